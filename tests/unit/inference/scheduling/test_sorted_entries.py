"""The entries that wait, in runs: the same as one sorted list, whatever is done with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from headrace.inference.scheduling import sorted_entries as runs
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.sorted_entries import SortedEntries
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.unit.inference.scheduling.test_queue_order import entry

KEYS = st.integers(1, 12)  # so few that many are equal
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS),
        st.tuples(st.just("take"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 40)),
        st.tuples(st.just("put back"), st.integers(0, 9)),
        st.tuples(st.just("refill"), st.just(0)),
    ),
    max_size=60,
)


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Runs of three, so that there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "MAX_RUN", 3)
        yield


def keyed(key: int) -> Entry:
    new = entry()
    new.key = key
    return new


@settings(max_examples=examples(300))
@given(STEPS)
def test_it_is_a_sorted_list(steps: list[tuple[str, int]]) -> None:
    result, line = SortedEntries(), []
    for step, number in steps:
        if step == "add":
            new = keyed(number)
            before = sum(each.key <= number for each in line)
            assert result.add(new) == (before < len(line))
            line.insert(before, new)
        elif step == "take":
            assert result.take(number) == line[:number]
            del line[:number]
        elif step == "remove" and line:
            result.remove(line.pop(number % len(line)))
        elif step == "put back":
            result.put_back(result.take(number))
        elif step == "refill":
            result.refill(list(result))
        assert list(result) == line
        assert list(reversed(result)) == line[::-1]
        assert list(result.head(4)) == line[:4]
        assert (bool(result), len(result)) == (bool(line), len(line))
        assert not line or result.first is line[0]


@given(st.lists(KEYS, max_size=40), KEYS)
def test_the_rank_of_an_entry(keys: list[int], key: int) -> None:
    result = SortedEntries()
    for each in keys:
        result.add(keyed(each))
    count = sum(each <= key for each in keys)
    assert result.is_at_end(key) == (count == len(keys))
    if count < len(keys):
        assert result.before(key) == count
