"""The scheduler without a network: `ModelHandle` in this process, with callers in a closed loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np
from headrace.config.model_folder import read_model_folder
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import InferRequest, InferResponse
from headrace.repository.loader import Loader
from headrace.scheduling.handle import ModelHandle

from loadtest.bench.spread import completion_rate
from loadtest.gpu.pinned import pinned
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import BEST, INPUT, SCORES
from loadtest.protocol import Array

_STRAGGLERS_S = 10.0
_CLOSE_S = 10.0
# Of a sample, how much is spent before it counts.
_WARM_UP = 0.3


class CallersFailed(RuntimeError):
    """Callers were answered with errors, or not at all."""


@dataclass(slots=True, eq=False)
class Answered:
    """Result of one sample.

    Attributes:
        images_per_s: by the slope of a line through the times of answers, see `completion_rate`.
        latencies_us: of every request, only if recorded.
        mean_rows: images in a batch.
        cpu_cores: that this process used, callers included.
    """

    images_per_s: float
    latencies_us: list[float] = field(default_factory=list)
    mean_rows: float = 0.0
    cpu_cores: float = 0.0

    def percentile_us(self, percent: float) -> float:
        """Of the latencies."""
        return float(np.percentile(self.latencies_us, percent))


class InProcess:
    """An event loop with models on it, as a server has them, and callers beside.

    Args:
        setup: which models.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loop = _new_loop()
        self._loader = Loader(Mailbox(self._loop))
        self._handles: list[ModelHandle] = []

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.close(_CLOSE_S)
        self._loop.close()

    def open(self, name: str) -> ModelHandle:
        """Load a model of the bench's repository.

        Raises:
            ConfigError: it cannot be served.
        """
        folder = read_model_folder(self._setup.repository / name, self._setup.repository)
        handle = self._loader.load(folder, 1, self._loader.plan(folder, 1))
        self._handles.append(handle)
        return handle

    def measure(self, handle: ModelHandle, requests: Sequence[Array], callers: int, seconds: float) -> Answered:
        """Keep so many requests under way for so long.

        Args:
            handle: who answers.
            requests: uint8 pictures with the rows in front, as many rows in each; callers take them in turns.
            callers: requests under way; latencies are kept where it is one.
            seconds: that count; a warm-up comes before.

        Raises:
            CallersFailed: some got an error, or none came.
        """
        crowd = _Callers(handle, requests, callers)
        return self._loop.run_until_complete(crowd.run(seconds))

    def measure_blocking(self, handle: ModelHandle, requests: Sequence[Array], seconds: float) -> Answered:
        """As `measure`, with one caller that waits on a thread of its own; reports only the latencies.

        Raises:
            CallersFailed: it got an error.
        """
        return self._loop.run_until_complete(asyncio.to_thread(_call_blocking, handle, requests, seconds))

    def ask(self, handle: ModelHandle, pixels: Array) -> tuple[Array, Array]:
        """One request: its scores and classes."""
        rows = pixels.shape[0]

        async def once() -> InferResponse:
            request = InferRequest(inputs={INPUT: pixels}, rows=rows, shape_key=None, received_ns=monotonic_ns())
            return await asyncio.wait_for(_awaited(handle.infer(request)), _STRAGGLERS_S)

        outputs = self._loop.run_until_complete(once()).outputs
        return np.asarray(outputs[SCORES]), np.asarray(outputs[BEST])


async def _awaited(completion: LoopCompletion) -> InferResponse:
    return await completion


def _call_blocking(handle: ModelHandle, requests: Sequence[Array], seconds: float) -> Answered:
    latencies_us: list[float] = []
    begin_ns = monotonic_ns() + int(_WARM_UP * seconds * NS_PER_S)
    end_ns = begin_ns + int(seconds * NS_PER_S)
    for number in itertools.count():
        pixels = requests[number % len(requests)]
        now_ns = monotonic_ns()
        if now_ns >= end_ns:
            break
        request = InferRequest(inputs={INPUT: pixels}, rows=len(pixels), shape_key=None, received_ns=now_ns)
        try:
            handle.infer_blocking(request)
        except HeadraceError as error:
            raise CallersFailed(f"the caller got {type(error).__name__}: {error}") from error
        if now_ns >= begin_ns:
            latencies_us.append((monotonic_ns() - now_ns) / 1e3)
    if not latencies_us:
        raise CallersFailed(f"no request was answered within {seconds:.2g} s")
    return Answered(len(latencies_us) * len(requests[0]) / seconds, latencies_us)


class _Callers:
    """Callers that send the next request in the callback of the last. Everything runs on the event loop."""

    def __init__(self, handle: ModelHandle, requests: Sequence[Array], callers: int) -> None:
        self._handle = handle
        self._rows = len(requests[0])
        self._callers = [
            _Caller(self, handle, {INPUT: requests[n % len(requests)]}, self._rows) for n in range(callers)
        ]
        self.keeps_latencies = callers == 1
        # Every answer is counted; the time is noted of some, since noting takes time too.
        self._stride = max(1, min(32, callers // 32))
        self._marks: list[tuple[float, int]] = []
        self._counted = 0
        self.latencies_ns: list[int] = []
        self.under_way = 0
        self.done = asyncio.Event()
        self.stopped = False
        self.error: Exception | None = None

    async def run(self, seconds: float) -> Answered:
        for caller in self._callers:
            caller.ask()
        await asyncio.sleep(_WARM_UP * seconds)
        self.latencies_ns.clear()
        before = self._handle.recorder.totals()
        begin_s, cpu_s = time.perf_counter(), time.process_time()
        await asyncio.sleep(seconds)
        end_s, cpu_end_s = time.perf_counter(), time.process_time()
        after = self._handle.recorder.totals()
        self.stopped = True
        if self.under_way:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.done.wait(), _STRAGGLERS_S)
        if self.error is not None:
            raise CallersFailed(f"a caller got {type(self.error).__name__}: {self.error}") from self.error
        if self.under_way:
            raise CallersFailed(f"{self.under_way} callers were not answered within {_STRAGGLERS_S:.0f} s")
        times_s = [at for at, _ in self._marks if begin_s <= at <= end_s]
        if len(times_s) < 2:
            raise CallersFailed(f"only {self._counted} requests were answered, too few within {seconds:.2g} s")
        return Answered(
            images_per_s=completion_rate(times_s) * self._stride * self._rows,
            latencies_us=[nanoseconds / 1e3 for nanoseconds in self.latencies_ns],
            mean_rows=(after.rows - before.rows) / max(1, after.executions - before.executions),
            cpu_cores=(cpu_end_s - cpu_s) / (end_s - begin_s),
        )

    def count(self) -> None:
        self._counted += 1
        if self._counted % self._stride == 0:
            self._marks.append((time.perf_counter(), self._counted))


class _Caller:
    """One of them; its next request is made in the callback of the last one's answer."""

    __slots__ = ("_completion", "_crowd", "_infer", "_inputs", "_rows", "_started_ns")

    def __init__(self, crowd: _Callers, handle: ModelHandle, inputs: dict[str, Array], rows: int) -> None:
        self._crowd = crowd
        self._infer = handle.infer
        self._inputs = inputs
        self._rows = rows

    def ask(self) -> None:
        now_ns = self._started_ns = monotonic_ns()
        request = InferRequest(inputs=self._inputs, rows=self._rows, shape_key=None, received_ns=now_ns)
        try:
            completion = self._completion = self._infer(request)
        except HeadraceError as error:
            self._crowd.error = error
            self._crowd.stopped = True
            return
        self._crowd.under_way += 1
        completion.then(self.answered)

    def answered(self) -> None:
        crowd, outcome = self._crowd, self._completion.outcome
        crowd.under_way -= 1
        if isinstance(outcome, Exception):
            crowd.error = outcome
            crowd.stopped = True
            if not crowd.under_way:
                crowd.done.set()
            return
        if crowd.keeps_latencies:
            crowd.latencies_ns.append(monotonic_ns() - self._started_ns)
        crowd.count()
        if not crowd.stopped:
            self.ask()
        elif not crowd.under_way:
            crowd.done.set()


def requests_of(setup: Setup, pixels: Array, rows: int, *, in_pinned_memory: bool) -> list[Array]:
    """Images as requests of `rows` rows each; pinned on a GPU if requested."""
    source = pinned(pixels, setup.on_gpu) if in_pinned_memory else pixels
    return [source[at : at + rows] for at in range(0, len(pixels) - rows + 1, rows)]


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
