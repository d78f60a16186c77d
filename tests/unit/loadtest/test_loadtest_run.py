"""What `make load` reads from locust and how it judges."""

from __future__ import annotations

import ast

import pytest

from loadtest.crowd import SHAPES, users_at
from loadtest.mixes import MIXES
from loadtest.run import Line, _parser, allowed_p99_ms, percentile, summarise, verdicts
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
    (problem,) = verdicts(lines, lambda _: 1000.0)
    assert said in problem


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


def test_a_crowd_changes_as_its_shape_says() -> None:
    moments = (0.0, 0.3, 0.5, 0.7, 0.999)
    assert [users_at("steady", time, 20) for time in moments] == [20, 20, 20, 20, 20]
    assert [users_at("ramp", time, 20) for time in moments] == [1, 8, 13, 19, 20]
    assert [users_at("steps", time, 20) for time in moments] == [5, 10, 15, 15, 20]
    assert [users_at("spike", time, 20) for time in moments] == [4, 4, 20, 4, 4]
    assert [users_at("wave", time, 20) for time in (0.0, 0.25, 0.5, 0.75)] == [2, 20, 2, 20]
