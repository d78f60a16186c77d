"""Frames of the control stream: any cut of the bytes gives the same messages, in order."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from headrace.front_ends.control import MAX_FRAME_BYTES, SIZE, ControlStream, MessageKind
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until_async

Messages = list[tuple[int, int, list[Any]]]
contents = st.lists(
    st.one_of(st.binary(max_size=40), st.text(max_size=20), st.booleans(), st.integers(0, 2**40)), max_size=4
)


class Pair:
    """Two ends of a control stream on a socket pair."""

    def __init__(self) -> None:
        self.received: Messages = []
        self.closed = 0

    async def open(self) -> Pair:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self.sender = ControlStream(lambda *_: None, lambda: None)
        self.receiver = ControlStream(lambda *message: self.received.append(message), self._closed)
        await loop.connect_accepted_socket(lambda: self.sender, ours)
        await loop.connect_accepted_socket(lambda: self.receiver, theirs)
        return self

    def _closed(self) -> None:
        self.closed += 1

    async def wait_for(self, number: int) -> None:
        await until_async(lambda: len(self.received) >= number or self.closed)


@given(st.lists(contents, min_size=1, max_size=5), st.integers(1, 7))
def test_any_cut_of_the_bytes_gives_the_same_messages(messages: list[list[Any]], step: int) -> None:
    async def run() -> None:
        pair = await Pair().open()
        frames: list[bytes] = []
        pair.sender.transport = _Sink(frames)  # type: ignore[assignment]
        for number, fields in enumerate(messages):
            pair.sender.send(MessageKind.BODY, number, *fields)
        pair.sender._flush()
        data = b"".join(frames)
        for start in range(0, len(data), step):
            pair.receiver.data_received(data[start : start + step])
        assert pair.received == [(MessageKind.BODY, number, fields) for number, fields in enumerate(messages)]

    asyncio.run(run())


class _Sink:
    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames

    def writelines(self, frames: list[bytes]) -> None:
        self._frames += frames


def test_messages_of_one_iteration_arrive_in_order() -> None:
    async def run() -> None:
        pair = await Pair().open()
        for number in range(100):
            pair.sender.send(MessageKind.BODY, number, b"x" * number, True)
        await pair.wait_for(100)
        assert [number for _, number, _ in pair.received] == list(range(100))

    asyncio.run(run())


def test_a_frame_of_impossible_size_closes_the_stream() -> None:
    async def run() -> None:
        pair = await Pair().open()
        pair.sender.transport.write(SIZE.pack(MAX_FRAME_BYTES + 1))
        await pair.wait_for(1)
        assert pair.received == []
        assert pair.closed == 1

    asyncio.run(run())


def test_nothing_is_sent_on_a_closed_stream() -> None:
    async def run() -> None:
        pair = await Pair().open()
        pair.receiver.transport.abort()
        await until_async(lambda: not pair.sender.is_open)
        pair.sender.send(MessageKind.BODY, 1, b"")
        await pair.sender.drain()
        assert pair.received == []

    asyncio.run(run())
