"""Outputs that are not those of the rows sent: on every path a batch can take, no caller gets any of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ModelFailed
from headrace.core.request import InferResponse
from headrace.core.tensor import FP32, Array, ModelSpec, TensorSpec
from headrace.inference.pipelines.execution import PictureExecution, Steps
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.output_check import OutputCheck, OutputMismatch
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.inference.scheduling.reshaping import ReshapingExecution
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution
from headrace.runtimes.overlapped import InFlightBatch

from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import SPEC, FakeModel, infer_request

Change = Callable[[Array], Array]

DROPPED: Change = lambda y: y[1:] if len(y) > 1 else y  # noqa: E731
ONE_FOR_ALL: Change = lambda y: y.sum(axis=0, keepdims=True)  # type: ignore[attr-defined]  # noqa: E731
WIDER: Change = lambda y: np.concatenate([y, y], axis=1)  # noqa: E731
FLAT: Change = lambda y: y.reshape(-1)  # noqa: E731
SCALAR: Change = lambda y: y.sum()  # type: ignore[attr-defined]  # noqa: E731


class WrongModel(FakeModel):
    """One batch after the other, with changed outputs."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        return {"y": np.asarray(self.change(super().run(inputs)["y"]))}


class WrongOverlapped(FakeOverlapped):
    """Overlapping batches, with changed outputs."""

    def __init__(self, change: Change, **more: Any) -> None:
        super().__init__(**more)
        self.change = change

    def _finish(self, in_flight: InFlightBatch) -> dict[str, Array]:
        return {"y": np.asarray(self.change(super()._finish(in_flight)["y"]))}


def serial(change: Change) -> WrongModel:
    return WrongModel(change)


def overlapped(change: Change) -> WrongOverlapped:
    return WrongOverlapped(change)


def prompt(change: Change) -> WrongOverlapped:
    return WrongOverlapped(change, prompt=True)


class Pictured(WrongOverlapped):
    """Behind the steps for pictures, as the server prepares them."""

    def execution(self, index: int) -> Any:
        return PictureExecution(self, Steps(None, None, True))


def pictured(change: Change) -> Pictured:
    return Pictured(change)


PATHS = pytest.mark.parametrize("make", [serial, overlapped, prompt, pictured])


@asynccontextmanager
async def serving(model: Any, spec: ModelSpec = SPEC, rows: int = 8) -> AsyncIterator[ModelHandle]:
    """A handle on `model`, which must end well after the block."""
    policy = HandlePolicy(batch=BatchPolicy(rows, max_delay_ns=50_000_000))
    handle = ModelHandle(spec, policy, model, Mailbox(asyncio.get_running_loop()), Recorder())
    handle.start()
    yield handle
    assert await asyncio.to_thread(handle.close, 60)


async def outcome(waiting: Awaitable[InferResponse]) -> InferResponse | Exception:
    try:
        return await waiting
    except Exception as error:
        return error


@PATHS
async def test_members_of_a_merged_batch_get_their_own_response_or_an_error(make: Callable[[Change], Any]) -> None:
    """One row of output for the whole batch: right for a request of one row, wrong for the batch."""

    async with serving(make(ONE_FOR_ALL)) as handle:
        result = await asyncio.gather(
            *[outcome(handle.infer(infer_request(value, rows))) for value, rows in ((1, 1), (2, 2), (3, 1))]
        )
        assert isinstance(result[0], InferResponse)
        assert result[0].outputs["y"].tolist() == [[2, 2]]
        assert isinstance(result[1], OutputMismatch)
        assert isinstance(result[2], InferResponse)
        assert result[2].outputs["y"].tolist() == [[6, 6]]


@PATHS
@pytest.mark.parametrize("change", [DROPPED, ONE_FOR_ALL, WIDER, FLAT, SCALAR])
async def test_a_single_request_gets_an_error_that_blames_the_model(
    make: Callable[[Change], Any], change: Change
) -> None:
    async with serving(make(change)) as handle:
        error = await outcome(handle.infer(infer_request(1, rows=3)))
        assert isinstance(error, ModelFailed)
        text = str(error)
        assert "model 'fake' returned output 'y' with the shape" in text
        assert "3 rows" in text
        assert "The model is at fault, not the request" in text


@PATHS
async def test_nothing_is_merged_or_split_after_a_mismatch(make: Callable[[Change], Any]) -> None:
    model = make(DROPPED)
    async with serving(model) as handle:
        assert handle.policy.batch.merge
        assert isinstance(await outcome(handle.infer(infer_request(1, rows=3))), OutputMismatch)
        assert not handle.policy.batch.merge
        before = len(model.batches)
        result = await asyncio.gather(*[outcome(handle.infer(infer_request(value))) for value in range(5)])
        assert all(isinstance(each, InferResponse) for each in result)
        assert [len(batch) for batch in model.batches[before:]] == [1] * 5
        with pytest.raises(
            ModelFailed, match=r"has 9 rows, model 'fake' runs at most 8 in one execution.*no longer split"
        ):
            handle.infer(infer_request(1, rows=9))


async def test_parts_that_were_queued_before_a_mismatch_are_not_joined() -> None:
    """Of two instances' worth of work: the parts are right, what another request got is not."""
    model = WrongModel(lambda y: y[:1] if y[0, 0] == 200 else y)  # type: ignore[call-overload,index]

    async with serving(model) as handle:
        model.gate.clear()
        first = handle.infer(infer_request(100, rows=8))
        assert await asyncio.to_thread(model.started.acquire, timeout=60)
        large = handle.infer(infer_request(1, rows=16))
        model.gate.set()
        assert isinstance(await outcome(first), OutputMismatch)
        error = await outcome(large)
        assert isinstance(error, OutputMismatch)
        assert "returned output 'y'" in str(error)


async def test_a_part_with_too_few_rows_fails_its_request() -> None:
    async with serving(WrongModel(DROPPED)) as handle:
        assert isinstance(await outcome(handle.infer(infer_request(1, rows=17))), OutputMismatch)


@PATHS
async def test_callers_on_threads_get_the_error_too(make: Callable[[Change], Any]) -> None:
    async with serving(make(ONE_FOR_ALL)) as handle:

        def call(rows: int) -> InferResponse | Exception:
            try:
                return handle.infer_blocking(infer_request(1, rows=rows))
            except Exception as error:
                return error

        with ThreadPoolExecutor(3) as pool:
            result = await asyncio.gather(
                *[asyncio.get_running_loop().run_in_executor(pool, call, rows) for rows in (2, 3, 2)]
            )
        assert all(isinstance(each, OutputMismatch) for each in result)


def unbatched(shape: tuple[int, ...]) -> ModelSpec:
    return replace(
        SPEC,
        inputs={"x": TensorSpec("x", FP32, (-1, 2))},
        outputs={"y": TensorSpec("y", FP32, shape)},
        max_batch_size=0,
    )


@PATHS
@pytest.mark.parametrize(
    ("shape", "right"),
    [((3, 2), True), ((-1, 2), True), ((-1, -1), True), ((4, 2), False), ((-1, 3), False), ((-1,), False)],
)
async def test_without_a_batch_dimension_the_declared_dims_hold(
    make: Callable[[Change], Any], shape: tuple[int, ...], right: bool
) -> None:
    async with serving(make(lambda y: y), unbatched(shape), rows=1) as handle:
        request = infer_request(1, rows=3)
        request.rows = 1
        result = await outcome(handle.infer(request))
        assert isinstance(result, InferResponse if right else OutputMismatch)


def test_a_missing_output_is_a_model_error() -> None:
    check = OutputCheck(SPEC)
    with pytest.raises(OutputMismatch, match="returned no output 'y'"):
        check.check({"z": np.zeros((1, 2))}, 1)


async def test_outputs_that_are_not_declared_need_no_rows() -> None:
    class More(FakeModel):
        def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
            return {**super().run(inputs), "loss": np.zeros((), np.float32)}

    async with serving(More()) as handle:
        result = await asyncio.gather(*[handle.infer(infer_request(value)) for value in (1, 2)])
        assert [each.outputs["y"].tolist() for each in result] == [[[2, 2]], [[4, 4]]]


@pytest.fixture(params=[(3,), (2, 2), ()])
def short_output(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param  # type: ignore[no-any-return]


def test_an_impossible_reshape_is_a_model_error(short_output: tuple[int, ...]) -> None:
    class Inner(Execution):
        def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
            return {"y": np.zeros(short_output, np.float32)}

        def close(self) -> None:
            pass

    inner: Execution = Inner()
    with pytest.raises(OutputMismatch, match="reshape"):
        ReshapingExecution(inner, {}, {"y": (5,)}, True).run({"x": np.zeros((2, 2), np.float32)})
