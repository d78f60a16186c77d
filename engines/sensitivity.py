"""Which layers quantisation harms most, and the fewest that have to stay in floating point.

The harm of a layer is the error of the model's outputs when this layer alone is quantised. To measure it takes a session and
a run of the whole network for each layer, too much for a network of many. So all layers are first looked at in one run, in
which each shows the noise that quantisation adds to its own output (`layer_noise`). That is what the layer adds, though not
what the layers behind it make of it; so the noisiest 16 are then measured as said. The error of the others is estimated from
their noise, and from what became of the noise of those that were measured, never above these.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from engines.errors import BuildError
from engines.layer_noise import layer_noise
from engines.onnx_graph import Graph, copy_model
from engines.onnx_runner import OnnxRunner
from engines.progress import Report, part
from engines.quantization.placement import place
from engines.quantization.qdq import quantizable, quantize

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
        stored = place(Graph(copy_model(model)), target, precision).stored
        noise = layer_noise(model, quantized, stored, named, samples.head(_NOISE_SAMPLES), part(report, 0.0, 0.2))
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
    return float(error / signal) if signal else (float("inf") if error else 0.0)


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
