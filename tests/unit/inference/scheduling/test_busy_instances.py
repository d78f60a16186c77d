"""Number of busy instances at the start of a batch, by which the latency table separates times."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import numpy as np
import pytest
from headrace.core.clock import monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder
from headrace.runtimes.base import LoadedModel

from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import SPEC, FakeModel
from tests.support.waiting import until_async


def request() -> InferRequest:
    array = np.zeros((1, 2), np.float32)
    return InferRequest(inputs={"x": array}, rows=1, shape_key=None, received_ns=monotonic_ns())


def seen(handle: ModelHandle) -> dict[int, int]:
    """Return batches by the number of busy instances, in the steps of the latency table (1, 2, up to 4)."""
    counts: Counter[int] = Counter()
    for entry in handle.latency_table.entries():
        counts[entry.instances] += entry.observations
    return dict(counts)


async def settled(handle: ModelHandle, batches: int) -> None:
    """Answers come a moment before they are counted."""
    await until_async(lambda: sum(seen(handle).values()) >= batches)


class Meeting(FakeModel):
    """A batch that takes part waits for the others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.meeting = threading.Barrier(count)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.meeting.wait(20)
        return super().run(inputs)


class Overlapping(LoadedModel):
    """Each instance has an overlapped execution of its own."""

    def __init__(self, prompt: bool) -> None:
        self.prompt = prompt

    def execution(self, index: int) -> FakeOverlapped:
        return FakeOverlapped(prompt=self.prompt)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("model", [FakeModel(), Overlapping(False), Overlapping(True)])
def test_one_after_the_other_is_one_at_a_time(model: FakeModel | Overlapping) -> None:
    async def busy_counts() -> dict[int, int]:
        handle = ModelHandle(
            SPEC, HandlePolicy(BatchPolicy(8), instances=3), model, Mailbox(asyncio.get_running_loop()), Recorder()
        )
        handle.start()
        try:
            for _ in range(60):
                await handle.infer(request())
            await settled(handle, 60)
            return seen(handle)
        finally:
            await asyncio.to_thread(handle.close, 5.0)

    assert asyncio.run(busy_counts()) == {1: 60}


def test_those_that_run_at_the_same_time_are_counted() -> None:
    async def busy_counts() -> dict[int, int]:
        handle = ModelHandle(
            SPEC,
            HandlePolicy(BatchPolicy(merge=False), instances=3),
            Meeting(3),
            Mailbox(asyncio.get_running_loop()),
            Recorder(),
        )
        handle.latency_table.seed({1: [1000]})
        handle.start()
        try:
            for _ in range(5):
                await asyncio.gather(*(handle.infer(request()) for _ in range(3)))
            await settled(handle, 15)
            return seen(handle)
        finally:
            await asyncio.to_thread(handle.close, 5.0)

    assert asyncio.run(busy_counts()) == {1: 5, 2: 5, 4: 5}
