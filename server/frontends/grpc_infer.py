"""ModelInfer in two halves, so that an engine or a stream can run any number of requests without a task for each.

`begin` takes a message to the queue, `finish` takes the outcome to a message; between them there is only the completion.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from weakref import WeakKeyDictionary

from server.core.clock import Clock, monotonic_ns
from server.core.completion import LoopCompletion
from server.core.errors import Cancelled, HeadraceError, ModelFailed, Unavailable
from server.core.request import InferRequest, InferResponse
from server.frontends.asked import NOTHING, Asked
from server.frontends.grpc_codec import Envelope, GrpcCodec, Plan, scan
from server.frontends.grpc_methods import Call, Message
from server.frontends.load_report import load_parameters
from server.frontends.models import Handle, Services
from server.frontends.timing import timing

logger = logging.getLogger("headrace.grpc")


class Pending:
    """A request between the halves; it holds a lease, so each must come to `finish` or `drop`, once.

    Attributes:
        completion: await it, or have it call back.
        id: the caller's own, "" if there is none.
        timing: the answer is to tell where its time has gone.
        load: it is to tell how busy the version is.
    """

    __slots__ = ("codec", "completion", "handle", "id", "load", "plan", "queued_ns", "received_ns", "timing", "traced")

    def __init__(
        self, handle: Handle, codec: GrpcCodec, plan: Plan, request: InferRequest, completion: LoopCompletion
    ) -> None:
        self.handle = handle
        self.codec = codec
        self.plan = plan
        self.completion = completion
        self.id = request.id
        self.received_ns = request.received_ns
        self.timing = plan.timing
        self.load = False
        self.queued_ns = 0
        self.traced: InferRequest | None = None


class InferService:
    """Serves inference requests.

    Args:
        services: of the server.
        max_shared_bytes: of the inputs of one request in shared memory.
        clock: monotonic nanoseconds.
    """

    def __init__(self, services: Services, max_shared_bytes: int, clock: Clock = monotonic_ns) -> None:
        self._max_shared_bytes = max_shared_bytes
        self._models = services.models
        self._regions = services.regions
        self._traces = services.traces
        self._clock = clock
        self._codecs: WeakKeyDictionary[Handle, GrpcCodec] = WeakKeyDictionary()

    async def infer(self, message: bytes, call: Call) -> Message:
        """The method: one ModelInferRequest in, one ModelInferResponse out.

        Raises:
            HeadraceError: for the caller.
        """
        pending = self.begin(message, scan(message), call.received_ns, call.deadline_ns, call.asked)
        call.caller = pending.completion
        try:
            await pending.completion
        except asyncio.CancelledError:
            self.drop(pending)
            raise
        except HeadraceError:
            pass  # `finish` counts and raises it
        finally:
            call.caller = None
        return self.finish(pending)

    def begin(
        self, message: bytes, envelope: Envelope, received_ns: int, deadline_ns: int, asked: Asked = NOTHING
    ) -> Pending:
        """Decode a request and queue it.

        Args:
            message: a serialized ModelInferRequest; must not change until the request is finished.
            envelope: what `scan` found in it.
            received_ns: monotonic, when it had arrived.
            deadline_ns: of the call, monotonic, 0 for none.
            asked: what the call's metadata ask.

        Raises:
            HeadraceError: it cannot be served; counted.
        """
        handle = self._models.lease(envelope.model_name, envelope.model_version)
        try:
            handle.admit()
            codec = self._codecs.get(handle)
            if codec is None:
                codec = self._codecs[handle] = GrpcCodec(handle.spec, self._regions, self._max_shared_bytes)
            if asked.timeout_ns:
                deadline_ns = asked.deadline_ns(received_ns, deadline_ns)
            request, plan = codec.decode(message, envelope, received_ns, deadline_ns, asked.client)
            queued_ns = self._clock() if self._traces.active else 0
            pending = Pending(handle, codec, plan, request, handle.infer(request))
            if asked.timing or asked.load_format:
                pending.timing |= asked.timing
                pending.load = bool(asked.load_format)
            if queued_ns:
                pending.queued_ns = queued_ns
                pending.traced = request
            return pending
        except HeadraceError as error:
            self._failed(handle, error, received_ns)
            raise
        except Exception as error:
            raise self._fault(handle, received_ns) from error

    def finish(self, pending: Pending) -> Message:
        """The answer to a request whose completion is settled.

        Raises:
            HeadraceError: what the caller gets instead; counted.
        """
        outcome = pending.completion.outcome
        handle = pending.handle
        if not isinstance(outcome, InferResponse):
            error = outcome if isinstance(outcome, HeadraceError) else Unavailable("the request was not answered")
            self._failed(handle, error, pending.received_ns)
            raise error
        try:
            told = timing(outcome, pending.received_ns, self._clock()) if pending.timing else {}
            if pending.load:
                told |= load_parameters(handle.load(by_level=False))
            message = pending.codec.encode(outcome, pending.plan, pending.id, told)
        except HeadraceError as error:
            self._failed(handle, error, pending.received_ns)
            raise
        except Exception as error:
            raise self._fault(handle, pending.received_ns) from error
        if pending.traced is not None:
            self._traces.record(handle.spec, pending.traced, outcome, pending.queued_ns, self._clock())
        handle.release()
        return message

    def drop(self, pending: Pending) -> None:
        """Nobody waits any more: leave the queue, count it, give the lease back."""
        pending.completion.abandon()
        self._failed(pending.handle, Cancelled("the caller has gone"), pending.received_ns)

    def _failed(self, handle: Handle, error: HeadraceError, received_ns: int) -> None:
        handle.failed(error, received_ns)
        handle.release()

    def _fault(self, handle: Handle, received_ns: int) -> ModelFailed:
        """Called while a fault of ours is handled."""
        failure = fault()
        self._failed(handle, failure, received_ns)
        return failure


def fault() -> ModelFailed:
    """Log the exception that is being handled under a reference, and make the error that tells the caller no more."""
    reference = uuid.uuid4().hex[:12]
    logger.exception("request failed in the front end (reference %s)", reference)
    return ModelFailed(f"the server failed on this request; its log has the cause ({reference})", reference)
