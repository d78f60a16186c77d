"""Table of an optimised model."""

from __future__ import annotations

import io
from dataclasses import asdict
from typing import Any

import pytest
from headrace_engines.optimize.figures import ModelFigures
from headrace_engines.optimize.result_table import show_result
from headrace_engines.targets.base import BatchTiming
from rich.console import Console


def document(sparse: bool, sparsity: dict[str, Any] | None) -> dict[str, Any]:
    timing = BatchTiming(8, 100.0, 110.0, 80_000.0)
    models = [
        ModelFigures("before", 500, 40, 1000, 2000, "fp16", False, 0.99, None, (timing,), 0.002),
        ModelFigures("after", 500, 40, 1000, 2000, "fp16", sparse, 0.98, 0.985, (timing,), 0.002, sparsity),
    ]
    return {
        "model": "m",
        "machine": "a GPU",
        "models": [asdict(model) for model in models],
        "points_lost": 1.0,
        "loss": "accuracy",
        "target_loss": 2.0,
        "data": "held_out.npz",
    }


@pytest.mark.parametrize(("sparse", "verdict"), [(True, "kept"), (False, "not kept")])
def test_the_measurement_of_sparse_kernels_is_shown(sparse: bool, verdict: str) -> None:
    console = Console(file=io.StringIO(), width=120)
    show_result(console, document(sparse, {"rows": 8, "dense_us": 3350.0, "sparse_us": 3300.0, "nodes": ["conv"]}))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert f"Sparse kernels {verdict}: 3.35 ms without, 3.3 ms with them at 8 rows, 1.015 times as fast." in text


def test_without_sparse_weights_there_is_no_such_line() -> None:
    console = Console(file=io.StringIO(), width=120)
    show_result(console, document(False, None))
    assert isinstance(console.file, io.StringIO)
    assert "Sparse kernels" not in console.file.getvalue()
