"""`headrace lab overlap`: preprocess, copy, run and postprocess of a model's engine, with and without overlap."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
from headrace.runtimes.cuda.devices import Nvml
from headrace_engines.build import BuildResult, build_engine, sample_batch
from headrace_engines.commands import add_cache, add_repository, add_version
from headrace_engines.errors import BuildError, CallError
from headrace_engines.progress import part
from headrace_engines.project import Project, open_data, open_project, read_spec
from headrace_engines.report import BuildDisplay, Heading, narrow_table, print_text, save, save_json
from headrace_engines.store import Store
from headrace_engines.targets.base import Array
from headrace_engines.targets.tensorrt.api import load
from headrace_engines.targets.tensorrt.pipelined import PipelinedPlan
from headrace_engines.targets.tensorrt.target import TensorRtTarget, available
from rich.console import Console

from headrace_lab.overlap import OverlapLab, OverlapResult, PixelStage, TensorStage
from headrace_lab.overlap_page import HEADINGS, overlap_advice, overlap_cells, overlap_page

FORMAT = 1
_DEVICE = 0
_PRECISIONS = ("fp32", "fp16", "bf16", "int8", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lab overlap`."""
    parser.add_argument("model", metavar="MODEL", help="name of a model in the repository, or its folder")
    add_version(parser)
    add_repository(parser)
    add_cache(parser)
    text = f"of {', '.join(_PRECISIONS)} (default: the configuration's)"
    parser.add_argument("--precision", choices=_PRECISIONS, metavar="P", help=text)
    parser.add_argument("--batch", type=int, metavar="N", help="rows of a batch (default: the tuned one)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="duration of each measurement (2)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with both timelines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure both modes, print a table and advice, and return 0.

    Raises:
        BuildError: there is no GPU or no TensorRT, or the engine cannot be built or run.
    """
    if not 0 < options.seconds <= 600:
        raise CallError(f"--seconds is {options.seconds:g}: write a number above 0, 600 at most")
    project = open_project(options.model, options.model_repository, options.version)
    if missing := available(_DEVICE):
        raise BuildError(f"the overlap of GPU stages cannot be measured: {missing}")
    spec = read_spec(project.config)
    spec = spec.at(options.precision or ("fp32" if spec.precision == "best" else spec.precision))
    rows = _rows(options.batch, project, spec.profiles[0].rows)
    target = TensorRtTarget(_DEVICE)
    with BuildDisplay(console, [project.name]) as display:
        report = display.report(project.name)
        built = build_engine(project, spec, target, Store(options.cache), part(report, 0.0, 0.8))
        batch = sample_batch(open_data(project, spec), rows, project)
        report(0.8, "without overlap")
        results = measure(built, batch, host_stage(project, batch), options.seconds)
        display.finish(project.name, "measured")
    advice = overlap_advice(results[0], results[1], spec.precision)
    title = f"{project.name} {project.version} in {spec.precision}, {rows} rows: overlap of stages"
    show(console, f"{title}, on {built.machine}", results, advice)
    if options.html is not None:
        save(options.html, overlap_page(title, str(built.machine), results, advice))
        print_text(console, f"The page is in {options.html}.")
    if options.json is not None:
        document = {"format": FORMAT, "model": project.name, "version": project.version, "precision": spec.precision}
        save_json(options.json, document | {"results": [result.to_json() for result in results], "advice": advice})
        print_text(console, f"Everything is in {options.json}.")
    return 0


def _rows(option: int | None, project: Project, profile: tuple[int, int, int]) -> int:
    if not project.batched:
        if option not in (None, 1):
            raise CallError(f"--batch is {option}, but {project.name} has no batch dimension: leave --batch out")
        return 1
    smallest, tuned, largest = profile
    rows = tuned if option is None else option
    if not smallest <= rows <= largest:
        raise CallError(f"--batch is {rows}, {project.name} takes {smallest} to {largest} rows: choose one of these")
    return rows


def host_stage(project: Project, batch: Mapping[str, Array]) -> TensorStage:
    """Return the work of the host: normalised pixels for a model with `preprocess`, else a copy of the inputs."""
    picture = project.config.preprocess
    name = (picture.input or next(iter(batch))) if picture is not None else ""
    if picture is None or name not in batch or batch[name].ndim != 4 or batch[name].dtype.kind != "f":
        return TensorStage(batch)
    mean, std = (np.asarray(values, np.float32) for values in (picture.mean, picture.std))
    return PixelStage(batch, name, mean, std, channels_first=picture.layout == "nchw")


def measure(built: BuildResult, batch: Mapping[str, Array], stage: TensorStage, seconds: float) -> list[OverlapResult]:
    """Return the measurements without and with overlap.

    Raises:
        BuildError: the engine cannot be loaded or fails.
    """
    with closing(PipelinedPlan(load(), built.path, _DEVICE)) as plan:
        lab = OverlapLab(plan, batch, stage, _DEVICE, Nvml())
        try:
            return [lab.measure(seconds, overlapped=overlapped) for overlapped in (False, True)]
        finally:
            lab.close()


def show(console: Console, title: str, results: list[OverlapResult], advice: list[str]) -> None:
    """Print one row for each mode, the state of the GPU, and the advice."""
    headings = [
        Heading(HEADINGS[0]),
        *(Heading(text, number=True, rank=rank) for rank, text in enumerate(HEADINGS[1:])),
    ]
    console.print(narrow_table(title, headings, [overlap_cells(result) for result in results], console.width))
    for result in results:
        mode = "with overlap" if result.overlapped else "without"
        print_text(console, f"{mode}: {result.load.text()}.")
    for line in advice:
        print_text(console, line)
