"""`headrace lab memory`: cost of GPU memory per request, allocated each time, from a pool, and preallocated."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.runtimes.cuda import devices
from headrace.runtimes.cuda.devices import Nvml
from headrace_engines.errors import BuildError, CallError
from headrace_engines.report import BuildDisplay, Heading, narrow_table, print_text, rate, save_json, size
from rich.console import Console

from headrace_lab.memory import STRATEGIES, MemoryResult, measure_memory, memory_advice

FORMAT = 1
_INSTANCES = "1,8,64"
# A picture of 224 x 224 in FP32, and scores of 1000 classes.
_INPUT_BYTES, _OUTPUT_BYTES = 3 * 224 * 224 * 4, 4000
# Bytes of an FP32 value over those of an 8-bit one.
_SMALLER = 4
_HEADINGS = (
    Heading("memory"),
    Heading("instances", number=True),
    Heading("requests/s", number=True),
    Heading("request", number=True, rank=1),
    Heading("p99", number=True, rank=2),
    Heading("take and return", number=True),
    Heading("p99", number=True, rank=3),
    Heading("held", number=True, rank=4),
    Heading("peak", number=True, rank=5),
    Heading("mJ/request", number=True, rank=6),
)
_NAMES = {"allocation": "allocation per request", "pool": "stream-ordered pool", "slots": "preallocated slots"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lab memory`."""
    add = parser.add_argument
    add("--instances", default=_INSTANCES, metavar="N,N", help=f"numbers of threads ({_INSTANCES})")
    add("--input-bytes", type=int, default=_INPUT_BYTES, metavar="N", help=f"inputs of a request ({_INPUT_BYTES})")
    add("--output-bytes", type=int, default=_OUTPUT_BYTES, metavar="N", help=f"outputs of a request ({_OUTPUT_BYTES})")
    add("--seconds", type=float, default=1.0, metavar="S", help="duration of each measurement (1)")
    add("--device", type=int, default=0, metavar="N", help="number of the GPU (0)")
    add("--json", type=Path, metavar="FILE", help="write everything as JSON")


def run(options: argparse.Namespace, console: Console) -> int:
    """Measure, print a table and advice, and return 0.

    Raises:
        BuildError: there is no GPU, or it fails.
    """
    words = [word.strip() for word in options.instances.split(",")]
    if not all(word.isdecimal() and 0 < int(word) <= 1024 for word in words):
        raise CallError(f"--instances is '{options.instances}': write numbers from 1 to 1024, e.g. {_INSTANCES}")
    if min(options.input_bytes, options.output_bytes) < 1:
        raise CallError("--input-bytes and --output-bytes must be 1 or more: leave them out for the defaults")
    if not 0 < options.seconds <= 600:
        raise CallError(f"--seconds is {options.seconds:g}: write a number above 0, 600 at most")
    numbers = sorted({int(word) for word in words})
    nvml = Nvml()
    results: list[MemoryResult] = []
    try:
        gpu = devices.describe(options.device)
    except HeadraceError as error:
        raise BuildError(f"the cost of GPU memory cannot be measured: {error}") from error
    with BuildDisplay(console, ["memory"]) as display:
        report = display.report("memory")
        for number, instances in enumerate(numbers):
            for index, strategy in enumerate(STRATEGIES):
                share = (number * len(STRATEGIES) + index) / (len(numbers) * len(STRATEGIES))
                report(share, f"{_NAMES[strategy]}, {instances} instances")
                results.append(_measure(strategy, instances, _sizes(options), options, nvml))
        report(0.99, "8-bit inputs")
        inputs, outputs = _sizes(options)
        smaller = _measure("slots", numbers[0], (-(-inputs // _SMALLER), outputs), options, nvml)
        display.finish("memory", "measured")
    print_text(console, f"{gpu.name}, driver {devices.driver_version() or gpu.driver}", "bold")
    advice = memory_advice(results, smaller)
    show(console, results, advice)
    if options.json is not None:
        document = {"format": FORMAT, "gpu": gpu._asdict(), "results": [asdict(one) for one in results]}
        save_json(options.json, document | {"smaller_inputs": asdict(smaller), "advice": advice})
        print_text(console, f"Everything is in {options.json}.")
    return 0


def _sizes(options: argparse.Namespace) -> tuple[int, int]:
    return options.input_bytes, options.output_bytes


def _measure(
    strategy: str, instances: int, sizes: tuple[int, int], options: argparse.Namespace, nvml: Nvml
) -> MemoryResult:
    try:
        return measure_memory(strategy, instances, sizes, options.seconds, nvml, options.device)
    except HeadraceError as error:
        return MemoryResult(strategy, instances, reason=str(error))


def show(console: Console, results: list[MemoryResult], advice: list[str]) -> None:
    """Print one row for each measurement, the state of the GPU, and the advice."""
    rows = [_cells(result) for result in results if not result.reason]
    if rows:
        title = "GPU memory of a request, median times"
        console.print(narrow_table(title, _HEADINGS, rows, console.width))
    for result in results:
        if result.reason:
            print_text(console, f"{_NAMES[result.strategy]}, {result.instances} instances: {result.reason}", "yellow")
    loads = {result.load.text(): None for result in results if result.load is not None}
    for text in list(loads)[-1:]:
        print_text(console, f"The last measurement: {text}.")
    for line in advice:
        print_text(console, line)


def _cells(result: MemoryResult) -> list[str]:
    return [
        _NAMES[result.strategy],
        str(result.instances),
        rate(result.requests_per_s),
        f"{result.median_us:.1f} us",
        f"{result.p99_us:.1f} us",
        f"{result.memory_us:.1f} us",
        f"{result.memory_p99_us:.1f} us",
        size(result.held_bytes),
        size(result.peak_bytes),
        "-" if result.energy_j is None else f"{1e3 * result.energy_j:.3g}",
    ]
