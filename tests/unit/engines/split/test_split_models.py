"""Random graphs cut into parts: the joined parts compute what the whole does, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, weight_bytes, write_onnx
from headrace_engines.split.models import SplitModel, prove, split_model
from onnx import TensorProto, helper, numpy_helper

from loadtest.onnx_models import convolution, onnx_model, transformer
from tests.support.split_graphs import WIDTH, RandomGraph, layer_report, measured

FP32, INT64 = TensorProto.FLOAT, TensorProto.INT64


def cut(
    model: onnx.ModelProto, inputs: dict[str, Array], parts: int = 2, seed: int = 0, *, batched: bool = True
) -> SplitModel:
    return split_model(model, measured(model, seed), inputs, parts=parts, slack=0.05, batched=batched)


def check_equal(folder: Path, whole: onnx.ModelProto, split: SplitModel, inputs: dict[str, Array]) -> None:
    paths = [folder / "whole.onnx", *(folder / f"part{number}.onnx" for number in range(len(split.models)))]
    for path, model in zip(paths, (whole, *split.models), strict=True):
        onnx.checker.check_model(model, full_check=True)
        write_onnx(model, path)
    prove(paths[0], paths[1:], inputs)


def random_inputs(rows: int, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((rows, WIDTH)).astype(np.float32) for name in ("A", "B")}


@pytest.mark.parametrize("seed", range(30))
def test_joined_parts_of_random_graphs_equal_the_whole(tmp_path: Path, seed: int) -> None:
    model, parts = RandomGraph(seed).model(), 2 + seed % 3
    split = cut(model, random_inputs(4), parts, seed)
    assert len(split.models) == parts
    for rows in (1, 2, 5):
        check_equal(tmp_path, model, split, random_inputs(rows, rows))
    for each in split.parts:
        assert each.inputs
        assert each.outputs
        for tensor in each.received:
            assert tensor.dims[0] == "rows", "the batch stays symbolic"


@pytest.mark.parametrize("seed", range(10))
def test_random_graphs_without_batches(tmp_path: Path, seed: int) -> None:
    model = RandomGraph(seed, batched=False).model()
    split = cut(model, random_inputs(WIDTH), batched=False)
    check_equal(tmp_path, model, split, random_inputs(WIDTH, 1))


def test_a_transformer_crosses_states_with_a_symbolic_length(tmp_path: Path) -> None:
    model = transformer(layers=4, width=32, heads=2, words=50, has_hidden=False)
    inputs: dict[str, Array] = {"ids": np.zeros((2, 8), np.int64), "mask": np.ones((2, 8), np.int64)}
    split = cut(model, inputs, 3)
    check_equal(tmp_path, model, split, inputs)
    dims = {tensor.dims for part in split.parts for tensor in part.received}
    assert ("rows", "length", 32) in dims
    assert all(part.received for part in split.parts[1:])


def test_each_weight_is_in_the_part_that_reads_it() -> None:
    model = convolution((8, 8, 8, 8), side=8)
    split = cut(model, {"pixels": np.zeros((2, 3, 8, 8), np.float32)})
    names = [{tensor.name for tensor in part.graph.initializer} for part in split.models]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {tensor.name for tensor in model.graph.initializer}
    assert sum(split.weight_bytes) == weight_bytes(model)


def test_open_shapes_are_read_from_runs_of_the_model(tmp_path: Path) -> None:
    """The shape of the reshape is an output of arithmetic that inference does not follow."""
    nodes = [
        helper.make_node("MatMul", ["X", "W"], ["a"]),
        helper.make_node("Shape", ["a"], ["shape"]),
        helper.make_node("Cast", ["shape"], ["real"], to=FP32),
        helper.make_node("Mul", ["real", "factors"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["wide"], to=INT64),
        helper.make_node("Reshape", ["a", "wide"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "V"], ["d"]),
        helper.make_node("ReduceSum", ["d", "last"], ["Y"], keepdims=0),
    ]
    constants = {
        "W": np.ones((4, 8), np.float32),
        "V": np.ones((8, 3), np.float32),
        "factors": np.array([1, 1], np.float32),
        "last": np.array([1], np.int64),
    }
    x, y = {"X": (FP32, ("n", 4))}, {"Y": (FP32, ("n",))}
    model = onnx_model(nodes, x, y, constants)
    report = layer_report([((node.output[0],), 1.0 if node.output[0] != "c" else 20.0) for node in nodes])
    inputs: dict[str, Array] = {"X": np.arange(12, dtype=np.float32).reshape(3, 4)}
    split = split_model(model, report, inputs, parts=3, slack=0.0, batched=True)
    check_equal(tmp_path, model, split, inputs)
    received = {tensor.name: tensor.dims for part in split.parts for tensor in part.received}
    assert received["c"] == ("n", 8)


def test_a_graph_of_one_node_is_refused() -> None:
    nodes = [helper.make_node("Relu", ["X"], ["Y"])]
    model = onnx_model(nodes, {"X": (FP32, ("n", 4))}, {"Y": (FP32, ("n", 4))})
    with pytest.raises(BuildError, match="cannot be cut into 2 parts: it has 1 nodes"):
        cut(model, {"X": np.zeros((2, 4), np.float32)})


def test_a_loop_is_never_cut_and_named() -> None:
    loop = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n,4] X) => (float[n,4] Y) {
        trips = Constant <value_int = 3> ()
        yes = Constant <value: tensor = bool[1] {1}> ()
        Y = Loop (trips, yes, X) <body = body (int64 i, bool go, float[n,4] x) => (bool on, float[n,4] y) {
            on = Identity (go)
            y = Add (x, X)
        }>
        }"""
    )
    with pytest.raises(BuildError, match=r"node 'Y' \(Loop\) is never cut"):
        cut(loop, {"X": np.zeros((2, 4), np.float32)})


def test_a_random_tensor_is_never_computed_twice() -> None:
    """The noise has no batch dimension: it would have to be drawn again behind a cut."""
    nodes = [
        helper.make_node("RandomNormal", [], ["noise"], shape=[1, 4], dtype=FP32),
        helper.make_node("Add", ["X", "noise"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Sub", ["b", "noise"], ["Y"]),
    ]
    model = onnx_model(nodes, {"X": (FP32, ("n", 4))}, {"Y": (FP32, ("n", 4))})
    with pytest.raises(BuildError, match="cannot be cut into 2 parts"):
        cut(model, {"X": np.zeros((2, 4), np.float32)})


def test_an_output_that_is_an_input_is_refused() -> None:
    nodes = [helper.make_node("Relu", ["X"], ["a"]), helper.make_node("Neg", ["a"], ["Y"])]
    shape = (FP32, ("n", 4))
    model = onnx_model(nodes, {"X": shape}, {"Y": shape, "X": shape})
    with pytest.raises(BuildError, match="output 'X' is an input or a constant"):
        cut(model, {"X": np.zeros((2, 4), np.float32)})


def test_parts_that_differ_are_refused(tmp_path: Path) -> None:
    model = convolution((4, 4), side=8)
    inputs: dict[str, Array] = {"pixels": np.ones((2, 3, 8, 8), np.float32)}
    split = cut(model, inputs)
    weights = split.models[1].graph.initializer[0]
    weights.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32(1.001), weights.name))
    with pytest.raises(BuildError, match="differs from the whole"):
        check_equal(tmp_path, model, split, inputs)
