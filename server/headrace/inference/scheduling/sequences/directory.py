"""Finds the version with a live sequence: after a reload or an unload, its requests go to the version that started it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from headrace.inference.scheduling.version_handle import VersionHandle


class SequenceDirectory:
    """All versions with sequences, from load to close. Any thread may call.

    Ownership: `_lock` guards the changes of `_handles`, which is replaced as a whole and read without it.

    Attributes:
        by_client: an id belongs to the client that sends it: two clients may use the same id. For servers with keys.
    """

    def __init__(self) -> None:
        self.by_client = False
        self._lock = threading.Lock()
        self._handles: dict[str, tuple[VersionHandle, ...]] = {}

    def add(self, handle: VersionHandle) -> None:
        """Add a version, before it is published."""
        name = handle.spec.name
        with self._lock:
            self._handles = {**self._handles, name: (handle, *self._handles.get(name, ()))}

    def discard(self, handle: VersionHandle) -> None:
        """Remove a version, once it is closed."""
        name = handle.spec.name
        with self._lock:
            others = tuple(other for other in self._handles.get(name, ()) if other is not handle)
            self._handles = {key: value for key, value in self._handles.items() if key != name}
            if others:
                self._handles[name] = others

    def versions(self, name: str) -> Iterator[VersionHandle]:
        """Yield the versions of a model, the latest load first."""
        yield from self._handles.get(name, ())

    def has_others(self, handle: VersionHandle) -> bool:
        """Return True if the model has further versions."""
        return len(self._handles.get(handle.spec.name, ())) > 1

    def lease_ending(self, name: str, version: str) -> VersionHandle | None:
        """Lease a version that no longer serves, but has live sequences; None if there is none.

        Args:
            name: name of the model.
            version: version number; "" for any.
        """
        for handle in self.versions(name):
            if version in ("", handle.spec.version) and handle.live_sequences and handle.lease():
                return handle
        return None
