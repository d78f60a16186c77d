"""ModelInfer on serialized messages, in two halves: `begin` queues a request, `finish` encodes its response.

Between the halves there is only the completion, so that a stream can have many requests in flight without a task for each.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from headrace.core.clock import Clock, monotonic_ns
from headrace.core.errors import HeadraceError
from headrace.grpc.codec import Envelope, GrpcCodec, scan
from headrace.grpc.methods import GrpcCall, Message
from headrace.inference.models import Services
from headrace.inference.request_options import NO_OPTIONS, RequestOptions
from headrace.inference.service import InferenceService, PendingRequest, Wire
from headrace.inference.status import grpc_code

WIRE = Wire("grpc", "OK", grpc_code, load_in_parameters=True)


class GrpcInference:
    """Serves inference requests over gRPC.

    Args:
        services: of the server.
        max_shared_bytes: limit on the inputs of one request in shared memory, bytes.
        clock: monotonic nanoseconds.
    """

    def __init__(self, services: Services, max_shared_bytes: int, clock: Clock = monotonic_ns) -> None:
        regions = services.regions
        self._service = InferenceService(services, WIRE, lambda spec: GrpcCodec(spec, regions, max_shared_bytes), clock)

    async def infer(self, message: bytes, call: GrpcCall) -> Message:
        """The method: one ModelInferRequest in, one ModelInferResponse out.

        Raises:
            HeadraceError: for the caller.
        """
        try:
            envelope, options = scan(message), call.options
        except HeadraceError as error:
            self.record_unreadable(error, call.received_ns)
            raise
        pending = self.begin(message, envelope, call.received_ns, call.deadline_ns, options)
        call.completion = pending.completion
        try:
            await pending.completion
        except asyncio.CancelledError:
            self._service.drop(pending)
            raise
        except HeadraceError:
            pass  # `finish` counts and raises it
        finally:
            call.completion = None
        try:  # as in `finish`, without its call
            return self._service.finish(pending)
        except Exception as error:
            self._raise(pending, error)

    def begin(
        self,
        message: bytes,
        envelope: Envelope,
        received_ns: int,
        deadline_ns: int,
        options: RequestOptions = NO_OPTIONS,
    ) -> PendingRequest:
        """Decode a request and queue it.

        Args:
            message: a serialized ModelInferRequest; must not change until the request is finished.
            envelope: from `scan`.
            received_ns: monotonic, when it had arrived.
            deadline_ns: of the call, monotonic, 0 for none.
            options: of the call's metadata.

        Returns:
            The request, which must come to `finish` or `drop`, once.

        Raises:
            HeadraceError: it cannot be served; counted.
        """
        pending = PendingRequest(envelope.model_name, envelope.model_version, received_ns, options)
        pending.id = envelope.id
        try:
            handle = self._service.lease(pending)
            if options.timeout_ns:
                deadline_ns = options.deadline_ns(received_ns, deadline_ns)
            self._service.enqueue(pending, handle, message, envelope, deadline_ns)
        except Exception as error:
            self._raise(pending, error)
        return pending

    def finish(self, pending: PendingRequest) -> Message:
        """Encode the response to a request whose completion is settled.

        Raises:
            HeadraceError: what the caller gets instead; counted.
        """
        try:
            return self._service.finish(pending)
        except Exception as error:
            self._raise(pending, error)

    def drop(self, pending: PendingRequest) -> None:
        """Drop a request whose caller disconnected."""
        self._service.drop(pending)

    def record_unreadable(self, error: HeadraceError, received_ns: int) -> None:
        """Record a message that cannot be read."""
        self._service.fail(PendingRequest("", "", received_ns), error)

    def _raise(self, pending: PendingRequest, error: Exception) -> NoReturn:
        failure = self._service.fail(pending, error)
        if failure is error:
            raise error
        raise failure from error
