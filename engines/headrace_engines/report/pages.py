"""HTML pages of `headrace compare` and `headrace inspect`: one file each, no scripts, readable on a phone and in the dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryFile

from headrace.core.svg_plot import (
    HEIGHT,
    LEGEND_HEIGHT,
    WIDTH,
    Bar,
    PlotPoint,
    Series,
    bar_plot,
    bars_height,
    colour,
    legend,
    line_plot,
    side_by_side,
    svg,
    variables,
)

from headrace_engines.comparison import Comparison, ComparisonRow
from headrace_engines.errors import BuildError
from headrace_engines.inspection import EngineInspection
from headrace_engines.report.terminal import milliseconds, rate, size
from headrace_engines.targets.base import Layer

_CSS = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;font:16px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.4rem;margin:.2rem 0}h2{font-size:1.1rem;margin:1.6rem 0 .5rem}
p{margin:.3rem 0}.soft{color:var(--soft)}.soft,small{font-size:.85rem}
svg{display:block;width:100%;height:auto}
.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr))}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
.dot{display:inline-block;width:.8em;height:.8em;border-radius:50%;margin-right:.35em;vertical-align:-.05em}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1rem;padding:0;margin:.5rem 0;list-style:none}
"""


def page(title: str, body: str, css: str = "") -> str:
    """A whole HTML document.

    Args:
        title: plain text.
        body: HTML.
        css: of this page alone.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        # Nothing may be fetched and nothing may run, whatever a model's names hold.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
        f"<title>{escape(title)}</title><style>{variables()}{_CSS}{css}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of numbers, the first column text, that scrolls by itself where the screen is narrow.

    Args:
        headings: plain text.
        rows: cells, HTML; what is text has been escaped.
    """
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def make_folder(path: Path) -> None:
    """Make a folder for pages and check that it can be written.

    Raises:
        BuildError: it does not; says why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}: name another folder, or make room") from error


def save(path: Path, text: str) -> None:
    """Write a page, a picture or JSON.

    Raises:
        BuildError: the file cannot be written; says why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error.strerror}: name another file, or make room") from error


_LAYERS_CSS = """
.sum{display:flex;height:1.6rem;border-radius:.3rem;overflow:hidden;margin:.8rem 0;background:var(--line)}
.sum span{display:block}
ol{padding:0;margin:0;list-style:none}
ol li{display:grid;grid-template:"name time""kind kind""bar bar"/minmax(0,1fr) auto;gap:.1rem .8rem;padding:.4rem 0;
border-bottom:1px solid var(--line)}
ol b,ol small{overflow-wrap:anywhere}ol b{font-weight:600}ol small{color:var(--soft)}
ol .name{grid-area:name}ol .kind{grid-area:kind}
ol .time{grid-area:time;text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
ol .bar{grid-area:bar;height:.55rem;border-radius:.2rem;min-width:2px}
@media (min-width:60rem){
ol li{grid-template:"name kind time bar"/minmax(0,2fr) minmax(0,1.7fr) 9rem minmax(0,2.6fr);align-items:center;padding:.2rem 0}
ol .bar{height:1rem}}
"""


def layers_page(inspection: EngineInspection) -> str:
    """HTML of everything that is known of an engine's layers, in the order in which they run."""
    layers = inspection.layers
    longest_us = max((layer.time_us for layer in layers), default=0.0) or 1.0
    title = f"{inspection.model} {inspection.version}: layers"
    body = [
        f"<h1>{escape(inspection.model)} <small>version {inspection.version}</small></h1>",
        f"<p>{escape(inspection.title)}</p>",
        f"<p>{escape(inspection.machine_text)}</p>",
        f'<p class="soft">This is the model itself: {escape(inspection.reason)}.</p>' if inspection.reason else "",
        f"<p><b>{milliseconds(inspection.timing.median_us)}</b> an execution (p99 {milliseconds(inspection.timing.p99_us)}), "
        f"<b>{rate(inspection.timing.rows_per_s)}</b> rows/s; {len(layers)} layers take "
        f"{milliseconds(inspection.total_us)} together under the profiler</p>",
        _by_precision(inspection),
        "<h2>Layers in order</h2><ol>",
        *(_layer(layer, longest_us) for layer in layers),
        "</ol><h2>By kind</h2>",
        _by_kind(layers),
    ]
    return page(title, "\n".join(body), _LAYERS_CSS)


def _layer(layer: Layer, longest_us: float) -> str:
    nodes = ", ".join(layer.nodes)
    description = " · ".join(word for word in (layer.kind, layer.precision, layer.tactic) if word)
    head = f"<b>{escape(nodes)}</b>" if nodes else f'<span class="soft">{escape(layer.name)}</span>'
    name = f"<br><small>{escape(layer.name)}</small>" if nodes and nodes != layer.name else ""
    return (
        f'<li><div class="name">{head}{name}</div><small class="kind">{escape(description)}</small>'
        f'<div class="time">{layer.time_us:,.1f} us <span class="soft">{layer.share:.1%}</span></div>'
        f'<div class="bar" style="width:{100 * layer.time_us / longest_us:.2f}%;background:{colour(layer.precision)}"></div></li>'
    )


def _by_precision(inspection: EngineInspection) -> str:
    shares = inspection.shares()
    strip = "".join(
        f'<span style="width:{100 * share:.2f}%;background:{colour(name)}"></span>' for name, share in shares.items()
    )
    names = "".join(
        f'<li><span class="dot" style="background:{colour(name)}"></span>{escape(name or "unknown")} {share:.1%}</li>'
        for name, share in shares.items()
    )
    return f'<div class="sum">{strip}</div><ul class="legend">{names}</ul>'


def _by_kind(layers: Sequence[Layer]) -> str:
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind, []).append(layer)
    ranked = sorted(kinds.items(), key=lambda item: -sum(layer.time_us for layer in item[1]))
    rows = [
        [
            escape(kind),
            str(len(group)),
            f"{sum(layer.time_us for layer in group):,.1f}",
            f"{sum(layer.share for layer in group):.1%}",
        ]
        for kind, group in ranked
    ]
    return table(("kind", "layers", "us", "share"), rows)


def comparison_page(comparison: Comparison) -> str:
    """HTML with three plots and two tables."""
    names = [row.precision for row in comparison.worked]
    throughput, latency, accuracy = _panels(comparison)
    lines = [comparison_cells(row) for row in comparison.worked]
    columns = filled_columns(lines)
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
        table(
            [HEADINGS[column] for column in columns], [[escape(cells[column]) for column in columns] for cells in lines]
        ),
        *(
            f"<p><small><b>{escape(row.precision)}</b> {escape(columns)}</small></p>"
            for row, columns in _remarks(comparison)
        ),
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


def comparison_cells(row: ComparisonRow) -> list[str]:
    """Return the properties of one precision as plain text under `HEADINGS`."""
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


def filled_columns(lines: list[list[str]]) -> list[int]:
    """Return the columns of `comparison_cells` in which a row has text; remarks are left out."""
    return [column for column in range(len(HEADINGS) - 1) if any(line[column] for line in lines)]


def speed_cells(comparison: Comparison, row: ComparisonRow, rows: int) -> list[str]:
    """Return the times of one precision at a batch size as plain text under `SPEED_HEADINGS`."""
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


def _remarks(comparison: Comparison) -> list[tuple[ComparisonRow, str]]:
    return [(row, remark) for row in comparison.rows if (remark := comparison_cells(row)[-1])]


def _panels(comparison: Comparison) -> tuple[str, str, tuple[str, int]]:
    worked = comparison.worked
    throughput = [Series(r.precision, [PlotPoint(t.rows, t.rows_per_s) for t in r.timings]) for r in worked]
    latency = [
        Series(r.precision, [PlotPoint(t.rows, t.median_us / 1e3, t.p99_us / 1e3) for t in r.timings]) for r in worked
    ]
    bars = _accuracy_bars(worked)
    return (
        line_plot("Throughput", throughput, "rows a batch", "rows/s"),
        line_plot("Latency: median, and up to p99", latency, "rows a batch", "ms", log_y=True),
        (bar_plot("Accuracy", bars), bars_height(len(bars))),
    )


def _accuracy_bars(rows: list[ComparisonRow]) -> list[Bar]:
    bars = []
    for row in rows:
        accuracy = row.accuracy
        if accuracy is None:
            continue
        if accuracy.top1_agreement is not None:
            agreement = accuracy.top1_agreement
            bars.append(Bar(row.precision, f"{row.precision} same as FP32", agreement, f"{agreement:.1%}"))
        else:
            bars.append(Bar(row.precision, f"{row.precision} cosine", accuracy.cosine, f"{accuracy.cosine:.4f}"))
        if accuracy.accuracy is not None:
            bars.append(Bar(row.precision, f"{row.precision} correct", accuracy.accuracy, f"{accuracy.accuracy:.1%}"))
    return bars


def _speed_cells(comparison: Comparison, row: ComparisonRow, rows: int) -> list[str]:
    name, *others = (escape(cell) for cell in speed_cells(comparison, row, rows))
    return [f'<span class="dot" style="background:{colour(row.precision)}"></span>{name}', *others]
