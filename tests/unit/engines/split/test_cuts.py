"""The choice of a cut against every cut there is, and the times of nodes."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from headrace_engines.onnx_graph import OnnxGraph
from headrace_engines.split.cuts import CutGraph
from headrace_engines.split.models import is_coarse, node_times
from headrace_engines.split.tensors import CrossingTensor
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support.split_graphs import layer_report

FP32 = TensorProto.FLOAT


def chain(times_us: list[float], row_bytes: list[int], layers: list[int] | None = None) -> CutGraph:
    """A chain of ReLUs; `row_bytes` is the size of the tensor behind each."""
    names = ["X", *(f"t{index}" for index in range(len(times_us)))]
    nodes = [helper.make_node("Relu", [names[i]], [names[i + 1]], name=f"n{i}") for i in range(len(times_us))]
    model = onnx_model(nodes, {"X": (FP32, ("n", 4))}, {names[-1]: (FP32, ("n", 4))})
    crossing = {
        name: CrossingTensor(name, FP32, ("n", 4), size) for name, size in zip(names[1:], row_bytes, strict=True)
    }
    return CutGraph(OnnxGraph(model), crossing, times_us, layers or [-1] * len(times_us))


@pytest.mark.parametrize("seed", range(20))
def test_choice_equals_the_best_of_all_cuts(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, parts, slack = int(random.integers(5, 12)), int(random.integers(2, 5)), float(random.choice([0, 0.1, 0.5]))
    times_us = random.exponential(10, count).tolist()
    sizes = random.integers(1, 100, count).tolist()
    chosen = [boundary.position for boundary in chain(times_us, sizes).choose(parts, slack)]

    def longest(cut: tuple[int, ...]) -> float:
        edges = (0, *cut, count)
        return max(sum(times_us[a:b]) for a, b in pairwise(edges))

    cuts = list(combinations(range(1, count), parts - 1))
    limit = min(map(longest, cuts)) * (1 + slack) * (1 + 1e-9)
    fewest = min(sum(sizes[p - 1] for p in cut) for cut in cuts if longest(cut) <= limit)
    assert longest(tuple(chosen)) <= limit
    assert sum(sizes[p - 1] for p in chosen) == fewest


def test_a_cut_beside_a_fused_layer_is_preferred_to_one_inside() -> None:
    cut = chain([0, 5, 0, 0, 5, 0], [8] * 6, layers=[0, 0, 1, 1, 2, 2])
    (boundary,) = cut.choose(2, 0.0)
    assert boundary.position in (2, 4)
    assert not boundary.in_layer


def test_a_skip_counts_at_every_cut_that_it_crosses() -> None:
    nodes = [
        helper.make_node("Relu", ["X"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["Y"]),
    ]
    model = onnx_model(nodes, {"X": (FP32, ("n", 4))}, {"Y": (FP32, ("n", 4))})
    crossing = {name: CrossingTensor(name, FP32, ("n", 4), 16) for name in ("a", "b")}
    cut = CutGraph(OnnxGraph(model), crossing, [1, 1, 1], [-1] * 3)
    assert [(each.position, each.row_bytes) for each in cut.boundaries] == [(1, 16), (2, 32)]


def test_layers_of_one_kind_have_their_median_time() -> None:
    report = layer_report([(("a", "b"), 10.0), (("c", "d"), 90.0), (("e", "f"), 12.0), (("g",), 8.0)])
    times = node_times(report, list("abcdefg"), list("xyxyxyz"))
    assert times.layers == (0, 0, 1, 1, 2, 2, 3)
    factor = 120 / (3 * 12 + 8)
    assert times.times_us == pytest.approx([12 * factor, 0, 12 * factor, 0, 12 * factor, 0, 8 * factor])


def test_without_times_every_node_has_the_same() -> None:
    assert len(set(node_times(layer_report([(("a",), 0.0)]), ["a", "b", "c"]).times_us)) == 1


def test_one_large_fused_layer_is_too_coarse() -> None:
    assert is_coarse(layer_report([(("a", "b"), 60.0), (("c",), 40.0)]), 2)
    assert not is_coarse(layer_report([(("a",), 60.0), (("b", "c"), 20.0), (("d",), 20.0)]), 2)
