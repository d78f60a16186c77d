"""Methods of the gRPC port on serialized messages: control, health, reflection, and the table of all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf import descriptor_pool, json_format
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from headrace.config.triton_messages import service_pb2
from headrace.core.access import AccessControl, Principal
from headrace.core.clock import pause
from headrace.core.errors import BadRequest, NotFound, Unavailable, Unsupported
from headrace.wire.grpc.codec import parameter_value
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.infer_streams import InferStreams
from headrace.wire.grpc.load_service import LOAD_METHOD, LOAD_SERVICE, LoadService
from headrace.wire.grpc.methods import GrpcCall, Message, Methods, StreamCall, StreamMethod, UnaryMethod
from headrace.wire.grpc.reflection import NOT_FOUND, V1, V1ALPHA, DescriptorIndex, file_of_v1
from headrace.wire.grpc.reflection import pb as reflection_pb
from headrace.wire.requests.control_plane import ControlPlane
from headrace.wire.requests.operations import OperationCall, grpc_operation
from headrace.wire.requests.services import ControlServices, Regions
from headrace.wire.requests.shared_runs import SharedRuns

# The classes of these modules are created at import, where no type checker sees them.
pb: Any = service_pb2
health_pb: Any = health_pb2

SERVICE: str = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_SERVICE: str = health_pb.DESCRIPTOR.services_by_name["Health"].full_name
# Polling interval of Watch: readiness has no event to wait for.
WATCH_INTERVAL_S = 1.0

REFLECTION_SERVICES = (f"{V1}.ServerReflection", f"{V1ALPHA}.ServerReflection")

P = TypeVar("P", bound=Protobuf)
# Triton's JSON, whose keys are the fields of the response message, or the serialized message.
Response = Mapping[str, object] | bytes
# Handles a request message of a principal.
Handler = Callable[[Any, Principal], Response | Awaitable[Response]]
# Field of the request with the model that the key of the caller must allow, by method.
_MODEL_FIELDS = {
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"), "name"),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting"), "model_name"),
}
# Requests of control methods are parsed and logged on the event loop. Only those that load models have files.
_MAX_SMALL_BYTES = 1 << 20
# Requests of health and reflection: a name.
_MAX_LOOKUP_BYTES = 16 << 10
_MAX_NAME_CHARS = 128
# Methods that read settings, and change them if the request has any.
_SETTINGS = ("TraceSetting", "LogSettings")


def parse(kind: type[P], message: bytes) -> P:
    """Parse a serialized message.

    Args:
        kind: class of the message.
        message: serialized protobuf.

    Raises:
        BadRequest: the bytes are not a message of that class.
    """
    try:
        return kind.FromString(message)
    except DecodeError as error:
        raise BadRequest(
            f"the message is not a valid {kind.DESCRIPTOR.full_name}: its protobuf encoding is broken"
        ) from error


def _parse_lookup(kind: type[P], message: bytes) -> P:
    """Parse a message that has a name only; raises BadRequest if it is long or invalid."""
    if len(message) > _MAX_LOOKUP_BYTES:
        text = f"a {kind.DESCRIPTOR.name} has at most {_MAX_LOOKUP_BYTES} bytes, not {len(message)}: shorten its name"
        raise BadRequest(text)
    return parse(kind, message)


def _unary(name: str, handler: Handler, access: AccessControl) -> UnaryMethod:
    """Make the method on serialized messages of a handler; raises LookupError if it has no scope."""
    request_type, response_type = getattr(pb, f"{name}Request"), getattr(pb, f"{name}Response")
    operation = grpc_operation(f"/{SERVICE}/{name}")
    change = grpc_operation(f"/{SERVICE}/{name}+settings") if name in _SETTINGS else operation
    model_field = _MODEL_FIELDS.get(name, "")
    target_field = "name" if "SharedMemory" in name else ""
    is_small = name != "RepositoryModelLoad"

    def check_size(message: bytes) -> None:
        if is_small and len(message) > _MAX_SMALL_BYTES:
            text = f"a {name}Request has at most {_MAX_SMALL_BYTES} bytes, not {len(message)}: shorten its texts"
            raise BadRequest(text)

    async def run(message: bytes, call: GrpcCall) -> Response:
        principal, request = call_principal(call, access), None
        if change is not operation:  # the message decides
            if operation.scope is not None:
                principal.authenticate()
            check_size(message)
            request = parse(request_type, message)
        called = change if request is not None and request.settings else operation
        with OperationCall(called, principal, "grpc", call.peer if called.audited else "") as permit:
            permit.require()
            if request is None:
                check_size(message)
                request = parse(request_type, message)
            if target_field:
                permit.target = getattr(request, target_field)
            if model_field:
                model = getattr(request, model_field)
                if len(model) > _MAX_NAME_CHARS:
                    permit.target = model[:_MAX_NAME_CHARS]
                    raise BadRequest(f"the name of a model has at most {_MAX_NAME_CHARS} characters: {model[:40]!r}...")
                permit.check_model(model)
            values = handler(request, principal)
            return await values if isinstance(values, Awaitable) else values

    async def method(message: bytes, call: GrpcCall) -> Message:
        values = await run(message, call)
        if isinstance(values, bytes):
            return [values]
        response: Protobuf = json_format.ParseDict(dict(values), response_type())
        return [response.SerializeToString()]

    return method


def control_methods(services: ControlServices) -> dict[str, UnaryMethod]:
    """The methods of GRPCInferenceService except inference, by name.

    Args:
        services: of the server.
    """
    plane, regions = ControlPlane(services), services.regions

    def trace_settings(request: Any, principal: Principal) -> Mapping[str, object]:
        changes = {name: _trace_value(name, list(setting.value)) for name, setting in request.settings.items()}
        settings = plane.trace_settings(request.model_name, changes or None)
        return {"settings": {name: {"value": _string_list(value)} for name, value in settings.items()}}

    def log_settings(request: Any, principal: Principal) -> Mapping[str, object]:
        changes = {name: parameter_value(name, setting) for name, setting in request.settings.items()}
        settings = services.logs.update(changes) if changes else services.logs.settings()
        return {"settings": {name: {_log_field(value): value} for name, value in settings.items()}}

    all_statistics = SharedRuns(lambda _: _rows(pb.ModelStatisticsResponse, "model_stats", model_statistics("", "")))

    def model_statistics(name: str, version: str) -> list[Mapping[str, object]]:
        return [_without("headrace", each) for each in services.models.statistics(name, version)]

    async def statistics(request: Any, principal: Principal) -> Response:
        if not request.name:
            return _merge(principal.filter_models(await all_statistics.result()))
        return {"model_stats": principal.filter_models(model_statistics(request.name, request.version))}

    async def model_ready(request: Any, principal: Principal) -> Response:
        return {"ready": await _is_ready(plane, request.name, request.version)}

    handlers: dict[str, Handler] = {
        "ServerLive": lambda request, principal: plane.live(),
        "ServerReady": lambda request, principal: {"ready": services.models.ready()},
        "ModelReady": model_ready,
        "ServerMetadata": lambda request, principal: plane.server_metadata(),
        # Triton's messages have no field for the precision of an engine and the device of a version.
        "ModelMetadata": lambda request, principal: _without(
            "parameters", plane.model_metadata(request.name, request.version)
        ),
        "ModelConfig": lambda request, principal: {"config": services.models.config(request.name, request.version)},
        "ModelStatistics": statistics,
        "TraceSetting": trace_settings,
        "LogSettings": log_settings,
    }
    handlers |= _repository(plane) | _shared_memory("System", regions) | _shared_memory("Cuda", regions)
    return {name: _unary(name, handler, services.access) for name, handler in handlers.items()}


def _repository(plane: ControlPlane) -> dict[str, Handler]:
    models = plane.services.models
    all_models = SharedRuns(lambda _: _rows(pb.RepositoryIndexResponse, "models", models.index()))

    async def index(request: Any, principal: Principal) -> Response:
        _only_repository(request)
        rows = principal.filter_models(await all_models.result())
        return _merge([row for row in rows if row["state"] == "READY"] if request.ready else rows)

    async def load(request: Any, principal: Principal) -> Mapping[str, object]:
        _only_repository(request)
        await plane.load(request.model_name, _parameters(request))
        return {}

    async def unload(request: Any, principal: Principal) -> Mapping[str, object]:
        _only_repository(request)
        await plane.unload(request.model_name, _parameters(request))
        return {}

    return {"RepositoryIndex": index, "RepositoryModelLoad": load, "RepositoryModelUnload": unload}


def _shared_memory(kind: str, regions: Regions) -> dict[str, Handler]:
    def status(request: Any, principal: Principal) -> Mapping[str, object]:
        return {"regions": {str(row["name"]): dict(row) for row in regions.status(kind.lower(), request.name)}}

    def register(request: Any, principal: Principal) -> Mapping[str, object]:
        if not request.name:
            raise BadRequest("'name' is empty: a shared memory region needs one")
        if kind == "System":
            regions.register_system(request.name, request.key, request.offset, request.byte_size)
        else:
            regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return {}

    def unregister(request: Any, principal: Principal) -> Mapping[str, object]:
        regions.unregister(kind.lower(), request.name)
        return {}

    name = f"{kind}SharedMemory"
    return {f"{name}Status": status, f"{name}Register": register, f"{name}Unregister": unregister}


def _rows(kind: type[Protobuf], field: str, rows: Iterable[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Serialize a list row by row: callers with keys get parts of it.

    Args:
        kind: class of the response message.
        field: its repeated field.
        rows: values of the field.

    Returns:
        Name and state of each row, and as `message` the response with this row only.
    """
    serialized: list[Mapping[str, object]] = []
    for row in rows:
        message: Protobuf = json_format.ParseDict({field: [row]}, kind())
        serialized.append({"name": row["name"], "state": row.get("state"), "message": message.SerializeToString()})
        pause()
    return serialized


def _merge(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the response with all rows: messages that follow each other are merged, and repeated fields appended."""
    return b"".join([row["message"] for row in rows])


async def _is_ready(plane: ControlPlane, model: str, version: str) -> bool:
    """True if the model can serve requests; a model that does not exist is not ready, as in Triton."""
    try:
        await plane.require_model_ready(model, version)
    except (NotFound, Unavailable):
        return False
    return True


def _without(key: str, values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name != key}


def _only_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' is not supported: all repositories share one set of model names")


def _parameters(request: Any) -> dict[str, object]:
    return {name: parameter_value(name, value) for name, value in request.parameters.items()}


def _trace_value(name: str, values: list[str]) -> object:
    """Value of a trace setting by Triton's rules: none resets it, `trace_level` is a list, every other setting has one value."""
    if not values:
        return None
    if name == "trace_level":
        return values
    if len(values) > 1:
        raise BadRequest(f"trace setting {name[:64]!r} takes one value, not {len(values)}")
    return values[0]


def _string_list(value: object) -> list[str]:
    return list(value) if isinstance(value, list | tuple) else [str(value)]


def _log_field(value: object) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"


def call_principal(call: GrpcCall | StreamCall, access: AccessControl) -> Principal:
    """Return the principal of a call; raises BadRequest if the metadata are invalid."""
    return call.options.principal or access.anonymous if access.has_keys else access.anonymous


class HealthService:
    """The standard health service grpc.health.v1: status of the server (""), of the inference service, and of each model by name.

    Args:
        plane: of the server, whose status is also that of the inference service.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._model_scope = grpc_operation(f"/{HEALTH_SERVICE}/Check+service").scope

    async def check(self, message: bytes, call: GrpcCall) -> Message:
        """Check: one HealthCheckRequest in, one HealthCheckResponse out; raises NotFound for an unknown name."""
        name = _parse_lookup(health_pb.HealthCheckRequest, message).service
        self._check_permission(name, call)
        status = await self._status(name)
        if status == health_pb.HealthCheckResponse.SERVICE_UNKNOWN:
            raise NotFound(f"service {name[:128]!r} is not found; it is '', {SERVICE!r} or a model's name")
        return [health_pb.HealthCheckResponse(status=status).SerializeToString()]

    async def watch(self, call: StreamCall) -> None:
        """Watch: one HealthCheckRequest in, then one HealthCheckResponse at once and one at each change.

        Raises:
            Cancelled: the client disconnected.
            Unavailable: the server stops.
            Unauthenticated, Forbidden: the caller may not read the model, or not any more.
        """
        message = await call.read()
        if message is None:
            return
        name = _parse_lookup(health_pb.HealthCheckRequest, message).service
        sent_status = None
        while True:
            self._check_permission(name, call)
            status = await self._status(name)
            if status != sent_status:
                await call.write([health_pb.HealthCheckResponse(status=status).SerializeToString()])
                sent_status = status
            if call.stopping:
                raise Unavailable("the server is shutting down")
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _check_permission(self, name: str, call: GrpcCall | StreamCall) -> None:
        """Check that the caller may read the model; the status of the server is open."""
        if name not in ("", SERVICE) and self._model_scope is not None:
            call_principal(call, self._plane.services.access).check(self._model_scope, name)

    async def _status(self, name: str) -> int:
        kind = health_pb.HealthCheckResponse
        if name in ("", SERVICE):
            return int(kind.SERVING if self._plane.services.models.ready() else kind.NOT_SERVING)
        try:
            await self._plane.require_model_ready(name)
        except NotFound:
            return int(kind.SERVICE_UNKNOWN)
        except Unavailable:
            return int(kind.NOT_SERVING)
        return int(kind.SERVING)


class ReflectionService:
    """Server reflection for grpcurl and similar clients.

    v1 and v1alpha are one protocol under two names.

    Args:
        services: full names of all services of the server.
        access: keys and scopes.
        pools: further descriptor pools with some of the services.
    """

    def __init__(self, services: Iterable[str], access: AccessControl, pools: Iterable[Any] = ()) -> None:
        self._access = access
        self._scope = grpc_operation(f"/{REFLECTION_SERVICES[0]}/ServerReflectionInfo").scope
        # The package has v1alpha only. Its messages serve both, but a client that looks up v1 must find it: in a second pool.
        v1: Any = descriptor_pool.DescriptorPool()
        v1.Add(file_of_v1())
        self._pools: tuple[Any, ...] = (descriptor_pool.Default(), v1, *pools)
        names = tuple(services)
        self._indexes = [DescriptorIndex(names, pool) for pool in self._pools]

    async def info(self, call: StreamCall) -> None:
        """ServerReflectionInfo: one ServerReflectionResponse for each ServerReflectionRequest."""
        principal = call_principal(call, self._access)
        while (message := await call.read()) is not None:
            if self._scope is not None:
                principal.require(self._scope)
            response = self._respond(_parse_lookup(reflection_pb.ServerReflectionRequest, message))
            await call.write([response.SerializeToString()])
            await asyncio.sleep(0)  # neither call waits while thousands of small messages have arrived

    def _respond(self, request: Any) -> Any:
        lookup = reflection_pb.ServerReflectionRequest()
        lookup.CopyFrom(request)
        if request.HasField("file_containing_symbol"):
            lookup.file_containing_symbol = self._service_of_method(request.file_containing_symbol)
        for index in self._indexes:
            response = index.respond(lookup)
            if response.error_response.error_code != NOT_FOUND:
                break
        response.valid_host = request.host
        response.original_request.CopyFrom(request)
        if response.HasField("error_response"):
            kind = request.WhichOneof("message_request")
            text = f"{kind.replace('_', ' ')}: not found" if kind else "'message_request' has no value"
            response.error_response.error_message = text
        return response

    def _service_of_method(self, symbol: str) -> str:
        """Full name of the service for that of a method, which a pool does not find; other symbols unchanged."""
        service, _, method = symbol.rpartition(".")
        for pool in self._pools:
            try:
                if method in pool.FindServiceByName(service).methods_by_name:
                    return service
            except KeyError:
                continue
        return symbol


def grpc_methods(services: ControlServices, max_message_bytes: int) -> Methods:
    """Make all methods: inference, control, health, reflection, load reports.

    Args:
        services: of the server.
        max_message_bytes: largest request, which the server enforces; also the bytes in flight on one stream.
    """
    infer, access = GrpcInference(services, max_message_bytes), services.access
    health = HealthService(ControlPlane(services))
    names = [SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES]
    load = LoadService(services.load_reports, access) if services.load_reports.enabled else None
    if load is not None:
        names.append(LOAD_SERVICE)
    reflection = ReflectionService(names, access, () if load is None else (load.pool,))
    unary: dict[str, UnaryMethod] = {f"/{SERVICE}/{name}": method for name, method in control_methods(services).items()}
    unary[f"/{SERVICE}/ModelInfer"] = infer.infer
    unary[f"/{HEALTH_SERVICE}/Check"] = health.check
    streams: dict[str, StreamMethod] = {
        f"/{name}/ServerReflectionInfo": reflection.info for name in REFLECTION_SERVICES
    }
    streams[f"/{SERVICE}/ModelStreamInfer"] = InferStreams(infer, max_message_bytes).serve
    streams[f"/{HEALTH_SERVICE}/Watch"] = health.watch
    if load is not None:
        streams[LOAD_METHOD] = load.stream
    open_paths = [path for path in (*unary, *streams) if grpc_operation(path).scope is None]
    direct = {f"/{SERVICE}/ModelInfer": infer}
    return Methods(unary, streams, services.options_reader.grpc, frozenset(open_paths), direct, services.codec_threads)
