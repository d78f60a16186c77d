"""Requests whose head equals that of an earlier one: served without parser, task and ASGI.

Clients repeat the same head with each request, byte for byte. Parsing, the task and the steps of ASGI take half of the event
loop's time of a small request. So parsed heads are cached by their bytes, as HTTP/2 caches header blocks. A read that has a
cached head and exactly its body is decoded and queued immediately, and the callback of its completion writes the response.
uvicorn serves all other requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Cancelled, Unavailable, forget_frames
from headrace.core.limits import BodyReservation
from headrace.wire.http.infer_endpoint import InferEndpoint, ParsedHead, error_response, success_head
from headrace.wire.requests.response_metadata import header_lines
from headrace.wire.requests.service import PendingRequest
from headrace.wire.requests.tensor_codec import BodyBytes

logger = logging.getLogger("headrace.http")


class RepeatedConnection(Protocol):
    """The part of `headrace.wire.http.connection.HeadraceHttpProtocol` that a repeated request uses; see there."""

    completion: LoopCompletion | None
    loop: asyncio.AbstractEventLoop
    tasks: set[Any]
    transport: asyncio.Transport

    def on_repeated_complete(self) -> None:
        """Continue after a repeated request."""

    def write(self, cycle: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Write a complete response; returns False if it must be written by `write_later`."""

    async def write_later(self, cycle: Any, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write a complete response after the client has read earlier ones."""


class RepeatedHeads:
    """The endpoint whose cached heads the connections of one listener share. Ownership: the event loop.

    Attributes:
        endpoint: of the first inference request of the listener; None before it.
        has_wide_bodies: a request was larger than a read, and smaller than one whose body is read directly.
    """

    __slots__ = ("endpoint", "has_wide_bodies")

    def __init__(self) -> None:
        self.has_wide_bodies = False
        self.endpoint: InferEndpoint | None = None


class RepeatedRequest:
    """One request: `begin` starts it, the callback of its completion ends it.

    It replaces uvicorn's RequestResponseCycle in the connection, and the task of the request in the server's set of tasks. A
    shutdown waits for these tasks and cancels them after the drain timeout.

    Ownership: the event loop.

    Args:
        connection: of the request.
        endpoint: serves the request.
        head: of the request, cached.
        reservation: of its body; released at the end of the request.

    Attributes:
        awaits_body: it is admitted, and its body is incomplete.
        disconnected, keep_alive, response_started, response_complete: see uvicorn's RequestResponseCycle.
    """

    __slots__ = (
        "_connection", "_endpoint", "_head", "_pending", "_reservation", "_writing", "awaits_body", "disconnected",
        "keep_alive", "on_response", "response_complete", "response_started",
    )  # fmt: skip

    body = b""
    more_body = waiting_for_100_continue = False
    message_event = SimpleNamespace(set=bool)  # nothing waits for parts of the request: `set` does nothing

    def __init__(
        self, connection: RepeatedConnection, endpoint: InferEndpoint, head: ParsedHead, reservation: BodyReservation
    ) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._head = head
        self._reservation = reservation
        self._pending: PendingRequest | None = None
        self._writing: asyncio.Task[None] | None = None
        self.on_response = connection.on_repeated_complete
        self.disconnected = self.response_started = self.response_complete = self.awaits_body = False
        self.keep_alive = True

    def admit(self) -> None:
        """Admit the request before its body arrives, or respond with an error; never raises."""
        head = self._head
        pending = self._pending = PendingRequest(head.model, head.version, monotonic_ns(), head.headers.options)
        self.awaits_body = True
        try:
            self._endpoint.service.admit(pending)
        except Exception as error:
            self._fail(pending, error)

    def drop(self) -> None:
        """End the request without a response: its body does not arrive."""
        if self.awaits_body:
            assert self._pending is not None
            self._fail(self._pending, Cancelled("the client disconnected before its request was complete"))

    def begin(self, body: bytes | BodyBytes) -> None:
        """Decode and queue the request; never raises."""
        endpoint, head, pending = self._endpoint, self._head, self._pending
        if pending is None:
            pending = self._pending = PendingRequest(head.model, head.version, monotonic_ns(), head.headers.options)
        else:
            pending.received_ns, self.awaits_body = monotonic_ns(), False
        try:
            completion = endpoint.service.enqueue(pending, body, head.headers.header_size)
        except Exception as error:
            self._fail(pending, error)
            return
        self._connection.completion = completion
        if completion.woken:  # the request ran on the event loop
            self._finish()
        else:
            completion.then(self._finish)

    def cancel(self, msg: str | None = None) -> None:
        """End the request with an error after the drain timeout; see `asyncio.Task.cancel`."""
        if self._writing is not None:
            self._writing.cancel()
            self._end()
            self._connection.transport.abort()
        elif self._pending is not None:
            error = Unavailable("the server is shutting down and could not wait for this request")
            if self.awaits_body:
                self._fail(self._pending, error)
            else:
                self._pending.completion.settle(error)

    def _finish(self) -> None:
        """Write the response, after the completion is settled; never raises."""
        pending = self._pending
        assert pending is not None, "a completion calls back once"
        connection, endpoint, headers = self._connection, self._endpoint, self._head.headers
        connection.completion = None
        accept_encoding = headers.accept_encoding
        try:
            if (pending.template.is_costly or accept_encoding) and endpoint.service.is_large(pending, True):
                large = endpoint.respond_large(pending, headers, self._write, self._fail)
                self._writing = connection.loop.create_task(large)
                return
            header_size, parts, extra_headers = endpoint.finish(pending)
            if headers.cors:
                extra_headers = extra_headers.with_pairs(headers.cors)
            head, parts = success_head(header_size, parts, accept_encoding, extra_headers)
            if connection.write(self, head, parts):  # as `_write`, without its call
                self._end()
            else:
                self._write(head, parts)
        except Exception as error:
            self._fail(pending, error)

    def _fail(self, pending: PendingRequest, error: Exception) -> None:
        self.awaits_body = False
        try:
            failure, load_headers = self._endpoint.fail(pending, error)
            forget_frames(error)
            if isinstance(failure, Cancelled):
                self._end()
                return
            status, headers, body = error_response(failure)
            self._write(STATUS_LINE[status] + header_lines([*headers, *load_headers, *self._head.headers.cors]), [body])
        except Exception:
            logger.exception("the response of a failed request could not be written")
            self._end()
            self._connection.transport.abort()

    def _write(self, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        if self._connection.write(self, head, parts):
            self._end()
        else:
            self._writing = self._connection.loop.create_task(self._write_later(head, parts))

    async def _write_later(self, head: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """Write the response after the write buffer has room again."""
        try:
            await self._connection.write_later(self, head, parts)
        finally:
            self._end()

    def _end(self) -> None:
        self._reservation.end()
        self._connection.tasks.discard(self)
        self._pending = self._writing = None  # an idle connection holds no tensors
