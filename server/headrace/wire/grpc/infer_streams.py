"""ModelStreamInfer on serialized messages: many requests in flight on one stream, with responses in their order.

A stream has two coroutines, and a request has none. The reader decodes and queues requests. Completions call back. The writer
encodes and sends the responses that are next in order. Most messages resume neither: while the reader waits, the server
passes a small request to `take`, and while the writer waits, the callback sends a small response. Stock clients match
responses by their order, as Triton sends them. A request with the parameter `headrace_unordered` is answered as soon as it is
done and delays no other. Responses of decoupled models are not ordered either (`DecoupledRequest`). The limit on requests in
flight is the backpressure: a stream whose client does not read responses is not read, and a response that waits for an earlier
one counts as in flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from headrace.core.access import Scope
from headrace.core.clock import monotonic_ns
from headrace.core.errors import HeadraceError, Overloaded, Unauthenticated, Unavailable, forget_frames
from headrace.core.request import InferResponse
from headrace.wire.grpc.codec import Envelope, scan
from headrace.wire.grpc.decoupled import DecoupledRequest, error_message, stream_message
from headrace.wire.grpc.forwarder import Forwarder
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.methods import Message, StreamCall
from headrace.wire.grpc.response_room import max_held_bytes, unread_error
from headrace.wire.grpc.status import StatusError
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.service import PendingRequest, internal_error

logger = logging.getLogger("headrace.grpc")


# Responses up to this size are not counted while they wait in a stream: all of them together are small.
_SMALL_RESPONSE_BYTES = 4096

# Maximum requests of one stream between their arrival and their response.
MAX_IN_FLIGHT = 256
MAX_IN_SEQUENCES = 4096  # requests of sequences on one stream that do not count in it
_SEQUENCE = b"sequence_id"

StreamResponse = PendingRequest | Message | HeadraceError | StatusError


@dataclass(frozen=True, slots=True)
class InferStreams:
    """Serves ModelStreamInfer.

    Attributes:
        infer: decodes, queues and encodes each request.
        max_bytes: limit on all requests in flight on one stream, and so on one request, bytes.
        max_in_flight: limit on the requests in flight on one stream.
        forwarder: serves some of the requests; None for none.
    """

    infer: GrpcInference
    max_bytes: int
    max_in_flight: int = MAX_IN_FLIGHT
    forwarder: Forwarder | None = None

    async def serve(self, call: StreamCall) -> None:
        """Serve ModelStreamInfer: ModelInferRequest in, ModelStreamInferResponse out. An error ends its request, not the stream.

        Raises:
            HeadraceError: a request failed and the stream's metadata have `triton_grpc_error: true`; later ones are abandoned.
            Cancelled: the client disconnected; requests in flight are abandoned.
            Unavailable: the server stops; requests in flight are completed.
            Unauthenticated: the key of the stream is not valid, or not any more.
        """
        principal = call.options.principal
        if principal is not None:
            principal.check(Scope.INFER)
        stream = _Stream(self, call)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(stream.write())
                await stream.read()
        except BaseExceptionGroup as errors:
            for error in errors.exceptions:
                forget_frames(error)
            raise errors.exceptions[0] from None
        finally:
            stream.close()
            self.infer.trailers.report_requested(call, call.options)
        if stream.rejection is not None:
            raise stream.rejection


@dataclass(slots=True, eq=False)
class _StreamEntry:
    """One request of a stream, from its arrival until its response is sent."""

    request_bytes: int  # size of its message
    expected_bytes: int = 0  # reserved in the room for responses until the response is settled
    reserved_bytes: int = 0  # of its message in the budget for all bodies, until the response is sent
    response_bytes: int = 0  # size of its settled response, counted in the room until it is sent; 0 for a small one
    # A request whose completion is settled, an encoded response or error, or an error that ends the stream; None while
    # the request runs.
    response: StreamResponse | None = None
    encoded: Message | None = None  # the encoded response, None before the writer or `_send` has encoded it
    # Messages of a request of a decoupled model, None for any other; such an entry is in `_ready` while it has one.
    decoupled: DecoupledRequest | None = None
    is_ready: bool = False  # True while such an entry is in `_ready`, or the writer has taken it
    sent: asyncio.Event | None = None  # set once the response is sent; None if nothing waits for that
    in_sequence: bool = False  # True for a request of a sequence


class _Stream:
    """State of one stream. Ownership: the event loop."""

    def __init__(self, streams: InferStreams, call: StreamCall) -> None:
        self._streams = streams
        self._infer = streams.infer
        self._call = call
        self._response_room = call.room
        self._expected_bytes = self._response_bytes = 0
        self._closed = False
        self._options = call.options
        self._in_flight = 0
        self._in_sequences = 0  # of them, requests of sequences
        self._in_flight_bytes = 0
        self._queued: set[PendingRequest] = set()
        self._forwarded: set[asyncio.Task[None]] = set()
        self._sequences: dict[object, asyncio.Task[None]] = {}  # the last forwarded request of each sequence
        self._ordered: deque[_StreamEntry] = deque()  # in order of arrival, without unordered requests
        self._ready: deque[_StreamEntry] = deque()  # responses that can be sent now
        self._anything_ready = asyncio.Event()
        self._writing = False  # the writer has taken a response from `_ready`
        self._room = asyncio.Event()
        self._waits_for_room = False
        self._read_all = self._has_rejected = False
        # Error that stopped the reader before the client half-closed, None for none.
        self.rejection: Unavailable | None = None

    async def read(self) -> None:
        """Queue requests until the client half-closes or the server stops."""
        streams = self._streams
        self._call.take = self._take
        while True:
            try:
                message = await self._call.read()
            except Unavailable as error:
                self.rejection = error
                message = None
            if message is None:
                self._read_all = True
                self._anything_ready.set()
                return
            self._in_flight += 1
            self._in_flight_bytes += len(message)
            expected_bytes = 0
            if self._infer.large_responses:
                expected_bytes = self._infer.expected_bytes(message)
                if expected_bytes:
                    await self._response_room.start(expected_bytes)
                    self._expected_bytes += expected_bytes
            if self._infer.needs_coroutine(message, self._options):
                await self._begin_large(message, expected_bytes)
            else:
                self._begin(message, expected_bytes)
            del message  # otherwise it stays in memory until the next message
            if self._has_rejected:  # other calls come first: thousands of invalid messages may have arrived at once
                self._has_rejected = False
                await asyncio.sleep(0)
            while self._counted >= streams.max_in_flight or self._in_flight_bytes >= streams.max_bytes:
                self._waits_for_room = True
                self._room.clear()
                await self._room.wait()
                self._waits_for_room = False

    @property
    def _counted(self) -> int:
        """Requests in flight that count in the limit.

        A sequence without a slot waits for the end of another one, which may be a later request of this stream: the reader must
        not wait for it. The queue of the model bounds these requests, and `max_bytes`.
        """
        return self._in_flight - min(self._in_sequences, MAX_IN_SEQUENCES)

    def _take(self, message: bytes) -> bool:
        """Queue a request while the reader waits for one; False if the reader must do it, since it may have to wait after it."""
        streams, size_bytes = self._streams, len(message)
        if (
            size_bytes > LARGE_BYTES
            or self._infer.large_responses
            or (self._infer.service.has_shared_memory and self._infer.service.may_read_late(message))
            or self._infer.service.needs_charge(self._options)
            or self._counted + 1 >= streams.max_in_flight
            or self._in_flight_bytes + size_bytes >= streams.max_bytes
        ):
            return False
        self._in_flight += 1
        self._in_flight_bytes += size_bytes
        self._begin(message, 0)
        return True

    async def write(self) -> None:
        """Send responses until the reader has ended and no request is in flight.

        Small responses are sent when they are settled, by `_send`, while this waits.
        """
        ready = self._ready
        while self._in_flight or not self._read_all:
            self._anything_ready.clear()
            self._writing = True
            while ready:
                entry = ready.popleft()
                response = entry.response
                if entry.decoupled is not None:
                    await self._write_next(entry, entry.decoupled)
                    continue
                if entry.response_bytes or entry.expected_bytes:
                    self._count(entry, 0)  # written bytes count in the connection
                if isinstance(response, PendingRequest):
                    if entry.encoded is not None:
                        message = entry.encoded
                    elif response.template.is_costly and self._infer.service.is_large(response):
                        message = await self._finish_large(response)
                    else:
                        message = self._finish(response)
                    try:
                        await self._call.write(message)
                    except Overloaded as error:  # memory for unread responses is full: nothing was written
                        self._infer.service.fail(response, error)
                        await self._call.write(self._failed(response, error))
                    del message
                elif isinstance(response, HeadraceError | StatusError):
                    raise response
                elif response:  # none is left if a decoupled model has sent all before
                    await self._call.write(response)
                self._leave(entry)
            self._writing = False
            if self._in_flight or not self._read_all:
                await self._anything_ready.wait()

    async def _write_next(self, entry: _StreamEntry, decoupled: DecoupledRequest) -> None:
        """Write the next message of a request of a decoupled model; other requests come before the one after it."""
        try:
            message = entry.encoded or await decoupled.next()
            entry.encoded = None
            if message:
                try:
                    await self._call.write(message)
                except Overloaded as error:  # memory for unread responses is full: nothing was written
                    if not decoupled.is_done:
                        await self._call.write(decoupled.fail(error))
        finally:
            if decoupled.is_done:
                self._queued.discard(decoupled.pending)
        decoupled.written()
        entry.is_ready = False
        self._send_ready(entry, decoupled)

    def _send_ready(self, entry: _StreamEntry, decoupled: DecoupledRequest) -> None:
        """Send the messages of a request of a decoupled model that are there, or leave them to the writer."""
        if entry.is_ready or self._closed or entry.decoupled is None:
            return
        if decoupled.is_done:
            entry.decoupled = None
            if entry.expected_bytes:
                self._count(entry, 0)
            self._leave(entry)
            self._anything_ready.set()
            return
        while decoupled.is_ready:
            if not (self._writing or self._ready or self._options.ends_stream) and decoupled.is_small:
                entry.encoded = message = decoupled.next_small()
                if not decoupled.is_done and self._call.write_now(message, last=not decoupled.is_ready):
                    entry.encoded = None
                    decoupled.written()
                    continue
            entry.is_ready = True
            self._ready.append(entry)
            self._anything_ready.set()
            return

    def _send(self, entry: _StreamEntry, response: StreamResponse) -> None:
        """Send the response that is next in order, if it is small and the writer has nothing to do; else the writer sends it."""
        if (
            type(response) is PendingRequest
            and not (self._writing or self._ready or self._closed or entry.response_bytes or entry.expected_bytes)
            and not (response.template.is_costly or self._options.ends_stream)
        ):
            entry.encoded = message = self._finish(response)
            if self._call.write_now(message, last=self._in_flight == 1):
                self._leave(entry)
                if not self._in_flight and self._read_all:
                    self._anything_ready.set()
                return
        self._ready.append(entry)
        self._anything_ready.set()

    def _leave(self, entry: _StreamEntry) -> None:
        """Release a request whose response is sent."""
        self._call.reservation.shrink(entry.reserved_bytes)
        self._in_flight -= 1
        self._in_sequences -= entry.in_sequence
        self._in_flight_bytes -= entry.request_bytes
        if entry.sent is not None:
            entry.sent.set()
        if self._waits_for_room:
            self._room.set()

    def close(self) -> None:
        """Abandon all requests in flight."""
        self._closed = True
        self._call.take = None  # otherwise the call and its responses are a reference cycle
        for pending in self._queued:
            self._infer.service.drop(pending)
            if pending.responses is not None:
                pending.responses.close()
        self._queued.clear()
        for task in self._forwarded:
            task.cancel()
        if self._expected_bytes or self._response_bytes:
            self._response_room.end(self._expected_bytes)
            self._response_room.queue(-self._response_bytes)

    def _count(self, entry: _StreamEntry, size_bytes: int) -> None:
        """Count the size of a response in the place of the expected one: once it is settled, and 0 once it is sent.

        More than `max_held_bytes` wait only if they are larger than those that the model has sent before. Then the requests
        that have no response yet are refused.
        """
        if self._closed:
            return  # `close` has released all
        if entry.expected_bytes:
            self._response_room.end(entry.expected_bytes)
            self._expected_bytes -= entry.expected_bytes
            entry.expected_bytes = 0
        change, entry.response_bytes = size_bytes - entry.response_bytes, size_bytes
        self._response_bytes += change
        self._response_room.queue(change)
        if change > 0 and self._response_bytes > max_held_bytes(self._streams.max_bytes):
            error = unread_error()
            for pending in list(self._queued):
                pending.completion.settle(error)

    def _begin(self, message: bytes, expected_bytes: int) -> None:
        """Queue a request of usual size, without a coroutine: there is one for every message."""
        received_ns, entry = monotonic_ns(), _StreamEntry(len(message), expected_bytes)
        envelope = self._scan(entry, message, received_ns)
        if envelope is None or self._forward(entry, message, envelope):
            return
        try:
            # Without the deadline of the stream: the server ends the whole stream at its deadline.
            pending = self._infer.begin(message, envelope, received_ns, 0, self._options, takes_many=True)
        except BaseException as error:
            self._refuse(entry, error, envelope.id)
            return
        self._wait_for(entry, pending)

    async def _begin_large(self, message: bytes, expected_bytes: int) -> None:
        received_ns, entry = monotonic_ns(), _StreamEntry(len(message), expected_bytes)
        envelope = self._scan(entry, message, received_ns)
        if envelope is None or self._forward(entry, message, envelope):
            return
        try:
            pending = await self._infer.begin_large(message, envelope, received_ns, 0, self._options, takes_many=True)
        except BaseException as error:
            self._refuse(entry, error, envelope.id)
            return
        self._wait_for(entry, pending)

    def _scan(self, entry: _StreamEntry, message: bytes, received_ns: int) -> Envelope | None:
        """Read the fields of a request and reserve its memory; None if it is refused."""
        request_id = ""
        try:
            envelope = scan(message)
            request_id = envelope.id
            if _SEQUENCE in envelope.header:
                entry.in_sequence = True
                self._in_sequences += 1
            self._call.reservation.grow(entry.request_bytes)
            entry.reserved_bytes = entry.request_bytes
        except HeadraceError as error:
            self._infer.service.fail(PendingRequest("", "", received_ns), error)
            forget_frames(error)
            self._reject(entry, error, request_id)
            return None
        return envelope

    def _refuse(self, entry: _StreamEntry, error: BaseException, request_id: str) -> None:
        """Release the memory of a request that could not be queued, and respond with its error; raises what is no error of it."""
        self._call.reservation.shrink(entry.reserved_bytes)
        entry.reserved_bytes = 0
        if isinstance(error, HeadraceError):
            forget_frames(error)
            self._reject(entry, error, request_id)
        elif isinstance(error, Exception):
            self._reject(entry, internal_error(error, logger), request_id)
        else:
            raise error

    def _forward(self, entry: _StreamEntry, message: bytes, envelope: Envelope) -> bool:
        """Pass a request to the process that serves it; False if that is this one."""
        forwarder = self._streams.forwarder
        if forwarder is None or not forwarder.takes(envelope):
            return False
        is_unordered = forwarder.is_unordered(envelope)
        if not is_unordered:
            self._ordered.append(entry)
        responses, sequence = forwarder.responses(message, self._call), forwarder.sequence_of(envelope)
        before = self._sequences.get(sequence)
        task = asyncio.ensure_future(self._await_forwarded(entry, responses, envelope.id, is_unordered, before))
        self._forwarded.add(task)
        task.add_done_callback(self._forwarded.discard)
        if sequence is not None:
            self._sequences[sequence] = task
            task.add_done_callback(partial(self._end_forwarded, sequence))
        return True

    def _end_forwarded(self, sequence: object, task: asyncio.Task[None]) -> None:
        if self._sequences.get(sequence) is task:
            del self._sequences[sequence]

    async def _await_forwarded(
        self,
        entry: _StreamEntry,
        responses: AsyncGenerator[Message],
        request_id: str,
        is_unordered: bool,
        before: asyncio.Task[None] | None,
    ) -> None:
        """Send the responses of another process to a request: at once without an order, else the last one in its turn."""
        last: StreamResponse | None = None
        if before is not None:  # calls of their own may overtake each other
            await asyncio.wait([before])
        try:
            async with aclosing(responses):
                async for response in responses:
                    if last is not None:
                        await self._send_part(last)
                    last = response
                    if is_unordered:
                        await self._send_part(response)
                        last = None
        except Exception as error:
            if last is not None:
                await self._send_part(last)
            last = self._forward_error(error, request_id, True if is_unordered else None)
        if is_unordered:
            entry.response = last or []
            self._ready.append(entry)
            self._anything_ready.set()
        else:
            self._on_settled(entry, last or [])

    async def _send_part(self, response: StreamResponse) -> None:
        """Send one of several responses to a request, and wait until it is sent."""
        entry = _StreamEntry(0, response=response, sent=asyncio.Event())
        self._in_flight += 1
        self._ready.append(entry)
        self._anything_ready.set()
        assert entry.sent is not None
        await entry.sent.wait()

    def _forward_error(self, error: Exception, request_id: str, final: bool | None) -> StreamResponse:
        forget_frames(error)
        if isinstance(error, StatusError):
            return error
        failure = error if isinstance(error, HeadraceError) else internal_error(error, logger)
        return failure if self._options.ends_stream else error_message(failure, request_id, final)

    def _wait_for(self, entry: _StreamEntry, pending: PendingRequest) -> None:
        self._queued.add(pending)
        completion = pending.completion
        if pending.responses is not None:
            decoupled = entry.decoupled = DecoupledRequest(self._infer.service, pending, self._options.ends_stream)
            send_ready = partial(self._send_ready, entry, decoupled)
            pending.responses.then(send_ready)
            completion.then(send_ready)
            return
        on_settled: Callable[[_StreamEntry, PendingRequest], None] = self._on_settled_unordered
        if not pending.template.unordered:
            self._ordered.append(entry)
            on_settled = self._on_settled
        if completion.woken:  # the request ran on the event loop
            on_settled(entry, pending)
        else:
            completion.then(partial(on_settled, entry, pending))

    def _reject(self, entry: _StreamEntry, error: HeadraceError, request_id: str) -> None:
        self._ordered.append(entry)
        self._has_rejected = True
        ends_stream = self._options.ends_stream or isinstance(error, Unauthenticated)
        self._on_settled(entry, error if ends_stream else error_message(error, request_id))

    def _on_settled(self, entry: _StreamEntry, response: StreamResponse) -> None:
        entry.response = response
        if type(response) is PendingRequest:
            self._count_response(entry, response)
        ordered = self._ordered
        if ordered[0] is not entry:
            return
        while ordered and (settled := ordered[0].response) is not None:
            self._send(ordered.popleft(), settled)

    def _on_settled_unordered(self, entry: _StreamEntry, pending: PendingRequest) -> None:
        entry.response = pending
        self._count_response(entry, pending)
        self._send(entry, pending)

    def _count_response(self, entry: _StreamEntry, pending: PendingRequest) -> None:
        """Count a response from its completion on: it may wait for earlier ones, and for a client that does not read."""
        outcome, size_bytes = pending.completion.outcome, 0
        if isinstance(outcome, InferResponse):
            for array in outcome.outputs.values():
                size_bytes += array.nbytes
        if size_bytes > _SMALL_RESPONSE_BYTES or entry.expected_bytes:
            self._count(entry, size_bytes)

    def _finish(self, pending: PendingRequest) -> Message:
        self._queued.discard(pending)
        try:
            return stream_message(self._infer.finish(pending))
        except HeadraceError as error:
            return self._failed(pending, error)

    async def _finish_large(self, pending: PendingRequest) -> Message:
        self._queued.discard(pending)
        try:
            return stream_message(await self._infer.finish_large(pending))
        except HeadraceError as error:
            return self._failed(pending, error)

    def _failed(self, pending: PendingRequest, error: HeadraceError) -> Message:
        forget_frames(error)
        if self._options.ends_stream:
            raise error
        return error_message(error, pending.id)
