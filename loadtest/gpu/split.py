"""`python -m loadtest.gpu.split`: models cut by `headrace split`, on two GPUs and on one.

ResNet-50 in FP16 with batches of 64 pictures on GPU 0, and a text encoder with 2 GB of weights in FP16. The same engines run
twice: part 1 on GPU 0 and part 2 on GPU 1, and both parts on GPU 0. Callers in this process keep whole batches in flight. The
latency bound is the p99 of one GPU where it first reaches 97 % of its best throughput; both layouts are compared within it.

Every figure is printed, and written to `OUT/split.jsonl`, as soon as it is there. Each part has a time limit and a process of
its own. Exit status: 0, 1 if a target is missed, or 2 if a part failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import headrace
import numpy as np
from headrace.core.errors import HeadraceError
from headrace.core.request import InferResponse
from headrace.core.tensor import ResidentRows, as_input

from loadtest.callers import Answered, Callers, CallersFailed
from loadtest.gpu import place
from loadtest.gpu.part_process import end_with_parent, name_package
from loadtest.gpu.split_models import BOUNDED, LAYOUTS, RESNET, TRANSFORMER, clear
from loadtest.protocol import Array
from loadtest.servers import ROOT

_TARGET = 1.8
_KNEE = 0.97
_CALLERS = (1, 2, 3, 4, 5, 6, 8)
_ROWS = {RESNET: 64, TRANSFORMER: 8}
_SMALL_ROWS = {RESNET: 8, TRANSFORMER: 1}
_LENGTH = 128
_SMALL_CALLERS = 48
_PARTS = (RESNET, TRANSFORMER, "budget")
_BUILD_S, _MEASURE_S, _BUDGET_S = 150.0, 60.0, 45.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, measure, print; return the exit status."""
    options = _parser().parse_args(arguments)
    end_with_parent() if options.measure else signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if options.measure:
        name_package(options.work)
        return _measure_process(options)
    output = FigureLog(options.output / "split.jsonl")
    output.report("machine", **place.describe(place.gpus()))
    with ExitStack() as stack:
        if options.work is None:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-split-"))
            options.work = Path(name)
        return _Session(options, output).run()


class _Session:
    """One run: builds beside each other, then each measurement alone on the GPUs."""

    def __init__(self, options: argparse.Namespace, output: FigureLog) -> None:
        self._options = options
        self._output = output
        self._failed = False
        self._missed = False

    def run(self) -> int:
        """Run all parts; return the exit status."""
        options = self._options
        options.work.mkdir(parents=True, exist_ok=True)
        name_package(options.work)
        if not options.keep:
            clear(options.work)
            self._build()
        for name in (RESNET, TRANSFORMER):
            if name in options.parts:
                self._compare(name)
        if "budget" in options.parts:
            # The whole is refused by its memory budget; the parts serve with the same one.
            self._process(TRANSFORMER, "whole", _BUDGET_S)
        return 2 if self._failed else int(self._missed)

    def _build(self) -> None:
        """Prepare the models at the same time, one on each GPU."""
        options = self._options
        names = {RESNET: 0, TRANSFORMER: 1}
        needed = set(options.parts) | ({TRANSFORMER} if "budget" in options.parts else set())
        builders = []
        for name, gpu in names.items():
            if name in needed:
                words = [name, "--work", str(options.work), "--gpu", str(gpu % options.gpus)]
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
                process.wait()
                status = -1
            ready = (options.work / f"{name}.ready").exists()
            if status or not ready:
                self._failed |= not ready
                reason = f"after {options.build_s:.0f} s" if status == -1 else f"with status {status}"
                self._output.report("build", of=name, ended=reason, parts_are_there=ready)

    def _compare(self, name: str) -> None:
        """Measure both layouts and compare them within the latency bound."""
        results = {layout: self._process(name, layout, _MEASURE_S) for layout in LAYOUTS}
        one, two = results["one"], results["two"]
        if not one or not two:
            return
        best = max(point["rows_per_s"] for point in one)
        knee = next(point for point in one if point["rows_per_s"] >= _KNEE * best)
        bound_ms = knee["p99_ms"]
        within = {layout: [p for p in points if p["p99_ms"] <= bound_ms] for layout, points in results.items()}
        rates = {layout: max((p["rows_per_s"] for p in points), default=0.0) for layout, points in within.items()}
        ratio = rates["two"] / rates["one"]
        self._missed |= ratio < _TARGET
        self._output.report(
            name,
            comparison="two GPUs over one",
            latency_bound_ms=bound_ms,
            one_gpu_rows_per_s=rates["one"],
            two_gpus_rows_per_s=rates["two"],
            ratio=round(ratio, 3),
            ratio_without_bound=round(max(p["rows_per_s"] for p in two) / best, 3),
            target=_TARGET,
            met=ratio >= _TARGET,
        )

    def _process(self, name: str, layout: str, limit_s: float) -> list[dict[str, Any]]:
        """Run one measurement in a process of its own; return its points of full batches."""
        options = self._options
        if not (options.work / f"{name}.ready").exists():
            return []
        words = ["--measure", f"{layout}:{name}", "--work", str(options.work), "--backend", options.backend]
        words += ["--seconds", str(options.seconds), "--rounds", str(options.rounds), "--output", str(options.output)]
        words += ["--width", str(options.width), "--callers", *map(str, options.callers)]
        command = [sys.executable, "-m", "loadtest.gpu.split", *words]
        points = []
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            signal_timer = _kill_after(process, limit_s)
            assert process.stdout is not None
            for line in process.stdout:
                if not line.startswith("{"):
                    print(line, end="", flush=True)
                    continue
                point = json.loads(line)
                self._output.report(name, layout=layout, **point)
                if point.get("load") == "whole batches":
                    points.append(point)
            status = process.wait()
            signal_timer.cancel()
        if status:
            self._failed = True
            self._output.report(name, layout=layout, failed=f"status {status}, limit {limit_s:.0f} s")
        return points


def _kill_after(process: subprocess.Popen[str], seconds: float) -> Any:
    import threading

    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    return timer


def _measure_process(options: argparse.Namespace) -> int:
    layout, _, name = options.measure.partition(":")
    measure = _refusal if layout == "whole" else _sweep
    try:
        asyncio.run(measure(options, layout, name))
    except (HeadraceError, CallersFailed) as error:
        _emit(failed=f"{type(error).__name__}: {error}"[:1500])
        return 1
    return 0


def _emit(**values: object) -> None:
    print(json.dumps({name: _rounded(value) for name, value in values.items()}), flush=True)


async def _sweep(options: argparse.Namespace, layout: str, name: str) -> None:
    """Measure the pipeline of one layout with more and more whole batches in flight, then with small requests."""
    repository = options.work / layout
    parts, pipeline = [f"{name}_part1", f"{name}_part2"], f"{name}_split"
    started_s = time.monotonic()
    async with headrace.Server(repository, models=[*parts, pipeline], state_dir=options.work / "state") as server:
        _emit(loaded_s=time.monotonic() - started_s)
        handles = [server.model(each)._lease() for each in (*parts, pipeline)]
        try:
            if options.backend == "tensorrt" and layout == "two":
                from headrace.cuda.peers import peer_copy

                _emit(copies_from_gpu_0_to_gpu_1=peer_copy(0, 1) is not None)
            await _check(options, server, name)
            for callers in options.callers:
                await _point(options, handles, name, _ROWS[name], callers, "whole batches")
            await _point(options, handles, name, _SMALL_ROWS[name], _SMALL_CALLERS, "small requests")
        finally:
            for handle in handles:
                handle.release()


async def _point(
    options: argparse.Namespace, handles: Sequence[Any], name: str, rows: int, callers: int, load: str
) -> None:
    *parts, pipeline = handles
    output = _output_of(pipeline.spec, rows)
    with _inputs(options, name, rows, pipeline.spec) as inputs:
        samples: list[Answered] = []
        before = [handle.recorder.totals() for handle in parts]
        for _ in range(options.rounds):
            requests = [dict(inputs) for _ in range(callers)]
            samples.append(await Callers(pipeline, requests, output).run(0.25, options.seconds))
        after = [handle.recorder.totals() for handle in parts]
    rates = [sample.per_s * rows for sample in samples]
    latencies = np.concatenate([np.asarray(sample.latencies_us) for sample in samples])
    batches = [
        round((b.rows - a.rows) / max(1, b.executions - a.executions), 2) for a, b in zip(before, after, strict=True)
    ]
    _emit(
        load=load,
        callers=callers,
        rows_a_request=rows,
        rows_per_s=float(median(rates)),
        lowest=min(rates),
        highest=max(rates),
        p50_ms=float(np.percentile(latencies, 50)) / 1e3,
        p99_ms=float(np.percentile(latencies, 99)) / 1e3,
        mean_batches=batches,
        cores=float(median(sample.cores for sample in samples)),
    )


def _output_of(spec: Any, rows: int) -> tuple[str, tuple[int, ...]]:
    (output,) = spec.outputs.values()
    return output.name, (rows, *output.shape[1:])


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
    from headrace.cuda.driver import CudaStream, current
    from headrace.cuda.memory import DeviceBuffer, PinnedBuffer, read_gpu, upload

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


async def _check(options: argparse.Namespace, server: headrace.Server, name: str) -> None:
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
    _emit(largest_difference_from_parts_alone=difference, finite=bool(np.isfinite(expected).all()))
    if not difference < 1e-2:
        raise CallersFailed(f"the pipeline's answer differs by {difference:.3g} of the largest value from its parts'")


async def _refusal(options: argparse.Namespace, layout: str, name: str) -> None:
    """Load the whole under its memory budget, which must fail; then the parts under the same budget, and run them."""
    if not (options.work / layout / name / "1" / "model.plan").is_file():
        _emit(whole="its plan was not built in time")
        return
    try:
        async with headrace.Server(options.work / layout, models=[name], state_dir=options.work / "state"):
            _emit(whole="served: the budget is too large for this test")
            return
    except HeadraceError as error:
        _emit(whole_is_refused=str(error)[:600])
    repository, pipeline = options.work / BOUNDED, f"{name}_split"
    models = [f"{name}_part1", f"{name}_part2", pipeline]
    async with headrace.Server(repository, models=models, state_dir=options.work / "state") as server:
        await _check(options, server, name)
        with _inputs(options, name, 1, server.model(pipeline).spec) as inputs:
            answer: InferResponse | dict[str, Array] = await server.model(pipeline).infer_async(inputs)
            _emit(parts_are_served=True, outputs={key: list(array.shape) for key, array in answer.items()})  # type: ignore[union-attr]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.split", description="A model over two GPUs.")
    add = parser.add_argument
    add("parts", nargs="*", default=list(_PARTS), metavar="PART", help=f"of {', '.join(_PARTS)} (all)")
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
    add("--measure", default="", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())


# Figures of a measurement, printed and kept as lines of JSON as soon as they are there.


class FigureLog:
    """Prints figures and appends them to a file as lines of JSON.

    Args:
        file: is continued; its folder is made.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._start_s = time.monotonic()

    def report(self, part: str, /, **values: object) -> None:
        """Print and write one figure; values of None are left out, fractions have five digits."""
        rounded = {name: _rounded(value) for name, value in values.items() if value is not None}
        text = ", ".join(f"{name} {value}" for name, value in rounded.items())
        print(f"[{time.monotonic() - self._start_s:5.1f} s] {part}: {text}", flush=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"part": part, **rounded}) + "\n")


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value
