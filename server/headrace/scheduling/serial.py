"""One batch at a time: pull, stack, run, split, settle."""

from __future__ import annotations

import threading

from headrace.backends.base import Execution, ExecutionLost
from headrace.core.clock import Clock, monotonic_ns
from headrace.core.request import BatchTimes
from headrace.core.tensor import Array
from headrace.scheduling.answers import Answers
from headrace.scheduling.batch import Staging
from headrace.scheduling.outlook import UnderWay
from headrace.scheduling.queue import Entry
from headrace.scheduling.scheduler import Scheduler
from headrace.scheduling.selection import Batch


class SerialRunner:
    """Runs an execution that takes one batch after the other; see `headrace.scheduling.instance.Runner`.

    Args:
        execution: what runs; used from the thread that calls `serve` (or `execute`).
        scheduler: where batches come from.
        max_rows: rows in the largest batch.
        answers: settles what came of them.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self,
        execution: Execution,
        scheduler: Scheduler,
        max_rows: int,
        answers: Answers,
        clock: Clock = monotonic_ns,
    ) -> None:
        self._execution = execution
        self._scheduler = scheduler
        self._staging = Staging(max_rows)
        self._answers = answers
        self._clock = clock
        self._held: list[Entry] = []
        self._taken_ns = 0

    def serve(self) -> None:
        """Run batches until the scheduler is closed and empty."""
        sleeper = threading.Lock()
        sleeper.acquire()
        answers = self._answers
        while (batch := self._scheduler.next_batch(sleeper)) is not None:
            batch.entries[:] = [entry for entry in batch.entries if not entry.completion.done]
            if batch.entries:
                self._held, self._taken_ns = batch.entries, batch.taken_ns
                answers.begin(self)
                try:
                    self.execute(batch)
                finally:
                    answers.at_work.discard(self)
                self._held = []
            del batch  # its arrays may be large, and the next may be long in coming

    def give_up(self, error: Exception) -> None:
        """From any thread: answer what is being run with an error."""
        self._answers.give_up(self._held, error)

    def under_way(self) -> UnderWay:
        """From any thread: what is being run."""
        held = self._held
        return UnderWay(0, [(self._taken_ns, sum([entry.rows for entry in held]))] if held else ())

    def execute(self, batch: Batch) -> None:
        """Run a batch and settle every member; if it fails as a whole, run its members one by one."""
        instances = len(self._answers.at_work) or 1
        try:
            times, results = self._run(batch.entries, batch.taken_ns)
        except ExecutionLost:
            raise
        except Exception as error:  # whatever else a backend raises belongs to this batch alone
            for entry in self._answers.failed(batch.entries, batch.reason, error):
                if not entry.completion.done:
                    self.execute(Batch([entry], batch.reason, self._clock()))
            return
        busy_ns = times.split_ns - times.taken_ns
        self._answers.at_work.discard(self)  # first: who has the answer may ask again before this thread goes on
        self._answers.settle(batch.entries, batch.reason, times, results, busy_ns, instances)

    def _run(self, entries: list[Entry], taken_ns: int) -> tuple[BatchTimes, list[dict[str, Array]]]:
        inputs = self._staging.stack(entries)
        assembled_ns = self._clock()
        outputs = self._execution.run(inputs)
        computed_ns = self._clock()
        results = self._answers.split(outputs, entries)
        return BatchTimes(taken_ns, assembled_ns, computed_ns, self._clock()), results
