"""Ranges of tensors, found by running the FP32 model on samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from engines.progress import Report
from engines.quantization.samples import Samples
from server.core.optimization_config import Calibration


def calibrate(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    samples: Samples,
    calibration: Calibration,
    cache: Path | None,
    report: Report,
) -> dict[str, tuple[float, float]]:
    """By tensor its range (low, high), which holds 0."""
    raise NotImplementedError
