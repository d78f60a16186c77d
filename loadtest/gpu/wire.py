"""A real server and the ways to it: a transport and where the pictures lie."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from headrace_bench.processor import children
from headrace_bench.regions import FOLDER, PREFIX

from loadtest.front_ends import thread_times
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import INPUT, pictures
from loadtest.load import LoadFailed, bench_point, url_of
from loadtest.protocol import send_json
from loadtest.servers import HOST, ROOT, Running, headrace, running

READY_S = 90.0
_WARM_S = 0.3
# Time in which a crowd makes a server start all of its front ends.
CROWD_WARM_S = 2.0
_LEAD_S = 0.05  # from an order to the moment at which all clients begin
_DISTINCT = 16
_GRPC_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class Way:
    """Transport of requests to a server.

    Attributes:
        transport: "http" or "grpc".
        data: "body", "system" or "cuda": where the pictures lie.
    """

    transport: str
    data: str

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"{self.transport} {self.data}"


WAYS = tuple(Way(transport, data) for transport in ("http", "grpc") for data in ("body", "system", "cuda"))


def ways_of(setup: Setup) -> list[Way]:
    """Those that this machine has."""
    return [way for way in WAYS if setup.on_gpu or way.data != "cuda"]


@contextmanager
def server(setup: Setup, model: str, *options: str) -> Iterator[Running]:
    """Headrace with one model of the bench's repository and clients' shared memory allowed."""
    command = headrace(setup.repository.resolve(), models=(model,), options=("--allow-client-shm", *options))
    with running(command, setup.scratch, READY_S) as started:
        yield started


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of one closed loop.

    Attributes:
        images_per_s: answered.
        p50_ms, p99_ms: latencies.
        mean_batch: images in a batch.
        busiest_client: cores that the busiest client process used.
        server_us: processor time of each role of the server for a request, in microseconds.
    """

    images_per_s: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    busiest_client: float
    server_us: Mapping[str, float] = field(default_factory=dict)


def sample_way(
    setup: Setup, way: Way, served: Running, model: str, rows: int, callers: int, warm_s: float = _WARM_S
) -> Sampled:
    """Take one closed-loop sample of requests of `rows` pictures, with so many requests in flight, after a warm-up.

    Raises:
        LoadFailed: a client could not, or a request failed.
    """
    times, before = process_times(served), counts(served, model)
    if way.data == "cuda":
        found = _with_cuda_memory(setup, way, served, model, rows, callers, warm_s)
    else:
        found = _by_bench(setup, way, served, model, rows, callers, warm_s)
    after, later = counts(served, model), process_times(served)
    # The whole load, including its warm-up and end; only shows how full the batches are.
    images = after[0] - before[0]
    mean_batch = images / max(1, after[1] - before[1])
    return Sampled(*found[:3], mean_batch, found[3], used_us(times, later, images / rows))


ProcessTimes = dict[tuple[int, str], int]
"""Processor time in ns by process id and role."""
LOOP = " loop"
"""End of the role of an event loop, whose time is part of that of its process."""


def process_times(served: Running) -> ProcessTimes:
    """Processor time in ns of every process of a server, and of its event loop, which is the main thread.

    A process that ends during a sample is left out.
    """
    pids, found = [served.pid], ProcessTimes()
    for pid in pids:
        pids += children(pid)
        try:
            role = _role(Path(f"/proc/{pid}/comm").read_text().strip())
            times = thread_times(pid)
            found[pid, role], found[pid, role + LOOP] = sum(times.values()), times.get(pid, 0)
        except OSError:  # it has ended
            continue
    return found


def used_us(before: ProcessTimes, after: ProcessTimes, requests: float) -> dict[str, float]:
    """Processor time of each role for a request in microseconds; without roles that used none."""
    used: dict[str, float] = {}
    for (pid, role), nanoseconds in after.items():
        spent_us = (nanoseconds - before.get((pid, role), 0)) / 1e3 / max(1.0, requests)
        used[role] = used.get(role, 0.0) + spent_us
    return {role: value for role, value in sorted(used.items()) if value}


def _role(command: str) -> str:
    """Name of a process without the number of a front end."""
    if not command.startswith("headrace "):
        return "server process"
    role = command.removeprefix("headrace ")
    return "front ends" if role.startswith("fe") else "supervisor" if role.startswith("superv") else role


def bench_words(
    transport: str, file: Path, rows: int, callers: int, processes: int, warm_s: float = _WARM_S
) -> list[str]:
    """Options of `headrace bench` for one sample.

    Args:
        transport: "http" or "grpc".
        file: inputs of the requests.
        rows: of a request.
        callers: of all processes together.
        processes: client processes.
        warm_s: length of the warm-up.
    """
    words = ["--npz", str(file), "--batch", str(rows), "--concurrency", str(callers)]
    words += ["--warm-up", str(warm_s), "--processes", str(processes)]
    return words + (["--connections", str(min(_GRPC_CONNECTIONS, callers))] if transport == "grpc" else [])


def _by_bench(
    setup: Setup, way: Way, served: Running, model: str, rows: int, callers: int, warm_s: float
) -> tuple[float, float, float, float]:
    file, processes = _saved_pictures(setup, rows), min(setup.clients, callers)
    words = bench_words(way.transport, file, rows, callers, processes, warm_s)
    words += ["--shared-memory"] if way.data == "system" else []
    point = bench_point(url_of(served, way.transport), model, *words, seconds=setup.seconds)
    latency_ms = point["latency_ms"]
    return float(point["rows_per_s"]), latency_ms["p50"], latency_ms["p99"], max(point["client_busy"], default=0.0)


def _saved_pictures(setup: Setup, rows: int) -> Path:
    file = setup.scratch / f"pictures_{rows}.npz"
    if not file.exists():
        inputs: dict[str, Any] = {INPUT: pictures(setup, _DISTINCT * rows)}
        np.savez(file, **inputs)
    return file


def _with_cuda_memory(
    setup: Setup, way: Way, served: Running, model: str, rows: int, callers: int, warm_s: float
) -> tuple[float, float, float, float]:
    """Start client processes with memory of the GPUs in turn, let them begin at the same moment, and join their results."""
    count = min(setup.clients, callers)
    shares = [callers // count + (number < callers % count) for number in range(count)]
    words = [sys.executable, "-m", "loadtest.gpu.client", model, "--transport", way.transport]
    words += ["--http-port", str(served.port), "--grpc-port", str(served.grpc_port), "--rows", str(rows)]
    words += ["--side", str(setup.side), "--warm-s", str(warm_s), "--seconds", str(setup.seconds)]
    with ExitStack() as stack, (setup.scratch / "clients.log").open("ab") as log:
        clients = []
        for number, share in enumerate(shares):
            gpu = setup.gpus[number % len(setup.gpus)]
            command = [*words, "--callers", str(share), "--gpu", str(gpu)]
            client = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            stack.callback(client.wait)
            stack.callback(client.kill)
            clients.append(client)
        for client in clients:
            if _line(client) != "ready\n":
                raise LoadFailed(f"a client of {way.name} has ended: {log.name} has the reason")
        start_s = time.monotonic() + _LEAD_S
        for client in clients:
            assert client.stdin is not None
            client.stdin.write(f"{start_s}\n")
            client.stdin.flush()
        results = [json.loads(_line(client) or '{"failures": ["a client has ended"]}') for client in clients]
    if failures := [text for result in results for text in result["failures"]]:
        raise LoadFailed(f"{way.name}: {failures[0]}")
    latencies_ms = np.concatenate([result["latencies_ms"] for result in results])
    p50_ms, p99_ms = np.percentile(latencies_ms, (50, 99))
    busiest = max(result["busy"] for result in results)
    return len(latencies_ms) * rows / setup.seconds, float(p50_ms), float(p99_ms), busiest


def _line(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline()


def counts(served: Running, model: str) -> tuple[int, int]:
    """Images and batches so far."""
    (statistics,) = send_json(HOST, served.port, f"/v2/models/{model}/stats")["model_stats"]
    return int(statistics["inference_count"]), int(statistics["execution_count"])


def remove_left() -> int:
    """Unlink shared memory of clients that were killed; return the number of files."""
    files = [name for name in os.listdir(FOLDER) if name.startswith(PREFIX)] if os.path.isdir(FOLDER) else []
    left = [name for name in files if not os.path.exists(f"/proc/{name.removeprefix(PREFIX)}")]
    for name in left:
        os.unlink(f"{FOLDER}/{name}")
    return len(left)
