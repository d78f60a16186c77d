"""Triton's trace settings ("trace extension"), and which requests they let into the trace file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from server.core.errors import BadRequest, Forbidden, TooLarge, Unavailable
from server.core.request import InferRequest, InferResponse
from server.core.tensor import ModelSpec
from server.observability.logs import escape
from server.observability.trace_file import MAX_BYTES, TraceRecord, TraceWriter

_MAX_MODELS = 1024
_MAX_NAME = 1024
_MAX_REQUEST_ID = 256
_NUMBERS = {"trace_rate": (1, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}
_NUMBER = re.compile(r"-?[0-9]{1,10}")
_DEFAULTS: Mapping[str, int] = {"trace_level": 0, "trace_rate": 1000, "trace_count": -1, "log_frequency": 0}
_OFF, _TIMESTAMPS = 0, 1
_LEVELS = {"OFF": _OFF, "TIMESTAMPS": _TIMESTAMPS}


@dataclass(slots=True)
class _Sampler:
    """Settings in force, and how far they have been used up.

    Attributes:
        on: trace at all.
        rate: every how many requests one is traced.
        count: how many more are traced, -1 for no end.
        log_frequency: traces a file.
        seen: requests since the settings came into force.
    """

    on: bool
    rate: int
    count: int
    log_frequency: int
    seen: int = 0

    @property
    def live(self) -> bool:
        return self.on and self.count != 0


class Tracer:
    """Decides which requests are traced and hands them to the writer.

    Settings hold for all models; a model may have its own for some of them, and then counts its own requests, as in Triton.
    What a model or the server as a whole has not set comes from the next one up. `trace_count` is how many traces are still to
    come.

    Not thread-safe: everything is called on the event loop.

    Args:
        path: the trace file, set by the operator; "" if there is none, then nothing can be traced.
        max_bytes: of all trace files together; tracing stops there.

    Attributes:
        active: some request might be traced.
    """

    def __init__(self, path: str, max_bytes: int = MAX_BYTES) -> None:
        self.active = False
        self._path = path
        self._writer = TraceWriter(path, max_bytes)
        self._number = 0
        self._global: dict[str, int] = {}
        self._models: dict[str, dict[str, int]] = {}
        self._sampler = _sampler(_DEFAULTS)
        self._samplers: dict[str, _Sampler] = {}

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
            "trace_mode": "triton",
        }

    def update(self, model: str, changes: Mapping[str, object]) -> Mapping[str, object]:
        """Change settings, all or none of them, and give what is in force then. The requests are counted anew.

        Args:
            model: whose settings (that there is such a model is the caller's to check), "" for all.
            changes: by name. A value is text, a number or a list of one of them (gRPC has nothing but lists); `trace_level` is
                "OFF" or "TIMESTAMPS". None or an empty list resets a setting to that of the server, or to the default.

        Raises:
            BadRequest: an unknown setting or a value it does not take.
            TooLarge: too many models with settings of their own.
            Forbidden: trace_file, or TIMESTAMPS without a trace file: both are the operator's.
            Unavailable: TIMESTAMPS after the writer has failed.
        """
        if len(model) > _MAX_NAME:
            raise BadRequest(f"a model's name has at most {_MAX_NAME} characters")
        parsed = {name: self._parse(name, value) for name, value in changes.items()}
        if parsed.get("trace_level") == _TIMESTAMPS:
            self._require_writer()
        own: dict[str, int | None] = {**self._own(model), **parsed}
        chosen = {name: value for name, value in own.items() if value is not None}
        if model and chosen and model not in self._models and len(self._models) >= _MAX_MODELS:
            raise TooLarge(f"{_MAX_MODELS} models have trace settings of their own: reset some")
        self._apply(model, chosen)
        return self.settings(model)

    def record(
        self, spec: ModelSpec, request: InferRequest, response: InferResponse, queued_ns: int, done_ns: int
    ) -> None:
        """A request was answered; every n-th is written, as the settings say.

        Args:
            spec: of the model.
            request: as it was queued.
            response: its answer; a request that was cut into several has no times of its batch.
            queued_ns: monotonic, when it was handed to the queue.
            done_ns: monotonic, when its answer was there.
        """
        sampler = self._samplers.get(spec.name, self._sampler)
        if not sampler.live:
            return
        sampler.seen += 1
        if sampler.seen % sampler.rate:
            return
        if self._writer.failed:
            self.active = False
            return
        if sampler.count > 0:
            sampler.count -= 1
            if sampler.count == 0:
                self._refresh()
        self._number += 1
        events = [("REQUEST_START", request.received_ns), ("QUEUE_START", queued_ns)]
        times = response.times
        if times is not None:
            events.append(("COMPUTE_START", times.taken_ns))
            events.append(("COMPUTE_INPUT_END", times.assembled_ns))
            events.append(("COMPUTE_OUTPUT_START", times.computed_ns))
            events.append(("COMPUTE_END", times.split_ns))
        events.append(("REQUEST_END", done_ns))
        request_id = request.id[:_MAX_REQUEST_ID]
        self._writer.put(
            TraceRecord(self._number, spec.name, spec.version, request_id, tuple(events), sampler.log_frequency)
        )

    def close(self) -> None:
        """Stop tracing, write what waits and close the files."""
        self.active = False
        self._sampler = _sampler(_DEFAULTS)
        self._samplers.clear()
        self._writer.close()

    def _parse(self, name: str, value: object) -> int | None:
        """The value as a number, None to reset; raises BadRequest or Forbidden."""
        values = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
        if name in ("trace_file", "trace_mode"):
            # What stays as it is passes, so that a client may send back what it has read.
            if all(each == self.settings("")[name] for each in values):
                return None
            if name == "trace_file":
                raise Forbidden("trace_file is the operator's: start the server with --trace-file")
            raise BadRequest("trace_mode must be triton")
        if name not in _DEFAULTS:
            known = ", ".join(self.settings(""))
            raise BadRequest(f"unknown trace setting '{escape(name[:64])}': there are {known}")
        if not values:
            return None
        if name == "trace_level":
            if len(values) == 1 and isinstance(values[0], str) and values[0] in _LEVELS:
                return _LEVELS[values[0]]
            raise BadRequest(f"trace_level must be one of {', '.join(_LEVELS)}")
        low, high = _NUMBERS[name]
        number = values[0]
        if isinstance(number, str) and _NUMBER.fullmatch(number):
            number = int(number)
        if len(values) > 1 or isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            raise BadRequest(f"{name} must be a whole number of {low} to {high}, as text")
        return number

    def _require_writer(self) -> None:
        if not self._path:
            raise Forbidden("there is no trace file: start the server with --trace-file")
        if self._writer.failed:
            raise Unavailable("tracing has stopped, the trace file cannot be written: the server's log tells why")

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
            self._sampler = _sampler({**_DEFAULTS, **own})
            for name in self._models:
                mine = self._own(name)
                self._models[name] = mine
                self._samplers[name] = _sampler({**_DEFAULTS, **own, **mine})
        elif own:
            self._models[model] = own
            inherited = self._own("")
            self._samplers[model] = _sampler({**_DEFAULTS, **inherited, **own})
        else:
            self._models.pop(model, None)
            self._samplers.pop(model, None)
        self._refresh()

    def _refresh(self) -> None:
        live = self._sampler.live or any(sampler.live for sampler in self._samplers.values())
        self.active = live and bool(self._path) and not self._writer.failed


def _sampler(settings: Mapping[str, int]) -> _Sampler:
    return _Sampler(
        on=settings["trace_level"] == _TIMESTAMPS,
        rate=settings["trace_rate"],
        count=settings["trace_count"],
        log_frequency=settings["log_frequency"],
    )
