"""Callers without a key, or with a key that was revoked: closed on open connections and streams too (S16)."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import SERVICE, Attacked, attack, grpc_request, head, http_body, watched
from tests.support.keys import Keys, until
from tests.support.sequence_models import add_accumulator
from tests.support.serving import HOST, Server
from tests.support.waiting import at_rest

pb: Any = service_pb2


@dataclass
class Keyed(Attacked):
    """A server with keys."""

    keys: Keys

    def still_serves(self) -> None:
        """Fail unless both protocols serve a client with a key, without a trace of a fault in the log."""
        assert self.infer(http_body(), **self.keys.bearer("all")) == (200, "")
        with self.channel() as channel:
            assert unary(channel, self.keys.metadata("all")) == "OK"
        assert "Traceback" not in self.server.text


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Attacked, Keys]]:
    folder = tmp_path_factory.mktemp("keys")
    keys = Keys(folder)
    options = ("--api-keys-file", str(keys.path), "--log-format", "json", "--request-log", "all")
    with attack(folder, *options) as attacked:
        yield Keyed(attacked.server, attacked.repository, keys), keys


class KeepAlive:
    """One connection that repeats one request, byte for byte, as the server caches it."""

    def __init__(self, server: Server, key: str) -> None:
        body = http_body()
        head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: {HOST}\r\nX-API-Key: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._socket = socket.create_connection((HOST, server.port), timeout=20)

    def send(self) -> int:
        """Status of one request."""
        self._socket.sendall(self._request)
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        response.read()
        return response.status

    def close(self) -> None:
        self._socket.close()


class Stream:
    """A ModelStreamInfer on a channel of its own."""

    def __init__(self, attacked: Attacked, metadata: list[tuple[str, str]]) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        self._channel = grpc.insecure_channel(attacked.server.grpc_address)
        method = self._channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        self._responses = method(iter(self._requests.get, None), metadata=metadata, timeout=60)

    def send(self) -> str:
        """Name of the status with which the stream has ended; "" if the request is answered."""
        self._requests.put(grpc_request())
        try:
            response = next(self._responses)
        except grpc.RpcError as error:
            return str(error.code().name)
        assert not response.error_message, response.error_message
        return ""

    def close(self) -> None:
        self._responses.cancel()
        self._channel.close()


def unary(channel: grpc.Channel, metadata: list[tuple[str, str]]) -> str:
    """Name of the status of one ModelInfer."""
    method = channel.unary_unary(f"{SERVICE}ModelInfer", request_serializer=pb.ModelInferRequest.SerializeToString)
    try:
        method(grpc_request(), metadata=metadata, timeout=20)
        return "OK"
    except grpc.RpcError as error:
        return str(error.code().name)


def test_a_revoked_key_ends_on_connections_and_streams_that_are_open(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    key = keys.add("leaver", scopes=["infer", "read"])
    keys.add("stayer", scopes=["infer", "read"])
    keys.write()
    until(lambda: attacked.infer(http_body(), **{"x-api-key": key})[0] == 200, "the new key does not work")
    metadata = keys.metadata("leaver")
    repeated, stream = KeepAlive(attacked.server, key), Stream(attacked, metadata)
    other_repeated, other_stream = (
        KeepAlive(attacked.server, keys.keys["stayer"]),
        Stream(attacked, keys.metadata("stayer")),
    )
    with attacked.channel() as channel, watched(attacked, "S16 key revoked") as watch:
        for _ in range(5):
            assert (repeated.send(), stream.send(), unary(channel, metadata)) == (200, "", "OK")
            assert (other_repeated.send(), other_stream.send()) == (200, "")
        del keys.clients["leaver"]
        keys.write()
        until(lambda: repeated.send() == 401, "the connection still works with a revoked key")
        assert stream.send() == "UNAUTHENTICATED"
        assert unary(channel, metadata) == "UNAUTHENTICATED"
        assert repeated.send() == 401
        assert attacked.infer(http_body(), **{"x-api-key": key})[0] == 401
        assert (other_repeated.send(), other_stream.send()) == (200, "")
        for each in (repeated, stream, other_repeated, other_stream):
            each.close()
    watch.check()


def test_withdrawn_scopes_and_models_act_on_open_connections(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    key = keys.add("narrowed", scopes=["infer", "read"])
    keys.write()
    until(lambda: attacked.infer(http_body(), **{"x-api-key": key})[0] == 200, "the new key does not work")
    repeated = KeepAlive(attacked.server, key)
    with attacked.channel() as channel:
        assert (repeated.send(), repeated.send(), unary(channel, keys.metadata("narrowed"))) == (200, 200, "OK")
        keys.clients["narrowed"]["models"] = ["other*"]
        keys.write()
        until(lambda: repeated.send() == 403, "the connection still works on a model that was withdrawn")
        assert unary(channel, keys.metadata("narrowed")) == "PERMISSION_DENIED"
        keys.clients["narrowed"]["models"] = ["aff*"]
        keys.write()
        until(lambda: repeated.send() == 200, "the connection does not work again")
        assert unary(channel, keys.metadata("narrowed")) == "OK"
    repeated.close()


def test_a_broken_or_deleted_file_neither_opens_nor_closes_the_server(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    for text in ("clients: {", "", "clients: {}\nextra: 1\n", None):
        count = attacked.server.text.count("the keys in force stay")
        if text is None:
            keys.path.unlink()
        else:
            keys.write(text)
        until(
            lambda count=count: attacked.server.text.count("the keys in force stay") > count, f"no error for {text!r}"
        )
        assert attacked.infer(http_body(), **{"x-api-key": keys.keys["all"]})[0] == 200
        assert attacked.infer(http_body())[0] == 401
    keys.write()


def test_a_hang_up_reads_the_keys_again(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    server = attacked.server
    key = keys.add("last", scopes=["infer"])
    keys.write()
    until(lambda: attacked.infer(http_body(), **{"x-api-key": key})[0] == 200, "the new key does not work")
    before = at_rest(lambda: server.text.count("audit: reload keys"))
    server.signal(signal.SIGHUP)
    until(lambda: server.text.count("audit: reload keys") == before + 1, "the file was not read")
    assert attacked.infer(http_body(), **{"x-api-key": keys.keys["all"]})[0] == 200


def test_errors_do_not_show_which_models_exist(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    key = keys.add("bound", scopes=["infer", "read", "control"], models=["row_*"])
    keys.write()
    headers = {"x-api-key": key}
    server = attacked.server
    until(lambda: server.request("GET", "/v2", headers=headers)[0] == 200, "the new key does not work")
    paths = [
        ("GET", "/v2/models/{}"),
        ("GET", "/v2/models/{}/config"),
        ("GET", "/v2/models/{}/stats"),
        ("GET", "/v2/models/{}/ready"),
        ("GET", "/v2/models/{}/explain"),
        ("POST", "/v2/models/{}/infer"),
        ("POST", "/v2/models/{}/versions/1/infer"),
        ("POST", "/v2/repository/models/{}/load"),
        ("POST", "/v2/repository/models/{}/unload"),
    ]
    for method, path in paths:
        body = http_body() if method == "POST" else None
        answers = [server.request(method, path.format(model), body, headers) for model in ("affine", "no_such")]
        answers += [server.request(method, path.format(model), body) for model in ("affine", "no_such")]
        statuses = [status for status, _, _ in answers]
        assert statuses == [403, 403, 401, 401], path
        assert answers[0][2] == answers[1][2]
        assert answers[2][2] == answers[3][2]
    assert server.request("GET", "/v2/models/row_sums", headers=headers)[0] == 200
    assert server.request("GET", "/v2/models/row_none", headers=headers)[0] == 404
    lists: list[tuple[str, str, str]] = [
        ("GET", "/v2/models", "models"),
        ("GET", "/v2/status", "models"),
        ("GET", "/v2/models/stats", "model_stats"),
        ("POST", "/v2/repository/index", ""),
    ]
    for method, path, field in lists:
        status, _, content = server.request(method, path, b"" if method == "POST" else None, headers)
        rows = json.loads(content)[field] if field else json.loads(content)
        assert (status, {row["name"] for row in rows}) == (200, {"row_sums"}), path
    with attacked.channel() as channel:
        metadata = keys.metadata("bound")
        index = channel.unary_unary(
            f"{SERVICE}RepositoryIndex", response_deserializer=pb.RepositoryIndexResponse.FromString
        )
        assert {row.name for row in index(b"", metadata=metadata).models} == {"row_sums"}
        stats = channel.unary_unary(
            f"{SERVICE}ModelStatistics", response_deserializer=pb.ModelStatisticsResponse.FromString
        )
        assert {row.name for row in stats(b"", metadata=metadata).model_stats} == {"row_sums"}
        for name in ("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"):
            seen = set()
            for model in ("affine", "no_such"):
                request = getattr(pb, f"{name}Request")(name=model).SerializeToString()
                with pytest.raises(grpc.RpcError) as error:
                    channel.unary_unary(f"{SERVICE}{name}")(request, metadata=metadata)
                seen.add((error.value.code(), error.value.details()))
            assert len(seen) == 1, name
            assert seen.pop()[0] is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("id_type", ["TYPE_UINT64", "TYPE_STRING"])
def test_a_sequence_belongs_to_the_client_of_its_key(case: tuple[Attacked, Keys], id_type: str) -> None:
    """Another key can use the same id, and neither reads, changes nor ends the sequence, also in the memory of the model."""
    attacked, keys = case
    add_accumulator(attacked.repository, id_type, id_type=id_type)
    assert attacked.post(f"/v2/repository/models/{id_type}/load", b"{}", **keys.bearer("control")) == (200, "")
    sequence_id: object = 42 if id_type == "TYPE_UINT64" else "42"

    def send(client: str, value: int, **flags: bool) -> int | str:
        tensor = {"name": "INPUT", "datatype": "INT32", "shape": [1, 1], "data": [value]}
        flags_sent = {f"sequence_{name}": value for name, value in flags.items()}
        body = http_body(tensor, parameters={"sequence_id": sequence_id, **flags_sent})
        path = f"/v2/models/{id_type}/infer"
        _, _, content = attacked.server.request("POST", path, body, keys.bearer(client))
        response = json.loads(content)
        return response["error"] if "error" in response else response["outputs"][0]["data"][0]

    assert send("all", 1, start=True) == 1
    for _ in range(2):
        assert "must specify the START flag" in str(send("infer", 10))
        assert send("infer", 10, start=True) == 10
        assert (send("all", 2), send("infer", 20, end=True), send("all", -2)) == (3, 30, 1)
    assert send("all", 4, end=True) == 5
    assert attacked.post(f"/v2/repository/models/{id_type}/unload", b"{}", **keys.bearer("control")) == (200, "")
    attacked.still_serves()


@pytest.mark.parametrize("name", ["Authorization", "X-API-Key"])
def test_two_keys_in_one_request_are_refused(case: tuple[Attacked, Keys], name: str) -> None:
    attacked, keys = case
    prefix = "Bearer " if name == "Authorization" else ""
    headers = [f"{name}: {prefix}{key}" for key in ("hr_wrong", keys.keys["all"])]
    for path in ("/v2/models/affine/infer", "/v2/repository/index"):
        with attacked.connect() as wire:
            wire.pour([head(path, "Content-Type: application/json", "Content-Length: 2", *headers), b"{}"])
            assert wire.answer() == (400, f"the header {name.lower()} came twice: send it once")
    metadata = [(name.lower(), prefix + keys.keys["all"])] * 2
    with attacked.channel() as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(grpc_request().SerializeToString(), metadata=metadata, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    attacked.still_serves()


def test_a_caller_without_a_key_is_refused_before_its_body_is_read(case: tuple[Attacked, Keys]) -> None:
    attacked, _ = case
    with watched(attacked, "S16 bodies without a key") as watch:
        for path in ("/v2/models/affine/infer", "/v2/repository/models/affine/load", "/v2/logging"):
            with attacked.connect() as wire:
                assert wire.pour([head(path, "Content-Length: 12000000")])
                assert wire.answer()[0] == 401, path
    watch.check()


def test_control_calls_have_an_audit_line_and_no_line_has_a_key(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    server, admin = attacked.server, keys.bearer("all")
    before = len(server.text)
    calls = [
        ("POST", "/v2/repository/models/table_lookup/unload", b"{}", "unload model", "table_lookup"),
        ("POST", "/v2/repository/models/table_lookup/load", b"{}", "load model", "table_lookup"),
        ("POST", "/v2/logging", b'{"log_info": false}', "change log settings", None),
        ("POST", "/v2/logging", b'{"log_info": true}', "change log settings", None),
        ("POST", "/v2/trace/setting", b'{"trace_rate": "100"}', "change trace settings", None),
        (
            "POST",
            "/v2/systemsharedmemory/region/audited/register",
            b'{"key": "/no_such_key", "byte_size": 8}',
            "register shared memory",
            "audited",
        ),
        ("POST", "/v2/systemsharedmemory/region/audited/unregister", b"", "unregister shared memory", "audited"),
    ]
    results = []
    for method, path, body, operation, target in calls:
        status, _, content = server.request(method, path, body, admin)
        results.append((operation, target, "ok" if status == 200 else None))
        assert status in (200, 400), content
    assert server.request("POST", "/v2/logging", b"{}", keys.bearer("read"))[0] == 403
    assert server.request("POST", "/v2/logging", b"{}")[0] == 401
    with attacked.channel() as channel:
        message = pb.RepositoryModelLoadRequest(model_name="table_lookup").SerializeToString()
        channel.unary_unary(f"{SERVICE}RepositoryModelLoad")(message, metadata=keys.metadata("control"), timeout=60)
        with pytest.raises(grpc.RpcError):
            channel.unary_unary(f"{SERVICE}RepositoryModelLoad")(message, metadata=keys.metadata("read"), timeout=60)

    def lines() -> list[dict[str, Any]]:
        records = [json.loads(line) for line in server.text[before:].splitlines() if line.startswith("{")]
        return [record for record in records if record.get("logger") == "headrace.audit"]

    until(lambda: sum(line["protocol"] == "grpc" for line in lines()) == 2, "no audit lines of gRPC")
    over_http = [line for line in lines() if line["protocol"] == "http"]
    assert [(line["operation"], line.get("target"), line["client"]) for line in over_http] == [
        *((operation, target, "all") for operation, target, _ in results),
        ("change log settings", None, "read"),
    ]
    for line, (_, _, result) in zip(over_http, results, strict=False):
        assert line["peer"].startswith(f"{HOST}:")
        assert result is None or line["result"] == result
    assert over_http[-1]["result"] == "forbidden"
    granted, refused = (line for line in lines() if line["protocol"] == "grpc")
    assert (granted["client"], granted["target"], granted["result"]) == ("control", "table_lookup", "ok")
    assert (refused["client"], refused["result"]) == ("read", "forbidden")
    assert granted["peer"].startswith(f"{HOST}:")
    keys.write()
    until(lambda: lines()[-1]["operation"] == "reload keys", "no audit line of a reload")


def test_no_log_trace_or_metric_has_a_key(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    server = attacked.server
    for name, key in keys.keys.items():
        server.request(
            "POST", "/v2/models/affine/infer", http_body(), {"Authorization": f"Bearer {key}", "x-api-key": key}
        )
        server.request("POST", f"/v2/models/{key[:60]}/infer", http_body(), keys.bearer(name))
        server.request("GET", "/v2", headers={"Authorization": key, "x-headrace-client": "other"})
    status, _, page = server.request("GET", "/metrics", headers=keys.bearer("metrics"))
    assert status == 200
    until(
        lambda: '"client": "all"' in server.text or '"client":"all"' in server.text, "no access log line has the name"
    )
    text = server.text.replace("/v2/models/hr_", "")
    for key in keys.keys.values():
        assert f"Bearer {key}" not in text
        assert key.encode() not in page
    leaks = [line for line in text.splitlines() if any(key in line for key in keys.keys.values())]
    # A key in the place of a model's name is shown as that name is.
    assert all('"model"' in line for line in leaks), leaks[:3]


@contextmanager
def quota_client(case: tuple[Attacked, Keys], name: str, **quota: float) -> Iterator[str]:
    attacked, keys = case
    key = keys.add(name, scopes=["infer", "read"], quota=quota)
    keys.write()
    health = "/v2/models/affine/ready"
    until(lambda: attacked.server.request("GET", health, headers=keys.bearer(name))[0] in (200, 429), "no such key")
    yield key


def test_the_quota_of_a_key_holds_over_all_protocols_and_models(case: tuple[Attacked, Keys]) -> None:
    attacked, keys = case
    with (
        quota_client(case, "quota", requests_per_s=0.01, burst=6) as key,
        attacked.channel() as channel,
    ):
        repeated = KeepAlive(attacked.server, key)
        metadata = [("x-api-key", key)]
        answers = [repeated.send(), repeated.send(), unary(channel, metadata)]
        server = attacked.server
        headers = {"x-api-key": key, "x-headrace-client": "somebody-else"}
        answers += [server.request("POST", "/v2/models/affine/infer", http_body(), headers)[0] for _ in range(4)]
        assert answers.count(200) + answers.count("OK") <= 5
        status, response_headers, content = server.request("POST", "/v2/models/affine/infer", http_body(), headers)
        assert status == 429
        assert int(response_headers["retry-after"]) >= 1
        assert "quota of its key" in json.loads(content)["error"]
        assert (repeated.send(), unary(channel, metadata)) == (429, "RESOURCE_EXHAUSTED")
        assert attacked.infer(http_body(), **{"x-api-key": keys.keys["all"]})[0] == 200
        repeated.close()
