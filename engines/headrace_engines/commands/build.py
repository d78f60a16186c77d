"""`headrace build`: builds engines for this machine, compares them with FP32 and publishes them beside the model.

Before a build the command calls the server's selection of the file to serve (`headrace.config.serving_plan`). A stamp in a
scratch folder stands for the engine that is not built yet.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headrace.config.auto_complete import keeps_rows_apart
from headrace.config.digests import config_digest
from headrace.config.files import read_config_file
from headrace.config.machine import LIBRARIES, Machine
from headrace.config.manifest import Stamp, artefact_name, write_stamp
from headrace.config.model_folder import served_versions
from headrace.config.onnx_model import read_signature
from headrace.config.optimization_config import PRECISIONS, cuda_accelerator
from headrace.config.serving_plan import CUDA_RUNTIME, GpuRuntime, ServingPlan, cpu_pin, engine_folder, serving_plan
from headrace.config.tried_files import TriedFiles
from headrace.core.errors import ConfigError, HeadraceError, Unsupported
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.cuda.tensorrt import plugin_problem
from headrace_reports.command_line import number_parser, open_console, pickup_text, plural, printable
from rich.console import Console
from rich.text import Text

from headrace_engines.build import BuildResult, build_best_engine, build_engine, find_fp32_engine, make_stamp
from headrace_engines.commands import add_cache, add_repository_and_target, add_state, add_version
from headrace_engines.commands.bisect import batch_layer_text
from headrace_engines.errors import BuildError, CallError, failure_text
from headrace_engines.layers.bisection import first_batch_layer
from headrace_engines.precision.methods import REMARKS, stored_precision
from headrace_engines.progress import PLUGIN_PHASES, Report, silent, with_lines, with_progress_lines
from headrace_engines.project import PLUGINS_BUDGET_S, Project, all_projects, open_data, open_project, read_spec
from headrace_engines.report import BuildDisplay, Heading, narrow_table, print_text, rate, save_json, size
from headrace_engines.store import Store, publish, publishing_folder
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Target

# Loads models as a server does, tests all batch sizes and stores the result; orders and results are lines of JSON.
_TRIAL_LOAD = (sys.executable, "-P", "-m", "headrace.server.commands.validate")
_NO_SECONDS = "is no number of seconds above 0: write e.g. 120"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `build`."""
    add = parser.add_argument
    add("models", nargs="*", metavar="MODEL", help="name of a model in the repository, or its folder")
    add("--all", action="store_true", help="build every model of the repository")
    add_version(parser)
    add("--precision", choices=PRECISIONS, help="precision, in place of the configuration's")
    add("--force", action="store_true", help="publish engines that miss the required accuracy, with a mark")
    add(
        "--refine",
        action="store_true",
        help="INT8, FP8: measure the ten longest layers in the built engine; those that are faster in floating point stay there",
    )
    add(
        "--version-compatible",
        action="store_true",
        help="build a TensorRT engine that later TensorRT versions of the same major version load too; it holds code that runs",
    )
    add(
        "--plugins",
        default="off",
        metavar="off|auto|NODE,...",
        help="run convolutions of a TensorRT engine on our kernels: auto where the engine is measured to be faster, or the named "
        "ONNX nodes (default: off)",
    )
    add(
        "--plugins-budget",
        type=number_parser(float, lambda seconds: 0 < seconds < math.inf, _NO_SECONDS),
        default=PLUGINS_BUDGET_S,
        metavar="SECONDS",
        help="--plugins auto: time after which no further kernel is timed and no further engine is built (default: %(default)g)",
    )
    add("--json", type=Path, metavar="FILE", help="write the results and the measurements of --plugins as JSON")
    add("--rebuild", action="store_true", help="build again even if the engine is in the store")
    # The server starts builders with it and reads lines "progress SHARE PHASE" from standard output.
    add("--progress", action="store_true", help=argparse.SUPPRESS)
    add_repository_and_target(parser)
    add_cache(parser)
    add_state(parser)


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """Result for one model.

    Attributes:
        name: name of the model.
        built: the artefact; None if there is none.
        published: True if the artefact is published.
        forced: True if it is published although it misses an accuracy limit.
        error: reason why there is no artefact, or why it is not published; "" without an error.
        seconds: duration of this call.
        repository: folder that holds the model.
        fp32_rows_per_s: throughput of FP32 on the same target; 0 if unknown.
        current: description of the file that served before the build; "" if it was this engine.
        current_rows_per_s: throughput of that file; 0 if unknown.
        not_served: reason why a server does not use the published engine, and the remedy; "" if it does.
        advice: change that would lead to another engine, e.g. one for the GPU; "" without any.
        state_folder: folder that the engine is published in, if not the version's folder.
        batches: which batches of the published engine are proven; "" if nothing was tested.
        without_engine: after a failed build, what a server does without the engine; "" if it is not known.
    """

    name: str
    built: BuildResult | None = None
    published: bool = False
    forced: bool = False
    error: str = ""
    seconds: float = 0.0
    repository: str = ""
    fp32_rows_per_s: float = 0.0
    current: str = ""
    current_rows_per_s: float = 0.0
    not_served: str = ""
    advice: str = ""
    state_folder: Path | None = None
    batches: str = ""
    without_engine: str = ""


def run(options: argparse.Namespace, console: Console) -> int:
    """Build the requested models; return 1 if a build failed or missed its accuracy, else 0.

    Raises:
        BuildError: a model or target does not exist, or options contradict each other.
    """
    if options.models and options.all:
        raise CallError("both models and --all are given: leave one of them out")
    if not options.models and not options.all:
        raise CallError("no model is given: name the models to build, or use --all")
    if options.all and options.version is not None:
        raise CallError("both --version and --all are given: name one model in place of --all")
    repository = options.model_repository
    projects: list[Project | BuildError] = all_projects(repository) if options.all else []
    projects += [open_project(name, repository, options.version) for name in options.models]
    with ThreadPoolExecutor(1) as pool:
        # Reading a large model takes as long as initialising a GPU; both run at the same time.
        digests = [pool.submit(project.digest) for project in projects if isinstance(project, Project)]
        targets = _Targets(options.target)
        wait(digests)
    store = Store(options.cache)

    outcomes = []
    names = [p.name for p in projects if isinstance(p, Project)]
    with BuildDisplay(console, names, is_logged=not options.progress) as display:
        for project in projects:
            if isinstance(project, BuildError):
                outcomes.append(BuildOutcome("", error=str(project)))
                continue
            report = display.report(project.name)
            report = with_progress_lines(report) if options.progress else report
            if options.plugins != "off" and not options.progress:
                report = with_lines(report, PLUGIN_PHASES, _line_writer(console, project.name))
            outcome = build_model(project, options, targets, store, report)
            outcomes.append(outcome)
            display.finish(outcome.name, _last_phase(outcome))
    show_outcomes(console, open_console(stderr=True), outcomes)
    if options.json is not None:
        write_outcomes(options.json, outcomes)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _line_writer(console: Console, name: str) -> Callable[[str], None]:
    """Return a callback that prints a phase at once, also into a pipe."""

    def write(phase: str) -> None:
        print_text(console, f"{printable(name)}: {printable(phase)}")
        console.file.flush()

    return write


def write_outcomes(path: Path, outcomes: Sequence[BuildOutcome]) -> None:
    """Write the outcomes as JSON.

    Raises:
        BuildError: the file cannot be written.
    """
    models = [
        {
            "model": outcome.name,
            "error": outcome.error,
            "published": outcome.published,
            "seconds": round(outcome.seconds, 2),
            "precision": outcome.built.spec.precision if outcome.built else None,
            "machine": str(outcome.built.machine) if outcome.built else None,
            "timings": [asdict(timing) for timing in outcome.built.timings] if outcome.built else [],
            "plugins": outcome.built.plugins if outcome.built else None,
            "batches": outcome.batches,
        }
        for outcome in outcomes
    ]
    save_json(path, {"models": models})


def _last_phase(outcome: BuildOutcome) -> str:
    """Return the last phase of a model's progress bar."""
    if outcome.error:
        return "failed"
    return "stored" if outcome.built is not None and outcome.built.cached else "built"


class _Targets:
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


def build_model(
    project: Project, options: argparse.Namespace, targets: _Targets, store: Store, report: Report
) -> BuildOutcome:
    """Build and publish one model; errors are in the outcome, not raised."""
    started_s = time.monotonic()
    outcome, error, expected = BuildOutcome(project.name), "", None
    try:
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
        build = build_best_engine if spec.precision == "best" else build_engine
        built = build(project, spec, target, store, report, rebuild=options.rebuild)
        outcome = replace(outcome, built=built)
        if built.refusal and not options.force:
            raise BuildError("; ".join(built.refusal) + "; --force publishes it with a mark")
        forced = bool(built.refusal)
        folder = _publish(project, options, built, store, requested, forced)
        current, current_rows_per_s = _serving_before(expected.current, built)
        outcome = replace(
            outcome,
            published=True,
            forced=forced,
            repository=str(project.folder.path.parent),
            fp32_rows_per_s=_fp32_rows_per_s(project, built, target, store),
            current=current,
            current_rows_per_s=current_rows_per_s,
            not_served=expected.not_served,
            advice=advice,
            state_folder=folder,
        )
        # A server that has started this build proves the engine when it loads it.
        if not options.progress and not expected.not_served:
            outcome = replace(outcome, batches=_prove_batches(project, built, target, options.state_dir, store, report))
    except (HeadraceError, MemoryError, OSError) as raised:
        error = failure_text(raised)
    without_engine = without_engine_text(expected) if error and expected is not None else ""
    seconds = time.monotonic() - started_s
    return replace(outcome, error=error, without_engine=without_engine, seconds=seconds)


def _serving_before(plan: ServingPlan | None, built: BuildResult) -> tuple[str, float]:
    """Return description and throughput of the file that serves before the build; "" if it was this engine."""
    if plan is None:
        return "nothing", 0.0
    if plan.stamp is not None and plan.stamp.key == built.key:
        return "", 0.0
    return current_serving_text(plan), serving_rows_per_s(plan, built)


def _publish(
    project: Project, options: argparse.Namespace, built: BuildResult, store: Store, requested: str, forced: bool
) -> Path | None:
    """Put the engine beside the model, or into the state folder if the version's folder is read-only.

    Returns:
        The folder, if it is not the version's folder.

    Raises:
        BuildError: neither folder can be written, or the engine is no longer in the store.
    """
    overridden = bool(options.precision) and options.precision != read_spec(project.config).precision
    entry = store.find(built.key)
    if entry is None:
        raise BuildError("the engine was removed from the store meanwhile: build it again")
    stamp = make_stamp(built, entry, project, requested, overridden, forced)
    folder = publishing_folder(project, options.state_dir)
    publish(entry.path, folder, stamp)
    # The build has run the engine, so a server with this state folder loads it at once.
    tried = TriedFiles(options.state_dir)
    tried.write(tried.key(stamp.artefact_sha256, stamp.machine, project.config.parameters), project.name)
    return None if folder == project.version_folder else folder


def _prove_batches(
    project: Project, built: BuildResult, target: Target, state: Path, store: Store, report: Report
) -> str:
    """Prove the batches of the published engine; return the result, with the first layer if only the engine is wrong."""
    if target.name != "tensorrt" and keeps_rows_apart(project.config, read_signature(built.path, built.path.name)):
        return ""
    report(1.0, "proving batches")
    folder = project.folder.path
    order = {"models": [[project.name, str(folder), str(folder.parent)]], "state_dir": str(state.expanduser())}
    order |= {"environments_dir": "", "model_keys_file": ""}
    child = subprocess.run(_TRIAL_LOAD, input=json.dumps(order), capture_output=True, text=True, check=False)
    if child.returncode:
        return f"its batches are not proven: the process of the proof ended with status {child.returncode}"
    batches = json.loads(child.stdout)["batches"].get(str(project.version), {})
    verified, faults, reason = (batches.get(name) for name in ("verified_batches", "faults", "reason"))
    if not reason:
        return f"{plural(len(verified), 'batch size')} proven, up to {verified[-1]} rows" if verified else ""
    text = f"not all batches are proven ({batches['state']}): {reason}"
    if batches["state"] == "limited" and faults:
        report(1.0, "searching the layer")
        rows, data = min(map(int, faults)), open_data(project, built.spec)
        try:
            text += f"; {batch_layer_text(first_batch_layer(project, built.spec, target, store, data, rows, silent))}"
        except HeadraceError as error:
            text += f"; its layer was not found: {error}"
    return text


def _fp32_rows_per_s(project: Project, built: BuildResult, target: Target, store: Store) -> float:
    """Return the throughput of FP32 on the target: its FP32 engine, or `model.onnx` on ONNX Runtime; 0 if unknown."""
    fp32 = find_fp32_engine(project, built.spec, target, store)
    if fp32 is not None:
        return fp32.rows_per_s
    baseline = built.baseline if target.name == "onnxruntime" else None
    return 0.0 if baseline is None else baseline.rows_per_s


_DEVICES = {"onnxruntime": "the CPU", "onnxruntime_cuda": "the GPU", "tensorrt": "the GPU"}
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


def serving_text(built: BuildResult) -> str:
    """Describe the runtime that serves a built engine, e.g. "TensorRT FP16 on the GPU (NVIDIA H200)"."""
    target, device = built.machine.target, built.machine.device
    device_text = f"{_DEVICES[target]} ({device})" if target == "tensorrt" else _DEVICES[target]
    return f"{LIBRARIES[target]} {built.spec.precision.upper()} on {device_text}"


def current_serving_text(plan: ServingPlan) -> str:
    """Describe the file and runtime that serve now, e.g. "model.onnx, ONNX Runtime on the CPU"."""
    what = plan.file.name if plan.stamp is None else f"the {plan.stamp.precision.upper()} engine"
    return f"{what}, {LIBRARIES[plan.runtime]} on {_DEVICES[plan.runtime]}"


def serving_rows_per_s(plan: ServingPlan, built: BuildResult) -> float:
    """Return the throughput of the file that serves: from its stamp, or from the build's baseline; 0 if unknown."""
    if plan.stamp is not None:
        return max((timing.rows_per_s for timing in plan.stamp.timings), default=0.0)
    if plan.runtime == "onnxruntime" and built.baseline is not None:
        return built.baseline.rows_per_s
    return 0.0


def without_engine_text(expected: Forecast) -> str:
    """Describe what a server does after a failed build, e.g. "served without it: model.onnx, ONNX Runtime on the CPU".

    Args:
        expected: the forecast for the engine; "" is returned if it would not be served in any case.
    """
    if expected.refusal or expected.not_served:
        return ""
    plan = expected.current
    if plan is None:
        return f"not served without it: {expected.problem}"
    other = f"; {_second_runtime_problem(plan)}" if plan.build and plan.cuda_problem else ""
    return f"served without it: {current_serving_text(plan)}{other}"


def _second_runtime_problem(plan: ServingPlan) -> str:
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
    return None, f"{reason}; {_second_runtime_problem(plan)}" if plan.cuda_problem else reason


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


_HEADINGS = (
    Heading("model"),
    Heading("engine", wraps=True),
    Heading("", wraps=True),
    Heading("top-1", number=True, rank=1),
    Heading("accuracy", number=True, rank=2),
    Heading("rows/s", number=True, rank=3),
    Heading("size", number=True, rank=4),
    Heading("time", number=True, rank=5),
)


def show_outcomes(console: Console, errors: Console, outcomes: Sequence[BuildOutcome]) -> None:
    """Print a table of built engines with speed-up and runtime; print failures with their reasons to `errors`."""
    built = [outcome for outcome in outcomes if outcome.built is not None]
    for machine in dict.fromkeys(outcome.built.machine for outcome in built if outcome.built is not None):
        rows = [_row(outcome) for outcome in built if outcome.built is not None and outcome.built.machine == machine]
        console.print(narrow_table(f"Engines for {machine}", _HEADINGS, rows, console.width))
    for outcome in built:
        if outcome.built is not None and outcome.built.plugins is not None:
            show_plugins(console, outcome.name, outcome.built.plugins)
    _print_served(console, outcomes)
    for outcome in outcomes:
        if outcome.without_engine:
            print_text(console, f"{printable(outcome.name)}: {printable(outcome.without_engine)}")
    for outcome in outcomes:
        name = f"{outcome.name}: " if outcome.name else ""
        if outcome.error:
            verb = "was not published" if outcome.built else "was not built"
            # Some errors begin with the name of the model.
            text = outcome.error.removeprefix(name)
            style, head = "red", f"{outcome.name} {verb}: " if name else ""
        elif outcome.not_served:
            style, head, text = "yellow", f"{name}built, but not served: ", outcome.not_served
        elif outcome.forced and outcome.built is not None:
            style, head, text = "yellow", f"{name}published with a mark: ", "; ".join(outcome.built.refusal)
        else:
            continue
        errors.print(Text.assemble((head, style), text), soft_wrap=True)


def _print_served(console: Console, outcomes: Sequence[BuildOutcome]) -> None:
    """Print speed-up and runtime of each published engine, and the command that makes a running server load it."""
    published = [outcome for outcome in outcomes if outcome.published and outcome.built is not None]
    for outcome in published:
        for line in filter(None, (speed_text(outcome), *_served_lines(outcome))):
            print_text(console, f"{printable(outcome.name)}: {printable(line)}")
    served = [outcome for outcome in published if outcome.repository and not outcome.not_served]
    for repository in dict.fromkeys(outcome.repository for outcome in served):
        names = [outcome.name for outcome in served if outcome.repository == repository]
        text = pickup_text(names[0] if len(names) == 1 else "MODEL", repository)
        print_text(console, text)


def _served_lines(outcome: BuildOutcome) -> list[str]:
    """Return lines on the runtime after the build, and on obstacles."""
    assert outcome.built is not None
    lines = [] if outcome.not_served else [f"serves from now on: {serving_text(outcome.built)}"]
    if outcome.built.spec.method:
        lines.append(f"{outcome.built.spec.precision}: {REMARKS[outcome.built.spec.method]}")
    lines += filter(None, (outcome.batches, outcome.advice))
    if outcome.state_folder is not None:
        reason = "the model's folder cannot be written; a server with this --state-dir takes it from there"
        lines.append(f"published in {outcome.state_folder}: {reason}")
    return lines


def speed_text(outcome: BuildOutcome) -> str:
    """Return the speed-up over the serving file and over FP32; "" if neither was measured."""
    built = outcome.built
    assert built is not None
    parts = []
    if outcome.current_rows_per_s:
        current = f"{outcome.current}, {rate(outcome.current_rows_per_s)} rows/s"
        parts.append(f"{_times(built.rows_per_s, outcome.current_rows_per_s)} as fast as what serves now ({current})")
    elif outcome.current:
        parts.append(f"{rate(built.rows_per_s)} rows/s; {outcome.current} serves now")
    if built.spec.precision != "fp32":
        fp32 = outcome.fp32_rows_per_s
        measure = f"FP32 not measured: `headrace compare {outcome.name}` does"
        parts.append(f"{_times(built.rows_per_s, fp32)} as fast as FP32" if fp32 else measure)
    if built.sparsity is not None:
        speed_up = built.sparsity["dense_us"] / built.sparsity["sparse_us"]
        result = "kept" if built.sparse_weights else "not kept"
        parts.append(
            f"sparse kernels {result}: {speed_up:.2f} times as fast at {plural(built.sparsity['rows'], 'row')}"
        )
    if built.refinement:
        layers = [name for result in built.refinement if result["in_float"] for name in result["nodes"]]
        measured = plural(len(built.refinement), "pattern")
        parts.append(f"of {measured} of long layers, faster in floating point: {', '.join(layers) or 'none'}")
    return "; ".join(parts)


def _times(faster: float, slower: float) -> str:
    ratio = faster / slower
    return f"{ratio:,.0f} times" if ratio >= 20 else f"{ratio:.2f} times"


def _row(outcome: BuildOutcome) -> list[str]:
    built = outcome.built
    assert built is not None
    accuracy = built.accuracy
    if outcome.published:
        done = "not served" if outcome.not_served else "published, marked" if outcome.forced else "published"
    else:
        done = "refused" if built.refusal else "not published"
    float_nodes_text = f", {plural(len(built.float_nodes), 'node')} kept" if built.float_nodes else ""
    return [
        printable(outcome.name),
        f"{built.spec.precision}{', 2:4 sparse' if built.sparse_weights else ''}{float_nodes_text}",
        done,
        "" if accuracy is None or accuracy.top1_agreement is None else f"{accuracy.top1_agreement:.1%}",
        "" if accuracy is None or accuracy.accuracy is None else f"{accuracy.accuracy:.1%}",
        rate(built.rows_per_s),
        size(built.size_bytes),
        "stored" if built.cached else f"{outcome.seconds:.1f} s",
    ]


# Prints the measurements behind the plug-in layers of an engine.

_PLUGIN_HEADINGS = (
    Heading("layer"),
    Heading("shape", wraps=True, rank=3),
    Heading("TensorRT us", number=True),
    Heading("our kernel us", number=True, rank=1),
    Heading("plug-in us", number=True),
    Heading("ratio", number=True),
    Heading("kernel", wraps=True, rank=2),
    Heading("chosen"),
    Heading("", wraps=True, rank=4),
)


def show_plugins(console: Console, name: str, report: Mapping[str, Any]) -> None:
    """Print a table of the measured convolutions, and the result.

    Args:
        console: the table goes here.
        name: name of the model.
        report: `PluginReport` as plain data.
    """
    rows = [
        [
            printable(row["layer"]),
            row["shape"],
            _us(row["tensorrt_us"]),
            _us(row["kernel_us"]),
            _us(row["plugin_us"]),
            f"{row['ratio']:.2f}" if row["ratio"] else "",
            row["algorithm"],
            "yes" if row["kept"] else "no",
            row["reason"],
        ]
        for row in report["table"]
    ]
    if rows:
        console.print(
            narrow_table(f"Convolutions of {name}, {report['rows']} rows", _PLUGIN_HEADINGS, rows, console.width)
        )
    if report["plugin_engine_us"]:
        error = f"{report['speedup']:.3f} +- {report['error']:.3f} times as fast"
        times = f"{report['engine_us']:.1f} us without plug-ins, {report['plugin_engine_us']:.1f} us with: {error}"
        print_text(console, f"{printable(name)}: {times}")
    print_text(console, f"{printable(name)}: {report['verdict']}")


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us else ""
