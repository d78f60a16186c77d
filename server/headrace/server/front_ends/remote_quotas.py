"""Quotas of keys in a front end: the engine process takes the tokens, so that a quota holds for the whole server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.core.access import QuotaBucket, RemoteBucket
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import QuotaExceeded, Unavailable
from headrace.server.front_ends import frames
from headrace.server.front_ends.errors import restore_error
from headrace.server.front_ends.frames import ErrorRecord


class RemoteQuotas:
    """Charges requests to quotas in the engine process. Ownership: the event loop.

    Args:
        loop: event loop of the front end.
        send: sends a frame to the engine.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[frames.Buffer], None]) -> None:
        self._loop = loop
        self._send = send
        self._waiting: dict[int, asyncio.Future[ErrorRecord | None]] = {}
        self._last = 0

    async def charge(self, bucket: QuotaBucket) -> None:
        """Take a token. After a refusal, requests are refused here until the next token, without a message to the engine.

        Raises:
            QuotaExceeded: the quota is used up.
            Unavailable: the engine process has ended.
        """
        now_ns = monotonic_ns()
        if isinstance(bucket, RemoteBucket):
            bucket.check(now_ns)
        self._last = number = self._last + 1
        waiter = self._waiting[number] = self._loop.create_future()
        self._send(frames.message_frame(frames.CHARGE, bucket.name, group=number))
        try:
            refusal = await waiter
        finally:
            self._waiting.pop(number, None)
        if refusal is None:
            return
        error = restore_error(refusal)
        if isinstance(error, QuotaExceeded) and isinstance(bucket, RemoteBucket):
            bucket.mark_empty(now_ns + int(error.retry_after_s * NS_PER_S))
        raise error

    def on_charged(self, number: int, refusal: ErrorRecord | None) -> None:
        """Take the result of a charge; the request may have been cancelled since."""
        waiter = self._waiting.get(number)
        if waiter is not None and not waiter.done():
            waiter.set_result(refusal)

    def fail_all(self, message: str) -> None:
        """End all charges with Unavailable: the engine process has ended."""
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(Unavailable(message))
