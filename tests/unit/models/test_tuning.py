"""The sweep over instances and batch sizes: every pair is run for real; a change is recommended only beyond the spread."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from headrace.__main__ import main
from headrace.config.model_folder import ModelFolder, read_model_folder
from headrace.core.errors import ConfigError
from headrace.models import tuning
from headrace.models.tuning import (
    Advice,
    MeasuredSetting,
    Options,
    advise,
    choose,
    default_counts,
    sweep,
    tuning_inputs,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models import add_model, affine, identity, row_sums, unbatched

MS = 1_000_000
POINTS = st.builds(
    lambda instances, rows, runs, p95_ns: MeasuredSetting(instances, rows, tuple(runs), p95_ns, p95_ns),
    st.integers(1, 8),
    st.integers(1, 64),
    st.lists(st.floats(1, 1e6), min_size=1, max_size=5),
    st.integers(1, 10**9),
)


def folder_of(path: Path) -> ModelFolder:
    return read_model_folder(path, path.parent)


def point(
    instances: int, rows: int, rows_hz: float, p95_ms: float, spread: float = 0.0, runs: int = 5
) -> MeasuredSetting:
    """Seeded runs around a median rate, up to `spread` of it to either side."""
    chance = random.Random(f"{instances} {rows} {rows_hz}")
    parts = [spread, *(chance.uniform(0, spread) for _ in range(runs // 2 - 1))]
    hz = [rows_hz, *(rows_hz * (1 + part) for part in parts), *(rows_hz * (1 - part) for part in parts)]
    return MeasuredSetting(instances, rows, tuple(hz), int(p95_ms * MS), int(p95_ms * MS))


def test_every_pair_is_run_several_times(tmp_path: Path) -> None:
    path = add_model(
        tmp_path,
        "m",
        affine(),
        config="max_batch_size: 4\ninstance_group [ { count: 2 kind: KIND_CPU } ]\ndynamic_batching { }\n",
    )
    messages: list[tuple[int, int, str]] = []
    result = sweep(folder_of(path), Options([1], 0.01, repeats=3), lambda *args: messages.append(args))
    assert [(point.instances, point.rows) for point in result.points] == [
        (n, rows) for n in (1, 2) for rows in (1, 2, 4)
    ]
    assert all(len(point.runs_hz) == 3 for point in result.points)
    assert [(done, total) for done, total, _ in messages] == [(done, 18) for done in range(1, 19)]
    assert messages[-1][2].startswith("1 instance, 4 rows: "), "the second pass goes the other way"
    assert all(0 < point.low_hz <= point.rows_hz <= point.high_hz for point in result.points)
    assert all(0 < point.median_ns <= point.p95_ns for point in result.points)
    assert result.current is not None
    assert (result.current.instances, result.current.rows) == (2, 4), (
        "the configuration's number of instances is measured too"
    )
    assert result.best in result.points
    assert result.runtime == "onnxruntime, model.onnx"


def test_an_automatic_batch_size_does_not_bound_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = tuning._measure

    def faster_up_to_64_rows(handle: object, inputs: object, rows: int, seconds: float) -> tuple[float, int, int]:
        measured(handle, inputs, rows, seconds)  # type: ignore[arg-type]
        return 1000.0 * min(rows, 64), 2 * MS, 2 * MS

    monkeypatch.setattr(tuning, "_measure", faster_up_to_64_rows)
    path = add_model(tmp_path, "m", affine())
    assert folder_of(path).config.max_batch_size == 4, "completed from the model"
    result = sweep(folder_of(path), Options([1], 0.005, repeats=1))
    assert [point.rows for point in result.points] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert result.limit == "more rows do not increase throughput"
    assert result.best is not None
    assert result.best.rows == 64

    (path / "config.yaml").write_text("max_batch_size: 8\n")
    result = sweep(folder_of(path), Options([1], 0.005, repeats=1))
    assert [point.rows for point in result.points] == [1, 2, 4, 8]
    assert "max_batch_size is 8 in the configuration; --max-batch-size N looks further" in result.limit
    result = sweep(folder_of(path), Options([1], 0.005, repeats=1, max_rows=24))
    assert [point.rows for point in result.points] == [1, 2, 4, 8, 16, 24]


def test_memory_and_time_bound_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    run = point(1, 8, 1000.0, 5.0)
    assert tuning.search_end(run, 0, 0, 0) == ""
    assert tuning.search_end(run, 3, 0, 0) == "more rows do not increase throughput"
    assert tuning.search_end(run, 0, 0, 9 * MS) == "batches of 8 rows miss the objective"
    assert tuning.search_end(point(1, 8, 1.0, 3000.0), 0, 0, 0) == "a batch of 8 rows takes 3.0 s"
    monkeypatch.setattr(tuning, "free_bytes", lambda: 1 << 30)
    assert tuning.search_end(run, 0, 1 << 27, 0) == ""
    assert tuning.search_end(run, 0, 1 << 29, 0) == "a batch of 16 rows would take half of the free memory"
    monkeypatch.setattr(tuning, "free_bytes", lambda: None)
    assert tuning.search_end(run, 0, 1 << 29, 0) == ""


@pytest.mark.parametrize(
    ("now", "best", "change", "reason"),
    [
        (point(1, 4, 1000, 4), point(1, 4, 1000, 4), False, "the configuration has the best setting"),
        (point(1, 4, 1000, 4, 0.05), point(2, 8, 1500, 5, 0.05), True, "1.50 times .* beyond the spread"),
        (
            point(1, 4, 1000, 4, 0.4),
            point(2, 8, 1500, 5, 0.4),
            False,
            "within the spread: .* reach 1,400, .* begin at 900",
        ),
        (point(1, 4, 1000, 4, 0.3), point(2, 8, 1500, 5, 0.01), True, "beyond the spread"),
        (point(1, 4, 1000, 4, 0.001), point(2, 8, 1020, 5, 0.001), False, "1.02 times .* not worth a change"),
        (None, point(2, 8, 1500, 5), False, "there is no comparison"),
        (point(1, 4, 1000, 4), None, False, "no setting meets the objective"),
    ],
)
def test_a_change_is_recommended_only_beyond_the_spread(
    now: MeasuredSetting | None, best: MeasuredSetting | None, change: bool, reason: str
) -> None:
    advice = advise(now, best)
    assert advice.change is change
    assert re.search(reason, advice.reason), advice.reason


def test_a_configuration_that_misses_the_objective_is_changed_in_any_case() -> None:
    now, best = point(1, 32, 1000, 30, 0.5), point(1, 4, 700, 5, 0.5)
    assert advise(now, best, 20 * MS) == Advice(
        True, "0.70 times the configuration's 1 x 32 rows, which miss the objective"
    )


@given(POINTS, POINTS)
def test_runs_that_overlap_are_never_a_reason(now: MeasuredSetting, best: MeasuredSetting) -> None:
    if advise(now, best).change:
        assert best.low_hz > now.high_hz


def test_the_soonest_of_the_best_is_chosen() -> None:
    slow, quick = point(1, 32, 1000, 32), point(1, 16, 980, 16)
    small, several = point(1, 4, 500, 8), point(4, 4, 700, 21)
    points = [slow, quick, small, several]
    assert choose(points) == quick
    assert choose(points, 32 * MS) == quick, "it waits for one batch and takes one"
    assert choose(points, 30 * MS) == several, "one of four is free sooner"
    assert choose(points, 20 * MS) == small
    assert choose(points, 10 * MS) is None
    assert choose([]) is None


@given(st.lists(POINTS, max_size=20), st.integers(0, 10**9))
def test_the_selection_meets_the_objective_and_is_close_to_the_best(points: list[MeasuredSetting], slo_ns: int) -> None:
    best = choose(points, slo_ns)
    fit = [point for point in points if not slo_ns or point.p95_ns * (1 + 1 / point.instances) <= slo_ns * 0.999999]
    if best is None:
        assert not fit
        return
    assert not slo_ns or best.p95_ns * (1 + 1 / best.instances) <= slo_ns * 1.000001
    assert all(best.rows_hz >= 0.97 * point.rows_hz for point in fit)


def test_numbers_of_instances_go_up_to_the_cores(tmp_path: Path) -> None:
    config = folder_of(add_model(tmp_path, "m", affine(), config="max_batch_size: 4\n")).config
    assert default_counts(config, 1) == [1]
    assert default_counts(config, 6) == [1, 2, 4]
    assert default_counts(config, 999) == [1, 2, 4, 8, 16]


# Inputs


def test_inputs_come_from_the_file_then_the_warm_up_then_chance(tmp_path: Path) -> None:
    path = add_model(tmp_path, "m", row_sums())
    (path / "config.yaml").write_text("max_batch_size: 4\n")
    with pytest.raises(ConfigError, match=r"input X has free dimensions \(write --input FILE.npz .* or model_warmup"):
        tuning_inputs(folder_of(path))
    (path / "config.yaml").write_text(
        "max_batch_size: 4\nmodel_warmup:\n"
        "  - {name: seven, batch_size: 2, inputs: {X: {data_type: TYPE_FP32, dims: [7], random_data: true}}}\n"
    )
    inputs = tuning_inputs(folder_of(path))
    assert inputs.origin == "of model_warmup 'seven'"
    assert inputs.batch(5)["X"].shape == (5, 7)
    assert inputs.row_bytes == 28
    file = tmp_path / "in.npz"
    np.savez(file, X=np.arange(6, dtype=np.float32).reshape(2, 3))
    inputs = tuning_inputs(folder_of(path), file)
    assert inputs.origin == f"of {file}"
    np.testing.assert_array_equal(inputs.batch(3)["X"], [[0, 1, 2], [3, 4, 5], [0, 1, 2]])
    plain = tuning_inputs(folder_of(add_model(tmp_path, "plain", affine())))
    assert plain.origin == "random values"
    single = tuning_inputs(folder_of(add_model(tmp_path, "single", unbatched())))
    assert single.batch(1)["X"].shape == (2, 3)


def test_text_is_run_from_a_file(tmp_path: Path) -> None:
    path = add_model(tmp_path, "texts", identity("BYTES", ("batch", 3)), config="max_batch_size: 2\n")
    file = tmp_path / "in.npz"
    np.savez(file, X=np.array([["a", "b", "ö"]]))
    batch = tuning_inputs(folder_of(path), file).batch(2)["X"]
    assert batch.tolist() == [[b"a", b"b", "ö".encode()]] * 2
    assert main(["tune", str(path), "--input", str(file), "--instances", "1", "--seconds", "0.01"]) == 0


@pytest.mark.parametrize(
    ("arrays", "messages"),
    [
        ({"Z": np.zeros((1, 16), np.float32)}, "has the array 'Z', the model has the inputs X (rename or remove it)"),
        ({}, "has no array for the input 'X' (add one; the model needs X)"),
        (
            {"X": np.zeros((1, 16))},
            "has the type float64, the input takes FP32 (float32) (write array.astype('float32'))",
        ),
        ({"X": np.zeros(16, np.float32)}, "has the shape [16], the input takes [rows, 16] (reshape it)"),
        ({"X": np.zeros((0, 16), np.float32)}, "has the shape [0, 16], the input takes [rows, 16] (reshape it)"),
        ({"X": np.array([[b"a"]], dtype=object)}, "is not an .npz of plain arrays"),
    ],
)
def test_a_mismatched_file_is_an_error(arrays: dict[str, np.ndarray], messages: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    path = add_model(tmp_path, "m", affine(), config="max_batch_size: 2\n")
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(ConfigError) as caught:
        tuning_inputs(folder_of(path), tmp_path / "in.npz")
    assert messages in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = add_model(tmp_path, "m", affine(), config="max_batch_size: 2\n")
    assert main(["tune", str(path), "--input", str(tmp_path / "none.npz")]) == 1
    assert "none.npz: error: cannot be read: No such file or directory (name an .npz file)" in capsys.readouterr().err


# The command


def measured_as(monkeypatch: pytest.MonkeyPatch, rates: dict[tuple[int, int], Sequence[float]]) -> None:
    """Runs of each (instances, rows) as given, one after the other, in place of a clock that other tests disturb."""
    remaining_runs = {setting: list(runs) for setting, runs in rates.items()}

    def measured(handle: object, _inputs: object, rows: int, _seconds: float) -> tuple[float, int, int]:
        runs = remaining_runs[handle.alive, rows]  # type: ignore[attr-defined]
        runs.append(runs.pop(0))
        return runs[-1], 2 * MS, 3 * MS

    monkeypatch.setattr(tuning, "_measure", measured)


FASTER = {(1, 1): (100, 110, 105), (1, 2): (150, 190, 160), (2, 1): (120, 125, 130), (2, 2): (300, 310, 290)}
SPREAD = {(1, 1): (100, 300, 105), (1, 2): (150, 190, 160), (2, 1): (120, 125, 130), (2, 2): (300, 310, 290)}
CALL = ("--instances", "1,2", "--repeats", "3")
# With inputs and outputs, so that nothing is completed, dynamic batching included.
WHOLE = """max_batch_size: 2 # rows
input { name: "X" data_type: TYPE_FP32 dims: 16 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""


def test_the_command_shows_the_spread_and_the_suggested_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_model(tmp_path, "m", affine(), config=WHOLE)
    before = (path / "config.pbtxt").read_text()
    measured_as(monkeypatch, FASTER)
    assert main(["tune", "m", "--model-repository", str(tmp_path), *CALL]) == 0, (
        "by its name, as `headrace build` has it"
    )
    printed = capsys.readouterr().out
    assert "300/s (290-310)  3 ms" in printed
    assert "Inputs: random values. Measured: onnxruntime, model.onnx." in printed
    assert "Best: 2 x 2 rows, 300 rows/s; 2.86 times the configuration's 1 x 1 rows, beyond the spread" in printed
    assert "+instance_group [ { count: 2 } ]" in printed
    assert "+dynamic_batching { }" in printed
    assert "--apply writes it." in printed
    assert (path / "config.pbtxt").read_text() == before
    measured_as(monkeypatch, SPREAD)
    assert main(["tune", str(path), *CALL, "--apply"]) == 0
    printed = capsys.readouterr().out
    assert "within the spread: the configuration's runs reach 300, the best setting's begin at 290 rows/s" in printed
    assert "the configuration is unchanged" in printed
    assert (path / "config.pbtxt").read_text() == before
    assert main(["tune", str(path), *CALL, "--slo-ms", "0.000001"]) == 0
    assert "No setting meets 1e-06 ms" in capsys.readouterr().out


def test_on_a_cpu_the_bound_of_its_own_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = add_model(tmp_path, "m", affine())
    (path / "config.yaml").write_text(
        "max_batch_size: 4\ncpu_max_batch_size: 1  # a GPU wants more\ndynamic_batching: {}\n"
    )
    measured_as(monkeypatch, {(1, 1): (100, 110, 105), (1, 2): (300, 310, 305), (1, 4): (290, 280, 285)})
    assert main(["tune", str(path), "--instances", "1", "--repeats", "3", "--apply"]) == 0
    assert "the configuration's 1 x 1 rows" in capsys.readouterr().out
    assert (path / "config.yaml").read_text() == (
        "max_batch_size: 4\ncpu_max_batch_size: 2  # a GPU wants more\ndynamic_batching: {}\n"
    )


def test_invalid_configurations_are_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "max_batch_size: 2\ndynamic_batching { preferred_batch_size: [ 2 ] }\n"
    path = add_model(tmp_path, "m", affine(), config=text)
    measured_as(monkeypatch, {(1, 1): (300, 310, 305), (1, 2): (100, 110, 105)})
    assert main(["tune", str(path), "--instances", "1", "--repeats", "3", "--apply"]) == 1
    assert "preferred_batch_size 2 is more than max_batch_size 1" in capsys.readouterr().err
    assert (path / "config.pbtxt").read_text() == text


def test_unsupported_models_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = add_model(tmp_path, "texts", identity("BYTES", ("batch", 3)), config="max_batch_size: 2\n")
    assert main(["tune", str(path), "--seconds", "0.02"]) == 1
    assert "no random inputs can be generated: input X is text" in capsys.readouterr().err
    assert main(["tune", "text", "--model-repository", str(tmp_path)]) == 1
    assert f"headrace tune: there is no model 'text' in {tmp_path} (did you mean texts?)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", str(path), "--instances", "0"])
