"""What `make load` reads from locust and how it judges."""

from __future__ import annotations

import pytest

from loadtest.run import Line, percentile, summarise, verdicts


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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([line(failures=3)], "3 of 100 failed"),
        ([line(), line("digits", p99_ms=1000.5)], "digits: p99 is 1000.5 ms"),
        ([], "no request was answered"),
        ([line(requests=0)], "no request was answered"),
    ],
)
def test_thresholds_are_kept(lines: list[Line], said: str) -> None:
    (problem,) = verdicts(lines, p99_ms=1000.0)
    assert said in problem


def test_a_good_run_has_no_problems() -> None:
    assert verdicts([line(p99_ms=1000.0)], p99_ms=1000.0) == []
