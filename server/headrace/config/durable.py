"""Atomic file writes, and locks that end with their process.

Locks are flock(2)'s: between processes and between threads, released with the descriptor.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Errors of file systems that cannot lock a folder: NFS needs a writable descriptor.
_NO_FOLDER_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP)
_FOLDER_LOCK = ".build.lock"
_TEMPORARY = re.compile(r"\..+\.[0-9]+\.[0-9a-f]{8}\.tmp")


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None, *, block: bool = True) -> Iterator[int]:
    """Hold the lock of a file, which is created if it is missing; yields its descriptor.

    The holder may unlink the file: a waiting process then locks the new one.

    Args:
        path: lock file, used for nothing else.
        on_wait: called once if another process or thread holds the lock.
        block: wait for the lock.

    Raises:
        BlockingIOError: another process or thread holds the lock, and `block` is off.
        OSError: the file cannot be created or locked.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _flock(descriptor, on_wait, block)
            on_wait = None
            if _is_same_file(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, without a lock file if the file system can lock folders.

    Raises:
        OSError: the path is not a folder, or cannot be locked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_FOLDER_LOCKS:
                raise
            with locked(folder / _FOLDER_LOCK):
                yield
            return
        yield
    finally:
        os.close(descriptor)


def temporary_name(path: Path) -> Path:
    """Return a new hidden name beside `path`; see `is_temporary`."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def is_temporary(name: str) -> bool:
    """True for the names that `temporary_name` returns."""
    return _TEMPORARY.fullmatch(name) is not None


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file atomically and wait until it is on disk; readers see the old content or the new one.

    Raises:
        OSError: it could not be written; the old content is unchanged.
    """
    temporary = temporary_name(path)
    try:
        with open(temporary, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk.

    Raises:
        OSError: it is not, e.g. because the disk is full.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems refuse to sync a folder, and do not need it.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _flock(descriptor: int, on_wait: Callable[[], None] | None, block: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not block:
            raise
        if on_wait is not None:
            on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
