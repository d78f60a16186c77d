"""2:4 sparsity of weights: the pattern value by value, eligible layers, and models."""

from __future__ import annotations

import itertools

import numpy as np
import onnx
import pytest
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.optimize.sparsity import (
    MIN_REDUCTION,
    is_sparse,
    make_sparse,
    sparse_layers,
    sparse_nodes,
    sparse_weights,
)
from onnx import numpy_helper


def conv_model(random: np.random.Generator, group: int = 1) -> onnx.ModelProto:
    """Return Conv [32, 16, 3, 3] - Conv [8, 12, 1, 1] - Gemm [8, 10] with and without transB - MatMul [16, 16]."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,{16 * group},8,8] x) => (float[N,16] y) {{
            [first] a = Conv<pads=[1,1,1,1], group={group}>(x, w0)
            [pool] p = GlobalAveragePool(a)
            [flat] f = Flatten(p)
            [straight] b = Gemm(f, w1)
            [turned] c = Gemm<transB=1>(b, w2)
            [short] d = MatMul(c, w3)
            y = Relu(d)
        }}"""
    )
    shapes = {"w0": (32, 16, 3, 3), "w1": (32, 16), "w2": (12, 16), "w3": (12, 16)}
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize(("shape", "axis"), [((8, 16, 3, 3), 1), ((16, 5), 0), ((5, 16), 1), ((4,), 0)])
def test_two_smallest_of_each_four_along_the_reduction_are_zero(shape: tuple[int, ...], axis: int) -> None:
    weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    pruned = sparse_weights(weights, axis)
    others = [range(size) for number, size in enumerate(shape) if number != axis]
    for position in itertools.product(*others):
        index: list[int | slice] = list(position)
        index.insert(axis, slice(None))
        before, after = weights[tuple(index)], pruned[tuple(index)]
        for start in range(0, shape[axis], 4):
            block = before[start : start + 4]
            largest = set(np.argsort(-np.abs(block))[:2].tolist())
            expected = [value if number in largest else 0.0 for number, value in enumerate(block.tolist())]
            assert after[start : start + 4].tolist() == expected
    assert is_sparse(pruned, axis)
    assert not is_sparse(weights, axis)


def test_equal_magnitudes_keep_exactly_two() -> None:
    assert sparse_weights(np.array([1.0, -1.0, 1.0, 1.0], np.float32), 0).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_pattern_along_another_axis_does_not_count() -> None:
    weights = sparse_weights(np.random.default_rng(1).standard_normal((16, 16)).astype(np.float32), 0)
    assert is_sparse(weights, 0)
    assert not is_sparse(weights, 1)


def test_half_precision_stays_half_precision() -> None:
    weights = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float16)
    pruned = sparse_weights(weights, 1)
    assert pruned.dtype == np.float16
    assert np.array_equal(pruned[pruned != 0], weights[pruned != 0])


def test_layers_by_operator_and_reduction() -> None:
    layers = sparse_layers(conv_model(np.random.default_rng(3)))
    assert [(layer.node, layer.weight, layer.axis) for layer in layers] == [
        ("first", "w0", 1),
        ("straight", "w1", 0),
        ("turned", "w2", 1),
    ]  # the last product reduces 12 values, less than one step of a sparse kernel
    assert MIN_REDUCTION == 16


def test_grouped_convolutions_and_shared_weights_stay_dense() -> None:
    model = conv_model(np.random.default_rng(4), group=2)
    model.graph.node[3].input[1] = "w2"  # now two products read it
    assert sparse_layers(model) == []


def test_only_named_weights_change() -> None:
    model = conv_model(np.random.default_rng(5))
    before = model.SerializeToString()
    sparse = make_sparse(model, ["w0"])
    assert model.SerializeToString() == before
    assert sparse_nodes(model) == []
    assert sparse_nodes(sparse) == ["first"]
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in sparse.graph.initializer}
    originals = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert np.array_equal(values["w1"], originals["w1"])
    assert np.count_nonzero(values["w0"]) == originals["w0"].size // 2
    x = np.random.default_rng(6).standard_normal((2, 16, 8, 8)).astype(np.float32)
    assert OnnxRunner(sparse).run({"x": x})["y"].shape == (2, 16)


def test_weights_of_zeros_are_no_sparse_layer() -> None:
    model = conv_model(np.random.default_rng(7))
    zeros = numpy_helper.from_array(np.zeros((32, 16, 3, 3), np.float32), "w0")
    model.graph.initializer[0].CopyFrom(zeros)
    assert sparse_nodes(model) == []
