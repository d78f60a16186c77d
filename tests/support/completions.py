"""Completions and requests for tests that need no event loop."""

from __future__ import annotations

import numpy as np
from headrace.core.completion import Completion, Outcome
from headrace.core.request import InferRequest
from headrace.scheduling.queue import Entry


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
