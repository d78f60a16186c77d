"""The ten cells of serving with and without front ends: HTTP and gRPC, `resnet50` and `mlp`, one caller and a crowd.

Every server answers FP32 tensors in the body. Servers of all modes are started; one is measured while the others are stopped.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from loadtest import grpc_protocol, protocol
from loadtest.bench.machine import usable_cores
from loadtest.front_ends import ping_pong_us
from loadtest.gpu import place, subject
from loadtest.gpu.inprocess import RawEngine
from loadtest.gpu.parts import Measure, Part, WrongAnswers, in_turns, report_server
from loadtest.gpu.report import Compare, Reporter
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import INPUT, LOGITS, Variant, rows_of, variant
from loadtest.gpu.wire import CROWD_WARM_S, READY_S, bench_words, counts, process_times, used_us
from loadtest.load import LoadFailed, bench_point, url_of
from loadtest.protocol import Array
from loadtest.servers import HOST, Running, headrace, running

_INSTANCES = 2
_DISTINCT = 4
_CHECK_S = 0.2
_BUILD_S = 120.0
_STOP_S = 20.0
# Modes whose front ends start and end by the load, and the longest wait for their end.
_SCALED = ("default", "auto")
_QUIET_S = 15.0
# A client process that used more of a core may have slowed the load.
_BUSY = 0.9
# Largest difference from the engine: a batch of another size may use other kernels.
_BOUND = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """Load of a cell over one protocol.

    Attributes:
        transport: "http" or "grpc".
        model: "images" or "mlp".
        rows: of a request.
        processes: client processes.
        callers: of each process.
    """

    transport: str
    model: str
    rows: int
    processes: int
    callers: int

    @property
    def load(self) -> str:
        """Model and load, as the engine alone has them too."""
        return f"{self.model} of {self.rows} by {self.processes} x {self.callers}"

    @property
    def name(self) -> str:
        """Name in reports and for --cells."""
        return f"{self.transport} {self.load}"


_LOADS = (("images", 1, 1, 1), ("images", 1, 4, 32), ("images", 8, 6, 8), ("mlp", 1, 1, 1), ("mlp", 1, 4, 64))
CELLS = tuple(Cell(transport, *load) for load in _LOADS for transport in ("http", "grpc"))


@dataclass(frozen=True, slots=True, eq=False)
class _Model:
    """A model of the table."""

    setup: Setup
    name: str
    engine: RawEngine
    requests: dict[int, Array]  # FP32, by the number of rows of a request

    def file(self, rows: int) -> Path:
        """Requests for `headrace bench`."""
        return self.setup.scratch / f"table_{self.setup.model}_{rows}.npz"


def cells_of(setup: Setup) -> list[Cell]:
    """Cells whose names contain one of the requested texts; all without any."""
    return [cell for cell in CELLS if not setup.cells or any(text in cell.name for text in setup.cells)]


def table(setup: Setup, reporter: Reporter) -> None:
    """Take samples of every cell and mode in turn, with the engine alone and a ping-pong of the same sizes.

    Raises:
        WrongAnswers: an answer differs from the engine's.
    """
    deadline_s = time.monotonic() + setup.limit_s - _STOP_S
    cells = cells_of(setup)
    mlp = replace(setup, model="mlp")
    if any(cell.model == "mlp" for cell in cells):
        subject.prepare(mlp, _BUILD_S, place.seeing(0) if setup.on_gpu else None)
    wrong: list[str] = []
    with ExitStack() as stack:
        models: dict[str, _Model] = {}
        for name in dict.fromkeys(cell.model for cell in cells):
            rows = {cell.rows for cell in cells if cell.model == name}
            models[name] = _open(stack, setup if name == "images" else mlp, rows)
        served = {mode: stack.enter_context(_server(setup, models, mode)) for mode in setup.front_ends}
        contenders: dict[str, Measure] = {}
        for cell in cells:
            model = models[cell.model]
            raw, pings = f"engine, {cell.load}", f"ping-pong, {cell.model} of {cell.rows}"
            all_servers = list(served.values())
            contenders.setdefault(raw, _beside(all_servers, partial(_raw, reporter, model, cell, raw)))
            contenders.setdefault(pings, _beside(all_servers, partial(_ping_pong, reporter, model, cell, pings)))
            for mode, server in served.items():
                name = f"{cell.name} | {mode}"
                others = [each for each in all_servers if each is not server]
                contenders[name] = _beside(others, partial(_sample, reporter, model, cell, server, name, wrong))
                reporter.compare(Compare(f"{name} / {raw}", name, raw, "requests/s"))
                if cell.callers == 1:
                    reporter.compare(Compare(f"{name} - {pings}", name, pings, "p50 ms", "difference"))
        in_turns(reporter, setup.rounds, contenders, partial(_has_time, deadline_s, []))
    if wrong:
        raise WrongAnswers("; ".join(wrong))


def _beside(others: Sequence[Running], measure: Measure) -> Measure:
    """Return a measurement during which other servers are stopped: idle ones test batches, and take time of the GPU for it."""

    def run(number: int) -> None:
        pids = list(dict.fromkeys(pid for other in others for pid, _ in process_times(other)))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            measure(number)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    return run


def _has_time(deadline_s: float, starts_s: list[float]) -> bool:
    """Return False if a round as long as the longest would pass the deadline; the first always begins."""
    starts_s.append(time.monotonic())
    longest_s = max((end - start for start, end in pairwise(starts_s)), default=0.0)
    return len(starts_s) == 1 or starts_s[-1] + longest_s < deadline_s


def _open(stack: ExitStack, setup: Setup, rows: set[int]) -> _Model:
    name = variant(setup, Variant(_INSTANCES, is_plain=True))
    engine = stack.enter_context(RawEngine(setup, name))
    model = _Model(setup, name, engine, {count: rows_of(setup, _DISTINCT * count, seed=7) for count in rows})
    for count, array in model.requests.items():
        inputs: dict[str, Any] = {INPUT: array}
        np.savez(model.file(count), **inputs)
    return model


def _server(setup: Setup, models: Mapping[str, _Model], mode: str) -> Any:
    options = () if mode == "default" else ("--front-ends", mode)
    names = [model.name for model in models.values()]
    command = headrace(setup.repository.resolve(), name=f"table {mode}", models=names, options=options)
    return running(command, setup.scratch, READY_S)


def _raw(reporter: Reporter, model: _Model, cell: Cell, name: str, number: int) -> None:
    """Graph replay: as many rows as a request for one caller, the largest batch for a crowd."""
    timing = model.engine.time(cell.rows if cell.callers == 1 else model.setup.max_rows, 0.35 * model.setup.seconds)
    reporter.sample(name, "requests/s", timing.rows_per_s / cell.rows, number)
    reporter.sample(name, "p50 ms", timing.median_us / 1e3, number)


def _ping_pong(reporter: Reporter, model: _Model, cell: Cell, name: str, number: int) -> None:
    """Round trip over TCP of a request's and an answer's bytes, without headers."""
    request = model.requests[cell.rows][: cell.rows]
    answer_bytes = model.engine.run(request).nbytes
    p50_us = ping_pong_us(0.35 * model.setup.seconds, usable_cores(), (request.nbytes, answer_bytes), is_tcp=True)
    reporter.sample(name, "requests/s", 1e6 / p50_us, number)
    reporter.sample(name, "p50 ms", p50_us / 1e3, number)


def _sample(
    reporter: Reporter, model: _Model, cell: Cell, served: Running, name: str, wrong: list[str], number: int
) -> None:
    """Check the answers in the first round; then take and report one sample."""
    remark = _check(model, cell, served, name, wrong) if number == 0 else ""
    if cell.callers == 1:
        _await_quiet(served)
    times, before = process_times(served), counts(served, model.name)
    point = bench_point(url_of(served, cell.transport), model.name, *_words(model, cell), seconds=model.setup.seconds)
    after, later = counts(served, model.name), process_times(served)
    latency_ms, busy = point["latency_ms"], max(point["client_busy"])
    if busy > _BUSY:
        reporter.note(f"{name}, round {number}: the clients were the limit, {busy:.2f} of a core each")
        remark = "; ".join(filter(None, (remark, "the clients are the limit")))
    detail = {"mean_batch": round((after[0] - before[0]) / max(1, after[1] - before[1]), 1)}
    reporter.sample(
        name, "requests/s", point["throughput_per_s"], number, **detail, **({"remark": remark} if remark else {})
    )
    reporter.sample(name, "p50 ms", latency_ms["p50"], number)
    reporter.sample(name, "p99 ms", latency_ms["p99"], number)
    reporter.sample(name, "client core share", busy, number)
    reporter.sample(name, "front ends", _front_ends(served), number)
    report_server(reporter, name, used_us(times, later, (after[0] - before[0]) / cell.rows), number)


def _await_quiet(served: Running) -> None:
    """Wait until a server that starts front ends by the load has ended those of the crowd before."""
    end_s = time.monotonic() + _QUIET_S
    while served.name.endswith(_SCALED) and _front_ends(served) and time.monotonic() < end_s:
        time.sleep(0.2)


def _front_ends(served: Running) -> int:
    """Number of front ends that run."""
    return sum(role == "front ends" for _, role in process_times(served))


def _words(model: _Model, cell: Cell) -> list[str]:
    callers = cell.processes * cell.callers
    processes = cell.processes + (model.setup.more_clients if callers > 1 else 0)
    warm = {"warm_s": CROWD_WARM_S} if callers > 1 else {}
    return bench_words(cell.transport, model.file(cell.rows), cell.rows, callers, processes, **warm)


def _check(model: _Model, cell: Cell, served: Running, name: str, wrong: list[str]) -> str:
    """Compare lone answers with the engine's, and those under load with the lone ones."""
    array, largest = model.requests[cell.rows], 0.0
    for start in range(0, len(array), cell.rows):
        inputs = {INPUT: array[start : start + cell.rows]}
        expected = model.engine.run(inputs[INPUT])
        answer = _call(cell, served, model.name, inputs)
        if answer.shape != expected.shape or not np.allclose(answer, expected, _BOUND, _BOUND):
            wrong.append(f"{name}: a lone answer differs from the engine's")
            return "WRONG ANSWERS"
        largest = max(largest, float(np.abs(answer - expected).max()))
    words = [*_words(model, cell), "--check"]
    point = bench_point(url_of(served, cell.transport), model.name, *words, seconds=_CHECK_S, failures=True)
    if point["errors"]:
        wrong.append(f"{name}: {point['errors']} under load")
        return "WRONG ANSWERS"
    lone = f"within {largest:.2g} of the engine's" if largest else "equal to the engine's to the bit"
    return f"answers {lone}, under load within 1 % or 0.001"


def _call(cell: Cell, served: Running, model: str, inputs: Mapping[str, Array]) -> Array:
    """One request and its answer.

    Raises:
        LoadFailed: the status is not 200.
    """
    if cell.transport == "grpc":
        message = grpc_protocol.infer_message(model, inputs)
        return grpc_protocol.decode_answer(grpc_protocol.call(served.grpc_port, grpc_protocol.MODEL_INFER, message))[
            LOGITS
        ]
    status, headers, body = protocol.send(HOST, served.port, protocol.binary_request(model, inputs))
    if status != 200:
        raise LoadFailed(f"{model} was answered with {status}: {body[:300]!r}")
    return protocol.decode_answer(headers, body)[LOGITS]


TABLE = Part(
    "table",
    table,
    "FP32 tensors in the body, one caller and crowds, by mode of `--front-ends`",
    580.0,
    300.0,
    least_s=30.0,
)
