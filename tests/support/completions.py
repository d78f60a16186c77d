"""Completions, streams of responses and requests for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
from headrace.core.completion import Completion, LoopCompletion, Outcome
from headrace.core.request import InferRequest
from headrace.core.response_stream import ResponseStream
from headrace.inference.scheduling.queue import Entry


class RecordedCompletion(Completion):
    """Completion that records its notifications; a completion may notify only once."""

    __slots__ = ("outcomes",)

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Outcome | None] = []

    def notify(self) -> None:
        self.outcomes.append(self.outcome)


def request(rows: int = 1, shape_key: object = None, value: float = 0.0, **fields: object) -> InferRequest:
    """A request for a model with one input `x` of shape [-1, 2]."""
    inputs = {"x": np.full((rows, 2), value, np.float32)}
    return InferRequest(inputs=inputs, rows=rows, shape_key=shape_key, received_ns=0, **fields)  # type: ignore[arg-type]


def entry(rows: int = 1, shape_key: object = None, level: int = 0, enqueued_ns: int = 0) -> Entry:
    """A queue entry with a `RecordedCompletion`."""
    return Entry(request(rows, shape_key), RecordedCompletion(), level, enqueued_ns)


async def responses_of(stream: ResponseStream, completion: LoopCompletion) -> AsyncIterator[Any]:
    """Iterate over the responses until the end of the request. Each one is consumed when the next is read."""
    changed = asyncio.Event()
    stream.then(changed.set)
    completion.then(changed.set)
    while True:
        response = stream.take()
        if response is not None:
            yield response
            stream.consumed()
        elif completion.woken:
            return
        else:
            changed.clear()
            await changed.wait()
