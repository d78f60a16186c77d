"""Hostile peers: floods, silence, very small frames, empty windows. Each uses a bounded amount of the server."""

from __future__ import annotations

import asyncio
import itertools
import struct

import pytest
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.grpc.methods import Methods
from headrace.wire.grpc.server import GrpcServer
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import ErrorCode, Http2ConnectionError, Setting
from headrace.wire.http2.stream import FrameBudget, Http2Limits

from tests.support.http2_peer import HELLO, POST, Frame, PlainApplication, Wire, data, on_a_loop, request
from tests.support.virtual_time import in_virtual_time

QUICK = Http2Limits(
    handshake_s=0.1,
    frame_s=0.1,
    message_s=0.15,
    stall_s=0.1,
    keepalive_s=0.1,
    keepalive_timeout_s=0.1,
    idle_s=10.0,
    drain_s=0.05,
    linger_s=0.1,
)


async def _until_closed(wire: Wire, timeout_s: float = 20.0) -> list[Frame]:
    result: list[Frame] = []
    for _ in range(int(timeout_s / 0.01)):
        await asyncio.sleep(0.01)
        result += await wire.frames()
        if wire.transport.closed:
            return result
    raise AssertionError("the connection is still open")


FLOODS: dict[str, bytes] = {
    "ping": frames.ping(b"\0" * 8, ack=False),
    "settings": frames.settings({Setting.INITIAL_WINDOW_SIZE: 5}),
    "empty data": data(1, b""),
    "crumbs on an unserved stream": data(1, b"x"),
    "priority": frames.frame(frames.PRIORITY, 0, 1, b"\0" * 5),
    "window update": frames.window_update(1, 1),
    "unknown": frames.frame(0x77, 0, 0, b"x"),
    "reset of a closed stream": frames.rst_stream(1, ErrorCode.CANCEL),
    "padding": frames.frame(frames.DATA, frames.PADDED, 1, b"\x02\0\0"),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_of_frames_without_work_end_the_connection(name: str) -> None:
    @on_a_loop
    async def run() -> None:
        wire = Wire(limits=Http2Limits(frame_burst=500, frames_per_s=100))
        wire.application.answers = False
        sent = FLOODS[name]
        await wire.send(request(1, end="crumbs" in name))
        if "crumbs" in name or "closed" in name:
            await wire.send(frames.rst_stream(1, ErrorCode.CANCEL))
        await wire.send(*[sent] * 100)
        assert not wire.transport.closed, "a few are no flood"
        result = await wire.send(*[sent * 50] * 40)
        assert (result[-1].kind, result[-1].code) == (frames.GOAWAY, ErrorCode.ENHANCE_YOUR_CALM)
        assert wire.transport.closed

    run()


@on_a_loop
async def test_settings_cost_by_entries_and_by_streams_whose_windows_change() -> None:
    wire = Wire()
    wire.application.answers = False
    await wire.send(*[request(2 * n + 1, end=False) for n in range(100)])

    async def cost(*values: int) -> int:
        entries = b"".join(struct.pack(">HI", Setting.INITIAL_WINDOW_SIZE, value) for value in values)
        before = wire.connection.frame_budget.available
        await wire.send(frames.frame(frames.SETTINGS, 0, 0, entries))
        return before - wire.connection.frame_budget.available

    assert await cost() == 2
    assert await cost(1000) == 2 + 1 + 100
    assert await cost(1000) == 2 + 1, "no window changes"
    assert await cost(*[5, 6] * 200, 1000) == 2 + 401, "only the last entry counts"
    assert await cost(*[5, 6] * 200) == 2 + 400 + 100
    assert {stream.send_window for stream in wire.connection.streams.values()} == {6}


@on_a_loop
async def test_refused_and_reset_calls_earn_no_allowance() -> None:
    wire = Wire(limits=Http2Limits(streams=2))
    budget = wire.connection.frame_budget
    before = budget.available
    await wire.send(request(1))  # answered
    assert budget.available > before
    wire.application.answers = False
    await wire.send(request(3, end=False), request(5, end=False))
    before = budget.available
    await wire.send(request(7, end=False))  # one too many
    await wire.send(frames.rst_stream(3, ErrorCode.CANCEL))
    assert before - budget.available == 3 + 1 + 1


@on_a_loop
async def test_long_header_blocks_cost_and_only_a_successful_call_gets_it_back() -> None:
    wire = Wire()
    budget = wire.connection.frame_budget
    long = [*POST, *[(b"x", b"y")] * 350]
    before = budget.available
    await wire.send(request(1, fields=long))
    assert 0 <= budget.available - before < 20
    wire.application.answers = False
    before = budget.available
    long[-1] = (b"z", b"y")  # a cached block costs nothing
    await wire.send(request(3, fields=long), frames.rst_stream(3, ErrorCode.CANCEL))
    assert before - budget.available > 300


@on_a_loop
async def test_a_flood_is_read_in_slices() -> None:
    """Other connections are served between two slices."""
    wire = Wire()
    await wire.frames()
    wire.connection.data_received(frames.ping(b"\0" * 8, ack=False) * 10_000)
    read = 50_000 - wire.connection.frame_budget.available
    assert read < 1100
    for _ in range(20):
        await asyncio.sleep(0)
    assert 50_000 - wire.connection.frame_budget.available >= 10_000 - 100  # some time has passed
    assert len(await wire.frames()) == 10_000


@on_a_loop
async def test_calls_that_cost_nothing_are_read_in_slices_of_time() -> None:
    """Calls that are answered at once give their cost back: only the time that they take bounds an iteration."""
    wire = Wire()
    await wire.frames()
    now_ns = itertools.count(1, 1_000_000)  # each look at the clock is a millisecond later
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("headrace.wire.http2.connection.monotonic_ns", lambda: next(now_ns))
        wire.connection.data_received(b"".join(request(stream_id) for stream_id in range(1, 41, 2)))
        opened = [wire.connection.last_stream_id]
        for _ in range(20):
            await asyncio.sleep(0)
            opened.append(wire.connection.last_stream_id)
    assert 1 < opened[0] < 15
    assert opened[-1] == 39, "all are read, in later iterations"


@on_a_loop
async def test_windows_opened_in_single_bytes_earn_nothing() -> None:
    wire = Wire(hello=frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    wire.application.answer = b"x" * 10_000
    await wire.send(request(1))
    before = wire.connection.frame_budget.available
    for _ in range(100):
        await wire.send(frames.window_update(1, 1))
    assert before - wire.connection.frame_budget.available == 100


@on_a_loop
async def test_reset_streams_do_not_stay_in_queues() -> None:
    """Neither behind a body that waits for its window, nor while the peer's window is closed."""
    wire = Wire(limits=Http2Limits(max_granted_bytes=1000))
    wire.application.answers = False
    await wire.send(request(1, end=False), request(3, end=False))
    for stream_id in (1, 3):
        stream = wire.application.streams[stream_id]
        stream.request_window(stream.receive_window + 800)
    await wire.send(frames.rst_stream(3, ErrorCode.CANCEL))
    assert not wire.connection.window_grants.waiting
    wire.application.answers = True
    wire.application.answer = b"x" * 100_000
    await wire.send(request(5), request(7), frames.rst_stream(7, ErrorCode.CANCEL))
    assert [stream.stream_id for stream in wire.connection.write_buffer._send_queue] in ([5], [])
    await wire.send(frames.rst_stream(5, ErrorCode.CANCEL))
    assert not wire.connection.write_buffer._send_queue


@on_a_loop
async def test_streams_that_the_server_must_reset_are_a_flood_too() -> None:
    """CVE-2025-8671: the peer makes the server reset its streams."""
    wire = Wire(limits=Http2Limits(frame_burst=500, frames_per_s=100))
    wire.application.answers = False
    attack = [request(2 * n + 1) + frames.window_update(2 * n + 1, 0) for n in range(2000)]
    assert (await wire.send(*attack))[-1].code == ErrorCode.ENHANCE_YOUR_CALM


@on_a_loop
async def test_completed_requests_raise_the_limit_of_pings_and_window_updates() -> None:
    wire = Wire(limits=Http2Limits(frame_burst=100, frames_per_s=1))
    for number in range(3000):
        stream_id = 2 * number + 1
        await wire.send(
            request(stream_id, end=False)
            + frames.ping(b"\0" * 8, ack=False)
            + data(stream_id, b"abc", end=True)
            + frames.window_update(0, 3)
        )
        wire.transport.written.clear()
    assert not wire.transport.closed
    assert wire.connection.last_stream_id == 5999


def test_the_frame_budget_refills_over_time() -> None:
    frame_budget = FrameBudget(burst=10, per_s=1_000_000_000)
    frame_budget.spend(10)
    frame_budget.spend(1)  # some time has passed since it was made
    assert frame_budget.available <= 10, "a long silence is no larger budget"
    frame_budget.available = 500
    frame_budget.cap()
    assert frame_budget.available == 10
    poor = FrameBudget(burst=3, per_s=0)
    poor.spend(3)
    with pytest.raises(Http2ConnectionError):
        poor.spend(1)


@in_virtual_time
async def test_peers_without_a_preface_are_closed() -> None:
    for hello in (b"", frames.PREFACE[:10], frames.PREFACE, frames.PREFACE + b"\0\0"):
        wire = Wire(limits=QUICK, hello=hello)
        result = await _until_closed(wire)
        assert result[-1].code in (ErrorCode.SETTINGS_TIMEOUT, ErrorCode.ENHANCE_YOUR_CALM)
        assert wire.application.connections == 0


@pytest.mark.parametrize("part", [request(1)[:12], frames.frame(frames.HEADERS, 0, 1, b""), b"\0"])
def test_frames_and_header_blocks_must_get_done(part: bytes) -> None:
    @in_virtual_time
    async def run() -> None:
        wire = Wire(limits=QUICK)
        wire.connection.data_received(part)
        assert (await _until_closed(wire))[-1].code == ErrorCode.ENHANCE_YOUR_CALM

    run()


@in_virtual_time
async def test_crumbs_of_a_header_block_do_not_stop_its_clock() -> None:
    wire = Wire(limits=QUICK)
    wire.connection.data_received(frames.frame(frames.HEADERS, 0, 1, b""))
    for _ in range(25):
        if wire.transport.closed:
            break
        wire.connection.data_received(frames.frame(frames.CONTINUATION, 0, 1, b"\x82"))
        await asyncio.sleep(0.02)
    assert wire.transport.closed


@in_virtual_time
async def test_a_stalled_body_is_reset_and_the_connection_stays_open() -> None:
    wire = Wire(limits=QUICK)
    wire.connection.data_received(request(1, end=False) + data(1, b"abc"))
    result: list[Frame] = []
    for number in range(30):
        result += await wire.send(frames.ping(b"%08d" % number, ack=False))
        await asyncio.sleep(0.02)
    assert [frame.code for frame in result if frame.kind == frames.RST_STREAM] == [ErrorCode.CANCEL]
    assert not wire.transport.closed
    await wire.drop()


@in_virtual_time
async def test_an_unread_response_is_reset() -> None:
    wire = Wire(limits=QUICK, hello=frames.PREFACE + frames.settings({Setting.INITIAL_WINDOW_SIZE: 0}))
    wire.application.answer = b"x" * 1000
    result = await wire.send(request(1))
    for number in range(30):
        result += await wire.send(frames.ping(b"%08d" % number, ack=False))
        await asyncio.sleep(0.02)
    assert [frame.code for frame in result if frame.kind == frames.RST_STREAM] == [ErrorCode.CANCEL]
    assert wire.connection.write_buffer.unsent_bytes == 0
    assert wire.application.lost == [1]
    await wire.drop()


@on_a_loop
async def test_unread_responses_stop_new_requests() -> None:
    wire = Wire(limits=Http2Limits(max_unsent_bytes=10_000))
    wire.application.answer = b"x" * 6_000
    await wire.frames()
    wire.transport.fill()
    result = await wire.send(*[request(2 * number + 1) for number in range(5)])
    assert result == []
    assert len(wire.application.opened) == 2
    wire.transport.empty()
    result = await wire.frames()
    codes = [(frame.stream_id, frame.code) for frame in result if frame.kind == frames.RST_STREAM]
    assert codes == [(number, ErrorCode.REFUSED_STREAM) for number in (5, 7, 9)]
    assert sum(len(frame.payload) for frame in result if frame.kind == frames.DATA) == 12_000


@on_a_loop
async def test_queued_ping_replies_are_bounded() -> None:
    wire = Wire(limits=Http2Limits(control_bytes=5_000))
    wire.transport.fill()
    await wire.send(*[frames.ping(b"\0" * 8, ack=False)] * 400)
    assert wire.transport.aborted
    assert wire.application.connections == 0


@in_virtual_time
async def test_an_idle_connection_is_closed_without_an_error() -> None:
    wire = Wire(limits=Http2Limits(handshake_s=0.1, idle_s=0.2, drain_s=0.05))
    await wire.send(request(1))
    result = await _until_closed(wire)
    assert [frame.code for frame in result if frame.kind == frames.GOAWAY] == [ErrorCode.NO_ERROR] * 2


@in_virtual_time
async def test_a_shutdown_waits_for_a_ping_while_the_peer_sends() -> None:
    wire = Wire(limits=QUICK)
    wire.application.answers = False
    await wire.send(request(1, end=False))
    wire.connection.timers.start_graceful_shutdown()
    await wire.frames()
    for _ in range(5):  # a large body, in front of the answer to the PING
        await asyncio.sleep(QUICK.drain_s * 0.6)
        assert frames.GOAWAY not in [frame.kind for frame in await wire.send(data(1, b"x"))]
    await wire.send(request(3))
    assert len(wire.application.opened) == 2, "a call behind the body is served"
    await wire.drop()


@in_virtual_time
async def test_an_old_connection_is_closed_after_its_streams() -> None:
    wire = Wire(limits=Http2Limits(handshake_s=0.1, max_age_s=0.05, drain_s=0.05))
    wire.application.answers = False
    sent, stream_id = await wire.send(request(1)), 1
    while not any(frame.kind == frames.GOAWAY for frame in sent):
        await asyncio.sleep(0.02)
        wire.application.streams[stream_id].answer(b"done")
        stream_id += 2
        sent = await wire.send(request(stream_id))
    assert wire.connection.streams, "GOAWAY comes with a call, whose client begins no other at that moment"
    sent = []
    while not any(frame.kind == frames.GOAWAY and frame.payload[3] == stream_id for frame in sent):
        await asyncio.sleep(0.02)
        sent += await wire.frames()
    assert not wire.transport.closed
    wire.application.streams[stream_id].answer(b"done")
    await _until_closed(wire)


@in_virtual_time
async def test_a_connection_leaves_when_as_many_calls_wait_as_ever() -> None:
    wire = Wire()
    wire.application.answers = False
    wire.connection.timers.leave()
    sent = await wire.send(request(1) + request(3) + request(5))
    await asyncio.sleep(QUICK.handshake_s)
    for stream_id in (1, 3):
        wire.application.streams[stream_id].answer(b"done")
    sent += await wire.frames() + await wire.send(request(7))
    assert frames.GOAWAY not in [frame.kind for frame in sent], "three at a time are the most: a third may come"
    assert frames.GOAWAY in [frame.kind for frame in await wire.send(request(9))]
    await wire.drop()


@on_a_loop
async def test_a_shutdown_takes_two_steps_and_loses_no_stream() -> None:
    wire = Wire()
    wire.application.answers = False
    await wire.send(request(1))
    wire.connection.timers.start_graceful_shutdown()
    warned, pings = await wire.frames()
    assert (warned.payload[:4], warned.code) == (b"\x7f\xff\xff\xff", ErrorCode.NO_ERROR)
    # Begun by the peer before it read the warning, and written behind its answer to the PING: served.
    (again,) = await wire.send(frames.ping(pings.payload, ack=True) + request(3))
    assert again.kind == frames.PING
    (last,) = await wire.send(frames.ping(again.payload, ack=True))
    assert (last.payload[:4], last.code) == (b"\0\0\0\3", ErrorCode.NO_ERROR)
    # Opened after the last word: not served, and no fault either; nor is what belongs to it.
    assert (
        await wire.send(request(5, end=False) + data(5, b"x", end=True) + frames.rst_stream(5, ErrorCode.CANCEL)) == []
    )
    assert len(wire.application.opened) == 2
    for stream_id in (1, 3):
        assert not wire.transport.closed
        wire.application.streams[stream_id].answer(b"done")
        assert frames.DATA in [frame.kind for frame in await wire.frames()]
    assert wire.transport.closed
    assert wire.application.connections == 0


@on_a_loop
async def test_a_shutdown_before_the_preface_serves_pending_requests() -> None:
    """A client that has read the server's SETTINGS may have sent calls that have not arrived."""
    wire = Wire(hello=b"")
    wire.connection.timers.start_graceful_shutdown()
    assert [frame.kind for frame in await wire.frames()] == [
        frames.SETTINGS,
        frames.WINDOW_UPDATE,
        frames.GOAWAY,
        frames.PING,
    ]
    result = await wire.send(HELLO + request(1))
    assert (frames.HEADERS, 1) in [(frame.kind, frame.stream_id) for frame in result]
    assert not wire.transport.closed
    (again,) = await wire.send(frames.ping(b"draining", ack=True))
    (last,) = await wire.send(frames.ping(again.payload, ack=True))
    assert (last.payload[:4], last.code) == (b"\0\0\0\1", ErrorCode.NO_ERROR)
    assert wire.transport.closed


@on_a_loop
async def test_refused_connections_get_no_settings() -> None:
    application = PlainApplication()
    application.most_connections = 0
    wire = Wire(application, hello=b"")
    assert await wire.frames() == []
    assert wire.transport.closed
    await wire.drop()


@in_virtual_time
async def test_a_shutdown_does_not_wait_for_a_ping_for_ever() -> None:
    wire = Wire(limits=QUICK, hello=HELLO)
    wire.connection.timers.start_graceful_shutdown()
    result = await _until_closed(wire)
    assert [frame.code for frame in result if frame.kind == frames.GOAWAY] == [ErrorCode.NO_ERROR] * 2


@in_virtual_time
async def test_a_connection_that_cannot_be_flushed_is_cut_after_a_while() -> None:
    wire = Wire(limits=QUICK)
    wire.transport.fill()
    await wire.send(data(0, b"x"))
    assert wire.transport.closed
    assert not wire.transport.aborted
    await asyncio.sleep(QUICK.linger_s)
    assert wire.transport.aborted
    assert wire.application.connections == 0


@on_a_loop
async def test_a_flood_of_requests_that_are_not_grpc_ends_the_connection() -> None:
    wire = Wire(GrpcServer(Methods({}, {}), ClientLimits(Limits()), None))
    result: list[Frame] = []
    fields = [(b":method", b"GET"), *POST[1:]]
    for start in range(1, 80_000, 1000):
        result += await wire.send(*(request(start + number, fields=fields) for number in range(0, 1000, 2)))
        if wire.transport.closed:
            break
    assert (result[-1].kind, result[-1].code) == (frames.GOAWAY, ErrorCode.ENHANCE_YOUR_CALM)


@on_a_loop
async def test_a_closed_transport_is_not_paused() -> None:
    wire = Wire()
    wire.connection.close()
    wire.connection._read_pause.pause()
    assert wire.transport.reading
    await wire.frames()
