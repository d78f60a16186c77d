"""Outcome of every request of the soak: one entry each."""

from __future__ import annotations

import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

# Of the requests of one kind that ended badly in the same way.
_DETAILS = 2


class Outcome(StrEnum):
    """Outcome of a request."""

    RIGHT = "right"
    """Answered, and as expected."""
    REFUSED = "refused"
    """Answered with the error that an invalid request must get."""
    LEFT = "left"
    """Given up by its client before there was an answer."""
    STRUCK = "struck"
    """Answered that the model's process was killed while it ran this request, which need not be the cause."""
    WRONG = "wrong"
    """Answered with other values than expected, or with an answer that cannot be read."""
    FAILED = "failed"
    """Answered with an unexpected error, or without the expected one."""
    LOST = "lost"
    """Not answered at all: the connection broke, or nothing came in time."""


BAD = (Outcome.WRONG, Outcome.FAILED, Outcome.LOST)


@dataclass(frozen=True, slots=True)
class Line:
    """Requests to a model over one transport.

    Attributes:
        way: HTTP, gRPC, stream, or the kind of client.
        model: name of the model.
        counts: number of requests by outcome.
        at_s: when each right answer came.
        took_s: how long it took, as long as `at_s`.
    """

    way: str
    model: str
    counts: Counter[Outcome] = field(default_factory=Counter)
    at_s: array[float] = field(default_factory=lambda: array("d"))
    took_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was done to the server.

    Attributes:
        at_s: when, of `time.monotonic`.
        name: a word: reload, broken, unload, load, kill.
    """

    at_s: float
    name: str


class Ledger:
    """Thread-safe; its one lock guards everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], Line] = {}
        self._details: list[str] = []
        self.events: list[Event] = []

    def note(self, way: str, model: str, outcome: Outcome, took_s: float = 0.0, detail: str = "") -> None:
        """Record the end of a request; `detail` is stored for the first ones of a kind that ended badly."""
        now_s = time.monotonic()
        with self._lock:
            line = self._lines.setdefault((way, model), Line(way, model))
            line.counts[outcome] += 1
            if outcome is Outcome.RIGHT:
                line.at_s.append(now_s)
                line.took_s.append(took_s)
            elif outcome in BAD and line.counts[outcome] <= _DETAILS:
                self._details.append(f"{way}, {model}, {outcome}: {detail}")

    def event(self, name: str) -> None:
        """Something was done to the server just now."""
        with self._lock:
            self.events.append(Event(time.monotonic(), name))

    @property
    def lines(self) -> list[Line]:
        """All lines, by transport and model; read after all clients have stopped."""
        return [self._lines[key] for key in sorted(self._lines)]

    @property
    def details(self) -> list[str]:
        """Of the first requests that ended badly."""
        return list(self._details)


def total(lines: Iterable[Line], *outcomes: Outcome, model: str = "") -> int:
    """Number of requests with one of these outcomes, of one model or of all."""
    return sum(line.counts[outcome] for line in lines for outcome in outcomes if model in ("", line.model))


def times_between(lines: Iterable[Line], start_s: float, end_s: float) -> npt.NDArray[np.float64]:
    """Latencies in seconds of the right answers within a span of time."""
    found = [np.empty(0)]
    for line in lines:
        at_s = np.array(line.at_s)
        found.append(np.array(line.took_s)[(at_s >= start_s) & (at_s < end_s)])
    return np.concatenate(found)
