"""The decision, by table and by property."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from headrace.inference.scheduling.batching import (
    BatchCosts,
    CloseReason,
    CostModel,
    Idle,
    Skip,
    Take,
    WaitUntil,
    decide,
    draw_costs,
)
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import FAR_NS
from headrace.inference.scheduling.thread_work import WAKE_UP_NS, ThreadWork
from hypothesis import given
from hypothesis import strategies as st


@dataclass
class View:
    rows: list[int]
    oldest_ns: int = 0
    dues: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return len(self.rows)

    @property
    def total_rows(self) -> int:
        return sum(self.rows)

    def row_counts(self) -> Iterable[int]:
        return iter(self.rows)

    def due_from_ns(self, count: int) -> int:
        return min(self.dues[:count], default=FAR_NS)

    def members(self) -> Iterable[tuple[int, int]]:
        return zip(self.rows, self.dues, strict=True)


CASES = [
    ("nothing waits", [], 0, BatchPolicy(8), Idle()),
    ("no delay: what is there", [1, 1], 0, BatchPolicy(8), Take(2, CloseReason.IDLE)),
    ("exactly full", [4, 4], 0, BatchPolicy(8, (), 100), Take(2, CloseReason.FULL)),
    ("exactly full, and one behind", [4, 4, 2], 0, BatchPolicy(8, (), 100), Take(2, CloseReason.FULL)),
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


# Where something is due. A batch of n rows takes 10 + n, and 15 + n at most, and there are 4 rows in the best.

PLAN = BatchCosts([15 + rows for rows in range(9)], [10 + rows for rows in range(9)], [0, 1, 2, 3, 4, 4, 4, 4, 4])
POLICY = BatchPolicy(8)
IN_TIME = [
    ("all in time, and few", [1, 1], [50, 60], POLICY, Take(2, CloseReason.IDLE)),
    ("no more than is best", [1] * 6, [50] * 6, POLICY, Take(4, CloseReason.FULL)),
    ("just in time", [1, 1], [17, 17], POLICY, Take(2, CloseReason.IDLE)),
    (
        "smaller for the first, and in time for the others",
        [1, 1, 1],
        [16, 60, 60],
        POLICY,
        Take(1, CloseReason.DEADLINE),
    ),
    ("not at the cost of those behind", [1, 1, 1], [12, 30, 30], POLICY, Skip((0,))),
    ("a request that may be late rather than none", [1], [12], POLICY, Take(1, CloseReason.FULL)),
    ("of many only those certain to be in time", [1] * 9, [16] + [34] * 8, POLICY, Skip((0,))),
    ("too late for all", [1, 1, 1], [5, 6, 7], POLICY, Skip((0, 1, 2))),
    ("too late in the middle", [1, 1, 1, 1], [60, 5, 60, 6], POLICY, Skip((1, 3))),
    ("without a due time", [1, 1], [30, FAR_NS], POLICY, Take(2, CloseReason.IDLE)),
    ("more than is best, but one request", [7], [50], POLICY, Take(1, CloseReason.FULL)),
    ("waits for the allowed delay", [1], [100], BatchPolicy(8, (), 30), WaitUntil(30)),
    ("no longer than a larger batch allows", [1], [40], BatchPolicy(8, (), 30), WaitUntil(40 - 17)),
    ("the latest start has come", [1], [17], BatchPolicy(8, (), 30), Take(1, CloseReason.DEADLINE)),
    ("alone", [1, 1], [50, 50], BatchPolicy(8, merge=False), Take(1, CloseReason.SINGLE)),
    ("alone and too late", [1, 1], [5, 50], BatchPolicy(8, merge=False), Skip((0,))),
]


@pytest.mark.parametrize(("name", "rows", "dues", "policy", "expected"), IN_TIME, ids=[case[0] for case in IN_TIME])
def test_decides_by_deadlines(
    name: str, rows: list[int], dues: list[int], policy: BatchPolicy, expected: object
) -> None:
    assert decide(View(rows, 0, tuple(dues)), 0, policy, PLAN) == expected


def test_without_measured_latencies_batches_are_full() -> None:
    assert decide(View([1] * 9, 0, (1,) * 9), 5, POLICY) == Take(8, CloseReason.FULL)


@given(
    members=st.lists(st.tuples(st.integers(1, 8), st.integers(-10, 120)), min_size=1, max_size=30),
    fixed=st.integers(1, 40),
    row=st.integers(0, 10),
    jitter=st.integers(0, 10),
    objective=st.sampled_from([0, 60, 120]),
    ordered=st.booleans(),
)
def test_batches_by_due_times_are_as_promised(
    members: list[tuple[int, int]], fixed: int, row: int, jitter: int, objective: int, ordered: bool
) -> None:
    if ordered:
        members.sort(key=lambda member: member[1])
    rows, dues = [member[0] for member in members], [member[1] for member in members]
    policy = BatchPolicy(8, objective_ns=objective)
    profile = LatencyTable()
    profile.seed({size: [fixed + row * size] * 9 + [fixed + row * size + jitter] for size in range(1, 9)})
    plan = draw_costs(profile, policy)
    answer = decide(View(rows, 0, tuple(dues)), 0, policy, plan)
    if isinstance(answer, Skip):
        assert answer.positions
        assert all(dues[index] < plan.promises_ns[max(plan.best[8], *rows)] for index in answer.positions)
        return
    assert isinstance(answer, Take)
    used, size = dues[: answer.count], sum(rows[: answer.count])
    assert answer.count == 1 or size <= plan.best[8]
    if ordered and min(used) < plan.promises_ns[size]:
        assert min(used) >= plan.estimates_ns[size], "in doubt it is tried, beyond it is not"
    fits = sum(rows) <= plan.best[8] and min(dues) >= plan.promises_ns[sum(rows)]
    assert not fits or answer.count == len(rows), "requests that can be in time together are batched"


def test_a_larger_batch_is_not_planned_if_it_is_slower_by_the_row() -> None:
    profile = LatencyTable()
    profile.seed({rows: [100 if rows <= 4 else 250] for rows in range(1, 9)})
    assert list(draw_costs(profile, BatchPolicy(8)).best) == [0, 1, 2, 3, 4, 4, 4, 4, 4]
    profile = LatencyTable()
    profile.seed({rows: [100 + rows + (rows == 6)] for rows in range(1, 9)})
    assert list(draw_costs(profile, BatchPolicy(8)).best) == list(range(9)), "a measurement is not that exact"


def test_a_batch_reserves_time_for_the_next_request() -> None:
    profile = LatencyTable()
    profile.seed({rows: [40 + 15 * rows] for rows in range(1, 9)})
    sizes = [draw_costs(profile, BatchPolicy(8, objective_ns=260), instances).best[8] for instances in (1, 2)]
    assert sizes == [5, 7], "9/10 of 1/2, of 2/3: 117 and 156; 98 % of the throughput of 7 rows needs 7"
    assert draw_costs(profile, BatchPolicy(8)).best[8] == 8


def test_time_for_the_next_request_costs_little_throughput() -> None:
    profile = LatencyTable()
    profile.seed({rows: [100 + rows] for rows in range(1, 9)})
    assert draw_costs(profile, BatchPolicy(8, objective_ns=204)).best[8] == 7, "as long as one row, nearly"
    assert draw_costs(profile, BatchPolicy(8, objective_ns=50)).best[8] == 7, "nothing is in time: as much as can be"


def test_models_without_batching_gain_run_in_small_batches() -> None:
    profile = LatencyTable()
    profile.seed({rows: [10 + 1000 * rows] for rows in range(1, 9)})
    assert list(draw_costs(profile, BatchPolicy(8)).best) == [0, 1, 1, 1, 1, 1, 1, 1, 1]
    profile = LatencyTable()
    profile.seed({rows: [1000 + 250 * rows] for rows in range(1, 33)})
    planner = CostModel(profile, BatchPolicy(32))
    alone = planner.current
    planner.crowded = True
    crowded = planner.current
    assert alone is not None
    assert crowded is not None
    assert (alone.best[32], crowded.best[32]) == (28, 18), "98 % of 32 rows in 9 ms, and 92 %"
    assert alone.best[20] == 20


def works(measured_ns: dict[int, int]) -> ThreadWork:
    work = ThreadWork()
    for rows, time_ns in measured_ns.items():
        for _ in range(5):
            work.observe(rows, time_ns)
    return work


MS = 1_000_000
LINEAR = {rows: [rows * MS] for rows in range(1, 9)}


def test_batch_sizes_are_compared_by_processor_time() -> None:
    profile = LatencyTable()
    profile.seed({rows: [10 * MS + rows * MS] for rows in range(1, 9)})  # durations: the largest batch is the best
    alone = draw_costs(profile, BatchPolicy(8, objective_ns=100 * MS))
    assert alone.best[8] == 8
    work = works({rows: rows * 8 * MS + (rows == 2) * -2 * MS for rows in range(1, 9)})
    costs = draw_costs(profile, BatchPolicy(8, objective_ns=100 * MS), thread_work=work)
    assert list(costs.best) == [0, 1, 2, 2, 2, 2, 2, 2, 2], "two rows take the least processor time a row"
    assert costs.estimates_ns == alone.estimates_ns, "predictions are durations"


def test_a_backend_that_computes_elsewhere_is_compared_by_durations() -> None:
    estimates_ns = np.array([0, 10 * MS, 20 * MS])
    assert works({1: MS, 2: 4 * MS}).costs_ns(estimates_ns) is None
    assert ThreadWork().costs_ns(estimates_ns) is None
    few = ThreadWork()
    few.observe(1, 9 * MS)
    assert few.costs_ns(estimates_ns) is None, "one time is no measurement"


def test_sizes_without_processor_times_are_scaled() -> None:
    costs_ns = works({1: 5 * MS}).costs_ns(np.array([0, 10 * MS, 18 * MS]))
    assert costs_ns is not None
    assert costs_ns.tolist() == [WAKE_UP_NS, 5 * MS + WAKE_UP_NS, 9 * MS + WAKE_UP_NS]


def test_a_queue_without_due_times_is_cut_into_efficient_batches() -> None:
    profile = LatencyTable()
    profile.seed(LINEAR)
    planner = CostModel(profile, BatchPolicy(8))
    planner.batch(100 * MS)
    assert planner.efficient_rows == 0, "no processor times: the largest batch"
    for rows in (1, 2, 4, 8):
        for _ in range(5):
            planner.thread_work.observe(rows, rows * MS + (rows == 8) * 2 * MS)
    planner.batch(100 * MS)
    assert planner.efficient_rows == 3, "8 rows are clearly worse, 3 nearly as good as 4"
    view = View([1] * 20)
    assert decide(view, 0, BatchPolicy(8), None, 4) == Take(4, CloseReason.FULL)
    assert decide(view, 0, BatchPolicy(8)) == Take(8, CloseReason.FULL)
    assert decide(view, 0, BatchPolicy(8, (8,)), None, 4) == Take(8, CloseReason.PREFERRED), "as configured"
    few = View([1] * 3)
    assert decide(few, 0, BatchPolicy(8), None, 4) == Take(3, CloseReason.IDLE)


def test_the_first_time_of_more_rows_replaces_an_extrapolation_at_once() -> None:
    table = LatencyTable()
    table.seed({1: [700_000]})
    model = CostModel(table, BatchPolicy(4096))
    assert model.current is not None
    assert model.current.estimates_ns[4096] == 4096 * 700_000
    table.observe(4096, 10_000_000)
    model.batch()
    assert model.current.estimates_ns[4096] == 10_000_000
