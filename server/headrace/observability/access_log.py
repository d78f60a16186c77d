"""Access log: one line for each request, as JSON or text, written by its own thread."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple

from headrace.core.clock import NS_PER_S, NS_PER_US, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.core.telemetry import PHASES, RequestLogMode, TraceContext
from headrace.observability.background import CAPACITY, BackgroundWorker
from headrace.observability.counters import DROPPED
from headrace.observability.logs import escape, iso8601, redact

OK = "ok"


class AccessRecord(NamedTuple):
    """One request from its arrival to its answer; times are monotonic nanoseconds, 0 for what it did not come to.

    Attributes:
        protocol: http or grpc.
        model: as it was asked for, or the version's own name.
        version: "" if it is not known.
        status: of the answer, an HTTP status or the name of a gRPC code.
        received_ns: when the whole request had arrived.
        ended_ns: when its answer was ready to be sent.
        queued_ns: when it was handed to the queue.
        done_ns: when the event loop had its outcome.
        request_id: the caller's own, "" if there is none.
        client: who asks, "" for nobody in particular.
        rows: of the request, 0 if it was not read so far.
        context: the caller's trace.
        reason: "ok", or the error's word in the metrics.
        error: its text, "" for none.
        times: of its batch; None for an error, and for a request that was cut into several.
        batch_rows, closed: as in `InferResponse`, whose tensors a record must not keep.
    """

    protocol: str
    model: str
    version: str
    status: str
    received_ns: int
    ended_ns: int
    queued_ns: int = 0
    done_ns: int = 0
    request_id: str = ""
    client: str = ""
    rows: int = 0
    context: TraceContext | None = None
    reason: str = OK
    error: str = ""
    times: BatchTimes | None = None
    batch_rows: int = 0
    closed: str = ""

    @property
    def batch_id(self) -> str:
        """The same for all members of a batch, and for no others of its version; "" if it was in none, or in several."""
        return "" if self.times is None else f"{self.times.assembled_ns:x}"


_BATCH_PHASES = PHASES[1:-1]  # one for each time of `BatchTimes`, which ends it


class Phase(NamedTuple):
    """A stretch of a request's time."""

    name: str
    begin_ns: int
    end_ns: int


def phases(record: AccessRecord) -> list[Phase]:
    """Time of each phase of a request; consecutive, and as long as the whole request if it was answered.

        decode    read and validate the request
        queue     wait until an instance takes its batch
        assemble  gather the rows of the batch
        compute   run the model, for the whole batch
        split     divide the outputs among the requests of the batch
        encode    return to the event loop and write the response

    A request that was cut into several batches, or that failed after admission, has one phase `queue_to_split` in place of
    those from `queue` to `split`.
    """
    if not record.queued_ns:
        return []
    result = [Phase("decode", record.received_ns, record.queued_ns)]
    times = record.times
    if times is None:
        begin_ns = record.done_ns or record.ended_ns
        result.append(Phase("queue_to_split", record.queued_ns, begin_ns))
    else:
        begin_ns = record.queued_ns
        for name, end_ns in zip(_BATCH_PHASES, times, strict=True):
            end_ns = max(end_ns, begin_ns)
            result.append(Phase(name, begin_ns, end_ns))
            begin_ns = end_ns
    if record.done_ns:
        result.append(Phase("encode", begin_ns, max(record.ended_ns, begin_ns)))
    return result


logger = logging.getLogger("headrace.request")

SAMPLED_ONE_IN = 100
"""Requests to a line of mode `sampled`: at 1,000 a second ten lines a second. Mode `all` has every request."""

_MAX_TEXT = 512
_MAX_NAME = 256
_CLOSE_TIMEOUT_S = 5.0
# Whoever sends nothing but nonsense fills neither the disk nor, with the writing of it, a processor that serves others.
_MAX_ERRORS_HZ = 100
# The caller's own fault, or nobody's.
_CLIENTS = frozenset(
    ("bad_request", "too_large", "conflict", "forbidden", "not_found", "quota", "cancelled", "unsupported")
)


class RequestLog:
    """Writes the lines.

    `wants`, `put` and `close` are called on the event loop (`close` by who ends it); only the thread touches the stream.

    Args:
        mode: off: none; errors: what was not answered with success, a hundred a second at most; sampled: those, what is traced,
            and one in `rate` of the rest; all: all.
        stream: for bytes, unbuffered; owned by who opened it.
        rate: of `sampled`.
        text: for people instead of JSON.
        capacity: lines that may wait.

    Attributes:
        active: True while successful requests may be logged.
    """

    def __init__(
        self,
        mode: RequestLogMode,
        stream: BinaryIO,
        rate: int = SAMPLED_ONE_IN,
        text: bool = False,
        capacity: int = CAPACITY,
    ) -> None:
        self._mode = mode
        self.active = mode in ("sampled", "all")
        self._stream = stream
        self._rate = rate
        self._format = as_text if text else as_json
        self._seen = 0
        self._second, self._in_second = 0, 0
        self._lines: BackgroundWorker[tuple[AccessRecord, str]] | None = None
        if mode != "off":
            self._lines = BackgroundWorker(
                "headrace-request-log", "request_log", self._write, capacity, on_failed=self._deactivate
            )

    @property
    def errors(self) -> bool:
        """A request that fails is logged."""
        return self._lines is not None and not self._lines.failed

    def wants(self, traced: bool) -> bool:
        """Called once for each request, while `active`; True if it is to be logged whatever becomes of it."""
        if self._mode == "all":
            return True
        if traced:
            return True
        self._seen += 1
        return self._seen % self._rate == 0

    def wants_error(self, now_ns: int) -> bool:
        """Called once for each request that fails and is not logged in any case; False, and counted, if there are too many."""
        if not self.errors or self._mode == "all":
            return self.errors
        second = now_ns // NS_PER_S
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > _MAX_ERRORS_HZ:
            DROPPED.count("request_log")
            return False
        return True

    def put(self, record: AccessRecord, trace_id: str = "") -> None:
        """Write a line, soon."""
        if self._lines is not None:
            self._lines.put((record, trace_id))

    def close(self) -> None:
        """Write what waits; waits a few seconds at most for a slow disk or terminal."""
        if self._lines is not None and not self._lines.close(_CLOSE_TIMEOUT_S):
            logger.error("the request log is stuck, lines are lost")

    def _deactivate(self) -> None:
        self.active = False

    def _write(self, lines: list[tuple[AccessRecord, str]]) -> None:
        offset_ns = time.time_ns() - monotonic_ns()
        rest = memoryview("".join([self._format(fields(*line, offset_ns)) for line in lines]).encode())
        while rest:
            rest = rest[self._stream.write(rest) :]


def fields(record: AccessRecord, trace_id: str, offset_ns: int) -> dict[str, object]:
    """What a line says.

    Args:
        record: of the request.
        trace_id: "" if it is not traced; then that of its caller stands there.
        offset_ns: from monotonic time to nanoseconds since 1970.
    """
    good = not record.error
    document: dict[str, object] = {
        "time": iso8601((record.ended_ns + offset_ns) / NS_PER_S),
        "level": "info" if good else "warning" if record.reason in _CLIENTS else "error",
        "logger": logger.name,
        "id": redact(record.request_id[:_MAX_NAME]),
        "trace_id": trace_id or (record.context.trace_id if record.context else ""),
        "client": record.client[:_MAX_NAME],
        "protocol": record.protocol,
        "model": record.model[:_MAX_NAME],
        "version": record.version[:_MAX_NAME],
        "rows": record.rows,
        "status": record.status,
        "reason": record.reason,
    }
    if record.error:
        document["error"] = redact(record.error[:_MAX_TEXT])
    if record.times is not None:
        document["batch"] = {"id": record.batch_id, "rows": record.batch_rows, "closed": record.closed}
    times = {f"{name}_us": (end_ns - begin_ns) // NS_PER_US for name, begin_ns, end_ns in phases(record)}
    document["times"] = {**times, "total_us": max(record.ended_ns - record.received_ns, 0) // NS_PER_US}
    return document


def as_json(document: dict[str, object]) -> str:
    """One line in ASCII: JSON's own escaping keeps clients from forging lines."""
    return json.dumps(document, separators=(",", ":")) + "\n"


def as_text(document: dict[str, object]) -> str:
    """One line, with everything escaped that could steer a terminal."""
    moment = datetime.fromisoformat(str(document["time"])).astimezone()
    times, batch = document["times"], document.get("batch")
    assert isinstance(times, dict)
    words = [
        f"{moment:%H:%M:%S.%f}"[:-3],
        f"{document['protocol']} {document['status']}",
        f"{document['model']}/{document['version']}".rstrip("/"),
        f"{times['total_us'] / 1000:.1f} ms",
    ]
    parts = [f"{name[:-3]} {spent / 1000:.1f}" for name, spent in times.items() if name != "total_us" and spent >= 50]
    if parts:
        words.append(f"({', '.join(parts)})")
    if document["rows"]:
        words.append(f"rows {document['rows']}")
    if isinstance(batch, dict):
        words.append(f"of {batch['rows']} ({batch['closed']})")
    words += [f"{name} {document[name]}" for name in ("client", "id", "trace_id") if document[name]]
    if "error" in document:
        words.append(f"{document['reason']}: {document['error']}")
    return escape("  ".join(words)) + "\n"


def open_stream(path: str) -> BinaryIO:
    """The stream to a file, at its end, or to the standard error if it is "".

    Raises:
        OSError: the file cannot be written.
    """
    if path:
        return Path(path).open("ab", buffering=0)
    return open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)
