"""A trace replayed by the clock: through a real `ModelHandle` with its threads and locks, on a device that sleeps."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import uvloop
from headrace.backends.base import Execution
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import InferRequest
from headrace.core.tensor import BY_NAME, FP32, ModelSpec, TensorSpec
from headrace.observability.counters import BatchRecord
from headrace.scheduling.handle import ModelHandle
from headrace.scheduling.policy import HandlePolicy
from headrace.simulation.replay import ANSWERED, BatchHistory, BatchRecorder, Replay
from headrace.simulation.traces import Trace

from loadtest.bench.dataplane import Device, Sleeper, sleep_until
from loadtest.protocol import Array

_HEAD_START_NS = 50 * NS_PER_MS


@dataclass
class Sleeping:
    """A model (and its execution) that takes one batch after the other, for as long as a device of that speed would."""

    device: Device

    def execution(self, index: int) -> Execution:
        """Itself."""
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Sleep."""
        rows = len(inputs["x"])
        sleep_until(monotonic_ns() + self.device.ns(rows))
        return {"scores": np.zeros((rows, 1), np.float32)}

    def close(self) -> None:
        """Holds nothing."""


@dataclass
class Real:
    """A trace replayed by the clock.

    Attributes:
        requests: in the order of arrival, their times counted from the beginning.
        handle: the model.
        result: outcome of each request.
        start_ns: when the trace begins.
        missing: requests that are not answered.
        behind_ns: delay of each request after its due time, caused by this process.
        done: set once none is missing.
    """

    requests: list[InferRequest]
    handle: ModelHandle
    result: Replay
    start_ns: int = 0
    missing: int = 0
    behind_ns: list[int] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Until everything is answered."""
        self.start_ns, self.missing = monotonic_ns() + _HEAD_START_NS, len(self.requests)
        threading.Thread(target=self._feed, args=(asyncio.get_running_loop(),), daemon=True).start()
        await self.done.wait()

    def _feed(self, loop: asyncio.AbstractEventLoop) -> None:
        for which, request in enumerate(self.requests):
            request.received_ns += self.start_ns
            if request.deadline_ns:
                request.deadline_ns += self.start_ns
            sleep_until(request.received_ns)
            loop.call_soon_threadsafe(self._ask, which, request)

    def _ask(self, which: int, request: InferRequest) -> None:
        due_ns = request.received_ns
        self.behind_ns.append(monotonic_ns() - due_ns)
        try:
            completion = self.handle.infer(request)
        except HeadraceError as error:
            self.result.latency_ns[which] = monotonic_ns() - due_ns
            self._record(which, error.reason)
        else:
            completion.then(partial(self._answered, which, due_ns, completion))

    def _answered(self, which: int, due_ns: int, completion: LoopCompletion) -> None:
        self.result.latency_ns[which] = monotonic_ns() - due_ns
        outcome = completion.outcome
        self._record(which, outcome.reason if isinstance(outcome, HeadraceError) else ANSWERED)

    def _record(self, which: int, outcome: str) -> None:
        self.result.outcomes[which] = outcome
        self.missing -= 1
        if not self.missing:
            self.done.set()


class Timed(BatchRecorder):
    """Remembers what batches took longer than their device.

    Attributes:
        added_ns: of each, from being pulled to being answered.
    """

    def __init__(self, batches: BatchHistory, device: Device) -> None:
        super().__init__(batches)
        self._device = device
        self.added_ns: list[int] = []

    def record_batch(self, batch: BatchRecord) -> None:
        """Record a batch and its time beyond the device's."""
        super().record_batch(batch)
        self.added_ns.append(batch.times.split_ns - batch.times.taken_ns - self._device.ns(batch.batch_rows))


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a replayed trace.

    Attributes:
        replay: in the simulator's format.
        added_ns: what each batch took longer than its device, from being pulled to being answered.
        behind_ns: delay of each request after its due time.
    """

    replay: Replay
    added_ns: list[int]
    behind_ns: list[int]


def play(trace: Trace, policy: HandlePolicy, device: Device) -> Played:
    """Replay a trace of one model by the clock, to its last answer.

    Args:
        trace: the requests.
        policy: how requests are treated.
        device: what the model runs on; with a depth of 1 each instance has one of its own, which is done when its thread wakes.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_play(trace, policy, device))


async def _play(trace: Trace, policy: HandlePolicy, device: Device) -> Played:
    most = policy.batch.max_rows
    model = Sleeping(device) if device.depth == 1 else Sleeper(device)
    names = ("scores",) if device.depth == 1 else ("scores", "classes")
    outputs = {name: TensorSpec(name, FP32, (-1, -1)) for name in names}  # of any width: what they hold is not measured
    spec = ModelSpec("sleeper", "1", "none", {"x": TensorSpec("x", BY_NAME["UINT8"], (-1, 1))}, outputs, most)
    batches = BatchHistory()
    recorder = Timed(batches, device)
    handle = ModelHandle(spec, policy, model, Mailbox(asyncio.get_running_loop()), recorder)
    await asyncio.to_thread(handle.start)
    sizes = {most, *policy.batch.preferred_rows, *(1 << power for power in range(most.bit_length()))}
    handle.latency_table.seed({rows: [device.ns(rows)] for rows in sizes if rows <= most})  # as a server does at load
    requests = [request for _, _, request in trace.requests()]
    rows = {size: np.zeros((size, 1), np.uint8) for size in set(trace.rows.tolist())}
    for request in requests:
        request.inputs, request.size_bytes = {"x": rows[request.rows]}, request.rows
    result = Replay(trace, [0] * len(trace), [""] * len(trace), [batches], [0])
    real = Real(requests, handle, result)
    await real.run()
    await asyncio.to_thread(handle.close, None)
    return Played(result, recorder.added_ns, real.behind_ns)
