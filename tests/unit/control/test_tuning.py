"""The sweep over instances and batch sizes: every pair is run for real, and the choice keeps to what is asked of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.__main__ import main
from server.config.config_reader import read_model_folder
from server.control.tuning import Point, choose, default_counts, sweep
from tests.models import add_model, affine, identity

MS = 1_000_000
POINTS = st.builds(
    Point, st.integers(1, 8), st.integers(1, 64), st.floats(1, 1e6), st.integers(1, 10**9), st.integers(1, 10**9)
)


def test_every_pair_is_run(tmp_path: Path) -> None:
    path = add_model(
        tmp_path,
        "m",
        affine(),
        config="max_batch_size: 4\ninstance_group [ { count: 2 kind: KIND_CPU } ]\ndynamic_batching { }\n",
    )
    told: list[Point] = []
    found = sweep(read_model_folder(path, tmp_path), [1, 2], 0.03, told=told.append)
    assert [(point.instances, point.rows) for point in found.points] == [
        (n, rows) for n in (1, 2) for rows in (1, 2, 4)
    ]
    assert told == list(found.points)
    assert all(point.rows_hz > 0 and 0 < point.median_ns <= point.p95_ns for point in found.points)
    assert found.now is not None
    assert (found.now.instances, found.now.rows) == (2, 4)
    assert found.best in found.points


def test_the_soonest_of_the_best_is_chosen() -> None:
    slow = Point(1, 32, 1000.0, 30 * MS, 32 * MS)
    quick = Point(1, 16, 980.0, 15 * MS, 16 * MS)
    small = Point(1, 4, 500.0, 7 * MS, 8 * MS)
    several = Point(4, 4, 700.0, 20 * MS, 21 * MS)
    points = [slow, quick, small, several]
    assert choose(points) == quick
    assert choose(points, 32 * MS) == quick, "it waits for one batch and takes one"
    assert choose(points, 30 * MS) == several, "one of four is free sooner"
    assert choose(points, 20 * MS) == small
    assert choose(points, 10 * MS) is None
    assert choose([]) is None


@given(st.lists(POINTS, max_size=20), st.integers(0, 10**9))
def test_the_choice_keeps_what_is_promised_and_nothing_that_does_is_much_better(
    points: list[Point], slo_ns: int
) -> None:
    best = choose(points, slo_ns)
    fit = [point for point in points if not slo_ns or point.p95_ns * (1 + 1 / point.instances) <= slo_ns * 0.999999]
    if best is None:
        assert not fit
        return
    assert not slo_ns or best.p95_ns * (1 + 1 / best.instances) <= slo_ns * 1.000001
    assert all(best.rows_hz >= 0.97 * point.rows_hz for point in fit)


def test_numbers_of_instances_go_up_to_the_cores(tmp_path: Path) -> None:
    config = read_model_folder(add_model(tmp_path, "m", affine(), config="max_batch_size: 4\n"), tmp_path).config
    assert default_counts(config, 1) == [1]
    assert default_counts(config, 6) == [1, 2, 4]
    assert default_counts(config, 999) == [1, 2, 4, 8, 16]


def test_the_command_tells_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = add_model(tmp_path, "m", affine(), config="max_batch_size: 2\n")
    assert main(["tune", str(path), "--instances", "1", "--seconds", "0.02"]) == 0
    printed = capsys.readouterr().out
    assert "instance_group: [{count: 1}]" in printed
    assert "times that of the configuration (1 x 1 rows)" in printed
    assert main(["tune", str(path), "--instances", "1", "--seconds", "0.02", "--slo-ms", "0.000001"]) == 0
    assert "Nothing keeps to 1e-06 ms" in capsys.readouterr().out
    assert main(["tune", str(path), "--instances", "1,2", "--seconds", "0.02", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(point["instances"], point["rows"]) for point in told["points"]] == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_what_cannot_be_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = add_model(tmp_path, "texts", identity("BYTES", ("batch", 3)), config="max_batch_size: 2\n")
    assert main(["tune", str(path), "--seconds", "0.02"]) == 1
    assert "no inputs can be made up: input X is text" in capsys.readouterr().err
    assert main(["tune", str(tmp_path / "nobody")]) == 1
    assert "nobody" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", str(path), "--instances", "0"])
