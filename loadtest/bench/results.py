"""Result of a case: figures of each contender, and comparisons that may have a target."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from loadtest.bench.spread import Spread

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio (unit "") or a difference (unit "us") taken round by round, and what it should be."""

    label: str
    unit: str
    spread: Spread
    target: Target | None = None

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
        title: what was measured, in a line.
        figures: one for each contender (and quantity).
        comparisons: with their targets.
        notes: remarks for the reader of the figures.
        failure: why there are no figures; empty if there are.
    """

    name: str
    title: str
    figures: tuple[Figure, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = field(default=())
    failure: str = ""

    @property
    def missed(self) -> bool:
        """Whether any target was missed."""
        return any(comparison.verdict == "MISS" for comparison in self.comparisons)
