"""The HTTP/2 client of `headrace bench` against a peer made with h2: windows, padding, resets, GOAWAY, header compression."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from headrace_bench.grpc_pool import GrpcPool, parse_fields
from headrace_bench.pool import BROKEN, CLOSED, TIMEOUT, WRONG, Answer, PoolOptions
from headrace_bench.target import ServerUrl
from headrace_bench.wire import grpc_headers

from tests.support.stub_server import Outcome, outcomes_of

MESSAGE = b"answer"
HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
OK = [("grpc-status", "0")]


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


@dataclass
class Peer:
    """A gRPC server on h2.

    Attributes:
        answer: writes the response to a stream; gets the connection, the stream and the message.
        settings: that it announces.
        delay: windows are renewed one stream at a time, this long after the bytes have come.
        messages: received.
        headers: of the calls.
    """

    answer: Callable[[h2.connection.H2Connection, int, bytes], None]
    settings: dict[int, int] = field(default_factory=dict)
    delay: float = 0.0
    messages: list[bytes] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    connections: int = 0
    most_open: int = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=False))
        connection.local_settings = h2.settings.Settings(client=False, initial_values=self.settings)
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        bodies: dict[int, bytearray] = {}
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.RequestReceived):
                    bodies[event.stream_id] = bytearray()
                    self.headers.append({bytes(name): bytes(value) for name, value in event.headers})
                    self.most_open = max(self.most_open, len(bodies))
                elif isinstance(event, h2.events.DataReceived):
                    bodies[event.stream_id] += event.data
                    await asyncio.sleep(self.delay)
                    connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamEnded):
                    body = bytes(bodies.pop(event.stream_id))
                    assert struct.unpack_from(">BI", body) == (0, len(body) - 5)
                    self.messages.append(body[5:])
                    self.answer(connection, event.stream_id, body[5:])
            writer.write(connection.data_to_send())


def plain(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
    connection.send_headers(stream, HEADERS)
    connection.send_data(stream, framed(MESSAGE))
    connection.send_headers(stream, OK, end_stream=True)


def send(peer: Peer, messages: list[bytes], **options: Any) -> list[Outcome]:
    """Outcomes of one call for each message, all submitted at once."""

    def open_pool(pool_options: PoolOptions) -> GrpcPool:
        url = ServerUrl("grpc", "127.0.0.1", pool_options.address.port, False)
        return GrpcPool(messages, grpc_headers(url, {"X-Client": "me"}), pool_options)

    return outcomes_of(peer.talk, open_pool, len(messages), **options)


def test_calls_share_connections() -> None:
    peer = Peer(plain)
    messages = [b"%d" % number for number in range(50)]
    assert [each.status for each in send(peer, messages, connections=2)] == [""] * 50
    assert sorted(peer.messages) == sorted(messages)
    assert peer.connections == 2
    assert peer.headers[0][b":path"] == b"/inference.GRPCInferenceService/ModelInfer"
    assert peer.headers[0][b"te"] == b"trailers"
    assert peer.headers[0][b"x-client"] == b"me"


def test_the_answers_are_checked() -> None:
    bodies = []

    def check(index: int, answer: Answer) -> bool:
        bodies.append((index, answer.body))
        return index == 0

    assert [each.status for each in send(Peer(plain), [b"a", b"b"], check=check)] == ["", WRONG]
    assert sorted(bodies) == [(0, MESSAGE), (1, MESSAGE)]


def test_a_server_with_few_streams_gets_no_more() -> None:
    peer = Peer(plain, {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: 3})
    # The first calls may start before the server's settings arrive.
    outcomes = send(peer, [b"x"] * 40)
    assert [each.status for each in outcomes] == [""] * 40
    assert len(peer.messages) == 40


@pytest.mark.parametrize("window", [1, 1000, 65535])
def test_a_slow_reader_gets_whole_messages(window: int) -> None:
    """Windows of a few bytes, renewed late: messages are complete and not mixed up."""
    size = 30 if window == 1 else 200_000
    peer = Peer(plain, {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}, delay=0.0002)
    messages = [bytes([number]) * (size + number) for number in range(4)]
    assert [each.status for each in send(peer, messages)] == [""] * 4
    assert sorted(peer.messages) == sorted(messages)


def test_padded_frames_and_fragmented_headers_are_read() -> None:
    def answer(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        # Larger than a frame: h2 sends CONTINUATION frames.
        connection.send_headers(stream, [*HEADERS, ("x-large", "v" * 20_000)])
        connection.send_data(stream, framed(MESSAGE)[:3], pad_length=7)
        connection.send_data(stream, framed(MESSAGE)[3:], pad_length=0)
        connection.send_headers(stream, OK, end_stream=True)

    bodies = []

    def check(index: int, answer: Answer) -> bool:
        bodies.append(answer.body)
        return True

    assert [each.status for each in send(Peer(answer), [b"x"] * 3, check=check)] == [""] * 3
    assert bodies == [MESSAGE] * 3


def test_large_answers_are_received() -> None:
    large = b"z" * 3_000_000

    def answer(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        connection.send_headers(stream, HEADERS)
        data = framed(large)
        for start in range(0, len(data), 16384):
            connection.send_data(stream, data[start : start + 16384])
        connection.send_headers(stream, OK, end_stream=True)

    assert [each.status for each in send(Peer(answer), [b"x"] * 2, check=lambda _i, a: a.body == large)] == ["", ""]


def test_errors_have_the_name_of_their_code_and_text() -> None:
    def answer(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        fields = [*HEADERS, ("grpc-status", "14"), ("grpc-message", "full: 100%25 %C3%BC")]
        connection.send_headers(stream, fields, end_stream=True)

    (outcome,) = send(Peer(answer), [b"x"])
    assert (outcome.status, outcome.text) == ("UNAVAILABLE", "full: 100% ü")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ([(b":status", b"200"), (b"grpc-status", b"0")], ""),
        ([(b":status", b"200")], None),
        ([(b":status", b"502")], "HTTP 502"),
        ([(b"grpc-status", b"99")], "status 99"),
        (None, BROKEN),
    ],
)
def test_fields(fields: list[tuple[bytes, bytes]] | None, status: str | None) -> None:
    assert parse_fields(fields).status == status


def test_an_answer_without_a_message_or_status_is_an_error() -> None:
    def no_message(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        connection.send_headers(stream, HEADERS)
        connection.send_headers(stream, OK, end_stream=True)

    def no_status(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        connection.send_headers(stream, HEADERS)
        connection.send_data(stream, framed(MESSAGE), end_stream=True)

    for answer, text in ((no_message, "no message"), (no_status, "no grpc-status")):
        (outcome,) = send(Peer(answer), [b"x"])
        assert outcome.status == BROKEN
        assert text in outcome.text


def test_a_reset_stream_fails_its_call_alone() -> None:
    def answer(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        if message == b"bad":
            connection.reset_stream(stream, 11)
        else:
            plain(connection, stream, message)

    statuses = [each.status for each in send(Peer(answer), [b"good", b"bad", b"good"])]
    assert statuses == ["", "RST_STREAM ENHANCE_YOUR_CALM", ""]


def test_calls_move_to_another_connection_after_goaway() -> None:
    """A server that ends its connections after some calls: the calls that it has not begun are sent again, none is lost."""

    class Leaving(Peer):
        async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            writer.write(frames())
            await reader.readexactly(24)
            answered = 0
            while True:
                header = await reader.readexactly(9)
                payload = await reader.readexactly(int.from_bytes(header[:3], "big"))
                kind, stream = header[3], int.from_bytes(header[5:9], "big")
                if kind != 0:
                    continue
                answered += 1
                if answered > 3:  # this stream and later ones were not begun
                    writer.write(goaway(stream - 2))
                    await writer.drain()
                    await reader.read()
                    return
                self.messages.append(payload[5:])
                writer.write(small_answer(stream))

    peer = Leaving(plain)
    messages = [b"%d" % number for number in range(10)]
    assert [each.status for each in send(peer, messages)] == [""] * 10
    assert sorted(peer.messages) == messages
    assert peer.connections == 4


def test_a_call_that_the_server_began_before_goaway_fails_with_its_connection() -> None:
    class Leaving(Peer):
        async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frames())
            await reader.readexactly(24)
            header = b"\0\0\0\0\0\0\0\0\0"
            while header[3] != 0 or header == bytes(9):
                header = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(header[:3], "big"))
            writer.write(goaway(1))
            await writer.drain()
            await asyncio.sleep(0.05)

    assert [each.status for each in send(Leaving(plain), [b"x"])] == [CLOSED]


def frames() -> bytes:
    return b"\0\0\0\4\0\0\0\0\0"  # empty SETTINGS


def goaway(last_stream: int) -> bytes:
    return b"\0\0\x08\7\0\0\0\0\0" + struct.pack(">II", last_stream, 0)


def small_answer(stream: int) -> bytes:
    """HEADERS, DATA and trailers without Huffman code or dynamic table."""
    identity = struct.pack(">I", stream)
    status = b"\x88"
    trailers = b"\0\x0bgrpc-status\x010"
    data = framed(MESSAGE)
    return (
        struct.pack(">I", len(status))[1:] + b"\1\4" + identity + status
        + struct.pack(">I", len(data))[1:] + b"\0\0" + identity + data
        + struct.pack(">I", len(trailers))[1:] + b"\1\5" + identity + trailers
    )  # fmt: skip


def test_a_lost_connection_fails_its_calls_and_the_next_one_works() -> None:
    class Failing(Peer):
        async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self.connections:
                await super().talk(reader, writer)
                return
            self.connections = 1
            await reader.read(10)

    peer = Failing(plain)
    statuses = sorted(each.status for each in send(peer, [b"a", b"b", b"c"]))
    assert set(statuses) <= {"", CLOSED}
    assert CLOSED in statuses


def test_a_call_without_an_answer_is_cancelled() -> None:
    def answer(connection: h2.connection.H2Connection, stream: int, message: bytes) -> None:
        if message != b"never":
            plain(connection, stream, message)

    statuses = [each.status for each in send(Peer(answer), [b"never", b"x"], timeout_s=2.0)]
    assert statuses == [TIMEOUT, ""]


def test_a_peer_that_breaks_the_protocol_is_left() -> None:
    class Wrong(Peer):
        async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"\0\0\1\4\0\0\0\0\0x")  # SETTINGS of one byte
            await reader.read()

    (outcome,) = send(Wrong(plain), [b"x"])
    assert outcome.status in (BROKEN, CLOSED)
