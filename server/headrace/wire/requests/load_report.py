"""Load reports for load balancers: figures of the whole server and of a model, in headers, trailers and parameters.

Every HTTP response has the headers `headrace-queue-depth` and `headrace-predicted-wait-us`. Reports of Open Request Cost
Aggregation (ORCA) are sent as `--orca` says: the header `endpoint-load-metrics` over HTTP, in the forms that Triton writes and
Envoy parses, and the trailer `endpoint-load-metrics-bin` over gRPC, a serialized `xds.data.orca.v3.OrcaLoadReport`.

A balancer that weighs replicas divides `rps_fractional` by `application_utilization`: see `LoadMeter`.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import orjson

from headrace.core.clock import NS_PER_MS, NS_PER_S, NS_PER_US, Clock, monotonic_ns
from headrace.core.limits import Cells
from headrace.core.request import ModelLoad
from headrace.core.response_bodies import LoadFigures, LoadResponse
from headrace.observability.counters import Recorder
from headrace.wire.requests.response_metadata import Header, Headers, header_lines

# Reports are cached for this time: computing them takes 30 to 70 us of a single request, and load balancers weigh replicas over
# seconds. A request with an option for the report gets the present figures of its model.
FRESH_NS = 50 * NS_PER_MS
# Rates are those of this time, or since the report before if that is longer ago.
WINDOW_NS = 2 * NS_PER_S
# Time of one sample of all versions, as a share of the time between two.
_MOST_BUSY = 50

When = Literal["always", "on-request", "never"]
LOAD_TRAILER = "endpoint-load-metrics-bin"

# Cells in which the protocols of a process count: requests that have ended, and those of them that the server has failed.
ENDED, FAILED = range(2)
COUNT_CELLS = 2


class ServerFigures(NamedTuple):
    """Load of a server over the last seconds.

    Attributes:
        utilization: work as a share of the capacity; more than 1 if more work waits than the server can do.
        requests_hz: requests of clients that have ended, a second.
        errors_hz: those of them that the server has failed (HTTP status 500 and more), a second.
    """

    utilization: float
    requests_hz: float
    errors_hz: float


class LoadedVersion(Protocol):
    """A served version; see `headrace.inference.scheduling.version_handle.VersionHandle`."""

    def load(self, by_level: bool = True) -> ModelLoad:
        """Return the load of the version; also of each priority level if `by_level`."""

    def queue_load(self, now_ns: int, /) -> tuple[int, int]:
        """Return the number of queued requests and the predicted wait in nanoseconds, as `load` does for less."""


class MeasuredVersion(LoadedVersion, Protocol):
    """A served version in the process of the models."""

    serial: int
    recorder: Recorder

    @property
    def in_flight(self) -> int:
        """Number of requests between lease and release."""

    @property
    def calls(self) -> frozenset[str]:
        """Names of the models that a pipeline calls; empty for a model."""


class _Sample(NamedTuple):
    now_ns: int
    ended: int
    failed: int
    work_s: float


class LoadMeter:
    """Measures the load of a server when a report needs it. Thread-safe.

    The utilisation is the work of `WINDOW_NS` as a share of what all instances can do in that time: the rows that models have
    computed over the rows that they can compute, summed over the models, and the time that the requests in flight still take.
    So a server at half its capacity without a queue has 0.5. One that is busy all the time has 1, and 0.5 more for each second
    that its queue takes to drain. Requests per second over the utilisation is the rate that the server can sustain, less if
    work waits.

    A model without a latency table counts by the time for which its instances were busy. The steps of a pipeline count as the
    models that run them.

    Args:
        versions: returns model, version and handle of all that serves.
        counts: requests that have ended and have failed, of all processes.
        clock: returns monotonic nanoseconds.
    """

    def __init__(
        self,
        versions: Callable[[], Iterable[tuple[str, str, MeasuredVersion]]],
        counts: Cells,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._versions = versions
        self._counts = counts
        self._clock = clock
        self._lock = threading.Lock()
        self._done: dict[int, tuple[int, int]] = {}  # rows and busy time of each version at the last sample, by serial
        self._work_s = 0.0
        self._samples = deque([_Sample(clock(), counts[ENDED], counts[FAILED], 0.0)])
        self._due_ns = 0
        self._figures = ServerFigures(0.0, 0.0, 0.0)

    def figures(self, now_ns: int) -> ServerFigures:
        """Return the load of the server, at most `FRESH_NS` old; `now_ns` is monotonic."""
        with self._lock:
            if now_ns >= self._due_ns:
                started_ns = self._clock()
                self._measure(now_ns)
                # Thousands of versions take milliseconds.
                self._due_ns = now_ns + max(FRESH_NS, _MOST_BUSY * (self._clock() - started_ns))
            return self._figures

    def _measure(self, now_ns: int) -> None:
        waiting_s = self._add_work()
        samples, counts = self._samples, self._counts
        sample = _Sample(now_ns, counts[ENDED], counts[FAILED], self._work_s)
        samples.append(sample)
        while len(samples) > 2 and now_ns - samples[1].now_ns >= WINDOW_NS:
            samples.popleft()
        first = samples[0]
        seconds = max(now_ns - first.now_ns, NS_PER_MS) / NS_PER_S
        self._figures = ServerFigures(
            (sample.work_s - first.work_s) / seconds + waiting_s * NS_PER_S / WINDOW_NS,
            (sample.ended - first.ended) / seconds,
            (sample.failed - first.failed) / seconds,
        )

    def _add_work(self) -> float:
        """Add the work since the last sample; returns the time that the requests in flight take, in seconds."""
        waiting_s, done = 0.0, dict[int, tuple[int, int]]()
        for _, _, version in self._versions():
            if version.calls:
                continue
            rows, busy_ns = done[version.serial] = version.recorder.work()
            rows_before, busy_before_ns = self._done.get(version.serial, (0, 0))
            if rows == rows_before and busy_ns == busy_before_ns and not version.in_flight:
                continue
            load = version.load(by_level=False)
            waiting_s += load.drain_ns / NS_PER_S
            if load.rows_hz:
                self._work_s += (rows - rows_before) / load.rows_hz
            elif load.instances:
                self._work_s += (busy_ns - busy_before_ns) / NS_PER_S / load.instances
        self._done = done
        return waiting_s


class LoadReports:
    """Load reports of one process. Ownership: the event loop.

    Args:
        when: "always", "on-request" (of requests with the header `endpoint-load-metrics-format`) or "never".
        figures: returns the load of the whole server at a monotonic time; None while it is unknown.
        counts: cells in which the protocols of this process count.

    Attributes:
        always: every response has a report.
        enabled: reports are sent at all.
        counts: see Args.
    """

    def __init__(
        self,
        when: When = "on-request",
        figures: Callable[[int], ServerFigures | None] = lambda _now_ns: None,
        counts: Cells | None = None,
    ) -> None:
        self.always, self.enabled = when == "always", when != "never"
        self.counts: Cells = [0] * COUNT_CELLS if counts is None else counts
        self._figures = figures
        self._trailers: WeakKeyDictionary[LoadedVersion, tuple[int, bytes]] = WeakKeyDictionary()

    def headers(self, load: ModelLoad, now_ns: int, form: str) -> list[Header]:
        """Return the header of a report; an unknown format has none, since it must not fail the request.

        Args:
            load: of the model of the request.
            now_ns: monotonic.
            form: "text" or "json".
        """
        named, server = model_figures(load), _server_fields(self._figures(now_ns))
        if form == "json":
            return [(b"endpoint-load-metrics", b"JSON " + orjson.dumps({"named_metrics": named, **server}))]
        if form == "text":
            fields = {**{f"named_metrics.{name}": value for name, value in named.items()}, **server}
            text = ", ".join([f"{name}={value}" for name, value in fields.items()])
            return [(b"endpoint-load-metrics", f"TEXT {text}".encode())]
        return []

    def message(self, load: ModelLoad | None, now_ns: int) -> bytes:
        """Return a report as a serialized `OrcaLoadReport`.

        Args:
            load: of the model of the request; None for a report of the server alone.
            now_ns: monotonic.
        """
        return serialized(_server_fields(self._figures(now_ns)), {} if load is None else model_figures(load))

    def cached_message(self, handle: LoadedVersion, now_ns: int) -> bytes:
        """Return the report of a version as a serialized message, at most `FRESH_NS` old."""
        until_ns, content = self._trailers.get(handle, (0, b""))
        if now_ns >= until_ns:
            content = self.message(handle.load(by_level=False), now_ns)
            self._trailers[handle] = now_ns + FRESH_NS, content
        return content


class LoadHeaders:
    """Load headers of the responses of one version, cached for `FRESH_NS`. Ownership: the event loop.

    Args:
        reports: reports of the process.

    Attributes:
        brief: the headers without a report, for a response with a report of another format.
    """

    __slots__ = ("_headers", "_reports", "_until_ns", "brief")

    def __init__(self, reports: LoadReports) -> None:
        self._reports = reports
        self._until_ns = 0
        self._headers = self.brief = Headers((), b"")

    def at(self, now_ns: int, handle: LoadedVersion) -> Headers:
        """Return the headers at a monotonic time. The handle is always the same; no reference to it is stored."""
        if now_ns >= self._until_ns:
            self._until_ns = now_ns + FRESH_NS
            if self._reports.always:
                load = handle.load(by_level=False)
                self.brief = _brief_headers(load.depth, load.wait_ns)
                self._headers = self.brief.with_pairs(self._reports.headers(load, now_ns, "text"))
            else:
                depth, wait_ns = handle.queue_load(now_ns)
                self._headers = self.brief = _brief_headers(depth, wait_ns) if depth or wait_ns else _IDLE
        return self._headers


def _brief_headers(depth: int, wait_ns: int) -> Headers:
    pairs = [(b"headrace-queue-depth", b"%d" % depth), (b"headrace-predicted-wait-us", b"%d" % (wait_ns // NS_PER_US))]
    return Headers(tuple(pairs), header_lines(pairs))


_IDLE = _brief_headers(0, 0)


def load_parameters(load: ModelLoad) -> dict[str, int | str]:
    """Return the load of a model as response parameters, for gRPC."""
    return {"headrace_queue_depth": load.depth, "headrace_predicted_wait_us": load.wait_ns // NS_PER_US}


def describe_load(name: str, version: str, load: ModelLoad) -> LoadResponse:
    """Return the complete load of a version as JSON values."""
    return {
        "name": name,
        "version": version,
        **model_figures(load),
        "instances": load.instances,
        "rows_per_s": round(load.rows_hz, 1),
        "late_answers": load.late,
        "levels": [
            {
                "level": level.level,
                "queue_depth": level.depth,
                "queue_rows": level.rows,
                "predicted_wait_us": level.wait_ns // NS_PER_US,
            }
            for level in load.levels
        ],
    }


def model_figures(load: ModelLoad) -> LoadFigures:
    """Return the named metrics of a report: the load of the model of a request."""
    return {
        "queue_depth": load.depth,
        "queue_rows": load.rows,
        "in_flight": load.in_flight,
        "running_rows": load.running_rows,
        "predicted_wait_us": load.wait_ns // NS_PER_US,
        "drain_us": load.drain_ns // NS_PER_US,
    }


def _server_fields(figures: ServerFigures | None) -> dict[str, float]:
    """Return the fields of a report with the load of the server; empty if it is unknown."""
    if figures is None:
        return {}
    return {
        "application_utilization": round(figures.utilization, 6),
        "rps_fractional": round(figures.requests_hz, 3),
        "eps": round(figures.errors_hz, 3),
    }


# --- xds.data.orca.v3.OrcaLoadReport: three doubles and a map, encoded by hand, which saves a dependency with generated code ----

_DOUBLE_FIELDS = {"rps_fractional": 6, "eps": 7, "application_utilization": 9}
_NAMED_METRICS = 8
_DOUBLE = struct.Struct("<Bd")
_ENTRY = struct.Struct("<BBBB")
_FIXED64, _LENGTH_DELIMITED = 1, 2


def serialized(server: Mapping[str, float], named: Mapping[str, object]) -> bytes:
    """Serialize a report.

    Args:
        server: values by the name of their field.
        named: named metrics; names are ASCII of at most 100 bytes, so that every length has one byte.
    """
    parts = [_DOUBLE.pack(_DOUBLE_FIELDS[name] << 3 | _FIXED64, value) for name, value in server.items()]
    for name, value in named.items():
        key = name.encode()
        size_bytes = 2 + len(key) + _DOUBLE.size
        head = _ENTRY.pack(_NAMED_METRICS << 3 | _LENGTH_DELIMITED, size_bytes, 1 << 3 | _LENGTH_DELIMITED, len(key))
        parts += (head, key, _DOUBLE.pack(2 << 3 | _FIXED64, value))
    return b"".join(parts)
