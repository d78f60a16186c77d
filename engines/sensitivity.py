"""Which layers quantisation harms most, and the fewest that have to stay in floating point.

The harm of a layer is the error of the model's outputs when this layer alone is quantised. It is measured for every layer, which
takes a session and a run of the whole network each: with 16 samples on two cores about a second for each layer of resnet50.

Cheaper would be the noise that each layer's quantisation adds to its own output, of all layers in one run. It does not tell the
harm: on efficientnet_lite0 it found at best 5 of the 8 most harmful layers (rank correlation at most 0.63), because what counts
is what the layers behind make of it. The harm measured on 8 samples found 7 or 8 of those measured on 32 (0.96).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx

from engines.errors import BuildError
from engines.onnx_runner import OnnxRunner
from engines.progress import Report
from engines.quantization.qdq import quantizable, quantize

if TYPE_CHECKING:
    from engines.quantization.samples import Samples

Array = npt.NDArray[Any]

# The harm is measured on so many samples.
SAMPLES = 16
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
        samples: the first 16 are run.
        report: told after every layer.
        nodes: names of the layers to look at; all that would be quantised if None.

    Returns:
        By layer the energy of the error over the energy of the output, of the worst floating-point output.

    Raises:
        BuildError: ONNX Runtime cannot run the model, or cannot run it quantised.
    """
    layers = quantizable(model)
    named = layers if nodes is None else nodes
    batches = list(samples.head(SAMPLES).batches(_ROWS))
    reference = OnnxRunner(model)
    expected = [reference.run(rows) for rows in batches]
    harm: dict[str, float] = {}
    for i, name in enumerate(named):
        runner = OnnxRunner(quantize(model, ranges, target, precision, [other for other in layers if other != name]))
        harm[name] = _output_error(expected, [runner.run(rows) for rows in batches])
        report((i + 1) / len(named), f"harm of {name}")
    return sorted(harm.items(), key=lambda item: -item[1])


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
