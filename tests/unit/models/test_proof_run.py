"""Batch sizes that a proof tests and allows, and the bound of differences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from headrace.models.proof_run import allowed_rows, candidates, smallest_bound


def test_the_most_important_sizes_come_first() -> None:
    assert candidates(8, (), int, False) == [2, 3, 8, 4, 1 + 4, 6, 7]
    assert candidates(64, (24,), int, False)[:5] == [2, 3, 64, 24, 4]
    assert candidates(1, (), int, False) == []

    def padded(rows: int) -> int:
        return next(bucket for bucket in (1, 4, 8) if bucket >= rows)

    assert candidates(8, (), padded, True) == [2, 3, 8, 4, 5]


def test_no_batch_runs_in_a_bucket_with_a_size_that_is_not_proven() -> None:
    def padded(rows: int) -> int:
        return next(bucket for bucket in (2, 4, 8) if bucket >= rows)

    assert allowed_rows(8, [], padded) == list(range(1, 9))
    assert allowed_rows(8, [3], padded) == [1, 2, 5, 6, 7, 8]
    assert allowed_rows(8, [8], padded) == [1, 2, 3, 4]
    assert allowed_rows(8, [2, 4], padded) == [1, 5, 6, 7, 8]  # one row has no other bucket


@pytest.mark.parametrize(
    ("runtime", "precision", "bound"),
    [
        ("onnxruntime", None, 1e-5),
        ("onnxruntime", "int8", 1e-2),
        ("onnxruntime_cuda", None, 1e-3),
        ("tensorrt", "fp32", 1e-3),
        ("tensorrt", "bf16", 8e-3),
        ("tensorrt", "fp8", 1e-2),
        ("tensorrt", None, 1e-2),
    ],
)
def test_the_smallest_bound_follows_the_precision(runtime: str, precision: str | None, bound: float) -> None:
    stamp = None if precision is None else SimpleNamespace(precision=precision)
    plan: Any = SimpleNamespace(runtime=runtime, stamp=stamp)
    assert smallest_bound(plan) == bound
