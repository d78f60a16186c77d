"""ModelInfer on serialized messages.

A request has two halves: `GrpcInference.begin` queues it, `finish` encodes its response. Between the halves there is only the
completion, so that a stream can have many requests in flight without a task for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NoReturn

from headrace.core.errors import Cancelled, HeadraceError, Overloaded
from headrace.core.limits import SMALL_BODY_BYTES
from headrace.core.tensor import BYTES
from headrace.wire.grpc.codec import Envelope, GrpcCodec, scan
from headrace.wire.grpc.load_trailers import LoadTrailers
from headrace.wire.grpc.methods import GrpcCall, Message, RequestMessage
from headrace.wire.requests.codec_threads import LARGE_BYTES
from headrace.wire.requests.request_options import RequestOptions
from headrace.wire.requests.service import InferenceService, PendingRequest, Wire
from headrace.wire.requests.services import InferenceServices
from headrace.wire.requests.status import grpc_code

WIRE = Wire("grpc", "OK", grpc_code, load_in_parameters=True)


class GrpcInference:
    """Serves inference requests over gRPC.

    Args:
        services: of the server.
        max_shared_bytes: limit on the inputs of one request in shared memory, bytes.

    Attributes:
        service: runs the steps of each request.
        trailers: load reports of calls.
        large_responses: expected size of a response in bytes, by the requested names of the models whose last ones were large.
    """

    def __init__(self, services: InferenceServices, max_shared_bytes: int) -> None:
        regions = services.regions
        self.service = InferenceService(services, WIRE, lambda spec: GrpcCodec(spec, regions, max_shared_bytes))
        self.trailers = LoadTrailers(services.load_reports)
        self.large_responses: dict[str, int] = {}

    async def infer(self, message: RequestMessage, call: GrpcCall) -> Message:
        """Serve ModelInfer: one ModelInferRequest in, one ModelInferResponse out.

        Raises:
            HeadraceError: the request failed; the error is for the caller.
        """
        options = call.options
        try:
            envelope = scan(message)
        except HeadraceError as error:
            self._reject(call, error)
        expected_bytes = 0
        if self.large_responses and envelope.model_name in self.large_responses:
            # It waits while the client does not read earlier ones.
            expected_bytes = self.large_responses[envelope.model_name]
            room = call.room  # of a connection that may close before the end
            await room.start(expected_bytes)
        try:
            pending = await self.begin_large(message, envelope, call.received_ns, call.deadline_ns, options)
            call.completion = pending.completion
            try:
                await pending.completion
            except asyncio.CancelledError:
                self.service.drop(pending)
                raise
            except HeadraceError:
                pass  # `finish` counts and raises it
            finally:
                call.completion = None
            if pending.template.is_costly and self.service.is_large(pending):
                return await self.finish_large(pending, call)
            return self.finish(pending, call=call)
        except HeadraceError:
            self.trailers.report_failure(call)
            raise
        finally:
            if expected_bytes:
                room.end(expected_bytes)

    def start(self, message: RequestMessage, call: GrpcCall) -> PendingRequest | None:
        """Start a request; None if it needs the coroutine in `Methods.unary`. Raises as the coroutine. A request that takes
        long to decode, and one with a large response, needs the coroutine.
        """
        if self.service.has_remote_quotas and self.service.needs_charge(call.options):
            return None
        try:
            envelope = scan(message)
        except HeadraceError as error:
            self._reject(call, error)
        is_plain = len(message) <= LARGE_BYTES and not self.service.has_shared_memory  # as most: spares the call
        if not is_plain and self.needs_thread(message, envelope):
            return None
        if self.large_responses and envelope.model_name in self.large_responses:
            return None
        try:
            return self.begin(message, envelope, call.received_ns, call.deadline_ns, call.options)
        except HeadraceError:
            self.trailers.report_failure(call)
            raise

    def needs_thread(self, message: RequestMessage, envelope: Envelope) -> bool:
        """Return True for a request that may take longer to decode than the event loop can wait."""
        service = self.service
        if len(message) <= LARGE_BYTES:
            return service.has_shared_memory and service.may_read_late(message)
        header = envelope.header  # of an input of texts it has the datatype
        if len(header) > LARGE_BYTES or BYTES.name.encode() in header:
            return True
        return service.has_shared_memory and service.may_read_late(header)

    def end(self, request: PendingRequest, call: GrpcCall) -> Message | Awaitable[Message]:
        """Return the response to a started request of `call` whose completion is settled, once; raises as the coroutine."""
        if request.template.is_costly and self.service.is_large(request):
            return self.finish_large(request, call)
        return self.finish(request, call=call)

    def _reject(self, call: GrpcCall, error: HeadraceError) -> NoReturn:
        """Count the error of a message that is no request, and raise it."""
        self.service.fail(PendingRequest("", "", call.received_ns), error)
        raise error

    def needs_coroutine(self, message: RequestMessage, options: RequestOptions) -> bool:
        """Return True for a request that `begin_large` must queue."""
        service = self.service
        return len(message) > LARGE_BYTES or service.has_shared_memory or service.needs_charge(options)

    def begin(
        self,
        message: RequestMessage,
        envelope: Envelope,
        received_ns: int,
        deadline_ns: int,
        options: RequestOptions,
        takes_many: bool = False,
    ) -> PendingRequest:
        """Decode a request and queue it.

        Args:
            message: a serialized ModelInferRequest; must not change until the request is finished.
            envelope: from `scan`.
            received_ns: monotonic time at which the message had arrived.
            deadline_ns: monotonic deadline of the call, 0 for none.
            options: of the call's metadata.
            takes_many: as in `InferenceService.enqueue`.

        Returns:
            The request. The caller must pass it to `finish`, `finish_large` or `service.drop`, once.

        Raises:
            HeadraceError: the request cannot be served; the error is counted.
        """
        pending = PendingRequest(envelope.model_name, envelope.model_version, received_ns, options)
        pending.id = envelope.id
        try:
            self.service.enqueue(pending, message, envelope, deadline_ns, takes_many=takes_many)
        except Exception as error:
            self._raise(pending, error)
        return pending

    async def begin_large(
        self,
        message: RequestMessage,
        envelope: Envelope,
        received_ns: int,
        deadline_ns: int,
        options: RequestOptions,
        takes_many: bool = False,
    ) -> PendingRequest:
        """Decode a request on a codec thread if that takes long, and queue it, after the charge of its quota; see `begin`."""
        pending = PendingRequest(envelope.model_name, envelope.model_version, received_ns, options)
        pending.id = envelope.id
        try:
            if self.service.needs_charge(options):
                await self.service.charge(pending)
            handle = self.service.admit(pending, deadline_ns)
            parts = await self.service.read_large(handle, message, envelope)
            self.service.enqueue(pending, message, envelope, parts=parts, takes_many=takes_many)
        except asyncio.CancelledError:
            self.service.fail(pending, Cancelled("the client disconnected"))
            raise
        except Exception as error:
            self._raise(pending, error)
        return pending

    def finish(self, pending: PendingRequest, encoded: Message | None = None, call: GrpcCall | None = None) -> Message:
        """Encode the response to a request whose completion is settled.

        Args:
            pending: the request.
            encoded: from `finish_large`, None to encode the response here.
            call: of a unary request. A response that the server would refuse fails here, so that the request counts as failed.

        Raises:
            HeadraceError: the request failed; the error is for the caller, and counted.
        """
        try:
            response = self.service.finish(pending, encoded)
        except Exception as error:
            if call is not None and self.trailers.always:
                self.trailers.report(call, pending)
            self._raise(pending, error)
        if call is not None and (pending.load is not None or self.trailers.always):
            self.trailers.report(call, pending)
        size_bytes = sum(map(len, response))
        if size_bytes > SMALL_BODY_BYTES or self.large_responses:
            self._expect(pending.model, size_bytes)
            if call is not None:
                try:
                    call.admit(size_bytes)
                except Overloaded as error:
                    self._raise(pending, error)
        return response

    def expected_bytes(self, message: bytes) -> int:
        """Size of the response to a serialized request by the last responses of its model; 0 if it is small or unknown."""
        try:
            return self.large_responses.get(scan(message).model_name, 0)
        except HeadraceError:
            return 0

    def _expect(self, model: str, size_bytes: int) -> None:
        """Update the expected size of a model's responses: the largest of the last ones, which decays by 1/8 with each."""
        before_bytes = self.large_responses.pop(model, 0)
        expected_bytes = max(size_bytes, before_bytes - (before_bytes >> 3))
        if expected_bytes > SMALL_BODY_BYTES:
            self.large_responses[model] = expected_bytes

    async def finish_large(self, pending: PendingRequest, call: GrpcCall | None = None) -> Message:
        """Encode a large response on a codec thread; see `finish`."""
        try:
            encoded = await self.service.encode_large(pending)
        except asyncio.CancelledError:
            self.service.fail(pending, Cancelled("the client disconnected"))
            raise
        except Exception as error:
            self._raise(pending, error)
        return self.finish(pending, encoded, call)

    def _raise(self, pending: PendingRequest, error: Exception) -> NoReturn:
        failure = self.service.fail(pending, error)
        if failure is error:
            raise error
        raise failure from error
