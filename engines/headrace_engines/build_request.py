"""First stage of `headrace build`: the options and the model's configuration become a `BuildRequest`.

It calls the server's selection of the file to serve (`headrace.config.serving_plan`). A stamp in a scratch folder stands for
the engine that is not built yet.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.config.digests import config_digest
from headrace.config.files import read_config_file
from headrace.config.machine import LIBRARIES, Machine
from headrace.config.manifest import Stamp, artefact_name, write_stamp
from headrace.config.model_folder import served_versions
from headrace.config.optimization_config import cuda_accelerator
from headrace.config.serving_plan import CUDA_RUNTIME, GpuRuntime, ServingPlan, cpu_pin, engine_folder, serving_plan
from headrace.core.errors import ConfigError, Unsupported
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.cuda.tensorrt import plugin_problem

from headrace_engines.errors import BuildError
from headrace_engines.precision.methods import stored_precision
from headrace_engines.project import BuildSpec, Project, read_spec
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Target

_STAND_IN = b"\0"
_STAND_IN_KEY = "0" * 64


@dataclass(frozen=True, slots=True)
class Forecast:
    """The file that serves a version now, and the change by a build for a target.

    Attributes:
        current: the file and runtime that a server loads now; None if it serves nothing.
        refusal: reason why an engine of the target would not be served, and the remedy; "" if it would.
        not_served: reason why the version is not served, and the remedy; "" if it is.
        problem: reason why nothing serves now; "" if `current` does.
    """

    current: ServingPlan | None
    refusal: str = ""
    not_served: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class BuildRequest:
    """An engine to build and to publish.

    Attributes:
        project: the version of the model.
        spec: specification of the engine.
        requested: requested precision, possibly "best".
        overridden: the precision comes from the command line, not from the configuration.
        target: target to build for.
        expected: the file that serves before and after.
        advice: change that would lead to another engine, e.g. one for the GPU; "" without any.
        options: of the command.
    """

    project: Project
    spec: BuildSpec
    requested: str
    overridden: bool
    target: Target
    expected: Forecast
    advice: str
    options: argparse.Namespace


def request_build(project: Project, options: argparse.Namespace, targets: Targets) -> BuildRequest:
    """Return the request for one model.

    Raises:
        BuildError: a server would not use the engine, or the configuration is wrong.
    """
    spec = read_spec(project.config, options.precision or "")
    requested = spec.precision
    if not options.precision and (stored := stored_precision(project)):
        spec = spec.at(stored)
    spec = replace(
        spec,
        version_compatible=options.version_compatible,
        refined=options.refine,
        plugins=options.plugins,
        plugins_budget_s=options.plugins_budget,
    )
    target, advice = targets.of(project)
    engines = engine_folder(options.state_dir.expanduser(), project.folder.path, project.version)
    expected = forecast(project, target, targets.gpu, engines)
    if expected.refusal:
        raise BuildError(f"its engine would not be served: {expected.refusal}")
    overridden = bool(options.precision) and options.precision != read_spec(project.config).precision
    return BuildRequest(project, spec, requested, overridden, target, expected, advice, options)


class Targets:
    """Selects the target of each model.

    Args:
        name: value of --target. "auto" is TensorRT if it and a GPU are available, except for models configured for the CPU.

    Raises:
        BuildError: TensorRT is requested and not available.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._default = choose_target(name)
        self.gpu = gpu_runtime()

    def of(self, project: Project) -> tuple[Target, str]:
        """Return the target of a model, and the change that would lead to another one or ""."""
        pin = cpu_pin(project.config)
        if self._name != "auto" or self._default.name == "onnxruntime" or not pin:
            return self._default, ""
        return choose_target("onnxruntime"), f"built for the CPU ({pin}); for the GPU {gpu_config_change(project)}"


def gpu_runtime() -> GpuRuntime:
    """Return the GPU runtimes of this machine as the server's loader sees them, each loaded on first use."""
    from headrace_engines.targets.tensorrt.target import TensorRtTarget, available

    def describe() -> Machine:
        missing = available()
        if missing:
            raise Unsupported(missing)
        return TensorRtTarget().describe()

    def cuda_problem() -> str:
        from headrace.runtimes import onnxruntime_cuda  # with it come the libraries of the GPU backends

        return onnxruntime_cuda.provider_problem()

    return GpuRuntime(describe, gpus.is_visible, cuda_problem, plugin_problem)


def gpu_config_change(project: Project) -> str:
    """Return the one-line change of a configuration that moves a model from the CPU to the GPU."""
    if project.config.runtime == "onnxruntime":
        return _runtime_change(project, "auto")
    pbtxt = "instance_group [ { kind: KIND_AUTO } ]"
    return _config_change(project, "instance_group: [{kind: KIND_AUTO}]", pbtxt, "instance_group")


def _runtime_change(project: Project, runtime: str) -> str:
    pbtxt = f'parameters {{ key: "headrace.runtime" value {{ string_value: "{runtime}" }} }}'
    return _config_change(project, f"runtime: {runtime}", pbtxt, "runtime")


def forecast(project: Project, target: Target, gpu: GpuRuntime, engines: Path | None) -> Forecast:
    """Return the file that a server selects for a version, without and with an engine of a target.

    Args:
        project: the version.
        target: target of the build.
        gpu: GPU runtimes of this machine.
        engines: folder of the version in the server's state folder; None without one.
    """
    served = served_versions(project.config, project.folder.versions)
    if project.version not in served:
        policy = f"version_policy serves {', '.join(map(str, served)) or 'none'}"
        yaml = f"version_policy: {{specific: {{versions: [{project.version}]}}}}"
        pbtxt = f"version_policy {{ specific {{ versions: [ {project.version} ] }} }}"
        change = _config_change(project, yaml, pbtxt, "version_policy")
        return Forecast(None, not_served=f"version {project.version} is not served: {policy}: {change}")
    current, reason = _plan(project, gpu, engines)
    with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
        machine = target.describe()
        _write_stand_in(Path(scratch), project, machine, target.suffix)
        planned, problem = _plan(project, gpu, Path(scratch))
    if planned is not None and planned.stamp is not None and planned.stamp.machine == machine:
        return Forecast(current, problem=reason)
    return Forecast(current, _refusal(project, target, gpu, planned, problem), problem=reason)


def second_runtime_problem(plan: ServingPlan) -> str:
    """Return the reason why ONNX Runtime's CUDA provider does not serve a model either."""
    return f"{LIBRARIES[CUDA_RUNTIME]} does not serve it: {plan.cuda_problem}"


def _plan(project: Project, gpu: GpuRuntime, engines: Path | None) -> tuple[ServingPlan | None, str]:
    """Return the plan of the server's loader, or None and the reason why it serves nothing."""
    try:
        plan = serving_plan(project.folder, project.version, gpu, engines)
    except ConfigError as error:
        return None, "; ".join(finding.message for finding in error.findings)
    if not plan.is_pending:
        return plan, ""
    reason = f"the configuration requires a GPU, and it waits for its engine ({plan.engine})"
    return None, f"{reason}; {second_runtime_problem(plan)}" if plan.cuda_problem else reason


def _write_stand_in(folder: Path, project: Project, machine: Machine, suffix: str) -> None:
    """Write the stamp of a future build, beside a file of one byte."""
    name = artefact_name(_STAND_IN_KEY, suffix)
    (folder / name).write_bytes(_STAND_IN)
    stamp = Stamp(
        key=_STAND_IN_KEY,
        artefact=name,
        artefact_sha256=hashlib.sha256(_STAND_IN).hexdigest(),
        size_bytes=len(_STAND_IN),
        onnx_sha256=project.digest(),
        config_digest=config_digest(project.config),
        spec_digest=_STAND_IN_KEY,
        precision="fp32",
        requested="fp32",
        overridden=False,
        machine=machine,
    )
    write_stamp(folder, stamp)


def _refusal(project: Project, target: Target, gpu: GpuRuntime, planned: ServingPlan | None, problem: str) -> str:
    other = "onnxruntime" if target.name == "tensorrt" else "tensorrt"
    instead = f"or build for the serving runtime: headrace build {project.name} --target {other}"
    pin = cpu_pin(project.config)
    if target.name == "tensorrt" and pin:
        return f"the configuration keeps the model on the CPU ({pin}): {gpu_config_change(project)}, {instead}"
    if planned is not None and planned.runtime == CUDA_RUNTIME:
        reason = f"{LIBRARIES[CUDA_RUNTIME]} serves {planned.file.name} on this machine's GPU"
        is_requested = cuda_accelerator(project.config.optimization) is not None
        if target.name == "tensorrt":
            location = _config_location(project, "optimization")
            cure = f"remove the accelerator cuda in {location}" if is_requested else planned.not_on_tensorrt
            return f"{reason}: {cure}"
        choices = [_runtime_change(project, "onnxruntime"), *([] if is_requested or gpu.problem else [instead])]
        return f"{reason}: {', '.join(choices)}"
    if target.name == "onnxruntime" and (planned is None or planned.runtime == "tensorrt"):
        reason = problem or f"TensorRT serves {planned.file.name if planned else 'it'} on this machine's GPU"
        return f"{reason}: {_runtime_change(project, 'onnxruntime')}, {instead}"
    reason = problem or (planned.remark or planned.not_on_gpu if planned is not None else "")
    return f"{reason or 'the server takes another file'}: {instead}"


def _config_change(project: Project, yaml: str, pbtxt: str, field: str) -> str:
    """Return the line to write, with file and line number."""
    location = _config_location(project, field)
    return f"write {pbtxt if read_config_file(project.folder.path).path.suffix == '.pbtxt' else yaml} in {location}"


def _config_location(project: Project, field: str) -> str:
    """Return the name of the configuration's file, with the line of a field if it has one."""
    file = read_config_file(project.folder.path)
    line = file.document.line_of((field,)) if file.exists else None
    return f"{file.path.name}:{line}" if line else file.path.name
