"""The noise that quantisation adds to the output of each layer, of all layers in one run of the FP32 network.

Beside each layer stands its quantised twin, which reads the same FP32 tensors: a copy of its node in the model with Q/DQ, with
the pairs before it, and the one behind it where its output is stored in 8 bits. What differs between the two outputs is set
against the output itself, channel by channel: where one channel is a thousand times larger than the others, all of these may
be lost and hardly anything of the energy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from engines.onnx_graph import Graph, copy_model
from engines.onnx_runner import OnnxRunner
from engines.progress import Report
from engines.quantization.operators import CLAMPS, only_reader
from engines.simplify import raise_opset

if TYPE_CHECKING:
    from engines.quantization.samples import Samples

Array = npt.NDArray[Any]

# Noise that is less counts as this, more than the signal as the signal.
_LEAST = 1e-12
_ROWS = 8
_QDQ = ("QuantizeLinear", "DequantizeLinear")
# What has its channels along dimension 1; products have them along the last.
_CONVOLUTIONS = ("Conv", "ConvTranspose")


def layer_noise(
    model: onnx.ModelProto,
    quantized: onnx.ModelProto,
    stored: Collection[str],
    names: Sequence[str],
    samples: Samples,
    report: Report,
) -> dict[str, float]:
    """By layer the energy of quantisation's noise over that of its output, 1e-12..1, as the geometric mean over channels.

    Args:
        model: FP32.
        quantized: the same with Q/DQ; nodes and tensors of the model have their names there.
        stored: tensors that exist in 8 bits only. A layer that makes one, itself or through the clamp behind it, is compared
            behind that: its output is quantised with it.
        names: of layers in both.
        samples: all are run.
        report: told after every batch.

    Returns:
        Infinite for a layer that cannot be compared, because its inputs are not those of the model.
    """
    twins = _Twins(model, quantized, frozenset(stored))
    sums: dict[str, Array] = {name: np.zeros((2, 1)) for name in names if twins.add(name)}
    runner = OnnxRunner(twins.graph.finish(), [tensor for pair in twins.sums.values() for tensor in pair])
    for i, rows in enumerate(samples.batches(_ROWS)):
        found = runner.run(rows)
        for name, pair in twins.sums.items():
            sums[name] = sums[name] + np.array([found[tensor].ravel() for tensor in pair], np.float64)
        report(min((i + 1) * _ROWS / len(samples), 1.0), "noise of all layers")
    return {name: _mean_ratio(*sums[name]) if name in sums else float("inf") for name in names}


def _mean_ratio(noise: Array, signal: Array) -> float:
    """Geometric mean of noise over signal, [channels] both; channels that are zero throughout are left out."""
    lives = (noise > 0) | (signal > 0)
    if not np.isfinite(noise).all():
        return float("inf")
    if not lives.any():
        return _LEAST
    ratios = np.divide(noise, signal, out=np.ones(len(noise)), where=signal > 0)[lives]
    return float(np.exp(np.log(np.clip(ratios, _LEAST, 1.0)).mean()))


class _Twins:
    """An FP32 model with quantised twins of layers, and sums over what the two have in their outputs.

    Attributes:
        graph: of the model, at the opset of the quantised one.
        sums: by layer two tensors of a value a channel: the energy of the difference, and of the signal.
    """

    def __init__(self, model: onnx.ModelProto, quantized: onnx.ModelProto, stored: frozenset[str]) -> None:
        self._quantized = Graph(copy_model(quantized))
        self.graph = Graph(copy_model(raise_opset(model, self._quantized.opset)))
        self.sums: dict[str, tuple[str, str]] = {}
        self._stored = stored
        readers = {node.output[0]: only_reader(self.graph, node.output[0]) for node in self.graph.nodes}
        self._clamps = {tensor: node for tensor, node in readers.items() if node is not None and node.op_type in CLAMPS}
        self._originals = {node.name: node for node in self.graph.nodes}
        self._twins = {node.name: node for node in self._quantized.nodes}
        self._constants = {tensor.name: tensor for tensor in self._quantized.model.graph.initializer}
        self._copied: dict[str, str] = {}

    def add(self, name: str) -> bool:
        """Set a twin beside a layer; False if it reads something that the FP32 model does not have."""
        original, twin = self._originals.get(name), self._twins.get(name)
        inputs = [] if twin is None else [self._copy(tensor) for tensor in twin.input]
        if original is None or twin is None or None in inputs:
            return False
        made, quantized = self._behind(original.output[0], self._insert(twin, [tensor or "" for tensor in inputs]))
        difference = self.graph.add_node("Sub", [made, quantized])
        axes = _axes(self.graph, original)
        self.sums[name] = (self._energy(difference, axes), self._energy(made, axes))
        return True

    def _behind(self, tensor: str, twin: str) -> tuple[str, str]:
        """An output and its twin; where it is stored in 8 bits, maybe behind a clamp, both there."""
        end, clamp = tensor, self._clamps.get(tensor)
        if tensor not in self._stored and clamp is not None and clamp.output[0] in self._stored:
            end, twin = clamp.output[0], self._insert(clamp, [twin, *clamp.input[1:]])
        before = end
        for operator in _QDQ if end in self._stored else ():
            # None for an output of the model, which has another name in the quantised one: its noise is left out.
            step = next((node for node in self._quantized.consumers(before) if node.op_type == operator), None)
            if step is not None:
                before = step.output[0]
                twin = self._insert(step, [twin, *(self._copy(name) or "" for name in step.input[1:])])
        return end, twin

    def _energy(self, tensor: str, axes: Array | None) -> str:
        square = self.graph.add_node("Mul", [tensor, tensor])
        along = [] if axes is None else [self.graph.add_constant("axes", axes)]
        return self.graph.add_node("ReduceSum", [square, *along], keepdims=0)

    def _copy(self, tensor: str) -> str | None:
        """The tensor of the FP32 model that is the same as one of the quantised model, made if need be."""
        if tensor in self._copied or not tensor:
            return self._copied.get(tensor, "")
        producer = self._quantized.producer(tensor)
        if tensor in self._constants:
            self._copied[tensor] = self.graph.add_constant(
                tensor, onnx.TensorProto.FromString(self._constants[tensor].SerializeToString())
            )
        elif producer is not None and producer.op_type in _QDQ:
            inputs = [self._copy(name) for name in producer.input]
            if None in inputs:
                return None
            self._copied[tensor] = self._insert(producer, [name or "" for name in inputs])
        elif self.graph.producer(tensor) is None and tensor not in self.graph.inputs:
            return None
        return self._copied.get(tensor, tensor)

    def _insert(self, node: onnx.NodeProto, inputs: list[str]) -> str:
        """A copy of a node with other inputs; gives its output."""
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        return self.graph.add_node(node.op_type, inputs, f"{node.output[0]}/twin", domain=node.domain, **attributes)


def _axes(graph: Graph, layer: onnx.NodeProto) -> Array | None:
    """All dimensions of a layer's output but that of the channels; None, that is all, where their number is not known."""
    shape = graph.shape(layer.output[0])
    if shape is None:
        return None
    channels = 1 if layer.op_type in _CONVOLUTIONS else len(shape) - 1
    return np.array([axis for axis in range(len(shape)) if axis != channels], np.int64)
