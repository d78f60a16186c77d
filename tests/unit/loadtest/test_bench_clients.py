"""The load clients of the bench: their arguments, what is read out of their output, and results that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest import servers
from loadtest.bench import clients
from loadtest.bench.clients import CallLoad, Load, Sample
from loadtest.grpc_protocol import MODEL_INFER
from loadtest.load import LoadFailed
from loadtest.protocol import HttpRequest
from loadtest.servers import running

ANSWER_BYTES = 120
H2LOAD = """\
starting benchmark...
spawning thread #0: 4 total client(s). 8000 total requests
Application protocol: h2c
progress: 100% done

finished in 1.15s, 6954.95 req/s, 1.22MB/s
requests: 8000 total, 8000 started, 8000 done, 8000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 8000 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 1.40MB (1469419) total, 23.73KB (24300) headers (space savings 96.25%), 976.56KB (1000000) data
                     min         max         mean         sd        +/- sd
time for request:     2.06ms     26.10ms      9.16ms      1.60ms    96.09%
"""
GOOD = Sample(8000, 6954.95, 0.0, 0.0)


def wrk_report(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "requests": 51000,
        "duration_us": 2000000,
        "p50_us": 1234.0,
        "p99_us": 2100.0,
        "errors": {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0},
        "completions_s": [],
    } | changes
    return "Running 2s test @ http://127.0.0.1:8000/\n" + clients.REPORT_PREFIX + json.dumps(fields) + "\n"


def test_report_of_wrk_is_read() -> None:
    sample = clients.parse_wrk(wrk_report(completions_s=[1.5, 1.75]), busy_s=1.0)
    assert sample == Sample(51000, 25500.0, 1234.0, 2100.0, client_busy=0.5, completions_s=(1.5, 1.75))


@pytest.mark.parametrize("kind", ["connect", "read", "write", "status", "timeout"])
def test_one_failed_request_fails_the_run(kind: str) -> None:
    errors = {"connect": 0, "read": 0, "write": 0, "status": 0, "timeout": 0} | {kind: 1}
    with pytest.raises(LoadFailed, match=f"{kind} 1"):
        clients.parse_wrk(wrk_report(errors=errors))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (wrk_report(requests=0), "no request was answered"),
        ("unable to connect to 127.0.0.1:8000 Connection refused\n", "0 reports, expected 1"),
    ],
)
def test_a_run_of_wrk_without_answers_fails(output: str, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        clients.parse_wrk(output)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_one_request_is_formatted_once(tmp_path: Path, is_recorded: bool) -> None:
    request = HttpRequest("/v2/models/tiny/infer", b"\x00\xffraw", {"Content-Type": "application/octet-stream"})
    text = clients.script(Load(request, connections=4, seconds=1, record_completions=is_recorded), tmp_path)
    assert "function request()" not in text
    assert '["Content-Type"] = "application/octet-stream"' in text
    assert ("clock_gettime" in text) == is_recorded
    assert (tmp_path / "body.bin").read_bytes() == b"\x00\xffraw"


def test_text_that_would_break_the_script_is_refused(tmp_path: Path) -> None:
    request = HttpRequest("/a", b"", {'"; os.exit() --': ""})
    with pytest.raises(ValueError, match="Lua string"):
        clients.script(Load(request, connections=1, seconds=1), tmp_path)


def test_report_of_h2load_is_read() -> None:
    assert clients.parse_h2load(H2LOAD, ANSWER_BYTES) == GOOD
    # h2load writes minutes as "1m23s", and sizes with other units.
    long = H2LOAD.replace("finished in 1.15s", "finished in 1m23.00s").replace("976.56KB", "0.93GB")
    assert clients.parse_h2load(long, ANSWER_BYTES) == GOOD


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "no report"),
        (H2LOAD.split("traffic")[0], "no report"),
        (H2LOAD.replace("8000 succeeded, 0 failed", "7999 succeeded, 1 failed"), "only 7999 succeeded"),
        # grpc-status stands in trailers that h2load skips: a call that fails brings no message and counts as a success.
        (H2LOAD.replace("(1000000) data", "(999875) data"), "answered with an error"),
    ],
)
def test_success_is_every_call_and_every_byte(output: str, reason: str) -> None:
    with pytest.raises(LoadFailed, match=reason):
        clients.parse_h2load(output, ANSWER_BYTES)


def test_missing_clients_name_the_packages_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "`apt-get install wrk nghttp2-client`" in clients.missing()


@pytest.mark.slow
@pytest.mark.skipif(bool(clients.missing()), reason=clients.missing())
def test_calls_of_h2load_reach_a_server(tmp_path: Path) -> None:
    command = servers.peer("grpc_echo", "echo", "--answer-bytes", str(ANSWER_BYTES), ready_path="")
    with running(command, tmp_path) as server:
        load = CallLoad(MODEL_INFER, b"message", ANSWER_BYTES, connections=4, in_flight=16, calls=2000)
        sample = clients.run_grpc(server.port, load, tmp_path)
        assert sample.requests == 2000
        assert 0 < sample.p50_us <= sample.p99_us
        assert sample.client_busy > 0
        absent = CallLoad("/inference.GRPCInferenceService/NoSuchMethod", b"", ANSWER_BYTES, 1, 4, 100)
        with pytest.raises(LoadFailed, match="answered with an error"):
            clients.run_grpc(server.port, absent, tmp_path)
