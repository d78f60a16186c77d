"""The engine process of a server alone, with synthetic front ends that send prepared groups over the real data streams.

The program plays the supervisor: it starts the engine process as `headrace serve --front-ends N` does. It plays the front ends
too: each keeps a number of members in flight, in groups of one size, and sends a group whenever one is answered. No HTTP is
involved: what is measured is the processor time of the engine process for each request as a function of the group size.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from headrace.core.clock import NS_PER_S, NS_PER_US, monotonic_ns
from headrace.core.tensor import ModelSpec
from headrace.front_ends import frames
from headrace.front_ends.arena import Arena
from headrace.front_ends.channel import Ports, Start, SupervisorChannel, channel_pair, close_all, send_start
from headrace.front_ends.control import Hello
from headrace.front_ends.counter_array import CounterArray
from headrace.front_ends.meeting import EngineFacts, connect, engine_listener
from headrace.front_ends.proxy import EngineLink
from headrace.front_ends.request_groups import MIN_SLOT_BYTES
from headrace.front_ends.table import VersionRow, decode_table, model_spec
from headrace.front_ends.tensors import TensorReader, TensorWriter
from headrace.settings import Settings

from loadtest.protocol import Array
from loadtest.servers import pinned

_PROGRAM = (sys.executable, "-P", "-m", "headrace.front_ends")
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
        arena: of the stream; receives rows of 32 KiB and more, which all groups name.

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
        arena: Arena | None = None,
    ) -> None:
        self._sock = sock
        self._expected = expected
        self._groups = groups
        spec, members = model_spec(row), len(next(iter(inputs.values())))
        self._reader = TensorReader(spec.outputs)
        self._memory: list[Array] = []  # the slots of the rows
        self._frame = bytearray(self._request(row, inputs, arena))
        self._times = np.frombuffer(self._frame, "<i8", members, _TIMES_OFFSET)
        self._group = np.frombuffer(self._frame, "<u8", 1, _GROUP_OFFSET)
        self._counts = frames.counts_frame(row.number, [20_000, 20_000] * _COUNTED)
        self._counted = 0
        self._members = members
        self._missing: dict[int, int] = {}
        self._last = 0
        self._received = b""
        self._is_stopping = False
        self.outputs: dict[str, Array] = {}
        self.answered = self._frames = 0
        self.batches = 0.0

    def _request(self, row: VersionRow, inputs: Mapping[str, Array], arena: Arena | None) -> bytes:
        """Encode a group of a row for each member: in slots if the rows are large, as `RemoteModels` does."""
        members = len(next(iter(inputs.values())))
        arrival, rows, writer = [0] * members, [1] * members, TensorWriter(model_spec(row).inputs)
        if arena is None or min(array.nbytes for array in inputs.values()) < members * MIN_SLOT_BYTES:
            block, data, size = writer.write((inputs,), 0)
            return b"".join(frames.requests_frame(0, row.number, arrival, rows, block, data, size))
        slots = {name: [self._slot(arena, array[index]) for index in range(members)] for name, array in inputs.items()}
        if members == 1:
            places = [writer.place(name, inputs[name], *each[0]) for name, each in slots.items()]
            block = frames.tensor_block(places)
            return b"".join(frames.requests_frame(0, row.number, arrival, rows, block, (), 0))
        block = frames.tensor_block([writer.place(name, inputs[name][:1], 0, 0, 0) for name in slots])
        content = frames.slots_data([slot for each in slots.values() for slot in each])
        parts = frames.requests_frame(0, row.number, arrival, rows, block, (content,), len(content), is_scattered=True)
        return b"".join(parts)

    def _slot(self, arena: Arena, array: Array) -> frames.Slot:
        """Copy a row into a slot, which this front end never frees."""
        memory = arena.allocate(array.nbytes)
        slot = None if memory is None else arena.find(memory)
        if memory is None or slot is None:
            raise EngineFailed(
                f"the arena of {arena.size_bytes} bytes has no room: send groups of fewer or smaller rows"
            )
        memory[:] = array.reshape(-1).view(np.uint8)
        self._memory.append(memory)
        return slot

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
            raise EngineFailed("the engine has closed the data stream")
        data = self._received + received if self._received else received
        offset, complete = 0, 0
        while len(data) - offset >= frames.HEADER_BYTES:
            size, kind, _, members, group = frames.HEADER.unpack_from(data, offset)
            if offset + size > len(data):
                break
            if kind == frames.RELEASE:
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
        return repr(frames.parse_error(data, start, end)[1])
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
        self._links: list[EngineLink] = []
        self._sockets: list[socket.socket] = []
        self._arenas: list[Arena] = []
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
            incarnation=1,
            parent=os.getpid(),
            token=secrets.token_bytes(16),
            engine=self._listener.getsockname(),
            listener=self._listener.fileno(),
            ports=Ports("http://", "", 0, ""),
            model_filter={},
            first_model="",
            arrays=descriptors,
        )
        ours, theirs = channel_pair()
        send_start(ours, self._start)
        inherited = (theirs.fileno(), self._listener.fileno(), *descriptors)
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
        for link in self._links:
            link.close()
        for arena in self._arenas:
            arena.close()
        self._channel.send("stop")
        try:
            self._process.wait(_SILENCE_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._channel.close()
        self._listener.close()

    def _on_message(self, name: str, _content: Any, descriptors: Sequence[int]) -> None:
        close_all(descriptors)
        self._messages.put_nowait(name)

    async def _connect(self, number: int) -> None:
        hello = Hello(self._start.token, "control", number, 1, os.getpid())
        opened, table = asyncio.Event(), asyncio.Event()

        def on_open(_facts: EngineFacts, descriptors: Sequence[int]) -> None:
            close_all(descriptors)
            opened.set()

        def on_notice(name: str, content: Any) -> None:
            if name == "table":
                rows = [row for row in decode_table(content) if row.name == self._model]
                self._row = rows[0] if rows else None
                table.set()

        link = EngineLink(self._start.engine, hello, on_open, lambda: None, on_notice)
        link.start()
        self._links.append(link)
        await asyncio.wait_for(opened.wait(), _SILENCE_S)
        data = msgspec.structs.replace(hello, role="data")
        self._arenas.append(Arena())
        sock, _, descriptors = await connect(self._start.engine, data, [self._arenas[-1].fd])
        close_all(descriptors)
        self._sockets.append(sock)
        await asyncio.wait_for(table.wait(), _SILENCE_S)

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
        inputs = prepared_rows(model_spec(row), members)
        expected = await self._outputs(row, inputs, members)
        front_ends = [
            SyntheticFrontEnd(sock, row, inputs, max(callers // members, 1), expected, arena)
            for sock, arena in zip(self._sockets, self._arenas, strict=True)
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
