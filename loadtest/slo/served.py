"""Overload of a real server process, with ONNX Runtime and sockets; `headrace bench` makes the load.

One server holds the same model several times: without an objective, and with `slo { p99_ms: ... }`. Requests come at random
moments (Poisson), whether or not earlier ones are answered; a latency counts from the time when the request was due. The capacity
is the best rate of closed loops with different numbers of callers on the same server, measured before and after the open loops of
each round.

Other programs on the machine change both rates. So each ratio is also counted by the server's processor time.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from loadtest.bench.machine import usable_cores
from loadtest.bench.results import CaseResult, Comparison, Figure, Spread, Target, at_least, at_most
from loadtest.load import bench_point
from loadtest.onnx_models import convolution
from loadtest.servers import Running, headrace, running
from loadtest.slo.plan import LOADS, Plan

PLAIN = "plain"
_BATCHES = (2.0, 3.0, 5.0, 10.0)
"""Objectives of the convolution net in durations of the most efficient batch."""
_SLO_BATCHES = 4.0
"""Objective of ResNet-50 in full batches: one may run while the next is collected, and some to spare."""
_CALLERS = (1, 2, 3)  # of the closed loops, in full batches
_CONNECTIONS = 2400  # more than can be under way at twice the capacity with a wait of a second
_BOUND_MS = 1000.0  # longest wait without an objective, by default


@dataclass(frozen=True, slots=True)
class Objective:
    """A copy of the model.

    Attributes:
        slo_ms: promised latency; 0 for none.
        bound_ms: latency within which an answer counts.
        target: of the goodput over the capacity.
    """

    slo_ms: float
    bound_ms: float
    target: Target


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of one loop.

    Attributes:
        goodput_hz, throughput_hz: answers in time, and answers, a second.
        cpu: share of a core that the server used.
        p99_ms: of the answers.
        refused: share of the requests that were refused.
    """

    goodput_hz: float
    throughput_hz: float
    cpu: float
    p99_ms: float
    refused: float


Samples = dict[tuple[str, float], list[tuple[Served, Served]]]


def over_http(plan: Plan) -> CaseResult:
    """ResNet-50, one instance on one core, batches of four: with an objective and without."""
    rows, model = 4, onnx.load(_newest(plan.repository / "resnet50"))
    (server_core, *_), before = usable_cores(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {server_core})
    batch_ms = _batch_ms(model, {"input": np.zeros((rows, 3, 224, 224), np.float32)}, 5)
    os.sched_setaffinity(0, before)
    slo_ms = float(round(_SLO_BATCHES * batch_ms, -1))
    objectives = {PLAIN: Objective(0.0, slo_ms, at_most(0.2)), "slo": Objective(slo_ms, slo_ms, at_least(0.9))}
    return _overload(plan, "http", model, rows, objectives)


def over_http_on_one_core(plan: Plan) -> CaseResult:
    """A convolution net that shares its core with the front end, and requests of 27 KiB."""
    model = convolution((128, 128))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, usable_cores()[:1])
    rows, batch_ms = most_efficient(model)
    os.sched_setaffinity(0, before)
    objectives = {PLAIN: Objective(0.0, math.inf, at_least(0.95))}
    for batches in _BATCHES:
        slo_ms = round(batches * batch_ms, 1)
        objectives[f"slo {batches:g} batches"] = Objective(slo_ms, slo_ms, at_least(0.95))
    note = f"most efficient batch: {rows} rows in {batch_ms:.2f} ms on one thread"
    return _overload(plan, "convolution", model, 16, objectives, note)


def _overload(
    plan: Plan,
    name: str,
    model: onnx.ModelProto,
    max_rows: int,
    objectives: Mapping[str, Objective],
    *notes: str,
) -> CaseResult:
    """Goodput and waits of every objective at each load; the server has the first usable core, the client the last."""
    (server_core, *_, client_core), samples = usable_cores(), Samples()
    with _serving(plan, name, model, max_rows, objectives, (server_core,)) as server:
        for seed in range(plan.rounds):
            first = _capacity(server, max_rows, (client_core,))
            opened = {}
            for load in LOADS:
                for objective, promise in objectives.items():
                    words = ["--rate", f"{load * first.throughput_hz:.1f}", "--poisson", "--seed", str(seed)]
                    words += [
                        "--connections",
                        str(_CONNECTIONS),
                        "--warm-up",
                        "1.5",
                        "--slo",
                        str(min(promise.bound_ms, 1e6)),
                    ]
                    opened[objective, load] = _loop(server, objective, (client_core,), plan.seconds, *words)
            best = max(first, _capacity(server, max_rows, (client_core,)), key=lambda sample: sample.throughput_hz)
            for key, sample in opened.items():
                samples.setdefault(key, []).append((sample, best))
    capacities = ", ".join(f"{best.throughput_hz:.0f}" for _, best in samples[PLAIN, LOADS[0]])
    slos = ", ".join(f"{name}: {each.slo_ms:g} ms" for name, each in objectives.items() if each.slo_ms)
    notes = (*notes, f"capacity {capacities} requests/s by round", f"objectives: {slos}; server on one core")
    compared = _compared(samples, objectives)
    return CaseResult(name, f"overload of {name} over HTTP", _figures(samples), compared, notes)


def most_efficient(model: onnx.ModelProto) -> tuple[int, float]:
    """Return the batch size with the most rows a second on one thread, and its duration in milliseconds."""
    pixels = np.random.default_rng(1).random((1, 3, 48, 48), np.float32)
    times_ms = {
        rows: _batch_ms(model, {"pixels": np.repeat(pixels, rows, axis=0)}, max(48 // rows, 5))
        for rows in (1, 2, 4, 8, 16)
    }
    best = max(times_ms, key=lambda rows: rows / times_ms[rows])
    return best, times_ms[best]


def _batch_ms(model: onnx.ModelProto, inputs: Mapping[str, Any], runs: int) -> float:
    """Return the median duration of a batch on one thread, in milliseconds."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    times_ms = []
    for _ in range(runs):
        begun_s = time.perf_counter()
        session.run(None, dict(inputs))
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
    return statistics.median(times_ms)


def _capacity(server: Running, max_rows: int, cpus: tuple[int, ...], seconds: float = 2.0) -> Served:
    """The best closed loop."""
    loops = [
        _loop(server, PLAIN, cpus, seconds, "--concurrency", str(batches * max_rows), "--warm-up", "0.5")
        for batches in _CALLERS
    ]
    return max(loops, key=lambda sample: sample.throughput_hz)


def _loop(server: Running, objective: str, cpus: tuple[int, ...], seconds: float, *words: str) -> Served:
    """One load on the model with an objective.

    Raises:
        LoadFailed: the load failed.
        RuntimeError: a request has failed with another status than 503.
    """
    words = ("--processes", "1", "--server-pid", str(server.pid), *words)
    model = objective.replace(" ", "_")
    point = bench_point(server.url, model, *words, seconds=seconds, cpus=cpus, failures=True)
    refused = sum(count for status, count in point["errors"].items() if status == "503")
    if refused != sum(point["errors"].values()):
        raise RuntimeError(f"{server.name} answered {point['errors']}: {point['error_texts']}")
    throughput = float(point["throughput_per_s"])
    good = point.get("goodput_per_s")
    p99_ms = point["latency_ms"].get("p99", float("nan"))
    share = refused / max(point["requests"], 1)
    return Served(throughput if good is None else float(good), throughput, point["server_cores"], p99_ms, share)


def _figures(samples: Samples) -> list[Figure]:
    units = {
        "goodput_hz": "answers in time/s",
        "throughput_hz": "answers/s",
        "p99_ms": "p99 ms",
        "refused": "share refused",
        "cpu": "cores used",
    }
    return [
        Figure(f"{name}, {load:g} x", unit, Spread.of([getattr(sample, quantity) for sample, _ in pairs]))
        for (name, load), pairs in samples.items()
        for quantity, unit in units.items()
    ]


def _compared(samples: Samples, objectives: Mapping[str, Objective]) -> list[Comparison]:
    compared: list[Comparison] = []
    for (name, load), pairs in samples.items():
        goodput = [sample.goodput_hz / best.throughput_hz for sample, best in pairs]
        by_cpu = [
            sample.goodput_hz / sample.cpu / (best.throughput_hz / best.cpu) for sample, best in pairs if sample.cpu
        ]
        where = f"{name}, {load:g} x capacity"
        compared.append(Comparison(f"goodput / capacity, {where}", "", Spread.of(goodput), objectives[name].target))
        compared.append(Comparison(f"the same by processor time, {where}", "", Spread.of(by_cpu)))
        if math.isinf(objectives[name].bound_ms):
            waits = Spread.of([sample.p99_ms / _BOUND_MS for sample, _ in pairs])
            compared.append(Comparison(f"p99 / 1 s, {where}", "", waits, at_most(1.1)))
    return compared


@contextmanager
def _serving(
    plan: Plan,
    name: str,
    model: onnx.ModelProto,
    max_rows: int,
    objectives: Mapping[str, Objective],
    cpus: tuple[int, ...],
) -> Iterator[Running]:
    repository = plan.scratch / name
    config = f"max_batch_size: {max_rows}\ndynamic_batching: {{}}\ninstance_group: [{{kind: KIND_CPU, count: 1}}]\n"
    config += 'parameters: {intra_op_thread_count: "1"}\n'
    for objective, promise in objectives.items():
        folder = repository / objective.replace(" ", "_")
        (folder / "1").mkdir(parents=True)
        onnx.save(model, folder / "1" / "model.onnx")
        (folder / "config.yaml").write_text(
            config + (f"slo: {{p99_ms: {promise.slo_ms:.1f}}}\n" if promise.slo_ms else "")
        )
    # Connections are there before they are needed.
    options = ("--header-timeout-s", "300", "--keep-alive-timeout-s", "300")
    with running(headrace(repository, name=name, cpus=cpus, options=options), plan.scratch) as server:
        yield server


def _newest(folder: Path) -> Path:
    versions = sorted(folder.glob("*/model.onnx"), key=lambda path: int(path.parent.name))
    if not versions:
        raise FileNotFoundError(
            f"no {folder.name}/<version>/model.onnx in {folder.parent}: build it with `make models`"
        )
    return versions[-1]
