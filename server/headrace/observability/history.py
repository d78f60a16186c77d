"""Request rates of the last ten minutes, a sample every five seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from headrace.core.clock import NS_PER_S, stepwise
from headrace.core.response_bodies import RequestRates

PERIOD_NS = 5 * NS_PER_S
LENGTH = 120
"""Samples that are kept: ten minutes."""


class Counts(Protocol):
    """Total counts of one model version; see `headrace.observability.counters.Recorder`."""

    def request_counts(self) -> tuple[int, int]:
        """Return the numbers of successful and of failed requests."""


class Counted(Protocol):
    """A version with its counts; see `headrace.inference.scheduling.version_handle.VersionHandle`."""

    @property
    def recorder(self) -> Counts:
        """Return its counts."""


class _Series:
    """Rates of one version."""

    __slots__ = ("counts", "failures", "recorder", "requests")

    def __init__(self, recorder: Counts) -> None:
        self.recorder = recorder
        self.counts = (0, 0)
        self.requests: deque[float] = deque(maxlen=LENGTH)
        self.failures: deque[float] = deque(maxlen=LENGTH)


class RequestHistory:
    """Rings with the request rates of every version.

    A version that is loaded again keeps its ring, one that is unloaded loses it.

    Thread-safety: `sample` runs on one thread at a time and replaces the rings; `rates` may run on any other.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}
        self._rates: dict[int, RequestRates] = {}  # by id() of a recorder that its series holds
        self._sampled_ns = 0

    def sample(self, sources: Iterable[tuple[str, str, Counted]], now_ns: int) -> None:
        """Add one sample for each version.

        Args:
            sources: model name, version number and version of everything that serves.
            now_ns: monotonic.
        """
        # A period that was longer, because the event loop was busy, still gives the right rate.
        elapsed_s = max(now_ns - self._sampled_ns, 1) / NS_PER_S
        series: dict[tuple[str, str], _Series] = {}
        rates: dict[int, RequestRates] = {}
        for name, version, source in stepwise(sources):
            recorder = source.recorder
            ring = self._series.get((name, version)) or _Series(recorder)
            if ring.recorder is not recorder:
                ring.recorder, ring.counts = recorder, (0, 0)
            counts = recorder.request_counts()
            if self._sampled_ns:
                # Fewer than before if requests failed after their answer, and none else succeeded.
                ring.requests.append(round(max(counts[0] - ring.counts[0], 0) / elapsed_s, 2))
                ring.failures.append(round((counts[1] - ring.counts[1]) / elapsed_s, 2))
            ring.counts = counts
            series[name, version] = ring
            rates[id(recorder)] = {
                "requests_per_s": _without_leading_zeros(ring.requests),
                "failures_per_s": _without_leading_zeros(ring.failures),
            }
        self._series, self._rates, self._sampled_ns = series, rates, now_ns

    def rates(self, recorder: Counts) -> RequestRates:
        """Return requests and failures a second in each period, the latest last, from the first that is not zero on."""
        return self._rates.get(id(recorder), {"requests_per_s": [], "failures_per_s": []})


def _without_leading_zeros(values: deque[float]) -> list[float]:
    first = next((place for place, value in enumerate(values) if value), len(values))
    return list(values)[first:]
