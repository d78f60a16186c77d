"""Says what a server on this machine serves of a version, before a build and with the engine that the build makes.

The choice itself is the server's (`server.config.serving_plan`). An engine that is not built yet is stood for by a stamp in a
scratch folder.
"""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from engines.build import Built
from engines.project import Project
from engines.targets.base import Target
from server.config.config_edit import read_config_file
from server.config.config_reader import served_versions
from server.config.machine import Machine
from server.config.serving_plan import GpuRuntime, Plan, cpu_pin, serving_plan
from server.config.stamps import Stamp, artefact_name, config_digest, write_stamp
from server.core.errors import ConfigError, Unsupported
from server.cuda import device as gpus

_RUNTIMES = {"onnxruntime": "ONNX Runtime", "tensorrt": "TensorRT"}
_DEVICES = {"onnxruntime": "the CPU", "tensorrt": "the GPU"}
_STAND_IN = b"\0"
_STAND_IN_KEY = "0" * 64


@dataclass(frozen=True, slots=True)
class Forecast:
    """What serves a version now, and what a build for a target changes.

    Attributes:
        now: What a server loads now; None if it serves nothing.
        not_now: Why it serves nothing; "" if it does.
        refusal: Why an engine of the target would never be served, and what to change; "" if it would.
        not_served: Why the version is not served at all yet, and what to change; "" if it is.
    """

    now: Plan | None
    not_now: str
    refusal: str = ""
    not_served: str = ""


def gpu_runtime() -> GpuRuntime:
    """TensorRT of this machine, looked for when it is first needed."""
    from engines.targets.tensorrt_target import TensorRtTarget, available

    def describe() -> Machine:
        missing = available()
        if missing:
            raise Unsupported(missing)
        return TensorRtTarget().describe()

    return GpuRuntime(describe, gpus.is_visible)


def cpu_change(project: Project) -> str:
    """Return the one-line change that lets a model that is kept on the CPU use the GPU."""
    if project.config.runtime == "onnxruntime":
        yaml, pbtxt, place = (
            "runtime: auto",
            'parameters { key: "headrace.runtime" value { string_value: "auto" } }',
            "runtime",
        )
    else:
        yaml, pbtxt, place = (
            "instance_group: [{kind: KIND_AUTO}]",
            "instance_group [ { kind: KIND_AUTO } ]",
            "instance_group",
        )
    return _change(project, yaml, pbtxt, place)


def forecast(project: Project, target: Target, gpu: GpuRuntime, engines: Path | None) -> Forecast:
    """Ask the server's choice for a version as it is, and with an engine of a target beside it.

    Args:
        project: The version.
        target: Of the build.
        gpu: TensorRT of this machine.
        engines: Folder of the version in the server's state folder; None: without one.
    """
    served = served_versions(project.config, project.folder.versions)
    if project.version not in served:
        policy = f"version_policy serves {', '.join(map(str, served)) or 'none'}"
        change = _change(
            project,
            f"version_policy: {{specific: {{versions: [{project.version}]}}}}",
            f"version_policy {{ specific {{ versions: [ {project.version} ] }} }}",
            "version_policy",
        )
        return Forecast(None, policy, not_served=f"version {project.version} is not served: {policy}: {change}")
    now, not_now = _plan(project, gpu, engines)
    with tempfile.TemporaryDirectory(prefix="headrace-") as scratch:
        machine = target.describe()
        _write_stand_in(Path(scratch), project, machine, target.suffix)
        then, problem = _plan(project, gpu, Path(scratch))
    if then is not None and then.stamp is not None and then.stamp.machine == machine:
        return Forecast(now, not_now)
    return Forecast(now, not_now, _refusal(project, target, then, problem))


def served_words(built: Built) -> str:
    """What serves once an engine is taken, e.g. "TensorRT FP16 on the GPU (NVIDIA H200)"."""
    target, device = built.machine.target, built.machine.device
    place = f"{_DEVICES[target]} ({device})" if target == "tensorrt" else _DEVICES[target]
    return f"{_RUNTIMES[target]} {built.spec.precision.upper()} on {place}"


def now_words(plan: Plan) -> str:
    """What serves now, e.g. "model.onnx, ONNX Runtime on the CPU"."""
    what = plan.file.name if plan.stamp is None else f"the {plan.stamp.precision.upper()} engine"
    return f"{what}, {_RUNTIMES[plan.runtime]} on {_DEVICES[plan.runtime]}"


def now_rows_per_s(plan: Plan, built: Built) -> float:
    """Rows a second of what serves now: by an engine's stamp, or as the build has timed the model's own file; 0: not known."""
    if plan.stamp is not None:
        return max((timing.rows_per_s for timing in plan.stamp.timings), default=0.0)
    if plan.runtime == "onnxruntime" and built.baseline is not None:
        return built.baseline.rows_per_s
    return 0.0


def _plan(project: Project, gpu: GpuRuntime, engines: Path | None) -> tuple[Plan | None, str]:
    try:
        plan = serving_plan(project.folder, project.version, gpu, engines)
    except ConfigError as error:
        return None, "; ".join(finding.message for finding in error.findings)
    return (None, plan.remark or "it waits for its engine") if plan.waits else (plan, "")


def _write_stand_in(folder: Path, project: Project, machine: Machine, suffix: str) -> None:
    """A stamp as the build would write it, beside a file of one byte."""
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
        asked="fp32",
        overridden=False,
        machine=machine,
    )
    write_stamp(folder, stamp)


def _refusal(project: Project, target: Target, then: Plan | None, problem: str) -> str:
    other = "onnxruntime" if target.name == "tensorrt" else "tensorrt"
    instead = f"or build for what serves: headrace build {project.name} --target {other}"
    kept = cpu_pin(project.config)
    if target.name == "tensorrt" and kept:
        return f"the configuration keeps the model on the CPU ({kept}): {cpu_change(project)}, {instead}"
    if target.name == "onnxruntime" and (then is None or then.runtime == "tensorrt"):
        change = _change(
            project,
            "runtime: onnxruntime",
            'parameters { key: "headrace.runtime" value { string_value: "onnxruntime" } }',
            "runtime",
        )
        reason = problem or f"TensorRT serves {then.file.name if then else 'it'} on this machine's GPU"
        return f"{reason}: {change}, {instead}"
    reason = problem or (then.remark or then.not_on_gpu if then is not None else "") or "the server takes another file"
    return f"{reason}: {instead}"


def _change(project: Project, yaml: str, pbtxt: str, field: str) -> str:
    """The line to write, and where."""
    file = read_config_file(project.folder.path)
    line = file.document.line_of((field,)) if file.exists else None
    where = f"{file.path.name}:{line}" if line else file.path.name
    return f"write {pbtxt if file.path.suffix == '.pbtxt' else yaml} in {where}"
