"""One request of a pipeline whose rows run alone: a `PipelineRun` for each row, whose outputs are joined.

A pipeline with `each` and `max_batch_size` computes for each row what a request with that row alone gets: steps with results of
different sizes, conditions and fallbacks are those of the row. The models of the steps batch the rows again. See
docs/decisions/0025-rows-of-a-pipeline.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from headrace.core.completion import LoopCompletion, Mailbox, Outcome
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed
from headrace.core.request import InferRequest, InferResponse, PipelineStepTimes
from headrace.core.tensor import Array
from headrace.inference.pipelines.run import PipelineRun, error_of_running, prefixed_error, unexpected_error
from headrace.inference.scheduling.version_handle import VersionHandle

# Rows of a request that run at once: enough for full batches, few enough that the event loop starts them within milliseconds.
MAX_RUNNING_ROWS = 64
# A copy of that many bytes takes about 0.1 ms, which the event loop can wait for.
_LARGE_BYTES = 1 << 20

CreateRun = Callable[[InferRequest, LoopCompletion, dict[int, int]], PipelineRun]
"""Creates the run of one row from its request, its completion and the counts of `each` of the whole request."""


def join_rows(where: str, responses: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the outputs of all rows, with a batch dimension in front.

    Args:
        where: pipeline, for messages.
        responses: outputs by name of each row, without a batch dimension; at least one row.

    Raises:
        BadRequest: an output has another shape in another row.
    """
    first = responses[0]
    for name, array in first.items():
        for row, outputs in enumerate(responses):
            if outputs[name].shape != array.shape:
                raise BadRequest(
                    f"{where}, output '{name}' has shape {list(array.shape)} for row 0 and {list(outputs[name].shape)} for row "
                    f"{row}: rows with results of different shapes cannot be joined; send each row in a request of its own"
                )
    if len(responses) == 1:
        return {name: array[np.newaxis] for name, array in first.items()}
    return {name: np.stack([outputs[name] for outputs in responses]) for name in first}


class RowRuns:
    """One request of a pipeline, each row of which is a run of its own. Ownership: the event loop.

    At most `MAX_RUNNING_ROWS` rows run at once. The error of a row ends the request, and the other rows are cancelled.

    Args:
        create: creates the run of a row.
        members: leased version by index of the step.
        request: request of the pipeline; every input has a batch dimension.
        completion: completion of the whole request.
        where: pipeline, for messages.
        mailbox: mailbox of the event loop.
        on_end: called once with this object when the request is over, before the caller is resumed.

    Attributes:
        members: leased version by index of the step.
        request: the request.
        is_over: True once the request has an outcome.
        outcome: the response, or the error; None if the caller gave up.
        predicted_ns: predicted end, monotonic; 0 for none.
    """

    __slots__ = (
        "_completion", "_create", "_each_rows", "_mailbox", "_next", "_on_end", "_responses", "_running", "_runs", "_where",
        "is_over", "members", "outcome", "predicted_ns", "request",
    )  # fmt: skip

    def __init__(
        self,
        create: CreateRun,
        members: Mapping[int, VersionHandle],
        request: InferRequest,
        completion: LoopCompletion,
        where: str,
        mailbox: Mailbox,
        on_end: Callable[[RowRuns], None],
    ) -> None:
        self._create, self.members, self._where = create, members, where
        self.request, self._completion = request, completion
        self._mailbox, self._on_end = mailbox, on_end
        self._next = 0  # row that is started next
        self._runs: list[PipelineRun] = []
        self._running: dict[int, LoopCompletion] = {}  # by row
        self._responses: dict[int, InferResponse] = {}  # by row
        self._each_rows: dict[int, int] = {}
        self.is_over, self.predicted_ns = False, 0
        self.outcome: Outcome | None = None

    @property
    def times(self) -> list[PipelineStepTimes]:
        """Times of the steps that are done, row by row."""
        return [times for run in self._runs for times in run.times]

    def start(self) -> None:
        """Start the first rows. Settles the completion if one of them is rejected."""
        self._completion.after = self._on_settled
        try:
            self._start_rows()
        except Exception as error:  # any: the caller would wait for ever
            self._completion.settle_now(unexpected_error(self._where, error))

    def _start_rows(self) -> None:
        request = self.request
        while self._next < request.rows and len(self._running) < MAX_RUNNING_ROWS and not self.is_over:
            row = self._next
            self._next += 1
            inputs = {name: array[row : row + 1].reshape(array.shape[1:]) for name, array in request.inputs.items()}
            size_bytes = request.size_bytes // request.rows
            inner = self._running[row] = LoopCompletion(self._mailbox)
            alone = request.replace(inputs=inputs, rows=1, shape_key=None, size_bytes=size_bytes)
            run = self._create(alone, inner, self._each_rows)
            self._runs.append(run)
            run.start()
            # After `start`: the callback of a row that is over at once must not start the next one within this loop.
            inner.then(partial(self._row_done, row))

    def _row_done(self, row: int) -> None:
        """Callback of the completion of a row; raises nothing."""
        inner = self._running.pop(row)
        if self.is_over:
            return
        response = inner.outcome
        try:
            if not isinstance(response, InferResponse):
                error = response or ModelFailed("the row ended without a response: retry it")
                if self.request.rows > 1 and isinstance(error, HeadraceError):
                    error = prefixed_error(error, f"row {row} of the request")
                self._completion.settle_now(error)
                return
            self._responses[row] = response
            if len(self._responses) < self.request.rows:
                self._start_rows()
                return
            self._join()
        except Exception as error:
            self._completion.settle_now(unexpected_error(self._where, error))

    def _join(self) -> None:
        """Settle with the joined outputs of all rows; large ones are copied on a thread."""
        responses = [self._responses[row].outputs for row in range(self.request.rows)]
        size_bytes = sum([array.nbytes for outputs in responses for array in outputs.values()])
        if len(responses) == 1 or size_bytes <= _LARGE_BYTES:
            self._completion.settle_now(self._joined(responses))
            return
        copied = self._mailbox.loop.run_in_executor(None, self._joined, responses)
        copied.add_done_callback(lambda future: self._completion.settle_now(future.result()))

    def _joined(self, responses: Sequence[Mapping[str, Array]]) -> Outcome:
        """Return the response, or its error; any thread."""
        try:
            return InferResponse(join_rows(f"in {self._where}", responses), steps=tuple(self.times))
        except BadRequest as error:
            return error
        except Exception as error:  # out of memory
            return unexpected_error(self._where, error)

    def _on_settled(self) -> None:
        """Cancel the rows that still run; called once the request has any outcome, also a timeout or a cancellation."""
        self.is_over = True
        self.outcome = outcome = self._completion.outcome
        try:
            for inner in tuple(self._running.values()):
                inner.settle(error_of_running(outcome))
            if isinstance(outcome, HeadraceError):
                outcome.steps = tuple(self.times)
        finally:
            self._responses.clear()
            self._on_end(self)
