"""Ensembles compared with the models that they call: names, types, shapes, batch sizes, optional inputs."""

from __future__ import annotations

from typing import Any

import pytest
from headrace.config.config_base import Problem
from headrace.config.model_config import ModelConfig
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.inference.pipelines.graph import build_graph, check_members

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def model(name: str, inputs: Tensors, outputs: Tensors, rows: int = 8, optional: tuple[str, ...] = ()) -> ModelSpec:
    """A spec; dims without the batch dimension."""
    batch = (-1,) if rows else ()

    def specs(tensors: Tensors) -> dict[str, TensorSpec]:
        return {
            key: TensorSpec(key, BY_NAME[datatype], (*batch, *dims), optional=key in optional)
            for key, (datatype, dims) in tensors.items()
        }

    return ModelSpec(name, "1", "test", specs(inputs), specs(outputs), rows)


def ensemble(
    steps: list[tuple[str, dict[str, str], dict[str, str]]], inputs: Tensors, outputs: Tensors, rows: int = 8
) -> ModelConfig:
    def tensors(given: Tensors) -> list[dict[str, Any]]:
        return [{"name": name, "data_type": kind, "dims": list(dims)} for name, (kind, dims) in given.items()]

    parts = [{"model_name": name, "input_map": reads, "output_map": writes} for name, reads, writes in steps]
    return ModelConfig.model_validate(
        {
            "name": "e",
            "platform": "ensemble",
            "max_batch_size": rows,
            "input": tensors(inputs),
            "output": tensors(outputs),
            "ensemble_scheduling": {"step": parts},
        }
    )


X: Tensors = {"x": ("FP32", (4,))}
Y: Tensors = {"y": ("FP32", (2,))}
STEPS = [("a", {"X": "x"}, {"Y": "m"}), ("b", {"X": "m"}, {"Y": "y"})]
A = model("a", {"X": ("FP32", (4,))}, {"Y": ("FP32", (3,))})
B = model("b", {"X": ("FP32", (3,))}, {"Y": ("FP32", (2,))})


def found(config: ModelConfig, *specs: ModelSpec) -> list[Problem]:
    return list(check_members(build_graph(config), config, dict(enumerate(specs))))


def test_a_matching_ensemble_has_no_problem() -> None:
    assert found(ensemble(STEPS, X, Y), A, B) == []


def test_models_that_are_not_given_are_not_checked() -> None:
    config = ensemble(STEPS, X, Y)
    assert list(check_members(build_graph(config), config, {1: B})) == []


@pytest.mark.parametrize(
    ("a", "b", "loc", "message"),
    [
        (
            model("a", {"Q": ("FP32", (4,))}, {"Y": ("FP32", (3,))}), B,
            ("ensemble_scheduling", "step", 0, "input_map", "X"), 'model a has no input "X"',
        ),
        (
            model("a", {"Q": ("FP32", (4,))}, {"Y": ("FP32", (3,))}), B,
            ("ensemble_scheduling", "step", 0, "input_map"), 'input "Q" of model a is not mapped',
        ),
        (
            A, model("b", {"X": ("FP32", (3,))}, {"Z": ("FP32", (2,))}),
            ("ensemble_scheduling", "step", 1, "output_map", "Y"), 'model b has no output "Y"',
        ),
        (
            model("a", {"X": ("FP32", (4,))}, {"Y": ("FP32", (3,))}, rows=4), B,
            ("max_batch_size",), "max_batch_size 8 is more than 4 of model a",
        ),
        (
            A, model("b", {"X": ("FP16", (3,))}, {"Y": ("FP32", (2,))}),
            ("ensemble_scheduling", "step", 1, "input_map", "X"),
            'tensor "m" is TYPE_FP32 as output "Y" of model a, TYPE_FP16 as input "X" of model b',
        ),
        (
            A, model("b", {"X": ("FP32", (5,))}, {"Y": ("FP32", (2,))}),
            ("ensemble_scheduling", "step", 1, "input_map", "X"), 'tensor "m" has dims [3] as output "Y" of model a, [5]',
        ),
        (
            model("a", {"X": ("FP32", (7,))}, {"Y": ("FP32", (3,))}), B,
            ("ensemble_scheduling", "step", 0, "input_map", "X"), 'dims [4] as input "x" of the ensemble, [7]',
        ),
        (
            A, model("b", {"X": ("FP32", (3,))}, {"Y": ("INT64", (2,))}),
            ("ensemble_scheduling", "step", 1, "output_map", "Y"), 'TYPE_FP32 as output "y" of the ensemble, TYPE_INT64',
        ),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_both_values(
    a: ModelSpec, b: ModelSpec, loc: tuple[Any, ...], message: str
) -> None:
    matching = [problem for problem in found(ensemble(STEPS, X, Y), a, b) if problem.loc == loc]
    assert matching
    assert message in matching[0].message
    assert matching[0].cure


def test_free_sizes_match_any_size() -> None:
    assert found(ensemble(STEPS, X, Y), model("a", {"X": ("FP32", (-1,))}, {"Y": ("FP32", (-1,))}), B) == []


def test_an_optional_input_need_not_be_mapped() -> None:
    optional = model("a", {"X": ("FP32", (4,)), "Q": ("FP32", (1,))}, {"Y": ("FP32", (3,))}, optional=("Q",))
    assert found(ensemble(STEPS, X, Y), optional, B) == []


def test_models_without_batches_have_no_batch_size_to_exceed() -> None:
    """The tensor goes from a model with batches to one without, whose own first size is free."""
    unbatched = model("b", {"X": ("FP32", (-1, 3))}, {"Y": ("FP32", (-1, 2))}, rows=0)
    assert found(ensemble(STEPS, X, Y), A, unbatched) == []


def test_dims_may_agree_without_the_batch_dimension() -> None:
    """At run time a row of its own is added or removed, as in Triton."""
    unbatched = model("b", {"X": ("FP32", (3,))}, {"Y": ("FP32", (2,))}, rows=0)
    assert found(ensemble(STEPS, X, Y), A, unbatched) == []
    assert found(ensemble(STEPS, X, Y, rows=0), A, B) == []


def test_other_shapes_between_batches_and_none_are_refused() -> None:
    unbatched = model("b", {"X": ("FP32", (7, 3))}, {"Y": ("FP32", (2,))}, rows=0)
    assert found(ensemble(STEPS, X, Y), A, unbatched) == []  # [-1, 3] and [7, 3]: the rows of a request decide
    unbatched = model("b", {"X": ("FP32", (7, 4))}, {"Y": ("FP32", (2,))}, rows=0)
    assert [problem.loc[-1] for problem in found(ensemble(STEPS, X, Y), A, unbatched)] == ["X"]
