"""Result of a case: figures of each contender, and comparisons that may have a target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# Summary of repeated rounds: the median and the range.


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


Verdict = Literal["PASS", "MISS", "-"]


@dataclass(frozen=True, slots=True)
class Target:
    """The bound that the median of a comparison has to keep."""

    sense: Literal["at least", "at most"]
    bound: float

    def met_by(self, value: float) -> bool:
        """Whether a value keeps the bound."""
        return value >= self.bound if self.sense == "at least" else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.sense == 'at least' else '<='} {self.bound:.4g}"


def at_least(bound: float) -> Target:
    """A target that larger values meet."""
    return Target("at least", bound)


def at_most(bound: float) -> Target:
    """A target that smaller values meet."""
    return Target("at most", bound)


@dataclass(frozen=True, slots=True)
class Figure:
    """One quantity of one contender, e.g. requests a second of the naive server."""

    contender: str
    unit: str
    spread: Spread


def values_of(rounds: Sequence[object], quantity: str) -> list[float]:
    """One quantity of every round, by the name of its attribute."""
    return [getattr(sample, quantity) for sample in rounds]


def figures_of(samples: Mapping[str, Sequence[object]], units: Mapping[str, str]) -> list[Figure]:
    """Some quantities of all contenders.

    Args:
        samples: rounds by contender.
        units: unit of each quantity, by the name of its attribute in the samples.
    """
    return [
        Figure(name, unit, Spread.of(values_of(rounds, quantity)))
        for quantity, unit in units.items()
        for name, rounds in samples.items()
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio (unit "") or a difference (unit "us") taken round by round, and its target."""

    label: str
    unit: str
    spread: Spread
    target: Target | None = None

    @classmethod
    def ratio(
        cls, label: str, quantity: str, ours: Sequence[object], theirs: Sequence[object], target: Target | None = None
    ) -> Comparison:
        """Compare a quantity of two contenders: ours over theirs."""
        return cls(label, "", ratios(values_of(ours, quantity), values_of(theirs, quantity)), target)

    @classmethod
    def p50_difference(
        cls, label: str, ours: Sequence[object], theirs: Sequence[object], target: Target | None = None
    ) -> Comparison:
        """Compare the median latencies of two contenders: ours minus theirs."""
        return cls(label, "us", differences(values_of(ours, "p50_us"), values_of(theirs, "p50_us")), target)

    @property
    def verdict(self) -> Verdict:
        """PASS or MISS by the median; "-" without a target."""
        if self.target is None:
            return "-"
        return "PASS" if self.target.met_by(self.spread.median) else "MISS"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one case.

    Attributes:
        name: the case, as `--only` takes it.
        title: one-line description of the measurement.
        figures: one for each contender (and quantity).
        comparisons: with their targets.
        notes: remarks for the reader of the figures.
        failure: why there are no figures; empty if there are.
    """

    name: str
    title: str
    figures: Sequence[Figure] = ()
    comparisons: Sequence[Comparison] = ()
    notes: Sequence[str] = ()
    failure: str = ""

    @property
    def missed(self) -> bool:
        """Whether any target was missed."""
        return any(comparison.verdict == "MISS" for comparison in self.comparisons)
