"""A model under the test's control: y = 2x, which can be held, made to raise, or made to die."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import numpy as np
from headrace.core.clock import Clock, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest
from headrace.core.tensor import FP32, Array, ModelSpec, TensorSpec
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution, LoadedModel

POISON = -1.0  # the model raises on a batch that holds this value
DEATH = -2.0  # the instance dies of it


class InstanceKilledError(BaseException):
    """Not an Exception: nothing in an instance may survive it."""


class FakeModel(Execution, LoadedModel):
    """Doubles its input; every batch waits for `gate` and is written down in `batches`.

    A batch that begins releases `started` once; `handles` are those that `handle` has made.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)
        self.batches: list[list[float]] = []
        self.closed = False
        self.handles: list[ModelHandle] = []

    def execution(self, index: int) -> FakeModel:
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        x = inputs["x"]
        values = [float(row[0]) for row in x]  # type: ignore[index,attr-defined]
        gate = self.gate
        self.batches.append(values)
        self.started.release()
        assert gate.wait(60), "the test forgot to open the gate"
        if DEATH in values:
            raise InstanceKilledError
        if POISON in values:
            raise RuntimeError("poisoned: /secret/path")
        return {"y": np.asarray(x) * 2}

    def pass_one(self) -> None:
        """Let the batches that have begun pass the gate, and hold later ones: after `set` and `clear` one could wait for both."""
        gate, self.gate = self.gate, threading.Event()
        gate.set()

    def close(self) -> None:
        self.closed = True


SPEC = ModelSpec(
    "fake",
    "1",
    "test",
    {"x": TensorSpec("x", FP32, (-1, 2))},
    {"y": TensorSpec("y", FP32, (-1, 2))},
    max_batch_size=8,
)


def handle(
    mailbox: Mailbox,
    model: FakeModel,
    on_dead: Callable[[int], None] = lambda _left: None,
    batch: BatchPolicy | None = None,
    clock: Clock = monotonic_ns,
    **policy: object,
) -> ModelHandle:
    """A started handle on a fake model."""
    chosen = HandlePolicy(batch=batch or BatchPolicy(8), **policy)  # type: ignore[arg-type]
    created = ModelHandle(SPEC, chosen, model, mailbox, Recorder(), on_dead, clock)
    created.start()
    model.handles.append(created)
    return created


def infer_request(value: float, rows: int = 1, **more: object) -> InferRequest:
    """A request whose every row holds `value`."""
    inputs = {"x": np.full((rows, 2), value, np.float32)}
    return InferRequest(inputs=inputs, rows=rows, shape_key=None, received_ns=more.pop("received_ns", 1), **more)  # type: ignore[arg-type]


async def wait_started(model: FakeModel) -> None:
    """Wait until a batch is running."""
    assert await asyncio.to_thread(model.started.acquire, timeout=60)


async def error_of(waiting: Awaitable[object]) -> Exception:
    """Await something that must fail, and return its error."""
    try:
        await waiting
    except Exception as error:
        return error
    raise AssertionError("no error came")
