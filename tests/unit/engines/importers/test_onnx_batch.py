"""Graphs with a fixed batch: what is rewritten, what is refused, and equality with the original for every freed graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.onnx_proof import prove
from headrace_engines.onnx_graph import OnnxRunner
from onnx import TensorProto, helper, numpy_helper

from tests.support.onnx_blocks import Network

INT64 = TensorProto.INT64


def indices(net: Network, values: object) -> str:
    return net.constant(values, np.int64)


def reshape(net: Network, tensor: str, target: list[int], name: str = "") -> str:
    return net.node("Reshape", tensor, indices(net, target), name=name)


def heads_in_front() -> onnx.ModelProto:
    """The batch of 1 is a factor of the heads: [2, 6, 4] stands for [batch * 2, 6, 4]."""
    net = Network()
    x = net.input("x", [1, 6, 8])
    split = net.node("Transpose", reshape(net, x, [1, 6, 2, 4]), perm=[0, 2, 1, 3])
    heads = reshape(net, split, [2, 6, 4])
    scores = net.node("Softmax", net.node("MatMul", heads, net.node("Transpose", heads, perm=[0, 2, 1])), axis=-1)
    back = reshape(net, net.node("MatMul", scores, heads), [1, 2, 6, 4])
    return net.model(reshape(net, net.node("Transpose", back, perm=[0, 2, 1, 3]), [1, 6, 8]))


def positions_first() -> onnx.ModelProto:
    """PyTorch's MultiheadAttention: positions first, [6, 1, 8] to [6, batch * 2, 4]; then a squeeze, a product, an unsqueeze."""
    net = Network()
    x = net.node("Transpose", net.input("x", [1, 6, 8]), perm=[1, 0, 2])
    heads = net.node("Transpose", reshape(net, x, [6, 2, 4]), perm=[1, 0, 2])
    scores = net.node("Softmax", net.node("MatMul", heads, net.node("Transpose", heads, perm=[0, 2, 1])), axis=-1)
    joined = reshape(net, net.node("Transpose", net.node("MatMul", scores, heads), perm=[1, 0, 2]), [6, 8])
    whole = reshape(net, net.node("MatMul", joined, net.weight(8, 8)), [6, 1, 8])
    return net.model(net.node("Transpose", whole, perm=[1, 0, 2]))


def class_token() -> onnx.ModelProto:
    net = Network()
    x = net.input("x", [1, 6, 8])
    tokens = net.node("Concat", net.weight(1, 1, 8), x, axis=1)
    mixed = net.node("Add", tokens, net.weight(1, 7, 8))
    first = net.node("ReduceMean", mixed, axes=[1], keepdims=0)
    return net.model(net.node("Gemm", first, net.weight(8, 3), net.weight(1, 3)))


def squeezed_look_up() -> onnx.ModelProto:
    """`x[0]`, products, and back: the batch of 1 vanishes in between."""
    net = Network()
    x = net.input("x", [1, 6, 8])
    flat = net.node("Gather", x, net.constant(0, np.int64), axis=0)
    product = net.node("Relu", net.node("MatMul", flat, net.weight(8, 4)))
    return net.model(net.node("Unsqueeze", product, indices(net, [0])))


def whole_slices() -> onnx.ModelProto:
    net = Network()
    x = net.input("x", [1, 3, 8, 8])
    whole = net.node("Slice", x, indices(net, [0, 1]), indices(net, [1, 3]), indices(net, [0, 1]))
    again = net.node("Gather", net.conv(whole, (2, 4), "c"), indices(net, [0]), axis=0)
    return net.model(net.node("Flatten", again, axis=1))


def flattened_to_one_row() -> onnx.ModelProto:
    net = Network()
    x = net.input("x", [1, 3, 4, 4])
    return net.model(net.node("Gemm", net.node("Flatten", x, axis=0), net.weight(48, 5), net.weight(5)))


def resized() -> onnx.ModelProto:
    net = Network()
    x = net.conv(net.input("x", [1, 3, 4, 4]), (3, 2), "c")
    bigger = net.node("Resize", x, "", "", indices(net, [1, 2, 8, 8]), mode="nearest")
    return net.model(net.conv(bigger, (2, 3), "d"))


def lstm() -> onnx.ModelProto:
    net = Network()
    x = net.node("Transpose", net.input("x", [1, 5, 4]), perm=[1, 0, 2])
    states = [net.constant(np.full((1, 1, 3), value)) for value in (0.1, -0.2)]
    every = net.node(
        "LSTM", x, net.weight(1, 12, 4), net.weight(1, 12, 3), net.weight(1, 24), "", *states, hidden_size=3
    )
    return net.model(net.node("Transpose", net.node("Squeeze", every, indices(net, [1])), perm=[1, 0, 2]))


def tokens() -> onnx.ModelProto:
    net = Network()
    ids = net.input("ids", [1, 6], INT64)
    embedded = net.node("Gather", net.weight(11, 8), ids, axis=0)
    return net.model(net.node("ReduceMean", net.node("Add", embedded, net.weight(6, 8)), axes=[1], keepdims=0))


def four_rows() -> onnx.ModelProto:
    """A batch of 4: targets, a bias and a token with one row for each row of the batch."""
    net = Network()
    x = net.input("x", [4, 6, 8])
    joined = net.node("Concat", net.constant(np.tile(net.random.standard_normal((1, 1, 8)), (4, 1, 1))), x, axis=1)
    flat = reshape(net, joined, [28, 8])
    cube = reshape(net, net.node("MatMul", flat, net.weight(8, 4)), [4, -1, 4])
    summed = net.node("Add", cube, net.constant(np.tile(net.random.standard_normal((1, 7, 4)), (4, 1, 1))))
    wide = net.node("Expand", net.node("ReduceSum", summed, indices(net, [2]), keepdims=1), indices(net, [4, 7, 3]))
    picked = net.node("Gather", wide, indices(net, [0, 1, 2, 3]), axis=0)
    return net.model(reshape(net, picked, [4, 21]))


def as_wide_as_the_batch() -> onnx.ModelProto:
    """A matrix of 4 rows behind a batch of 4: its rows are no rows of the batch."""
    net = Network()
    return net.model(net.node("MatMul", net.input("x", [4, 4]), net.weight(4, 3)))


def shape_attribute() -> onnx.ModelProto:
    """Reshape of opset 1, whose target is an attribute."""
    nodes = [
        helper.make_node("Reshape", ["x"], ["flat"], name="flat", shape=[1, 12]),
        helper.make_node("Gemm", ["flat", "w", "b"], ["y"], name="gemm", broadcast=1),
    ]
    random = np.random.default_rng(0)
    values = {"w": random.standard_normal((12, 3)), "b": random.standard_normal(3)}
    constants = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in values.items()]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 2, 2])]
    inputs += [helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims) for tensor in constants]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])]
    graph = helper.make_graph(nodes, "old", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 4)], ir_version=3)


SAFE: list[Callable[[], onnx.ModelProto]] = [
    heads_in_front, positions_first, class_token, squeezed_look_up, whole_slices, flattened_to_one_row, resized, lstm,
    tokens, four_rows, as_wide_as_the_batch,
]  # fmt: skip


@pytest.mark.parametrize("build", SAFE, ids=lambda build: build.__name__)
def test_batches_have_the_values_of_single_runs(build: Callable[[], onnx.ModelProto]) -> None:
    model = build()
    onnx.checker.check_model(model, full_check=True)
    freed = free_batch(model)
    onnx.checker.check_model(freed.model, full_check=True)
    proof = prove(model, freed.model, freed.batch_size, freed.merged)
    assert proof.weights > 0 or build in (heads_in_front, positions_first)
    for value in (*freed.model.graph.input, *freed.model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"


def test_shape_attributes_of_old_reshapes_are_rewritten() -> None:
    freed = free_batch(shape_attribute()).model
    x = np.random.default_rng(1).standard_normal((5, 3, 2, 2)).astype(np.float32)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in shape_attribute().graph.initializer}
    expected = x.reshape(5, 12) @ weights["w"] + weights["b"]
    np.testing.assert_allclose(OnnxRunner(freed).run({"x": x})["y"], expected, rtol=1e-5, atol=1e-6)


def test_changes_name_the_nodes() -> None:
    net = Network()
    x = net.input("x", [1, 3, 4, 4])
    freed = free_batch(net.model(reshape(net, x, [1, 48], name="to_rows")))
    assert freed.changes == ("Reshape node 'to_rows': [1, 48] is [-1, 48] now",)


def test_a_free_batch_stays_as_it_is() -> None:
    net = Network()
    freed = free_batch(net.model(net.node("Relu", net.input("x", ["n", 4]))))
    assert (freed.batch_size, freed.changes) == (1, ())


def test_other_free_dimensions_stay_free() -> None:
    net = Network()
    x = net.input("x", [1, "positions", 8])
    heads = net.node("Transpose", reshape(net, x, [1, -1, 2, 4]), perm=[0, 2, 1, 3])
    model = net.model(reshape(net, net.node("Transpose", heads, perm=[0, 2, 1, 3]), [1, -1, 8]))
    freed = free_batch(model)
    rows = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(np.float32)
    (output,) = OnnxRunner(freed.model).run({"x": rows}).values()
    np.testing.assert_array_equal(output, rows)


def folded_heads() -> onnx.ModelProto:
    """Heads without a dimension for the batch: the positions of all rows would attend to one another."""
    net = Network()
    x = net.input("x", [1, 6, 8])
    query = net.node("MatMul", x, net.weight(8, 8))
    heads = [net.node("Transpose", reshape(net, part, [6, 2, 4]), perm=[1, 0, 2]) for part in (query, x)]
    scores = net.node(
        "Softmax",
        net.node("MatMul", heads[0], net.node("Transpose", heads[1], perm=[0, 2, 1]), name="culprit"),
        axis=-1,
    )
    joined = net.node("Transpose", net.node("MatMul", scores, heads[1]), perm=[1, 0, 2])
    return net.model(net.node("MatMul", reshape(net, joined, [1, 6, 8]), net.weight(8, 5)))


def mixing(operator: str) -> onnx.ModelProto:
    net = Network()
    x = net.input("x", [1, 6])
    if operator == "heads":
        return folded_heads()
    if operator == "softmax":
        return net.model(net.node("Softmax", x, axis=0, name="culprit"))
    if operator == "mean":
        return net.model(net.node("ReduceMean", x, axes=[0], keepdims=1, name="culprit"))
    if operator == "transpose":
        turned = net.node("Transpose", x, perm=[1, 0])
        return net.model(reshape(net, turned, [1, 6], name="culprit"))
    if operator == "sum":
        return net.model(net.node("CumSum", x, net.constant(0, np.int64), name="culprit"))
    if operator == "quantise":
        net.node("DynamicQuantizeLinear", x, outputs=3, name="culprit")
        return net.model(net.node("DequantizeLinear", "culprit_out", "culprit_out1", "culprit_out2"))
    if operator == "product":
        return net.model(net.node("MatMul", net.node("Transpose", x), x, name="culprit"))
    raise AssertionError(operator)


@pytest.mark.parametrize("operator", ["heads", "softmax", "mean", "transpose", "sum", "quantise", "product"])
def test_a_graph_that_mixes_rows_is_refused_by_its_node(operator: str) -> None:
    with pytest.raises(BuildError, match=r"culprit.*export the model with a dynamic batch dimension"):
        free_batch(mixing(operator))


def test_constants_that_differ_by_row_and_operators_without_a_rule_are_refused() -> None:
    net = Network()
    x = net.input("x", [3, 4])
    with pytest.raises(BuildError, match=r"Add node 'shift'.*other values for each row"):
        free_batch(net.model(net.node("Add", x, net.weight(3, 4), name="shift")))
    with pytest.raises(BuildError, match=r"node .*foreign.* is of the domain com.microsoft"):
        free_batch(net.model(net.node("BiasGelu", x, net.weight(4), domain="com.microsoft", name="foreign")))


def test_inputs_need_a_common_first_dimension() -> None:
    net = Network()
    total = net.node("Add", net.input("a", [1, 4]), net.input("b", [4]))
    with pytest.raises(BuildError, match=r"first dimensions of the inputs differ \(a: 1, b: 4\)"):
        free_batch(net.model(total))


def test_an_output_without_rows_is_refused() -> None:
    net = Network()
    x = net.input("x", [1, 4])
    flat = net.node("Squeeze", x, indices(net, [0]), name="flat")
    with pytest.raises(BuildError, match="flat"):
        free_batch(net.model(flat))
