"""The protobuf message of load reports, for tests that read what servers send."""

from __future__ import annotations

import socket
import struct
from base64 import b64decode
from collections.abc import Sequence
from functools import cache
from typing import Any

import h2.config
import h2.connection
import h2.events
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.support.serving import HOST, Server


@cache
def orca_message() -> Any:
    """The class of xds.data.orca.v3.OrcaLoadReport: fields and numbers of its proto file."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="orca", syntax="proto3")
    report = file.message_type.add(name="OrcaLoadReport")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, number in (
        ("cpu_utilization", 1),
        ("mem_utilization", 2),
        ("rps_fractional", 6),
        ("eps", 7),
        ("application_utilization", 9),
    ):
        report.field.add(name=name, number=number, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL)
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL)
    report.field.add(
        name="named_metrics",
        number=8,
        type=kinds.TYPE_MESSAGE,
        type_name=".orca.OrcaLoadReport.NamedMetricsEntry",
        label=kinds.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("orca.OrcaLoadReport"))


TRAILER = "endpoint-load-metrics-bin"


def call_trailers(
    server: Server, path: str, contents: Sequence[bytes], metadata: Sequence[tuple[str, str]] = ()
) -> dict[str, str]:
    """Trailers of a gRPC call by name, over a plain HTTP/2 connection: grpcio does not pass on load reports to its callers.

    Args:
        server: the server.
        path: of the method.
        contents: messages of the call, sent at once.
        metadata: of the call.
    """
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    connection.send_headers(1, [*head, ("te", "trailers"), ("content-type", "application/grpc"), *metadata])
    body = b"".join(struct.pack(">BI", 0, len(content)) + content for content in contents)
    connection.send_data(1, body, end_stream=True)
    fields: list[tuple[str, str]] = []
    with socket.create_connection((HOST, server.grpc_port), timeout=60) as sock:
        while True:
            sock.sendall(connection.data_to_send())
            received = sock.recv(1 << 16)
            assert received, "the server has closed the connection"
            for event in connection.receive_data(received):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    fields = event.headers
                elif isinstance(event, h2.events.DataReceived):
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                elif isinstance(event, h2.events.StreamEnded):
                    assert len({name for name, _ in fields}) == len(fields), fields
                    return dict(fields)


def call_report(*args: Any, **options: Any) -> tuple[str, Any]:
    """Status of a call and the report in its trailers, None without one; arguments as in `call_trailers`."""
    fields = call_trailers(*args, **options)
    text = fields.get(TRAILER)
    if text is None:
        return fields["grpc-status"], None
    return fields["grpc-status"], orca_message().FromString(b64decode(text + "=" * (-len(text) % 4), validate=True))
