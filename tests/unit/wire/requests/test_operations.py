"""The table of operations has every route and every RPC, and a server with another one does not start."""

from __future__ import annotations

from typing import Any

import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from headrace.core.access import Principal
from headrace.core.errors import Forbidden, HeadraceError, QuotaExceeded, Unauthenticated
from headrace.core.limits import ClientLimits, Limits
from headrace.observability.logs import FIELDS
from headrace.server.listen import metrics_application
from headrace.wire.grpc.service import grpc_methods
from headrace.wire.http.application import control_application
from headrace.wire.requests import operations
from headrace.wire.requests.operations import OPERATIONS, OperationCall
from headrace.wire.requests.services import ControlServices
from tritonclient.grpc import service_pb2

NOTHING: Any = None


def services() -> ControlServices:
    nothing: Any = type("Nothing", (), {"__getattr__": lambda self, name: lambda *args, **fields: {}})()
    return ControlServices(
        models=nothing,
        repository=nothing,
        regions=nothing,
        traces=nothing,
        observer=nothing,
        logs=nothing,
        overview=nothing,
        version="0",
        extensions=(),
        explain=nothing,
    )


def http_routes() -> set[str]:
    app = control_application(services(), ClientLimits(Limits()), lambda accept: ("text/plain", b""))
    routes: list[Any] = [*app.routes, *metrics_application(NOTHING, services().options_reader).routes]
    paths = {(method, route.path) for route in routes for method in route.methods}
    return {f"{method} {'/page/{file}' if path.startswith('/page/') else path}" for method, path in paths}


def test_the_table_has_every_route_and_no_other() -> None:
    table = [route for operation in OPERATIONS for route in operation.http]
    assert len(table) == len(set(table))
    assert http_routes() == set(table)


def test_the_table_has_every_rpc_and_no_other() -> None:
    table = [rpc for operation in OPERATIONS for rpc in operation.grpc]
    assert len(table) == len(set(table))
    described = {
        f"/{service.full_name}/{method.name}"
        for file in (service_pb2, health_pb2, reflection_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    methods = grpc_methods(services(), 1)
    served = {*methods.unary, *methods.streams}
    assert served == {rpc for rpc in table if "+" not in rpc}
    # grpcio's packages have v1alpha only; the later standard health RPC `List` is not served.
    assert described - served <= {"/grpc.health.v1.Health/List"}
    variants = {rpc for rpc in table if "+" in rpc}
    assert {rpc.partition("+")[0] for rpc in variants} <= served
    assert methods.open_paths == {rpc for op in OPERATIONS if op.scope is None for rpc in op.grpc}


@pytest.mark.parametrize("route", sorted(operations._BY_ROUTE))
def test_a_route_without_an_entry_stops_the_start(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    monkeypatch.delitem(operations._BY_ROUTE, route)
    with pytest.raises(LookupError, match="add it to OPERATIONS"):
        http_routes()


@pytest.mark.parametrize("rpc", sorted(set(operations._BY_RPC) - {"/grpc.health.v1.Health/Watch+service"}))
def test_an_rpc_without_an_entry_stops_the_start(monkeypatch: pytest.MonkeyPatch, rpc: str) -> None:
    monkeypatch.delitem(operations._BY_RPC, rpc)
    with pytest.raises(LookupError, match="add it to OPERATIONS"):
        grpc_methods(services(), 1)


def test_control_and_admin_operations_are_audited() -> None:
    for operation in OPERATIONS:
        assert operation.audited == (operation.scope in ("control", "admin")), operation.name


@pytest.mark.parametrize("error", [Forbidden("no"), QuotaExceeded("no", 1.0), Unauthenticated("no")])
def test_anonymous_callers_that_are_refused_do_not_fill_the_audit_log(
    error: HeadraceError, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "headrace")
    operation = operations.http_operation("POST", "/v2/logging")
    with pytest.raises(type(error)), OperationCall(operation, Principal(), "http", "10.0.0.7:1"):
        raise error
    assert caplog.text == ""
    with OperationCall(operation, Principal(), "http", "10.0.0.7:1"):
        pass
    assert caplog.text.count("by an anonymous client from 10.0.0.7:1 over http: ok") == 1
    caplog.clear()
    with pytest.raises(type(error)), OperationCall(operation, Principal("shop"), "http", "10.0.0.7:1"):
        raise error
    assert caplog.text.count("by shop") == (0 if isinstance(error, Unauthenticated) else 1)


def test_the_target_of_an_audit_line_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace")
    operation = operations.http_operation("POST", "/v2/repository/models/{model}/unload")
    with OperationCall(operation, Principal("shop"), "grpc", "", "x" * 20_000_000):
        pass
    (record,) = caplog.records
    assert record.getMessage() == f"audit: unload model {'x' * 255} by shop over grpc: ok"
    assert vars(record)[FIELDS]["target"] == "x" * 255
