"""Models that carry Q/DQ, as a quantising exporter leaves them."""

from __future__ import annotations

import numpy as np
import onnx
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify


def with_qdq(model: onnx.ModelProto, inputs: dict[str, np.ndarray], target: str) -> onnx.ModelProto:
    """The model with Q/DQ whose ranges are those of `inputs`.

    Args:
        model: FP32.
        inputs: one batch.
        target: "tensorrt" for symmetric INT8, "onnxruntime" for UINT8 with zero points and without Relu.
    """
    simple = simplify(model)
    tensors = tensors_to_calibrate(simple)
    outputs = OnnxRunner(simple, tensors, optimize=False).run(inputs) | inputs
    ranges = {name: (float(outputs[name].min()), float(outputs[name].max())) for name in tensors}
    return quantize(simple, ranges, target)
