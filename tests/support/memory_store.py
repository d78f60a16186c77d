"""A store in memory, with faults, in place of one on a network."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.models.stores.base import ObjectChanged, Stopped, StoredObject, StoreError


class MemoryStore:
    """Objects by path.

    Attributes:
        objects: content by path.
        fetched: path of every object of which bytes were read, with the offset.
        error: raised by every request; None for none.
        on_fetch: called with the path before an object is read.
        cut_after: bytes after which the next download fails; None for never.
        broken: paths of objects that arrive with other bytes.
        has_digests: listings have MD5 digests.
        are_certain: and these are those of the content.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fetched: list[tuple[str, int]] = []
        self.error: StoreError | None = None
        self.on_fetch: Callable[[str], None] = lambda _path: None
        self.cut_after: int | None = None
        self.broken: set[str] = set()
        self.has_digests = False
        self.are_certain = True
        self._lock = threading.Lock()

    def list_objects(self, stop: threading.Event) -> Sequence[StoredObject]:
        """Return the objects, or raise the error that is set."""
        if stop.is_set():
            raise Stopped
        if self.error is not None:
            raise self.error
        return [self._stored(path, content) for path, content in sorted(self.objects.items())]

    def _stored(self, path: str, content: bytes) -> StoredObject:
        digest = hashlib.md5(content).hexdigest() if self.has_digests else ""
        etag = hashlib.sha1(content).hexdigest()
        return StoredObject(path, len(content), etag, digest and f"md5:{digest}", self.are_certain)

    def fetch(self, item: StoredObject, target: Path, on_bytes: Callable[[int], None], stop: threading.Event) -> None:
        """Write an object to a file, or raise the error that is set."""
        with self._lock:
            self.on_fetch(item.path)
            content = self.objects.get(item.path)
        if self.error is not None:
            raise self.error
        if stop.is_set():
            raise Stopped
        if content is None or self._stored(item.path, content).etag != item.etag:
            raise ObjectChanged(item.path)
        if item.path in self.broken:
            content = bytes(byte ^ 1 for byte in content)
        with open(target, "ab") as file:
            offset = target.stat().st_size
            if offset == len(content):
                return
            self.fetched.append((item.path, offset))
            part = content[offset:]
            if self.cut_after is not None:
                file.write(part[: self.cut_after])
                self.cut_after = None
                raise StoreError(f"{item.path}: the connection was cut")
            file.write(part)
        on_bytes(len(part))
