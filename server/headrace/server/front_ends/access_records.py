"""Access records of front ends: sent to the engine process, which samples, logs and traces them as those of its own requests.

The engine process says on the shared page which records it needs, so a front end sends none while nothing is logged or traced.
Records of one turn of the event loop travel in one message (MessagePack, an array for each record).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from headrace.core.clock import NS_PER_S
from headrace.core.telemetry import TraceContext
from headrace.observability.access_log import MAX_ERRORS_HZ, AccessRecord
from headrace.observability.counters import Recorder
from headrace.observability.labelled_counter import DROPPED
from headrace.observability.tracing import RequestObserver, SamplingDecision
from headrace.server.front_ends.shared_page import SharedPage

SUCCESSES, ERRORS_LOGGED, TRACES = 1, 2, 4
"""Bits of `SharedPage.record_needs`: successful requests may be selected, failed ones are logged, requests are traced."""

_SELECTED = SamplingDecision(None, True)
_MAX_PENDING = 4096


class SentRecord(NamedTuple):
    """A record on its way to the engine process.

    Attributes:
        sampled: the request reached the queue while successful requests could be selected.
        record: of the request.
    """

    sampled: bool
    record: AccessRecord


class ForwardingObserver:
    """Sends the records of a front end to the engine process; stands for `RequestObserver` there.

    Ownership: the event loop.

    Args:
        send: sends one message; must not block.
        defer: calls a function after the work at hand, `call_soon` of the event loop.

    Attributes:
        needs: page of the engine process, which says which records it needs; None while there is none, and no record is kept.
    """

    def __init__(self, send: Callable[[bytes], object], defer: Callable[[Callable[[], None]], object]) -> None:
        self.needs: SharedPage | None = None
        self._send, self._defer = send, defer
        self._encoder = msgspec.msgpack.Encoder()
        self._pending: list[SentRecord] = []
        self._second = self._in_second = 0

    @property
    def active(self) -> bool:
        """False if no successful request can be selected."""
        return self.needs is not None and bool(self.needs.record_needs & SUCCESSES)

    def sample(self, _model: str, _context: TraceContext | None) -> SamplingDecision | None:
        """Select every request: the engine process decides when it receives the record."""
        return _SELECTED

    def record_success(self, _sampling: SamplingDecision, access_record: AccessRecord, _recorder: Recorder) -> None:
        """Send the record of a request that succeeded."""
        self._put(SentRecord(True, access_record))

    def record_failure(self, sampling: SamplingDecision | None, access_record: AccessRecord) -> None:
        """Send the record of a request that failed, if it may be logged or traced."""
        needs = 0 if self.needs is None else self.needs.record_needs
        context = access_record.context
        if sampling is not None or (needs & TRACES and context is not None and context.sampled):
            self._put(SentRecord(sampling is not None, access_record))
        elif needs & ERRORS_LOGGED:
            second = access_record.ended_ns // NS_PER_S
            if second != self._second:
                self._second, self._in_second = second, 0
            self._in_second += 1
            if self._in_second > MAX_ERRORS_HZ:
                DROPPED.count("request_log")
            else:
                self._put(SentRecord(False, access_record))

    def flush(self) -> None:
        """Send the records that wait for the end of the loop's turn."""
        pending, self._pending = self._pending, []
        if pending:
            self._send(self._encoder.encode(pending))

    def _put(self, record: SentRecord) -> None:
        if not self._pending:
            self._defer(self.flush)
        elif len(self._pending) >= _MAX_PENDING:
            self.flush()
            self._defer(self.flush)
        self._pending.append(record)


class RecordSink:
    """Receives the records of all front ends in the engine process.

    Ownership: the event loop.

    Args:
        observer: samples, logs and traces.
        recorder_of: returns the counters of a model version, which get exemplars; None if it is not served.
    """

    def __init__(self, observer: RequestObserver, recorder_of: Callable[[str, str], Recorder | None]) -> None:
        self._observer = observer
        self._recorder_of = recorder_of
        self._decoder = msgspec.msgpack.Decoder(list[SentRecord])

    def receive(self, message: bytes) -> None:
        """Process a message of `ForwardingObserver`; raises msgspec.DecodeError for anything else."""
        observer = self._observer
        for sampled, record in self._decoder.decode(message):
            sampling = observer.sample(record.model, record.context) if sampled and observer.active else None
            if record.error:
                observer.record_failure(sampling, record)
            elif sampling is not None:
                recorder = self._recorder_of(record.model, record.version)
                observer.record_success(sampling, record, recorder or Recorder())


def record_needs(observer: RequestObserver) -> int:
    """Return the records that an observer may select, for the shared page."""
    return SUCCESSES * observer.active + ERRORS_LOGGED * observer.logs_errors + TRACES * observer.traces
