"""Durations in buckets, for both kinds of histogram that Prometheus knows.

A classic histogram has a handful of bounds, a native one many that grow by the same factor. Both are sums over the same fine
buckets, whose bounds are all of theirs, so that a duration is sorted once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.core.clock import NS_PER_S

# Seconds. The same for every model and phase, so that histograms add up over replicas.
BUCKETS_S: tuple[float, ...] = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
# Prometheus calls it the schema: 2 ** SCHEMA native buckets for each doubling, so each is 9 % wider than the one before.
SCHEMA = 3
_PER_DOUBLING = 1 << SCHEMA
# Native bucket i ends at 2 ** (i / 8) s. What ends before the first, about a microsecond, counts as zero.
FIRST_NATIVE = -20 * _PER_DOUBLING + 1
ZERO_S = 2.0**-20
_LAST_NATIVE = 10 * _PER_DOUBLING + 1  # beyond 17 minutes all is one

_CLASSIC_NS = np.rint(np.array(BUCKETS_S) * NS_PER_S)
_NATIVE_NS = 2.0 ** (np.arange(FIRST_NATIVE - 1, _LAST_NATIVE) / _PER_DOUBLING) * NS_PER_S
_BOUNDS_NS = np.union1d(_CLASSIC_NS, _NATIVE_NS)
_FINE = len(_BOUNDS_NS) + 1
_LOWER_NS = np.insert(_BOUNDS_NS, 0, 0.0)
_UPPER_NS = np.append(_BOUNDS_NS, np.inf)
# For each fine bucket, the classic and the native one that it lies in.
_CLASSIC_OF = np.searchsorted(_CLASSIC_NS, _UPPER_NS)
_NATIVE_OF = np.searchsorted(_NATIVE_NS, _UPPER_NS)

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One traced request, as an example of a bucket.

    Attributes:
        trace_id: 32 hexadecimal digits.
        value_ns: how long it took.
        time_s: when, in seconds since 1970.
    """

    trace_id: str
    value_ns: int
    time_s: float


class Histogram:
    """Durations in buckets; `observe` is cheap, `fold` does the work.

    Not thread-safe: its owner's lock guards it.

    Attributes:
        fine: how many durations lie in each fine bucket, as far as they are folded.
        sum_ns: of all that are folded.
        exemplars: the last one of each classic bucket.
    """

    __slots__ = ("_pending_ns", "_pending_weights", "exemplars", "fine", "sum_ns")

    def __init__(self) -> None:
        self._pending_ns: list[int] = []
        self._pending_weights: list[int] = []
        self.fine: Counts = np.zeros(_FINE, dtype=np.int64)
        self.sum_ns = 0
        self.exemplars: dict[int, Exemplar] = {}

    def observe(self, value_ns: int, weight: int = 1) -> None:
        """`weight` requests took `value_ns` each."""
        self._pending_ns.append(value_ns)
        self._pending_weights.append(weight)

    def observe_each(self, values_ns: list[int]) -> None:
        """One request each."""
        self._pending_ns.extend(values_ns)
        self._pending_weights.extend([1] * len(values_ns))

    def exemplify(self, value_ns: int, trace_id: str) -> None:
        """A request that took `value_ns`, and is observed besides, was traced."""
        place = int(np.searchsorted(_CLASSIC_NS, value_ns))
        self.exemplars[place] = Exemplar(trace_id, value_ns, time.time())

    @property
    def pending(self) -> int:
        """Observations that are not folded yet."""
        return len(self._pending_ns)

    def fold(self) -> None:
        """Sort what was observed into the buckets (upper bounds included, as Prometheus counts)."""
        if not self._pending_ns:
            return
        values = np.array(self._pending_ns, dtype=np.int64)
        weights = np.array(self._pending_weights, dtype=np.int64)
        places = np.searchsorted(_BOUNDS_NS, values, side="left")
        self.fine += np.bincount(places, weights=weights, minlength=_FINE).astype(np.int64)
        self.sum_ns += int((values * weights).sum())
        self._pending_ns.clear()
        self._pending_weights.clear()

    def add(self, other: Histogram) -> None:
        """Take in what another one has folded."""
        self.fine += other.fine
        self.sum_ns += other.sum_ns
        self.exemplars |= other.exemplars

    @property
    def count(self) -> int:
        """How many durations are folded."""
        return int(self.fine.sum())

    @property
    def counts(self) -> Counts:
        """By classic bucket, the last one without an upper bound."""
        return _summed(_CLASSIC_OF, self.fine, len(BUCKETS_S) + 1)

    @property
    def native(self) -> Counts:
        """By native bucket: the first holds what counts as zero, the second is number FIRST_NATIVE."""
        return _summed(_NATIVE_OF, self.fine, len(_NATIVE_NS) + 1)

    def count_to(self, bound_ns: int) -> int:
        """How many durations are at most `bound_ns`, which must be the bound of a fine bucket: a classic or a native one.

        Raises:
            ValueError: it is no bound.
        """
        place = int(np.searchsorted(_BOUNDS_NS, bound_ns))
        if place == len(_BOUNDS_NS) or _BOUNDS_NS[place] != bound_ns:
            raise ValueError(f"{bound_ns} ns is not the bound of a bucket")
        return int(self.fine[: place + 1].sum())

    def quantile_s(self, quantile: float) -> float | None:
        """What the share `quantile` of all durations keeps to, within 9 %; None if there are none."""
        total = self.count
        if not total:
            return None
        place = int(np.searchsorted(self.fine.cumsum(), max(quantile * total, 1), side="left"))
        return float(_BOUNDS_NS[min(place, len(_BOUNDS_NS) - 1)]) / NS_PER_S


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
    found: list[float] = (lower + (upper - lower) * share.clip(0, 1)).tolist()
    return found


def _summed(places: npt.NDArray[np.intp], fine: Counts, length: int) -> Counts:
    return np.bincount(places, weights=fine, minlength=length).astype(np.int64)
