"""Operations of the server and their scopes: one table, from which HTTP routes and RPCs take their permissions.

A route or an RPC that is not in the table cannot be served: the server fails at start. Operations with the scope None are open
to every caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from headrace.core.access import Principal, Scope
from headrace.core.errors import Forbidden, HeadraceError, QuotaExceeded, Unauthenticated
from headrace.observability.audit import AUDIT, AuditRecord

_SERVICE = "/inference.GRPCInferenceService/"
_HEALTH = "/grpc.health.v1.Health/"
_REFLECTION = tuple(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Routes and RPCs with the same effect.

    Attributes:
        name: for the audit log.
        scope: that a caller needs; None: open.
        http: method and path of each route, as in the route table.
        grpc: path of each RPC. "+NAME" at the end is the variant of the RPC that has NAME in its request.
        audited: each call has a line in the audit log.
    """

    name: str
    scope: Scope | None
    http: Sequence[str] = ()
    grpc: Sequence[str] = ()
    audited: bool = False


def _of_model(suffix: str) -> tuple[str, str]:
    return f"GET /v2/models/{{model}}{suffix}", f"GET /v2/models/{{model}}/versions/{{version}}{suffix}"


def _inference(*names: str) -> tuple[str, ...]:
    return tuple(_SERVICE + name for name in names)


def _regions(action: str) -> tuple[str, ...]:
    kinds, paths = (
        ("system", "cuda"),
        [f"/region/{{region}}/{action}", *([f"/{action}"] if action != "register" else ())],
    )
    method = "GET" if action == "status" else "POST"
    return tuple(f"{method} /v2/{kind}sharedmemory{path}" for kind in kinds for path in paths)


def _memory(action: str) -> tuple[str, ...]:
    return _inference(f"SystemSharedMemory{action}", f"CudaSharedMemory{action}")


def _reads(name: str, http: Sequence[str] = (), grpc: Sequence[str] = ()) -> Operation:
    return Operation(name, Scope.READ, http, grpc)


def _changes(name: str, scope: Scope, http: Sequence[str], grpc: Sequence[str] = ()) -> Operation:
    return Operation(name, scope, http, grpc, audited=True)


_MODEL, _TRACE_PATHS = "/v2/repository/models/{model}", ("/v2/trace/setting", "/v2/models/{model}/trace/setting")
_READ = (
    _reads("server metadata", ("GET /v2",), _inference("ServerMetadata")),
    _reads("status", ("GET /v2/status",)),
    _reads("repository index", ("POST /v2/repository/index", "GET /v2/models"), _inference("RepositoryIndex")),
    _reads("model metadata", _of_model(""), _inference("ModelMetadata")),
    _reads(
        "model readiness",
        _of_model("/ready"),
        (*_inference("ModelReady"), f"{_HEALTH}Check+service", f"{_HEALTH}Watch+service"),
    ),
    _reads("model configuration", _of_model("/config"), _inference("ModelConfig")),
    _reads("statistics", ("GET /v2/models/stats", *_of_model("/stats")), _inference("ModelStatistics")),
    _reads("profile", _of_model("/profile")),
    _reads("load report", _of_model("/load"), ("/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",)),
    _reads("explanation", _of_model("/explain")),
    _reads("layers", _of_model("/layers")),
    _reads("traffic", (f"GET {_MODEL}/traffic",)),
    _reads("shared memory status", _regions("status"), _memory("Status")),
    _reads("trace settings", [f"GET {path}" for path in _TRACE_PATHS], _inference("TraceSetting")),
    _reads("log settings", ("GET /v2/logging",), _inference("LogSettings")),
    _reads("OpenAPI document", ("GET /openapi.json",)),
    _reads("reflection", (), _REFLECTION),
)
OPERATIONS: tuple[Operation, ...] = (
    Operation("liveness", None, ("GET /v2/health/live",), _inference("ServerLive")),
    Operation(
        "readiness", None, ("GET /v2/health/ready",), (*_inference("ServerReady"), f"{_HEALTH}Check", f"{_HEALTH}Watch")
    ),
    # Static files: their scripts read everything else with the key of the visitor.
    Operation("web pages", None, ("GET /", "GET /docs", "GET /page/{file}")),
    Operation(
        "inference",
        Scope.INFER,
        tuple(
            f"POST /v2/models/{{model}}{version}/{action}"
            for action in ("infer", "generate", "generate_stream")
            for version in ("", "/versions/{version}")
        ),
        _inference("ModelInfer", "ModelStreamInfer"),
    ),
    *_READ,
    Operation("metrics", Scope.METRICS, ("GET /metrics",)),
    _changes("load model", Scope.CONTROL, (f"POST {_MODEL}/load",), _inference("RepositoryModelLoad")),
    _changes("unload model", Scope.CONTROL, (f"POST {_MODEL}/unload",), _inference("RepositoryModelUnload")),
    _changes("change traffic", Scope.CONTROL, (f"POST {_MODEL}/traffic",)),
    _changes("register shared memory", Scope.CONTROL, _regions("register"), _memory("Register")),
    _changes("unregister shared memory", Scope.CONTROL, _regions("unregister"), _memory("Unregister")),
    _changes(
        "change trace settings",
        Scope.ADMIN,
        [f"POST {path}" for path in _TRACE_PATHS],
        _inference("TraceSetting+settings"),
    ),
    _changes("change log settings", Scope.ADMIN, ("POST /v2/logging",), _inference("LogSettings+settings")),
)
_BY_ROUTE = {route: operation for operation in OPERATIONS for route in operation.http}
_BY_RPC = {rpc: operation for operation in OPERATIONS for rpc in operation.grpc}


def http_operation(method: str, path: str) -> Operation:
    """Return the operation of a route.

    Args:
        method: GET or POST.
        path: as in the route table, with its parameters in braces.

    Raises:
        LookupError: the table has no entry: the route would have no permission.
    """
    key = "GET /page/{file}" if path.startswith("/page/") else f"{method} {path}"
    return _lookup(_BY_ROUTE, key)


def grpc_operation(path: str) -> Operation:
    """Return the operation of an RPC, such as "/inference.GRPCInferenceService/ModelInfer"; raises LookupError as above."""
    return _lookup(_BY_RPC, path)


def _lookup(table: dict[str, Operation], key: str) -> Operation:
    operation = table.get(key)
    if operation is None:
        raise LookupError(f"{key} has no scope: add it to OPERATIONS in headrace/wire/requests/operations.py")
    return operation


class OperationCall:
    """One call of an operation, except inference: checks the permission, and writes the audit line. A context manager.

    Refused calls without a valid key have no audit line: anonymous clients could push other lines out of the log. Metrics count
    them.

    Args:
        operation: of the call.
        principal: of the caller.
        protocol: "http" or "grpc".
        peer: address of the caller.
        target: model or region; "" for none. It may be set during the call.
    """

    __slots__ = ("_operation", "_peer", "_protocol", "principal", "target")

    def __init__(self, operation: Operation, principal: Principal, protocol: str, peer: str, target: str = "") -> None:
        self._operation = operation
        self.principal = principal
        self._protocol = protocol
        self._peer = peer
        self.target = target

    def require(self, model: str = "") -> None:
        """Check the permission, once for each call; raises Unauthenticated, Forbidden or QuotaExceeded.

        Args:
            model: name; "" for an operation on no model, or whose model is in the body (see `check_model`).
        """
        if self._operation.scope is not None:
            self.principal.require(self._operation.scope, model)

    def check_model(self, model: str) -> None:
        """Check the permission for the model after `require`; raises Forbidden."""
        self.target = model
        if model and self._operation.scope is not None:
            self.principal.check_model(model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_refused = isinstance(error, (Forbidden, QuotaExceeded)) and not self.principal.name
        if self._operation.audited and not is_refused and not isinstance(error, Unauthenticated):
            result = "ok" if error is None else error.reason if isinstance(error, HeadraceError) else "internal error"
            AUDIT.write(
                AuditRecord(self._operation.name, self.target, self.principal.name, self._peer, self._protocol, result)
            )
