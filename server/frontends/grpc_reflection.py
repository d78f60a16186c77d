"""Server reflection, so that grpcurl and its like need no .proto files; v1 and v1alpha are one protocol under two names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

from server.frontends.grpc_control import parse
from server.frontends.grpc_methods import StreamCall

pb: Any = reflection_pb2

_V1ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"
SERVICES = (f"{_V1}.ServerReflection", f"{_V1ALPHA}.ServerReflection")

_NOT_FOUND = 5  # google.rpc.Code, which ErrorResponse carries as a number
_INVALID_ARGUMENT = 3


class ReflectionService:
    """Answers ServerReflectionInfo.

    Args:
        services: full names of all services of the server.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = sorted(services)
        self._pool: Any = descriptor_pool.Default()
        # The package ships v1alpha alone. Its messages serve both, but who asks what v1 looks like must find it.
        self._v1_pool: Any = descriptor_pool.DescriptorPool()
        self._v1_pool.Add(_as_v1(pb.DESCRIPTOR))

    async def info(self, call: StreamCall) -> None:
        """The method: each ServerReflectionRequest is answered with one ServerReflectionResponse."""
        while (message := await call.read()) is not None:
            response = self._answer(parse(pb.ServerReflectionRequest, message))
            await call.write([response.SerializeToString()])

    def _answer(self, request: Any) -> Any:
        response = pb.ServerReflectionResponse(valid_host=request.host, original_request=request)
        question = request.WhichOneof("message_request")
        if question is None:
            return _error(response, _INVALID_ARGUMENT, "the request asks for nothing")
        if question == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
            return response
        for pool in (self._pool, self._v1_pool):
            try:
                _look_up(pool, question, request, response)
            except KeyError:
                continue
            return response
        return _error(response, _NOT_FOUND, f"{question.replace('_', ' ')}: nothing of that name")


def _look_up(pool: Any, question: str, request: Any, response: Any) -> None:
    """Fill the response to one of the questions about descriptors; raises KeyError if the pool knows nothing of it."""
    if question == "all_extension_numbers_of_type":
        kind = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
        numbers = sorted(extension.number for extension in pool.FindAllExtensions(kind))
        answer = response.all_extension_numbers_response
        answer.base_type_name = kind.full_name
        answer.extension_number.extend(numbers)
        return
    if question == "file_by_filename":
        file = pool.FindFileByName(request.file_by_filename)
    elif question == "file_containing_symbol":
        file = _file_of(pool, request.file_containing_symbol)
    else:
        wanted = request.file_containing_extension
        kind = pool.FindMessageTypeByName(wanted.containing_type)
        file = pool.FindExtensionByNumber(kind, wanted.extension_number).file
    files: dict[str, bytes] = {}
    _collect(file, files)
    response.file_descriptor_response.file_descriptor_proto.extend(files.values())


def _file_of(pool: Any, symbol: str) -> Any:
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:  # the pool knows no methods by their full names, the protocol does
        service, _, method = symbol.rpartition(".")
        return pool.FindServiceByName(service).methods_by_name[method].containing_service.file


def _collect(file: Any, files: dict[str, bytes]) -> None:
    """A file and all that it needs, serialized, by name; the file that was asked for comes first."""
    files[file.name] = file.serialized_pb
    for needed in file.dependencies:
        if needed.name not in files:
            _collect(needed, files)


def _error(response: Any, code: int, text: str) -> Any:
    response.error_response.error_code = code
    response.error_response.error_message = text
    return response


def _as_v1(file: Any) -> Any:
    """The FileDescriptorProto of v1: v1alpha's with another package."""
    proto = descriptor_pb2.FileDescriptorProto.FromString(file.serialized_pb)
    proto.name = proto.name.replace("v1alpha", "v1")
    proto.package = _V1
    for message in proto.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for service in proto.service:
        for method in service.method:
            method.input_type = method.input_type.replace(_V1ALPHA, _V1)
            method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    return proto
