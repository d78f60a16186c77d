"""The HTTP/1.1 client of `headrace bench` against servers that answer in every way the protocol allows, and some it does not."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from headrace_bench.http_pool import HttpPool, parse_head, read_chunks
from headrace_bench.pool import BROKEN, CLOSED, NO_CONNECTION, TIMEOUT, WRONG, Address, Answer, PoolOptions

from tests.support.stub_server import Outcome, Outcomes, Talk, listening, outcomes_of, read_request
from tests.support.waiting import until_async

OK_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


def request(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def answers(*parts: bytes, close: bool = False) -> Talk:
    """Answer every request with these parts, each in a write of its own."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.001)
            if close:
                return

    return talk


def send(talk: Talk, count: int = 1, **options: Any) -> list[Outcome]:
    """Outcomes of so many requests that are submitted at once."""
    requests = [request(b"x" * number) for number in range(count)]
    return outcomes_of(talk, lambda pool_options: HttpPool(requests, pool_options), count, **options)


def test_requests_share_connections() -> None:
    assert [each.status for each in send(answers(OK_ANSWER), 20, connections=3)] == [""] * 20


@pytest.mark.parametrize(
    "parts",
    [
        tuple(OK_ANSWER[i : i + 1] for i in range(len(OK_ANSWER))),
        (OK_ANSWER[:-1], OK_ANSWER[-1:]),
        (b"HTTP/1.1 100 Continue\r\n\r\n", OK_ANSWER),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK_ANSWER,),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            b"3\r\nhel\r\n",
            b"2;x=y\r\nlo\r\n0\r\na: b\r\n\r\n",
        ),
        (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:5\r\nx: y\r\n\r\n", b"hello"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello",),
        (b"HTTP/1.1 200 OK\r\n\r\nhello",),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",),
    ],
    ids=["bytes", "two reads", "100", "100 and answer", "chunked", "case", "close", "until close", "1.0"],
)
def test_bodies_are_complete_however_they_arrive(parts: tuple[bytes, ...]) -> None:
    bodies = []

    def check(index: int, answer: Answer) -> bool:
        bodies.append(answer.body)
        return True

    # A connection that ends with its answer is replaced.
    is_closed = len(parts) == 1 and b"Continue" not in parts[0]
    assert [each.status for each in send(answers(*parts, close=is_closed), 3, check=check)] == ["", "", ""]
    assert bodies == [b"hello"] * 3


@pytest.mark.parametrize(
    ("answer", "status", "text"),
    [
        (b'HTTP/1.1 503 no\r\ncontent-length: 16\r\n\r\n{"error":"full"}', "503", "full"),
        (b"HTTP/1.1 404 no\r\ncontent-length: 4\r\n\r\ngone", "404", "gone"),
        (b"220 mail.example ESMTP\r\n", BROKEN, "HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhello", BROKEN, "3 bytes more"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", BROKEN, "chunk"),
    ],
)
def test_errors_have_status_and_text(answer: bytes, status: str, text: str) -> None:
    (outcome,) = send(answers(answer))
    assert outcome.status == status
    assert text in outcome.text


def test_an_early_end_of_a_connection_is_an_error() -> None:
    (outcome,) = send(answers(OK_ANSWER[:-2], close=True))
    assert outcome.status == CLOSED


def test_a_missing_answer_ends_with_a_timeout_and_frees_its_connection() -> None:
    requests = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while await read_request(reader) is not None:
            requests += 1
            if requests > 1:
                writer.write(OK_ANSWER)

    first, second = send(talk, 2, timeout_s=1.0)
    assert first.status == TIMEOUT
    # It waited in the client for the only connection, longer than its own timeout or not.
    assert second.status in ("", TIMEOUT)


def test_a_server_that_does_not_listen_is_an_error() -> None:
    async def run() -> list[Outcome]:
        outcomes = Outcomes()
        async with listening(answers()) as port:
            pass
        pool = HttpPool([request(b"")], PoolOptions(Address("127.0.0.1", port), 2, 5.0, outcomes.finished))
        for _ in range(3):
            pool.submit(0, time.monotonic())
        result = await outcomes.take(3)
        pool.close()
        return result

    assert {each.status for each in asyncio.run(run())} == {NO_CONNECTION}


def test_wrong_answers_are_counted() -> None:
    assert send(answers(OK_ANSWER), check=lambda _index, answer: answer.body == b"olleh")[0].status == WRONG


def test_a_server_that_reads_slowly_gets_the_whole_request() -> None:
    """Requests of 4 MB, of which the server reads a piece now and then: nothing is lost or sent twice."""
    body = bytes(range(256)) * 16384
    received = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: %d" % len(body) in head
            data = bytearray()
            while len(data) < len(body):
                data += await reader.read(min(100_000, len(body) - len(data)))
                await asyncio.sleep(0.0005)
            received.append(bytes(data))
            writer.write(OK_ANSWER)

    async def run() -> list[Outcome]:
        outcomes = Outcomes()
        async with listening(talk) as port:
            pool = HttpPool([request(body)], PoolOptions(Address("127.0.0.1", port), 1, 60.0, outcomes.finished))
            pool.submit(0, time.monotonic())
            pool.submit(0, time.monotonic())
            result = await outcomes.take(2)
            pool.close()
        return result

    assert [each.status for each in asyncio.run(run())] == ["", ""]
    assert received == [body, body]


def test_an_idle_connection_that_the_server_closes_is_not_used_again() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK_ANSWER)
        await writer.drain()
        writer.close()

    async def run() -> list[str]:
        outcomes = Outcomes()
        statuses = []
        async with listening(talk) as port:
            pool = HttpPool([request(b"")], PoolOptions(Address("127.0.0.1", port), 1, 30.0, outcomes.finished))
            for _ in range(3):
                pool.submit(0, time.monotonic())
                statuses += [each.status for each in await outcomes.take(1)]
                await until_async(lambda: not pool.connections)
            pool.close()
        return statuses

    assert asyncio.run(run()) == ["", "", ""]


def test_heads_and_chunks() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 7\r\nContent-Length: 12")
    assert head == (200, 12, False, 7)
    assert parse_head(b"nonsense").status == 0
    assert read_chunks(b"..3\r\nabc\r\n0\r\n\r\n", 2) == (b"abc", 15)
    assert read_chunks(b"3\r\nab", 0) is None
    assert read_chunks(b"0\r\nx: y\r\n", 0) is None
