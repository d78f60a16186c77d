"""A system that starts no further thread, at the start of the server and while it serves (S11 in docs/security.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.attacks import build, http_body
from tests.support.serving import Server, start
from tests.support.waiting import until


def threadless(folder: Path, limit: Path, *options: str) -> Server:
    command = (sys.executable, "-m", "tests.support.threadless_server", str(limit))
    repository = folder / "models"
    if not repository.exists():
        build(repository)
    return start(repository, folder / "log", *options, command=command)


def test_the_first_failed_request_needs_no_thread(tmp_path: Path) -> None:
    """Failed requests are answered and logged, metrics and pages are served, and the server stops in order."""
    limit, log = tmp_path / "limit", tmp_path / "requests"
    with threadless(tmp_path, limit, "--request-log-file", str(log)) as server:
        server.wait_until_ready()
        limit.write_text("0")
        for _ in range(20):
            status, _, content = server.request("POST", "/v2/models/affine/infer", b"{}")
            assert (status, "error" in json.loads(content)) == (400, True)
        for path in ("/metrics", "/openapi.json", "/v2/health/ready", "/v2/repository/index"):
            method = "POST" if path.endswith("index") else "GET"
            assert server.request(method, path)[0] == 200
        until(lambda: log.exists() and len(log.read_text().splitlines()) == 20)
        assert server.request("POST", "/v2/models/affine/infer", http_body())[0] == 200
        server.stop()
        assert "Traceback" not in server.text


@pytest.mark.parametrize("threads", [0, 1, 2, 5, 6, 8])
def test_a_server_without_its_threads_does_not_start(tmp_path: Path, threads: int) -> None:
    limit = tmp_path / "limit"
    limit.write_text(str(threads))
    with threadless(tmp_path, limit, "--no-grpc") as server:
        assert server.wait() == 1
        assert "the system starts no thread for" in server.text
        assert "ulimit -u" in server.text
        assert "Traceback" not in server.text
