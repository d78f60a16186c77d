"""`isolation: process` in a real server: the process of a model, and the server itself, are killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.models import add_model, affine
from tests.support.processes import alive, children, isolated_children, stop
from tests.support.serving import Server, serving, start
from tests.support.waiting import until

BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 16], "data": [1.0] * 16}]}).encode()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    repository = tmp_path / "repository"
    add_model(repository, "apart", affine(seed=1), files={"config.yaml": "isolation: process\n"})
    add_model(repository, "within", affine(seed=1))
    return repository


def answer(server: Server, model: str) -> tuple[int, object]:
    status, _headers, body = server.request("POST", f"/v2/models/{model}/infer", BODY)
    return status, json.loads(body).get("outputs")


def ready(server: Server) -> int:
    return server.request("GET", "/v2/health/ready")[0]


def test_a_killed_process_is_replaced_and_everything_else_serves_on(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path) as server:
        assert answer(server, "apart") == answer(server, "within")
        (child,) = isolated_children(server.process.pid)
        os.kill(child, signal.SIGKILL)
        assert answer(server, "within")[0] == 200
        assert answer(server, "apart") == answer(server, "within")
        until(lambda: ready(server) == 200)
        assert isolated_children(server.process.pid) != [child]
        page = server.request("GET", "/metrics")[2].decode()
        assert 'headrace_model_process_restarts_total{model="apart",version="1"} 1.0' in page
        assert 'headrace_model_process_up{model="apart",version="1"} 1.0' in page
        assert 'model="within",version="1"} 1.0' not in page[page.index("headrace_model_process") :].split("# ")[0]
    assert "the process of apart has died: killed by SIGKILL" in server.text


def test_a_process_that_is_stopped_ends_with_a_server_that_is_killed(repository: Path, tmp_path: Path) -> None:
    with start(repository, tmp_path / "log") as server:
        server.wait_until_ready()
        (child,) = isolated_children(server.process.pid)
        stop(child)  # as one that hangs: it cannot see that its socket is closed
    until(lambda: not alive(child))


def test_ctrl_c_and_sigterm_to_all_of_them_end_in_order(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path) as server:
        (child,) = children(server.process.pid)
        os.kill(child, signal.SIGTERM)
        os.kill(child, signal.SIGINT)
        assert answer(server, "apart")[0] == 200
        assert isolated_children(server.process.pid) == [child], "it waits for the server"
    assert not alive(child)
    assert "has died" not in server.text
