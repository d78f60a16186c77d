"""Which runtime serves a model, row by row of the table in docs/gpu.md, on a machine with a simulated GPU and on one without."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from headrace.config.model_folder import read_model_folder
from headrace.config.serving_plan import GpuRuntime, ServingPlan, serving_plan
from headrace.core.errors import Unavailable, Unsupported
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_backend import tensorrt_machine
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry
from headrace.runtimes.tensorrt.backend import HOST_CODE

from tests.support.control_thread import EXPLICIT, index, infer_values, put, running, same
from tests.support.fake_builder import command, publish
from tests.support.fake_tensorrt_runtime import MAGIC
from tests.support.models import affine, read_config_text
from tests.support.waiting import until_async
from tests.unit.models.test_gpu_backend import plan_of

# Each of these starts processes of its own; together they take most of a minute.
pytestmark = pytest.mark.slow

NO_CONTROL = ControlPolicy("none")
FP16 = "optimization: {precision: fp16}\n"
BATCHES = "max_batch_size: 8\n"
TRITON_FP16 = """
optimization:
  execution_accelerators:
    gpu_execution_accelerator: [{name: tensorrt, parameters: {precision_mode: FP16}}]
"""
# What introductions to Triton show, beside nothing but a model.onnx.
INTRODUCTION = """
name: "m"
backend: "tensorrt"
max_batch_size: 8
input [{ name: "X" data_type: TYPE_FP32 dims: [ 16 ] }]
output [{ name: "Y" data_type: TYPE_FP32 dims: [ 4 ] }]
"""


class GpuWorkshop:
    """A repository with the model "m" on a machine with a simulated GPU, and a builder of its TensorRT engine."""

    def __init__(self, folder: Path, config: str, file: str = "config.yaml") -> None:
        self.repository, self.orders = folder / "repository", folder / "orders"
        put(self.repository, 1)
        (self.repository / "m" / file).write_text(config)
        self.command = command(self.orders)
        self.stamp: dict[str, Any] = {"machine": asdict(tensorrt_machine()), "precision": "fp16", "asked": "fp16"}
        (self.orders / "tensorrt.json").write_text(json.dumps(self.stamp))
        (self.orders / "engine.plan").write_bytes(plan_of(folder, 2))

    def publish(self, **fields: Any) -> None:
        engine = (self.orders / "engine.plan").read_bytes()
        publish(self.repository / "m", 1, engine, ".plan", **{**self.stamp, **fields})

    def calls(self) -> list[str]:
        path = self.orders / "calls"
        return [" ".join(line.split()[:4]) for line in path.read_text().splitlines()] if path.exists() else []

    def running(
        self, control: ControlPolicy = NO_CONTROL, names: frozenset[str] | None = None, **loading: Any
    ) -> AbstractAsyncContextManager[tuple[Reconciler, Registry]]:
        return running(self.repository, control, names, self.command, **loading)


def facts(registry: Registry) -> dict[str, object]:
    """Return the platform of "m" from its metadata."""
    handle = registry.lease("m", "")
    result = {name.removeprefix("headrace."): value for name, value in handle.spec.parameters.items()}
    handle.release()
    return {name: result[name] for name in ("runtime", "device", "precision", "not_on_gpu") if name in result}


ON_GPU = {"runtime": "tensorrt", "device": "GPU 0", "precision": "fp16"}


@pytest.mark.parametrize(
    ("config", "file"),
    [
        (BATCHES + FP16, "config.yaml"),
        (BATCHES + FP16 + "backend: onnxruntime\ninstance_group: [{count: 2}]\n", "config.yaml"),
        (BATCHES + TRITON_FP16, "config.yaml"),
        (BATCHES + "backend: tensorrt\n", "config.yaml"),
        (BATCHES + "platform: tensorrt_plan\n", "config.yaml"),
        (BATCHES + "runtime: tensorrt\n", "config.yaml"),
        (BATCHES + "build_on_load: true\n", "config.yaml"),
        (INTRODUCTION, "config.pbtxt"),
        (
            'max_batch_size: 8 parameters { key: "headrace.optimization.precision" value { string_value: "fp16" } }',
            "config.pbtxt",
        ),
    ],
)
async def test_the_cpu_serves_until_the_engine_is_built_then_the_gpu(
    trt: Any, tmp_path: Path, config: str, file: str
) -> None:
    workshop = GpuWorkshop(tmp_path, config, file)
    (workshop.orders / "hold").touch()

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        await until_async(lambda: workshop.calls() == ["started m 1 tensorrt"])
        precision = "FP16" if "FP16" in config or "fp16" in config else "FP32"
        text = f"building TensorRT {precision}, usually a minute or two; the CPU serves meanwhile"
        assert index(registry)["m", "1"] == ("READY", text)
        waits = "model.onnx serves on the CPU until its engine is built"
        assert facts(registry) == {
            "runtime": "onnxruntime",
            "device": "CPU",
            "precision": "as in model.onnx",
            "not_on_gpu": waits,
        }
        (workshop.orders / "progress").write_text("progress 0.45 timing 8 rows")
        (workshop.orders / "hold").unlink()
        await until_async(lambda: f"TensorRT {precision} (45%, timing 8 rows), usually" in index(registry)["m", "1"][1])
        (workshop.orders / "progress").unlink()
        await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
        assert same(await infer_values(registry), 2)
        assert facts(registry) == ON_GPU

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 2)
    assert workshop.calls() == ["started m 1 tensorrt"], "the next start builds nothing"


async def test_after_a_failed_build_the_cpu_serves_and_the_reason_is_shown(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16)
    (workshop.orders / "fail").write_text("no room on the disk")

    async with workshop.running() as (_, registry):
        await until_async(lambda: "failed" in index(registry)["m", "1"][1])
        assert same(await infer_values(registry), 1)
        assert facts(registry)["not_on_gpu"] == "building its engine failed: no room on the disk"
        assert index(registry)["m", "1"][1].endswith("building it failed: no room on the disk")


@pytest.mark.parametrize("precision", ["", FP16])
async def test_an_engine_that_was_built_by_hand_serves_whatever_the_backend(
    trt: Any, tmp_path: Path, precision: str
) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES + precision + "backend: onnxruntime\n")
    workshop.publish(overridden=not precision)

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 2)
        assert facts(registry) == ON_GPU
        handle = registry.lease("m", "")
        assert handle.policy.instances == 2, "two on each GPU where no group is written"
        handle.release()
    assert workshop.calls() == []


@pytest.mark.parametrize(
    ("fallback", "reason"),
    [("instance_group: [{kind: cpu, count: 3}]\n", "KIND_CPU"), ("runtime: onnxruntime\n", "runtime: onnxruntime")],
)
async def test_only_kind_cpu_and_runtime_keep_a_model_on_the_cpu(
    trt: Any, tmp_path: Path, fallback: str, reason: str
) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16 + fallback)
    workshop.publish()

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        assert {"runtime": "onnxruntime", "device": "CPU"}.items() <= facts(registry).items()
        assert reason in str(facts(registry)["not_on_gpu"])
    assert workshop.calls() == []


async def test_models_without_gpu_settings_stay_on_the_cpu_with_a_hint(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES)

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        assert index(registry)["m", "1"] == ("READY", "")
        assert "write optimization: {precision: fp16}" in str(facts(registry)["not_on_gpu"])
    assert workshop.calls() == []


async def test_build_on_load_false_is_obeyed(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16 + "build_on_load: false\n")

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        assert "not_on_gpu" in facts(registry)
    assert workshop.calls() == []


KIND_GPU = BATCHES + "instance_group: [{kind: gpu, count: 1}]\n"


async def test_kind_gpu_is_not_ready_until_the_gpu_serves(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, KIND_GPU + FP16)
    (workshop.orders / "hold").touch()

    async with workshop.running() as (_, registry):
        await until_async(lambda: workshop.calls() == ["started m 1 tensorrt"])
        state, reason = index(registry)["m", "1"]
        assert state == "LOADING"
        assert reason == "building TensorRT FP16, usually a minute or two; requests are refused until then (KIND_GPU)"
        with pytest.raises(Unavailable, match="is being loaded: building TensorRT FP16"):
            registry.lease("m", "")
        (workshop.orders / "hold").unlink()
        await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
        assert same(await infer_values(registry), 2)
        assert facts(registry) == ON_GPU


async def test_kind_gpu_is_an_error_if_no_gpu_runtime_can_serve_it(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, KIND_GPU)
    (workshop.orders / "fail").write_text("node 'x' has no kernel")

    async with workshop.running() as (_, registry):
        await until_async(lambda: index(registry)["m", "1"][0] == "UNAVAILABLE")
        with pytest.raises(Unavailable, match=r"cannot be served: .*node 'x' has no kernel"):
            registry.lease("m", "")
        assert registry.failures()


async def test_a_reload_for_kind_gpu_serves_the_old_version_until_the_gpu_is_ready(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES)
    (workshop.orders / "hold").touch()

    async with workshop.running(EXPLICIT, frozenset({"m"})) as (reconciler, registry):
        assert same(await infer_values(registry), 1)
        (workshop.repository / "m" / "config.yaml").write_text(KIND_GPU)
        await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 1)
        await until_async(lambda: workshop.calls() == ["started m 1 tensorrt"])
        (workshop.orders / "hold").unlink()
        await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
        assert same(await infer_values(registry), 2)


async def test_a_model_that_waits_for_its_engine_can_be_unloaded(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, KIND_GPU)
    (workshop.orders / "hold").touch()

    async with workshop.running(EXPLICIT, frozenset({"m"})) as (reconciler, registry):
        await until_async(lambda: workshop.calls() == ["started m 1 tensorrt"])
        await reconciler.unload("m", False)
        assert index(registry)["m", "1"] == ("UNAVAILABLE", "unloaded")
        await until_async(lambda: workshop.calls()[-1] == "stopped m 1 tensorrt")


# Without a GPU


def no_gpu() -> GpuRuntime:
    def describe() -> Any:
        raise Unsupported("this machine has no NVIDIA GPU")

    return GpuRuntime(describe, lambda: False)


def planned(folder: Path, config: str) -> ServingPlan:
    put(folder, 1, config=config or "{}\n")
    return serving_plan(read_model_folder(folder / "m", folder), 1, no_gpu())


@pytest.mark.parametrize(
    ("config", "remark", "substitutes"),
    [
        (BATCHES, "", False),
        (BATCHES + FP16, "", False),
        (
            BATCHES + "instance_group: [{kind: gpu}]\n",
            "model.onnx serves on the CPU: this machine has no NVIDIA GPU",
            True,
        ),
        (BATCHES + "backend: tensorrt\n", "model.onnx serves on the CPU: this machine has no NVIDIA GPU", True),
        (
            BATCHES + "backend: tensorrt\nfallback: onnxruntime\n",
            "model.onnx serves on the CPU: this machine has no NVIDIA GPU",
            False,
        ),
    ],
)
def test_without_a_gpu_the_cpu_serves_and_builds_nothing(
    tmp_path: Path, config: str, remark: str, substitutes: bool
) -> None:
    plan = planned(tmp_path, config)
    assert (plan.runtime, plan.build, plan.remark, plan.substitutes) == ("onnxruntime", "", remark, substitutes)
    assert bool(plan.not_on_gpu) == bool(remark)


def test_without_a_gpu_only_an_explicit_build_on_load_builds(tmp_path: Path) -> None:
    plan = planned(tmp_path, "optimization: {precision: int8}\nbuild_on_load: true\n")
    assert (plan.target, plan.engine) == ("onnxruntime", "ONNX Runtime INT8")


def test_cuda_is_not_initialized_for_cpu_models(tmp_path: Path) -> None:
    def describe() -> Any:
        raise AssertionError("the GPU was looked for")

    put(tmp_path, 1, config=BATCHES)
    folder = read_model_folder(tmp_path / "m", tmp_path)
    assert serving_plan(folder, 1, GpuRuntime(describe, lambda: True)).runtime == "onnxruntime"
    (tmp_path / "m" / "config.yaml").write_text(BATCHES + FP16 + "runtime: onnxruntime\n")
    folder = read_model_folder(tmp_path / "m", tmp_path)
    assert serving_plan(folder, 1, GpuRuntime(describe, lambda: True)).runtime == "onnxruntime"


# What was built before


def test_a_precision_written_after_the_build_finds_the_engine(tmp_path: Path) -> None:
    put(tmp_path, 1, config=BATCHES)
    publish(tmp_path / "m", 1, affine(seed=2).SerializeToString(), overridden=True)
    for config in ("", "optimization: {precision: int8}\n", TRITON_FP16.replace("FP16", "INT8")):
        plan = planned(tmp_path, BATCHES + config)
        assert plan.stamp is not None, config
    for config in (FP16, "optimization: {precision: int8, workspace_mb: 5}\n"):
        assert planned(tmp_path, BATCHES + config).stamp is None, config
    assert planned(tmp_path, "max_batch_size: 4\noptimization: {precision: int8}\n").stamp is None


async def test_engines_of_a_read_only_folder_are_loaded_from_the_state_folder(trt: Any, tmp_path: Path) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16)
    (workshop.orders / "readonly").touch()
    before = sorted(path.name for path in (workshop.repository / "m" / "1").iterdir())
    for _ in range(2):
        async with workshop.running(state=tmp_path / "state") as (_reconciler, registry):
            await until_async(lambda: index(registry)["m", "1"] == ("READY", ""))
            assert same(await infer_values(registry), 2)
            assert facts(registry) == ON_GPU
    assert workshop.calls() == ["started m 1 tensorrt"], "a restart builds nothing"
    assert sorted(path.name for path in (workshop.repository / "m" / "1").iterdir()) == before


def earlier(workshop: GpuWorkshop, version: str) -> None:
    """Turn the engine of a workshop into a version-compatible one of an earlier TensorRT."""
    file = workshop.orders / "engine.plan"
    document = json.loads(file.read_bytes().removeprefix(MAGIC)) | {"version": version, "host_code": True}
    file.write_bytes(MAGIC + json.dumps(document).encode())
    workshop.stamp["machine"] |= {"version": version}


@pytest.mark.parametrize("is_stamped", [True, False])
async def test_version_compatible_engines_of_an_earlier_tensorrt_serve(
    trt: Any, tmp_path: Path, is_stamped: bool
) -> None:
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16 + "build_on_load: false\n")
    earlier(workshop, "10.2.0")
    workshop.publish(**({"version_compatible": True} if is_stamped else {}))

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 2 if is_stamped else 1)
        assert (facts(registry) == ON_GPU) is is_stamped


async def test_a_plan_runs_no_code_unless_its_stamp_says_that_it_holds_some(trt: Any, tmp_path: Path) -> None:
    version = trt.__version__
    workshop = GpuWorkshop(tmp_path, BATCHES + FP16 + "build_on_load: false\n")
    earlier(workshop, version)
    workshop.publish()
    # No configuration gives the permission.
    _, findings = read_config_text(f"parameters: {{{HOST_CODE}: 1}}", "m/config.yaml")
    assert any(f'unknown parameter "{HOST_CODE}"' in str(finding) for finding in findings)

    async with workshop.running() as (_, registry):
        assert same(await infer_values(registry), 1)
        assert "cannot be loaded" in index(registry)["m", "1"][1]
