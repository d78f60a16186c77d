"""Receivers of OpenTelemetry's protocol, over gRPC and HTTP: they keep every span that comes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.waiting import until

pb: Any = trace_service_pb2
_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


@dataclass
class Receiver:
    """Received spans and their origin.

    Attributes:
        endpoint: URL for `--otlp-endpoint`.
        spans: spans in the order of arrival.
        resources: resource attributes, by message.
        paths: HTTP paths, by message.
    """

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def take(self, message: bytes) -> bytes:
        """An ExportTraceServiceRequest came; the answer to it."""
        for of_resource in pb.ExportTraceServiceRequest.FromString(message).resource_spans:
            self.resources.append(attributes(of_resource.resource))
            for of_scope in of_resource.scope_spans:
                self.spans.extend(of_scope.spans)
        return bytes(pb.ExportTraceServiceResponse().SerializeToString())

    def named(self, prefix: str) -> list[Span]:
        """The spans whose name begins so."""
        return [span for span in self.spans if span.name.startswith(prefix)]

    def wait(self, prefix: str, count: int = 1) -> list[Span]:
        """The spans whose name begins so, once there are `count`."""
        until(lambda: len(self.named(prefix)) >= count)
        result = self.named(prefix)
        assert len(result) == count, [span.name for span in result]
        return result

    def children(self, parent: Span) -> list[Span]:
        """Those of a span, by their begin."""
        result = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(result, key=lambda span: span.start_time_unix_nano)


def attributes(of: Any) -> dict[str, Any]:
    """As plain values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@contextmanager
def receiving(protocol: str) -> Iterator[Receiver]:
    """A receiver on a free port, over "grpc" or "http"."""
    receiver = Receiver()
    with over_grpc(receiver) if protocol == "grpc" else over_http(receiver) as port:
        receiver.endpoint = f"http://127.0.0.1:{port}"
        yield receiver


@contextmanager
def over_grpc(receiver: Receiver, port: int = 0) -> Iterator[int]:
    """Serve the collector's method."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.unary_unary_rpc_method_handler(lambda message, _: receiver.take(message))
    service, method = _METHOD[1:].split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    chosen = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield chosen
    finally:
        server.stop(None).wait(60)


@contextmanager
def over_http(receiver: Receiver) -> Iterator[int]:
    """Serve the collector's path."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.paths.append(self.path)
            answer = receiver.take(body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
