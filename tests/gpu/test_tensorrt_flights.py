"""What a GPU does within a flight beside the plan: pixels to tensors, scores to classes."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.progress import silent
from engines.targets.base import Order, ShapeRange
from engines.targets.tensorrt_target import TensorRtTarget
from server.backends.tensorrt_backend import MAX_BATCH_SIZE, TensorRtBackend
from server.core.errors import ModelFailed
from server.cuda.driver import current, loaded
from server.cuda.kernels import reference
from server.cuda.kernels.stages import ClassStage, PictureStage
from server.pipelines.recipe import ImageRecipe
from tests.gpu.tensorrt_networks import answers, convolutions, cosine

_missing = [name for name in ("pycuda", "tensorrt") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(_missing), reason="needs an NVIDIA GPU, PyCUDA and TensorRT"),
]

ROWS = 32
RECIPE = ImageRecipe(
    by="server", source=(40, 30), resize_short_side=20, crop=(16, 16), mean=(120.0, 110.0, 100.0), std=(60.0,)
)
FLOAT = np.dtype(np.float32)
STAGES = (
    PictureStage("x", RECIPE, FLOAT),
    ClassStage("logits", FLOAT, (10,), 10, True, 3, "scores", "classes"),
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`convolutions` for 1 to 32 rows."""
    path = tmp_path_factory.mktemp("plan") / "model.plan"
    shape = ShapeRange({"x": ((1, 3, 16, 16), (8, 3, 16, 16), (ROWS, 3, 16, 16))})
    TensorRtTarget(optimization_level=1).build(convolutions(), Order("fp32", (shape,)), path, silent)
    return path


@contextmanager
def opened(path: Path, stages: tuple[Any, ...] = STAGES, **parameters: str) -> Iterator[Any]:
    """An execution of a plan behind its stages."""
    with closing(TensorRtBackend().load(path, 1, {MAX_BATCH_SIZE: str(ROWS), **parameters})) as model:
        assert model.join(stages) == ""
        with closing(model.execution(0)) as execution:
            yield execution


def pictures(rows: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """uint8 (rows, *RECIPE.pixels)."""
    return np.random.default_rng(seed).integers(0, 256, (rows, *RECIPE.pixels), dtype=np.uint8)


def check(found: dict[str, Any], sent: np.ndarray[Any, Any]) -> None:
    """Hold the answers against ONNX Runtime's and the kernels' references."""
    assert list(found) == ["scores", "classes", "top", "positive"]
    logits = answers(convolutions(), {"x": reference.prepare(sent, RECIPE, FLOAT)})["logits"]
    scores, _ = reference.rank(logits, 3, True)
    assert found["classes"].dtype == np.int32
    assert found["scores"].shape == found["classes"].shape == (len(sent), 3)
    assert cosine(found["scores"], scores) > 0.9999
    # TensorRT computes FP32 with TF32: what is nearly equal may change places, what is not may not.
    of_classes = np.take_along_axis(reference.soften(logits), found["classes"], axis=1)
    np.testing.assert_allclose(of_classes, found["scores"], atol=5e-3)


@pytest.mark.parametrize("graphs", ["1", "0"])
def test_pixels_in_and_classes_out(plan: Path, graphs: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"), opened(plan, cuda_graphs=graphs) as execution:
        for rows in (1, 2, 3, 7, 8, 31, 32, 1):
            sent = pictures(rows, rows)
            check(execution.run({"x": sent}), sent)
        with pytest.raises(ModelFailed, match="takes 'x' as uint8"):
            execution.run({"x": np.zeros((1, 3, 16, 16), np.float32)})
    assert not caplog.records, "graphs can be captured, and TensorRT complains of nothing"


def test_probabilities_of_all_classes(plan: Path) -> None:
    with opened(plan, (ClassStage("logits", FLOAT, (10,), 10, True, 0, "", ""),)) as execution:
        x = np.random.default_rng(1).random((5, 3, 16, 16), np.float32)
        found = execution.run({"x": x})
        logits = answers(convolutions(), {"x": x})["logits"]
        np.testing.assert_allclose(found["logits"], reference.soften(logits), atol=5e-3)
        np.testing.assert_array_equal(found["positive"], logits > 0)


def test_stages_leave_nothing_behind(plan: Path) -> None:
    def free_bytes() -> int:
        with current():
            return int(loaded().mem_get_info()[0])

    for _ in range(2):
        with opened(plan) as execution:
            execution.run({"x": pictures(ROWS)})
    before = free_bytes()
    for _ in range(3):
        with opened(plan) as execution:
            execution.run({"x": pictures(ROWS)})
    assert before - free_bytes() <= 32 << 20, (before, free_bytes())
