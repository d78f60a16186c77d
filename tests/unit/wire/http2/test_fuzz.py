"""Arbitrary bytes and damaged sessions: the connection closes or continues; nothing raises, hangs or leaks."""

from __future__ import annotations

import asyncio
import random

import pytest
from headrace.wire.http2 import frames
from headrace.wire.http2.frames import Setting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import ErrorLog, serve_http2
from tests.support.examples import examples
from tests.support.http2_peer import HELLO, POST, data, request

GRPC = [*POST[:2], (b":path", b"/s/echo"), (b"te", b"trailers"), (b"content-type", b"application/grpc")]
STREAM = [*POST[:2], (b":path", b"/s/chat"), (b"te", b"trailers"), (b"content-type", b"application/grpc")]
_MESSAGE = b"\0\0\0\0\x05hello"


def _session() -> list[bytes]:
    """A session with one of nearly everything."""
    return [
        frames.PREFACE,
        frames.settings({Setting.INITIAL_WINDOW_SIZE: 30, Setting.MAX_FRAME_SIZE: 20000}),
        request(1, end=False, fields=GRPC),
        data(1, _MESSAGE, end=True),
        frames.window_update(0, 1000),
        request(3, end=False, fields=STREAM),
        data(3, _MESSAGE * 2),
        data(3, _MESSAGE[:7]),
        data(3, _MESSAGE[7:], end=True),
        frames.window_update(3, 100),
        frames.ping(b"12345678", ack=False),
        request(5, end=False, fields=[*GRPC, (b"grpc-timeout", b"10m"), (b"content-length", b"10")]),
        frames.frame(frames.DATA, frames.PADDED | frames.END_STREAM, 5, b"\x03" + _MESSAGE + b"\0\0\0"),
        frames.frame(frames.HEADERS, 0, 7, request(7, fields=GRPC)[9:20]),
        frames.frame(frames.CONTINUATION, frames.END_HEADERS, 7, request(7, fields=GRPC)[20:]),
        frames.rst_stream(7, frames.ErrorCode.CANCEL),
        frames.frame(frames.PRIORITY, 0, 9, b"\0\0\0\0\1"),
        frames.frame(0x55, 3, 0, b"unknown"),
        request(11, fields=GRPC),
        request(13, fields=[*GRPC[:3], (b"content-type", b"text/plain")]),
        frames.goaway(0, frames.ErrorCode.NO_ERROR, "bye"),
    ]


@pytest.fixture(scope="module")
def errors() -> list[str]:
    """Errors logged by the server and asyncio."""
    return ErrorLog().lines


async def _survive(parts: list[bytes], log: list[str]) -> None:
    log.clear()
    await serve_http2(parts, hello=b"")
    assert not log, log


def _cut(whole: bytes, seed: int) -> list[bytes]:
    chance = random.Random(seed)
    parts, position = [], 0
    while position < len(whole):
        size = chance.choice((1, 5, 9, 60, 5000))
        parts.append(whole[position : position + size])
        position += size
    return parts


_few = settings(max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("seed", range(20))
async def test_the_session_itself_is_served(seed: int, errors: list[str]) -> None:
    await _survive(_cut(b"".join(_session()), seed), errors)


@_few
@given(st.binary(max_size=400), st.booleans(), st.integers(0, 1000))
def test_arbitrary_bytes(errors: list[str], noise: bytes, greeted: bool, seed: int) -> None:
    asyncio.run(_survive(_cut((HELLO if greeted else b"") + noise, seed), errors))


_kinds = st.integers(0, 11)
_frames = st.builds(
    frames.frame,
    _kinds,
    st.sampled_from([0, 1, 4, 5, 8, 9, 12, 13, 0x20, 0x24, 0x25, 0x2D, 0xFF]),
    st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 2**31 - 1, 2**32 - 1]),
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [request(1, fields=GRPC)[9:], request(1, fields=STREAM)[9:], _MESSAGE, _MESSAGE * 3, b"\0\0\0\1", b"\0" * 8]
        ),
    ),
)


@_few
@given(st.lists(_frames, max_size=25), st.integers(0, 1000))
def test_arbitrary_frames(errors: list[str], sent: list[bytes], seed: int) -> None:
    asyncio.run(_survive([HELLO, *_cut(b"".join(sent), seed)], errors))


@_few
@given(st.data(), st.integers(0, 1000))
def test_damaged_sessions(errors: list[str], choice: st.DataObject, seed: int) -> None:
    session = _session()
    for _ in range(choice.draw(st.integers(1, 4))):
        index = choice.draw(st.integers(1, len(session) - 1))
        match choice.draw(st.sampled_from(["drop", "twice", "swap", "flip", "cut", "insert"])):
            case "drop" if len(session) > 2:
                del session[index]
            case "twice":
                session.insert(index, session[index])
            case "swap":
                other = choice.draw(st.integers(1, len(session) - 1))
                session[index], session[other] = session[other], session[index]
            case "flip" if session[index]:
                damaged = bytearray(session[index])
                damaged[choice.draw(st.integers(0, len(damaged) - 1))] ^= 1 << choice.draw(st.integers(0, 7))
                session[index] = bytes(damaged)
            case "cut":
                session[index] = session[index][: choice.draw(st.integers(0, 20))]
            case _:
                session.insert(index, choice.draw(_frames))
    asyncio.run(_survive(_cut(b"".join(session), seed), errors))
