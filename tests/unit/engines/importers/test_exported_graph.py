"""Changes of an exported file: names, and operators of no version of ONNX."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.importers.exported_graph import load_failure, mend_graph
from onnx import TensorProto, helper

from tests.unit.engines.importers.conftest import Save


def test_names_are_changed_in_inner_graphs_too(tmp_path: Path, save_model: Save) -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"])],
        "then",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    other = helper.make_graph(
        [helper.make_node("Abs", ["x"], ["z2"])],
        "else",
        [],
        [helper.make_tensor_value_info("z2", TensorProto.FLOAT, None)],
    )
    nodes = [
        helper.make_node("ReduceMin", ["x"], ["low"], keepdims=0),
        helper.make_node("Constant", [], ["zero"], value_float=0.0),
        helper.make_node("Less", ["low", "zero"], ["negative"]),
        helper.make_node("If", ["negative"], ["y"], then_branch=branch, else_branch=other),
    ]
    path = save_model(nodes, out=4)
    assert mend_graph(path, {"x": "image", "y": "scores", "w": "w"}, 17) == 17
    x = np.array([[1, -2, 3, -4]], np.float32)
    np.testing.assert_array_equal(ort.InferenceSession(path).run(["scores"], {"image": x})[0], -x)


def test_a_name_of_another_tensor_is_refused(save_model: Save) -> None:
    with pytest.raises(BuildError, match="the tensor x cannot be called w, another one has that name"):
        mend_graph(save_model(), {"x": "w"}, None)


def test_names_may_be_exchanged(save_model: Save) -> None:
    path = save_model([helper.make_node("Neg", ["x"], ["y"])], out=4)
    mend_graph(path, {"x": "y", "y": "x"}, None)
    (output,) = ort.InferenceSession(path).run(["x"], {"y": np.ones((1, 4), np.float32)})
    assert output[0, 0] == -1


def test_another_opset_than_requested_is_refused(save_model: Save) -> None:
    with pytest.raises(BuildError, match="the exporter wrote opset 17, --opset is 40: leave --opset out, or write 17"):
        mend_graph(save_model(), {}, 40)


def test_erfc_is_written_with_operators_of_onnx(save_model: Save) -> None:
    path = save_model([helper.make_node("Erfc", ["x"], ["y"], name="gelu")], out=4)
    mend_graph(path, {}, None)
    x = np.array([[-3.0, -0.5, 0.25, 2.0]], np.float32)
    (y,) = ort.InferenceSession(path).run(["y"], {"x": x})
    np.testing.assert_allclose(y[0], [math.erfc(value) for value in x[0]], atol=1e-6)


def _failure(operator: str) -> BuildError:
    text = (
        f'Load model from /repo/.import-net-1/net/1/model.onnx failed: In Node, ("head/{operator}", {operator}, "", -1) : '
        f'("x": tensor(float),) -> ("y",) , Error No Op registered for {operator} with domain_version of 15'
    )
    return load_failure(BuildError(text), 15)


def test_an_operator_of_no_opset_is_named() -> None:
    assert str(_failure("Svd")) == (
        "the exporter has no ONNX form of the operator Svd (node 'head/Svd'): write that part of the model with other operators"
    )


def test_an_operator_of_a_later_opset_is_named_with_that_opset() -> None:
    text = (
        "the operator LayerNormalization (node 'head/LayerNormalization') is not in opset 15: write --opset 17 or later"
    )
    assert str(_failure("LayerNormalization")) == text


def test_the_path_of_the_hidden_folder_is_left_out() -> None:
    assert str(load_failure(BuildError("Load model from /a/.import-b/1/model.onnx failed: no"), 15)) == (
        "Load model from model.onnx failed: no"
    )
