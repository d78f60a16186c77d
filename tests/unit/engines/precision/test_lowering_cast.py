"""Models in FP16 and BF16: types, casts, and outputs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.precision.casting import cast_model
from headrace_engines.precision.limits import must_stay_fp32
from headrace_engines.progress import silent
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.examples import MORE_EXAMPLES
from tests.support.networks import samples_of
from tests.support.onnx_blocks import Network, small_cnn, transformer_block

LIGHT = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx"))
DEEP = ("light_densenet121", "light_inception_v2", "light_resnet50")
NETWORKS = [pytest.param(path, marks=MORE_EXAMPLES) if path.stem in DEEP else path for path in LIGHT]
PRECISIONS = ("fp16", "bf16")
LOW = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def types(model: onnx.ModelProto) -> dict[str, set[int]]:
    """By node the types of what it reads and makes, as inference finds them without what the model says itself."""
    bare = copy_model(model)
    del bare.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(bare, check_type=True, strict_mode=True)
    graph = OnnxGraph(inferred)
    return {node.name: {graph.element_type(t) for t in (*node.input, *node.output) if t} for node in graph.nodes}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def run(model: onnx.ModelProto, **inputs: np.ndarray) -> np.ndarray:
    return next(iter(OnnxRunner(model).run(inputs).values()))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_cnn_is_cast_whole_with_casts_at_its_ends_only(precision: str) -> None:
    model = small_cnn()
    before = model.SerializeToString()
    written = cast_model(model, precision)
    onnx.checker.check_model(written, full_check=True)
    assert model.SerializeToString() == before
    assert [*written.graph.input] == [*model.graph.input]
    assert [*written.graph.output] == [*model.graph.output]
    assert operators(written) == operators(model) + Counter(Cast=2)
    low = LOW[precision]
    assert all(kinds == {low} for name, kinds in types(written).items() if "Cast" not in name and "/" not in name)
    assert {tensor.data_type for tensor in written.graph.initializer} == {low}
    assert written.ByteSize() < model.ByteSize()


def test_a_cast_cnn_answers_as_before() -> None:
    model = small_cnn()
    picture = np.random.default_rng(1).standard_normal((4, 3, 16, 16), np.float32)
    expected, given = run(model, picture=picture), run(cast_model(model, "fp16"), picture=picture)
    assert given.dtype == np.float32
    assert cosine(expected, given) > 0.99999
    assert not np.array_equal(expected, given)


def test_excluded_nodes_stay_fp32_between_casts() -> None:
    written = cast_model(small_cnn(), "fp16", ["conv2"])
    onnx.checker.check_model(written, full_check=True)
    kinds = types(written)
    assert kinds["conv2"] == {TensorProto.FLOAT}
    assert kinds["conv1"] == kinds["conv3"] == {TensorProto.FLOAT16}
    assert operators(written)["Cast"] == 4


def test_a_tensor_is_cast_once_for_all_its_readers() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    sums = [net.node("MatMul", x, net.weight(4, 4)) for _ in range(3)]
    kept = [net.node("Exp", sums[0], name=f"kept{i}") for i in range(2)]
    written = cast_model(net.model(net.node("Sum", *sums, name="sum"), *kept), "fp16", ["kept0", "kept1"])
    onnx.checker.check_model(written, full_check=True)
    # The input, the tensor that the two kept nodes read, the output.
    assert operators(written)["Cast"] == 3


def test_reshapes_between_excluded_nodes_are_not_cast() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    first = net.node("MatMul", x, net.weight(4, 4), name="first")
    turned = net.node("Reshape", net.node("Transpose", first, perm=[1, 0]), net.constant([-1, 4], np.int64))
    last = net.node("MatMul", turned, net.weight(4, 4), name="last")
    written = cast_model(net.model(last), "fp16", ["first", "last"])
    assert operators(written)["Cast"] == 0


def test_a_table_that_is_read_by_index_is_stored_in_16_bits() -> None:
    net = Network()
    ids = net.input("ids", ["N", 5], TensorProto.INT64)
    written = cast_model(net.model(net.node("Gather", net.weight(100, 8), ids, name="embedding")), "fp16")
    assert types(written)["embedding"] == {TensorProto.FLOAT16, TensorProto.INT64}
    assert len(written.graph.initializer) == 1


def test_parameters_shapes_and_indices_have_unchanged_types() -> None:
    net = Network(opset=19)
    x = net.input("x", ["N", 4, "H", "W"])
    convolved = net.conv(x, (4, 4), "conv")
    larger = net.node("Resize", convolved, "", net.constant([1, 1, 2, 2]), name="resize")
    shape = net.node("Shape", larger, name="shape")
    # As exporters compute sizes: in floating point, from the shape.
    half = net.node("Cast", shape, to=TensorProto.FLOAT, name="as_float")
    sizes = net.node(
        "Cast", net.node("Mul", half, net.constant(0.5), name="halved"), to=TensorProto.INT64, name="as_int"
    )
    zeros = net.node("ConstantOfShape", net.constant([1, 4, 1, 1], np.int64), name="zeros")
    smaller = net.node("Resize", net.node("Add", larger, zeros, name="add"), "", "", sizes, name="resize_back")
    best = net.node("ArgMax", smaller, axis=1, name="best")
    written = cast_model(net.model(smaller, best), "fp16")
    kinds = types(written)
    assert kinds["resize"] == {TensorProto.FLOAT16, TensorProto.FLOAT}
    assert kinds["as_float"] == {TensorProto.INT64, TensorProto.FLOAT}
    assert kinds["halved"] == {TensorProto.FLOAT}
    assert kinds["zeros"] == {TensorProto.INT64, TensorProto.FLOAT16}
    assert kinds["best"] == {TensorProto.FLOAT16, TensorProto.INT64}
    rows = np.random.default_rng(0).standard_normal((2, 4, 6, 6), np.float32)
    assert run(written, x=rows).shape == (1, 2, 6, 6)


def test_subgraphs_read_fp32_by_the_old_names() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    product = net.node("MatMul", x, net.weight(4, 4), name="product")
    branches = []
    for operator in ("Neg", "Abs"):
        created = helper.make_tensor_value_info(operator, TensorProto.FLOAT, None)
        branches.append(helper.make_graph([helper.make_node(operator, [product], [operator])], operator, [], [created]))
    positive = net.node("Greater", net.node("ReduceSum", product, keepdims=0), net.constant(0.0), name="positive")
    chosen = net.node("If", positive, then_branch=branches[0], else_branch=branches[1], name="choice")
    model = net.model(net.node("MatMul", chosen, net.weight(4, 4), name="last"))
    written = cast_model(model, "fp16")
    onnx.checker.check_model(written, full_check=True)
    kinds = types(written)
    assert kinds["product"] == kinds["last"] == {TensorProto.FLOAT16}
    assert kinds["positive"] == {TensorProto.FLOAT16, TensorProto.BOOL}
    rows = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    np.testing.assert_allclose(run(written, x=rows), run(model, x=rows), atol=0.01)


def test_operators_without_a_schema_stay_fp32() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    gelu = net.node("Gelu", net.node("MatMul", x, net.weight(4, 4), name="before"), domain="com.microsoft", name="gelu")
    model = net.model(net.node("MatMul", gelu, net.weight(4, 4), name="behind"))
    written = cast_model(model, "fp16")
    by_name = {node.name: node for node in written.graph.node}
    assert by_name["gelu"].input[0] == "before_out/fp32"
    rows = np.random.default_rng(0).standard_normal((3, 4), np.float32)
    np.testing.assert_allclose(run(written, x=rows), run(model, x=rows), atol=0.01)


def test_casts_that_the_model_has_itself_do_not_pile_up() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    half = net.node("Cast", net.node("MatMul", x, net.weight(4, 4), name="first"), to=TensorProto.FLOAT16, name="down")
    squared = net.node("Mul", half, half, name="square")
    back = net.node("Cast", squared, to=TensorProto.FLOAT, name="up")
    written = cast_model(net.model(net.node("MatMul", back, net.weight(4, 4), name="last")), "fp16")
    onnx.checker.check_model(written, full_check=True)
    # At the model's ends.
    assert operators(written)["Cast"] == 2


def test_constants_beyond_the_format_saturate() -> None:
    net = Network()
    x = net.input("x", ["N", 4])
    clipped = net.node("Clip", x, net.constant(0.0), net.constant(3e38), name="clip")
    masked = net.node("Add", clipped, net.constant([0.0, -1e9, 0.0, -np.inf]), name="mask")
    written = cast_model(net.model(net.node("Softmax", masked, name="softmax")), "fp16")
    result = {t.name: onnx.numpy_helper.to_array(t) for t in written.graph.initializer}
    assert result["constant1/fp16"] == 65504
    np.testing.assert_array_equal(result["constant2/fp16"], [0, -32752, 0, -np.inf])


@pytest.mark.parametrize("written_out", [False, True])
def test_a_transformer_block_is_cast_and_answers_as_before(written_out: bool) -> None:
    model = transformer_block(written_out_norm=written_out)
    random = np.random.default_rng(3)
    tokens = random.standard_normal((6, 8, 16), np.float32)
    # The last row sees nothing at all. What it answers means nothing, but a mask of minus infinity would make it NaN.
    mask = (np.arange(8) < np.array([[8], [5], [3], [1], [8], [0]])).astype(np.int64)
    samples = samples_of({"tokens": tokens, "mask": mask})
    keep = must_stay_fp32(model, samples, "fp16", silent)
    written = cast_model(model, "fp16", keep)
    onnx.checker.check_model(written, full_check=True)
    expected, given = run(model, tokens=tokens, mask=mask), run(written, tokens=tokens, mask=mask)
    assert np.isfinite(given).all()
    assert cosine(expected[:-1], given[:-1]) > 0.99999
    kinds = types(written)
    products = [name for name in kinds if name.startswith("MatMul")]
    assert products
    assert all(kinds[name] == {TensorProto.FLOAT16} for name in (*products, "softmax", "add_mask"))
    norms = {"Pow", "ReduceMean", "Sub", "Sqrt"} if written_out else set()
    assert norms <= {node.op_type for node in model.graph.node if node.name in keep}
    assert bool(keep) == written_out


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("path", NETWORKS, ids=lambda path: path.stem)
def test_networks_of_many_families_are_cast(path: Path, precision: str) -> None:
    model = onnx.load(path)
    if path.stem.removeprefix("light_") in ("vgg19", "zfnet512", "bvlc_alexnet"):
        # Their weights, which these files only describe, would be hundreds of megabytes.
        for i, node in enumerate(model.graph.node):
            node.name = f"{node.op_type}{i}"
    else:
        model = simplify(model)
    # The weights are all of one number, so only types can be held against them.
    written = cast_model(model, precision, must_stay_fp32(model, None, precision, silent))
    onnx.checker.check_model(written, full_check=True)
    kinds = types(written)
    heavy = [n.name for n in written.graph.node if n.op_type in ("Conv", "Gemm")]
    assert heavy
    assert all(kinds[name] == {LOW[precision]} for name in heavy)
    assert operators(written)["Cast"] <= 2 + 2 * operators(written)["LRN"]


def test_one_of_them_answers_as_before_in_fp16() -> None:
    model = simplify(onnx.load(next(path for path in LIGHT if path.stem == "light_squeezenet")))
    model = _with_random_weights(model)
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    picture = np.random.default_rng(0).standard_normal(shape, np.float32)
    inputs = {model.graph.input[0].name: picture}
    keep = must_stay_fp32(model, None, "fp16", silent)
    assert cosine(run(model, **inputs), run(cast_model(model, "fp16", keep), **inputs)) > 0.999


def _with_random_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    random = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 4:
            values = random.standard_normal(tensor.dims) * np.sqrt(2 / np.prod(tensor.dims[1:]))
            tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), tensor.name))
    return model


def test_bf16_computes_the_expected_values() -> None:
    net = Network(opset=22)
    x = net.input("x", ["N", 8])
    hidden = net.node("Relu", net.node("Gemm", x, net.weight(8, 16), net.weight(16)))
    model = net.model(net.node("Softmax", net.node("MatMul", hidden, net.weight(16, 4))))
    written = cast_model(model, "bf16")
    assert operators(written)["Cast"] == 2
    rows = np.random.default_rng(0).standard_normal((5, 8), np.float32)
    (given,) = ReferenceEvaluator(written).run(None, {"x": rows})
    assert given.dtype == np.float32
    assert cosine(run(model, x=rows), given) > 0.999
    assert not np.array_equal(run(model, x=rows), given)


def test_another_precision_is_refused() -> None:
    with pytest.raises(BuildError, match="fp16 or bf16"):
        cast_model(small_cnn(), "int4")


# Q/DQ


def quantized_cnn() -> onnx.ModelProto:
    """Q/DQ around conv1 and conv3, none around conv2, and a classifier that is not linked with any of them."""
    net = Network()
    x = net.input("x", ["N", 4, 8, 8])
    one = net.node("Relu", net.conv(_pair(net, x, "q1"), (4, 4), "conv1"), name="relu1")
    two = net.node("Relu", net.conv(one, (4, 4), "conv2"), name="relu2")
    three = net.node("Relu", net.conv(_pair(net, two, "q3"), (4, 4), "conv3"), name="relu3")
    y = net.input("y", ["N", 4])
    return net.model(three, net.node("Gemm", y, net.weight(4, 4), net.weight(4), name="apart"))


def _pair(net: Network, tensor: str, name: str) -> str:
    scale, zero = net.constant(0.02), net.constant(0, np.int8)
    return net.node(
        "DequantizeLinear", net.node("QuantizeLinear", tensor, scale, zero, name=f"{name}_q"), scale, zero, name=name
    )


@pytest.mark.parametrize(
    ("quantized", "low"),
    [
        ("layers", {"apart", "conv2", "relu2"}),
        ("scales", {"apart", "conv1", "relu1", "conv2", "relu2", "conv3", "relu3"}),
    ],
)
def test_casts_in_a_quantised_model(quantized: str, low: set[str]) -> None:
    model = quantized_cnn()
    written = cast_model(model, "fp16", quantized=quantized)  # type: ignore[arg-type]
    onnx.checker.check_model(written, full_check=True)
    kinds = types(written)
    layers = ("apart", "conv1", "relu1", "conv2", "relu2", "conv3", "relu3")
    assert {name for name in layers if TensorProto.FLOAT16 in kinds[name]} == low
    # The Q of the model's input reads FP32 as it always did.
    assert kinds["q1_q"] == {TensorProto.FLOAT, TensorProto.INT8}
    assert all((TensorProto.FLOAT16 in kinds[name]) == (quantized == "scales") for name in ("q1", "q3_q", "q3"))
    random = np.random.default_rng(0)
    inputs = {"x": random.standard_normal((2, 4, 8, 8), np.float32), "y": random.standard_normal((2, 4), np.float32)}
    assert cosine(run(model, **inputs), run(written, **inputs)) > 0.999


def test_layers_left_in_floating_point_by_quantize_are_cast() -> None:
    model = simplify(small_cnn())
    picture = np.random.default_rng(1).standard_normal((4, 3, 16, 16), np.float32)
    ranges = dict.fromkeys(tensors_to_calibrate(model), (-4.0, 4.0))
    quantized = quantize(model, ranges, "tensorrt", "int8", ["conv2"])
    written = cast_model(quantized, "fp16", must_stay_fp32(model, samples_of({"picture": picture}), "fp16", silent))
    onnx.checker.check_model(written, full_check=True)
    kinds = types(written)
    assert kinds["conv2"] == {TensorProto.FLOAT16}
    assert kinds["conv1"] == kinds["conv3"] == kinds["classifier"] == {TensorProto.FLOAT}
    assert operators(written)["Cast"] == 2
    assert cosine(run(quantized, picture=picture), run(written, picture=picture)) > 0.9999
