"""The part on a GPU: uint8 pictures in the body, prepared on the GPU, against the raw engine in the same run."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
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
# Pictures in flight: six of the largest batches, so that the engine never waits for the wire.
_BATCHES_IN_FLIGHT = 6


def build(setup: Setup, report: Report, precisions: Sequence[str]) -> None:
    """Build the engines, or find them."""
    subject.prepare_demo(setup, _BUILD_S)
    for precision in precisions:
        begun_s = time.monotonic()
        subject.prepare(replace(setup, precision=precision), _BUILD_S)
        report("engine", precision=precision, seconds=time.monotonic() - begun_s)


def over_the_wire(
    host: Host, report: Report, setup: Setup, front_ends: Sequence[int], single_from: int, rounds: int
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
    file = host.scratch / "pictures.npz"
    inputs: dict[str, Any] = {INPUT: pictures(setup, _DISTINCT * REQUEST_ROWS)}
    np.savez(file, **inputs)
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
    words += ["--processes", str(len(host.client_cores))]
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
