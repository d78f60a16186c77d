"""A load client for ModelStreamInfer: keeps so many messages in flight on each stream, one stream on each connection.

h2load cannot do it: it sends a whole body whatever comes back, so that the server's bound decides how many are in flight. This
one sends a message for every answer. It is written in Python and stays small beside the server all the same: it decodes no
message, it counts the bytes of DATA frames, and all answers that lie in one buffer are followed by one write.

    python -m loadtest.bench.streaming --port 8001 --message m.bin --answer-bytes 130 --connections 4 --in-flight 16 --seconds 4

runs in a process of its own and prints one JSON line. HTTP/2 as in RFC 9113, gRPC as in its "gRPC over HTTP/2" page.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import hpack

from loadtest.bench.wrk import LoadFailed
from loadtest.grpc_protocol import MODEL_STREAM_INFER, PREFIX_BYTES, framed
from loadtest.servers import HOST, ROOT, pinned

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
HEADER_BYTES = 9
INITIAL_WINDOW_SIZE = 4
LARGEST_WINDOW, DEFAULT_WINDOW = (1 << 31) - 1, 65_535
# What every server takes (RFC 9113, 4.2).
SMALLEST_FRAME_LIMIT = 16_384
STREAM = 1
SILENCE_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class StreamSample:
    """Result of one run.

    Attributes:
        answers: messages answered, every one of those sent.
        duration_s: from the first message to the last answer.
        client_busy: the share of one core that the client used.
    """

    answers: int
    duration_s: float
    client_busy: float = 0.0

    @property
    def calls_per_s(self) -> float:
        """Answers over the whole run."""
        return self.answers / self.duration_s


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """The same message again and again.

    Attributes:
        message: a ModelInferRequest, serialized.
        connections: kept open, one stream on each.
        in_flight: messages sent and not answered, on each stream.
        seconds: how long.
        cpus: the client's cores.
    """

    message: bytes
    connections: int
    in_flight: int
    seconds: int
    cpus: tuple[int, ...] | None = None


class Connection:
    """One connection with one stream on it.

    Args:
        port: of the server.
        message: a ModelInferRequest, serialized.
        answer_bytes: the size that every answer's message has to have.
        in_flight: messages sent and not answered, at most.

    Raises:
        ValueError: the message does not fit into one frame.
    """

    def __init__(self, port: int, message: bytes, answer_bytes: int, in_flight: int) -> None:
        if PREFIX_BYTES + len(message) > SMALLEST_FRAME_LIMIT:
            raise ValueError(f"a message of {len(message)} bytes does not fit into a frame of {SMALLEST_FRAME_LIMIT}")
        self._frame = frame(DATA, 0, STREAM, framed(message))
        self._message_bytes = PREFIX_BYTES + len(message)
        self._answer_bytes = PREFIX_BYTES + answer_bytes
        self._in_flight = in_flight
        self._buffer = b""
        self._received_bytes = 0
        self._decoder = hpack.Decoder()
        self._window, self._stream_window, self._initial_window = DEFAULT_WINDOW, DEFAULT_WINDOW, DEFAULT_WINDOW
        self.sent = 0
        self.status: str | None = None
        self.reason = ""
        self.socket = socket.create_connection((HOST, port), timeout=SILENCE_LIMIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(_opening(port))

    @property
    def answered(self) -> int:
        """Whole answers received."""
        return self._received_bytes // self._answer_bytes

    def refill(self) -> None:
        """Send as many messages as may be in flight, and as the server's windows take."""
        room = min(self._window, self._stream_window) // self._message_bytes
        count = min(self._in_flight - self.sent + self.answered, room)
        if count > 0:
            self._window -= count * self._message_bytes
            self._stream_window -= count * self._message_bytes
            self.sent += count
            self.socket.sendall(self._frame * count)

    def half_close(self) -> None:
        """No more messages."""
        self.socket.sendall(frame(DATA, END_STREAM, STREAM, b""))

    def receive(self) -> None:
        """Take what has arrived.

        Raises:
            LoadFailed: the server ended the stream or the connection, or answered with something else than it should.
        """
        data = self.socket.recv(1 << 18)
        if not data:
            raise LoadFailed("the server closed the connection in the middle of a stream")
        data = self._buffer + data if self._buffer else data
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            size, kind, flags, stream = frame_header(data, at)
            after = at + HEADER_BYTES + size
            if after > end:
                break
            if kind != DATA:
                self._control(kind, flags, stream, data[at + HEADER_BYTES : after])
            elif flags:
                # Padding would be counted as part of an answer; an end of the stream belongs to the trailers.
                raise LoadFailed(f"a DATA frame has the flags {flags:#x}, expected none")
            else:
                self._received_bytes += size
            at = after
        self._buffer = data[at:]
        if self._received_bytes > LARGEST_WINDOW // 2:
            raise LoadFailed("more than 1 GiB on one stream: take fewer seconds")

    def check_end(self) -> None:
        """LoadFailed unless the stream ended with OK and brought one answer of the right size for every message."""
        if self.status != "0":
            raise LoadFailed(f"a stream ended with grpc-status {self.status}")
        if self._received_bytes != self.sent * self._answer_bytes:
            raise LoadFailed(
                f"{self.sent} messages brought {self._received_bytes} bytes of answers, "
                f"expected {self.sent * self._answer_bytes}: some were answered with an error instead"
            )

    def _control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            (by,) = struct.unpack(">I", payload)
            if stream:
                self._stream_window += by
            else:
                self._window += by
        elif kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == INITIAL_WINDOW_SIZE:
                    self._stream_window += value - self._initial_window
                    self._initial_window = value
            self.socket.sendall(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self.socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == HEADERS:
            self._headers(flags, payload)
        # After the trailers a server may still reset the stream, to stop the client from sending more (RFC 9113, 8.1).
        elif kind in (RST_STREAM, GOAWAY) and self.status is None:
            raise LoadFailed(f"the server sent {'GOAWAY' if kind == GOAWAY else 'RST_STREAM'} {payload!r}")

    def _headers(self, flags: int, block: bytes) -> None:
        if not flags & END_HEADERS:
            raise LoadFailed("the server sent headers in several frames, which this client cannot read")
        fields = {str(name): str(value) for name, value in self._decoder.decode(block)}
        if flags & END_STREAM:
            self.status = fields.get("grpc-status", "missing")
            self.reason = fields.get("grpc-message", "")
        elif fields.get(":status") != "200":
            raise LoadFailed(f"a stream was answered with {fields}")


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def frame_header(data: bytes, at: int) -> tuple[int, int, int, int]:
    """Payload size, type, flags and stream of the frame that begins there."""
    high, low, kind, flags, stream = struct.unpack_from(">BHBBI", data, at)
    return high << 16 | low, kind, flags, stream & LARGEST_WINDOW


def _opening(port: int) -> bytes:
    """Preface, settings, and the headers of the stream; our windows are so wide that we never update them."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", MODEL_STREAM_INFER),
        (":authority", f"{HOST}:{port}"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ]
    return b"".join(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)),
            frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)),
            frame(HEADERS, END_HEADERS, STREAM, hpack.Encoder().encode(fields)),
        )
    )


def stream(connections: Sequence[Connection], seconds: float) -> StreamSample:
    """Keep all streams full for so long, then let them run dry and end them.

    Raises:
        LoadFailed: a message was not answered as it should be.
    """
    with selectors.DefaultSelector() as selector:
        for connection in connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
        begin = time.perf_counter()
        for connection in connections:
            connection.refill()
        while time.perf_counter() - begin < seconds:
            for connection in _received(selector):
                connection.refill()
        while any(connection.answered < connection.sent for connection in connections):
            _received(selector)
        duration_s = time.perf_counter() - begin
        for connection in connections:
            connection.half_close()
        while any(connection.status is None for connection in connections):
            for connection in _received(selector, may_end=True):
                if connection.status is not None:
                    selector.unregister(connection.socket)
    for connection in connections:
        connection.check_end()
    return StreamSample(sum(connection.answered for connection in connections), duration_s)


def _received(selector: selectors.BaseSelector, may_end: bool = False) -> list[Connection]:
    """The connections that something has arrived on, once it is read."""
    ready: list[Connection] = [key.data for key, _ in selector.select(SILENCE_LIMIT_S)]
    if not ready:
        raise LoadFailed(f"the server has sent nothing for {SILENCE_LIMIT_S:.0f} s")
    for connection in ready:
        connection.receive()
        if connection.status is not None and not may_end:
            raise LoadFailed(f"the server ended a stream: {connection.status} {connection.reason}")
    return ready


def run(port: int, answer_bytes: int, load: StreamLoad, scratch: Path) -> StreamSample:
    """Put one load on one server, from a fresh process; every answer's message must have `answer_bytes`.

    Raises:
        LoadFailed: a message was not answered as it should be.
    """
    path = scratch / "message.bin"
    path.write_bytes(load.message)
    command = [*pinned(load.cpus), sys.executable, "-m", "loadtest.bench.streaming", "--port", str(port)]
    command += ["--message", str(path), "--answer-bytes", str(answer_bytes), "--seconds", str(load.seconds)]
    command += ["--connections", str(load.connections), "--in-flight", str(load.in_flight)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise LoadFailed(finished.stderr.strip() or f"the client of the streams exited with {finished.returncode}")
    return StreamSample(**json.loads(finished.stdout))


def main() -> None:
    """Start from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--message", type=Path, required=True)
    parser.add_argument("--answer-bytes", type=int, required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    try:
        sample = _measure(options)
    except (LoadFailed, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(asdict(sample)))


def _measure(options: argparse.Namespace) -> StreamSample:
    message = options.message.read_bytes()
    connections = [
        Connection(options.port, message, options.answer_bytes, options.in_flight) for _ in range(options.connections)
    ]
    before_s = time.process_time()
    sample = stream(connections, options.seconds)
    return replace(sample, client_busy=(time.process_time() - before_s) / sample.duration_s)


if __name__ == "__main__":
    main()
