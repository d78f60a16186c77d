"""Chooses the file and the runtime of a version on this machine, with the reason if the GPU does not run it.

docs/gpu.md has the rule as a table. Nothing here loads a model: `GpuRuntime` reports whether TensorRT can run, and is
only probed if a version could use it. The server, `headrace build` and `headrace validate` call the same function.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from headrace.config.digests import config_digest, onnx_digest
from headrace.config.documents import refuse
from headrace.config.machine import LIBRARIES, Machine, onnxruntime_machine
from headrace.config.manifest import ArtefactMatch, Stamp, choose_from_folder, read_stamps
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import ModelFolder, sample_paths
from headrace.config.optimization_config import cuda_accelerator, requested_precision, tensorrt_accelerator
from headrace.config.tensor_config import ModelInput, ModelOutput
from headrace.core.errors import ConfigError, Unsupported

SLOWER_STATUS = 3
"""Exit status of `headrace build` for an engine that is slower than what serves now, and so is not published."""
NOT_PUBLISHED = "an engine was built, but is not published: "
"""Start of the reason of such a build."""
ENGINES_FOLDER = "engines"
"""Folder in the state folder: engines of models whose own folder is read-only."""

PYTHON_RUNTIMES = frozenset({"python", "sklearn", "xgboost", "lightgbm", "pytorch"})
"""Backends whose models are Python code, or run by Python code of Headrace, in processes of their own."""

CUDA_RUNTIME = "onnxruntime_cuda"
"""ONNX Runtime's CUDA provider: the second GPU runtime."""

GPU_RUNTIMES = frozenset({"tensorrt", CUDA_RUNTIME})
"""Runtimes that run models on GPUs."""

# Precisions that only a GPU computes faster: on a CPU a missing engine of these is no loss.
_GPU_PRECISIONS = ("fp16", "bf16", "fp8")

Device = Literal["auto", "cpu", "gpu"]


class GpuRuntime:
    """TensorRT and ONNX Runtime's CUDA provider on this machine's GPUs. Every property is probed on first use and cached.

    Args:
        describe: returns the machine for TensorRT; raises `Unsupported` or `ConfigError` without a GPU or TensorRT. Starts
            the CUDA driver.
        is_visible: returns True if a GPU exists, whether or not TensorRT can use it; starts nothing.
        cuda_problem: returns the reason why the CUDA provider cannot run here, "" if it can; called only if a GPU exists.
        plugin_problem: returns the reason why an engine with a plug-in of this name, version, digest and layers does not run
            here, "" if it does.
    """

    def __init__(
        self,
        describe: Callable[[], Machine],
        is_visible: Callable[[], bool] = lambda: True,
        cuda_problem: Callable[[], str] = lambda: "the CUDA provider is not looked for",
        plugin_problem: Callable[[str, str, str, Mapping[str, str]], str] = lambda *_: "plug-ins are not looked for",
    ) -> None:
        self._describe = describe
        self._is_visible = is_visible
        self._cuda_problem = cuda_problem
        self._plugin_problem = plugin_problem

    @cached_property
    def visible(self) -> bool:
        """True if a GPU exists."""
        return self._is_visible()

    @cached_property
    def cuda_problem(self) -> str:
        """Reason why ONNX Runtime's CUDA provider cannot run here; "" if it can."""
        return self._cuda_problem() if self.visible else "this machine has no NVIDIA GPU"

    def plugin_problem(self, stamp: Stamp) -> str:
        """Return the reason why the plug-ins of an engine are not those of this Headrace; "" if they are."""
        problems = (self._plugin_problem(use.name, use.version, use.digest, use.layers) for use in stamp.plugins)
        return next(filter(None, problems), "")

    @cached_property
    def problem(self) -> str:
        """Reason why TensorRT cannot run here; "" if it can."""
        return self._probe[1]

    @property
    def machine(self) -> Machine:
        """This machine for TensorRT; valid only without a `problem`."""
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
    """Plan for loading a version: runtime, file, and the engine to build.

    Attributes:
        runtime: name of the backend.
        source: the model's own file.
        artefact: engine that is loaded instead, or None.
        stamp: stamp of the artefact.
        remark: text shown beside READY: why a requested engine does not serve, or that it is below its accuracy bar; "" if
            there is none.
        cure: what the user can do about the remark; "" if there is nothing.
        build: digest of the inputs of the engine to build; "" if none is built.
        target: runtime of the engine to build.
        precision: precision of the engine to build.
        fallback: plan to load if this one cannot be loaded; None if there is none.
        is_pending: nothing is loaded until the engine is built: the configuration requires a GPU without a fallback.
        not_on_gpu: reason why a version is on the CPU although a GPU is present or requested; "" otherwise.
        substitutes: the CPU serves although the configuration requires a GPU without `fallback`; `--strict` refuses it.
        not_on_tensorrt: reason why the CUDA provider serves instead of TensorRT; "" if another runtime serves, or if the
            configuration requests the CUDA provider.
        cuda_problem: reason why the CUDA provider does not serve a version that TensorRT could refuse; "" otherwise.
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
    not_on_tensorrt: str = ""
    cuda_problem: str = ""

    @property
    def file(self) -> Path:
        """The file that is loaded."""
        return self.artefact or self.source

    @property
    def engine(self) -> str:
        """Name of the engine to build, e.g. "TensorRT FP16"; "" if none is built."""
        return f"{LIBRARIES[self.target]} {self.precision.upper()}" if self.build else ""

    @property
    def served_precision(self) -> str:
        """Precision of the loaded file, e.g. "fp16"; only a model's own file itself has its precision."""
        return self.stamp.precision if self.stamp is not None else f"as in {self.file.name}"

    def loads_same_as(self, other: ServingPlan) -> bool:
        """True if both plans load the same file."""
        stamps = [(p.stamp.artefact_sha256, p.stamp.forced) if p.stamp else None for p in (self, other)]
        return (self.runtime, self.file) == (other.runtime, other.file) and stamps[0] == stamps[1]

    def fallback_plan(self, error: ConfigError) -> ServingPlan | None:
        """Return the fallback with the reason why it serves; None if there is none.

        Args:
            error: error of loading this plan.
        """
        if self.fallback is None:
            return None
        # Cures for a model's own file do not help with an engine, so only messages are shown.
        reason = "; ".join(f"{finding.path} {finding.message}" for finding in error.findings)
        if self.runtime == CUDA_RUNTIME:
            return self._without_cuda(self.fallback, reason)
        subject = self.file.name if self.artefact is None else engine_label(self.stamp)
        remark = f"{self.fallback.file.name} serves in place of {subject}, which cannot be loaded: {reason}"
        rebuild = "" if self.artefact is None else " --rebuild"
        not_on_gpu = f"{subject} cannot be loaded: {reason}" if self.runtime == "tensorrt" else self.fallback.not_on_gpu
        if self.fallback.runtime == "tensorrt":
            not_on_gpu = ""
        return replace(self.fallback, remark=remark, cure=f"{self.cure}{rebuild}", not_on_gpu=not_on_gpu)

    def placement_reasons(self, failure: str, reason: str = "") -> dict[str, str]:
        """Return the reasons for the choice of the runtime by name in the metadata; "" for those that do not apply.

        Args:
            failure: error of building the engine; "" without one.
            reason: why a built engine cannot be used; "" if none was built.
        """
        text = reason or failed_build_text("its engine", failure)
        return {
            "not_on_gpu": text
            if text and (self.not_on_gpu or (reason and not self.not_on_tensorrt))
            else self.not_on_gpu,
            "not_on_tensorrt": text if text and self.not_on_tensorrt else self.not_on_tensorrt,
        }

    def failed_build(self, failure: str) -> str:
        """Describe the failure of building the engine for the log, with the reason why the other GPU runtime does not serve."""
        has_other = self.target == "tensorrt" and bool(self.cuda_problem)
        other = f"; the second GPU runtime does not serve the model: {self.cuda_problem}" if has_other else ""
        return f"{failed_build_text('its engine', failure)}{other}"

    def _without_cuda(self, fallback: ServingPlan, reason: str) -> ServingPlan:
        problem = f"{LIBRARIES[CUDA_RUNTIME]} cannot load it: {reason}"
        remark = f"{fallback.remark}; {problem}" if fallback.remark else problem
        not_on_gpu = f"{fallback.not_on_gpu}; {problem}" if fallback.not_on_gpu else problem
        return replace(
            fallback,
            remark=remark,
            not_on_gpu=not_on_gpu if fallback.runtime == "onnxruntime" else "",
            cuda_problem=problem,
        )

    def with_cure(self, error: ConfigError) -> ConfigError:
        """Return the error of a version that is not served, with the plan's cure.

        Args:
            error: error of loading this plan.
        """
        if self.fallback is not None or self.remark or not self.cure:
            return error
        return ConfigError(
            [replace(each, cure=", or ".join(filter(None, (each.cure, self.cure)))) for each in error.findings]
        )


def requested_device(config: ModelConfig) -> Device:
    """Return the device that a configuration requests: "cpu" or "gpu" if it is explicit, else "auto"."""
    kinds = {group.kind for group in config.instance_group if not group.is_default}
    if config.runtime == "onnxruntime" or kinds == {"KIND_CPU"}:
        return "cpu"
    return "gpu" if "KIND_GPU" in kinds and "KIND_CPU" not in kinds else "auto"


def cpu_pin(config: ModelConfig) -> str:
    """Return the configuration text that keeps a model on the CPU; "" if there is none."""
    if requested_device(config) != "cpu":
        return ""
    return "runtime: onnxruntime" if config.runtime == "onnxruntime" else "KIND_CPU in instance_group"


def failed_build_text(engine: str, failure: str) -> str:
    """Return the sentence on a build that ended without an engine in place; "" without a failure."""
    if not failure or failure.startswith(NOT_PUBLISHED):
        return failure
    return f"building {engine} failed: {failure}"


def requests_tensorrt(config: ModelConfig) -> bool:
    """True if the configuration names TensorRT (`runtime`, `backend`, `platform` or the model's file) or KIND_GPU, which needs
    it.
    """
    if requested_device(config) == "cpu":
        return False
    is_named = config.runtime == "tensorrt" or config.backend == "tensorrt"
    return is_named or requested_device(config) == "gpu"


def builds_by_default(config: ModelConfig) -> bool:
    """True if a missing engine is built on load on a machine with a GPU, without `build_on_load` in the configuration."""
    options = config.optimization
    requests_precision = options.precision is not None or tensorrt_accelerator(options) is not None
    return requests_tensorrt(config) or (requests_precision and requested_device(config) != "cpu")


def serving_plan(folder: ModelFolder, version: int, gpu: GpuRuntime, engines: Path | None = None) -> ServingPlan:
    """Choose the plan of a version on this machine.

    Reads the whole model and the whole engine if there is one, to compare their digests.

    Args:
        folder: the model's folder, configuration complete.
        version: version number, on disk.
        gpu: GPU runtimes of this machine; probed only if the version could use them.
        engines: folder with engines that were built while the model's folder was read-only, see `engine_folder`.

    Raises:
        ConfigError: no runtime here can serve it, or its file cannot be read.
    """
    if folder.config.backend in PYTHON_RUNTIMES:
        return ServingPlan(folder.config.backend, folder.model_file(version))
    return _PlanChooser(folder, version, gpu, engines).plan()


def engine_folder(state: Path, model: Path, version: int) -> Path:
    """Return the folder for engines of a version whose own folder is read-only.

    Args:
        state: the state folder (`--state-dir`).
        model: the model's folder.
        version: version number.
    """
    digest = hashlib.sha256(str(model.resolve()).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return state / ENGINES_FOLDER / f"{model.name}-{digest}" / str(version)


def sample_fingerprints(folder: ModelFolder) -> tuple[tuple[str, int, int], ...]:
    """Return name, size in bytes and modification time in nanoseconds of the samples of a build; empty if nothing is built on
    load.
    """
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
    """Describe an engine in a sentence, e.g. "the fp16 engine"."""
    return "the engine" if stamp is None else f"the {stamp.precision} engine"


class _PlanChooser:
    """Chooses the plan of one version; caches the model's digest."""

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
        if cuda_accelerator(config.optimization) is not None:
            plan = self._requested_on_cuda()
            if plan is not None:
                return plan
        if not (self._requests_tensorrt or self._builds_for_gpu() or self._has_plan()):
            return self._on_cpu(self._unrequested() if self._gpu.visible else "")
        gpu = self._gpu
        if not gpu.problem:
            return self._on_gpu()
        if not self._requests_tensorrt:
            plan = self._on_cpu(gpu.problem if gpu.visible else "")
            return self._on_cuda(plan, gpu.problem) if self._builds_for_gpu() else plan
        if not self._source.is_file():
            message = f"backend 'tensorrt' is not available on this machine: {gpu.problem}"
            cure = f"put {self._source.name} beside it, which the CPU can serve, or serve it on a machine with a GPU"
            raise refuse(self._folder.name, None, message, cure)
        plan = self._on_cpu(gpu.problem)
        remark = plan.remark if plan.build else f"{plan.file.name} serves on the CPU: {gpu.problem}"
        plan = replace(plan, remark=remark, cure="", substitutes=config.fallback is None)
        return self._on_cuda(plan, gpu.problem)

    def _check_cpu(self) -> None:
        """Check that a TensorRT model that is kept on the CPU has an ONNX file.

        Raises:
            ConfigError: it has none, or its instance groups contradict its backend.
        """
        if self._config.backend != "tensorrt":
            return
        name = self._folder.name
        if self._config.runtime != "onnxruntime" and not self._gpu.problem:
            cure = "write KIND_GPU or remove kind, or serve the model with backend: onnxruntime"
            raise refuse(name, None, "TensorRT does not run on the CPU (KIND_CPU)", cure)
        if not self._source.is_file():
            cure = f"put {self._source.name} beside it, or remove runtime: onnxruntime and KIND_CPU"
            raise refuse(name, None, f"has no {self._source.name} that the CPU could serve", cure)

    def _builds_for_gpu(self) -> bool:
        explicit = self._config.build_on_load
        return explicit or (explicit is None and builds_by_default(self._config))

    def _has_plan(self) -> bool:
        """True if TensorRT engines for any machine exist."""
        try:
            return any(stamp.machine.target == "tensorrt" for folder in self._folders for stamp in read_stamps(folder))
        except ConfigError:
            return False

    def _on_gpu(self) -> ServingPlan:
        """Plan for a machine with TensorRT: its engine, the model's own plan, or a file that serves until an engine is built."""
        choice = self._choose("tensorrt", self._gpu.machine)
        may_fall_back = requested_device(self._config) != "gpu" or self._config.fallback is not None
        if choice.stamp is not None:
            return self._engine("tensorrt", choice, self._plan_of_model_file(choice) or self._fallback(may_fall_back))
        own_file_plan = self._plan_of_model_file(choice)
        if own_file_plan is not None:
            return own_file_plan
        if not self._source.is_file():
            raise self._no_engine(choice)
        reason = choice.reason or "none is built"
        if self._builds_for_gpu():
            wait = f"{self._source.name} serves on the CPU until its engine is built"
            plan = self._with_build(self._on_cpu(wait), "tensorrt", choice.reason)
            if not may_fall_back:
                plan = replace(
                    plan, runtime="tensorrt", is_pending=True, artefact=None, stamp=None, source=self._source
                )
            return self._on_cuda(plan, f"no engine serves: {reason}")
        if self._requests_tensorrt and self._config.fallback is None:
            plan = self._on_cuda(ServingPlan("onnxruntime", self._source), f"no engine fits: {reason}")
            if plan.runtime == CUDA_RUNTIME:
                return replace(plan, fallback=None)
            raise self._no_engine(choice)
        if not self._requests_tensorrt:
            return self._on_cpu(f"{reason}: {self._command('tensorrt')}" if choice.reason else self._unrequested())
        plan = self._on_cpu(f"no engine fits: {reason}")
        plan = replace(plan, remark=self._missing(reason), cure=self._command("tensorrt"))
        return self._on_cuda(plan, f"no engine fits: {reason}")

    def _requested_on_cuda(self) -> ServingPlan | None:
        """Plan for a configuration with the accelerator `cuda`; None if the CUDA provider cannot serve it."""
        if self._cuda_refusal():
            return None
        may_fall_back = requested_device(self._config) != "gpu" or self._config.fallback is not None
        return ServingPlan(CUDA_RUNTIME, self._source, fallback=self._fallback(may_fall_back))

    def _on_cuda(self, plan: ServingPlan, reason: str) -> ServingPlan:
        """Return a plan in which the CUDA provider serves the ONNX file, instead of the CPU or until the engine is built.

        Args:
            plan: the plan without it, which is used if the file does not load; returned if the provider cannot serve it.
            reason: why TensorRT does not serve.
        """
        problem = self._cuda_refusal()
        if problem:
            return replace(plan, cuda_problem=problem)
        build = plan.build if plan.target == "tensorrt" else ""
        remark = plan.remark if build else f"{LIBRARIES[CUDA_RUNTIME]} serves {self._source.name}: {reason}"
        return ServingPlan(
            CUDA_RUNTIME,
            self._source,
            remark=remark,
            cure="" if self._gpu.problem else self._command("tensorrt"),
            build=build,
            target=plan.target if build else "",
            precision=plan.precision if build else "",
            fallback=plan,
            not_on_tensorrt=reason,
        )

    def _cuda_refusal(self) -> str:
        """Return the reason why the CUDA provider cannot serve the version; "" if it can."""
        config = self._config
        if not self._source.is_file():
            return f"there is no {self._source.name}"
        tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
        texts = [tensor.name for tensor in tensors if tensor.data_type == "TYPE_STRING"]
        if texts:
            return f"{LIBRARIES[CUDA_RUNTIME]} takes no text ('{texts[0]}')"
        return self._gpu.cuda_problem

    def _on_cpu(self, not_on_gpu: str = "") -> ServingPlan:
        """Plan for the CPU: an ONNX Runtime engine that fits, else the ONNX file, with a build if `build_on_load` is set."""
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
        """True if a GPU could serve the version, so that the missing engine is the GPU's, not the CPU's."""
        return requested_device(self._config) != "cpu" and not self._gpu.problem

    def _engine(self, runtime: str, choice: ArtefactMatch, fallback: ServingPlan | None) -> ServingPlan:
        stamp = choice.stamp
        assert stamp is not None
        remark = f"{engine_label(stamp)} is below its accuracy bar: {'; '.join(stamp.refusal)}" if stamp.forced else ""
        source = self._source if fallback is None else fallback.source
        return ServingPlan(runtime, source, choice.path, stamp, remark, self._command(runtime), fallback=fallback)

    def _plan_of_model_file(self, choice: ArtefactMatch) -> ServingPlan | None:
        """Plan for the TensorRT plan that the model consists of; None if there is none.

        If it does not load, the ONNX file beside it serves, if the configuration has a `fallback` or `build_on_load:
        true`. An automatic build does not replace a plan that the user has provided.
        """
        if self._config.backend != "tensorrt" or not self._model_file.is_file() or self._model_file == self._source:
            return None
        if not self._source.is_file():
            cure = f"put {self._source.name} beside it and write fallback: onnxruntime"
            return ServingPlan("tensorrt", self._model_file, cure=cure)
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
        """Return the engine that fits, from the version's folder or the state folder; the reason is "" if nothing is built."""
        reasons: list[str] = []
        for folder in self._folders:
            try:
                if not read_stamps(folder) or (runtime == "tensorrt" and not self._source.is_file()):
                    continue
            except ConfigError as error:
                reasons.append(f"{error.findings[0].path} {error.findings[0].message}")
                continue
            choice = choose_from_folder(folder, self._onnx_sha256(), self._config, machine)
            problem = "" if choice.stamp is None else self._gpu.plugin_problem(choice.stamp)
            if choice.stamp is not None and not problem:
                return choice
            reasons.append(problem or choice.reason)
        return ArtefactMatch(None, None, reasons[0] if reasons else "")

    def _onnx_sha256(self) -> str:
        self._digest = self._digest or onnx_digest(self._source)
        return self._digest

    def _missing(self, reason: str) -> str:
        names = {"fp32": "an engine", "best": "the fastest engine"}
        engine = names.get(self._precision, f"the {self._precision} engine")
        return f"{self._source.name} serves in place of {engine}: {reason or 'none is built'}"

    def _no_engine(self, choice: ArtefactMatch) -> ConfigError:
        message = f"has no engine for this machine ({choice.reason or 'none is built'})"
        cure = f"{self._command('tensorrt')}, or write fallback: onnxruntime"
        return refuse(f"{self._folder.name}/{self._version}", None, message, cure)

    def _unrequested(self) -> str:
        precision = "write optimization: {precision: fp16}"
        return f"no engine is requested: {precision}, or run headrace build {self._folder.name}"

    def _command(self, target: str) -> str:
        return f"headrace build {self._folder.name} --target {target}{self._option(target)}"

    def _option(self, target: str) -> str:
        """Return the option with which this machine's engine was built, if no configuration requests it."""
        if self._precision != "fp32":
            return ""
        machine = onnxruntime_machine() if target == "onnxruntime" else self._gpu.machine
        precisions: list[str] = []
        for folder in self._folders:
            try:
                stamps = [stamp for stamp in read_stamps(folder) if stamp.overridden and stamp.machine == machine]
                precisions += [stamp.requested for stamp in stamps]
            except ConfigError:
                continue
        return f" --precision {precisions[0]}" if precisions else ""
