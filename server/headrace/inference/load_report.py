"""How busy a version is, as load balancers read it: two headers of ours with every answer over HTTP, and to who asks for it Open
Request Cost Aggregation's report (ORCA; the header `endpoint-load-metrics` as Envoy reads it and Triton writes it)."""

from __future__ import annotations

from typing import NamedTuple

import orjson

from headrace.core.clock import NS_PER_MS, NS_PER_US
from headrace.core.request import ModelLoad
from headrace.inference.models import Handle

# The headers of a response repeat a load report for so long: computing it takes 30 to 70 us of a lone request, and
# load balancers weigh replicas over seconds. A request that asks for the report (ORCA) gets a new one.
FRESH_NS = 50 * NS_PER_MS
Header = tuple[bytes, bytes]


class Headers(NamedTuple):
    """Some headers of an answer, in both forms that are needed.

    Attributes:
        pairs: name and value of each.
        lines: as they stand on the wire, each with its line end.
    """

    pairs: tuple[Header, ...]
    lines: bytes

    def with_pairs(self, pairs: list[Header]) -> Headers:
        """These, and others."""
        return Headers((*self.pairs, *pairs), self.lines + _lines(pairs))


class LoadHeaders:
    """The headers of one version, rendered anew where they are older than `FRESH_NS`. Ownership: the event loop."""

    __slots__ = ("_headers", "_until_ns")

    def __init__(self) -> None:
        self._until_ns = 0
        self._headers = Headers((), b"")

    def at(self, now_ns: int, handle: Handle) -> Headers:
        """As of `now_ns`, monotonic, or a moment before; always of the same handle, which must not be kept alive by this."""
        if now_ns >= self._until_ns:
            self._until_ns = now_ns + FRESH_NS
            load = handle.load(by_level=False)
            pairs = [
                (b"headrace-queue-depth", b"%d" % load.depth),
                (b"headrace-predicted-wait-us", b"%d" % (load.wait_ns // NS_PER_US)),
            ]
            self._headers = Headers(tuple(pairs), _lines(pairs))
        return self._headers


def orca_headers(load: ModelLoad, form: str) -> list[Header]:
    """ORCA's header in the form that was asked for, text or json; none in any other, since an answer does not hang on it."""
    metrics = _metrics(load)
    if form == "json":
        return [(b"endpoint-load-metrics", b"JSON " + orjson.dumps({"named_metrics": metrics}))]
    if form == "text":
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
        return [(b"endpoint-load-metrics", f"TEXT {text}".encode())]
    return []


def load_parameters(load: ModelLoad) -> dict[str, int | str]:
    """The same as parameters of an answer, for gRPC."""
    return {"headrace_queue_depth": load.depth, "headrace_predicted_wait_us": load.wait_ns // NS_PER_US}


def describe_load(name: str, version: str, load: ModelLoad) -> dict[str, object]:
    """All of it, as JSON values."""
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


def _lines(pairs: list[Header]) -> bytes:
    return b"".join([b"%s: %s\r\n" % pair for pair in pairs])
