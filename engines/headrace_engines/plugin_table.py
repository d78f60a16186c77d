"""Prints the measurements behind the plug-in layers of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.core.command_line import printable
from rich.console import Console

from headrace_engines.report import Heading, narrow_table, print_text

_HEADINGS = (
    Heading("layer"),
    Heading("shape", wraps=True, rank=3),
    Heading("TensorRT us", number=True),
    Heading("our kernel us", number=True, rank=1),
    Heading("plug-in us", number=True),
    Heading("ratio", number=True),
    Heading("kernel", wraps=True, rank=2),
    Heading("chosen"),
    Heading("", wraps=True, rank=4),
)


def show_plugins(console: Console, name: str, report: Mapping[str, Any]) -> None:
    """Print a table of the measured convolutions, and the result.

    Args:
        console: the table goes here.
        name: name of the model.
        report: `PluginReport` as plain data.
    """
    rows = [
        [
            printable(row["layer"]),
            row["shape"],
            _us(row["tensorrt_us"]),
            _us(row["kernel_us"]),
            _us(row["plugin_us"]),
            f"{row['ratio']:.2f}" if row["ratio"] else "",
            row["algorithm"],
            "yes" if row["kept"] else "no",
            row["reason"],
        ]
        for row in report["table"]
    ]
    if rows:
        console.print(narrow_table(f"Convolutions of {name}, {report['rows']} rows", _HEADINGS, rows, console.width))
    if report["plugin_engine_us"]:
        error = f"{report['speedup']:.3f} +- {report['error']:.3f} times as fast"
        times = f"{report['engine_us']:.1f} us without plug-ins, {report['plugin_engine_us']:.1f} us with: {error}"
        print_text(console, f"{printable(name)}: {times}")
    print_text(console, f"{printable(name)}: {report['verdict']}")


def _us(time_us: float) -> str:
    return f"{time_us:.1f}" if time_us else ""
