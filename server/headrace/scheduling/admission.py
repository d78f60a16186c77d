"""What a request becomes in the queue: an entry, or one for each part of a request that is larger than a batch."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.completion import Completion
from headrace.core.errors import BadRequest, ModelFailed, TooLarge
from headrace.core.request import InferRequest
from headrace.core.tensor import ModelSpec
from headrace.scheduling.batch import cut
from headrace.scheduling.join import Joint, PartCompletion
from headrace.scheduling.output_check import OutputMismatch
from headrace.scheduling.queue import Entry
from headrace.scheduling.sequencer import Sequencer


class Admission:
    """Makes entries, and has them answered in order where that is wanted; from any thread.

    Args:
        spec: what callers may send.
        max_rows: rows in the largest batch.
        split: cut a request larger than a batch into parts, or refuse it.
        most_parts: entries that the queue holds.
        levels: number of priority levels, 1 if there are none.
        default_level: 1-based level of a request that names none.
        leave: gives an entry's place in the queue back.
        sequencer: keeps the answers in order; None: they need not be.
        objective_ns: how long after its arrival a request should be answered, 0 if nothing is promised.

    Attributes:
        mismatch: what the model returned that has put an end to splitting; None while requests may be split.
    """

    def __init__(
        self,
        spec: ModelSpec,
        max_rows: int,
        split: bool,
        most_parts: int,
        levels: int,
        default_level: int,
        leave: Callable[[Entry], None],
        sequencer: Sequencer | None,
        objective_ns: int = 0,
    ) -> None:
        self._spec = spec
        self._max_rows = max_rows
        self._split = split
        self._most_parts = most_parts
        self._levels = levels
        self._default_level = default_level
        self._leave = leave
        self._sequencer = sequencer
        self._objective_ns = objective_ns
        self.mismatch: OutputMismatch | None = None

    def entries(self, request: InferRequest, completion: Completion, now_ns: int) -> list[Entry]:
        """The entries of a request, whose answer goes to `completion`.

        Raises:
            BadRequest: more rows than a batch holds, and the model does not split.
            TooLarge: more rows than the queue holds.
            ModelFailed: more rows than a batch holds, and the model has returned outputs that cannot be joined.
        """
        level = 0 if self._levels == 1 else self._level(request)
        if request.rows <= self._max_rows:
            entry = Entry(request, completion, level, now_ns, self._objective_ns)
            entry.leave = self._leave
            completion.after = entry.on_settled
            entries = [entry]
        else:
            entries = self._parts(request, completion, level, now_ns)
        if self._sequencer is not None:
            _sequence(self._sequencer, [entry.completion for entry in entries])
        return entries

    def _level(self, request: InferRequest) -> int:
        # Triton's rule: 0 and numbers beyond the lowest level mean the default.
        return (request.priority if 0 < request.priority <= self._levels else self._default_level) - 1

    def _parts(self, request: InferRequest, whole: Completion, level: int, now_ns: int) -> list[Entry]:
        max_rows = self._max_rows
        # The CPU may run fewer rows together than a request may have.
        allowed = max(max_rows, self._spec.max_batch_size)
        if self._spec.max_batch_size == 0 or (not self._split and request.rows > allowed):
            raise BadRequest(
                f"the request has {request.rows} rows, model '{self._spec.name}' takes at most {allowed} and does not split "
                "larger requests: send fewer rows at once, or write oversize: split in its configuration if rows are independent"
            )
        if self.mismatch is not None:
            raise ModelFailed(
                f"the request has {request.rows} rows, model '{self._spec.name}' takes at most {max_rows} in one execution, and "
                f"larger requests are no longer split: {self.mismatch}"
            )
        if request.rows > max_rows * self._most_parts:
            raise TooLarge(
                f"the request has {request.rows} rows, which is more than the whole queue of model '{self._spec.name}' holds"
            )
        pieces = cut(request.inputs, request.rows, max_rows)
        joint = Joint(whole, len(pieces), lambda: self.mismatch)
        entries: list[Entry] = []
        for index, inputs in enumerate(pieces):
            part = InferRequest(
                inputs=inputs,
                rows=min(max_rows, request.rows - index * max_rows),
                shape_key=request.shape_key,
                received_ns=request.received_ns,
                deadline_ns=request.deadline_ns,
                client=request.client,
                size_bytes=request.size_bytes // len(pieces),
            )
            entry = Entry(part, PartCompletion(joint, index), level, now_ns, self._objective_ns)
            entry.leave = self._leave
            entry.leads = index == len(pieces) - 1
            entries.append(entry)

        def leave_all() -> None:
            for entry in entries:
                entry.on_settled()

        whole.after = leave_all
        return entries


def _sequence(sequencer: Sequencer, completions: list[Completion]) -> None:
    for completion in completions:
        before = completion.after

        def after(before: Callable[[], None] | None = before) -> None:
            if before is not None:
                before()
            sequencer.release()

        completion.after = after
    sequencer.admit(completions)
