"""Calls of a Python model to other models of its server (business logic scripting, BLS): blocking and asyncio.

A call is one frame on a socket of its own; its tensors lie in a slot that this process creates. Arrays of a response are views of
the slot, which is used again once they are gone. Frames are those of `headrace_model.protocol`; the bodies of CALL and REPLY are
JSON:

    CALL   {"op": "infer", "model", "version", "id", "outputs", "parameters", "timeout_us", "batch", "member",
            "inputs": [[name, datatype code, dims, offset, size]]}, or
           {"op": "ready", "load", "unload", ...; "model", "version"; "probe": true from within `is_ready`}
    REPLY  {"outputs": [[name, datatype code, dims, offset, size]], "parameters": {...} if there are any}, {"ready": bool}, {}, or
           {"error": [code, text]}

An "infer" with "stream": true has any number of REPLY with the flag MORE, each of which is read before CREDIT lets the next one
take its place in the slot; the last REPLY has no flag, and no outputs if the model is decoupled.

    CREDIT (no body): the response of this call in the slot has been read
    CANCEL (no body): nothing waits for the reply to the call any more; it comes all the same, and frees the slot
    CLOSE  (no body): no call runs, and the slots so far are not used any more

"batch" is the number of the running batch, "member" the request that the call serves (-1: any of them). The server takes
deadline, client and cancellation from its own record of that batch.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Callable

import numpy as np

from headrace_model import protocol, python_backend, python_tensors
from headrace_model.channel import Frames
from headrace_model.protocol import BYTES, DTYPES, HEADER, SPILL, SPILLED
from headrace_model.slots import START, Slot, SlotLease, aligned

_SLOT_BYTES = 1 << 16
# Slots that arrays of responses may hold; while all are in use, outputs are copied.
_MAX_HELD_SLOTS = 32
# Slots in all; the server allows 1,024.
_MAX_SLOTS = 512
# Calls of `async_exec` at the same time; further ones wait in this process.
_MAX_ASYNC_CALLS = 256
# `json.dumps` with separators creates an encoder for each call.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode
_CLOSED = "the server has closed the connection for calls"


class Calls:
    """Sends calls and distributes the replies. Thread-safe.

    One thread at a time receives: the first one that waits for a reply, for all others too. With asyncio the event loop of
    `async def execute` reads the socket.

    Args:
        descriptor: descriptor of the socket to the server; owned.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._frames = Frames(self._socket)
        self._free: deque[int] = deque()  # any thread appends, when a lease ends
        self._waiting: deque[Callable[[], None]] = deque()  # calls of `async_exec` above the limit; on the event loop
        self._async_calls = 0  # on the event loop
        self._dropped: deque[tuple[int, SlotLease]] = deque()  # any thread appends
        self._sending = threading.Lock()  # guards the next attributes
        self._slots: list[Slot] = []
        self._number = 0
        self._changed = threading.Condition()  # guards the next attributes
        self._replies: dict[int, bytes] = {}
        self._receivers: dict[int, Callable[[bytes], None]] = {}
        self._is_receiving = False
        self._is_closed = False

    def infer(self, request: python_backend.InferenceRequest) -> python_backend.InferenceResponse:
        """Call the model of a request and wait for its response, which has an error if the call fails."""
        number, lease = self._send_infer(request, None)
        return self._response(lease, self._wait(number, lease))

    def stream(self, request: python_backend.InferenceRequest) -> python_backend.ResponseIterator:
        """Call the model of a request; the responses are waited for one by one."""
        number, lease = self._send_infer(request, None, stream=True)
        return python_backend.ResponseIterator(self, number, lease)

    def next_response(self, number: int, lease: SlotLease) -> tuple[python_backend.InferenceResponse | None, bool]:
        """Wait for the next response of a `stream`.

        Returns:
            The response, or None at the end; and whether others may follow.
        """
        frame = self._wait(number, lease)
        may_follow = _has_followers(frame)
        response = self._response(lease, frame, copies=True)
        if may_follow:
            with self._sending, suppress(OSError):  # closed: the next call says so
                self._frames.send(protocol.CREDIT, 0, number, 0, b"")
        elif not response.has_error() and not response.output_tensors():
            return None, False
        return response, may_follow

    def drop(self, number: int, lease: SlotLease) -> None:
        """Cancel a `stream` before its end; does not wait, so that a finalizer may call it from any line of code."""
        self._dropped.append((number, lease))
        if self._sending.acquire(blocking=False):
            try:
                self._cancel_dropped()
            finally:
                self._sending.release()

    def _cancel_dropped(self) -> None:
        """Let the server cancel the dropped streams; the caller holds `_sending`."""
        while self._dropped:
            number, lease = self._dropped.popleft()
            with self._changed:
                frame = self._replies.pop(number, None)
                if frame is not None and not _has_followers(frame):
                    continue
                self._receivers[number] = lambda _frame, _lease=lease: None  # type: ignore[misc]
            with suppress(OSError):
                self._frames.send(protocol.CANCEL, 0, number, 0, b"")

    def infer_async(self, request: python_backend.InferenceRequest) -> asyncio.Future[python_backend.InferenceResponse]:
        """Call the model of a request; the result is awaited on the running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[python_backend.InferenceResponse] = loop.create_future()
        if self._async_calls < _MAX_ASYNC_CALLS:
            self._start(request, loop, future)
        else:
            self._waiting.append(lambda: self._start_waiting(request, loop, future))
        return future

    def _start(self, request: python_backend.InferenceRequest, loop: asyncio.AbstractEventLoop, future: Any) -> None:
        def deliver(frame: bytes) -> None:
            try:
                loop.call_soon_threadsafe(self._finish, lease, frame, future)
            except RuntimeError:  # the loop is closed: nothing waits
                return

        number, lease = self._send_infer(request, deliver)
        self._async_calls += 1
        future.add_done_callback(lambda done: self._cancel(number) if done.cancelled() else None)
        loop.add_reader(self._socket.fileno(), self._read_available, loop)

    def _cancel(self, number: int) -> None:
        """Let the server cancel a call whose future was cancelled, e.g. by `asyncio.wait_for`."""
        if number not in self._receivers:  # the reply is there
            return
        with self._sending:
            try:
                self._frames.send(protocol.CANCEL, 0, number, 0, b"")
            except OSError:  # the server has closed the connection, and the call with it
                return

    def _start_waiting(
        self, request: python_backend.InferenceRequest, loop: asyncio.AbstractEventLoop, future: Any
    ) -> None:
        if future.done():  # cancelled while it waited
            self._start_next()
            return
        try:
            self._start(request, loop, future)
        except Exception as error:
            future.set_exception(error)
            self._start_next()

    def _start_next(self) -> None:
        if self._waiting:
            self._waiting.popleft()()

    def _finish(self, lease: SlotLease, frame: bytes, future: Any) -> None:
        """Set the result of a call of `async_exec`; on the event loop."""
        self._async_calls -= 1
        try:
            if not future.done():  # else it was cancelled
                future.set_result(self._response(lease, frame))
        except Exception as error:
            future.set_exception(error)
        self._start_next()

    def control(self, operation: str, model: str, version: str) -> Any:
        """Run an operation of the server on a model and return its result.

        Args:
            operation: "ready", "load", "unload" or "unload_dependents".
            model: name of the model.
            version: version; "" for the latest.

        Raises:
            TritonModelException: the operation failed.
        """
        with self._sending:
            lease = self._take_slot()
            message: dict[str, Any] = {"op": operation, "model": model, "version": version}
            if threading.current_thread().name == protocol.PROBE_THREAD:
                message["probe"] = True  # the call delays the answer of this process
            number = self._send(lease, START, message, None)
        reply = self._message(lease, self._wait(number, lease))
        error = reply.get("error")
        if error:
            raise python_tensors.TritonModelException(error[1])
        return reply.get("ready")

    # Sending

    def _send_infer(
        self, request: python_backend.InferenceRequest, receiver: Callable[[bytes], None] | None, stream: bool = False
    ) -> tuple[int, SlotLease]:
        """Send a call; return its number and its slot."""
        trace = request._trace
        message: dict[str, Any] = {
            "op": "infer",
            "model": request._model_name,
            "version": "" if request._model_version == -1 else str(request._model_version),
            "id": request._request_id,
            "outputs": list(request._output_names),
            "parameters": request._parameters,
            "timeout_us": request._timeout,
            "batch": python_backend.runtime.calling_batch(),
            "member": -1 if trace is None else trace._member,
        }
        if request._correlation_id:
            flags = request._flags or 0
            is_start = bool(flags & python_backend.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START)
            is_end = bool(flags & python_backend.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
            message["sequence"] = [request._correlation_id, is_start, is_end]
        if stream:
            message["stream"] = True
        with self._sending:
            lease = self._take_slot()
            end, message["inputs"] = self._write(lease.slot, request._inputs)
            return self._send(lease, end, message, receiver), lease

    def _take_slot(self) -> SlotLease:
        try:
            index = self._free.popleft()
        except IndexError:
            index = len(self._slots)
            if index >= _MAX_SLOTS:
                raise python_tensors.TritonModelException(
                    f"{index} calls of other models at the same time are the limit: wait for responses before further calls"
                ) from None
            slot = Slot.create("headrace calls of " + python_backend.runtime.model_name, _SLOT_BYTES)
            self._frames.share(protocol.SHARE, index, [slot.fd])
            self._slots.append(slot)
        return SlotLease(self._free, index, self._slots[index])

    def release(self) -> bool:
        """Return the memory of earlier calls to the system; False while a call runs, or an array of a response is in use."""
        if len(self._free) < len(self._slots):
            gc.collect(1)  # cycles of asyncio hold arrays of the last responses
        with self._sending:
            if len(self._free) < len(self._slots):
                return False
            if self._slots:
                with suppress(OSError):  # the server has closed the connection
                    self._frames.send(protocol.CLOSE, 0, 0, 0, b"")
                self._free.clear()
                self._slots = []
            return True

    @staticmethod
    def _write(slot: Slot, tensors: Any) -> tuple[int, list[list[Any]]]:
        """Write tensors into a slot; return the end and their descriptions."""
        end, described = START, []
        for tensor in tensors:
            if not isinstance(tensor, python_tensors.Tensor):
                raise python_tensors.TritonModelException(
                    f"inputs of an InferenceRequest are a list of Tensor, not of {type(tensor).__name__}"
                )
            array = tensor._array
            code = python_tensors.numpy_to_triton_type(array.dtype)
            if code is None:
                raise python_tensors.TritonModelException(
                    f"input {tensor._name!r} has the dtype {array.dtype}, which is no datatype"
                )
            try:
                size = slot.put(end, array, code)
            except protocol.WrongResultError as error:
                raise python_tensors.TritonModelException(f"input {tensor._name!r}: {error}") from None
            described.append([tensor._name, code, list(array.shape), end, size])
            end = aligned(end + size)
        return end, described

    def _send(
        self, lease: SlotLease, end: int, message: dict[str, Any], receiver: Callable[[bytes], None] | None
    ) -> int:
        self._cancel_dropped()
        self._number = number = self._number + 1
        body, flags = lease.slot.spill(_encode(message).encode(), end)
        if receiver is not None:
            with self._changed:
                self._receivers[number] = receiver
        try:
            self._frames.send(protocol.CALL, lease.index, number, 1, body, flags)
        except OSError:
            with self._changed:
                self._receivers.pop(number, None)
            raise python_tensors.TritonModelException(_CLOSED) from None
        return number

    # Receiving

    def _wait(self, number: int, lease: SlotLease) -> bytes:
        """Return the reply to a call; an exception, e.g. of a signal's handler, keeps the slot until the reply is there."""
        try:
            return self._receive(number)
        except BaseException:
            with self._changed:
                if self._replies.pop(number, None) is None:
                    self._receivers[number] = lambda _frame, _lease=lease: None  # type: ignore[misc]
            raise

    def _receive(self, number: int) -> bytes:
        changed = self._changed
        while True:
            with changed:
                while True:
                    frame = self._replies.pop(number, None)
                    if frame is not None:
                        return frame
                    if self._is_closed:
                        raise python_tensors.TritonModelException(_CLOSED)
                    if not self._is_receiving:
                        break
                    changed.wait()
                self._is_receiving = True
            received = None
            try:
                received = self._socket.recv(protocol.FRAME_BYTES + 1)
            except OSError:
                received = b""
            finally:
                with changed:
                    self._is_receiving = False
                    if received is not None:
                        self._dispatch(received)
                    changed.notify_all()

    def _read_available(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read replies on the event loop until there is none."""
        while True:
            with self._changed:
                # A thread that waits for a reply receives those of the event loop as well: it must not wait for a reply that
                # is read here.
                if self._is_receiving:
                    return
                try:
                    frame = self._socket.recv(protocol.FRAME_BYTES + 1, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    break
                except OSError:
                    frame = b""
                self._dispatch(frame)
                self._changed.notify_all()
            if not frame:
                break
        if not self._receivers:
            loop.remove_reader(self._socket.fileno())

    def _dispatch(self, frame: bytes) -> None:
        """Hand a reply to its caller; the caller holds `_changed`."""
        if len(frame) < HEADER.size:
            self._is_closed = True
            receivers, self._receivers = self._receivers, {}
            for receiver in receivers.values():
                receiver(b"")
            return
        number: int = HEADER.unpack_from(frame)[4]
        receiver_of_call = (self._receivers.get if _has_followers(frame) else self._receivers.pop)(number, None)
        if receiver_of_call is None:
            self._replies[number] = frame
        else:
            receiver_of_call(frame)

    @staticmethod
    def _message(lease: SlotLease, frame: bytes) -> dict[str, Any]:
        if not frame:
            raise python_tensors.TritonModelException(_CLOSED)
        flags: int = HEADER.unpack_from(frame)[2]
        body = frame[HEADER.size :]
        if flags & SPILLED:
            offset, size = SPILL.unpack(body)
            body = lease.slot.read(offset, size)
        message: dict[str, Any] = _decode(body.decode())
        return message

    def _response(self, lease: SlotLease, frame: bytes, copies: bool = False) -> python_backend.InferenceResponse:
        """Return the response of a call; its arrays hold the slot, unless they are copies."""
        message = self._message(lease, frame)
        error = message.get("error")
        if error:
            return python_backend.InferenceResponse(
                [], python_tensors.TritonError(error[1], error[0] - protocol.UNKNOWN)
            )
        slot, base, tensors = lease.slot, None, []
        copies = copies or len(self._slots) - len(self._free) > _MAX_HELD_SLOTS
        for name, code, dims, offset, size in message["outputs"]:
            if code == BYTES:
                array = protocol.unpack_texts(slot.read(offset, size), dims)
            elif copies:
                slot.reach(offset, size)
                array = np.ndarray(dims, DTYPES[code], slot.memory, offset).copy()
            else:
                slot.reach(offset, size)
                if base is None or offset + size > len(base):
                    base = lease.array()
                array = np.ndarray(dims, DTYPES[code], base, offset)
            tensors.append(python_tensors.Tensor(name, array))
        return python_backend.InferenceResponse(tensors, None, message.get("parameters"))


def _has_followers(frame: bytes) -> bool:
    return bool(HEADER.unpack_from(frame)[2] & protocol.MORE)
