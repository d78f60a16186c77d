"""Models with `backend: tensorrt` from the repository to the answer, on a GPU that does its work late, and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_backend import tensorrt_machine
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.fake_builder import command, publish
from tests.support.fake_streams import LateCuda
from tests.support.models import affine
from tests.support.waiting import until_async

ALL = ControlPolicy("none")
TENSORRT = "backend: tensorrt\nmax_batch_size: 8\n"


def plan_of(folder: Path, seed: int, largest: int = 8) -> bytes:
    """A plan of `affine`."""
    path = folder / "built.plan"
    profile = ShapeRange({"X": ((1, 16), (largest, 16), (largest, 16))})
    TensorRtTarget().build(affine(seed=seed), TargetSpec("fp32", (profile,)), path, silent)
    return path.read_bytes()


def machine() -> dict[str, Any]:
    result = tensorrt_machine()
    return {name: getattr(result, name) for name in ("target", "version", "device", "capability", "driver")}


async def serves(repository: Path, seed: int) -> tuple[str, int]:
    """Load the repository, see that the answers are those of a seed; what the index says beside READY, and the instances."""
    async with running(repository, ALL) as (_, registry):
        for _number in range(5):
            assert same(await infer_values(registry), seed)
        state, reason = index(registry)["m", "1"]
        assert state == "READY"
        handle = registry.lease("m", "")
        handle.release()
    return reason, handle.policy.instances


async def refused(repository: Path) -> str:
    """Return the reason why the model is not served."""
    async with running(repository, ALL) as (_, registry):
        result = [text for (name, _version), text in index(registry).items() if name == "m"]
        assert [state for state, _reason in result] == ["UNAVAILABLE"], result
    return result[0][1]


async def test_a_plan_of_the_repository_s_own(trt: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=TENSORRT + "instance_group: [{kind: gpu, count: 2, gpus: [0]}]\n")
    (repository / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 2))
    assert await serves(repository, 2) == ("", 2)


async def test_the_engine_stamped_for_this_machine_has_precedence(trt: Any, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=TENSORRT)
    publish(repository / "m", 1, plan_of(tmp_path, 3), suffix=".plan", machine=machine())
    assert await serves(repository, 3) == ("", 2)
    (repository / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 2))
    assert await serves(repository, 3) == ("", 2)


async def test_every_gpu_gets_the_instances(trt: Any, cuda: LateCuda, tmp_path: Path) -> None:
    cuda.devices = 3
    repository = tmp_path / "repository"
    put(repository, 1, config=TENSORRT + "instance_group: [{kind: gpu, count: 2}, {kind: gpu, gpus: [1]}]\n")
    (repository / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 2))
    assert await serves(repository, 2) == ("", 7)
    (repository / "m" / "config.yaml").write_text(TENSORRT)
    assert await serves(repository, 2) == ("", 6)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("fallback: onnxruntime\n", "model.onnx serves in place of an engine: built for NVIDIA"),
        ("", "has no engine for this machine (built for NVIDIA"),
    ],
)
async def test_an_engine_of_another_machine(trt: Any, tmp_path: Path, config: str, reason: str) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=TENSORRT + config + "build_on_load: false\n")
    other = {**machine(), "device": "NVIDIA A10", "capability": "8.6"}
    publish(repository / "m", 1, plan_of(tmp_path, 3), suffix=".plan", machine=other)
    reasons = (await serves(repository, 1))[0] if config else await refused(repository)
    assert reason in reasons
    assert "headrace build m --target tensorrt" in reasons


def foreign(repository: Path, config: str = "") -> None:
    """A plan of the model's own that TensorRT refuses, as it does one from another GPU, beside its ONNX file."""
    put(repository, 1, config=TENSORRT + config)
    (repository / "m" / "1" / "model.plan").write_bytes(b"rubbish")


async def test_the_onnx_file_replaces_a_foreign_plan_if_allowed(
    trt: Any, cuda: LateCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    repository = tmp_path / "repository"
    foreign(repository, "fallback: onnxruntime\n")
    reason, instances = await serves(repository, 1)
    assert reason.startswith("model.onnx serves in place of model.plan, which cannot be loaded: model.plan is no plan")
    assert reason.endswith("(headrace build m --target tensorrt)")
    assert str(tmp_path) not in reason
    assert instances == 1
    assert any(r.levelname == "ERROR" and "serves in place of model.plan" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("onnx", "cure"),
    [
        (True, "`headrace build`, or write fallback: onnxruntime)"),
        (False, "or put model.onnx beside it and write fallback: onnxruntime)"),
    ],
)
async def test_a_foreign_plan_is_quarantined_without_a_fallback(
    trt: Any, cuda: LateCuda, tmp_path: Path, onnx: bool, cure: str
) -> None:
    repository = tmp_path / "repository"
    tensors = "input: [{name: X, data_type: fp32, dims: [16]}]\noutput: [{name: Y, data_type: fp32, dims: [4]}]\n"
    foreign(repository, tensors if not onnx else "")
    if not onnx:
        (repository / "m" / "1" / "model.onnx").unlink()
    reason = await refused(repository)
    assert "model.plan: error: is no plan that TensorRT" in reason
    assert reason.endswith(cure)


async def test_engine_then_own_plan_then_the_onnx_file(trt: Any, cuda: LateCuda, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    foreign(repository, "fallback: onnxruntime\n")
    publish(repository / "m", 1, b"more rubbish", suffix=".plan", machine=machine())
    assert "in place of model.plan" in (await serves(repository, 1))[0]
    (repository / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 2))
    reason, _instances = await serves(repository, 2)
    assert reason.startswith("model.plan serves in place of the int8 engine")
    assert reason.endswith("(headrace build m --target tensorrt --rebuild)")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (TENSORRT.replace("8", "9"), "takes batches of up to 8 rows, max_batch_size is 9"),
        (TENSORRT + "instance_group: [{kind: cpu}]\n", "TensorRT does not run on the CPU"),
        (TENSORRT + "instance_group: [{kind: gpu, gpus: [4]}]\n", "GPU 4"),
        (
            TENSORRT
            + "input: [{name: X, data_type: fp32, dims: [17]}]\noutput: [{name: Z, data_type: fp32, dims: [4]}]\n",
            "output 'Z' is not in the plan",
        ),
    ],
)
async def test_a_plan_that_contradicts_its_configuration(trt: Any, tmp_path: Path, config: str, words: str) -> None:
    repository = tmp_path / "repository"
    put(repository, 1, config=config)
    if "17" in config:
        (repository / "m" / "1" / "model.onnx").unlink()
    (repository / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 2))
    reasons = await refused(repository)
    assert words in reasons
    if "17" in config:
        assert "input 'X' has the shape [17] in the configuration, [16] in the plan" in reasons


async def test_without_a_gpu(cuda: LateCuda, tmp_path: Path) -> None:
    cuda.devices = 0
    repository = tmp_path / "repository"
    put(repository, 1, config=TENSORRT)
    reason = "model.onnx serves on the CPU: this machine has no NVIDIA GPU: check that nvidia-smi lists one"
    assert await serves(repository, 1) == (reason, 1)
    put(repository, 1, config=TENSORRT + "fallback: onnxruntime\n")
    assert await serves(repository, 1) == (reason, 1)
    tensors = "input: [{name: X, data_type: fp32, dims: [16]}]\noutput: [{name: Y, data_type: fp32, dims: [4]}]\n"
    put(repository, 1, config=TENSORRT + tensors)
    (repository / "m" / "1" / "model.onnx").rename(repository / "m" / "1" / "model.plan")
    reasons = await refused(repository)
    assert "backend 'tensorrt' is not available on this machine: this machine has no NVIDIA GPU" in reasons
    assert "put model.onnx beside it, which the CPU can serve" in reasons


@pytest.mark.parametrize("is_foreign", [False, True], ids=["no plan", "a foreign plan"])
async def test_a_plan_is_built_while_the_onnx_file_serves(trt: Any, tmp_path: Path, is_foreign: bool) -> None:
    repository, orders = tmp_path / "repository", tmp_path / "orders"
    put(repository, 1, config=TENSORRT + "build_on_load: true\n")
    if is_foreign:
        foreign(repository, "build_on_load: true\n")
    builder = command(orders)
    (orders / "fail").write_text("error: no room")

    async with running(repository, ALL, None, builder) as (_, registry):
        assert same(await infer_values(registry), 1)
        await until_async(lambda: "building it failed: error: no room" in index(registry)["m", "1"][1])
    assert (orders / "calls").read_text().split()[:4] == ["started", "m", "1", "tensorrt"]


async def profiled(repository: Path, **loading: Any) -> list[dict[str, object]]:
    """The profile of the model before its first request."""
    async with running(repository, ALL, **loading) as (_, registry):
        handle = registry.lease("m", "")
        handle.release()
        return handle.latency_table.table()


async def test_the_latency_table_starts_with_the_measurements_of_the_tuner(trt: Any, tmp_path: Path) -> None:
    put(tmp_path / "models", 3, config=TENSORRT)
    (tmp_path / "models" / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 3))
    table = await profiled(tmp_path / "models")
    rows = [row["rows"] for row in table]
    assert (rows[0], rows[-1]) == (1, 8)
    assert {row["source"] for row in table} == {"load"}


async def test_a_plan_without_graphs_is_measured_like_any_model(trt: Any, tmp_path: Path) -> None:
    put(tmp_path / "models", 3, config=TENSORRT + "parameters: {cuda_graphs: '0'}\n")
    (tmp_path / "models" / "m" / "1" / "model.plan").write_bytes(plan_of(tmp_path, 3))
    assert await profiled(tmp_path / "models") == []
    table = await profiled(tmp_path / "models", profile_s=10.0)
    assert [(row["instances"], row["rows"]) for row in table] == [
        (count, rows) for count in (1, 2) for rows in (1, 2, 4, 8)
    ]
