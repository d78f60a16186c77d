"""Search of the strongest pruning within the loss target, and the loss in points."""

from __future__ import annotations

import onnx
import pytest
from headrace_engines.accuracy import Accuracy
from headrace_engines.optimize.pruning_program.jobs import PrunedNetwork
from headrace_engines.optimize.search import LADDER, best_trial, missed_target, points_lost, search_strength
from headrace_engines.optimize.torch_job import TorchResult
from headrace_engines.progress import Report, silent


def pruned(share: float, _report: Report) -> TorchResult:
    return TorchResult(onnx.ModelProto(), PrunedNetwork(round(1000 * share), 1000, 10, 20), 0.0)


def held_down_to(share: float) -> object:
    def measured(result: TorchResult) -> Accuracy:
        return Accuracy(100, "s", 1.0 if result.network.macs >= round(1000 * share) else 0.5, 1.0, 0.0)

    return measured


@pytest.mark.parametrize("share", LADDER)
def test_strongest_step_that_holds_is_found(share: float) -> None:
    trials = search_strength(pruned, held_down_to(share), 1.0, silent)  # type: ignore[arg-type]
    best = best_trial(trials)
    assert best is not None
    assert best.flops_share == share
    assert len(trials) <= len(LADDER).bit_length() + 1
    assert len({trial.flops_share for trial in trials}) == len(trials)


def test_nothing_is_chosen_if_the_weakest_step_fails() -> None:
    trials = search_strength(pruned, held_down_to(1.0), 1.0, silent)  # type: ignore[arg-type]
    assert best_trial(trials) is None
    assert min(LADDER) not in {trial.flops_share for trial in trials}
    assert max(LADDER) in {trial.flops_share for trial in trials}


def test_one_step_is_one_trial() -> None:
    (trial,) = search_strength(pruned, held_down_to(0.2), 1.0, silent, [0.35])  # type: ignore[arg-type]
    assert trial.flops_share == 0.35
    assert not trial.refusal


def test_loss_is_agreement_without_labels_and_endless_without_classes() -> None:
    assert points_lost(Accuracy(100, "s", 0.97, 0.9, 0.0)) == pytest.approx(3.0)
    assert points_lost(Accuracy(100, "s", None, 0.9, 0.0)) == float("inf")
    assert points_lost(Accuracy(100, "s", 1.0, 1.0, 0.0, problem="other shapes")) == float("inf")
    assert not missed_target(Accuracy(100, "s", 0.97, 0.1, 0.0), 3.0)
    (missed,) = missed_target(Accuracy(100, "s", 0.97, 0.1, 0.0), 2.9)
    assert "97.00%" in missed
    assert "--target-loss" in missed
    assert missed_target(Accuracy(100, "s", None, 1.0, 0.0), 50.0)
