from itertools import pairwise

import numpy as np
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.quantization.calibration import TensorHistogram
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.examples import examples

METHODS = ("minmax", "percentile", "entropy", "mse", "tensorrt")
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
TENSORS = hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=40), elements=FINITE)


def _range(values, method, percentile=99.99):
    histogram = TensorHistogram("x", method, percentile)
    histogram.add(np.asarray(values))
    return histogram.range()


@given(TENSORS, st.lists(st.integers(0, 10_000), max_size=5))
def test_minmax_is_exact_and_includes_zero_for_any_batches(values, cuts):
    histogram = TensorHistogram("x", "minmax")
    for piece in np.split(values.ravel(), sorted(cut % (values.size + 1) for cut in cuts)):
        histogram.add(piece)
    assert histogram.range() == (min(float(values.min()), 0.0), max(float(values.max()), 0.0))


@settings(max_examples=examples(40), deadline=None)
@given(TENSORS, st.sampled_from(METHODS), st.integers(0, 10_000))
def test_batches_do_not_change_a_range(values, method, cut):
    pieces = TensorHistogram("x", method)
    for piece in np.split(values.ravel(), [cut % (values.size + 1)]):
        pieces.add(piece)
    assert pieces.range() == _range(values, method)


@settings(max_examples=examples(60), deadline=None)
@given(TENSORS, st.sampled_from(METHODS))
def test_no_range_is_wider_than_minmax_and_each_holds_zero(values, method):
    low, high = _range(values, method)
    least, most = _range(values, "minmax")
    assert least <= low <= 0 <= high <= most
    assert (low < high) == bool(np.any(values))


@settings(max_examples=examples(40), deadline=None)
@given(TENSORS, st.lists(st.floats(50.1, 100), min_size=2, max_size=4))
def test_a_higher_percentile_is_never_narrower(values, percentiles):
    ranges = [_range(values, "percentile", percentile) for percentile in sorted(percentiles)]
    for (low, high), (next_low, next_high) in pairwise(ranges):
        assert next_low <= low
        assert next_high >= high
    assert _range(values, "percentile", 100.0) == _range(values, "minmax")


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 2**32 - 1), st.floats(50.5, 99.9))
def test_a_percentile_covers_its_share(seed, percentile):
    values = np.random.default_rng(seed).standard_normal(5000).astype(np.float32)
    _, high = _range(np.abs(values), "percentile", percentile)
    inside = (np.abs(values) <= high).mean() * 100
    # A bin is 1/256 of its value wide at most.
    assert percentile - 0.05 <= inside <= percentile + 1


@pytest.mark.parametrize(("method", "outlier", "most"), [
    ("percentile", 1e6, 5), ("entropy", 1e6, 6), ("tensorrt", -1000, 6), ("mse", 60, 45), ("mse", -60, 45),
])  # fmt: skip
def test_one_huge_value_is_clipped(method, outlier, most):
    values = np.append(np.random.default_rng(0).standard_normal(100_000), outlier).astype(np.float32)
    low, high = _range(values, method)
    assert 2 < max(-low, high) < most


def test_the_range_minimizes_the_squared_error():
    values = np.random.default_rng(1).laplace(size=50_000).astype(np.float32)

    def error(threshold):
        step = threshold / 127
        return np.mean((values - np.clip(np.rint(values / step), -127, 127) * step) ** 2)

    low, high = _range(values, "mse")
    threshold = max(-low, high)
    best = min(error(t) for t in np.linspace(1, np.abs(values).max(), 400))
    assert error(threshold) <= 1.02 * best
    assert error(threshold) < 0.9 * error(np.abs(values).max())


def test_entropy_keeps_uniform_values_and_cuts_a_thin_tail():
    random = np.random.default_rng(2)
    assert _range(random.uniform(-1, 1, 100_000), "entropy") == pytest.approx((-1, 1), rel=0.02)
    tail = np.concatenate([random.uniform(-1, 1, 1_000_000), random.uniform(1, 20, 60)])
    assert 0.9 < _range(tail, "entropy")[1] < 4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("values", "expected"), [
    ([], (0, 0)), (np.zeros(7), (0, 0)), ([-0.0], (0, 0)), (np.full(50, 1.0), (0, 1)), (np.full(50, -3.5), (-3.5, 0)),
    ([3e38, -3e38], (-3e38, 3e38)), ([1e-45], (0, 1e-45)), (np.arange(17), (0, 16)), (np.array([True, False]), (0, 1)),
], ids=str)  # fmt: skip
def test_degenerate_tensors(values, expected, method):
    assert _range(values, method) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_nan_and_infinity_are_reported_with_their_tensor(value, method):
    with pytest.raises(BuildError, match=r"tensor 'x' has NaN or infinite values"):
        _range([1.0, value, 2.0], method)
