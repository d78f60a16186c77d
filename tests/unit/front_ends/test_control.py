"""Notices of the control stream: any cut of the bytes gives the same ones, in order."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from headrace.front_ends.control import MAX_FRAME_BYTES, SIZE, ControlStream
from hypothesis import given
from hypothesis import strategies as st

from tests.support.waiting import until_async

Notices = list[tuple[str, Any]]
contents = st.one_of(st.none(), st.binary(max_size=40), st.text(max_size=20), st.lists(st.integers(0, 2**40)))


class Pair:
    """Two ends of a control stream on a socket pair."""

    def __init__(self) -> None:
        self.received: Notices = []
        self.closed = 0

    async def open(self) -> Pair:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        self.sender = ControlStream(lambda *_: None, lambda: None)
        self.receiver = ControlStream(lambda *notice: self.received.append(notice), self._closed)
        await loop.connect_accepted_socket(lambda: self.sender, ours)
        await loop.connect_accepted_socket(lambda: self.receiver, theirs)
        return self

    def _closed(self) -> None:
        self.closed += 1

    async def wait_for(self, number: int) -> None:
        await until_async(lambda: len(self.received) >= number or self.closed)


@given(st.lists(contents, min_size=1, max_size=5), st.integers(1, 7))
def test_any_cut_of_the_bytes_gives_the_same_notices(messages: list[Any], step: int) -> None:
    async def run() -> None:
        pair = await Pair().open()
        frames: list[bytes] = []
        pair.sender.transport = _Sink(frames)  # type: ignore[assignment]
        for number, content in enumerate(messages):
            pair.sender.send(str(number), content)
        pair.sender._flush()
        data = b"".join(frames)
        for start in range(0, len(data), step):
            pair.receiver.data_received(data[start : start + step])
        assert pair.received == [(str(number), content) for number, content in enumerate(messages)]

    asyncio.run(run())


class _Sink:
    def __init__(self, frames: list[bytes]) -> None:
        self._frames = frames

    def writelines(self, frames: list[bytes]) -> None:
        self._frames += frames


async def test_notices_of_one_iteration_arrive_in_order() -> None:
    pair = await Pair().open()
    for number in range(100):
        pair.sender.send(str(number), b"x" * number)
    await pair.wait_for(100)
    assert [name for name, _ in pair.received] == [str(number) for number in range(100)]


async def test_a_notice_is_acknowledged_when_it_is_applied_or_the_stream_ends() -> None:
    pair = await Pair().open()
    await pair.sender.notify("table", b"")
    assert pair.received == [("table", b"")]
    pair.receiver._on_notice = lambda *_: pair.receiver.transport.abort()
    await pair.sender.notify("table", b"")
    await pair.sender.notify("table", b"")  # on a closed stream


async def test_a_frame_of_impossible_size_closes_the_stream() -> None:
    pair = await Pair().open()
    pair.sender.transport.write(SIZE.pack(MAX_FRAME_BYTES + 1))
    await pair.wait_for(1)
    assert pair.received == []
    assert pair.closed == 1


async def test_nothing_is_sent_on_a_closed_stream() -> None:
    pair = await Pair().open()
    pair.receiver.transport.abort()
    await until_async(lambda: not pair.sender.is_open)
    pair.sender.send("table", b"")
    pair.sender._flush()
    assert pair.received == []
