"""Fixtures of the TensorRT target: a specification, a model with expected outputs, a build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.fake_tensorrt import affine


def batches(minimum: int, optimum: int, maximum: int) -> ShapeRange:
    return ShapeRange({"x": ((minimum, 3), (optimum, 3), (maximum, 3))})


ORDER = TargetSpec("fp32", (batches(1, 4, 8),))
X = np.array([[1, 2, 3], [-9, 0, 0]], np.float32)
Y = np.array([[23, 27], [0, 0]], np.float32)


def build(
    tmp_path: Path, model: onnx.ModelProto | None = None, order: TargetSpec = ORDER, report: Any = silent
) -> Path:
    path = tmp_path / "model.plan"
    TensorRtTarget().build(affine() if model is None else model, order, path, report)
    return path
