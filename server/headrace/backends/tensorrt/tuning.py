"""What is measured of a plan when it is loaded, and what follows: the buckets that batches are padded to, and how they fly.

Times are microseconds a batch, of several queued one behind the other: what a batch costs while the GPU is kept busy, the host's
part included. The least of a few is taken: what else goes on makes it longer, nothing makes it shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from time import perf_counter_ns
from typing import NamedTuple

from headrace.core.clock import NS_PER_US

# A bucket is worth its graphs and contexts if batches are this much faster than in the next larger one; running a batch as it is,
# without a graph, must be faster by as much.
_WORTH = 0.95
# One graph for a whole flight gives up the overlap of copies with computing; up to this much is a fair price for its latency.
_FAIR = 1.05
# Where that price is too high, one graph is for flights that have nothing to overlap with, as long as it makes them that much
# faster; and how often such a flight is timed at the most.
_FASTER = 0.97
_FLIGHTS = 9
# Of one measurement: batches queued at once, rounds, and how long all of it may take if a batch is slow.
_AT_ONCE = 8
_ROUNDS = 4
_ENOUGH_US = 20_000.0


class Timing(NamedTuple):
    """Times of one number of rows.

    Attributes:
        replay_us: by its CUDA graph.
        plain_us: without, by a context that had other shapes before.
    """

    replay_us: float
    plain_us: float


class Choice(NamedTuple):
    """How the batches of a plan are run.

    Attributes:
        buckets: numbers of rows that have lanes and graphs of their own, ascending; none where there is no batch dimension.
        whole: of the buckets those whose flights are one graph each; 0 for that of a model without a batch dimension.
        lone: those whose flights are one graph each while nothing else of the instance is in the air; likewise.
        timings: by rows what was measured; empty if nothing was.
        exact: numbers of rows that run as they are, in no bucket.
    """

    buckets: tuple[int, ...]
    whole: frozenset[int] = frozenset()
    timings: Mapping[int, Timing] = {}
    exact: frozenset[int] = frozenset()
    lone: frozenset[int] = frozenset()

    def padded(self, rows: int) -> int:
        """Rows that are run for a batch of `rows`, at most the last bucket."""
        return rows if rows in self.exact else self.buckets[bisect_left(self.buckets, rows)]


def worthwhile(timings: Mapping[int, Timing]) -> tuple[int, ...]:
    """Of the numbers of rows measured those to keep: the largest, the smallest, and what is faster than the next above it."""
    rows = sorted(timings, reverse=True)
    kept = rows[:1]
    for number in rows[1:]:
        if number == rows[-1] or timings[number].replay_us < _WORTH * timings[kept[-1]].replay_us:
            kept.append(number)
    return tuple(sorted(kept))


def exact_rows(buckets: tuple[int, ...], timings: Mapping[int, Timing]) -> frozenset[int]:
    """Numbers of rows between buckets that are faster as they are, without a graph, than padded; by interpolation."""
    found = set[int]()
    for low, high in pairwise(buckets):
        begin, end = timings[low].plain_us, timings[high].plain_us
        for rows in range(low + 1, high):
            plain_us = begin + (end - begin) * (rows - low) / (high - low)
            if plain_us < _WORTH * timings[high].replay_us:
                found.add(rows)
    return frozenset(found)


def fair(whole_us: float, staged_us: float) -> bool:
    """True if a flight in one graph costs the GPU hardly more than one in three streams."""
    return whole_us <= _FAIR * staged_us


def faster(whole_us: float, staged_us: float) -> bool:
    """True if a flight with nothing else in the air is noticeably sooner back in one graph than through three streams."""
    return whole_us < _FASTER * staged_us


def latency_us(fly: Callable[[], None]) -> float:
    """Microseconds of a flight that has the GPU for itself: the median of a few, of fewer where one takes long.

    Args:
        fly: queues it and waits for it; may have to set up what is measured when it is first called.
    """
    fly()
    found = [_elapsed_us(fly, _nothing, 1)]
    count = int(max(1, min(_FLIGHTS, _ENOUGH_US // max(found[0], 0.001))))
    found += [_elapsed_us(fly, _nothing, 1) for _ in range(count - 1)]
    return sorted(found)[len(found) // 2]


def measured_us(queue: Callable[[], None], wait: Callable[[], None]) -> float:
    """Microseconds a batch.

    Args:
        queue: queues one; may have to set up what is measured when it is first called.
        wait: waits for all that was queued.
    """
    queue()
    wait()
    one_us = _elapsed_us(queue, wait, 1)
    count = int(max(1, min(_AT_ONCE, _ENOUGH_US / _ROUNDS // max(one_us, 0.001))))
    rounds = int(max(1, min(_ROUNDS, _ENOUGH_US // max(one_us * count, 0.001))))
    return min(one_us, *[_elapsed_us(queue, wait, count) for _ in range(rounds)])


def told(timings: Mapping[int, Timing], buckets: Collection[int]) -> str:
    """The table for people; what is no bucket stands in brackets."""
    return ", ".join(
        f"{rows} rows {timing.replay_us:.0f} us (plain {timing.plain_us:.0f})"
        if rows in buckets
        else f"[{rows} rows {timing.replay_us:.0f} us]"
        for rows, timing in sorted(timings.items())
    )


def _nothing() -> None:
    pass


def _elapsed_us(queue: Callable[[], None], wait: Callable[[], None], count: int) -> float:
    begun_ns = perf_counter_ns()
    for _ in range(count):
        queue()
    wait()
    return (perf_counter_ns() - begun_ns) / NS_PER_US / count
