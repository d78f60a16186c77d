"""The bench against real processes: that it starts, loads and stops them, and believes no server that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest import servers
from loadtest.bench import clients
from loadtest.bench.clients import Load
from loadtest.load import LoadFailed
from loadtest.protocol import HttpRequest, send
from loadtest.servers import ROOT, ServerCommand, ServerFailed, running

pytestmark = pytest.mark.slow

TINY = ROOT / "model_repository" / "tiny"
needs_models = pytest.mark.skipif(not TINY.is_dir(), reason="the demo models are not built: `make models`")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the bench needs two cores")
needs_clients = pytest.mark.skipif(bool(clients.missing()), reason=clients.missing())


@needs_clients
def test_a_peer_is_started_loaded_and_stopped(tmp_path: Path) -> None:
    request = HttpRequest("/anything", b"x" * 1000, {"Content-Type": "application/octet-stream"})
    with running(servers.peer("bare_asgi", "bare", "--answer-bytes", "123"), tmp_path) as server:
        assert send(servers.HOST, server.port, request)[2] == b"o" * 123
        sample = clients.run_http(server.url, Load(request, 4, seconds=1, record_completions=True), tmp_path)
    assert sample.requests > 100
    assert len(sample.completions_s) == sample.requests
    assert 0 < sample.p50_us <= sample.p99_us


@needs_clients
def test_errors_of_a_server_fail_the_run(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    write_sum(model)
    with running(servers.peer("naive_fastapi", "naive", "--model", str(model)), tmp_path) as server:
        wrong = HttpRequest("/predict", b"{}", {"Content-Type": "application/json"})
        with pytest.raises(LoadFailed, match="status"):
            clients.run_http(server.url, Load(wrong, connections=2, seconds=1), tmp_path)


def test_a_server_that_does_not_start_raises_its_reason(tmp_path: Path) -> None:
    command = ServerCommand("broken", (sys.executable, "-c", "import sys; sys.exit('no such model')"))
    with pytest.raises(ServerFailed, match="no such model"), running(command, tmp_path):
        pass


def test_a_server_that_exits_badly_is_no_success(tmp_path: Path) -> None:
    code = (
        "import http.server, sys\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200)\n"
        "        self.end_headers()\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[2])), Handler).serve_forever()\n"
    )
    with (
        pytest.raises(ServerFailed, match="exited with -15 after SIGTERM"),
        running(ServerCommand("rude", (sys.executable, "-c", code)), tmp_path),
    ):
        pass


@needs_clients
@needs_models
@needs_two_cores
def test_quick_bench_measures_headrace_and_its_peers(tmp_path: Path) -> None:
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    command = [sys.executable, "-m", "loadtest.bench", "--quick", "--only", "tiny-1"]
    command += ["--json", str(results), "--markdown", str(page)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (result,) = json.loads(results.read_text())["results"]
    assert {figure["contender"] for figure in result["figures"]} >= {"headrace", "bare ASGI", "naive FastAPI"}
    assert all(figure["spread"]["median"] > 0 for figure in result["figures"])
    assert "| headrace | requests/s |" in page.read_text()


@needs_clients
@needs_models
@needs_two_cores
def test_quick_bench_compares_two_checkouts(tmp_path: Path) -> None:
    words = ["--against", sys.executable, "--only", "grpc-tiny-64", "in-process-1", "resnet50"]
    results = quick_results(*words, folder=tmp_path)
    assert [result["name"] for result in results] == ["grpc-tiny-64", "in-process-1"]
    for result in results:
        rates = [figure for figure in result["figures"] if figure["unit"] == "requests/s"]
        assert [figure["contender"] for figure in rates] == ["headrace", "headrace of --against"]
        assert all(figure["spread"]["median"] > 0 for figure in rates)
        assert result["comparisons"][0]["label"] == "headrace / headrace of --against, requests/s"


@needs_clients
@needs_two_cores
def test_quick_bench_measures_features_beside_a_plain_model(tmp_path: Path) -> None:
    results = quick_results("--only", "python-1", "cache-1", "pipeline-1", folder=tmp_path)
    assert [result["comparisons"][0]["label"].split(" / ")[0] for result in results] == ["python", "cached", "pipeline"]
    assert all(figure["spread"]["median"] > 0 for result in results for figure in result["figures"])


def quick_results(*words: str, folder: Path) -> list[dict[str, Any]]:
    """Results of `--quick` with these options; a failed case makes the exit status 2."""
    results = folder / "results.json"
    command = [sys.executable, "-m", "loadtest.bench", "--quick", "--json", str(results), *words]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    actual: list[dict[str, Any]] = json.loads(results.read_text())["results"]
    return actual


def write_sum(path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("input", "output")]
    graph = helper.make_graph(
        [helper.make_node("Add", ["input", "input"], ["output"])], "sum", tensors[:1], tensors[1:]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
