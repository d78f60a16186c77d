"""Bias correction: biases compensate for rounded weights."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace.config.optimization_config import Calibration
from headrace_engines.accuracy import measure
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.progress import silent
from headrace_engines.quantization.calibration import calibrate
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import correct_biases, quantizable, quantize
from headrace_engines.quantization.samples import Samples
from headrace_engines.simplify import simplify
from onnx import TensorProto, helper, numpy_helper

from tests.support.networks import samples_of

CHANNELS = 8


def network(bias: bool, groups: int = 1) -> onnx.ModelProto:
    """Three convolutions with ReLUs, whose weights have one large value a channel that makes all others round badly."""
    random = np.random.default_rng(3)
    nodes, constants, x = [], [], "x"
    for layer in range(3):
        weight = random.uniform(0.0, 0.02, (CHANNELS, CHANNELS // groups, 3, 3)).astype(np.float32)
        weight[:, 0, 0, 0] = 2.0
        constants.append(numpy_helper.from_array(weight, f"w{layer}"))
        inputs = [x, f"w{layer}"]
        if bias:
            constants.append(numpy_helper.from_array(random.standard_normal(CHANNELS).astype(np.float32), f"b{layer}"))
            inputs.append(f"b{layer}")
        nodes.append(helper.make_node("Conv", inputs, [f"c{layer}"], name=f"conv{layer}", pads=[1] * 4, group=groups))
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"], name=f"relu{layer}"))
        x = f"r{layer}"
    nodes += [
        helper.make_node("GlobalAveragePool", [x], ["p"], name="pool"),
        helper.make_node("Flatten", ["p"], ["y"], name="flatten"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["n", CHANNELS, 8, 8])],
        [value("y", TensorProto.FLOAT, ["n", CHANNELS])],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples() -> Samples:
    return samples_of({"x": np.random.default_rng(4).uniform(0, 1, (32, CHANNELS, 8, 8)).astype(np.float32)})


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(("bias", "groups"), [(True, 1), (False, 1), (True, CHANNELS)])
def test_the_error_shrinks(target: str, bias: bool, groups: int) -> None:
    model, rows = simplify(network(bias, groups)), samples()
    ranges = calibrate(model, tensors_to_calibrate(model), rows, Calibration(method="minmax"), None, silent)
    plain = quantize(model, ranges, target)
    before = model.SerializeToString()
    corrected = quantize(correct_biases(model, plain, quantizable(model), rows, silent), ranges, target)
    assert model.SerializeToString() == before, "the given model is not changed"
    reference = OnnxRunner(model)
    errors = [measure(reference, OnnxRunner(one), rows, 8, silent).max_abs for one in (plain, corrected)]
    assert errors[1] < 0.7 * errors[0], errors


def test_excluded_layers_are_unchanged() -> None:
    model, rows = simplify(network(bias=True)), samples()
    ranges = calibrate(model, tensors_to_calibrate(model), rows, Calibration(method="minmax"), None, silent)
    kept = quantizable(model)[0]
    plain = quantize(model, ranges, "tensorrt", keep=[kept])
    corrected = correct_biases(model, plain, [name for name in quantizable(model) if name != kept], rows, silent)

    def bias_of(model: onnx.ModelProto, name: str) -> np.ndarray:
        node = next(node for node in model.graph.node if node.name == name)
        return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == node.input[2]))

    assert np.array_equal(bias_of(corrected, kept), bias_of(model, kept))
    other = quantizable(model)[1]
    assert not np.array_equal(bias_of(corrected, other), bias_of(model, other))


def test_every_sample_counts_alike_also_in_a_batch_of_its_own() -> None:
    """Five samples are a batch of four and one of one."""
    model = simplify(network(bias=False))
    rows = np.zeros((5, CHANNELS, 8, 8), np.float32)
    rows[4] = 1.0
    ranges = dict.fromkeys(tensors_to_calibrate(model), (0.0, 50.0))
    plain = quantize(model, ranges, "tensorrt")
    corrected = correct_biases(model, plain, ["conv0"], samples_of({"x": rows}), silent)
    node = next(node for node in corrected.graph.node if node.name == "conv0")
    bias = numpy_helper.to_array(next(t for t in corrected.graph.initializer if t.name == node.input[2]))
    whole = correct_biases(model, plain, ["conv0"], samples_of({"x": np.full_like(rows[:4], 0.2)}), silent)
    node = next(node for node in whole.graph.node if node.name == "conv0")
    same = numpy_helper.to_array(next(t for t in whole.graph.initializer if t.name == node.input[2]))
    np.testing.assert_allclose(bias, same, rtol=1e-4)
