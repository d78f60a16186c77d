"""Table and HTML page of an optimised model, before and after."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from headrace_reports.command_line import printable
from rich.console import Console

from headrace_engines.optimize.model_writer import REPORT_FILE
from headrace_engines.optimize.search import loss_text
from headrace_engines.report import (
    Heading,
    milliseconds,
    narrow_table,
    page,
    print_text,
    rate,
    save,
    save_json,
    size,
    table,
)

PAGE_FILE = "optimize.html"
_FIELDS = ("accuracy", "agreement", "FLOPs", "parameters", "model.onnx", "engine", "joules per row")


def result_rows(document: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the figures as text: name, before, after; a figure that was not measured is "-".

    Args:
        document: the report.
    """
    before, after = document["models"]
    rows = [(name, _cell(name, before), _cell(name, after)) for name in _FIELDS]
    for first, second in zip(before["timings"], after["timings"], strict=True):
        count = first["rows"]
        rows.append((f"latency, batch {count}", milliseconds(first["median_us"]), milliseconds(second["median_us"])))
        rows.append((f"rows/s, batch {count}", rate(first["rows_per_s"]), rate(second["rows_per_s"])))
    return rows


def _cell(name: str, model: Mapping[str, Any]) -> str:
    if name in ("accuracy", "agreement"):
        value = model[name]
        return "-" if value is None else f"{value:.2%}"
    if name == "FLOPs":
        return "-" if model["macs"] is None else f"{2 * model['macs']:,}"
    if name == "parameters":
        return f"{model['parameters']:,}"
    if name == "model.onnx":
        return size(model["size_bytes"])
    if name == "engine":
        return f"{size(model['engine_bytes'])}, {model['precision']}"
    joules = model["joules_per_row"]
    return "-" if joules is None else f"{joules:.3g}"


def show_result(console: Console, document: Mapping[str, Any]) -> None:
    """Print the table."""
    title = f"{document['model']} on {document['machine']}"
    headings = [Heading("", wraps=True), Heading("before", number=True), Heading("after", number=True)]
    console.print(narrow_table(printable(title), headings, result_rows(document), console.width))
    print_text(console, printable(_loss_line(document)))


def _loss_line(document: Mapping[str, Any]) -> str:
    lost = loss_text(document["points_lost"], document["loss"])
    return f"{lost}, a loss of {document['target_loss']:g} is allowed, on {document['data']}."


def write_page(document: Mapping[str, Any], folder: Path) -> None:
    """Write optimize.json and optimize.html.

    Raises:
        BuildError: a file cannot be written.
    """
    save_json(folder / REPORT_FILE, document)
    rows = [[escape(cell) for cell in row] for row in result_rows(document)]
    body = [
        f"<h1>{escape(document['model'])} <small>pruned: {escape(document['prune'])}</small></h1>",
        f"<p>{escape(document['machine'])}</p>",
        f"<p>{escape(_loss_line(document))}</p>",
        table(["", "before", "after"], rows),
    ]
    save(folder / PAGE_FILE, page(f"{document['model']}: before and after", "\n".join(body)))
