"""HTTP/1.1 as bytes on a socket: framing, pipelining, large bodies, disconnects and malformed requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.e2e.conftest import MAX_BODY_BYTES
from tests.support.serving import HOST, Server

PATH = "/v2/models/row_sums/infer"
SMALL = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,2],"data":[1,2]}],"outputs":[{"name":"SUM"}]}'
COLUMNS = 100_000  # 400 KB: far beyond what comes with the headers in one piece


def large(value: float = 1.0, columns: int = COLUMNS) -> tuple[bytes, int]:
    """A body with `columns` numbers, and the size of its header."""
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "parameters": {"binary_data_size": 4 * columns}}
    header = json.dumps({"inputs": [tensor], "outputs": [{"name": "SUM"}]}).encode()
    return header + np.full(columns, value, "<f4").tobytes(), len(header)


def head(body: bytes, header_size: int | None = None, *lines: str, path: str = PATH, version: str = "1.1") -> bytes:
    named = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}", *lines]
    if header_size is not None:
        named.append(f"Inference-Header-Content-Length: {header_size}")
    return "\r\n".join([*named, "", ""]).encode()


def request(body: bytes, header_size: int | None = None, *lines: str, path: str = PATH, version: str = "1.1") -> bytes:
    return head(body, header_size, *lines, path=path, version=version) + body


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Wire:
    """A connection; `answer` reads one answer off it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        while b"\r\n\r\n" not in self._buffer:
            self._more()
        top, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        first, *lines = top.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = int(headers.get("content-length", 0))
        while len(self._buffer) < size:
            self._more()
        body, self._buffer = self._buffer[:size], self._buffer[size:]
        return int(first.split()[1]), headers, body

    def sum(self) -> float:
        """The answer to `SMALL` or `large`."""
        status, _, body = self.answer()
        assert status == 200, body
        return float(json.loads(body)["outputs"][0]["data"][0])

    def closed(self) -> bool:
        return not self._buffer and self.connection.recv(1) == b""

    def _more(self) -> None:
        data = self.connection.recv(1 << 16)
        assert data, f"the server closed the connection after {self._buffer[:200]!r}"
        self._buffer += data


@contextmanager
def connect(server: Server, timeout_s: float = 10.0) -> Iterator[Wire]:
    with socket.create_connection((HOST, server.port), timeout=timeout_s) as connection:
        yield Wire(connection)


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_a_request_sent_in_pieces(server: Server, piece: int) -> None:
    data = request(SMALL)
    with connect(server) as wire:
        wire.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), piece):
            wire.send(data[start : start + piece])
        assert wire.sum() == 3


def chunked(body: bytes, size: int, *lines: str) -> bytes:
    """A whole request whose body comes in chunks of `size` bytes."""
    named = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Transfer-Encoding: chunked", *lines, "", ""]
    parts = [body[start : start + size] for start in range(0, len(body), size)]
    return "\r\n".join(named).encode() + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 10, 1_000])
def test_a_chunked_body(server: Server, size: int) -> None:
    with connect(server) as wire:
        for _ in range(2):
            wire.send(chunked(SMALL, size))
            assert wire.sum() == 3


def test_a_large_chunked_body(server: Server) -> None:
    body, header_size = large(0.5)
    with connect(server) as wire:
        wire.send(chunked(body, 10_000, f"Inference-Header-Content-Length: {header_size}") + request(SMALL))
        assert wire.sum() == COLUMNS / 2
        assert wire.sum() == 3


def test_large_bodies_and_small_ones_in_turn_on_one_connection(server: Server) -> None:
    with connect(server) as wire:
        for value in (1.0, 2.0, 3.0):
            body, header_size = large(value)
            wire.send(request(body, header_size))
            assert wire.sum() == value * COLUMNS
            wire.send(request(SMALL))
            assert wire.sum() == 3


def test_large_bodies_pipelined_with_small_ones(server: Server) -> None:
    two, size = large(2.0)
    three, _ = large(3.0)
    with connect(server) as wire:
        wire.send(
            request(two, size) + GET + request(three, size) + request(SMALL) + request(SMALL) + request(two, size)
        )
        assert wire.sum() == 2.0 * COLUMNS
        assert wire.answer()[0] == 200
        assert wire.sum() == 3.0 * COLUMNS
        assert [wire.sum(), wire.sum()] == [3, 3]
        assert wire.sum() == 2.0 * COLUMNS


@pytest.mark.parametrize("first", [0, 1, 100, 70_000, 399_999], ids=lambda first: f"{first} bytes at first")
def test_a_large_body_sent_slowly(server: Server, first: int) -> None:
    body, size = large(2.0)
    with connect(server) as wire:
        wire.send(head(body, size) + body[:first])
        for start in range(first, len(body), 150_000):
            time.sleep(0.02)
            wire.send(body[start : start + 150_000])
        assert wire.sum() == 2.0 * COLUMNS
        wire.send(request(SMALL))
        assert wire.sum() == 3


def test_a_large_body_and_the_connection_is_to_be_closed(server: Server) -> None:
    body, size = large()
    for version, line in (("1.1", "Connection: close"), ("1.0", "X: y")):
        with connect(server) as wire:
            wire.send(request(body, size, line, version=version))
            assert wire.sum() == COLUMNS
            assert wire.closed()


def test_a_large_body_after_100_continue(server: Server) -> None:
    body, size = large(4.0)
    with connect(server) as wire:
        wire.send(head(body, size, "Expect: 100-continue"))
        assert wire.answer()[0] == 100
        wire.send(body)
        assert wire.sum() == 4.0 * COLUMNS


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v2/models/nothing/infer", 404), ("/v2/models/broken_file/infer", 503), ("/v2/repository/nothing", 404)],
)
def test_the_connection_stays_usable_after_a_refused_large_body(server: Server, path: str, status: int) -> None:
    body, size = large()
    with connect(server) as wire:
        for _ in range(2):
            wire.send(request(body, size, path=path))
            actual, _, content = wire.answer()
            assert actual == status
            assert json.loads(content)["error"]
            wire.send(request(SMALL))
            assert wire.sum() == 3


def test_the_connection_answers_correctly_after_a_refused_large_body(server: Server) -> None:
    body, size = large()
    with connect(server) as wire:
        wire.send(request(body[:-4] + b"more", size + 1))  # the header reaches into the data
        status, _, content = wire.answer()
        assert (status, "not valid JSON" in json.loads(content)["error"]) == (400, True)
        wire.send(request(body + b"1234", size))
        status, _, content = wire.answer()
        assert (status, "4 bytes are left over" in json.loads(content)["error"]) == (400, True)
        wire.send(request(SMALL))
        assert wire.sum() == 3


def test_a_declared_body_at_the_limit_is_accepted(server: Server) -> None:
    columns = (MAX_BODY_BYTES - 1_000) // 4
    body, size = large(1.0, columns)
    body = body[:size].replace(b"{", b"{" + b" " * (MAX_BODY_BYTES - len(body)), 1) + body[size:]
    assert len(body) == MAX_BODY_BYTES
    with connect(server) as wire:
        wire.send(request(body, MAX_BODY_BYTES - 4 * columns))
        assert wire.sum() == columns


@pytest.mark.parametrize(
    "data",
    [
        b"GARBAGE\r\n\r\n",
        b"GET /v2/\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /v2 x HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_bytes_that_are_not_http(server: Server, data: bytes) -> None:
    with connect(server) as wire:
        wire.send(data)
        assert wire.answer()[0] == 400
        assert wire.closed()


def test_headers_without_end_are_refused(server: Server) -> None:
    with connect(server) as wire:
        wire.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n" + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n")
        assert 400 <= wire.answer()[0] < 500


def test_the_server_still_serves(server: Server) -> None:
    """Last in this file."""
    with connect(server) as wire:
        wire.send(request(SMALL))
        assert wire.sum() == 3
    assert "Traceback" not in server.text
