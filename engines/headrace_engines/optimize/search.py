"""Searches how far the channels of a model can be pruned within a loss target, by a share of the FLOPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_engines.accuracy import Accuracy, judge
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
