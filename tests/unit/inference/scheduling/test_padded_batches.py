"""Requests of different length through a whole handle: each response is that of the request alone, serial or overlapped."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.request import InferRequest
from headrace.core.shapes import CheckedShapes
from headrace.core.tensor import BY_CONFIG_NAME, Array, ModelSpec, PaddedInputs, TensorSpec
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, PaddingPolicy
from headrace.inference.scheduling.ragged import PaddedLayout
from headrace.observability.counters import Recorder
from headrace.runtimes.base import Execution, LoadedModel
from headrace.runtimes.overlapped import InFlightBatch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CALLERS = 16
DTYPES = ("FP32", "FP16", "FP64", "INT8", "UINT8", "INT32", "INT64")
LONGEST = 24

Request = Mapping[str, Array]


def texts_model(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Per position, per pair of positions and in all; positions outside the mask do not count. Pure."""
    values = inputs["x"] * inputs["mask"].astype(inputs["x"].dtype)
    return {
        "y": values,
        "pairs": np.ascontiguousarray(values[:, :, None] + values[:, None, :]),
        "total": values.sum(axis=1, keepdims=True, dtype=values.dtype),
        "side": inputs["side"] * 2,
    }


class SerialTexts(Execution, LoadedModel):
    """Execution and model; counts the rows and lengths of its batches.

    Args:
        function: outputs of a batch.
    """

    def __init__(self, function: Callable[[Mapping[str, Array]], dict[str, Array]] = texts_model) -> None:
        self.function = function
        self.shapes: list[tuple[int, ...]] = []

    def execution(self, _index: int) -> SerialTexts:
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.shapes.append(inputs["x"].shape)
        return self.function(inputs)

    def close(self) -> None:
        """Nothing to close."""


class OverlappedTexts(SerialTexts):
    """An execution with buffers of its own, which later batches overwrite, as pinned memory is."""

    depth = 2

    def __init__(self, function: Callable[[Mapping[str, Array]], dict[str, Array]] = texts_model) -> None:
        super().__init__(function)
        self.free = deque(np.full(1 << 20, 0xA5, np.uint8) for _ in range(self.depth))

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        memory, start = self.free.popleft(), 0
        memory.fill(0xA5)
        views = {}
        for name, array in like.items():
            shape = (rows, *array.shape[1:])
            size = int(np.prod(shape)) * array.dtype.itemsize
            views[name] = memory[start : start + size].view(array.dtype).reshape(shape)
            start += -(-size // 64) * 64
        return InFlightBatch(views, rows, memory)

    def launch(self, batch: InFlightBatch) -> None:
        self.shapes.append(batch.inputs["x"].shape)

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        outputs = {name: values.copy() for name, values in self.function(batch.inputs).items()}
        self.free.append(batch.state)  # type: ignore[arg-type]
        return outputs

    discard = finish


def spec_of(dtype: str, padding: PaddedInputs) -> ModelSpec:
    datatype, mask = BY_CONFIG_NAME[f"TYPE_{dtype}"], BY_CONFIG_NAME["TYPE_INT64"]
    inputs = {
        "x": TensorSpec("x", datatype, (-1, -1)),
        "mask": TensorSpec("mask", mask, (-1, -1)),
        "side": TensorSpec("side", mask, (-1, 2)),
    }
    outputs = {
        "y": TensorSpec("y", datatype, (-1, -1)),
        "pairs": TensorSpec("pairs", datatype, (-1, -1, -1)),
        "total": TensorSpec("total", datatype, (-1, 1)),
        "side": TensorSpec("side", mask, (-1, 2)),
    }
    return ModelSpec("m", "1", "", inputs, outputs, 8, padded=padding)


def request_of(dtype: str, rows: int, length: int, seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    # Small whole numbers: sums are exact in every dtype, in any order.
    values = random.integers(0, 4, (rows, length)).astype(BY_CONFIG_NAME[f"TYPE_{dtype}"].dtype)
    return {"x": values, "mask": np.ones((rows, length), np.int64), "side": random.integers(0, 9, (rows, 2))}


@contextmanager
def serving(model: SerialTexts, dtype: str, always: bool, multiple_of: int = 8, longest: int = 0) -> Iterator[Any]:
    """A handle of the model on an event loop of its own; yields it and a function that sends one request."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    padding = PaddedInputs(frozenset({"x", "mask"}), 1, multiple_of, longest)
    spec = spec_of(dtype, padding)
    values = {"x": 3.0, "mask": 0.0}
    policy = HandlePolicy(BatchPolicy(8, max_delay_ns=2 * NS_PER_MS), padding=PaddingPolicy(values, padding))
    handle = ModelHandle(spec, policy, model, Mailbox(loop), Recorder())  # type: ignore[arg-type]
    assert isinstance(handle.layout, PaddedLayout)
    handle.layout.always = always
    handle.start()
    shapes = CheckedShapes(spec)

    def send(inputs: Request) -> dict[str, Array]:
        rows, key = shapes.rows(inputs)
        request = InferRequest(inputs=dict(inputs), rows=rows, shape_key=key, received_ns=monotonic_ns())
        return handle.infer_blocking(request).outputs

    try:
        yield handle, send
    finally:
        handle.close(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def send_all(send: Callable[[Request], dict[str, Array]], requests: list[dict[str, Array]]) -> list[dict[str, Array]]:
    with ThreadPoolExecutor(CALLERS) as pool:
        return list(pool.map(send, requests))


def assert_alone(request: Request, response: Mapping[str, Array]) -> None:
    for name, expected in texts_model(request).items():
        assert response[name].dtype == expected.dtype
        assert np.array_equal(response[name], expected), name


SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, LONGEST)), min_size=1, max_size=40)


@pytest.mark.parametrize("model", [SerialTexts, OverlappedTexts])
@pytest.mark.parametrize("always", [False, True])
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=SIZES, dtype=st.sampled_from(DTYPES), multiple_of=st.sampled_from([1, 4, 8, 16]))
def test_every_response_is_that_of_the_request_alone(
    model: type[SerialTexts], always: bool, sizes: list[tuple[int, int]], dtype: str, multiple_of: int
) -> None:
    requests = [request_of(dtype, rows, length, seed) for seed, (rows, length) in enumerate(sizes)]
    with serving(model(), dtype, always, multiple_of) as (handle, send):
        if not always:
            handle.layout.check(SerialTexts(), [request_of(dtype, 1, 3, 1), request_of(dtype, 1, 5, 2)])
            times = {(rows, length): 1_000_000 for rows in (1, 2, 4, 8) for length in (1, 2, 4, 8, 16, 32)}
            handle.layout.lengths.seed(times)
        for request, response in zip(requests, send_all(send, requests), strict=True):
            assert_alone(request, response)
        assert not handle.layout.problem


@pytest.mark.parametrize("model", [SerialTexts, OverlappedTexts])
def test_on_a_gpu_every_request_is_padded_to_a_multiple(model: type[SerialTexts]) -> None:
    execution = model()
    with serving(execution, "FP32", always=True) as (handle, send):
        send_all(send, [request_of("FP32", 1, 1 + n % LONGEST, n) for n in range(200)])
        assert handle.layout.is_ready, handle.layout.problem
        execution.shapes.clear()
        for request in (requests := [request_of("FP32", 1, 1 + n % LONGEST, n) for n in range(200)]):
            assert request["x"].shape[1] <= LONGEST
        for request, response in zip(requests, send_all(send, requests), strict=True):
            assert_alone(request, response)
        assert {length for _, length in execution.shapes} <= {8, 16, 24}
        assert len(execution.shapes) < len(requests)
        totals = handle.recorder.totals()
        assert 0 < totals.padding_positions < totals.positions


def test_lengths_are_not_padded_beyond_the_longest_of_the_engine() -> None:
    execution = OverlappedTexts()
    with serving(execution, "INT32", always=True, multiple_of=16, longest=20) as (handle, send):
        handle.layout.check(SerialTexts(), [request_of("INT32", 1, 3, 1), request_of("INT32", 1, 5, 2)])
        for length in (18, 20, 21, 3):
            request = request_of("INT32", 2, length, length)
            assert_alone(request, send(request))
        assert [length for _, length in execution.shapes] == [20, 20, 21, 16]


@pytest.mark.parametrize("model", [SerialTexts, OverlappedTexts])
def test_a_model_that_does_not_mask_is_found_with_its_first_requests(
    model: type[SerialTexts], caplog: pytest.LogCaptureFixture
) -> None:
    def unmasked(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return texts_model({**inputs, "mask": np.ones_like(inputs["mask"])})

    with serving(model(unmasked), "FP32", always=True) as (handle, send):
        for round_number in range(20):
            requests = [request_of("FP32", 1, 1 + n, n + round_number) for n in range(8)]
            for request, response in zip(requests, send_all(send, requests), strict=True):
                assert_alone(request, response)
            if handle.layout.problem:
                break
        assert "output 'total' of a request changes when it is padded" in handle.layout.problem
    assert caplog.text.count("its requests are not padded") == 1


def test_a_model_that_fails_on_padded_batches_is_not_padded() -> None:
    def fails_on_several(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs["x"].shape[1] % 8 == 0:
            raise ValueError("not this length")
        return texts_model(inputs)

    with serving(SerialTexts(fails_on_several), "FP32", always=True) as (handle, send):
        for number in range(20):
            requests = [request_of("FP32", 1, 1 + n, n + number) for n in range(7)]
            for request, response in zip(requests, send_all(send, requests), strict=True):
                assert_alone(request, response)
        assert "the check with its first requests failed (ValueError: not this length)" in handle.layout.problem
