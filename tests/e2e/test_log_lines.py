"""The server's output line by line: one line for each event in files, only JSON with `--log-format json`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import CONTRADICTING
from tests.support.models import add_model, affine, row_sums
from tests.support.processes import isolated_children
from tests.support.serving import COMMAND, HOST, ROOT, Server, run_headrace, serving, start_process
from tests.support.waiting import until

BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()
ISO_8601 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
LOCAL_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"
LEVELS = {"debug", "info", "warning", "error", "critical"}
LONG = "a_model_whose_name_alone_is_longer_than_the_eighty_columns_at_which_a_terminal_would_be_folded"


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "COLUMNS"))}
    return {**inherited, "HEADRACE_STATE_DIR": "", **variables}


@contextmanager
def json_server(repository: Path, folder: Path, *options: str) -> Iterator[tuple[Server, Path]]:
    """A server with a JSON log; standard output and standard error go to a file each."""
    out, err = folder / "out", folder / "err"
    words = [*COMMAND, "serve", "--model-repository", str(repository), "--host", HOST, "--http-port", "0"]
    words += ["--grpc-port", "0", "--log-format", "json", *options]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = start_process(words, environment(), stdout, stderr)
    server = Server(process, err)
    try:
        server.wait_until_ready()
        yield server, out
    finally:
        process.kill()
        process.wait()


def parsed(text: str) -> list[dict[str, Any]]:
    """Every line as JSON; fails on any that is not."""
    lines: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            pytest.fail(f"not JSON: {line!r}")
        assert ISO_8601.fullmatch(lines[-1]["time"]), line
        assert lines[-1]["level"] in LEVELS, line
        assert lines[-1]["logger"], line
    return lines


def test_every_line_of_a_servers_life_is_json(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "good", affine())
    add_model(repository, "apart", affine(), files={"config.yaml": "isolation: process\n"})
    add_model(repository, "wrong", affine(), config=CONTRADICTING)
    options = ("--model-control", "explicit", "--load-model", "*", "--request-log", "all")
    with json_server(repository, tmp_path, *options) as (server, out):
        for name in ("good", "apart"):
            assert server.request("POST", f"/v2/models/{name}/infer", BODY)[0] == 200
        assert server.request("POST", "/v2/models/good/infer", b"{}")[0] == 400
        assert server.request("POST", "/v2/models/absent/infer", BODY)[0] == 404
        (child,) = isolated_children(server.process.pid)
        os.kill(child, signal.SIGKILL)
        until(lambda: server.request("POST", "/v2/models/apart/infer", BODY)[0] == 200)
        assert server.request("POST", "/v2/repository/models/good/load")[0] == 200
        assert server.request("POST", "/v2/repository/models/wrong/load")[0] >= 400
        assert server.request("POST", "/v2/repository/models/good/unload")[0] == 200
        assert server.request("POST", "/v2/logging", b'{"log_verbose_level": 1}')[0] == 200
        with socket.create_connection((HOST, server.port)) as sock:
            sock.sendall(b"no HTTP at all\r\n\r\n")
            sock.recv(1000)
        with socket.create_connection((HOST, server.grpc_port)) as sock:
            sock.sendall(b"no HTTP/2 at all\r\n\r\n" * 10)
        client = triton_grpc.InferenceServerClient(server.grpc_address)
        with pytest.raises(InferenceServerException):
            client.infer("absent", [])
        client.close()
        assert server.request("POST", "/v2/repository/models/good/load")[0] == 200
        server.stop()
        lines = parsed(server.text)
        assert out.read_text() == ""
    table = {line["model"]: line for line in lines if line.get("event") == "startup_model"}
    assert {name: line["state"] for name, line in table.items()} == {
        "good": "READY",
        "apart": "READY",
        "wrong": "UNAVAILABLE",
    }
    (listening,) = [line for line in lines if line.get("event") == "listening"]
    assert listening["http"] == server.url
    assert listening["grpc"] == server.grpc_address
    assert listening["metrics"] == f"{server.url}/metrics"
    messages = "\n".join(line.get("message", "") for line in lines)
    for words in ("model good serves version 1", "wrong/config.pbtxt", "the process of apart has died"):
        assert words in messages
    assert {line["status"] for line in lines if line["logger"] == "headrace.request"} >= {"200", "400", "404"}


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--http-port", "x", "--log-format", "json"], {}, "--http-port"),
        ([], {"HEADRACE_LOG_FORMAT": "json", "HEADRACE_HTTP_PORT": "x"}, "HTTP_PORT"),
        (["--log-format", "json", "--model-repository", "/no/such/folder"], {}, "/no/such/folder"),
    ],
)
def test_a_refusal_to_start_is_json(words: list[str], variables: Mapping[str, str], message: str) -> None:
    ports = ["--http-port", "0", "--no-grpc"]
    done = run_headrace("serve", *ports, *words, env=environment(**variables))
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    lines = parsed(done.stderr)
    assert message in "\n".join(line["message"] for line in lines if line["level"] == "error")


def test_a_port_in_use_is_logged_in_json(tmp_path: Path) -> None:
    with socket.socket() as occupied:
        occupied.bind((HOST, 0))
        occupied.listen()
        port = str(occupied.getsockname()[1])
        for option in ("--http-port", "--grpc-port"):
            words = ["serve", "--model-repository", str(tmp_path), "--log-format", "json"]
            words += ["--http-port", "0", "--grpc-port", "0", option, port]
            done = run_headrace(*words, env=environment())
            assert done.returncode == 1, done.stderr
            assert "cannot listen" in parsed(done.stdout + done.stderr)[-1]["message"]


SURPRISES = """
import gc, logging, sys, threading, warnings
from headrace.server.program import configure_logging
configure_logging({format!r})
warnings.warn("a library warns", stacklevel=1)
def fail(): raise RuntimeError("of a thread")
thread = threading.Thread(target=fail, name="surprise"); thread.start(); thread.join()
class Ending:
    def __del__(self): raise RuntimeError("of a destructor")
Ending(); gc.collect()
logging.getLogger("library").warning("of a library")
raise ValueError("of the main thread")
"""


def surprises(log_format: str) -> str:
    code = SURPRISES.format(format=log_format)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr


def test_warnings_and_uncaught_exceptions_are_json() -> None:
    lines = parsed(surprises("json"))
    assert [line["level"] for line in lines] == ["warning", "critical", "error", "warning", "critical"]
    assert "a library warns" in lines[0]["message"]
    assert "surprise" in lines[1]["message"]
    assert lines[3]["message"] == "of a library"
    for line, words in ((lines[1], "of a thread"), (lines[2], "of a destructor"), (lines[4], "of the main thread")):
        assert line["exception"].startswith("Traceback")
        assert words in line["exception"].splitlines()[-1]


def test_warnings_and_uncaught_exceptions_are_lines_of_text() -> None:
    lines = [line for line in surprises("text").splitlines() if not line.startswith("  ")]
    assert len(lines) == 5
    assert all(re.match(rf"{LOCAL_TIME} (WARNING|ERROR|CRITICAL) ", line) for line in lines)


def test_text_in_files_is_not_folded(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "affine", affine())
    add_model(repository, LONG, row_sums())
    add_model(repository, f"{LONG}_too", affine(), config=CONTRADICTING)
    with serving(repository, tmp_path, env={"COLUMNS": "40"}) as server:
        assert server.request("POST", "/v2/models/affine/infer", BODY)[0] == 200
    lines = server.text.splitlines()
    assert any(re.fullmatch(rf"{LOCAL_TIME} INFO     model {LONG} serves version 1", line) for line in lines)
    assert any(re.fullmatch(rf"{LONG} +1 +READY.*", line.rstrip()) for line in lines), server.text
    assert any(f"{LONG}_too/config.pbtxt" in line and "error:" in line for line in lines)
    log = [line for line in lines if re.match(LOCAL_TIME, line)]
    table = [line for line in lines if not re.match(f"{LOCAL_TIME}| ", line)]
    assert len(table) == 1 + 3 + 1 + 1 + 1 + 6, (
        "header, models, a reason, counts, empty line, addresses, access, processes"
    )
    assert "2 models ready, 1 failed" in table
    assert not any(":" in line for line in table[:4]), "a long reason would widen every row"
    assert len(log) + len(table) == len(lines), server.text
    assert "\x1b" not in server.text
