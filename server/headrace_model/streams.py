"""Responses that a model sends one by one: senders, their credit, and the end of a request.

A request of a decoupled model, or one whose response comes after `execute`, is open until its sender has sent the final flag, or
until nothing references the request and its senders any more. Frames are those of `headrace_model.protocol`.

Responses of one request are bounded: `send` blocks while the server holds as many as it allows, until the client reads some. It
never blocks for a cancelled request, whose responses are dropped.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from typing import Any, Sequence

import numpy as np

from headrace_model import protocol
from headrace_model.channel import Frames
from headrace_model.protocol import (
    BYTES,
    CREDIT_BYTES,
    DTYPES,
    HEADER,
    MAX_INLINE_BYTES,
    OUTPUT,
    RESPONSE_FRAME_BYTES,
    RESPONSE_HEAD,
    VERSION,
    dims_struct,
    pack_texts,
)
from headrace_model.requests import ResultWriter
from headrace_model.slots import START, Slot, aligned

_MAX_TEXT = 4096
# Longest frame without the values of outputs: the kernel limits a message to the socket's buffer.
_MAX_HEAD_BYTES = RESPONSE_FRAME_BYTES - HEADER.size - MAX_INLINE_BYTES


class SenderError(Exception):
    """A response cannot be sent; the text is for the author of the model."""


class OpenRequest:
    """State of a request that has a response sender.

    Attributes:
        batch, member: number of its batch, and its index there.
        output_names: outputs that the caller requested; () for all.
        sent: number of responses that the model has sent.
        is_closed: True after the final flag.
        cancelled: True once nothing waits for its responses.
        is_answered: True once the return or the error of `execute` answers it: nothing is sent for it any more.
        buffered: response that was sent while `execute` ran (models that are not decoupled).
        unconsumed, unconsumed_bytes: responses that the server holds.
        slot: memory with its cancel flag; None for a decoupled model, whose requests outlive the use of the slot.
        wants: True while the server has not replied to a WANT.
    """

    __slots__ = (
        "batch", "buffered", "cancelled", "changed", "has_returned", "is_answered", "is_closed", "member",
        "output_names", "sent", "slot", "unconsumed", "unconsumed_bytes", "wants",
    )  # fmt: skip

    def __init__(
        self, batch: int, member: int, output_names: Sequence[str], slot: Slot | None, lock: threading.Lock
    ) -> None:
        self.batch = batch
        self.member = member
        self.output_names = output_names
        self.slot = slot
        self.sent = self.unconsumed = self.unconsumed_bytes = 0
        self.is_closed = self.cancelled = self.is_answered = self.has_returned = self.wants = False
        self.buffered: Any = None
        self.changed = threading.Condition(lock)

    def is_cancelled(self, _member: int = 0) -> bool:
        """Return True once nothing waits for its responses; has the argument of `Slot.is_cancelled`."""
        if self.slot is None or self.is_closed or self.is_answered:
            return self.cancelled
        return self.cancelled or self.slot.is_cancelled(self.member)


class Reference:
    """Keeps a request open; its end is reported once the request and all its senders are gone.

    Args:
        state: of the request.
        dropped: receives the state; its `put` may be called from a destructor.
    """

    __slots__ = ("_dropped", "state")

    def __init__(self, state: OpenRequest, dropped: queue.SimpleQueue[OpenRequest]) -> None:
        self.state = state
        self._dropped = dropped

    def __del__(self) -> None:
        if not self.state.is_closed:
            self._dropped.put(self.state)


class ResponseSocket:
    """Sends responses of open requests. Thread-safe.

    Two threads start with the first open request: one reads credit and cancellations, one reports dropped senders.

    Lock order: `_sending`, then `_lock`. A thread that waits for credit holds neither.

    Args:
        descriptor: socket to the server; owned.
        writer: names and datatypes of the outputs.
        decoupled: requests have any number of responses.
        max_responses, max_bytes: bound of the responses of one request that the server holds.

    Attributes:
        decoupled: see above.
    """

    def __init__(
        self, descriptor: int, writer: ResultWriter, decoupled: bool, max_responses: int, max_bytes: int
    ) -> None:
        self.decoupled = decoupled
        self._socket = socket.socket(fileno=descriptor)
        self._frames = Frames(self._socket)
        self._writer = writer
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._process = os.getpid()
        self._sending = threading.Lock()  # orders the frames of a request: nothing follows its final flag
        self._lock = threading.Lock()  # guards the states and the next two attributes
        self._states: dict[tuple[int, int], OpenRequest] = {}
        self._suspended: dict[tuple[int, int], Reference] = {}  # requests between two steps
        self._dropped: queue.SimpleQueue[OpenRequest] = queue.SimpleQueue()
        self._is_started = False

    def open(self, batch: int, member: int, output_names: Sequence[str], slot: Slot) -> Reference:
        """Open a request; on the thread that runs `execute`. Arguments as in `OpenRequest`."""
        if not self._is_started:
            self._is_started = True
            for target in (self._receive, self._report_dropped):
                threading.Thread(target=target, name="responses", daemon=True).start()
        state = OpenRequest(batch, member, output_names, None if self.decoupled else slot, self._lock)
        with self._lock:
            self._states[batch, member] = state
        return Reference(state, self._dropped)

    def suspend(self, reference: Reference) -> bool:
        """Keep a request that is scheduled again open until its next step; False if its final flag was sent."""
        state = reference.state
        with self._lock:
            if state.is_closed:
                return False
            if not state.cancelled:
                self._suspended[state.batch, state.member] = reference
            return True

    def resume(self, key: tuple[int, int], output_names: Sequence[str]) -> Reference:
        """Return a request for its next step; responses of one that has ended meanwhile are dropped."""
        with self._lock:
            reference = self._suspended.pop(key, None)
        if reference is None:
            state = OpenRequest(*key, output_names, None, self._lock)
            state.cancelled = state.is_answered = True
            reference = Reference(state, self._dropped)
        return reference

    def take_buffered(self, state: OpenRequest) -> Any:
        """Return the response that was sent while `execute` ran; None if it is sent later, as a frame of its own."""
        with self._sending:
            state.has_returned = True
            state.is_answered = state.buffered is not None
            response, state.buffered = state.buffered, None
            if response is not None:
                self._forget(state)
            return response

    def abandon(self, references: Sequence[Reference | None]) -> None:
        """Drop all further responses of requests, because `execute` has failed."""
        with self._sending, self._lock:
            for reference in references:
                if reference is not None:
                    state = reference.state
                    state.cancelled = state.is_answered = True
                    state.changed.notify_all()
                    self._states.pop((state.batch, state.member), None)

    # From any thread of the model

    def send(self, state: OpenRequest, response: Any, is_final: bool) -> None:
        """Send a response, or only the final flag.

        Args:
            state: of the request.
            response: an `InferenceResponse`; None for the final flag alone.
            is_final: no other response follows.

        Raises:
            SenderError: the final flag was sent before, or the model may send no further response.
            WrongResultError: an output has a dtype that no datatype has.
        """
        if os.getpid() != self._process:
            raise SenderError(
                "a process that the model's code has forked cannot send responses: send them in the model"
            )
        if not self.decoupled:
            self._send_only(state, response, is_final)
            return
        if response is None:
            with self._sending:
                self._check_open(state)
                self._send_frame(state, protocol.EMPTY | protocol.FINAL, b"")
            return
        body, slot, size = self._encode(state, response)
        self._wait_credit(state, size)
        with self._sending:
            self._check_open(state)
            state.sent += 1
            if not state.cancelled:
                self._send_response(state, protocol.FINAL if is_final else 0, body, slot)
            elif is_final:
                self._send_frame(state, protocol.EMPTY | protocol.FINAL, b"")

    def _send_only(self, state: OpenRequest, response: Any, is_final: bool) -> None:
        """Send the only response of a request of a model that is not decoupled, or the final flag after it."""
        with self._sending:
            self._check_open(state)
            if response is None:
                if not state.sent:
                    raise SenderError(
                        "the model is not decoupled: a request has exactly one response, send it with the final flag"
                    )
                if state.is_answered or not state.has_returned:
                    state.is_closed = True
                else:
                    self._send_frame(state, protocol.EMPTY | protocol.FINAL, b"")
                return
            if state.sent:
                raise SenderError(
                    "the model is not decoupled: a request has exactly one response. Write model_transaction_policy "
                    "{ decoupled: true } for any number"
                )
            if not state.has_returned:
                state.buffered = response
                state.is_closed = is_final
            else:
                body, slot, _size = self._encode(state, response)
                self._send_response(state, protocol.FINAL if is_final else 0, body, slot)
            state.sent = 1

    @staticmethod
    def _check_open(state: OpenRequest) -> None:
        if state.is_closed:
            raise SenderError(
                "a response was sent after the final flag: send TRITONSERVER_RESPONSE_COMPLETE_FINAL with the last response"
            )

    def _wait_credit(self, state: OpenRequest, size: int) -> None:
        """Wait until the server may hold a response of `size` bytes, and reserve its place; at once for a cancelled request."""
        while True:
            with self._lock:
                self._check_open(state)
                has_room = not state.unconsumed or (
                    state.unconsumed < self._max_responses and state.unconsumed_bytes + size <= self._max_bytes
                )
                if has_room or state.cancelled:
                    state.unconsumed += 1
                    state.unconsumed_bytes += size
                    return
                if state.wants:
                    state.changed.wait()
                    continue
                state.wants = True
            with self._sending:
                if not state.is_closed:
                    self._write(HEADER.pack(VERSION, protocol.WANT, 0, state.member, state.batch, 0, 0))

    def _encode(self, state: OpenRequest, response: Any) -> tuple[bytes, Slot | None, int]:
        """Encode a response.

        Returns:
            The body of its frame; the memory with the values of its outputs if they are not in the body; and the bytes that it
            takes of the credit.
        """
        error, text, records, values, size = response._error, b"", [], [], 0
        if error is not None:
            text = str(error._message).encode("utf-8", "replace")[:_MAX_TEXT]
        else:
            declared = self._writer.declared
            for tensor in response._output_tensors:
                name = tensor._name
                if name not in declared or (state.output_names and name not in state.output_names):
                    continue
                array, code = self._writer.checked(name, tensor._array)
                content = np.frombuffer(pack_texts(array, f"output '{name}'"), np.uint8) if code == BYTES else array
                records.append(OUTPUT.pack(0, declared[name][0], code, array.ndim, 0, size, content.nbytes))
                records.append(dims_struct(array.ndim).pack(*array.shape))
                values.append((size, content, content.dtype if code == BYTES else DTYPES[code]))
                size = aligned(size + content.nbytes)
        parameters = response._parameters.encode() if response._parameters else b""
        code = protocol.OK if error is None else error._code
        head = RESPONSE_HEAD.pack(code, len(values), len(text), len(parameters), size)
        body = b"".join([head, *records, text, parameters])
        if len(body) > _MAX_HEAD_BYTES:
            raise SenderError(
                f"names and shapes of the outputs of a response take {len(body)} bytes, at most {_MAX_HEAD_BYTES} are allowed: "
                "send fewer outputs or parameters"
            )
        slot, offset = None, 0
        if size > MAX_INLINE_BYTES:
            slot, offset = Slot.create("headrace response", START + size), START
            slot.reserve(START + size)
        memory = np.zeros(size, np.uint8) if slot is None else slot.memory
        for place, content, dtype in values:
            np.copyto(np.ndarray(content.shape, dtype, memory, offset + place), content)
        credit = len(body) + size
        return (body + memory.tobytes(), None, credit) if slot is None else (body, slot, credit)

    def _send_response(self, state: OpenRequest, flags: int, body: bytes, slot: Slot | None) -> None:
        if slot is None:
            self._send_frame(state, flags, body)
        else:
            self._send_frame(state, flags | protocol.SPILLED, body, slot.fd)

    def _send_frame(self, state: OpenRequest, flags: int, body: bytes, descriptor: int | None = None) -> None:
        """Send a frame of a request; the caller holds `_sending`."""
        if flags & protocol.FINAL:
            state.is_closed = True
            self._forget(state)
        if state.is_answered:  # a final flag here could reach the server before the error of `execute`
            return
        frame = HEADER.pack(VERSION, protocol.RESPONSE, flags, state.member, state.batch, 0, len(body)) + body
        self._write(frame, descriptor)

    def _write(self, frame: bytes, descriptor: int | None = None) -> None:
        try:
            if descriptor is None:
                self._socket.send(frame)
            else:
                self._frames.send_frame(frame, descriptor)
        except (BrokenPipeError, ConnectionResetError):  # the server has closed the socket: this process ends
            return

    def _forget(self, state: OpenRequest) -> None:
        with self._lock:
            self._states.pop((state.batch, state.member), None)
            state.changed.notify_all()  # threads that wait for credit find it closed

    # On threads of their own

    def _report_dropped(self) -> None:
        """Report requests whose senders are gone without a final flag."""
        while True:
            state = self._dropped.get()
            with self._sending:
                if not state.is_closed and not state.is_answered:
                    self._send_frame(state, protocol.EMPTY | protocol.FINAL | protocol.DROPPED, b"")

    def _receive(self) -> None:
        """Read credit and cancellations until the server closes the socket."""
        frames, actions = self._frames, {protocol.CREDIT: _credit, protocol.CANCEL: _cancel}
        while True:
            try:
                size = frames.receive()
            except (OSError, protocol.ProtocolError):
                size = 0
            if not size:
                break
            _version, kind, _flags, member, number, count, _size = HEADER.unpack_from(frames.buffer)
            with self._lock:
                state = self._states.get((number, member))
                if state is not None and kind in actions:
                    actions[kind](state, count, frames.buffer)
                    state.changed.notify_all()
                if kind == protocol.CANCEL:  # no step follows: it is dropped unless the model has a sender
                    self._suspended.pop((number, member), None)
        with self._lock:
            for state in self._states.values():
                _cancel(state, 0, frames.buffer)
                state.changed.notify_all()


def _credit(state: OpenRequest, count: int, frame: bytearray) -> None:
    state.unconsumed -= count
    state.unconsumed_bytes -= CREDIT_BYTES.unpack_from(frame, HEADER.size)[0]
    state.wants = False


def _cancel(state: OpenRequest, _count: int, _frame: bytearray) -> None:
    state.cancelled = True
