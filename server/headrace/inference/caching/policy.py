"""Eviction policy of the response cache: S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi: FIFO queues are all you need for cache
eviction, SOSP 2023).

A new entry enters a small queue with a tenth of the memory. Its oldest entry moves to the main queue if it was read, and is
evicted otherwise: most requests never repeat, and leave the cache soon. The main queue puts its oldest entry back to the end as
often as it was read, at most three times. The keys of entries that were evicted from the small queue are remembered for a while;
such an entry enters the main queue when it returns.

Nothing here locks: the store calls every method under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.core.tensor import Array

_SMALL_SHARE = 0.1
_MAX_READS = 3
# Memory of an entry besides its arrays' elements: key, entry, nodes of two dictionaries, one remembered key. With CPython 3.11
# it is about 700 bytes and 130 bytes for each array (tests/unit/inference/caching/test_local.py measures it).
ENTRY_BYTES = 768
ARRAY_BYTES = 160


@dataclass(slots=True, eq=False)
class EntryTotals:
    """Entries of one model version in the store.

    Attributes:
        entries: number of entries.
        size_bytes: their memory.
        insertions: entries stored since the version was loaded.
        evictions: entries evicted for others since then.
        expirations: entries removed since then because their time to live had passed.
        closed: True once the version is unloaded; nothing more is stored.
    """

    entries: int = 0
    size_bytes: int = 0
    insertions: int = 0
    evictions: int = 0
    expirations: int = 0
    closed: bool = False


@dataclass(slots=True, eq=False)
class CacheEntry:
    """A cached response.

    Attributes:
        key: its key.
        outputs: read-only arrays by name.
        size_bytes: memory of the entry.
        compute_ns: time that a hit saves.
        expires_ns: monotonic time after which it is not served; 0 for no limit.
        totals: of the version that stored it.
        reads: hits since it entered its queue, at most 3.
        queue: queue that holds it; None once it is removed.
    """

    key: bytes
    outputs: dict[str, Array]
    size_bytes: int
    compute_ns: int
    expires_ns: int
    totals: EntryTotals
    reads: int = 0
    queue: EntryQueue | None = None

    def touch(self) -> None:
        """Count a hit."""
        if self.reads < _MAX_READS:
            self.reads += 1


class EntryQueue(OrderedDict[bytes, CacheEntry]):
    """Entries in the order of their arrival.

    Attributes:
        size_bytes: memory of the entries.
    """

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def append(self, entry: CacheEntry) -> None:
        """Append an entry."""
        self[entry.key] = entry
        self.size_bytes += entry.size_bytes
        entry.queue = self

    def remove(self, entry: CacheEntry) -> None:
        """Remove an entry."""
        del self[entry.key]
        self.size_bytes -= entry.size_bytes
        entry.queue = None

    def take_oldest(self) -> CacheEntry:
        """Remove and return the oldest entry."""
        entry = next(iter(self.values()))
        self.remove(entry)
        return entry


class S3Fifo:
    """Queues of entries that share one limit.

    Args:
        limit_bytes: maximum memory of the entries.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._small, self._main = EntryQueue(), EntryQueue()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Memory of the entries."""
        return self._small.size_bytes + self._main.size_bytes

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def admit(self, entry: CacheEntry) -> list[CacheEntry]:
        """Add an entry, whose key must not be in a queue, and return the entries that it evicts.

        The entry must fit into the limit alone.
        """
        evicted: list[CacheEntry] = []
        while len(self) and self.size_bytes + entry.size_bytes > self.limit_bytes:
            evicted.append(self.evict())
        if entry.key in self._ghosts:
            del self._ghosts[entry.key]
            self._main.append(entry)
        else:
            self._small.append(entry)
        return evicted

    def evict(self) -> CacheEntry:
        """Remove and return the entry that is worth least; there must be one."""
        while True:
            if self._small and (self._small.size_bytes > _SMALL_SHARE * self.limit_bytes or not self._main):
                entry = self._small.take_oldest()
                if not entry.reads:
                    self._remember(entry.key)
                    return entry
                entry.reads = 0
            else:
                entry = self._main.take_oldest()
                if not entry.reads:
                    return entry
                entry.reads -= 1
            self._main.append(entry)

    def _remember(self, key: bytes) -> None:
        """Remember a key, at most one for each entry: `ENTRY_BYTES` includes it."""
        self._ghosts[key] = None
        while len(self._ghosts) > len(self) + 1:
            self._ghosts.popitem(last=False)
