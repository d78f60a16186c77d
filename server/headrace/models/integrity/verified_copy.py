"""Copies of models whose checksums were compared with the bytes that were copied.

A file that is checked in the repository and opened again by a runtime may have changed in between. So a model with checksums
is copied into a folder that only the user of the server may write; each block is hashed while it is copied. All that follows
reads the copy: configuration, labels, code, weights, loads on demand, and engine builds.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

from headrace.config.documents import refuse
from headrace.config.files import SharedFolder, create_process_folder
from headrace.core.errors import ConfigError
from headrace.models.integrity.checksums import (
    CHECKSUMS,
    MAX_CHECKSUMS_BYTES,
    SIGNATURE,
    check_files,
    digest_file,
    parse_checksums,
    read_bounded,
)
from headrace.models.integrity.signatures import MAX_SIGNATURE_BYTES, ModelKeys, read_keys

logger = logging.getLogger("headrace.loader")

_PREFIX = "headrace-verified-"
_WRITE = "write it with `headrace checksums write MODEL`"


class VerifiedCopy(SharedFolder):
    """Copy of a model's folder, removed with its last reference. Thread-safe.

    Args:
        store: folders of all copies of the process.
        repository: folder of this copy.
        name: name of the model.
        checksums: content of its `SHA256SUMS`.

    Attributes:
        checksums: see Args.
    """

    def __init__(self, store: _CopyStore, repository: Path, name: str, checksums: bytes) -> None:
        super().__init__(repository, name, partial(store.remove, repository))
        self.checksums = checksums


class _CopyStore:
    """Folder with the copies of a process; it exists while there are copies. Thread-safe: `_lock` guards all attributes.

    Args:
        parents: folders to try, in this order.
    """

    def __init__(self, parents: Sequence[Path]) -> None:
        self._parents = parents
        self._lock = threading.Lock()
        self._root: Path | None = None
        self._descriptor = -1
        self._count = 0
        self._number = 0

    def create(self, name: str) -> Path:
        """Create a folder for the copy of a model.

        Raises:
            ConfigError: no folder can be created.
        """
        with self._lock:
            root = self._root
            if root is None:
                root, self._descriptor = self._create_root(name)
                self._root = root
            self._number += 1
            repository = root / str(self._number)
            try:
                repository.mkdir(mode=0o700)
                (repository / name).mkdir()
            except OSError as error:
                raise _cannot_copy(name, error) from error
            self._count += 1
            return repository

    def remove(self, repository: Path) -> None:
        """Remove a folder, and with the last one the folder around it."""
        shutil.rmtree(repository, ignore_errors=True)
        with self._lock:
            self._count -= 1
            if not self._count and self._root is not None:
                shutil.rmtree(self._root, ignore_errors=True)
                os.close(self._descriptor)
                self._root = None

    def _create_root(self, name: str) -> tuple[Path, int]:
        problem: OSError | None = None
        for parent in self._parents:
            try:
                return create_process_folder(parent, _PREFIX)
            except OSError as error:
                problem = error
        raise _cannot_copy(name, problem or OSError("there is no folder for it"))


def _cannot_copy(name: str, error: OSError) -> ConfigError:
    cure = "free some space, or name a folder on another disk with --state-dir"
    return refuse(name, None, f"its verified copy cannot be written: {error.strerror or error}", cure)


class ModelVerifier:
    """Checks the files of models before they are loaded.

    Args:
        keys: accepted keys; None also accepts models without a signature and without checksums.
        parents: folders for copies; the first one that can be written is used.
    """

    def __init__(self, keys: ModelKeys | None = None, parents: Sequence[Path] = ()) -> None:
        self.keys = keys
        self._store = _CopyStore(parents or [Path(tempfile.gettempdir())])

    def read(self, path: Path, repository: Path) -> tuple[bytes, str] | None:
        """Read the checksums of a model and check their signature.

        Args:
            path: the model's folder.
            repository: links must not lead out of this folder.

        Returns:
            Content of `SHA256SUMS` and ID of the key that has signed it, "" without keys; None if a model without checksums is
            accepted.

        Raises:
            ConfigError: they cannot be read, are not signed, or are missing although there are keys.
        """
        content = read_bounded(path / CHECKSUMS, repository, MAX_CHECKSUMS_BYTES)
        if self.keys is None:
            return None if content is None else (content, "")
        if content is None:
            message = f"has no {CHECKSUMS}: only signed models are served (--model-keys-file {self.keys.file})"
            raise refuse(path.name, None, message, f"{_WRITE} --secret-key FILE")
        signature = read_bounded(path / SIGNATURE, repository, MAX_SIGNATURE_BYTES)
        return content, self.keys.check(content, signature, path.name)

    def check(self, path: Path, repository: Path) -> tuple[int, str] | None:
        """Compare all files of a model with its checksums, without a copy.

        Args:
            path: the model's folder.
            repository: links must not lead out of this folder.

        Returns:
            Number of files and ID of the key that has signed them, "" without keys; None for a model without checksums.

        Raises:
            ConfigError: as `copy`.
        """
        signed = self.read(path, repository)
        if signed is None:
            return None
        digests = parse_checksums(signed[0], path.name)
        check_files(path, repository, digests)
        return len(digests), signed[1]

    def copy(self, path: Path, repository: Path, present: VerifiedCopy | None) -> VerifiedCopy | None:
        """Compare all files of a model with its checksums, and copy them while they are read.

        Args:
            path: the model's folder.
            repository: links must not lead out of this folder.
            present: copy from which the model serves now; with the same checksums it is returned, with a reference more.

        Returns:
            The copy; the caller has one reference. None for a model without checksums, if it is accepted.

        Raises:
            ConfigError: as `read`; or a file differs, is missing or is not listed; or there is no room for the copy.
        """
        signed = self.read(path, repository)
        if signed is None:
            return None
        content, key = signed
        digests = parse_checksums(content, path.name)
        signer = f", signed with the key {key}" if key else ""
        logger.info("model %s: checking %d files with %s%s", path.name, len(digests), CHECKSUMS, signer)
        if present is not None and present.checksums == content:
            check_files(path, repository, digests)
            present.acquire()
            return present
        target = self._store.create(path.name)
        try:
            _check_room(path, digests, target)
            check_files(path, repository, digests, lambda name, file: _copy_file(file, target / path.name / name))
            _copy_empty_versions(path, target / path.name)
        except BaseException:
            self._store.remove(target)
            raise
        return VerifiedCopy(self._store, target, path.name, content)


def open_verifier(keys_file: str, state: Path | None) -> ModelVerifier:
    """Create the verifier of a server.

    Args:
        keys_file: file with public keys; "" accepts models without a signature.
        state: state folder, where copies are made; None for the folder of temporary files.

    Raises:
        ConfigError: the keys cannot be read.
    """
    parents = [Path(tempfile.gettempdir())] if state is None else [state.expanduser(), Path(tempfile.gettempdir())]
    return ModelVerifier(read_keys(Path(keys_file)) if keys_file else None, parents)


def _check_room(path: Path, digests: dict[str, str], target: Path) -> None:
    """Refuse a copy that would fill the disk."""
    size = 0
    for name in digests:
        try:
            size += os.stat(path / name).st_size
        except OSError:
            continue  # reported as missing
    free = shutil.disk_usage(target).free
    if size > free:
        message = f"its verified copy needs {size} bytes, {free} are free in {target.parent.parent}"
        raise refuse(path.name, None, message, "free some space, or name a folder on another disk with --state-dir")


def _copy_file(source: Path, target: Path) -> str:
    """Copy a file and return the SHA-256 of the bytes that were written."""

    def write(block: bytes) -> None:
        try:
            write_block(stream, block)
        except OSError as error:
            raise _cannot_copy(source.name, error) from error

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        stream = target.open("xb")
    except OSError as error:
        raise _cannot_copy(source.name, error) from error
    with stream:
        digest = digest_file(source, write)
    if os.access(source, os.X_OK):
        target.chmod(0o700)
    return digest


def write_block(stream: BinaryIO, block: bytes) -> None:
    """Write a block to the file of a copy, without a rest that `close` would write; raises OSError."""
    stream.write(block)
    stream.flush()


def _copy_empty_versions(path: Path, target: Path) -> None:
    """Create the version folders of a copy that have no file, as those of a pipeline."""
    for entry in path.iterdir():
        if entry.name.isdecimal() and entry.is_dir():
            (target / entry.name).mkdir(exist_ok=True)
