"""Steps of an inference request, the same for every protocol: lease, admit, decode, infer, encode, record.

A protocol creates a `PendingRequest`, calls `enqueue` and `finish` for it, and writes the result of `finish`. One that reads the
content later calls `admit` before it. After an exception in any of these steps it calls `fail`, and after a disconnect that it
detects itself `drop`. The protocols differ in reading bytes, waiting for the completion and writing the response
(docs/decisions/0004-one-inference-service.md).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple

from headrace.core.access import Scope
from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import Cancelled, HeadraceError, ModelFailed, Unavailable
from headrace.core.request import InferResponse, ModelLoad
from headrace.core.response_stream import ResponseStream
from headrace.core.tensor import ModelSpec
from headrace.observability.access_log import OK, AccessRecord
from headrace.observability.tracing import SamplingDecision
from headrace.wire.requests.forwarded_headers import add_headers
from headrace.wire.requests.load_report import ENDED, FAILED, load_parameters
from headrace.wire.requests.request_options import NO_OPTIONS, RequestOptions
from headrace.wire.requests.request_template import (
    MAX_TEMPLATE_BYTES,
    MAX_TEMPLATES,
    Codec,
    Content,
    Encoded,
    Layout,
    ReadContent,
    RequestTemplate,
    is_large_response,
    may_have_shared_inputs,
    read_shared,
)
from headrace.wire.requests.response_metadata import timing
from headrace.wire.requests.services import Handle, InferenceServices
from headrace.wire.requests.status import http_status


class Wire(NamedTuple):
    """Names of a protocol for results.

    Attributes:
        name: "http" or "grpc".
        success: status of a successful response.
        status: returns the status of an error.
        load_in_parameters: True if the load report is part of the response parameters, False if it is in headers.
    """

    name: str
    success: str
    status: Callable[[HeadraceError], str]
    load_in_parameters: bool


_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

# Stages of a request. It holds a lease in LEASED only; one that is ANSWERED may still fail while its response is written.
_RECEIVED, _LEASED, _ANSWERED, _FAILED = range(4)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """One inference request, from the first step to its response or error.

    Holds a lease between `admit` and one of `finish`, `fail` and `drop`.

    Args:
        model, version: as requested.
        received_ns: monotonic.
        options: of the request's headers or metadata.

    Attributes:
        handle: the leased version, None before `admit`.
        deadline_ns: monotonic deadline after `admit`, 0 for none.
        stage: received, leased, answered (after `finish`) or failed.
        id: request id of the caller, "" for none.
        rows: of the request; 0 before it is decoded.
        template: of the request, after `enqueue`.
        completion: completion to wait for, after `enqueue`.
        responses: responses of a decoupled model, after `enqueue`; None for a request with exactly one.
        queued_ns: monotonic; 0 before `enqueue`.
        done_ns: monotonic time at which the completion was settled; 0 before `finish`.
        parameters: of the response, None for none.
        load: of the version at `done_ns`, None if the request has no option for it.
        sampling: decision to trace or log the request, None for neither.
    """

    model: str
    version: str
    received_ns: int
    options: RequestOptions = NO_OPTIONS
    handle: Handle | None = field(init=False, default=None)
    deadline_ns: int = field(init=False, default=0)
    stage: int = field(init=False, default=_RECEIVED)
    id: str = field(init=False, default="")
    rows: int = field(init=False, default=0)
    codec: Codec[Any, Any, Any] = field(init=False)
    template: RequestTemplate = field(init=False)
    completion: LoopCompletion = field(init=False)
    responses: ResponseStream | None = field(init=False, default=None)
    queued_ns: int = field(init=False, default=0)
    done_ns: int = field(init=False, default=0)
    parameters: dict[str, int | str] | None = field(init=False, default=None)
    load: ModelLoad | None = field(init=False, default=None)
    sampling: SamplingDecision | None = field(init=False, default=None)

    def access_record(
        self,
        wire: Wire,
        ended_ns: int,
        response: InferResponse | None = None,
        error: HeadraceError | None = None,
    ) -> AccessRecord:
        """Make the record for traces and the access log.

        Args:
            wire: protocol of the request.
            ended_ns: monotonic time of the end.
            response: of a successful request.
            error: of a failed request.
        """
        spec = None if self.handle is None else self.handle.spec
        return AccessRecord(
            protocol=wire.name,
            model=self.model if spec is None else spec.name,
            version=self.version if spec is None else spec.version,
            status=wire.success if error is None else wire.status(error),
            received_ns=self.received_ns,
            ended_ns=ended_ns,
            queued_ns=self.queued_ns,
            done_ns=self.done_ns if error is None else 0,
            request_id=self.id,
            client=self.options.client,
            rows=self.rows,
            context=self.options.trace,
            reason=OK if error is None else error.reason,
            error="" if error is None else str(error) or error.reason,
            times=None if response is None else response.times,
            batch_rows=0 if response is None else response.batch_rows,
            closed="" if response is None else response.closed,
            steps=response.steps if response is not None else () if error is None else error.steps,
            cached=response is not None and response.cached,
        )


class InferenceService(Generic[Content, Layout, Encoded]):
    """Runs inference requests of one protocol. Ownership: the event loop.

    Args:
        services: models, shared memory regions and the destination of request records.
        wire: the protocol.
        new_codec: creates the codec of a model version, which lives as long as the version.

    Attributes:
        codec_threads: decode and encode large bodies.
        has_shared_memory: clients may register shared memory.
        has_remote_quotas: another process keeps the quotas of keys; see `needs_charge`.
    """

    def __init__(
        self,
        services: InferenceServices,
        wire: Wire,
        new_codec: Callable[[ModelSpec], Codec[Content, Layout, Encoded]],
    ) -> None:
        self.codec_threads = services.codec_threads
        self.has_shared_memory = "system_shared_memory" in services.extensions
        self._brief: dict[bytes, None] = {}  # contents of requests whose inputs in shared memory are small
        self._regions = services.regions
        self._models = services.models
        self._observer = services.observer
        self._quotas = services.quotas
        self._traffic = services.traffic
        self.has_remote_quotas = services.quotas is not None
        self._counts = services.load_reports.counts
        self._wire = wire
        self._new_codec = new_codec
        self._mailbox: Mailbox | None = None  # of the streams of responses
        self._logger = logging.getLogger(f"headrace.{wire.name}")

    def needs_charge(self, options: RequestOptions) -> bool:
        """Return True for a request that must be passed to `charge` before `admit`."""
        if self._quotas is None or options.principal is None:
            return False
        grant = options.principal.grant
        return grant is not None and grant.bucket is not None

    async def charge(self, pending: PendingRequest) -> None:
        """Charge a request to the quota of its key in the process that keeps it; a no-op without one.

        Raises:
            QuotaExceeded: the quota is used up.
            Unavailable: that process has ended.
        """
        principal = pending.options.principal
        if principal is None or self._quotas is None or principal.grant is None or principal.grant.bucket is None:
            return
        try:
            principal.check(Scope.INFER, pending.model)
        except HeadraceError:  # `admit` raises it
            return
        await self._quotas.charge(principal.grant.bucket)

    def admit(self, pending: PendingRequest, deadline_ns: int = 0, check: Callable[[], None] | None = None) -> Handle:
        """Check the permission, lease the model version and check that it can answer in time, before the request is decoded.

        Args:
            pending: the request.
            deadline_ns: monotonic deadline of the transport, 0 for none. The request's own timeout may end earlier.
            check: checks the headers once the version is leased, and may set `pending.options`; raises HeadraceError.

        Raises:
            HeadraceError: the caller may not use the model, or the version does not exist or does not accept requests.
        """
        principal = pending.options.principal
        if principal is not None:  # before the lease: the error must not depend on whether the model exists
            principal.admit(pending.model)
        splits = self._traffic.splits
        if splits and not pending.version and pending.model in splits:
            handle = pending.handle = splits[pending.model].lease(pending.options.routing or _NO_HEADERS)
        else:
            handle = pending.handle = self._models.lease(pending.model, pending.version)
        pending.stage = _LEASED
        handle.admit()
        if check is not None:
            check()
        options = pending.options
        if options.timeout_ns:
            deadline_ns = options.deadline_ns(pending.received_ns, deadline_ns)
        pending.deadline_ns = deadline_ns
        handle.check_load(pending.received_ns, deadline_ns, options.client)
        return handle

    def codec(self, handle: Handle) -> Codec[Content, Layout, Encoded]:
        """Return the codec of a model version."""
        codec: Codec[Content, Layout, Encoded] | None = handle.protocol_cache.get(self)
        if codec is None:
            codec = handle.protocol_cache[self] = self._new_codec(handle.spec)
        return codec

    def may_read_late(self, content: bytes | memoryview) -> bool:
        """Return True if a request may have large inputs in shared memory: `read_large` must read it first.

        Their size is in the content, and known once an equal request has been read.
        """
        data = bytes(content)  # no copy of bytes
        return may_have_shared_inputs(data) and not (len(data) <= MAX_TEMPLATE_BYTES and data in self._brief)

    async def read_large(self, handle: Handle, content: Content, layout: Layout) -> ReadContent | None:
        """Read a large request, or large inputs in shared memory, on a codec thread; None if `enqueue` can read it.

        Args:
            handle, content, layout: as in `enqueue`.

        Raises:
            HeadraceError: the request is invalid.
        """
        codec, run = self.codec(handle), self.codec_threads.run
        is_large = codec.is_large_request(content, layout)
        if not is_large and not self.has_shared_memory:
            return None
        parts = (
            await run(codec.read, content, layout, size_bytes=len(content)) if is_large else codec.read(content, layout)
        )
        template, inputs, request_id = parts
        if template.is_brief and not request_id and len(content) <= MAX_TEMPLATE_BYTES:
            if len(self._brief) >= MAX_TEMPLATES:
                self._brief.clear()
            self._brief[bytes(content)] = None  # type: ignore[call-overload]
        elif self._regions is not None and template.shared:
            large = template.large_shared(self._regions, handle.spec.resident_devices)
            if large:
                await run(read_shared, large, inputs, size_bytes=sum(entry.size_bytes for entry, _ in large))
        return parts

    def enqueue(
        self,
        pending: PendingRequest,
        content: Content,
        layout: Layout,
        deadline_ns: int = 0,
        parts: ReadContent | None = None,
        takes_many: bool = False,
    ) -> LoopCompletion:
        """Decode a request and queue it, after `admit` if that was not called yet.

        Args:
            pending: the request.
            content, layout: as in `Codec.decode`; `content` must not change until the request is finished.
            deadline_ns: as in `admit`; not used after it.
            parts: from `read_large`.
            takes_many: the caller reads any number of responses, of a decoupled model from `pending.responses`.

        Raises:
            HeadraceError: the request is invalid or rejected.
        """
        handle, options = pending.handle or self.admit(pending, deadline_ns), pending.options
        codec = handle.protocol_cache.get(self) or self.codec(handle)
        request, template = codec.decode(
            content, layout, pending.received_ns, pending.deadline_ns, options.client, parts
        )
        pending.codec, pending.template, pending.id, pending.rows = codec, template, request.id, request.rows
        if options.forwarded is not None:
            add_headers(request, options.forwarded)
        if self._observer.active:
            pending.sampling = self._observer.sample(handle.spec.name, options.trace)
        if request.resident_outputs and handle.has_cache:  # which stores arrays
            request.resident_outputs = frozenset()
        if takes_many and handle.spec.decoupled:
            self._mailbox = self._mailbox or Mailbox(asyncio.get_running_loop())
            pending.responses = request.responses = ResponseStream(self._mailbox)
        pending.queued_ns = monotonic_ns()
        completion = pending.completion = handle.infer(request)
        return completion

    def is_large(self, pending: PendingRequest, compressed: bool = False) -> bool:
        """Return True if the response is large: it is encoded by `encode_large`.

        Args:
            pending: a request whose completion is settled.
            compressed: True if the response may be compressed.
        """
        response = pending.completion.outcome
        return isinstance(response, InferResponse) and is_large_response(response, pending.template, compressed)

    async def encode_large(self, pending: PendingRequest) -> Encoded:
        """Encode a large response on a codec thread, for `finish`; raises HeadraceError."""
        handle, response = pending.handle, pending.completion.outcome
        assert handle is not None
        assert isinstance(response, InferResponse)
        pending.done_ns = monotonic_ns()
        pending.parameters = self._parameters(pending, handle, response)
        encode = pending.codec.encode
        encoded: Encoded = await self.codec_threads.run(
            encode, response, pending.template, pending.id, pending.parameters
        )
        return encoded

    def finish(self, pending: PendingRequest, encoded: Encoded | None = None) -> Encoded:
        """Encode the response of a request whose completion is settled, record it and release the lease.

        Args:
            pending: the request.
            encoded: from `encode_large`, None to encode the response here.

        Raises:
            HeadraceError: the request failed; the error is for the caller.
        """
        done_ns = pending.done_ns = pending.done_ns or monotonic_ns()
        handle, response = pending.handle, pending.completion.outcome
        assert handle is not None
        if not isinstance(response, InferResponse):
            raise response if isinstance(response, Exception) else Unavailable("the request has no response: retry it")
        if encoded is None:
            if pending.options is not NO_OPTIONS or pending.template.timing:
                pending.parameters = self._parameters(pending, handle, response)
            encoded = pending.codec.encode(response, pending.template, pending.id, pending.parameters)
        assert encoded is not None
        times = response.times
        encode_ns = monotonic_ns() - (done_ns if times is None else times.split_ns)
        handle.recorder.record_codec_times(pending.queued_ns - pending.received_ns, encode_ns)
        if pending.sampling is not None:
            self._observe(pending, handle, response)
        pending.stage = _ANSWERED
        self._counts[ENDED] += 1
        handle.release()
        return encoded

    def finish_stream(self, pending: PendingRequest, encode_ns: int) -> None:
        """Record a request whose responses are all written, and release the lease.

        Args:
            pending: the request; its completion is settled.
            encode_ns: time that all responses took to encode, nanoseconds.

        Raises:
            HeadraceError: the request failed, also after its first responses; the error is for the caller.
        """
        handle, outcome = pending.handle, pending.completion.outcome
        assert handle is not None
        if not isinstance(outcome, InferResponse):
            raise outcome if isinstance(outcome, Exception) else Unavailable("the request has no response: retry it")
        handle.recorder.record_codec_times(pending.queued_ns - pending.received_ns, encode_ns)
        if pending.sampling is not None:
            self._observe(pending, handle, outcome)
        pending.stage = _ANSWERED
        self._counts[ENDED] += 1
        handle.release()

    def _observe(self, pending: PendingRequest, handle: Handle, response: InferResponse) -> None:
        """Record a sampled request that succeeded in traces and the access log."""
        assert pending.sampling is not None
        access_record = pending.access_record(self._wire, monotonic_ns(), response)
        self._observer.record_success(pending.sampling, access_record, handle.recorder)

    def fail(self, pending: PendingRequest, error: BaseException) -> HeadraceError:
        """Count and record a request that ends with an exception, and release the lease.

        Its batch counts a request as answered. One that fails later, also after `finish`, does not count as a success any more.

        Returns:
            The error for the caller: `error` itself if it is a HeadraceError, else one with a reference to the log.
        """
        if isinstance(error, HeadraceError):
            failure = error
        elif isinstance(error, asyncio.CancelledError):  # the drain timeout has passed
            failure = Unavailable("the server is shutting down and could not wait for this request")
        else:
            failure = internal_error(error, self._logger)
        handle, stage = pending.handle, pending.stage
        pending.stage = _FAILED
        self._count_failure(failure, stage)
        if handle is not None and stage in (_LEASED, _ANSWERED):
            outcome = getattr(getattr(pending, "completion", None), "outcome", None)  # none before `enqueue`
            answered = outcome if isinstance(outcome, InferResponse) else None
            handle.record_failure(failure, pending.received_ns, answered)
            if stage == _LEASED:
                handle.release()
        self._observer.record_failure(
            pending.sampling, pending.access_record(self._wire, monotonic_ns(), error=failure)
        )
        return failure

    def _count_failure(self, failure: HeadraceError, stage: int) -> None:
        """Count a failed request in the figures of load reports; one that its client has cancelled is not counted."""
        if stage == _FAILED or isinstance(failure, Cancelled):
            return
        if stage != _ANSWERED:
            self._counts[ENDED] += 1
        if http_status(failure) >= 500:
            self._counts[FAILED] += 1

    def drop(self, pending: PendingRequest) -> None:
        """Remove a request whose client disconnected from the queue, record it and release the lease."""
        pending.completion.abandon()
        self.fail(pending, Cancelled("the client disconnected"))

    def _parameters(
        self, pending: PendingRequest, handle: Handle, response: InferResponse
    ) -> dict[str, int | str] | None:
        options = pending.options
        parameters: dict[str, int | str] = {}
        if options.timing or pending.template.timing:
            parameters = timing(response, pending.received_ns, pending.queued_ns, pending.done_ns)
        if options.load_format:
            load = pending.load = handle.load(by_level=False)
            if self._wire.load_in_parameters:
                parameters |= load_parameters(load)
        return parameters or None


def internal_error(error: BaseException, logger: logging.Logger) -> ModelFailed:
    """Log an exception with a reference; returns the error for the caller, which has only the reference."""
    reference = uuid.uuid4().hex[:12]
    logger.error("request failed in the front end (reference %s)", reference, exc_info=error)
    return ModelFailed(f"the server failed on this request; its log has the cause ({reference})", reference)
