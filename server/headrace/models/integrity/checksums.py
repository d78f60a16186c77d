"""Checksums of a model: `SHA256SUMS` in its folder lists all of its files, in the format of the tool `sha256sum`.

    <64 hexadecimal digits>  <path below the model's folder>

Everything that is loaded is listed: the configuration, labels, data folders and the files of each version. Hidden files and
`__pycache__` may be missing in the list; they are not part of the model then.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from headrace.config.documents import open_regular_file, refuse, within
from headrace.config.files import write_durably
from headrace.config.model_folder import filename_problem
from headrace.core.errors import ConfigError, Finding

CHECKSUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.minisig"
# A line takes about 100 bytes: room for 80,000 files.
MAX_CHECKSUMS_BYTES = 8 << 20
MAX_DEPTH = 16
# Files that differ are listed in an error up to this number.
MAX_FINDINGS = 8
_BLOCK_BYTES = 1 << 20
# Of `sha256sum`: two spaces, or a space and a star for binary mode, which is the same on Linux.
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
_WRITE = "write it with `headrace checksums write MODEL`, or with sha256sum"
_AGAIN = "copy the model again, or write SHA256SUMS again if the change is intended"


def read_bounded(path: Path, repository: Path, max_bytes: int) -> bytes | None:
    """Read a small file of a model at once; None if there is none.

    Args:
        path: the file.
        repository: links must not lead out of this folder.
        max_bytes: largest size.

    Raises:
        ConfigError: it is no regular file, larger than `max_bytes`, outside of the repository, or cannot be read.
    """
    if not os.path.lexists(path):
        return None
    name = f"{path.parent.name}/{path.name}"
    if not within(path, repository):
        raise refuse(name, None, "is a link that leads out of the repository", "copy the file into the repository")
    try:
        with open_regular_file(path) as stream:
            content = stream.read(max_bytes + 1)
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from None
    if len(content) > max_bytes:
        raise refuse(name, None, f"has more than {max_bytes} bytes", _WRITE)
    return content


def parse_checksums(content: bytes, model: str) -> dict[str, str]:
    """Parse `SHA256SUMS`.

    Args:
        content: of the file.
        model: name of the model, for errors.

    Returns:
        SHA-256 in lower-case hexadecimal by path, which is relative and has no `..`.

    Raises:
        ConfigError: a line is not one of `sha256sum`, or its path is listed twice or leads out of the model's folder.
    """
    name = f"{model}/{CHECKSUMS}"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise refuse(name, None, "is not UTF-8", _WRITE) from None
    digests: dict[str, str] = {}
    # Not splitlines(): it also splits at characters that a name may contain.
    for number, line in enumerate(text.split("\n"), 1):
        if not line or line.startswith("#"):  # as sha256sum --check
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise refuse(name, number, f"{line[:80]!a} is not a line of sha256sum: DIGEST, two spaces, PATH", _WRITE)
        path = match[2].removeprefix("./")
        problem = _path_problem(path)
        if problem:
            raise refuse(name, number, f"the path {match[2][:80]!a} {problem}", _WRITE)
        if path in (CHECKSUMS, SIGNATURE):
            cure = "leave it out: find . -type f ! -name 'SHA256SUMS*' -exec sha256sum {} + > SHA256SUMS"
            raise refuse(name, number, f"lists {path} itself", cure)
        if path in digests:
            raise refuse(name, number, f"lists {path!a} twice", "keep the line of the file that is there")
        digests[path] = match[1].lower()
    if not digests:
        raise refuse(name, None, "lists no file", _WRITE)
    return digests


def _path_problem(path: str) -> str:
    if filename_problem(path) is not None:
        return "leads out of the model's folder"
    parts = path.split("/")
    if any(part in ("", ".") for part in parts) or not path.isprintable():
        return "is not a plain relative path"
    return f"has more than {MAX_DEPTH} parts" if len(parts) > MAX_DEPTH else ""


def list_files(folder: Path, repository: Path) -> set[str]:
    """Return the paths of all files below a model's folder, without its checksums, hidden names and `__pycache__`.

    Args:
        folder: the model's folder; links are followed within the repository.
        repository: links must not lead out of this folder.

    Raises:
        ConfigError: a link leads out of the repository, a folder cannot be read, or folders are nested too deep.
    """
    return set(_files_below(folder, "", repository, folder.name)) - {CHECKSUMS, SIGNATURE}


def _files_below(folder: Path, prefix: str, repository: Path, model: str) -> Iterable[str]:
    if prefix.count("/") >= MAX_DEPTH:
        raise refuse(
            f"{model}/{prefix}", None, f"is nested in more than {MAX_DEPTH} folders", "remove links in a circle"
        )
    try:
        with os.scandir(folder) as scanned:
            entries = sorted(scanned, key=lambda entry: entry.name)
    except OSError as error:
        raise refuse(f"{model}/{prefix}", None, f"cannot be read: {error.strerror}", "check its permissions") from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name == "__pycache__":
            continue
        path = prefix + entry.name
        if entry.is_symlink() and not within(Path(entry.path), repository):
            message = "is a link that leads out of the repository"
            raise refuse(f"{model}/{_shown(path)}", None, message, "copy the file into the repository")
        if entry.is_dir():
            yield from _files_below(Path(entry.path), f"{path}/", repository, model)
        else:
            yield path


def digest_file(path: Path, write: Callable[[bytes], object] | None = None) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Args:
        path: a regular file.
        write: called with each block that was hashed; None for none.

    Raises:
        OSError: it cannot be read, or `write` failed.
    """
    digest = hashlib.sha256()
    with open_regular_file(path) as stream:
        # A file that grows while it is read must not be read for ever.
        remaining = os.fstat(stream.fileno()).st_size + 1
        while remaining > 0 and (block := stream.read(min(_BLOCK_BYTES, remaining))):
            digest.update(block)
            remaining -= len(block)
            if write is not None:
                write(block)
    return digest.hexdigest()


def check_files(
    folder: Path, repository: Path, digests: Mapping[str, str], copy: Callable[[str, Path], str] | None = None
) -> None:
    """Compare the files of a model with its checksums.

    Args:
        folder: the model's folder.
        repository: links must not lead out of this folder.
        digests: from `parse_checksums`.
        copy: called with path and file in place of `digest_file`; returns the digest of the bytes that it has copied.

    Raises:
        ConfigError: a file differs, is missing, or is not listed; names each with its expected and its present digest.
    """
    findings: list[Finding] = []
    for path in sorted(list_files(folder, repository) - digests.keys())[:MAX_FINDINGS]:
        message = f"is not listed in {CHECKSUMS}"
        findings.append(Finding(f"{folder.name}/{_shown(path)}", None, message, f"remove the file, or {_AGAIN}"))
    for path, expected in digests.items():
        if len(findings) >= MAX_FINDINGS:
            break
        message = _mismatch(folder / path, repository, expected, path, copy)
        if message:
            findings.append(Finding(f"{folder.name}/{_shown(path)}", None, message, _AGAIN))
    if findings:
        raise ConfigError(findings)


def _mismatch(file: Path, repository: Path, expected: str, path: str, copy: Callable[[str, Path], str] | None) -> str:
    """Return how a file differs from its checksum; "" if it does not."""
    if not within(file, repository):
        return "is a link that leads out of the repository"
    try:
        digest = digest_file(file) if copy is None else copy(path, file)
    except (FileNotFoundError, NotADirectoryError):
        return f"is missing: {CHECKSUMS} lists it with SHA-256 {expected}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if digest == expected else f"has SHA-256 {digest}, {CHECKSUMS} lists {expected}"


def write_checksums(folder: Path) -> bytes:
    """Write `SHA256SUMS` for all files of a model, and return its content; a signature of the former content is removed.

    Args:
        folder: the model's folder.

    Raises:
        ConfigError: a file cannot be read or has a name that the format does not allow, or there is none.
        OSError: the file cannot be written.
    """
    lines = []
    for path in sorted(list_files(folder, folder.parent)):
        problem = _path_problem(path)
        if problem:
            raise refuse(f"{folder.name}/{_shown(path)}", None, f"its path {problem}", "rename the file")
        try:
            lines.append(f"{digest_file(folder / path)}  {path}\n")
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise refuse(f"{folder.name}/{path}", None, message, "check the file and its permissions") from None
    content = "".join(lines).encode()
    if not content:
        raise refuse(folder.name, None, "has no files", "name the folder of a model")
    if len(content) > MAX_CHECKSUMS_BYTES:
        message = f"has {len(lines)} files: their checksums take more than {MAX_CHECKSUMS_BYTES} bytes"
        raise refuse(folder.name, None, message, "move samples and other data out of the model's folder")
    (folder / SIGNATURE).unlink(missing_ok=True)
    write_durably(folder / CHECKSUMS, content)
    return content


def _shown(path: str) -> str:
    """Return a path of a file in an error, which appears in logs and terminals."""
    return path if path.isprintable() else ascii(path)
