"""A run of `headrace bench`: prepares requests, checks that the server answers them, runs every load, collects figures."""

from __future__ import annotations

import asyncio
import csv
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from headrace.core.errors import BadRequest, HeadraceError, Unavailable
from headrace.server.commands.connection import ConnectionOptions

from headrace_bench import wire
from headrace_bench.grpc_pool import GrpcPool
from headrace_bench.http_pool import HttpPool
from headrace_bench.inputs import InputOptions, Request, make_requests
from headrace_bench.loads import Floats, constant_times, poisson_times
from headrace_bench.pool import NO_CONNECTION, TIMEOUT, Address, Answer, Pool, PoolOptions
from headrace_bench.processes import ClientProcesses, ClientSetup, PlannedLoad
from headrace_bench.processor import tree_cpu_s
from headrace_bench.regions import shared_inputs
from headrace_bench.results import merge_repeats, statistics_between, summarize
from headrace_bench.target import Control, GrpcControl, HttpControl, ServerUrl, tls_context

FORMAT = "headrace-bench"
_HTTP_OPEN_CONNECTIONS = 512
_GRPC_CONNECTIONS = 8
_OPEN_FIRST = 16


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load of a run.

    Attributes:
        mode: "closed", "constant", "poisson" or "trace".
        value: callers of a closed loop, or requests a second.
    """

    mode: str
    value: float

    @property
    def label(self) -> str:
        """Name in reports, by which two runs are compared."""
        if self.mode == "trace":
            return "trace"
        return f"concurrency {self.value:g}" if self.mode == "closed" else f"{self.mode} {self.value:g}/s"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a run.

    Attributes:
        url: address of the server.
        model: name of the model.
        version: version of the model; "" lets the server choose.
        points: the loads, in order.
        trace_s: arrival times of a trace, float64[n], ascending from 0; None without one.
        duration_s: measured time of each load; of a trace 0 for all of it.
        warm_up_s: time before it.
        repeats: runs of each load.
        processes: number of client processes.
        connections: number of connections at most; 0 for the default.
        inputs: sources of the inputs.
        uses_shared_memory: inputs in system shared memory.
        as_json: HTTP bodies of JSON only.
        slo_ms: bound of goodput; None for none.
        is_checked: compare answers with the first ones.
        headers: further headers, without the key.
        timeout_s: time to wait for an answer.
        connection: TLS files and key.
        server_pid: process of the server on this machine, whose processor time is measured; 0 for none.
    """

    url: ServerUrl
    model: str
    version: str
    points: Sequence[LoadPoint]
    trace_s: Floats | None
    duration_s: float
    warm_up_s: float
    repeats: int
    processes: int
    connections: int
    inputs: InputOptions
    uses_shared_memory: bool
    as_json: bool
    slo_ms: float | None
    is_checked: bool
    headers: dict[str, str]
    timeout_s: float
    connection: ConnectionOptions = field(repr=False)
    server_pid: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """Callbacks of a run, for a progress bar.

    Attributes:
        begin: a load begins: its label, its length in seconds.
        progress: requests and errors so far.
        point: figures of a load are complete.
    """

    begin: Callable[[str, float], None] = lambda _label, _seconds: None
    progress: Callable[[int, int], None] = lambda _requests, _errors: None
    point: Callable[[dict[str, Any]], None] = lambda _point: None


class _ServerRead(NamedTuple):
    """Statistics and processor time of the server at a time of the monotonic clock in seconds."""

    at_s: float
    statistics: dict[str, Any] | None
    cpu_s: float


def read_arrivals(path: Path, model: str) -> Floats:
    """Read arrival times, float64[n], ascending from 0: one number a line, or a .csv with the column `seconds`.

    Args:
        path: the file. Of a .csv with the column `model` only the lines of the model, and those without a name, are read.
        model: name of the model.

    Raises:
        BadRequest: the file cannot be read, or holds something else; the message names the line.
    """
    cure = "write one arrival time in seconds a line, or a .csv with the column `seconds`"
    times = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            columns: list[str] = ["seconds"]
            for number, cells in enumerate(csv.reader(file), 1):
                if number == 1 and "seconds" in cells:
                    columns = cells
                elif cells:
                    line = dict(zip(columns, cells, strict=False))
                    try:
                        time_s = float(line["seconds"])
                    except (ValueError, KeyError):
                        raise BadRequest(f"{path}:{number}: {','.join(cells)[:80]!r} is no time: {cure}") from None
                    if line.get("rows", "1") not in ("", "1"):
                        raise BadRequest(
                            f"{path}:{number}: the request has {line['rows'][:20]} rows, and all requests of a run are alike: "
                            "remove the column `rows`, and give the rows of all requests with --batch"
                        )
                    if line.get("model", model) in ("", model):
                        times.append(time_s)
    except OSError as error:
        raise BadRequest(f"{path}: cannot be read: {error.strerror or error}: {cure}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path}: is no text: {cure}") from None
    array = np.sort(np.array(times, np.float64))
    if not len(array) or not np.isfinite(array).all():
        raise BadRequest(f"{path}: holds no arrival, or one that is not finite: {cure}")
    shifted: Floats = array - array[0]
    return shifted


class Bench:
    """A run against one server.

    Args:
        options: of the run.
        events: callbacks.
    """

    def __init__(self, options: BenchOptions, events: Events) -> None:
        self._options, self._events = options, events
        self._processes: ClientProcesses | None = None
        self._is_interrupted = False
        self._points: list[dict[str, Any]] = []
        self._control: Control

    @property
    def has_begun(self) -> bool:
        """True once client processes run: `interrupt` then keeps what was measured."""
        return self._processes is not None

    def interrupt(self) -> None:
        """End the run; `run` returns what was measured so far."""
        self._is_interrupted = True
        if self._processes is not None:
            self._processes.stop()

    async def run(self) -> dict[str, Any]:
        """Run all loads.

        Returns:
            The document of `--json`.

        Raises:
            HeadraceError: the server cannot be reached, does not have the model, or refuses its inputs.
        """
        options = self._options
        if options.server_pid:
            tree_cpu_s(options.server_pid)
        self._control = control = await asyncio.to_thread(_open_control, options)
        metadata = await asyncio.to_thread(control.metadata)
        config = await asyncio.to_thread(control.config)
        server = await asyncio.to_thread(control.server)
        requests, rows = make_requests(metadata, config, options.inputs)
        with self._encoded(requests) as encoded:
            expected = await self._try_requests(encoded)
            setup = _setup(options, encoded, expected)
            count = min(options.processes, int(max(point.value for point in options.points)) or 1)
            if any(point.mode != "closed" for point in options.points):
                count = options.processes
            async with ClientProcesses(count, setup) as self._processes:
                for number, point in enumerate(options.points):
                    if self._is_interrupted:
                        break
                    await self._measure(point, number, rows)
        return self._document(server, requests, rows, count)

    @contextmanager
    def _encoded(self, requests: Sequence[Request]) -> Iterator[list[bytes]]:
        """Encode the requests; tensors are in shared memory until the block ends, if the options say so."""
        if not self._options.uses_shared_memory:
            yield [self._encode(request, None) for request in requests]
            return
        with shared_inputs(self._control, requests) as placements:
            yield [self._encode(request, places) for request, places in zip(requests, placements, strict=True)]

    def _encode(self, request: Request, placements: wire.Placements | None) -> bytes:
        options = self._options
        if options.url.protocol == "grpc":
            return wire.grpc_message(options.model, options.version, request, placements)
        headers = {**options.connection.headers(), **options.headers}
        is_json = options.as_json
        return wire.http_request(
            options.url, options.model, options.version, request, headers, as_json=is_json, placements=placements
        )

    async def _try_requests(self, encoded: Sequence[bytes]) -> list[Answer]:
        """Send the first request, or with the check of answers each one, and return the answers.

        Raises:
            HeadraceError: a request fails.
        """
        options = self._options
        answers = await try_once(options, encoded if options.is_checked else encoded[:1])
        return answers if options.is_checked else []

    async def _measure(self, point: LoadPoint, number: int, rows: int) -> None:
        """Run a load, repeated if the options say so, and keep its figures."""
        runs: list[dict[str, Any]] = []
        for repeat in range(self._options.repeats):
            if self._is_interrupted:
                break
            runs.append(await self._run_once(point, [self._options.inputs.seed, number, repeat], rows, repeat))
        if runs:
            result = {"label": point.label, "mode": point.mode, "value": point.value, **merge_repeats(runs)}
            self._points.append(result)
            self._events.point(result)

    async def _run_once(self, point: LoadPoint, seed: list[int], rows: int, repeat: int) -> dict[str, Any]:
        options, processes = self._options, self._processes
        assert processes is not None
        times_s = _arrivals(options, point, np.random.default_rng(seed))
        warm_up_s = options.warm_up_s
        seconds = options.duration_s
        if options.trace_s is not None and times_s is not None:
            seconds = max(float(times_s[-1]) - warm_up_s, 0.0) + 1e-6 if len(times_s) else 1e-6
        load = _planned(options, point, times_s, warm_up_s + seconds)
        label = f"{point.label}, run {repeat + 1}" if options.repeats > 1 else point.label
        self._events.begin(label, warm_up_s + seconds)
        reads: list[_ServerRead] = []
        reader: asyncio.Task[None] | None = None

        def start(start_s: float) -> None:
            nonlocal reader
            first_s = start_s + warm_up_s
            reader = asyncio.create_task(self._read_statistics(reads, first_s, first_s + seconds))

        outcomes = await processes.run(load, self._events.progress, start)
        first_s = outcomes.start_s + warm_up_s
        last_s = first_s + seconds
        if self._is_interrupted:
            last_s = min(last_s, outcomes.end_s)
            first_s = min(first_s, last_s)
        is_open = point.mode != "closed"
        figures = summarize(outcomes, first_s, last_s, is_open=is_open, slo_ms=options.slo_ms, rows=rows)
        if reader is not None:
            if self._is_interrupted:
                reader.cancel()
                reads.append(await self._read_server())
            await asyncio.gather(reader, return_exceptions=True)
        figures["server"] = statistics_between(reads[0].statistics, reads[-1].statistics) if len(reads) > 1 else None
        if options.server_pid and len(reads) > 1:
            cpu_s = reads[-1].cpu_s - reads[0].cpu_s
            is_between = (outcomes.done_s >= reads[0].at_s) & (outcomes.done_s < reads[-1].at_s)
            figures["server_cpu_us_per_request"] = cpu_s / max(1, int(is_between.sum())) * 1e6
            figures["server_cores"] = cpu_s / max(reads[-1].at_s - reads[0].at_s, 1e-9)
        figures["interrupted"] = self._is_interrupted
        return figures

    async def _read_server(self) -> _ServerRead:
        statistics = await asyncio.to_thread(self._control.statistics)
        pid = self._options.server_pid
        return _ServerRead(time.monotonic(), statistics, tree_cpu_s(pid) if pid else 0.0)

    async def _read_statistics(self, reads: list[_ServerRead], first_s: float, last_s: float) -> None:
        """Read the server's statistics at the begin and at the end of the measured time."""
        for at_s in (first_s, last_s):
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            reads.append(await self._read_server())

    def _document(self, server: dict[str, Any], requests: Sequence[Request], rows: int, count: int) -> dict[str, Any]:
        options = self._options
        return {
            "format": FORMAT,
            "format_version": 1,
            "headrace": version("headrace"),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "url": options.url.text,
            "protocol": options.url.protocol,
            "model": options.model,
            "model_version": options.version,
            "server": {name: server.get(name, "") for name in ("name", "version")},
            "inputs": [
                {"name": tensor.name, "datatype": tensor.datatype.name, "shape": list(tensor.shape)}
                for tensor in requests[0]
            ],
            "request_bytes": sum(len(tensor.raw) for tensor in requests[0]),
            "rows": rows,
            "distinct_requests": len(requests),
            "source": _source(options),
            "client": {
                "processes": count,
                "cores": os.cpu_count(),
                "machine": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            },
            "duration_s": options.duration_s,
            "warm_up_s": options.warm_up_s,
            "repeats": options.repeats,
            "slo_ms": options.slo_ms,
            "checked": options.is_checked,
            "interrupted": self._is_interrupted,
            "points": self._points,
        }


async def try_once(options: BenchOptions, encoded: Sequence[bytes]) -> list[Answer]:
    """Send requests one after the other and return their answers.

    Raises:
        Unavailable: the server cannot be reached, or does not answer.
        HeadraceError: a request fails; the message has the server's error.
    """
    answers: list[Answer] = []
    outcomes: asyncio.Queue[tuple[int, str, str]] = asyncio.Queue()

    def finished(index: int, due_s: float, sent_s: float, status: str, text: str) -> None:
        del due_s, sent_s
        outcomes.put_nowait((index, status, text))

    def keep(index: int, answer: Answer) -> bool:
        del index
        answers.append(answer)
        return True

    url, tls = options.url, _tls_files(options)
    context = tls_context(tls["ca"], tls["cert"], tls["key"], url.protocol) if tls else None
    pool_options = PoolOptions(Address(url.host, url.port, context), 1, options.timeout_s, finished, keep)
    pool: Pool = (
        HttpPool(encoded, pool_options)
        if url.protocol == "http"
        else GrpcPool(encoded, _grpc_headers(options), pool_options)
    )
    try:
        for index in range(len(encoded)):
            pool.submit(index, time.monotonic())
            _, status, text = await outcomes.get()
            if status:
                raise _first_error(options, status, text)
    finally:
        pool.close()
    return answers


def _first_error(options: BenchOptions, status: str, text: str) -> HeadraceError:
    """Return the error of a request that fails before the load."""
    url = options.url
    if status in (NO_CONNECTION, TIMEOUT):
        return Unavailable(f"{url.text}: {status} ({text}): check the address, and read the server's log")
    cures = {
        "400": "give inputs that the model accepts: --shape, --range, --npz or --pictures",
        "INVALID_ARGUMENT": "give inputs that the model accepts: --shape, --range, --npz or --pictures",
        "415": "try --body json: the server may lack the binary extension",
        "422": "try --body json: the server may lack the binary extension",
        "500": "read the server's log"
        + (
            ""
            if options.as_json or options.uses_shared_memory
            else "; a server without the binary extension needs --body json"
        ),
    }
    number: int | str = int(status) if status.isdigit() else status
    cure = options.connection.refusal_cure(number, url.host) or cures.get(status, "read the server's log")
    return HeadraceError(f"the first request to '{options.model}' failed with {status} ({text}): {cure}")


def _open_control(options: BenchOptions) -> Control:
    url, arguments = options.url, (options.model, options.version, options.connection, options.timeout_s)
    if url.protocol == "http":
        return HttpControl(url, *arguments, headers=options.headers)
    return GrpcControl(url, *arguments, headers=options.headers)


def _tls_files(options: BenchOptions) -> dict[str, str] | None:
    files = options.connection
    return {"ca": files.ca, "cert": files.cert, "key": files.key} if options.url.is_tls else None


def _grpc_headers(options: BenchOptions) -> bytes:
    return wire.grpc_headers(options.url, {**options.connection.headers(), **options.headers})


def _setup(options: BenchOptions, encoded: Sequence[bytes], expected: Sequence[Answer]) -> ClientSetup:
    url = options.url
    headers = _grpc_headers(options) if url.protocol == "grpc" else b""
    return ClientSetup(
        url.protocol, url.host, url.port, _tls_files(options), options.timeout_s, encoded, headers, expected
    )


def _arrivals(options: BenchOptions, point: LoadPoint, random: np.random.Generator) -> Floats | None:
    """Return the due times of an open loop from its start, warm-up included; None for a closed loop."""
    seconds = options.warm_up_s + options.duration_s
    match point.mode:
        case "constant":
            return constant_times(point.value, seconds)
        case "poisson":
            return poisson_times(point.value, seconds, random)
        case "trace":
            assert options.trace_s is not None
            return options.trace_s[options.trace_s < seconds] if options.duration_s else options.trace_s
    return None


def _planned(options: BenchOptions, point: LoadPoint, times_s: Floats | None, seconds: float) -> PlannedLoad:
    """Return the load of a point with its number of connections."""
    is_http = options.url.protocol == "http"
    if times_s is None:
        callers = int(point.value)
        connections = (
            callers if is_http else min(callers, options.connections or max(_GRPC_CONNECTIONS, options.processes))
        )
        return PlannedLoad(callers, None, seconds, connections, connections)
    connections = options.connections or (
        _HTTP_OPEN_CONNECTIONS if is_http else max(_GRPC_CONNECTIONS, options.processes)
    )
    return PlannedLoad(0, times_s, seconds, connections, min(connections, max(_OPEN_FIRST, options.processes)))


def _source(options: BenchOptions) -> str:
    """Return a text of where the inputs come from and travel."""
    inputs = options.inputs
    source = str(inputs.npz or inputs.pictures or "random")
    form = "shared memory" if options.uses_shared_memory else "JSON" if options.as_json else "body"
    return f"{source}, {form}"
