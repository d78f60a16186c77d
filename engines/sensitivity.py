"""Which layers quantisation harms most, and the fewest that have to stay in floating point.

The harm of a layer is the error of the model's outputs when this layer alone is quantised. To measure it takes a session and
a run of the whole network for each layer, too much for a network of many. So all layers are first looked at in one run of the
FP32 network: beside each layer stands its quantised twin, which reads the same FP32 tensors, and the noise in its output is
set against the signal. That is what the layer adds, though not what the layers behind it make of it; so the noisiest 16 are
then measured as said. The error of the others is estimated from their noise, and from what became of the noise of those
that were measured, never above these.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from engines.errors import BuildError
from engines.onnx_graph import Graph, copy_model
from engines.onnx_runner import OnnxRunner
from engines.progress import Report, part
from engines.quantization.qdq import quantizable, quantize
from engines.simplify import raise_opset

if TYPE_CHECKING:
    from engines.quantization.samples import Samples

Array = npt.NDArray[Any]

# Layers whose harm is measured at the model's outputs.
MEASURED = 16
# On so many samples.
SAMPLES = 32
# The noise is looked at on fewer: every value of a layer's output counts.
_NOISE_SAMPLES = 8
_ROWS = 8
_QDQ = ("QuantizeLinear", "DequantizeLinear")


def rank(
    model: onnx.ModelProto,
    ranges: Mapping[str, tuple[float, float]],
    target: str,
    precision: str,
    samples: Samples,
    report: Report,
    nodes: Sequence[str] | None = None,
) -> list[tuple[str, float]]:
    """Layers by the harm that quantising them does, the most harmful first.

    Args:
        model: simplified, FP32.
        ranges: of its tensors, calibrated.
        target: "tensorrt" or "onnxruntime".
        precision: "int8" or "fp8".
        samples: the first 32 are run.
        report: told after every layer.
        nodes: names of the layers to look at; all that would be quantised if None.

    Returns:
        By layer the energy of the error over the energy of the output, of the worst output.

    Raises:
        BuildError: ONNX Runtime cannot run the model, or cannot run it quantised.
    """
    layers = quantizable(model)
    named = list(layers if nodes is None else nodes)
    samples = samples.head(SAMPLES)
    noise: dict[str, float] = {}
    if len(named) > MEASURED:
        quantized = quantize(model, ranges, target, precision)
        noise = layer_noise(model, quantized, named, samples.head(_NOISE_SAMPLES), part(report, 0.0, 0.2))
        named.sort(key=lambda name: -noise[name])
    batches = list(samples.batches(_ROWS))
    reference = OnnxRunner(model)
    expected = [reference.run(rows) for rows in batches]
    measured: dict[str, float] = {}
    measuring = part(report, 0.2 if noise else 0.0, 1.0)
    for i, name in enumerate(named[:MEASURED]):
        runner = OnnxRunner(quantize(model, ranges, target, precision, [other for other in layers if other != name]))
        measured[name] = _output_error(expected, [runner.run(rows) for rows in batches])
        measuring((i + 1) / min(len(named), MEASURED), f"harm of {name}")
    ranking = sorted(measured.items(), key=lambda item: -item[1])
    return ranking + _estimated(named[MEASURED:], noise, measured)


def _estimated(
    names: Sequence[str], noise: Mapping[str, float], measured: Mapping[str, float]
) -> list[tuple[str, float]]:
    """Errors of layers that were not measured, in the order of their noise."""
    if not names:
        return []
    passed = statistics.median(error / max(noise[name], 1e-30) for name, error in measured.items())
    least = min(measured.values())
    return [(name, min(noise[name] * passed, least)) for name in names]


def _output_error(expected: Sequence[Mapping[str, Array]], given: Sequence[Mapping[str, Array]]) -> float:
    """Energy of the error over that of the signal, over all samples, of the worst floating-point output."""
    worst = 0.0
    for name, first in expected[0].items():
        if first.dtype.kind != "f":
            continue
        signal = sum(float(np.square(rows[name], dtype=np.float64).sum()) for rows in expected)
        error = sum(
            float(np.square(np.subtract(rows[name], got[name], dtype=np.float64)).sum())
            for rows, got in zip(expected, given, strict=True)
        )
        worst = max(worst, _ratio(error, signal))
    return worst


def _ratio(error: float, signal: float) -> float:
    if not np.isfinite(error):
        return float("inf")
    return error / signal if signal else (float("inf") if error else 0.0)


# The noise of all layers in one run


def layer_noise(
    model: onnx.ModelProto, quantized: onnx.ModelProto, names: Sequence[str], samples: Samples, report: Report
) -> dict[str, float]:
    """By layer the energy of quantisation's noise in its output over that of the output, its inputs being the FP32 model's.

    Args:
        model: FP32.
        quantized: the same with Q/DQ; nodes and tensors of the model have their names there.
        names: of layers in both.
        samples: all are run.
        report: told after every batch.

    Returns:
        Infinite for a layer that cannot be compared because its inputs are not those of the model.
    """
    twins = _Twins(model, quantized)
    sums = {name: np.zeros(2) for name in names if twins.add(name)}
    runner = OnnxRunner(twins.graph.finish(), [tensor for pair in twins.sums.values() for tensor in pair])
    for i, rows in enumerate(samples.batches(_ROWS)):
        found = runner.run(rows)
        for name, pair in twins.sums.items():
            sums[name] += [float(found[tensor]) for tensor in pair]
        report(min((i + 1) * _ROWS / len(samples), 1.0), "noise of all layers")
    return {name: _ratio(*sums[name]) if name in sums else float("inf") for name in names}


class _Twins:
    """An FP32 model with quantised twins of layers, and sums over what the two have in their outputs.

    Attributes:
        graph: of the model, at the opset of the quantised one.
        sums: by layer two tensors of one value: the energy of the difference, and of the signal.
    """

    def __init__(self, model: onnx.ModelProto, quantized: onnx.ModelProto) -> None:
        self._quantized = Graph(copy_model(quantized))
        self.graph = Graph(copy_model(raise_opset(model, self._quantized.opset)))
        self.sums: dict[str, tuple[str, str]] = {}
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
        made, quantized = original.output[0], self._insert(twin, [tensor or "" for tensor in inputs])
        difference = self.graph.add_node("Sub", [made, quantized])
        self.sums[name] = (self._energy(difference), self._energy(made))
        return True

    def _energy(self, tensor: str) -> str:
        square = self.graph.add_node("Mul", [tensor, tensor])
        return self.graph.add_node("ReduceSum", [square], keepdims=0)

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


# Searching


def search(ranking: Sequence[str], holds: Callable[[set[str]], bool]) -> set[str]:
    """The fewest of the most harmful layers that have to stay in floating point.

    1, 2, 4, 8, ... of them are tried until the accuracy holds, then the numbers between the last two are bisected: about
    2 log2 n trials for n layers, few of them with many.

    Args:
        ranking: names of layers, the most harmful first; keeping none of them is known not to be enough.
        holds: whether the accuracy holds with these layers in floating point.

    Raises:
        BuildError: it does not hold even with all of them.
    """
    few, many = 0, min(1, len(ranking))
    while not (many > few and holds(set(ranking[:many]))):
        if many == len(ranking):
            cure = "ask for fp16, or lower the bar in optimization.accuracy"
            raise BuildError(f"the accuracy does not hold even with all {many} layers in floating point: {cure}")
        few, many = many, min(2 * many, len(ranking))
    while many - few > 1:
        middle = (few + many) // 2
        if holds(set(ranking[:middle])):
            many = middle
        else:
            few = middle
    return set(ranking[:many])
