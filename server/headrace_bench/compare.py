"""Comparison of two runs: the change of every figure with its 95 % confidence interval.

A figure of a run has a sample: its values in the repeats of the run (`--repeat`), or, without three repeats in both runs, those
of ten slices of the measured time (the method of batch means). The interval of the difference of two means is Welch's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from headrace.core.errors import BadRequest
from headrace_reports.command_line import PIPE_WIDTH, fit_title, printable
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace_bench.results import student_95

# Figures that are compared: name, heading, unit, whether more is better.
_FIGURES = (
    ("throughput_per_s", "requests/s", "1/s", True),
    ("goodput_per_s", "goodput/s", "1/s", True),
    ("mean", "mean", "ms", False),
    ("p50", "p50", "ms", False),
    ("p90", "p90", "ms", False),
    ("p95", "p95", "ms", False),
    ("p99", "p99", "ms", False),
)
_COLUMNS = ("figure", "unit", "first", "second", "change_percent", "margin_percent", "verdict")
_MIN_REPEATS = 3
# Fields in which two runs should agree, so that their difference has one cause.
_CONDITIONS = (
    ("model", "model"),
    ("protocol", "protocol"),
    ("rows", "rows of a request"),
    ("request_bytes", "bytes of a request"),
    ("source", "inputs"),
    ("duration_s", "duration in s"),
)


def compare(first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Compare the loads that two runs have in common.

    Args:
        first, second: documents of two runs.
        names: their names in the report.

    Returns:
        JSON object: `rows` with the load, the figure, both values, the change in percent, half the width of its interval in
        percentage points (None if it is unknown), and `verdict`: "better", "worse" or "no difference".

    Raises:
        BadRequest: the runs have no load in common.
    """
    points = {point["label"]: point for point in second["points"]}
    pairs = [(point, points[point["label"]]) for point in first["points"] if point["label"] in points]
    if not pairs:
        labels = [", ".join(point["label"] for point in run["points"]) or "none" for run in (first, second)]
        raise BadRequest(
            f"the runs have no load in common: {names[0]} has {labels[0]}, {names[1]} has {labels[1]}: run both with the same "
            "--concurrency, --rate or --trace"
        )
    return {
        "format": "headrace-bench-comparison",
        "format_version": 1,
        "names": list(names),
        "differences": [
            f"{text}: {first.get(field)} and {second.get(field)}"
            for field, text in _CONDITIONS
            if first.get(field) != second.get(field)
        ],
        "rows": [row for pair in pairs for row in _rows(*pair)],
    }


def _rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[tuple[Any, ...]] = []
    for name, heading, unit, more_is_better in _FIGURES:
        values = [_value(point, name) for point in (first, second)]
        samples = _samples(first, second, name)
        if values[0] is None or values[1] is None:
            continue
        change, margin = relative_change(values[0], values[1], *samples)
        verdict = "no difference"
        if margin is not None and change is not None and abs(change) > margin:
            verdict = "better" if (change > 0) == more_is_better else "worse"
        rows.append((heading, unit, *values, change, margin, verdict))
    counts = [sum(point["errors"].values()) for point in (first, second)]
    shares = [count / max(1, point["requests"]) * 100 for count, point in zip(counts, (first, second), strict=True)]
    if any(counts):
        verdict = "no difference" if shares[0] == shares[1] else "better" if shares[1] < shares[0] else "worse"
        rows.append(("errors", "%", *shares, None, None, verdict))
    return [{"load": first["label"], **dict(zip(_COLUMNS, row, strict=True))} for row in rows]


def _value(point: Mapping[str, Any], name: str) -> float | None:
    value = point.get(name) if name.endswith("per_s") else point["latency_ms"].get(name)
    return float(value) if value is not None else None


def _samples(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> tuple[list[float], list[float]]:
    """Return the samples of a figure: of repeats if both runs have enough, else of slices."""
    repeats = [(point.get("repeats") or {}).get(name) or [] for point in (first, second)]
    if min(map(len, repeats)) >= _MIN_REPEATS:
        return repeats[0], repeats[1]
    slices = [(point.get("slices") or {}).get(name) or [] for point in (first, second)]
    return slices[0], slices[1]


def relative_change(
    first: float, second: float, first_sample: Sequence[float], second_sample: Sequence[float]
) -> tuple[float | None, float | None]:
    """Return the change from a figure to another in percent, and half the width of its 95 % interval in percentage points.

    Args:
        first, second: the figures.
        first_sample, second_sample: independent values of each.

    Returns:
        None for a change from 0; None for the interval with fewer than two values in a sample.
    """
    if not first:
        return None, None
    change = (second / first - 1) * 100
    if min(len(first_sample), len(second_sample)) < 2:
        return change, None
    squares = [float(np.var(sample, ddof=1)) / len(sample) for sample in (first_sample, second_sample)]
    total = sum(squares)
    if total == 0:
        return change, 0.0
    # Welch-Satterthwaite.
    freedoms = (
        square**2 / (len(sample) - 1) for square, sample in zip(squares, (first_sample, second_sample), strict=True)
    )
    margin = student_95(total**2 / sum(freedoms)) * math.sqrt(total)
    return change, margin / abs(first) * 100


def change_text(row: Mapping[str, Any]) -> str:
    """Return the change with its interval, e.g. "+3.1 % ± 1.2"."""
    if row["change_percent"] is None:
        return ""
    margin = "" if row["margin_percent"] is None else f" ± {row['margin_percent']:.1f}"
    return f"{row['change_percent']:+.1f} %{margin}"


def number_text(value: float) -> str:
    """Format a figure with at least three digits: 0.116, 13.5, 1,234."""
    digits = 3 if abs(value) < 10 else 1 if abs(value) < 1000 else 0
    return f"{value:,.{digits}f}"


def show_comparison(console: Console, comparison: Mapping[str, Any]) -> None:
    """Print a row for each load and figure."""
    first, second = comparison["names"]
    for line in comparison["differences"]:
        console.print(
            Text(printable(f"the runs differ in {line}"), style="yellow"), soft_wrap=console.width >= PIPE_WIDTH
        )
    table = Table(
        title=printable(f"{first} -> {second}"), title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for heading in ("load", "figure", "first", "second", "change (95 %)", "verdict"):
        table.add_column(heading, justify="left" if heading in ("load", "figure", "verdict") else "right", no_wrap=True)
    styles = {"better": "green", "worse": "red"}
    for row in comparison["rows"]:
        values = [number_text(row[name]) for name in ("first", "second")]
        verdict = Text(row["verdict"], style=styles.get(row["verdict"], "dim"))
        unit = "" if row["unit"] == "1/s" else f" {row['unit']}"
        table.add_row(printable(row["load"]), row["figure"] + unit, *values, change_text(row), verdict)
    console.print(fit_title(table, console.width))
