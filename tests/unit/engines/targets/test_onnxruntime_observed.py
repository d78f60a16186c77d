"""Inner tensors of models on ONNX Runtime: values, and the fusions that reading them leaves as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.precision.casting import cast_model
from headrace_engines.progress import silent
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify
from headrace_engines.targets.base import TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeTarget
from headrace_engines.targets.onnxruntime_observed import ObservedSession

from tests.support import networks


def tensors(model: onnx.ModelProto) -> list[str]:
    return [name for node in model.graph.node for name in node.output]


def test_fused_layers_stay_fused_and_their_inner_tensors_are_not_listed() -> None:
    model = simplify(networks.residual())
    observed = OnnxRuntimeTarget().observe(model, TargetSpec("fp32"), tensors(model), Path("unused"), silent)
    assert observed.remark == ""
    assert "stem_r" in observed.names
    # Convolution and Relu are one operator.
    assert "stem" not in observed.names
    inputs = networks.inputs_of(model)
    expected = OnnxRunner(model, observed.names, optimize=False).run(inputs)
    for name, values in observed.run(inputs).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5)
    observed.close()


def test_tensors_in_8_bits_are_returned_in_fp32() -> None:
    model = simplify(networks.residual())
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    observed = ObservedSession(quantize(model, ranges, "onnxruntime"), tensors(model))
    assert observed.remark == ""
    inputs = networks.inputs_of(model)
    expected = OnnxRunner(model, observed.names, optimize=False).run(inputs)
    values = observed.run(inputs)
    assert {"stem_r", "a1r", "ar", "y"} <= set(values)
    for name, array in values.items():
        assert array.dtype == np.float32
        assert networks.cosine(array, expected[name]) > 0.99, name
        assert not np.array_equal(array, expected[name]), name


def test_tensors_in_16_bits_are_returned() -> None:
    model = simplify(networks.residual())
    observed = ObservedSession(cast_model(model, "fp16"), tensors(model))
    inputs = networks.inputs_of(model)
    expected = OnnxRunner(model, observed.names, optimize=False).run(inputs)
    values = observed.run(inputs)
    assert "c1" in values
    for name, array in values.items():
        np.testing.assert_allclose(array, expected[name], rtol=0.02, atol=0.02)


def test_unknown_tensors_are_left_out_and_wrong_inputs_are_an_error() -> None:
    model = simplify(networks.residual())
    observed = ObservedSession(model, ["y", "nothing"])
    assert observed.names == ("y",)
    with pytest.raises(BuildError, match="does not run on ONNX Runtime"):
        observed.run({"x": np.zeros((1, 2), np.float32)})
