"""Server reflection (grpc.reflection.v1 and v1alpha): descriptors of the services of this server, from a descriptor pool.

grpcio-reflection has the messages and a servicer. The servicer imports grpcio, which the server does not need, so only its
messages are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

# The classes of this module are created at import, where no type checker sees them.
pb: Any = reflection_pb2

V1ALPHA = "grpc.reflection.v1alpha"
V1 = "grpc.reflection.v1"
# google.rpc.Code, which ErrorResponse carries as a number.
NOT_FOUND, _INVALID_ARGUMENT = 5, 3


class DescriptorIndex:
    """Answers requests of server reflection from one descriptor pool.

    Args:
        services: full names of all services of the server.
        pool: has their files.
    """

    def __init__(self, services: Iterable[str], pool: Any) -> None:
        self._services = sorted(services)
        self._pool = pool

    def respond(self, request: Any) -> Any:
        """Return the ServerReflectionResponse of a ServerReflectionRequest, without the request's host and the request itself.

        An error has a code and no text: NOT_FOUND, or INVALID_ARGUMENT for a request without content.
        """
        kind = request.WhichOneof("message_request")
        response = pb.ServerReflectionResponse()
        try:
            if kind == "list_services":
                response.list_services_response.service.extend(pb.ServiceResponse(name=name) for name in self._services)
            elif kind == "all_extension_numbers_of_type":
                message = self._pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                numbers = sorted(extension.number for extension in self._pool.FindAllExtensions(message))
                response.all_extension_numbers_response.base_type_name = message.full_name
                response.all_extension_numbers_response.extension_number.extend(numbers)
            elif kind is None:
                response.error_response.error_code = _INVALID_ARGUMENT
            else:
                files = with_dependencies(self._file(kind, request))
                response.file_descriptor_response.file_descriptor_proto.extend(files)
        except KeyError:
            response.error_response.error_code = NOT_FOUND
        return response

    def _file(self, kind: str, request: Any) -> Any:
        """Return the descriptor of the file with what is requested; raises KeyError if there is none."""
        if kind == "file_by_filename":
            return self._pool.FindFileByName(request.file_by_filename)
        if kind == "file_containing_symbol":
            return self._pool.FindFileContainingSymbol(request.file_containing_symbol)
        extension = request.file_containing_extension
        message = self._pool.FindMessageTypeByName(extension.containing_type)
        return self._pool.FindExtensionByNumber(message, extension.extension_number).file


def with_dependencies(file: Any) -> list[bytes]:
    """Serialize a file's descriptor, and after it those of all files that it imports, each once."""
    files = {file.name: file}
    waiting = [file]
    while waiting:
        for dependency in waiting.pop().dependencies:
            if dependency.name not in files:
                files[dependency.name] = dependency
                waiting.append(dependency)
    return [each.serialized_pb for each in files.values()]


def file_of_v1() -> Any:
    """Make the FileDescriptorProto of v1 from that of v1alpha, the only one that the package has."""
    proto = descriptor_pb2.FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)
    proto.name = proto.name.replace("v1alpha", "v1")
    proto.package = V1
    for message in proto.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(V1ALPHA, V1)
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(V1ALPHA, V1)
            method.output_type = method.output_type.replace(V1ALPHA, V1)
    return proto
