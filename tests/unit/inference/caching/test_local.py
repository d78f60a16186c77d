"""Memory of the response cache: exact bytes, limits of models, time to live."""

from __future__ import annotations

import gc
import sys
import tracemalloc

import numpy as np
from headrace.core.tensor import Array
from headrace.inference.caching.local import LocalStore, VersionEntries, frozen, memory_bytes
from hypothesis import given, settings
from hypothesis import strategies as st


def outputs(elements: int, fill: float = 0.0) -> dict[str, Array]:
    return frozen({"y": np.full(elements, fill, np.float32)})


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


ONE = memory_bytes(outputs(1000))


def put(part: VersionEntries, number: int, elements: int = 1000, now_ns: int = 0) -> bool:
    return part.put(key(number), outputs(elements, number), compute_ns=1, now_ns=now_ns)


def test_a_response_comes_back_with_its_bytes_and_cannot_be_changed() -> None:
    part = LocalStore(1 << 20).open()
    batch = np.arange(12, dtype=np.float32).reshape(4, 3)
    copies = frozen({"y": batch[1:2]})
    part.put(key(1), copies, 7, 0)
    batch[:] = -1
    entry = part.get(key(1), 5)
    assert entry is not None
    assert entry.outputs["y"].tolist() == [[3, 4, 5]]
    assert entry.outputs["y"].base is None, "a view would keep the whole batch alive"
    assert not entry.outputs["y"].flags.writeable
    assert entry.compute_ns == 7
    assert part.get(key(2), 5) is None


def test_the_store_holds_no_more_than_its_size() -> None:
    store = LocalStore(10 * ONE)
    part = store.open()
    for number in range(25):
        assert put(part, number)
        assert store.used_bytes <= store.size_bytes
    assert (len(store), part.totals.entries, part.totals.size_bytes) == (10, 10, 10 * ONE)
    assert (part.totals.insertions, part.totals.evictions) == (25, 15)


def test_a_response_larger_than_the_limit_is_not_stored() -> None:
    store = LocalStore(10 * ONE)
    part, small = store.open(), store.open(max_bytes=ONE - 1)
    assert not put(part, 1, elements=100_000)
    assert not put(small, 2)
    assert (len(store), store.used_bytes) == (0, 0)


def test_an_entry_replaces_the_one_with_its_key() -> None:
    store = LocalStore(10 * ONE)
    part = store.open()
    assert put(part, 1)
    assert put(part, 1, elements=500)
    assert len(store) == 1
    assert store.used_bytes == memory_bytes(outputs(500)) == part.totals.size_bytes


def test_a_model_with_a_limit_leaves_the_memory_of_others_alone() -> None:
    store = LocalStore(10 * ONE)
    limited, other = store.open(max_bytes=3 * ONE), store.open()
    for number in range(7):
        put(other, number)
    for number in range(100, 150):
        put(limited, number)
    assert (limited.totals.entries, other.totals.entries) == (3, 7)
    assert other.totals.evictions == 0
    for number in range(10, 20):  # the others do not use the memory of the limited model either
        put(other, number)
    assert (limited.totals.entries, other.totals.entries) == (3, 7)
    assert store.used_bytes == 10 * ONE


def test_limits_that_add_up_to_more_than_the_store_share_it() -> None:
    store = LocalStore(10 * ONE)
    first, second = store.open(max_bytes=8 * ONE), store.open(max_bytes=8 * ONE)
    for number in range(8):
        put(first, number)
    for number in range(100, 108):
        put(second, number)
    assert store.used_bytes == 10 * ONE
    assert first.totals.entries + second.totals.entries == 10
    assert second.totals.entries >= 5


def test_entries_expire() -> None:
    store = LocalStore(10 * ONE)
    part = store.open(ttl_ns=100)
    put(part, 1, now_ns=50)
    assert part.get(key(1), 149) is not None
    assert part.get(key(1), 150) is None
    assert (len(store), store.used_bytes, part.totals.expirations) == (0, 0, 1)


def test_a_closed_version_leaves_nothing_and_stores_nothing_more() -> None:
    store = LocalStore(1000 * ONE)
    part, other = store.open(max_bytes=500 * ONE), store.open()
    for number in range(300):
        put(part, number)
        put(other, 1000 + number)
    part.close()
    assert (len(store), part.totals.entries, store.used_bytes) == (300, 0, 300 * ONE)
    assert not put(part, 5)
    assert store._limited == []
    assert other.get(key(1000), 0) is not None


def test_the_size_of_texts_counts() -> None:
    texts = np.array([[b"a" * 1000, b"b" * 10]], object)
    size = memory_bytes({"y": texts})
    assert size - memory_bytes({"y": np.zeros((1, 2), np.int64)}) == sys.getsizeof(b"a" * 1000) + sys.getsizeof(
        b"b" * 10
    )


def test_the_bytes_that_are_counted_are_those_that_are_used() -> None:
    """The real memory of small entries, ghosts included, is at most what is counted, and not far below."""
    store = LocalStore(4 << 20)
    part = store.open()
    for number in range(2000):  # the tables reach a size that they keep
        put(part, number, elements=4)
    part.close()
    gc.collect()
    tracemalloc.start()
    part = store.open()
    before = tracemalloc.get_traced_memory()[0]
    number = 10_000
    while part.totals.evictions < 3000:
        put(part, number, elements=4)
        number += 1
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.6 * store.used_bytes < used <= store.used_bytes, used / part.totals.entries


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "close"]), st.integers(0, 2), st.integers(0, 12), st.integers(0, 3000)
        ),
        max_size=120,
    )
)
def test_totals_are_those_of_the_entries(steps: list[tuple[str, int, int, int]]) -> None:
    store = LocalStore(20_000)
    parts = [store.open(), store.open(max_bytes=8000), store.open(ttl_ns=40)]
    for now_ns, (step, index, number, elements) in enumerate(steps):
        part = parts[index]
        if step == "put":
            put(part, 100 * index + number, elements, now_ns)
        elif step == "get":
            entry = part.get(key(100 * index + number), now_ns)
            assert entry is None or float(entry.outputs["y"].sum()) == len(entry.outputs["y"]) * (100 * index + number)
        elif index:
            part.close()
        entries = list(store._entries.values())
        assert store.used_bytes == sum(each.size_bytes for each in entries) <= store.size_bytes
        assert all(each.size_bytes == memory_bytes(each.outputs) for each in entries)
        for each in parts:
            mine = [entry for entry in entries if entry.totals is each.totals]
            assert (each.totals.entries, each.totals.size_bytes) == (len(mine), sum(one.size_bytes for one in mine))
            assert each.totals.size_bytes <= each.limit_bytes
