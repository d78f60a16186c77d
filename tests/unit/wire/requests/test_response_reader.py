"""Reading the responses of a request: one or any number, their end, errors, silence, credit."""

from __future__ import annotations

import asyncio

import pytest
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import Cancelled, ModelFailed
from headrace.core.request import InferResponse
from headrace.core.response_stream import ResponseStream
from headrace.wire.requests.response_reader import SILENCE, ResponseReader
from headrace.wire.requests.service import PendingRequest

END = InferResponse({})


def pending(is_stream: bool = True) -> PendingRequest:
    request = PendingRequest("m", "", 1)
    mailbox = Mailbox(asyncio.get_running_loop())
    request.completion = LoopCompletion(mailbox)
    request.responses = ResponseStream(mailbox) if is_stream else None
    return request


async def test_responses_come_in_order_and_then_the_end() -> None:
    request = pending()
    assert request.responses is not None
    reader, sent = ResponseReader(request), [InferResponse({}) for _ in range(3)]
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    for response in sent:
        request.responses.send(response)
    request.completion.settle(END)
    assert [await waiting, await reader.next(), await reader.next()] == sent
    assert await reader.next() is None
    assert await reader.next() is None


async def test_an_error_comes_after_the_responses_before_it() -> None:
    request = pending()
    assert request.responses is not None
    response = InferResponse({})
    request.responses.send(response)
    request.completion.settle(ModelFailed("it failed"))
    reader = ResponseReader(request)
    assert await reader.next() is response
    for _ in range(2):
        with pytest.raises(ModelFailed, match="it failed"):
            await reader.next()


async def test_the_outcome_of_an_ordinary_model_is_its_only_response() -> None:
    request = pending(is_stream=False)
    reader, outcome = ResponseReader(request), InferResponse({})
    request.completion.settle(outcome)
    assert await reader.next() is outcome
    reader.consume()
    assert await reader.next() is None


async def test_an_outcome_that_was_there_before_the_reader() -> None:
    request, outcome = pending(is_stream=False), InferResponse({})
    request.completion.settle_now(outcome)
    assert await ResponseReader(request).next() is outcome


async def test_silence_is_reported_until_a_response_comes() -> None:
    request = pending()
    assert request.responses is not None
    reader, response = ResponseReader(request, 0.001), InferResponse({})
    assert await reader.next() is SILENCE
    assert await reader.next() is SILENCE
    request.responses.send(response)
    result = SILENCE
    while result is SILENCE:
        result = await reader.next()  # type: ignore[assignment]
    assert result is response


async def test_only_consumed_responses_are_credit() -> None:
    request = pending()
    assert request.responses is not None
    credit: list[tuple[int, int]] = []
    request.responses.on_consumed = lambda count, size_bytes: credit.append((count, size_bytes))
    reader = ResponseReader(request)
    request.responses.send(InferResponse({}), 10)
    request.responses.send(InferResponse({}), 20)
    await reader.next()
    assert credit == []
    reader.consume()
    await reader.next()
    reader.consume()
    assert credit == [(1, 10), (1, 20)]


async def test_a_cancelled_request_raises() -> None:
    request = pending()
    reader = ResponseReader(request)
    waiting = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    request.completion.abandon()
    with pytest.raises(Cancelled):
        await waiting
