"""Triton's trace settings and trace files, and the selection of requests for traces and the access log.

Trace files have the layout of Triton's and are written by their own thread.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple, Protocol

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import BadRequest, Forbidden, TooLarge, Unavailable
from headrace.core.telemetry import TraceContext
from headrace.observability.access_log import OK, AccessRecord, RequestLog
from headrace.observability.counters import DROPPED
from headrace.observability.logs import Pseudonyms, escape

logger = logging.getLogger("headrace.trace")

_QUEUE_RECORDS = 4096
# A new file costs a block of the file system, however small it is.
_FILE_BYTES = 4096
MAX_BYTES = 1 << 30
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One traced request.

    Attributes:
        number: of the trace, from 1.
        model: the model's name.
        version: of the model.
        request_id: the caller's own, "" if there is none.
        events: name and monotonic nanoseconds of each station, in order.
        log_frequency: traces in an indexed file, 0 for the one file without an index.
    """

    number: int
    model: str
    version: str
    request_id: str
    events: tuple[tuple[str, int], ...]
    log_frequency: int


class TraceWriter:
    """Writes records to `path`, or to `path`.0, `path`.1, ... where they carry a `log_frequency`.

    Each file is a JSON array (Triton's documentation, "JSON Trace Output") and is valid after every record: the closing bracket
    is written with it and overwritten by the next. An indexed file ends when it holds `log_frequency` traces of the record
    written last; unlike Triton's, traces of models with different frequencies share the files.

    `put` and `close` are called by one thread, the event loop; the records pass to the writer's thread through the queue.

    Args:
        path: where the operator wants the traces; existing files are overwritten.
        max_bytes: in all files together; the writer stops there, so that no client can fill the disk.

    Attributes:
        dropped: records lost because the queue was full.
        failed: the writer cannot write any more; the log says why.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self.dropped = 0
        DROPPED.declare("traces")
        self.failed = False
        self._path = path
        self._left_bytes = max_bytes
        self._queue: queue.Queue[TraceRecord | None] = queue.Queue(_QUEUE_RECORDS)
        self._thread: threading.Thread | None = None
        self._single: _JsonArray | None = None
        self._indexed: _JsonArray | None = None
        self._index = 0

    def put(self, record: TraceRecord) -> None:
        """Hand over a record; drops and counts it if the writer is behind or has failed."""
        if self._thread is None:
            # A daemon: a disk that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._run, name="headrace-traces", daemon=True)
            self._thread.start()
        try:
            if self.failed:
                raise queue.Full
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1
            DROPPED.count("traces")

    def close(self) -> None:
        """Write what waits and close the files; waits at most ten seconds for a slow disk. No `put` may follow."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=_CLOSE_TIMEOUT_S)
        except queue.Full:
            self.failed = True
        else:
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the trace writer is stuck, traces are lost")
        if self.dropped:
            logger.warning("%d traces were dropped: they came faster than they could be written", self.dropped)

    def _run(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                self._write(record)
                if self._left_bytes <= 0:
                    self.failed = True
                    logger.error("the trace files have reached their limit: tracing stops")
                    break
        except OSError as error:
            self.failed = True
            logger.error("tracing stops, --trace-file %s cannot be written: %s", self._path, error.strerror)
        except Exception:
            self.failed = True
            logger.exception("tracing stops, the trace writer has died")
        finally:
            for file in (self._single, self._indexed):
                if file is not None:
                    file.close()
            # Nobody reads any more: `close` must find room.
            while self.failed and not self._queue.empty():
                self._queue.get_nowait()

    def _write(self, record: TraceRecord) -> None:
        if record.log_frequency == 0:
            if self._single is None:
                self._single = self._open(self._path)
            self._left_bytes -= self._single.append(record)
            return
        if self._indexed is None:
            self._indexed = self._open(f"{self._path}.{self._index}")
            self._index += 1
        self._left_bytes -= self._indexed.append(record)
        if self._indexed.records >= record.log_frequency:
            self._indexed.close()
            self._indexed = None

    def _open(self, path: str) -> _JsonArray:
        self._left_bytes -= _FILE_BYTES
        return _JsonArray(path)


class _JsonArray:
    """A file with a JSON array that records are appended to."""

    def __init__(self, path: str) -> None:
        self._file = FileIO(path, "w")
        self._file.write(b"[\n]")
        self.records = 0

    def append(self, record: TraceRecord) -> int:
        """Write one record; how many bytes that were."""
        text = (",\n" if self.records else "\n") + _to_triton(record) + "\n]"
        data = text.encode("ascii")
        self._file.seek(-2, 2)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]
        self.records += 1
        return len(data)

    def close(self) -> None:
        self._file.close()


def _to_triton(record: TraceRecord) -> str:
    """The two objects of one trace, a line each: what was traced, and when it was where."""
    about: dict[str, object] = {
        "id": record.number,
        "model_name": record.model,
        "model_version": int(record.version) if record.version.isdecimal() else record.version,
    }
    if record.request_id:
        about["request_id"] = record.request_id
    stations = [{"name": name, "ns": ns} for name, ns in record.events]
    return json.dumps(about) + ",\n" + json.dumps({"id": record.number, "timestamps": stations})


_MAX_MODELS = 1024
_MAX_NAME = 1024
_MAX_REQUEST_ID = 256
_NUMBERS = {"trace_rate": (1, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}
_NUMBER = re.compile(r"-?[0-9]{1,10}")
_RATE = 1000
_OFF, _TIMESTAMPS = 0, 1
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")
_FILE, _SPANS = 0, 1
_MODES = {"triton": _FILE, "opentelemetry": _SPANS}
_MODE_NAMES = {mode: name for name, mode in _MODES.items()}
# Clients decide by their own trace's flag: whatever they ask, there are no more than so many a second. The spans of a request
# cost about 0.3 ms of a processor that the event loop needs, too.
_MAX_PROPAGATED_HZ = 200


class Spans(Protocol):
    """Makes spans of requests; see `headrace.observability.spans.SpanWriter`."""

    @property
    def failed(self) -> bool:
        """No spans are made any more."""

    def put(self, access_record: AccessRecord, trace_id: str) -> None:
        """A request is over that is traced."""

    def close(self) -> None:
        """Send what waits."""


class TraceSelection(NamedTuple):
    """How a request is traced.

    Attributes:
        trace_id: its trace, 32 hexadecimal digits; "" if it goes to the trace file.
        log_frequency: traces a file.
    """

    trace_id: str
    log_frequency: int = 0


@dataclass(slots=True)
class _Sampler:
    """Settings in force, and how far they have been used up.

    Attributes:
        on: trace at all.
        mode: to the trace file, or as spans.
        rate: every how many requests one is traced, 0 for none but those whose callers trace them.
        count: how many more are traced, -1 for no end.
        log_frequency: traces a file.
        seen: requests since the settings came into force.
    """

    on: bool
    mode: int
    rate: int
    count: int
    log_frequency: int
    seen: int = 0

    @property
    def live(self) -> bool:
        return self.on and (self.count != 0 or self.mode == _SPANS)


class Tracer:
    """Decides which requests are traced and hands them to a writer: of trace files in Triton's layout, or of spans.

    Settings hold for all models; a model may have its own for some of them, and then counts its own requests, as in Triton.
    What a model or the server as a whole has not set comes from the next one up. `trace_count` is how many traces are still to
    come.

    As spans (mode opentelemetry) a request follows its caller: it is traced if the caller's trace is sampled, whatever rate and
    count say, and not if it is not; only requests without a trace are sampled by them.

    Not thread-safe: everything is called on the event loop.

    Args:
        path: the trace file, set by the operator; "" if there is none.
        max_bytes: of all trace files together; tracing stops there.
        spans: makes spans, where the operator has named a receiver: then they are the default, and tracing is on.
        rate: the default of trace_rate.
        clock: monotonic nanoseconds.

    Attributes:
        active: some request might be traced.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int = MAX_BYTES,
        spans: Spans | None = None,
        rate: int = _RATE,
        clock: Clock = monotonic_ns,
    ) -> None:
        self.active = False
        self._path = path
        self._writer = TraceWriter(path, max_bytes)
        self._spans = spans
        self._clock = clock
        self._second, self._in_second = 0, 0
        on = _OFF if spans is None else _TIMESTAMPS
        mode = _FILE if spans is None else _SPANS
        self._defaults: Mapping[str, int] = {
            "trace_level": on,
            "trace_rate": rate,
            "trace_count": -1,
            "log_frequency": 0,
            "trace_mode": mode,
        }
        self._modes = {mode} | ({_FILE} if path else set())
        self._number = 0
        self._global: dict[str, int] = {}
        self._models: dict[str, dict[str, int]] = {}
        self._sampler = _sampler(self._defaults)
        self._samplers: dict[str, _Sampler] = {}
        self._refresh()

    def settings(self, model: str) -> Mapping[str, object]:
        """In force for a model, for all if it is "": strings, `trace_level` a list of them.

        Of the trace file only the name is told, not the folder.
        """
        sampler = self._samplers.get(model, self._sampler)
        return {
            "trace_level": ["TIMESTAMPS" if sampler.on else "OFF"],
            "trace_rate": str(sampler.rate),
            "trace_count": str(sampler.count),
            "log_frequency": str(sampler.log_frequency),
            "trace_file": os.path.basename(self._path),
            "trace_mode": _MODE_NAMES[sampler.mode],
        }

    def update(self, model: str, changes: Mapping[str, object]) -> Mapping[str, object]:
        """Change settings, all or none of them, and give what is in force then. The requests are counted anew.

        Args:
            model: whose settings (that there is such a model is the caller's to check), "" for all.
            changes: by name. A value is text, a number or a list of one of them (gRPC has nothing but lists); `trace_level` is
                "OFF", or a list with "TIMESTAMPS" and perhaps "TENSORS", which is not recorded. None or an empty list resets a
                setting to that of the server, or to the default.

        Raises:
            BadRequest: an unknown setting or a value it does not take.
            TooLarge: too many models with settings of their own.
            Forbidden: trace_file, or TIMESTAMPS where the operator has given neither a trace file nor a receiver, or the
                trace_mode of the one that is not given.
            Unavailable: TIMESTAMPS after the writer has failed.
        """
        if len(model) > _MAX_NAME:
            raise BadRequest(f"a model's name has at most {_MAX_NAME} characters")
        parsed = {name: self._parse(name, value) for name, value in changes.items()}
        if parsed.get("trace_level") == _TIMESTAMPS:
            mode = parsed.get("trace_mode")
            self._require_writer(self._samplers.get(model, self._sampler).mode if mode is None else mode)
        own: dict[str, int | None] = {**self._own(model), **parsed}
        chosen = {name: value for name, value in own.items() if value is not None}
        if model and chosen and model not in self._models and len(self._models) >= _MAX_MODELS:
            raise TooLarge(f"{_MAX_MODELS} models have trace settings of their own: reset some")
        self._apply(model, chosen)
        return self.settings(model)

    def select(self, model: str, context: TraceContext | None) -> TraceSelection | None:
        """Called once for each request, while `active`: how it is traced, None if it is not.

        Args:
            model: the version's model.
            context: its caller's trace.
        """
        sampler = self._samplers.get(model, self._sampler)
        if not sampler.live:
            return None
        if not self._usable(sampler.mode):
            self._refresh()
            return None
        if sampler.mode == _SPANS and context is not None:
            return self._follow(context.trace_id) if context.sampled else None
        sampler.seen += 1
        if sampler.count == 0 or not sampler.rate or sampler.seen % sampler.rate:
            return None
        if sampler.count > 0:
            sampler.count -= 1
            if sampler.count == 0:
                self._refresh()
        if sampler.mode == _SPANS:
            return TraceSelection(f"{random.getrandbits(128) or 1:032x}")
        return TraceSelection("", sampler.log_frequency)

    def record(self, pick: TraceSelection, access_record: AccessRecord) -> None:
        """A request that was picked is over. Only what was answered goes to the trace file."""
        if pick.trace_id:
            if self._spans is not None:
                self._spans.put(access_record, pick.trace_id)
            return
        if access_record.reason != OK:
            return
        self._number += 1
        events = [("REQUEST_START", access_record.received_ns), ("QUEUE_START", access_record.queued_ns)]
        times = access_record.times
        if times is not None:
            events.append(("COMPUTE_START", times.taken_ns))
            events.append(("COMPUTE_INPUT_END", times.assembled_ns))
            events.append(("COMPUTE_OUTPUT_START", times.computed_ns))
            events.append(("COMPUTE_END", times.split_ns))
        events.append(("REQUEST_END", access_record.done_ns))
        request_id = access_record.request_id[:_MAX_REQUEST_ID]
        self._writer.put(
            TraceRecord(
                self._number, access_record.model, access_record.version, request_id, tuple(events), pick.log_frequency
            )
        )

    def close(self) -> None:
        """Stop tracing, write and send what waits, and close the files."""
        self.active = False
        self._sampler = _sampler({**self._defaults, "trace_level": _OFF})
        self._samplers.clear()
        self._writer.close()
        if self._spans is not None:
            self._spans.close()

    def _follow(self, trace_id: str) -> TraceSelection | None:
        """Trace as the caller does; None, and counted, if too many callers did in this second."""
        second = self._clock() // NS_PER_S
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > _MAX_PROPAGATED_HZ:
            DROPPED.count("spans")
            return None
        return TraceSelection(trace_id)

    def _parse(self, name: str, value: object) -> int | None:
        """The value as a number, None to reset; raises BadRequest or Forbidden."""
        values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if name == "trace_file":
            # What stays as it is passes, so that a client may send back what it has read.
            if all(each == self.settings("")[name] for each in values):
                return None
            raise Forbidden("trace_file is the operator's: start the server with --trace-file")
        if name not in self._defaults:
            known = ", ".join(self.settings(""))
            raise BadRequest(f"unknown trace setting '{escape(name[:64])}': there are {known}")
        if not values:
            return None
        if name == "trace_level":
            return _level(values)
        if name == "trace_mode":
            modes = {_MODE_NAMES[mode]: mode for mode in sorted(self._modes)}
            if len(values) == 1 and isinstance(values[0], str) and values[0] in modes:
                return modes[values[0]]
            message = f"trace_mode must be {' or '.join(modes)}"
            if len(values) == 1 and values[0] in ("triton", "opentelemetry"):
                option = "--trace-file" if values[0] == "triton" else "--otlp-endpoint"
                raise Forbidden(f"{message}: {values[0]} needs a server started with {option}")
            raise BadRequest(message)
        low, high = _NUMBERS[name]
        if name == "trace_rate" and self._spans is not None:
            low = 0
        number = values[0]
        if isinstance(number, str) and _NUMBER.fullmatch(number):
            number = int(number)
        if len(values) > 1 or isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise BadRequest(f"{name} must be a whole number of {low} to {high}, as text")
        return number

    def _require_writer(self, mode: int) -> None:
        if not self._path and self._spans is None:
            raise Forbidden("there is nowhere for traces to go: start the server with --trace-file or --otlp-endpoint")
        if not self._usable(mode):
            raise Unavailable("tracing has stopped, traces cannot be written: the server's log tells why")

    def _usable(self, mode: int) -> bool:
        """Where traces of a mode go is there and works."""
        if mode == _SPANS:
            return self._spans is not None and not self._spans.failed
        return bool(self._path) and not self._writer.failed

    def _own(self, model: str) -> dict[str, int]:
        """What was set for a model (or for all), counted down to now."""
        own = dict(self._models.get(model, {}) if model else self._global)
        if "trace_count" in own:
            own["trace_count"] = self._samplers.get(model, self._sampler).count
        return own

    def _apply(self, model: str, own: dict[str, int]) -> None:
        """Put settings into force: those of a model, or those of all with the models that follow them."""
        if not model:
            self._global = own
            self._sampler = _sampler({**self._defaults, **own})
            for name in self._models:
                mine = self._own(name)
                self._models[name] = mine
                self._samplers[name] = _sampler({**self._defaults, **own, **mine})
        elif own:
            self._models[model] = own
            inherited = self._own("")
            self._samplers[model] = _sampler({**self._defaults, **inherited, **own})
        else:
            self._models.pop(model, None)
            self._samplers.pop(model, None)
        self._refresh()

    def _refresh(self) -> None:
        self.active = any(
            sampler.live and self._usable(sampler.mode) for sampler in (self._sampler, *self._samplers.values())
        )


def _level(values: list[object]) -> int:
    """The level in force for the names of `trace_level`; raises BadRequest.

    Triton records TENSORS too. Here the name is accepted beside TIMESTAMPS, and the settings in the answer do not list it.
    """
    for value in values:
        if value not in _LEVELS:
            shown = escape(str(value)[:64])
            raise BadRequest(f"trace_level '{shown}' is unknown: send ['OFF'] or ['TIMESTAMPS']")
    if "OFF" in values:
        if len(values) > 1:
            raise BadRequest(f"trace_level has {values}: 'OFF' cannot be combined, send it alone")
        return _OFF
    if "TIMESTAMPS" not in values:
        raise BadRequest("trace_level 'TENSORS' is not recorded by this server: send ['TIMESTAMPS'], or ['OFF']")
    if "TENSORS" in values:
        logger.warning("trace_level TENSORS is not recorded: TIMESTAMPS alone is in force")
    return _TIMESTAMPS


def _sampler(settings: Mapping[str, int]) -> _Sampler:
    return _Sampler(
        on=settings["trace_level"] == _TIMESTAMPS,
        mode=settings["trace_mode"],
        rate=settings["trace_rate"],
        count=settings["trace_count"],
        log_frequency=settings["log_frequency"],
    )


class Exemplars(Protocol):
    """Keeps examples of a version's durations; see `headrace.observability.counters.Recorder`."""

    def add_exemplar(self, total_ns: int, trace_id: str) -> None:
        """A request that took `total_ns` from arrival to answer was traced."""


class SamplingDecision(NamedTuple):
    """What a request was chosen for.

    Attributes:
        trace: how it is traced, None if it is not.
        log: it is logged whatever becomes of it.
    """

    trace: TraceSelection | None
    log: bool


class RequestObserver:
    """The one place that the front ends know.

    Everything is called on the event loop unless it says otherwise, `close` by who ends it.

    Args:
        tracer: decides what is traced.
        log: of requests.
        secret_clients: what names clients is a secret: they go under pseudonyms.
    """

    def __init__(self, tracer: Tracer, log: RequestLog, secret_clients: bool = False) -> None:
        self._tracer = tracer
        self._log = log
        self._pseudonyms = Pseudonyms() if secret_clients else None

    @property
    def active(self) -> bool:
        """Some request might be chosen: all that one looks at while nothing is traced or logged."""
        return self._tracer.active or self._log.active

    def sample(self, model: str, context: TraceContext | None) -> SamplingDecision | None:
        """Called once for each request on its way to the queue, while `active`.

        Args:
            model: the version's model.
            context: the caller's trace.

        Returns:
            What it was chosen for, None for nothing.
        """
        trace = self._tracer.select(model, context) if self._tracer.active else None
        log = self._log.active and self._log.wants(trace is not None)
        return SamplingDecision(trace, log) if log or trace is not None else None

    def answered(self, sampling: SamplingDecision, access_record: AccessRecord, exemplars: Exemplars) -> None:
        """A request that was chosen has its answer."""
        trace = sampling.trace
        if trace is not None and trace.trace_id and access_record.times is not None:
            exemplars.add_exemplar(access_record.times.split_ns - access_record.received_ns, trace.trace_id)
        self._record(sampling, access_record)

    def failed(self, sampling: SamplingDecision | None, access_record: AccessRecord) -> None:
        """A request, chosen or not, got an error.

        One that never came to the queue is traced if its caller's trace is sampled.
        """
        if (
            sampling is None
            and access_record.context is not None
            and access_record.context.sampled
            and self._tracer.active
        ):
            sampling = SamplingDecision(self._tracer.select(access_record.model, access_record.context), False)
        trace, log = sampling or SamplingDecision(None, False)
        log = log or self._log.wants_error(access_record.ended_ns)
        if log or trace is not None:
            self._record(SamplingDecision(trace, log), access_record)

    def close(self) -> None:
        """Write and send what waits."""
        self._tracer.close()
        self._log.close()

    def client_name(self, client: str) -> str:
        """What a client is called to whoever reads of it; from any thread."""
        return client if self._pseudonyms is None else self._pseudonyms.name(client)

    def _record(self, sampling: SamplingDecision, access_record: AccessRecord) -> None:
        if self._pseudonyms is not None:
            access_record = access_record._replace(client=self.client_name(access_record.client))
        trace_id = ""
        if sampling.trace is not None:
            trace_id = sampling.trace.trace_id
            self._tracer.record(sampling.trace, access_record)
        if sampling.log:
            self._log.put(access_record, trace_id)
