"""Rules of RFC 9113 for servers, on a connection without a socket."""

from __future__ import annotations

import asyncio
import struct

import h2.config
import h2.connection
import h2.events
import h2.settings
import pytest
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import END_HEADERS, END_STREAM, ErrorCode, Setting, encode
from headrace.wire.http2.stream import Http2Limits

from tests.support.http2_peer import HELLO, POST, Frame, PlainApplication, Wire, data, on_a_loop, read_frames, request


def _kinds(result: list[Frame]) -> list[tuple[int, int]]:
    return [(frame.kind, frame.stream_id) for frame in result]


@on_a_loop
async def test_the_server_sends_its_limits_first() -> None:
    wire = Wire(limits=Http2Limits(streams=7))
    settings, acknowledged, window = sorted(await wire.frames(), key=lambda frame: (frame.kind, frame.flags))
    pairs = dict(frames.read_settings(settings.payload))
    assert (settings.kind, settings.flags, settings.stream_id) == (frames.SETTINGS, 0, 0)
    assert pairs[Setting.MAX_CONCURRENT_STREAMS] == 7
    assert pairs[Setting.INITIAL_WINDOW_SIZE] == Http2Limits().stream_window_bytes
    assert (acknowledged.flags, acknowledged.payload) == (frames.ACK, b"")
    assert struct.unpack(">I", window.payload)[0] == Http2Limits().connection_window_bytes - 65535


@on_a_loop
async def test_a_body_is_echoed_for_any_framing() -> None:
    whole = HELLO + request(1, end=False) + data(1, b"hello ") + data(1, b"") + data(1, b"world", end=True)
    padded = frames.frame(frames.DATA, frames.PADDED | END_STREAM, 3, b"\x04padded\0\0\0\0")
    unknown = frames.frame(0x42, 0xFF, 9, b"?" * 40)
    whole += request(3, end=False) + unknown + padded + request(5)
    for size in (1, 2, 3, 7, 10, 31, len(whole)):
        wire = Wire(hello=b"")
        for start in range(0, len(whole), size):
            wire.connection.data_received(whole[start : start + size])
        bodies = {frame.stream_id: frame.payload for frame in await wire.frames() if frame.kind == frames.DATA}
        assert bodies == {1: b"hello world", 3: b"padded"}
        assert not wire.connection.streams


FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "data on stream 0": (data(0, b"x"), ErrorCode.PROTOCOL_ERROR),
    "data on a stream never opened": (data(5, b"x"), ErrorCode.PROTOCOL_ERROR),
    "headers on stream 0": (request(0), ErrorCode.PROTOCOL_ERROR),
    "headers on an even stream": (request(2), ErrorCode.PROTOCOL_ERROR),
    "headers on a closed stream": (request(3) + request(1), ErrorCode.STREAM_CLOSED),
    "settings on a stream": (frames.frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
    "settings acknowledged with a payload": (
        frames.frame(frames.SETTINGS, frames.ACK, 0, b"\0" * 6),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "settings cut short": (frames.frame(frames.SETTINGS, 0, 0, b"\0" * 5), ErrorCode.FRAME_SIZE_ERROR),
    "ping on a stream": (frames.frame(frames.PING, 0, 1, b"\0" * 8), ErrorCode.PROTOCOL_ERROR),
    "ping of 7 bytes": (frames.frame(frames.PING, 0, 0, b"\0" * 7), ErrorCode.FRAME_SIZE_ERROR),
    "goaway on a stream": (frames.frame(frames.GOAWAY, 0, 1, b"\0" * 8), ErrorCode.PROTOCOL_ERROR),
    "goaway cut short": (frames.frame(frames.GOAWAY, 0, 0, b"\0" * 7), ErrorCode.FRAME_SIZE_ERROR),
    "window update of 3 bytes": (frames.frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\1"), ErrorCode.FRAME_SIZE_ERROR),
    "window update by 0": (frames.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
    "window update on a stream never opened": (frames.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
    "the connection's window overflows": (frames.window_update(0, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "reset of a stream never opened": (frames.rst_stream(1, ErrorCode.CANCEL), ErrorCode.PROTOCOL_ERROR),
    "reset of 5 bytes": (request(1) + frames.frame(frames.RST_STREAM, 0, 1, b"\0" * 5), ErrorCode.FRAME_SIZE_ERROR),
    "priority on stream 0": (frames.frame(frames.PRIORITY, 0, 0, b"\0" * 5), ErrorCode.PROTOCOL_ERROR),
    "priority of a stream that depends on itself": (
        frames.frame(frames.PRIORITY, 0, 5, b"\x80\0\0\5\0"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "headers of a stream that depends on itself": (
        frames.frame(frames.HEADERS, frames.WITH_PRIORITY | END_HEADERS | END_STREAM, 1, b"\0\0\0\1\0" + encode(POST)),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "push": (frames.frame(frames.PUSH_PROMISE, END_HEADERS, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
    "continuation of nothing": (frames.frame(frames.CONTINUATION, END_HEADERS, 1), ErrorCode.PROTOCOL_ERROR),
    "a header block interrupted": (
        frames.frame(frames.HEADERS, 0, 1, b"") + frames.ping(b"\0" * 8, ack=False),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block continued on another stream": (
        frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, END_HEADERS, 3),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "a header block that is no HPACK": (
        frames.frame(frames.HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
        ErrorCode.COMPRESSION_ERROR,
    ),
    "a header block that is too large": (
        frames.frame(frames.HEADERS, END_HEADERS, 1, b"\0" * 40000),
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a frame that is too large": (b"\xff\xff\xff\0\0" + b"\0\0\0\1", ErrorCode.FRAME_SIZE_ERROR),
    "padding longer than its frame": (
        request(1, end=False) + frames.frame(frames.DATA, frames.PADDED, 1, b"\x09xx"),
        ErrorCode.PROTOCOL_ERROR,
    ),
    "padded without the padding's length": (
        request(1, end=False) + frames.frame(frames.DATA, frames.PADDED, 1, b""),
        ErrorCode.FRAME_SIZE_ERROR,
    ),
    "endless continuation": (
        frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, 0, 1) * 40,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "a header block that grows without end": (
        frames.frame(frames.HEADERS, 0, 1, b"") + frames.frame(frames.CONTINUATION, 0, 1, b"\0" * 16000) * 3,
        ErrorCode.ENHANCE_YOUR_CALM,
    ),
    "an initial window out of range": (
        frames.settings({Setting.INITIAL_WINDOW_SIZE: 2**31}),
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_end_the_connection_with_their_code(name: str) -> None:
    sent, code = FAULTS[name]

    @on_a_loop
    async def run() -> None:
        wire = Wire()
        last = (await wire.send(sent))[-1]
        assert (last.kind, last.code) == (frames.GOAWAY, code)
        assert wire.transport.closed
        assert not wire.connection.streams

    run()


STREAM_FAULTS: dict[str, tuple[bytes, ErrorCode]] = {
    "data after the end": (request(1) + data(1, b"x"), ErrorCode.STREAM_CLOSED),
    "headers after the end": (request(1) + request(1), ErrorCode.STREAM_CLOSED),
    "trailers that do not end": (request(1, end=False) + request(1, end=False), ErrorCode.PROTOCOL_ERROR),
    "window update by 0": (request(1) + frames.window_update(1, 0), ErrorCode.PROTOCOL_ERROR),
    "the stream's window overflows": (request(1) + frames.window_update(1, 2**31 - 1), ErrorCode.FLOW_CONTROL_ERROR),
    "priority of 4 bytes": (request(1) + frames.frame(frames.PRIORITY, 0, 1, b"\0" * 4), ErrorCode.FRAME_SIZE_ERROR),
    "malformed headers": (request(1, fields=[(b":method", b"POST")]), ErrorCode.PROTOCOL_ERROR),
    "more data than the window": (
        request(1, end=False) + data(1, b"x" * 16384) * 9,
        ErrorCode.FLOW_CONTROL_ERROR,
    ),
}


@pytest.mark.parametrize("name", STREAM_FAULTS)
def test_faults_on_a_stream_end_that_stream_alone(name: str) -> None:
    sent, code = STREAM_FAULTS[name]

    @on_a_loop
    async def run() -> None:
        wire = Wire()
        wire.application.answers = False
        result = await wire.send(sent)
        assert code in [frame.code for frame in result if frame.kind == frames.RST_STREAM and frame.stream_id == 1]
        assert frames.GOAWAY not in [frame.kind for frame in result]
        assert 1 not in wire.connection.streams
        wire.application.answers = True
        assert (frames.HEADERS, 3) in _kinds(await wire.send(request(3)))

    run()


MALFORMED = [(b":method", b"POST")]


@pytest.mark.parametrize(
    "rest", [data(1, b"x") + data(1, b"y", end=True), data(1, b"x") + request(1)], ids=["data", "trailers"]
)
def test_what_the_peer_sent_before_it_saw_a_reset_is_ignored(rest: bytes) -> None:
    """nginx gave the second reset to the next request on the connection, which failed."""

    @on_a_loop
    async def run() -> None:
        wire = Wire()
        assert (frames.RST_STREAM, 1) in _kinds(await wire.send(request(1, end=False, fields=MALFORMED)))
        result = await wire.send(rest + request(3))
        assert {kind for kind, stream_id in _kinds(result) if stream_id == 1} == set()
        assert (frames.HEADERS, 3) in _kinds(result)
        assert (frames.RST_STREAM, 1) in _kinds(await wire.send(data(1, b"x"))), "behind the end of the request"

    run()


@on_a_loop
async def test_resets_are_remembered_for_as_many_streams_as_may_be_open() -> None:
    wire = Wire(limits=Http2Limits(streams=2))
    await wire.send(b"".join(request(stream_id, end=False, fields=MALFORMED) for stream_id in (1, 3, 5)))
    resets = _kinds(await wire.send(data(1, b"x") + data(3, b"x") + data(5, b"x")))
    assert [stream_id for kind, stream_id in resets if kind == frames.RST_STREAM] == [1]


@on_a_loop
async def test_no_http2_at_all_is_refused() -> None:
    for hello in (
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        frames.PREFACE + frames.ping(b"\0" * 8, ack=False),
        b"\x16\x03\x01",
    ):
        wire = Wire(hello=hello)
        assert (await wire.frames())[-1].code == ErrorCode.PROTOCOL_ERROR
        assert wire.transport.closed


@on_a_loop
async def test_streams_beyond_the_limit_get_refused_stream() -> None:
    wire = Wire(limits=Http2Limits(streams=2))
    wire.application.answers = False
    result = await wire.send(request(1, end=False), request(3, end=False), request(5, end=False))
    assert [frame.code for frame in result if frame.kind == frames.RST_STREAM] == [ErrorCode.REFUSED_STREAM]
    assert len(wire.application.opened) == 2
    await wire.send(frames.rst_stream(1, ErrorCode.CANCEL))
    await wire.send(request(7, end=False))
    assert len(wire.application.opened) == 3
    assert wire.application.lost == [1]


@on_a_loop
async def test_headers_beyond_the_limit_are_reported_to_the_application() -> None:
    wire = Wire()
    await wire.send(request(1, fields=[*POST, (b"x", b"y" * 20000)]))
    assert wire.application.opened == [[(b"too", b"large")]]
    assert not wire.transport.closed


@on_a_loop
async def test_pings_are_answered_and_settings_acknowledged() -> None:
    wire = Wire()
    await wire.frames()
    result = await wire.send(frames.ping(b"abcdefgh", ack=False), frames.settings({Setting.HEADER_TABLE_SIZE: 0}))
    assert result == [
        Frame(frames.PING, frames.ACK, 0, b"abcdefgh"),
        Frame(frames.SETTINGS, frames.ACK, 0, b""),
    ]


# --- Flow control ------------------------------------------------------------------------------------------------------


def _body(result: list[Frame], stream_id: int) -> bytes:
    return b"".join(frame.payload for frame in result if frame.kind == frames.DATA and frame.stream_id == stream_id)


@on_a_loop
async def test_an_answer_waits_for_the_windows_of_stream_and_connection() -> None:
    wire = Wire()
    wire.application.answer = bytes(range(256)) * 400  # 102,400 bytes
    result = await wire.send(request(1))
    got = _body(result, 1)
    assert len(got) == 65535
    assert max(len(frame.payload) for frame in result if frame.kind == frames.DATA) <= 16384
    assert wire.connection.write_buffer.unsent_bytes == 102400 - 65535
    got += _body(await wire.send(frames.window_update(1, 1 << 20)), 1)
    assert len(got) == 65535  # the connection's window is still empty
    got += _body(await wire.send(frames.window_update(0, 1000)), 1)
    assert len(got) == 66535
    result = await wire.send(frames.window_update(0, 1 << 20))
    got += _body(result, 1)
    assert got == wire.application.answer
    assert result[-1].flags & END_STREAM
    assert wire.connection.write_buffer.unsent_bytes == 0
    assert not wire.connection.streams


@on_a_loop
async def test_a_change_of_the_initial_window_reaches_open_streams() -> None:
    wire = Wire(hello=frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    wire.application.answer = b"abcdefghij"
    assert _body(await wire.send(request(1)), 1) == b""
    assert _body(await wire.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 4})), 1) == b"abcd"
    assert _body(await wire.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 1})), 1) == b""  # now it is -3
    assert _body(await wire.send(frames.window_update(1, 3)), 1) == b""
    assert _body(await wire.send(frames.window_update(1, 2)), 1) == b"ef"
    assert _body(await wire.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 100})), 1) == b"ghij"


@on_a_loop
async def test_a_window_update_in_two_parts_counts_once() -> None:
    wire = Wire()
    wire.application.answer = b"abcdefghij"
    update = frames.window_update(1, 4)
    await wire.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}), request(1))
    for size in range(1, len(update)):
        wire.connection.data_received(update[:size])
        assert _body(await wire.send(b""), 1) == b""
        wire.connection.data_received(update[size:])
        body = _body(await wire.send(b""), 1)
        assert body == b"abcdefghij"[4 * (size - 1) : 4 * size]
    assert not wire.connection.streams


@on_a_loop
async def test_streams_share_the_connection_round_robin() -> None:
    wire = Wire()
    wire.application.answer = b"x" * 60000
    result = await wire.send(request(1), request(3))
    sent = [len(_body(result, 1)), len(_body(result, 3))]
    assert sum(sent) == 65535
    assert abs(sent[0] - sent[1]) <= 16384
    await wire.send(frames.rst_stream(1, ErrorCode.CANCEL))
    rest = await wire.send(frames.window_update(0, 1 << 20))
    assert _body(rest, 1) == b""
    assert len(_body(rest, 3)) == 60000 - sent[1]


@on_a_loop
async def test_larger_frames_are_sent_once_the_peer_allows_them() -> None:
    hello = frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: 1 << 20, Setting.MAX_FRAME_SIZE: 1 << 20})
    wire = Wire(hello=hello + frames.window_update(0, 1 << 20))
    wire.application.answer = b"x" * 60000
    sizes = [len(frame.payload) for frame in await wire.send(request(1)) if frame.kind == frames.DATA]
    assert sizes == [60000]


@on_a_loop
async def test_a_large_body_is_granted_its_window_and_a_second_one_waits_its_turn() -> None:
    limits = Http2Limits(stream_window_bytes=1000, max_granted_bytes=5000)
    wire = Wire(limits=limits)
    await wire.send(request(1, end=False), request(3, end=False))
    first, second = wire.connection.streams[1], wire.connection.streams[3]
    first.request_window(5000)
    second.request_window(4000)
    granted = await wire.frames()
    assert [frame.stream_id for frame in granted if frame.kind == frames.WINDOW_UPDATE] == [1]
    wire.application.answers = False
    await wire.send(data(1, b"x" * 5000, end=True))
    assert 3 in wire.connection.streams
    granted = await wire.send(frames.rst_stream(1, ErrorCode.CANCEL))
    assert [(f.stream_id, f.payload) for f in granted if f.kind == frames.WINDOW_UPDATE] == [
        (3, struct.pack(">I", 3000))
    ]


@on_a_loop
async def test_the_connections_own_window_is_kept_open_in_large_steps() -> None:
    wire = Wire(limits=Http2Limits(connection_window_bytes=100_000, stream_window_bytes=1 << 20))
    await wire.send(request(1, end=False))
    updates = []
    for _ in range(30):
        updates += [f for f in await wire.send(data(1, b"x" * 10_000)) if f.kind == frames.WINDOW_UPDATE]
    assert 4 <= len(updates) <= 6
    assert sum(struct.unpack(">I", frame.payload)[0] for frame in updates) >= 200_000


@on_a_loop
async def test_data_beyond_the_connection_window_is_an_error() -> None:
    wire = Wire(limits=Http2Limits(connection_window_bytes=70_000, stream_window_bytes=1 << 20, frame_bytes=1 << 20))
    await wire.send(request(1, end=False))
    assert (await wire.send(data(1, b"x" * 80_000)))[-1].code == ErrorCode.FLOW_CONTROL_ERROR


# --- Against the h2 package --------------------------------------------------------------------------------------------


class _H2Client:
    """The client is the `h2` package, which checks every frame of the server."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.events: list[h2.events.Event] = []
        self.h2.initiate_connection()

    async def run(self) -> None:
        for _ in range(40):
            if sent := self.h2.data_to_send():
                self.wire.connection.data_received(sent)
            for _ in range(4):
                await asyncio.sleep(0)
            written = self.wire.transport.written
            if not written and not sent:
                return
            self.wire.transport.written = bytearray()
            self.events += self.h2.receive_data(bytes(written))
            for event in self.events:
                if (
                    isinstance(event, h2.events.DataReceived)
                    and event.flow_controlled_length
                    and not event.stream_ended
                ):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                    event.flow_controlled_length = 0


@on_a_loop
async def test_h2_receives_its_data_on_many_streams() -> None:
    wire = Wire(PlainApplication(), hello=b"")
    client = _H2Client(wire)
    bodies = {2 * number + 1: bytes((number,)) * (number * 3331) for number in range(25)}
    await client.run()
    for stream_id, body in bodies.items():
        client.h2.send_headers(stream_id, [*POST, (b"x-number", b"%d" % stream_id)])
        for start in range(0, len(body), 16384):
            client.h2.send_data(stream_id, body[start : start + 16384])
            await client.run()
        client.h2.end_stream(stream_id)
    await client.run()
    got = dict.fromkeys(bodies, b"")
    for event in client.events:
        if isinstance(event, h2.events.DataReceived):
            got[event.stream_id] += event.data
    assert got == bodies
    assert sum(isinstance(event, h2.events.TrailersReceived) for event in client.events) == len(bodies)
    client.h2.close_connection()
    await client.run()
    assert not wire.connection.streams


@on_a_loop
async def test_h2_gets_a_large_answer_under_a_small_window() -> None:
    wire = Wire(PlainApplication(), hello=b"")
    wire.application.answer = bytes(300_000)
    client = _H2Client(wire)
    client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 5000})
    await client.run()
    client.h2.send_headers(1, POST, end_stream=True)
    for _ in range(10):
        await client.run()
    got = sum(len(event.data) for event in client.events if isinstance(event, h2.events.DataReceived))
    assert got == 300_000


def test_the_frame_functions_round_trip() -> None:
    block = encode(POST)
    assert read_frames(request(1)) == [Frame(frames.HEADERS, END_HEADERS | END_STREAM, 1, block)]
