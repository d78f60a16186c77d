"""Keys and scopes on every route, every alias of it, and every RPC."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from headrace.core.access import Scope
from headrace.wire.requests.operations import OPERATIONS, Operation
from tritonclient.grpc import service_pb2

from tests.support.grpc_requests import message
from tests.support.keys import Keys
from tests.support.models import add_model, affine
from tests.support.serving import HOST, Server, free_port, serving

pb: Any = service_pb2
KEYS = ["", *[scope.value for scope in Scope], "all"]
BODY = json.dumps({"inputs": [{"name": "X", "shape": [1, 16], "datatype": "FP32", "data": [0.0] * 16}]}).encode()
ROUTES = [(operation, route) for operation in OPERATIONS for route in operation.http]
RPCS = [(operation, rpc) for operation in OPERATIONS for rpc in operation.grpc]
OPTIONS = ("--model-control", "explicit", "--load-model", "tiny", "--allow-client-shm", "--allow-model-override")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys")
    add_model(path / "models", "tiny", affine())
    add_model(path / "models", "spare", affine())
    return path


@pytest.fixture(scope="module")
def keys(folder: Path) -> Keys:
    return Keys(folder)


@pytest.fixture(scope="module")
def server(folder: Path, keys: Keys) -> Iterator[Server]:
    """Serves /metrics on the HTTP port."""
    with serving(folder / "models", folder, *OPTIONS, "--api-keys-file", str(keys.path)) as running:
        yield running


def filled(route: str) -> tuple[str, str]:
    """Method and path of a route, with names in its parameters. Control calls are for the model that nothing else uses."""
    method, path = route.split(" ")
    model = "spare" if "/repository/" in path else "tiny"
    return method, path.format(model=model, version="1", region="r", file="page.css")


def status_of(
    server: Server, method: str, path: str, headers: dict[str, str], body: bytes | None = None
) -> tuple[int, bytes]:
    """Send a request whose path is not changed by the client."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
            connection.putheader("Content-Type", "application/json")
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def body_of(method: str, path: str) -> bytes | None:
    if path.endswith("/infer"):
        return BODY
    return b"{}" if method == "POST" else None


@pytest.mark.parametrize(("operation", "route"), ROUTES, ids=[route for _, route in ROUTES])
def test_every_route_needs_its_scope(server: Server, keys: Keys, operation: Operation, route: str) -> None:
    method, path = filled(route)
    for name in KEYS:
        status, content = status_of(server, method, path, keys.bearer(name), body_of(method, path))
        if operation.scope is None or name in (operation.scope, "all"):
            assert status not in (401, 403), (name, content)
        elif name:
            assert status == 403, (name, status, content)
            assert f"needs the scope '{operation.scope}'" in json.loads(content)["error"]
        else:
            assert status == 401, (status, content)
            assert "Authorization: Bearer KEY" in json.loads(content)["error"]


def aliases(path: str) -> Iterator[str]:
    """Other spellings of a path: some reach the same route, others none."""
    yield path + "/"
    yield "/" + path
    yield path.replace("/", "//")
    yield path.upper()
    yield "".join(f"%{ord(character):02x}" if character.isalnum() else character for character in path)
    yield path.replace("v2", "%76%32").replace("tiny", "t%69ny")
    yield path + "?x=1"
    yield path + "#x"
    yield path + ";x"
    yield "/./" + path[1:]
    yield "/x/.." + path
    yield f"http://localhost{path}"


@pytest.mark.parametrize(("operation", "route"), ROUTES, ids=[route for _, route in ROUTES])
def test_no_spelling_of_a_route_is_open(server: Server, operation: Operation, route: str) -> None:
    method, path = filled(route)
    if operation.scope is None:
        return
    spellings = [(method, alias) for alias in aliases(path)]
    spellings += [(other, path) for other in ("HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "GET", "POST", "TRACE")]
    for other, alias in spellings:
        status, content = status_of(server, other, alias, {}, body_of(other, path) if other == method else None)
        refused = (400, 401, 404, 405)
        # The index is a POST, and its path no GET; of the settings the other method is a route of its own.
        assert status in refused, (other, alias, status, content)
        if other == "HEAD" and method == "GET":
            assert status == 401


def test_a_missing_key_says_how_to_send_one(server: Server) -> None:
    status, headers, content = server.request("GET", "/v2")
    assert (status, headers["www-authenticate"], headers["content-type"]) == (401, "Bearer", "application/json")
    assert "X-API-Key: KEY" in json.loads(content)["error"]


def test_both_headers_and_any_case_of_bearer_are_read(server: Server, keys: Keys) -> None:
    key = keys.keys["read"]
    for headers in (
        {"X-API-Key": key},
        {"authorization": f"bearer {key}"},
        {"Authorization": f"BEARER  {key} "},
        {"Authorization": "Basic cHJveHk6cHJveHk=", "x-api-key": key},
    ):
        assert server.request("GET", "/v2", headers=headers)[0] == 200, headers
    for headers in (
        {"Authorization": f"Basic {key}"},
        {"Authorization": key},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {key}x"},
        {"Authorization": f"Bearer {key[:-1]}"},
        {"Authorization": f"Bearer {key.upper()}"},
        {"X-API-Key": "hr_" + "A" * 43},
        {"X-API-Key": "é"},
        {"X-API-Key": "a" * 9000},
        {"x-headrace-client": "all"},
        {"Cookie": f"key={key}"},
    ):
        assert server.request("GET", "/v2", headers=headers)[0] == 401, headers


def test_an_invalid_key_does_not_close_open_operations(server: Server) -> None:
    assert server.request("GET", "/v2/health/live", headers={"X-API-Key": "wrong"})[0] == 200
    assert server.request("GET", "/v2/health/ready")[0] == 200


def test_the_metrics_port_needs_the_scope(folder: Path, keys: Keys, tmp_path: Path) -> None:
    port = free_port()
    options = (*OPTIONS, "--api-keys-file", str(keys.path), "--metrics-port", str(port))
    with serving(folder / "models", tmp_path, *options):
        for name in KEYS:
            connection = http.client.HTTPConnection(HOST, port, timeout=30)
            connection.request("GET", "/metrics", headers=keys.bearer(name))
            response = connection.getresponse()
            content = response.read()
            expected = 200 if name in ("metrics", "all") else 403 if name else 401
            assert response.status == expected, (name, content)
            assert response.headers["cache-control"] == "no-store"
            connection.close()
        for path in ("/metrics/", "//metrics", "/%6detrics", "/METRICS", "/docs", "/openapi.json", "/"):
            connection = http.client.HTTPConnection(HOST, port, timeout=30)
            connection.request("GET", path)
            assert connection.getresponse().status in (401, 404), path
            connection.close()


# gRPC


def request_of(rpc: str) -> bytes:
    """A message for an RPC: its model is `tiny`, for control calls `spare`."""
    path, _, variant = rpc.partition("+")
    name = path.rpartition("/")[2]
    if name in ("ModelInfer", "ModelStreamInfer"):
        return message("tiny", "1", np.zeros((1, 16), np.float32))
    if name in ("Check", "Watch"):
        return bytes(health_pb2.HealthCheckRequest(service="tiny" if variant else "").SerializeToString())
    if name == "StreamCoreMetrics":
        return b""
    if name == "ServerReflectionInfo":
        return bytes(reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString())
    request = getattr(pb, f"{name}Request")()
    if variant:
        request.settings["trace_rate" if name == "TraceSetting" else "log_verbose_level"].CopyFrom(
            pb.TraceSettingRequest.SettingValue(value=["1000"])
            if name == "TraceSetting"
            else pb.LogSettingsRequest.SettingValue(uint32_param=0)
        )
    elif name.startswith("RepositoryModel"):
        request.model_name = "spare"
    elif name.startswith("Model"):
        request.name = "tiny"
    elif name.endswith("Register"):
        request.name = "r"
    return bytes(request.SerializeToString())


def call(channel: grpc.Channel, rpc: str, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
    """Call an RPC with one message; streams end with the first response."""
    path = rpc.partition("+")[0]
    if path.rpartition("/")[2] in ("ModelStreamInfer", "Watch", "ServerReflectionInfo", "StreamCoreMetrics"):
        responses = channel.stream_stream(path)(iter([request_of(rpc)]), metadata=metadata, timeout=20)
        try:
            next(responses)
            return grpc.StatusCode.OK
        except grpc.RpcError as error:
            return error.code()
        finally:
            responses.cancel()
    try:
        channel.unary_unary(path)(request_of(rpc), metadata=metadata, timeout=20)
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


@pytest.mark.parametrize(("operation", "rpc"), RPCS, ids=[rpc for _, rpc in RPCS])
def test_every_rpc_needs_its_scope(server: Server, keys: Keys, operation: Operation, rpc: str) -> None:
    refused = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
    with grpc.insecure_channel(server.grpc_address) as channel:
        for name in KEYS:
            code = call(channel, rpc, keys.metadata(name))
            if operation.scope is None or name in (operation.scope, "all"):
                assert code not in refused, (name, code)
            else:
                assert code is refused[bool(name)], (name, code)
        code = call(channel, rpc, [("x-api-key", "hr_wrong")])
        assert (code is refused[0]) == (operation.scope is not None), code
        code = call(channel, rpc, [("x-api-key", keys.keys["all"])])
        assert code not in refused, code


def test_a_key_does_not_stay_with_its_connection(server: Server, keys: Keys) -> None:
    rpc = "/inference.GRPCInferenceService/ModelInfer"
    with grpc.insecure_channel(server.grpc_address) as channel:
        for name in ("infer", "", "read", "infer", "", "all"):
            expected = {"": "UNAUTHENTICATED", "read": "PERMISSION_DENIED"}.get(name, "OK")
            assert call(channel, rpc, keys.metadata(name)).name == expected, name


def test_unknown_rpcs_do_nothing(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        for path in (
            "/inference.GRPCInferenceService/modelinfer",
            "//inference.GRPCInferenceService/ModelInfer",
            "/inference.GRPCInferenceService/ModelInfer/",
            "/inference.GRPCInferenceService/%4dodelInfer",
            "/INFERENCE.GRPCInferenceService/ModelInfer",
        ):
            with pytest.raises(grpc.RpcError) as error:
                channel.unary_unary(path)(b"", timeout=20)
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED, path
