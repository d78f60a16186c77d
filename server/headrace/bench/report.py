"""Figures of a run as a table in a terminal, and the sentences beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.core.command_line import PIPE_WIDTH, fit_title, printable
from headrace.core.svg_plot import short

# A client process that used more of its core may be the bottleneck itself.
_BUSY = 0.9
_LATE_SHARE = 0.01


def title(document: Mapping[str, Any]) -> str:
    """Return one line with the model, the server and the form of the requests."""
    server = " ".join(part for part in (document["server"]["name"], document["server"]["version"]) if part)
    rows = document["rows"]
    return printable(
        f"{document['model']} at {document['url']}" + (f" ({server})" if server else "") + ", "
        f"{rows} row{'s' if rows != 1 else ''} a request, {document['request_bytes']:,} bytes of inputs, {document['source']}"
    )


def show(console: Console, document: Mapping[str, Any]) -> None:
    """Print a row for each load, then errors and warnings."""
    points = document["points"]
    has_slo, has_server = document["slo_ms"] is not None, any(point.get("server") for point in points)
    table = Table(title=title(document), title_justify="left", box=None, pad_edge=False, header_style="bold")
    headings = ["load", "requests/s", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "max ms", "errors"]
    headings += [f"in {document['slo_ms']:g} ms/s"] if has_slo else []
    headings += ["batch", "queue ms", "compute ms"] if has_server else []
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "load" else "right", no_wrap=True)
    for point in points:
        table.add_row(*(Text(cell) for cell in _cells(point, has_slo, has_server)))
    console.print(fit_title(table, console.width))
    for style, line in notes(document):
        console.print(Text(printable(line), style=style), soft_wrap=console.width >= PIPE_WIDTH)


def _cells(point: Mapping[str, Any], has_slo: bool, has_server: bool) -> list[str]:
    latency = point["latency_ms"]
    names = ("p50", "p90", "p99", "p99.9", "max")
    errors = sum(point["errors"].values())
    cells = [point["label"], f"{point['throughput_per_s']:,.1f}"]
    cells += [f"{latency[name]:.3f}" if latency else "-" for name in names]
    cells.append(f"{errors:,}")
    if has_slo:
        cells.append(f"{point['goodput_per_s']:,.1f}")
    if has_server:
        cells += server_cells(point.get("server"))
    return cells


def server_cells(server: Mapping[str, Any] | None) -> list[str]:
    """Return mean batch, time in the queue and compute time of the server's statistics, "-" for none."""
    phases = (server or {}).get("phases_us") or {}
    batch = (server or {}).get("mean_batch")
    compute = [phases[name] for name in ("compute_input", "compute_infer", "compute_output") if name in phases]
    return [
        f"{batch:.2f}" if batch is not None else "-",
        f"{phases['queue'] / 1e3:.3f}" if "queue" in phases else "-",
        f"{sum(compute) / 1e3:.3f}" if compute else "-",
    ]


def notes(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return sentences about a run with the style of each: errors by status, and what limits the figures."""
    lines: list[tuple[str, str]] = []
    for point in document["points"]:
        label = point["label"]
        for status, count in point["errors"].items():
            text = point["error_texts"].get(status, "")
            lines.append(("red", f"{label}: {count:,} x {status}" + (f": {text}" if text else "")))
        if not point["requests"]:
            lines.append(("yellow", f"{label}: no request was due in the measured time: raise --duration or the load"))
        if "server_cpu_us_per_request" in point:
            server, client = point["server_cpu_us_per_request"], point["client_cpu_us_per_request"]
            lines.append(
                (
                    "dim",
                    f"{label}: processor time of a request {server:.1f} us in the server ({point['server_cores']:.2f} cores), "
                    f"{client:.1f} us in the client: {client / max(server, 1e-9):.2f} of it",
                )
            )
        busy = max(point["client_busy"], default=0.0)
        if busy > _BUSY:
            lines.append(
                (
                    "yellow",
                    f"{label}: a client process used {busy:.0%} of its core and may be the limit: add --processes",
                )
            )
        late = point.get("sent_late", 0)
        if late > _LATE_SHARE * max(1, point["requests"]):
            lag = point["send_lag_ms"]
            lines.append(
                (
                    "yellow",
                    f"{label}: {late:,} of {point['requests']:,} requests were sent more than 1 ms after they were due (p99 "
                    f"{short(lag['p99'])} ms), all connections were busy or the client was late; latencies count from the due "
                    "time and include it: see --connections and --processes",
                )
            )
    if document["points"] and not any(point.get("server") for point in document["points"]):
        lines.append(("dim", "the server reports no statistics of the model: batch sizes and phases are unknown"))
    if document["interrupted"]:
        lines.append(("yellow", "interrupted: the figures are those measured so far"))
    return lines
