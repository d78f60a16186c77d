"""Clients that leave before they are answered: over HTTP and gRPC, while they still send, in the queue, in execution."""

from __future__ import annotations

import http.client
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc

from loadtest.grpc_protocol import infer_message
from loadtest.protocol import HttpRequest, binary_request, wire_bytes
from loadtest.servers import HOST, Running
from loadtest.soak.clients import TIMEOUT_S, ChannelClient, Client, connect, post, read_grpc, read_http
from loadtest.soak.ledger import Ledger, Outcome
from loadtest.soak.models import Case

_MAX_WAIT_S = 0.015
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is reset, not closed


class HttpLeaver(Client):
    """Closes or resets its connection in the middle of a request, of the wait, or lets a deadline pass."""

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int, cases: Sequence[Case]) -> None:
        super().__init__(server, ledger, per_s, seed, cases)
        self._requests = [(case, binary_request(case.model, case.inputs)) for case in cases]

    def turn(self) -> None:
        """One of the ways to leave."""
        case, request = self.random.choice(self._requests)
        self.random.choice((self._leave, self._leave, self._expire))(case, request)

    def _leave(self, case: Case, request: HttpRequest) -> None:
        content = wire_bytes(replace(request, headers={**request.headers, **self.headers}), self.server.port)
        part = len(content) if self.random.random() < 0.7 else self.random.randrange(1, len(content))
        try:
            with socket.create_connection((HOST, self.server.port), timeout=TIMEOUT_S) as connection:
                connection.sendall(content[:part])
                time.sleep(self.random.uniform(0, _MAX_WAIT_S))
                if self.random.random() < 0.5:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        except OSError as error:
            self.ledger.note(
                "HTTP, leaving", case.model, Outcome.FAILED, 0.0, f"the request could not be sent: {error!r}"
            )
            return
        self.ledger.note("HTTP, leaving", case.model, Outcome.LEFT)

    def _expire(self, case: Case, request: HttpRequest) -> None:
        connection = connect(self.server)
        start_s = time.perf_counter()
        try:
            more = {"X-Request-Timeout-Ms": str(self.random.randint(1, 8)), **self.headers}
            status, headers, body = post(connection, request, more)
        except (OSError, http.client.HTTPException) as error:
            self.ledger.note("HTTP, deadline", case.model, Outcome.LOST, 0.0, repr(error))
            return
        finally:
            connection.close()
        # 504: the deadline has passed; 503: it would have.
        if status in (503, 504):
            self.ledger.note("HTTP, deadline", case.model, Outcome.REFUSED)
            return
        outcome, detail = read_http(case, status, headers, body)
        self.ledger.note("HTTP, deadline", case.model, outcome, time.perf_counter() - start_s, detail)


class GrpcLeaver(ChannelClient):
    """Cancels its call, lets its deadline pass, or drops a stream with requests in flight."""

    def turn(self) -> None:
        """One of the ways to leave."""
        case = self.random.choice(self.cases)
        self.random.choice((self._cancel, self._cancel, self._expire, self._drop))(case)

    def _cancel(self, case: Case) -> None:
        start_s = time.perf_counter()
        message = infer_message(case.model, case.inputs)
        call = self.infer.future(message, timeout=TIMEOUT_S, metadata=self.metadata)
        time.sleep(self.random.uniform(0, _MAX_WAIT_S))
        call.cancel()
        try:
            self._read("gRPC, leaving", case, call.result(), time.perf_counter() - start_s)
        except grpc.FutureCancelledError:
            self.ledger.note("gRPC, leaving", case.model, Outcome.LEFT)
        except grpc.RpcError as error:
            self.ledger.note("gRPC, leaving", case.model, Outcome.FAILED, 0.0, f"{error.code()}: {error.details()}")

    def _expire(self, case: Case) -> None:
        start_s = time.perf_counter()
        try:
            message, timeout_s = infer_message(case.model, case.inputs), self.random.uniform(0.001, 0.008)
            answer = self.infer(message, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            late = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            # The server may have answered when the client gave up.
            outcome = Outcome.LEFT if error.code() in late else Outcome.FAILED
            self.ledger.note("gRPC, deadline", case.model, outcome, 0.0, f"{error.code()}: {error.details()}")
            return
        self._read("gRPC, deadline", case, answer, time.perf_counter() - start_s)

    def _drop(self, case: Case) -> None:
        count = self.random.randint(1, 6)
        answers, sent = self.stream(dict.fromkeys(map(str, range(count)), case))
        time.sleep(self.random.uniform(0, _MAX_WAIT_S))
        answers.cancel()
        sent.put(None)
        for _ in range(count):
            self.ledger.note("stream, leaving", case.model, Outcome.LEFT)

    def _read(self, way: str, case: Case, answer: bytes, took_s: float) -> None:
        outcome, detail = read_grpc(case, answer)
        self.ledger.note(way, case.model, outcome, took_s, detail)
