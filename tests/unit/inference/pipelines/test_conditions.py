"""Conditions of pipeline steps: grammar, values, and texts that break the grammar."""

from __future__ import annotations

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import Array
from headrace.inference.pipelines.conditions import MAX_CONDITION_CHARS, InvalidConditionError, parse_condition
from hypothesis import given
from hypothesis import strategies as st

TENSORS: dict[str, Array] = {
    "scores": np.array([0.1, 0.7, 0.2], np.float32),
    "boxes": np.zeros((3, 4), np.float32),
    "none": np.empty((0, 4), np.float32),
    "flags": np.array([True, False]),
    "half.scale": np.array(2, np.float16),
    "text": np.array([b"a", b"b"], dtype=object),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("scores.max > 0.5", True),
        ("scores.max > 0.8", False),
        ("scores.min<=0.1", False),  # 0.1 in float32 is a little more
        ("scores.mean >= .33", True),
        ("scores.sum < 1.1e0", True),
        ("boxes.rows == 3", True),
        ("boxes.size == 12", True),
        ("boxes.any == false", True),
        ("flags.any == true and flags.all == false", True),
        ("half.scale.max != 1", True),
        ("half.scale.rows == 1", True),
        ("none.rows == 0", True),
        ("none.max > -1", False),
        ("none.max <= 100", False),
        ("none.sum == 0", True),
        ("none.all == true", True),
        ("absent.rows == 0", False),
        ("text.size == 2", True),
        ("scores.max > 0.8 or boxes.rows == 3", True),
        # `and` binds tighter than `or`.
        ("boxes.rows == 3 or scores.max > 0.8 and scores.max > 0.9", True),
        ("boxes.rows == 9 and scores.max > 0 or scores.max > 0.9", False),
        ("scores.max\n>\t0.5", True),
    ],
)
def test_conditions_compare_reductions_with_numbers(text: str, expected: bool) -> None:
    assert parse_condition(text).holds(TENSORS) is expected


def test_a_condition_lists_its_tensors_once() -> None:
    assert parse_condition("a.max > 1 and b.rows > 0 or a.min < 0").tensors == ("a", "b")


@pytest.mark.parametrize("number", ["0.5", "-1", "+2.", ".25", "1e-3", "1E+10"])
def test_numbers_have_their_usual_spellings(number: str) -> None:
    ((comparison,),) = parse_condition(f"x.max > {number}").any_of
    assert comparison.number == float(number)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the end of the text"),
        ("scores", "no comparison"),
        ("scores.max", "no comparison"),
        ("scores.max > ", "no comparison"),
        ("0.5 < scores.max", "no comparison"),
        ("scores.median > 1", "is no reduction"),
        ("scores.__class__ == 1", "no comparison"),
        ("scores.max > 0.5 and", "no comparison"),
        ("scores.max > 0.5 xor boxes.rows > 1", "neither `and` nor `or`"),
        ("scores.max > 0.5 android.max > 1", "neither `and` nor `or`"),
        ("scores.max > 0.5and boxes.rows > 1", "neither `and` nor `or`"),
        ("(scores.max > 0.5)", "no comparison"),
        ("scores.max > inf", "no comparison"),
        ("scores.max > 0.5; import os", "neither `and` nor `or`"),
        ("x.max > 1 or " * 100 + "x.max > 1", f"at most {MAX_CONDITION_CHARS}"),
    ],
)
def test_other_texts_are_refused_with_the_place(text: str, reason: str) -> None:
    with pytest.raises(InvalidConditionError, match=reason):
        parse_condition(text)


def test_numbers_of_texts_are_the_clients_error() -> None:
    with pytest.raises(BadRequest, match=r"'text' needs numbers"):
        parse_condition("text.max > 0.5").holds(TENSORS)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        condition = parse_condition(text)
    except InvalidConditionError:
        return
    assert condition.holds({}) is False


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8), st.floats(-1e6, 1e6, width=32))
def test_reductions_agree_with_numpy(values: list[float], number: float) -> None:
    array = np.array(values, np.float32)
    text = format(number, ".17g")
    for name, value in (("max", array.max()), ("min", array.min()), ("sum", array.sum(dtype=np.float64))):
        assert parse_condition(f"x.{name} >= {text}").holds({"x": array}) == (float(value) >= float(text))
