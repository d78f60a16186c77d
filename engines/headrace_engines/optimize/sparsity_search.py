"""Chooses the layers that become 2:4 sparse: the least sensitive ones, as many as the loss target allows.

The sensitivity of a layer is the loss with this layer alone sparse, measured on samples that the target is not measured on.
Layers are added in the order of their sensitivity; the largest number that holds the target is found by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from headrace_engines.accuracy import Accuracy
from headrace_engines.optimize.loss import missed_target, points_lost
from headrace_engines.optimize.sparsity import SparseLayer, make_sparse
from headrace_engines.progress import Report, part

# Compares a model with the original one on samples.
Measure = Callable[[onnx.ModelProto], Accuracy]


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Loss with one sparse layer.

    Attributes:
        layer: the layer.
        points: lost points of accuracy or agreement; negative for a gain.
        distance: 1 - cosine similarity of the outputs.
    """

    layer: SparseLayer
    points: float
    distance: float


@dataclass(frozen=True, slots=True)
class SparsityChoice:
    """Result of the search.

    Attributes:
        model: model with sparse weights; None if no layer holds the target.
        sparse: sensitivities of the sparse layers, least sensitive first.
        dense: sensitivities of the other layers.
        accuracy: accuracy of `model`, or of the least sensitive layer alone if there is none.
    """

    model: onnx.ModelProto | None
    sparse: tuple[Sensitivity, ...]
    dense: tuple[Sensitivity, ...]
    accuracy: Accuracy


def rank_layers(
    model: onnx.ModelProto, layers: Sequence[SparseLayer], measure: Measure, report: Report
) -> list[Sensitivity]:
    """Return the sensitivities of layers, least sensitive first; larger layers first among equal ones.

    Args:
        model: dense model.
        layers: layers of `sparse_layers`.
        measure: compares on samples for the ranking.
        report: progress callback.
    """
    ranked = []
    for number, layer in enumerate(layers):
        report(number / len(layers), f"sensitivity of {layer.node}")
        accuracy = measure(make_sparse(model, [layer.weight]))
        ranked.append(Sensitivity(layer, points_lost(accuracy), 1 - accuracy.cosine))
    return sorted(ranked, key=lambda entry: (max(entry.points, 0.0), entry.distance, -entry.layer.size))


def choose_layers(
    model: onnx.ModelProto, ranked: Sequence[Sensitivity], measure: Measure, target_points: float, report: Report
) -> SparsityChoice:
    """Return the model with the most sparse layers that holds the target.

    Args:
        model: dense model.
        ranked: at least one layer, least sensitive first.
        measure: compares on held-out samples.
        target_points: largest loss in points.
        report: progress callback.
    """
    best: tuple[int, onnx.ModelProto, Accuracy] | None = None
    first: Accuracy | None = None
    low, high = 1, len(ranked)
    steps = max(high.bit_length(), 1)
    for step in range(steps + 1):
        if low > high:
            break
        # All layers first: often they hold the target.
        count = high if step == 0 else (low + high + 1) // 2
        inner = part(report, step / (steps + 1), (step + 1) / (steps + 1))
        inner(0.0, f"{count} of {len(ranked)} layers sparse")
        candidate = make_sparse(model, [entry.layer.weight for entry in ranked[:count]])
        accuracy = measure(candidate)
        if not missed_target(accuracy, target_points):
            best, low = (count, candidate, accuracy), count + 1
        else:
            first, high = accuracy, count - 1
    if best is None:
        assert first is not None, "the loop has measured at least one candidate"
        return SparsityChoice(None, (), tuple(ranked), first)
    count, chosen, accuracy = best
    return SparsityChoice(chosen, tuple(ranked[:count]), tuple(ranked[count:]), accuracy)
