"""Server reflection for grpcurl and similar clients; v1 and v1alpha are one protocol under two names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha.reflection import ReflectionServicer  # type: ignore[import-untyped]

from headrace.grpc.control import parse
from headrace.grpc.methods import StreamCall

pb: Any = reflection_pb2

_V1ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"
SERVICES = (f"{_V1}.ServerReflection", f"{_V1ALPHA}.ServerReflection")

_NOT_FOUND = 5  # google.rpc.Code, which ErrorResponse carries as a number


class ReflectionService:
    """Answers ServerReflectionInfo with the servicer of grpcio-reflection.

    Args:
        services: full names of all services of the server.
    """

    def __init__(self, services: Iterable[str]) -> None:
        # The package has v1alpha alone. Its messages serve both, but a client that looks up v1 must find it: in a second pool.
        v1: Any = descriptor_pool.DescriptorPool()
        v1.Add(_as_v1(pb.DESCRIPTOR))
        self._pools: tuple[Any, ...] = (descriptor_pool.Default(), v1)
        names = tuple(services)
        self._servicers = [ReflectionServicer(names, pool) for pool in self._pools]

    async def info(self, call: StreamCall) -> None:
        """The method: each ServerReflectionRequest is answered with one ServerReflectionResponse."""
        while (message := await call.read()) is not None:
            response = self._answer(parse(pb.ServerReflectionRequest, message))
            await call.write([response.SerializeToString()])

    def _answer(self, request: Any) -> Any:
        known = pb.ServerReflectionRequest()
        known.CopyFrom(request)
        if request.HasField("file_containing_symbol"):
            known.file_containing_symbol = self._container(request.file_containing_symbol)
        for servicer in self._servicers:
            (response,) = servicer.ServerReflectionInfo([known], None)
            if response.error_response.error_code != _NOT_FOUND:
                break
        response.valid_host = request.host
        response.original_request.CopyFrom(request)
        if response.HasField("error_response"):
            question = request.WhichOneof("message_request")
            text = f"{question.replace('_', ' ')}: nothing of that name" if question else "the request asks for nothing"
            response.error_response.error_message = text
        return response

    def _container(self, symbol: str) -> str:
        """The service of a method, whose full name a pool does not find; every other symbol as it is."""
        service, _, method = symbol.rpartition(".")
        for pool in self._pools:
            try:
                if method in pool.FindServiceByName(service).methods_by_name:
                    return service
            except KeyError:
                continue
        return symbol


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
