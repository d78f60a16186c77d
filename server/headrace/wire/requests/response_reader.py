"""Reads the responses of one request in order, whether its model sends exactly one or, decoupled, any number."""

from __future__ import annotations

import asyncio
from typing import Final

from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.request import InferResponse
from headrace.wire.requests.service import PendingRequest


class Silence:
    """Result of `ResponseReader.next` while the model sends nothing."""


SILENCE: Final = Silence()


class ResponseReader:
    """Responses of one request for a coroutine. Ownership: the event loop.

    Args:
        pending: the request, after `InferenceService.enqueue` with `takes_many`.
        silence_s: seconds after which `next` returns `SILENCE`; 0 for never.
    """

    def __init__(self, pending: PendingRequest, silence_s: float = 0.0) -> None:
        self._completion, self._responses = pending.completion, pending.responses
        self._silence_s = silence_s
        self._has_single = pending.responses is None
        self._waiter: asyncio.Future[bool] | None = None
        if self._responses is not None:
            self._responses.then(self._wake)
        self._completion.then(self._wake)

    async def next(self) -> InferResponse | HeadraceError | Silence | None:
        """Return the next response or an error in place of one, `SILENCE` after `silence_s` without any, None after the last.

        Raises:
            HeadraceError: the request has failed; all responses before the error have been returned.
        """
        while True:
            response = None if self._responses is None else self._responses.take()
            if response is not None:
                return response
            if self._completion.woken:
                return self._end()
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            timer = loop.call_later(self._silence_s, self._wake, False) if self._silence_s else None
            try:
                is_ready = await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
            if not is_ready:
                return SILENCE

    def consume(self) -> None:
        """Let the model send another response in place of the latest one, which is written."""
        if self._responses is not None:
            self._responses.consumed(1)

    def _end(self) -> InferResponse | None:
        outcome = self._completion.outcome
        if not isinstance(outcome, InferResponse):
            raise outcome if outcome is not None else Unavailable("the request has no response: retry it")
        if not self._has_single:
            return None
        self._has_single = False
        self._responses = None
        return outcome

    def _wake(self, is_ready: bool = True) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_ready)
