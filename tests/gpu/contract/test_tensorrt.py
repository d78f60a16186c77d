"""Executions of TensorRT plans: batches, flights, shapes, types and errors."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.completion import Mailbox
from headrace.core.errors import ConfigError, ModelFailed
from headrace.core.request import InferRequest
from headrace.core.tensor import FP32, ModelSpec, TensorSpec
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.observability.counters import Recorder
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace_engines.targets.base import ShapeRange, TargetSpec
from onnx import helper

from tests.gpu.contract.conftest import Build, GpuUnderTest
from tests.support.fake_gpu import install_tensorrt
from tests.support.fake_tensorrt import affine
from tests.support.tensorrt_case import BATCHED, ORDER, batches, fly, opened, right, rows


@pytest.fixture(params=["10.6.0", "11.4.0.106", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GpuUnderTest:
    """The fake with the bindings of TensorRT 10 and of 11, and the real GPU with what is installed."""
    under_test: GpuUnderTest = request.getfixturevalue("real_gpu" if request.param == "real" else "fake_gpu")
    if under_test.fake is not None:
        install_tensorrt(monkeypatch, under_test.fake, request.param)
    return under_test


@pytest.fixture
def plan(build: Build) -> Path:
    """`affine` for 1 to 8 rows."""
    return build(affine(), ORDER)


WAYS = [{"one_graph_rows": "0"}, {"one_graph_rows": "2"}, {"one_graph_rows": "auto"}, {"cuda_graphs": "0"}]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: "=".join(*way.items()))


@every_way
def test_batches_of_every_size(plan: Path, way: dict[str, str]) -> None:
    with opened(plan, {**BATCHED, **way}) as execution:
        for count in (1, 2, 3, 4, 5, 7, 8, 6, 1):
            x = rows(count, count)
            np.testing.assert_array_equal(execution.run({"x": x})["y"], right(x))
        with pytest.raises(ModelFailed, match=r"not built for x \[9, 3\]"):
            execution.run({"x": rows(9)})
        with pytest.raises(ModelFailed, match="takes 'x' as float32, the batch has float64"):
            execution.run({"x": rows(1).astype(np.float64)})
        with pytest.raises(ModelFailed, match="takes the inputs x, the batch has z"):
            execution.run({"z": rows(1)})
        # None of these has cost a buffer slot.
        under_way = [fly(execution, rows(2)) for _ in range(execution.depth)]
        for batch in under_way:
            np.testing.assert_array_equal(execution.finish(batch)["y"], right(rows(2)))


@every_way
def test_batches_in_flight_overlap_and_finish_in_launch_order(
    gpu: GpuUnderTest, plan: Path, way: dict[str, str]
) -> None:
    with opened(plan, {**BATCHED, **way}) as execution:
        waits = gpu.fake.waits if gpu.fake else 0
        under_way = []
        for number in range(30):
            x = rows(1 + number % 8, number)
            under_way.append((fly(execution, x), x))
            if len(under_way) == execution.depth:
                batch, x = under_way.pop(0)
                np.testing.assert_array_equal(execution.finish(batch)["y"], right(x))
        assert len(under_way) == execution.depth - 1
        for batch, x in under_way:
            np.testing.assert_array_equal(execution.finish(batch)["y"], right(x))
        if gpu.fake:
            assert gpu.fake.waits - waits == 30, "one wait a batch"


def test_another_thread_finishes(plan: Path) -> None:
    with opened(plan) as execution:
        x = rows(5)
        in_flight_batches = [fly(execution, x), fly(execution, x + 1)]
        result: list[Any] = []
        thread = threading.Thread(
            target=lambda: result.extend(execution.finish(each)["y"] for each in in_flight_batches)
        )
        thread.start()
        thread.join(60)
        np.testing.assert_array_equal(result, [right(x), right(x + 1)])


def test_answers_belong_to_the_caller(plan: Path) -> None:
    with opened(plan) as execution:
        x = rows(4)
        first = execution.run({"x": x})["y"]
        for _ in range(execution.depth):
            execution.run({"x": np.zeros_like(x)})
        np.testing.assert_array_equal(first, right(x))


def test_a_discarded_batch_frees_its_slot(plan: Path) -> None:
    with opened(plan) as execution:
        for _ in range(2 * execution.depth):
            execution.discard(execution.begin({"x": rows(1)}, 3))
        np.testing.assert_array_equal(execution.run({"x": rows(3)})["y"], right(rows(3)))


def test_closing_waits_for_open_batches(plan: Path) -> None:
    with opened(plan) as execution:
        fly(execution, rows(3))


def test_nothing_is_allocated_for_a_batch_and_everything_freed_at_the_end(gpu: GpuUnderTest, plan: Path) -> None:
    with opened(plan) as execution:
        execution.run({"x": rows(8)})  # what a process takes once is taken now
    before = gpu.used_bytes()
    for _ in range(3):
        with opened(plan) as execution:
            execution.run({"x": rows(8)})
            used = gpu.used_bytes()
            for count in (3, 8, 1) * 20:
                execution.run({"x": rows(count)})
            assert gpu.used_bytes() == used
    assert gpu.used_bytes() - before <= gpu.slack_bytes


def test_profiles_are_chosen_by_bucket(build: Build) -> None:
    plan = build(affine(), TargetSpec("fp32", (batches(1, 1, 1), batches(4, 6, 6))))
    with opened(plan, {MAX_BATCH_SIZE: "6"}) as execution:
        for count in (1, 2, 3, 4, 5, 6):
            x = rows(count)
            np.testing.assert_array_equal(execution.run({"x": x})["y"], right(x))
    with pytest.raises(ConfigError, match="up to 6 rows, max_batch_size is 8"), opened(plan):
        pass


def test_a_model_of_one_shape(build: Build) -> None:
    plan = build(affine(2), TargetSpec("fp32", ()))
    with opened(plan, {}) as execution:
        np.testing.assert_array_equal(execution.run({"x": rows(2)})["y"], right(rows(2)))
        with pytest.raises(ModelFailed, match="not built for"):
            execution.run({"x": rows(1)})
    # One that only ever runs two rows serves batches of one and two.
    with opened(plan, {MAX_BATCH_SIZE: "2"}) as execution:
        np.testing.assert_array_equal(execution.run({"x": rows(1)})["y"], right(rows(1)))


def doubled(element: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    """y = x + x, [n, k]."""
    x, y = (helper.make_tensor_value_info(name, element, [None, None]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"], name="double")], "doubled", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_rows_of_any_length(gpu: GpuUnderTest, build: Build) -> None:
    plan = build(doubled(), TargetSpec("fp32", (ShapeRange({"x": ((1, 1), (4, 16), (8, 40))}),)))
    with opened(plan) as execution:
        memory = set(gpu.fake.live) if gpu.fake else set()
        # More shapes than get a graph, and one of them again.
        for length in (*range(1, 41), 3):
            x = np.random.default_rng(length).random((1 + length % 8, length), np.float32)
            np.testing.assert_array_equal(execution.run({"x": x})["y"], x + x)
        if gpu.fake:
            assert gpu.fake.live == memory
            # A graph of its own for the first shapes only, in whatever buffer slot they came.
            assert len(gpu.fake.graphs) <= 16 * execution.depth
        with pytest.raises(ModelFailed, match=r"not built for x \[1, 41\]"):
            execution.run({"x": np.zeros((1, 41), np.float32)})


@pytest.mark.parametrize("datatype", ["float16", "int32", "int64"])
def test_other_types(build: Build, datatype: str) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(datatype))
    plan = build(doubled(element), TargetSpec("fp32", (ShapeRange({"x": ((1, 1), (4, 4), (8, 4))}),)))
    with opened(plan) as execution:
        x = np.arange(12).reshape(3, 4).astype(datatype)
        y = execution.run({"x": x})["y"]
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x + x)


def test_plans_that_are_refused(plan: Path) -> None:
    whole = plan.read_bytes()
    for content in (b"", b"rubbish", whole[: len(whole) // 2]):
        plan.write_bytes(content)
        with pytest.raises(ConfigError, match="headrace build"):
            TensorRtBackend().load(plan, 1, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        TensorRtBackend().load(plan.with_name("none.plan"), 1, {})


def test_instances_at_the_same_time(plan: Path) -> None:
    with closing(TensorRtBackend().load(plan, 2, BATCHED)) as model:

        def work(index: int) -> int:
            with closing(model.execution(index)) as execution:
                for number in range(50):
                    x = rows(1 + number % 5, index)
                    np.testing.assert_array_equal(execution.run({"x": x})["y"], right(x))
            return index

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(work, range(2))) == [0, 1]


def request(x: np.ndarray[Any, Any]) -> InferRequest:
    return InferRequest(inputs={"x": x}, rows=len(x), shape_key=None, received_ns=1)


def test_through_the_scheduler_from_the_loop_and_from_threads(plan: Path) -> None:
    spec = ModelSpec(
        "m", "1", "tensorrt", {"x": TensorSpec("x", FP32, (-1, 3))}, {"y": TensorSpec("y", FP32, (-1, 2))}, 8
    )

    async def scenario() -> None:
        model = TensorRtBackend().load(plan, 2, BATCHED)
        mailbox = Mailbox(asyncio.get_running_loop())
        handle = ModelHandle(spec, HandlePolicy(BatchPolicy(8), instances=2), model, mailbox, Recorder())
        handle.start()
        try:
            sent = [rows(1 + number % 7, number) for number in range(100)]
            waiting = [asyncio.to_thread(lambda x=x: handle.infer_blocking(request(x))) for x in sent]
            result = await asyncio.gather(*waiting, *[handle.infer(request(x)) for x in sent])
            for x, response in zip([*sent, *sent], result, strict=True):
                np.testing.assert_array_equal(response.outputs["y"], right(x))
        finally:
            assert handle.close(10)

    asyncio.run(asyncio.wait_for(scenario(), 100))
