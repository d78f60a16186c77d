"""p99 of hot models among thousands, beside a server with one model: paired rounds at the same rate on the same cores.

    python -m loadtest.many_models [--models 5000 --hot 50 --rate 300 --rounds 8 --seconds 10] [--model-control poll]

Two servers run at the same time with the same options, one with one model, one with all, of which some are hot. Rounds
alternate between them: Poisson arrivals at one rate, which the hot models share. Both are scraped by a Prometheus-like reader
meanwhile. The ratio of the p99 of each pair of rounds is printed with its spread, then the peak memory of both servers.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from loadtest.bench.spread import Spread, ratios
from loadtest.onnx_models import onnx_model
from loadtest.protocol import binary_request, wire_bytes
from loadtest.servers import HOST, Running, headrace, running

FEATURES, CLASSES = 64, 16
_CONNECTIONS = 16
_READY_TIMEOUT_S = 600.0
_MIB = 1 << 20


class RequestFailed(RuntimeError):
    """A server answered with an error, or not in time."""


@dataclass(frozen=True, slots=True)
class Round:
    """Latencies of one round, in microseconds."""

    latencies_us: Sequence[float]

    def percentile_us(self, percent: float) -> float:
        """Return a percentile of the latencies."""
        return float(np.percentile(self.latencies_us, percent))


def small_model() -> onnx.ModelProto:
    """Return a small classifier: Y = relu(X @ W + B), FP32 (batch, 64) to (batch, 16)."""
    values = np.random.default_rng(0)
    weights = {
        "W": values.standard_normal((FEATURES, CLASSES)).astype(np.float32),
        "B": values.standard_normal(CLASSES).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["X", "W"], ["XW"]),
        helper.make_node("Add", ["XW", "B"], ["XWB"]),
        helper.make_node("Relu", ["XWB"], ["Y"]),
    ]
    fp32 = TensorProto.FLOAT
    return onnx_model(nodes, {"X": (fp32, ("b", FEATURES))}, {"Y": (fp32, ("b", CLASSES))}, weights)


def write_repository(folder: Path, count: int) -> None:
    """Write `count` models with different weights.

    Args:
        folder: the repository.
        count: number of models, named m0000, m0001, ...
    """
    model = small_model()
    for number in range(count):
        version = folder / name_of(number) / "1"
        version.mkdir(parents=True)
        model.graph.initializer[1].CopyFrom(
            onnx.numpy_helper.from_array(np.full(CLASSES, number, np.float32), model.graph.initializer[1].name)
        )
        onnx.save(model, version / "model.onnx")
        (version.parent / "config.yaml").write_text("max_batch_size: 8\ndynamic_batching: {}\n")


def name_of(number: int) -> str:
    """Return the name of a model."""
    return f"m{number:04}"


class _Connection(asyncio.Protocol):
    """A connection with at most one request in flight; sets the future of each when its response is complete."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._response: asyncio.Future[bytes] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes) -> asyncio.Future[bytes]:
        """Send a request, and return the future of its status line."""
        self._response = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._response

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(received[:end]).lower()
        _, _, rest = head.partition(b"\r\ncontent-length:")
        length = int(rest.partition(b"\r\n")[0])
        if len(received) >= end + 4 + length and self._response is not None:
            received.clear()
            self._response.set_result(head[:12])

    def connection_lost(self, error: Exception | None) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error or RequestFailed("the server has closed the connection"))


class Client:
    """Open-loop client of one server.

    Args:
        server: the server.
        requests: bytes of a request to each hot model.
    """

    def __init__(self, server: Running, models: Sequence[str]) -> None:
        values = np.random.default_rng(1).standard_normal((1, FEATURES)).astype(np.float32)
        self._requests = [wire_bytes(binary_request(model, {"X": values}), server.port) for model in models]
        self._port = server.port
        self._idle: asyncio.Queue[_Connection] = asyncio.Queue()
        self._latencies_us: list[float] = []

    async def open(self) -> None:
        """Connect."""
        for _ in range(_CONNECTIONS):
            self._idle.put_nowait(await self._connect())

    def close(self) -> None:
        """Close all connections."""
        while not self._idle.empty():
            self._idle.get_nowait().transport.close()

    async def warm_up(self) -> None:
        """Send three requests to each model, which loads it and fills its latency table."""
        for request in self._requests * 3:
            await self._call(request)

    async def run(self, rate: float, seconds: float, seed: int) -> Round:
        """Send requests at random times, each to a random hot model.

        Args:
            rate: requests a second.
            seconds: duration.
            seed: of the times and the models.
        """
        chance = random.Random(seed)
        self._latencies_us = []
        tasks: set[asyncio.Task[None]] = set()
        start = due = time.perf_counter()
        gc.collect()
        gc.disable()
        try:
            while due < start + seconds:
                due += chance.expovariate(rate)
                delay = due - time.perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                task = asyncio.create_task(self._call(chance.choice(self._requests)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.gather(*tasks)
        finally:
            gc.enable()
        return Round(self._latencies_us)

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, HOST, self._port)
        return connection

    async def _call(self, request: bytes) -> None:
        begun = time.perf_counter()
        connection = await self._idle.get()
        if connection.transport.is_closing():  # the server closes idle connections
            connection = await self._connect()
        status = await connection.send(request)
        self._latencies_us.append((time.perf_counter() - begun) * 1e6)
        self._idle.put_nowait(connection)
        if not status.endswith(b" 200"):
            raise RequestFailed(f"a request got {status.decode('latin-1')}")


@contextmanager
def scraping(servers: Sequence[Running], interval_s: float) -> Iterator[None]:
    """Read `/metrics` of all servers at an interval, as Prometheus does; 0 for never."""
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(interval_s):
            for server in servers:
                connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
                connection.request("GET", "/metrics")
                connection.getresponse().read()
                connection.close()

    thread = threading.Thread(target=scrape, name="scrape", daemon=True)
    if interval_s:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if interval_s:
            thread.join()


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory of a process so far, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


async def measure(one: Running, many: Running, options: argparse.Namespace) -> tuple[list[Round], list[Round]]:
    """Run the rounds, alternating which server is first; returns those of the server with one model, and of that with many."""
    clients = (
        Client(one, [name_of(0)]),
        Client(many, [name_of(number * options.models // options.hot) for number in range(options.hot)]),
    )
    rounds: tuple[list[Round], list[Round]] = ([], [])
    for client in clients:
        await client.open()
        await client.warm_up()
        await client.run(options.rate, min(options.seconds, 3.0), 0)
    for number in range(options.rounds):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            rounds[index].append(await clients[index].run(options.rate, options.seconds, number + 1))
    for client in clients:
        client.close()
    return rounds


def report(rounds: tuple[list[Round], list[Round]], options: argparse.Namespace) -> str:
    """Return the table of the percentiles."""
    one, many = rounds
    lines = [
        f"{options.models} models, {options.hot} of them hot, {options.rate:g} requests/s, {options.rounds} pairs of rounds "
        f"of {options.seconds:g} s, --model-control {options.model_control}, /metrics every {options.scrape_s:g} s",
        "",
        "| percentile | one model, us | many models, us | many over one |",
        "|---|---|---|---|",
    ]
    for percent in (50, 90, 99, 99.9):
        ours, theirs = ([each.percentile_us(percent) for each in side] for side in (many, one))
        lines.append(
            f"| p{percent:g} | {_text(Spread.of(theirs), 0)} | {_text(Spread.of(ours), 0)} | {_text(ratios(ours, theirs), 2)} |"
        )
    return "\n".join(lines)


def _text(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} to {spread.high:.{digits}f})"


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures; return 1 if the server with many models has used more memory than allowed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.many_models", description=__doc__)
    parser.add_argument("--models", type=int, default=5000)
    parser.add_argument("--hot", type=int, default=50, help="models with requests")
    parser.add_argument("--rate", type=float, default=300.0, help="requests a second, to all hot models together")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of a round")
    parser.add_argument("--scrape-s", type=float, default=5.0, help="interval of reads of /metrics; 0 for none")
    parser.add_argument("--model-control", choices=["none", "poll"], default="none")
    parser.add_argument("--budget", default="1GiB", help="--host-memory-budget of both servers")
    parser.add_argument("--limit-gib", type=float, default=4.0, help="largest memory of the server with many models")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="headrace-many-") as name:
        folder = Path(name)
        write_repository(folder / "one", 1)
        write_repository(folder / "many", options.models)
        flags = ("--host-memory-budget", options.budget, "--model-control", options.model_control)
        # A group of its own: the end of thousands of models may take longer than `running` waits, and is not measured.
        commands = [
            replace(headrace(folder / each, name=each, options=flags), own_group=True) for each in ("one", "many")
        ]
        begun = time.monotonic()
        with (
            running(commands[1], folder, _READY_TIMEOUT_S) as many,
            running(commands[0], folder, _READY_TIMEOUT_S) as one,
        ):
            start_s = time.monotonic() - begun
            with scraping((one, many), options.scrape_s):
                rounds = asyncio.run(measure(one, many, options))
            peaks = [peak_bytes(each.pid) for each in (one, many)]
            sys.stdout.write(f"{report(rounds, options)}\n\n")
            sys.stdout.flush()
    out = sys.stdout
    out.write(f"start of both servers {start_s:.1f} s; peak memory {peaks[0] // _MIB} MiB with one model, ")
    out.write(f"{peaks[1] // _MIB} MiB with {options.models}\n")
    return int(peaks[1] > options.limit_gib * 1024 * _MIB)


if __name__ == "__main__":
    sys.exit(main())
