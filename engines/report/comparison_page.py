"""The page, and the picture, of `headrace compare`: throughput, latency and accuracy of each precision."""

from __future__ import annotations

from html import escape

from engines.comparison import Comparison, Row
from engines.report.page import page, table
from engines.report.style import milliseconds, rate, size
from server.core.svg_plot import (
    HEIGHT,
    LEGEND_HEIGHT,
    WIDTH,
    Bar,
    Point,
    Series,
    bar_plot,
    bars_height,
    colour,
    legend,
    line_plot,
    side_by_side,
    svg,
)


def comparison_page(comparison: Comparison) -> str:
    """HTML with three plots and two tables."""
    names = [row.precision for row in comparison.worked]
    throughput, latency, accuracy = _panels(comparison)
    lines = [cells_of(row) for row in comparison.worked]
    told = told_columns(lines)
    label = f"{comparison.model} by precision: "
    body = [
        f"<h1>{escape(comparison.model)} <small>version {comparison.version}, precisions compared</small></h1>",
        f"<p>{escape(str(comparison.machine))}</p>",
        f'<p class="soft">Timed in turns in one process, {comparison.seconds:g} s each; medians over rounds.'
        + (f" Accuracy on {escape(comparison.data)}." if comparison.data else "")
        + "</p>",
        f'<div class="key">{svg(legend(names), WIDTH, LEGEND_HEIGHT, label + "legend")}</div>',
        '<div class="plots">',
        svg(throughput, WIDTH, HEIGHT, label + "throughput"),
        svg(latency, WIDTH, HEIGHT, label + "latency"),
        svg(accuracy[0], WIDTH, accuracy[1], label + "accuracy"),
        "</div><h2>What they are</h2>",
        table([HEADINGS[column] for column in told], [[escape(cells[column]) for column in told] for cells in lines]),
        *(f"<p><small><b>{escape(row.precision)}</b> {escape(told)}</small></p>" for row, told in _remarks(comparison)),
        "<h2>How fast they are</h2>",
        table(
            SPEED_HEADINGS, [_speed_cells(comparison, row, n) for row in comparison.worked for n in comparison.sizes]
        ),
    ]
    return page(f"{comparison.model}: precisions compared", "\n".join(body), ".key{max-width:28rem}")


def comparison_picture(comparison: Comparison) -> str:
    """One SVG for documents: the three plots side by side."""
    throughput, latency, accuracy = _panels(comparison)
    title = f"{comparison.model} on {comparison.machine}"
    names = [row.precision for row in comparison.worked]
    return side_by_side([(throughput, HEIGHT), (latency, HEIGHT), accuracy], names, title)


HEADINGS = ("precision", "top-1", "cosine", "accuracy", "kept", "size", "memory", "built", "remark")
SPEED_HEADINGS = ("precision", "batch", "median", "p99", "rows/s", "against fp32")


def cells_of(row: Row) -> list[str]:
    """What one precision is, as plain text under `HEADINGS`."""
    built, accuracy = row.built, row.accuracy
    if built is None:
        return [row.precision, *[""] * (len(HEADINGS) - 2), f"not measured: {row.reason}"]
    agreement = accuracy.top1_agreement if accuracy else None
    true = accuracy.accuracy if accuracy else None
    drop = accuracy.drop if accuracy else None
    points = "" if drop is None or abs(drop) < 0.0005 else f" ({-100 * drop:+.1f})"
    return [
        row.precision,
        "" if agreement is None else f"{agreement:.1%}",
        "" if accuracy is None else f"{accuracy.cosine:.5f}",
        "" if true is None else f"{true:.1%}{points}",
        str(len(built.kept)) if built.kept else "",
        size(built.size_bytes),
        "" if row.memory_bytes is None else size(row.memory_bytes),
        f"{built.seconds:.1f} s",
        row.remark,
    ]


def told_columns(lines: list[list[str]]) -> list[int]:
    """Of lines of `cells_of`: what no row can tell, such as an accuracy without labels, takes no column; nor do remarks."""
    return [column for column in range(len(HEADINGS) - 1) if any(line[column] for line in lines)]


def speed_cells(comparison: Comparison, row: Row, rows: int) -> list[str]:
    """How fast one precision is at a batch size, as plain text under `SPEED_HEADINGS`."""
    timing, times = row.at(rows), comparison.speed_up(row, rows)
    if timing is None:
        return [row.precision, str(rows), "", "", "", ""]
    return [
        row.precision,
        str(rows),
        milliseconds(timing.median_us),
        milliseconds(timing.p99_us),
        rate(timing.rows_per_s),
        "" if times is None else f"x {times:.2f}",
    ]


def _remarks(comparison: Comparison) -> list[tuple[Row, str]]:
    return [(row, told) for row in comparison.rows if (told := cells_of(row)[-1])]


def _panels(comparison: Comparison) -> tuple[str, str, tuple[str, int]]:
    worked = comparison.worked
    throughput = [Series(r.precision, [Point(t.rows, t.rows_per_s) for t in r.timings]) for r in worked]
    latency = [
        Series(r.precision, [Point(t.rows, t.median_us / 1e3, t.p99_us / 1e3) for t in r.timings]) for r in worked
    ]
    bars = _accuracy_bars(worked)
    return (
        line_plot("Throughput", throughput, "rows a batch", "rows/s"),
        line_plot("Latency: median, and up to p99", latency, "rows a batch", "ms", log_y=True),
        (bar_plot("Accuracy", bars), bars_height(len(bars))),
    )


def _accuracy_bars(rows: list[Row]) -> list[Bar]:
    bars = []
    for row in rows:
        accuracy = row.accuracy
        if accuracy is None:
            continue
        if accuracy.top1_agreement is not None:
            told = accuracy.top1_agreement
            bars.append(Bar(row.precision, f"{row.precision} same as FP32", told, f"{told:.1%}"))
        else:
            bars.append(Bar(row.precision, f"{row.precision} cosine", accuracy.cosine, f"{accuracy.cosine:.4f}"))
        if accuracy.accuracy is not None:
            bars.append(Bar(row.precision, f"{row.precision} correct", accuracy.accuracy, f"{accuracy.accuracy:.1%}"))
    return bars


def _speed_cells(comparison: Comparison, row: Row, rows: int) -> list[str]:
    name, *others = (escape(cell) for cell in speed_cells(comparison, row, rows))
    return [f'<span class="dot" style="background:{colour(row.precision)}"></span>{name}', *others]
