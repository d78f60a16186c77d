"""Choice of sparse layers: order of sensitivity, and the most layers within the target."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from headrace_engines.accuracy import Accuracy
from headrace_engines.optimize.search import (
    Sensitivity,
    choose_layers,
    missed_target,
    points_lost,
    rank_layers,
)
from headrace_engines.optimize.sparsity import sparse_layers, sparse_nodes
from headrace_engines.progress import silent
from onnx import numpy_helper

# Loss in points of each layer alone, and together their sum.
LOSSES = {"a": 1.0, "b": 0.0, "c": 4.0, "d": 0.5}


def chain() -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,16] x) => (float[N,16] y) {
            [a] h = MatMul(x, wa)
            [b] i = MatMul(h, wb)
            [c] j = MatMul(i, wc)
            [d] y = MatMul(j, wd)
        }"""
    )
    random = np.random.default_rng(0)
    for name in LOSSES:
        values = random.standard_normal((16, 16)).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, f"w{name}"))
    return model


def accuracy(points: float, cosine: float = 0.99) -> Accuracy:
    return Accuracy(1000, "samples", None, cosine, 0.0, 0.9 - points / 100, 0.9)


def lost(model: onnx.ModelProto) -> Accuracy:
    return accuracy(sum(LOSSES[node] for node in sparse_nodes(model)))


def test_layers_are_ranked_by_their_loss() -> None:
    model = chain()
    ranked = rank_layers(model, sparse_layers(model), lost, silent)
    assert [entry.layer.node for entry in ranked] == ["b", "d", "a", "c"]
    assert [round(entry.points, 6) for entry in ranked] == [0.0, 0.5, 1.0, 4.0]


def test_outputs_decide_among_equal_losses_and_gains_count_as_none() -> None:
    model = chain()
    cosines = {"a": 0.9, "b": 0.99, "c": 0.95, "d": 0.999}

    def measured(candidate: onnx.ModelProto) -> Accuracy:
        (node,) = sparse_nodes(candidate)
        return accuracy(-0.3 if node == "a" else 0.0, cosines[node])

    ranked = rank_layers(model, sparse_layers(model), measured, silent)
    assert [entry.layer.node for entry in ranked] == ["d", "b", "c", "a"]


@pytest.mark.parametrize(
    ("target", "sparse"),
    [(0.0, ["b"]), (0.5, ["b", "d"]), (1.49, ["b", "d"]), (1.5, ["b", "d", "a"]), (9.0, ["b", "d", "a", "c"])],
)
def test_most_layers_within_the_target(target: float, sparse: list[str]) -> None:
    model = chain()
    ranked = rank_layers(model, sparse_layers(model), lost, silent)
    choice = choose_layers(model, ranked, lost, target, silent)
    assert [entry.layer.node for entry in choice.sparse] == sparse
    assert choice.model is not None
    assert sorted(sparse_nodes(choice.model)) == sorted(sparse)
    assert points_lost(choice.accuracy) <= target + 1e-9
    assert len(choice.sparse) + len(choice.dense) == len(LOSSES)


def test_no_model_if_the_least_sensitive_layer_misses_the_target() -> None:
    model = chain()
    ranked = [Sensitivity(layer, 9.0, 0.1) for layer in sparse_layers(model)]
    choice = choose_layers(model, ranked, lambda _: accuracy(9.0), 1.0, silent)
    assert choice.model is None
    assert points_lost(choice.accuracy) == pytest.approx(9.0)


def test_loss_is_agreement_without_labels_and_endless_without_classes() -> None:
    assert points_lost(Accuracy(100, "s", 0.97, 0.9, 0.0)) == pytest.approx(3.0)
    assert points_lost(Accuracy(100, "s", None, 0.9, 0.0)) == float("inf")
    assert points_lost(Accuracy(100, "s", 1.0, 1.0, 0.0, problem="other shapes")) == float("inf")
    assert not missed_target(Accuracy(100, "s", 0.97, 0.1, 0.0), 3.0)
    (missed,) = missed_target(Accuracy(100, "s", 0.97, 0.1, 0.0), 2.9)
    assert "97.00%" in missed
    assert "--target-loss" in missed
    assert missed_target(Accuracy(100, "s", None, 1.0, 0.0), 50.0)
