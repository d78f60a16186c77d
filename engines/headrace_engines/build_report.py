"""Text of `headrace build`: the tables and lines of its results, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config.machine import LIBRARIES
from headrace.config.serving_plan import ServingPlan, requests_tensorrt
from headrace_reports.command_line import pickup_text, plural, printable
from rich.console import Console
from rich.text import Text

from headrace_engines.build import BuildResult
from headrace_engines.build_publication import Published
from headrace_engines.build_request import BuildRequest, second_runtime_problem
from headrace_engines.precision.methods import REMARKS
from headrace_engines.report import Heading, narrow_table, print_text, rate, save_json, size

# Two timings of 0.3 s of one file differ by up to 15 % on a machine with other load.
_SLOWER = 0.85
_DEVICES = {"onnxruntime": "the CPU", "onnxruntime_cuda": "the GPU", "tensorrt": "the GPU"}


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """Result for one model, with the values of the stages that it has passed.

    Attributes:
        name: name of the model.
        request: None if there is none.
        built: the artefact; None if there is none.
        published: None if the artefact is not published.
        error: reason of the first stage that failed; "" without an error.
        seconds: duration of this call.
        is_slower: the error is that the engine is slower than what serves now.
    """

    name: str
    request: BuildRequest | None = None
    built: BuildResult | None = None
    published: Published | None = None
    error: str = ""
    seconds: float = 0.0
    is_slower: bool = False

    @property
    def not_served(self) -> str:
        """Reason why a server does not use the engine, and the remedy; "" if it does."""
        return self.request.expected.not_served if self.request else ""

    @property
    def repository(self) -> str:
        """Folder that holds the model."""
        return str(self.request.project.folder.path.parent) if self.request else ""


def write_outcomes(path: Path, outcomes: Sequence[BuildOutcome]) -> None:
    """Write the outcomes as JSON.

    Raises:
        BuildError: the file cannot be written.
    """
    models = [
        {
            "model": outcome.name,
            "error": outcome.error,
            "published": outcome.published is not None,
            "seconds": round(outcome.seconds, 2),
            "precision": outcome.built.spec.precision if outcome.built else None,
            "machine": str(outcome.built.machine) if outcome.built else None,
            "timings": [asdict(timing) for timing in outcome.built.timings] if outcome.built else [],
            "plugins": outcome.built.plugins if outcome.built else None,
            "batches": outcome.published.batches if outcome.published else "",
        }
        for outcome in outcomes
    ]
    save_json(path, {"models": models})


def last_phase(outcome: BuildOutcome) -> str:
    """Return the last phase of a model's progress bar."""
    if outcome.error:
        return "failed"
    return "stored" if outcome.built is not None and outcome.built.cached else "built"


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
        if text := without_engine_text(outcome):
            print_text(console, f"{printable(outcome.name)}: {printable(text)}")
    for outcome in outcomes:
        name = f"{outcome.name}: " if outcome.name else ""
        if outcome.error:
            verb = "was not published" if outcome.built else "was not built"
            # Some errors begin with the name of the model.
            text = outcome.error.removeprefix(name)
            style, head = "red", f"{outcome.name} {verb}: " if name else ""
        elif outcome.not_served:
            style, head, text = "yellow", f"{name}built, but not served: ", outcome.not_served
        elif outcome.published is not None and outcome.built is not None and outcome.built.refusal:
            style, head, text = "yellow", f"{name}published with a mark: ", "; ".join(outcome.built.refusal)
        else:
            continue
        errors.print(Text.assemble((head, style), text), soft_wrap=True)


def _print_served(console: Console, outcomes: Sequence[BuildOutcome]) -> None:
    """Print speed-up and runtime of each published engine, and the command that makes a running server load it."""
    published = [outcome for outcome in outcomes if outcome.published is not None]
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
    published, advice = outcome.published, outcome.request.advice if outcome.request else ""
    assert published is not None
    lines += filter(None, (published.batches, advice))
    if published.state_folder is not None:
        reason = "the model's folder cannot be written; a server with this --state-dir takes it from there"
        lines.append(f"published in {published.state_folder}: {reason}")
    return lines


def speed_text(outcome: BuildOutcome) -> str:
    """Return the speed-up over the serving file and over FP32; "" if neither was measured."""
    built = outcome.built
    assert built is not None
    parts = []
    current, current_rows_per_s = _serving_before(outcome)
    if current_rows_per_s:
        parts.append(_beside_serving(built.rows_per_s, current, current_rows_per_s))
    elif current:
        parts.append(f"{rate(built.rows_per_s)} rows/s; {current} serves now")
    if built.spec.precision != "fp32":
        fp32 = outcome.published.fp32_rows_per_s if outcome.published else 0.0
        measure = f"FP32 not measured: `headrace compare {outcome.name}` does"
        parts.append(f"{_times(built.rows_per_s, fp32)} as fast as FP32" if fp32 else measure)
    if built.refinement:
        layers = [name for result in built.refinement if result["in_float"] for name in result["nodes"]]
        measured = plural(len(built.refinement), "pattern")
        parts.append(f"of {measured} of long layers, faster in floating point: {', '.join(layers) or 'none'}")
    return "; ".join(parts)


def _beside_serving(rows_per_s: float, current: str, current_rows_per_s: float) -> str:
    times = _times(rows_per_s, current_rows_per_s)
    return f"{times} as fast as what serves now ({current}, {rate(current_rows_per_s)} rows/s)"


def slower_text(outcome: BuildOutcome, in_turns: tuple[float, float] | None = None) -> str:
    """Return how much slower the engine is than what serves now; "" if it is not, or if a server would use no other file.

    Args:
        outcome: the build.
        in_turns: rows/s of the engine and of what serves, if they were timed in turns; else the figures of their builds count.
    """
    current, current_rows_per_s = _serving_before(outcome)
    if outcome.request is None or outcome.built is None or outcome.not_served:
        return ""
    if requests_tensorrt(outcome.request.project.config):
        return ""
    rows_per_s, current_rows_per_s = in_turns or (outcome.built.rows_per_s, current_rows_per_s)
    if rows_per_s >= _SLOWER * current_rows_per_s:
        return ""
    beside = _beside_serving(rows_per_s, current, current_rows_per_s)
    return f"it is {beside}: `headrace build {outcome.name} --publish-slower` publishes it"


def _times(faster: float, slower: float) -> str:
    ratio = faster / slower
    return f"{ratio:,.0f} times" if ratio >= 20 else f"{ratio:.2f} times"


def _row(outcome: BuildOutcome) -> list[str]:
    built = outcome.built
    assert built is not None
    accuracy = built.accuracy
    if outcome.published is not None:
        done = "not served" if outcome.not_served else "published, marked" if built.refusal else "published"
    else:
        done = "refused" if built.refusal else "not published"
    float_nodes_text = f", {plural(len(built.float_nodes), 'node')} kept" if built.float_nodes else ""
    return [
        printable(outcome.name),
        f"{built.spec.precision}{float_nodes_text}",
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


def without_engine_text(outcome: BuildOutcome) -> str:
    """Describe what a server does after a failed build, e.g. "served without it: model.onnx, ONNX Runtime on the CPU".

    Returns:
        "" if nothing failed, or if the engine would not be served in any case.
    """
    if not outcome.error or outcome.request is None or outcome.not_served:
        return ""
    expected = outcome.request.expected
    plan = expected.current
    if plan is None:
        return f"not served without it: {expected.problem}"
    other = f"; {second_runtime_problem(plan)}" if plan.build and plan.cuda_problem else ""
    return f"served without it: {current_serving_text(plan)}{other}"


def _serving_before(outcome: BuildOutcome) -> tuple[str, float]:
    """Return description and throughput of the file that serves before the build; "" if it was this engine."""
    if outcome.request is None or outcome.built is None:
        return "", 0.0
    plan = outcome.request.expected.current
    if plan is None:
        return "nothing", 0.0
    if plan.stamp is not None and plan.stamp.key == outcome.built.key:
        return "", 0.0
    return current_serving_text(plan), serving_rows_per_s(plan, outcome.built)
