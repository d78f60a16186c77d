"""Result of our Q/DQ placement in TensorRT on a real GPU, family by family: every quantised convolution must run in INT8.

`pytest -rP tests/gpu/test_tensorrt_placement.py` prints what was fused with what.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace_engines.errors import NoKernelError
from headrace_engines.onnx_graph import OnnxGraph, OnnxRunner, copy_model
from headrace_engines.precision.casting import cast_model
from headrace_engines.progress import silent
from headrace_engines.quantization.placement import place_pairs, tensors_to_calibrate
from headrace_engines.quantization.qdq import quantize
from headrace_engines.simplify import simplify
from headrace_engines.targets.base import MeasuredLayer, ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.gpu_marks import gpu_marks
from tests.support.networks import (
    cosine,
    inputs_of,
    measured_ranges,
    network,
    residual,
    squeeze_excite,
    transformer,
    weights,
)

pytestmark = gpu_marks(180)  # TensorRT 10.6 looks for 80 s before it finds no kernel for a region

ROWS = 8
# What a 3x3 convolution of 32 channels, a 1x1 one and a vector are called below.
_SHAPES: dict[str, tuple[int, ...]] = {
    "w0": (32, 3, 3, 3),
    "w3": (32, 32, 3, 3),
    "w1": (32, 32, 1, 1),
    "wd": (32, 1, 3, 3),
    "w64": (32, 64, 1, 1),
    "w96": (32, 96, 1, 1),
    "w128": (32, 128, 1, 1),
    "wt": (32, 32, 2, 2),
    "wf": (10, 32),
    "b": (32,),
    "bf": (10,),
    "shift": (32,),
    "shift64": (64,),
}
_STEM = "s0 = Conv <pads=[1,1,1,1]> (x, w0, b)  s = Relu(s0) "
_HEAD = " mean = GlobalAveragePool(last)  flat = Flatten(mean)  y = Gemm <transB=1> (flat, wf, bf)"

# By family the nodes from tensor s, [N, 32, 16, 16], to tensor last, [N, 32, .., ..].
FAMILIES = {
    "plain": "a = Conv <pads=[1,1,1,1]> (s, w3, b)  last = Relu(a)",
    "max_pool": (
        "p = MaxPool <kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]> (s)"
        "  a = Conv <pads=[1,1,1,1]> (p, w3, b)  last = Relu(a)"
    ),
    "average_pool": (
        "p = AveragePool <kernel_shape=[2,2], strides=[2,2]> (s)  a = Conv <pads=[1,1,1,1]> (p, w3, b)  last = Relu(a)"
    ),
    "squeezenet_fire": (
        "q0 = Conv(s, w1, b)  q = Relu(q0)  e0 = Conv(q, w1, b)  e = Relu(e0)"
        "  f0 = Conv <pads=[1,1,1,1]> (q, w3, b)  f = Relu(f0)"
        "  c = Concat <axis=1> (e, f)  a = Conv(c, w64, b)  last = Relu(a)"
    ),
    "inception": (
        "i0 = Conv(s, w1, b)  i = Relu(i0)  j0 = Conv(s, w1, b)  j1 = Relu(j0)"
        "  j2 = Conv <pads=[1,1,1,1]> (j1, w3, b)  j = Relu(j2)"
        "  k0 = AveragePool <kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1> (s)  k1 = Conv(k0, w1, b)  k = Relu(k1)"
        "  l0 = MaxPool <kernel_shape=[3,3], pads=[1,1,1,1]> (s)  l1 = Conv(l0, w1, b)  l = Relu(l1)"
        "  c = Concat <axis=1> (i, j, k, l)  a = Conv(c, w128, b)  last = Relu(a)"
    ),
    "densenet": (
        "n0 = BatchNormalization(s, scale, shift, shift, scale)  n = Relu(n0)  a = Conv <pads=[1,1,1,1]> (n, w3, b)"
        "  c = Concat <axis=1> (s, a)"
        "  m0 = BatchNormalization(c, scale64, shift64, shift64, scale64)  m = Relu(m0)  d = Conv(m, w64, b)"
        "  p = AveragePool <kernel_shape=[2,2], strides=[2,2]> (d)"
        "  o0 = BatchNormalization(p, scale, shift, shift, scale)  o = Relu(o0)  f = Conv(o, w1, b)  last = Relu(f)"
    ),
    # Each convolution's output goes into every concatenation behind it.
    "dense_block": (
        "a0 = Conv(s, w1, b)  a = Relu(a0)  c = Concat <axis=1> (s, a)  d0 = Conv(c, w64, b)  d = Relu(d0)"
        "  e = Concat <axis=1> (s, a, d)  f = Conv(e, w96, b)  last = Relu(f)"
    ),
    "unet": (
        "e0 = Conv <pads=[1,1,1,1]> (s, w3, b)  e = Relu(e0)  p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (e)"
        "  m0 = Conv(p, w1, b)  m = Relu(m0)"
        '  u = Resize <mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"> (m, , twice)'
        "  c = Concat <axis=1> (e, u)  a = Conv(c, w64, b)  last = Relu(a)"
    ),
    "mobilenet": (
        "e0 = Conv(s, w1, b)  e = Clip(e0, nought, six)  d0 = Conv <group=32, pads=[1,1,1,1]> (e, wd, b)"
        "  d = Clip(d0, nought, six)  p = Conv(d, w1, b)  r = Add(p, s)  a = Conv(r, w1, b)  last = Relu(a)"
    ),
    "shufflenet": (
        "g0 = Conv <group=2> (s, wg, b)  g = Relu(g0)  r0 = Reshape(g, halves)  r1 = Transpose <perm=[0,2,1,3,4]> (r0)"
        "  r = Reshape(r1, whole)  d = Conv <group=32, pads=[1,1,1,1]> (r, wd, b)  a = Conv <group=2> (d, wg, b)"
        "  t = Add(a, s)  last = Relu(t)"
    ),
    "pyramid": (
        "p = MaxPool <kernel_shape=[2,2], strides=[2,2]> (s)  d = Conv(p, w1, b)"
        '  u = Resize <mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"> (d, , twice)'
        "  l = Conv(s, w1, b)  t = Add(l, u)  a = Conv <pads=[1,1,1,1]> (t, w3, b)  last = Relu(a)"
    ),
    "transposed": (
        "d = Conv <pads=[1,1,1,1], strides=[2,2]> (s, w3, b)  dr = Relu(d)"
        "  u = ConvTranspose <strides=[2,2]> (dr, wt, b)  ur = Relu(u)  a = Conv <pads=[1,1,1,1]> (ur, w3, b)  last = Relu(a)"
    ),
    "hard_swish": (
        "a0 = Conv <pads=[1,1,1,1]> (s, w3, b)  a = HardSwish(a0)  d = Conv(a, w1, b)"
        "  e = LeakyRelu(d)  f = Conv(e, w1, b)  last = Relu(f)"
    ),
}


def family(name: str) -> onnx.ModelProto:
    constants: dict[str, Any] = weights(**_SHAPES, wg=(32, 16, 1, 1))
    constants |= {"scale": np.linspace(0.5, 1.5, 32), "scale64": np.linspace(0.5, 1.5, 64)}
    constants |= {"nought": np.float32(0), "six": np.float32(6), "twice": np.array([1, 1, 2, 2], np.float32)}
    constants |= {"halves": np.array([0, 2, 16, 16, 16]), "whole": np.array([0, 32, 16, 16])}
    return network(f"{_STEM} {FAMILIES[name]} {_HEAD}", constants, ("N", 3, 16, 16))


def table(layers: list[MeasuredLayer]) -> str:
    """Readable list of the engine's layers."""
    return "\n".join(f"{one.precision:5} {one.kind:12} {' + '.join(one.nodes) or one.name[:60]}" for one in layers)


def run_quantized(
    folder: Path, source: onnx.ModelProto, precision: str = "int8", keep: Collection[str] = ()
) -> list[MeasuredLayer]:
    """Quantise all but `keep`, build, hold the answers and the precision of every quantised layer; gives all layers."""
    # Convolutions in FP8 were seen at the default level only.
    target = TensorRtTarget(optimization_level=1 if precision == "int8" else None)
    model = simplify(source)
    graph = OnnxGraph(copy_model(model))
    placed = place_pairs(graph, "tensorrt", precision, keep)
    written = quantize(model, measured_ranges(model, tensors_to_calibrate(model)), "tensorrt", precision, keep)
    shape = tuple(d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim)[1:]
    order = TargetSpec(precision, (ShapeRange({"x": ((1, *shape), (ROWS, *shape), (ROWS, *shape))}),))
    plan = folder / "model.plan"
    if precision == "fp8":  # as a build does: FP16 around, or FP32 where TensorRT finds no kernel for that
        try:
            half = cast_model(written, "fp16", quantized="scales")
            target.build(half, order, plan, silent)
            written = half
        except NoKernelError as error:
            print(f"in FP32 around: {error}")
            target.build(written, order, plan, silent)
    else:
        target.build(written, order, plan, silent)
    engine = target.open(folder / "model.plan", written)
    try:
        inputs = inputs_of(source, ROWS)
        result = engine.run(inputs)["y"]
        layers = engine.layers(inputs)
    finally:
        engine.close()
    print(f"pairs before {', '.join(f'{node}[{index}]' for node, index in placed.edges)}\n{table(layers)}")
    same, plain = (OnnxRunner(one, optimize=False).run(inputs)["y"] for one in (written, source))
    print(f"cosine to the same Q/DQ on ONNX Runtime {cosine(result, same):.5f}, to FP32 {cosine(result, plain):.5f}")
    assert cosine(result, same) > 0.99
    assert cosine(result, plain) > 0.97
    in_it = {node for one in layers if one.precision == precision for node in one.nodes}
    convolutions = {name for name, one in placed.weighted.items() if one.operator.startswith("Conv")}
    assert convolutions <= in_it, f"not in {precision}: {sorted(convolutions - in_it)}\n{table(layers)}"
    # Small products whose sizes suit no tensor core are not computed in 8 bits.
    assert in_it & placed.weighted.keys(), table(layers)
    return layers


@pytest.mark.parametrize("name", FAMILIES)
def test_convolutions_run_in_int8(tmp_path: Path, name: str) -> None:
    run_quantized(tmp_path, family(name))


def test_a_residual_network_runs_in_int8(tmp_path: Path) -> None:
    run_quantized(tmp_path, residual())


def test_gates_on_channels_run_in_int8(tmp_path: Path) -> None:
    run_quantized(tmp_path, squeeze_excite())


def test_a_transformer_runs_in_int8(tmp_path: Path) -> None:
    run_quantized(tmp_path, transformer())


def test_a_transformer_runs_in_fp8(tmp_path: Path) -> None:
    if refused := TensorRtTarget().refuses("fp8"):
        pytest.skip(refused)
    run_quantized(tmp_path, transformer(), "fp8")


def test_convolutions_run_in_fp8(tmp_path: Path) -> None:
    if refused := TensorRtTarget().refuses("fp8"):
        pytest.skip(refused)
    if not TensorRtTarget().refuses_fp8_convolutions():
        run_quantized(tmp_path, residual(), "fp8")
        return
    convolutions = {node.name for node in simplify(residual()).graph.node if node.op_type == "Conv"}
    layers = run_quantized(tmp_path, residual(), "fp8", convolutions)
    assert convolutions <= {node for one in layers if one.precision == "fp16" for node in one.nodes}, table(layers)
    assert "node_y" in {node for one in layers if one.precision == "fp8" for node in one.nodes}, table(layers)
    # Nothing is quantised but what the product reads.
    quantised = {node for one in layers for node in one.nodes if node.endswith(("_quantized", "_dequantized"))}
    assert quantised <= {"flat_quantized", "flat_dequantized", "wf_dequantized"}, table(layers)
