"""Overload of a convolution net on ONNX Runtime that shares its cores with the front end.

One server holds the same net several times: without an objective, and with objectives of 2 to 10 batch durations at the most
efficient batch size. Requests of 27 KiB come at random moments (Poisson), whether or not earlier ones are answered, at 1.5 and 2
times the capacity. The capacity is the best rate of closed loops with different numbers of callers on the same server, measured
before and after the open loops of each round.

Other programs on the machine change both rates. So each ratio is also counted per second of the server's processor time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from loadtest.bench.machine import usable_cores
from loadtest.bench.results import CaseResult, Comparison, Figure, Target, at_least, at_most
from loadtest.bench.spread import Spread
from loadtest.gpu.client import Arrivals, closed_loop, poisson_arrivals
from loadtest.gpu.lines import GrpcLines, HttpLines, Lines
from loadtest.grpc_protocol import infer_message
from loadtest.onnx_models import convolution
from loadtest.protocol import binary_request
from loadtest.servers import Running, cpu_seconds, headrace, running
from loadtest.slo.parts import Plan

PLAIN = "plain"
LOADS = (1.5, 2.0)
BATCHES = (2.0, 3.0, 5.0, 10.0)
"""Objectives in durations of the most efficient batch."""
_CHANNELS = (128, 128)
_SIZES = (1, 2, 4, 8, 16)
_MAX_ROWS = 16
_CALLERS = (4, 16, 48)
_WARM_UP_S = 1.5  # of an open loop, not counted: a queue that was empty has to fill
_SLOTS = 2400  # connections: more than can be under way at twice the capacity with a wait of a second
_LONGEST_S = 60.0
_BOUND_S = 1.0  # longest wait without an objective, by default
_CONFIG = f"""\
max_batch_size: {_MAX_ROWS}
dynamic_batching: {{}}
instance_group: [{{kind: KIND_CPU, count: 1}}]
parameters: {{intra_op_thread_count: "1"}}
"""
_PIXELS = np.random.default_rng(1).random((1, 3, 48, 48), np.float32)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """Outcome of one loop.

    Attributes:
        goodput_hz, throughput_hz: answers in time, and answers, a second.
        cpu: share of a core that the server used.
        p99_ms: of the answers.
        refused: share of the requests that were refused.
        refused_ms: time to a refusal, median.
    """

    goodput_hz: float
    throughput_hz: float
    cpu: float
    p99_ms: float = 0.0
    refused: float = 0.0
    refused_ms: float = 0.0


def run(plan: Plan) -> CaseResult:
    """Goodput and waits of every configuration at each load; the server has the first usable core, the client the last."""
    usable = usable_cores()
    cores, over_grpc = usable[:1], False
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, cores[:1])
        model = convolution(_CHANNELS)
        rows, batch_ms = most_efficient(model)
        os.sched_setaffinity(0, {usable[-1]})
        objectives = {PLAIN: 0.0} | {f"slo {each:g} batches": round(each * batch_ms, 1) for each in BATCHES}
        server = stack.enter_context(_served(plan, model, objectives, tuple(cores)))
        samples: dict[tuple[str, float], list[tuple[LoadSample, LoadSample]]] = {}
        for seed in range(plan.rounds):
            first = capacity(server, over_grpc)
            opened = {
                (name, load): open_loop(server, name, load * first.throughput_hz, plan.seconds, slo_ms, seed, over_grpc)
                for load in LOADS
                for name, slo_ms in objectives.items()
            }
            best = max(first, capacity(server, over_grpc), key=lambda sample: sample.throughput_hz)
            for key, sample in opened.items():
                samples.setdefault(key, []).append((sample, best))
    notes = (
        f"most efficient batch: {rows} rows in {batch_ms:.2f} ms on one thread; server on {len(cores)} core(s), "
        f"{'gRPC' if over_grpc else 'HTTP'}",
        "capacity "
        + ", ".join(f"{best.throughput_hz:.0f}" for _, best in samples[PLAIN, LOADS[0]])
        + " requests/s by round",
    )
    return CaseResult("convolution", "overload of a convolution net", _figures(samples), _compared(samples), notes)


def most_efficient(model: onnx.ModelProto) -> tuple[int, float]:
    """Return the batch size with the most rows a second on one thread, and its duration in milliseconds."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    times_ms: dict[int, float] = {}
    for rows in _SIZES:
        pixels, runs = np.repeat(_PIXELS, rows, axis=0), list[float]()
        for _ in range(max(48 // rows, 5)):
            begun_s = time.perf_counter()
            session.run(None, {"pixels": pixels})
            runs.append((time.perf_counter() - begun_s) * 1e3)
        times_ms[rows] = statistics.median(runs)
    best = max(times_ms, key=lambda rows: rows / times_ms[rows])
    return best, times_ms[best]


def capacity(server: Running, over_grpc: bool = False, seconds: float = 1.5) -> LoadSample:
    """The best closed loop."""
    return max(
        (_saturate(server, callers, seconds, over_grpc) for callers in _CALLERS),
        key=lambda sample: sample.throughput_hz,
    )


def _saturate(server: Running, callers: int, seconds: float, over_grpc: bool) -> LoadSample:
    with closing(_lines(server, PLAIN, callers, over_grpc)) as lines:
        begun_s, cpu_s = time.monotonic(), cpu_seconds(server.pid)
        answered = closed_loop(lines, begun_s, 0.5, seconds)
        cpu = (cpu_seconds(server.pid) - cpu_s) / (time.monotonic() - begun_s)
    if answered["wrong"]:
        raise RuntimeError(f"{server.name} answered {answered['errors'][0]}")
    return LoadSample(answered["per_s"], answered["per_s"], cpu)


def open_loop(
    server: Running, model: str, rate_hz: float, seconds: float, slo_ms: float, seed: int, over_grpc: bool = False
) -> LoadSample:
    """Poisson arrivals; a latency counts from the moment when the request should have begun."""
    random = np.random.default_rng(seed)
    end_s = _WARM_UP_S + seconds
    with closing(_lines(server, model, _SLOTS, over_grpc)) as lines:
        start_s, cpu_s = time.monotonic() + 0.05, cpu_seconds(server.pid)
        arrivals = poisson_arrivals(lines, start_s, end_s, rate_hz, random, _LONGEST_S)
        cpu = (cpu_seconds(server.pid) - cpu_s) / (time.monotonic() - start_s)
    return _counted(arrivals, start_s + _WARM_UP_S, start_s + end_s, slo_ms, cpu, server.name)


def _counted(arrivals: Arrivals, first_s: float, last_s: float, slo_ms: float, cpu: float, name: str) -> LoadSample:
    bound_ms = slo_ms or float("inf")
    refusals, answers = list[float](), list[tuple[float, float]]()
    for at_s, took_s, wrong in arrivals.answers:
        if not wrong:
            answers.append((at_s, took_s * 1e3))
        elif wrong.lower().startswith("http/1.1 503") or wrong.startswith("UNAVAILABLE"):
            refusals.append(took_s * 1e3)
        else:
            raise RuntimeError(f"{name} answered {wrong}")
    inside = [took_ms for at_s, took_ms in answers if first_s <= at_s <= last_s]
    return LoadSample(
        goodput_hz=sum(took_ms <= bound_ms for took_ms in inside) / (last_s - first_s),
        throughput_hz=len(inside) / (last_s - first_s),
        cpu=cpu,
        p99_ms=float(np.percentile(inside, 99)) if inside else float("nan"),
        refused=len(refusals) / max(len(arrivals.answers), 1),
        refused_ms=statistics.median(refusals) if refusals else 0.0,
    )


Samples = dict[tuple[str, float], list[tuple[LoadSample, LoadSample]]]


def _figures(samples: Samples) -> list[Figure]:
    units = {
        "goodput_hz": "answers in time/s",
        "throughput_hz": "answers/s",
        "p99_ms": "p99 ms",
        "refused": "share refused",
        "refused_ms": "ms until refused, p50",
        "cpu": "cores used",
    }
    return [
        Figure(f"{name}, {load:g} x", unit, Spread.of([getattr(sample, quantity) for sample, _ in pairs]))
        for (name, load), pairs in samples.items()
        for quantity, unit in units.items()
    ]


def _compared(samples: Samples) -> list[Comparison]:
    compared: list[Comparison] = []
    for (name, load), pairs in samples.items():
        ratios = [sample.goodput_hz / best.throughput_hz for sample, best in pairs]
        by_cpu = [
            sample.goodput_hz / sample.cpu / (best.throughput_hz / best.cpu) for sample, best in pairs if sample.cpu
        ]
        where = f"{name}, {load:g} x capacity"
        target: Target = at_least(0.95)
        compared.append(Comparison(f"goodput / capacity, {where}", "", Spread.of(ratios), target))
        compared.append(Comparison(f"the same by processor time, {where}", "", Spread.of(by_cpu)))
        if name == PLAIN:
            p99 = Spread.of([sample.p99_ms / 1e3 / _BOUND_S for sample, _ in pairs])
            compared.append(Comparison(f"p99 / 1 s, {where}", "", p99, at_most(1.1)))
    return compared


def _lines(server: Running, model: str, slots: int, over_grpc: bool) -> Lines:
    name = model.replace(" ", "_")
    if over_grpc:
        return GrpcLines(server.grpc_port, [infer_message(name, {"pixels": _PIXELS})] * slots)
    return HttpLines(server.port, [binary_request(name, {"pixels": _PIXELS})] * slots)


@contextmanager
def _served(
    plan: Plan, model: onnx.ModelProto, objectives: dict[str, float], cores: tuple[int, ...]
) -> Iterator[Running]:
    repository = plan.scratch / "convolution"
    for name, slo_ms in objectives.items():
        _write(repository / name.replace(" ", "_"), model, slo_ms)
    # Connections are there before they are needed.
    options = ("--header-timeout-s", "300", "--keep-alive-timeout-s", "300")
    with running(headrace(repository, name="convolution", cpus=cores, options=options), plan.scratch) as server:
        yield server


def _write(folder: Path, model: onnx.ModelProto, slo_ms: float) -> None:
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(_CONFIG + (f"slo: {{p99_ms: {slo_ms:.1f}}}\n" if slo_ms else ""))
