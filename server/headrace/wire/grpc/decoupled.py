"""Responses of a decoupled model on a stream of ModelStreamInfer: any number for one request, each as soon as it is sent.

Responses of such requests are not ordered among requests. At most one response of a request is encoded at a time, and the model
gets credit for the next only once it is written: a client that does not read holds up its models by HTTP/2's flow control.
"""

from __future__ import annotations

from typing import Any

from headrace.config.triton_messages import service_pb2
from headrace.core.clock import monotonic_ns
from headrace.core.errors import HeadraceError, Unavailable, forget_frames
from headrace.core.request import InferResponse
from headrace.observability.labelled_counter import ERRORS
from headrace.wire.grpc.large_contents import varint
from headrace.wire.grpc.methods import Message
from headrace.wire.requests.request_template import is_large_response
from headrace.wire.requests.service import InferenceService, PendingRequest
from headrace.wire.requests.status import retry_after_ms

# Field 2 of ModelStreamInferResponse, a message; and as its last field the entry of `parameters` (field 4 of
# ModelInferResponse) that Triton's clients expect in every response of a stream: {"triton_final_response": true}.
_INFER_RESPONSE = b"\x12"
_FINAL = b"\x22\x1b\x0a\x15triton_final_response\x12\x02\x08\x01"
_NOT_FINAL = _FINAL[:-1] + b"\x00"
_FINAL_PARAMETER = "triton_final_response"
_RETRY = "headrace_retry_after_ms"


class DecoupledRequest:
    """Makes the messages of one request of a decoupled model. Ownership: the event loop.

    Args:
        service: encodes and records.
        pending: the request, which has `responses`.
        stops_at_error: an error ends the stream with its status.

    Attributes:
        pending: see Args.
        is_done: all messages are made, and the request is recorded.
    """

    __slots__ = ("_encode_ns", "_failure", "_item", "_responses", "_service", "_stops_at_error", "is_done", "pending")

    def __init__(
        self, service: InferenceService[Any, Any, Message], pending: PendingRequest, stops_at_error: bool
    ) -> None:
        responses = pending.responses
        assert responses is not None
        self.pending = pending
        self.is_done = False
        self._service = service
        self._responses = responses
        self._stops_at_error = stops_at_error
        self._item: InferResponse | HeadraceError | None = None
        self._failure: HeadraceError | None = None
        self._encode_ns = 0

    @property
    def is_ready(self) -> bool:
        """True if `next` has a message, or the end of the request, now."""
        if self._item is None and not self.is_done:
            self._item = self._responses.take()
        return self._item is not None or (self.pending.completion.woken and not self.is_done)

    @property
    def is_small(self) -> bool:
        """True if the next message is a response that `next` encodes quickly."""
        if not self.is_ready or not isinstance(self._item, InferResponse):
            return False
        template = self.pending.template
        return not template.is_costly or not is_large_response(self._item, template, False)

    def next_small(self) -> Message:
        """Return the next message, of a response that `is_small`; raises as `next`."""
        response, self._item = self._item, None
        assert isinstance(response, InferResponse)
        pending, started_ns = self.pending, monotonic_ns()
        try:
            parts = pending.codec.encode(response, pending.template, pending.id)
        except Exception as error:
            return self._end(error)
        self._encode_ns += monotonic_ns() - started_ns
        return _stream_message(parts, response.final)

    async def next(self) -> Message:
        """Return the next message; [] after the last response if nothing marks the end.

        Raises:
            HeadraceError: the request has failed, and an error ends the stream.
        """
        if self.is_small:
            return self.next_small()
        item, self._item = self._item, None
        if isinstance(item, InferResponse):
            pending, started_ns = self.pending, monotonic_ns()
            try:
                parts = await self._service.codec_threads.run(pending.codec.encode, item, pending.template, pending.id)
            except Exception as error:
                return self._end(error)
            self._encode_ns += monotonic_ns() - started_ns
            return _stream_message(parts, item.final)
        if item is not None:
            self._failure = self._failure or item
            if self._stops_at_error:
                return self._end(item)
            return error_message(item, self.pending.id, final=False)
        return self._end(None)

    def written(self) -> None:
        """Let the model send another response in place of the latest message, which is written."""
        if not self.is_done:
            self._responses.consumed(1)

    def fail(self, error: HeadraceError) -> Message:
        """End the request with an error of its stream; returns its last message, or raises the error if it ends the stream."""
        return self._end(error)

    def _end(self, error: Exception | None) -> Message:
        """Record the request and return its last message, [] for none.

        Args:
            error: that ends it; None: its completion is settled.

        Raises:
            HeadraceError: the request has failed, and an error ends the stream.
        """
        pending = self.pending
        self.is_done = True
        if error is None and self._failure is None:
            try:
                self._service.finish_stream(pending, self._encode_ns)
            except HeadraceError as raised:
                error = raised
            else:
                return _final_message(pending) if pending.template.empty_final else []
        outcome = pending.completion.outcome
        if error is None and isinstance(outcome, Exception):
            error = outcome
        pending.completion.abandon()
        failure = self._service.fail(pending, error or self._failure or Unavailable("the request has no end"))
        forget_frames(failure)
        if error is None:  # its errors are sent already
            return _final_message(pending) if pending.template.empty_final else []
        if self._stops_at_error:
            raise failure
        return error_message(failure, pending.id, final=True)


def stream_message(parts: Message) -> Message:
    """Make the ModelStreamInferResponse of the only ModelInferResponse of a request."""
    return _stream_message(parts, True)


def _stream_message(parts: Message, final: bool) -> Message:
    flag = _FINAL if final else _NOT_FINAL
    return [_INFER_RESPONSE + varint(sum(map(len, parts)) + len(flag)), *parts, flag]


def _final_message(pending: PendingRequest) -> Message:
    """Make the response without outputs that marks the end of a request."""
    handle = pending.handle
    assert handle is not None
    response = service_pb2.ModelStreamInferResponse()
    response.infer_response.model_name = handle.spec.name
    response.infer_response.model_version = handle.spec.version
    response.infer_response.id = pending.id
    response.infer_response.parameters[_FINAL_PARAMETER].bool_param = True
    return [response.SerializeToString()]


def error_message(error: HeadraceError, request_id: str, final: bool | None = None) -> Message:
    """Make the ModelStreamInferResponse of an error, and count it.

    Args:
        error: the error.
        request_id: of the caller, "" for none.
        final: whether it ends a request of a decoupled model; None for any other request.
    """
    ERRORS.count("grpc", error.reason)
    response = service_pb2.ModelStreamInferResponse(error_message=str(error).encode("utf-8", "replace").decode())
    response.infer_response.id = request_id
    if final is not None:
        response.infer_response.parameters[_FINAL_PARAMETER].bool_param = final
    delay_ms = retry_after_ms(error)
    if delay_ms is not None:  # as in the trailers of a failed call
        response.infer_response.parameters[_RETRY].int64_param = delay_ms
    return [response.SerializeToString()]
