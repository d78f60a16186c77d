"""Nodes that stay FP32: by rule, by weights, and by measured activations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.precision.casting import cast_model
from headrace_engines.precision.limits import must_stay_fp32
from headrace_engines.progress import silent
from onnx import TensorProto

from tests.support.networks import samples_of
from tests.support.onnx_blocks import Network, small_cnn

PRECISIONS = ("fp16", "bf16")


def kept(model: onnx.ModelProto, precision: str = "fp16", **arrays: np.ndarray) -> set[str]:
    return must_stay_fp32(model, samples_of(arrays) if arrays else None, precision, silent)


def rows(*shape: int, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.float32(scale)


def test_nothing_of_a_plain_cnn_stays_fp32() -> None:
    shares: list[float] = []
    samples = samples_of({"picture": rows(4, 3, 16, 16)})
    assert must_stay_fp32(small_cnn(), samples, "fp16", lambda done, _note: shares.append(done)) == set()
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert kept(small_cnn(), "bf16", picture=rows(4, 3, 16, 16)) == set()


def large_activation() -> onnx.ModelProto:
    net = Network()
    x = net.input("x", ["N", 4])
    first = net.node("MatMul", x, net.constant(np.eye(4)), name="first")
    large = net.node("Mul", first, net.constant(1e5 / 4), name="large")
    squashed = net.node("Div", large, net.constant(1e4), name="squashed")
    return net.model(net.node("MatMul", squashed, net.constant(np.eye(4)), name="last"))


def test_a_layer_that_overflows_stays_fp32_and_answers_finite() -> None:
    model, x = large_activation(), np.float32([[4.0, -4.0, 1.0, 2.0]])
    assert np.isinf(
        OnnxRunner(cast_model(model, "fp16"), ["large_out"], optimize=False).run({"x": x})["large_out"]
    ).any()
    keep = kept(model, x=x)
    assert keep == {"large", "squashed"}
    result = OnnxRunner(cast_model(model, "fp16", keep), ["large_out", "last_out"], optimize=False).run({"x": x})
    assert result["large_out"].dtype == np.float32
    assert float(result["large_out"].max()) == pytest.approx(1e5)
    np.testing.assert_allclose(result["last_out"], x * 2.5, rtol=2e-3)
    assert kept(model, "bf16", x=x) == set()


def test_values_near_the_largest_are_too_close_to_it() -> None:
    model = large_activation()
    assert kept(model, x=np.float32([[0.6, 0, 0, 0]])) == set()
    assert kept(model, x=np.float32([[0.8, 0, 0, 0]])) == {"large", "squashed"}


def test_overflowing_or_vanishing_weights_are_detected_without_samples() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    one = net.node("Mul", x, net.constant(1e6), name="overflows")
    two = net.node("Add", one, net.constant(1e-12), name="vanishes")
    three = net.node("Mul", two, net.constant([1.0, 1e-9, 0.0, -2.0]), name="harmless")
    four = net.node("Mul", three, net.constant(np.full(4, 2e-7)), name="subnormal")
    model = net.model(net.node("Clip", four, net.constant(-1e30), net.constant(1e30), name="bounds"))
    assert kept(model) == {"overflows", "vanishes", "subnormal"}
    assert kept(model, "bf16") == set()


def test_vanishing_activations_are_detected_where_they_matter() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    tiny = net.node("Mul", x, net.constant(1e-4), name="makes_tiny")
    smaller = net.node("Mul", tiny, tiny, name="makes_tinier")
    back = net.node("MatMul", smaller, net.constant(np.eye(4) * 1e3), name="reads_tinier")
    assert kept(net.model(back), x=rows(4, 4)) == {"makes_tinier", "reads_tinier"}
    mixed = Network()
    x = mixed.input("x", ["N", 4])
    scaled = mixed.node("Mul", x, mixed.constant([1.0, 1e-9, 1.0, 1.0]), name="scale")
    assert kept(mixed.model(mixed.node("MatMul", scaled, mixed.constant(np.eye(4)))), x=rows(4, 4)) == set()


@pytest.mark.parametrize("operator", ["Div", "Reciprocal", "Log"])
def test_values_that_vanish_in_a_division_or_logarithm_stay_fp32(operator: str) -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    scaled = net.node("Mul", x, net.constant([1.0, 1e-9, 1.0, 1.0]), name="scale")
    inputs = (x, scaled) if operator == "Div" else (scaled,)
    model = net.model(net.node(operator, *inputs, name="harmed"))
    assert {"scale", "harmed"} <= kept(model, x=np.abs(rows(4, 4)) + np.float32(0.1))


def test_means_with_overflowing_sums_stay_fp32() -> None:
    net = Network()
    x = net.input("x", ["N", 2, 64, 64])
    doubled = net.node("Mul", x, net.constant(2.0), name="doubled")
    model = net.model(net.node("GlobalAveragePool", doubled, name="mean"))
    assert kept(model, x=np.full((1, 2, 64, 64), 3, np.float32)) == {"mean"}
    assert kept(model, x=np.full((1, 2, 64, 64), 0.5, np.float32)) == set()


def test_integers_that_the_format_has_not_stay() -> None:
    net = Network()
    ids = net.input("ids", ["N", 4], TensorProto.INT64)
    as_float = net.node("Cast", ids, to=TensorProto.FLOAT, name="position")
    model = net.model(net.node("Mul", as_float, net.constant(0.125), name="scaled"))
    small, large = np.int64([[1, 2, 3, 2048]]), np.int64([[1, 2, 3, 2049]])
    assert kept(model, ids=small) == set()
    assert kept(model, ids=large) == {"position", "scaled"}
    assert kept(model, "bf16", ids=np.int64([[1, 2, 3, 257]])) == {"position", "scaled"}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_norms_without_internal_fp32_stay_fp32(precision: str) -> None:
    net = Network(opset=22)
    x = net.input("x", ["N", 4, 8])
    scale, bias = net.constant(np.ones(8)), net.constant(np.zeros(8))
    one = net.node("LayerNormalization", x, scale, bias, name="stashes")
    two = net.node("LayerNormalization", one, scale, bias, stash_type=TensorProto.BFLOAT16, name="does_not")
    four = net.constant(np.ones(4))
    three = net.node("InstanceNormalization", two, four, four, name="instance")
    last = net.node("LRN", net.node("Unsqueeze", three, net.constant([3], np.int64)), size=3, name="lrn")
    assert kept(net.model(last), precision) == {"does_not", "instance", "lrn"}


def test_a_root_mean_square_norm_that_is_written_out_stays_whole() -> None:
    net = Network()
    x = net.input("x", ["N", 4, 8])
    doubled = net.node("MatMul", x, net.weight(8, 8), name="before")
    square = net.node("Mul", doubled, doubled, name="square")
    mean = net.node("ReduceMean", square, axes=[-1], name="mean")
    root = net.node("Sqrt", net.node("Add", mean, net.constant(1e-5), name="epsilon"), name="root")
    normed = net.node("Mul", doubled, net.node("Reciprocal", root, name="inverse"), name="normed")
    scaled = net.node("Mul", normed, net.constant(np.ones(8)), name="scale")
    model = net.model(net.node("MatMul", scaled, net.weight(8, 8), name="behind"))
    assert kept(model) == {"square", "mean", "epsilon", "root", "inverse", "normed"}
    written, inputs = cast_model(model, "fp16", kept(model)), {"x": rows(2, 4, 8)}
    expected, given = (OnnxRunner(m).run(inputs)["behind_out"] for m in (model, written))
    np.testing.assert_allclose(given, expected, atol=0.01)


def test_angles_of_rotary_positions_stay() -> None:
    net = Network()
    positions = net.input("positions", ["N", 1, 6], TensorProto.INT64)
    x = net.input("x", ["N", 8, 6])
    as_float = net.node("Cast", positions, to=TensorProto.FLOAT, name="as_float")
    angle = net.node("MatMul", net.constant(np.ones((1, 8, 1))), as_float, name="angle")
    rotated = net.node("Mul", net.node("MatMul", net.weight(8, 8), x, name="layer"), net.node("Cos", angle, name="cos"))
    assert kept(net.model(rotated)) == {"as_float", "angle", "cos"}


def test_long_softmax_stays() -> None:
    for size, result in ((4096, set()), (4097, {"softmax"})):
        net = Network()
        model = net.model(net.node("Softmax", net.input("x", ["N", size]), axis=-1, name="softmax"))
        assert kept(model) == result


def test_nodes_without_names_are_refused() -> None:
    model = small_cnn()
    model.graph.node[1].name = ""
    with pytest.raises(BuildError, match="simplify the model first"):
        kept(model)
