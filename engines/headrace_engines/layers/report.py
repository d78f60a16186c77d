"""Table, HTML and plot of a layer comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from headrace_reports.command_line import printable
from headrace_reports.svg_plot import HEIGHT, WIDTH, Panel, PlotCurve, curve_legend, curve_plot, svg
from rich.console import Console

from headrace_engines.layers.comparison import LayerComparison, LayerRow
from headrace_engines.layers.differences import TensorDifference
from headrace_engines.layers.tensors import SourceLayer
from headrace_engines.report import Heading, narrow_table, print_text, table

_LEGEND_HEIGHT = 20
_SOURCE = "FP32 is the model on ONNX Runtime without fusions"


def error_text(value: float) -> str:
    """Format an error: "0.0123", "4.5e-06", "infinite"."""
    return f"{value:.3g}" if math.isfinite(value) else "infinite"


def cosine_text(value: float) -> str:
    """Format a cosine with as many digits as its distance from 1 needs: "0.93", "0.99981", "1 - 4.5e-08"."""
    distance = 1.0 - value
    if 1e-12 < distance < 1e-5:
        return f"1 - {distance:.1e}"
    return f"{value:.5f}"


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Format a shape: "[N, 64, 56, 56]", "" if it is unknown; free dimensions are N."""
    return "" if shape is None else f"[{', '.join('N' if size < 0 else str(size) for size in shape)}]"


def show_layers(console: Console, comparison: LayerComparison) -> None:
    """Print one row for each tensor, with cosine, largest and mean error of each precision."""
    precisions = comparison.precisions
    headings = [Heading("node"), Heading("op"), Heading("output", rank=3)]
    for name in precisions:
        headings += [
            Heading(f"{name} cosine", number=True),
            Heading(f"{name} relative", number=True, rank=1),
            Heading(f"{name} max", number=True, rank=2),
            Heading(f"{name} mean", number=True, rank=4),
        ]
    rows = [[printable(cell) for cell in _cells(row, precisions)] for row in comparison.rows]
    title = f"Layers against FP32, {comparison.samples} samples of {printable(comparison.data)}"
    if rows:
        console.print(narrow_table(title, headings, rows, console.width))
        print_text(console, f"{_SOURCE}; layers that every engine fuses have no row.")
    for name, remark in comparison.remarks.items():
        print_text(console, f"{name}: {printable(remark)}", "yellow")


def _cells(row: LayerRow, precisions: Sequence[str]) -> list[str]:
    cells = [row.layer.node, row.layer.operator, shape_text(row.layer.shape)]
    for name in precisions:
        cells += figures(row.differences.get(name))
    return cells


def figures(difference: TensorDifference | None) -> list[str]:
    """Return cosine, relative, largest and mean error as text; "-" for a tensor that the engine does not have."""
    if difference is None:
        return ["-"] * 4
    errors = (difference.relative, difference.max_abs, difference.mean_abs)
    return [cosine_text(difference.cosine), *map(error_text, errors)]


def layers_section(comparison: LayerComparison) -> str:
    """Return HTML with a plot of the relative error by layer and a table."""
    precisions = comparison.precisions
    headings = ["node", "op", "output"]
    for name in precisions:
        headings += [f"{name} cosine", "relative", "max", "mean"]
    remarks = [
        f"<p><small><b>{escape(name)}</b> {escape(remark)}</small></p>" for name, remark in comparison.remarks.items()
    ]
    return "\n".join(
        [
            "<h2>Layers</h2>",
            f'<p class="soft">Against FP32 on {comparison.samples} samples of {escape(comparison.data)}. {_SOURCE}. '
            "Only tensors that the fused layers of an engine still write are compared.</p>",
            f'<div class="key">{svg(curve_legend(precisions), WIDTH, _LEGEND_HEIGHT * max(len(precisions), 1), "legend")}</div>',
            svg(layers_plot(comparison), WIDTH, HEIGHT, "relative error by layer"),
            table(headings, [[escape(cell) for cell in _cells(row, precisions)] for row in comparison.rows]),
            *remarks,
        ]
    )


def layers_plot(comparison: LayerComparison) -> str:
    """Draw the relative error of each precision over the layers, on a logarithmic axis, as SVG elements."""
    curves = []
    for name in comparison.precisions:
        numbered = [(number, row.differences.get(name)) for number, row in enumerate(comparison.rows, 1)]
        points = [(float(n), d.relative) for n, d in numbered if d is not None and math.isfinite(d.relative)]
        curves.append(PlotCurve(name, [x for x, _ in points], [y for _, y in points]))
    panel = Panel("Relative error by layer", curves, "layer, in the order of the graph", "error / FP32", log_y=True)
    return curve_plot(panel, comparison.precisions)


def layer_text(layer: SourceLayer) -> str:
    """Return node, operator and output of a layer."""
    shape = f", output {shape_text(layer.shape)}" if layer.shape is not None else ""
    return f"{layer.node} ({layer.operator}{shape})"


def batch_layer_text(layer: SourceLayer | None) -> str:
    """Return the result of `first_batch_layer`."""
    if layer is None:
        return "rows have the same outputs in a batch and alone"
    return f"the first layer whose rows differ in a batch: {layer_text(layer)}"
