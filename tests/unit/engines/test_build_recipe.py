"""Fingerprints of built models: a change must come with a new `BUILD_RECIPE`, or stores return old artefacts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.optimization_config import AccuracyBar, Calibration
from headrace_engines import project as spec
from headrace_engines.precision import lowering
from headrace_engines.precision.lowering import lower_model
from headrace_engines.progress import silent
from headrace_engines.project import BuildData, BuildSpec
from headrace_engines.quantization import calibration as ranges
from headrace_engines.simplify import simplify
from onnx import TensorProto, numpy_helper

from tests.support import networks
from tests.support.networks import samples_of

# What these recipes make of two networks. Another value here needs another number there: ranges.RECIPE where the same samples
# give other ranges, else spec.RECIPE.
RECIPES = (5, 1)
# fmt: off
MADE = {
    ("residual", "onnxruntime", "fp16"): {"nodes": 19, "float16": 831.5591},
    ("residual", "onnxruntime", "int8"): {"nodes": 54, "float": 0.9733237, "uint8": 500, "int8": 255714, "int32": 123929},
    ("residual", "tensorrt", "fp16"): {"nodes": 19, "float16": 831.5591},
    ("residual", "tensorrt", "int8"): {"nodes": 39, "float": 11.61184, "int8": 255714},
    ("residual", "tensorrt", "fp8"): {"nodes": 40, "float16": 739.4853, "float8e4m3fn": 41755.06},
    ("transformer", "onnxruntime", "fp16"): {"nodes": 35, "float16": 1350.694},
    ("transformer", "onnxruntime", "int8"): {"nodes": 59, "float": 43.56273, "uint8": 960, "int8": 348355},
    ("transformer", "tensorrt", "fp16"): {"nodes": 35, "float16": 1350.694},
    ("transformer", "tensorrt", "int8"): {"nodes": 55, "float": 43.55069, "int8": 348355},
    ("transformer", "tensorrt", "fp8"): {"nodes": 57, "float16": 42.51902, "float8e4m3fn": 818647.4},
}
# fmt: on


def fingerprint(model: onnx.ModelProto) -> dict[str, float]:
    """Return the number of nodes, and the sum of absolute constants by element type."""
    result: dict[str, float] = {"nodes": len(model.graph.node)}
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT64:  # shapes
            continue
        values = numpy_helper.to_array(tensor).astype(np.float64)
        name = TensorProto.DataType.Name(tensor.data_type).lower()
        result[name] = result.get(name, 0.0) + float(np.abs(values).sum())
    return result


@pytest.mark.parametrize("precision", ["fp16", "int8", "fp8"])
@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize("family", ["residual", "transformer"])
def test_the_same_specification_makes_the_same(
    family: str, target: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (target, precision) == ("onnxruntime", "fp8"):
        pytest.skip("ONNX Runtime has no FP8")
    # Whatever processor this is.
    monkeypatch.setattr(lowering, "has_vnni", lambda _capability: True)
    model = simplify(networks.residual() if family == "residual" else networks.transformer())
    rows = samples_of(networks.inputs_of(model, 16))
    bar = AccuracyBar(min_top1_agreement=0.0, min_cosine=0.0)
    requested = BuildSpec(precision, (), None, Calibration(method="minmax"), bar)
    created = lower_model(model, requested, target, BuildData(rows, rows), tmp_path, silent)
    assert (spec.BUILD_RECIPE, ranges.RANGES_RECIPE) == RECIPES, "write down what the new recipe makes"
    result = fingerprint(created.model)
    assert result == pytest.approx(MADE[family, target, precision], rel=1e-4), result
