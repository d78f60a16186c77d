"""The TensorRT backend against a GPU that does its work late and a TensorRT that runs on the host."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from engines.targets.base import Order, ShapeRange
from server.backends.base import ExecutionLost
from server.backends.tensorrt_backend import GPUS, MAX_BATCH_SIZE, TensorRtBackend
from server.core.completion import Mailbox
from server.core.errors import ConfigError, ModelFailed
from server.core.request import InferRequest
from server.core.tensor import FP32, ModelSpec, TensorSpec
from server.cuda.driver import DeviceError
from server.dataplane.batching import BatchPolicy
from server.dataplane.handle import ModelHandle
from server.dataplane.policy import HandlePolicy
from server.observability.recorder import Recorder
from tests.fake_streams import LateCuda
from tests.fake_tensorrt import affine
from tests.tensorrt_case import batches, build

BATCHED = {MAX_BATCH_SIZE: "8"}


@pytest.fixture(params=["10.6.0", "11.4.0.106"])
def trt_version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def opened(path: Path, parameters: dict[str, str] = BATCHED, instances: int = 1) -> Iterator[Any]:
    """The executions of a plan; the only one itself if there is one."""
    with closing(TensorRtBackend().load(path, instances, parameters)) as model:
        executions = []
        try:
            executions += [model.execution(index) for index in range(instances)]
            yield executions[0] if instances == 1 else executions
        finally:
            for execution in executions:
                execution.close()


def rows(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-9, 9, (count, 3)).astype(np.float32)


def right(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What `affine` gives."""
    return np.maximum(x @ np.array([[1, 2], [3, 4], [5, 6]], np.float32) + np.array([1, -1], np.float32), 0)


def fly(execution: Any, x: np.ndarray[Any, Any]) -> Any:
    """Begin, fill and launch."""
    flight = execution.begin({"x": x[:1]}, len(x))
    assert flight.inputs["x"].shape == x.shape
    flight.inputs["x"][:] = x
    execution.launch(flight)
    return flight


@pytest.mark.parametrize("one_graph_rows", ["0", "2", "auto"])
def test_batches_of_every_size(trt: Any, tmp_path: Path, one_graph_rows: str) -> None:
    with opened(build(tmp_path), {**BATCHED, "one_graph_rows": one_graph_rows}) as execution:
        for count in (1, 2, 3, 4, 5, 7, 8, 6, 1):
            x = rows(count, count)
            np.testing.assert_array_equal(execution.run({"x": x})["y"], right(x))
        with pytest.raises(ModelFailed, match=r"not built for x \[9, 3\]"):
            execution.run({"x": rows(9)})
        with pytest.raises(ModelFailed, match="takes 'x' as float32, it was given as float64"):
            execution.run({"x": rows(1).astype(np.float64)})
        with pytest.raises(ModelFailed, match="takes x, it was given z"):
            execution.run({"z": rows(1)})
        # Nothing of that has cost a berth.
        assert [len(fly(execution, rows(2)).inputs) for _ in range(execution.depth)] == [1] * execution.depth


@pytest.mark.parametrize("one_graph_rows", ["0", "2", "auto"])
def test_flights_overlap_and_answer_in_the_order_of_launch(
    cuda: LateCuda, trt: Any, tmp_path: Path, one_graph_rows: str
) -> None:
    with opened(build(tmp_path), {**BATCHED, "one_graph_rows": one_graph_rows}) as execution:
        waits = cuda.waits
        under_way = []
        for number in range(30):
            x = rows(1 + number % 8, number)
            under_way.append((fly(execution, x), x))
            if len(under_way) == execution.depth:
                flight, x = under_way.pop(0)
                np.testing.assert_array_equal(execution.finish(flight)["y"], right(x))
        assert len(under_way) == execution.depth - 1
        for flight, x in under_way:
            np.testing.assert_array_equal(execution.finish(flight)["y"], right(x))
        assert cuda.waits - waits == 30, "one wait a batch"


def test_a_second_thread_finishes(trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path)) as execution:
        x = rows(5)
        flight = fly(execution, x)
        later = fly(execution, x + 1)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(execution.finish(f)["y"] for f in (flight, later)))
        thread.start()
        thread.join(10)
        np.testing.assert_array_equal(found, [right(x), right(x + 1)])


def test_answers_belong_to_the_caller(trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path)) as execution:
        x = rows(4)
        first = execution.run({"x": x})["y"]
        for _ in range(execution.depth):
            execution.run({"x": np.zeros_like(x)})
        np.testing.assert_array_equal(first, right(x))


def test_nothing_is_allocated_for_a_batch(cuda: LateCuda, trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path)) as execution:
        before, contexts, graphs = set(cuda.live), trt.state.contexts, set(cuda.graphs)
        # Buckets 1, 2, 4, 8 in each of three berths.
        assert len(graphs) == 4 * execution.depth
        for count in (3, 8, 1):
            execution.run({"x": rows(count)})
        assert (cuda.live, trt.state.contexts, cuda.graphs) == (before, contexts, graphs)


def test_without_graphs(cuda: LateCuda, trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path), {**BATCHED, "cuda_graphs": "0", "pipeline_depth": "2"}) as execution:
        assert execution.depth == 2
        assert not cuda.graphs
        np.testing.assert_array_equal(execution.run({"x": rows(3)})["y"], right(rows(3)))


def test_a_refused_capture_is_told_once(
    cuda: LateCuda, trt: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.refuse_capture = True
    with caplog.at_level(logging.WARNING, "headrace"), opened(build(tmp_path), instances=2) as executions:
        for execution in executions:
            np.testing.assert_array_equal(execution.run({"x": rows(3)})["y"], right(rows(3)))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "model.plan runs without CUDA graphs" in lines[0]
    assert "CAPTURE_INVALIDATED" in lines[0]


def test_profiles_are_chosen_by_bucket(trt: Any, tmp_path: Path) -> None:
    order = Order("fp32", (batches(1, 1, 1), batches(4, 6, 6)))
    with opened(build(tmp_path, order=order), {MAX_BATCH_SIZE: "6"}) as execution:
        for count in (1, 2, 3, 4, 5, 6):
            x = rows(count)
            np.testing.assert_array_equal(execution.run({"x": x})["y"], right(x))
    with pytest.raises(ConfigError, match="up to 6 rows, max_batch_size is 8"), opened(tmp_path / "model.plan"):
        pass


def test_a_model_of_one_shape(trt: Any, tmp_path: Path) -> None:
    plan = build(tmp_path, affine(2), Order("fp32", ()))
    with opened(plan, {}) as execution:
        np.testing.assert_array_equal(execution.run({"x": rows(2)})["y"], right(rows(2)))
        with pytest.raises(ModelFailed, match="not built for"):
            execution.run({"x": rows(1)})
    # One that only ever runs two rows serves batches of one and two.
    with opened(plan, {MAX_BATCH_SIZE: "2"}) as execution:
        np.testing.assert_array_equal(execution.run({"x": rows(1)})["y"], right(rows(1)))


def free_rows(element: int = onnx.TensorProto.FLOAT) -> onnx.ModelProto:
    """y = x + x, [n, k]."""
    x, y = (helper.make_tensor_value_info(name, element, [None, None]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"], name="double")], "free", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_rows_of_any_length(cuda: LateCuda, trt: Any, tmp_path: Path) -> None:
    order = Order("fp32", (ShapeRange({"x": ((1, 1), (4, 16), (8, 40))}),))
    with opened(build(tmp_path, free_rows(), order)) as execution:
        memory = set(cuda.live)
        for length in (*range(1, 41), 3):
            x = np.random.default_rng(length).random((1 + length % 8, length), np.float32)
            np.testing.assert_array_equal(execution.run({"x": x})["y"], x + x)
        assert cuda.live == memory
        # A lane of its own for the first shapes only, in whatever berth they came.
        assert len(cuda.graphs) <= 16 * execution.depth
        with pytest.raises(ModelFailed, match=r"not built for x \[1, 41\]"):
            execution.run({"x": np.zeros((1, 41), np.float32)})


@pytest.mark.parametrize("datatype", ["float16", "int32", "int64"])
def test_other_types(trt: Any, tmp_path: Path, datatype: str) -> None:
    element = helper.np_dtype_to_tensor_dtype(np.dtype(datatype))
    order = Order("fp32", (ShapeRange({"x": ((1, 1), (4, 4), (8, 4))}),))
    with opened(build(tmp_path, free_rows(element), order)) as execution:
        x = np.arange(12).reshape(3, 4).astype(datatype)
        y = execution.run({"x": x})["y"]
        assert y.dtype == x.dtype
        np.testing.assert_array_equal(y, x + x)


def test_a_discarded_flight_is_free_again(trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path)) as execution:
        for _ in range(2 * execution.depth):
            execution.discard(execution.begin({"x": rows(1)}, 3))
        np.testing.assert_array_equal(execution.run({"x": rows(3)})["y"], right(rows(3)))


def test_a_batch_that_is_not_launched_harms_nobody(trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path), {**BATCHED, "cuda_graphs": "0"}) as execution:
        x = rows(3)
        under_way = fly(execution, x)
        trt.state.broken = True
        for _ in range(2 * execution.depth):
            with pytest.raises(ModelFailed, match="not launched"):
                fly(execution, rows(2))
        trt.state.broken = False
        np.testing.assert_array_equal(execution.finish(under_way)["y"], right(x))


def test_a_gpu_that_has_failed_ends_the_execution(cuda: LateCuda, trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path)) as execution:
        flight = fly(execution, rows(3))
        cuda.broken = True
        with pytest.raises(ExecutionLost, match=r"GPU 0 has failed, model\.plan runs there no more"):
            execution.finish(flight)
        cuda.broken = False


def test_an_open_flight_is_waited_for_at_the_end(trt: Any, tmp_path: Path) -> None:
    with opened(build(tmp_path)) as execution:
        fly(execution, rows(3))


def test_instances_share_the_engine(cuda: LateCuda, trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.devices = 2
    made = []
    real = trt.Runtime
    monkeypatch.setattr(trt, "Runtime", lambda logger: made.append(logger) or real(logger))
    with opened(build(tmp_path), {**BATCHED, GPUS: "0,0,1"}, instances=3) as executions:
        assert len(made) == 2, "one engine a GPU"
        flights = [(execution, fly(execution, rows(n))) for n, execution in enumerate(executions, 1)]
        for n, (execution, flight) in enumerate(flights, 1):
            np.testing.assert_array_equal(execution.finish(flight)["y"], right(rows(n)))
    with pytest.raises(ConfigError, match="GPU 5"), opened(tmp_path / "model.plan", {GPUS: "5"}):
        pass


def test_plans_that_are_refused(trt: Any, tmp_path: Path) -> None:
    plan = build(tmp_path)
    whole = plan.read_bytes()
    for content, words in (
        (b"rubbish", "is no plan that TensorRT"),
        (whole.replace(trt.__version__.encode(), b"10.1.0"), "was not built by TensorRT"),
    ):
        plan.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as refused:
            TensorRtBackend().load(plan, 1, {})
        assert "headrace build" in str(refused.value)
        assert str(tmp_path) not in str(refused.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        TensorRtBackend().load(tmp_path / "none.plan", 1, {})
    for name, value in (("cuda_graphs", "yes"), ("pipeline_depth", "1"), ("one_graph_rows", "-1"), ("wait", "no")):
        with pytest.raises(ConfigError, match=name):
            TensorRtBackend().load(plan, 1, {name: value})


def test_outputs_whose_shape_the_values_decide_on(trt: Any, tmp_path: Path) -> None:
    trt.state.late_shapes = True
    with pytest.raises(ConfigError, match="'y', whose shape depends on the values"), opened(build(tmp_path)):
        pass


@pytest.mark.parametrize("function", ["mem_alloc", "pagelocked_empty", "Stream", "Event"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_full_gpu_is_told_and_leaves_nothing_behind(
    cuda: LateCuda, trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, number: int
) -> None:
    import pycuda.driver

    plan = build(tmp_path)
    real, calls = getattr(pycuda.driver, function), []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == number:
            raise pycuda.driver.MemoryError("out of memory")
        return real(*arguments)

    monkeypatch.setattr(pycuda.driver, function, fail)
    if function == "Stream" and number > 3:
        pytest.skip("an instance has three streams")
    with pytest.raises(ConfigError, match=r"memory is full.*serve fewer models"), opened(plan):
        pass


def test_without_a_gpu(cuda: LateCuda, trt: Any) -> None:
    cuda.devices = 0
    with pytest.raises(
        ConfigError, match="'tensorrt' is not available on this machine: this machine has no NVIDIA GPU"
    ):
        TensorRtBackend()


def test_a_driver_error_that_passes_is_the_batch_s_alone(
    cuda: LateCuda, trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pycuda.driver

    def refuse(*_: object) -> None:
        raise pycuda.driver.Error("resource not mapped")

    with opened(build(tmp_path), {**BATCHED, "one_graph_rows": "0"}) as execution:
        with monkeypatch.context() as patch:
            patch.setattr(pycuda.driver, "memcpy_htod_async", refuse)
            with pytest.raises(DeviceError, match="resource not mapped"):
                execution.run({"x": rows(1)})
        np.testing.assert_array_equal(execution.run({"x": rows(3)})["y"], right(rows(3)))


def test_callers_that_wait_run_it_from_their_own_threads(cuda: LateCuda, trt: Any, tmp_path: Path) -> None:
    spec = ModelSpec(
        "m", "1", "tensorrt", {"x": TensorSpec("x", FP32, (-1, 3))}, {"y": TensorSpec("y", FP32, (-1, 2))}, 8
    )
    loop = asyncio.new_event_loop()
    model = TensorRtBackend().load(build(tmp_path), 2, BATCHED)
    handle = ModelHandle(spec, HandlePolicy(BatchPolicy(8), instances=2), model, Mailbox(loop), Recorder())
    handle.start()

    def calls(seed: int) -> int:
        for number in range(20):
            x = rows(1 + number % 8, 100 * seed + number)
            asked = InferRequest(inputs={"x": x}, rows=len(x), shape_key=None, received_ns=1)
            np.testing.assert_array_equal(handle.infer_blocking(asked).outputs["y"], right(x))
        return seed

    try:
        assert calls(0) == 0
        assert cuda.depth == 0, "a context was left current"
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(calls, (1, 2, 3))) == [1, 2, 3]
    finally:
        assert handle.close(10)
        loop.close()
