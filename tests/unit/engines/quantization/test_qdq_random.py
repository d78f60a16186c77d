"""Random small graphs: a quantised model is valid, runs, and is close to the FP32 model."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.quantization.placement import tensors_to_calibrate
from headrace_engines.quantization.qdq import quantizable, quantize
from headrace_engines.simplify import simplify
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.support import networks
from tests.support.examples import examples

pytestmark = pytest.mark.slow

CHANNELS, SIDE = 8, 6
_STEPS = [
    "Conv",
    "Depthwise",
    "Relu",
    "Clip",
    "Add",
    "Mul",
    "Concat",
    "MaxPool",
    "AveragePool",
    "Norm",
    "Sigmoid",
    "Gate",
]


class _Network:
    """A graph in the making; all tensors but the gates are [N, CHANNELS, SIDE, SIDE]."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self.tensors = ["x"]

    def _constant(self, values: np.ndarray) -> str:
        name = f"constant{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(values, np.float32), name))
        return name

    def _node(self, operator: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=f"n{name}", **attributes))
        return name

    def _conv(self, tensor: str, channels_in: int, kernel: int, group: int = 1) -> str:
        shape = (CHANNELS, channels_in // group, kernel, kernel)
        weight = self._random.normal(0, np.sqrt(1.2 / np.prod(shape[1:])), shape)
        bias = self._random.normal(0, 0.1, CHANNELS)
        inputs = (tensor, self._constant(weight), self._constant(bias))
        return self._node("Conv", *inputs, pads=[kernel // 2] * 4, group=group)

    def step(self, kind: str, first: str, second: str) -> None:
        by_channel = [self._random.uniform(0.5, 1.5, CHANNELS) for _ in range(4)]
        if kind == "Conv":
            created = self._conv(first, CHANNELS, 3)
        elif kind == "Depthwise":
            created = self._conv(first, CHANNELS, 3, CHANNELS)
        elif kind == "Clip":
            created = self._node("Clip", first, self._constant(np.float32(0)), self._constant(np.float32(2)))
        elif kind in ("Add", "Mul"):
            created = self._node(kind, first, second)
        elif kind == "Concat":
            created = self._conv(self._node("Concat", first, second, axis=1), 2 * CHANNELS, 1)
        elif kind in ("MaxPool", "AveragePool"):
            created = self._node(kind, first, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        elif kind == "Norm":
            created = self._node("BatchNormalization", first, *map(self._constant, by_channel))
        elif kind == "Gate":
            gate = self._node("Sigmoid", self._conv(self._node("GlobalAveragePool", first), CHANNELS, 1))
            created = self._node("Mul", second, gate)
        else:
            created = self._node(kind, first)
        self.tensors.append(created)

    def model(self) -> onnx.ModelProto:
        shape = ["N", CHANNELS, SIDE, SIDE]
        self._nodes[-1].output[0] = "y"
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y")]
        graph = helper.make_graph(self._nodes, "g", values[:1], values[1:], self._constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


_PLANS = st.lists(st.tuples(st.sampled_from(_STEPS), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=14)


@settings(max_examples=examples(25), deadline=None, suppress_health_check=list(HealthCheck))
@given(_PLANS, st.integers(0, 2**16), st.integers(1, 4))
def test_random_graphs(plan: list[tuple[str, int, int]], seed: int, every: int) -> None:
    created = _Network(seed)
    for kind, first, second in plan:
        recent = created.tensors[-4:]
        created.step(kind, recent[first % len(recent)], recent[second % len(recent)])
    model = created.model()
    simple = simplify(model)
    x = networks.inputs_of(simple)
    expected = OnnxRunner(model).run(x)["y"]
    np.testing.assert_allclose(OnnxRunner(simple).run(x)["y"], expected, atol=1e-4 * (1e-6 + np.abs(expected).max()))

    ranges = networks.measured_ranges(simple, tensors_to_calibrate(simple))
    for target, precision in (("tensorrt", "int8"), ("onnxruntime", "int8"), ("tensorrt", "fp8")):
        for keep in ([], quantizable(simple)[::every]):
            quantized = quantize(simple, ranges, target, precision, keep)
            onnx.checker.check_model(quantized, full_check=True)
            result = OnnxRunner(quantized, optimize=precision == "int8").run(x)["y"]
            assert result.shape == expected.shape
            # Of the whole output: where a random graph subtracts nearly equal values, single ones are all noise.
            assert np.linalg.norm(result - expected) <= 0.25 * np.linalg.norm(expected)
        if target == "onnxruntime":
            fused = networks.operators(networks.as_optimised(quantize(simple, ranges, target)))
            assert not fused["Conv"]
