"""The plan of `affine`: its specification, build and executions, with the expected outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.fake_tensorrt import affine


def batches(minimum: int, optimum: int, maximum: int) -> ShapeRange:
    return ShapeRange({"x": ((minimum, 3), (optimum, 3), (maximum, 3))})


BATCHED = {MAX_BATCH_SIZE: "8"}
ORDER = TargetSpec("fp32", (batches(1, 4, 8),))
X = np.array([[1, 2, 3], [-9, 0, 0]], np.float32)
Y = np.array([[23, 27], [0, 0]], np.float32)


def build(
    tmp_path: Path, model: onnx.ModelProto | None = None, order: TargetSpec = ORDER, report: Any = silent
) -> Path:
    path = tmp_path / "model.plan"
    TensorRtTarget().build(affine() if model is None else model, order, path, report)
    return path


@contextmanager
def opened(path: Path, parameters: dict[str, str] = BATCHED, instances: int = 1) -> Iterator[Any]:
    """The executions of a plan; the only one itself if there is one."""
    with closing(TensorRtBackend().load(path, instances, parameters)) as model:
        executions = []
        try:
            executions += [model.execution(index) for index in range(instances)]
            yield executions[0] if instances == 1 else executions
        finally:
            for execution in executions:
                execution.close()


def rows(count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Small whole numbers, which TF32 computes exactly."""
    return np.random.default_rng(seed).integers(-9, 9, (count, 3)).astype(np.float32)


def right(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Output of `affine`."""
    return np.maximum(x @ np.array([[1, 2], [3, 4], [5, 6]], np.float32) + np.array([1, -1], np.float32), 0)


def fly(execution: Any, x: np.ndarray[Any, Any]) -> Any:
    """Begin, fill and launch."""
    batch = execution.begin({"x": x[:1]}, len(x))
    assert batch.inputs["x"].shape == x.shape
    batch.inputs["x"][:] = x
    execution.launch(batch)
    return batch
