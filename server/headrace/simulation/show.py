"""Reports as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from headrace.simulation.report import PERCENTILES, Figures, Report

# Models, or clients, that a table lists: those that ask, or are asked, most.
_MOST_MODELS = 10

# A name, its figures, and how busy the devices were where that is known.
_Line = tuple[str, Figures, float | None]


def print_reports(reports: Sequence[tuple[str, Report]], console: Console) -> None:
    """One setting: its models and clients, a line each. Several: a line each.

    Args:
        reports: by the text that tells the setting.
        console: where to print.
    """
    if len(reports) == 1:
        told = reports[0][1]
        listed = sorted(told.models, key=lambda each: -each.requests)[:_MOST_MODELS] if len(told.models) > 1 else []
        lines: list[_Line] = [(figures.name, figures, None) for figures in listed]
        lines += [*_clients(told), (told.total.name, told.total, told.busy)]
        if len(told.models) > len(listed) > 0:
            console.print(f"the {len(listed)} models of {len(told.models)} that were asked most, and all")
    else:
        lines = []
        for label, told in reports:
            lines += [(label, told.total, told.busy), *_clients(told)]
    first = "setting" if len(reports) > 1 else "model"
    console.print(_times(first, lines))
    console.print(_batches(first, lines))


def _clients(told: Report) -> list[_Line]:
    asked_most = sorted(told.clients, key=lambda each: -each.requests)[:_MOST_MODELS]
    return [(f"  client {figures.name}", figures, None) for figures in asked_most]


def _times(first: str, lines: Sequence[_Line]) -> Table:
    heads = ("requests/s", "goodput/s", *[f"p{percentile:g} ms" for percentile in PERCENTILES])
    table = _table(first, heads)
    for name, figures, _ in lines:
        table.add_row(
            name,
            f"{figures.throughput_hz:,.0f}",
            "-" if figures.goodput_hz is None else f"{figures.goodput_hz:,.0f}",
            *[f"{time_us / 1000:,.2f}" for time_us in figures.percentiles_us],
        )
    return table


def _batches(first: str, lines: Sequence[_Line]) -> Table:
    table = _table(first, ("batch", "busy"))
    table.add_column("closed because")
    table.add_column("errors")
    for name, figures, busy in lines:
        table.add_row(
            name,
            f"{figures.mean_rows:.1f}" if figures.batches else "-",
            "" if busy is None else f"{busy:.0%}",
            _shares(figures.reasons, sum(figures.reasons.values())),
            _shares(figures.errors, figures.requests) or "none",
        )
    return table


def _table(first: str, heads: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first, overflow="fold")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _shares(counts: dict[str, int], of: int) -> str:
    return ", ".join(f"{name} {count / of:.1%}" for name, count in sorted(counts.items(), key=lambda each: -each[1]))
