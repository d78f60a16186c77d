"""Overload with a real server process, ONNX Runtime and sockets.

Two servers of the same model, one core for the measured one and one for the client: as its configuration is, and with a
`slo { p99_ms: ... }` behind it. Requests come at random moments, whether or not the last ones are answered.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np

from loadtest.bench.machine import usable_cores
from loadtest.bench.results import CaseResult, Comparison, Figure
from loadtest.gpu.client import closed_loop, poisson_arrivals
from loadtest.gpu.lines import HttpLines
from loadtest.protocol import binary_request
from loadtest.servers import Running, headrace, running
from loadtest.slo.parts import Plan, compare_goodput, figures, in_rounds

MODEL = "resnet50"
LOADS = (1.5, 2.0)
_WARM_UP_S = 3.0  # of an open loop, not counted: a queue that was empty has to fill
# In full batches: long enough that one may be under way while the next is collected, and some to spare.
_SLO_BATCHES = 4.0
_ROWS = 4
# More than can be under way at twice the capacity of a model on one core.
_SLOTS = 600
_CLOSED_SLOTS = 4 * _ROWS
_LONGEST_S = 60.0
_REQUEST = binary_request(MODEL, {"input": np.random.default_rng(1).normal(size=(1, 3, 224, 224)).astype(np.float32)})
_CONFIG = f"""\
max_batch_size: {_ROWS}
dynamic_batching: {{}}
instance_group: [{{kind: KIND_CPU, count: 1}}]
"""


@dataclass(frozen=True, slots=True)
class Answered:
    """Outcome of the requests of one sample.

    Attributes:
        goodput_hz, throughput_hz: answers in time, and answers, a second, before the end of the arrivals.
        p99_ms: of the answers.
        refused: share that was answered with 503.
        refused_ms: how long a refusal took, the median.
    """

    goodput_hz: float
    throughput_hz: float
    p99_ms: float
    refused: float
    refused_ms: float


def run(plan: Plan) -> CaseResult:
    """Goodput of both servers at each load."""
    seconds = max(plan.seconds, 10.0)
    case_figures: list[Figure] = []
    compared: list[Comparison] = []
    server_core, client_core = usable_cores()[:2]
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, {client_core})
        plain = stack.enter_context(_served(plan, "fixed", (server_core,), None))
        capacity_hz = saturate(plain, 5.0)
        slo_ms = float(round(_SLO_BATCHES * _ROWS / capacity_hz * 1e3, -1))
        servers = {"slo": stack.enter_context(_served(plan, "slo", (server_core,), slo_ms)), "fixed": plain}
        for load in LOADS:
            contenders = {
                name: partial(open_loop, server, load * capacity_hz, seconds, slo_ms)
                for name, server in servers.items()
            }
            runs = in_rounds(contenders, plan.rounds)
            where = f"{load:g} x capacity"
            case_figures += figures(runs, where, [field.name for field in fields(Answered)])
            compared += compare_goodput(runs, where)
    notes = (
        f"{MODEL} on ONNX Runtime, one instance on one core, batches of {_ROWS}: {capacity_hz:.1f} pictures/s in a closed loop",
        f"SLO {slo_ms:g} ms, {_SLO_BATCHES:g} full batches",
    )
    return CaseResult("http", "the same over HTTP, with a real model", case_figures, compared, notes)


def saturate(server: Running, seconds: float) -> float:
    """Answers a second with enough requests under way all the time."""
    with closing(HttpLines(server.port, [_REQUEST] * _CLOSED_SLOTS)) as lines:
        answered = closed_loop(lines, time.monotonic(), 1.0, seconds)
    if answered["wrong"]:
        raise RuntimeError(f"{server.name} answered {answered['errors'][0]}")
    return float(answered["per_s"])


def open_loop(server: Running, rate_hz: float, seconds: float, slo_ms: float, seed: int) -> Answered:
    """Poisson arrivals; a latency counts from the moment when the request should have begun."""
    start_s = time.monotonic() + 0.1
    random = np.random.default_rng(seed)
    with closing(HttpLines(server.port, [_REQUEST] * _SLOTS)) as lines:
        arrivals = poisson_arrivals(lines, start_s, seconds, rate_hz, random, _LONGEST_S)
    refusals, answers = list[float](), list[tuple[float, float]]()
    for at_s, took_s, wrong in arrivals.answers:
        if not wrong:
            answers.append((at_s, took_s))
        elif wrong.lower().startswith("http/1.1 503"):
            refusals.append(took_s)
        else:
            raise RuntimeError(f"{server.name} answered {wrong}")
    if len(arrivals.answers) < arrivals.offered:
        raise RuntimeError(f"{server.name}: more than {_SLOTS} requests under way")
    first_s, last_s = start_s + _WARM_UP_S, start_s + seconds
    inside = [took_s for at_s, took_s in answers if first_s <= at_s <= last_s]
    return Answered(
        goodput_hz=sum(took_s * 1e3 <= slo_ms for took_s in inside) / (last_s - first_s),
        throughput_hz=len(inside) / (last_s - first_s),
        p99_ms=float(np.percentile([took_s for _, took_s in answers], 99)) * 1e3 if answers else float("nan"),
        refused=len(refusals) / arrivals.offered,
        refused_ms=float(np.median(refusals)) * 1e3 if refusals else 0.0,
    )


@contextmanager
def _served(plan: Plan, name: str, cpus: tuple[int, ...], slo_ms: float | None) -> Iterator[Running]:
    repository = plan.scratch / name
    _copied(plan.repository / MODEL, repository / MODEL, slo_ms)
    # Connections are there before they are needed.
    options = ("--header-timeout-s", "300", "--keep-alive-timeout-s", "300")
    with running(headrace(repository, name=name, cpus=cpus, options=options), plan.scratch) as server:
        yield server


def _copied(source: Path, folder: Path, slo_ms: float | None) -> None:
    """The model with one instance: two would share the one core."""
    version = max(source.glob("*/model.onnx"), key=lambda path: int(path.parent.name)).parent
    (folder / version.name).mkdir(parents=True)
    shutil.copy(version / "model.onnx", folder / version.name)
    promise = "" if slo_ms is None else f"slo: {{p99_ms: {slo_ms:.1f}}}\n"
    (folder / "config.yaml").write_text(_CONFIG + promise)
