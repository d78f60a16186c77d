"""ModelInfer in two halves, so that an engine or a stream can run any number of requests without a task for each.

`begin` takes a message to the queue, `finish` takes the outcome to a message; between them there is only the completion.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from weakref import WeakKeyDictionary

from headrace.core.clock import Clock, monotonic_ns
from headrace.core.completion import LoopCompletion
from headrace.core.errors import Cancelled, HeadraceError, ModelFailed, Unavailable
from headrace.core.request import InferRequest, InferResponse
from headrace.grpc.codec import Envelope, GrpcCodec, Plan, scan
from headrace.grpc.methods import GrpcCall, Message
from headrace.inference.load_report import load_parameters
from headrace.inference.models import Handle, Services
from headrace.inference.request_context import RequestContext
from headrace.inference.request_options import NOTHING, Asked
from headrace.inference.status import grpc_code
from headrace.inference.timing import timing
from headrace.observability.tracing import SamplingDecision

logger = logging.getLogger("headrace.grpc")


class Pending:
    """A request between the halves; it holds a lease, so each must come to `finish` or `drop`, once.

    Attributes:
        completion: await it, or have it call back.
        id: the caller's own, "" if there is none.
        rows: of the request.
        asked: what its metadata ask.
        timing: the answer is to tell where its time has gone.
        sampling: what it was chosen for.
        queued_ns: monotonic.
    """

    __slots__ = (
        "asked",
        "codec",
        "completion",
        "handle",
        "id",
        "plan",
        "queued_ns",
        "received_ns",
        "rows",
        "sampling",
        "timing",
    )

    def __init__(
        self,
        handle: Handle,
        codec: GrpcCodec,
        plan: Plan,
        asked: Asked,
        request: InferRequest,
        completion: LoopCompletion,
    ) -> None:
        self.handle = handle
        self.codec = codec
        self.plan = plan
        self.asked = asked
        self.completion = completion
        self.id = request.id
        self.rows = request.rows
        self.received_ns = request.received_ns
        self.timing = plan.timing or asked.timing
        self.sampling: SamplingDecision | None = None
        self.queued_ns = 0

    def request_context(self) -> RequestContext:
        """What is known of it."""
        spec = self.handle.spec
        return RequestContext(
            "grpc", spec.name, spec.version, self.received_ns, self.asked, self.id, self.rows, self.queued_ns
        )


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
        self._observer = services.observer
        self._clock = clock
        self._codecs: WeakKeyDictionary[Handle, GrpcCodec] = WeakKeyDictionary()

    async def infer(self, message: bytes, call: GrpcCall) -> Message:
        """The method: one ModelInferRequest in, one ModelInferResponse out.

        Raises:
            HeadraceError: for the caller.
        """
        try:
            envelope, asked = scan(message), call.asked
        except HeadraceError as error:
            self.refused(error, call.received_ns)
            raise
        pending = self.begin(message, envelope, call.received_ns, call.deadline_ns, asked)
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
        handle: Handle | None = None
        request: InferRequest | None = None
        sampling: SamplingDecision | None = None
        queued_ns = 0
        try:
            handle = self._models.lease(envelope.model_name, envelope.model_version)
            handle.admit()
            codec = self._codecs.get(handle)
            if codec is None:
                codec = self._codecs[handle] = GrpcCodec(handle.spec, self._regions, self._max_shared_bytes)
            if asked.timeout_ns:
                deadline_ns = asked.deadline_ns(received_ns, deadline_ns)
            request, plan = codec.decode(message, envelope, received_ns, deadline_ns, asked.client)
            if self._observer.active:
                sampling = self._observer.sample(handle.spec.name, asked.trace)
            queued_ns = self._clock()
            pending = Pending(handle, codec, plan, asked, request, handle.infer(request))
            pending.sampling, pending.queued_ns = sampling, queued_ns
            return pending
        except Exception as error:
            rows = 0 if request is None else request.rows
            name, version = envelope.model_name, envelope.model_version
            request_context = RequestContext("grpc", name, version, received_ns, asked, envelope.id, rows, queued_ns)
            failure = error if isinstance(error, HeadraceError) else fault()
            self._failed(handle, failure, request_context, sampling)
            if failure is error:
                raise
            raise failure from error

    def finish(self, pending: Pending) -> Message:
        """The answer to a request whose completion is settled.

        Raises:
            HeadraceError: what the caller gets instead; counted.
        """
        done_ns = self._clock()
        outcome = pending.completion.outcome
        handle = pending.handle
        if not isinstance(outcome, InferResponse):
            error = outcome if isinstance(outcome, HeadraceError) else Unavailable("the request was not answered")
            self._failed(handle, error, pending.request_context(), pending.sampling)
            raise error
        try:
            told = timing(outcome, pending.received_ns, done_ns) if pending.timing else {}
            if pending.asked.load_format:
                told |= load_parameters(handle.load(by_level=False))
            message = pending.codec.encode(outcome, pending.plan, pending.id, told)
        except Exception as error:
            failure = error if isinstance(error, HeadraceError) else fault()
            self._failed(handle, failure, pending.request_context(), pending.sampling)
            if failure is error:
                raise
            raise failure from error
        ended_ns = self._clock()
        handle.recorder.record_codec_times(pending.queued_ns - pending.received_ns, ended_ns - done_ns)
        if pending.sampling is not None:
            account = pending.request_context().answered(handle.spec, outcome, done_ns, ended_ns, "OK")
            self._observer.answered(pending.sampling, account, handle.recorder)
        handle.release()
        return message

    def drop(self, pending: Pending) -> None:
        """Nobody waits any more: leave the queue, count it, give the lease back."""
        pending.completion.abandon()
        self._failed(pending.handle, Cancelled("the caller has gone"), pending.request_context(), pending.sampling)

    def refused(self, error: HeadraceError, received_ns: int) -> None:
        """Tell of a message that could not be read."""
        self._failed(None, error, RequestContext("grpc", "", "", received_ns))

    def _failed(
        self,
        handle: Handle | None,
        error: HeadraceError,
        request_context: RequestContext,
        sampling: SamplingDecision | None = None,
    ) -> None:
        """Count it, tell of it, and give the lease back if there is one."""
        spec = None
        if handle is not None:
            spec = handle.spec
            handle.failed(error, request_context.received_ns)
            handle.release()
        self._observer.failed(sampling, request_context.failed(spec, error, self._clock(), grpc_code(error)))


def fault() -> ModelFailed:
    """Log the exception that is being handled under a reference, and make the error that tells the caller no more."""
    reference = uuid.uuid4().hex[:12]
    logger.exception("request failed in the front end (reference %s)", reference)
    return ModelFailed(f"the server failed on this request; its log has the cause ({reference})", reference)
