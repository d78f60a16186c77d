"""Random graphs to cut: branches, skips, shapes computed while the model runs, shared weights, branches of an If."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from headrace.config.machine import Machine
from headrace.config.manifest import FORMAT, LayerReport, MeasuredLayer
from onnx import TensorProto, helper, numpy_helper

WIDTH = 6
_FP32, _INT64 = TensorProto.FLOAT, TensorProto.INT64


class RandomGraph:
    """Builder of a model with FP32 inputs A and B (rows, 6) and outputs (rows, 6), or (6, 6) without batches.

    Args:
        seed: of the choices and weights.
        batched: True for a free first dimension.
    """

    def __init__(self, seed: int, batched: bool = True) -> None:
        self._random = np.random.default_rng(seed)
        self._batched = batched
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, np.ndarray[Any, Any]] = {}
        self._tensors = ["A", "B"]

    def model(self, steps: int = 14) -> onnx.ModelProto:
        """Return the model."""
        kinds: list[Callable[[], str]] = [
            *(self._unary, self._binary, self._product, self._flattened, self._shared),
            *(self._of_batch, self._branch, self._normalised, self._cast, self._unused),
        ]
        for _ in range(steps):
            self._tensors.append(kinds[int(self._random.integers(len(kinds)))]())
        last = self._tensors[-1]
        middle = self._tensors[int(self._random.integers(2, len(self._tensors)))]
        outputs = [self._node("Identity", [last])]
        if self._random.random() < 0.5 and middle not in ("A", "B"):
            outputs.append(middle)
        first = "rows" if self._batched else WIDTH
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            self._nodes,
            "random",
            [value(name, _FP32, [first, WIDTH]) for name in ("A", "B")],
            [value(name, _FP32, [first, WIDTH]) for name in outputs],
            [numpy_helper.from_array(array, name) for name, array in self._constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model

    def _pick(self) -> str:
        recent = self._tensors[-4:] if self._random.random() < 0.7 else self._tensors
        return recent[int(self._random.integers(len(recent)))]

    def _node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        output = f"t{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def _constant(self, values: Any, dtype: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = np.asarray(values, dtype)
        return name

    def _weights(self) -> str:
        return self._constant(self._random.standard_normal((WIDTH, WIDTH)), np.float32)

    def _unary(self) -> str:
        return self._node(str(self._random.choice(["Relu", "Tanh", "Sigmoid", "Neg"])), [self._pick()])

    def _binary(self) -> str:
        return self._node(str(self._random.choice(["Add", "Mul", "Sub"])), [self._pick(), self._pick()])

    def _product(self) -> str:
        return self._node("MatMul", [self._pick(), self._weights()])

    def _shared(self) -> str:
        """Return a product with weights that may have been used before."""
        names = [name for name, array in self._constants.items() if array.shape == (WIDTH, WIDTH)]
        weights = str(self._random.choice(names)) if names else self._weights()
        return self._node("MatMul", [self._pick(), weights])

    def _flattened(self) -> str:
        """Return a reshape there and back by a shape that is computed: it has no batch dimension, and may cross a cut."""
        source = self._pick()
        shape = self._node("Shape", [self._pick()])
        rows = self._node("Gather", [shape, self._constant(0, np.int64)], axis=0)
        rows = self._node("Unsqueeze", [rows, self._constant([0], np.int64)])
        wide = self._node("Concat", [rows, self._constant([2, WIDTH // 2], np.int64)], axis=0)
        state = self._node("Reshape", [source, wide])
        if self._random.random() < 0.5:
            state = self._node("Relu", [state])
        return self._node("Reshape", [state, shape])

    def _of_batch(self) -> str:
        """Return a tensor plus a table that is computed from constants only."""
        table = self._node("Tanh", [self._constant(self._random.standard_normal((1, WIDTH)), np.float32)])
        self._tensors.append(self._node("Add", [self._pick(), table]))
        return self._node("Mul", [self._tensors[-1], table])

    def _branch(self) -> str:
        """Return an If whose branches read tensors of the graph outside."""
        first, second = self._pick(), self._pick()
        size = self._node("Size", [self._pick()])
        condition = self._node("Greater", [size, self._constant(2 * WIDTH, np.int64)])
        branches = {}
        for name, operator in (("then_branch", "Add"), ("else_branch", "Sub")):
            output = f"{name}{len(self._nodes)}"
            branches[name] = helper.make_graph(
                [helper.make_node(operator, [first, second], [output])],
                name,
                [],
                [helper.make_tensor_value_info(output, _FP32, None)],
            )
        return self._node("If", [condition], **branches)

    def _normalised(self) -> str:
        mean = self._node("ReduceMean", [self._pick()], axes=[1], keepdims=1)
        return self._node("Sub", [self._pick(), mean])

    def _cast(self) -> str:
        whole = self._node("Cast", [self._pick()], to=_INT64)
        return self._node("Cast", [whole], to=_FP32)

    def _unused(self) -> str:
        self._node("Exp", [self._pick()])
        return self._unary()


def measured(model: onnx.ModelProto, seed: int = 0) -> LayerReport:
    """Return a report of random times, with a few fused layers, of a model whose nodes are named as `name_nodes` does."""
    from headrace_engines.targets.onnxruntime import name_nodes

    random = np.random.default_rng(seed)
    names = [node.name for node in name_nodes(model).graph.node]
    layers, index = [], 0
    while index < len(names):
        count = int(random.integers(1, 4))
        layers.append((tuple(names[index : index + count]), float(random.exponential(10.0))))
        index += count
    return layer_report(layers)


def layer_report(layers: list[tuple[tuple[str, ...], float]]) -> LayerReport:
    """Return a report of layers: names of their nodes, and microseconds."""
    total_us = sum(time_us for _, time_us in layers) or 1.0
    return LayerReport(
        format=FORMAT,
        model="random",
        version=1,
        artefact="model.onnx",
        precision="",
        machine=Machine("onnxruntime", "1", "cpu", "avx2"),
        reason="",
        shapes={},
        rows=4,
        median_us=total_us,
        p99_us=total_us,
        rows_per_s=1.0,
        total_us=total_us,
        layers=tuple(
            MeasuredLayer(
                name=nodes[0], kind="X", nodes=nodes, precision="", tactic="", time_us=us, share=us / total_us
            )
            for nodes, us in layers
        ),
    )
