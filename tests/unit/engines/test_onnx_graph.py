"""`OnnxRunner`: outputs, inner tensors, errors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify
from onnx import TensorProto, helper

from tests.support import models


def test_inner_tensors_are_returned_with_the_outputs() -> None:
    model = models.affine(16, 4)
    rows = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    runner = OnnxRunner(model, ["XW"])
    assert runner.outputs == ["Y", "XW"]
    outputs = runner.run({"X": rows})
    assert outputs["XW"].shape == (3, 4)
    assert [value.name for value in model.graph.output] == ["Y"], "the given model is not changed"


def test_a_clip_before_fp8_runs() -> None:
    """ONNX Runtime's optimiser refuses it."""
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["g"], name="first"),
        helper.make_node("Clip", ["g", "low", "high"], ["c"], name="clip"),
        helper.make_node("Gemm", ["c", "w"], ["y"], name="second"),
    ]
    random = np.random.default_rng(1)
    constants = {
        "w": random.standard_normal((4, 4)).astype(np.float32),
        "low": np.array(0, np.float32),
        "high": np.array(6, np.float32),
    }
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", TensorProto.FLOAT, ["n", 4])],
        [value("y", TensorProto.FLOAT, ["n", 4])],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    model = simplify(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9))
    ranges = {name: (-6.0, 6.0) for node in model.graph.node for name in (*node.input, *node.output)}
    rows = {"x": random.standard_normal((8, 4)).astype(np.float32)}
    quantized = OnnxRunner(quantize(model, ranges, "tensorrt", "fp8")).run(rows)["y"]
    plain = OnnxRunner(model).run(rows)["y"]
    assert not np.array_equal(quantized, plain)
    assert np.abs(quantized - plain).max() < 0.2 * np.abs(plain).max()


def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], domain="example.org")
    value = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [value("x", TensorProto.FLOAT, [1])], [value("y", TensorProto.FLOAT, [1])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("example.org", 1)]
    with pytest.raises(BuildError, match="Frobnicate"):
        OnnxRunner(helper.make_model(graph, opset_imports=opsets, ir_version=8))


def test_rejected_inputs_are_reported() -> None:
    with pytest.raises(BuildError, match=r"fails on samples of X \[2, 15\].*check the samples"):
        OnnxRunner(models.affine(16, 4)).run({"X": np.zeros((2, 15), np.float32)})
