"""`make soak`, shorter: a server under load, reloads, leaving clients, bad requests and kills passes; one with faults does not.

Its bounds for latency are wide here, where other tests use the same cores; `make soak` has the narrow ones.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import ROOT

pytestmark = pytest.mark.slow

FAULTY = shlex.join([sys.executable, "-m", "tests.support.faulty_server", "serve"])

# Other tests run on the same cores, and start and end during a run: latency is judged by long runs on a quiet machine.
BUSY = ("--p99-ratio", "4", "--p99-slack-ms", "2000")


def soak(output: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was printed, and what was found."""
    done = subprocess.run(
        [sys.executable, "-m", "loadtest.soak", "--output", str(output), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=230,
        check=False,
    )
    report = output / "soak.json"
    return done.returncode, done.stdout, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.timeout(240)
def test_nothing_is_lost_or_wrong_and_nothing_grows(tmp_path: Path) -> None:
    """With keys and hundreds of connections, since both add kinds of requests to those of a soak without them."""
    words = ("--seconds", "25", "--keys", "--connections", "300")
    status, printed, soak_report = soak(tmp_path, *words, *BUSY)
    assert status == 0, printed
    assert soak_report["passed"]
    assert len(soak_report["phases"]) == 5
    request_kinds = {(line["way"], line["model"]) for line in soak_report["requests"]}
    assert {(way, "steady") for way in ("HTTP", "gRPC", "stream", "HTTP, leaving", "gRPC, leaving")} <= request_kinds
    assert {(way, "apart") for way in ("HTTP", "gRPC", "stream")} <= request_kinds
    assert "crowd" in {line["way"] for line in soak_report["requests"]}, printed
    refused = {(line["way"], line["model"]) for line in soak_report["requests"] if line["counts"].get("refused")}
    for name in ("no key", "an unknown key", "a key without the scope"):
        assert {("HTTP, bad", name), ("gRPC, bad", name)} <= refused
    page = (tmp_path / "soak.html").read_text()
    assert page.count(">PASS<") == len(soak_report["verdicts"])
    assert "with API keys" in page


@pytest.mark.timeout(240)
def test_a_server_with_faults_does_not_pass(tmp_path: Path) -> None:
    """Wrong values, leaks, and answers to requests with wrong keys, which no client counts as received."""
    words = ("--seconds", "18", "--keys", "--command", FAULTY)
    status, printed, soak_report = soak(tmp_path, *words, *BUSY)
    assert status == 1, printed
    failed = {verdict["name"] for verdict in soak_report["verdicts"] if not verdict["passed"]}
    leaks = {"memory flat", "descriptors flat", "threads flat"}
    assert failed == {"nothing wrong", "the server's own count agrees", *leaks}, printed
    assert "/dev/null" in printed, "what leaks is named"
    assert "another answer" in printed
    assert "key, failed: status 200, expected one of (401,)" in printed


def test_a_server_that_does_not_start_is_reported(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-c", "raise SystemExit('no licence')"])
    status, printed, _ = soak(tmp_path, "--seconds", "5", "--command", command)
    assert status == 2
    assert "no licence" in printed
