"""One overlapped instance without an event loop, with callers that tests can wait for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from headrace.core.completion import settle_all
from headrace.core.errors import Unavailable
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import FP32, Array, TensorSpec
from headrace.inference.scheduling.admission import AdmissionController
from headrace.inference.scheduling.batch_results import BatchResults
from headrace.inference.scheduling.batching import CostModel
from headrace.inference.scheduling.instance import BatchRunner, Instance, OnDeath
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.inference.scheduling.launch_pacing import LaunchPacing
from headrace.inference.scheduling.output_check import OutputCheck
from headrace.inference.scheduling.overlapped_runner import OverlappedRunner
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.scheduler import Scheduler
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.serial_runner import SerialRunner
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution
from headrace.runtimes.overlapped import OverlappedExecution

from tests.support.completions import RecordedCompletion
from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import SPEC

# Its requests have rows of different widths.
_ANY_WIDTH = replace(SPEC, outputs={"y": TensorSpec("y", FP32, (-1, -1))})


class Caller(RecordedCompletion):
    """Waits for its answer."""

    __slots__ = ("notified",)

    def __init__(self) -> None:
        super().__init__()
        self.notified = threading.Event()

    def notify(self) -> None:
        super().notify()
        self.notified.set()

    def answer(self) -> InferResponse | Exception:
        assert self.notified.wait(60), "no answer came"
        assert self.outcome is not None
        assert len(self.outcomes) == 1
        return self.outcome


def batch_results(
    recorder: Recorder,
    policy: BatchPolicy,
    check: OutputCheck,
    report: Callable[[int], None] = lambda _busy_ns: None,
) -> BatchResults:
    """Return what settles batches without a handle."""
    latency_table = LatencyTable()
    admission = AdmissionController(CostModel(latency_table, policy), policy, list)
    return BatchResults(recorder, settle_all, report, check, latency_table, admission, lambda _error: None)


class Bench:
    """One overlapped instance with its scheduler.

    Args:
        model: execution of the instance.
        batch: batch policy.
        last: True if no other instance serves the queue: at its death waiting requests fail.
        pace: launch pacing with batches in flight.
    """

    def __init__(
        self,
        model: FakeOverlapped,
        batch: BatchPolicy | None = None,
        last: bool = True,
        pace: LaunchPacing | None = None,
    ):
        self.model = model
        self.pace = pace
        self.last = last
        self.policy = batch or BatchPolicy(8)
        self.clock: Callable[[], int] = itertools.count(1).__next__
        self.scheduler = Scheduler(self.policy, clock=self.clock)
        self.recorder = Recorder()
        self.reports: list[int] = []
        check = OutputCheck(_ANY_WIDTH)
        self.answers = batch_results(self.recorder, self.policy, check, self.reports.append)
        self.exits: list[BaseException | None] = []
        self.instance = Instance("bench", lambda: model, self._runner, self._ended)
        self.instance.start()
        self.instance.opened.result(60)

    def _ended(self, cause: BaseException | None) -> None:
        self.exits.append(cause)
        if cause is not None and self.last:
            error = Unavailable("the only instance has died")
            settle_all([(entry.completion, error) for entry in self.scheduler.fail(error)])

    def _runner(self, execution: Execution, on_death: OnDeath) -> BatchRunner:
        serial = SerialRunner(execution, self.scheduler, self.policy.max_rows, self.answers, self.clock, None)
        overlapped = cast("OverlappedExecution", execution)
        return OverlappedRunner(
            "bench finisher",
            overlapped,
            self.scheduler,
            1,
            serial,
            self.answers,
            on_death,
            self.pace,
            self.clock,
            1,
            True,
        )

    def submit(self, *values: float, rows: int = 1) -> list[Caller]:
        """Queue requests that come together, one a value."""
        return self.queue([np.full((rows, 2), value, np.float32) for value in values])

    def queue(self, arrays: list[Array], resident_outputs: Sequence[frozenset[str]] = ()) -> list[Caller]:
        """Queue requests that come together; `resident_outputs` has the attribute of each, if any."""
        entries = []
        for index, array in enumerate(arrays):
            request = InferRequest(inputs={"x": array}, rows=len(array), shape_key=array.shape[1:], received_ns=0)
            if resident_outputs:
                request.resident_outputs = resident_outputs[index]
            entries.append(Entry(request, Caller(), 0, 0))
            entries[-1].remove = self.scheduler.discard
            entries[-1].completion.after = entries[-1].on_settled
        self.scheduler.enqueue(entries)
        return [cast("Caller", entry.completion) for entry in entries]

    def log_pulls(self) -> None:
        """Log each pull of the instance in the model's log: "pull", or "pull busy" with batches in flight."""
        next_batch = self.scheduler.next_batch

        def logged(sleeper: threading.Lock, interrupted: Callable[[], bool], busy: bool, *more: Any) -> Batch | None:
            self.model.note("pull busy" if busy else "pull")
            return next_batch(sleeper, interrupted, busy, *more)

        self.scheduler.next_batch = logged  # type: ignore[method-assign,assignment]

    def close(self) -> None:
        """End it; whatever was wrong with how the model was treated comes out now."""
        self.scheduler.close()
        self.model.let_go()
        assert self.instance.join(60)
        assert not self.model.violations
        assert self.model.log.count("close") == 1
        assert not any(thread.name.startswith("bench") for thread in threading.enumerate())
