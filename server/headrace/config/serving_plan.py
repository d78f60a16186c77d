"""Which file of a version serves on this machine, with which runtime, and why not on the GPU.

docs/gpu.md has the rule as a table. Nothing here loads a model: `GpuRuntime` says whether TensorRT can run, and is looked for
only where a version could use it. The server, `headrace build` and `headrace validate` call the same function.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from headrace.config.manifest import (
    ArtefactMatch,
    Machine,
    Stamp,
    choose_from_folder,
    config_digest,
    onnx_digest,
    onnxruntime_machine,
    read_stamps,
)
from headrace.config.model_folder import ModelFolder, sample_paths
from headrace.core.errors import ConfigError, Finding, Unsupported
from headrace.core.model_config import ModelConfig
from headrace.core.optimization_config import requested_precision, tensorrt_accelerator

ENGINES_FOLDER = "engines"
"""Below the state folder: engines of models whose own folder cannot be written."""

# Precisions that only a GPU computes faster: on a CPU nothing is missed where they are asked for.
_GPU_PRECISIONS = ("fp16", "bf16", "fp8")
_RUNTIME_NAMES = {"onnxruntime": "ONNX Runtime", "tensorrt": "TensorRT"}

Device = Literal["auto", "cpu", "gpu"]


class GpuRuntime:
    """TensorRT on this machine's GPUs. Every answer is looked for when it is first read, and kept.

    Args:
        describe: the machine as TensorRT sees it; raises `Unsupported` or `ConfigError` where there is no GPU or no TensorRT.
            Starts the CUDA driver.
        is_visible: True if a GPU is there, whether or not TensorRT can use it; starts nothing.
    """

    def __init__(self, describe: Callable[[], Machine], is_visible: Callable[[], bool] = lambda: True) -> None:
        self._describe = describe
        self._is_visible = is_visible

    @cached_property
    def visible(self) -> bool:
        """True if a GPU is there."""
        return self._is_visible()

    @cached_property
    def problem(self) -> str:
        """Why TensorRT cannot run here, "" if it can."""
        return self._probe[1]

    @property
    def machine(self) -> Machine:
        """This machine as TensorRT sees it; only where there is no `problem`."""
        machine = self._probe[0]
        assert machine is not None
        return machine

    @cached_property
    def _probe(self) -> tuple[Machine | None, str]:
        try:
            return self._describe(), ""
        except ConfigError as error:
            return None, error.findings[0].message
        except Unsupported as error:
            return None, str(error)


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """What to load of a version.

    Attributes:
        runtime: name of the backend that loads it.
        source: the model's own file.
        artefact: the engine that is loaded in its place, or None.
        stamp: of the artefact.
        remark: text shown beside READY: why a requested engine does not serve, or that it is below its accuracy bar; "" if
            there is none.
        cure: what a person can do about the remark, or "".
        build: digest of what an engine would be built from, where the configuration has it built; "" where nothing is.
        target: the runtime that it would be built for.
        precision: that would be built.
        fallback: what is loaded should this not load; None: nothing is.
        is_pending: nothing is loaded until the engine is built: the configuration asks for a GPU, and allows nothing else.
        not_on_gpu: why a version is on the CPU although a GPU is present or requested; "" otherwise.
        substitutes: the CPU serves though the configuration asks for a GPU and names no `fallback`; `--strict` refuses it.
    """

    runtime: str
    source: Path
    artefact: Path | None = None
    stamp: Stamp | None = None
    remark: str = ""
    cure: str = ""
    build: str = ""
    target: str = ""
    precision: str = ""
    fallback: ServingPlan | None = None
    is_pending: bool = False
    not_on_gpu: str = ""
    substitutes: bool = False

    @property
    def file(self) -> Path:
        """What is loaded."""
        return self.artefact or self.source

    @property
    def engine(self) -> str:
        """The engine to be built, e.g. "TensorRT FP16"; "" where none is."""
        return f"{_RUNTIME_NAMES[self.target]} {self.precision.upper()}" if self.build else ""

    @property
    def served_precision(self) -> str:
        """Of what is loaded, e.g. "fp16"; of a model's own file only the file itself tells."""
        return self.stamp.precision if self.stamp is not None else f"as in {self.file.name}"

    def loads_same_as(self, other: ServingPlan) -> bool:
        """True if both load the same."""
        stamps = [(p.stamp.artefact_sha256, p.stamp.forced) if p.stamp else None for p in (self, other)]
        return (self.runtime, self.file) == (other.runtime, other.file) and stamps[0] == stamps[1]

    def fallback_plan(self, error: ConfigError) -> ServingPlan | None:
        """The spare and why it serves; None if there is none.

        Args:
            error: why this could not be loaded.
        """
        if self.fallback is None:
            return None
        # What would mend a model's own file, which the rest of the error tells, mends no engine.
        reason = "; ".join(f"{finding.path} {finding.message}" for finding in error.findings)
        subject = self.file.name if self.artefact is None else engine_label(self.stamp)
        remark = f"{self.fallback.file.name} serves in place of {subject}, which cannot be loaded: {reason}"
        rebuild = "" if self.artefact is None else " --rebuild"
        not_on_gpu = f"{subject} cannot be loaded: {reason}" if self.runtime == "tensorrt" else self.fallback.not_on_gpu
        if self.fallback.runtime == "tensorrt":
            not_on_gpu = ""
        return replace(self.fallback, remark=remark, cure=f"{self.cure}{rebuild}", not_on_gpu=not_on_gpu)

    def with_cure(self, error: ConfigError) -> ConfigError:
        """The error for a version that is not served, with what else would help.

        Args:
            error: why this could not be loaded.
        """
        if self.fallback is not None or self.remark or not self.cure:
            return error
        return ConfigError(
            [replace(finding, cure=", or ".join(filter(None, (finding.cure, self.cure)))) for finding in error.findings]
        )


def requested_device(config: ModelConfig) -> Device:
    """Where a configuration wants its instances: "cpu" and "gpu" are written, "auto" leaves it to the machine."""
    kinds = {group.kind for group in config.instance_group if not group.is_default}
    if config.runtime == "onnxruntime" or kinds == {"KIND_CPU"}:
        return "cpu"
    return "gpu" if "KIND_GPU" in kinds and "KIND_CPU" not in kinds else "auto"


def cpu_pin(config: ModelConfig) -> str:
    """The words of a configuration that keep a model on the CPU, "" if there are none."""
    if requested_device(config) != "cpu":
        return ""
    return "runtime: onnxruntime" if config.runtime == "onnxruntime" else "KIND_CPU in instance_group"


def requests_tensorrt(config: ModelConfig) -> bool:
    """True if TensorRT is named (by `runtime`, `backend`, `platform` or the model's file), or KIND_GPU, which only it serves."""
    if requested_device(config) == "cpu":
        return False
    is_named = config.runtime == "tensorrt" or config.backend == "tensorrt"
    return is_named or requested_device(config) == "gpu"


def builds_by_default(config: ModelConfig) -> bool:
    """True if a missing engine is built on load on a machine with a GPU, though `build_on_load` says nothing."""
    options = config.optimization
    requests_precision = options.precision is not None or tensorrt_accelerator(options) is not None
    return requests_tensorrt(config) or (requests_precision and requested_device(config) != "cpu")


def serving_plan(folder: ModelFolder, version: int, gpu: GpuRuntime, engines: Path | None = None) -> ServingPlan:
    """Choose what serves a version on this machine.

    Reads the whole model and the whole engine where something was built, to compare their digests.

    Args:
        folder: the model's, configuration complete.
        version: its number, on disk.
        gpu: TensorRT of this machine; looked for only if the version could use it.
        engines: folder of the engines that were built while the model's folder could not be written, see `engine_folder`.

    Raises:
        ConfigError: nothing here can serve it, or its file cannot be read.
    """
    return _PlanChooser(folder, version, gpu, engines).plan()


def engine_folder(state: Path, model: Path, version: int) -> Path:
    """Where engines of a version go whose own folder cannot be written.

    Args:
        state: the state folder (`--state-dir`).
        model: the model's folder.
        version: its number.
    """
    digest = hashlib.sha256(str(model.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return state / ENGINES_FOLDER / f"{model.name}-{digest}" / str(version)


def sample_fingerprints(folder: ModelFolder) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of what a build takes its samples from; nothing where nothing is built on load."""
    config, fingerprints = folder.config, []
    builds = config.build_on_load or (config.build_on_load is None and builds_by_default(config))
    for path in sample_paths(config, folder.path) if builds else ():
        try:
            status = path.stat()
        except OSError:
            continue
        fingerprints.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(fingerprints)


def engine_label(stamp: Stamp | None) -> str:
    """An engine in a sentence, e.g. "the fp16 engine"."""
    return "the engine" if stamp is None else f"the {stamp.precision} engine"


class _PlanChooser:
    """One choice; what is read twice is kept."""

    def __init__(self, folder: ModelFolder, version: int, gpu: GpuRuntime, engines: Path | None) -> None:
        self._folder = folder
        self._version = version
        self._config = folder.config
        self._source = folder.source_file(version)
        self._model_file = folder.model_file(version)
        self._folders = [folder.path / str(version), *([engines] if engines is not None else [])]
        self._precision = requested_precision(folder.config.optimization)
        self._requests_tensorrt = requests_tensorrt(folder.config)
        self._gpu = gpu
        self._digest = ""

    def plan(self) -> ServingPlan:
        device, config = requested_device(self._config), self._config
        if device == "cpu":
            self._check_cpu()
            pinned = f"the configuration keeps it on the CPU ({cpu_pin(self._config)})"
            return self._on_cpu(pinned if self._gpu.visible else "")
        if not (self._requests_tensorrt or self._builds_for_gpu() or self._has_plan()):
            return self._on_cpu(self._unrequested() if self._gpu.visible else "")
        gpu = self._gpu
        if not gpu.problem:
            return self._on_gpu()
        if not self._requests_tensorrt:
            return self._on_cpu(gpu.problem if gpu.visible else "")
        if not self._source.is_file():
            message = f"backend 'tensorrt' is not available on this machine: {gpu.problem}"
            cure = f"put {self._source.name} beside it, which the CPU can serve, or serve it on a machine with a GPU"
            raise ConfigError([Finding(self._folder.name, None, message, cure)])
        plan = self._on_cpu(gpu.problem)
        remark = plan.remark if plan.build else f"{plan.file.name} serves on the CPU: {gpu.problem}"
        return replace(plan, remark=remark, cure="", substitutes=config.fallback is None)

    def _check_cpu(self) -> None:
        """A model for TensorRT that is kept on the CPU has an ONNX file.

        Raises:
            ConfigError: it has none, or its groups contradict its backend.
        """
        if self._config.backend != "tensorrt":
            return
        name = self._folder.name
        if self._config.runtime != "onnxruntime" and not self._gpu.problem:
            cure = "write KIND_GPU or remove kind, or serve the model with backend: onnxruntime"
            raise ConfigError([Finding(name, None, "TensorRT does not run on the CPU (KIND_CPU)", cure)])
        if not self._source.is_file():
            cure = f"put {self._source.name} beside it, or remove runtime: onnxruntime and KIND_CPU"
            raise ConfigError([Finding(name, None, f"has no {self._source.name} that the CPU could serve", cure)])

    def _builds_for_gpu(self) -> bool:
        explicit = self._config.build_on_load
        return explicit or (explicit is None and builds_by_default(self._config))

    def _has_plan(self) -> bool:
        """True if TensorRT engines are there, for whatever machine."""
        try:
            return any(stamp.machine.target == "tensorrt" for folder in self._folders for stamp in read_stamps(folder))
        except ConfigError:
            return False

    def _on_gpu(self) -> ServingPlan:
        """TensorRT can run: its engine, the model's own plan, or what serves until an engine is built."""
        choice = self._choose("tensorrt", self._gpu.machine)
        may_fall_back = requested_device(self._config) != "gpu" or self._config.fallback is not None
        if choice.stamp is not None:
            return self._engine("tensorrt", choice, self._plan_of_model_file(choice) or self._fallback(may_fall_back))
        own_file_plan = self._plan_of_model_file(choice)
        if own_file_plan is not None:
            return own_file_plan
        if not self._source.is_file():
            raise self._no_engine(choice)
        if self._builds_for_gpu():
            wait = f"{self._source.name} serves on the CPU until its engine is built"
            plan = self._with_build(self._on_cpu(wait), "tensorrt", choice.reason)
            if not may_fall_back:
                return replace(
                    plan, runtime="tensorrt", is_pending=True, artefact=None, stamp=None, source=self._source
                )
            return plan
        if self._requests_tensorrt and self._config.fallback is None:
            raise self._no_engine(choice)
        reason = choice.reason or "none is built"
        if not self._requests_tensorrt:
            return self._on_cpu(f"{reason}: {self._command('tensorrt')}" if choice.reason else self._unrequested())
        return replace(
            self._on_cpu(f"no engine fits: {reason}"), remark=self._missing(reason), cure=self._command("tensorrt")
        )

    def _on_cpu(self, not_on_gpu: str = "") -> ServingPlan:
        """An ONNX Runtime engine that fits, else the ONNX file; an engine is built meanwhile if `build_on_load` says so."""
        choice = self._choose("onnxruntime", onnxruntime_machine())
        source = ServingPlan("onnxruntime", self._source, not_on_gpu=not_on_gpu)
        if choice.stamp is not None:
            return replace(self._engine("onnxruntime", choice, source), not_on_gpu=not_on_gpu)
        explicit = self._config.build_on_load is True
        if explicit and not (not_on_gpu and self._gpu_serves()):
            source = self._with_build(source, "onnxruntime")
        missed = self._precision not in ("fp32", *_GPU_PRECISIONS) or (
            self._precision != "fp32" and requested_device(self._config) == "cpu"
        )
        if (choice.reason or missed or source.build) and not (not_on_gpu and self._gpu_serves()):
            return replace(source, remark=self._missing(choice.reason), cure=self._command("onnxruntime"))
        return source

    def _gpu_serves(self) -> bool:
        """True if a GPU could serve the version: what is missing then is its engine, not one of the CPU's."""
        return requested_device(self._config) != "cpu" and not self._gpu.problem

    def _engine(self, runtime: str, choice: ArtefactMatch, fallback: ServingPlan | None) -> ServingPlan:
        stamp = choice.stamp
        assert stamp is not None
        remark = f"{engine_label(stamp)} is below its accuracy bar: {'; '.join(stamp.refusal)}" if stamp.forced else ""
        source = self._source if fallback is None else fallback.source
        return ServingPlan(runtime, source, choice.path, stamp, remark, self._command(runtime), fallback=fallback)

    def _plan_of_model_file(self, choice: ArtefactMatch) -> ServingPlan | None:
        """The plan that the model came with; None if there is none.

        Where it does not load the ONNX file beside it serves, if the configuration has a `fallback` or `build_on_load: true`. An
        automatic build does not take the place of a plan that somebody has put there.
        """
        if self._config.backend != "tensorrt" or not self._model_file.is_file() or self._model_file == self._source:
            return None
        if not self._source.is_file():
            return ServingPlan(
                "tensorrt", self._model_file, cure=f"put {self._source.name} beside it and write fallback: onnxruntime"
            )
        builds = self._config.build_on_load is True and requested_device(self._config) != "gpu"
        if not builds and self._config.fallback is None:
            return ServingPlan("tensorrt", self._model_file, cure="write fallback: onnxruntime")
        fallback = ServingPlan("onnxruntime", self._source, not_on_gpu="its plan cannot be loaded")
        if builds:
            fallback = self._with_build(fallback, "tensorrt", choice.reason)
        return ServingPlan("tensorrt", self._model_file, cure=self._command("tensorrt"), fallback=fallback)

    def _fallback(self, may_fall_back: bool) -> ServingPlan | None:
        return ServingPlan("onnxruntime", self._source) if may_fall_back and self._source.is_file() else None

    def _with_build(self, plan: ServingPlan, target: str, reason: str = "") -> ServingPlan:
        parts = [self._onnx_sha256(), config_digest(self._config), target, sample_fingerprints(self._folder)]
        build = hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogateescape")).hexdigest()
        described = replace(plan, build=build, target=target, precision=self._precision)
        return replace(described, remark=self._missing(reason), cure=self._command(target))

    def _choose(self, runtime: str, machine: Machine) -> ArtefactMatch:
        """The engine that fits, from the version's folder or the state folder; the reason is "" where nothing is built."""
        reasons: list[str] = []
        for folder in self._folders:
            try:
                if not read_stamps(folder) or (runtime == "tensorrt" and not self._source.is_file()):
                    continue
            except ConfigError as error:
                reasons.append(f"{error.findings[0].path} {error.findings[0].message}")
                continue
            choice = choose_from_folder(folder, self._onnx_sha256(), self._config, machine)
            if choice.stamp is not None:
                return choice
            reasons.append(choice.reason)
        return ArtefactMatch(None, None, reasons[0] if reasons else "")

    def _onnx_sha256(self) -> str:
        self._digest = self._digest or onnx_digest(self._source)
        return self._digest

    def _missing(self, reason: str) -> str:
        engine = {"fp32": "an engine", "best": "the fastest engine"}.get(
            self._precision, f"the {self._precision} engine"
        )
        return f"{self._source.name} serves in place of {engine}: {reason or 'none is built'}"

    def _no_engine(self, choice: ArtefactMatch) -> ConfigError:
        message = f"has no engine for this machine ({choice.reason or 'none is built'})"
        cure = f"{self._command('tensorrt')}, or write fallback: onnxruntime"
        return ConfigError([Finding(f"{self._folder.name}/{self._version}", None, message, cure)])

    def _unrequested(self) -> str:
        precision = "write optimization: {precision: fp16}"
        return f"no engine is asked for: {precision}, or run headrace build {self._folder.name}"

    def _command(self, target: str) -> str:
        return f"headrace build {self._folder.name} --target {target}{self._option(target)}"

    def _option(self, target: str) -> str:
        """The option with which this machine's engine was built, where no configuration requests it."""
        if self._precision != "fp32":
            return ""
        machine = onnxruntime_machine() if target == "onnxruntime" else self._gpu.machine
        precisions: list[str] = []
        for folder in self._folders:
            try:
                precisions += [
                    stamp.requested for stamp in read_stamps(folder) if stamp.overridden and stamp.machine == machine
                ]
            except ConfigError:
                continue
        return f" --precision {precisions[0]}" if precisions else ""
