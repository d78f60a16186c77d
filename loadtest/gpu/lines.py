"""Connections to a server with a request prepared for each: the lightest clients that Python allows.

`begin` sends a slot's request, `poll` gives the slots that were answered since. A slot has one request under way at most.
"""

from __future__ import annotations

import queue
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Protocol

import grpc

from loadtest.grpc_protocol import MODEL_INFER
from loadtest.protocol import HttpRequest, wire_bytes
from loadtest.servers import HOST

_CHUNK = 1 << 16
_SILENCE_S = 20.0
_HEAD_END, _LENGTH = b"\r\n\r\n", b"\ncontent-length:"
_CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Without it channels to the same server share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class Answer(tuple[int, float, str]):
    """(slot, when it came on the monotonic clock in seconds, what was wrong with it or "")."""

    __slots__ = ()


class Lines(Protocol):
    """Interface of a transport for the clients' loops."""

    slots: int

    def begin(self, slot: int) -> None:
        """Send the request of a slot that has none under way."""

    def poll(self, timeout_s: float) -> list[Answer]:
        """The answers that have come; waits for one at most so long."""

    def ask(self, slot: int) -> str:
        """Send and wait; what was wrong or ""."""

    def renew(self) -> None:
        """Before a sample, with nothing under way: connections that the server may have closed are opened anew."""

    def close(self) -> None:
        """Close the connections."""


class HttpLines:
    """A socket a slot.

    Args:
        port: of the server.
        requests: one a slot.
    """

    def __init__(self, port: int, requests: Sequence[HttpRequest]) -> None:
        self.slots = len(requests)
        wires = {
            id(request): wire_bytes(request, port) for request in requests
        }  # slots with the same request share its bytes
        self._requests = [wires[id(request)] for request in requests]
        self._buffers = [bytearray() for _ in requests]
        self._left: list[memoryview | None] = [None] * self.slots
        self._selector = selectors.DefaultSelector()
        self._port = port
        self._sockets: list[socket.socket] = []
        self._connect()

    def begin(self, slot: int) -> None:
        """Send as much as the socket takes; `poll` sends the rest."""
        self._send(slot, memoryview(self._requests[slot]))

    def poll(self, timeout_s: float) -> list[Answer]:
        """See `Lines`."""
        answers: list[Answer] = []
        for key, events in self._selector.select(timeout_s):
            slot = key.data
            left = self._left[slot]
            if events & selectors.EVENT_WRITE and left is not None:
                self._send(slot, left)
            if events & selectors.EVENT_READ:
                wrong = self._receive(slot)
                if wrong is not None:
                    answers.append(Answer((slot, time.monotonic(), wrong)))
        return answers

    def ask(self, slot: int) -> str:
        """See `Lines`."""
        sock = self._sockets[slot]
        sock.settimeout(_SILENCE_S)
        try:
            sock.sendall(self._requests[slot])
            while (wrong := self._receive(slot)) is None:
                pass
            return wrong
        finally:
            sock.setblocking(False)

    def renew(self) -> None:
        """All of them: a server closes connections that idle, and other contenders' samples lie between two of ours."""
        for sock in self._sockets:
            self._selector.unregister(sock)
            sock.close()
        self._sockets.clear()
        self._connect()

    def close(self) -> None:
        """See `Lines`."""
        self._selector.close()
        for sock in self._sockets:
            sock.close()

    def _connect(self) -> None:
        for slot in range(self.slots):
            sock = socket.create_connection((HOST, self._port), timeout=_SILENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            self._sockets.append(sock)
            self._selector.register(sock, selectors.EVENT_READ, slot)
            self._buffers[slot].clear()
            self._left[slot] = None

    def _send(self, slot: int, data: memoryview) -> None:
        sock, waited = self._sockets[slot], self._left[slot] is not None
        try:
            left = data[sock.send(data) :]
        except BlockingIOError:
            left = data
        self._left[slot] = left or None
        if bool(left) != waited:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if left else 0)
            self._selector.modify(sock, events, slot)

    def _receive(self, slot: int) -> str | None:
        """Return the error of an answer, "" if it is right, None if it is not complete yet."""
        try:
            data = self._sockets[slot].recv(_CHUNK)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionError("the server closed a connection with a request under way")
        buffer = self._buffers[slot]
        buffer += data
        end = buffer.find(_HEAD_END)
        if end < 0:
            return None
        head = bytes(buffer[:end]).lower()
        at = head.find(_LENGTH)
        if at < 0:
            raise ConnectionError(f"an answer without a content-length: {head[:200]!r}")
        size = int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0])
        body = end + len(_HEAD_END)
        if len(buffer) < body + size:
            return None
        wrong = (
            "" if head.startswith(b"http/1.1 200") else bytes(buffer[: body + min(size, 300)]).decode(errors="replace")
        )
        del buffer[: body + size]
        return wrong


class GrpcLines:
    """Calls of grpcio on raw messages; its core, written in C++, does the wire.

    Args:
        port: of the server.
        messages: serialized ModelInferRequests, one a slot.
        channels: connections that the slots share.
    """

    def __init__(self, port: int, messages: Sequence[bytes], channels: int = 2) -> None:
        self.slots = len(messages)
        self._messages = list(messages)
        self._channels = [grpc.insecure_channel(f"{HOST}:{port}", options=_CHANNEL_OPTIONS) for _ in range(channels)]
        self._calls: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(MODEL_INFER) for channel in self._channels
        ]
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def begin(self, slot: int) -> None:
        """See `Lines`."""
        call = self._calls[slot % len(self._calls)].future(self._messages[slot], timeout=_SILENCE_S)

        def done(ended: grpc.Future[bytes], slot: int = slot) -> None:
            error = ended.exception()
            self._answers.put(Answer((slot, time.monotonic(), "" if error is None else _error_text(error))))

        call.add_done_callback(done)

    def poll(self, timeout_s: float) -> list[Answer]:
        """See `Lines`."""
        answers: list[Answer] = []
        try:
            answers.append(self._answers.get(timeout=timeout_s) if timeout_s > 0 else self._answers.get_nowait())
            while True:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            return answers

    def ask(self, slot: int) -> str:
        """See `Lines`."""
        try:
            self._calls[slot % len(self._calls)](self._messages[slot], timeout=_SILENCE_S)
        except grpc.RpcError as error:
            return _error_text(error)
        return ""

    def renew(self) -> None:
        """Nothing to do: channels connect again by themselves."""

    def close(self) -> None:
        """See `Lines`."""
        for channel in self._channels:
            channel.close()


def _error_text(error: BaseException) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
