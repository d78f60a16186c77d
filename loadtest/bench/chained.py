"""Pipelines of three models in this process: cost of a step, throughput, and goodput at twice the capacity.

    python -m loadtest.bench.chained latency --seconds 3

No network: requests go through the public Python API (`headrace.Server`) on one event loop. `latency` has three models of some
microseconds. In `throughput` and `overload` the step in the middle computes for about two milliseconds, the others for 0.1 ms.
There the models take the cores from the load generator and the server. In `waiting` they do not: they are processes that wait, as
for a GPU, 16 ms for eight rows in the middle and 1 ms in the others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import headrace
import numpy as np
import onnxruntime
import uvloop
from headrace.core.errors import HeadraceError
from onnx import TensorProto, helper

from loadtest.bench.inprocess import pinned
from loadtest.onnx_models import onnx_model
from loadtest.protocol import Array
from loadtest.servers import ROOT

NAMES = ("first", "second", "third")
CALLERS = 64
# Layers of each model: a few us, about 0.1 ms and about 2 ms on one core.
SMALL, LIGHT, HEAVY = (1, 16), (2, 512), (24, 768)
DEADLINE_S = 0.25
OVERLOAD = 2.0
_STRETCHES = 4


def layers(count: int, width: int, seed: int) -> bytes:
    """Y = tanh of `count` matrices of X, FP32 (batch, 16); seeded weights."""
    generator = np.random.default_rng(seed)
    sizes = [16, *[width] * (count - 1), 16] if count > 1 else [16, 16]
    nodes, weights, name = [], {}, "X"
    for index in range(count):
        shape = (sizes[index], sizes[index + 1])
        weights[f"W{index}"] = (generator.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        nodes.append(helper.make_node("MatMul", [name, f"W{index}"], [f"M{index}"]))
        name = f"M{index}"
    nodes.append(helper.make_node("Tanh", [name], ["Y"]))
    fp32 = TensorProto.FLOAT
    model = onnx_model(nodes, {"X": (fp32, ("batch", 16))}, {"Y": (fp32, ("batch", 16))}, weights)
    content: bytes = model.SerializeToString()
    return content


def write_repository(folder: Path, sizes: tuple[tuple[int, int], ...]) -> None:
    """Write the models and their ensemble `chain`."""
    fields = (
        'max_batch_size: 8 dynamic_batching {} parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
    )
    for index, (name, (count, width)) in enumerate(zip(NAMES, sizes, strict=True)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1/model.onnx").write_bytes(layers(count, width, index))
        (folder / name / "config.pbtxt").write_text(fields)
    _write_chain(folder)


def write_waiting(folder: Path) -> None:
    """Write three Python models that wait, and their ensemble `chain`."""
    for name, (batch_ms, row_ms) in zip(NAMES, ((1.0, 0.0), (4.0, 1.5), (1.0, 0.0)), strict=True):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1/model.py").write_text(
            "import time\n\nfrom headrace_model import Tensor, model\n\n\n@model(max_batch_size=8)\n"
            'def wait(X: Tensor["fp32", 16]) -> {"Y": Tensor["fp32", 16]}:\n'
            f'    time.sleep(({batch_ms} + {row_ms} * len(X)) / 1e3)\n    return {{"Y": X}}\n'
        )
    _write_chain(folder)


def _write_chain(folder: Path) -> None:
    steps, tensor = [], "X"
    for index, name in enumerate(NAMES):
        written = "Y" if index == len(NAMES) - 1 else f"t{index}"
        steps.append(
            f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "X" value: "{tensor}" }} '
            f'output_map {{ key: "Y" value: "{written}" }} }}'
        )
        tensor = written
    (folder / "chain/1").mkdir(parents=True)
    tensors = [
        f'{side} [ {{ name: "{name}" data_type: TYPE_FP32 dims: [16] }} ]'
        for side, name in (("input", "X"), ("output", "Y"))
    ]
    config = [
        'platform: "ensemble"',
        "max_batch_size: 8",
        *tensors,
        f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}",
    ]
    (folder / "chain/config.pbtxt").write_text("\n".join(config))


async def latency(folder: Path, seconds: float) -> dict[str, float]:
    """p50 of one caller in us: the pipeline, its models by the same API, and by ONNX Runtime alone."""
    write_repository(folder, (SMALL, SMALL, SMALL))
    x = {"X": np.random.default_rng(0).standard_normal((1, 16)).astype(np.float32)}
    sessions = [onnxruntime.InferenceSession(str(folder / name / "1/model.onnx")) for name in NAMES]
    async with headrace.Server(folder, state_dir="") as server:
        models, chain = [server.model(name) for name in NAMES], server.model("chain")

        async def pipeline() -> Array:
            return (await chain.infer_async(x))["Y"]

        async def in_turn() -> Array:
            given = x
            for model in models:
                given = {"X": (await model.infer_async(given))["Y"]}
            return given["X"]

        async def alone() -> Array:
            y = x["X"]
            for session in sessions:
                y = session.run(None, {"X": y})[0]
            return y

        contenders: dict[str, Callable[[], Awaitable[Array]]] = {
            "pipeline": pipeline,
            "in turn": in_turn,
            "alone": alone,
        }
        expected: Array = await alone()
        for contender in contenders.values():
            np.testing.assert_allclose(await contender(), expected, rtol=1e-5)
        times_ns: dict[str, list[int]] = {name: [] for name in contenders}
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        while time.monotonic_ns() < end_ns:
            for name, contender in contenders.items():
                for _ in range(50):
                    begun_ns = time.monotonic_ns()
                    await contender()
                    times_ns[name].append(time.monotonic_ns() - begun_ns)
    return {f"{name}_us": statistics.median(values) / 1e3 for name, values in times_ns.items()}


async def closed_loop(model: Any, seconds: float) -> float:
    """Requests a second of 64 callers in a closed loop."""
    x = {"X": np.ones((1, 16), np.float32)}
    done, end_ns = 0, time.monotonic_ns() + int(seconds * 1e9)

    async def caller() -> None:
        nonlocal done
        while time.monotonic_ns() < end_ns:
            await model.infer_async(x)
            done += 1

    begun_ns = time.monotonic_ns()
    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return done * 1e9 / (time.monotonic_ns() - begun_ns)


async def throughput(folder: Path, seconds: float) -> dict[str, float]:
    """Requests a second of 64 callers: the pipeline, and its slowest step alone."""
    write_repository(folder, (LIGHT, HEAVY, LIGHT))
    rates: dict[str, list[float]] = {"second": [], "chain": []}
    async with headrace.Server(folder, state_dir="") as server:
        for name in ("chain", "second") * 3:
            rates[name].append(await closed_loop(server.model(name), seconds / 6))
    return {f"{name}_hz": statistics.median(values) for name, values in rates.items()}


async def open_loop(model: Any, rate_hz: float, seconds: float, seed: int) -> dict[str, float]:
    """Offer requests with deadlines at a rate, whatever the answers; returns the counts of their ends and the time in seconds.

    Only answers within that time count: those of the queue that is left at its end would exceed what the server can answer.
    """
    x = {"X": np.ones((1, 16), np.float32)}
    counts = {"in time": 0, "refused": 0, "late": 0, "afterwards": 0}
    gaps_s = np.random.default_rng(seed).exponential(1 / rate_hz, int(rate_hz * seconds))
    begun_s = time.monotonic()
    end_s = begun_s + float(gaps_s.sum())

    async def one(due_s: float) -> None:
        try:
            await model.infer_async(x, deadline_s=max(due_s + DEADLINE_S - time.monotonic(), 1e-6))
            now_s = time.monotonic()
            counts["late" if now_s > due_s + DEADLINE_S else "in time" if now_s <= end_s else "afterwards"] += 1
        except HeadraceError:
            counts["refused"] += 1

    tasks = []
    for due_s in (begun_s + np.cumsum(gaps_s)).tolist():
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
        tasks.append(asyncio.create_task(one(due_s)))
    await asyncio.gather(*tasks)
    return {**counts, "offered": len(tasks), "seconds": end_s - begun_s}


async def overload(folder: Path, seconds: float) -> dict[str, float]:
    """Twice the capacity as an open loop with deadlines: answers in time over the capacity, and the share of wasted compute."""
    write_repository(folder, (LIGHT, HEAVY, LIGHT))
    return await goodput(folder, seconds)


async def waiting(folder: Path, seconds: float) -> dict[str, float]:
    """As `overload`, of models that wait and leave the cores to the server."""
    write_waiting(folder)
    return await goodput(folder, seconds)


async def goodput(folder: Path, seconds: float) -> dict[str, float]:
    """Figures of `chain` at twice its capacity.

    The capacity is measured before and after each stretch of overload: on a machine with other work it changes in seconds.
    """
    async with headrace.Server(folder, state_dir="") as server:
        chain = server.model("chain")
        await closed_loop(chain, 0.5)  # latency tables and margins of a server that has just started
        capacities_hz, stretches = [await closed_loop(chain, seconds / 8)], []
        busy_ns = wasted_ns = 0
        for number in range(_STRETCHES):
            before = _work_ns(server)
            rate_hz = OVERLOAD * capacities_hz[-1]
            stretches.append(await open_loop(chain, rate_hz, seconds / _STRETCHES, number))
            after = _work_ns(server)
            busy_ns, wasted_ns = busy_ns + after[0] - before[0], wasted_ns + after[1] - before[1]
            capacities_hz.append(await closed_loop(chain, seconds / 8))
    around_hz = [statistics.mean(pair) for pair in pairwise(capacities_hz)]
    goodput_hz = [each["in time"] / each["seconds"] for each in stretches]
    ratios = [ours / capacity for ours, capacity in zip(goodput_hz, around_hz, strict=True)]
    return {
        "capacity_hz": statistics.mean(around_hz),
        "goodput_hz": statistics.mean(goodput_hz),
        "goodput": statistics.median(ratios),
        "wasted": wasted_ns / max(busy_ns, 1),
        "late": sum(each["late"] for each in stretches) / sum(each["offered"] for each in stretches),
    }


def _work_ns(server: headrace.Server) -> tuple[int, int]:
    """Compute time of the models, and what of it the pipeline wasted, since the start."""
    totals = {name: handle.recorder.totals() for name, _, handle in server._running().registry.sources()}
    return sum(totals[name].busy_ns for name in NAMES), totals["chain"].wasted_ns


KINDS = {"latency": latency, "throughput": throughput, "overload": overload, "waiting": waiting}


def in_fresh_process(kind: str, seconds: float, cpus: tuple[int, ...] | None) -> dict[str, float]:
    """Measure in a process of its own, on these cores; raises subprocess.CalledProcessError if it fails."""
    command = [*pinned(cpus), sys.executable, "-m", "loadtest.bench.chained", kind, "--seconds", str(seconds)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Start from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(uvloop.run(KINDS[options.kind](Path(folder), options.seconds))))


if __name__ == "__main__":
    main()
