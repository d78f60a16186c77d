"""The parts on GPUs: uint8 pictures, prepared on the GPU.

In the body, against the raw engine in the same run; and in shared memory, with several GPUs against one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from loadtest.front_ends.host import Host, LoadFailed, grpc_url
from loadtest.front_ends.parts import Report, figures
from loadtest.gpu import place, subject
from loadtest.gpu.inprocess import InProcess, requests_of
from loadtest.gpu.raw import RawEngine
from loadtest.gpu.setup import REQUEST_ROWS, Setup
from loadtest.gpu.subject import INPUT, Variant, pictures, variant
from loadtest.servers import Running, ServerFailed

_BUILD_S = 280.0
_DISTINCT = 16
_GRPC_CONNECTIONS = 32
_CLIENTS = 16  # processes at most
_SHARED_CLIENTS = 6  # enough for requests without pictures
# Pictures in flight: six of the largest batches, so that the engine never waits for the wire.
_BATCHES_IN_FLIGHT = 6


class EngineBuilds:
    """Builds the engines of several precisions at the same time, in the background; engines of an earlier run are found.

    Args:
        setup: model and folders.
        report: gets the duration of each build.
        precisions: of the engines.
        gpus: numbers of the GPUs; each build sees one of them.
        cores: of the builders.
    """

    def __init__(
        self, setup: Setup, report: Report, precisions: Sequence[str], gpus: Sequence[int], cores: Sequence[int]
    ) -> None:
        self._setup = setup
        self._report = report
        self._cores = cores
        self._pool = ThreadPoolExecutor(len(precisions) + 1)
        demo = self._pool.submit(self._prepare_demo)
        self._builds = {
            precision: self._pool.submit(self._build, precision, gpus[number % len(gpus)], demo)
            for number, precision in enumerate(precisions)
        }
        self._pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait for the end of all builds; a failed one has been reported."""
        futures.wait(self._builds.values())

    def failed(self) -> list[str]:
        """Wait for the end of all builds; return the precisions whose build failed."""
        return [precision for precision, build in self._builds.items() if build.exception() is not None]

    def _prepare_demo(self) -> None:
        os.sched_setaffinity(0, self._cores)  # of this thread: the builder inherits it
        subject.prepare_demo(self._setup, _BUILD_S)

    def _build(self, precision: str, gpu: int, demo: Future[None]) -> None:
        begun_s = time.monotonic()
        try:
            demo.result()
            os.sched_setaffinity(0, self._cores)
            environment = place.seeing(gpu) if self._setup.on_gpu else None
            subject.prepare(replace(self._setup, precision=precision), _BUILD_S, environment)
        except Exception as error:
            self._report("engine", precision=precision, failed=f"{type(error).__name__}: {error}"[-1500:])
            raise
        self._report("engine", precision=precision, seconds=time.monotonic() - begun_s)


def over_the_wire(
    host: Host, report: Report, setup: Setup, front_ends: Sequence[int], single_from: float, rounds: int
) -> None:
    """Images a second of every number of front ends, over HTTP and gRPC, of the raw engine with the same preparation.

    Args:
        host: cores and folders.
        report: gets the figures.
        setup: model and precision.
        front_ends: numbers of front ends.
        single_from: least number of front ends with which requests of one picture are measured too.
        rounds: samples of each load.
    """
    model = variant(setup, Variant(setup.instances))
    file = _save_pictures(host, setup)
    raw, prepared = _raw(host, report, setup, model)
    for count in front_ends:
        try:
            with host.serve(setup.repository.resolve(), [model], count) as server:
                for rows in (REQUEST_ROWS, 1) if count >= single_from else (REQUEST_ROWS,):
                    for protocol in ("http", "grpc"):
                        _sample(
                            host, report, setup, server, model, file, (protocol, rows, count), (raw, prepared), rounds
                        )
        except (LoadFailed, ServerFailed) as error:
            report("pictures", precision=setup.precision, front_ends=count, failed=str(error)[-1500:])
    # The clock of the GPU may have changed meanwhile.
    _raw(host, report, setup, model)


def several_gpus(host: Host, report: Report, setup: Setup, front_ends: Sequence[int], rounds: int) -> None:
    """Images a second over HTTP on 1, 2 and 4 GPUs, eight pictures a request in system shared memory.

    Args:
        host: cores and folders.
        report: gets the figures.
        setup: model, precision and the GPUs of this machine.
        front_ends: numbers of front ends.
        rounds: samples of each load.
    """
    counts = [count for count in (1, 2, 4, 8) if count <= len(setup.gpus)] if setup.on_gpu else [1, 2]
    models = {count: _on_gpus(setup, count) for count in counts}
    file = _save_pictures(host, setup)
    alone = dict[str, float]()
    for count, model in models.items():
        with InProcess(setup) as bench:
            requests = requests_of(setup, pictures(setup, 4 * setup.max_rows), REQUEST_ROWS, in_pinned_memory=True)
            callers = count * _BATCHES_IN_FLIGHT * setup.max_rows // REQUEST_ROWS
            rate = bench.measure(bench.open(model), requests, callers, host.seconds / 2).per_s * REQUEST_ROWS
        over_one = rate / alone.setdefault("in process", rate)
        report("gpus", gpus=count, load="in process, pinned", images_per_s=rate, over_one=over_one)
    for number in front_ends:
        for count, model in models.items():
            key = f"{number} front ends"
            try:
                points = _shared_memory(host, setup, model, file, (number, count), rounds)
            except (LoadFailed, ServerFailed) as error:
                report("gpus", gpus=count, load=key, failed=str(error)[-1500:])
                continue
            rate = median(point["rows_per_s"] for point in points)
            ratio = rate / alone.setdefault(key, rate) if count == 1 or key in alone else None
            best = max(point["rows_per_s"] for point in points)
            report("gpus", gpus=count, load=key, images_per_s=rate, over_one=ratio, best=best, **figures(points[-1]))


def _shared_memory(
    host: Host, setup: Setup, model: str, file: Path, counts: tuple[int, int], rounds: int
) -> list[dict[str, Any]]:
    """Return the figures of each sample; `counts` are those of the front ends and GPUs."""
    front_ends, gpus = counts
    callers = gpus * _BATCHES_IN_FLIGHT * setup.max_rows // REQUEST_ROWS
    words = ["--npz", str(file), "--batch", str(REQUEST_ROWS), "--concurrency", str(callers), "--warm-up", "0.7"]
    words += ["--processes", str(min(_SHARED_CLIENTS, len(host.client_cores))), "--shared-memory"]
    with host.serve(setup.repository.resolve(), [model], front_ends, "--allow-client-shm") as server:
        return [host.loaded(server, server.url, model, *words) for _ in range(rounds)]


def _on_gpus(setup: Setup, count: int) -> str:
    """Return the name of the model on so many GPUs; on a CPU instances stand for GPUs."""
    if setup.on_gpu:
        return variant(setup, Variant(setup.instances, gpus=setup.gpus[:count]))
    return variant(setup, Variant(count))


def _save_pictures(host: Host, setup: Setup) -> Path:
    file = host.scratch / "pictures.npz"
    inputs: dict[str, Any] = {INPUT: pictures(setup, _DISTINCT * REQUEST_ROWS)}
    np.savez(file, **inputs)
    return file


def _sample(
    host: Host,
    report: Report,
    setup: Setup,
    server: Running,
    model: str,
    file: Path,
    load: tuple[str, int, int],
    raw: tuple[float, float],
    rounds: int,
) -> None:
    protocol, rows, count = load
    url = server.url if protocol == "http" else grpc_url(server)
    callers = _BATCHES_IN_FLIGHT * setup.max_rows // rows
    words = ["--npz", str(file), "--batch", str(rows), "--concurrency", str(callers), "--warm-up", "0.7"]
    words += ["--processes", str(min(_CLIENTS, len(host.client_cores)))]
    if protocol == "grpc":
        words += ["--connections", str(_GRPC_CONNECTIONS)]
    points = []
    try:
        points = [host.loaded(server, url, model, *words) for _ in range(rounds)]
    except LoadFailed as error:
        report("pictures", precision=setup.precision, protocol=protocol, rows=rows, front_ends=count, failed=str(error))
        return
    rates = [point["rows_per_s"] for point in points]
    rate = median(rates)
    report(
        "pictures",
        precision=setup.precision,
        protocol=protocol,
        rows=rows,
        front_ends=count,
        of_raw=rate / raw[0],
        of_prepared=rate / raw[1],
        lowest=min(rates),
        highest=max(rates),
        **figures(points[rates.index(rate)] if rate in rates else points[0]),
    )


def _raw(host: Host, report: Report, setup: Setup, model: str) -> tuple[float, float]:
    """Images a second of the engine alone at the largest batch, and of the same batches prepared and ranked on the GPU."""
    rows = setup.max_rows
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, host.server_cores)
    try:
        with RawEngine(setup) as engine:
            raw = engine.time(rows, host.seconds / 2).rows_per_s
        report("raw engine", precision=setup.precision, rows=rows, images_per_s=raw, gpu=place.states())
        with InProcess(setup) as bench:
            handle = bench.open(model)
            requests = requests_of(setup, pictures(setup, 2 * rows), rows, in_pinned_memory=True)
            prepared = bench.measure(handle, requests, _BATCHES_IN_FLIGHT, host.seconds / 2).per_s * rows
        report("in process, pinned", precision=setup.precision, rows=rows, images_per_s=prepared, of_raw=prepared / raw)
    finally:
        os.sched_setaffinity(0, before)
    return raw, prepared
