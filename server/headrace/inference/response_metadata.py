"""Metadata of a response: the time of each phase and the load of the model, as headers and as parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import orjson

from headrace.core.clock import NS_PER_MS, NS_PER_US
from headrace.core.request import InferResponse, ModelLoad
from headrace.core.telemetry import PHASES
from headrace.inference.services import Handle

# --- Timing: the time of each phase, returned on demand ----------------------------------------------------------------
#
# The phases are consecutive and add up to the total (docs/decisions/0006-phases.md):
#
#     decode    read and validate the request
#     queue     wait until an instance takes its batch
#     assemble  gather the rows of the batch
#     compute   run the model, for the whole batch
#     split     divide the outputs among the requests of the batch
#     encode    return to the event loop; ends before the response is written, because these figures are part of it

_PREFIX = "headrace_"


def timing(response: InferResponse, received_ns: int, queued_ns: int, now_ns: int) -> dict[str, int | str]:
    """Return the time of each phase as response parameters.

    Args:
        response: without `times` (a request that was cut into several batches) only the total is returned.
        received_ns: monotonic time at which the whole request had arrived.
        queued_ns: monotonic time at which it was put in the queue.
        now_ns: monotonic.

    Returns:
        `headrace_total_us`; with `times` also `headrace_decode_us` and so on for each phase, `headrace_batch_rows` and
        `headrace_batch_closed` (the reason, as in the metrics).
    """
    parameters: dict[str, int | str] = {}
    times = response.times
    if times is not None:
        begin_ns = received_ns
        for phase, end_ns in zip(PHASES, (queued_ns, *times, now_ns), strict=True):
            parameters[f"{_PREFIX}{phase}_us"] = max(end_ns - begin_ns, 0) // NS_PER_US
            begin_ns = max(end_ns, begin_ns)
        parameters[f"{_PREFIX}batch_rows"] = response.batch_rows
        parameters[f"{_PREFIX}batch_closed"] = response.closed
    parameters[f"{_PREFIX}total_us"] = max(now_ns - received_ns, 0) // NS_PER_US
    return parameters


def timing_headers(parameters: dict[str, int | str]) -> list[tuple[bytes, bytes]]:
    """Return the same as headers: `headrace-timing`, and `server-timing` (W3C Server Timing) for browsers and proxies."""
    values = {name.removeprefix(_PREFIX): value for name, value in parameters.items()}
    headrace_timing = ", ".join(f"{name}={value}" for name, value in values.items())
    server_timing = [
        f"{name.removesuffix('_us')};dur={value / 1000:.3f}"
        for name, value in values.items()
        if isinstance(value, int) and name.endswith("_us")
    ]
    if "batch_rows" in values:
        server_timing.append(f'batch;desc="{values["batch_rows"]} rows, {values["batch_closed"]}"')
    return [(b"headrace-timing", headrace_timing.encode()), (b"server-timing", ", ".join(server_timing).encode())]


# --- Load report: the load of a model for load balancers ---------------------------------------------------------------
#
# Every HTTP response has two headers. On demand, a response has the report of Open Request Cost Aggregation (ORCA): the header
# `endpoint-load-metrics` in the form that Triton writes and Envoy parses.

# Load headers are cached for this time: computing them takes 30 to 70 us of a single request, and load balancers weigh
# replicas over seconds. A request with an option for the report (ORCA) gets a new one.
FRESH_NS = 50 * NS_PER_MS
Header = tuple[bytes, bytes]


class Headers(NamedTuple):
    """Response headers as pairs, and encoded for the wire.

    Attributes:
        pairs: name and value of each header.
        lines: the same headers in HTTP/1.1, each with its line end.
    """

    pairs: tuple[Header, ...]
    lines: bytes

    def with_pairs(self, pairs: list[Header]) -> Headers:
        """Return these headers and others."""
        return Headers((*self.pairs, *pairs), self.lines + header_lines(pairs))


class LoadHeaders:
    """Load headers of one version, cached for `FRESH_NS`. Ownership: the event loop."""

    __slots__ = ("_headers", "_until_ns")

    def __init__(self) -> None:
        self._until_ns = 0
        self._headers = Headers((), b"")

    def at(self, now_ns: int, handle: Handle) -> Headers:
        """Return the headers at a monotonic time. The handle is always the same; no reference to it is stored."""
        if now_ns >= self._until_ns:
            self._until_ns = now_ns + FRESH_NS
            load = handle.load(by_level=False)
            pairs = [
                (b"headrace-queue-depth", b"%d" % load.depth),
                (b"headrace-predicted-wait-us", b"%d" % (load.wait_ns // NS_PER_US)),
            ]
            self._headers = Headers(tuple(pairs), header_lines(pairs))
        return self._headers


def orca_headers(load: ModelLoad, form: str) -> list[Header]:
    """Return the ORCA header in a format, "text" or "json". An unknown format gives none: it must not fail the request."""
    metrics = _metrics(load)
    if form == "json":
        return [(b"endpoint-load-metrics", b"JSON " + orjson.dumps({"named_metrics": metrics}))]
    if form == "text":
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        return [(b"endpoint-load-metrics", f"TEXT {text}".encode())]
    return []


def load_parameters(load: ModelLoad) -> dict[str, int | str]:
    """Return the load report as response parameters, for gRPC."""
    return {"headrace_queue_depth": load.depth, "headrace_predicted_wait_us": load.wait_ns // NS_PER_US}


def describe_load(name: str, version: str, load: ModelLoad) -> dict[str, object]:
    """Return the complete load report of a version as JSON values."""
    return {
        "name": name,
        "version": version,
        **_metrics(load),
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


def _metrics(load: ModelLoad) -> dict[str, int]:
    return {
        "queue_depth": load.depth,
        "queue_rows": load.rows,
        "in_flight": load.in_flight,
        "running_rows": load.running_rows,
        "predicted_wait_us": load.wait_ns // NS_PER_US,
        "drain_us": load.drain_ns // NS_PER_US,
    }


def header_lines(pairs: Sequence[Header]) -> bytes:
    """Headers in their form on the wire, each with its line end."""
    return b"".join([b"%s: %s\r\n" % pair for pair in pairs])
