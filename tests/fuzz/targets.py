"""Code that reads bytes of clients or files, as functions of one input; each fails if the input breaks a property.

Properties: only declared errors are raised, nothing is logged as an error, nothing is left behind, and the processor time is
bounded.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from unittest import mock

from headrace.config.binding import bind, screen
from headrace.config.documents import Document, read_pbtxt, read_value, read_yaml
from headrace.config.triton_json import read_config_json
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.grpc.call import DeadlineTimer
from headrace.wire.grpc.framing import MessageReader
from headrace.wire.grpc.methods import Message, Methods, StreamCall, StreamMethod, UnaryMethod
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.http2.frames import HpackDecoder, Http2ConnectionError

from tests.support.http2_peer import HELLO, Wire, read_frames
from tests.unit.wire.grpc import test_codec_fuzz as grpc_cases
from tests.unit.wire.http import test_codec_fuzz as json_cases
from tests.unit.wire.http.test_repeated import Case

# Far above the time of any input of the corpus, also on a busy machine and with coverage counters.
MAX_PROCESSOR_S = 2.0

_loop = asyncio.new_event_loop()


class ErrorLog(logging.Handler):
    """Collects what the server and asyncio log as errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []
        for name in ("headrace", "asyncio", "uvicorn"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


_errors = ErrorLog()


def pieces(data: bytes) -> Iterator[bytes]:
    """Cut an input into reads: its first byte is the size of all reads but the last, 0 for one read."""
    size = data[0] if data and data[0] else len(data)
    for start in range(1, len(data), max(1, size)):
        yield data[start : start + size]


# --- HTTP/2 ------------------------------------------------------------------------------------------------------------


async def _echo(message: bytes, _call: object) -> Message:
    await asyncio.sleep(0)
    return [message]


async def _wait(_message: bytes, _call: object) -> Message:
    await asyncio.get_running_loop().create_future()
    raise AssertionError("unreachable")


async def _chat(call: StreamCall) -> None:
    while (message := await call.read()) is not None:
        await call.write([message])


_UNARY: dict[str, UnaryMethod] = {"/s/echo": _echo, "/s/wait": _wait}
_STREAMS: dict[str, StreamMethod] = {"/s/chat": _chat}


async def serve_http2(parts: Iterable[bytes], hello: bytes = HELLO) -> None:
    """Read bytes as one connection of the fast gRPC engine; nothing of it may be left afterwards.

    Args:
        parts: the bytes, read by read.
        hello: read before them.
    """
    limits = ClientLimits(Limits(max_body_bytes=1000), "grpc")
    engine = GrpcServer(Methods(_UNARY, _STREAMS), limits, None)
    engine.deadline_timer = DeadlineTimer(asyncio.get_running_loop())
    wire = Wire(engine, hello=hello)
    written = bytearray()
    for part in parts:
        if wire.transport.closed:
            break
        wire.connection.data_received(part)
        await asyncio.sleep(0)
        written += wire.transport.written
        wire.transport.written.clear()
    await asyncio.sleep(0)
    wire.transport.abort()
    for _ in range(6):
        await asyncio.sleep(0)
    engine.deadline_timer.close()
    read_frames(bytes(written))
    assert not wire.connection.streams
    assert wire.connection.cancelled_running == 0
    assert wire.connection.write_buffer.unsent_bytes == 0
    assert limits.connections == 0
    assert limits.bodies.reserved_bytes == 0
    _no_tasks()


def http2(data: bytes) -> None:
    """A gRPC connection: frames, header blocks, messages."""
    _loop.run_until_complete(serve_http2(pieces(data)))


def hpack(data: bytes) -> None:
    """Header blocks of one connection, each after its length in one byte."""
    decoder, position = HpackDecoder(16384), 0
    while position < len(data):
        block = data[position + 1 : position + 1 + data[position]]
        position += 1 + data[position]
        try:
            decoder.decode(block)
        except Http2ConnectionError:
            return


# --- Messages ----------------------------------------------------------------------------------------------------------


def _ignore(_text: str) -> None:
    """Replaces `hypothesis.event`, which works in tests of Hypothesis only."""


_ENCODINGS = ("", "gzip", "deflate")


def grpc_messages(data: bytes) -> None:
    """The body of a call: length-prefixed messages, perhaps compressed. The first byte selects the encoding."""
    if not data:
        return
    limits = ClientLimits(Limits(max_body_bytes=100_000), "grpc")
    reader = MessageReader(_ENCODINGS[data[0] % 3], limits)
    try:
        for piece in pieces(data[1:]):
            reader.feed(piece, 0, len(piece))
            while reader.complete:
                assert len(reader.pop()[0]) <= 100_000
    except HeadraceError:
        return


def protobuf(data: bytes) -> None:
    """A ModelInferRequest; the first byte selects the model."""
    with mock.patch.object(grpc_cases, "event", _ignore):
        grpc_cases.feed(data[1:], grpc_cases.FLAT_SPEC if data[:1] == b"\1" else grpc_cases.SPEC)


def json_request(data: bytes) -> None:
    """The body of an inference request over HTTP; the first two bytes are the size of its JSON header, 0xFFFF for none."""
    if len(data) < 2:
        return
    size: int = struct.unpack_from(">H", data)[0]
    with mock.patch.object(json_cases, "event", _ignore):
        json_cases.feed(json_cases.SPEC, data[2:], None if size == 0xFFFF else size)


# --- HTTP/1.1 ----------------------------------------------------------------------------------------------------------


async def _http1(data: bytes) -> None:
    case = Case(max_body_bytes=5000)
    for piece in pieces(data):
        if case.transport.closed:
            break
        case.protocol.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    case.protocol.connection_lost(None)
    for _ in range(20):
        await asyncio.sleep(0)
    case.check_clean()
    _no_tasks()


def http1(data: bytes) -> None:
    """A connection to the inference endpoint over HTTP/1.1."""
    _loop.run_until_complete(_http1(data))


# --- Files -------------------------------------------------------------------------------------------------------------


def _complete(document: Document) -> None:
    screen(document)
    bind(document)


def config_files(data: bytes) -> None:
    """A model configuration as protobuf text, YAML, one value or JSON; the first byte selects the reader."""
    text = data[1:].decode("utf-8", "replace")
    reader = data[0] % 4 if data else 0
    try:
        if reader == 0:
            _complete(read_pbtxt(text, "config.pbtxt"))
        elif reader == 1:
            _complete(read_yaml(text, "config.yaml"))
        elif reader == 2:
            read_value(text, "config.pbtxt")
        else:
            _complete(read_config_json(text))
    except ConfigError:
        return


# -----------------------------------------------------------------------------------------------------------------------


def _no_tasks() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not others, f"tasks are left behind: {others}"


TARGETS: dict[str, Callable[[bytes], None]] = {
    function.__name__: function
    for function in (http2, hpack, grpc_messages, protobuf, http1, json_request, config_files)
}


def check(target: str, data: bytes) -> None:
    """Run a target on an input; fails if a property of the input or of all targets is broken."""
    _errors.lines.clear()
    start_s = time.process_time()
    TARGETS[target](data)
    used_s = time.process_time() - start_s
    assert used_s < MAX_PROCESSOR_S, f"{used_s:.1f} s of processor time for {len(data)} bytes"
    assert not _errors.lines, _errors.lines
