"""Server reflection gives what the servicer of grpcio-reflection gives."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import ReflectionServicer
from headrace.config.triton_messages import service_pb2
from headrace.wire.grpc.reflection import DescriptorIndex

SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
Request: Any = reflection_pb2.ServerReflectionRequest


def extended_pool() -> Any:
    """A pool with a message that has two extensions, in a file that imports the message's."""
    pool: Any = descriptor_pool.DescriptorPool()
    base = descriptor_pb2.FileDescriptorProto(name="base.proto", package="x", syntax="proto2")
    base.message_type.add(name="Base").extension_range.add(start=100, end=200)
    pool.Add(base)
    further = descriptor_pb2.FileDescriptorProto(name="further.proto", package="x", syntax="proto2")
    further.dependency.append("base.proto")
    for name, number in (("second", 120), ("first", 110)):
        further.extension.add(name=name, number=number, extendee=".x.Base", type=5, label=1)
    pool.Add(further)
    return pool


def extension(number: int, message: str = "x.Base") -> Any:
    return reflection_pb2.ExtensionRequest(containing_type=message, extension_number=number)


@pytest.mark.parametrize(
    "content",
    [
        {"list_services": ""},
        {"file_by_filename": "grpc_service.proto"},
        {"file_by_filename": "base.proto"},
        {"file_by_filename": "further.proto"},
        {"file_by_filename": ""},
        {"file_containing_symbol": "inference.ModelInferRequest"},
        {"file_containing_symbol": "inference.GRPCInferenceService"},
        {"file_containing_symbol": "x.Base"},
        {"file_containing_symbol": "x.first"},
        {"file_containing_symbol": "nothing"},
        {"file_containing_extension": extension(110)},
        {"file_containing_extension": extension(111)},
        {"file_containing_extension": extension(110, "x.Other")},
        {"all_extension_numbers_of_type": "x.Base"},
        {"all_extension_numbers_of_type": "x.Other"},
        {"all_extension_numbers_of_type": "inference.ModelInferRequest"},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("pool", [descriptor_pool.Default(), extended_pool()], ids=["default", "extended"])
def test_responses_equal_those_of_grpcio_reflection(pool: Any, content: dict[str, Any]) -> None:
    assert service_pb2.DESCRIPTOR.name == "grpc_service.proto"
    request = Request(host="me", **content)
    (expected,) = ReflectionServicer(SERVICES, pool).ServerReflectionInfo([request], None)
    expected.ClearField("original_request")
    if expected.HasField("error_response"):
        expected.error_response.error_message = ""  # the service writes its own
    actual = DescriptorIndex(SERVICES, pool).respond(request)
    assert files_of(actual) == files_of(expected)
    assert actual == expected


def files_of(response: Any) -> list[Any]:
    files = response.file_descriptor_response.file_descriptor_proto
    return [descriptor_pb2.FileDescriptorProto.FromString(file) for file in files]
