"""Generate extension: `POST /v2/models/{model}[/versions/{version}]/generate` and `/generate_stream`. See docs/generate.md.

The steps of a request are those of inference: permission, lease, limits, decode, queue. A decoupled model may send any number of
responses. `/generate` takes exactly one, `/generate_stream` sends each as an event as soon as the model sends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import BadRequest, Cancelled, HeadraceError, forget_frames
from headrace.core.limits import ClientLimits
from headrace.core.request import InferResponse
from headrace.wire.http.event_stream import EventStream, error_data
from headrace.wire.http.generate_codec import GenerateCodec
from headrace.wire.http.infer_endpoint import (
    WIRE,
    Connection,
    InferEndpoint,
    InferHeaders,
    Receive,
    Scope,
    Send,
    abandoned_on_disconnect,
)
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.request_template import is_large_response
from headrace.wire.requests.response_metadata import Headers
from headrace.wire.requests.response_reader import ResponseReader
from headrace.wire.requests.service import InferenceService, PendingRequest
from headrace.wire.requests.services import InferenceServices
from headrace.wire.requests.tensor_codec import BodyBytes

_Encoded = tuple[bytes, Headers]


class GenerateEndpoint:
    """Serves the generate extension.

    Args:
        services: models and the destination of request records.
        client_limits: limits of all requests.
        inference: endpoint of inference, with the same limits: reads headers and bodies, writes responses and errors.
    """

    def __init__(self, services: InferenceServices, client_limits: ClientLimits, inference: InferEndpoint) -> None:
        self._inference = inference
        self._service: InferenceService[bytes | BodyBytes, None, bytes] = InferenceService(
            services, WIRE, lambda spec: GenerateCodec(spec, client_limits)
        )
        self._heartbeat_s = services.heartbeat_s

    async def respond_once(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        """Serve `/generate`: the one response as JSON; never raises for an invalid request.

        Args:
            scope, receive, send: of ASGI.
            model: name.
            version: "" for the latest.
        """
        pending = PendingRequest(model, version, monotonic_ns())
        connection: Connection | None = scope.get("headrace.connection")
        try:
            headers = await self._begin(scope, receive, send, pending)
            with _cancelled_with(connection, receive, pending.completion):
                encoded, extra_headers = await self._single(pending, bool(headers.accept_encoding))
            if headers.cors:
                extra_headers = extra_headers.with_pairs(headers.cors)
            await self._inference.respond(send, connection, None, [encoded], headers.accept_encoding, extra_headers)
        except (Exception, asyncio.CancelledError) as error:
            _abandon(pending)
            await self._inference.respond_error(scope, send, error, pending)

    async def respond_each(self, scope: Scope, receive: Receive, send: Send, model: str, version: str) -> None:
        """Serve `/generate_stream`: each response as an event; see `respond_once`.

        An error before the first event is the status of the response. A later one is an event, and ends the response.
        """
        pending = PendingRequest(model, version, monotonic_ns())
        events = EventStream(send)
        try:
            headers = await self._begin(scope, receive, send, pending)
            assert pending.handle is not None
            load_headers = self._inference.load_headers(pending.handle, pending.queued_ns)
            events.headers = [*load_headers.pairs, *headers.cors]
            with _cancelled_with(scope.get("headrace.connection"), receive, pending.completion):
                await self._send_events(pending, events)
        except (Exception, asyncio.CancelledError) as error:
            _abandon(pending)
            if not events.has_started:
                await self._inference.respond_error(scope, send, error, pending)
                return
            failure = self._service.fail(pending, error)
            forget_frames(error)
            await _end_with(events, failure)

    async def _begin(self, scope: Scope, receive: Receive, send: Send, pending: PendingRequest) -> InferHeaders:
        """Check, read, decode and queue a request; raises HeadraceError."""
        inference, service = self._inference, self._service
        headers = inference.parse_headers(scope)
        pending.options = headers.options

        def check() -> None:
            inference.check_origin(scope, headers)
            if headers.header_size is not None:
                raise BadRequest(
                    "the body has the type of an image or the header Inference-Header-Content-Length: the body of a "
                    "generate request is one JSON object, send tensors and files to /infer"
                )
            inference.check_length(headers)

        handle = service.admit(pending, check=check)
        connection: Connection | None = scope.get("headrace.connection")
        body = await inference.read_body(send, receive, connection, headers, scope.get("headrace.reservation"))
        pending.received_ns = monotonic_ns()
        parts = await service.read_large(handle, body, None) if len(body) > LARGE_BYTES else None
        if connection is not None and connection.is_lost:
            raise Cancelled("the client disconnected")
        service.enqueue(pending, body, None, parts=parts, takes_many=True)
        return headers

    async def _single(self, pending: PendingRequest, compressed: bool) -> _Encoded:
        """Wait for exactly one response of the model, and record the request.

        Returns:
            The encoded response and further headers.

        Raises:
            BadRequest: the model has sent none, or more than one.
            HeadraceError: the request has failed.
        """
        service, handle = self._service, pending.handle
        assert handle is not None
        if pending.responses is None:
            await pending.completion
            large = await service.encode_large(pending) if service.is_large(pending, compressed) else None
            encoded = service.finish(pending, large)
            return encoded, self._inference.requested_headers(
                pending, self._inference.load_headers(handle, pending.done_ns)
            )
        reader = ResponseReader(pending)
        response = await reader.next()
        if isinstance(response, HeadraceError):
            raise response
        if not isinstance(response, InferResponse):
            raise _not_one(pending.model, "sent no response")
        reader.consume()
        if await reader.next() is not None:
            raise _not_one(pending.model, "sent more than one response")
        started_ns = monotonic_ns()
        encoded = await self._encode(pending, response)
        service.finish_stream(pending, monotonic_ns() - started_ns)
        return encoded, self._inference.load_headers(handle, monotonic_ns())

    async def _send_events(self, pending: PendingRequest, events: EventStream) -> None:
        """Write each response as an event, heartbeats in between, and the end; raises HeadraceError."""
        reader = ResponseReader(pending, self._heartbeat_s)
        encode_ns, failure = 0, None
        while (response := await reader.next()) is not None:
            if isinstance(response, HeadraceError):  # the model may send further responses
                if not events.has_started:
                    raise response
                failure = failure or response
                await events.event(error_data(response))
                reader.consume()
                continue
            if not isinstance(response, InferResponse):
                await events.comment()
                continue
            started_ns = monotonic_ns()
            encoded = await self._encode(pending, response)
            encode_ns += monotonic_ns() - started_ns
            await events.event(encoded)
            reader.consume()
        if failure is None:
            self._service.finish_stream(pending, encode_ns)
        else:
            self._service.fail(pending, failure)
        await events.end()

    async def _encode(self, pending: PendingRequest, response: InferResponse) -> bytes:
        """Encode one response, a large one on a codec thread; raises BadRequest."""
        encode = pending.codec.encode
        arguments = response, pending.template, pending.id
        if is_large_response(response, pending.template, False):
            large: bytes = await self._service.codec_threads.run(encode, *arguments)
            return large
        encoded: bytes = encode(*arguments)
        return encoded


def _not_one(model: str, text: str) -> BadRequest:
    return BadRequest(f"model '{model}' {text}, /generate returns exactly one: send the request to /generate_stream")


def _abandon(pending: PendingRequest) -> None:
    """Cancel the work of a request that ends with an error, if it runs still."""
    completion: LoopCompletion | None = getattr(pending, "completion", None)  # none before `enqueue`
    if completion is not None:
        completion.abandon()


async def _end_with(events: EventStream, error: HeadraceError) -> None:
    """Write an error as the last event, unless the client has disconnected."""
    if not isinstance(error, Cancelled):
        await events.event(error_data(error))
    await events.end()


@contextmanager
def _cancelled_with(connection: Connection | None, receive: Receive, completion: LoopCompletion) -> Iterator[None]:
    """Abandon a completion when the client disconnects."""
    if connection is None:
        with abandoned_on_disconnect(completion, receive):
            yield
        return
    connection.completion = completion
    try:
        yield
    finally:
        connection.completion = None
