"""Conditions of pipeline steps (`when`): a small fixed grammar over reductions of tensors, without `eval`.

    condition  = all_of ("or" all_of)*
    all_of     = comparison ("and" comparison)*
    comparison = TENSOR "." REDUCTION OPERATOR NUMBER
    REDUCTION  = "max" | "min" | "mean" | "sum" | "size" | "rows" | "any" | "all"
    OPERATOR   = ">" | ">=" | "<" | "<=" | "==" | "!="
    NUMBER     = decimal number, "true" or "false"

`and` binds tighter than `or`; there are no parentheses.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headrace.core.errors import BadRequest
from headrace.core.tensor import Array, bf16_values

GRAMMAR = "TENSOR.max > NUMBER, joined by and, or; reductions: max, min, mean, sum, size, rows, any, all"

# Longer conditions are mistakes, or try to slow the server down.
MAX_CONDITION_CHARS = 1024

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
}


def _rows(array: Array) -> int:
    return int(array.shape[0]) if array.ndim else 1


# Reductions that have no value for an empty tensor, and those that have one.
_NUMERIC: dict[str, Callable[[Array], float]] = {
    "max": lambda array: float(array.max()),
    "min": lambda array: float(array.min()),
    "mean": lambda array: float(array.mean(dtype=np.float64)),
}
_TOTAL: dict[str, Callable[[Array], float]] = {
    "sum": lambda array: float(array.sum(dtype=np.float64)),
    "any": lambda array: float(array.any()),
    "all": lambda array: float(array.all()),
}
_SHAPED: dict[str, Callable[[Array], float]] = {"size": lambda array: float(array.size), "rows": _rows}
REDUCTIONS = (*_NUMERIC, *_TOTAL, *_SHAPED)

_COMPARISON = re.compile(
    r"(?P<tensor>[^\s.()<>=!][^\s()<>=!]*)\s*\.\s*(?P<reduction>[a-z]+)\s*(?P<operator>>=|<=|==|!=|>|<)\s*"
    r"(?P<number>true|false|[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?)"
)


class InvalidConditionError(ValueError):
    """A condition breaks the grammar; the text says where."""


class TensorComparison(NamedTuple):
    """One comparison of a reduced tensor with a number.

    Attributes:
        tensor: name of the tensor.
        reduction: one of `REDUCTIONS`.
        operator: comparison, as text.
        number: right side.
    """

    tensor: str
    reduction: str
    operator: str
    number: float

    def holds(self, array: Array | None, is_bf16: bool = False) -> bool:
        """Return True if the comparison holds; False for a tensor that is absent or has no value (the maximum of no elements).

        Args:
            array: the tensor.
            is_bf16: True if its elements are bit patterns of BF16.

        Raises:
            BadRequest: the tensor has texts, which only `size` and `rows` reduce.
        """
        if array is None:
            return False
        reduce = _SHAPED.get(self.reduction)
        if reduce is None:
            if array.dtype.hasobject:
                raise BadRequest(
                    f"the condition on '{self.tensor}' needs numbers, it has texts: compare {self.tensor}.size or .rows"
                )
            if array.size == 0 and self.reduction in _NUMERIC:
                return False
            reduce = _NUMERIC.get(self.reduction) or _TOTAL[self.reduction]
            if is_bf16:
                array = bf16_values(array)
        return _OPERATORS[self.operator](reduce(array), self.number)


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition.

    Attributes:
        text: the text as configured.
        any_of: the condition holds if all comparisons of one of the groups hold.
    """

    text: str
    any_of: tuple[tuple[TensorComparison, ...], ...]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors, without repetition."""
        return tuple(dict.fromkeys(comparison.tensor for group in self.any_of for comparison in group))

    def holds(self, tensors: Mapping[str, Array], bf16: Collection[str] = ()) -> bool:
        """Return True if the condition holds.

        Args:
            tensors: arrays by name; an absent one makes its comparisons false.
            bf16: tensors whose elements are bit patterns of BF16.

        Raises:
            BadRequest: a tensor has texts where the condition needs numbers.
        """
        return any(
            all(comparison.holds(tensors.get(comparison.tensor), comparison.tensor in bf16) for comparison in group)
            for group in self.any_of
        )


def parse_condition(text: str) -> Condition:
    """Parse a condition such as `scores.max > 0.5 and boxes.rows >= 1`.

    Raises:
        InvalidConditionError: the text breaks the grammar.
    """
    if len(text) > MAX_CONDITION_CHARS:
        raise InvalidConditionError(f"it has {len(text)} characters, at most {MAX_CONDITION_CHARS} are allowed")
    groups: list[list[TensorComparison]] = [[]]
    position, length = 0, len(text)
    while True:
        position = _skip_blanks(text, position)
        comparison, position = _comparison(text, position)
        groups[-1].append(comparison)
        position = _skip_blanks(text, position)
        if position == length:
            return Condition(text, tuple(tuple(group) for group in groups))
        word = re.compile(r"and\b|or\b").match(text, position)
        if word is None or not text[position - 1].isspace():
            raise InvalidConditionError(
                f"after character {position}, {_excerpt(text, position)} is neither `and` nor `or`"
            )
        if word[0] == "or":
            groups.append([])
        position = word.end()


def _comparison(text: str, position: int) -> tuple[TensorComparison, int]:
    match = _COMPARISON.match(text, position)
    if match is None:
        raise InvalidConditionError(
            f"after character {position}, {_excerpt(text, position)} is no comparison ({GRAMMAR})"
        )
    if match["reduction"] not in REDUCTIONS:
        raise InvalidConditionError(f'"{match["reduction"]}" is no reduction: write one of {", ".join(REDUCTIONS)}')
    word = match["number"]
    number = float(word == "true") if word in ("true", "false") else float(word)
    return TensorComparison(match["tensor"], match["reduction"], match["operator"], number), match.end()


def _skip_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _excerpt(text: str, position: int) -> str:
    rest = text[position : position + 40]
    return f'"{rest}"' if rest else "the end of the text"
