"""The folder of all mirrors: one for each URL, held by one server, with a bound on the size of all.

<cache>/<name>-<digest>/lock            held by the server that mirrors the URL
                        url             for people
                        repository/     what is served
                        versions/       whole units: downloaded and not served yet, or replaced
                        partial/        objects that are being downloaded
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from headrace.config.documents import refuse
from headrace.config.files import folder_bytes, locked
from headrace.core.store_url import StoreUrl
from headrace.models.stores.base import StoreError
from headrace.models.stores.opening import check_packages

logger = logging.getLogger("headrace.stores")

REPOSITORY, VERSIONS, PARTIAL = "repository", "versions", "partial"
_LOCK = "lock"
# Servers of one machine that mirror the same URL; each has a copy.
_MAX_COPIES = 64


@contextmanager
def open_mirrors(locations: Sequence[Path | StoreUrl], cache: str) -> Iterator[dict[Path, StoreUrl | None]]:
    """Return the local folder of each location, in their order, with the URL that it mirrors; None for a local one.

    The folders of mirrors are held until the context ends.

    Args:
        locations: folders and URLs.
        cache: folder of all mirrors; "" for none.

    Raises:
        ConfigError: a package is missing, or the folder cannot be used.
    """
    folders: dict[Path, StoreUrl | None] = {}
    with ExitStack() as resources:
        for location in locations:
            if isinstance(location, Path):
                folders.setdefault(location, None)
            elif location not in folders.values():
                check_packages(location)
                if not cache:
                    cure = "write --repository-cache-dir DIR, or a --state-dir"
                    raise refuse(str(location), None, "needs a folder for its files, and there is none", cure)
                folders[_hold(Path(cache).expanduser(), location, resources)] = location
        yield folders


def _hold(cache: Path, url: StoreUrl, resources: ExitStack) -> Path:
    """Lock a folder for a URL, and return the repository in it; another one if a server holds the first."""
    digest = hashlib.sha256(str(url).encode()).hexdigest()[:12]
    label = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', str(url))[:64].strip('-.')}-{digest}"
    try:
        for copy in range(1, _MAX_COPIES + 1):
            folder = cache / (label if copy == 1 else f"{label}.{copy}")
            if not _lock(folder, resources):
                continue
            for name in (REPOSITORY, VERSIONS, PARTIAL):
                (folder / name).mkdir(exist_ok=True)
            (folder / "url").write_text(f"{url}\n")
            os.utime(folder / _LOCK)  # the time of its last use
            if copy > 1:
                logger.info("repository %s: other servers hold its copies in %s, this one makes its own", url, cache)
            return folder / REPOSITORY
    except OSError as error:
        cure = "name another with --repository-cache-dir"
        raise refuse(str(cache), None, f"the cache of repositories cannot be written: {error.strerror}", cure) from None
    raise refuse(str(cache), None, f"{_MAX_COPIES} servers mirror {url} already", "name another --repository-cache-dir")


def _lock(folder: Path, resources: ExitStack) -> bool:
    """Create the folder of a mirror and hold its lock; False if another server holds it."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            resources.enter_context(locked(folder / _LOCK, block=False))
        except BlockingIOError:
            return False
        except FileNotFoundError:  # evicted between both calls
            continue
        return True


def make_room(mirror: Path, needed_bytes: int, bound_bytes: int, kept: Collection[str]) -> None:
    """Evict what no server uses, the longest unused first, until `needed_bytes` more fit.

    Replaced versions of this mirror, and mirrors that no server holds. What a server serves is never evicted.

    Args:
        mirror: folder of the mirror that needs room.
        needed_bytes: size of the coming downloads.
        bound_bytes: largest size of all mirrors.
        kept: names in `versions` of this mirror that may not be evicted.

    Raises:
        StoreError: the rest is in use.
    """
    cache = mirror.parent
    free = bound_bytes - folder_bytes(cache) - needed_bytes
    if free >= 0:
        return
    unused = [path for path in _entries(mirror / VERSIONS) if path.name not in kept]
    candidates = [(_modified_ns(path), path) for path in unused]
    # Other folders in the cache are not ours to remove.
    others = [path for path in _entries(cache) if path != mirror and (path / PARTIAL).is_dir()]
    others = [path for path in others if (path / "url").is_file() and (path / _LOCK).is_file()]
    candidates += [(_modified_ns(path / _LOCK), path) for path in others]
    for _, path in sorted(candidates):
        size = folder_bytes(path)
        try:
            with locked(path / _LOCK, block=False) if path.parent == cache else nullcontext():
                shutil.rmtree(path, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):  # a server holds it, or evicts it at this moment
            continue
        logger.info("the cache of repositories evicts %s: %.1f MB", path, size / 1e6)
        free = bound_bytes - folder_bytes(cache) - needed_bytes
        if free >= 0:
            return
    raise StoreError(
        f"{needed_bytes} bytes are missing, and the cache of repositories {cache} may have {bound_bytes}, "
        f"{-free} too few beside what is served: raise --repository-cache-bytes"
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if entry.is_dir()]
    except OSError:
        return []


def _modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
