"""Everything of GRPCInferenceService but inference: messages in and out around `ControlPlane` and the services."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf
from tritonclient.grpc import service_pb2

from server.core.errors import BadRequest, NotFound, Unavailable, Unsupported
from server.frontends.control_plane import ControlPlane
from server.frontends.grpc_methods import Call, Message, Unary
from server.frontends.models import Services

pb: Any = service_pb2  # its classes are made at import, where no type checker sees them

P = TypeVar("P", bound=Protobuf)
Answer = Callable[[Any], Awaitable[Any]]


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


def unary(kind: type[Protobuf], answer: Answer) -> Unary:
    """A method on bytes of one on messages."""

    async def method(message: bytes, call: Call) -> Message:
        response: Protobuf = await answer(parse(kind, message))
        return [response.SerializeToString()]

    return method


class ControlMethods:
    """The control RPCs, on messages.

    Args:
        services: of the server.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._plane = ControlPlane(services)

    def methods(self) -> dict[str, Unary]:
        """By the names of the RPCs."""
        answers: dict[str, Answer] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
            "SystemSharedMemoryStatus": self._system_status,
            "SystemSharedMemoryRegister": self._system_register,
            "SystemSharedMemoryUnregister": self._system_unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
            "TraceSetting": self._trace_setting,
            "LogSettings": self._log_settings,
        }
        return {name: unary(getattr(pb, f"{name}Request"), answer) for name, answer in answers.items()}

    def is_model_ready(self, model: str, version: str) -> bool:
        """True if requests for the model can be served; a model that is not there is not ready, as in Triton."""
        try:
            self._plane.require_model_ready(model, version)
        except (NotFound, Unavailable):
            return False
        return True

    # Health and metadata

    async def _server_live(self, request: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, request: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._plane.ready())

    async def _model_ready(self, request: Any) -> Any:
        return pb.ModelReadyResponse(ready=self.is_model_ready(request.name, request.version))

    async def _server_metadata(self, request: Any) -> Any:
        return _from_json(self._plane.server_metadata(), pb.ServerMetadataResponse())

    async def _model_metadata(self, request: Any) -> Any:
        metadata = self._plane.model_metadata(request.name, request.version)
        # Triton's message has no field for them; what matters of them is in the repository index too.
        metadata.pop("parameters", None)
        return _from_json(metadata, pb.ModelMetadataResponse())

    async def _model_config(self, request: Any) -> Any:
        return _from_json({"config": self._plane.config(request.name, request.version)}, pb.ModelConfigResponse())

    async def _model_statistics(self, request: Any) -> Any:
        found: Any = self._plane.statistics(request.name, request.version)["model_stats"]
        # Triton's message has no field for where a version runs.
        models = [{key: value for key, value in one.items() if key != "headrace"} for one in found]
        return _from_json({"model_stats": models}, pb.ModelStatisticsResponse())

    # The repository

    async def _repository_index(self, request: Any) -> Any:
        _only_repository(request)
        return _from_json({"models": list(self._plane.index(request.ready))}, pb.RepositoryIndexResponse())

    async def _load(self, request: Any) -> Any:
        _only_repository(request)
        await self._plane.load(request.model_name, _parameters(request))
        return pb.RepositoryModelLoadResponse()

    async def _unload(self, request: Any) -> Any:
        _only_repository(request)
        await self._plane.unload(request.model_name, _parameters(request))
        return pb.RepositoryModelUnloadResponse()

    # Shared memory

    async def _system_status(self, request: Any) -> Any:
        return _regions(self._services.regions.status("system", request.name), pb.SystemSharedMemoryStatusResponse())

    async def _system_register(self, request: Any) -> Any:
        _named(request)
        self._services.regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _system_unregister(self, request: Any) -> Any:
        self._services.regions.unregister("system", request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _cuda_status(self, request: Any) -> Any:
        return _regions(self._services.regions.status("cuda", request.name), pb.CudaSharedMemoryStatusResponse())

    async def _cuda_register(self, request: Any) -> Any:
        _named(request)
        self._services.regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    async def _cuda_unregister(self, request: Any) -> Any:
        self._services.regions.unregister("cuda", request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    # Traces and logs

    async def _trace_setting(self, request: Any) -> Any:
        changes = {name: _trace_value(name, list(setting.value)) for name, setting in request.settings.items()}
        settings = self._plane.trace_settings(request.model_name, changes or None)
        response = pb.TraceSettingResponse()
        for name, value in settings.items():
            response.settings[name].value.extend(value if isinstance(value, list | tuple) else [str(value)])
        return response

    async def _log_settings(self, request: Any) -> Any:
        logs = self._services.logs
        changes = {name: _chosen(name, setting, "parameter_choice") for name, setting in request.settings.items()}
        settings = logs.update(changes) if changes else logs.settings()
        response = pb.LogSettingsResponse()
        for name, value in settings.items():
            setting = response.settings[name]
            if isinstance(value, bool):
                setting.bool_param = value
            elif isinstance(value, int):
                setting.uint32_param = value
            else:
                setting.string_param = value
        return response


def _from_json(values: Mapping[str, object], response: P) -> P:
    """Fill a message from Triton's JSON, which names its fields as the message does."""
    json_format.ParseDict(dict(values), response)
    return response


def _only_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' is not supported: all repositories share one set of model names")


def _named(request: Any) -> None:
    if not request.name:
        raise BadRequest("a region needs a name")


def _parameters(request: Any) -> dict[str, object]:
    return {name: _chosen(name, value, "parameter_choice") for name, value in request.parameters.items()}


def _chosen(name: str, value: Any, choice: str) -> Any:
    field = value.WhichOneof(choice)
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


def _regions(rows: Any, response: P) -> P:
    for row in rows:
        json_format.ParseDict(dict(row), response.regions[row["name"]])  # type: ignore[attr-defined]
    return response
