"""A model version whose execution can overlap batches: what is chosen, how it ends, what its callers see."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.errors import DeadlineExceeded, ModelFailed, Unavailable
from headrace.core.tensor import BYTES, FP32, ModelSpec, TensorSpec
from headrace.inference.scheduling.inline_gate import INLINE_BATCH_PAUSE
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.inference.scheduling.reshaping import ReshapingExecution
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution, LoadedModel

from tests.support.fake_overlapped import DIES, RAISES, FakeOverlapped
from tests.support.fakes import SPEC, error_of, infer_request
from tests.support.sleepers import inline_dispatches
from tests.support.waiting import until


def served(
    mailbox: Mailbox,
    model: Any,
    on_dead: Callable[[int], None] = lambda _left: None,
    spec: ModelSpec = SPEC,
    batch: BatchPolicy | None = None,
    **policy: Any,
) -> ModelHandle:
    created = ModelHandle(
        spec, HandlePolicy(batch=batch or BatchPolicy(8), **policy), model, mailbox, Recorder(), on_dead
    )
    created.start()
    return created


async def test_batches_overlap_if_the_execution_supports_it(mailbox: Mailbox) -> None:
    model = FakeOverlapped(manual=True)
    handle = served(mailbox, model, batch=BatchPolicy(1))
    waiting = [handle.infer(infer_request(value)) for value in range(2)]
    await asyncio.to_thread(model.wait_for, "finishing 0", "launch 1")
    assert "finish 0" not in model.log
    model.let_go()
    for value, completion in enumerate(waiting):
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    assert await asyncio.to_thread(handle.close, 60)
    assert not model.violations
    assert "run" not in model.log


@pytest.mark.parametrize(
    ("spec", "depth"),
    [
        (SPEC, 1),
        (replace(SPEC, inputs={**SPEC.inputs, "t": TensorSpec("t", BYTES, (-1, 1), optional=True)}), 2),
    ],
    ids=["no depth", "text"],
)
async def test_executions_without_overlap_run_plainly(spec: ModelSpec, depth: int, mailbox: Mailbox) -> None:
    model = FakeOverlapped(depth=depth)
    handle = served(mailbox, model, spec=spec)
    assert (await handle.infer(infer_request(3))).outputs["y"].tolist() == [[6, 6]]
    assert await asyncio.to_thread(handle.close, 60)
    assert model.log == ["run", "close", "close"], "of the execution and of the model"


@pytest.mark.parametrize("shape", [(), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("reshaped", [False, True], ids=["plain", "reshaped"])
async def test_requests_of_a_model_without_a_batch_dimension_overlap(
    shape: tuple[int, ...], reshaped: bool, mailbox: Mailbox
) -> None:
    inner = FakeOverlapped(manual=True)

    class Model(LoadedModel):
        def execution(self, index: int) -> Execution:
            requested = {"x": (*shape, 1)}, {"y": shape}
            return ReshapingExecution(inner, *requested, batched=False) if reshaped else inner

        def close(self) -> None:
            pass

    tensors = {"inputs": {"x": TensorSpec("x", FP32, shape)}, "outputs": {"y": TensorSpec("y", FP32, shape)}}
    spec = replace(SPEC, max_batch_size=0, **tensors)
    handle = served(mailbox, Model(), spec=spec, batch=BatchPolicy(1, merge=False))
    requests = [infer_request(value) for value in (1, 2)]
    for value, request in enumerate(requests, 1):
        request.inputs["x"] = np.full(shape, value, np.float32)
    waiting = [handle.infer(request) for request in requests]
    await asyncio.to_thread(inner.wait_for, "finishing 0", "launch 1")
    inner.let_go()
    for value, completion in enumerate(waiting, 1):
        answer = (await completion).outputs["y"]
        assert answer.shape == shape
        assert (answer == 2 * value).all()
    assert await asyncio.to_thread(handle.close, 60)
    assert "run" not in inner.log
    assert not inner.violations


async def test_requests_without_an_optional_input_run_plainly_between_pipelined_batches(mailbox: Mailbox) -> None:
    model = FakeOverlapped(manual=True)
    spec = replace(SPEC, inputs={**SPEC.inputs, "z": TensorSpec("z", FP32, (-1, 1), optional=True)})
    handle = served(mailbox, model, spec=spec, batch=BatchPolicy(2))
    whole = [infer_request(1), infer_request(2), infer_request(6)]
    for request in whole:
        request.inputs["z"] = np.zeros((1, 1), np.float32)
        request.shape_key = "xz"
    waiting = [
        handle.infer(request) for request in (*whole[:2], infer_request(RAISES["finish"]), infer_request(5), whole[2])
    ]
    await asyncio.to_thread(model.wait_for, "finishing 0")
    model.let_go()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results.pop(2), ModelFailed)
    assert [result.outputs["y"].tolist() for result in results] == [[[2 * v] * 2] for v in (1, 2, 5, 6)]  # type: ignore[union-attr]
    assert await asyncio.to_thread(handle.close, 60)
    assert not model.violations, "run only while nothing is in the air"
    assert model.log.count("run") == 3, "the two together, then one by one"


@pytest.mark.parametrize("call", ["begin", "launch", "finish"])
async def test_the_death_of_the_last_instance_fails_all_requests_and_readiness(call: str, mailbox: Mailbox) -> None:
    model = FakeOverlapped(manual=True)
    deaths: list[int] = []
    handle = served(mailbox, model, deaths.append, batch=BatchPolicy(1))
    first = handle.infer(infer_request(DIES[call] if call == "finish" else 1))
    await asyncio.to_thread(model.wait_for, "finishing 0")
    if call == "finish":
        rest = [handle.infer(infer_request(value)) for value in (2, 3)]
        await asyncio.to_thread(model.wait_for, "launch 1")
        model.land()
    else:
        rest = [handle.infer(infer_request(DIES[call])), handle.infer(infer_request(3))]
    errors = [await error_of(each) for each in (first, *rest)]
    assert [type(error) for error in errors] == [ModelFailed, ModelFailed, Unavailable]
    assert not handle.ready
    assert deaths == [0]
    with pytest.raises(Unavailable, match="died"):
        handle.infer(infer_request(4))
    model.let_go()
    assert await asyncio.to_thread(handle.close, 60)
    assert model.log.count("close") == 2, "the execution's and the model's"


@pytest.mark.parametrize("call", ["begin", "launch", "finish"])
async def test_closing_times_out_on_a_hanging_backend(call: str, mailbox: Mailbox) -> None:
    model = FakeOverlapped(manual=call != "finish")
    handle = served(mailbox, model, batch=BatchPolicy(1))
    waiting = []
    if call != "finish":
        waiting.append(handle.infer(infer_request(0)))
        await asyncio.to_thread(model.wait_for, "finishing 0")
    model.hanging = call
    waiting += [handle.infer(infer_request(value)) for value in (1, 2, 3)]
    await asyncio.to_thread(model.wait_for, f"{call} hangs")
    assert not await asyncio.to_thread(handle.close, 0.05)
    for each in waiting:
        assert isinstance(await error_of(each), Unavailable)
    assert "close" not in model.log, "its memory is still in use"
    model.let_go()
    assert await asyncio.to_thread(handle.close, 60)


async def test_behind_reshape_rows_are_written_into_the_model_s_own_memory(mailbox: Mailbox) -> None:
    inner = FakeOverlapped(manual=True)

    class Model(LoadedModel):
        def execution(self, index: int) -> ReshapingExecution:
            return ReshapingExecution(inner, {"x": (2,)}, {"y": (2, 1)}, batched=True)

        def close(self) -> None:
            pass

    spec = replace(SPEC, outputs={"y": TensorSpec("y", FP32, (-1, 2, 1))})
    handle = served(mailbox, Model(), spec=spec)
    requests = [infer_request(1), infer_request(2, rows=2)]
    for request in requests:
        request.inputs["x"] = request.inputs["x"].reshape(request.rows, 1, 2)
    waiting = [handle.infer(request) for request in requests]
    inner.let_go()
    assert (await waiting[0]).outputs["y"].tolist() == [[[2], [2]]]
    assert (await waiting[1]).outputs["y"].tolist() == [[[4], [4]]] * 2
    assert await asyncio.to_thread(handle.close, 60)
    assert inner.batches == [[1, 2, 2]]
    assert not inner.violations


def test_reshape_before_a_plain_execution_is_plain() -> None:
    class Plain(Execution):
        def run(self, inputs: Any) -> Any:
            return inputs

        def close(self) -> None:
            pass

    plain = ReshapingExecution(Plain(), {}, {}, batched=True)
    assert plain.depth == 1
    with pytest.raises(TypeError, match="one batch at a time"):
        plain.begin({}, 1)


async def test_a_served_request_creates_no_reference_cycles(mailbox: Mailbox) -> None:
    handle = served(mailbox, FakeOverlapped())
    for rows in (1, 3, 20):  # alone, and in parts
        await handle.infer(infer_request(1, rows=rows))
    gc.collect()
    gc.disable()
    try:
        for rows in (1, 3, 20):
            await handle.infer(infer_request(1, rows=rows))
        await asyncio.to_thread(handle.close, 60)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [
            each for each in gc.garbage if type(each).__name__ in ("Entry", "InferRequest", "Batch", "InFlightBatch")
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


class Brief(FakeOverlapped):
    """Batches of up to four rows are brief."""

    any_thread = True

    def __init__(self, **more: Any) -> None:
        super().__init__(prompt=True, brief_rows=4, **more)


def served_on_the_loop(
    mailbox: Mailbox, model: Brief, clock: Clock = monotonic_ns, bound_ns: int = 3600 * NS_PER_S
) -> ModelHandle:
    policy = HandlePolicy(batch=BatchPolicy(8), inline_bound_ns=bound_ns)
    handle = ModelHandle(SPEC, policy, model, mailbox, Recorder(), clock=clock)
    handle.start()
    until(lambda: bool(inline_dispatches(handle)))  # its instance sleeps
    return handle


async def test_a_brief_batch_runs_on_the_event_loop(mailbox: Mailbox) -> None:
    model = Brief()
    handle = served_on_the_loop(mailbox, model)
    for values in ((1, 2, 3), (4, 5, 6, 7)):
        waiting = [handle.infer(infer_request(value)) for value in values]
        for value, completion in zip(values, waiting, strict=True):
            assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    assert model.batches == [[1, 2, 3], [4, 5, 6, 7]]
    assert {thread.name for thread in model.finishers} == {threading.current_thread().name}
    assert handle.recorder.totals().requests == 7
    assert handle.recorder.totals().inline_runs == 2
    assert await asyncio.to_thread(handle.close, 60)
    assert not model.violations


async def test_brief_batches_return_to_the_event_loop_under_constant_load(mailbox: Mailbox) -> None:
    """Requests wait whenever the instance's thread has finished a batch: it would take each next one, too."""
    model = Brief(manual=True)
    handle = served_on_the_loop(mailbox, model)
    mailbox.latest = "another"
    first = handle.infer(infer_request(1))
    await asyncio.to_thread(model.wait_for, "finishing 0")
    await asyncio.to_thread(until, lambda: monotonic_ns() > mailbox.mixed_ns)
    waiting = [handle.infer(infer_request(value)) for value in (2, 3)]
    await asyncio.sleep(0)  # the instance is woken
    model.let_go()
    assert (await first).outputs["y"].tolist() == [[2, 2]]
    for value, completion in zip((2, 3), waiting, strict=True):
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    assert [thread is threading.current_thread() for thread in model.finishers] == [False, True]
    assert model.batches == [[1], [2, 3]]
    assert await asyncio.to_thread(handle.close, 60)
    assert not model.violations


async def test_a_longer_batch_runs_on_its_instance(mailbox: Mailbox) -> None:
    model = Brief()
    handle = served_on_the_loop(mailbox, model)
    waiting = [handle.infer(infer_request(value)) for value in range(5)]
    for value, completion in enumerate(waiting):
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    assert threading.current_thread() not in model.finishers
    assert await asyncio.to_thread(handle.close, 60)


async def test_a_batch_runs_on_its_instance_soon_after_a_request_of_another_model(mailbox: Mailbox) -> None:
    model = Brief()
    handle = served_on_the_loop(mailbox, model)
    mailbox.latest = "another"
    waiting = [handle.infer(infer_request(value)) for value in range(3)]
    for value, completion in enumerate(waiting):
        assert (await completion).outputs["y"].tolist() == [[2 * value] * 2]
    assert threading.current_thread() not in model.finishers
    assert await asyncio.to_thread(handle.close, 60)


async def test_a_request_that_fails_a_batch_on_the_event_loop_fails_alone(mailbox: Mailbox) -> None:
    model = Brief()
    handle = served_on_the_loop(mailbox, model)
    good, bad = handle.infer(infer_request(1)), handle.infer(infer_request(RAISES["finish"]))
    assert (await good).outputs["y"].tolist() == [[2, 2]]
    assert isinstance(await error_of(bad), ModelFailed)
    assert await asyncio.to_thread(handle.close, 60)


async def test_deadlines_that_pass_during_a_batch_on_the_event_loop(mailbox: Mailbox) -> None:
    now_ns = [NS_PER_S]
    model = Brief()
    handle = served_on_the_loop(mailbox, model, lambda: now_ns[0])
    late_ns = 10_000 * NS_PER_S
    model.during_fill = lambda: now_ns.__setitem__(0, late_ns)
    first, second = handle.infer(infer_request(1)), handle.infer(infer_request(2, deadline_ns=late_ns))
    assert (await first).outputs["y"].tolist() == [[2, 2]]
    assert isinstance(await error_of(second), DeadlineExceeded)
    assert await asyncio.to_thread(handle.close, 60)


async def test_batches_that_usually_take_longer_run_on_their_instance_for_a_while(mailbox: Mailbox) -> None:
    now_ns = [NS_PER_S]
    model = Brief()
    handle = served_on_the_loop(mailbox, model, lambda: now_ns[0], bound_ns=1)
    model.during_fill = lambda: now_ns.__setitem__(
        0, now_ns[0] + 3 * NS_PER_MS
    )  # of 4 ms that one may take, and 2 ms usually
    for _ in range(20):
        for completion in [handle.infer(infer_request(value)) for value in (1, 2)]:
            await completion
    totals = handle.recorder.totals()
    assert 2 < totals.inline_runs < 20
    assert totals.inline_disabled == 1
    assert threading.current_thread() is not model.finishers[-1]
    assert await asyncio.to_thread(handle.close, 60)


async def test_a_slow_batch_on_the_event_loop_leaves_the_next_ones_to_the_instance(mailbox: Mailbox) -> None:
    now_ns = [NS_PER_S]
    model = Brief()
    handle = served_on_the_loop(mailbox, model, lambda: now_ns[0], bound_ns=1)

    async def on_loop(run_ns: int) -> bool:
        """Run a batch; True if it ran on the event loop."""
        model.during_fill = lambda: now_ns.__setitem__(0, now_ns[0] + run_ns)
        for completion in [handle.infer(infer_request(value)) for value in (1, 2)]:
            await completion
        until(lambda: bool(inline_dispatches(handle)))  # the instance sleeps again
        return threading.current_thread() is model.finishers[-1]

    for run_ms in (5, 100):  # the pause does not grow with one stall
        assert await on_loop(run_ms * NS_PER_MS)
        assert not await on_loop(0)
        now_ns[0] += INLINE_BATCH_PAUSE * 4 * NS_PER_MS
        assert await on_loop(0)
    assert await asyncio.to_thread(handle.close, 60)
