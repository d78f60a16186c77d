"""The TensorRT backend against a GPU that does its work late and a TensorRT that runs on the host."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import ConfigError, ModelFailed
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.cuda.driver import DeviceError, current, is_context_usable
from headrace.runtimes.tensorrt.backend import GPUS, TensorRtBackend

from tests.support.fake_streams import LateCuda
from tests.support.tensorrt_case import BATCHED, build, fly, opened, right, rows


@pytest.fixture(params=["10.6.0", "11.4.0.106"])
def trt_version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


def test_a_refused_capture_is_logged_once(
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


def test_a_discarded_batch_does_not_affect_others(trt: Any, tmp_path: Path) -> None:
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
        batch = fly(execution, rows(3))
        cuda.broken = True
        with pytest.raises(ExecutionLost, match=r"GPU 0 has failed, model\.plan runs there no more"):
            execution.finish(batch)
        cuda.broken = False


def test_a_gpu_whose_memory_can_still_be_read_may_have_failed(cuda: LateCuda) -> None:
    with current():
        assert is_context_usable()
        cuda.stream_fails = True
        assert not is_context_usable()


def test_instances_share_the_engine(cuda: LateCuda, trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.devices = 2
    created = []
    real = trt.Runtime
    monkeypatch.setattr(trt, "Runtime", lambda logger: created.append(logger) or real(logger))
    with opened(build(tmp_path), {**BATCHED, GPUS: "0,0,1"}, instances=3) as executions:
        assert len(created) == 2, "one engine a GPU"
        batches = [(execution, fly(execution, rows(n))) for n, execution in enumerate(executions, 1)]
        for n, (execution, batch) in enumerate(batches, 1):
            np.testing.assert_array_equal(execution.finish(batch)["y"], right(rows(n)))
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


def test_outputs_with_data_dependent_shapes(trt: Any, tmp_path: Path) -> None:
    trt.state.late_shapes = True
    with pytest.raises(ConfigError, match="'y', whose shape depends on the values"), opened(build(tmp_path)):
        pass


@pytest.mark.parametrize("function", ["mem_alloc", "pagelocked_empty", "Stream", "Event"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_full_gpu_is_an_error_and_leaks_nothing(
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
