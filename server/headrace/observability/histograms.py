"""Histograms of durations: raw nanoseconds in fine buckets, of which the classic and the native buckets of Prometheus are sums.

A classic histogram has a handful of bounds. A native one has many, which grow by a constant factor. Both are sums over the same
fine buckets, whose bounds include all of theirs, so each duration is sorted once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from headrace.core.clock import NS_PER_S

# Seconds. The same for every model and phase, so that histograms add up over replicas.
BUCKETS_S: tuple[float, ...] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# Prometheus calls it the schema: 2 ** SCHEMA native buckets for each doubling, so each is 9 % wider than the one before.
SCHEMA = 3
_PER_DOUBLING = 1 << SCHEMA
# Native bucket i ends at 2 ** (i / 8) s. Durations below the first, about a microsecond, count as zero.
FIRST_NATIVE = -20 * _PER_DOUBLING + 1
ZERO_S = 2.0**-20
_LAST_NATIVE = 10 * _PER_DOUBLING + 1  # longer durations, over 17 minutes, share one bucket

_CLASSIC_NS = np.rint(np.array(BUCKETS_S) * NS_PER_S)
_NATIVE_NS = 2.0 ** (np.arange(FIRST_NATIVE - 1, _LAST_NATIVE) / _PER_DOUBLING) * NS_PER_S
_BOUNDS_NS = np.union1d(_CLASSIC_NS, _NATIVE_NS)
_FINE = len(_BOUNDS_NS) + 1
FINE_BUCKETS = _FINE
"""Number of fine buckets of a `Histogram`."""
_LOWER_NS = np.insert(_BOUNDS_NS, 0, 0.0)
_UPPER_NS = np.append(_BOUNDS_NS, np.inf)
# Index of the classic and of the native bucket that contain each fine bucket.
_CLASSIC_OF = np.searchsorted(_CLASSIC_NS, _UPPER_NS)
_NATIVE_OF = np.searchsorted(_NATIVE_NS, _UPPER_NS)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exemplar:
    """A traced request as the exemplar of a bucket.

    Attributes:
        trace_id: 32 hexadecimal digits.
        value_ns: duration of the request.
        time_s: time of the observation, in seconds since 1970.
    """

    trace_id: str
    value_ns: int
    time_s: float


class Histogram:
    """Durations in buckets.

    Not thread-safe: its owner's lock guards it.

    Args:
        fine: int64[FINE_BUCKETS] that holds the counts by fine bucket; None for zeros.

    Attributes:
        fine: number of durations in each fine bucket.
        sum_ns: sum of all durations.
        exemplars: the last one of each classic bucket, by index of the bucket.
    """

    __slots__ = ("exemplars", "fine", "sum_ns")

    def __init__(self, fine: Counts | None = None) -> None:
        self.fine: Counts = np.zeros(_FINE, dtype=np.int64) if fine is None else fine
        self.sum_ns = 0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, values_ns: ArrayLike, weights: ArrayLike = 1) -> None:
        """Add durations to the buckets, which include their upper bounds as in Prometheus. Cheap for many at a time.

        Args:
            values_ns: the durations.
            weights: number of requests with each of them.
        """
        values = np.asarray(values_ns, dtype=np.int64)
        observe_each([self], [len(values)], values, np.broadcast_to(np.asarray(weights, dtype=np.int64), values.shape))

    def exemplify(self, value_ns: int, trace_id: str) -> None:
        """Set the exemplar of the bucket of `value_ns`; the duration itself is counted by `observe`."""
        place = int(np.searchsorted(_CLASSIC_NS, value_ns))
        self.exemplars[place] = Exemplar(trace_id, value_ns, time.time())

    def add(self, other: Histogram) -> None:
        """Add the durations of another histogram."""
        self.fine += other.fine
        self.sum_ns += other.sum_ns
        self.exemplars |= other.exemplars

    @property
    def count(self) -> int:
        """Number of durations."""
        return int(self.fine.sum())

    @property
    def counts(self) -> Counts:
        """Number of durations in each classic bucket; the last bucket has no upper bound."""
        return _summed(_CLASSIC_OF, self.fine, len(BUCKETS_S) + 1)

    @property
    def native(self) -> Counts:
        """Number of durations in each native bucket: first the zero bucket, then from bucket FIRST_NATIVE on."""
        return _summed(_NATIVE_OF, self.fine, len(_NATIVE_NS) + 1)

    def count_to(self, bound_ns: int) -> int:
        """Return the number of durations up to a bound in nanoseconds: exact at bounds of buckets, else within 9 % of it."""
        return int(self.fine[: int(np.searchsorted(_BOUNDS_NS, bound_ns, side="right"))].sum())

    def quantile_s(self, quantile: float) -> float | None:
        """Estimate a quantile (0 to 1) in seconds, within 9 %; None without durations."""
        total = self.count
        if not total:
            return None
        place = int(np.searchsorted(self.fine.cumsum(), max(quantile * total, 1), side="left"))
        return float(_BOUNDS_NS[min(place, len(_BOUNDS_NS) - 1)]) / NS_PER_S


def observe_each(histograms: Sequence[Histogram], counts: Sequence[int], values_ns: Counts, weights: Counts) -> None:
    """Add durations to several histograms at once: NumPy takes twice as long to do it for one after the other.

    Args:
        histograms: the histograms.
        counts: number of durations of each histogram.
        values_ns: int64[n], the durations of the first histogram first.
        weights: int64[n], number of requests with each of them.
    """
    places = np.searchsorted(_BOUNDS_NS, values_ns) + _FINE * np.repeat(np.arange(len(counts)), counts)
    fine = np.bincount(places, weights, len(counts) * _FINE).astype(np.int64).reshape(len(counts), _FINE)
    sums_ns = np.concatenate(([0], np.cumsum(values_ns * weights)))[np.cumsum((0, *counts))].tolist()
    for histogram, added, (before_ns, sum_ns) in zip(histograms, fine, pairwise(sums_ns), strict=True):
        histogram.fine += added
        histogram.sum_ns += sum_ns - before_ns


def quantiles_ns(fine: Counts, quantiles: Sequence[float]) -> list[float]:
    """Estimate quantiles from counts by fine bucket, linear within a bucket, as Prometheus' `histogram_quantile` does.

    Args:
        fine: counts by fine bucket.
        quantiles: 0 to 1.

    Returns:
        Nanoseconds, within 9 %; NaN if there are no counts.
    """
    cumulative = fine.cumsum()
    total = int(cumulative[-1])
    if not total:
        return [float("nan")] * len(quantiles)
    ranks = np.asarray(quantiles) * total
    places = np.minimum(np.searchsorted(cumulative, ranks, side="left"), len(_BOUNDS_NS) - 1)
    upper, lower = _BOUNDS_NS[places], _LOWER_NS[places]
    share = (ranks - (cumulative[places] - fine[places])) / np.maximum(fine[places], 1)
    values_ns: list[float] = (lower + (upper - lower) * share.clip(0, 1)).tolist()
    return values_ns


def _summed(places: npt.NDArray[np.intp], fine: Counts, length: int) -> Counts:
    return np.bincount(places, weights=fine, minlength=length).astype(np.int64)
