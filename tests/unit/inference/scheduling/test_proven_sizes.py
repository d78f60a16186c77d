"""Batches are cut and padded to the numbers of rows that are proven."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import ModelFailed
from headrace.inference.scheduling.batch_proof import BatchVerdict
from headrace.inference.scheduling.proven_sizes import ProvenSizes, size_at
from headrace.runtimes.base import Execution

Array = np.ndarray[Any, Any]


class Doubling(Execution):
    """Y = 2 X; records the rows of each run."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.is_closed = False

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.sizes.append(len(inputs["X"]))
        return {"Y": inputs["X"] * 2, "rows": np.arange(len(inputs["X"]))}

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize(
    ("allowed", "rows", "sizes"),
    [
        ((1, 2, 4), 4, [4]),
        ((1, 2, 4), 3, [4]),
        ((1, 2, 8), 5, [8]),
        ((1, 2), 5, [2, 2, 1]),
        ((1,), 3, [1, 1, 1]),
        ((1, 5, 8), 3, [5]),
        ((1, 3), 8, [3, 3, 3]),
    ],
)
def test_a_batch_runs_in_proven_sizes(allowed: Sequence[int], rows: int, sizes: list[int]) -> None:
    inner = Doubling()
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    outputs = ProvenSizes(inner, lambda: BatchVerdict(allowed=tuple(allowed))).run({"X": x})
    assert inner.sizes == sizes
    np.testing.assert_array_equal(outputs["Y"], x * 2)
    assert len(outputs["rows"]) == rows


def test_a_batch_that_must_not_be_cut_is_refused() -> None:
    inner = Doubling()
    execution = ProvenSizes(inner, lambda: BatchVerdict(alone=True, allowed=(1,), reason="influence: output 'Y'"))
    assert len(execution.run({"X": np.zeros((1, 2))})["Y"]) == 1
    with pytest.raises(ModelFailed, match=r"3 rows, of which no batch is proven: send one row. influence: output 'Y'"):
        execution.run({"X": np.zeros((3, 2))})
    assert inner.sizes == [1]
    execution.close()
    assert inner.is_closed


def test_more_sizes_may_be_proven_while_the_execution_is_open() -> None:
    inner, verdicts = Doubling(), [BatchVerdict(allowed=(1, 2))]
    execution = ProvenSizes(inner, lambda: verdicts[-1])
    for verdict in (BatchVerdict(allowed=(1, 2, 4)), BatchVerdict((1, 2, 4))):
        execution.run({"X": np.zeros((4, 2))})
        verdicts.append(verdict)
    execution.run({"X": np.zeros((3, 2))})
    assert inner.sizes == [2, 2, 4, 3]


def test_each_row_of_a_cut_batch_has_run_with_the_rows_of_its_part() -> None:
    assert [size_at(place, 5, (1, 2, 4)) for place in range(5)] == [4, 4, 4, 4, 1]
    assert [size_at(place, 3, (1, 4)) for place in range(3)] == [4] * 3
    assert size_at(2, 3, (1, 3)) == size_at(2, 3, ()) == 3
