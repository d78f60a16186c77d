"""Places of Q/DQ pairs: rules on the graph, checked on networks of several families."""

from __future__ import annotations

import functools

import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, copy_model
from headrace_engines.quantization.placement import QdqPlacement, place_pairs, tensors_to_calibrate
from headrace_engines.simplify import simplify
from onnx import TensorProto

from tests.support import networks


@functools.cache
def simple(name: str) -> onnx.ModelProto:
    if name in ("residual", "squeeze_excite", "transformer"):
        return simplify(getattr(networks, name)())
    return simplify(networks.light(name))


def placed(model: onnx.ModelProto, target: str, precision: str = "int8", keep: tuple[str, ...] = ()) -> QdqPlacement:
    return place_pairs(OnnxGraph(copy_model(model)), target, precision, keep)


def edges(model: onnx.ModelProto, precision: str = "int8", keep: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """By operator, for TensorRT: what is read through pairs, as "node:tensor"."""
    nodes = {node.name: node for node in model.graph.node}
    result: dict[str, list[str]] = {}
    for name, index in placed(model, "tensorrt", precision, keep).edges:
        result.setdefault(nodes[name].op_type, []).append(f"{name}:{nodes[name].input[index]}")
    return result


def small(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    constants = networks.weights(w=(16, 16, 1, 1), wd=(16, 1, 3, 3), b=(16,), **shapes)
    return simplify(networks.network(text, constants, ("N", 16, 8, 8)))


def test_tensorrt_quantises_the_stem_every_product_and_the_shortcuts() -> None:
    result = edges(simple("residual"))
    assert result["Conv"][0] == "node_stem:x"
    assert len(result["Conv"]) == 6
    assert result["Gemm"] == ["node_y:flat"]
    # Of two convolutions the deeper is fused with the addition, wherever it stands; else the shortcut is what is no convolution.
    assert result["Add"] == ["node_a:down", "node_c:ar"]
    assert result["GlobalAveragePool"] == ["node_mean:cr"]
    assert "MaxPool" not in result


def test_tensorrt_adds_no_pair_to_an_addition_without_quantised_readers() -> None:
    model = small("c = Conv(x, w)  y = Add(c, x)")
    assert set(edges(model)) == {"Conv"}
    assert set(edges(small("c = Conv(x, w)  a = Add(c, x)  y = Conv(a, w)"))) == {"Conv", "Add"}


def test_tensorrt_quantises_both_operands_if_no_convolution_can_be_fused() -> None:
    model = small("c = Conv(x, w)  s = Sigmoid(c)  m = Mul(c, s)  a = Add(m, x)  y = Conv(a, w)")
    assert edges(model)["Add"] == ["node_a:m", "node_a:x"]
    # The output of a convolution that others read too has to be written anyway.
    shared = small("c = Conv(x, w)  r = Relu(c)  a = Add(c, r)  y = Conv(a, w)")
    assert edges(shared)["Add"] == ["node_a:c", "node_a:r"]


def test_tensorrt_adds_no_pair_to_a_residual_branch_with_an_excluded_side() -> None:
    model = small("c = Conv(x, w)  d = Conv(x, w, b)  e = Relu(d)  a = Add(c, e)  y = Conv(a, w)")
    assert edges(model)["Add"] == ["node_a:e"]
    for keep in (("node_c",), ("node_d",), ("node_a",), ("node_y",)):
        assert "Add" not in edges(model, keep=keep)


def test_tensorrt_quantises_gates_and_averages_but_not_activations() -> None:
    result = edges(simple("squeeze_excite"))
    assert result["GlobalAveragePool"] == ["node_m:dr"]
    assert result["Mul"] == ["node_gated:dr", "node_gated:gate"]
    assert result["Add"] == ["node_r:er"]


def test_tensorrt_quantises_batch_norms_between_quantised_operators() -> None:
    result = edges(simple("densenet121"))
    assert len(result["Conv"]) == 121
    assert len(result["BatchNormalization"]) == 62
    assert "Concat" not in result
    assert "MaxPool" not in result


def test_tensorrt_quantises_both_sides_of_attention_and_no_residual_stream() -> None:
    result = edges(simple("transformer"))
    assert set(result) == {"MatMul"}
    assert {"node_s0:q", "node_s0:k", "node_c0:s", "node_c0:v"} <= set(result["MatMul"])
    assert len(result["MatMul"]) == 10
    assert placed(simple("transformer"), "onnxruntime").edges == placed(simple("transformer"), "tensorrt").edges


def test_concatenations_of_concatenations_share_one_scale() -> None:
    model = small(
        "a = Conv(x, w)  b1 = Conv(x, w, b)  c = Concat <axis=1> (a, b1)  m = MaxPool <kernel_shape=[1,1]> (c)"
        "d = Conv(m, w2)  e = Concat <axis=1> (m, d)  y = Conv(e, w3)",
        w2=(16, 32, 1, 1),
        w3=(8, 48, 1, 1),
    )
    sources = placed(model, "tensorrt").sources
    assert sources == {"x": ("x",), "m": ("e",), "e": ("e",)}
    stored = placed(model, "onnxruntime").sources
    assert {name: stored[name] for name in ("a", "b1", "c", "m", "d", "e")} == dict.fromkeys(
        ("a", "b1", "c", "m", "d", "e"), ("e",)
    )


def test_tensors_concatenated_and_read_elsewhere_have_separate_pairs_on_tensorrt() -> None:
    model = small(
        "a = Conv(x, w)  b1 = Conv(x, w, b)  c = Concat <axis=1> (a, b1)  m = MaxPool <kernel_shape=[1,1]> (a)"
        "d = Conv(m, w)  e = Concat <axis=1> (c, d)  f = Conv(c, w2)  y = Conv(e, w3)",
        w2=(16, 32, 1, 1),
        w3=(8, 48, 1, 1),
    )
    assert placed(model, "tensorrt").apart == {"m": ("e", "c"), "e": ("m", "c"), "c": ("m", "e")}
    assert placed(model, "onnxruntime").apart == {}
    # Each of these is read by the concatenation alone, or is all that it is made of.
    assert placed(simple("squeezenet"), "tensorrt").apart == {}
    assert placed(simple("shufflenet"), "tensorrt").apart == {}
    assert placed(simple("residual"), "tensorrt").apart == {}


def test_moved_values_have_the_range_of_their_origin() -> None:
    model = small(
        "c = Conv(x, w)  r = Relu(c)  m = MaxPool <kernel_shape=[2,2], strides=[2,2]> (r)  t = Transpose <perm=[0,1,3,2]> (m)"
        "y = Conv(t, w)"
    )
    assert placed(model, "tensorrt").sources["t"] == ("r",)
    assert tensors_to_calibrate(model) == ["x", "r", "y"]


def test_resize_to_the_nearest_moves_values_and_interpolation_makes_new_ones() -> None:
    text = 'c = Conv(x, w)  s = Resize <mode="{}"> (c,,f)  y = Conv(s, w)'
    for mode, origin in (("nearest", "c"), ("linear", "s")):
        model = simplify(
            networks.network(
                text.format(mode), {**networks.weights(w=(16, 16, 1, 1)), "f": [1.0, 1.0, 2.0, 2.0]}, (1, 16, 8, 8)
            )
        )
        assert placed(model, "tensorrt").sources["s"] == (origin,)
        assert ("s" in placed(model, "onnxruntime").stored) is (mode == "nearest")


def test_onnxruntime_stores_tensors_between_integer_kernels() -> None:
    stored = set(placed(simple("residual"), "onnxruntime").stored)
    # Behind the Relu rather than before it; the moves; not the logits.
    assert stored == {"stem_r", "pool", "a1r", "a2", "down", "ar", "c1r", "c2", "cr", "mean", "flat"}


def test_onnxruntime_leaves_chains_without_an_integer_kernel_in_float() -> None:
    model = small("c = Conv(x, w)  r = Relu(c)  p = GlobalAveragePool(r)  y = Flatten(p)")
    assert placed(model, "onnxruntime").stored == ("r",)


def test_onnxruntime_products_between_others_write_8_bits_and_others_float() -> None:
    constants = networks.weights(w=(6, 6), b=(6,))
    text = "h = Gemm(x, w, b)  hr = Relu(h)  g = Gemm(hr, w, b)  s = Sigmoid(g)  m = MatMul(s, w)  y = MatMul(m, w)"
    model = simplify(networks.network(text, constants, ("N", 6)))
    assert placed(model, "onnxruntime").stored == ("hr", "m")


def test_onnxruntime_has_no_integer_kernel_for_some() -> None:
    transposed = small("c = Conv(x, w)  t = ConvTranspose(c, w)  y = Conv(t, w)")
    assert list(placed(transposed, "onnxruntime").weighted) == ["node_c", "node_y"]
    assert list(placed(transposed, "tensorrt").weighted) == ["node_c", "node_t", "node_y"]
    added = networks.network("h = Relu(x)  y = Gemm(x, w, h)", networks.weights(w=(6, 6)), ("N", 6))
    assert not placed(simplify(added), "onnxruntime").weighted
    assert list(placed(simplify(added), "tensorrt").weighted) == ["node_y"]


@pytest.mark.parametrize("text", ["y = Conv(x, k)", "h = Relu(x)  k2 = Relu(k)  y = Conv(h, k2)"])
def test_convolutions_with_computed_weights_stay(text: str) -> None:
    model = networks.network(text, {}, ("N", 16, 8, 8))
    model.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("k", 1, [4, 16, 1, 1]))
    assert not placed(simplify(model), "tensorrt").weighted


def test_fp16_models_and_integers_are_not_quantised() -> None:
    for element_type in (TensorProto.FLOAT16, TensorProto.INT32):
        text = f"h = Cast <to={element_type}> (x)  m = MatMul(h, h)  y = Cast <to=1> (m)"
        assert not placed(networks.network(text, {}, (4, 4)), "tensorrt").weighted


def test_excluded_nodes_are_omitted_with_their_own_tensors() -> None:
    model = simple("residual")
    result = placed(model, "tensorrt", keep=("node_c1",))
    assert "node_c1" not in result.weighted
    assert ("node_c1", 0) not in result.edges
    everything = tuple(node.name for node in model.graph.node)
    for target in ("tensorrt", "onnxruntime"):
        none = placed(model, target, keep=everything)
        assert not none.edges
        assert not none.stored


@pytest.mark.parametrize("name", ["residual", "squeeze_excite", "transformer", "squeezenet", *networks.DEEP])
def test_ranges_of_the_whole_model_suffice_for_any_exclusion(name: str) -> None:
    model = simple(name)
    entry = set(tensors_to_calibrate(model))
    names = [node.name for node in model.graph.node]
    for step in (2, 3, 5):
        for target, precision in (("tensorrt", "int8"), ("tensorrt", "fp8"), ("onnxruntime", "int8")):
            result = placed(model, target, precision, tuple(names[::step]))
            assert {source for sources in result.sources.values() for source in sources} <= entry


def test_fp8_covers_products_and_convolutions_of_many_channels_with_small_filters() -> None:
    result = edges(simple("residual"), "fp8")
    assert [edge for edge in result["Conv"] if edge.startswith("node_stem")] == []
    assert len(result["Conv"]) == 5
    assert result["Add"] == ["node_a:down", "node_c:ar"]
    assert "GlobalAveragePool" not in result
    depthwise = edges(simple("squeeze_excite"), "fp8")
    assert "node_d:er" not in depthwise["Conv"]
    assert "Mul" not in depthwise
    large = small("c = Conv <pads=[3,3,3,3]> (x, w7)  y = Conv(c, w)", w7=(16, 16, 7, 7))
    assert edges(large, "fp8") == {"Conv": ["node_y:c"]}
    text = "c = Conv(x, wider)  d = Conv <group=2> (c, halves)  y = Conv(d, back)"
    grouped = small(text, wider=(32, 16, 1, 1), halves=(32, 16, 1, 1), back=(16, 32, 1, 1))
    assert edges(grouped, "fp8") == {"Conv": ["node_c:x", "node_y:d"]}


def test_without_convolutions_in_fp8_no_addition_has_pairs() -> None:
    model = simple("residual")
    convolutions = tuple(node.name for node in model.graph.node if node.op_type == "Conv")
    assert edges(model, "fp8", convolutions) == {"Gemm": ["node_y:flat"]}
    text = "p = Add(x, x)  q = Add(p, x)  m = GlobalAveragePool(q)  f = Flatten(m)  y = Gemm(f, w)"
    sums = simplify(networks.network(text, networks.weights(w=(16, 16)), ("N", 16, 8, 8)))
    assert edges(sums, "fp8") == {"Gemm": ["node_y:f"]}
    assert edges(sums)["Add"] != []


@pytest.mark.parametrize(("target", "precision"), [("onnxruntime", "fp8"), ("openvino", "int8"), ("tensorrt", "int4")])
def test_precisions_without_a_target_are_refused(target: str, precision: str) -> None:
    with pytest.raises(BuildError, match=f"{target} cannot run {precision}"):
        placed(simple("residual"), target, precision)


def test_calibration_tensors_come_in_order_without_constants() -> None:
    model = simple("squeezenet")
    tensors = tensors_to_calibrate(model)
    created = [*(v.name for v in model.graph.input), *(name for node in model.graph.node for name in node.output)]
    assert tensors == [name for name in created if name in set(tensors)]
    assert tensors[0] == "data_0"
