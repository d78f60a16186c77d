"""The server as a process: options and variables, warnings, refused starts, shutdown."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import onnx
import pytest
import tritonclient.grpc as triton_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.e2e.conftest import CONTRADICTING
from tests.support import models
from tests.support.keys import Keys
from tests.support.processes import children
from tests.support.python_models import GATE_BODY, Gate
from tests.support.serving import (
    COMMAND,
    HOST,
    ROOT,
    Server,
    accepts,
    free_port,
    run_headrace,
    serving,
    start,
    start_process,
)
from tests.support.waiting import until


@pytest.fixture
def good(tmp_path: Path) -> Path:
    models.add_model(tmp_path / "good", "row_sums", models.row_sums())
    models.add_model(tmp_path / "good", "busy", models.busy())
    return tmp_path / "good"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """One model that serves, one that cannot."""
    models.add_model(tmp_path / "mixed", "row_sums", models.row_sums())
    models.add_model(tmp_path / "mixed", "wrong", models.affine(), config=CONTRADICTING)
    return tmp_path / "mixed"


def index(server: Server) -> dict[str, str]:
    return {row["name"]: row["state"] for row in json.loads(server.request("POST", "/v2/repository/index")[2])}


def refuses(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit status and output of `headrace serve` that must end by itself."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    free = {"COLUMNS": "400", "HEADRACE_HTTP_PORT": "0", "HEADRACE_GRPC_PORT": "0"}
    done = run_headrace("serve", *words, env={**inherited, **free, **(env or {})}, timeout_s=30)
    return done.returncode, done.stdout + done.stderr


def test_strict_refuses_to_start_with_a_broken_model(mixed: Path, tmp_path: Path) -> None:
    server = start(mixed, tmp_path / "log", "--strict")
    assert server.wait() == 1
    assert "wrong/config.pbtxt:3: error:" in server.text
    assert "--strict: 1 of the models cannot be served" in server.text
    assert "Headrace listens" not in server.text


def probes(server: Server) -> set[object]:
    """Readiness by every probe: HTTP, ServerReady, grpc.health.v1, the metric, the page's status."""
    pb, kind = health_pb2, health_pb2.HealthCheckResponse
    with (
        grpc.insecure_channel(server.grpc_address) as channel,
        triton_grpc.InferenceServerClient(server.grpc_address) as client,
    ):
        standard = health_pb2_grpc.HealthStub(channel).Check(pb.HealthCheckRequest(service="")).status == kind.SERVING
        status, _, _ = server.request("GET", "/v2/health/ready")
        gauge = re.search(r"^headrace_ready (.+)$", server.request("GET", "/metrics")[2].decode(), re.MULTILINE)
        assert gauge is not None
        assert status in (200, 503)
        return {status == 200, client.is_server_ready(), standard, float(gauge[1]) == 1}


@pytest.mark.parametrize("rule", ["any", "all"])
def test_every_probe_follows_ready_when(good: Path, mixed: Path, tmp_path: Path, rule: str) -> None:
    options = ("--ready-when", rule, "--model-control", "explicit")
    models_at_start = ("--load-model", "row_sums", "--load-model", "wrong")
    with serving(mixed, tmp_path, "--model-repository", str(good), *options, *models_at_start) as server:
        # One serves, one is quarantined, one was never requested.
        assert probes(server) == {rule == "any"}
        status = json.loads(server.request("GET", "/v2/status")[2])
        assert (status["models_ready"], status["models_expected"]) == (1, 2)
        document = json.loads(server.request("GET", "/openapi.json")[2])
        summary = document["paths"]["/v2/health/ready"]["get"]["summary"]
        assert "200 while a model serves, with --ready-when all while every model" in summary
        assert server.request("POST", "/v2/repository/models/row_sums/unload")[0] == 200
        assert probes(server) == {False}, "nothing of what should serve does"
        assert server.request("POST", "/v2/repository/models/wrong/unload")[0] == 200
        assert probes(server) == {True}, "nothing is to be served"
        assert server.request("POST", "/v2/repository/models/busy/load")[0] == 200
        assert probes(server) == {True}
        server.stop()


def test_the_environment_sets_every_option_and_the_command_line_beats_it(
    good: Path, mixed: Path, tmp_path: Path
) -> None:
    http_port, metrics_port = free_port(), free_port()
    environment = {
        "HEADRACE_MODEL_REPOSITORY": os.pathsep.join([str(tmp_path / "good"), str(tmp_path / "mixed")]),
        "HEADRACE_HOST": HOST,
        "HEADRACE_HTTP_PORT": str(http_port),
        "HEADRACE_GRPC_PORT": "0",
        "HEADRACE_METRICS_PORT": str(metrics_port),
        "HEADRACE_MAX_BODY_BYTES": "500",
        "HEADRACE_MODEL_CONTROL": "explicit",
        "HEADRACE_LOAD_MODEL": "row_sums",
        "HEADRACE_LOG_FORMAT": "json",
        "HEADRACE_STRICT": "true",
    }
    with (tmp_path / "log").open("wb") as log:
        process = start_process([*COMMAND, "serve", "--max-body-bytes", "600"], {**os.environ, **environment}, log, log)
    server = Server(process, tmp_path / "log")
    try:
        server.wait_until_ready()
        assert server.port == http_port
        # Only the model named is loaded; whatever else is there is listed, for a client to load.
        assert index(server) == {"row_sums": "READY", "busy": "UNAVAILABLE", "wrong": "UNAVAILABLE"}
        status, _, answer = server.request("GET", "/v2/models/busy")
        assert (status, "is not loaded" in json.loads(answer)["error"]) == (503, True)
        assert server.request("GET", "/v2/health/ready")[0] == 200
        assert server.request("GET", "/metrics")[0] == 404
        apart = Server(process, server.log, metrics_port)
        status, _, page = apart.request("GET", "/metrics")
        assert status == 200
        assert b'headrace_requests_total{model="row_sums",version="1"} 0.0' in page
        assert server.request("POST", "/v2/models/row_sums/infer", bytes(601))[0] == 413
        assert server.request("POST", "/v2/models/row_sums/infer", bytes(599))[0] == 400
        lines = [json.loads(line) for line in server.text.splitlines() if line.startswith("{")]
        assert any(line["message"] == "model row_sums serves version 1" for line in lines)
        assert f"metrics: http://{HOST}:{metrics_port}/metrics " in server.text
    finally:
        server.stop()


def test_metrics_can_be_turned_off(good: Path, tmp_path: Path) -> None:
    with serving(good, tmp_path, "--no-metrics") as server:
        assert server.request("GET", "/metrics")[0] == 404
        assert server.request("POST", "/v2/models/row_sums/infer", row(2))[0] == 200
        stats = json.loads(server.request("GET", "/v2/models/row_sums/stats")[2])["model_stats"][0]
        assert stats["inference_stats"]["success"]["count"] == 1


@pytest.mark.parametrize(
    ("words", "environment", "status", "pattern"),
    [
        ([], {"HEADRACE_HTTP_PORT": "http"}, 2, "HEADRACE_HTTP_PORT: 'http' is not a port"),
        (["--model-repository", "no/such/folder", "--http-port", "0"], {}, 1, "no/such/folder.*is not a folder"),
    ],
)
def test_options_that_are_wrong(words: list[str], environment: dict[str, str], status: int, pattern: str) -> None:
    actual, text = refuses(*words, env=environment)
    assert actual == status, text
    assert re.search(pattern, re.sub(r"\s+", " ", text)), text
    assert "Traceback" not in text


def test_a_port_in_use(good: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind((HOST, 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        status, text = refuses("--model-repository", str(good), "--http-port", str(port))
    assert status == 1
    assert re.search(rf"cannot listen: {HOST}:{port}: .*choose another", re.sub(r"\s+", " ", text)), text
    assert "Traceback" not in text


def row(columns: int) -> bytes:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "data": [1] * columns}
    return json.dumps({"inputs": [tensor]}).encode()


def steps(count: int) -> bytes:
    return json.dumps({"inputs": [{"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [count]}]}).encode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_running_and_queued_requests_are_answered_before_exit(
    good: Path, tmp_path: Path, number: signal.Signals
) -> None:
    gate = Gate(good)
    with serving(good, tmp_path) as server, contextlib.ExitStack() as connections:

        def connect(data: bytes) -> socket.socket:
            connection = connections.enter_context(socket.create_connection((HOST, server.port), timeout=30))
            connection.sendall(data)
            return connection

        idle = connect(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(1_000).startswith(b"HTTP/1.1 200")
        # The first keeps the only instance until the others are in the queue, and the server has begun to stop.
        gate.close()
        held = post(GATE_BODY, model="gate")
        waiting = [connect(held)]
        until(lambda: b'headrace_in_flight{model="gate",version="1"} 1.0' in server.request("GET", "/metrics")[2])
        waiting += [connect(held) for _ in range(3)]
        until(lambda: b'headrace_queue_depth{model="gate",version="1"} 3.0' in server.request("GET", "/metrics")[2])
        server.signal(number)
        until(lambda: not accepts(server.port))
        gate.open()
        for connection in waiting:
            answer = b""
            while not re.search(rb"\r\n\r\n\{.+\}\Z", answer):  # its body may come in a packet of its own
                more = connection.recv(1_000)
                assert more, answer
                answer += more
            assert answer.startswith(b"HTTP/1.1 200")
        # The idle connection delayed no request.
        assert server.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            server.request("GET", "/v2/health/live")
    assert "Traceback" not in server.text


@pytest.mark.parametrize("size_bytes", [100, 1_000_000], ids=["small body", "large body"])
def test_a_client_that_never_finishes_holds_the_end_up_only_so_long(
    good: Path, tmp_path: Path, size_bytes: int
) -> None:
    with serving(good, tmp_path, "--drain-timeout-s", "1") as server:
        with socket.create_connection((HOST, server.port), timeout=30) as stalled:
            stalled.sendall(post(b"{", size_bytes))
            until(lambda: b"\nheadrace_body_bytes 1.0\n" in server.request("GET", "/metrics")[2])
            begin_s = time.monotonic()
            server.signal()
            answer = b"".join(iter(lambda: stalled.recv(10_000), b""))
            assert answer.startswith(b"HTTP/1.1 503")
            assert b'{"error":"the server is shutting down' in answer
        assert server.wait() == 0
        assert time.monotonic() - begin_s < 60  # the body would never have come
    assert "Traceback" not in server.text


def test_idle_connections_close_after_the_timeout_and_active_ones_stay_open(good: Path, tmp_path: Path) -> None:
    kept_s = 0.6
    live, infer = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", post(steps(1))
    with serving(good, tmp_path, "--keep-alive-timeout-s", str(kept_s)) as server:

        def read_answer(connection: socket.socket) -> None:
            answer = b""
            while not re.search(rb"\r\n\r\n\{.+\}\Z", answer):  # its body may come in a packet of its own
                more = connection.recv(1_000)
                assert more, answer
                answer += more
            assert answer.startswith(b"HTTP/1.1 200")

        def begin_another(connection: socket.socket, whole: bytes) -> bool:
            """A request, and the begin of another just in time; False if this machine was too slow for it."""
            begun_s = time.monotonic()
            connection.sendall(whole)
            read_answer(connection)
            time.sleep(0.8 * kept_s)
            with contextlib.suppress(ConnectionError):
                connection.sendall(whole[:10])
            return time.monotonic() - begun_s < kept_s

        def serve_parts(whole: bytes) -> bool:
            with socket.create_connection((HOST, server.port), timeout=30) as connection:
                if not begin_another(connection, whole):
                    return False
                for part in (whole[10:-5], whole[-5:]):  # it takes as long as it takes
                    time.sleep(1.5 * kept_s)
                    connection.sendall(part)
                read_answer(connection)
                answered = time.monotonic()
                assert connection.recv(1) == b""
                assert 0.9 * kept_s < time.monotonic() - answered < 60
                return True

        for whole in (live, infer):
            until(lambda whole=whole: serve_parts(whole))
    assert "Traceback" not in server.text


def post(body: bytes, size_bytes: int = 0, model: str = "busy") -> bytes:
    """A request for a model; its body is declared to have `size_bytes`, or as many as it has."""
    return b"POST /v2/models/%s/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (
        model.encode(),
        size_bytes or len(body),
        body,
    )


def test_the_console_script_serves(good: Path, tmp_path: Path) -> None:
    script = Path(sys.executable).parent / "headrace"
    server = start(good, tmp_path / "log", command=[str(script)])
    try:
        server.wait_until_ready()
        assert server.request("POST", "/v2/models/row_sums/infer", row(2))[0] == 200
        assert f"metrics: http://{HOST}:{server.port}/metrics " in server.text
    finally:
        server.stop()


def serve_paths(folder: Path, *words: str, cwd: Path = ROOT, trial_limit_s: str = "0") -> Server:
    """`headrace serve PATH...` on free ports, without helper processes that try models first."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    options = ["--host", HOST, "--http-port", "0", "--grpc-port", "0", "--state-dir", str(folder / "state")]
    options += ["--trial-limit-s", trial_limit_s]
    with (folder / "log").open("wb") as log:
        env = {**inherited, "COLUMNS": "400", "PYTHONPATH": str(ROOT)}
        process = start_process([*COMMAND, "serve", *options, *words], env, log, log, cwd)
    return Server(process, folder / "log")


def tried(server: Server) -> str:
    """Output of the command in the banner."""
    (line,) = [line.removeprefix("Try:  ") for line in server.text.splitlines() if line.startswith("Try:  ")]
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


def test_model_files_are_served_under_their_names(tmp_path: Path) -> None:
    (tmp_path / "my pictures.onnx").write_bytes(models.pictures(classes=3).SerializeToString())
    external = models.affine()
    onnx.save(external, tmp_path / "large.onnx", save_as_external_data=True, location="large.bin", size_threshold=0)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.onnx").write_bytes(models.scores().SerializeToString())
    (tmp_path / "bare" / "config.yaml").write_text("max_batch_size: 3\n")
    before = sorted(tmp_path.rglob("*"))
    server = serve_paths(tmp_path, "my pictures.onnx", "large.onnx", "bare", cwd=tmp_path, trial_limit_s="100")
    try:
        server.wait_until_ready()
        assert index(server) == {"my_pictures": "READY", "large": "READY", "bare": "READY"}
        assert len(json.loads(tried(server))["outputs"][0]["data"]) == 3, "the banner's line is for the first file"
        assert json.loads(server.request("GET", "/v2/models/bare/config")[2])["max_batch_size"] == 3
        tensor = {"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1] * 16}
        body = json.dumps({"inputs": [tensor]}).encode()
        assert server.request("POST", "/v2/models/large/infer", body)[0] == 200
    finally:
        server.stop()
    after = [path for path in sorted(tmp_path.rglob("*")) if path.name != "log" and "state" not in path.parts]
    assert after == before, "nothing is written beside the files"
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["profiles", "tried"], (
        "what was measured stays"
    )


@pytest.mark.parametrize(("folder", "files"), [("digits", "digits-v7.onnx"), ("models", "1/model.onnx")])
def test_a_folder_with_one_model_is_served_under_a_given_name(tmp_path: Path, files: str, folder: str) -> None:
    """As KServe mounts a model: the folder's name is not the model's."""
    file = tmp_path / "mnt" / folder / files
    file.parent.mkdir(parents=True)
    file.write_bytes(models.sum_difference().SerializeToString())
    before = sorted((tmp_path / "mnt").rglob("*"))
    server = serve_paths(tmp_path, str(tmp_path / "mnt" / folder), "--model-name", "digits")
    try:
        server.wait_until_ready()
        assert index(server) == {"digits": "READY"}
        assert server.request("GET", "/v2/models/digits/ready")[0] == 200
    finally:
        server.stop()
    assert sorted((tmp_path / "mnt").rglob("*")) == before, "the model is neither changed nor removed"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["profiles"], "no link stays"


def test_a_renamed_folder_keeps_its_configuration_and_its_links(tmp_path: Path) -> None:
    folder = models.add_model(tmp_path, "pvc", models.sum_difference(), files={"config.yaml": "max_batch_size: 3\n"})
    (folder / "2").symlink_to("1")
    (folder / "3").symlink_to(models.add_model(tmp_path, "elsewhere", models.sum_difference()) / "1")
    server = serve_paths(tmp_path, str(folder), "--model-name", "digits")
    try:
        server.wait_until_ready()
        assert "digits/3: error: is a link that leads out of the repository" in " ".join(server.text.split())
        (folder / "3").unlink()
    finally:
        server.stop()
    server = serve_paths(tmp_path, str(folder), "--model-name", "digits")
    try:
        server.wait_until_ready()
        assert json.loads(server.request("GET", "/v2/models/digits/config")[2])["max_batch_size"] == 3
        assert server.request("GET", "/v2/models/digits/versions/2/ready")[0] == 200
    finally:
        server.stop()


def test_models_of_a_repository_keep_their_names(good: Path, tmp_path: Path) -> None:
    """One command line of KServe serves both: a repository, or the files of one model."""
    server = serve_paths(tmp_path, str(good), "--model-name", "digits")
    try:
        server.wait_until_ready()
        assert index(server) == {"row_sums": "READY", "busy": "READY"}
    finally:
        server.stop()


def test_small_inputs_are_tried_as_json(tmp_path: Path) -> None:
    (tmp_path / "add.onnx").write_bytes(models.sum_difference().SerializeToString())
    server = serve_paths(tmp_path, str(tmp_path / "add.onnx"))
    try:
        server.wait_until_ready()
        assert [output["name"] for output in json.loads(tried(server))["outputs"]] == ["SUM", "DIFFERENCE"]
    finally:
        server.stop()


def test_a_model_of_a_repository_may_be_named_without_an_option(good: Path, tmp_path: Path) -> None:
    server = serve_paths(tmp_path, str(good / "row_sums"), "--model-control", "poll")
    try:
        server.wait_until_ready()
        assert index(server) == {"row_sums": "READY"}, "the models beside it are not served"
    finally:
        server.stop()


def test_a_model_name_that_cannot_be_used_is_refused() -> None:
    status, text = refuses("--model-name", "../x", "model.onnx")
    assert (status, "'../x' cannot be a model's name: use letters, digits" in text) == (2, True), text
    status, text = refuses("--model-name", "x")
    assert (status, "--model-name x: error: names the model of a PATH, and there is none" in text) == (1, True), text


def test_commands_suggest_the_nearest_model(good: Path, tmp_path: Path) -> None:
    with serving(good, tmp_path) as server:
        for words in (
            ["explain", "row_sum", "--url", server.url],
            ["infer", "row_sum", "--json-input", str(tmp_path / "x.json"), "--url", server.grpc_address],
        ):
            (tmp_path / "x.json").write_bytes(row(2))
            done = run_headrace(*words)
            assert done.returncode == 1
            assert "did you mean" in done.stderr, done.stderr
            assert "row_sums" in done.stderr
    done = run_headrace("m.onnx", "--http-port", "0")
    assert done.returncode == 2
    assert "did you mean headrace serve m.onnx --http-port 0?" in done.stderr


@pytest.mark.parametrize("options", [(), ("--front-ends", "1")], ids=["one process", "front end"])
def test_no_process_of_the_server_loads_grpcio(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = models.add_model(tmp_path / "models", "affine", models.affine(), config="max_batch_size: 8\n")
    assert (folder / "config.pbtxt").is_file(), "read with Triton's messages"
    with serving(tmp_path / "models", tmp_path, *options) as server:
        with grpc.insecure_channel(server.grpc_address) as channel:
            services = ProtoReflectionDescriptorDatabase(channel).get_services()
            assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            assert client.get_model_config("affine").config.max_batch_size == 8
        pids = [server.process.pid, *children(server.process.pid)]
        mapped = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    assert "inference.GRPCInferenceService" in services
    assert "cygrpc" not in mapped, "the extension module of grpcio, which every import of it loads"


def test_the_command_of_a_server_with_keys_needs_the_key(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path)
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    with serving(good, tmp_path, "--api-keys-file", str(keys.path)) as server:
        assert "send Authorization: Bearer KEY" in json.loads(tried(server))["error"]
        monkeypatch.setenv("HEADRACE_API_KEY", keys.keys["read"])
        assert {model["name"] for model in json.loads(tried(server))["models"]} == {"row_sums", "busy"}
