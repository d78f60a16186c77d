"""Graphs of ensembles: every rule that a configuration must keep by itself, routes, and paths."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.config.config_base import Problem, Problems
from headrace.config.model_config import ModelConfig
from headrace.inference.pipelines.graph import PipelineGraph, build_graph, same_shape
from headrace.inference.pipelines.run import find_route

FP32 = {"data_type": "TYPE_FP32", "dims": [2]}


def step(model: str, reads: dict[str, str], writes: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"model_name": model, "input_map": reads, "output_map": writes, **more}


def config(steps: list[dict[str, Any]], inputs: str = "x", outputs: str = "y", **more: Any) -> ModelConfig:
    """An ensemble whose inputs and outputs are the words of two texts."""
    return ModelConfig.model_validate(
        {
            "name": "e",
            "platform": "ensemble",
            "input": [{"name": name, **FP32} for name in inputs.split()],
            "output": [{"name": name, **FP32} for name in outputs.split()],
            "ensemble_scheduling": {"step": steps},
            **more,
        }
    )


def problems(given: ModelConfig) -> list[Problem]:
    with pytest.raises(Problems) as error:
        build_graph(given)
    return list(error.value.problems)


CHAIN = [step("a", {"X": "x"}, {"Y": "m"}), step("b", {"X": "m"}, {"Y": "y"})]
# x -> a -> m -> {b -> left, c -> right} -> d -> y
DIAMOND = [
    step("d", {"L": "left", "R": "right"}, {"Y": "y"}),
    step("b", {"X": "m"}, {"Y": "left"}),
    step("c", {"X": "m"}, {"Y": "right"}),
    step("a", {"X": "x"}, {"Y": "m"}),
]


def test_a_chain_has_its_steps_producers_and_consumers() -> None:
    graph = build_graph(config(CHAIN, ensemble_scheduling={"step": CHAIN, "max_inflight_requests": 3}))
    assert [(s.index, s.name, s.model, s.version) for s in graph.steps] == [(0, "a", "a", ""), (1, "b", "b", "")]
    assert graph.producers == {"m": 0, "y": 1}
    assert graph.consumers == {"x": (0,), "m": (1,)}
    assert (graph.inputs, graph.outputs, graph.max_inflight) == (("x",), {"y": "y"}, 3)


def test_steps_of_one_model_have_names_of_their_own_and_versions_are_kept() -> None:
    twice = [step("a", {"X": "x"}, {"Y": "m"}, model_version=3), step("a", {"X": "m"}, {"Y": "y"}, model_version=-1)]
    steps = build_graph(config(twice)).steps
    assert [(s.name, s.model, s.version) for s in steps] == [("a", "a", "3"), ("a#2", "a", "")]


def test_the_order_of_steps_in_a_configuration_does_not_matter() -> None:
    graph = build_graph(config(DIAMOND))
    order = graph.order(graph.needed(()))
    assert (order[0], order[-1], set(order[1:3])) == (3, 0, {1, 2})


@pytest.mark.parametrize(
    ("given", "loc", "message"),
    [
        (config([]), ("ensemble_scheduling",), "has no steps"),
        (config(CHAIN, ensemble_scheduling=None), ("ensemble_scheduling",), "has no steps"),
        (config(CHAIN, platform="onnxruntime_onnx"), ("platform",), 'not "onnxruntime_onnx"'),
        (config(CHAIN, instance_group=[{"count": 2}]), ("instance_group",), "is not for an ensemble"),
        (config(CHAIN, optimization={"eager_batching": True}), ("optimization",), "is not for an ensemble"),
        (config(CHAIN, dynamic_batching={}), ("dynamic_batching",), "is not for an ensemble"),
        (
            config(CHAIN, model_warmup=[{"name": "w", "batch_size": 1, "inputs": {"x": {"zero_data": True}}}]),
            ("model_warmup",),
            "is not for an ensemble",
        ),
        (config(CHAIN, isolation="process"), ("isolation",), "is not for an ensemble"),
        (config(CHAIN, inputs=""), ("input",), "input is missing"),
        (config(CHAIN, outputs=""), ("output",), "output is missing"),
        (
            config([step("", {"X": "x"}, {"Y": "y"})]),
            ("ensemble_scheduling", "step", 0, "model_name"),
            "has no model_name",
        ),
        (
            config([step("e", {"X": "x"}, {"Y": "y"})]),
            ("ensemble_scheduling", "step", 0, "model_name"),
            "the ensemble itself",
        ),
        (
            config([step("a", {"X": "x"}, {"Y": "y"}, model_version=-2)]),
            ("ensemble_scheduling", "step", 0, "model_version"),
            "is no version",
        ),
        (config([step("a", {}, {"Y": "y"})]), ("ensemble_scheduling", "step", 0, "input_map"), "has no input_map"),
        (config([step("a", {"X": "x"}, {})]), ("ensemble_scheduling", "step", 0, "output_map"), "has no output_map"),
        (
            config([*CHAIN, step("c", {"X": "x"}, {"Y": "m"})]),
            ("ensemble_scheduling", "step", 2, "output_map", "Y"),
            '"m" is written twice: it is also an output of step 0 (a)',
        ),
        (
            config([step("a", {"X": "x"}, {"Y": "y", "Z": "y"})]),
            ("ensemble_scheduling", "step", 0, "output_map", "Z"),
            '"y" is written twice',
        ),
        (
            config([step("a", {"X": "x"}, {"Y": "x", "Z": "y"})]),
            ("ensemble_scheduling", "step", 0, "output_map", "Y"),
            "it is also an input of the ensemble",
        ),
        (config(CHAIN, inputs="x z"), ("input", 1, "name"), 'input "z" is not read'),
        (config(CHAIN, outputs="y z"), ("output", 1, "name"), 'output "z" is not written'),
        (
            config([*CHAIN, step("c", {"X": "x"}, {"Y": "n"})]),
            ("ensemble_scheduling", "step", 2, "output_map", "Y"),
            '"n" is not used',
        ),
        (
            config([*CHAIN, step("c", {"X": "q", "Z": "x"}, {"Y": "z"})], outputs="y z"),
            ("ensemble_scheduling", "step", 2, "input_map", "X"),
            '"q" is neither an input of the ensemble nor an output of a step',
        ),
        (
            config([step("a", {"X": "x", "Z": "n"}, {"Y": "m"}), step("b", {"X": "m"}, {"Y": "n", "Z": "y"})]),
            ("output", 0, "name"),
            'output "y" is never ready',
        ),
        (
            config([step("a", {"X": "x"}, {"Y": "y"}), step("b", {"X": "n"}, {"Y": "m"}), step("c", {"X": "m"}, {"Y": "n"})]),
            ("ensemble_scheduling", "step", 1, "output_map", "Y"),
            '"m" is never ready',
        ),
    ],
)  # fmt: skip
def test_a_broken_rule_is_named_with_its_place_and_cure(given: ModelConfig, loc: tuple[Any, ...], message: str) -> None:
    matching = [problem for problem in problems(given) if problem.loc == loc]
    assert matching, problems(given)
    assert message in matching[0].message
    assert matching[0].cure


def test_fields_with_their_defaults_are_allowed() -> None:
    assert build_graph(config(CHAIN, instance_group=[], optimization={}, isolation="none", max_batch_size=0))


def test_only_the_steps_that_outputs_need_are_run() -> None:
    graph = build_graph(config([*CHAIN, step("c", {"X": "x"}, {"Y": "z"})], outputs="m y z"))
    assert graph.needed(()) == {0, 1, 2}
    assert (graph.needed(("m",)), graph.needed(("y",)), graph.needed(("z", "m"))) == ({0}, {0, 1}, {0, 2})


def test_a_route_has_the_first_steps_followers_and_readers() -> None:
    route = find_route(build_graph(config(DIAMOND)), ())
    assert route.first == (3,)
    assert {index: set(followers) for index, followers in route.followers.items()} == {
        3: {1, 2},
        1: {0},
        2: {0},
        0: set(),
    }
    assert route.waits == {3: 0, 1: 1, 2: 1, 0: 2}
    assert route.readers == {"x": 1, "m": 2, "left": 1, "right": 1, "y": 1}


def test_the_longest_path_behind_a_step() -> None:
    route = find_route(build_graph(config(DIAMOND)), ())
    # a takes 1, b 10, c 20, d 100.
    assert route.remaining_ns({3: 1, 1: 10, 2: 20, 0: 100}) == {0: 0, 1: 100, 2: 100, 3: 120}


def test_one_tensor_in_two_inputs_of_a_step_counts_once() -> None:
    graph = build_graph(
        config([step("a", {"X": "x", "Z": "x"}, {"Y": "m"}), step("b", {"X": "m", "Z": "m"}, {"Y": "y"})])
    )
    route = find_route(graph, ())
    assert route.readers == {"x": 1, "m": 1, "y": 1}
    assert route.waits == {0: 0, 1: 1}


def test_shapes_agree_up_to_free_sizes() -> None:
    assert same_shape((-1, 2), (5, 2))
    assert same_shape((-1,), (-1,))
    assert not same_shape((1, 2), (2,))
    assert not same_shape((3,), (2,))


def test_a_graph_is_immutable() -> None:
    graph: PipelineGraph = build_graph(config(CHAIN))
    with pytest.raises(AttributeError):
        graph.name = "other"  # type: ignore[misc]
