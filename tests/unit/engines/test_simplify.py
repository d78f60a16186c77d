"""`simplify`: the same function in fewer operators, with the same names, inputs and outputs."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.quantization.qdq import quantizable
from headrace_engines.simplify import OPSET, raise_opset, simplify
from onnx import TensorProto, helper, numpy_helper

from tests.support import networks


def _same(model: onnx.ModelProto, simple: onnx.ModelProto, tolerance: float = 1e-5) -> None:
    x = networks.inputs_of(simple)
    expected, result = OnnxRunner(model).run(x), OnnxRunner(simple).run(x)
    assert list(expected) == list(result)
    for name, values in expected.items():
        assert result[name].shape == values.shape
        np.testing.assert_allclose(result[name], values, atol=tolerance * np.abs(values).max())


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", *networks.DEEP])
def test_simplified_models_have_the_same_function_and_names(name: str) -> None:
    model = networks.light(name)
    before = model.SerializeToString(deterministic=True)
    simple = simplify(model)
    assert model.SerializeToString(deterministic=True) == before
    onnx.checker.check_model(simple, full_check=True)
    _same(model, simple)
    result = networks.operators(simple)
    assert not {"ConstantOfShape", "Constant", "Dropout", "Identity", "Unsqueeze", "Sum"} & set(result)
    assert result["Conv"] == networks.operators(model)["Conv"]
    assert [(o.domain, o.version) for o in simple.opset_import] == [("", OPSET)]
    names = [node.name for node in simple.graph.node]
    assert len(set(names)) == len(names)
    # Convolutions are still called what they were called.
    of_old = {node.name for node in model.graph.node if node.op_type == "Conv"}
    assert {node.name for node in simple.graph.node if node.op_type == "Conv"} == of_old


def test_inputs_and_outputs_stay_and_constants_are_no_inputs() -> None:
    model = networks.light("squeezenet")
    simple = simplify(model)
    data = next(value for value in model.graph.input if value.name == "data_0")
    assert list(simple.graph.input) == [data]
    assert list(simple.graph.output) == list(model.graph.output)


def test_free_batch_dimension_and_metadata_stay() -> None:
    model = networks.residual()
    helper.set_model_props(model, {"origin": "a test"})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    simple = simplify(model)
    assert simple.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "rows"
    assert {p.key: p.value for p in simple.metadata_props} == {"origin": "a test"}
    _same(model, simple)


def _with_norm(count: int) -> onnx.ModelProto:
    text = (
        "r = Relu(x)  n = BatchNormalization(r, s, b, m, v)  k = Mul(n, scale)  a = Add(shift, k)  y = Conv(a, w)"
        if count == 1
        else "c = Conv(x, w)  n = BatchNormalization(c, s, b, m, v)  y = Relu(n)"
    )
    random = np.random.default_rng(0)
    by_channel = {name: random.uniform(0.5, 2, 4) for name in "sbmv"}
    others = {"scale": random.uniform(1, 2, (4, 1, 1)), "shift": random.uniform(1, 2, (1, 4, 1, 1))}
    return networks.network(text, {**networks.weights(w=(4, 4, 1, 1)), **by_channel, **others}, ("N", 4, 5, 5))


def test_batch_norm_is_folded_into_the_convolution_else_scale_and_shift_into_it() -> None:
    for number, expected in ((2, {"Conv": 1, "Relu": 1}), (1, {"Relu": 1, "BatchNormalization": 1, "Conv": 1})):
        model = _with_norm(number)
        simple = simplify(model)
        assert networks.operators(simple) == expected
        _same(model, simple)


def test_scale_by_row_is_not_folded_into_a_batch_norm() -> None:
    model = _with_norm(1)
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == "scale")
    scale.CopyFrom(numpy_helper.from_array(np.arange(1, 6, dtype=np.float32).reshape(1, 1, 5), "scale"))
    simple = simplify(model)
    assert networks.operators(simple)["Mul"] == 1
    _same(model, simple)


def test_gemm_scales_are_folded_into_its_constants() -> None:
    text = "h = Gemm <alpha=0.5, beta=2.0> (x, w, one)  y = Gemm <transB=1, beta=3.0> (h, v, row)"
    constants = networks.weights(w=(6, 8), v=(5, 8), row=(1, 5))
    model = networks.network(text, {**constants, "one": np.array([0.3])}, ("N", 6))
    simple = simplify(model)
    graph = OnnxGraph(simple)
    for node, columns in zip(graph.nodes, (8, 5), strict=True):
        assert graph.attribute(node, "alpha", 1.0) == graph.attribute(node, "beta", 1.0) == 1.0
        assert graph.shape(node.input[2]) == (columns,)
    _same(model, simple)


def test_product_and_bias_become_one_gemm_with_the_name_of_the_product() -> None:
    text = "m = MatMul(x, w)  h = Add(b, m)  r = Relu(h)  n = MatMul(r, v)  y = Add(n, row)"
    model = networks.network(text, networks.weights(w=(6, 8), b=(8,), v=(8, 5), row=(1, 5)), ("N", 6))
    simple = simplify(model)
    assert [(node.op_type, node.name) for node in simple.graph.node] == [
        ("Gemm", "node_m"),
        ("Relu", "node_r"),
        ("Gemm", "node_n"),
    ]
    onnx.checker.check_model(simple, full_check=True)
    _same(model, simple)


@pytest.mark.parametrize(
    "text",
    [
        "m = MatMul(x, w)  y = Add(m, x)",
        "m = MatMul(x, w)  r = Relu(m)  y = Add(m, r)",
        "m = MatMul(x, w)  y = Add(m, column)",
    ],
)
def test_other_additions_stay(text: str) -> None:
    model = networks.network(text, networks.weights(w=(6, 6), column=(4, 1)), (4, 6))
    simple = simplify(model)
    assert networks.operators(simple)["Add"] == 1
    _same(model, simple)


def test_shared_weights_of_gemms_with_factors_stay_apart() -> None:
    text = "h = Gemm <alpha=0.5> (x, w)  g = Gemm(x, w)  y = Add(h, g)"
    model = networks.network(text, networks.weights(w=(6, 8)), ("N", 6))
    _same(model, simplify(model))


def test_nameless_nodes_are_called_after_their_outputs() -> None:
    model = networks.residual()
    for node in model.graph.node:
        node.name = "same" if node.op_type == "Relu" else ""
    names = [node.name for node in simplify(model).graph.node]
    assert len(set(names)) == len(names)
    assert {"same", "stem", "c2", "y"} <= set(names)


def test_later_opsets_stay_and_earlier_ones_are_raised() -> None:
    assert simplify(networks.residual()).opset_import[0].version == 17
    later = simplify(networks.network("y = Relu(x)", {}, ("N", 4), opset=19))
    assert later.opset_import[0].version == 19
    raised = raise_opset(simplify(networks.light("squeezenet")), 19)
    assert (raised.opset_import[0].version, raised.ir_version) == (19, 9)
    onnx.checker.check_model(raised, full_check=True)
    assert not networks.operators(raised)["Constant"]
    _same(networks.light("squeezenet"), raised)


def test_unknown_operator_is_named_with_its_node_and_a_cure() -> None:
    with pytest.raises(BuildError, match=r"at node 'the_odd_one' \(example.org:Frobnicate\).*export the model without"):
        simplify(networks.unknown_operator())


def test_wrong_use_of_an_operator_is_named_with_its_node() -> None:
    model = networks.network("h = Relu(x)  y = MatMul(h, w)", networks.weights(w=(6, 8)), ("N", 5))
    with pytest.raises(BuildError, match=r"at node 'node_y' \(MatMul\).*onnx.checker") as raised:
        simplify(model)
    assert "headrace-" not in str(raised.value)


def test_local_functions_are_written_out() -> None:
    body = [helper.make_node("Relu", ["a"], ["r"]), helper.make_node("Add", ["r", "a"], ["o"])]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    function = helper.make_function("mine", "Twice", ["a"], ["o"], body, opsets[:1])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Twice", ["x"], ["y"], domain="mine")], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=8)
    simple = simplify(model)
    assert networks.operators(simple) == {"Relu": 1, "Add": 1}
    assert not simple.functions
    assert [o.domain for o in simple.opset_import] == [""]
    _same(model, simple)


def test_simple_models_stay_as_they_are() -> None:
    simple = simplify(networks.transformer())
    again = simplify(copy_model(simple))
    assert networks.operators(again) == networks.operators(simple)
    assert [node.name for node in again.graph.node] == [node.name for node in simple.graph.node]


def test_a_model_of_fp16_has_fp32_constants_inside() -> None:
    """Else none of its layers would have a weight that can be quantised."""
    model = networks.network("c = Conv(x, w, b)  y = Relu(c)", networks.weights(w=(4, 3, 3, 3), b=(4,)), ("N", 3, 8, 8))
    for tensor in model.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    simple = simplify(model)
    assert quantizable(simple) == ["node_c"]
    assert [*simple.graph.input, *simple.graph.output] == [*model.graph.input, *model.graph.output]
    picture = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float16)
    expected, result = (OnnxRunner(one).run({"x": picture})["y"] for one in (model, simple))
    assert result.dtype == np.float16
    np.testing.assert_allclose(result, expected, atol=2e-3)
