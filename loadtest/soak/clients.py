"""Well-behaved clients on threads of their own: over HTTP, by gRPC calls, by gRPC streams; base classes of the others."""

from __future__ import annotations

import http.client
import itertools
import queue
import random
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import grpc
from tritonclient.grpc import service_pb2

from loadtest.grpc_protocol import MODEL_INFER, MODEL_STREAM_INFER, infer_message
from loadtest.grpc_protocol import decode_answer as decode_message
from loadtest.protocol import HttpRequest, binary_request, decode_answer, json_request
from loadtest.servers import HOST, Running
from loadtest.soak.ledger import Ledger, Outcome
from loadtest.soak.models import APART, GUEST, Case

TIMEOUT_S = 30.0
# Names of the keys of deploy/make_keys.py.
INFER_KEY, METRICS_KEY, ADMIN_KEY = "infer", "metrics", "admin"
CHANNEL_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
# The server's messages for a model that is unloaded or being loaded again, and for a killed process.
_UNLOADED = ("is not loaded", "is being loaded")
_KILLED = "died while it ran the request: killed by SIGKILL"
_BURST = 8


class Client(ABC):
    """A client that repeats an action at a given rate.

    Args:
        server: the server under test.
        ledger: record of all requests.
        per_s: turns a second, if the server keeps up.
        seed: of the random numbers.
        cases: requests and their answers.

    Attributes:
        KEY: name of the client whose key is sent, if the server has keys.
        headers: that key, as a header of HTTP.
        metadata: the same for gRPC.
    """

    KEY: ClassVar[str] = INFER_KEY

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int, cases: Sequence[Case] = ()) -> None:
        self.server = server
        self.ledger = ledger
        self.random = random.Random(seed)
        self.cases = cases
        self.headers = server.headers(self.KEY)
        self.metadata = tuple(self.headers.items())
        self._pause_s = 1.0 / per_s

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set; the current turn is finished."""
        due_s = time.monotonic() + self.random.uniform(0, self._pause_s)
        try:
            while not stop.wait(max(due_s - time.monotonic(), 0.0)):
                # Evenly, so that phases can be compared; a late client does not catch up.
                due_s = max(due_s + self._pause_s, time.monotonic())
                self.turn()
        except Exception as error:  # a client that died must not look like one without requests
            self.ledger.note(type(self).__name__, "", Outcome.FAILED, 0.0, f"the client itself: {error!r}")
        finally:
            self.close()

    @abstractmethod
    def turn(self) -> None:
        """Send one request."""

    def close(self) -> None:
        """Close the connections."""
        return


class ChannelClient(Client):
    """A client with a gRPC channel of its own, which shares its connection with no other."""

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int, cases: Sequence[Case] = ()) -> None:
        super().__init__(server, ledger, per_s, seed, cases)
        self.channel = grpc.insecure_channel(f"{HOST}:{server.grpc_port}", options=CHANNEL_OPTIONS)
        self.infer: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(MODEL_INFER)

    def stream(self, cases: Mapping[str, Case]) -> tuple[Any, queue.SimpleQueue[bytes | None]]:
        """Open a stream with a request of each case, by id; return the answers and the queue, which ends the stream by None."""
        sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for name, case in cases.items():
            sent.put(named_message(case, name))
        open_stream: grpc.StreamStreamMultiCallable[bytes, bytes] = self.channel.stream_stream(MODEL_STREAM_INFER)
        return open_stream(iter(sent.get, None), timeout=TIMEOUT_S, metadata=self.metadata), sent

    def close(self) -> None:
        """Close the channel."""
        self.channel.close()


class HttpClient(Client):
    """Requests on one connection that stays open, half of them JSON, half of them binary."""

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int, cases: Sequence[Case]) -> None:
        super().__init__(server, ledger, per_s, seed, cases)
        large = 1 << 14
        self._requests = [(case, binary_request(case.model, case.inputs)) for case in cases]
        self._requests += [
            (case, json_request(case.model, case.inputs))
            for case in cases
            if sum(array.nbytes for array in case.inputs.values()) < large
        ]
        self._connection = connect(server)

    def turn(self) -> None:
        """One request; every value of its answer is compared."""
        case, request = self.random.choice(self._requests)
        start_s = time.perf_counter()
        try:
            status, headers, body = post(self._connection, request, self.headers)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            self._connection = connect(self.server)
            self.ledger.note("HTTP", case.model, Outcome.LOST, 0.0, repr(error))
            return
        took_s = time.perf_counter() - start_s
        outcome, detail = read_http(case, status, headers, body)
        self.ledger.note("HTTP", case.model, outcome, took_s, detail)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class GrpcClient(ChannelClient):
    """Calls on one channel."""

    def __init__(self, server: Running, ledger: Ledger, per_s: float, seed: int, cases: Sequence[Case]) -> None:
        super().__init__(server, ledger, per_s, seed, cases)
        self._requests = [(case, infer_message(case.model, case.inputs)) for case in cases]

    def turn(self) -> None:
        """One call; every value of its answer is compared."""
        case, message = self.random.choice(self._requests)
        start_s = time.perf_counter()
        try:
            answer = self.infer(message, timeout=TIMEOUT_S, metadata=self.metadata)
        except grpc.RpcError as error:
            self.ledger.note("gRPC", case.model, *read_failure(case, error))
            return
        took_s = time.perf_counter() - start_s
        outcome, detail = read_grpc(case, answer)
        self.ledger.note("gRPC", case.model, outcome, took_s, detail)


class ConnectionCrowd(Client):
    """Many clients with a connection each, nine of ten over gRPC, which send one request after the other, in turn.

    The connections stay open from phase to phase: `run` does not close them.

    Args:
        server, ledger, per_s, seed, cases: see `Client`; `per_s` is the rate of all connections together.
        connections: number of them.
    """

    def __init__(
        self, server: Running, ledger: Ledger, per_s: float, seed: int, cases: Sequence[Case], connections: int
    ) -> None:
        super().__init__(server, ledger, per_s, seed, cases)
        self._clients = [
            (GrpcClient if number % 10 else HttpClient)(server, ledger, per_s, seed + number, cases)
            for number in range(connections)
        ]
        self._next = itertools.cycle(self._clients)

    def open(self) -> None:
        """Open all connections, with one request on each."""
        for client in self._clients:
            client.turn()

    def turn(self) -> None:
        """One request on the next connection."""
        next(self._next).turn()

    def check(self) -> None:
        """Note a failure if the server has fewer open connections than there should be."""
        expected = len(self._clients)
        connection = connect(self.server)
        connection.request("GET", "/metrics", headers=self.server.headers(METRICS_KEY))
        page = connection.getresponse().read().decode()
        connection.close()
        found = sum(float(value) for value in re.findall(r"(?m)^headrace_connections\{[^}]*\} (\S+)$", page))
        outcome = Outcome.RIGHT if found >= expected else Outcome.FAILED
        self.ledger.note("crowd", "", outcome, 0.0, f"{found:.0f} of {expected} connections are open")

    def end(self) -> None:
        """Close all connections."""
        for client in self._clients:
            client.close()


class StreamClient(ChannelClient):
    """Bursts of requests in one stream, answered in any order."""

    def turn(self) -> None:
        """A stream with its burst: every id must come back once, with its own answer."""
        waiting = {str(number): self.random.choice(self.cases) for number in range(_BURST)}
        start_s = time.perf_counter()
        answers, sent = self.stream(waiting)
        last: Case | None = None
        try:
            while waiting:
                answer = service_pb2.ModelStreamInferResponse.FromString(next(answers))
                last = waiting.pop(answer.infer_response.id, None)
                if last is None:
                    self.ledger.note("stream", "", Outcome.WRONG, 0.0, f"an answer without a request: {answer}"[:300])
                    continue
                took_s = time.perf_counter() - start_s
                self.ledger.note("stream", last.model, *_read_streamed(last, answer, took_s))
            sent.put(None)
            for more in answers:
                self.ledger.note("stream", "", Outcome.WRONG, 0.0, f"an answer too many: {more[:100]!r}")
        except (grpc.RpcError, StopIteration) as error:
            for case in waiting.values():
                self.ledger.note("stream", case.model, Outcome.LOST, 0.0, repr(error)[:300])
        finally:
            sent.put(None)
            answers.cancel()


class Onlooker(Client):
    """Monitoring client: metrics, load of a model, readiness, statistics, all over HTTP."""

    _PATHS = (
        "/metrics",
        "/v2/health/ready",
        "/v2/health/live",
        "/v2/models/steady",
        "/v2/models/steady/stats",
        "/v2/models/steady/load",
    )

    def turn(self) -> None:
        """One page."""
        path = self.random.choice(self._PATHS)
        connection = connect(self.server)
        try:
            key = METRICS_KEY if path == "/metrics" else self.KEY
            connection.request("GET", path, headers=self.server.headers(key))
            response = connection.getresponse()
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.ledger.note("onlooker", "", Outcome.LOST, 0.0, f"{path}: {error!r}")
            return
        finally:
            connection.close()
        # While an isolated model has no process, the server answers that it is not ready.
        right = response.status == 200 or (path.endswith("ready") and response.status == 503)
        outcome = Outcome.RIGHT if right else Outcome.FAILED
        self.ledger.note("onlooker", "", outcome, 0.0, f"{path}: {response.status} {body[:200]!r}")


def connect(server: Running) -> http.client.HTTPConnection:
    """A connection that opens with its first request."""
    return http.client.HTTPConnection(HOST, server.port, timeout=TIMEOUT_S)


def post(
    connection: http.client.HTTPConnection, request: HttpRequest, headers: Mapping[str, str]
) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return status, headers and body of the answer.

    Args:
        connection: to the server.
        request: path, body and the headers that belong to it.
        headers: further ones, e.g. of the API key.

    Raises:
        OSError, http.client.HTTPException: there is no answer.
    """
    connection.request("POST", request.path, request.body, {**request.headers, **headers})
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()


def read_http(case: Case, status: int, headers: dict[str, str], body: bytes) -> tuple[Outcome, str]:
    """Classify an answer over HTTP."""
    if status != 200:
        return read_error(case, body.decode(errors="replace")), f"status {status}: {body[:300]!r}"
    try:
        wrong = case.wrong_with(decode_answer(headers, body))
    except (ValueError, KeyError) as error:
        wrong = f"not an answer of the protocol: {error!r}"
    return (Outcome.WRONG, wrong) if wrong else (Outcome.RIGHT, "")


def read_grpc(case: Case, message: bytes) -> tuple[Outcome, str]:
    """Classify an answer over gRPC."""
    try:
        wrong = case.wrong_with(decode_message(message))
    except (ValueError, KeyError) as error:
        wrong = f"not an answer of the protocol: {error!r}"
    return (Outcome.WRONG, wrong) if wrong else (Outcome.RIGHT, "")


def read_failure(case: Case, error: grpc.RpcError) -> tuple[Outcome, float, str]:
    """Classify a failed call."""
    code, text = error.code(), f"{error.code().name}: {error.details()}"
    # grpcio's client also reports UNAVAILABLE where a connection breaks, but the server's own messages name the model.
    unanswered = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    if code in unanswered and case.model not in text:
        return Outcome.LOST, 0.0, text
    return read_error(case, text), 0.0, text


def read_error(case: Case, text: str) -> Outcome:
    """Classify an error message of the server."""
    if case.model == GUEST and any(word in text for word in _UNLOADED):
        return Outcome.REFUSED
    return Outcome.STRUCK if case.model == APART and _KILLED in text else Outcome.FAILED


def named_message(case: Case, name: str) -> bytes:
    """A request with an id."""
    request = service_pb2.ModelInferRequest.FromString(infer_message(case.model, case.inputs))
    request.id = name
    return bytes(request.SerializeToString())


def _read_streamed(
    case: Case, answer: service_pb2.ModelStreamInferResponse, took_s: float
) -> tuple[Outcome, float, str]:
    if answer.error_message:
        return read_error(case, answer.error_message), took_s, answer.error_message
    outcome, detail = read_grpc(case, answer.infer_response.SerializeToString())
    return outcome, took_s, detail
