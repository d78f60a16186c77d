"""Summary of repeated rounds: the median and the range."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of some rounds, in the unit of what was measured."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value.

        Raises:
            ValueError: there are none.
        """
        if not values:
            raise ValueError("no rounds to summarise")
        return cls(statistics.median(values), min(values), max(values), len(values))


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours over theirs, round by round, so that what slows both in one round cancels out."""
    return Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Ours minus theirs, round by round."""
    return Spread.of([a - b for a, b in zip(ours, theirs, strict=True)])


def completion_rate(times_s: Sequence[float]) -> float:
    """Completions a second: the slope of the least-squares line through (time, number completed).

    Answers of batches come in clumps, and a window that starts or ends in the middle of one counts a part of a batch too
    many or too few. The line through all completions has no such edges: a perfectly regular staircase gives its exact rate.

    Args:
        times_s: when each answer came, in seconds, ascending.

    Raises:
        ValueError: fewer than two different times.
    """
    if len(times_s) < 2 or times_s[0] == times_s[-1]:
        raise ValueError("a rate needs completions at two different times at least")
    return statistics.linear_regression(times_s, range(len(times_s))).slope
