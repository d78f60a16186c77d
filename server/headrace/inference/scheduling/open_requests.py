"""Requests that outlive their batch: those of decoupled models, with any number of responses, and late results.

The completion of such a request is settled by the end that its model sends, by its deadline or by its cancellation.
Batch and request are recorded apart: the batch when it returns, the request at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.completion import Completion, Outcome
from headrace.core.errors import HeadraceError
from headrace.core.request import BatchTimes, InferResponse, ParameterValue, Responses
from headrace.core.tensor import Array
from headrace.inference.scheduling.queue import Entry
from headrace.observability.counters import Recorder
from headrace.runtimes.members import MemberOutputs, MemberResult

Deliver = Callable[
    [Iterable[tuple[Completion, Outcome]], Callable[[list[Completion]], object] | None], list[Completion]
]
"""Settles outcomes; see `headrace.core.completion.settle_all`."""
CheckOutputs = Callable[[Mapping[str, Array]], None]
"""Raises HeadraceError for outputs that do not fit the request."""


@dataclass(eq=False, repr=False)
class OpenEntry:
    """Entry of a batch whose request ends later. Any thread may call.

    Attributes:
        entry: the entry.
        responses: stream of the request; None for a late result.
        check: check of its outputs.
        recorder: counters of the version.
        deliver: settles outcomes.
        clock: returns monotonic nanoseconds.
        batch_rows, closed: rows and close reason of its batch.
        taken_ns, assembled_ns: times of its batch, monotonic.
    """

    entry: Entry
    responses: Responses | None
    check: CheckOutputs
    recorder: Recorder
    deliver: Deliver
    clock: Clock
    batch_rows: int
    closed: str
    taken_ns: int
    assembled_ns: int

    def __post_init__(self) -> None:
        self._last_ns = 0  # of the latest response; by the thread that sends
        self._once = threading.Lock()

    def finish(self, result: MemberResult) -> None:
        """Settle a request with its late result."""
        if not isinstance(result, dict):
            self.end(result if isinstance(result, HeadraceError) else None)
            return
        try:
            self.check(result)
        except HeadraceError as error:
            self.end(error)
            return
        self._settle(result, result.parameters if isinstance(result, MemberOutputs) else None)

    def end(self, error: HeadraceError | None) -> None:
        """Settle a request whose responses have all been sent, or with an error; a second call has no effect."""
        if error is None:
            self._settle({}, None)
        elif self._once.acquire(blocking=False):
            self.deliver([(self.entry.completion, error)], None)

    def _settle(self, outputs: dict[str, Array], parameters: Mapping[str, ParameterValue] | None) -> None:
        if not self._once.acquire(blocking=False):
            return
        entry, now_ns = self.entry, self.clock()
        # The model computes from the start of its batch to the end of the request.
        times = BatchTimes(self.taken_ns, self.assembled_ns, now_ns, now_ns)
        response = InferResponse(outputs, times, self.batch_rows, self.closed, parameters=parameters, done_ns=now_ns)

        def count(lost: list[Completion]) -> None:
            if not lost:
                queue_ns, total_ns = self.taken_ns - entry.enqueued_ns, now_ns - entry.received_ns
                self.recorder.record_open_request(entry.rows, queue_ns, total_ns, times)

        self.deliver([(entry.completion, response)], count)


class StreamedEntry(OpenEntry):
    """Entry of a decoupled model; see `headrace.runtimes.members.ResponseSink`."""

    responses: Responses

    def send(self, result: dict[str, Array] | HeadraceError, size_bytes: int, is_final: bool) -> None:
        """Check a response and pass it on; one that does not fit ends the request with an error."""
        entry = self.entry
        if entry.completion.is_settled:
            return
        response: InferResponse | HeadraceError
        if isinstance(result, HeadraceError):
            if is_final:  # the outcome: no response follows
                self.end(result)
                return
            response = result
        else:
            try:
                self.check(result)
            except HeadraceError as error:
                self.end(error)
                return
            parameters = result.parameters if isinstance(result, MemberOutputs) else None
            response = InferResponse(result, parameters=parameters, final=is_final)
        now_ns, last_ns = self.clock(), self._last_ns
        self._last_ns = now_ns
        self.recorder.record_response(now_ns - (last_ns or entry.received_ns), is_first=not last_ns)
        self.responses.send(response, size_bytes)
