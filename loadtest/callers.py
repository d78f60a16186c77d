"""Callers of a `ModelHandle` in this process, in a closed loop: each sends its next request when its last one is answered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import HeadraceError
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.model_handle import ModelHandle

from loadtest.bench.results import completion_rate
from loadtest.protocol import Array

_STRAGGLERS_S = 10.0


class CallersFailed(RuntimeError):
    """Callers were answered with errors, or not at all."""


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """Result of one sample.

    Attributes:
        per_s: answers a second, by the slope of a line through their times, see `completion_rate`.
        latencies_us: from the call to the callback, of every request of one caller, of some requests of many.
        mean_rows: rows in a batch.
        cores: processor time of this process, callers included, over the time of the sample.
    """

    per_s: float
    latencies_us: Sequence[float]
    mean_rows: float
    cores: float

    def percentile_us(self, percent: float) -> float:
        """Of the latencies."""
        return float(np.percentile(self.latencies_us, percent))


class Callers:
    """Callers on the event loop, or one caller on a thread of its own.

    Args:
        handle: the model.
        requests: inputs by name, one for each caller; all have the same number of rows.
        output: an output, and the shape that each answer must have.
    """

    def __init__(
        self,
        handle: ModelHandle,
        requests: Sequence[dict[str, Array]],
        output: tuple[str, tuple[int, ...]],
    ) -> None:
        self._handle = handle
        self._requests = requests
        self._rows = len(next(iter(requests[0].values())))
        self._output, self._shape = output
        # Every answer is counted. Time is noted of some, because noting takes time too.
        self._stride = max(1, min(32, len(requests) // 32))
        self._notes: list[tuple[int, int]] = []
        self._answered = 0
        self._under_way = 0
        self._done = asyncio.Event()
        self._stopped = False
        self._error: Exception | None = None

    async def run(self, warm_s: float, seconds: float, *, blocking: bool = False) -> Answered:
        """Call for `warm_s`, then measure for `seconds`, then stop.

        Args:
            warm_s: time before the sample.
            seconds: length of the sample.
            blocking: the only caller waits for each answer on a thread of its own.

        Raises:
            CallersFailed: a caller got an error, or no answer.
        """
        if blocking:
            self._under_way = 1
            threading.Thread(target=self._block, args=(asyncio.get_running_loop(),), daemon=True).start()
        else:
            for inputs in self._requests:
                self._send(inputs)
        await asyncio.sleep(warm_s)
        self._notes.clear()
        before, begin_ns, cpu_s = self._handle.recorder.totals(), monotonic_ns(), time.process_time()
        await asyncio.sleep(seconds)
        after, end_ns, cpu_end_s = self._handle.recorder.totals(), monotonic_ns(), time.process_time()
        self._stopped = True
        if self._under_way:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), _STRAGGLERS_S)
        if self._error is not None:
            raise CallersFailed(f"a caller got {type(self._error).__name__}: {self._error}") from self._error
        if self._under_way:
            raise CallersFailed(f"{self._under_way} callers were not answered within {_STRAGGLERS_S:.0f} s")
        notes = [(at_ns, took_ns) for at_ns, took_ns in self._notes if begin_ns <= at_ns <= end_ns]
        if len(notes) < 2:
            raise CallersFailed(f"only {self._answered} requests were answered, too few within {seconds:.2g} s")
        return Answered(
            per_s=completion_rate([at_ns / NS_PER_S for at_ns, _ in notes]) * self._stride,
            latencies_us=[took_ns / 1e3 for _, took_ns in notes],
            mean_rows=(after.rows - before.rows) / max(1, after.executions - before.executions),
            cores=(cpu_end_s - cpu_s) * NS_PER_S / (end_ns - begin_ns),
        )

    def _request(self, inputs: dict[str, Array]) -> InferRequest:
        return InferRequest(inputs=inputs, rows=self._rows, shape_key=None, received_ns=monotonic_ns())

    def _send(self, inputs: dict[str, Array]) -> None:
        """Send a request; its callback sends the next one."""
        request = self._request(inputs)
        try:
            completion = self._handle.infer(request)
        except HeadraceError as error:
            self._fail(error)
            return
        self._under_way += 1

        def receive() -> None:
            self._under_way -= 1
            self._count(request, completion.outcome)
            if not self._stopped:
                self._send(inputs)
            elif not self._under_way:
                self._done.set()

        completion.then(receive)

    def _block(self, loop: asyncio.AbstractEventLoop) -> None:
        (inputs,) = self._requests
        while not self._stopped:
            request = self._request(inputs)
            try:
                self._count(request, self._handle.infer_blocking(request))
            except HeadraceError as error:
                self._fail(error)
        self._under_way = 0
        loop.call_soon_threadsafe(self._done.set)

    def _count(self, request: InferRequest, outcome: InferResponse | Exception | None) -> None:
        if not isinstance(outcome, InferResponse):
            self._fail(outcome or RuntimeError("no outcome"))
        elif (shape := outcome.outputs[self._output].shape) != self._shape:
            self._fail(RuntimeError(f"an output of shape {shape}, expected {self._shape}"))
        else:
            self._answered += 1
            if self._answered % self._stride == 0:
                now_ns = monotonic_ns()
                self._notes.append((now_ns, now_ns - request.received_ns))

    def _fail(self, error: Exception) -> None:
        self._error = error
        self._stopped = True
