"""Predictions, who is refused by them, and what is learned from what became of them."""

from __future__ import annotations

import heapq

import pytest
from headrace.core.clock import NS_PER_MS as MS
from headrace.core.clock import NS_PER_S
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import Overloaded, WouldMiss
from headrace.core.request import InferRequest
from headrace.inference.scheduling.admission import AdmissionController, InFlightWork, _nth_start
from headrace.inference.scheduling.batching import CostModel
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import Entry
from hypothesis import given
from hypothesis import strategies as st

NOW = 1000 * MS
IDLE = InFlightWork(NOW - 1, ())


class Line:
    """A queue of which only the numbers matter."""

    def __init__(self) -> None:
        self.waiting_rows = 0
        self.urgent = False  # the request is served before all others
        self.lag_ns, self.overtakers = 1000, 1000  # of who does not

    def locate(self, entry: Entry) -> tuple[int, int, int]:
        return (0, 0, 0) if self.urgent else (self.waiting_rows, self.overtakers, self.lag_ns)

    def rows_ahead(self, level: int, due_ns: int, client: str) -> int:
        return self.waiting_rows


class Case:
    """A model whose batches of up to 8 rows take 10 ms each, promised in 50 ms."""

    def __init__(
        self,
        instances: int = 1,
        objective_ms: int = 50,
        merge: bool = True,
        row: bool = True,
        shared: bool = False,
    ) -> None:
        self.line = Line()
        self.works = [IDLE] * instances
        self.objective_ns = objective_ms * MS
        self.latency_table = LatencyTable()
        if row:
            self.latency_table.seed({rows: [10 * MS] for rows in (1, 2, 4, 8)})
        policy = BatchPolicy(8, merge=merge, objective_ns=self.objective_ns)
        self.planner = CostModel(self.latency_table, policy)
        self.admission = AdmissionController(self.planner, policy, lambda: self.works, shared)
        self.admission.admit(self.line, [self.entry(deadline_ms=1000)], NOW)  # the queue has been empty until now

    def busy(self, *batches: tuple[int, int], instance: int = 0) -> None:
        """An instance has these under way: when each was taken, in ms from now, and its rows."""
        self.works[instance] = InFlightWork(0, [(NOW + ms * MS, rows) for ms, rows in batches])
        self.admission.changed = True

    def ran(self, rows: int, busy_ms: int, times: int = 1) -> None:
        """Batches were run."""
        for _ in range(times):
            self.admission.record_batch(rows, 10 * MS, busy_ms * MS)
            self.planner.batch()

    def entry(self, rows: int = 1, deadline_ms: int = 0) -> Entry:
        deadline_ns = NOW + deadline_ms * MS if deadline_ms else 0
        request = InferRequest(inputs={}, rows=rows, shape_key=None, received_ns=NOW, deadline_ns=deadline_ns)
        return Entry(request, ThreadCompletion(), 0, NOW, self.objective_ns)

    def predict_ms(self, *rows: int, deadline_ms: int = 0) -> float:
        """Return the predicted completion of a request, in ms from now."""
        entries = [self.entry(each, deadline_ms) for each in rows or (1,)]
        self.admission.admit(self.line, entries, NOW)
        return (entries[-1].predicted_ns - NOW) / MS


def test_running_and_queued_batches_delay_a_request() -> None:
    case = Case()
    assert case.predict_ms() == 10
    case.busy((-4, 8))
    assert case.predict_ms() == 16
    case.line.waiting_rows = 7
    assert case.predict_ms() == 16, "it fits into the next batch"
    assert case.predict_ms(2) == 26, "two rows do not"
    case.line.waiting_rows = 8
    assert case.predict_ms() == 26
    case.busy((-4, 8), (-3, 8), (-1, 8))
    assert case.predict_ms() == 46, "batches in the air follow one another"


def test_an_overdue_batch_is_expected_to_end_now() -> None:
    case = Case()
    case.busy((-15, 8), (-5, 8))
    assert case.predict_ms() == 20
    assert case.admission.wait_ns(case.line, 0, NOW) == 10 * MS
    assert case.admission.wait_ns(case.line, 0, NOW + 3 * MS) == 10 * MS, (
        "it is looked at again although nothing has changed"
    )


def test_several_instances_share_the_work() -> None:
    case = Case(instances=3)
    case.busy((-1, 8), instance=0)
    case.busy((-9, 8), instance=1)
    assert case.predict_ms() == 10, "one is idle"
    case.busy((-5, 8), instance=2)
    assert case.predict_ms() == 11, "the next to be free takes it"
    case.line.waiting_rows = 24
    assert case.predict_ms() == 21


def test_a_late_request_is_rejected_with_a_retry_delay() -> None:
    case = Case(instances=2)
    case.busy((0, 8))
    case.busy((0, 8), instance=1)
    case.line.waiting_rows = 6 * 8
    assert case.predict_ms() == 50
    case.line.waiting_rows = 8 * 8
    with pytest.raises(WouldMiss, match="complete in 60 ms, due in 50 ms") as refused:
        case.predict_ms()
    assert refused.value.retry_after_s == pytest.approx(0.05)
    with pytest.raises(WouldMiss, match="due in 20 ms"):
        case.predict_ms(deadline_ms=20)
    assert case.admission.drain_ns(case.line, NOW) == 50 * MS


def test_a_standing_queue_has_a_lower_bound_than_a_burst() -> None:
    case = Case(objective_ms=100)

    def is_admitted(ms: int, waiting_rows: int) -> bool:
        case.line.waiting_rows = waiting_rows
        case.busy((ms, 8))
        entry = case.entry()
        entry.due_ns += ms * MS
        try:
            case.admission.admit(case.line, [entry], NOW + ms * MS)
        except WouldMiss:
            return False
        return True

    assert is_admitted(0, 7), "all is well"
    assert is_admitted(10, 8 * 8), "a burst"
    assert is_admitted(99, 8 * 8), "it is served by and by"
    assert not is_admitted(101, 8 * 8), "it is not: more comes than can be served"
    assert not is_admitted(150, 4 * 8)
    assert is_admitted(150, 3 * 8), "half of the time"
    assert not is_admitted(290, 8 * 8)
    assert is_admitted(300, 3)
    assert is_admitted(301, 8 * 8)


def test_the_last_part_of_a_split_request_counts_as_the_request() -> None:
    case = Case()
    case.busy((0, 8))
    assert case.predict_ms(8, 8, 3) == 40
    with pytest.raises(WouldMiss):
        case.predict_ms(8, 8, 8, 8, 1)


def test_requests_that_do_not_merge_are_counted_singly() -> None:
    case = Case(merge=False)
    case.busy((0, 1))
    case.line.waiting_rows = 3
    assert case.predict_ms() == 50
    case.ran(3, busy_ms=10, times=300)  # it turns out that each has three rows
    assert case.predict_ms() == 30


def test_no_request_is_rejected_while_latencies_are_unmeasured() -> None:
    unknown = Case(row=False)
    unknown.line.waiting_rows = 10_000
    assert unknown.predict_ms() == -NOW / MS, "and nothing is promised"
    assert (
        unknown.admission.wait_ns(unknown.line, 0, NOW),
        unknown.admission.drain_ns(unknown.line, NOW),
        unknown.admission.rows_hz,
    ) == (0, 0, 0)
    evicted = Case(instances=0)
    evicted.line.waiting_rows = 10_000
    assert evicted.predict_ms() == -NOW / MS
    assert (evicted.admission.wait_ns(evicted.line, 0, NOW), evicted.admission.drain_ns(evicted.line, NOW)) == (0, 0)
    assert [case.admission.retry_after_s(case.line, NOW) for case in (unknown, evicted)] == [1, 1], (
        "for a queue may be full"
    )


def test_a_request_for_an_idle_instance_is_always_admitted() -> None:
    case = Case()
    for _ in range(100):  # something is slow for a while, and what is refused teaches nothing
        case.latency_table.observe(1, 45 * MS)
        case.latency_table.observe(8, 70 * MS)
        case.planner.batch()
    assert case.predict_ms() > 44
    case.busy((0, 1))
    with pytest.raises(WouldMiss):
        case.predict_ms()


def test_hard_deadlines_that_cannot_be_met_are_tried_once_a_second() -> None:
    case = Case(objective_ms=0)
    assert case.predict_ms(deadline_ms=3) == 10
    with pytest.raises(WouldMiss):
        case.predict_ms(deadline_ms=3)
    assert case.predict_ms(deadline_ms=11) == 10
    case.busy((-1000, 8))  # it takes longer than predicted, and is not idle
    with pytest.raises(WouldMiss):
        case.admission.admit(case.line, [case.entry(deadline_ms=3)], NOW + 2 * NS_PER_S)
    case.works[0] = IDLE
    case.admission.changed = True
    late = case.entry(deadline_ms=3)
    case.admission.admit(case.line, [late], NOW + NS_PER_S)
    assert late.predicted_ns == NOW + NS_PER_S + 10 * MS


def test_an_objective_shorter_than_one_batch_rejects_no_request() -> None:
    case = Case(objective_ms=9)
    case.busy((0, 8))
    case.line.waiting_rows = 1000
    assert case.predict_ms() == -NOW / MS


def test_batch_overhead_is_averaged_and_one_outlier_is_ignored() -> None:
    case = Case()
    case.ran(8, busy_ms=12, times=500)
    assert case.predict_ms() == pytest.approx(12, abs=0.1)
    case.ran(8, busy_ms=1000)
    case.ran(8, busy_ms=12, times=32)
    assert case.predict_ms() < 12.6


def test_the_safety_margin_follows_the_share_of_late_requests() -> None:
    case = Case()
    case.busy((0, 8))
    case.line.waiting_rows = 16
    assert case.predict_ms() == 40

    def answered(error_ms: int, times: int) -> None:
        for _ in range(times):
            entry = case.entry()
            entry.predicted_ns, entry.kind = NOW + 40 * MS, 10
            case.admission.learn([entry], NOW + (40 + error_ms) * MS)

    answered(14, 12)
    assert case.admission.late == 12
    with pytest.raises(WouldMiss):
        case.predict_ms()
    answered(0, 3000)
    assert case.predict_ms() == 40
    early = case.entry()
    early.predicted_ns, early.kind = NOW + 11 * MS, 10
    for _ in range(100):  # those with plenty of time do not matter
        case.admission.learn([early], NOW + 30 * MS)
    assert case.predict_ms() == 40
    case.admission.learn_dropped([early] * 8)
    case.admission.learn_dropped([case.entry()] * 8)
    assert case.predict_ms() == 40
    for _ in range(9):
        case.admission.learn_dropped([early])
    with pytest.raises(WouldMiss):
        case.predict_ms()


@given(st.integers(0, 60), st.lists(st.integers(0, 100), min_size=1, max_size=6).map(sorted), st.integers(1, 40))
def test_the_first_free_instance_runs_the_next_batch(number: int, free_ns: list[int], cycle_ns: int) -> None:
    heap = list(free_ns)
    for _ in range(number):
        heapq.heapreplace(heap, heap[0] + cycle_ns)
    assert _nth_start(number, free_ns, cycle_ns) == heap[0]


@given(
    st.lists(st.lists(st.tuples(st.integers(-30, 0), st.integers(1, 8)), max_size=4), min_size=1, max_size=5),
    st.integers(0, 100),
    st.integers(0, 100),
)
def test_more_work_is_never_done_earlier(works: list[list[tuple[int, int]]], waiting: int, more: int) -> None:
    case = Case(len(works), objective_ms=100_000)
    for instance, batches in enumerate(works):
        case.busy(*sorted(batches), instance=instance)
    case.line.waiting_rows = waiting
    first = case.predict_ms()
    drain_ns = case.admission.drain_ns(case.line, NOW)
    case.line.waiting_rows += more
    assert case.predict_ms() >= first >= 10
    assert case.admission.drain_ns(case.line, NOW) >= drain_ns
    case.busy(*sorted(works[0]), (0, 8))
    assert case.predict_ms() >= first


def test_margins_are_separate_and_shrink_while_they_reject_every_request() -> None:
    case = Case()
    case.busy((0, 8))
    assert case.predict_ms() == 20
    late = case.entry()
    case.admission.admit(case.line, [late], NOW)
    late.predicted_ns = NOW + 45 * MS
    for _ in range(20):
        case.admission.learn([late], NOW + 90 * MS)
    case.line.urgent = True
    assert case.predict_ms() == 20, "those in a hurry have not been late"
    case.line.urgent = False
    case.line.waiting_rows = 16
    refused = 0
    while True:
        try:
            case.predict_ms()
        except WouldMiss:
            refused += 1
        else:
            break
    assert 1000 < refused < 20_000


def test_lower_priority_requests_wait_longer() -> None:
    case = Case(objective_ms=100)
    case.busy((0, 8))
    case.line.waiting_rows = 7
    assert case.predict_ms() == 20
    case.line.urgent = True
    for _ in range(300):  # 300 rows a second, where 800 can be served
        assert case.predict_ms() == 20, "no request overtakes those"
    case.line.urgent = False
    assert case.predict_ms() == 40, "nine or fewer of them come meanwhile"
    case.busy((2000, 8))
    later = case.entry()
    later.due_ns += 2 * NS_PER_S
    case.admission.admit(case.line, [later], NOW + 2 * NS_PER_S)
    assert later.predicted_ns == NOW + 2 * NS_PER_S + 20 * MS, "none has come of late"


def test_under_fair_sharing_only_clients_below_their_share_go_first() -> None:
    case = Case(objective_ms=100, shared=True)
    case.busy((0, 8))
    case.line.waiting_rows, case.line.lag_ns = 7, 10
    for _ in range(300):
        assert case.predict_ms() == 20, "no overtaking request has arrived"
    case.line.lag_ns = 1000
    assert case.predict_ms() == 20, "nor have those: they were of a client that is above its share"
    case.line.urgent = True
    for _ in range(300):
        assert case.predict_ms() == 20, "no request overtakes those"
    case.line.urgent = False
    assert case.predict_ms() == 40, "nine or fewer come meanwhile"
    case.line.overtakers = 8
    assert case.predict_ms() == 30, "more than so many would be above their share themselves"
    case.line.overtakers = 1000
    case.busy((-9, 8))
    assert case.predict_ms() == 21, "in a millisecond there come fewer"


def test_observed_slow_batches_count_soon() -> None:
    case = Case()
    assert case.predict_ms() == 10
    for _ in range(9):
        case.latency_table.observe(1, 40 * MS)
    assert case.predict_ms() == 10, "tables are drawn now and then"
    case.planner.batch(40 * MS)
    assert case.predict_ms() == 10
    case.planner.batch(40 * MS)
    assert case.predict_ms() > 30, "it is 40 for one row, and still less for eight"


def rejected(case: Case) -> WouldMiss:
    with pytest.raises(WouldMiss) as refused:
        case.admission.admit(case.line, [case.entry()], NOW)
    return refused.value


def test_a_rejection_stands_until_a_batch_starts_or_ends() -> None:
    case = Case()
    case.busy((-4, 8))
    case.line.waiting_rows = 40
    first = rejected(case)
    later = NOW + MS
    again = case.admission.standing_error(case.line, later, 0, later)
    assert again is not None, "the same request a millisecond later"
    assert (str(again), again.retry_after_s) != (str(first), first.retry_after_s), "times are those of the request"
    case.admission.changed = True
    assert case.admission.standing_error(case.line, later, 0, later) is None
    assert case.admission.standing is None


def test_a_standing_rejection_has_the_numbers_of_a_full_prediction() -> None:
    case = Case()
    case.busy((-4, 8))
    case.line.waiting_rows = 40
    first = rejected(case)
    same = case.admission.standing_error(case.line, NOW, 0, NOW)
    assert same is not None
    assert (str(same), same.retry_after_s) == (str(first), first.retry_after_s)


def test_a_standing_rejection_ends_when_the_queue_shrinks_or_time_suffices() -> None:
    case = Case()
    case.busy((-4, 8))
    case.line.waiting_rows = 40
    rejected(case)
    assert case.admission.standing_error(case.line, NOW + 49 * MS, 0, NOW + 49 * MS) is None, "it would be in time then"
    case.line.waiting_rows = 39
    assert case.admission.standing_error(case.line, NOW, 0, NOW) is None, "a request has left the queue"


def test_a_standing_rejection_does_not_apply_to_more_urgent_requests() -> None:
    case = Case()
    case.busy((-4, 8))
    case.line.waiting_rows = 40
    rejected(case)
    assert case.admission.standing_error(case.line, NOW, NOW + 5 * MS, NOW) is None, (
        "it is served before those that are queued"
    )


@pytest.mark.parametrize("shared", [False, True])
def test_rejections_of_large_requests_and_of_shared_models_do_not_stand(shared: bool) -> None:
    case = Case(shared=shared)
    case.busy((-4, 8))
    case.line.waiting_rows = 40
    with pytest.raises(WouldMiss):
        case.admission.admit(case.line, [case.entry(1 if shared else 8)], NOW)
    assert case.admission.standing is None


def unpromised(rows: int = 0, longest_ms: int = 100) -> Case:
    case = Case(objective_ms=0)
    case.admission.max_wait_ns = longest_ms * MS
    case.busy((-4, 8))
    case.line.waiting_rows = rows
    return case


def test_the_predicted_wait_of_requests_without_a_due_time_is_bounded() -> None:
    case = unpromised(72)
    case.admission.check_wait(case.line, [case.entry()], NOW)  # 6 ms, then nine batches: 96 ms
    case.line.waiting_rows = 80
    with pytest.raises(Overloaded, match="a request would wait for 106 ms, 100 ms are allowed") as refused:
        case.admission.check_wait(case.line, [case.entry()], NOW)
    assert refused.value.retry_after_s == pytest.approx(0.106), "the running batch and the queued ones"
    again = case.admission.standing_error(case.line, NOW, 0, NOW)
    assert (str(again), type(again)) == (str(refused.value), Overloaded)
    assert case.admission.standing_error(case.line, NOW + 6 * MS, 0, NOW + 6 * MS) is None, (
        "the batch that runs has ended"
    )


def test_two_slow_batches_may_always_wait() -> None:
    case = unpromised(8, longest_ms=5)
    case.admission.check_wait(case.line, [case.entry()], NOW)  # 16 ms: more than allowed, less than two batches
    case.line.waiting_rows = 16
    with pytest.raises(Overloaded, match="26 ms, 20 ms are allowed"):
        case.admission.check_wait(case.line, [case.entry()], NOW)


def test_waits_are_not_bounded_while_latencies_are_unmeasured() -> None:
    case = Case(objective_ms=0, row=False)
    case.admission.max_wait_ns = MS
    case.line.waiting_rows = 4096
    case.admission.check_wait(case.line, [case.entry()], NOW)


def test_waits_behind_a_batch_of_more_rows_than_were_measured_are_not_bounded() -> None:
    case = Case(objective_ms=0, row=False)
    case.latency_table.seed({1: [700_000]})
    case.admission.max_wait_ns = MS
    case.line.waiting_rows = 8
    case.busy((0, 8))  # 5.6 ms by extrapolation from one row
    case.admission.check_wait(case.line, [case.entry()], NOW)
    assert case.admission.forecast_wait(case.line, NOW) is None
    case.latency_table.observe(8, 4 * MS)
    case.planner.batch()
    case.line.waiting_rows = 16
    with pytest.raises(Overloaded, match="are allowed"):
        case.admission.check_wait(case.line, [case.entry()], NOW)
    assert case.admission.forecast_wait(case.line, NOW) is not None


def test_waits_that_are_longer_than_predicted_are_learned() -> None:
    case = unpromised(72)
    entry = case.entry()
    case.admission.check_wait(case.line, [entry], NOW)
    for _ in range(200):
        case.admission.record_wait(entry, NOW + 2 * 96 * MS)
    with pytest.raises(Overloaded, match=r"would wait for 1[89]\d ms"):
        case.admission.check_wait(case.line, [case.entry()], NOW)
