"""Stream of frames: one write for what is written together, and answers of a read before what the loop has deferred."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from headrace.front_ends import frames
from headrace.front_ends.frame_stream import FrameStream
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


def test_answers_of_a_read_are_one_write_before_deferred_work() -> None:
    async def main() -> None:
        order: list[str] = []
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
        assert transport.writes == [received], "the scheduled write had nothing left"

    asyncio.run(main())


def test_frames_of_one_turn_are_one_write() -> None:
    async def main() -> None:
        stream, transport = await open_stream(lambda *_: None)
        for group in range(3):
            stream.write((frames.cancel_frame(group),))
        assert transport.writes == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert transport.writes == [b"".join(frames.cancel_frame(group) for group in range(3))]

    asyncio.run(main())


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


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_frames_keep_their_order_when_the_peer_does_not_read(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Small writes go to the socket directly, until it is full; then the transport has them."""
    numbers = list(range(60_000))
    received: list[int] = []

    async def main() -> None:
        ours, theirs = socket.socketpair()
        stream = FrameStream(lambda *_: None, lambda _error: None)
        await stream.open(ours)
        for number in numbers:
            stream.write((frames.cancel_frame(number),))
            if number % 3 == 0:
                stream.flush()
        await asyncio.sleep(0)
        is_complete = asyncio.Event()

        def on_frame(buffer: bytes, start: int, _end: int) -> None:
            received.append(group_of(buffer, start))
            if len(received) == len(numbers):
                is_complete.set()

        reader = FrameStream(on_frame, lambda _error: None)
        await reader.open(theirs)
        await asyncio.wait_for(is_complete.wait(), 60)
        stream.close()
        reader.close()
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    assert received == numbers


def group_of(buffer: bytes, start: int) -> int:
    return int(frames.HEADER.unpack_from(buffer, start)[4])


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_active_wait_handles_what_arrives(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        received: asyncio.Queue[int] = asyncio.Queue()
        is_lost = asyncio.Event()
        stream = FrameStream(
            lambda buffer, start, _: received.put_nowait(group_of(buffer, start)), lambda _error: is_lost.set()
        )
        assert not stream.spin(10**9), "a stream that is not open"
        await stream.open(ours)
        assert not stream.spin(1000)
        theirs.sendall(frames.cancel_frame(7))
        assert stream.spin(10**9)
        assert received.get_nowait() == 7
        theirs.sendall(frames.cancel_frame(8))
        assert await asyncio.wait_for(received.get(), 60) == 8  # by the event loop
        theirs.close()
        assert not stream.spin(10**9)
        await asyncio.wait_for(is_lost.wait(), 60)
        assert not stream.spin(10**9)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
