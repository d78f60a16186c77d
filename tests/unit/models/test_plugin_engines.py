"""Engines with plug-in layers from `headrace build` to the answer, and those that another Headrace has built."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.errors import ConfigError, Unsupported
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.models.batch_proofs import BatchProofs
from headrace.models.control_policy import ControlPolicy
from headrace.models.registry import Registry
from headrace.runtimes.cuda.kernels import loading
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace_engines import build
from headrace_engines.__main__ import main
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.targets.tensorrt import plugin_choice
from headrace_engines.targets.tensorrt.target import TensorRtTarget
from headrace_lab.kernels import algorithms
from headrace_lab.kernels import plugin as convolution_plugin
from headrace_lab.kernels.direct import DirectAlgorithm
from headrace_lab.kernels.plugin import plugin_digest
from onnx import TensorProto

from tests.support.control_thread import index, running
from tests.support.fake_streams import LateCuda
from tests.support.fake_tensorrt_runtime import FakeRuntime
from tests.support.kernels_on_host import install_host_kernels
from tests.support.plugin_case import images, read_past_rows, residual_block

ALL = ControlPolicy("none")
CONFIG = "max_batch_size: 4\ninstance_group: [{kind: gpu, count: 2}]\noptimization: {precision: fp16}\nbuild_on_load: false\n"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, cuda: LateCuda) -> None:
    """Our kernels, compiled for the host; only the direct algorithm, since Tensor Cores are slow there."""
    monkeypatch.setattr(algorithms, "ALGORITHMS", (DirectAlgorithm(),))
    monkeypatch.setattr(plugin_choice, "_ROUNDS", 2)
    monkeypatch.setattr(plugin_choice, "_ROUND_S", 0.01)
    monkeypatch.setattr(build, "_TIMING_S", 0.01)
    install_host_kernels(monkeypatch, cuda)


@pytest.fixture
def repository(trt: Any, kernels: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A repository whose model has an engine with two plug-in layers."""
    folder = tmp_path / "models" / "m"
    (folder / "1").mkdir(parents=True)
    onnx.save_model(residual_block(element=TensorProto.FLOAT), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(CONFIG)
    words = ["build", "m", "--model-repository", str(folder.parent), "--cache", str(tmp_path / "cache")]
    words += [
        "--publish-slower",
        "--target",
        "tensorrt",
        "--plugins",
        "conv1,conv3",
        "--json",
        str(tmp_path / "build.json"),
    ]
    assert main(words) == 0, capsys.readouterr()
    assert "m: plug-ins: building with 2 plug-in layers" in capsys.readouterr().out
    return folder.parent


@pytest.mark.parametrize("is_wrong", [False, True])
async def test_a_plugin_that_reads_past_its_row_is_found(
    repository: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    if is_wrong:
        read_past_rows(monkeypatch)
    async with running(repository, ALL, proofs=BatchProofs(None, 20.0)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        verdict = handle.batch_verdict
    assert (verdict.state, verdict.verified) == (("limited", (1,)) if is_wrong else ("proven", (1, 2, 3, 4)))
    assert verdict.reason.startswith("influence: output 'y' of row 0 of 2 changes" if is_wrong else "")


async def answer(registry: Registry, x: Array) -> Array:
    handle = registry.lease("m", "")
    try:
        request = InferRequest(inputs={"x": x}, rows=len(x), shape_key=x.shape[1:], received_ns=0)
        return np.asarray((await handle.infer(request)).outputs["y"])
    finally:
        handle.release()


def stamp_of(repository: Path) -> dict[str, Any]:
    (stamp,) = json.loads((repository / "m" / "1" / "build.json").read_text())["builds"]
    assert isinstance(stamp, dict)
    return stamp


def change_plugin(repository: Path, **values: object) -> None:
    """Write other facts of the engine's plug-in into its stamp."""
    stamp = stamp_of(repository)
    stamp["plugins"][0].update(values)
    (repository / "m" / "1" / "build.json").write_text(json.dumps({"format": 1, "builds": [stamp]}))


async def state_of(repository: Path) -> tuple[str, str]:
    """Return state and reason of the model."""
    async with running(repository, ALL) as (_, registry):
        return index(registry)["m", "1"]


async def test_a_server_answers_with_the_plugin(repository: Path) -> None:
    answers: list[tuple[Array, Array]] = []

    async with running(repository, ALL) as (_, registry):
        assert index(registry)["m", "1"] == ("READY", "")
        for rows in (1, 4, 3, 2, 4):
            x = images(rows, np.float32)
            answers.append((x, await answer(registry, x)))
    reference = OnnxRunner(residual_block(element=TensorProto.FLOAT))
    for x, y in answers:
        np.testing.assert_allclose(y, reference.run({"x": x})["y"], atol=0.02)


def test_the_json_of_the_build_has_the_table(repository: Path) -> None:
    (model,) = json.loads((repository.parent / "build.json").read_text())["models"]
    assert model["published"]
    assert [(row["layer"], row["kept"]) for row in model["plugins"]["table"]] == [("conv1", True), ("conv3", True)]
    assert all(row["tensorrt_us"] > 0 < row["kernel_us"] for row in model["plugins"]["table"])
    assert model["plugins"]["verdict"] == "2 layers replaced as requested"


def test_the_stamp_names_plugin_version_digest_and_layers(repository: Path) -> None:
    (plugin,) = stamp_of(repository)["plugins"]
    assert (plugin["name"], plugin["version"]) == ("HeadraceConvolution", "1")
    assert plugin["digest"] == plugin_digest(plugin["layers"])
    assert plugin["layers"]["conv1"] == "direct | n 4 c 8 6x5 k 8 3x3 stride 1 pad 1 | bias relu"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"name": "Other"}, "built with the plug-in 'Other', this Headrace has HeadraceConvolution"),
        ({"version": "9"}, "built with version '9' of the plug-in HeadraceConvolution, this Headrace has version 1"),
        ({"digest": "f" * 64}, "built with other kernels of the plug-in HeadraceConvolution (digest ffffffffffff)"),
        ({"layers": {"conv1": "direct"}}, "built with other kernels of the plug-in HeadraceConvolution (digest "),
    ],
)
async def test_an_engine_with_another_plugin_is_refused_before_it_is_read(
    repository: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, object], reason: str
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the plan is deserialised")

    change_plugin(repository, **values)
    monkeypatch.setattr(FakeRuntime, "deserialize_cuda_engine", read)
    state, text = await state_of(repository)
    assert state == "UNAVAILABLE"
    assert reason in text
    assert "headrace build m --target tensorrt" in text


async def test_the_onnx_file_replaces_such_an_engine_if_allowed(repository: Path) -> None:
    change_plugin(repository, version="9")
    (repository / "m" / "config.yaml").write_text(CONFIG + "fallback: onnxruntime\n")
    state, text = await state_of(repository)
    assert state == "READY"
    assert "model.onnx serves in place of the fp16 engine: built with version '9' of the plug-in" in text


def test_a_plan_without_a_stamp_is_refused_by_the_plugin_itself(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next((repository / "m" / "1").glob("*.plan"))
    monkeypatch.setattr(convolution_plugin, "sources_digest", lambda: "0" * 64)
    with pytest.raises(ConfigError) as raised:
        TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "4"})
    (finding,) = raised.value.findings
    assert "was built with other kernels of the plug-in HeadraceConvolution" in finding.message
    assert finding.cure == "build it again with `headrace build`"


@pytest.mark.parametrize("registered", [{}, {("HeadraceConvolution", "2"): None}])
def test_an_unknown_plugin_or_version_of_a_plan(repository: Path, trt: Any, registered: dict[Any, Any]) -> None:
    plan = next((repository / "m" / "1").glob("*.plan"))
    trt.get_plugin_registry().creators = registered
    with pytest.raises(ConfigError) as raised:
        TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "4"})
    (finding,) = raised.value.findings
    assert "needs a plug-in, or a version of one, that this Headrace does not have" in finding.message
    assert "Cannot find plugin: HeadraceConvolution, version: 1" in finding.message
    assert "headrace build" in finding.cure
    with pytest.raises(BuildError, match="that this Headrace does not have: build it again"):
        TensorRtTarget().open(plan)


def test_the_plugin_is_registered_for_a_plan_that_has_it(
    repository: Path, trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = next((repository / "m" / "1").glob("*.plan"))
    trt.get_plugin_registry().creators.clear()
    monkeypatch.setattr(convolution_plugin, "_registered", {})
    TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "4"}).close()
    assert ("HeadraceConvolution", "1") in trt.get_plugin_registry().creators


async def test_without_the_package_of_the_plugin_the_error_names_it(
    repository: Path, trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, convolution_plugin.__name__, None)
    message = "contains kernels of the package headrace_lab, which is not installed"
    assert message in (await state_of(repository))[1]
    trt.get_plugin_registry().creators.clear()
    with pytest.raises(ConfigError, match=message):
        TensorRtBackend().load(next((repository / "m" / "1").glob("*.plan")), 1, {MAX_BATCH_SIZE: "4"})


def test_a_missing_compiler_is_the_reason(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> bytes:
        raise Unsupported("NVRTC is not found: install it")

    plan = next((repository / "m" / "1").glob("*.plan"))
    monkeypatch.setattr(loading, "compile_cuda", missing)
    model = TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "4"})
    try:
        with pytest.raises(ConfigError) as raised:
            model.execution(0)
        assert "cannot open its plug-in HeadraceConvolution: NVRTC is not found" in raised.value.findings[0].message
    finally:
        model.close()
