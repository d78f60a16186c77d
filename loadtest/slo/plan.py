"""Settings of a run, and the loads of all parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LOADS = (1.5, 2.0)
"""Requests a second over the capacity."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One call of the command.

    Attributes:
        rounds: how often each contender is measured.
        seconds: length of a trace.
        repository: the demo models.
        scratch: a folder for logs.
    """

    rounds: int
    seconds: float
    repository: Path
    scratch: Path
