"""Measured compute times of a model version, by rows of a batch and by the number of busy instances.

Each number of rows has a window of recent times; estimates use its median, promises its 95th percentile. These are order
statistics, because a disturbance (garbage collection, another process, a page fault) makes single times many times longer:
close to half of a window may be disturbed without moving its median out of the range of the others (P. J. Huber, E. M.
Ronchetti, Robust Statistics, 2nd ed. 2009: the breakdown point). Smoothed means follow every outlier. Clockwork (A. Gujarati
and others, OSDI 2020) also uses a window of recent times for each model and batch size.

A window alone is slow after a lasting change: its median follows once half of it is new. A run rule, as in control charts
(Western Electric, Statistical Quality Control Handbook, 1956), detects the change: eight times in a row beyond the same
quartile happen by chance once in 4^8 = 65,536. Then the times before the run are dropped. The quartiles are those of the times
before the latest eight, since those of a whole window move with the change before all eight are measured. If the run spans
several numbers of rows, the machine has changed, and numbers of rows that are not run are scaled with those that are.

Between measured numbers of rows the estimate is linear. Above the largest it grows in proportion, below the smallest it is
constant: it overestimates rather than underestimates. If a larger batch measures faster than a smaller one, both get their mean,
weighted by the number of times (pool adjacent violators: R. E. Barlow and others, Statistical Inference under Order
Restrictions, 1972).

A number of rows that is not run keeps its measured times, or follows the others: with an estimate that is too long it might
never be run again.

Instances that share a processor or its memory slow each other down. So there is a table for 1, for 2, for up to 4, 8, 16 ...
busy instances at the start of a batch, including its own. That number is available when a batch is planned. A new table starts
as a copy of the next smaller one. Times are measured at load, and every batch updates them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.core.clock import NS_PER_US
from headrace.core.response_bodies import ProfileRow

WINDOW = 64  # times for each number of rows: the 95th percentile ignores three outliers
RUN = 8
_PROMISED = 0.95
_SORT = 4  # a window is sorted again once a quarter of its times is new
_REDRAW = 8  # the curve is rebuilt once an eighth of the windows has been sorted
_LATELY = 32  # batches from which the pace of a table is computed
_FOLLOWED = 1.25  # change of the pace from which rows that are not run are scaled
_REQUESTS = "requests"
COPIED = "copied"  # from another table: not measured

MeasuredTimes = Mapping[int, Sequence[int]]
"""By rows, nanoseconds."""


class LatencyEntry(NamedTuple):
    """Measurements of one number of rows, for one number of busy instances.

    Attributes:
        rows: rows of the batch.
        median_ns: median of the window.
        p95_ns: 95th percentile of the window.
        observations: number of batches that were run for requests.
        instances: largest number of busy instances of the table.
        source: "load", "stored" (by an earlier process) or, with observations, "requests".
    """

    rows: int
    median_ns: int
    p95_ns: int
    observations: int
    instances: int = 1
    source: str = "load"


class LatencyCurve(NamedTuple):
    """Points between which estimates are interpolated; immutable. The three lists are ascending, of equal length."""

    rows: list[int]
    medians_ns: list[float]
    p95s_ns: list[float]


class Window:
    """The recent times of one number of rows, with statistics as of the last `sort`."""

    def __init__(self, times_ns: Iterable[int], source: str, pace: float = 1.0) -> None:
        self.observations = 0
        self.source = source
        self.seen = 0  # number of the table's latest batch with these rows
        self.replace_times(times_ns)
        self.pace = pace  # pace of the table when these times were measured
        self.anchor_ns = max(self.median_ns, 1) / pace  # median at pace 1

    def replace_times(self, times_ns: Iterable[int]) -> None:
        """Replace all times."""
        self.times_ns = deque(times_ns, WINDOW)
        self.run = 0  # number of latest times in a row above the upper quartile; negative: below the lower one
        self.sort()

    def scale(self, ratio: float) -> None:
        """Multiply the latest times by `ratio`, and drop the others, so that new times soon outweigh them."""
        self.replace_times([max(round(time_ns * ratio), 1) for time_ns in self.last(RUN)])

    def sort(self) -> None:
        """Update the statistics, and count the run again."""
        ordered = sorted(self.times_ns)
        count = len(ordered)
        self.median_ns = (ordered[(count - 1) // 2] + ordered[count // 2]) // 2
        self.p95_ns = ordered[int(_PROMISED * count)]
        self.fresh = 0
        if count > RUN:
            self._set_quartiles(sorted(list(self.times_ns)[:-RUN]), RUN)
            self._count_run()
        elif not self.run:
            self._set_quartiles(ordered)

    def _set_quartiles(self, ordered: list[int], min_count: int = 0) -> None:
        """Store the quartiles, or the shortest and longest of fewer than `min_count` times, whose quartiles vary much."""
        count = len(ordered)
        beyond = count // 4 if count >= min_count else 0
        self.low_ns, self.high_ns = ordered[beyond], ordered[count - 1 - beyond]

    def _count_run(self) -> None:
        self.run = 0
        for time_ns in reversed(self.last(RUN)):
            side = self.side(time_ns)
            if not side or self.run * side < 0:
                break
            self.run += side

    def side(self, time_ns: int) -> int:
        """Return 1 for a time above the upper quartile, -1 for one below the lower quartile, and else 0."""
        return (time_ns > self.high_ns) - (time_ns < self.low_ns)

    def last(self, count: int) -> list[int]:
        """Return the latest `count` times, the newest last."""
        return list(self.times_ns)[-count:]


class LatencyWindows:
    """Times for one number of busy instances.

    Its pace is the median ratio of recent times to the first ones of the same rows. Rows that are not run are scaled by the
    change of the pace since they were run. Each ratio is relative to the same first times: a product of ratios would drift, since
    slow times come in runs more often than quick ones.

    Ownership: guarded by the table's lock, except `curve`, which is replaced and never changed.
    """

    def __init__(self, instances: int) -> None:
        self.instances = instances
        self.windows: dict[int, Window] = {}
        self.curve: LatencyCurve | None = LatencyCurve([], [], [])  # None: rebuilt on the next read
        self._run: list[int] = []  # rows of the last times beyond the same quartiles
        self._side = 0  # 1: that run is above the upper quartiles; -1: below the lower ones
        self._sorted = 0  # windows sorted since the curve was built
        self._batches = 0
        self._pace = 1.0
        self._seeded = False  # True if times were measured before any request
        self._ratios: deque[float] = deque(maxlen=_LATELY)  # of the latest times to the first ones of their rows

    def copy(self, instances: int) -> LatencyWindows:
        """Return a copy for another number of busy instances."""
        other = LatencyWindows(instances)
        other.windows = {rows: Window(window.last(RUN), COPIED) for rows, window in self.windows.items()}
        other.curve, other._seeded = None, True
        return other

    def seed(self, times_ns: MeasuredTimes, source: str) -> None:
        """Add times measured before any request: they replace copied times, and scale the other copied ones."""
        ratios = []
        for rows, measured_ns in times_ns.items():
            window = self.windows.get(rows)
            if not measured_ns or (window is not None and (window.source != COPIED or window.observations)):
                continue
            self.windows[rows] = fresh = Window(measured_ns, source)
            self._seeded = True
            if window is not None:
                ratios.append(fresh.median_ns / max(window.median_ns, 1))
        if ratios:
            ratio = sorted(ratios)[len(ratios) // 2]
            for window in self.windows.values():
                if window.source == COPIED and not window.observations:
                    window.scale(ratio)
                    window.anchor_ns = window.median_ns / window.pace
        self.curve = None

    def observe(self, rows: int, time_ns: int) -> None:
        """Record the compute time of a batch."""
        window = self.windows.get(rows)
        self._batches += 1
        if window is None:
            window = self.windows[rows] = Window([time_ns], _REQUESTS, self._pace)
            window.observations, window.seen = 1, self._batches
            self.curve = None
            return
        if window.source != _REQUESTS:
            self._ratios.append(time_ns / window.anchor_ns)
        elif not self._seeded:  # the first times of requests are the only reference
            self._update_anchor(window, time_ns)
        window.seen, window.pace = self._batches, self._pace
        side = (time_ns > window.high_ns) - (time_ns < window.low_ns)  # `Window.side`, inlined
        if window.run * side < 0:
            window.run = 0
            if len(window.times_ns) <= RUN:  # no run, so the quartiles need not be from before it
                window.sort()
                side = window.side(time_ns)
        window.times_ns.append(time_ns)
        window.observations += 1
        window.fresh += 1
        window.run = window.run + side if side else 0
        count = len(window.times_ns)
        # With one time more than a run the quartiles are of times before it for the first time.
        if window.fresh * _SORT >= count or count == RUN + 1:
            window.sort()
            self._sorted += 1
            if self._sorted * _REDRAW >= len(self.windows):  # the cost of a rebuild grows with the windows
                self.curve = None
        if abs(window.run) >= RUN:
            window.replace_times(window.last(RUN))
            self._run, self.curve = [], None
        elif side:
            self._extend_run(rows, side)
        elif self._run:
            self._run = []
        if not self._batches % _LATELY:
            self._follow(_LATELY)

    def _update_anchor(self, window: Window, time_ns: int) -> None:
        if window.observations >= RUN:
            self._ratios.append(time_ns / window.anchor_ns)
            return
        window.sort()
        window.anchor_ns = max(window.median_ns, 1) / self._pace

    def entries(self) -> list[LatencyEntry]:
        """Return the measurements by rows, ascending."""
        for window in self.windows.values():
            if window.fresh:
                window.sort()
        return [
            LatencyEntry(
                rows,
                window.median_ns,
                window.p95_ns,
                window.observations,
                self.instances,
                _REQUESTS if window.observations else window.source,
            )
            for rows, window in sorted(self.windows.items())
            if window.observations or window.source != COPIED
        ]

    def times(self, max_times: int) -> dict[int, list[int]]:
        """Return the latest `max_times` measured times by rows; without the pace for rows that no request used."""
        return {
            rows: window.last(max_times)
            if window.observations
            else [max(round(time_ns / window.pace), 1) for time_ns in window.last(max_times)]
            for rows, window in sorted(self.windows.items())
            if window.observations or window.source != COPIED
        }

    def draw(self) -> LatencyCurve:
        """Rebuild and return the curve."""
        windows = sorted(self.windows.items())
        weights = [len(window.times_ns) for _, window in windows]
        medians_ns = _rising([window.median_ns for _, window in windows], weights)
        p95s_ns = _rising([window.p95_ns for _, window in windows], weights)
        promises_ns = [max(pair) for pair in zip(medians_ns, p95s_ns, strict=True)]
        self._sorted = 0
        self.curve = curve = LatencyCurve([rows for rows, _ in windows], medians_ns, promises_ns)
        return curve

    def _extend_run(self, rows: int, side: int) -> None:
        """Record a time beyond a quartile, and react if it completes a run over several numbers of rows."""
        if side != self._side:
            self._side, self._run = side, []
        self._run.append(rows)
        if len(self._run) >= RUN:
            self._restart_windows()

    def _restart_windows(self) -> None:
        """Restart the windows of a run over several numbers of rows, and scale the others with them."""
        for rows in dict.fromkeys(self._run):
            window = self.windows[rows]
            window.replace_times(window.last(self._run.count(rows)))
        while len(self._ratios) > RUN:
            self._ratios.popleft()
        self._run, self.curve = [], None
        self._follow(RUN)

    def _follow(self, batches: int) -> None:
        """Scale windows without a time in the latest `batches` batches to the pace of the others."""
        if self._ratios:
            self._pace = sorted(self._ratios)[len(self._ratios) // 2]
        pace = self._pace
        for window in self.windows.values():
            if self._batches - window.seen < batches:
                window.pace = pace
            elif not 1 / _FOLLOWED < pace / window.pace < _FOLLOWED:
                window.scale(pace / window.pace)
                window.pace = pace
                self.curve = None


def _rising(values: Sequence[int], weights: Sequence[int]) -> list[float]:
    """Return the non-decreasing numbers closest to `values` by weighted least squares."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = float(value), weight, 1
        while pools and pools[-1][0] > mean:
            before, heavy, many = pools.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, count = total + heavy, count + many
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def interpolate(measured: list[int], values: list[float], rows: int) -> int:
    """Interpolate a value at `rows`.

    Args:
        measured: measured numbers of rows, ascending.
        values: values at `measured`.
        rows: any number of rows.
    """
    index = bisect_left(measured, rows)
    if index == len(measured):
        return int(values[-1] * rows / measured[-1]) if measured else 0
    if measured[index] == rows or index == 0:
        return int(values[index])
    low, high = measured[index - 1], measured[index]
    return int(values[index - 1] + (values[index] - values[index - 1]) * (rows - low) / (high - low))


def _interpolate_all(measured: list[int], values: list[float], max_rows: int) -> NDArray[np.int64]:
    """Return `interpolate` of 0 to `max_rows` rows."""
    rows = np.arange(max_rows + 1)
    if not measured:
        return np.zeros_like(rows)
    all_ns = np.interp(rows, measured, values)
    all_ns[measured[-1] + 1 :] = values[-1] * rows[measured[-1] + 1 :] / measured[-1]
    return all_ns.astype(np.int64)


_BUSY_SMOOTHING = 8  # batches over which the number of busy instances is smoothed
_TABLES = 8  # for 1, 2, up to 4 ... and for more than 64 busy instances


TAIL = 256  # times of one number of rows for the 95th percentile
_TAIL_MIN = 16
_TAIL_SHARE = 20  # of the times, one in so many may be slow


class TailWindow:
    """The last compute times of one number of rows, and how many of them exceed a bound.

    Attributes:
        times_ns: at most `TAIL`, the newest last.
        slow: number of `times_ns` beyond the bound. The 95th percentile (nearest rank) is within it while this is at most 5 %.
    """

    __slots__ = ("slow", "times_ns")

    def __init__(self, bound_ns: int, times_ns: Iterable[int]) -> None:
        self.times_ns: deque[int] = deque(times_ns, TAIL)
        self.slow = sum(time_ns > bound_ns for time_ns in self.times_ns)


class LatencyTable:
    """Compute times of one version; any thread may call any method.

    Ownership: `_lock` guards every attribute. `_tables` and `_mean_busy` are replaced under it and read without it.

    Args:
        tail_bound_ns: bound of `is_fast`; 0 if that is not called.

    Attributes:
        buckets: rows to which the backend pads batches, ascending; empty if it does not, or if it does not say.
        most_rows: largest number of rows with a measurement; times of more rows are extrapolated.
        stalls: number of times beyond ten times the bound, of one row and of the rows that `is_fast` was called with.
        stall_ns: the last of these times.
    """

    def __init__(self, tail_bound_ns: int = 0) -> None:
        self.tail_bound_ns = tail_bound_ns
        self.stalls = self.stall_ns = 0
        self._tails: dict[int, TailWindow] = {}  # by rows, of those that `is_fast` was called with
        self.buckets: tuple[int, ...] = ()
        self.most_rows = 0
        self._lock = threading.Lock()
        self._first = first = LatencyWindows(1)
        self._one = True  # the first table has all places
        self._tables = (first,) * _TABLES  # by `_table_index` of the busy instances; one table may have several places
        self._mean_busy = 1.0  # smoothed number of busy instances

    def seed(self, measured_ns: MeasuredTimes, instances: int = 1, source: str = "load") -> None:
        """Add times that were measured before any request; numbers of rows with measurements are not changed.

        Args:
            measured_ns: one time or more by rows, in nanoseconds.
            instances: busy instances during the measurement.
            source: source of the times, for `LatencyEntry`.
        """
        with self._lock:
            self._table(instances).seed(measured_ns, source)
            self.most_rows = max(self.most_rows, *(rows for rows, times_ns in measured_ns.items() if times_ns), 0)

    def observe(self, rows: int, time_ns: int, instances: int = 1) -> None:
        """Record that a batch of `rows` computed in `time_ns`, with `instances` busy at its start, including its own."""
        with self._lock:
            if rows > self.most_rows:
                self.most_rows = rows
            if instances > 1 or self._mean_busy > 1.0:
                self._mean_busy += (instances - self._mean_busy) / _BUSY_SMOOTHING
            if instances == 1:
                self._first.observe(rows, time_ns)
                tail, bound_ns = self._tails.get(rows), self.tail_bound_ns
                if tail is None and rows == 1 and time_ns > 10 * bound_ns > 0:
                    tail = self._tails[1] = TailWindow(bound_ns, ())  # the shorter windows would forget it sooner
                if tail is not None:
                    times_ns = tail.times_ns
                    if len(times_ns) == TAIL:
                        tail.slow -= times_ns[0] > bound_ns
                    times_ns.append(time_ns)
                    if time_ns > bound_ns:
                        tail.slow += 1
                        if time_ns > 10 * bound_ns:
                            self.stall_ns = time_ns
                            self.stalls += 1
            else:
                self._table(instances).observe(rows, time_ns)

    def estimate_ns(self, rows: int, instances: int = 0) -> int:
        """Return the usual compute time of a batch in nanoseconds; 0 while unmeasured.

        Args:
            rows: rows of the batch.
            instances: busy instances, including its own; 0 for the recent mean.
        """
        table = self._first if self._one else self._tables[_table_index(instances or round(self._mean_busy))]
        curve = table.curve or self._draw(table)
        return interpolate(curve.rows, curve.medians_ns, rows)

    def promise_ns(self, rows: int, instances: int = 0) -> int:
        """Return the 95th percentile of the compute time in nanoseconds, at least the estimate; 0 while unmeasured.

        Args:
            rows: rows of the batch.
            instances: busy instances, including its own; 0 for the recent mean.
        """
        table = self._first if self._one else self._tables[_table_index(instances or round(self._mean_busy))]
        curve = table.curve or self._draw(table)
        return interpolate(curve.rows, curve.p95s_ns, rows)

    def estimates_ns(self, max_rows: int) -> NDArray[np.int64]:
        """Return `estimate_ns` of 0 to `max_rows` rows, of shape `(max_rows + 1,)`."""
        curve = self._curve()
        return _interpolate_all(curve.rows, curve.medians_ns, max_rows)

    def promises_ns(self, max_rows: int) -> NDArray[np.int64]:
        """Return `promise_ns` of 0 to `max_rows` rows, of shape `(max_rows + 1,)`."""
        curve = self._curve()
        return _interpolate_all(curve.rows, curve.p95s_ns, max_rows)

    def _curve(self) -> LatencyCurve:
        table = self._first if self._one else self._tables[_table_index(round(self._mean_busy))]
        return table.curve or self._draw(table)

    def is_fast(self, rows: int) -> bool:
        """Return True if the 95th percentile of the compute time of `rows` on one busy instance is within the bound.

        False if fewer than 16 times are known.
        """
        tail = self._tails.get(rows) or self._add_tail(rows)
        return tail is not None and tail.slow * _TAIL_SHARE <= len(tail.times_ns)

    def _add_tail(self, rows: int) -> TailWindow | None:
        with self._lock:
            window = self._first.windows.get(rows)
            if window is None or window.source == COPIED or len(window.times_ns) < _TAIL_MIN:
                return None
            tail = self._tails[rows] = TailWindow(self.tail_bound_ns, window.times_ns)
            return tail

    def entries(self) -> list[LatencyEntry]:
        """Return the measurements by instances and rows, ascending, without interpolation."""
        with self._lock:
            return [entry for table in dict.fromkeys(self._tables) for entry in table.entries()]

    def table(self) -> list[ProfileRow]:
        """Return `entries` as JSON objects."""
        return [
            {
                "instances": entry.instances,
                "rows": entry.rows,
                "median_us": entry.median_ns / NS_PER_US,
                "p95_us": entry.p95_ns / NS_PER_US,
                "observations": entry.observations,
                "source": entry.source,
            }
            for entry in self.entries()
        ]

    def times(self, max_times: int = WINDOW) -> dict[int, dict[int, list[int]]]:
        """Return the latest `max_times` measured times in nanoseconds by instances and rows, for storage and `seed`."""
        with self._lock:
            return {table.instances: table.times(max_times) for table in dict.fromkeys(self._tables)}

    def summary(self) -> list[tuple[int, int, int]]:
        """Return (rows, estimate, promise) in nanoseconds for 1, 2, 4 ... and the largest measured number of rows."""
        max_times = max((entry.rows for entry in self.entries()), default=0)
        sizes = sorted({max_times, *(1 << power for power in range(max_times.bit_length()))} - {0})
        return [(rows, self.estimate_ns(rows), self.promise_ns(rows)) for rows in sizes]

    def _table(self, instances: int) -> LatencyWindows:
        """Return the table to write for a number of busy instances; creates it once the first table has measurements."""
        index = _table_index(instances)
        tables = self._tables
        match = tables[index]
        if match.instances == 1 << index or not self._first.windows:
            return match
        added = match.copy(1 << index)
        self._tables = tuple(added if at >= index and table is match else table for at, table in enumerate(tables))
        self._one = False
        return added

    def _draw(self, table: LatencyWindows) -> LatencyCurve:
        with self._lock:
            return table.draw()


def _table_index(instances: int) -> int:
    """Return the index of a table: 0 for 1 busy instance, 1 for 2, 2 for up to 4, 3 for up to 8 ..."""
    return min((instances - 1).bit_length(), _TABLES - 1) if instances > 1 else 0
