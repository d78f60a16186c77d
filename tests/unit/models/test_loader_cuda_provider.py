"""Which models ONNX Runtime's CUDA provider serves: those that request the GPU, if TensorRT does not serve them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headrace.config.model_folder import read_model_folder
from headrace.config.serving_plan import CUDA_RUNTIME, GpuRuntime, ServingPlan, serving_plan
from headrace.core.errors import ConfigError, Finding, Unavailable, Unsupported
from headrace.models.explanation import explain
from headrace.models.registry import Registry
from headrace.runtimes import onnxruntime_cuda

from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.cuda_provider import FakeProvider, install_provider
from tests.support.fake_streams import LateCuda
from tests.support.waiting import until_async
from tests.unit.models.test_gpu_backend import ALL
from tests.unit.models.test_loader_runtime import BATCHES, FP16, KIND_GPU, GpuWorkshop

FAILED = "TensorRT has no operator Unique"
CUDA_ACCELERATOR = (
    "optimization: {execution_accelerators: {gpu_execution_accelerator: [{name: cuda, parameters: {PAIRS}}]}}\n"
)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> Iterator[FakeProvider]:
    yield install_provider(monkeypatch)
    gc.collect()  # a stream goes with its object, which the traceback of an expected error may still hold
    assert cuda.depth == 0, "a context was left current"
    assert not cuda.live, "memory was not given back"


def facts(registry: Registry) -> dict[str, object]:
    """Runtime and device of "m" from its metadata, and the reasons."""
    handle = registry.lease("m", "")
    result = {name.removeprefix("headrace."): value for name, value in handle.spec.parameters.items()}
    handle.release()
    names = ("runtime", "device", "not_on_gpu", "not_on_tensorrt")
    return {name: result[name] for name in names if name in result}


@pytest.mark.parametrize("config", [BATCHES + FP16, KIND_GPU + FP16, BATCHES + "backend: tensorrt\n"])
async def test_the_provider_serves_on_the_gpu_until_the_engine_is_built(
    trt: Any, provider: FakeProvider, tmp_path: Path, config: str
) -> None:
    workshop = GpuWorkshop(tmp_path, config)
    (workshop.orders / "hold").touch()

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        await until_async(lambda: workshop.calls() == ["started m 1 tensorrt"])
        state, reason = index(registry)["m", "1"]
        assert state == "READY"
        assert reason.endswith("GPU 0 serves meanwhile")
        reason = "no engine serves: none is built"
        assert facts(registry) == {"runtime": CUDA_RUNTIME, "device": "GPU 0", "not_on_tensorrt": reason}
        (workshop.orders / "hold").unlink()
        await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
        assert same(await infer_values(registry), 2)
        assert facts(registry) == {"runtime": "tensorrt", "device": "GPU 0"}


@pytest.mark.parametrize("config", [KIND_GPU, KIND_GPU + "fallback: onnxruntime\n", BATCHES + FP16])
async def test_the_provider_goes_on_serving_a_model_that_tensorrt_refuses(
    trt: Any, provider: FakeProvider, tmp_path: Path, config: str
) -> None:
    workshop = GpuWorkshop(tmp_path, config)
    (workshop.orders / "fail").write_text(FAILED)

    async with workshop.running() as (_, registry):
        await until_async(lambda: "failed" in index(registry)["m", "1"][1])
        assert same(await infer_values(registry), 1)
        assert index(registry)["m", "1"][0] == "READY"
        assert index(registry)["m", "1"][1].endswith(f"building it failed: {FAILED}")
        reason = f"building its engine failed: {FAILED}"
        assert facts(registry) == {"runtime": CUDA_RUNTIME, "device": "GPU 0", "not_on_tensorrt": reason}
        (finding,) = [one for one in explain(registry, "m", "")["findings"] if one.kind == "not_on_tensorrt"]
        assert finding.explanation.endswith(reason)
        assert not registry.substitutes()
        handle = registry.lease("m", "")
        assert handle.policy.instances == (1 if "count: 1" in config else 2)
        handle.release()
    assert {options["device_id"] for options in provider.options} == {"0"}


async def test_a_file_that_the_provider_refuses_is_served_as_without_it(
    trt: Any, provider: FakeProvider, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    provider.failure = ConfigError([Finding("model.onnx", None, "no kernel for Unique")])
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16)
    (workshop.orders / "fail").write_text("no")

    async with workshop.running() as (_, registry):
        await until_async(lambda: "building it failed" in index(registry)["m", "1"][1])
        assert same(await infer_values(registry), 1)
        assert facts(registry)["runtime"] == "onnxruntime"
        assert "no kernel for Unique" in index(registry)["m", "1"][1]


async def test_kind_gpu_that_the_provider_refuses_waits_for_its_engine(
    trt: Any, provider: FakeProvider, tmp_path: Path
) -> None:
    provider.failure = ConfigError([Finding("model.onnx", None, "no kernel for Unique")])
    workshop = GpuWorkshop(tmp_path, KIND_GPU)
    (workshop.orders / "hold").touch()

    async with workshop.running() as (_, registry):
        await until_async(lambda: workshop.calls() == ["started m 1 tensorrt"])
        assert index(registry)["m", "1"][0] == "LOADING"
        with pytest.raises(Unavailable):
            registry.lease("m", "")
        (workshop.orders / "hold").unlink()
        await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
        assert same(await infer_values(registry), 2)


async def test_without_the_package_the_failed_build_names_the_extra(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    problem = f"the installed onnxruntime has no CUDA provider: {onnxruntime_cuda.EXTRA}"
    monkeypatch.setattr(onnxruntime_cuda, "provider_problem", lambda: problem)
    workshop = GpuWorkshop(tmp_path, KIND_GPU)
    (workshop.orders / "fail").write_text(FAILED)

    caplog.set_level(logging.ERROR)
    async with workshop.running() as (_, registry):
        await until_async(lambda: index(registry)["m", "1"][0] == "UNAVAILABLE")
    (line,) = [record.getMessage() for record in caplog.records if "building its engine" in record.getMessage()]
    assert line.endswith(f"{FAILED}; the second GPU runtime does not serve the model: {problem}")
    assert "gpu-onnx" in line


async def test_without_tensorrt_the_provider_serves(provider: FakeProvider, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=KIND_GPU)

    async with running(repository, ALL) as (_, registry):
        assert same(await infer_values(registry), 1)
        assert facts(registry)["runtime"] == CUDA_RUNTIME
        assert "TensorRT cannot be imported" in str(facts(registry)["not_on_tensorrt"])
        assert "ONNX Runtime's CUDA provider serves model.onnx: TensorRT" in index(registry)["m", "1"][1]


async def test_the_accelerator_cuda_selects_the_provider(trt: Any, provider: FakeProvider, tmp_path: Path) -> None:
    pairs = "cudnn_conv_algo_search: '0', gpu_mem_limit: '70000000'"
    workshop = GpuWorkshop(tmp_path, KIND_GPU + CUDA_ACCELERATOR.replace("PAIRS", pairs))

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        assert facts(registry) == {"runtime": CUDA_RUNTIME, "device": "GPU 0"}
        assert index(registry)["m", "1"] == ("READY", "")
    assert workshop.calls() == [], "no engine is built"
    (options,) = provider.options
    assert (options["cudnn_conv_algo_search"], options["gpu_mem_limit"]) == ("EXHAUSTIVE", "70000000")


async def test_an_engine_that_fits_is_preferred(trt: Any, provider: FakeProvider, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, KIND_GPU)
    workshop.publish()

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 2)
    assert provider.options == []


# The plan alone


def machine() -> Any:
    raise Unsupported("TensorRT is not there")


def planned(folder: Path, config: str, problem: str = "") -> ServingPlan:
    put(folder, 1, config=config)
    runtime = GpuRuntime(machine, lambda: True, lambda: problem)
    return serving_plan(read_model_folder(folder / "m", folder), 1, runtime)


@pytest.mark.parametrize(
    ("config", "runtime"),
    [
        (BATCHES, "onnxruntime"),
        (BATCHES + "instance_group: [{kind: cpu}]\n", "onnxruntime"),
        (KIND_GPU + "runtime: onnxruntime\n", "onnxruntime"),
        (BATCHES + CUDA_ACCELERATOR.replace("PAIRS", "") + "instance_group: [{kind: cpu}]\n", "onnxruntime"),
        (KIND_GPU, CUDA_RUNTIME),
        (KIND_GPU + "backend: onnxruntime\n", CUDA_RUNTIME),
        (KIND_GPU + "platform: onnxruntime_onnx\n", CUDA_RUNTIME),
        (BATCHES + FP16, CUDA_RUNTIME),
        (BATCHES + "backend: tensorrt\n", CUDA_RUNTIME),
        (BATCHES + CUDA_ACCELERATOR.replace("PAIRS", ""), CUDA_RUNTIME),
    ],
)
def test_only_models_that_request_the_gpu(tmp_path: Path, config: str, runtime: str) -> None:
    plan = planned(tmp_path, config)
    assert plan.runtime == runtime
    assert not plan.build
    without = planned(tmp_path / "without", config, "no package")
    assert without.runtime == "onnxruntime"
    if runtime == CUDA_RUNTIME:
        assert not plan.substitutes, "a GPU serves"
        assert plan.fallback is None or plan.fallback.runtime == "onnxruntime"


def test_kind_gpu_without_a_fallback_is_not_served_by_the_cpu(tmp_path: Path) -> None:
    plan = planned(tmp_path, KIND_GPU + CUDA_ACCELERATOR.replace("PAIRS", ""))
    assert (plan.runtime, plan.fallback) == (CUDA_RUNTIME, None)


def test_no_gpu_no_probe(tmp_path: Path) -> None:
    def probe() -> str:
        raise AssertionError("the libraries are loaded only on a machine with a GPU")

    put(tmp_path, 1, config=KIND_GPU)
    folder = read_model_folder(tmp_path / "m", tmp_path)
    assert serving_plan(folder, 1, GpuRuntime(machine, lambda: False, probe)).runtime == "onnxruntime"
