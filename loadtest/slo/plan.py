"""Settings of the parts, and their shared reporting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.results import Figure
from loadtest.bench.spread import Spread
from loadtest.slo.subject import LoadFigures, Way, by_the_clock, simulated


@dataclass(frozen=True, slots=True)
class Plan:
    """One call of the command.

    Attributes:
        rounds: how often each contender is measured.
        seconds: how long a trace is.
        repository: the demo models.
        scratch: a folder for logs.
    """

    rounds: int
    seconds: float
    repository: Path
    scratch: Path

    @property
    def ways(self) -> dict[str, tuple[Way, int, float]]:
        """Ways to replay traces, with rounds and seconds of each: virtual time costs little."""
        return {
            "by the clock": (by_the_clock, self.rounds, self.seconds),
            "simulated": (simulated, 3, max(self.seconds, 20.0)),
        }


def figures(runs_by_setting: Mapping[str, Sequence[LoadFigures]], quantities: Sequence[str]) -> list[Figure]:
    """Some quantities of each contender.

    Args:
        found: rounds by contender.
        quantities: of `_UNITS`.
    """
    return [
        Figure(name, _UNITS[quantity], Spread.of([getattr(run, quantity) for run in rounds]))
        for name, rounds in runs_by_setting.items()
        for quantity in quantities
    ]


_UNITS = {
    "goodput_hz": "answers in time/s",
    "throughput_hz": "answers/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "refused": "share refused",
    "rows": "rows a batch",
    "busy": "share of time computing",
    "late_ms": "asked late, p99 ms",
}
