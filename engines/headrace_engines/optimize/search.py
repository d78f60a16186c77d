"""Searches how far a model can be pruned within a loss target: its channels by a share of the FLOPs, its layers by 2:4 sparsity.

Layers become sparse in the order of their sensitivity; the largest number that holds the target is found by bisection. The
sensitivity of a layer is the loss with this layer alone sparse, measured on samples that the target is not measured on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from headrace_engines.accuracy import Accuracy, judge
from headrace_engines.optimize.sparsity import SparseLayer, make_sparse
from headrace_engines.optimize.torch_job import TorchResult
from headrace_engines.progress import Report, part
from headrace_engines.project import AccuracyLimits

# Loss of a smaller model in points: percentage points of accuracy with labels, of top-1 agreement without.

_CURE = "raise --target-loss, give more samples with --data, or train channels for more --epochs"


def points_lost(accuracy: Accuracy) -> float:
    """Return the lost points; infinity if the outputs cannot be compared or have no classes."""
    if accuracy.problem:
        return math.inf
    if accuracy.drop is not None:
        return 100 * accuracy.drop
    return math.inf if accuracy.top1_agreement is None else 100 * (1 - accuracy.top1_agreement)


def loss_measure(accuracy: Accuracy) -> str:
    """Return "accuracy" or "agreement", the quantity that `points_lost` counts."""
    return "agreement" if accuracy.drop is None else "accuracy"


def loss_text(points: float, measure: str) -> str:
    """Return e.g. "0.22 points of accuracy lost", or "gained" for a negative loss.

    Args:
        points: result of `points_lost`.
        measure: result of `loss_measure`.
    """
    return f"{abs(points):.2f} points of {measure} {'gained' if points < 0 else 'lost'}"


def missed_target(accuracy: Accuracy, target_points: float) -> list[str]:
    """Return a sentence for each missed limit by the accuracy gate of builds.

    Args:
        accuracy: accuracy of the smaller model against the original one.
        target_points: largest loss in points.
    """
    share = target_points / 100
    labelled = accuracy.drop is not None
    if not labelled and accuracy.top1_agreement is None and not accuracy.problem:
        return [
            "its outputs have no classes, so that no loss can be measured: optimise models with an output [samples, classes]"
        ]
    # Rounding of the sum must not decide between equal numbers of samples.
    limits = AccuracyLimits(0.0 if labelled else 1 - share - 1e-9, -1.0, share if labelled else None)
    return judge(accuracy, limits, cure=_CURE)


# Searches the strongest channel pruning that holds the loss target: bisection over a ladder of FLOPs.

# Shares of the FLOPs that remain, weakest pruning first.
LADDER = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1)
# The first candidate: half of the FLOPs.
_FIRST = 0.5


@dataclass(frozen=True, slots=True)
class Trial:
    """One pruned and trained network.

    Attributes:
        flops_share: requested share of the FLOPs.
        result: the network.
        accuracy: accuracy against the original network on held-out samples.
        refusal: missed limits; empty if the target holds.
    """

    flops_share: float
    result: TorchResult
    accuracy: Accuracy
    refusal: tuple[str, ...]


def search_strength(
    prune: Callable[[float, Report], TorchResult],
    measure: Callable[[TorchResult], Accuracy],
    target_points: float,
    report: Report,
    ladder: Sequence[float] = LADDER,
) -> list[Trial]:
    """Prune at several strengths; return the trials in order.

    Loss is taken to grow with the strength. The strongest trial without a refusal is the result, see `best_trial`.

    Args:
        prune: prunes to a share of the FLOPs and trains.
        measure: compares with the original network on held-out samples.
        target_points: largest loss in points.
        report: progress callback.
        ladder: shares of the FLOPs, descending.
    """
    low, high = 0, len(ladder) - 1
    index = ladder.index(_FIRST) if _FIRST in ladder else 0
    steps = len(ladder).bit_length()
    trials: list[Trial] = []
    while low <= high:
        share = ladder[index]
        done = len(trials)
        inner = part(report, min(done / steps, 0.9), min((done + 1) / steps, 1.0))
        result = prune(share, lambda d, note, s=share, r=inner: r(d, f"{s:.0%} of the FLOPs: {note}"))  # type: ignore[misc]
        accuracy = measure(result)
        trial = Trial(share, result, accuracy, tuple(missed_target(accuracy, target_points)))
        trials.append(trial)
        if trial.refusal:
            high = index - 1
        else:
            low = index + 1
        index = (low + high + 1) // 2
    return trials


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the fewest FLOPs that holds the target; None if none does."""
    held = [trial for trial in trials if not trial.refusal]
    return min(held, key=lambda trial: trial.result.network.macs) if held else None


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
