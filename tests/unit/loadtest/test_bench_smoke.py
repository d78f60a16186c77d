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
from loadtest.bench import h2load, session, wrk
from loadtest.bench.cases import cache
from loadtest.bench.cases.http import idle_connections
from loadtest.protocol import HttpRequest, send
from loadtest.servers import ROOT, ServerCommand, ServerFailed, running

pytestmark = pytest.mark.slow

TINY = ROOT / "model_repository" / "tiny"
needs_models = pytest.mark.skipif(not TINY.is_dir(), reason="the demo models are not built: `make models`")
needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the bench needs two cores")
needs_h2load = pytest.mark.skipif(not h2load.is_installed(), reason=h2load.HOW_TO_INSTALL)
needs_wrk = pytest.mark.skipif(not wrk.is_installed(), reason=wrk.HOW_TO_INSTALL)


@needs_wrk
def test_a_peer_is_started_loaded_and_stopped(tmp_path: Path) -> None:
    request = HttpRequest("/anything", b"x" * 1000, {"Content-Type": "application/octet-stream"})
    with running(servers.peer("bare_asgi", "bare", "--answer-bytes", "123"), tmp_path) as server:
        assert send(servers.HOST, server.port, request)[2] == b"o" * 123
        load = wrk.Load((request,), connections=4, seconds=1, record_completions=True)
        sample = wrk.run(server.url, load, tmp_path)
        assert servers.resident_bytes(server.pid) > 1_000_000
        assert servers.cpu_seconds(server.pid) > 0
        with idle_connections(server.port, 20):
            pass
    assert sample.requests > 100
    assert len(sample.completions_s) == sample.requests
    assert 0 < sample.p50_us <= sample.p99_us <= sample.max_us


@needs_wrk
def test_errors_of_a_server_fail_the_run(tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    write_sum(model)
    with running(servers.peer("naive_fastapi", "naive", "--model", str(model)), tmp_path) as server:
        wrong = HttpRequest("/predict", b"{}", {"Content-Type": "application/json"})
        with pytest.raises(wrk.LoadFailed, match="status"):
            wrk.run(server.url, wrk.Load((wrong,), connections=2, seconds=1), tmp_path)


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


@needs_wrk
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


@needs_wrk
@needs_h2load
@needs_models
@needs_two_cores
def test_quick_bench_measures_streams_beside_unary_calls(tmp_path: Path) -> None:
    (result,) = quick_results("grpc-stream-64", folder=tmp_path)
    servers_and_ways = {figure["contender"] for figure in result["figures"]}
    assert {name.split(", ")[-1] for name in servers_and_ways} == {"unary", "stream"}
    assert {name.rsplit(", ", 1)[0] for name in servers_and_ways} == {
        "headrace, fast engine",
        "headrace, grpcio engine",
        "bare grpc.aio echo",
    }
    assert all(figure["spread"]["median"] > 0 for figure in result["figures"])
    assert [comparison["target"]["bound"] for comparison in result["comparisons"] if comparison["target"]] == [1.5, 1.5]


@needs_wrk
@needs_two_cores
def test_quick_bench_measures_shared_memory_in_copies(tmp_path: Path) -> None:
    (result,) = quick_results("shm", folder=tmp_path)
    assert all(figure["spread"]["median"] > 0 for figure in result["figures"])
    (judged,) = (comparison for comparison in result["comparisons"] if comparison["target"])
    assert judged["target"]["bound"] == 1.5
    assert "one copy by the kernel" in judged["label"]


@needs_wrk
@needs_models
@needs_two_cores
def test_quick_bench_measures_the_cost_of_keys(tmp_path: Path) -> None:
    (result,) = quick_results("keys", folder=tmp_path)
    assert {figure["contender"] for figure in result["figures"]} == {"keys on", "keys off"}
    assert all(figure["spread"]["median"] > 0 for figure in result["figures"])


def quick_results(*cases: str, folder: Path) -> list[dict[str, Any]]:
    """Results of `--quick` for these cases; a failed case makes the exit status 2."""
    results = folder / "results.json"
    command = [sys.executable, "-m", "loadtest.bench", "--quick", "--json", str(results), "--only", *cases]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
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


@needs_wrk
@needs_two_cores
def test_the_case_of_the_cache_measures_hits_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "PAIRS", 60)
    first, second = sorted(os.sched_getaffinity(0))[:2]
    cores = session.Cores((first,), (second,))
    bench = session.Bench(tmp_path, servers.HEADRACE_COMMAND, 1, True, cores, tmp_path, lambda _step, _seconds: None)
    (case,) = cache.CASES
    assert isinstance(case, cache.CacheCost)
    figures, comparisons = case._hits(bench)
    assert len(figures) == 3 * 4 + 3
    assert [str(each.target) for each in comparisons] == ["<= 25", "<= 25", "<= 145.4", "<= 25"]
    figures, comparisons = case._without_hits(bench)
    assert all(figure.spread.median > 0 for figure in figures)
    assert str(comparisons[0].target) == ">= 0.98"
