"""Arguments of wrk, and parsing of its output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench import wrk
from loadtest.protocol import HttpRequest


def report(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "requests": 51000,
        "duration_us": 2000000,
        "p50_us": 1234.0,
        "p90_us": 1500.0,
        "p99_us": 2100.0,
        "max_us": 9000.0,
        "errors": {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0},
        "completions_s": [],
    } | changes
    return "Running 2s test @ http://127.0.0.1:8000/\n" + wrk.REPORT_PREFIX + json.dumps(fields) + "\n"


def test_report_is_read() -> None:
    sample = wrk.parse(report(completions_s=[1.5, 1.75]))
    assert sample.requests == 51000
    assert sample.requests_per_s == 25500.0
    assert (sample.p50_us, sample.p90_us, sample.p99_us, sample.max_us) == (1234.0, 1500.0, 2100.0, 9000.0)
    assert sample.completions_s == (1.5, 1.75)


@pytest.mark.parametrize("kind", ["connect", "read", "write", "status", "timeout"])
def test_one_failed_request_fails_the_run(kind: str) -> None:
    errors = {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0} | {kind: 1}
    with pytest.raises(wrk.LoadFailed, match=f"{kind} 1"):
        wrk.parse(report(errors=errors))


def test_a_run_without_answers_fails() -> None:
    with pytest.raises(wrk.LoadFailed, match="no request was answered"):
        wrk.parse(report(requests=0))


def test_output_without_a_report_fails() -> None:
    with pytest.raises(wrk.LoadFailed, match="0 reports, expected 1"):
        wrk.parse("unable to connect to 127.0.0.1:8000 Connection refused\n")


def test_one_request_is_formatted_once(tmp_path: Path) -> None:
    request = HttpRequest("/v2/models/tiny/infer", b"\x00\xffraw", {"Content-Type": "application/octet-stream"})
    text = wrk.script(wrk.Load((request,), connections=4, seconds=1), tmp_path)
    assert "function request()" not in text
    assert 'wrk.method = "POST"' in text
    assert '["Content-Type"] = "application/octet-stream"' in text
    assert "clock_gettime" not in text
    assert (tmp_path / "body0.bin").read_bytes() == b"\x00\xffraw"


def test_several_requests_are_sent_in_turn(tmp_path: Path) -> None:
    requests = (HttpRequest("/a", b"one"), HttpRequest("/b", b"two"))
    text = wrk.script(wrk.Load(requests, connections=4, seconds=1, record_completions=True), tmp_path)
    assert 'prepared[1] = wrk.format("POST", "/a"' in text
    assert 'prepared[2] = wrk.format("POST", "/b"' in text
    assert "clock_gettime" in text
    assert [(tmp_path / f"body{n}.bin").read_bytes() for n in (0, 1)] == [b"one", b"two"]


def test_text_that_would_break_the_script_is_refused(tmp_path: Path) -> None:
    request = HttpRequest('/a"; os.exit() --', b"")
    with pytest.raises(ValueError, match="Lua string"):
        wrk.script(wrk.Load((request, request), connections=1, seconds=1), tmp_path)
