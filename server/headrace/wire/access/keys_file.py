"""The keys file: names, hashed keys, scopes, model patterns, quotas and certificate names. YAML, read strictly.

A key is `hr_` and 32 random bytes in base64url. The file has its SHA-256. A slow hash such as bcrypt protects passwords, which
can be guessed; 256 random bits cannot, so a fast hash reveals nothing and costs a request half a microsecond.
"""

from __future__ import annotations

import base64
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from headrace.config.config_base import ConfigPart, Location, Problem, Problems, option
from headrace.config.documents import Document, check_permissions, did_you_mean, open_regular_file, read_yaml, refuse
from headrace.config.files import write_durably
from headrace.config.model_config import ClientName, RateLimit
from headrace.core.access import Scope
from headrace.core.errors import ConfigError

KEY_PREFIX = "hr_"
_KEY_BYTES = 32
_MAX_FILE_BYTES = 4 << 20
_HASH = re.compile(r"[0-9a-f]{64}")
_PATTERN = re.compile(r"[A-Za-z0-9_.*?\[\]!-]{1,128}")
_HEADER = (
    "# Keys of headrace serve --api-keys-file. Written by headrace keys; a running server reads changes at once.\n"
)


def new_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(_KEY_BYTES)).rstrip(b"=").decode()


def key_hash(key: str) -> bytes:
    """Return the SHA-256 of a key or token."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _problem(message: str, cure: str) -> Problems:
    return Problems([Problem((), message, cure)])


def _check_scope(value: Any) -> Any:
    if isinstance(value, str) and value not in list(Scope):
        raise _problem(f"{value[:80]!r} is not a scope", did_you_mean(value, list(Scope)))
    return value


def _check_hash(value: str) -> str:
    if not _HASH.fullmatch(value):
        raise _problem(
            "it is not the SHA-256 of a key", "write 64 hexadecimal digits in lower case, or use headrace keys new"
        )
    return value


def _check_pattern(value: str) -> str:
    if not _PATTERN.fullmatch(value):
        raise _problem(
            f"{value[:80]!r} is not a pattern of model names", 'write a name, or a pattern such as "resnet*"'
        )
    return value


def parse_time(value: str) -> datetime:
    """Parse a date or time in ISO 8601; UTC without a zone. Raises ValueError."""
    moment = datetime.fromisoformat(value)
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment


def _check_time(value: str) -> str:
    try:
        parse_time(value)
    except ValueError:
        raise _problem(f"{value[:80]!r} is not a time", "write 2027-01-31, or 2027-01-31T12:00:00Z") from None
    return value


def _check_models(value: Sequence[str]) -> Sequence[str]:
    if not value:
        raise _problem("the list of models is empty", "remove the line for all models, or revoke the client for none")
    return value


_Text = Annotated[str, Field(strict=True, min_length=1, max_length=512)]
_Time = Annotated[str, Field(strict=True), AfterValidator(_check_time)]


class KeyEntry(ConfigPart):
    """One key of a client; several at a time let a client change its key without a pause."""

    sha256: Annotated[str, Field(strict=True), AfterValidator(_check_hash)] = Field(description="SHA-256 of the key.")
    created: _Time | None = option(None, "Time of its creation.")
    expires: _Time | None = option(None, "Time of its end; none if absent.")


class ClientEntry(ConfigPart):
    """One client: its rights and its credentials."""

    scopes: tuple[Annotated[Scope, BeforeValidator(_check_scope)], ...] = Field(
        min_length=1, description="Operations: infer, read, metrics, control, admin."
    )
    models: Annotated[
        tuple[Annotated[str, Field(strict=True), AfterValidator(_check_pattern)], ...], AfterValidator(_check_models)
    ] = option((), "Patterns of the models to infer with, read and control; all if absent.")
    quota: RateLimit | None = option(None, "Requests over the whole server; unlimited if absent.")
    keys: tuple[KeyEntry, ...] = option((), "Hashes of its keys.")
    certificates: tuple[_Text, ...] = option((), "Common names or alternative names of its client certificates.")


class KeysFile(ConfigPart):
    """The whole file."""

    clients: dict[ClientName, ClientEntry] = Field(description="Clients by name.")

    def _problems(self) -> Iterator[Problem]:
        seen: dict[str, str] = {}
        for name, client in self.clients.items():
            loc: Location = ("clients", name)
            for index, key in enumerate(client.keys):
                if key.sha256 in seen:
                    text = f"the key of '{name}' is also one of '{seen[key.sha256]}'"
                    yield Problem((*loc, "keys", index, "sha256"), text, "remove one of them")
                seen[key.sha256] = name
            for index, subject in enumerate(client.certificates):
                if f"cert {subject}" in seen:
                    text = f"the certificate {subject!r} of '{name}' is also one of '{seen[f'cert {subject}']}'"
                    yield Problem((*loc, "certificates", index), text, "remove one of them")
                seen[f"cert {subject}"] = name


_FIELDS: Mapping[int, type[ConfigPart]] = {0: KeysFile, 2: ClientEntry, 4: KeyEntry}


def parse_keys(text: str, path: str) -> KeysFile:
    """Parse the content of a keys file.

    Args:
        text: content.
        path: name of the file, for errors.

    Raises:
        ConfigError: with file, line, error and cure of each error.
    """
    document = read_yaml(text, path)
    try:
        return KeysFile.model_validate(document.data)
    except ValidationError as error:
        raise ConfigError([document.finding(problem) for problem in _problems_of(error, document)]) from None


def _problems_of(error: ValidationError, document: Document) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        loc: Location = tuple(part for part in detail["loc"] if part != "[key]")
        cause = detail.get("ctx", {}).get("error")
        name = ".".join(str(part) for part in loc)
        if isinstance(cause, Problems):
            for problem in cause.problems:
                subject = "" if problem.loc else f"{name}: "
                yield Problem((*loc, *problem.loc), subject + problem.message, problem.cure)
        elif detail["type"] == "extra_forbidden":
            fields = _FIELDS.get(len(loc) - 1, RateLimit)
            yield Problem(loc, f'unknown field "{name}"', did_you_mean(str(loc[-1]), fields.model_fields))
        elif detail["type"] == "missing":
            cure = "write clients: {}" if not document.data else f"write {loc[-1]}"
            yield Problem(loc, f'"{name}" is missing', cure)
        else:
            expected = str(detail["msg"]).removeprefix("Input should ")
            yield Problem(loc, f"{name} should {expected}, not {detail['input']!r:.80}", "correct the value")


def read_keys(path: Path) -> tuple[KeysFile, str]:
    """Read and parse a keys file; see `read_text` and `parse_keys`."""
    text, warning = read_text(path)
    return parse_keys(text, str(path)), warning


def read_text(path: Path) -> tuple[str, str]:
    """Read the text of a keys file.

    Returns:
        The text, and a warning about the permissions of the file; "" for none.

    Raises:
        ConfigError: the file cannot be read, is no UTF-8, or any user of the machine may write it.
    """
    option_text = f"--api-keys-file {path}"
    try:
        with open_regular_file(path) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise refuse(option_text, None, "there is no such file", "create a key: headrace keys new NAME") from None
    except OSError as error:
        raise refuse(option_text, None, f"cannot be read: {error.strerror or error}", "check path and owner") from None
    if len(content) > _MAX_FILE_BYTES:
        raise refuse(option_text, None, f"is larger than {_MAX_FILE_BYTES} bytes", "remove expired keys")
    warning = check_permissions(option_text, path, mode)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(option_text, None, f"is not UTF-8: {error.reason}", "save it as UTF-8") from None
    if not warning and mode & (stat.S_IRGRP | stat.S_IROTH):
        warning = f"{path} can be read by other users: it shows names and rights, not keys (chmod 600 {path})"
    return text, warning


@contextmanager
def editing(path: Path) -> Iterator[dict[str, Any]]:
    """Edit a keys file: yields its clients as plain data, and writes them at the end, atomically. Links are followed.

    A new file has mode 0600. An existing file keeps owner, group and mode: the server may run as another user than the caller.
    A lock lets one process edit at a time. An exception in the body leaves the file as it is. Comments are not kept.

    Raises:
        ConfigError: the file is invalid, also after the edit, or the caller may not keep its owner.
        OSError: it cannot be written.
    """
    path = path.resolve()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = _open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        keys = read_keys(path)[0] if path.exists() else KeysFile(clients={})
        data = keys.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        yield data["clients"]
        text = _HEADER + yaml.safe_dump(data, sort_keys=False, width=120)
        parse_keys(text, str(path))
        write_durably(path, text.encode(), 0o600, partial(_keep_owner, path))
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """Open the lock file beside a keys file. A new one gets its owner, who edits it later."""
    lock, flags = path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(lock, flags | os.O_EXCL, 0o600)
    except FileExistsError:
        return os.open(lock, flags, 0o600)
    with suppress(OSError):
        status = path.stat()
        os.fchown(descriptor, status.st_uid, status.st_gid)
    return descriptor


def _keep_owner(path: Path, descriptor: int) -> None:
    """Give a new file the owner, group and mode of the file that it replaces; raises ConfigError."""
    try:
        before = path.stat()
    except FileNotFoundError:
        return
    after = os.fstat(descriptor)
    if (after.st_uid, after.st_gid) != (before.st_uid, before.st_gid):
        try:
            os.fchown(descriptor, before.st_uid, before.st_gid)
        except OSError as error:
            text = f"belongs to user {before.st_uid}, group {before.st_gid}, which cannot be kept: {error.strerror}"
            cure = f"run this as its owner: sudo -u '#{before.st_uid}' -g '#{before.st_gid}' headrace keys"
            raise refuse(str(path), None, text, cure) from None
    os.fchmod(descriptor, before.st_mode & 0o770)
