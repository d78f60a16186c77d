"""Memory of the response cache in this process: one store for all models (`--cache-config local,size=...`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping

import numpy as np

from headrace.core.tensor import Array
from headrace.inference.caching.policy import ARRAY_BYTES, ENTRY_BYTES, CacheEntry, EntryTotals, S3Fifo

_AT_ONCE = 256  # entries that are removed under one lock


def frozen(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """Copy arrays and make the copies read-only. The outputs of a request are views of its batch, which they would keep alive."""
    copies: dict[str, Array] = {}
    for name, array in outputs.items():
        copies[name] = copy = np.array(array, order="C")
        copy.flags.writeable = False
    return copies


def memory_bytes(outputs: Mapping[str, Array]) -> int:
    """Return the memory of an entry with these arrays, with the objects of BYTES tensors."""
    size = ENTRY_BYTES
    for array in outputs.values():
        size += ARRAY_BYTES + array.nbytes
        if array.dtype.hasobject:
            size += sum(map(sys.getsizeof, array.ravel().tolist()))
    return size


class LocalStore:
    """Responses of all models in the memory of this process. Thread-safe.

    Models without a limit of their own share one S3-FIFO. A model with one has its own, whose memory the others cannot use while
    its entries are there.

    Ownership: `_lock` guards the queues and totals. Reads take no lock: `dict.get` is atomic, and a lost count of reads is
    harmless.

    Args:
        size_bytes: maximum memory of all entries.

    Attributes:
        used_bytes: memory of all entries.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._lock = threading.Lock()
        self._entries: dict[bytes, CacheEntry] = {}
        self._shared = S3Fifo(size_bytes)
        self._limited: list[S3Fifo] = []
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, max_bytes: int | None = None, ttl_ns: int = 0) -> VersionEntries:
        """Return the part of a model version.

        Args:
            max_bytes: maximum memory of its entries; None for the limit of the store.
            ttl_ns: time to live of its entries; 0 for no limit.
        """
        fifo = self._shared
        if max_bytes is not None:
            fifo = S3Fifo(min(max_bytes, self.size_bytes))
            with self._lock:
                self._limited.append(fifo)
        return VersionEntries(self, fifo, ttl_ns)

    def get(self, key: bytes, now_ns: int) -> CacheEntry | None:
        """Return an entry and count the hit; None if there is none, or if it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_ns and entry.expires_ns <= now_ns:
            with self._lock:
                if self._remove(entry):
                    entry.totals.expirations += 1
            return None
        entry.touch()
        return entry

    def put(self, entry: CacheEntry, fifo: S3Fifo) -> bool:
        """Store an entry; False if it is too large, or its version is unloaded.

        Args:
            entry: a new entry; replaces the one with its key.
            fifo: queues of its model.
        """
        if entry.size_bytes > fifo.limit_bytes:
            return False
        totals = entry.totals
        with self._lock:
            if totals.closed:
                return False
            before = self._entries.get(entry.key)
            if before is not None:
                self._remove(before)
            for evicted in fifo.admit(entry):
                self._forget(evicted)
                evicted.totals.evictions += 1
            self._entries[entry.key] = entry
            self.used_bytes += entry.size_bytes
            totals.entries += 1
            totals.insertions += 1
            totals.size_bytes += entry.size_bytes
            while self.used_bytes > self.size_bytes:
                victim = self._largest(fifo).evict()
                self._forget(victim)
                victim.totals.evictions += 1
        return True

    def _largest(self, fifo: S3Fifo) -> S3Fifo:
        """Return the queues that give up memory for a new entry in `fifo`: the shared ones first."""
        if len(self._shared):
            return self._shared
        return max((other for other in self._limited if len(other)), key=lambda other: other.size_bytes, default=fifo)

    def _remove(self, entry: CacheEntry) -> bool:
        """Remove an entry from its queue and the table; False if it was removed before."""
        if entry.queue is None:
            return False
        entry.queue.remove(entry)
        self._forget(entry)
        return True

    def _forget(self, entry: CacheEntry) -> None:
        """Remove an entry, which is in no queue any more, from the table and the totals."""
        del self._entries[entry.key]
        self.used_bytes -= entry.size_bytes
        entry.totals.entries -= 1
        entry.totals.size_bytes -= entry.size_bytes

    def close(self, totals: EntryTotals, fifo: S3Fifo) -> None:
        """Remove the entries of a version; any thread but that of the event loop."""
        with self._lock:
            totals.closed = True
        entries = [entry for entry in list(self._entries.values()) if entry.totals is totals]
        for start in range(0, len(entries), _AT_ONCE):
            with self._lock:
                for entry in entries[start : start + _AT_ONCE]:
                    self._remove(entry)
        with self._lock:
            if fifo in self._limited and not len(fifo):
                self._limited.remove(fifo)


class VersionEntries:
    """The entries of one model version in a `LocalStore`. Thread-safe.

    Args:
        store: the store.
        fifo: queues of the model.
        ttl_ns: time to live of its entries; 0 for no limit.

    Attributes:
        totals: counts and memory.
        limit_bytes: maximum memory of the entries.
    """

    def __init__(self, store: LocalStore, fifo: S3Fifo, ttl_ns: int) -> None:
        self.totals = EntryTotals()
        self._store, self._fifo, self._ttl_ns = store, fifo, ttl_ns
        self.get, self.limit_bytes = store.get, fifo.limit_bytes

    def put(self, key: bytes, outputs: dict[str, Array], compute_ns: int, now_ns: int, latest_ns: int = 0) -> bool:
        """Store a response; False if it is larger than the limit.

        Args:
            key: its key.
            outputs: arrays that no other code changes (`frozen`).
            compute_ns: time that a hit saves.
            now_ns: monotonic.
            latest_ns: monotonic time after which it is not served in any case; 0 for no such time.
        """
        expires_ns = now_ns + self._ttl_ns if self._ttl_ns else latest_ns
        if latest_ns:
            expires_ns = min(expires_ns, latest_ns)
        entry = CacheEntry(key, outputs, memory_bytes(outputs), compute_ns, expires_ns, self.totals)
        return self._store.put(entry, self._fifo)

    def close(self) -> None:
        """Remove the entries; any thread but that of the event loop."""
        self._store.close(self.totals, self._fifo)
