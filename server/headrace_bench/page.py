"""Results of a run, or of a comparison, as one HTML page: tables and SVG, no scripts, no other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from headrace_reports.command_line import printable
from headrace_reports.html_page import page, table
from headrace_reports.svg_plot import Panel, PlotCurve, curve_picture, short

from headrace_bench.compare import change_text
from headrace_bench.report import notes, server_cells, title

# Batch sizes that are listed for a load.
_SHOWN_SIZES = 12
_CSS = """
.scroll{margin:.8rem 0}svg{max-width:62rem}.red,.worse{color:#c62828}
.yellow{color:#a06000}.dim{color:var(--soft)}.better{color:#2e7d32}
td:last-child{white-space:normal}
"""


def run_page(document: Mapping[str, Any]) -> str:
    """Return the HTML page of a run: figures, latency histogram, sweep, server's batches and phases, conditions."""
    points = document["points"]
    body = [
        f"<h1>{escape(title(document))}</h1>",
        _figures(document),
        *(f'<p class="{style}">{escape(line)}</p>' for style, line in notes(document)),
        "<h2>Latencies</h2>",
        histogram_picture([(point["label"], point["histogram"]) for point in points]),
    ]
    if len(points) > 1:
        body += ["<h2>Sweep</h2>", sweep_picture(document)]
    if any(point.get("server") for point in points):
        body += ["<h2>Server</h2>", _server(points)]
    body += ["<h2>Conditions</h2>", _conditions(document)]
    return page(title(document), "\n".join(body), _CSS)


def comparison_page(comparison: Mapping[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return the HTML page of a comparison: the changes, and the histograms of both runs.

    Args:
        comparison: result of `headrace_bench.compare.compare`.
        first, second: documents of the runs.
    """
    names = [printable(name) for name in comparison["names"]]
    heading = f"{names[0]} and {names[1]}"
    rows = [
        [
            escape(row["load"]),
            escape(row["figure"]),
            *(f"{row[side]:,.3f} {row['unit']}" for side in ("first", "second")),
            escape(change_text(row)),
            f'<span class="{escape(row["verdict"].split()[0])}">{escape(row["verdict"])}</span>',
        ]
        for row in comparison["rows"]
    ]
    curves = [
        (f"{name}, {point['label']}", point["histogram"])
        for name, run in zip(names, (first, second), strict=True)
        for point in run["points"]
    ]
    body = [
        f"<h1>{escape(heading)}</h1>",
        *(f'<p class="yellow">The runs differ in {escape(line)}.</p>' for line in comparison["differences"]),
        table(("load", "figure", *names, "change (95 % interval)", "verdict"), rows),
        "<h2>Latencies</h2>",
        histogram_picture(curves),
    ]
    return page(heading, "\n".join(body), _CSS)


def histogram_picture(histograms: Sequence[tuple[str, Mapping[str, Sequence[float]]]]) -> str:
    """Draw histograms as SVG: the share of the requests by latency, and the share that took longer.

    Args:
        histograms: pairs of name and histogram, see `headrace_bench.results.histogram`.
    """
    shares, tails = [], []
    for name, each in histograms:
        counts = np.array(each["counts"], np.float64)
        if not len(counts):
            continue
        bounds, total = np.array(each["bounds_ms"]), counts.sum()
        shares.append(PlotCurve(name, bounds.tolist(), [*(counts / total * 100).tolist(), 0.0], step=True))
        longer = (1 - np.cumsum(counts) / total) * 100
        tails.append(
            PlotCurve(name, bounds[1:].tolist(), [value if value > 1e-9 else 0.0 for value in longer.tolist()])
        )
    panels = [
        Panel("Latency histogram", shares, "latency in ms", "% of requests", log_x=True),
        Panel("Requests that took longer", tails, "latency in ms", "% of requests", log_x=True, log_y=True),
    ]
    return curve_picture(panels, "Latencies")


def sweep_picture(document: Mapping[str, Any]) -> str:
    """Draw throughput and latencies over the load as SVG."""
    points = [point for point in document["points"] if point["latency_ms"]]
    is_closed = bool(points) and points[0]["mode"] == "closed"
    axis = "concurrent requests" if is_closed else "requests/s offered"
    xs = [point["value"] for point in points]
    rates = [PlotCurve("requests/s", xs, [point["throughput_per_s"] for point in points])]
    if document["slo_ms"] is not None:
        rates.append(PlotCurve("goodput/s", xs, [point["goodput_per_s"] for point in points]))
    latencies = [PlotCurve(name, xs, [point["latency_ms"][name] for point in points]) for name in ("p50", "p90", "p99")]
    reached = [point["throughput_per_s"] for point in points]
    order = sorted(range(len(points)), key=lambda number: reached[number])
    against = [
        PlotCurve(curve.name, [reached[number] for number in order], [curve.ys[number] for number in order])
        for curve in latencies
    ]
    panels = [
        Panel("Throughput", rates, axis, "1/s", log_x=is_closed),
        Panel("Latency", latencies, axis, "ms", log_x=is_closed, log_y=True),
        Panel("Latency by throughput", against, "requests/s", "ms", log_y=True),
    ]
    return curve_picture(panels, "Sweep")


def _figures(document: Mapping[str, Any]) -> str:
    has_slo = document["slo_ms"] is not None
    latencies = ("p50", "p90", "p95", "p99", "p99.9", "max")
    headings = ["load", "requests", "requests/s", *(f"{name} ms" for name in latencies), "errors"]
    headings += [f"in {document['slo_ms']:g} ms/s", "in time"] if has_slo else []
    rows = []
    for point in document["points"]:
        latency = point["latency_ms"]
        row = [escape(point["label"]), f"{point['requests']:,}", f"{point['throughput_per_s']:,.1f}"]
        row += [f"{latency[name]:.3f}" if latency else "-" for name in latencies]
        row.append(f"{sum(point['errors'].values()):,}")
        row += [f"{point['goodput_per_s']:,.1f}", f"{point['in_time']:.1%}"] if has_slo else []
        rows.append(row)
    return table(headings, rows)


def _server(points: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for point in points:
        server = point.get("server")
        rows.append([escape(point["label"]), *server_cells(server), escape(_batch_sizes(server)) or "-"])
    return table(("load", "mean batch", "queue ms", "compute ms", "executions by rows"), rows)


def _batch_sizes(server: Mapping[str, Any] | None) -> str:
    """Return the most frequent numbers of rows of an execution, in order, each with its count."""
    counts: dict[str, int] = (server or {}).get("batch_sizes") or {}
    shown = sorted(sorted(counts, key=lambda size: -counts[size])[:_SHOWN_SIZES], key=int)
    more = ", ..." if len(counts) > len(shown) else ""
    return ", ".join(f"{size}: {counts[size]:,}" for size in shown) + more


def _conditions(document: Mapping[str, Any]) -> str:
    client = document["client"]
    inputs = "; ".join(f"{each['name']} {each['datatype']} {each['shape']}" for each in document["inputs"])
    busy = max((max(point["client_busy"], default=0.0) for point in document["points"]), default=0.0)
    rows = [
        ("time", document["time"]),
        ("inputs", inputs),
        ("different requests", str(document["distinct_requests"])),
        (
            "duration, warm-up, runs of each load",
            f"{short(document['duration_s'])} s, {document['warm_up_s']:g} s, {document['repeats']}",
        ),
        (
            "client",
            f"{client['processes']} processes on {client['cores']} cores, {client['machine']}; busiest {busy:.0%} of its core",
        ),
        ("headrace", document["headrace"]),
    ]
    return table(("", ""), [[escape(name), escape(str(text))] for name, text in rows])
