"""Attacks by names, and by what is said in answer to them: paths, shells, log lines, secrets (lines 8, 12 and 14)."""

from __future__ import annotations

import http.client
import json
import os
import re
from multiprocessing import shared_memory
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tests.support.attacks import SERVICE, Attacked, grpc_request, head, http_body, watched
from tests.support.keys import until
from tests.support.serving import HOST

pb: Any = service_pb2
NAMES = [
    "..",
    ".",
    "../affine",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "affine\0",
    "\0",
    "$(id)",
    "`id`",
    "affine;id",
    "a b",
    "affine\n",
    "a\r\nX: y",
    "\x1b[2J",
    "\u202eenffia",
    "-rf",
    "%2e%2e",
    "x" * 100_000,
    "~root",
    "C:",
    "*",
]
VERSIONS = ["..", "../1", "-1", "1\0", "1/../2", "$(id)", "1\n", "1e0", "+1", " 1", "9" * 10_000, "latest/..", "0x1"]
# Beside these the client library and the server's own parser end it: request lines have their limits.
LONGEST_IN_A_PATH = 4_000


def shown(name: str) -> str:
    return repr(name)[:24]


def send(attacked: Attacked, method: str, path: str, body: bytes | None = None) -> tuple[int, str]:
    """Like `post`, for paths that the client library would refuse to send."""
    connection = http.client.HTTPConnection(HOST, attacked.server.port, timeout=20)
    connection._validate_path = lambda _: None  # type: ignore[attr-defined]
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content).get("error", "") if content else ""
    finally:
        connection.close()


# --- 8: names ------------------------------------------------------------------------------------------------------------

ROUTES = [
    ("POST", "/v2/models/{}/infer"),
    ("POST", "/v2/models/{}/versions/1/infer"),
    ("GET", "/v2/models/{}"),
    ("GET", "/v2/models/{}/ready"),
    ("GET", "/v2/models/{}/config"),
    ("GET", "/v2/models/{}/stats"),
    ("GET", "/v2/models/{}/trace/setting"),
    ("POST", "/v2/repository/models/{}/load"),
    ("POST", "/v2/repository/models/{}/unload"),
]


@pytest.mark.parametrize("name", [name[:LONGEST_IN_A_PATH] for name in NAMES], ids=shown)
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_names_in_paths(attacked: Attacked, name: str, method: str, path: str) -> None:
    body = http_body() if path.endswith("infer") else b"{}" if method == "POST" else None
    status, text = send(attacked, method, path.format(quote(name, safe="")), body)
    assert status == 400, text
    assert text.isprintable()
    assert len(text) < 400


@pytest.mark.parametrize("version", [version[:LONGEST_IN_A_PATH] for version in VERSIONS], ids=shown)
@pytest.mark.parametrize("rest", ["/infer", "", "/ready", "/config", "/stats"])
def test_versions_in_paths(attacked: Attacked, version: str, rest: str) -> None:
    body = http_body() if rest == "/infer" else None
    path = f"/v2/models/affine/versions/{quote(version, safe='')}{rest}"
    status, text = send(attacked, "POST" if body else "GET", path, body)
    assert status == 400, text
    assert text.isprintable()


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/../../etc/passwd",
        "/v2/models/affine/../row_sums",
        "/../v2",
        "//v2/models/affine",
        "/V2/models/affine",
    ],
)
def test_paths_are_not_resolved(attacked: Attacked, path: str) -> None:
    assert send(attacked, "GET", path)[0] in (400, 404)


CALLS: dict[str, Any] = {
    "ModelInfer": lambda name: grpc_named(name),
    "ModelReady": lambda name: pb.ModelReadyRequest(name=name),
    "ModelMetadata": lambda name: pb.ModelMetadataRequest(name=name),
    "ModelConfig": lambda name: pb.ModelConfigRequest(name=name),
    "ModelStatistics": lambda name: pb.ModelStatisticsRequest(name=name),
    "TraceSetting": lambda name: pb.TraceSettingRequest(model_name=name),
    "RepositoryModelLoad": lambda name: pb.RepositoryModelLoadRequest(model_name=name),
    "RepositoryModelUnload": lambda name: pb.RepositoryModelUnloadRequest(model_name=name),
    "SystemSharedMemoryRegister": lambda name: pb.SystemSharedMemoryRegisterRequest(name=name, key="/k", byte_size=8),
}


def grpc_named(name: str, version: str = "") -> Any:
    request = grpc_request(model_version=version)
    request.model_name = name
    return request


@pytest.mark.parametrize("method", CALLS)
def test_names_in_calls(attacked: Attacked, channel: grpc.Channel, method: str) -> None:
    for name in NAMES:
        if (method, name) == ("SystemSharedMemoryRegister", "a b"):
            continue  # regions may have blanks in their names
        message = CALLS[method](name).SerializeToString()
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(SERVICE + method)(message, timeout=20)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, (name[:20], caught.value.details())
        assert (caught.value.details() or "").isprintable()
        assert len(caught.value.details() or "") < 500


@pytest.mark.parametrize(
    "method", ["ModelReady", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister"]
)
def test_names_of_10_mb_in_calls(attacked: Attacked, channel: grpc.Channel, method: str) -> None:
    """They are neither logged nor formatted, and the audit line is not lost."""
    before = len(attacked.server.text)
    message = CALLS[method]("x" * 10_000_000).SerializeToString()
    with watched(attacked, f"S16 name of 10 MB, {method}") as watch, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(SERVICE + method)(message, timeout=20)
    watch.check()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert re.search("has at most (128|1048576)", caught.value.details() or "")
    if method in ("RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister"):
        until(lambda: "audit: " in attacked.server.text[before:], "no audit line")
    assert max(map(len, attacked.server.text[before:].splitlines()), default=0) < 500


def test_versions_in_calls(attacked: Attacked) -> None:
    for version in VERSIONS:
        code, text = attacked.call(grpc_named("affine", version))
        assert code == "INVALID_ARGUMENT", text


def test_folders_that_cannot_be_models(attacked: Attacked) -> None:
    """The index lists them; no request reaches them, and loading creates none."""
    for name in ("$(touch pwned)", "a b", "x\ny"):
        (attacked.repository / name).mkdir(exist_ok=True)
    for name in ("..", "$(touch pwned)", "../models/affine", str(attacked.repository / "affine")):
        assert send(attacked, "POST", f"/v2/repository/models/{quote(name, safe='')}/load", b"{}")[0] == 400
    assert not list(attacked.repository.glob("**/pwned"))
    attacked.still_serves()


@pytest.mark.parametrize(
    "path", ["../evil", "/etc/evil", "1/../../evil", "1/evil\n", "..\\evil", "1/\0", "$(id)", ".git/hooks/x"]
)
def test_files_of_a_load_request(attacked: Attacked, path: str) -> None:
    before = sorted(str(file) for file in attacked.repository.parent.rglob("*"))
    config = json.dumps({"name": "affine"})
    body = json.dumps({"parameters": {"config": config, f"file:{path}": "eA=="}}).encode()
    assert attacked.post("/v2/repository/models/affine/load", body)[0] == 400
    request = pb.RepositoryModelLoadRequest(model_name="affine")
    request.parameters["config"].string_param = config
    request.parameters[f"file:{path}"].bytes_param = b"x"
    assert attacked.call(request, "RepositoryModelLoad")[0] == "INVALID_ARGUMENT"
    assert sorted(str(file) for file in attacked.repository.parent.rglob("*")) == before
    attacked.still_serves()


# --- 12: what reaches the log --------------------------------------------------------------------------------------------

FORGED = "ERROR    forged line"
HOSTILE = f"\n[01/01/30 00:00:00] {FORGED}\r\n\x1b[31m{FORGED}\x1b[0m\u202e{FORGED}\x9b2J"


def load_failures(attacked: Attacked) -> None:
    """A configuration whose names are hostile: its errors are returned and logged."""
    config = json.dumps({"name": "affine", "backend": HOSTILE})
    body = json.dumps({"parameters": {"config": config}}).encode()
    assert attacked.post("/v2/repository/models/affine/load", body)[0] == 400
    request = pb.RepositoryModelLoadRequest(model_name="affine")
    request.parameters["config"].string_param = config
    assert attacked.call(request, "RepositoryModelLoad")[0] == "INVALID_ARGUMENT"


def hostile_requests(attacked: Attacked) -> None:
    quoted = quote(HOSTILE, safe="")
    for method, path in ROUTES:
        send(attacked, method, path.format(quoted), b"{}" if method == "POST" else None)
    attacked.infer(http_body(id=HOSTILE))
    attacked.infer(http_body(id=HOSTILE, parameters={HOSTILE: HOSTILE}))
    # The model itself refuses the value: that is logged, or returned, with the request's id.
    row = {"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [99]}
    attacked.infer(http_body(row, id=HOSTILE), "table_lookup")
    latin = HOSTILE.encode("utf-8").decode("latin-1").replace("\n", "").replace("\r", "")
    attacked.infer(http_body(), X_Client=latin, User_Agent=latin, Traceparent=latin, Content_Encoding=latin)
    with attacked.connect() as wire:
        wire.pour([head("/v2/models/affine/infer", "X: " + "\x1b[31m" + FORGED), b"x"])
    with attacked.connect() as wire:
        wire.pour([f"GET /{HOSTILE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()])
        wire.answer()
    for method, make in CALLS.items():
        attacked.call(make(HOSTILE), method)
    attacked.call(grpc_request(id=HOSTILE))
    request = pb.LogSettingsRequest()
    request.settings[HOSTILE].string_param = HOSTILE
    attacked.call(request, "LogSettings")
    attacked.post("/v2/logging", json.dumps({HOSTILE: HOSTILE}).encode())


def test_no_client_forges_a_line_of_the_log(attacked: Attacked) -> None:
    before = len(attacked.server.text)
    load_failures(attacked)
    hostile_requests(attacked)
    attacked.still_serves()
    written = attacked.server.text[before:]
    assert "forged line" in written, "nothing hostile was logged: this test looks at nothing"
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", written), "a control character is in the log"
    assert not re.search(r"^.{0,24}ERROR +forged", written, re.MULTILINE), "a client has written a line of its own"
    assert not re.search(r"^\[01/01/30", written, re.MULTILINE)


# --- 14: text of errors --------------------------------------------------------------------------------------------------


def errors(attacked: Attacked) -> list[str]:
    """Responses of the server to every kind of error."""
    texts = []
    for path, body in (
        ("/v2/models/broken/infer", http_body()),
        ("/v2/models/nothing/infer", http_body()),
        ("/v2/repository/models/broken/load", b"{}"),
        ("/v2/repository/models/nothing/load", b"{}"),
        ("/v2/repository/models/affine/load", json.dumps({"parameters": {"config": '{"name": "other"}'}}).encode()),
        ("/v2/repository/models/affine/load", json.dumps({"parameters": {"config": "{"}}).encode()),
        ("/v2/systemsharedmemory/region/r/register", json.dumps({"key": "/no_such_key", "byte_size": 64}).encode()),
        ("/v2/systemsharedmemory/region/r/register", json.dumps({"key": "/../etc/passwd", "byte_size": 64}).encode()),
        ("/v2/systemsharedmemory/region/r/register", json.dumps({"key": "../../etc/passwd", "byte_size": 64}).encode()),
        (
            "/v2/cudasharedmemory/region/r/register",
            json.dumps({"raw_handle": {"b64": "eA=="}, "byte_size": 64}).encode(),
        ),
        ("/v2/models/table_lookup/infer", http_body({"name": "X", "datatype": "INT64", "shape": [1, 1], "data": [99]})),
    ):
        status, text = attacked.post(path, body)
        assert status >= 400, path
        texts.append(text)
    where = {"shared_memory_region": "nobodys", "shared_memory_byte_size": 64}
    texts.append(attacked.infer(http_body({"name": "X", "datatype": "FP32", "shape": [1, 16], "parameters": where}))[1])
    for method, message in {
        "RepositoryModelLoad": pb.RepositoryModelLoadRequest(model_name="broken"),
        "ModelInfer": grpc_named("broken"),
        "SystemSharedMemoryRegister": pb.SystemSharedMemoryRegisterRequest(name="r", key="/no_such_key", byte_size=64),
        "SystemSharedMemoryStatus": pb.SystemSharedMemoryStatusRequest(name="nobodys"),
        "LogSettings": pb.LogSettingsRequest(settings={"log_file": {"string_param": "/tmp/x"}}),
    }.items():
        code, text = attacked.call(message, method)
        assert code != "OK", method
        texts.append(text)
    index = attacked.server.request("POST", "/v2/repository/index", b"{}")[2].decode()
    return [*texts, index]


def test_errors_contain_no_secrets(attacked: Attacked) -> None:
    name = f"test_of_headrace_secret_key_{os.getpid()}"
    memory = shared_memory.SharedMemory(create=True, size=64, name=name)
    region = {"key": f"/{name}", "byte_size": 64}
    try:
        register = "/v2/systemsharedmemory/region/secret_region/register"
        assert attacked.post(register, json.dumps(region).encode()) == (200, "")
        for text in errors(attacked):
            assert text
            for secret in (
                str(attacked.repository.parent),
                os.getcwd(),
                "/etc/",
                "site-packages",
                "secret_",
                "Traceback",
                "0x7",
            ):
                assert secret not in text, text
    finally:
        assert attacked.post("/v2/systemsharedmemory/unregister", b"") == (200, "")
        memory.close()
        memory.unlink()


def test_missing_keys_and_foreign_keys_get_the_same_error(attacked: Attacked) -> None:
    """Names of other clients' objects cannot be guessed from errors."""
    link = f"/dev/shm/test_of_headrace_link_{os.getpid()}"
    os.symlink("/etc/passwd", link)
    try:
        texts = {
            attacked.post(
                "/v2/systemsharedmemory/region/r/register", json.dumps({"key": key, "byte_size": 64}).encode()
            )
            for key in ("/test_of_headrace_nothing", f"/{os.path.basename(link)}")
        }
    finally:
        os.unlink(link)
    assert len(texts) == 1
    assert texts.pop()[0] == 400
