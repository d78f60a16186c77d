"""`headrace bisect`: finds the first layer of a lower precision that deviates from FP32, and the layer to keep in FP32."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headrace.config.optimization_config import PRECISIONS
from headrace_reports.command_line import plural, printable
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_engines.commands import add_cache, add_model
from headrace_engines.errors import CallError
from headrace_engines.layers.bisection import Bisection, bisect, first_batch_layer
from headrace_engines.layers.comparison import SAMPLES
from headrace_engines.layers.differences import TensorDifference
from headrace_engines.layers.report import batch_layer_text, cosine_text, figures, layer_text
from headrace_engines.progress import silent
from headrace_engines.project import BuildSpec, open_data, open_project, read_spec
from headrace_engines.report import BuildDisplay, print_text, save_json
from headrace_engines.store import Store
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Target

FORMAT = 1
_LOWER = tuple(precision for precision in PRECISIONS if precision not in ("fp32", "best"))
_ALL = ("fp32", *_LOWER)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `bisect`."""
    add = parser.add_argument
    add_model(parser)
    add_cache(parser)
    default = "that of the configuration; for fp32 int8 with calibration samples, else fp16"
    text = f"precision, of {', '.join(_LOWER)} (default: {default}), or fp32 with --rows"
    add("--precision", choices=_ALL, metavar="P", help=text)
    text = "find the first layer whose rows have other values in a batch of N rows than alone, in the same precision"
    add("--rows", type=int, default=0, metavar="N", help=text)
    add("--bound", type=float, metavar="C", help="smallest cosine that is no deviation (default: accuracy.min_cosine)")
    add("--samples", type=int, default=SAMPLES, metavar="N", help=f"number of held-out samples ({SAMPLES})")
    text = "do not search for the layer whose higher precision repairs the outputs"
    add("--no-repair", action="store_true", help=text)
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Search one model and return 0, also if a layer deviates.

    Raises:
        BuildError: the model or the options are invalid, or the model cannot be lowered or run.
    """
    if options.samples < 1:
        raise CallError(f"--samples is {options.samples}: write a number from 1 on")
    if options.rows < 0 or options.rows == 1:
        raise CallError(f"--rows is {options.rows}: write a number from 2 on")
    if options.bound is not None and not 0 < options.bound <= 1:
        raise CallError(f"--bound is {options.bound:g}: write a cosine above 0, 1 at most")
    project = open_project(options.model, options.model_repository, options.version)
    target = choose_target(options.target)
    spec = read_spec(project.config)
    spec = spec.at(options.precision or _default_precision(spec))
    if refused := target.refuses(spec.precision):
        raise CallError(f"{spec.precision} does not run on this machine: {refused}")
    data = open_data(project, spec)
    data = replace(data, held_out=data.held_out.head(options.samples))
    if options.rows:
        layer = first_batch_layer(project, spec, target, Store(options.cache), data, options.rows, silent)
        print_text(
            console, f"Batches of {options.rows} rows in {spec.precision}: {printable(batch_layer_text(layer))}."
        )
        return 0
    bound = spec.bar.min_cosine if options.bound is None else options.bound
    with BuildDisplay(console, [project.name]) as display:
        report = display.report(project.name)
        result = bisect(
            project, spec, target, Store(options.cache), data, bound, report, with_repairs=not options.no_repair
        )
        display.finish(project.name, "searched")
    head = f"{project.name} {project.version} in {spec.precision} on {target.describe()}, {data.held_out.origin}"
    print_text(console, printable(head), "bold")
    show(console, result, spec)
    if options.json is not None:
        document = document_of(result, spec, target) | {"model": project.name, "version": project.version}
        save_json(options.json, document)
        print_text(console, f"Everything is in {options.json}.")
    return 0


def _default_precision(spec: BuildSpec) -> str:
    if spec.precision in _LOWER:
        return spec.precision
    return "int8" if spec.calibration.data else "fp16"


def higher_bound(cosine: float) -> str:
    """Return a bound between a cosine and 1, as the option takes it; "" if there is none in FP32."""
    distance = 1.0 - cosine
    if not 1e-12 < distance <= 2.0:
        return ""
    digits = max(math.ceil(-math.log10(distance)) + 1, 2)
    return f"{1.0 - distance / 2:.{digits}f}"


def show(console: Console, result: Bisection, spec: BuildSpec) -> None:
    """Print the layer with its tensors, the effect of single layers, and the lines of a configuration that repair it."""
    cosine = cosine_text(result.outputs.cosine)
    if result.layer is None or result.after is None:
        bound = cosine_text(result.bound)
        text = f"Output {result.output} has cosine {cosine} with FP32, the bound is {bound}: no output deviates."
        print_text(console, printable(text))
        if bound_option := higher_bound(result.outputs.cosine):
            print_text(console, f"The layer that costs most is searched with a higher bound: --bound {bound_option}.")
        return
    layer = result.layer
    text = f"Output {result.output} has cosine {cosine} with FP32, below the bound of {cosine_text(result.bound)}."
    print_text(console, printable(text))
    print_text(console, printable(f"First layer that deviates: {layer_text(layer)}"), "bold")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for heading in ("cosine", "relative", "max", "mean"):
        table.add_column(heading, justify="right")
    for name, difference in result.before.items():
        table.add_row(Text(printable(f"before: {name}")), *figures(difference))
    table.add_row(Text(printable(f"after: {layer.tensor}")), *figures(result.after))
    if result.alone is not None:
        table.add_row(Text("this layer alone, fed with FP32"), *figures(result.alone))
    console.print(table)
    print_text(console, _origin_text(result))
    if result.unchecked:
        text = f"An earlier layer may deviate too, its tensors cannot be read: {result.unchecked}."
        print_text(console, printable(text), "yellow")
    _show_repairs(console, result, spec)
    print_text(
        console,
        f"{plural(result.probes, 'part')} of the model run, {plural(result.layers, 'layer')} in {spec.precision}.",
    )


def _origin_text(result: Bisection) -> str:
    if result.alone is None:
        return "The layer cannot be run alone: whether the error is its own is not known."
    if result.alone.cosine < result.bound:
        return "The error is the layer's own: it deviates also with FP32 inputs."
    return "The error adds up: fed with FP32 inputs the layer holds the bound, the layers before it lose the rest."


def _show_repairs(console: Console, result: Bisection, spec: BuildSpec) -> None:
    if not result.repairs:
        return
    higher = "floating point" if spec.quantized else "FP32"
    print_text(console, f"Cosine of the output with one layer in {higher}:")
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    for repair in result.repairs:
        before, after = (cosine_text(one.cosine) for one in (result.outputs, repair.difference))
        table.add_row(Text(printable(repair.node)), before, after)
    console.print(table)
    best = result.repair
    if best is None:
        print_text(console, f"No single layer in {higher} improves the output: use a higher precision.")
        return
    verb = "repairs the output" if result.is_repaired else "helps most, but does not reach the bound alone"
    print_text(console, printable(f"{best.node} in {higher} {verb}. In config.yaml:"))
    for line in override_text(best.node, spec).splitlines():
        print_text(console, f"  {printable(line)}")


def override_text(node: str, spec: BuildSpec) -> str:
    """Return the lines of a config.yaml that keep a node in the higher precision, besides those that it keeps already."""
    if spec.quantized:
        names = json.dumps([*spec.calibration.keep, node])
        return f"optimization:\n  calibration:\n    keep: {names}"
    return f"optimization:\n  keep_fp32: {json.dumps([*spec.keep_fp32, node])}"


def document_of(result: Bisection, spec: BuildSpec, target: Target) -> dict[str, Any]:
    """Return the result as JSON data."""

    def figures_of(difference: TensorDifference | None) -> dict[str, Any] | None:
        return None if difference is None else difference.to_json()

    best = result.repair
    return {
        "format": FORMAT,
        "precision": spec.precision,
        "machine": asdict(target.describe()),
        "bound": result.bound,
        "output": {"name": result.output, "difference": figures_of(result.outputs)},
        "layer": None if result.layer is None else asdict(result.layer),
        "before": {name: figures_of(difference) for name, difference in result.before.items()},
        "after": figures_of(result.after),
        "alone": figures_of(result.alone),
        "unchecked": result.unchecked,
        "repairs": [{"node": one.node, "difference": figures_of(one.difference)} for one in result.repairs],
        "repaired": result.is_repaired,
        "override": None if best is None else override_text(best.node, spec),
        "probes": result.probes,
        "layers": result.layers,
    }
