"""S3-FIFO: which entries leave the cache."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from headrace.inference.caching.policy import CacheEntry, EntryTotals, S3Fifo


def entry(key: int, size: int = 1) -> CacheEntry:
    return CacheEntry(key.to_bytes(32, "little"), {}, size, 0, 0, EntryTotals())


class _Cache:
    """A cache of numbers, as the store uses the policy."""

    def __init__(self, limit: int) -> None:
        self.fifo = S3Fifo(limit)
        self.entries: dict[bytes, CacheEntry] = {}

    def read(self, key: int) -> bool:
        """Read a number, and store it if it is not there; True for a hit."""
        found = self.entries.get(key.to_bytes(32, "little"))
        if found is not None:
            found.touch()
            return True
        new = entry(key)
        for evicted in self.fifo.admit(new):
            del self.entries[evicted.key]
        self.entries[new.key] = new
        return False


def test_entries_that_were_read_stay_while_others_pass() -> None:
    cache = _Cache(100)
    for _ in range(2):
        for key in range(20):
            cache.read(key)
    for key in range(1000, 2000):
        cache.read(key)
    assert all(cache.read(key) for key in range(20))
    assert len(cache.fifo) == len(cache.entries) == 100
    assert cache.fifo.size_bytes == 100


def test_an_entry_that_returns_soon_after_its_eviction_enters_the_main_queue() -> None:
    cache = _Cache(100)
    cache.read(0)
    for key in range(1, 101):  # evicts 0 from the small queue
        cache.read(key)
    assert 0 not in [int.from_bytes(key, "little") for key in cache.entries]
    assert not cache.read(0)
    for key in range(1000, 1500):
        cache.read(key)
    assert cache.read(0)


def test_hot_entries_of_the_main_queue_leave_once_they_are_read_no_more() -> None:
    cache = _Cache(50)
    for _ in range(3):
        for key in range(50):
            cache.read(key)
    for _ in range(6):
        for key in range(100, 150):
            cache.read(key)
    assert sum(cache.read(key) for key in range(100, 150)) > 25


def test_hit_rate_on_skewed_requests_with_scans_is_above_lru() -> None:
    numbers = np.random.default_rng(7)
    popular = numbers.zipf(1.2, 20_000) % 5000
    requests: list[int] = []
    for index, key in enumerate(popular.tolist()):
        requests.append(key)
        if index % 2:
            requests.append(1_000_000 + index)  # never repeats
    cache, lru = _Cache(300), OrderedDict[int, None]()
    hits = lru_hits = 0
    for key in requests:
        hits += cache.read(key)
        if key in lru:
            lru_hits += 1
            lru.move_to_end(key)
        else:
            lru[key] = None
            if len(lru) > 300:
                lru.popitem(last=False)
    assert hits > 1.05 * lru_hits, (hits, lru_hits)


def test_large_entries_evict_as_many_as_they_need() -> None:
    fifo = S3Fifo(10)
    for key in range(10):
        assert fifo.admit(entry(key)) == []
    evicted = fifo.admit(entry(10, size=7))
    assert [int.from_bytes(each.key, "little") for each in evicted] == list(range(7))
    assert fifo.size_bytes == 10
    assert fifo.admit(entry(11, size=10))
    assert (len(fifo), fifo.size_bytes) == (1, 10)


def test_as_many_keys_are_remembered_as_there_are_entries() -> None:
    cache = _Cache(20)
    for key in range(10_000):
        cache.read(key)
    assert len(cache.fifo._ghosts) <= 21
