"""All services of the gRPC port, as methods on serialized messages for every engine."""

from __future__ import annotations

from tritonclient.grpc import service_pb2

from headrace.grpc.control import (
    HEALTH_SERVICE,
    REFLECTION_SERVICES,
    HealthService,
    ReflectionService,
    control_methods,
)
from headrace.grpc.infer import GrpcInference
from headrace.grpc.methods import Methods, StreamMethod, UnaryMethod
from headrace.grpc.stream import InferStreams
from headrace.inference.models import Services
from headrace.inference.request_options import RequestOptionsReader

SERVICE: str = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


def grpc_methods(
    services: Services, max_message_bytes: int, options_reader: RequestOptionsReader | None = None
) -> Methods:
    """Make all methods: inference, control, health, reflection.

    Args:
        services: of the server.
        max_message_bytes: largest request, which the engines enforce; also the bytes in flight on one stream.
        options_reader: parser of the request options in a call's metadata.
    """
    infer = GrpcInference(services, max_message_bytes)
    health = HealthService(services.models, SERVICE)
    names = (SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES)
    reflection = ReflectionService(names)
    unary: dict[str, UnaryMethod] = {f"/{SERVICE}/{name}": method for name, method in control_methods(services).items()}
    unary[f"/{SERVICE}/ModelInfer"] = infer.infer
    unary[f"/{HEALTH_SERVICE}/Check"] = health.check
    streams: dict[str, StreamMethod] = {
        f"/{name}/ServerReflectionInfo": reflection.info for name in REFLECTION_SERVICES
    }
    streams[f"/{SERVICE}/ModelStreamInfer"] = InferStreams(infer, max_message_bytes).serve
    streams[f"/{HEALTH_SERVICE}/Watch"] = health.watch
    return Methods(unary, streams, options_reader or RequestOptionsReader())
