"""Table of an optimised model."""

from __future__ import annotations

import io
import re
from dataclasses import asdict
from typing import Any

from headrace_engines.optimize.figures import ModelFigures
from headrace_engines.optimize.result_table import show_result
from headrace_engines.targets.base import BatchTiming
from rich.console import Console


def document() -> dict[str, Any]:
    timing = BatchTiming(8, 100.0, 110.0, 80_000.0)
    models = [
        ModelFigures("before", 500, 40, 1000, 2000, "fp16", 0.99, None, (timing,), 0.002),
        ModelFigures("after", 500, 40, 1000, 2000, "fp16", 0.98, 0.985, (timing,), 0.001),
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


def test_figures_and_loss_are_shown() -> None:
    console = Console(file=io.StringIO(), width=120)
    show_result(console, document())
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert re.search(r"engine +(\S+ \S+, fp16) +\1\s", text)
    assert re.search(r"joules per row +0.002 +0.001", text)
    assert "1.00 points of accuracy lost, a loss of 2 is allowed, on held_out.npz." in text
