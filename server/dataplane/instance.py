"""One instance of a model: a thread that pulls batches, runs them and settles their answers."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from server.backends.base import Execution
from server.core.clock import Clock, monotonic_ns
from server.core.completion import Completion, Outcome
from server.core.errors import HeadraceError, ModelFailed
from server.core.request import BatchTimes, InferResponse
from server.core.tensor import Array
from server.dataplane.batch import Staging, split
from server.dataplane.queue import Entry
from server.dataplane.scheduler import Batch, Scheduler
from server.observability.recorder import Recorder

logger = logging.getLogger("headrace.instance")

Deliver = Callable[[Iterable[tuple[Completion, Outcome]]], object]
WarmUp = Callable[[Execution], None]


class Instance:
    """Runs batches of one model version on its own thread until the scheduler is closed and empty.

    Args:
        name: of the thread, for logs and profilers.
        open_execution: makes the execution, on the instance's thread.
        scheduler: where batches come from.
        max_rows: rows in the largest batch.
        recorder: counts what is done.
        deliver: settles answers.
        on_exit: called once from the thread when it ends, with the error that killed it, or None.
        clock: monotonic nanoseconds.

    Attributes:
        opened: done once the execution is open and warm; holds the error if it is not to be had.
    """

    def __init__(
        self,
        name: str,
        open_execution: Callable[[], Execution],
        scheduler: Scheduler,
        max_rows: int,
        recorder: Recorder,
        deliver: Deliver,
        on_exit: Callable[[BaseException | None], None],
        clock: Clock = monotonic_ns,
    ) -> None:
        self.name = name
        self._open_execution = open_execution
        self._scheduler = scheduler
        self._staging = Staging(max_rows)
        self._recorder = recorder
        self._deliver = deliver
        self._on_exit = on_exit
        self._clock = clock
        self._held: list[Entry] = []
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._warm_up: WarmUp | None = None
        self.opened: Future[None] = Future()

    def start(self, warm_up: WarmUp | None = None) -> None:
        """Start the thread.

        Args:
            warm_up: called on the thread with the execution, before the first batch is pulled.
        """
        self._warm_up = warm_up
        self._thread.start()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread to end, for ever if `timeout_s` is None; False if it has not after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def give_up(self, error: Exception) -> None:
        """From any thread: answer what is being run with an error, since the backend does not come back."""
        self._deliver([(entry.completion, error) for entry in self._held])

    def _main(self) -> None:
        cause: BaseException | None = None
        try:
            execution = self._open_execution()
            try:
                self._prepare(execution)
                self._pull(execution)
            finally:
                execution.close()
        except BaseException as error:  # a dying instance says so, whatever it dies of
            cause = error
        finally:
            # First the count, then the answers: who has been told that it died finds the model no longer ready.
            try:
                self._on_exit(cause)
            finally:
                if cause is not None:
                    self._end(cause)

    def _end(self, cause: BaseException) -> None:
        if not self.opened.done():
            self.opened.set_exception(cause)
            return
        self.give_up(ModelFailed("the instance that ran the request died"))
        logger.error("instance %s died", self.name, exc_info=cause)

    def _prepare(self, execution: Execution) -> None:
        warm_up, self._warm_up = self._warm_up, None  # its arrays may be large
        if warm_up is not None:
            warm_up(execution)
        del warm_up
        self.opened.set_result(None)

    def _pull(self, execution: Execution) -> None:
        sleeper = threading.Lock()
        sleeper.acquire()
        while (batch := self._scheduler.next_batch(sleeper)) is not None:
            batch.entries[:] = [entry for entry in batch.entries if not entry.completion.done]
            self._held = batch.entries
            if batch.entries:
                self.execute(execution, batch)
            self._held = []

    def execute(self, execution: Execution, batch: Batch) -> None:
        """Run a batch and settle every member; if it fails as a whole, run its members one by one."""
        try:
            times, results = self._run(execution, batch.entries, batch.taken_ns)
        except Exception as error:  # whatever a backend raises belongs to this batch alone
            self._recorder.failed_batch(batch.reason.value)
            if len(batch.entries) == 1:
                self._fail(batch.entries[0], error)
                return
            logger.debug("a batch of %d failed as a whole: running its members singly", len(batch.entries))
            for entry in batch.entries:
                if not entry.completion.done:
                    self.execute(execution, Batch([entry], batch.reason, self._clock()))
            return
        pairs: list[tuple[Completion, Outcome]] = [
            (entry.completion, InferResponse(outputs, times))
            for entry, outputs in zip(batch.entries, results, strict=True)
        ]
        taken = self._deliver(pairs)
        answered = batch.entries
        if taken != len(answered):  # some callers left while the batch ran: theirs is no success
            answered = [
                entry
                for entry, (completion, outcome) in zip(answered, pairs, strict=True)
                if completion.outcome is outcome or completion.outcome is None
            ]
        self._record(batch, answered, times)

    def _run(
        self, execution: Execution, entries: list[Entry], taken_ns: int
    ) -> tuple[BatchTimes, list[dict[str, Array]]]:
        inputs = self._staging.stack(entries)
        assembled_ns = self._clock()
        outputs = execution.run(inputs)
        computed_ns = self._clock()
        results = split(outputs, entries)
        return BatchTimes(taken_ns, assembled_ns, computed_ns, self._clock()), results

    def _record(self, batch: Batch, answered: list[Entry], times: BatchTimes) -> None:
        done_ns, taken_ns = times.split_ns, times.taken_ns
        leading = [entry for entry in answered if entry.leads]
        self._recorder.batch(
            sum([entry.rows for entry in answered]),
            sum([entry.rows for entry in batch.entries]),
            batch.reason.value,
            times,
            [taken_ns - entry.enqueued_ns for entry in leading],
            [done_ns - entry.received_ns for entry in leading],
        )
        self._scheduler.report(done_ns - taken_ns)

    def _fail(self, entry: Entry, error: Exception) -> None:
        if isinstance(error, HeadraceError):
            failure: HeadraceError = error
        else:
            reference = uuid.uuid4().hex[:12]
            logger.error("request failed in the model (reference %s)", reference, exc_info=error)
            failure = ModelFailed(
                f"the model failed on this request; the server's log has the cause ({reference})", reference
            )
        self._deliver([(entry.completion, failure)])
