"""What to load of a version: the engine that was built for this machine, or the model's own file, and why not the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from server.config.config_completion import contradictions
from server.config.config_reader import ModelFolder
from server.config.machine import Machine, onnxruntime_machine
from server.config.model_files import sample_paths
from server.config.onnx_signature import read_signature
from server.config.stamps import Choice, Stamp, choose_in, config_digest, onnx_digest, read_stamps
from server.core.errors import ConfigError, Finding
from server.core.model_config import ModelConfig
from server.core.optimization_config import asked_precision

# What measurements are called in a stamp -> how people say them.
_MEASURED = {
    "top1_agreement": "top-1 agreement with FP32",
    "accuracy": "accuracy",
    "reference_accuracy": "accuracy in FP32",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to load of a version.

    Attributes:
        runtime: name of the backend that loads it.
        source: the model's own file.
        artefact: the engine that is loaded in its place, or None.
        stamp: of the artefact.
        remark: what is to be told of it beside READY: why an engine that is asked for does not serve, or that it is below its
            bar; "" if there is nothing to tell.
        cure: what a person can do about the remark, or "".
        build: digest of what an engine would be built from, where the configuration has it built; "" where nothing is.
        target: the runtime that it would be built for.
        spare: what is loaded should this not load; None: nothing is.
    """

    runtime: str
    source: Path
    artefact: Path | None = None
    stamp: Stamp | None = None
    remark: str = ""
    cure: str = ""
    build: str = ""
    target: str = ""
    spare: Plan | None = None

    @property
    def file(self) -> Path:
        """What is loaded."""
        return self.artefact or self.source

    def serves_as(self, other: Plan) -> bool:
        """True if both load the same."""
        stamps = [(p.stamp.artefact_sha256, p.stamp.forced) if p.stamp else None for p in (self, other)]
        return (self.runtime, self.file) == (other.runtime, other.file) and stamps[0] == stamps[1]

    def replaced(self, error: ConfigError) -> Plan | None:
        """The spare and why it serves; None if there is none.

        Args:
            error: why this could not be loaded.
        """
        if self.spare is None:
            return None
        # What would mend a model's own file, which the rest of the error tells, mends no engine.
        why = "; ".join(f"{finding.path} {finding.message}" for finding in error.findings)
        what = self.file.name if self.artefact is None else _engine(self.stamp)
        remark = f"{self.spare.file.name} serves in place of {what}, which cannot be loaded: {why}"
        rebuild = "" if self.artefact is None else " --rebuild"
        return replace(self.spare, remark=remark, cure=f"{self.cure}{rebuild}")

    def refused(self, error: ConfigError) -> ConfigError:
        """The error for a version that is not served, with what else would help.

        Args:
            error: why this could not be loaded.
        """
        if self.spare is not None or self.remark or not self.cure:
            return error
        return ConfigError(
            [replace(finding, cure=", or ".join(filter(None, (finding.cure, self.cure)))) for finding in error.findings]
        )


def plan(folder: ModelFolder, version: int, runtime: str) -> Plan:
    """Choose between a version's engine and its own file.

    Reads the whole model and the whole engine where something was built, to compare their digests.

    Args:
        folder: the model's.
        version: its number.
        runtime: the backend that is to load it.

    Raises:
        ConfigError: the model's file cannot be read.
    """
    config, source = folder.config, folder.source_file(version)
    place = folder.path / str(version)
    precision = asked_precision(config.optimization)
    option = _option(place, runtime) if precision == "fp32" else ""
    cure = f"headrace build {folder.name} --target {runtime}{option}"
    choice, digest = _choose(place, source, config, runtime)
    if choice.stamp is not None:
        remark = f"{_engine(choice.stamp)} is below its accuracy bar: {'; '.join(choice.stamp.refusal)}"
        told = remark if choice.stamp.forced else ""
        spare = _own(folder, version, runtime, digest, cure) or Plan("onnxruntime", source)
        return Plan(runtime, spare.source, choice.path, choice.stamp, told, cure, spare=spare)
    mine = _own(folder, version, runtime, digest, cure)
    if mine is not None:
        return mine
    if runtime != "onnxruntime" and not _may_serve_source(config, source):
        message = f"has no engine for this machine ({choice.reason or 'none is built'})"
        raise ConfigError(
            [Finding(f"{folder.name}/{version}", None, message, f"{cure}, or write fallback: onnxruntime")]
        )
    if runtime == "onnxruntime" and choice.reason == "" and precision == "fp32" and not config.build_on_load:
        return Plan(runtime, source)
    wanted = {"fp32": "an engine", "best": "the fastest engine"}.get(precision, f"the {precision} engine")
    remark = f"{source.name} serves in place of {wanted}: {choice.reason or 'none is built'}"
    return replace(_on_cpu(folder, version, runtime, digest), remark=remark, cure=cure)


def check_engine(plan: Plan, config: ModelConfig) -> None:
    """Hold an engine in ONNX against the configuration: it takes and gives what the model does, and nothing from elsewhere.

    Raises:
        ConfigError: it does not.
    """
    if plan.artefact is None or plan.artefact.suffix != ".onnx":
        return
    name = plan.artefact.name
    problems = contradictions(config, read_signature(plan.artefact, name))
    if problems:
        raise ConfigError([Finding(name, None, problem.message, problem.cure) for problem in problems])


def look_at_samples(folder: ModelFolder) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of what a build would take its samples from; nothing where nothing is built."""
    found = []
    for path in sample_paths(folder.config, folder.path) if folder.config.build_on_load else ():
        try:
            state = path.stat()
        except OSError:
            continue
        found.append((path.name, state.st_size, state.st_mtime_ns))
    return tuple(found)


def told_of(stamp: Stamp) -> str:
    """Precision and accuracy of an engine for the log, e.g. "int8, top-1 agreement with FP32 99.1 %"."""
    accuracy = stamp.accuracy or {}
    measured = [
        f"{words} {100 * value:.1f} %"
        for name, words in _MEASURED.items()
        if isinstance(value := accuracy.get(name), float | int) and not isinstance(value, bool)
    ]
    return ", ".join([stamp.precision, *measured])


def engine_parameters(stamp: Stamp) -> Mapping[str, str | float | bool]:
    """What the metadata of a model say of the engine that serves it, each under a name that begins with "engine."."""
    accuracy = stamp.accuracy or {}
    found: dict[str, str | float | bool] = {
        "engine.file": stamp.artefact,
        "engine.precision": stamp.precision,
        "engine.below_accuracy_bar": stamp.forced,
    }
    if stamp.forced:
        found["engine.refusal"] = "; ".join(stamp.refusal)
    for name in (*_MEASURED, "cosine"):
        value = accuracy.get(name)
        if isinstance(value, float | int):
            found[f"engine.{name}"] = value
    return found


def _own(folder: ModelFolder, version: int, runtime: str, digest: str, cure: str) -> Plan | None:
    """The file that the model came with, for a backend that does not run ONNX; None if there is none.

    The ONNX file beside it serves where somebody else's plan does not load, if the configuration allows that.
    """
    own, source = folder.model_file(version), folder.source_file(version)
    if runtime == "onnxruntime" or not own.is_file():
        return None
    if not source.is_file():
        return Plan(runtime, own, cure=f"put {source.name} beside it and write fallback: onnxruntime")
    if not _may_serve_source(folder.config, source):
        return Plan(runtime, own, cure="write fallback: onnxruntime")
    return Plan(runtime, own, cure=cure, spare=_on_cpu(folder, version, runtime, digest))


def _on_cpu(folder: ModelFolder, version: int, runtime: str, digest: str) -> Plan:
    """The ONNX file, and an engine of the model's own backend to be built meanwhile if the configuration says so."""
    source = folder.source_file(version)
    if not folder.config.build_on_load:
        return Plan("onnxruntime", source, target=runtime)
    build = _build_digest(folder, digest or onnx_digest(source), runtime)
    return Plan("onnxruntime", source, build=build, target=runtime)


def _may_serve_source(config: ModelConfig, source: Path) -> bool:
    """True if the ONNX file may serve where there is no engine of the model's own backend."""
    return (config.fallback is not None or config.build_on_load) and source.is_file()


def _choose(place: Path, source: Path, config: ModelConfig, runtime: str) -> tuple[Choice, str]:
    """The choice, its reason "" where nothing is built; and the model's digest, "" where it was not needed."""
    try:
        if not read_stamps(place) or (runtime != "onnxruntime" and not source.is_file()):
            return Choice(None, None, ""), ""
    except ConfigError as error:
        return Choice(None, None, f"{error.findings[0].path} {error.findings[0].message}"), ""
    digest = onnx_digest(source)
    return choose_in(place, digest, config_digest(config), _machine(runtime)), digest


def _machine(runtime: str) -> Machine:
    if runtime == "onnxruntime":
        return onnxruntime_machine()
    from server.control.gpus import tensorrt_machine

    return tensorrt_machine()


def _option(place: Path, runtime: str) -> str:
    """The option with which this machine's engine was built, where no configuration asked for it."""
    try:
        asked = [stamp.asked for stamp in read_stamps(place) if stamp.overridden and stamp.machine == _machine(runtime)]
    except ConfigError:
        return ""
    return f" --precision {asked[0]}" if asked else ""


def _engine(stamp: Stamp | None) -> str:
    return "the engine" if stamp is None else f"the {stamp.precision} engine"


def _build_digest(folder: ModelFolder, onnx_sha256: str, target: str) -> str:
    """Of all that the outcome of a build hangs on."""
    told = [onnx_sha256, config_digest(folder.config), target, look_at_samples(folder)]
    return hashlib.sha256(json.dumps(told).encode("utf-8", "surrogateescape")).hexdigest()
