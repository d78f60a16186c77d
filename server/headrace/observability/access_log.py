"""Access log: one line for each request, as JSON or text, written by its own thread."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import datetime
from typing import BinaryIO, NamedTuple, cast

from headrace.core.clock import NS_PER_S, NS_PER_US, monotonic_ns
from headrace.core.request import BatchTimes, PipelineStepTimes
from headrace.core.telemetry import PHASES, RequestLogMode, TraceContext
from headrace.observability.background import BackgroundWorker
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.logs import escape, iso8601, redact
from headrace.observability.output import standard_error_writer

OK = "ok"


class AccessRecord(NamedTuple):
    """One finished request. Times are monotonic nanoseconds, 0 for a stage that the request did not reach.

    Attributes:
        protocol: http or grpc.
        model: name of the served model, or the requested name if there is no such model.
        version: "" if it is unknown.
        status: of the response: an HTTP status, or the name of a gRPC code.
        received_ns: arrival of the whole request.
        ended_ns: its response was ready to be sent.
        queued_ns: it was put in the queue.
        done_ns: the event loop had its result.
        request_id: from the caller, "" for none.
        client: name of the client, "" for none.
        rows: of the request, 0 if it was not decoded.
        context: the caller's trace context.
        reason: "ok", or the error's reason in the metrics.
        error: message of the error, "" for none.
        times: of its batch; None for an error, and for a request that was cut into several batches.
        batch_rows, closed: as in `InferResponse`. The record has copies, so that it does not keep the tensors alive.
        cached: the response came from the response cache.
        steps: steps of a pipeline request that have ended; () for any other.
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
    cached: bool = False
    steps: tuple[PipelineStepTimes, ...] = ()

    @property
    def batch_id(self) -> str:
        """Identifies the batch within its version; "" for a request in no batch, or in several."""
        return "" if self.times is None else f"{self.times.assembled_ns:x}"


_BATCH_PHASES = PHASES[1:-1]  # one for each time of `BatchTimes`, which ends it


class Phase(NamedTuple):
    """One phase of a request, in monotonic nanoseconds."""

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
"""Requests for each line in mode `sampled`: ten lines a second at 1,000 requests a second."""

_MAX_TEXT = 512
_MAX_NAME = 256
_CLOSE_TIMEOUT_S = 5.0
# Bounds the disk space and the CPU time that a client can use up with invalid requests.
MAX_ERRORS_HZ = 100
"""Lines of failed requests in a second, unless all requests are logged."""
# Reasons that are the client's fault, or no fault of the server: logged as warnings.
_CLIENTS = frozenset(
    ("bad_request", "too_large", "conflict", "forbidden", "not_found", "quota", "cancelled", "unsupported")
)


class RequestLog:
    """Selects the requests to log and writes one line for each.

    `wants`, `wants_error`, `put` and `close` are called on the event loop; `close` also after it has ended. Only the writer
    thread uses the stream.

    Args:
        mode: `off`: none. `errors`: failed requests, at most 100 a second. `sampled`: failed and traced requests, and one in
            `rate` of the others. `all`: every request.
        stream: unbuffered, for bytes; the caller closes it.
        rate: of mode `sampled`.
        text: write text in place of JSON.

    Attributes:
        active: True while successful requests may be logged.
    """

    def __init__(self, mode: RequestLogMode, stream: BinaryIO, rate: int = SAMPLED_ONE_IN, text: bool = False) -> None:
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
                "headrace-request-log", "request_log", self._write, on_failed=self._deactivate
            )

    @property
    def errors(self) -> bool:
        """True if failed requests are logged."""
        return self._lines is not None and not self._lines.failed

    def wants(self, traced: bool) -> bool:
        """Return True if a request is logged whether it succeeds or fails; call it once for each request while `active`."""
        if self._mode == "all":
            return True
        if traced:
            return True
        self._seen += 1
        return self._seen % self._rate == 0

    def wants_error(self, now_ns: int) -> bool:
        """Return True if a failed request that `wants` did not select is logged; call it once for each of them.

        Requests over the limit of 100 a second are counted as dropped.

        Args:
            now_ns: monotonic.
        """
        if not self.errors or self._mode == "all":
            return self.errors
        second = now_ns // NS_PER_S
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > MAX_ERRORS_HZ:
            DROPPED.count("request_log")
            return False
        return True

    def put(self, record: AccessRecord, trace_id: str = "") -> None:
        """Queue a line for the writer thread; `trace_id` is "" for a request that is not traced."""
        if self._lines is not None:
            self._lines.put((record, trace_id))

    def close(self) -> None:
        """Write the queued lines; waits at most 5 s for a slow disk or terminal."""
        if self._lines is not None and not self._lines.close(_CLOSE_TIMEOUT_S):
            logger.error("request log: lines are lost, they could not be written within %g s", _CLOSE_TIMEOUT_S)

    def _deactivate(self) -> None:
        self.active = False

    def _write(self, lines: list[tuple[AccessRecord, str]]) -> None:
        offset_ns = time.time_ns() - monotonic_ns()
        remaining = memoryview("".join([self._format(fields(*line, offset_ns)) for line in lines]).encode())
        while remaining:
            remaining = remaining[self._stream.write(remaining) :]


def fields(record: AccessRecord, trace_id: str, offset_ns: int) -> dict[str, object]:
    """Return the fields of a line by name.

    Args:
        record: of the request.
        trace_id: "" if the request is not traced; the line then has that of the caller's trace context.
        offset_ns: added to monotonic time to get nanoseconds since 1970.
    """
    is_success = not record.error
    document: dict[str, object] = {
        "time": iso8601((record.ended_ns + offset_ns) / NS_PER_S),
        "level": "info" if is_success else "warning" if record.reason in _CLIENTS else "error",
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
    if record.cached:
        document["cached"] = True
    times = {f"{name}_us": (end_ns - begin_ns) // NS_PER_US for name, begin_ns, end_ns in phases(record)}
    document["times"] = {**times, "total_us": max(record.ended_ns - record.received_ns, 0) // NS_PER_US}
    return document


def as_json(document: dict[str, object]) -> str:
    """Format a line as JSON in ASCII. JSON escapes line breaks, so clients cannot forge lines."""
    return json.dumps(document, separators=(",", ":")) + "\n"


def as_text(document: dict[str, object]) -> str:
    """Format a line as the server's log has it; escapes everything that could control a terminal."""
    moment = datetime.fromisoformat(str(document["time"])).astimezone().isoformat(timespec="seconds")
    times, batch = document["times"], document.get("batch")
    assert isinstance(times, dict)
    columns = [
        f"{moment} {str(document['level']).upper():<8} {document['protocol']} {document['status']}",
        f"{document['model']}/{document['version']}".rstrip("/"),
        f"{times['total_us'] / 1000:.1f} ms",
    ]
    parts = [
        f"{name[:-3]} {time_us / 1000:.1f}" for name, time_us in times.items() if name != "total_us" and time_us >= 50
    ]
    if parts:
        columns.append(f"({', '.join(parts)})")
    if document["rows"]:
        columns.append(f"rows {document['rows']}")
    if isinstance(batch, dict):
        columns.append(f"of {batch['rows']} ({batch['closed']})")
    columns += [f"{name} {document[name]}" for name in ("client", "id", "trace_id") if document[name]]
    if "error" in document:
        columns.append(f"{document['reason']}: {document['error']}")
    return escape("  ".join(columns)) + "\n"


def open_stream(path: str) -> BinaryIO:
    """Open a file to append to it, or standard error.

    Args:
        path: of the file, "" for standard error.

    Returns:
        An unbuffered stream for bytes.

    Raises:
        OSError: the file cannot be written, or is a pipe that no process reads.
    """
    if path:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        return open(descriptor, "wb", buffering=0)
    queued = standard_error_writer()
    if queued is not None:
        return cast(BinaryIO, queued)
    if sys.stderr is None:
        return open(os.devnull, "wb", buffering=0)
    return open(sys.stderr.fileno(), "wb", buffering=0, closefd=False)
