"""Triton's trace settings and trace files, and the sampling of requests for traces and the access log.

Trace files have Triton's layout and are written by their own thread.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import NamedTuple, Protocol

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import BadRequest, Forbidden, TooLarge, Unavailable
from headrace.core.response_bodies import TraceSettings
from headrace.core.telemetry import TraceContext
from headrace.observability.access_log import OK, AccessRecord, RequestLog
from headrace.observability.background import BackgroundWorker
from headrace.observability.counters import Recorder
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.logs import Pseudonyms, escape

logger = logging.getLogger("headrace.trace")

_QUEUE_RECORDS = 4096
# A new file takes at least one block of the file system.
_FILE_BYTES = 4096
MAX_BYTES = 1 << 30
_CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One traced request.

    Attributes:
        number: of the trace, from 1.
        model: name of the model.
        version: of the model.
        request_id: from the caller, "" for none.
        events: names and monotonic nanoseconds, in order.
        log_frequency: number of traces in an indexed file, 0 for the file without an index.
    """

    number: int
    model: str
    version: str
    request_id: str
    events: tuple[tuple[str, int], ...]
    log_frequency: int


class TraceWriter(BackgroundWorker[TraceRecord]):
    """Writes records to `path`, or those with a `log_frequency` to `path`.0, `path`.1, ...

    Each file is a JSON array (Triton's documentation, "JSON Trace Output") and is valid after every record: the closing bracket
    is written with each record and overwritten by the next. An indexed file is complete when it has the `log_frequency` of the
    last record; unlike Triton's, traces of models with different frequencies share the files.

    `put` and `close` are called on the event loop, everything else runs on the writer's thread; `close` closes the files once
    that thread has ended.

    Args:
        path: of the trace file; existing files are overwritten. "" for none: then the writer has no thread.
        max_bytes: maximum size of all files together, so that no client can fill the disk. The writer stops there.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(
            "headrace-traces",
            "traces",
            self._write_all,
            _QUEUE_RECORDS,
            on_failed=self._close_files,
            start=bool(path),
        )
        self._path = path
        self._left_bytes = max_bytes
        self._single: _JsonArray | None = None
        self._indexed: _JsonArray | None = None
        self._index = 0

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Write the queued records and close the files; waits at most 10 s for a slow disk."""
        is_done = super().close(timeout_s)
        if is_done:
            self._close_files()
        else:
            logger.error("traces are lost: they could not be written within %g s", timeout_s)
        if self.dropped:
            logger.warning("%d traces were dropped: the trace writer's queue was full, or it had stopped", self.dropped)
        return is_done

    def _close_files(self) -> None:
        for file in (self._single, self._indexed):
            if file is not None:
                file.close()

    def _write_all(self, records: list[TraceRecord]) -> None:
        for number, record in enumerate(records):
            try:
                self._write(record)
            except OSError as error:
                del records[:number]
                raise OSError(f"--trace-file {self._path} cannot be written: {error.strerror}") from error
            if self._left_bytes <= 0:
                del records[: number + 1]
                raise OSError("the trace files have reached their maximum size")

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
    """A file with a JSON array of records."""

    def __init__(self, path: str) -> None:
        self._file = FileIO(path, "w")
        self._file.write(b"[\n]")
        self.records = 0

    def append(self, record: TraceRecord) -> int:
        """Append a record; return the number of written bytes."""
        text = (",\n" if self.records else "\n") + _to_triton(record) + "\n]"
        data = text.encode("ascii")
        self._file.seek(-2, 2)
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[self._file.write(remaining) or 0 :]
        self.records += 1
        return len(data)

    def close(self) -> None:
        self._file.close()


def _to_triton(record: TraceRecord) -> str:
    """Format a trace as two JSON objects, a line each: its model and its timestamps."""
    header: dict[str, object] = {
        "id": record.number,
        "model_name": record.model,
        "model_version": int(record.version) if record.version.isdecimal() else record.version,
    }
    if record.request_id:
        header["request_id"] = record.request_id
    timestamps = [{"name": name, "ns": ns} for name, ns in record.events]
    return json.dumps(header) + ",\n" + json.dumps({"id": record.number, "timestamps": timestamps})


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
# Maximum rate of requests that are traced because their caller's trace is sampled, which clients control. The spans of a
# request cost about 0.3 ms of CPU time that the event loop needs, too.
_MAX_PROPAGATED_HZ = 200


class Spans(Protocol):
    """Destination of spans; see `headrace.observability.spans.SpanWriter`."""

    @property
    def failed(self) -> bool:
        """True if no more spans are made."""

    def put(self, access_record: AccessRecord, trace_id: str) -> None:
        """Queue the record of a finished request."""

    def close(self) -> None:
        """Send the queued spans."""


class TraceSelection(NamedTuple):
    """Destination of the trace of one request.

    Attributes:
        trace_id: of its spans, 32 hexadecimal digits; "" for the trace file.
        log_frequency: number of traces in an indexed file.
    """

    trace_id: str
    log_frequency: int = 0


@dataclass(slots=True)
class _Sampler:
    """Trace settings in force, and the requests counted by them."""

    on: bool  # tracing is on
    mode: int  # trace file or spans
    rate: int  # one in `rate` requests is traced; 0: only requests in a sampled trace of their caller
    count: int  # number of further traces, -1 for no limit
    log_frequency: int  # number of traces in an indexed file
    seen: int = 0  # requests since the settings are in force

    @property
    def live(self) -> bool:
        return self.on and (self.count != 0 or self.mode == _SPANS)


class Tracer:
    """Selects the requests to trace and passes their records to the writer of trace files or of spans.

    Settings apply to all models. A model may have its own, and then counts its own requests, as in Triton. A setting that a
    model does not have is that of the server, else the default. `trace_count` is the number of further traces.

    With spans (mode opentelemetry), a request in a trace of its caller is traced if and only if that trace is sampled. Rate and
    count apply to requests without a trace.

    Not thread-safe: all methods are called on the event loop.

    Args:
        path: of the trace file (`--trace-file`), "" for none.
        max_bytes: maximum size of all trace files together; tracing stops there.
        spans: destination of spans (`--otlp-endpoint`), None for none. With it, tracing is on by default, as spans.
        rate: default of trace_rate.
        clock: monotonic nanoseconds.

    Attributes:
        active: False if no request can be traced.
        on_change: callback for changes of `active`.
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
        self.on_change: Callable[[], None] | None = None
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

    def settings(self, model: str) -> TraceSettings:
        """Return the settings in force for a model, or with "" for all: strings, and for `trace_level` a list of strings.

        `trace_file` has the name of the file without its folder.
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

    def update(self, model: str, changes: Mapping[str, object]) -> TraceSettings:
        """Change all given settings or none of them; return the settings in force. The count of requests restarts.

        Args:
            model: name of the model, whose existence the caller checks; "" for all models.
            changes: new values by name. A value is text, a number, or a list with one of them (gRPC has only lists).
                `trace_level` is "OFF", or a list with "TIMESTAMPS" and optionally "TENSORS", which is not recorded. None or an
                empty list resets a setting to that of the server, or to the default.

        Raises:
            BadRequest: an unknown setting, or a value that is not allowed.
            TooLarge: too many models have settings of their own.
            Forbidden: trace_file; or TIMESTAMPS or a trace_mode without the option that it needs (`--trace-file`,
                `--otlp-endpoint`).
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

    def changes(self) -> dict[str, dict[str, int]]:
        """Return the changed settings by model, and of all models under ""; any thread may call."""
        return {"": self._global, **self._models}

    def restore(self, changes: Mapping[str, dict[str, int]]) -> None:
        """Take over the `changes` of another process."""
        for model, own in changes.items():
            self._apply(model, own)

    def select(self, model: str, context: TraceContext | None) -> TraceSelection | None:
        """Return the destination of a request's trace, None if it is not traced; call it once for each request while `active`.

        Args:
            model: name of the model.
            context: the caller's trace context, None for none.
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

    def record(self, selection: TraceSelection, access_record: AccessRecord) -> None:
        """Write the trace of a finished request that was selected. The trace file has successful requests only."""
        if selection.trace_id:
            if self._spans is not None:
                self._spans.put(access_record, selection.trace_id)
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
                self._number,
                access_record.model,
                access_record.version,
                request_id,
                tuple(events),
                selection.log_frequency,
            )
        )

    def close(self) -> None:
        """Stop tracing, write and send queued traces, and close the files."""
        self.active = False
        self._sampler = _sampler({**self._defaults, "trace_level": _OFF})
        self._samplers.clear()
        self._writer.close()
        if self._spans is not None:
            self._spans.close()

    def _follow(self, trace_id: str) -> TraceSelection | None:
        """Trace a request in the caller's trace; None, and counted as dropped, over the limit of 200 a second."""
        second = self._clock() // NS_PER_S
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        if self._in_second > _MAX_PROPAGATED_HZ:
            DROPPED.count("spans")
            return None
        return TraceSelection(trace_id)

    def _parse(self, name: str, value: object) -> int | None:
        """Parse a value as a number, None to reset the setting; raises BadRequest or Forbidden."""
        values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if name == "trace_file":
            # An unchanged value is accepted, so that a client can send back settings that it has read.
            if all(each == self.settings("")["trace_file"] for each in values):
                return None
            raise Forbidden("trace_file cannot be changed by clients: start the server with --trace-file")
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
            raise Forbidden("traces have no destination: start the server with --trace-file or --otlp-endpoint")
        if not self._usable(mode):
            raise Unavailable("tracing has stopped, traces cannot be written: see the server's log for the reason")

    def _usable(self, mode: int) -> bool:
        """Return True if the destination of a mode exists and works."""
        if mode == _SPANS:
            return self._spans is not None and not self._spans.failed
        return bool(self._path) and not self._writer.failed

    def _own(self, model: str) -> dict[str, int]:
        """Return the settings of a model, or with "" those of all, with the present trace_count."""
        own = dict(self._models.get(model, {}) if model else self._global)
        if "trace_count" in own:
            own["trace_count"] = self._samplers.get(model, self._sampler).count
        return own

    def _apply(self, model: str, own: dict[str, int]) -> None:
        """Apply settings of a model, or with "" of all models, which also changes inherited settings of models."""
        if not model:
            self._global = own
            self._sampler = _sampler({**self._defaults, **own})
            for name in self._models:
                overrides = self._own(name)
                self._models[name] = overrides
                self._samplers[name] = _sampler({**self._defaults, **own, **overrides})
        elif own:
            self._models[model] = own
            inherited = self._own("")
            self._samplers[model] = _sampler({**self._defaults, **inherited, **own})
        else:
            self._models.pop(model, None)
            self._samplers.pop(model, None)
        self._refresh()

    def _refresh(self) -> None:
        was_active = self.active
        self.active = any(
            sampler.live and self._usable(sampler.mode) for sampler in (self._sampler, *self._samplers.values())
        )
        if self.active != was_active and self.on_change is not None:
            self.on_change()


def _level(values: list[object]) -> int:
    """Parse the names of `trace_level`; raises BadRequest.

    Triton also records TENSORS. This server accepts the name together with TIMESTAMPS and does not list it in the settings.
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


class SamplingDecision(NamedTuple):
    """Selection of a request for a trace and the access log, made before its result is known.

    Attributes:
        trace: destination of the trace, None for no trace.
        log: log the request whether it succeeds or fails.
    """

    trace: TraceSelection | None
    log: bool


class RequestObserver:
    """Samples requests for traces and the access log, and passes on their records; the interface of the protocols.

    Methods are called on the event loop unless they say otherwise, `close` also after its end.

    Args:
        tracer: selects and writes traces.
        log: the access log.
        secret_clients: client names are secrets (`--client-header` names such a header), so records have pseudonyms.

    Attributes:
        active: False if no request can be selected; the only check for each request while nothing is traced or logged.
    """

    def __init__(self, tracer: Tracer, log: RequestLog, secret_clients: bool = False) -> None:
        self._tracer = tracer
        self._log = log
        self._on_change: Callable[[], None] = lambda: None
        self.active = tracer.active or log.active
        tracer.on_change = self._on_traces
        self._pseudonyms = Pseudonyms() if secret_clients else None

    def _on_traces(self) -> None:
        self.active = self._tracer.active or self._log.active
        self._on_change()

    @property
    def traces(self) -> bool:
        """True if requests may be traced."""
        return self._tracer.active

    @property
    def logs_errors(self) -> bool:
        """True if failed requests are logged."""
        return self._log.errors

    def on_change(self, callback: Callable[[], None]) -> None:
        """Set a callback for changes of `traces`; called on the event loop."""
        self._on_change = callback

    def sample(self, model: str, context: TraceContext | None) -> SamplingDecision | None:
        """Select a request for a trace and the log; call it once for each request before it is queued, while `active`.

        Args:
            model: name of the model.
            context: the caller's trace context, None for none.

        Returns:
            The decision, None if the request is neither traced nor logged.
        """
        trace = self._tracer.select(model, context) if self._tracer.active else None
        log = self._log.active and self._log.wants(trace is not None)
        return SamplingDecision(trace, log) if log or trace is not None else None

    def record_success(self, sampling: SamplingDecision, access_record: AccessRecord, recorder: Recorder) -> None:
        """Record a selected request that succeeded."""
        trace = sampling.trace
        if trace is not None and trace.trace_id and access_record.times is not None:
            recorder.add_exemplar(access_record.times.split_ns - access_record.received_ns, trace.trace_id)
        self._record(sampling, access_record)

    def record_failure(self, sampling: SamplingDecision | None, access_record: AccessRecord) -> None:
        """Record a request that failed, selected or not.

        A request that failed before the queue is traced if its caller's trace is sampled.
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
        """Write and send all queued records."""
        self._tracer.close()
        self._log.close()

    def client_name(self, client: str) -> str:
        """Return the name of a client in logs and traces: its pseudonym if names are secrets. Thread-safe."""
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
