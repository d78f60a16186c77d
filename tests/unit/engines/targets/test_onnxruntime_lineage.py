"""ONNX nodes of fused kernels, on graphs that ONNX Runtime has optimised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace_engines.targets.onnxruntime import Lineage, compose_lineages, name_nodes, node_label, trace_nodes
from onnx import helper, numpy_helper

LEVELS = ort.GraphOptimizationLevel


def model(text: str, **constants: np.ndarray) -> onnx.ModelProto:
    parsed = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    parsed.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in constants.items())
    return parsed


def optimise(original: onnx.ModelProto, level: object, folder: Path) -> onnx.ModelProto:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(original.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return name_nodes(onnx.load(folder / "optimised.onnx"))


def in_two_steps(original: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, Lineage]:
    fused = optimise(original, LEVELS.ORT_ENABLE_EXTENDED, folder)
    final = optimise(original, LEVELS.ORT_ENABLE_ALL, folder)
    return final, compose_lineages(trace_nodes(final, fused), trace_nodes(fused, original))


def kernels(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def test_a_fused_kernel_does_its_two_nodes(tmp_path: Path) -> None:
    original = name_nodes(
        model(
            "(float[1,16,8,8] x) => (float[1,16,8,8] y) { [first] c = Conv(x, w) [second] y = Relu(c) }",
            w=kernels((16, 16, 1, 1)),
        )
    )
    final, lineage = in_two_steps(original, tmp_path)
    assert [done for done in lineage.values() if done] == [("first", "second")]
    assert set(lineage) == {node.name for node in final.graph.node}


def test_every_node_of_a_residual_block_is_done_by_one_kernel(tmp_path: Path) -> None:
    original = name_nodes(
        model(
            """(float[1,16,8,8] x) => (float[1,16,8,8] y) {
            [stem] s = Conv(x, w) [bn] b = BatchNormalization(s, scale, shift, mean, var) [stem_relu] r = Relu(b)
            [a] a1 = Conv(r, w) [a_relu] a2 = Relu(a1) [b] b1 = Conv(a2, w) [add] sum = Add(b1, r) [out] y = Relu(sum) }""",
            w=kernels((16, 16, 1, 1)),
            scale=kernels((16,), 1),
            shift=kernels((16,), 2),
            mean=kernels((16,), 3),
            var=np.ones(16, "f4"),
        )
    )
    final, lineage = in_two_steps(original, tmp_path)
    done = [name for result in lineage.values() for name in result]
    assert sorted(done) == sorted(node.name for node in original.graph.node)
    groups = [result for result in lineage.values() if result]
    assert ("stem", "bn", "stem_relu") in groups
    assert ("a", "a_relu") in groups
    # With NCHWc kernels the addition is done inside of the convolution, else by one of its own.
    assert any({"add", "out"} <= set(result) for result in groups) or ("add",) in groups
    assert len(final.graph.node) < len(original.graph.node) + 3


def quantized_pair() -> onnx.ModelProto:
    scale, zero, weights = np.float32(0.02), np.uint8(128), np.full(16, 0.01, "f4")
    return name_nodes(
        model(
            """(float[1,16,8,8] x) => (float[1,16,8,8] y) {
            [xq] xq = QuantizeLinear(x, s, z) [xdq] xd = DequantizeLinear(xq, s, z)
            [w1] w1d = DequantizeLinear<axis: int = 0>(w, ws, wz) [conv1] c1 = Conv(xd, w1d) [relu1] r1 = Relu(c1)
            [r1q] rq = QuantizeLinear(r1, s, n) [r1dq] rd = DequantizeLinear(rq, s, n)
            [pool] p = MaxPool<kernel_shape: ints = [3, 3], pads: ints = [1, 1, 1, 1]>(rd)
            [pq] pq = QuantizeLinear(p, s, n) [pdq] pd = DequantizeLinear(pq, s, n)
            [w2] w2d = DequantizeLinear<axis: int = 0>(w, ws, wz) [conv2] c2 = Conv(pd, w2d)
            [yq] yq = QuantizeLinear(c2, s, z) [ydq] y = DequantizeLinear(yq, s, z) }""",
            s=np.array(scale),
            z=np.array(zero),
            n=np.array(np.uint8(0)),
            w=np.random.default_rng(0).integers(-127, 127, (16, 16, 1, 1)).astype("i1"),
            ws=weights,
            wz=np.zeros(16, "i1"),
        )
    )


def test_integer_kernels_do_the_nodes_between_their_pairs(tmp_path: Path) -> None:
    _, lineage = in_two_steps(quantized_pair(), tmp_path)
    with_nodes = [set(result) for result in lineage.values() if result]
    assert {"xdq", "conv1", "relu1", "r1q"} in with_nodes
    assert {"pdq", "conv2", "yq"} in with_nodes
    assert any("pool" in result and "conv1" not in result and "conv2" not in result for result in with_nodes)


def test_the_steps_lead_from_kernels_to_the_model_before_quantisation(tmp_path: Path) -> None:
    quantized = quantized_pair()
    before = name_nodes(
        model(
            """(float[1,16,8,8] x) => (float[1,16,8,8] y) { [conv1] c1 = Conv(x, w) [relu1] r1 = Relu(c1)
            [pool] p = MaxPool<kernel_shape: ints = [3, 3], pads: ints = [1, 1, 1, 1]>(r1) [conv2] y = Conv(p, w) }""",
            w=kernels((16, 16, 1, 1)),
        )
    )
    _, lineage = in_two_steps(quantized, tmp_path)
    to_source = compose_lineages(lineage, trace_nodes(quantized, before))
    assert sorted(result for result in to_source.values() if result) == [("conv1", "relu1"), ("conv2",), ("pool",)]


def test_a_removed_node_is_listed_with_the_node_before_it(tmp_path: Path) -> None:
    original = name_nodes(
        model(
            "(float[2,4] x) => (float[2,4] y) { [exp] e = Exp(x) [same] i = Identity(e) [neg] y = Neg(i) }",
        )
    )
    optimised = optimise(original, LEVELS.ORT_ENABLE_ALL, tmp_path)
    lineage = trace_nodes(optimised, original)
    assert sorted(name for result in lineage.values() for name in result) == ["exp", "neg", "same"]


def test_normalisations_fused_into_convolutions_are_traced(tmp_path: Path) -> None:
    original = name_nodes(
        model(
            """(float[1,16,8,8] x) => (float[1,16,8,8] y, float[1,16,8,8] z) { [conv] c = Conv(x, w) [pool] z = Relu(c)
            [bn] b = BatchNormalization(c, scale, shift, mean, var) [mul] m = Mul(b, factor) [conv2] y = Conv(m, w) }""",
            w=kernels((16, 16, 1, 1)),
            scale=kernels((16,), 1),
            shift=kernels((16,), 2),
            mean=kernels((16,), 3),
            var=np.ones(16, "f4"),
            factor=kernels((16, 1, 1), 4),
        )
    )
    final, lineage = in_two_steps(original, tmp_path)
    done = [name for result in lineage.values() for name in result]
    assert sorted(done) == sorted(node.name for node in original.graph.node)
    strays = [name for name, result in lineage.items() if not result and not name.startswith("Reorder")]
    assert strays == [], final.graph.node


def test_nodes_of_constants_are_not_listed(tmp_path: Path) -> None:
    original = name_nodes(
        model("(float[2,4] x) => (float[2,4] y) { [weights] v = Neg(w) [mul] y = MatMul(x, v) }", w=kernels((4, 4)))
    )
    assert list(trace_nodes(optimise(original, LEVELS.ORT_ENABLE_ALL, tmp_path), original).values()) == [("mul",)]


def test_a_graph_is_its_own_lineage() -> None:
    original = quantized_pair()
    assert trace_nodes(original, original) == {node.name: (node.name,) for node in original.graph.node}


@pytest.mark.parametrize(("names", "expected"), [(("", ""), ["a", "b"]), (("n", "n"), ["n", "n#1"])])
def test_nodes_get_names_of_their_own(names: tuple[str, str], expected: list[str]) -> None:
    original = model("(float[2] x) => (float[2] b) { a = Exp(x) b = Neg(a) }")
    for node, name in zip(original.graph.node, names, strict=True):
        node.name = name
    assert [node.name for node in name_nodes(original).graph.node] == expected
    assert [node.name for node in original.graph.node] == list(names)


def test_a_node_without_a_name_is_called_after_its_output() -> None:
    assert node_label(helper.make_node("Split", ["x"], ["", "second"])) == "second"
