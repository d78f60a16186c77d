"""The comparison of a freed graph with the original: mutants that mix rows fail it by the name of the node."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.onnx_proof import prove
from headrace_engines.importers.random_weights import random_weights, weights_of
from headrace_engines.onnx_graph import OnnxRunner, copy_model
from onnx import helper, numpy_helper

from tests.support.onnx_blocks import Network


def network() -> onnx.ModelProto:
    """A batch of 1 through a convolution, a shuffle of channels and a classifier, constant weights throughout."""
    net = Network()
    x = net.input("x", [1, 3, 8, 8])
    kernel, bias = net.constant(np.full((8, 3, 3, 3), 0.02)), net.constant(np.full(8, 0.02))
    features = net.node("Relu", net.node("Conv", x, kernel, bias, name="conv", pads=[1, 1, 1, 1]), name="relu")
    groups = net.node("Reshape", features, net.constant([1, 2, 4, 8, 8], np.int64), name="groups")
    shuffled = net.node("Transpose", groups, name="shuffle", perm=[0, 2, 1, 3, 4])
    flat = net.node("Reshape", shuffled, net.constant([1, 512], np.int64), name="flat")
    scores = net.node(
        "Gemm", flat, net.constant(np.full((512, 5), 0.02)), net.constant(np.full(5, 0.02)), name="scores"
    )
    return net.model(net.node("Softmax", scores, name="softmax", axis=1))


def replaced(model: onnx.ModelProto, name: str, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """The model with other nodes in place of one."""
    changed = copy_model(model)
    index = next(i for i, node in enumerate(changed.graph.node) if node.name == name)
    rest = list(changed.graph.node)[index + 1 :]
    del changed.graph.node[index:]
    changed.graph.node.extend([*nodes, *rest])
    return changed


def mutant(kind: str) -> tuple[onnx.ModelProto, str]:
    """A freed graph that mixes rows but has the right shapes, and the name of the first node that does."""
    freed = free_batch(network()).model
    by_name = {node.name: node for node in freed.graph.node}

    def added(values: list[int]) -> str:
        name = f"mutant{len(freed.graph.initializer)}"
        freed.graph.initializer.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    if kind == "the batch folded into channels":
        source, output = by_name["groups"].input[0], by_name["groups"].output[0]
        folded = helper.make_node("Reshape", [source, added([2, -1, 4, 8, 8])], ["folded"], name="fold")
        turned = helper.make_node("Transpose", ["folded"], [output], name="culprit", perm=[1, 0, 2, 3, 4])
        return replaced(freed, "groups", folded, turned), "culprit"
    if kind == "softmax over the batch":
        source, output = by_name["softmax"].input[0], by_name["softmax"].output[0]
        return replaced(
            freed, "softmax", helper.make_node("Softmax", [source], [output], name="culprit", axis=0)
        ), "culprit"
    if kind == "mean over the batch":
        source, output = by_name["relu"].input[0], by_name["relu"].output[0]
        mean = helper.make_node("ReduceMean", [source], ["mean"], name="mean", axes=[0], keepdims=1)
        small = helper.make_node("Mul", ["mean", "share"], ["small"], name="small")
        freed.graph.initializer.append(numpy_helper.from_array(np.float32([1e-6]), "share"))
        mixed = helper.make_node("Add", [source, "small"], ["mixed"], name="culprit")
        relu = helper.make_node("Relu", ["mixed"], [output], name="relu")
        return replaced(freed, "relu", mean, small, mixed, relu), "relu"
    if kind == "rows in reverse order":
        source, output = by_name["relu"].input[0], by_name["relu"].output[0]
        ends = added([-1]), added([-(1 << 40)]), added([0]), added([-1])
        turned = helper.make_node("Slice", [source, *ends], ["turned"], name="turned")
        return replaced(freed, "relu", turned, helper.make_node("Relu", ["turned"], [output], name="relu")), "relu"
    assert kind == "transpose of the batch"
    source, output = by_name["flat"].input[0], by_name["flat"].output[0]
    first = helper.make_node("Transpose", [source], ["moved"], name="moved", perm=[1, 0, 2, 3, 4])
    flat = helper.make_node("Reshape", ["moved", by_name["flat"].input[1]], [output], name="culprit")
    return replaced(freed, "flat", first, flat), "culprit"


MUTANTS = [
    "the batch folded into channels", "softmax over the batch", "mean over the batch", "rows in reverse order",
    "transpose of the batch",
]  # fmt: skip


@pytest.mark.parametrize("kind", MUTANTS)
def test_a_mutant_that_mixes_rows_fails_by_its_node(kind: str) -> None:
    freed, culprit = mutant(kind)
    onnx.checker.check_model(freed)
    with pytest.raises(BuildError, match=rf"not free: rows of .* node '{culprit}' is the first that differs"):
        prove(network(), freed)


def test_the_freed_graph_passes_and_its_weights_are_random() -> None:
    freed = free_batch(network()).model
    proof = prove(network(), freed)
    assert proof.weights == 4
    assert proof.max_error < 1e-4


def test_a_mutant_is_found_only_with_random_weights() -> None:
    """With the file's constant weights, the same mutant passes: every channel and every class is alike."""
    freed = free_batch(network()).model
    channels = next(node for node in freed.graph.node if node.name == "shuffle")
    del channels.attribute[:]
    channels.attribute.append(helper.make_attribute("perm", [0, 1, 2, 3, 4]))
    rows = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    (batch,) = OnnxRunner(freed).run({"x": rows}).values()
    singles = [next(iter(OnnxRunner(network()).run({"x": row[np.newaxis]}).values())) for row in rows]
    np.testing.assert_allclose(batch, np.concatenate(singles), rtol=1e-5)
    with pytest.raises(BuildError, match="not free"):
        prove(network(), freed)


def test_rows_that_look_alike_prove_nothing() -> None:
    net = Network()
    x = net.input("x", [1, 4])
    model = net.model(net.node("Mul", x, net.constant(0.0)))
    with pytest.raises(BuildError, match=r"not proven to be free: the rows of .* do not differ"):
        prove(model, free_batch(model).model)


def test_a_batch_of_another_size_fails() -> None:
    net = Network()
    single = net.model(net.node("Relu", net.input("x", ["batch", 4]), name="y"))
    net = Network()
    x = net.input("x", ["batch", 4])
    doubled = net.model(net.node("Concat", x, x, name="y", axis=0))
    with pytest.raises(BuildError, match="deviate by inf"):
        prove(single, doubled)


def test_whole_numbers_are_compared_and_the_floats_before_them() -> None:
    net = Network()
    x = net.input("x", [1, 6])
    best = net.node("ArgMax", net.node("MatMul", x, net.weight(6, 5)), axis=1, keepdims=0)
    model = net.model(best)
    assert prove(model, free_batch(model).model).max_error < 1e-4


def test_layers_have_deviation_one_and_settings_stay() -> None:
    net = Network()
    x = net.input("x", ["batch", 3, 8, 8])
    for number, channels in enumerate(((3, 8), (8, 8), (8, 8), (8, 8), (8, 8))):
        x = net.node("Relu", net.conv(x, channels, f"c{number}"))
    clipped = net.node("Clip", x, net.constant(0.0), net.constant(1e9))
    masked = net.node("Add", clipped, net.constant(np.full((8, 1, 1), -1e9)))
    model = net.model(masked, "c4_out")
    rows = np.random.default_rng(0).standard_normal((6, 3, 8, 8)).astype(np.float32)
    weights = random_weights(model, {"x": rows}, 1)
    assert len(weights) == 10
    assert len(weights_of(model)) == 13
    assert not np.array_equal(weights["constant0"], random_weights(model, {"x": rows}, 2)["constant0"])
    changed = copy_model(model)
    for tensor in changed.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    last = OnnxRunner(changed).run({"x": rows})["c4_out"]
    assert last.std() == pytest.approx(1.0, abs=0.05)
    assert np.abs(last.mean(axis=(0, 2, 3))).max() < 0.05


def test_a_large_variance_is_a_weight_and_a_mask_is_not() -> None:
    net = Network()
    x = net.input("x", ["batch", 2, 4, 4])
    variance, mask = net.constant(np.array([20_000.0, 3.0])), net.constant(np.array([[[0.0]], [[-30_000.0]]]))
    ones, zeros = net.constant(np.ones(2)), net.constant(np.zeros(2))
    normed = net.node("BatchNormalization", x, ones, zeros, zeros, variance)
    weights = random_weights(net.model(net.node("Add", normed, mask)), {"x": np.ones((2, 2, 4, 4), np.float32)}, 0)
    assert variance in weights
    assert mask not in weights
