"""What a file system refuses while engines are written, in words, with what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.errors import BuildError
from engines.report.style import size

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
# A disk with less than this is full for a builder.
_LEAST_FREE_BYTES = 1 << 20
CURE = "name another place with --cache"


def disk_error(error: OSError, path: Path, needed_bytes: int = 0, cure: str = CURE) -> BuildError:
    """What to raise for an OSError.

    Args:
        error: that came of writing.
        path: what was written, where the error itself does not tell.
        needed_bytes: that have to be free there, 0 where it is not known.
        cure: what else could be done.
    """
    place = next(reversed(_places(error)), path)
    if error.errno in _FULL:
        return BuildError(_full(place, needed_bytes, cure))
    if error.errno == errno.EFBIG:
        needed = f", {size(needed_bytes)} are needed" if needed_bytes else ""
        return BuildError(f"{place} would be larger than a file may be here{needed}: raise `ulimit -f`, or {cure}")
    if error.errno in _FORBIDDEN:
        return BuildError(f"{place} cannot be written ({error.strerror}): check its permissions, or {cure}")
    return BuildError(f"{place} cannot be used ({error.strerror or error}): check the disk, or {cure}")


@contextmanager
def told_if_full(folder: Path) -> Iterator[None]:
    """Turn whatever is raised in this block into a BuildError if it comes of the folder's file system.

    Libraries tell of a full disk in words of their own, or write short files; that the disk is full then is what counts.

    Raises:
        BuildError: the disk is full, or something in the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if any(place.is_relative_to(folder) for place in _places(error)) or error.errno in (*_FULL, errno.EFBIG):
            raise disk_error(error, folder) from error
        raise
    except Exception as error:
        if free_bytes(folder) < _LEAST_FREE_BYTES:
            raise BuildError(_full(folder, 0, CURE)) from error
        raise


def free_bytes(folder: Path) -> int:
    """Room on a folder's disk for this user; plenty where nobody can tell."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return 1 << 62


def _places(error: OSError) -> list[Path]:
    """The files an error names: what was read or renamed, then what was written."""
    return [Path(name) for name in (error.filename, error.filename2) if isinstance(name, str)]


def _full(place: Path, needed_bytes: int, cure: str) -> str:
    needed = f"{size(needed_bytes)} are needed, " if needed_bytes else ""
    free = size(free_bytes(place))
    return f"{place}: the disk is full ({needed}{free} are free): make room, e.g. by `headrace engines gc`, or {cure}"
