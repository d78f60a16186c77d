"""Everything of GRPCInferenceService but inference: messages in and out around `ControlPlane` and the services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf
from tritonclient.grpc import service_pb2

from headrace.core.errors import BadRequest, NotFound, Unavailable, Unsupported
from headrace.grpc.methods import Call, Message, Unary
from headrace.inference.control_plane import ControlPlane
from headrace.inference.models import Regions, Services

pb: Any = service_pb2  # its classes are made at import, where no type checker sees them

P = TypeVar("P", bound=Protobuf)
# Answers a request message with Triton's JSON, which names its fields as the response message does.
Answer = Callable[[Any], Mapping[str, object] | Awaitable[Mapping[str, object]]]


def parse(kind: type[P], message: bytes) -> P:
    """A message of a kind.

    Raises:
        BadRequest: it is none.
    """
    parsed = kind()
    try:
        parsed.ParseFromString(message)
    except DecodeError as error:
        raise BadRequest(f"the message is no {kind.DESCRIPTOR.full_name}: its protobuf encoding is broken") from error
    return parsed


def _unary(name: str, answer: Answer) -> Unary:
    """The method on serialized messages of an RPC whose answer is Triton's JSON."""
    request_type, response_type = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")

    async def method(message: bytes, call: Call) -> Message:
        values = answer(parse(request_type, message))
        if isinstance(values, Awaitable):
            values = await values
        response: Protobuf = json_format.ParseDict(dict(values), response_type())
        return [response.SerializeToString()]

    return method


def control_methods(services: Services) -> dict[str, Unary]:
    """The RPCs of GRPCInferenceService except inference, by name.

    Args:
        services: of the server.
    """
    plane, regions = ControlPlane(services), services.regions

    def trace_settings(request: Any) -> Mapping[str, object]:
        changes = {name: _trace_value(name, list(setting.value)) for name, setting in request.settings.items()}
        settings = plane.trace_settings(request.model_name, changes or None)
        return {"settings": {name: {"value": _texts(value)} for name, value in settings.items()}}

    def log_settings(request: Any) -> Mapping[str, object]:
        changes = {name: _chosen(name, setting) for name, setting in request.settings.items()}
        settings = services.logs.update(changes) if changes else services.logs.settings()
        return {"settings": {name: {_log_field(value): value} for name, value in settings.items()}}

    answers: dict[str, Answer] = {
        "ServerLive": lambda request: plane.live(),
        "ServerReady": lambda request: {"ready": services.models.ready()},
        "ModelReady": lambda request: {"ready": _is_ready(plane, request.name, request.version)},
        "ServerMetadata": lambda request: plane.server_metadata(),
        # Triton's messages have no field for the engine's precision, nor for where a version runs.
        "ModelMetadata": lambda request: _without("parameters", plane.model_metadata(request.name, request.version)),
        "ModelConfig": lambda request: {"config": plane.config(request.name, request.version)},
        "ModelStatistics": lambda request: {
            "model_stats": [
                _without("headrace", each) for each in services.models.statistics(request.name, request.version)
            ]
        },
        "TraceSetting": trace_settings,
        "LogSettings": log_settings,
    }
    answers |= _repository(plane) | _shared_memory("System", regions) | _shared_memory("Cuda", regions)
    return {name: _unary(name, answer) for name, answer in answers.items()}


def _repository(plane: ControlPlane) -> dict[str, Answer]:
    def index(request: Any) -> Mapping[str, object]:
        _only_repository(request)
        return {"models": list(plane.index(request.ready))}

    async def load(request: Any) -> Mapping[str, object]:
        _only_repository(request)
        await plane.load(request.model_name, _parameters(request))
        return {}

    async def unload(request: Any) -> Mapping[str, object]:
        _only_repository(request)
        await plane.unload(request.model_name, _parameters(request))
        return {}

    return {"RepositoryIndex": index, "RepositoryModelLoad": load, "RepositoryModelUnload": unload}


def _shared_memory(kind: str, regions: Regions) -> dict[str, Answer]:
    def status(request: Any) -> Mapping[str, object]:
        return {"regions": {str(row["name"]): dict(row) for row in regions.status(kind.lower(), request.name)}}

    def register(request: Any) -> Mapping[str, object]:
        if not request.name:
            raise BadRequest("a region needs a name")
        if kind == "System":
            regions.register_system(request.name, request.key, request.offset, request.byte_size)
        else:
            regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return {}

    def unregister(request: Any) -> Mapping[str, object]:
        regions.unregister(kind.lower(), request.name)
        return {}

    name = f"{kind}SharedMemory"
    return {f"{name}Status": status, f"{name}Register": register, f"{name}Unregister": unregister}


def _is_ready(plane: ControlPlane, model: str, version: str) -> bool:
    """True if the model can serve requests; a model that does not exist is not ready, as in Triton."""
    try:
        plane.require_model_ready(model, version)
    except (NotFound, Unavailable):
        return False
    return True


def _without(key: str, values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name != key}


def _only_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' is not supported: all repositories share one set of model names")


def _parameters(request: Any) -> dict[str, object]:
    return {name: _chosen(name, value) for name, value in request.parameters.items()}


def _chosen(name: str, value: Any) -> Any:
    field = value.WhichOneof("parameter_choice")
    if field is None:
        raise BadRequest(f"{name[:64]!r} has no value")
    return getattr(value, field)


def _trace_value(name: str, values: list[str]) -> object:
    """Triton's rule: no value resets a setting, `trace_level` takes a list, every other one value."""
    if not values:
        return None
    if name == "trace_level":
        return values
    if len(values) > 1:
        raise BadRequest(f"trace setting {name[:64]!r} takes one value, not {len(values)}")
    return values[0]


def _texts(value: object) -> list[str]:
    return list(value) if isinstance(value, list | tuple) else [str(value)]


def _log_field(value: object) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"
