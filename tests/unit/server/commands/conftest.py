"""Real HTTP and gRPC servers that return scripted responses and keep the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]


@dataclass
class ScriptedServer:
    """Answers "METHOD /path" as set by `say` or `do`, everything else by 404."""

    url: str = ""
    received: list[Received] = field(default_factory=list)
    _answers: dict[str, Callable[[Received], Answer]] = field(default_factory=dict)

    def say(self, route: str, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.do(route, lambda _received: (status, headers or {}, body))

    def do(self, route: str, answer: Callable[[Received], Answer]) -> None:
        self._answers[route] = answer

    def answer(self, received: Received) -> Answer:
        self.received.append(received)
        answer = self._answers.get(f"{received.method} {received.path}")
        return (404, {}, b'{"error":"no such path"}') if answer is None else answer(received)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    script = ScriptedServer()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, extra, answer = script.answer(Received(self.command, self.path, headers, body))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(answer)), **extra}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = handle_any  # noqa: N815 - the names that http.server calls

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        script.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield script
        http.shutdown()
        thread.join()


class ScriptedGrpcServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A V2 server with the models that a test describes; other models are NOT_FOUND.

    Attributes:
        address: host:port.
        metadata, configs: by model, in protobuf's JSON.
        infer: by model, makes the response of a request; it may raise an `Abort`.
        successes: returns number of requests and their ns for the statistics; None: UNIMPLEMENTED.
        requests: of ModelInfer.
        versions: requested in any call.
        live_error: status and text of ServerLive, None for success.
    """

    def __init__(self) -> None:
        self.address = ""
        self.metadata: dict[str, dict[str, Any]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.infer: dict[str, Callable[[Any], Any]] = {}
        self.successes: Callable[[], tuple[int, int]] | None = None
        self.requests: list[Any] = []
        self.versions: list[str] = []
        self.live_error: Abort | None = None

    def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's names, here and below
        if self.live_error is not None:
            context.abort(*self.live_error.args)
        return service_pb2.ServerLiveResponse(live=True)

    def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return ParseDict(self._of(self.metadata, request, context), service_pb2.ModelMetadataResponse())

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return ParseDict({"config": self._of(self.configs, request, context)}, service_pb2.ModelConfigResponse())

    def ModelStatistics(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.successes is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no statistics")
        count, ns = self.successes()
        success = {"success": {"count": count, "ns": ns}}
        response = {"model_stats": [{"name": request.name, "inference_stats": success}]}
        return ParseDict(response, service_pb2.ModelStatisticsResponse())

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        try:
            return self._of(self.infer, request, context)(request)
        except Abort as abort:
            context.abort(*abort.args)

    def _of(self, table: dict[str, Any], request: Any, context: Any) -> Any:
        name = request.model_name if isinstance(request, service_pb2.ModelInferRequest) else request.name
        self.versions.append(request.model_version if hasattr(request, "model_version") else request.version)
        if name not in table:
            context.abort(grpc.StatusCode.NOT_FOUND, f"model '{name}' is not found")
        return table[name]


class Abort(Exception):
    """A status code and its text."""


def respond(*outputs: tuple[str, str, list[int], bytes]) -> Any:
    """A ModelInferResponse of outputs (name, datatype, shape, raw bytes)."""
    response = service_pb2.ModelInferResponse(model_name="net", model_version="1")
    for name, datatype, shape, data in outputs:
        response.outputs.add(name=name, datatype=datatype, shape=shape)
        response.raw_output_contents.append(data)
    return response


@pytest.fixture
def grpc_server() -> Iterator[ScriptedGrpcServer]:
    script = ScriptedGrpcServer()
    with ThreadPoolExecutor(4) as pool:
        served = grpc.server(pool)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(script, served)
        script.address = f"127.0.0.1:{served.add_insecure_port('127.0.0.1:0')}"
        served.start()
        yield script
        served.stop(None).wait()
