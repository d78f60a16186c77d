"""Time of the next pull while batches are in flight, from figures, and on an instance."""

from __future__ import annotations

import pytest
from headrace.core.clock import NS_PER_US
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.policy import BatchPolicy

from tests.support.fake_overlapped import DIES, RAISES, FakeOverlapped
from tests.support.overlapped_bench import Bench, Caller

US = NS_PER_US
LEAD_NS = 150 * US


def paced(*in_flight_batches: tuple[int, int]) -> LaunchPacing:
    """A pace that has seen flights of (rows, nanoseconds) one after the other, each launched when the one before was done."""
    pace, now_ns = LaunchPacing(full_rows=8), 1
    for rows, service_ns in in_flight_batches:
        pace.launched(rows, now_ns, now_ns)
        now_ns += service_ns
        pace.completed(now_ns)
    return pace


def test_no_delay_without_batches_in_flight_or_measurements() -> None:
    assert paced((4, 1000 * US)).pull_ns(0) == 0
    pace = LaunchPacing(full_rows=8)
    pace.launched(4, 5_000 * US, 5_000 * US)
    assert pace.pull_ns(0) == 5_000 * US - LEAD_NS


def test_the_next_batch_is_pulled_shortly_before_the_expected_end() -> None:
    pace = paced((4, 1000 * US))
    pace.launched(4, 9_000 * US, 9_000 * US)
    assert pace.pull_ns(0) == 10_000 * US - LEAD_NS


def test_batches_queue_on_the_device() -> None:
    pace = paced((4, 1000 * US))
    pace.launched(4, 9_000 * US, 9_000 * US)
    pace.launched(4, 9_100 * US, 9_100 * US)
    assert pace.pull_ns(0) == 11_000 * US - LEAD_NS


def test_the_time_of_a_batch_counts_from_the_end_of_the_one_before() -> None:
    pace = LaunchPacing(full_rows=8)
    pace.launched(4, 1_000 * US, 1_000 * US)
    pace.launched(4, 1_100 * US, 1_100 * US)
    pace.completed(2_000 * US)
    pace.completed(3_000 * US)
    pace.launched(4, 9_000 * US, 9_000 * US)
    assert pace.pull_ns(0) == 10_000 * US - LEAD_NS


def test_time_to_fill_is_allowed_for_by_rows_that_wait() -> None:
    pace = paced((4, 1000 * US))
    pace._fill_ns = 0.0
    pace.launched(4, 9_000 * US, 9_040 * US)
    assert pace.pull_ns(3) == 10_040 * US - LEAD_NS - 30 * US


def test_a_full_batch_is_never_delayed() -> None:
    pace = paced((4, 1000 * US))
    pace.launched(4, 9_000 * US, 9_000 * US)
    assert pace.pull_ns(8) == 0
    assert pace.pull_ns(7) > 0


@pytest.mark.parametrize(("rows", "expected_us"), [(2, 0), (4, 1000), (6, 1000), (8, 1500), (100, 1500)])
def test_unknown_sizes_use_the_next_smaller_size(rows: int, expected_us: int) -> None:
    pace = paced((8, 1500 * US), (4, 1000 * US))
    pace.launched(rows, 9_000 * US, 9_000 * US)
    assert pace.pull_ns(0) == (9_000 + expected_us) * US - LEAD_NS


def test_new_measurements_move_the_estimate_and_failures_do_not() -> None:
    pace = paced((4, 1000 * US), (4, 2000 * US))
    pace.launched(4, 8_000 * US, 8_000 * US)
    pace.completed(0)
    pace.launched(4, 9_000 * US, 9_000 * US)
    assert pace.pull_ns(0) == (9_000 + 1250) * US - LEAD_NS


class Patient(LaunchPacing):
    """Would wait for an hour."""

    def pull_ns(self, waiting_rows: int) -> int:
        return 3_600_000_000_000 if self._open and waiting_rows < self._full_rows else 0


def patient_bench(model: FakeOverlapped) -> tuple[Bench, list[Caller]]:
    """An instance with one flight in the air, which holds back the three requests in the queue."""
    bench = Bench(model, BatchPolicy(4), pace=Patient(4))
    bench.log_pulls()
    first = bench.submit(1)
    model.wait_for("finishing 0")
    return bench, first + bench.submit(2) + bench.submit(3) + bench.submit(4)


def test_a_delayed_pull_happens_when_a_batch_ends() -> None:
    model = FakeOverlapped(manual=True)
    bench, callers = patient_bench(model)
    assert "begin 1" not in model.log
    model.land(2)
    for value, caller in enumerate(callers, start=1):
        answer = caller.answer()
        assert not isinstance(answer, Exception)
        assert answer.outputs["y"].tolist() == [[2.0 * value] * 2]
    bench.close()
    assert model.batches == [[1], [2, 3, 4]]
    assert "pull busy" not in model.log, "the instance pulled while a batch was in flight"


def test_members_of_a_failed_batch_are_not_held_back() -> None:
    model = FakeOverlapped(depth=3, manual=True)
    bench = Bench(model, BatchPolicy(4), pace=Patient(4))
    spoilt = bench.submit(1, RAISES["finish"])
    model.wait_for("finishing 0")
    model.land()
    model.wait_for("launch 1", "launch 2")
    model.land(2)
    assert not isinstance(spoilt[0].answer(), Exception)
    bench.close()


def test_closing_and_death_do_not_wait_for_the_time_to_pull() -> None:
    model = FakeOverlapped(manual=True)
    bench, callers = patient_bench(model)
    bench.close()
    assert not [each for each in callers if isinstance(each.answer(), Exception)]

    model = FakeOverlapped(manual=True)
    bench = Bench(model, BatchPolicy(4), pace=Patient(4))
    (deadly,) = bench.submit(DIES["finish"])
    model.wait_for("finishing 0")
    model.land()
    assert isinstance(deadly.answer(), Exception)
    bench.close()
    assert len(bench.exits) == 1
