"""Native buckets have the bounds of their numbers, and quantiles are exact within the width of a bucket."""

from __future__ import annotations

import math

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S
from headrace.observability.histograms import BUCKETS_S, FIRST_NATIVE, SCHEMA, ZERO_S, Histogram
from hypothesis import given
from hypothesis import strategies as st

GROWTH = 2 ** (2**-SCHEMA)


def filled(values: list[int]) -> Histogram:
    histogram = Histogram()
    histogram.observe(values)
    return histogram


@given(st.integers(0, 1000 * NS_PER_S))
def test_a_duration_is_counted_in_the_native_bucket_of_its_logarithm(value_ns: int) -> None:
    (position,) = np.flatnonzero(filled([value_ns]).native)
    value_s = value_ns / NS_PER_S
    if position == 0:
        assert value_s <= ZERO_S
    else:
        upper_s = GROWTH ** (FIRST_NATIVE + int(position) - 1)
        assert upper_s / GROWTH * (1 - 1e-12) <= value_s <= upper_s * (1 + 1e-12)


@pytest.mark.parametrize("exponent", [-20, -10, -1, 0, 1, 9])
def test_a_power_of_two_ends_its_bucket(exponent: int) -> None:
    value_ns = 2**exponent * NS_PER_S
    if value_ns != int(value_ns):
        value_ns = math.floor(value_ns)
    places = [int(np.flatnonzero(filled([int(value)]).native)[0]) for value in (value_ns, value_ns + 1)]
    assert places == [8 * (exponent + 20), 8 * (exponent + 20) + 1]


def test_values_beyond_all_buckets_are_counted() -> None:
    histogram = filled([10**18])
    assert histogram.native[-1] == histogram.counts[-1] == histogram.count == 1


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_both_kinds_count_everything(values: list[int]) -> None:
    histogram = filled(values)
    assert histogram.counts.sum() == histogram.native.sum() == histogram.count == len(values)
    assert histogram.sum_ns == sum(values)


@given(st.lists(st.integers(2000, 10**11), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_never_too_small_and_at_most_a_bucket_too_large(values: list[int], quantile: float) -> None:
    exact_s = sorted(values)[max(math.ceil(quantile * len(values)), 1) - 1] / NS_PER_S
    actual_s = filled(values).quantile_s(quantile)
    assert actual_s is not None
    assert exact_s * (1 - 1e-9) <= actual_s <= exact_s * GROWTH * (1 + 1e-9)


def test_nothing_has_no_quantile() -> None:
    assert Histogram().quantile_s(0.5) is None


def test_the_last_example_of_a_bucket_stays() -> None:
    histogram = Histogram()
    histogram.exemplify(300_000, "a" * 32)
    histogram.exemplify(400_000, "b" * 32)
    histogram.exemplify(10**12, "c" * 32)
    examples = {bucket: example.trace_id for bucket, example in histogram.exemplars.items()}
    assert examples == {BUCKETS_S.index(0.0005): "b" * 32, len(BUCKETS_S): "c" * 32}
