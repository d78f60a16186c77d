"""Invalid requests, and the error that each must get: the server refuses them and continues."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from loadtest.grpc_protocol import MODEL_INFER
from loadtest.protocol import HEADER_LENGTH, HttpRequest, wire_bytes
from loadtest.servers import HOST, Running
from loadtest.soak.clients import METRICS_KEY, TIMEOUT_S, ChannelClient, Client
from loadtest.soak.ledger import Ledger, Outcome
from loadtest.soak.models import STEADY

_X: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
_PATH = f"/v2/models/{STEADY}/infer"
_HOST = "Host: localhost"
_LONGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Bad:
    """A request over HTTP.

    Attributes:
        name: the error.
        statuses: one of these must come.
        content: as it goes over the connection.
    """

    name: str
    statuses: tuple[int, ...]
    content: bytes


@dataclass(frozen=True, slots=True)
class BadCall:
    """A gRPC call: the error, its status code, the method, the message, and a key in place of the client's own."""

    name: str
    codes: tuple[str, ...]
    method: str
    message: bytes
    metadata: Mapping[str, str] | None = None


class HttpSpoiler(Client):
    """Sends invalid requests, each on a connection of its own."""

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int) -> None:
        super().__init__(server, ledger, per_s, seed)
        self._requests = [_with_headers(bad, self.headers) for bad in http_requests()]
        if server.api_keys:
            good = _post(json.dumps({"inputs": [_X]}).encode())
            self._requests += [
                _with_headers(Bad(name, (status,), good), headers) for name, status, _, headers in _wrong_keys(server)
            ]

    def turn(self) -> None:
        """One of them."""
        bad = self.random.choice(self._requests)
        try:
            with socket.create_connection((HOST, self.server.port), timeout=TIMEOUT_S) as connection:
                connection.sendall(bad.content)
                status = _status(connection)
        except (OSError, ValueError) as error:
            self.ledger.note("HTTP, bad", bad.name, Outcome.LOST, 0.0, repr(error))
            return
        outcome = Outcome.REFUSED if status in bad.statuses else Outcome.FAILED
        self.ledger.note("HTTP, bad", bad.name, outcome, 0.0, f"status {status}, expected one of {bad.statuses}")


class GrpcSpoiler(ChannelClient):
    """Sends invalid calls, and sometimes bytes that are not HTTP/2."""

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int) -> None:
        super().__init__(server, ledger, per_s, seed)
        self._calls = list(grpc_calls())
        if server.api_keys:
            good = _message(STEADY)
            self._calls += [
                BadCall(name, (code,), MODEL_INFER, good, headers) for name, _, code, headers in _wrong_keys(server)
            ]

    def turn(self) -> None:
        """One of them."""
        bad = self.random.choice([*self._calls, None])
        if bad is None:
            self._garbage()
            return
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(bad.method)
        try:
            metadata = self.metadata if bad.metadata is None else tuple(bad.metadata.items())
            call(bad.message, timeout=TIMEOUT_S, metadata=metadata)
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
        outcome = Outcome.REFUSED if code in bad.codes else Outcome.FAILED
        self.ledger.note("gRPC, bad", bad.name, outcome, 0.0, f"{code}, expected one of {bad.codes}")

    def _garbage(self) -> None:
        """The server must close the connection by itself."""
        try:
            with socket.create_connection((HOST, self.server.grpc_port), timeout=TIMEOUT_S) as connection:
                connection.sendall(self.random.randbytes(64))
                while connection.recv(_LONGEST):
                    pass
        except ConnectionError:
            pass  # closed with the rest unread
        except OSError as error:
            self.ledger.note("gRPC, bad", "no HTTP/2", Outcome.FAILED, 0.0, repr(error))
            return
        self.ledger.note("gRPC, bad", "no HTTP/2", Outcome.REFUSED)


@cache
def http_requests() -> Sequence[Bad]:
    """All of them."""
    good = json.dumps({"inputs": [_X]}).encode()
    packed = gzip.compress(good)
    spoiled = packed[:12] + bytes(len(packed) - 12)
    return [
        Bad("no JSON", (400,), _post(b"{not json")),
        Bad("JSON nested too deep", (400,), _post(b"[" * 5000 + b"]" * 5000)),
        Bad("no inputs", (400,), _post(b'{"inputs": []}')),
        Bad("another shape", (400,), _post(_inputs(shape=[1, 17], data=[0.5] * 17))),
        Bad("a negative shape", (400,), _post(_inputs(shape=[-1, -16]))),
        Bad("too little data", (400,), _post(_inputs(data=[0.5]))),
        Bad("another datatype", (400,), _post(_inputs(datatype="INT64", data=[1] * 16))),
        Bad("text in place of numbers", (400,), _post(_inputs(data=["a"] * 16))),
        Bad("another input", (400,), _post(_inputs(name="Z"))),
        Bad("an unknown output", (400,), _post(_inputs({"outputs": [{"name": "Q"}]}))),
        Bad("an unknown model", (404,), _post(good, "/v2/models/nobody/infer")),
        Bad("an unknown version", (404,), _post(good, f"/v2/models/{STEADY}/versions/99/infer")),
        Bad("an unknown path", (404,), _post(good, "/v2/nothing")),
        Bad("another method", (405,), f"PUT {_PATH} HTTP/1.1\r\n{_HOST}\r\nContent-Length: 0\r\n\r\n".encode()),
        Bad("a negative header length", (400,), _post(good, **{HEADER_LENGTH: "-1"})),
        Bad("a header length beyond the body", (400,), _post(good, **{HEADER_LENGTH: str(len(good) + 1)})),
        Bad("corrupt gzip", (400,), _post(spoiled, Content_Encoding="gzip")),
        Bad("a body beyond the limit", (413,), f"POST {_PATH} HTTP/1.1\r\n{_HOST}\r\nContent-Length: {1 << 40}\r\n\r\n".encode()),
        Bad("a header beyond the limit", (400, 431), f"GET / HTTP/1.1\r\n{_HOST}\r\nX: {'x' * 100_000}\r\n\r\n".encode()),
        Bad("no HTTP", (400,), b"\x16\x03\x01 nothing of the kind\r\n\r\n"),
    ]  # fmt: skip


@cache
def grpc_calls() -> Sequence[BadCall]:
    """All of them."""
    invalid = ("INVALID_ARGUMENT",)
    return [
        BadCall("an unknown model", ("NOT_FOUND",), MODEL_INFER, _message("nobody")),
        BadCall("another shape", invalid, MODEL_INFER, _message(STEADY, shape=(1, 17))),
        BadCall("a negative shape", invalid, MODEL_INFER, _message(STEADY, shape=(-1, -16))),
        BadCall("too little data", invalid, MODEL_INFER, _message(STEADY, content=bytes(8))),
        BadCall("another datatype", invalid, MODEL_INFER, _message(STEADY, datatype="INT64")),
        BadCall("no contents", invalid, MODEL_INFER, _message(STEADY, content=None)),
        BadCall("no message", ("INVALID_ARGUMENT", "INTERNAL"), MODEL_INFER, b"\xff\xff\xff no message"),
        BadCall("an unknown method", ("UNIMPLEMENTED",), "/inference.GRPCInferenceService/Nothing", b""),
    ]


def _wrong_keys(server: Running) -> Sequence[tuple[str, int, str, Mapping[str, str]]]:
    """Name, status of HTTP, gRPC code and headers of requests that a server with keys must refuse."""
    return [
        ("no key", 401, "UNAUTHENTICATED", {}),
        ("an unknown key", 401, "UNAUTHENTICATED", {"authorization": f"Bearer hr_{'A' * 43}"}),
        ("a key without the scope", 403, "PERMISSION_DENIED", server.headers(METRICS_KEY)),
    ]


def _with_headers(bad: Bad, headers: Mapping[str, str]) -> Bad:
    """Add headers after the request line."""
    line, rest = bad.content.split(b"\r\n", 1)
    added = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    return replace(bad, content=line + b"\r\n" + added + rest)


def _inputs(more: Mapping[str, object] | None = None, **changed: object) -> bytes:
    return json.dumps({"inputs": [{**_X, **changed}], **(more or {})}).encode()


def _post(body: bytes, path: str = _PATH, **headers: str) -> bytes:
    return wire_bytes(HttpRequest(path, body, {name.replace("_", "-"): value for name, value in headers.items()}), 0)


def _message(
    model: str, shape: Sequence[int] = (1, 16), datatype: str = "FP32", content: bytes | None = bytes(64)
) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="X", datatype=datatype, shape=shape)
    if content is not None:
        request.raw_input_contents.append(content)
    return bytes(request.SerializeToString())


def _status(connection: socket.socket) -> int:
    """Of the answer.

    Raises:
        OSError, ValueError: there is none, or it is none of HTTP.
    """
    answer = b""
    while b"\r\n" not in answer:
        part = connection.recv(_LONGEST)
        if not part:
            raise ValueError(f"the connection was closed with {answer!r}")
        answer += part
    return int(answer.split(b" ", 2)[1])
