"""Builds an ONNX graph node by node, with batch norm folded into the convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Floats = npt.NDArray[np.float32]

# Opset 17 with IR 8 is what ONNX Runtime has read since 1.12; nothing here needs a later one.
OPSET = 17
IR_VERSION = 8
BATCH = "batch"


class GraphBuilder:
    """A graph in the making: every method adds a node and returns the name of its output.

    Args:
        name: the graph's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """Add an initializer and return its name."""
        self._initializers.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add any node with one output; `output` names it, else it is named after the operator and its place."""
        name = output or f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def conv(
        self,
        x: str,
        name: str,
        weight: Floats,
        bias: Floats,
        *,
        stride: int = 1,
        pads: tuple[int, int] | None = None,
        groups: int = 1,
    ) -> str:
        """Add a convolution.

        Args:
            x: the input, [N, C, H, W].
            name: prefix of the weights' names.
            weight: FP32 [out, C / groups, k, k].
            bias: FP32 [out].
            stride: in both directions.
            pads: zeros (before, after) each spatial axis; half the kernel on both sides unless given.
            groups: as ONNX has it; C for a depthwise convolution.
        """
        kernel = weight.shape[2]
        before, after = pads if pads is not None else (kernel // 2, kernel // 2)
        return self.node(
            "Conv",
            x,
            self.constant(f"{name}.weight", weight),
            self.constant(f"{name}.bias", bias),
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=groups,
        )

    def dense(self, x: str, name: str, weight: Floats, bias: Floats, output: str = "") -> str:
        """Add x @ weight.T + bias, with x [N, in], weight FP32 [out, in] and bias FP32 [out]."""
        inputs = (x, self.constant(f"{name}.weight", weight), self.constant(f"{name}.bias", bias))
        return self.node("Gemm", *inputs, output=output, transB=1)

    def model(
        self,
        inputs: Mapping[str, tuple[int, tuple[int, ...]]],
        outputs: Mapping[str, tuple[int, tuple[int, ...]]],
        description: str,
        properties: Mapping[str, str],
    ) -> onnx.ModelProto:
        """Close the graph.

        Args:
            inputs: name -> ONNX element type and shape without the batch dimension, which is free.
            outputs: the same for the outputs.
            description: the model's doc string.
            properties: the model's metadata; origin and licence belong there.
        """
        graph = helper.make_graph(self._nodes, self._name, _values(inputs), _values(outputs), self._initializers)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="headrace",
            doc_string=description,
        )
        helper.set_model_props(model, dict(properties))
        return model


def _values(tensors: Mapping[str, tuple[int, tuple[int, ...]]]) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, element_type, [BATCH, *shape])
        for name, (element_type, shape) in tensors.items()
    ]


def fp32(*shape: int) -> tuple[int, tuple[int, ...]]:
    """An FP32 tensor of this shape (without the batch dimension), for `GraphBuilder.model`."""
    return TensorProto.FLOAT, shape


def fold_batch_norm(
    weight: Floats, gamma: Floats, beta: Floats, mean: Floats, variance: Floats, epsilon: float
) -> tuple[Floats, Floats]:
    """The weight and bias of the one convolution that equals a convolution without bias and its batch norm.

    Args:
        weight: [out, in, k, k].
        gamma: the batch norm's scale, [out]; beta, mean and variance likewise.
        beta: its shift.
        mean: its running mean.
        variance: its running variance.
        epsilon: what it adds to the variance.
    """
    scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    folded = weight.astype(np.float64) * scale[:, None, None, None]
    return folded.astype(np.float32), (beta - mean * scale).astype(np.float32)
