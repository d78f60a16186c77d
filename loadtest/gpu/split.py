"""`python -m loadtest.gpu.split`: models cut by `headrace split`, on two GPUs and on one.

ResNet-50 in FP16 with batches of 64 pictures on GPU 0, and a text encoder with 2 GB of weights in FP16. The same engines run
twice: part 1 on GPU 0 and part 2 on GPU 1, and both parts on GPU 0. Callers in this process keep whole batches in flight. The
latency bound is the p99 of one GPU where it first reaches 97 % of its best throughput; both layouts are compared within it.

The files in `OUT` are those of `loadtest.gpu`. Each layout has a time limit and a process of its own. Exit status: 0, 1 if a
target is missed, or 2 if a part failed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import headrace
import numpy as np
from headrace.core.errors import HeadraceError
from headrace.core.tensor import ResidentRows, as_input

from loadtest.bench.results import at_least
from loadtest.callers import Callers, CallersFailed
from loadtest.gpu import place
from loadtest.gpu.part_process import end_with_parent, name_package
from loadtest.gpu.report import Compare, Output, PartFindings, Reporter, missed
from loadtest.gpu.split_models import LAYOUTS, RESNET, TRANSFORMER, clear
from loadtest.gpu.watch import watch
from loadtest.protocol import Array
from loadtest.servers import ROOT

_TARGET = 1.8
_KNEE = 0.97
_CALLERS = (1, 2, 3, 4, 5, 6, 8)
_ROWS = {RESNET: 64, TRANSFORMER: 8}
_SMALL_ROWS = {RESNET: 8, TRANSFORMER: 1}
_LENGTH = 128
_SMALL_CALLERS = 48
_BUILD_S, _MEASURE_S = 150.0, 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure, print; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(words)
    if options.report_fd is not None:
        return _measure_process(options)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    output = Output(options.output, shlex.join(["python", "-m", "loadtest.gpu.split", *words]))
    output.machine |= place.describe(place.gpus())
    with ExitStack() as stack:
        if options.work is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-split-"))
            options.work = Path(name)
        options.work.mkdir(parents=True, exist_ok=True)
        name_package(options.work)
        if not options.keep:
            clear(options.work)
            _build(options, output)
        for name in options.models:
            _measure(options, output, name)
    return 2 if any(part.failure for part in output.parts) else int(missed(output.parts))


def _build(options: argparse.Namespace, output: Output) -> None:
    """Prepare the models at the same time, one on each GPU."""
    builders = []
    for number, name in enumerate(options.models):
        words = [name, "--work", str(options.work), "--gpu", str(number % options.gpus)]
        words += ["--backend", options.backend, "--rows", str(_ROWS[name])]
        words += ["--layers", str(options.layers), "--width", str(options.width), "--length", str(_LENGTH)]
        command = [sys.executable, "-m", "loadtest.gpu.split_models", *words]
        builders.append((name, subprocess.Popen(command, cwd=ROOT)))
    end_s = time.monotonic() + options.build_s
    for name, process in builders:
        try:
            status = process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status:
            output.say(f"the build of {name} has ended with status {status}")


def _measure(options: argparse.Namespace, output: Output, name: str) -> None:
    """Measure both layouts, each in a process of its own, and compare them within the latency bound."""
    findings = PartFindings(name, f"{_ROWS[name]} rows a batch, both parts on one GPU and on two")
    output.begin(findings)
    begun_s = time.monotonic()

    def on_message(kind: str, content: Any) -> None:
        findings.take(kind, content)
        if kind == "sample":
            output.figure(findings, findings.samples[-1])
        elif kind == "note":
            output.say(f"{name} | {content}")

    for layout in LAYOUTS:
        words = [name, "--layout", layout, "--work", str(options.work), "--backend", options.backend]
        words += ["--seconds", str(options.seconds), "--rounds", str(options.rounds)]
        words += ["--callers", *map(str, options.callers)]
        command = [sys.executable, "-m", "loadtest.gpu.split", *words]
        reason = watch(command, _MEASURE_S, output.log, on_message)
        findings.failure = findings.failure or reason
    if not findings.failure:
        compare_within_bound(findings)
    findings.seconds = round(time.monotonic() - begun_s, 1)
    output.part_ended(findings)


def compare_within_bound(findings: PartFindings) -> None:
    """Add the comparison of two GPUs with one: within the latency bound, and of the best rates."""
    rates, p99_ms = findings.medians("rows/s"), findings.medians("p99 ms")
    loads = {layout: [what for what in p99_ms if what.startswith(f"{layout}, ")] for layout in LAYOUTS}
    best = {layout: max(whats, key=rates.__getitem__) for layout, whats in loads.items()}
    knee = next(what for what in loads["one"] if rates[what] >= _KNEE * rates[best["one"]])
    within = {layout: [what for what in whats if p99_ms[what] <= p99_ms[knee]] for layout, whats in loads.items()}
    if not within["two"]:
        findings.failure = f"two GPUs exceed the latency bound of {p99_ms[knee]:.3g} ms at every load"
        return
    two, one = (max(within[layout], key=rates.__getitem__) for layout in ("two", "one"))
    label = f"two GPUs / one within {p99_ms[knee]:.3g} ms"
    for compare in (
        Compare(label, two, one, "rows/s", target=at_least(_TARGET)),
        Compare("two GPUs / one, best rates", best["two"], best["one"], "rows/s"),
    ):
        findings.take("compare", asdict(compare))


def _measure_process(options: argparse.Namespace) -> int:
    end_with_parent()
    name_package(options.work)
    reporter = Reporter(options.report_fd)
    (name,) = options.models
    try:
        asyncio.run(_sweep(options, name, reporter))
    except (HeadraceError, CallersFailed) as error:
        reporter.failure(f"{type(error).__name__}: {error}"[:1500])
        return 1
    return 0


async def _sweep(options: argparse.Namespace, name: str, reporter: Reporter) -> None:
    """Measure the pipeline of one layout with more and more whole batches in flight, then with small requests."""
    parts, pipeline = [f"{name}_part1", f"{name}_part2"], f"{name}_split"
    models, state = [*parts, pipeline], options.work / "state"
    async with headrace.Server(options.work / options.layout, models=models, state_dir=state) as server:
        handles = [server.model(each)._lease() for each in models]
        try:
            if options.backend == "tensorrt" and options.layout == "two":
                from headrace.runtimes.cuda.peers import peer_copy

                reporter.note(f"copies from GPU 0 to GPU 1: {peer_copy(0, 1) is not None}")
            await _check(server, name, reporter)
            for callers in options.callers:
                what = f"{options.layout}, {callers} in flight"
                await _point(options, handles, name, _ROWS[name], callers, what, reporter)
            what = f"small requests, {options.layout}"
            await _point(options, handles, name, _SMALL_ROWS[name], _SMALL_CALLERS, what, reporter)
        finally:
            for handle in handles:
                handle.release()


async def _point(
    options: argparse.Namespace,
    handles: Sequence[Any],
    name: str,
    rows: int,
    callers: int,
    what: str,
    reporter: Reporter,
) -> None:
    *parts, pipeline = handles
    (output,) = pipeline.spec.outputs.values()
    with _inputs(options, name, rows, pipeline.spec) as inputs:
        for number in range(options.rounds):
            before = [handle.recorder.totals() for handle in parts]
            requests = [dict(inputs) for _ in range(callers)]
            load = Callers(pipeline, requests, (output.name, (rows, *output.shape[1:])))
            sample = await load.run(0.25, options.seconds)
            after = [handle.recorder.totals() for handle in parts]
            batches = ", ".join(
                f"{(b.rows - a.rows) / max(1, b.executions - a.executions):.2f}"
                for a, b in zip(before, after, strict=True)
            )
            cores = round(sample.cores, 2)
            reporter.sample(what, "rows/s", sample.per_s * rows, number, mean_batches=batches, cores=cores)
            for percent in (50, 99):
                reporter.sample(what, f"p{percent} ms", sample.percentile_us(percent) / 1e3, number)


@contextmanager
def _inputs(options: argparse.Namespace, name: str, rows: int, spec: Any) -> Any:
    """Yield the inputs of a request: pictures in the memory of GPU 0, token ids in the host's."""
    (tensor,) = spec.inputs.values()
    random = np.random.default_rng(3)
    if name == TRANSFORMER:
        yield {tensor.name: random.integers(0, 1000, (rows, *tensor.shape[1:])).astype(np.int64)}
        return
    pictures = random.standard_normal((rows, *tensor.shape[1:]), np.float32)
    if options.backend != "tensorrt":
        yield {tensor.name: pictures}
        return
    from headrace.runtimes.cuda.driver import CudaStream, current
    from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, read_gpu, upload

    staged, block = PinnedBuffer(), DeviceBuffer()
    with current(0):
        staged.reserve(pictures.nbytes)
        block.reserve(pictures.nbytes)
        view = staged.view(pictures.shape, pictures.dtype)
        view[:] = pictures
        stream = CudaStream()
        upload(block, view, stream)
        stream.synchronize()
        del stream
    shape = tuple(pictures.shape)
    yield {tensor.name: as_input(ResidentRows(block.address, 0, pictures.dtype, shape, block, partial(read_gpu, 0)))}
    with current(0):
        block.free()
        staged.free()


async def _check(server: headrace.Server, name: str, reporter: Reporter) -> None:
    """Compare the pipeline with its parts one after the other, whose tensors pass through the host."""
    pipeline = server.model(f"{name}_split")
    (tensor,) = pipeline.spec.inputs.values()
    (output,) = pipeline.spec.outputs
    random = np.random.default_rng(5)
    rows, shape = _SMALL_ROWS[name] + 1, tensor.shape[1:]
    values: Array = (
        random.integers(0, 1000, (rows, *shape)).astype(np.int64)
        if name == TRANSFORMER
        else random.standard_normal((rows, *shape), np.float32)
    )
    joined = (await pipeline.infer_async({tensor.name: values}))[output]
    crossing: Mapping[str, Array] = {tensor.name: values}
    for number in (1, 2):
        model = server.model(f"{name}_part{number}")
        read = {key: array for key, array in crossing.items() if key in model.spec.inputs}
        crossing = {**crossing, **await model.infer_async(read)}
    expected = crossing[output].astype(np.float32)
    difference = float(np.abs(joined.astype(np.float32) - expected).max() / (np.abs(expected).max() or 1.0))
    reporter.note(f"the largest difference from the parts alone is {difference:.3g} of the largest value")
    if not difference < 1e-2:
        raise CallersFailed(f"the pipeline's answer differs by {difference:.3g} of the largest value from its parts'")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.split", description="A model over two GPUs.")
    add = parser.add_argument
    add("models", nargs="*", default=list(_ROWS), metavar="MODEL", help=f"of {', '.join(_ROWS)} (all)")
    add("--output", type=Path, default=Path("loadtest/results/split"), metavar="DIR", help="(%(default)s)")
    add("--work", type=Path, metavar="DIR", help="models and engines (a temporary folder)")
    add("--keep", action="store_true", help="use the models in --work as they are")
    add("--seconds", type=float, default=0.7, metavar="S", help="of a sample (%(default)s)")
    add("--rounds", type=int, default=2, metavar="N", help="samples of each point (%(default)s)")
    add("--callers", type=int, nargs="+", default=list(_CALLERS), metavar="N", help="batches in flight")
    add("--build-s", type=float, default=_BUILD_S, metavar="S", help="longest duration of the builds (%(default)s)")
    add("--gpus", type=int, default=2, metavar="N", help="GPUs that build (%(default)s)")
    add("--layers", type=int, default=20, metavar="N", help="of the transformer (%(default)s)")
    add("--width", type=int, default=2048, metavar="N", help="of the transformer (%(default)s: 100 MB a layer)")
    add("--backend", choices=("tensorrt", "onnxruntime"), default="tensorrt", help="onnxruntime: try it on a CPU")
    add("--layout", choices=tuple(LAYOUTS), help=argparse.SUPPRESS)
    add("--report-fd", type=int, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
