"""The latency table: exact statistics, robust against outliers, fast after a change, rising with the rows."""

from __future__ import annotations

import random
import statistics

import numpy as np
import pytest
from headrace.inference.scheduling.latency_table import RUN, WINDOW, LatencyTable
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.waiting import on_threads

SIZES = st.integers(1, 256)
TIMES = st.integers(1, 10**10)
OBSERVATIONS = st.lists(st.tuples(SIZES, TIMES), max_size=300)


def observe_all(profile: LatencyTable, rows: int, times_ns: list[int]) -> None:
    for time_ns in times_ns:
        profile.observe(rows, time_ns)


def around(seed: int, middle_ns: int, count: int) -> list[int]:
    """Times within a tenth of `middle_ns`."""
    rng = random.Random(seed)
    return [int(middle_ns * rng.uniform(0.9, 1.1)) for _ in range(count)]


def in_turn(seed: int, count: int) -> list[int]:
    """Times of a millisecond, short and long in turn: no two in a row are beyond the same quartile."""
    rng = random.Random(seed)
    return [rng.randrange(910_000, 990_000) + 100_000 * (index % 2) for index in range(count)]


def test_a_new_model_has_no_latencies() -> None:
    profile = LatencyTable()
    assert (profile.estimate_ns(1), profile.promise_ns(8), profile.entries(), profile.table()) == (0, 0, [], [])
    assert profile.summary() == []


def test_median_and_percentile_of_observed_times() -> None:
    profile = LatencyTable()
    times = list(range(1000, 1000 + WINDOW))
    random.Random(3).shuffle(times)
    observe_all(profile, 4, times)
    (entry,) = profile.entries()
    assert (entry.rows, entry.observations) == (4, WINDOW)
    assert entry.median_ns == int(statistics.median(times))
    assert entry.p95_ns == sorted(times)[60]
    assert profile.estimate_ns(4) <= profile.promise_ns(4)


@given(OBSERVATIONS)
def test_estimates_rise_with_the_rows_and_promises_are_no_shorter(seen: list[tuple[int, int]]) -> None:
    profile = LatencyTable()
    for rows, time_ns in seen:
        profile.observe(rows, time_ns)
    estimates = [profile.estimate_ns(rows) for rows in range(1, 300)]
    promises = [profile.promise_ns(rows) for rows in range(1, 300)]
    assert estimates == sorted(estimates)
    assert promises == sorted(promises)
    assert all(estimate <= promise for estimate, promise in zip(estimates, promises, strict=True))
    if seen:
        shortest, longest = min(time_ns for _, time_ns in seen), max(time_ns for _, time_ns in seen)
        largest = max(rows for rows, _ in seen)
        # Scaling after a change keeps within what was seen; each change scales by one ratio at the most.
        assert promises[largest - 1] <= longest * max(1, longest // shortest) ** (len(seen) // RUN)
        assert estimates[0] >= 0


@given(OBSERVATIONS)
def test_the_curve_interpolates_measured_sizes(seen: list[tuple[int, int]]) -> None:
    """Reads after each batch or only at the end leave the same times."""
    read_often, read_once = LatencyTable(), LatencyTable()
    for rows, time_ns in seen:
        read_often.observe(rows, time_ns)
        read_once.observe(rows, time_ns)
        assert read_often.estimate_ns(rows) > 0
    assert read_often.entries() == read_once.entries()
    assert sum(entry.observations for entry in read_often.entries()) == len(seen)


@given(st.integers(0, 2**32), st.integers(10, 1000))
@example(5523, 10)  # a run of eight beyond the quartile, while outliers of both rounds were mixed
def test_outliers_do_not_move_the_median_and_few_not_the_promise(seed: int, factor: int) -> None:
    profile, rng = LatencyTable(), random.Random(seed)
    times = in_turn(seed, WINDOW)  # no run of eight: three outliers make one of seven at most
    observe_all(profile, 8, times)
    outliers = rng.sample(range(WINDOW), 3)
    observe_all(profile, 8, [time_ns * (factor if index in outliers else 1) for index, time_ns in enumerate(times)])
    assert 800_000 <= profile.estimate_ns(8) <= 1_100_000
    assert profile.promise_ns(8) <= 1_100_000
    # A third of the next times are outliers: the median stands. The first is short, which ends a run of the times before.
    observe_all(profile, 8, [time_ns * (factor if index % 3 == 1 else 1) for index, time_ns in enumerate(times[:40])])
    assert profile.estimate_ns(8) <= 1_100_000


@given(st.integers(0, 2**32), st.sampled_from([0.25, 0.5, 2.0, 10.0]), st.integers(1, 3 * WINDOW))
@example(1628318423, 0.5, 3)  # the last of the times before the change began a run by chance
@example(1311774754, 10.0, 7)  # a run of seven before the change
@example(4191987201, 0.25, 16)  # runs by chance before the change and over its start
def test_a_lasting_change_is_followed_within_eight_batches(seed: int, factor: float, before: int) -> None:
    profile = LatencyTable()
    observe_all(profile, 16, in_turn(seed, before))
    observe_all(profile, 16, around(seed + 1, int(1_000_000 * factor), RUN))
    low, high = 0.9 * factor * 1_000_000 - 1, 1.1 * factor * 1_000_000 + 1
    assert low <= profile.estimate_ns(16) <= high
    assert low <= profile.promise_ns(16) <= high


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_sizes_that_are_not_run_follow_a_change_of_the_machine(factor: float) -> None:
    """The accuracy after 32 times varies: of 250 seeds the farthest was off by a third, one in many thousands by a half."""
    for seed in range(40):
        profile, rng = LatencyTable(), random.Random(seed)
        for rows in range(1, 65):
            observe_all(profile, rows, around(seed + rows, 100_000 * rows, 20))
        for _ in range(4 * RUN):  # sizes of every second number of rows, many of them once or not at all
            rows = rng.randrange(2, 65, 2)
            observe_all(profile, rows, around(rng.randrange(2**32), int(100_000 * rows * factor), 1))
        for rows in (9, 21, 33, 63):
            assert profile.estimate_ns(rows) == pytest.approx(100_000 * rows * factor, rel=0.4), seed


def test_estimates_are_linear_between_sizes_and_too_long_beyond() -> None:
    profile = LatencyTable()
    profile.seed({4: [1000], 8: [1800], 32: [4200]})
    assert [profile.estimate_ns(rows) for rows in (1, 4, 5, 6, 8, 20, 32, 64)] == [
        1000, 1000, 1200, 1400, 1800, 3000, 4200, 8400,
    ]  # fmt: skip


@given(st.dictionaries(st.integers(1, 40), st.integers(1, 10**9), max_size=8), st.integers(1, 64))
def test_the_estimates_of_all_sizes_are_those_of_each(measured_ns: dict[int, int], max_rows: int) -> None:
    profile = LatencyTable()
    profile.seed({rows: [time_ns] for rows, time_ns in measured_ns.items()})
    sizes = range(max_rows + 1)
    for every_ns, of_one in ((profile.estimates_ns, profile.estimate_ns), (profile.promises_ns, profile.promise_ns)):
        differences = every_ns(max_rows) - np.array([of_one(rows) for rows in sizes])
        assert np.abs(differences).max() <= 1, "the last bit of an interpolation"


def test_larger_batches_are_never_estimated_faster() -> None:
    profile = LatencyTable()
    observe_all(profile, 4, [1000] * 3)
    profile.seed({8: [600]})
    assert profile.estimate_ns(4) == profile.estimate_ns(8) == 900
    assert [entry.median_ns for entry in profile.entries()] == [1000, 600]


def test_observed_batches_replace_seeds_and_not_the_reverse() -> None:
    profile = LatencyTable()
    profile.seed({1: [100, 101, 102], 2: [], 4: [200]})
    assert [(row["rows"], row["source"]) for row in profile.table()] == [(1, "load"), (4, "load")]
    observe_all(profile, 1, [300] * 4)
    assert profile.entries()[0].median_ns == 300
    profile.seed({1: [7], 8: [900]})
    assert [(row["rows"], row["median_us"], row["source"], row["observations"]) for row in profile.table()] == [
        (1, 0.3, "requests", 4),
        (4, 0.2, "load", 0),
        (8, 0.9, "load", 0),
    ]


def test_the_summary_is_bounded() -> None:
    profile = LatencyTable()
    for rows in range(1, 401):
        profile.observe(rows, rows * 1000)
    assert [rows for rows, _, _ in profile.summary()] == [1, 2, 4, 8, 16, 32, 64, 128, 256, 400]
    assert [median_ns for _, median_ns, _ in profile.summary()][-2:] == [256_000, 400_000]


def test_many_threads_may_observe_and_read() -> None:
    profile = LatencyTable()

    def observe_and_read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(3000):
            profile.observe(rng.randrange(1, 20), rng.randrange(1, 10**6))
            assert profile.estimate_ns(5) <= profile.promise_ns(30)
            profile.entries()

    on_threads(observe_and_read, range(4))
    assert sum(entry.observations for entry in profile.entries()) == 12_000


def test_times_are_separate_for_each_number_of_busy_instances() -> None:
    profile = LatencyTable()
    profile.seed({1: [100_000], 8: [400_000]})
    profile.seed({1: [150_000], 8: [800_000]}, 2)
    assert [profile.estimate_ns(8, instances) for instances in (1, 2, 3, 4, 100)] == [400_000] + [800_000] * 4
    observe_all(profile, 8, [500_000] * 30)
    assert [profile.estimate_ns(8, instances) for instances in (1, 2)] == [500_000, 800_000]
    assert [(row["instances"], row["rows"], row["source"]) for row in profile.table()] == [
        (1, 1, "load"),
        (1, 8, "requests"),
        (2, 1, "load"),
        (2, 8, "load"),
    ]


def test_without_an_instance_count_the_recent_mean_applies() -> None:
    profile = LatencyTable()
    profile.seed({4: [100_000]})
    profile.seed({4: [300_000]}, 2)
    assert (profile.estimate_ns(4), profile.promise_ns(4)) == (100_000, 100_000)
    for _ in range(20):
        profile.observe(4, 300_000, 2)
    assert (profile.estimate_ns(4), profile.promise_ns(4)) == (300_000, 300_000)
    for _ in range(20):
        profile.observe(4, 100_000, 1)
    assert (profile.estimate_ns(4), profile.promise_ns(4)) == (100_000, 100_000)


def test_measurements_of_a_few_sizes_scale_the_others() -> None:
    profile = LatencyTable()
    profile.seed({1: [100_000], 8: [400_000], 16: [700_000]})
    profile.seed({1: [200_000], 8: [800_000]}, 2)
    assert profile.estimate_ns(16, 2) == 1_400_000
    assert [entry.rows for entry in profile.entries() if entry.instances == 2] == [1, 8], "16 rows are unmeasured"


def test_a_new_instance_count_converges_within_eight_batches() -> None:
    profile = LatencyTable()
    profile.seed({rows: [100_000 * rows] * 4 for rows in (1, 2, 4, 8, 16)})
    for index in range(RUN):
        rows = (2, 4, 8)[index % 3]
        profile.observe(rows, 250_000 * rows, 3)
    for rows in (1, 2, 4, 8, 16):
        assert profile.estimate_ns(rows, 4) == 250_000 * rows
        assert profile.estimate_ns(rows, 1) == 100_000 * rows
        assert profile.estimate_ns(rows, 2) == 100_000 * rows, "two instances were not measured"


def test_the_first_measurement_applies_to_any_instance_count() -> None:
    profile = LatencyTable()
    profile.observe(4, 100_000, 3)
    assert [profile.estimate_ns(4, instances) for instances in (0, 1, 2, 3, 9)] == [100_000] * 5


@given(st.lists(st.tuples(SIZES, TIMES, st.integers(1, 200)), max_size=200))
def test_estimates_are_monotonic_for_any_instance_count(seen: list[tuple[int, int, int]]) -> None:
    profile = LatencyTable()
    for rows, time_ns, instances in seen:
        profile.observe(rows, time_ns, instances)
    for instances in (0, 1, 2, 5, 64, 1000):
        estimates = [profile.estimate_ns(rows, instances) for rows in range(1, 260, 7)]
        promises = [profile.promise_ns(rows, instances) for rows in range(1, 260, 7)]
        assert estimates == sorted(estimates)
        assert all(estimate <= promise for estimate, promise in zip(estimates, promises, strict=True))
    assert sum(entry.observations for entry in profile.entries()) == len(seen)
    again = LatencyTable()
    for instances, times_ns in profile.times().items():
        again.seed(times_ns, instances, "stored")
    assert again.times() == profile.times()
    assert {(entry.instances, entry.rows) for entry in again.entries()} == {
        (entry.instances, entry.rows) for entry in profile.entries()
    }


@pytest.mark.parametrize("instances", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_sizes_that_are_not_run_do_not_drift_with_the_noise_of_those_that_are(seed: int, instances: int) -> None:
    """Calm and disturbed in turn, as beside other processes: slow times come in runs, and go one by one.

    Lognormal noise has no bound: of 300 seeds the farthest was 8 times too long, and there are seeds beyond 10.
    """
    profile, rng = LatencyTable(), random.Random(seed)
    profile.seed({rows: [20_000 + 2500 * rows] * 3 for rows in (1, 2, 4, 8, 16, 32, 64)})
    disturbed = 1.0
    for _ in range(4000):
        disturbed = 1 + (disturbed - 1) * 0.9 if rng.random() < 0.97 else rng.uniform(2, 6)
        rows = rng.choice((1, 1, 2, 3, 4))
        profile.observe(rows, int((20_000 + 2500 * rows) * disturbed * rng.lognormvariate(0, 0.3)), instances)
        for large in (8, 64):
            assert profile.estimate_ns(large) < 10 * (20_000 + 2500 * large), "no more than the disturbance itself"
    observe_all(profile, 2, [25_000] * 200)
    observe_all(profile, 4, [30_000] * 200)
    for large in (8, 64):
        assert profile.estimate_ns(large, 1) == pytest.approx(20_000 + 2500 * large, rel=0.3), "and it comes back"
