"""Sockets between the server and a process that runs a model: `Frames` of batches, and `Messages` of control."""

from __future__ import annotations

import array
import json
import socket
import struct
import threading
from typing import Any, Sequence

from headrace_model.protocol import FRAME_BYTES, HEADER, VERSION, ProtocolError

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 << 20
_MAX_DESCRIPTORS = 64


class Frames:
    """A socket of the type SOCK_SEQPACKET: one thread receives, any thread sends.

    Args:
        end: the socket, blocking; owned.
        max_bytes: longest frame.

    Attributes:
        end: see above.
        buffer: bytes of the last received frame.
    """

    def __init__(self, end: socket.socket, max_bytes: int = FRAME_BYTES) -> None:
        self.end = end
        self.buffer = bytearray(max_bytes + 1)
        self._timeouts_s = (0.0, 0.0)

    def set_timeouts(self, receive_s: float, send_s: float = 0.0) -> None:
        """Bound each receive and each send in seconds, which then raise BlockingIOError; 0 for no bound."""
        if (receive_s, send_s) == self._timeouts_s:
            return
        self._timeouts_s = receive_s, send_s
        for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
            timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
            self.end.setsockopt(socket.SOL_SOCKET, option, timeval)

    def send(self, kind: int, slot: int, number: int, count: int, body: bytes, flags: int = 0) -> None:
        """Send a frame; raises OSError if the other end is closed."""
        self.end.send(HEADER.pack(VERSION, kind, flags, slot, number, count, len(body)) + body)

    def send_now(self, kind: int, number: int) -> None:
        """Send a frame without a body, without waiting; raises BlockingIOError if the socket is full."""
        self.end.send(HEADER.pack(VERSION, kind, 0, 0, number, 0, 0), socket.MSG_DONTWAIT)

    def send_frame(self, frame: bytes, descriptor: int) -> None:
        """Send a frame with a file descriptor; raises OSError if the other end is closed."""
        self.end.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])

    def share(self, kind: int, first: int, descriptors: Sequence[int]) -> None:
        """Send a frame with file descriptors; `first` is the index of the first one."""
        header = HEADER.pack(VERSION, kind, 0, first, 0, len(descriptors), 0)
        self.end.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])

    def receive(self, descriptors: list[int] | None = None) -> int:
        """Receive a frame into `buffer`.

        Args:
            descriptors: receives the file descriptors that came with it; None where none can come.

        Returns:
            Bytes of the frame; 0 if the other end is closed.

        Raises:
            BlockingIOError: no frame came within the socket's receive timeout.
            ProtocolError: the frame is too short, too long or of another version.
        """
        buffer = self.buffer
        try:
            size = self.end.recv_into(buffer) if descriptors is None else self._receive_with(descriptors)
        except ConnectionResetError:  # it has died with frames unread; those that it has sent are still in the socket
            return self.receive(descriptors)
        if size and (size < HEADER.size or size >= len(buffer) or buffer[0] != VERSION):
            raise ProtocolError(f"a frame of {size} bytes and version {buffer[0]}")
        return size

    def _receive_with(self, descriptors: list[int]) -> int:
        room = socket.CMSG_LEN(_MAX_DESCRIPTORS * 4)
        size, control, _flags, _address = self.end.recvmsg_into([self.buffer], room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                descriptors.extend(numbers)
        return size

    def close(self) -> None:
        """Close the socket."""
        self.end.close()

    def __del__(self) -> None:
        """Close the socket: a thread may read it until its last reference is gone."""
        self.end.close()


class Messages:
    """A stream socket with JSON messages, each after its length in four bytes. One thread receives, any thread sends.

    Args:
        end: the socket, blocking; owned.
    """

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self.end.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; raises OSError if the other end is closed."""
        content = json.dumps(message, separators=(",", ":")).encode("utf-8", "surrogateescape")
        with self._sending:
            self.end.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self) -> dict[str, Any]:
        """Return the next message, waiting for all of it.

        Raises:
            EOFError: the other end is closed.
            ProtocolError: the content is no message.
        """
        while True:
            message = self.next_received()
            if message is not None:
                return message
            self.read_available()

    def read_available(self) -> None:
        """Read once from the socket; `next_received` returns the messages. Raises EOFError if the other end is closed."""
        try:
            data = self.end.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            raise EOFError
        self._received += data

    def next_received(self) -> dict[str, Any] | None:
        """Return the next message that is received whole; None if there is none. Raises ProtocolError."""
        received = self._received
        if len(received) < 4:
            return None
        (size,) = _LENGTH.unpack_from(received)
        if size > _MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {size} bytes")
        if len(received) < 4 + size:
            return None
        content = bytes(received[4 : 4 + size])
        del received[: 4 + size]
        try:
            message = json.loads(content)
        except (ValueError, RecursionError):
            raise ProtocolError("a message that is no JSON") from None
        if not isinstance(message, dict):
            raise ProtocolError("a message that is no object")
        return message

    def close(self) -> None:
        """Close the socket."""
        self.end.close()
