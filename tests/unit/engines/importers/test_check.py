"""Comparison of outputs: errors, bounds, and rows of a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.importers import cases as cases_module
from headrace_engines.importers.cases import BATCH_SIZES, Case, InputForm, random_cases
from headrace_engines.importers.check import BOUNDS, compare

Function = Callable[[np.ndarray], np.ndarray]


def check(reference: Function, imported: Function, *, form: InputForm | None = None) -> Any:
    def run(function: Function) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
        return lambda inputs: {"y": function(inputs["x"])}

    forms = [form or InputForm("x", np.dtype(np.float32), (2, 6))]
    return compare(random_cases(forms, True), run(reference), run(imported), lambda _name: None)


@pytest.mark.parametrize("kind", sorted(BOUNDS))
def test_an_error_beyond_the_bound_of_the_type_fails(kind: str) -> None:
    bound = BOUNDS[kind]

    def changed(share: float) -> Function:
        def function(x: np.ndarray) -> np.ndarray:
            y = x.astype(np.float64)
            y[..., 0] += share * np.abs(y).max()
            return y.astype(kind)

        return function

    form = InputForm("x", np.dtype(kind), (2, 600))
    below, above = (
        check(lambda x: x.astype(kind), changed(factor * bound.largest), form=form) for factor in (0.2, 1.5)
    )
    assert below.has_passed, below.faults
    assert not above.has_passed
    assert "largest error" in above.faults[0]


def test_a_small_error_of_every_element_fails_by_its_mean() -> None:
    result = check(lambda x: x, lambda x: x + 5e-5 * np.abs(x).max())
    assert result.outputs["y"].largest < BOUNDS["float32"].largest
    assert not result.has_passed


def test_the_two_forms_of_gelu_differ() -> None:
    def exact(x: np.ndarray) -> np.ndarray:
        return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.ravel()], x.dtype).reshape(x.shape)

    def by_tanh(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)))

    form = InputForm("x", np.dtype(np.float32), (2, 200))
    assert check(exact, exact, form=form).has_passed
    assert not check(exact, by_tanh, form=form).has_passed


def test_errors_are_relative_to_the_largest_value() -> None:
    assert check(lambda x: x * 1e6, lambda x: x * 1e6 + 1e-2).has_passed
    assert not check(lambda x: x * 1e-6, lambda x: x * 1e-6 + 1.0).has_passed
    assert not check(lambda x: x * 0, lambda x: x * 0 + 1.0).has_passed


def test_an_output_that_hardly_depends_on_the_input_is_noted() -> None:
    def faint(x: np.ndarray) -> np.ndarray:
        return (1 + 1e-5 * x).astype(x.dtype)

    result = check(faint, faint)
    assert result.has_passed
    (warning,) = result.warnings
    assert warning.startswith("output y varies by only 4e-05 of its largest value")
    assert not check(lambda x: x, lambda x: x).warnings


def test_outputs_that_are_constant_prove_nothing() -> None:
    (fault,) = check(np.ones_like, np.ones_like).faults
    assert fault.startswith("no output depends on these inputs")


def test_nan_and_infinity_are_equal_to_themselves_only() -> None:
    def holes(x: np.ndarray) -> np.ndarray:
        y = x.copy()
        y[:, 0], y[:, 1] = np.nan, np.inf
        return y

    assert check(holes, holes).has_passed
    assert not check(holes, lambda x: x).has_passed
    assert not check(holes, lambda x: -holes(x)).has_passed


def test_integers_may_differ_in_one_of_a_thousand() -> None:
    def ranks(errors: int) -> Function:
        def function(x: np.ndarray) -> np.ndarray:
            y = np.argsort(x, axis=1)
            y[0, :errors] += 1
            return y

        return function

    # The error is in row 0 of each batch, and of each single run.
    form = InputForm("x", np.dtype(np.float32), (2, 2000))
    assert check(ranks(0), ranks(0), form=form).has_passed
    assert check(ranks(0), ranks(1), form=form).outputs["y"].is_close
    assert not check(ranks(0), ranks(3), form=form).outputs["y"].is_close


def test_a_row_that_reads_its_neighbour_fails() -> None:
    def neighbour(x: np.ndarray) -> np.ndarray:
        return x + 0.01 * np.roll(x, 1, axis=0)

    result = check(neighbour, neighbour)
    assert result.outputs["y"].is_close
    assert not result.outputs["y"].has_own_rows
    assert "depends on the other rows of its batch" in result.faults[0]


def test_an_output_without_a_batch_fails_once() -> None:
    result = check(lambda x: x.sum(axis=0), lambda x: x.sum(axis=0))
    assert len(result.faults) == 1
    assert "its first dimension is no batch" in result.faults[0]


def test_an_error_of_the_import_is_a_fault() -> None:
    def fails(x: np.ndarray) -> np.ndarray:
        if len(x) > 1:
            raise BuildError("the reshape fails")
        return x

    result = check(lambda x: x, fails)
    assert result.faults == ["the imported model fails on random, 2 rows, the framework does not: the reshape fails"]


def test_no_case_is_a_fault() -> None:
    run = dict[str, np.ndarray]
    assert compare([], lambda _i: run(), lambda _i: run(), lambda _n: None).faults == ["no case was compared"]


def test_text_is_compared() -> None:
    def words(word: bytes) -> Function:
        return lambda x: np.where(x > 0, word, b"-").astype(object)

    assert check(words(b"a"), words(b"a")).has_passed
    assert not check(words(b"a"), words(b"b")).has_passed


# Random inputs


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float16", "float32", "object"])
def test_random_inputs_have_the_type_and_are_no_constants(dtype: str) -> None:
    cases = list(random_cases([InputForm("x", np.dtype(dtype), (2, 300))], True))
    assert {case.rows for case in cases} == set(BATCH_SIZES)
    for case in cases:
        values = case.inputs["x"]
        assert values.dtype == np.dtype(dtype)
        assert values.shape == (case.rows, 300)
        assert len(set(values.ravel().tolist())) > 1
        assert len(set(map(bytes, np.asarray(values, "S8")))) == case.rows, "the rows are equal"


def test_random_inputs_stay_in_the_range_of_the_example() -> None:
    ids = InputForm("x", np.dtype(np.int64), (2, 500), low=3, high=9)
    floats = InputForm("x", np.dtype(np.float32), (2, 500), low=0.0, high=1.0, mean=0.5, std=0.6)
    for form in (ids, floats):
        for case in random_cases([form], True):
            values = case.inputs["x"]
            assert values.min() >= form.low
            assert values.max() <= form.high
    # Equal values at the bounds would make ranks ambiguous.
    assert len(np.unique(values)) > 0.99 * values.size


def test_an_example_of_zeros_gives_other_integers() -> None:
    (case, *_) = random_cases([InputForm("x", np.dtype(np.int64), (1, 50), low=0, high=0)], True)
    assert set(case.inputs["x"].ravel()) == {0, 1}


def test_large_batches_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases_module, "_MAX_CASE_BYTES", 1 << 12)
    cases: list[Case] = list(random_cases([InputForm("x", np.dtype(np.uint8), (1, 1 << 11))], True))
    assert [case.rows for case in cases] == [1, 2, 1, 2]
