"""Small networks of several families with seeded random weights, and functions of tests on them."""

from __future__ import annotations

import collections
import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.quantization.samples import Samples, content_digest
from onnx import TensorProto, helper, numpy_helper

_LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"
# Names for `light` of networks of hundreds of nodes: seconds for each test.
DEEP = [pytest.param(name, marks=pytest.mark.slow) for name in ("inception_v2", "densenet121")]


def samples_of(arrays: dict[str, Any], labels: Any = None) -> Samples:
    """Samples from arrays by input name; the first dimension counts samples."""
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    rows = [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
    return Samples(rows.__getitem__, [content_digest(row) for row in rows], "arrays", labels=labels)


@functools.cache
def light(name: str) -> onnx.ModelProto:
    """One of the graphs that come with onnx; they make their weights of one number, so these are random."""
    model = onnx.load(_LIGHT / f"light_{name}.onnx")
    random = np.random.default_rng(0)
    shapes = {t.name: tuple(numpy_helper.to_array(t)) for t in model.graph.initializer if t.data_type == 7}
    norms = [node.input for node in model.graph.node if node.op_type == "BatchNormalization"]
    positive = {norm[index] for norm in norms for index in (1, 4)}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
            continue
        shape, output = shapes[node.input[0]], node.output[0]
        if output in positive or "scale" in output:
            values = random.uniform(0.5, 1.5, shape)
        elif len(shape) > 1:
            values = random.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        else:
            values = random.normal(0, 0.1, shape)
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), output))
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def network(text: str, constants: dict[str, Any], shape: tuple[int | str, ...], *, opset: int = 17) -> onnx.ModelProto:
    """A model with input "x" of `shape` and output "y", its nodes written in ONNX's text form and named after outputs."""
    lines = "".join(line for line in text.splitlines())
    header = f'<ir_version: 8, opset_import: ["" : {opset}]> g ({_type(shape)} x) => (float y)'
    model = onnx.parser.parse_model(f"{header} {{ {lines} }}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    for name, values in constants.items():
        values = np.asarray(values)
        model.graph.initializer.append(
            numpy_helper.from_array(values.astype(np.float32) if values.dtype.kind == "f" else values, name)
        )
    for node in model.graph.node:
        node.name = f"node_{node.output[0]}"
    model.graph.output[0].CopyFrom(onnx.shape_inference.infer_shapes(model).graph.output[0])
    return model


def _type(shape: tuple[int | str, ...]) -> str:
    return f"float[{', '.join(map(str, shape))}]"


def weights(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Random weights that keep the size of activations about the same, and small random vectors, by name."""
    random = np.random.default_rng(1)
    created = {}
    for name, shape in shapes.items():
        fan_in = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
        created[name] = random.normal(0, np.sqrt(1.5 / fan_in) if len(shape) > 1 else 0.1, shape)
    return created


def residual() -> onnx.ModelProto:
    """A stem with a MaxPool, a block with a convolution on its shortcut, one without, and a classifier."""
    text = """
        stem = Conv <pads=[1,1,1,1]> (x, w0, b0)  stem_r = Relu(stem)
        pool = MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (stem_r)
        a1 = Conv(pool, w1, b1)  a1r = Relu(a1)  a2 = Conv <pads=[1,1,1,1]> (a1r, w2, b2)
        down = Conv(pool, wd, b2)  a = Add(down, a2)  ar = Relu(a)
        c1 = Conv(ar, wc, b1)  c1r = Relu(c1)  c2 = Conv <pads=[1,1,1,1]> (c1r, w2, b2)
        c = Add(c2, ar)  cr = Relu(c)
        mean = GlobalAveragePool(cr)  flat = Flatten(mean)  y = Gemm <transB=1> (flat, wf, bf)
    """
    shapes = {
        "w0": (16, 3, 3, 3),
        "w1": (16, 16, 1, 1),
        "w2": (32, 16, 3, 3),
        "wd": (32, 16, 1, 1),
        "wc": (16, 32, 1, 1),
    }
    vectors = {"b0": (16,), "b1": (16,), "b2": (32,), "bf": (10,)}
    return network(text, weights(**shapes, **vectors, wf=(10, 32)), ("N", 3, 12, 12))


def squeeze_excite() -> onnx.ModelProto:
    """SiLU, a gate on the channels, a depthwise convolution and a residual addition, as in EfficientNet."""
    text = """
        e = Conv(x, w1, b)  es = Sigmoid(e)  er = Mul(e, es)
        d = Conv <group=16, pads=[1,1,1,1]> (er, wd, b)  ds = Sigmoid(d)  dr = Mul(d, ds)
        m = GlobalAveragePool(dr)  s1 = Conv(m, w1, b)  s1r = Relu(s1)  s2 = Conv(s1r, w1, b)  gate = Sigmoid(s2)
        gated = Mul(dr, gate)  p = Conv(gated, w1, b)  r = Add(p, er)  y = Conv(r, w1, b)
    """
    return network(text, weights(w1=(16, 16, 1, 1), wd=(16, 1, 3, 3), b=(16,)), ("N", 16, 8, 8))


WIDTH, HEADS, TOKENS = 32, 4, 10


def transformer() -> onnx.ModelProto:
    """One encoder block with layer norms, attention, GELU by Erf and two residual additions."""
    text = """
        n1 = LayerNormalization <axis=-1> (x, one_w, b)
        q0 = MatMul(n1, wq)  q1 = Add(q0, b)  q2 = Reshape(q1, split)  q = Transpose <perm=[0,2,1,3]> (q2)
        k0 = MatMul(n1, wk)  k1 = Add(k0, b)  k2 = Reshape(k1, split)  k = Transpose <perm=[0,2,3,1]> (k2)
        v0 = MatMul(n1, wv)  v1 = Add(v0, b)  v2 = Reshape(v1, split)  v = Transpose <perm=[0,2,1,3]> (v2)
        s0 = MatMul(q, k)  s1 = Mul(s0, root)  s = Softmax <axis=-1> (s1)
        c0 = MatMul(s, v)  c1 = Transpose <perm=[0,2,1,3]> (c0)  c = Reshape(c1, joined)
        o0 = MatMul(c, wo)  o = Add(o0, b)  x1 = Add(x, o)
        n2 = LayerNormalization <axis=-1> (x1, one_w, b)
        h0 = MatMul(n2, wh)  h1 = Add(h0, bh)
        g0 = Div(h1, two)  g1 = Erf(g0)  g2 = Add(g1, one)  g3 = Mul(h1, g2)  g = Mul(g3, half)
        p0 = MatMul(g, wp)  p = Add(p0, b)  y = Add(x1, p)
    """
    square = (WIDTH, WIDTH)
    shapes = {"wq": square, "wk": square, "wv": square, "wo": square, "wh": (WIDTH, 64), "wp": (64, WIDTH)}
    constants = weights(**shapes, b=(WIDTH,), bh=(64,))
    constants |= {"one_w": np.ones(WIDTH), "root": np.float32(0.35), "two": np.float32(2**0.5)}
    constants |= {"one": np.float32(1), "half": np.float32(0.5)}
    constants |= {"split": np.array([0, 0, HEADS, WIDTH // HEADS]), "joined": np.array([0, 0, WIDTH])}
    return network(text, constants, ("N", TOKENS, WIDTH))


def inputs_of(model: onnx.ModelProto, rows: int = 2, seed: int = 2) -> dict[str, np.ndarray]:
    """Normal random inputs; free dimensions are `rows`."""
    random = np.random.default_rng(seed)
    constants = {tensor.name for tensor in model.graph.initializer}
    sizes = {
        value.name: [d.dim_value or rows for d in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in constants
    }
    return {name: random.normal(size=size).astype(np.float32) for name, size in sizes.items()}


def measured_ranges(model: onnx.ModelProto, tensors: list[str]) -> dict[str, tuple[float, float]]:
    """Least and largest values on `inputs_of`."""
    run = OnnxRunner(model, tensors, optimize=False).run(inputs_of(model))
    return {name: (float(run[name].min()), float(run[name].max())) for name in tensors}


def logits(model: onnx.ModelProto) -> str:
    """Return the input of the last Softmax, or the output, where errors are visible."""
    name = model.graph.output[0].name
    makers = {output: node for node in model.graph.node for output in node.output}
    while makers[name].op_type in ("Softmax", "Reshape"):
        name = makers[name].input[0]
    return str(name)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


def as_optimised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that ONNX Runtime runs."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = f"{folder}/optimised.onnx"
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(f"{folder}/optimised.onnx")


def operators(model: onnx.ModelProto) -> collections.Counter[str]:
    """Return the number of nodes by operator."""
    return collections.Counter(node.op_type for node in model.graph.node)


def unknown_operator() -> onnx.ModelProto:
    """Return a model with an unknown operator."""
    node = helper.make_node("Frobnicate", ["x"], ["y"], name="the_odd_one", domain="example.org")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]) for name in ("x", "y")]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("example.org", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
