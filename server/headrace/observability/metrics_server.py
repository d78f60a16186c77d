"""The metrics of the server itself: readiness, states of models, refusals, the event loop, the process."""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.limits import Door
from headrace.observability import metrics_table as table
from headrace.observability.histogram import Histogram
from headrace.observability.tally import BUILDS, DROPPED, ERRORS, LOADS, Tally

_LOOK_S = 0.25


class States(Protocol):
    """What became of every model; see `headrace.repository.registry.Registry`."""

    def states(self) -> Sequence[tuple[str, str, str]]:
        """Model, version ("" before they are known) and state of each."""

    def ready(self) -> bool:
        """True if all that should be served can be."""


class LoopLag:
    """How late the event loop comes to a timer; four looks a second cost nothing that could be measured.

    Lives on its loop: `start` and `stop` are called there, `histogram` from any thread.
    """

    def __init__(self, clock: Clock = monotonic_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._histogram = Histogram()
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look from now on."""
        self._due_ns = self._clock() + int(_LOOK_S * NS_PER_S)
        self._timer = loop.call_later(_LOOK_S, self._look, loop)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def histogram(self) -> Histogram:
        """A copy of what was found so far."""
        found = Histogram()
        with self._lock:
            self._histogram.fold()
            found.add(self._histogram)
        return found

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._histogram.observe(max(self._clock() - self._due_ns, 0))
        self.start(loop)


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the wiring knows of the server.

    Attributes:
        states: of the models.
        version: of Headrace.
        lag: of the event loop.
        doors: what clients come through, one a protocol.
        certificate_expiry_s: seconds since 1970; None without TLS.
    """

    states: States
    version: str
    lag: LoopLag
    doors: Sequence[Door] = ()
    certificate_expiry_s: float | None = None


class ServerCollector(Collector):
    """Makes the metrics of the server itself."""

    def __init__(self, facts: ServerFacts) -> None:
        self._facts = facts

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: the models may change."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families."""
        facts = self._facts
        ready, build, threads = table.READY.gauge(), table.BUILD_INFO.gauge(), table.THREADS.gauge()
        ready.add_metric([], facts.states.ready())
        build.add_metric([facts.version, platform.python_version()], 1)
        threads.add_metric([], threading.active_count())
        yield from (ready, build, threads, _states(facts.states))
        lag = table.LOOP_LAG.durations()
        lag.add([], facts.lag.histogram())
        yield lag
        yield from _doors(facts.doors)
        expiry = table.CERTIFICATE.gauge()
        if facts.certificate_expiry_s is not None:
            expiry.add_metric([], facts.certificate_expiry_s)
        yield expiry
        for family, tally in _TALLIES:
            counter = family.counter()
            for values, count in tally.items():
                counter.add_metric(values, count)
            yield counter


def _doors(doors: Sequence[Door]) -> Iterator[Metric]:
    hits, connections, limits = table.LIMIT_HITS.counter(), table.CONNECTIONS.gauge(), table.LIMIT.gauge()
    bodies = table.BODIES.gauge()
    for door in doors:
        for limit, count in door.hits.items():
            hits.add_metric([door.protocol, limit], count)
        if door.connections is not None:
            connections.add_metric([door.protocol], door.connections)
    for door in doors[:1]:  # the others have the same
        bodies.add_metric([], door.bodies.held_bytes)
        for limit, value in door.limits.table().items():
            limits.add_metric([limit], value)
    yield from (hits, connections, bodies, limits)


def _states(states: States) -> Metric:
    family = table.MODEL_STATE.gauge()
    for model, version, state in states.states():
        for one in _STATES:
            family.add_metric([model, version, one], one == state)
    return family


# In the order of a version's life; see `headrace.repository.registry.State`.
_STATES = ("UNKNOWN", "LOADING", "READY", "UNAVAILABLE", "UNLOADING", "UNLOADED")
_TALLIES: tuple[tuple[table.Family, Tally], ...] = (
    (table.ERRORS, ERRORS),
    (table.MODEL_LOADS, LOADS),
    (table.ENGINE_BUILDS, BUILDS),
    (table.TELEMETRY_DROPPED, DROPPED),
)
