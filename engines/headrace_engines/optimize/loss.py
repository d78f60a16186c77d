"""Loss of a smaller model in points: percentage points of accuracy with labels, of top-1 agreement without."""

from __future__ import annotations

import math

from headrace_engines.accuracy import Accuracy, judge
from headrace_engines.project import AccuracyLimits

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
