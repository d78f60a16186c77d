"""Flights on a real GPU: pixels to tensors and scores to classes within them, whole in one graph, rows read where they lie."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import ModelFailed
from headrace.core.tensor import ResidentRows
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.runtimes.cuda.driver import current, loaded
from headrace.runtimes.cuda.kernels.launching import ClassStage, PictureStage
from headrace.runtimes.cuda.memory import DeviceBuffer, pinned_empty, pinned_rows
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import kernel_reference as reference
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_process_memory import process_gpu_bytes, processes
from tests.support.tensorrt_networks import answers, convolutions, cosine

pytestmark = gpu_marks(120)

ROWS = 32
RECIPE = ImageRecipe(
    by="server", source=(40, 30), resize_short_side=20, crop=(16, 16), mean=(120.0, 110.0, 100.0), std=(60.0,)
)
FLOAT = np.dtype(np.float32)
PLAIN = ImageRecipe(by="server", crop=(16, 16), mean=(120.0, 110.0, 100.0), std=(60.0,))
RANKED = ClassStage("logits", FLOAT, (10,), 10, True, 3, "scores", "classes")
STAGES = (PictureStage("x", RECIPE, FLOAT), RANKED)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`convolutions` for 1 to 32 rows."""
    path = tmp_path_factory.mktemp("plan") / "model.plan"
    shape = ShapeRange({"x": ((1, 3, 16, 16), (8, 3, 16, 16), (ROWS, 3, 16, 16))})
    TensorRtTarget(optimization_level=1).build(convolutions(), TargetSpec("fp32", (shape,)), path, silent)
    return path


@contextmanager
def opened(path: Path, stages: tuple[Any, ...] = STAGES, **parameters: str) -> Iterator[Any]:
    """An execution of a plan behind its stages."""
    with closing(TensorRtBackend().load(path, 1, {MAX_BATCH_SIZE: str(ROWS), **parameters})) as model:
        assert not stages or model.attach_stages(stages) == ""
        with closing(model.execution(0)) as execution:
            yield execution


def pictures(rows: int, seed: int = 0, recipe: ImageRecipe = RECIPE) -> np.ndarray[Any, Any]:
    """uint8 (rows, *recipe.pixels)."""
    return np.random.default_rng(seed).integers(0, 256, (rows, *recipe.pixels), dtype=np.uint8)


def check(actual: dict[str, Any], sent: np.ndarray[Any, Any], recipe: ImageRecipe = RECIPE) -> None:
    """Hold the answers against ONNX Runtime's and the kernels' references."""
    assert list(actual) == ["scores", "classes", "top", "positive"]
    logits = answers(convolutions(), {"x": reference.prepare(sent, recipe, FLOAT)})["logits"]
    scores, _ = reference.rank(logits, 3, True)
    assert actual["classes"].dtype == np.int32
    assert actual["scores"].shape == actual["classes"].shape == (len(sent), 3)
    assert cosine(actual["scores"], scores) > 0.9999
    # TensorRT computes FP32 with TF32: what is nearly equal may change places, what is not may not.
    of_classes = np.take_along_axis(reference.soften(logits), actual["classes"], axis=1)
    np.testing.assert_allclose(of_classes, actual["scores"], atol=5e-3)


WAYS: list[dict[str, str]] = [
    {"one_graph_rows": "0"},
    {"one_graph_rows": "8"},
    {"one_graph_rows": str(ROWS), "wait": "spin"},
    {"one_graph_rows": str(ROWS), "wait": "sleep"},
    {"cuda_graphs": "0"},
    {},
]


@pytest.mark.parametrize("way", WAYS)
def test_pixels_in_and_classes_out(plan: Path, way: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"), opened(plan, **way) as execution:
        for rows in (1, 2, 3, 7, 8, 31, 32, 1):
            sent = pictures(rows, rows)
            check(execution.run({"x": sent}), sent)
        with pytest.raises(ModelFailed, match="takes 'x' as uint8"):
            execution.run({"x": np.zeros((1, 3, 16, 16), np.float32)})
    assert not caplog.records, "graphs can be captured, and TensorRT complains of nothing"


def test_probabilities_of_all_classes(plan: Path) -> None:
    with opened(plan, (ClassStage("logits", FLOAT, (10,), 10, True, 0, "", ""),)) as execution:
        x = np.random.default_rng(1).random((5, 3, 16, 16), np.float32)
        actual = execution.run({"x": x})
        logits = answers(convolutions(), {"x": x})["logits"]
        np.testing.assert_allclose(actual["logits"], reference.soften(logits), atol=5e-3)
        np.testing.assert_array_equal(actual["positive"], logits > 0)


def test_stages_leak_nothing(plan: Path) -> None:
    for _ in range(2):
        with opened(plan) as execution:
            execution.run({"x": pictures(ROWS)})
    before = process_gpu_bytes()
    for _ in range(3):
        with opened(plan) as execution:
            execution.run({"x": pictures(ROWS)})
    assert process_gpu_bytes() - before <= 32 << 20, (before, process_gpu_bytes())


@contextmanager
def spread(sent: np.ndarray[Any, Any], seed: int) -> Iterator[list[tuple[str, int, ResidentRows]]]:
    """Some of the rows as resident ones, in pinned and in the GPU's memory, in ones and twos; some of them not aligned."""
    rng = np.random.default_rng(seed)
    pinned = pinned_empty(sent.shape, sent.dtype)
    pinned[:] = sent
    pool = pinned_rows(pinned)
    row_bytes = sent[0].nbytes
    with current():
        block = DeviceBuffer(sent.nbytes + 1)
        loaded().memcpy_htod(block.address + 1, sent)
        loaded().Context.synchronize()  # of up to 64 KB of pageable memory the copy may not be done yet
    actual, at = [], 0
    while at < len(sent):
        count = min(int(rng.integers(1, 3)), len(sent) - at)
        index = rng.integers(0, 3)
        if index == 0:
            actual.append(("x", at, pool[at : at + count]))
        elif index == 1:
            shape = (count, *sent.shape[1:])
            rows = ResidentRows(block.address + 1 + at * row_bytes, 0, sent.dtype, shape, block, _no_copy)
            actual.append(("x", at, rows))
        at += count
    yield actual
    with current():
        block.free()


def _no_copy(address: int, size_bytes: int) -> Any:
    raise AssertionError("the GPU was to read it")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", [RECIPE, PLAIN], ids=["resized", "plain"])
def test_rows_are_read_in_place(plan: Path, way: dict[str, str], recipe: ImageRecipe) -> None:
    with opened(plan, (PictureStage("x", recipe, FLOAT), RANKED), **way) as execution:
        for number in range(24):
            # Every other flight is of few rows: those may be prepared where they lie.
            sent = pictures(1 + number // 2 % 5 if number % 2 else 1 + number * 7 % ROWS, number, recipe)
            with spread(sent, number) as residents:
                batch = execution.begin({"x": sent}, len(sent))
                assert batch.device == 0
                batch.inputs["x"][:] = 0xA5
                resident = np.zeros(len(sent), bool)
                for _, first, rows in residents:
                    resident[first : first + len(rows)] = True
                batch.inputs["x"][~resident] = sent[~resident]
                batch.resident_inputs.extend(residents)
                execution.launch(batch)
                check(execution.finish(batch), sent, recipe)


def test_few_rows_are_prepared_in_place(plan: Path) -> None:
    with opened(plan, (PictureStage("x", PLAIN, FLOAT), RANKED), one_graph_rows="4") as execution:
        lanes = list(execution._resources._contexts.values())
        assert all(lane.direct for lane in lanes), "else it would have been captured the other way"
        for direct in (True, False):
            for lane in lanes:
                if lane.rows <= 4:
                    with current():
                        lane.drop_batch_graphs()
                        lane.direct = direct
                        assert execution._resources.try_capture_batch_graph(lane)
                    assert lane.direct == direct


def test_batches_in_flight_have_separate_row_tables(plan: Path) -> None:
    sent = pictures(ROWS)
    pinned = pinned_empty(sent.shape, sent.dtype)
    pinned[:] = sent
    pool = pinned_rows(pinned)
    for way in WAYS:
        with opened(plan, **way) as execution:
            under_way: list[tuple[Any, np.ndarray[Any, Any]]] = []
            for number in range(200):
                order = np.random.default_rng(number).permutation(ROWS)[: 1 + number % 9]
                batch = execution.begin({"x": sent}, len(order))
                batch.resident_inputs.extend(("x", at, pool[n : n + 1]) for at, n in enumerate(order))
                execution.launch(batch)
                under_way.append((batch, order))
                if len(under_way) == execution.depth:
                    batch, order = under_way.pop(0)
                    actual = execution.finish(batch)
                    if number % 10 == 0:
                        check(actual, sent[order])
            for batch, order in under_way:
                check(execution.finish(batch), sent[order])


@pytest.mark.whole_gpu
def test_every_bucket_is_measured_at_load(plan: Path) -> None:
    with opened(plan) as execution:
        choice = execution._resources.tuning_result
        assert 1 in choice.one_graph | choice.one_graph_when_idle, (
            f"one row is soonest back in one graph, unless others use the GPU: {processes()}"
        )
        assert choice.timings.keys() >= set(choice.buckets)
        assert choice.buckets[-1] == ROWS


def test_two_threads_launch_in_turn(plan: Path) -> None:
    """As the event loop does for an instance that sleeps."""
    with opened(plan, stages=()) as execution:
        assert execution.prompt, "all shapes are known at load"
        with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as finisher:
            for number in range(50):
                x = np.random.default_rng(number).standard_normal((1, 3, 16, 16)).astype(np.float32)

                def fly(x: np.ndarray[Any, Any] = x) -> Any:
                    batch = execution.begin({"x": x}, 1)
                    batch.inputs["x"][:] = x
                    execution.launch(batch)
                    return batch

                batch = other.submit(fly).result() if number % 2 else fly()
                actual = finisher.submit(execution.finish, batch).result()
                assert cosine(actual["logits"], answers(convolutions(), {"x": x})["logits"]) > 0.9999
