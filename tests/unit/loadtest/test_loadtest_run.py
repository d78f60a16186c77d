"""Parsing of locust's results by `make load`, and its verdicts."""

from __future__ import annotations

import ast
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest.crowd import SHAPES, users_at
from loadtest.run import (
    MIXES,
    Line,
    TargetNotReady,
    _parser,
    allowed_p99_ms,
    check_target,
    percentile,
    summarise,
    verdicts,
)
from loadtest.servers import ROOT


def line(name: str = "tiny", requests: int = 100, failures: int = 0, p99_ms: float = 10.0) -> Line:
    return Line(name, requests, failures, requests_per_s=50.0, p50_ms=2.0, p99_ms=p99_ms)


def test_percentile_counts_requests_not_times() -> None:
    times = {1.0: 98, 5.0: 1, 900.0: 1}
    assert percentile(times, 0.50) == 1.0
    assert percentile(times, 0.99) == 5.0
    assert percentile(times, 1.0) == 900.0
    assert percentile({}, 0.99) == 0.0


def test_statistics_are_read() -> None:
    entry = {
        "name": "tiny binary",
        "num_requests": 200,
        "num_failures": 1,
        "start_time": 100.0,
        "last_request_timestamp": 104.0,
        "response_times": {"2": 150, "7": 50},
    }
    assert summarise([entry], duration_s=5.0) == [Line("tiny binary", 200, 1, 50.0, 2.0, 7.0)]
    single = {**entry, "num_requests": 1, "last_request_timestamp": 100.00001, "response_times": {"7": 1}}
    assert summarise([single], duration_s=5.0) == [Line("tiny binary", 1, 1, 0.2, 7.0, 7.0)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line(failures=3)], "3 of 100 failed"),
        ([line(), line("digits", p99_ms=1000.5)], "digits: p99 is 1000.5 ms"),
        ([], "no request was answered"),
        ([line(requests=0)], "no request was answered"),
    ],
)
def test_thresholds_are_checked(lines: list[Line], message: str) -> None:
    (problem,) = verdicts(lines, lambda _: 1000.0)
    assert message in problem


def test_a_good_run_has_no_problems() -> None:
    assert verdicts([line(p99_ms=1000.0)], lambda _: 1000.0) == []


def test_some_may_be_allowed_to_fail() -> None:
    assert verdicts([line(failures=3)], lambda _: 1000.0, failed_percent=3.0) == []
    assert verdicts([line(failures=4)], lambda _: 1000.0, failed_percent=3.0) == ["tiny: 4 of 100 failed"]


@pytest.mark.parametrize(
    ("words", "name", "allowed_ms"),
    [
        ("", "tiny JSON", 1000.0),
        ("--mix gallery", "efficientnet_lite0 binary x4", 3000.0),
        ("--mix gallery", "tiny JSON", 1000.0),
        ("--mix gallery --p99-ms 70", "efficientnet_lite0 binary x4", 70.0),
        ("--mix gallery --p99-ms-of tiny*=5 --p99-ms-of *=6", "tiny JSON", 5.0),
        ("--mix gallery --p99-ms-of tiny*=5 --p99-ms-of *=6", "digits JSON", 6.0),
    ],
)
def test_the_nearest_threshold_counts(words: str, name: str, allowed_ms: float) -> None:
    assert allowed_p99_ms(_parser().parse_args(words.split()), name) == allowed_ms


@pytest.mark.parametrize("text", ["tiny", "=5", "tiny=", "tiny=0", "tiny=x"])
def test_a_threshold_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["--p99-ms-of", text])
    assert "is not PATTERN=MS" in capsys.readouterr().err


def test_every_mix_names_users_that_exist() -> None:
    source = (ROOT / "loadtest" / "locustfile.py").read_text()
    classes = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    for mix in MIXES.values():
        assert set(mix.users) <= classes
        assert min(mix.users.values()) > 0
    named = {name for mix in MIXES.values() for name in mix.users}
    assert named == {name for name in classes if name.endswith("User") and not name.startswith("_")}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_crowd_is_never_empty_and_reaches_its_peak(shape: str) -> None:
    counts = [users_at(shape, number / 1000, 40) for number in range(1000)]
    assert min(counts) >= 1
    assert max(counts) == 40


def test_the_number_of_users_follows_the_shape() -> None:
    moments = (0.0, 0.3, 0.5, 0.7, 0.999)
    assert [users_at("steady", time, 20) for time in moments] == [20, 20, 20, 20, 20]
    assert [users_at("ramp", time, 20) for time in moments] == [1, 8, 13, 19, 20]
    assert [users_at("steps", time, 20) for time in moments] == [5, 10, 15, 15, 20]
    assert [users_at("spike", time, 20) for time in moments] == [4, 4, 20, 4, 4]
    assert [users_at("wave", time, 20) for time in (0.0, 0.25, 0.5, 0.75)] == [2, 20, 2, 20]


# --- Before the load --------------------------------------------------------------------------------------------------------


@contextmanager
def answering(statuses: Mapping[str, int]) -> Iterator[str]:
    """The URL of an HTTP server that answers 200, but for the paths named."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = statuses.get(self.path, 200)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"{}" if status == 200 else b'{"error":"the words of the server"}')

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize(
    ("statuses", "message"),
    [
        ({"/v2/health/ready": 503}, "no server is ready at .+: 503 the words of the server; start one with"),
        (
            {"/v2/models/digits/ready": 404},
            "model digits is not ready at .+: 404 the words of the server; .*make models",
        ),
        ({"/v2/models/tiny/ready": 503, "/v2/models/digits/ready": 404}, "model tiny is not ready"),
    ],
)
def test_missing_models_are_reported_before_the_load(statuses: Mapping[str, int], message: str) -> None:
    with answering(statuses) as url, pytest.raises(TargetNotReady, match=message):
        check_target(url, "", MIXES["nightly"])


def test_an_unreachable_server_is_reported() -> None:
    url = f"http://127.0.0.1:{unused_port()}"
    with pytest.raises(TargetNotReady, match=f"no server is ready at {re.escape(url)}: .*refused"):
        check_target(url, "", MIXES["nightly"])
    with pytest.raises(TargetNotReady, match="no server is ready"):
        check_target("nonsense", "", MIXES["nightly"])


def test_grpc_is_checked_only_if_it_is_used() -> None:
    with answering({}) as url:
        check_target(url, "127.0.0.1:1", MIXES["nightly"])
        with pytest.raises(TargetNotReady, match=r"no server answers gRPC at 127\.0\.0\.1:1: .*--grpc-address"):
            check_target(url, "127.0.0.1:1", MIXES["everything"], timeout_s=2.0)


def test_every_mix_names_the_models_of_its_users() -> None:
    """Read from the text: to import the users would put gevent under everything."""
    text = (ROOT / "loadtest" / "locustfile.py").read_text()
    classes = {node.name: ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
    for name, mix in MIXES.items():
        pictures = any(re.search("PHOTOGRAPHS|ALBUM", classes[user]) for user in mix.users)
        assert ("efficientnet_lite0" in mix.models) == pictures, name
