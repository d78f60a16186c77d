"""Front-end processes: latency of a lone request, and the engine process alone. Linux only.

    python -m loadtest.front_ends lone       one caller: one process, one front end, and a ping-pong of two processes
    python -m loadtest.front_ends engine     processor time of the engine process for a request, by the size of groups

`lone` compares the latency that a front end adds with a ping-pong over a Unix socket: the least that a second process adds on
this machine. Rounds alternate, so that what slows the machine slows all three.

`engine` plays the supervisor: it starts the engine process as `headrace serve --front-ends N` does. It plays the front ends
too: each keeps a number of members in flight, in groups of one size, and sends a group whenever one is answered. No HTTP is
involved. Processor time depends less on other programs of the machine than rates do. Each figure is that of the cheapest round,
with the median of all rounds beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import select
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from headrace.core.clock import NS_PER_S, NS_PER_US, monotonic_ns
from headrace.core.tensor import ModelSpec
from headrace.server.front_ends import frames
from headrace.server.front_ends.channel import Ports, Start, SupervisorChannel, close_all, send_start
from headrace.server.front_ends.control_state import create_control_state
from headrace.server.front_ends.counter_array import CounterArray
from headrace.server.front_ends.handshake import Hello, connect, engine_listener
from headrace.server.front_ends.tensors import TensorReader, TensorWriter
from headrace.server.front_ends.version_table import VersionRow, decode_table
from headrace.server.settings import Settings

from loadtest.bench.report import markdown_table
from loadtest.bench.results import Spread, differences
from loadtest.load import bench_point, url_of
from loadtest.protocol import Array
from loadtest.servers import HOST, ROOT, headrace, pinned, running

# A child process of the supervisor, which forks it elsewhere; its argument is the descriptor of the channel.
_CHILD = """
import socket, sys
from headrace.server.front_ends.child_main import run
from headrace.server.program import end_process
end_process(run(socket.socket(fileno=int(sys.argv[1]))))
"""
_PROGRAM = (sys.executable, "-P", "-c", _CHILD)
_READ_BYTES = 1 << 20
_SILENCE_S = 60.0
# Offset of the arrival times in a REQUESTS frame: behind the header and four sizes.
_TIMES_OFFSET = frames.HEADER_BYTES + 16
_GROUP_OFFSET = 8
# Rows of the batch in an ANSWERS frame.
_ROWS, _ROWS_OFFSET = struct.Struct("<I"), frames.HEADER_BYTES + 4
# One of so many answers is compared.
_CHECKED = 64
# Responses whose codec times a front end sends in one frame, as `RemoteRecorder` does.
_COUNTED = 512


class EngineFailed(RuntimeError):
    """The engine process did not start, or answered with an error or a wrong result."""


def thread_times(pid: int) -> dict[int, int]:
    """Return the processor time of each thread of a process in nanoseconds; the main thread has the number of the process."""
    times: dict[int, int] = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        try:
            times[int(path.name)] = int((path / "schedstat").read_text().split()[0])
        except FileNotFoundError:  # it has ended
            continue
    return times


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Result of one round.

    Attributes:
        requests: answered.
        loop_us: processor time of the event loop's thread for each request.
        other_us: of all other threads: instances with the model's computation.
        batch_rows: mean rows of a batch.
        duration_s: of the round.
    """

    requests: int
    loop_us: float
    other_us: float
    batch_rows: float
    duration_s: float

    @property
    def total_us(self) -> float:
        """Processor time of the process for each request."""
        return self.loop_us + self.other_us


class SyntheticFrontEnd:
    """One front end: keeps groups in flight and counts answers. Ownership: the event loop.

    Args:
        sock: data stream, connected.
        row: version that serves the requests.
        inputs: arrays by name with one row for each member of a group.
        groups: in flight.
        expected: outputs of those rows, with which every 64th answer is compared; None compares nothing.

    Attributes:
        answered: members with an answer.
        batches: batches of which they were a part, each counted by that part.
        outputs: of the latest answer that was read.
    """

    def __init__(
        self,
        sock: socket.socket,
        row: VersionRow,
        inputs: Mapping[str, Array],
        groups: int,
        expected: Mapping[str, Array] | None = None,
    ) -> None:
        self._sock = sock
        self._expected = expected
        self._groups = groups
        spec, members = row.spec, len(next(iter(inputs.values())))
        self._reader = TensorReader(spec.outputs)
        block, content, size = TensorWriter(spec.inputs).write((inputs,), 0)
        arrival, rows = [0] * members, [1] * members
        self._frame = bytearray(b"".join(frames.requests_frame(0, row.number, arrival, rows, block, content, size)))
        self._times = np.frombuffer(self._frame, "<i8", members, _TIMES_OFFSET)
        self._group = np.frombuffer(self._frame, "<u8", 1, _GROUP_OFFSET)
        self._counts = frames.message_frame(frames.COUNTS, struct.pack("<q", 20_000) * 2 * _COUNTED, row.number)
        self._counted = 0
        self._members = members
        self._missing: dict[int, int] = {}
        self._last = 0
        self._received = b""
        self._is_stopping = False
        self.outputs: dict[str, Array] = {}
        self.answered = self._frames = 0
        self.batches = 0.0

    @property
    def is_idle(self) -> bool:
        """True if no group is in flight."""
        return not self._missing

    def start(self) -> None:
        """Send the first groups."""
        self._is_stopping = False
        self._send(self._groups)

    def stop(self) -> None:
        """Send no further groups."""
        self._is_stopping = True

    def _send(self, count: int) -> None:
        self._times[:] = monotonic_ns()
        parts: list[bytes] = []
        for _ in range(count):
            self._last += 1
            self._group[0] = self._last
            self._missing[self._last] = self._members
            parts.append(bytes(self._frame))
        if self.answered - self._counted >= _COUNTED:
            self._counted += _COUNTED
            parts.append(self._counts)
        content = b"".join(parts)
        sent = self._sock.send(content)
        while sent < len(content):
            select.select([], [self._sock], [], _SILENCE_S)
            sent += self._sock.send(content[sent:])

    def finish(self) -> None:
        """Wait for the answers of all groups in flight."""
        while self._missing:
            if not select.select([self._sock], [], [], _SILENCE_S)[0]:
                raise EngineFailed(f"{len(self._missing)} groups have no answer after {_SILENCE_S:g} s")
            self.receive()

    def receive(self) -> None:
        """Read the answers that have arrived, and send a group for each that is complete."""
        received = self._sock.recv(_READ_BYTES)
        if not received:
            raise EngineFailed("the engine has closed the stream")
        data = self._received + received if self._received else received
        offset, complete = 0, 0
        while len(data) - offset >= frames.HEADER_BYTES:
            size, kind, _, members, group = frames.HEADER.unpack_from(data, offset)
            if offset + size > len(data):
                break
            if kind in (frames.RELEASE, frames.NOTICE):
                offset += size
                continue
            if kind != frames.ANSWERS:
                raise EngineFailed(f"the engine answered with {_describe(data, kind, offset, offset + size)}")
            if not self._frames % _CHECKED:
                self._check(data, offset, offset + size)
            self._frames += 1
            self.answered += members
            self.batches += members / _ROWS.unpack_from(data, offset + _ROWS_OFFSET)[0]
            left = self._missing[group] = self._missing[group] - members
            if not left:
                del self._missing[group]
                complete += 1
            offset += size
        self._received = data[offset:]
        if complete and not self._is_stopping:
            self._send(complete)

    def _check(self, data: bytes, start: int, end: int) -> None:
        answer = frames.parse_answers(data, start, end)
        outputs = self._reader.read(self._reader.layout(answer.block), data, answer.data_start, answer.data_end)
        self.outputs = outputs
        for name, rows in (self._expected or {}).items():
            part = rows[answer.first : answer.first + answer.members]
            if not np.allclose(outputs[name], part, rtol=1e-4, atol=1e-5):
                raise EngineFailed(
                    f"output '{name}' of members from {answer.first} differs from that of single requests"
                )


def prepared_rows(spec: ModelSpec, rows: int) -> dict[str, Array]:
    """Return inputs of `rows` different rows, by name."""
    inputs: dict[str, Array] = {}
    for tensor in spec.inputs.values():
        shape = (rows, *(max(size, 1) for size in tensor.shape[1:]))
        values = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape) % 17
        inputs[tensor.name] = values.astype(tensor.datatype.dtype)
    return inputs


def _describe(data: bytes, kind: int, start: int, end: int) -> str:
    if kind == frames.ERROR:
        return repr(frames.parse_message(data, start, end).content)
    return f"a frame of kind {kind}"


class EngineAlone:
    """An engine process with synthetic front ends. Ownership: the event loop; use it as an async context.

    Args:
        repository: model repository.
        model: name of the only model that it loads.
        front_ends: number of synthetic front ends.
        cpus: cores of the engine; None for all.
    """

    def __init__(self, repository: Path, model: str, front_ends: int, cpus: tuple[int, ...] | None = None) -> None:
        self._settings = Settings(
            (repository,), model_control="explicit", load_model=(model,), grpc=False, front_ends=front_ends, state_dir="",
            http_port=0,
        )  # fmt: skip
        self._model, self._front_ends, self._cpus = model, front_ends, cpus
        self._sockets: list[socket.socket] = []
        self._row: VersionRow | None = None

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    async def __aenter__(self) -> EngineAlone:
        """Start the engine, wait until the model serves, and connect the front ends."""
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[str] = asyncio.Queue()
        self._start_process()
        try:
            while (message := await asyncio.wait_for(self._messages.get(), _SILENCE_S)) != "loaded":
                if message in ("ended", "refused"):
                    raise EngineFailed(f"the engine process has not started: {message}")
            for number in range(1, self._front_ends + 1):
                await self._connect(number)
        except BaseException:
            self._stop()
            raise
        return self

    def _start_process(self) -> None:
        self._arrays = [CounterArray.create() for _ in range(self._front_ends + 1)]
        self._listener = engine_listener()
        descriptors = [array.fd for array in self._arrays]
        self._start = Start(
            settings=self._settings,
            number=0,
            parent=os.getpid(),
            token=secrets.token_bytes(16),
            engine=self._listener.getsockname(),
            listener=self._listener.fileno(),
            ports=Ports("http://", "", ""),
            model_filter={},
            first_model="",
            arrays=descriptors,
            control_state=create_control_state(),
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        send_start(ours, self._start)
        inherited = (theirs.fileno(), self._listener.fileno(), self._start.control_state, *descriptors)
        command = [*pinned(self._cpus), *_PROGRAM, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=inherited)
        theirs.close()
        self._channel = SupervisorChannel(ours, self._on_message, lambda: self._messages.put_nowait("ended"))

    async def __aexit__(self, *error: object) -> None:
        """Stop the engine."""
        self._stop()

    def _stop(self) -> None:
        for sock in self._sockets:
            self._loop.remove_reader(sock)
            sock.close()
        self._channel.send("stop")
        try:
            self._process.wait(_SILENCE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        os.close(self._start.control_state)
        self._channel.close()
        self._listener.close()

    def _on_message(self, name: str, _content: Any, descriptors: Sequence[int]) -> None:
        close_all(descriptors)
        self._messages.put_nowait(name)

    async def _connect(self, number: int) -> None:
        hello = Hello(self._start.token, "stream", number)
        sock, _, descriptors = await connect(self._start.engine, hello)
        close_all(descriptors)
        self._sockets.append(sock)
        data, name = b"", ""
        while name != "table":
            data += await asyncio.wait_for(self._loop.sock_recv(sock, _READ_BYTES), _SILENCE_S)
            while len(data) >= frames.HEADER_BYTES and len(data) >= (size := frames.frame_bytes(data, 0)):
                notice, data = frames.parse_message(data, 0, size), data[size:]
                name, content = notice.content
                if name == "table":
                    await self._loop.sock_sendall(sock, frames.message_frame(frames.ACKNOWLEDGED, group=notice.group))
                    self._row = next((row for row in decode_table(content) if row.spec.name == self._model), None)

    async def drive(self, members: int, callers: int, seconds: float, rounds: int) -> list[EngineSample]:
        """Send groups for some rounds.

        Args:
            members: of each group.
            callers: members in flight of each front end, rounded to whole groups.
            seconds: of each round.
            rounds: number of rounds, behind half a round that does not count.

        Returns:
            One sample for each round.

        Raises:
            EngineFailed: an answer is an error, or wrong.
        """
        row = self._row
        if row is None:
            raise EngineFailed(f"the engine does not serve '{self._model}'")
        inputs = prepared_rows(row.spec, members)
        expected = await self._outputs(row, inputs, members)
        front_ends = [
            SyntheticFrontEnd(sock, row, inputs, max(callers // members, 1), expected) for sock in self._sockets
        ]
        with self._reading(front_ends) as failure:
            await _until(failure, seconds / 2)
            return [await self._round(front_ends, failure, seconds) for _ in range(rounds)]

    async def _outputs(self, row: VersionRow, inputs: Mapping[str, Array], rows: int) -> Mapping[str, Array]:
        """Return the outputs of rows, each sent as a request of its own."""
        parts: list[Mapping[str, Array]] = []
        for index in range(rows):
            single = {name: array[index : index + 1] for name, array in inputs.items()}
            front_end = SyntheticFrontEnd(self._sockets[0], row, single, 1)
            with self._reading([front_end]) as failure:
                front_end.stop()
                while not front_end.is_idle:
                    await _until(failure, 0.001)
            parts.append(front_end.outputs)
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    @contextmanager
    def _reading(self, front_ends: Sequence[SyntheticFrontEnd]) -> Iterator[asyncio.Future[None]]:
        """Start front ends, and read their answers; the future gets the first error. Waits for the last answers at the end."""
        failure: asyncio.Future[None] = self._loop.create_future()

        def receive(front_end: SyntheticFrontEnd) -> None:
            try:
                front_end.receive()
            except Exception as error:
                if not failure.done():
                    failure.set_exception(error)

        for sock, front_end in zip(self._sockets, front_ends, strict=False):
            self._loop.add_reader(sock, receive, front_end)
            front_end.start()
        try:
            yield failure
        finally:
            for sock, front_end in zip(self._sockets, front_ends, strict=False):
                self._loop.remove_reader(sock)
                front_end.stop()
                if not failure.done() or failure.exception() is None:
                    front_end.finish()

    async def _round(
        self, front_ends: Sequence[SyntheticFrontEnd], failure: asyncio.Future[None], seconds: float
    ) -> EngineSample:
        begun = _totals(front_ends), thread_times(self.pid), monotonic_ns()
        await _until(failure, seconds)
        while _totals(front_ends)[0] == begun[0][0]:
            if monotonic_ns() - begun[2] > _SILENCE_S * NS_PER_S:
                raise EngineFailed(f"the engine has answered nothing for {_SILENCE_S:g} s")
            await _until(failure, 0.01)
        (requests, batches), times, now_ns = _totals(front_ends), thread_times(self.pid), monotonic_ns()
        requests, batches = requests - begun[0][0], batches - begun[0][1]
        used = {thread: time_ns - begun[1].get(thread, 0) for thread, time_ns in times.items()}
        loop_ns = used.pop(self.pid)
        per_request = max(requests, 1) * NS_PER_US
        return EngineSample(
            requests,
            loop_ns / per_request,
            sum(used.values()) / per_request,
            requests / batches if batches else 0.0,
            (now_ns - begun[2]) / NS_PER_S,
        )


def _totals(front_ends: Sequence[SyntheticFrontEnd]) -> tuple[int, float]:
    return sum(each.answered for each in front_ends), sum(each.batches for each in front_ends)


async def _until(failure: asyncio.Future[None], seconds: float) -> None:
    """Wait for a time, or raise the error."""
    done, _ = await asyncio.wait([failure], timeout=seconds)
    for each in done:
        each.result()


_MESSAGE_BYTES = 256


class _Echo(asyncio.Protocol):
    def __init__(self, sizes: tuple[int, int], ended: asyncio.Future[None]) -> None:
        self._request_bytes, self._answer = sizes[0], bytes(sizes[1])
        self._received = 0
        self._ended = ended
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are of no common class

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += len(data)
        if self._received >= self._request_bytes:
            self._received = 0
            self._transport.write(self._answer)

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


class _Caller(asyncio.Protocol):
    def __init__(self, sizes: tuple[int, int], seconds: float) -> None:
        self._request, self._answer_bytes = bytes(sizes[0]), sizes[1]
        self.times_us: list[float] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._seconds = seconds
        self._end_s = 0.0
        self._sent_s = 0.0
        self._received = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._received < self._answer_bytes:
            return
        now_s = time.perf_counter()
        if self._end_s:
            self.times_us.append((now_s - self._sent_s) * 1e6)
        else:  # the other process has started
            self._end_s = now_s + self._seconds
        if now_s < self._end_s:
            self._send()
        else:
            assert self._transport is not None
            self._transport.close()
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the other process has ended"))

    def _send(self) -> None:
        assert self._transport is not None
        self._received = 0
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)


def ping_pong_us(
    seconds: float,
    cores: tuple[int, ...],
    sizes: tuple[int, int] = (_MESSAGE_BYTES, _MESSAGE_BYTES),
    *,
    is_tcp: bool = False,
) -> float:
    """Return the median round trip of a message between two uvloop processes in microseconds.

    Args:
        seconds: length of the sample.
        cores: of both processes.
        sizes: bytes of the request and of the answer.
        is_tcp: over the loopback interface; over a Unix socket without it.
    """
    here, there = _tcp_pair() if is_tcp else socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    command = [*pinned(cores), sys.executable, "-m", "loadtest.front_ends", "echo", str(there.fileno())]
    command += map(str, sizes)
    with there, subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()]):
        there.close()
        before = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, cores)
            return statistics.median(uvloop.run(_call(here, sizes, seconds)))
        finally:
            os.sched_setaffinity(0, before)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection over the loopback interface, as servers set it."""
    with socket.create_server((HOST, 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for sock in (here, there):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


async def _call(sock: socket.socket, sizes: tuple[int, int], seconds: float) -> list[float]:
    loop = asyncio.get_running_loop()
    _, caller = await loop.connect_accepted_socket(lambda: _Caller(sizes, seconds), sock)
    await caller.ended
    return caller.times_us


async def _echo(sock: socket.socket, sizes: tuple[int, int]) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    await loop.connect_accepted_socket(lambda: _Echo(sizes, ended), sock)
    await ended


def _lone(options: argparse.Namespace) -> None:
    """Measure one caller of the model with and without a front end, and the ping-pong, in turn; print p50 of the rounds."""
    cpus = _cpus(options)
    one_process, front_end, ping_pong = list[float](), list[float](), list[float]()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for front_ends in (0, 1):
            name, count = f"{front_ends} front ends", ("--front-ends", str(front_ends))
            command = headrace(options.repository, name=name, models=(options.model,), options=count, cpus=cpus)
            servers.append(stack.enter_context(running(command, folder)))
        words = ("--concurrency", "1", "--processes", "1", "--warm-up", "0.3")
        for _ in range(options.rounds):
            for server, medians_us in zip(servers, (one_process, front_end), strict=True):
                point = bench_point(url_of(server, options.protocol), options.model, *words, seconds=options.seconds)
                medians_us.append(point["latency_ms"]["p50"] * 1e3)
            ping_pong.append(ping_pong_us(options.seconds / 2, cpus or tuple(os.sched_getaffinity(0))))
    measured = {"one process": one_process, "one front end": front_end, "ping-pong of two processes": ping_pong}
    rows = [(name, f"{min(us):.0f}", f"{statistics.median(us):.0f}") for name, us in measured.items()]
    print("\n".join(markdown_table(("p50 of one caller", "us, best round", "median round"), rows)))
    added = [end - alone for end, alone in zip(front_end, one_process, strict=True)]
    for name, spread in (
        ("added by the front end", Spread.of(added)),
        ("beyond the ping-pong", differences(added, ping_pong)),
    ):
        print(
            f"{name}: {spread.median:.0f} us (median of {spread.rounds} rounds; {spread.low:.0f} to {spread.high:.0f})"
        )


async def _engine(options: argparse.Namespace) -> None:
    rows: list[Sequence[str]] = []
    for front_ends in options.front_ends:
        async with EngineAlone(options.repository, options.model, front_ends, _cpus(options)) as engine:
            for members in options.members:
                samples = await engine.drive(members, options.callers, options.seconds, options.rounds)
                best = min(samples, key=lambda sample: sample.total_us)
                median = statistics.median(sample.total_us for sample in samples)
                figures = (best.total_us, best.loop_us, best.other_us, median)
                cells = (*(f"{figure:.2f}" for figure in figures), f"{best.batch_rows:.0f}")
                rows.append((str(front_ends), str(members), *cells))
    head = (
        "front ends",
        "members of a group",
        "us a request",
        "event loop",
        "other threads",
        "median",
        "rows of a batch",
    )
    print("\n".join(markdown_table(head, rows)))


def _cpus(options: argparse.Namespace) -> tuple[int, ...] | None:
    return tuple(options.cpus) if options.cpus else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m loadtest.front_ends", description=summary)
    commands = parser.add_subparsers(dest="command", required=True)
    lone, engine, echo = (commands.add_parser(name) for name in ("lone", "engine", "echo"))
    echo.add_argument("fd", type=int, help="inherited socket of the other process of a ping-pong")
    echo.add_argument("sizes", type=int, nargs=2, help="bytes of a request and of an answer")
    for command, rounds, seconds in ((lone, 12, 1.0), (engine, 8, 0.5)):
        add = command.add_argument
        add("--repository", type=Path, default=Path("model_repository"))
        add("--model", default="tiny")
        add("--rounds", type=int, default=rounds, help="(default: %(default)s)")
        add("--seconds", type=float, default=seconds, help="of a round (default: %(default)s)")
        add("--cpus", type=int, nargs="+", help="cores of the measured servers (default: all)")
    lone.add_argument("--protocol", choices=("http", "grpc"), default="http")
    add = engine.add_argument
    add("--front-ends", type=int, nargs="+", default=[1, 6], help="numbers (default: %(default)s)")
    add("--callers", type=int, default=64, help="of each front end (default: %(default)s)")
    add("--members", type=int, nargs="+", default=[1, 4, 16, 64], help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    match options.command:
        case "echo":
            uvloop.run(_echo(socket.socket(fileno=options.fd), tuple(options.sizes)))
        case "lone":
            _lone(options)
        case "engine":
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_engine(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
