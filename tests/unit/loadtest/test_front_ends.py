"""`python -m loadtest.front_ends`: how it divides cores, names processes, reports, and goes on after a part that fails."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loadtest.front_ends import __main__ as front_ends
from loadtest.front_ends import host, parts, ping_pong
from loadtest.front_ends.parts import figures
from loadtest.gpu import place, subject
from loadtest.gpu.setup import Setup


@pytest.mark.parametrize(
    ("cores", "siblings", "server", "clients"),
    [
        (range(16), [(core,) for core in range(16)], tuple(range(10)), tuple(range(10, 16))),
        # Both hardware threads of a core are on the same side.
        (range(16), [(core, core + 8) for core in range(8)], (0, 8, 1, 9, 2, 10, 3, 11, 4, 12), (5, 13, 6, 14, 7, 15)),
        ([2, 3], [(2,), (3,)], (2,), (3,)),
        ([5], [], (5,), (5,)),
    ],
)
def test_server_and_clients_have_cores_of_their_own(
    cores: list[int], siblings: list[tuple[int, ...]], server: tuple[int, ...], clients: tuple[int, ...]
) -> None:
    assert host.divide(list(cores), siblings) == (server, clients)


def test_a_run_uses_some_of_the_cores() -> None:
    siblings = [(core, core + 32) for core in range(32)]
    server, clients = host.divide(list(range(64)), siblings, 16)
    assert server == (0, 32, 1, 33, 2, 34, 3, 35, 4, 36)
    assert clients == (5, 37, 6, 38, 7, 39)


def test_no_sample_begins_after_the_deadline(tmp_path: Path) -> None:
    late = host.Host((0,), (0,), tmp_path, 1.0, deadline_s=0.0)
    with pytest.raises(host.TimeSpent, match="no time was left for tiny"):
        late.bench("http://127.0.0.1:1", "tiny")


def test_a_failed_build_is_reported_and_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cores = []

    def prepare(setup: Setup, *_: object) -> None:
        cores.append(os.sched_getaffinity(0))
        if setup.precision == "int8":
            raise subject.NotBuilt("no calibration")

    monkeypatch.setattr(place, "describe", lambda _found: {})
    monkeypatch.setattr(subject, "prepare_demo", lambda *_: None)
    monkeypatch.setattr(subject, "prepare", prepare)
    before = os.sched_getaffinity(0)
    assert front_ends.main(["engines", "--backend", "onnxruntime", "--output", str(tmp_path / "out")]) == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "front-ends.jsonl").read_text().splitlines()]
    assert {"part": "engine", "precision": "int8", "failed": "NotBuilt: no calibration"} in lines
    assert [line["precision"] for line in lines if "seconds" in line and line["part"] == "engine"] == ["fp16"]
    assert len(cores) == 2
    assert os.sched_getaffinity(0) == before  # only the builders are limited to some cores


@pytest.mark.parametrize(("text", "cores"), [("0-3,8", (0, 1, 2, 3, 8)), ("7", (7,)), ("0,4-5", (0, 4, 5))])
def test_a_list_of_cores_is_read(text: str, cores: tuple[int, ...]) -> None:
    assert host.parse_cores(text) == cores


def test_a_server_without_front_ends_is_one_process() -> None:
    times = host.process_times(os.getpid())
    assert times["server"] > 0


def test_a_round_trip_takes_time() -> None:
    core = host.usable()[0]
    assert ping_pong.median_us(0.05, (core,)) > 0
    assert os.sched_getaffinity(0) == set(host.usable())


def test_figures_without_answers() -> None:
    point = {
        "latency_ms": {},
        "throughput_per_s": 0.0,
        "rows_per_s": 0.0,
        "server": None,
        "client_busy": [0.5, 0.25],
        "cores": {"engine": 0.123},
    }
    values = figures(point)
    assert values["p50_ms"] is None
    assert values["client_cores"] == 0.75
    assert values["cores"] == {"engine": 0.12}


def test_a_part_that_fails_is_reported_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise host.LoadFailed("no answer")

    monkeypatch.setattr(place, "describe", lambda _found: {})
    monkeypatch.setattr(parts, "small_requests", fail)
    monkeypatch.setattr(front_ends, "_repository", lambda scratch: scratch)
    monkeypatch.setattr(parts, "overload", lambda _host, report, _scratch: report("overload", ratio=0.987654))
    assert front_ends.main(["tiny", "overload", "--output", str(tmp_path / "out")]) == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "front-ends.jsonl").read_text().splitlines()]
    assert {"part": "tiny", "failed": "LoadFailed: no answer"} in lines
    assert {"part": "overload", "ratio": 0.98765} in lines
    assert "overload: ratio 0.98765" in capsys.readouterr().out


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert front_ends.main(["tinny", "--output", str(tmp_path)]) == 2
    assert "there is no part tinny" in capsys.readouterr().err
