"""Figures of a run as a table in a terminal, and the sentences beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace_reports.command_line import PIPE_WIDTH, fit_title, printable
from headrace_reports.svg_plot import short
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


class Column(NamedTuple):
    """A column of the table.

    Attributes:
        heading: of the column.
        rank: columns with the largest rank are left out first where the terminal is narrow.
        cells: one for each load.
    """

    heading: str
    rank: int
    cells: list[str]


def show(console: Console, document: Mapping[str, Any]) -> None:
    """Print a row for each load, then errors and warnings."""
    table = Table(title=title(document), title_justify="left", box=None, pad_edge=False, header_style="bold")
    columns = fitting(_columns(document), console.width)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.heading == "load" else "right", no_wrap=True)
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text(cell) for cell in cells))
    console.print(fit_title(table, console.width))
    for style, line in notes(document):
        console.print(Text(printable(line), style=style), soft_wrap=console.width >= PIPE_WIDTH)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit into so many characters; those of rank 0 always."""
    kept = list(columns)
    while True:
        sizes = [max(cell_len(text) for text in (column.heading, *column.cells)) for column in kept]
        least = max(kept, key=lambda column: column.rank)
        if sum(sizes) + 2 * (len(kept) - 1) <= width or least.rank == 0:
            return kept
        kept.remove(least)


def _columns(document: Mapping[str, Any]) -> list[Column]:
    points = document["points"]
    columns = [
        Column("load", 0, [point["label"] for point in points]),
        Column("requests/s", 0, [f"{point['throughput_per_s']:,.1f}" for point in points]),
    ]
    for name, rank in (("p50", 0), ("p90", 4), ("p99", 0), ("p99.9", 6), ("max", 5)):
        latencies = [point["latency_ms"] for point in points]
        columns.append(Column(f"{name} ms", rank, [f"{each[name]:.3f}" if each else "-" for each in latencies]))
    columns.append(Column("errors", 0, [f"{sum(point['errors'].values()):,}" for point in points]))
    if document["slo_ms"] is not None:
        goodputs = [f"{point['goodput_per_s']:,.1f}" for point in points]
        columns.append(Column(f"in {document['slo_ms']:g} ms/s", 1, goodputs))
    if any(point.get("server") for point in points):
        cells = list(zip(*(server_cells(point.get("server")) for point in points), strict=True))
        for heading, rank, column in zip(("batch", "queue ms", "compute ms"), (2, 3, 7), cells, strict=True):
            columns.append(Column(heading, rank, list(column)))
    return columns


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

    def add(style: str, text: str) -> None:
        lines.append((style, text))

    for point in document["points"]:
        label = point["label"]
        for status, count in point["errors"].items():
            text = point["error_texts"].get(status, "")
            add("red", f"{label}: {count:,} x {status}" + (f": {text}" if text else ""))
        if not point["requests"]:
            add("yellow", f"{label}: no request was due in the measured time: raise --duration or the load")
        if "server_cpu_us_per_request" in point:
            server, client = point["server_cpu_us_per_request"], point["client_cpu_us_per_request"]
            add(
                "dim",
                f"{label}: processor time of a request {server:.1f} us in the server ({point['server_cores']:.2f} cores), "
                f"{client:.1f} us in the client: {client / max(server, 1e-9):.2f} of it",
            )
        busy = max(point["client_busy"], default=0.0)
        if busy > _BUSY:
            add(
                "yellow", f"{label}: a client process used {busy:.0%} of its core and may be the limit: add --processes"
            )
        late = point.get("sent_late", 0)
        if late > _LATE_SHARE * max(1, point["requests"]):
            lag = point["send_lag_ms"]
            add(
                "yellow",
                f"{label}: {late:,} of {point['requests']:,} requests were sent more than 1 ms after they were due (p99 "
                f"{short(lag['p99'])} ms), all connections were busy or the client was late; latencies count from the due "
                "time and include it: see --connections and --processes",
            )
    if document["points"] and not any(point.get("server") for point in document["points"]):
        add("dim", "the server reports no statistics of the model: batch sizes and phases are unknown")
    if document["interrupted"]:
        add("yellow", "interrupted: the figures are those measured so far")
    return lines
