"""The decision, by table and by property."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.dataplane.batching import BatchPolicy, CloseReason, Idle, Take, WaitUntil, decide


@dataclass
class View:
    rows: list[int]
    oldest_ns: int = 0
    dated: int = 0

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    def row_counts(self) -> Iterable[int]:
        return iter(self.rows)

    def members(self) -> Iterable[tuple[int, int]]:
        raise AssertionError("nothing is due")


CASES = [
    ("nothing waits", [], 0, BatchPolicy(8), Idle()),
    ("no delay: what is there", [1, 1], 0, BatchPolicy(8), Take(2, CloseReason.IDLE)),
    ("exactly full", [4, 4], 0, BatchPolicy(8, (), 100), Take(2, CloseReason.FULL)),
    ("the next does not fit", [4, 3, 2], 0, BatchPolicy(8, (), 100), Take(2, CloseReason.FULL)),
    ("young: wait", [1], 40, BatchPolicy(8, (), 100), WaitUntil(100)),
    ("old enough", [1, 1], 100, BatchPolicy(8, (), 100), Take(2, CloseReason.DELAY)),
    ("preferred reached", [1, 1, 1, 1, 1], 0, BatchPolicy(8, (2, 4), 100), Take(4, CloseReason.PREFERRED)),
    ("preferred must be exact", [3], 0, BatchPolicy(8, (2, 4), 100), WaitUntil(100)),
    ("largest preferred first", [2, 2, 2], 0, BatchPolicy(8, (2, 4), 0), Take(2, CloseReason.PREFERRED)),
    (
        "preferred before full: that is what it is preferred for",
        [1] * 9,
        0,
        BatchPolicy(8, (2, 4)),
        Take(4, CloseReason.PREFERRED),
    ),
    ("none preferred, no delay", [1], 0, BatchPolicy(8, (2, 4), 0), Take(1, CloseReason.IDLE)),
    ("oversized goes alone", [20, 1], 0, BatchPolicy(8), Take(1, CloseReason.FULL)),
    ("no merging", [1, 1, 1], 0, BatchPolicy(8, (), 0, merge=False), Take(1, CloseReason.SINGLE)),
]


@pytest.mark.parametrize(("name", "rows", "now", "policy", "expected"), CASES, ids=[case[0] for case in CASES])
def test_decides(name: str, rows: list[int], now: int, policy: BatchPolicy, expected: object) -> None:
    assert decide(View(rows), now, policy) == expected


@given(
    rows=st.lists(st.integers(1, 8), max_size=40),
    age=st.integers(0, 200),
    delay=st.integers(0, 100),
    preferred=st.lists(st.integers(1, 8), max_size=3, unique=True).map(sorted).map(tuple),
)
def test_never_overfills_and_never_waits_too_long(
    rows: list[int], age: int, delay: int, preferred: tuple[int, ...]
) -> None:
    policy = BatchPolicy(8, preferred, delay)
    answer = decide(View(rows), age, policy)
    if not rows:
        assert answer == Idle()
    elif isinstance(answer, Take):
        assert 1 <= answer.count <= len(rows)
        assert sum(rows[: answer.count]) <= 8
    else:
        assert isinstance(answer, WaitUntil)
        assert age < answer.time_ns == delay
        assert sum(rows) < 8
