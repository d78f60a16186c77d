"""Dynamic INT8 of matrix products: close to FP32, the rows of a batch independent, other nodes untouched."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace.config.onnx_rows import analyse_rows
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.quantization.dynamic import dynamic_products, has_large_products, quantize_products
from headrace_engines.simplify import simplify

from loadtest.onnx_models import transformer
from tests.support.onnx_blocks import Network, small_cnn


def encoder() -> onnx.ModelProto:
    return simplify(transformer(layers=2, width=64, heads=2, words=50))


def texts(rows: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 50, (rows, 12))
    return {"ids": ids, "mask": np.ones_like(ids)}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("reduce_range", [False, True])
def test_outputs_are_those_of_fp32(reduce_range: bool) -> None:
    model = encoder()
    quantized = quantize_products(model, reduce_range=reduce_range)
    onnx.checker.check_model(quantized, full_check=True)
    assert len(dynamic_products(model)) == 12
    assert sum(node.op_type == "MatMulInteger" for node in quantized.graph.node) == 12
    # The three projections of a layer read one rounded tensor.
    assert sum(node.op_type == "QuantizeLinear" for node in quantized.graph.node) == 8
    expected, outputs = (OnnxRunner(one).run(texts(4)) for one in (model, quantized))
    for name, values in expected.items():
        assert cosine(outputs[name], values) > (0.998 if reduce_range else 0.9995)
        assert not np.array_equal(outputs[name], values)


def test_a_row_does_not_depend_on_its_batch() -> None:
    quantized = quantize_products(encoder())
    assert analyse_rows(quantized, ["ids", "mask"]).independent
    batch = texts(5)
    runner = OnnxRunner(quantized)
    together = runner.run(batch)
    for row in range(5):
        alone = runner.run({name: values[row : row + 1] for name, values in batch.items()})
        for name in together:
            np.testing.assert_allclose(alone[name][0], together[name][row], rtol=1e-4, atol=1e-5)


def test_one_large_row_leaves_the_others_alone() -> None:
    net = Network()
    model = net.model(net.node("MatMul", net.input("x", ["N", 64]), net.weight(64, 64)))
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    rows[1] *= 1e6
    (outputs,) = OnnxRunner(quantize_products(simplify(model))).run({"x": rows}).values()
    (expected,) = OnnxRunner(model).run({"x": rows}).values()
    for row in range(3):
        assert cosine(outputs[row], expected[row]) > 0.999
    np.testing.assert_allclose(outputs[1] / 1e6, expected[1] / 1e6, atol=0.1)


def test_rows_of_zeros_stay_zero() -> None:
    net = Network()
    model = net.model(net.node("MatMul", net.input("x", ["N", 64]), net.weight(64, 64)))
    (outputs,) = OnnxRunner(quantize_products(simplify(model))).run({"x": np.zeros((2, 64), np.float32)}).values()
    np.testing.assert_array_equal(outputs, 0)


@pytest.mark.parametrize("transposed", [0, 1])
def test_biased_products(transposed: int) -> None:
    net = Network()
    weight = net.weight(96, 64) if transposed else net.weight(64, 96)
    model = net.model(
        net.node("Gemm", net.input("x", ["N", 64]), weight, net.weight(96), name="layer", transB=transposed)
    )
    simple = simplify(model)
    rows = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    (outputs,) = OnnxRunner(quantize_products(simple)).run({"x": rows}).values()
    (expected,) = OnnxRunner(model).run({"x": rows}).values()
    assert cosine(outputs, expected) > 0.9995
    assert dynamic_products(simple) == ["layer"]
    assert quantize_products(simple, {"layer"}).graph.node == simple.graph.node


def test_models_of_large_products() -> None:
    assert has_large_products(encoder())
    assert not has_large_products(small_cnn())
    assert dynamic_products(simplify(small_cnn())) == []


def test_products_of_two_activations_and_small_ones_stay() -> None:
    net = Network()
    x = net.input("x", ["N", 64, 64])
    narrow = net.node("MatMul", net.node("MatMul", x, x), net.weight(64, 8), name="narrow")
    assert dynamic_products(simplify(net.model(narrow))) == []
