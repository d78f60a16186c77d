"""The forecast of `headrace build`: the server's selection of a file, read before the build."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from headrace.config.machine import Machine, onnxruntime_machine
from headrace.config.model_folder import read_model_folder
from headrace.config.serving_plan import CUDA_RUNTIME, GpuRuntime, ServingPlan, cpu_pin, engine_folder, serving_plan
from headrace.core.errors import ConfigError, Unsupported
from headrace.models.loader import Loader
from headrace.runtimes import onnxruntime_cuda
from headrace_engines.__main__ import main
from headrace_engines.build import BuildResult, build_engine
from headrace_engines.build_report import BuildOutcome, current_serving_text, without_engine_text
from headrace_engines.build_request import BuildRequest, forecast, gpu_config_change, gpu_runtime
from headrace_engines.commands import build as build_command
from headrace_engines.errors import BuildError
from headrace_engines.project import Project, open_project, read_spec
from headrace_engines.targets.base import BatchTiming, Engine
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget

from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_gpu import trt as trt
from tests.support.fake_gpu import trt_version as trt_version
from tests.support.models import affine

GPU = Machine("tensorrt", "10.6.0", "NVIDIA H200", "9.0", 580)


class _Target:
    """The part of a target that a forecast uses."""

    def __init__(self, machine: Machine) -> None:
        self.name = machine.target
        self.suffix = ".plan" if machine.target == "tensorrt" else ".onnx"
        self._machine = machine

    def describe(self) -> Machine:
        return self._machine


def project_of(tmp_path: Path, text: str, file: str = "config.yaml", versions: int = 1) -> Project:
    folder = tmp_path / "models" / "m"
    for version in range(1, versions + 1):
        (folder / str(version)).mkdir(parents=True)
        onnx.save_model(affine(), folder / str(version) / "model.onnx")
    if text:
        (folder / file).write_text(text)
    return open_project("m", folder.parent, 1)


def with_gpu() -> GpuRuntime:
    return GpuRuntime(lambda: GPU)


def without_gpu() -> GpuRuntime:
    def describe() -> Machine:
        raise Unsupported("there is no GPU")

    return GpuRuntime(describe, lambda: False)


TENSORRT: Any = _Target(GPU)
ONNXRUNTIME: Any = _Target(onnxruntime_machine())
TO_CPU = 'write parameters { key: "headrace.runtime" value { string_value: "onnxruntime" } } in config.pbtxt'


@pytest.mark.parametrize(
    ("file", "text", "target", "refusal"),
    [
        ("config.yaml", "", TENSORRT, ""),
        ("config.yaml", "optimization: {precision: fp16}\n", TENSORRT, ""),
        ("config.yaml", "backend: onnxruntime\n", TENSORRT, ""),
        ("config.yaml", "runtime: tensorrt\nmax_batch_size: 8\n", TENSORRT, ""),
        ("config.yaml", "instance_group: [{kind: KIND_GPU}]\nmax_batch_size: 8\n", TENSORRT, ""),
        (
            "config.yaml",
            "max_batch_size: 8\nruntime: onnxruntime\n",
            TENSORRT,
            "the configuration keeps the model on the CPU (runtime: onnxruntime): write runtime: auto in config.yaml:2, "
            "or build for the serving runtime: headrace build m --target onnxruntime",
        ),
        (
            "config.pbtxt",
            "max_batch_size: 8\n\ninstance_group [ { kind: KIND_CPU count: 2 } ]\n",
            TENSORRT,
            "the configuration keeps the model on the CPU (KIND_CPU in instance_group): "
            "write instance_group [ { kind: KIND_AUTO } ] in config.pbtxt:3, "
            "or build for the serving runtime: headrace build m --target onnxruntime",
        ),
        ("config.pbtxt", "max_batch_size: 8\ninstance_group [ { kind: KIND_CPU } ]\n", ONNXRUNTIME, ""),
        ("config.yaml", "optimization: {precision: fp16}\n", ONNXRUNTIME, ""),
        ("config.pbtxt", "max_batch_size: 8\ninstance_group [ { kind: KIND_GPU } ]\n", ONNXRUNTIME, TO_CPU),
    ],
)
def test_an_engine_that_would_not_be_served_is_refused_with_the_change(
    file: str, text: str, target: Any, refusal: str, tmp_path: Path
) -> None:
    project = project_of(tmp_path, text, file)
    result = forecast(project, target, with_gpu(), None)
    assert refusal in result.refusal
    assert bool(result.refusal) == bool(refusal)
    assert [path.name for path in (project.folder.path / "1").iterdir()] == ["model.onnx"], "nothing is left behind"


def test_without_a_gpu_the_cpu_serves_and_its_engines_too(tmp_path: Path) -> None:
    project = project_of(tmp_path, "optimization: {precision: int8, calibration: {data: a.npz}}\n")
    result = forecast(project, ONNXRUNTIME, without_gpu(), None)
    assert (result.refusal, result.not_served) == ("", "")
    assert result.current is not None
    assert current_serving_text(result.current) == "model.onnx, ONNX Runtime on the CPU"


def test_a_model_that_waits_for_its_engine_is_served_by_nothing_now(tmp_path: Path) -> None:
    project = project_of(tmp_path, "instance_group: [{kind: KIND_GPU}]\nmax_batch_size: 8\n")
    result = forecast(project, TENSORRT, with_gpu(), None)
    assert result.current is None


def test_a_version_excluded_by_the_policy_is_not_reported_as_served(tmp_path: Path) -> None:
    project = project_of(tmp_path, "max_batch_size: 8\n", versions=2)
    result = forecast(project, TENSORRT, with_gpu(), None)
    assert result.refusal == ""
    assert result.not_served == (
        "version 1 is not served: version_policy serves 2: write version_policy: {specific: {versions: [1]}} in config.yaml"
    )


def test_only_a_written_pin_keeps_a_model_on_the_cpu(tmp_path: Path) -> None:
    assert cpu_pin(project_of(tmp_path, "").config) == ""
    pinned = project_of(tmp_path / "pinned", "instance_group: [{kind: KIND_CPU}]\nmax_batch_size: 4\n")
    assert cpu_pin(pinned.config) == "KIND_CPU in instance_group"
    assert gpu_config_change(pinned) == "write instance_group: [{kind: KIND_AUTO}] in config.yaml:1"


def test_an_engine_of_a_read_only_folder_goes_to_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = project_of(tmp_path, "max_batch_size: 4\n")
    monkeypatch.setattr("headrace_engines.store.os.access", lambda _path, _mode: False)
    state = tmp_path / "state"
    words = (
        "build",
        str(project.folder.path),
        "--publish-slower",
        "--cache",
        str(tmp_path / "cache"),
        "--target",
        "onnxruntime",
    )
    assert main([*words, "--state-dir", str(state)]) == 0
    index = engine_folder(state, project.folder.path, 1)
    assert f"m: published in {index}: the model's folder cannot be written" in capsys.readouterr().out
    assert [path.name for path in (project.folder.path / "1").iterdir()] == ["model.onnx"]
    plan = serving_plan(project.folder, 1, without_gpu(), index)
    assert plan.artefact is not None
    assert plan.artefact.parent == index


def set_figures(monkeypatch: pytest.MonkeyPatch, by_build: float, in_turns: float) -> None:
    """Set how many times as fast as the engine the file is that serves now: by the figures of the build, and timed in turns."""

    def build(*arguments: Any, **options: Any) -> BuildResult:
        built = build_engine(*arguments, **options)
        return replace(built, baseline=replace(built.timings[0], rows_per_s=by_build * built.rows_per_s))

    def time_in_turns(engines: Mapping[str, Engine], *others: Any) -> dict[str, list[BatchTiming]]:
        for engine in engines.values():
            assert engine.time(others[0], 0.001).rows_per_s > 0
        return {name: [BatchTiming(4, 1, 1, rate)] for name, rate in zip(engines, (1e3, in_turns * 1e3), strict=True)}

    monkeypatch.setattr(build_command, "build_engine", build)
    monkeypatch.setattr(build_command, "time_in_turns", time_in_turns)


def test_an_engine_slower_than_what_serves_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = project_of(tmp_path, "max_batch_size: 4\n")

    set_figures(monkeypatch, by_build=1.5, in_turns=2.0)
    folder = project.folder.path
    words = [
        "build",
        str(folder),
        "--cache",
        str(tmp_path / "cache"),
        "--target",
        "onnxruntime",
        "--state-dir",
        str(tmp_path),
    ]
    assert main(words) == 3
    captured = capsys.readouterr()
    assert captured.err.startswith(
        "m was not published: it is 0.50 times as fast as what serves now (model.onnx, ONNX Runtime"
    )
    assert captured.err.endswith(": `headrace build m --publish-slower` publishes it\n")
    assert "m: served without it: model.onnx" in captured.out
    assert [path.name for path in (folder / "1").iterdir()] == ["model.onnx"]
    assert main([*words, "--publish-slower"]) == 0
    assert "m: 0.67 times as fast as what serves now" in capsys.readouterr().out
    assert {path.suffix for path in (folder / "1").iterdir()} == {".onnx", ".json"}


@pytest.mark.parametrize("by_build", [1.1, 9.0])
def test_an_engine_as_fast_as_what_serves_but_for_noise_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_build: float
) -> None:
    # 9.0: other work slowed the engine while its build timed it; beside what serves, in turns, it is as fast.
    project = project_of(tmp_path, "max_batch_size: 4\n")
    set_figures(monkeypatch, by_build=by_build, in_turns=1.1)
    words = ["build", str(project.folder.path), "--cache", str(tmp_path / "cache"), "--target", "onnxruntime"]
    assert main([*words, "--state-dir", str(tmp_path)]) == 0


def test_what_serves_is_opened_as_its_own_build_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = project_of(tmp_path, "max_batch_size: 4\n")
    words = ["build", str(project.folder.path), "--cache", str(tmp_path / "cache"), "--target", "onnxruntime"]
    words += ["--state-dir", str(tmp_path)]
    assert main([*words, "--publish-slower"]) == 0
    stamps = project.folder.path / "1" / "build.json"
    document = json.loads(stamps.read_text())
    (stamp,) = document["builds"]
    stamp["version_compatible"] = True
    stamp["timings"] = [{**timing, "rows_per_s": 1e12} for timing in stamp["timings"]]
    stamps.write_text(json.dumps(document))
    set_figures(monkeypatch, by_build=1.0, in_turns=1.1)
    opened: dict[str, bool] = {}
    open_file = OnnxRuntimeTarget.open

    def record(target: OnnxRuntimeTarget, path: Path, source: Any = None, *, host_code: bool = False) -> Any:
        opened[path.parent.name] = host_code
        return open_file(target, path, source, host_code=host_code)

    monkeypatch.setattr(OnnxRuntimeTarget, "open", record)
    assert main([*words, "--precision", "fp16"]) == 0
    assert opened["1"] is True, "the engine of the version's folder"
    assert not any(host_code for folder, host_code in opened.items() if folder != "1")


# ONNX Runtime's CUDA provider

KIND_GPU = "max_batch_size: 8\ninstance_group: [{kind: KIND_GPU}]\n"
ACCELERATOR = "optimization: {execution_accelerators: {gpu_execution_accelerator: [{name: cuda}]}}\n"
MISSING = "the installed onnxruntime has no CUDA provider"
ON_PROVIDER = "model.onnx, ONNX Runtime's CUDA provider on the GPU"


def with_provider(problem: str = "", tensorrt: bool = True) -> GpuRuntime:
    def describe() -> Machine:
        if tensorrt:
            return GPU
        raise Unsupported("TensorRT cannot be imported")

    return GpuRuntime(describe, lambda: True, lambda: problem)


def loader_plan(project: Project) -> ServingPlan | str:
    """The plan of the server's loader, or the reason why it serves nothing."""
    unused: Any = None
    folder = read_model_folder(project.folder.path, project.folder.path.parent)
    try:
        plan = Loader(unused).plan(folder, project.version)
    except ConfigError as error:
        return "; ".join(finding.message for finding in error.findings)
    return plan.cuda_problem if plan.is_pending else plan


@pytest.mark.parametrize("provider", ["", MISSING])
@pytest.mark.parametrize("has_tensorrt", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        "",
        "optimization: {precision: fp16}\n",
        KIND_GPU,
        KIND_GPU + "fallback: onnxruntime\n",
        KIND_GPU + "build_on_load: false\n",
        KIND_GPU + ACCELERATOR,
        "max_batch_size: 8\n" + ACCELERATOR,
        "max_batch_size: 8\nbackend: tensorrt\n",
        "max_batch_size: 8\nruntime: onnxruntime\n",
    ],
)
def test_the_forecast_is_the_plan_of_the_servers_loader(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, has_tensorrt: bool, provider: str
) -> None:
    monkeypatch.setattr("headrace.runtimes.cuda.devices.is_visible", lambda: True)
    monkeypatch.setattr(onnxruntime_cuda, "provider_problem", lambda: provider)
    if not has_tensorrt:
        monkeypatch.setitem(sys.modules, "tensorrt", None)
    project = project_of(tmp_path, config)
    expected, result = loader_plan(project), forecast(project, TENSORRT, gpu_runtime(), None)
    if isinstance(expected, str):
        assert result.current is None
        assert expected
        assert result.problem.endswith(expected)
        return
    assert result.problem == ""
    assert result.current is not None
    # Both give their own reason for the lack of TensorRT.
    names = ("runtime", "file", "build", "target", "precision", "is_pending", "substitutes", "cuda_problem")
    assert {name: getattr(result.current, name) for name in names} == {name: getattr(expected, name) for name in names}
    assert (result.current == expected) or not has_tensorrt
    uses_provider = not provider and "\nruntime: onnxruntime" not in config and config != ""
    assert (result.current.runtime == CUDA_RUNTIME) == uses_provider


@pytest.mark.parametrize(
    ("config", "target", "gpu", "refusal"),
    [
        (KIND_GPU, TENSORRT, with_provider(), ""),
        (KIND_GPU + ACCELERATOR, TENSORRT, with_provider(MISSING), ""),
        (
            KIND_GPU + ACCELERATOR,
            TENSORRT,
            with_provider(),
            "ONNX Runtime's CUDA provider serves model.onnx on this machine's GPU: remove the accelerator cuda in config.yaml:3",
        ),
        (
            KIND_GPU + ACCELERATOR,
            ONNXRUNTIME,
            with_provider(),
            "ONNX Runtime's CUDA provider serves model.onnx on this machine's GPU: write runtime: onnxruntime in config.yaml",
        ),
        (
            KIND_GPU,
            ONNXRUNTIME,
            with_provider(tensorrt=False),
            "ONNX Runtime's CUDA provider serves model.onnx on this machine's GPU: write runtime: onnxruntime in config.yaml",
        ),
        (
            KIND_GPU,
            ONNXRUNTIME,
            with_provider(),
            "ONNX Runtime's CUDA provider serves model.onnx on this machine's GPU: write runtime: onnxruntime in config.yaml, "
            "or build for the serving runtime: headrace build m --target tensorrt",
        ),
        (KIND_GPU, ONNXRUNTIME, with_provider(MISSING, tensorrt=False), ""),
    ],
)
def test_an_engine_that_the_cuda_provider_makes_useless_is_refused(
    config: str, target: Any, gpu: GpuRuntime, refusal: str, tmp_path: Path
) -> None:
    assert forecast(project_of(tmp_path, config), target, gpu, None).refusal == refusal


@pytest.mark.parametrize(
    ("config", "provider", "text"),
    [
        (KIND_GPU, "", f"served without it: {ON_PROVIDER}"),
        ("optimization: {precision: fp16}\n", "", f"served without it: {ON_PROVIDER}"),
        (
            "optimization: {precision: fp16}\n",
            MISSING,
            f"served without it: model.onnx, ONNX Runtime on the CPU; ONNX Runtime's CUDA provider does not serve it: {MISSING}",
        ),
        (
            KIND_GPU,
            MISSING,
            "not served without it: the configuration requires a GPU, and it waits for its engine (TensorRT FP32); "
            f"ONNX Runtime's CUDA provider does not serve it: {MISSING}",
        ),
        ("", "", "served without it: model.onnx, ONNX Runtime on the CPU"),
        (KIND_GPU + ACCELERATOR, "", ""),
    ],
)
def test_a_server_without_the_engine(config: str, provider: str, text: str, tmp_path: Path) -> None:
    project = project_of(tmp_path, config)
    expected = forecast(project, TENSORRT, with_provider(provider), None)
    request = BuildRequest(project, read_spec(project.config), "", False, TENSORRT, expected, "", argparse.Namespace())
    # A request that the server would not serve is refused before.
    outcome = BuildOutcome("m", None if expected.refusal else request, error="it failed")
    assert without_engine_text(outcome) == text


class _AlwaysTensorRt:
    """The targets of a machine with a GPU."""

    gpu = with_provider()

    def of(self, _project: Project) -> tuple[Any, str]:
        return TENSORRT, ""


def test_a_model_that_tensorrt_refuses_is_reported_with_what_serves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise BuildError("TensorRT has no operator Unique")

    monkeypatch.setattr(build_command, "build_engine", refuse)
    monkeypatch.setattr(build_command, "Targets", lambda _name: _AlwaysTensorRt())
    project = project_of(tmp_path, KIND_GPU)
    words = (
        "build",
        str(project.folder.path),
        "--publish-slower",
        "--cache",
        str(tmp_path / "cache"),
        "--state-dir",
        str(tmp_path),
    )
    assert main([*words]) == 1
    captured = capsys.readouterr()
    assert captured.err == "m was not built: TensorRT has no operator Unique\n", "the server takes the reason from here"
    assert f"m: served without it: {ON_PROVIDER}" in captured.out
