"""Runs before a model serves, for its latency table: sizes, time limits, and models that are not measured."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.model_config import ModelConfig
from headrace.config.model_folder import read_model_folder
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.tensor import Array
from headrace.inference.scheduling.latency_table import LatencyTable
from headrace.models.warmup import LatencyMeasurement, StoredLatencies, sizes
from headrace.runtimes.base import Execution, ExecutionLost, LoadedModel

from tests.support.models import add_model, identity, sum_difference, unbatched
from tests.support.waiting import on_threads


class Model(Execution, LoadedModel):
    """Takes 1 ms, and as much for each row, on a clock of its own; `before` is called with the rows of each run."""

    def __init__(self, before: Callable[[int], None] = lambda _rows: None) -> None:
        self.before = before
        self.now_ns = 0
        self.rows: list[int] = []
        self.inputs: list[dict[str, Array]] = []

    def clock(self) -> int:
        return self.now_ns

    def execution(self, index: int) -> Model:
        return self

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        rows = len(next(iter(inputs.values())))
        self.rows.append(rows)
        self.inputs.append(inputs)
        self.before(rows)
        self.now_ns += (1 + rows) * NS_PER_MS
        return {}

    def close(self) -> None:
        pass


def read(folder: Path, model: onnx.ModelProto, config: str = "max_batch_size: 8\n") -> ModelConfig:
    return read_model_folder(add_model(folder, "m", model, config=config), folder).config


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return read(tmp_path, sum_difference())


def measured(config: ModelConfig, model: Model, limit_ns: int = NS_PER_S, instances: int = 1) -> LatencyTable:
    profile = LatencyTable()
    measuring = LatencyMeasurement(config, model, instances, profile, limit_ns, model.clock)
    for _ in range(instances):
        measuring(model)
    return profile


def test_every_power_of_two_is_run_with_inputs_of_the_signature(config: ModelConfig) -> None:
    model = Model()
    profile = measured(config, model)
    assert model.rows == [1, 2, 4, 8] * 4
    for tensor, dtype in zip(config.input, (np.int32, np.float32), strict=True):
        last = model.inputs[-1][tensor.name]
        assert (last.shape, last.dtype, last.flags.c_contiguous) == ((8, *tensor.dims), dtype, True)
    assert [(row["rows"], row["median_us"], row["source"]) for row in profile.table()] == [
        (1, 2000, "load"),
        (2, 3000, "load"),
        (4, 5000, "load"),
        (8, 9000, "load"),
    ]


def test_the_first_run_of_a_size_counts_only_if_there_is_no_other(config: ModelConfig) -> None:
    model = Model()

    def slow_at_first(rows: int) -> None:
        model.now_ns += 50 * NS_PER_MS if model.rows.count(rows) == 1 else 0

    model.before = slow_at_first
    assert measured(config, model).estimate_ns(2) == 3 * NS_PER_MS
    model = Model(lambda rows: slow_at_first(rows))
    assert [entry.rows for entry in measured(config, model, 1).entries()] == [1]


@pytest.mark.parametrize(
    ("limit_ms", "rows"), [(1, [1]), (5, [1]), (6, [1, 2]), (18, [1, 2, 4]), (40, [1, 2, 4, 8, 1, 2, 4, 8, 1])]
)
def test_it_ends_before_it_takes_too_long(config: ModelConfig, limit_ms: int, rows: list[int]) -> None:
    model = Model()
    profile = measured(config, model, limit_ms * NS_PER_MS)
    assert model.rows == rows
    assert profile.estimate_ns(8) > 0


def test_nothing_runs_if_it_is_disabled(config: ModelConfig) -> None:
    model = Model()
    assert measured(config, model, 0).entries() == []
    assert model.rows == []


def test_preferred_sizes_and_the_largest_are_measured(tmp_path: Path) -> None:
    config = "max_batch_size: 11\ndynamic_batching { preferred_batch_size: [6] }\n"
    assert sizes(read(tmp_path / "a", sum_difference(), config)) == [1, 2, 4, 6, 8, 11]


def test_a_model_without_a_batch_dimension_is_measured_as_it_is(tmp_path: Path) -> None:
    config = read(tmp_path, unbatched(), "")
    model = Model()
    profile = measured(config, model)
    assert {name: array.shape for name, array in model.inputs[0].items()} == {
        tensor.name: tensor.dims for tensor in config.input
    }
    assert [entry.rows for entry in profile.entries()] == [1]


@pytest.mark.parametrize(
    ("model", "config", "why"),
    [
        (identity("BYTES", ("batch", 3)), "max_batch_size: 4\n", "input X is text"),
        (identity("FP32", ("batch", "width")), "max_batch_size: 4\n", "input X has free dimensions"),
    ],
)
def test_models_that_cannot_be_measured_give_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: onnx.ModelProto, config: str, why: str
) -> None:
    caplog.set_level(logging.INFO, "headrace.warmup")
    fake = Model()
    assert measured(read(tmp_path, model, config), fake).entries() == []
    assert fake.rows == []
    assert why in caplog.text


class Shared(LoadedModel):
    """Instances that write down who was at work as each batch began."""

    def __init__(self, broken: int | None = None) -> None:
        self.busy_runners = 0
        self.lock = threading.Lock()
        self.broken = broken
        self.runs: list[tuple[int, int, int]] = []  # instance, rows, at work as it began

    def execution(self, index: int) -> SharedExecution:
        return SharedExecution(self, index)

    def close(self) -> None:
        pass


class SharedExecution(Execution):
    def __init__(self, model: Shared, index: int) -> None:
        self.model, self.index = model, index

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        model, rows = self.model, len(next(iter(inputs.values())))
        with model.lock:
            model.busy_runners += 1
            model.runs.append((self.index, rows, model.busy_runners))
        if self.index == model.broken:
            raise ExecutionLost("gone")
        threading.Event().wait(0.002)  # so that those who begin at the same time see each other
        with model.lock:
            model.busy_runners -= 1
        return {}

    def close(self) -> None:
        pass


def all_at_once(measuring: LatencyMeasurement, model: Shared, count: int) -> list[BaseException | None]:
    """Return the result of each instance's thread."""
    ends: list[BaseException | None] = [None] * count

    def measure(index: int) -> None:
        try:
            measuring(model.execution(index))
        except BaseException as error:
            ends[index] = error

    on_threads(measure, range(count))
    return ends


def test_several_instances_are_measured_alone_and_together(config: ModelConfig) -> None:
    model, profile = Shared(), LatencyTable()
    measuring = LatencyMeasurement(config, model, 3, profile, 60 * NS_PER_S)
    assert all_at_once(measuring, model, 3) == [None] * 3
    last = model.runs[0][0]
    assert model.runs[:16] == [(last, rows, 1) for rows in [1, 2, 4, 8] * 4]
    pairs = model.runs[16 : 16 + 2 * 12]
    assert [rows for _, rows, _ in pairs] == [rows for rows in [1, 2, 4, 8] * 3 for _ in range(2)]
    assert len({index for index, _, _ in pairs}) == 2, "the last and one other"
    all_instances = model.runs[40:]
    assert [rows for _, rows, _ in all_instances] == [rows for rows in [1, 2, 4, 8] * 3 for _ in range(3)]
    assert max(busy_runners for _, _, busy_runners in all_instances) == 3
    assert [(entry.instances, entry.rows) for entry in profile.entries()] == [
        (instances, rows) for instances in (1, 2, 4) for rows in (1, 2, 4, 8)
    ]
    count = len(model.runs)
    measuring(model.execution(0))  # started anew
    LatencyMeasurement(config, model, 1, profile, NS_PER_S)(model.execution(0))  # brought back from parking
    assert len(model.runs) == count


def test_an_instance_that_does_not_open_does_not_block_the_others(config: ModelConfig) -> None:
    model, profile = Shared(), LatencyTable()
    clock = itertools.count(step=1000).__next__  # a pause of the process uses up no time of the measurement
    measuring = LatencyMeasurement(config, model, 2, profile, NS_PER_S // 50, clock)
    measuring(model.execution(0))
    assert model.runs == []
    measuring(model.execution(1))  # it has opened after all: alone, since the other has gone on
    assert {busy_runners for _, _, busy_runners in model.runs} == {1}
    assert {entry.instances for entry in profile.entries()} == {1}


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_instance_that_dies_meanwhile_stops_the_others(config: ModelConfig, broken: int) -> None:
    model, profile = Shared(broken), LatencyTable()
    ends = all_at_once(LatencyMeasurement(config, model, 3, profile, 60 * NS_PER_S), model, 3)
    for index, error in enumerate(ends):
        assert isinstance(error, ExecutionLost) == (index == broken), "and it was soon: see all_at_once"


def measure_with_stored(
    model: Model, config: ModelConfig, stored: StoredLatencies, limit_ns: int = NS_PER_S
) -> tuple[LatencyTable, int]:
    """The profile, and how long the smallest batch took."""
    profile = LatencyTable()
    measuring = LatencyMeasurement(config, model, 1, profile, limit_ns, model.clock, stored)
    measuring(model)
    return profile, measuring.idle_ns


def test_a_saved_table_is_used_if_the_model_is_as_fast(config: ModelConfig) -> None:
    times_ns = {1: {1: [9 * NS_PER_MS] * 3, 3: [12 * NS_PER_MS]}, 2: {1: [13 * NS_PER_MS]}}  # under load, as it was
    stored = StoredLatencies(times_ns, 3 * NS_PER_MS)
    model = Model()
    profile, idle_ns = measure_with_stored(model, config, stored)
    assert model.rows == [1] * 4
    assert {entry.source for entry in profile.entries()} == {"stored"}
    assert profile.times() == times_ns
    assert idle_ns == 3 * NS_PER_MS, "as it was when the times were taken"
    for then_ms in (0, 0.9, 4.1):
        model = Model()
        profile, idle_ns = measure_with_stored(model, config, StoredLatencies(times_ns, int(then_ms * NS_PER_MS)))
        assert model.rows == [1] * 4 + [1, 2, 4, 8] * 4
        assert {entry.source for entry in profile.entries()} == {"load"}
        assert idle_ns == 2 * NS_PER_MS


def test_unmeasured_models_use_the_saved_table(tmp_path: Path, config: ModelConfig) -> None:
    texts = read(tmp_path / "texts", identity("BYTES", ("batch", 3)), "max_batch_size: 4\n")
    stored = StoredLatencies({1: {1: [100], 4: [300]}}, 0)
    for what, limit_ns in ((texts, NS_PER_S), (config, 0)):
        model = Model()
        profile, idle_ns = measure_with_stored(model, what, stored, limit_ns)
        assert (model.rows, profile.times(), idle_ns) == ([], stored.times_ns, 0)


@pytest.mark.parametrize(("then_us", "source"), [(90, "stored"), (300, "load")])
def test_a_saved_table_is_compared_with_the_table_of_the_backend(
    config: ModelConfig, then_us: int, source: str
) -> None:
    class Measured(Model):
        def buckets_us(self) -> dict[int, float]:
            return {1: 100.0, 8: 200.5}

    profile, _ = measure_with_stored(Measured(), config, StoredLatencies({1: {1: [400_000]}}, then_us * 1000))
    assert [(entry.rows, entry.source) for entry in profile.entries()] == [(1, source), (2, "load"), (8, "load")]


def test_a_model_that_fails_on_made_up_inputs_serves_all_the_same(
    config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.warmup")

    def fail(rows: int) -> None:
        if rows > 2:
            raise RuntimeError("no such class")

    profile = measured(config, Model(fail))
    assert [entry.rows for entry in profile.entries()] == [1, 2]
    assert "failed on random inputs (RuntimeError)" in caplog.text

    def lose(_rows: int) -> None:
        raise ExecutionLost("the GPU is gone")

    with pytest.raises(ExecutionLost):
        measured(config, Model(lose))


def test_the_table_of_the_backend_is_used_without_a_run(config: ModelConfig) -> None:
    class Measured(Model):
        def buckets_us(self) -> dict[int, float]:
            return {1: 100.0, 4: 150.0, 8: 200.5}

    model = Measured()
    profile = measured(config, model, 0)
    assert model.rows == []
    # A batch of 5 rows is padded to 8, and takes as long.
    assert [profile.estimate_ns(rows) for rows in (1, 2, 4, 5, 8)] == [100_000, 150_000, 150_000, 200_500, 200_500]
    assert profile.buckets == (1, 4, 8)
