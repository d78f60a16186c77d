"""Stream of frames: one write for what is written together, answers of a read before what the loop has deferred, notices."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from headrace.server.front_ends import frames
from headrace.server.front_ends.frame_stream import FrameStream
from hypothesis import given
from hypothesis import strategies as st


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.writes.append(b"".join(list_of_data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Unlimited."""

    def close(self) -> None:
        """Nothing is open."""


async def open_stream(on_frame: Any) -> tuple[FrameStream, Transport]:
    stream, transport = FrameStream(on_frame, lambda error: None), Transport()
    stream._loop = asyncio.get_running_loop()
    stream.connection_made(transport)
    return stream, transport


async def test_answers_of_a_read_are_one_write_before_deferred_work(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    scheduled: list[FrameStream] = []
    schedule = FrameStream._schedule
    monkeypatch.setattr(FrameStream, "_schedule", lambda self: scheduled.append(self) or schedule(self))
    loop = asyncio.get_running_loop()

    def on_frame(buffer: bytes, start: int, end: int) -> None:
        loop.call_soon(lambda: order.append(f"deferred after {len(transport.writes)} writes"))
        stream.write((buffer[start:end],))

    stream, transport = await open_stream(on_frame)
    received = frames.cancel_frame(1) + frames.cancel_frame(2)
    stream.data_received(received)
    assert transport.writes == [received]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["deferred after 1 writes"] * 2
    assert (transport.writes, scheduled) == ([received], []), "the loop had nothing to write"
    stream.data_received(frames.HEADER.pack(frames.HEADER_BYTES, frames.ACKNOWLEDGED, 0, 0, 1)[:8])  # nothing to answer
    stream.write((received,))
    await asyncio.sleep(0)
    assert (transport.writes, scheduled) == ([received, received], [stream])


async def test_frames_of_one_turn_are_one_write() -> None:
    stream, transport = await open_stream(lambda *_: None)
    for group in range(3):
        stream.write((frames.cancel_frame(group),))
    assert transport.writes == []
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert transport.writes == [b"".join(frames.cancel_frame(group) for group in range(3))]


@given(st.data())
def test_every_frame_is_answered_in_order_however_the_bytes_arrive(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=6))
    content = b"".join(map(frames.cancel_frame, groups))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=6)))

    async def main() -> None:
        def on_frame(buffer: bytes, start: int, end: int) -> None:
            stream.write((buffer[start:end],))

        stream, transport = await open_stream(on_frame)
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            stream.data_received(content[start:end])
        assert b"".join(transport.writes) == content, "nothing waits for a turn of the loop"

    asyncio.run(main())


async def notice_streams(on_notice: Any) -> tuple[FrameStream, FrameStream]:
    """Two ends of a stream; the second one receives notices."""
    ends = socket.socketpair()
    sender = FrameStream(lambda *_: None, lambda _: None)
    receiver = FrameStream(lambda *_: None, lambda _: None, on_notice=on_notice)
    for stream, sock in zip((sender, receiver), ends, strict=True):
        await stream.open(sock)
    return sender, receiver


async def test_a_notice_is_acknowledged_when_it_is_applied_or_the_stream_ends() -> None:
    received: list[tuple[str, Any]] = []

    def on_notice(*notice: Any) -> None:
        received.append(notice)
        if notice[0] == "end":
            receiver.close()

    sender, receiver = await notice_streams(on_notice)
    for number in range(100):
        sender.send(str(number), b"x" * number)
    await sender.notify("table", b"")
    assert received == [*((str(number), b"x" * number) for number in range(100)), ("table", b"")]
    await sender.notify("end")
    await sender.notify("table")  # on a closed stream
    sender.send("table")
    assert sender._parts == []
