"""Measured times of a plan, and the buckets and launches chosen from them."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.runtimes.tensorrt import tuning as tensorrt_tuning
from headrace.runtimes.tensorrt.plan import BucketTiming, ProfileRange, TuningResult, buckets
from headrace.runtimes.tensorrt.tuning import exact_rows, latency_us, measured_us, useful_buckets
from hypothesis import given
from hypothesis import strategies as st


def test_the_latency_of_a_batch_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    for took_us, batches, middle in (
        ([5.0, 9.0, 1.0, 7.0, 2.0, 3.0, 4.0, 8.0, 6.0], 9, 5.0),
        ([9_000.0, 1.0], 2, 9_000.0),
    ):
        now_us, created = [0.0], list[int]()

        def fly(took_us: list[float] = took_us, created: list[int] = created, now_us: list[float] = now_us) -> None:
            now_us[0] += 1e6 if not created else took_us[len(created) - 1]
            created.append(1)

        monkeypatch.setattr(tensorrt_tuning, "perf_counter_ns", lambda now_us=now_us: round(now_us[0] * 1000))
        assert latency_us(fly) == pytest.approx(middle)
        assert len(created) == 1 + batches


def test_sizes_that_get_a_bucket() -> None:
    timings = {rows: BucketTiming(us, us) for rows, us in ((1, 99.0), (2, 100.0), (4, 100.0), (8, 106.0), (16, 200.0))}
    assert useful_buckets(timings) == (1, 4, 8, 16)
    assert useful_buckets({4: BucketTiming(1, 1)}) == (4,)


@given(st.lists(st.integers(1, 300), min_size=1, unique=True), st.randoms(use_true_random=False))
def test_every_batch_size_has_a_bucket(found: list[int], random: Any) -> None:
    timings = {rows: BucketTiming(random.uniform(1, 100), random.uniform(1, 100)) for rows in found}
    useful = useful_buckets(timings)
    exact = exact_rows(useful, timings)
    choice = TuningResult(useful, frozenset(), timings, exact)
    assert useful[-1] == max(found)
    assert not exact & set(useful)
    for count in range(1, max(found) + 1):
        run = choice.padded(count)
        assert run == count if count in exact else run in useful and run >= count


def test_rows_between_buckets_are_interpolated() -> None:
    timings = {4: BucketTiming(100, 120), 8: BucketTiming(200, 220)}
    # Plain: 5 rows 145, 6 rows 170, 7 rows 195; padded to 8: 200, less what it must be worth.
    assert exact_rows((4, 8), timings) == {5, 6}


def test_finer_buckets_are_within_the_profiles() -> None:
    whole = [{"x": ProfileRange((1, 3), (8, 3), (100, 3))}]
    assert buckets(whole, 100, fine=True) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    assert buckets(whole, 9, fine=True) == (1, 2, 4, 8, 9)
    assert buckets(whole, 100) == (1, 2, 4, 8, 16, 32, 64, 100)


@pytest.mark.parametrize(("batch_us", "calls"), [(10.0, 1 + 1 + 4 * 8), (9_000.0, 1 + 1 + 2), (50_000.0, 1 + 1 + 1)])
def test_slow_batches_are_measured_less_often(monkeypatch: pytest.MonkeyPatch, batch_us: float, calls: int) -> None:
    now_us, created = [0.0], []

    def queue() -> None:
        created.append(1)
        now_us[0] += batch_us

    monkeypatch.setattr(tensorrt_tuning, "perf_counter_ns", lambda: int(now_us[0] * 1000))
    assert measured_us(queue, lambda: None) == batch_us
    assert len(created) == calls
