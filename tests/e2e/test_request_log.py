"""The request log of a real server: one line for each request, over both protocols and all engines, as JSON and text."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from headrace.observability.access_log import SAMPLED_ONE_IN
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.grpc_requests import Collector, tensor
from tests.support.serving import COMMAND, HOST, ROOT, Server, look_quick, serving, start
from tests.support.waiting import until

X = np.ones((2, 16), np.float32)
TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
BODY = json.dumps(
    {"id": "an id", "inputs": [{"name": "X", "datatype": "FP32", "shape": [2, 16], "data": [1.0] * 32}]}
).encode()
TIMES = ["decode_us", "queue_us", "assemble_us", "compute_us", "split_us", "encode_us", "total_us"]


def repository(folder: Path) -> Path:
    models.add_model(folder / "models", "affine", models.affine())
    models.add_model(folder / "models", "busy", models.busy())
    return folder / "models"


class Log:
    """The lines of a server, from the last `clear` on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._from = 0

    def clear(self) -> None:
        self._from = len(self._lines())

    def wait(self, count: int = 1) -> list[dict[str, Any]]:
        until(lambda: len(self._lines()) >= self._from + count)
        log_lines = [json.loads(line) for line in self._lines()[self._from :]]
        assert len(log_lines) == count, log_lines
        return log_lines

    def clear_behind(self, request_id: str) -> None:
        """Forget everything up to this request, once it is there."""
        until(lambda: any(json.loads(line)["id"] == request_id for line in self._lines()))
        self.clear()

    def _lines(self) -> list[str]:
        return self._path.read_text(encoding="ascii").splitlines() if self._path.exists() else []


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Log]]:
    folder = tmp_path_factory.mktemp("logged")
    file = folder / "requests.jsonl"
    options = ("--request-log", "all", "--request-log-file", str(file))
    with serving(repository(folder), folder, *options) as server:
        yield server, Log(file)
        assert "Traceback" not in server.text


@pytest.fixture
def clean(logged: tuple[Server, Log]) -> tuple[Server, Log]:
    logged[1].clear()
    return logged


def check(line: dict[str, Any], protocol: str, status: str) -> None:
    assert (line["protocol"], line["status"], line["level"]) == (protocol, status, "info")
    assert (line["model"], line["version"], line["rows"]) == ("affine", "1", 2)
    assert (line["trace_id"], line["client"], line["reason"]) == (TRACE, "me", "ok")
    assert line["batch"]["rows"] == 2
    assert line["batch"]["closed"] == "idle"
    assert list(line["times"]) == TIMES
    assert abs(sum(line["times"][name] for name in TIMES[:-1]) - line["times"]["total_us"]) <= len(TIMES)
    assert line["logger"] == "headrace.request"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", line["time"])


def test_a_request_over_http(clean: tuple[Server, Log]) -> None:
    server, log = clean
    headers = {**TRACEPARENT, "x-headrace-client": "me"}
    assert server.request("POST", "/v2/models/affine/infer", BODY, headers)[0] == 200
    (line,) = log.wait()
    check(line, "http", "200")
    assert line["id"] == "an id"


def test_requests_over_grpc(clean: tuple[Server, Log]) -> None:
    server, log = clean
    headers = {**TRACEPARENT, "x-headrace-client": "me"}
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        client.infer("affine", [tensor("X", X)], headers=headers, request_id="one")
        collect = Collector()
        client.start_stream(collect, headers=headers)
        client.async_stream_infer("affine", [tensor("X", X)], request_id="two")
        assert collect.take(1)[0][1] is None
        client.stop_stream()
    lines = log.wait(2)
    for line in lines:
        check(line, "grpc", "OK")
    assert [line["id"] for line in lines] == ["one", "two"]


def test_errors_of_both_protocols(clean: tuple[Server, Log]) -> None:
    server, log = clean
    assert server.request("POST", "/v2/models/nothing/versions/7/infer", BODY, TRACEPARENT)[0] == 404
    assert server.request("POST", "/v2/models/affine/infer", b"{}")[0] == 400
    with triton_grpc.InferenceServerClient(server.grpc_address) as client, pytest.raises(InferenceServerException):
        client.infer("affine", [tensor("X", X[:, :3])], request_id="wrong")
    unknown, empty, wrong = log.wait(3)
    assert (unknown["model"], unknown["version"], unknown["status"]) == ("nothing", "7", "404")
    assert (unknown["level"], unknown["reason"], unknown["trace_id"]) == ("warning", "not_found", TRACE)
    assert (empty["status"], empty["reason"]) == ("400", "bad_request")
    assert (wrong["status"], wrong["id"]) == ("INVALID_ARGUMENT", "wrong")
    assert all(line["error"] and "batch" not in line for line in (unknown, empty, wrong))


def test_expired_and_cancelled_requests(clean: tuple[Server, Log]) -> None:
    server, log = clean
    steps = 3 * look_quick(server)
    slow = {"name": "STEPS", "datatype": "INT64", "shape": [1], "data": [steps]}
    body = json.dumps({"id": "late", "inputs": [slow]}).encode()
    assert server.request("POST", "/v2/models/affine/infer", BODY.replace(b"an id", b"behind them"))[0] == 200
    log.clear_behind("behind them")
    assert server.request("POST", "/v2/models/busy/infer", body, {"X-Request-Timeout-Ms": "500"})[0] == 504
    with pytest.raises(TimeoutError):
        server.request("POST", "/v2/models/busy/infer", body.replace(b"late", b"gone"), timeout_s=0.1)
    tensors = [tensor("STEPS", np.array([steps], np.int64), "INT64")]
    with triton_grpc.InferenceServerClient(server.grpc_address) as client, pytest.raises(InferenceServerException):
        client.infer("busy", tensors, request_id="rpc", client_timeout=0.6)
    lines = {
        line["id"]: line for line in log.wait(3)
    }  # one that has disconnected may be noticed after the next has ended
    late, cancelled, rpc = lines["late"], lines["gone"], lines["rpc"]
    assert (late["status"], late["reason"], late["level"]) == ("504", "deadline", "error")
    assert (cancelled["status"], cancelled["reason"], cancelled["level"]) == ("499", "cancelled", "warning")
    assert rpc["reason"] in ("deadline", "cancelled")
    assert late["times"]["queue_to_split_us"] >= 200_000


def test_no_client_forges_lines_or_leaks_secrets(clean: tuple[Server, Log]) -> None:
    server, log = clean
    hostile = BODY.replace(b"an id", b'\\"}\\n{\\u001b[2J\\u202e\\ud800 token=abc123 Bearer eyJabcdefghij.x.y')
    assert server.request("POST", "/v2/models/affine/infer", hostile)[0] in (200, 400)
    assert server.request("POST", "/v2/models/%0a%7b%1b%5b2J/infer", BODY)[0] in (400, 404)
    lines = log.wait(2)
    text = json.dumps(lines)
    assert "abc123" not in text
    assert "eyJ" not in text


def test_a_sample_of_requests_and_all_errors_are_logged(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    options = ("--request-log", "sampled", "--request-log-file", str(file))
    with serving(repository(tmp_path), tmp_path, *options) as server:
        for _ in range(2 * SAMPLED_ONE_IN):
            assert server.request("POST", "/v2/models/affine/infer", BODY)[0] == 200
        assert server.request("POST", "/v2/models/affine/infer", b"{}")[0] == 400
    statuses = [json.loads(line)["status"] for line in file.read_text().splitlines()]
    assert statuses == ["200", "200", "400"]


def test_errors_are_logged_to_standard_error_by_default(tmp_path: Path) -> None:
    with serving(repository(tmp_path), tmp_path) as server:
        assert server.request("POST", "/v2/models/affine/infer", BODY)[0] == 200
        assert server.request("POST", "/v2/models/affine/infer", b"{}")[0] == 400
    lines = [line for line in server.text.splitlines() if " http " in line]
    assert [line[26:52] for line in lines] == ["WARNING  http 400  affine/"], "text in a log of text"
    with serving(tmp_path / "models", tmp_path, "--log-format", "json") as server:
        assert server.request("POST", "/v2/models/affine/infer", b"{}")[0] == 400
    lines = [line for line in server.text.splitlines() if '"headrace.request"' in line]
    assert [json.loads(line)["status"] for line in lines] == ["400"]


def test_a_key_that_names_the_client_is_logged_as_a_pseudonym(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    options = ("--request-log", "all", "--request-log-file", str(file), "--client-header", "x-api-key")
    with serving(repository(tmp_path), tmp_path, *options) as server:
        for key in ("hunter2hunter2", "hunter2hunter2", "swordfish", "not a key"):
            server.request("POST", "/v2/models/affine/infer", BODY, {"x-api-key": key})
    clients = [json.loads(line)["client"] for line in file.read_text().splitlines()]
    assert len(clients) == 4
    assert clients[0] == clients[1] != clients[2]
    assert all(client.startswith("secret-") for client in clients[:3])
    assert not any(key in file.read_text() + server.text for key in ("hunter2", "swordfish", "not a key"))


def test_on_a_terminal_people_read_it(tmp_path: Path) -> None:
    controller, terminal = pty.openpty()
    words = [*COMMAND, "serve", "--model-repository", str(repository(tmp_path)), "--host", HOST, "--http-port", "0"]
    words += ["--no-grpc", "--request-log", "all"]
    out = tmp_path / "out"
    with out.open("wb") as stream:
        env = {**os.environ, "HEADRACE_STATE_DIR": "", "COLUMNS": "200"}
        process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=stream, stderr=terminal)
    os.close(terminal)
    try:
        server = Server(process, out)
        server.wait_until_ready()
        headers = {"x-headrace-client": "me"}
        assert server.request("POST", "/v2/models/affine/infer", BODY, headers)[0] == 200
        printed = b""
        while b"http 200" not in printed or not printed.endswith(b"\n"):
            printed += os.read(controller, 4096)
        server.stop()
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    (line,) = [line for line in printed.decode().splitlines() if "http 200" in line]
    assert "  affine/1  " in line
    assert "rows 2  of 2 (idle)  client me  id an id" in line
    assert not line.startswith("{")


def test_a_file_that_cannot_be_written_is_reported_at_the_start(tmp_path: Path) -> None:
    server = start(repository(tmp_path), tmp_path / "log", "--request-log-file", str(tmp_path / "missing" / "r"))
    assert server.wait() == 1
    assert "--request-log-file" in server.text
    assert "Traceback" not in server.text
