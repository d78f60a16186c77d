"""Streams of responses: order across threads, the end of the request, and credit for the sender."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import ModelFailed
from headrace.core.request import InferResponse
from headrace.core.response_stream import ResponseStream

from tests.support.completions import responses_of


def response(value: int) -> InferResponse:
    return InferResponse({"y": np.array([value])})


def value(answer: object) -> int:
    assert isinstance(answer, InferResponse)
    return int(answer.outputs["y"][0])  # type: ignore[index,call-overload]


async def test_responses_of_another_thread_arrive_in_order_and_before_the_end() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    stream, completion = ResponseStream(mailbox), LoopCompletion(mailbox)

    def send() -> None:
        for number in range(1000):
            stream.send(response(number))
        completion.settle(InferResponse({}))

    thread = threading.Thread(target=send)
    thread.start()
    assert [value(answer) async for answer in responses_of(stream, completion)] == list(range(1000))
    assert (await completion).outputs == {}
    assert stream.sent == 1000
    thread.join()


async def test_an_error_ends_the_stream_after_the_responses_before_it() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    stream, completion = ResponseStream(mailbox), LoopCompletion(mailbox)
    stream.send(response(1))
    completion.settle(ModelFailed("the second token"))
    assert [value(answer) async for answer in responses_of(stream, completion)] == [1]
    assert isinstance(completion.outcome, ModelFailed)


async def test_a_stream_without_responses_ends_with_its_request() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    stream, completion = ResponseStream(mailbox), LoopCompletion(mailbox)
    asyncio.get_running_loop().call_soon(completion.settle, response(7))
    assert [value(answer) async for answer in responses_of(stream, completion)] == []
    assert value(await completion) == 7


async def test_credit_is_returned_with_the_bytes_of_the_oldest_responses() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    stream = ResponseStream(mailbox)
    credit: list[tuple[int, int]] = []
    stream.on_consumed = lambda count, size_bytes: credit.append((count, size_bytes))
    for size in (10, 20, 30):
        stream.send(response(size), size)
    assert [value(answer) for _ in range(4) if (answer := stream.take()) is not None] == [10, 20, 30]
    assert credit == [], "a response that is taken is not consumed yet"
    stream.consumed(2)
    stream.consumed()
    assert credit == [(2, 30), (1, 30)]


async def test_the_callback_runs_on_the_loop_after_then() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    stream, calls = ResponseStream(mailbox), [0]

    def count() -> None:
        calls[0] += 1

    stream.then(count)
    stream.send(response(1))
    stream.send(response(2))
    assert calls == [0]
    await asyncio.sleep(0)
    assert calls == [1], "one call for all responses that arrived together"
    stream.send(response(3))
    await asyncio.sleep(0)
    assert calls == [2]
