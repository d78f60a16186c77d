"""`headrace tune MODEL_FOLDER`: which numbers of instances and rows give the most, and what to write into the configuration."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from server.core.clock import NS_PER_MS
from server.core.console import fit_title, open_console
from server.core.errors import ConfigError, HeadraceError

if TYPE_CHECKING:
    from server.control.tuning import Point, Sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="of one model, e.g. model_repository/resnet50")
    add("--instances", type=_counts, default=(), metavar="N,N", help="numbers to try (1, 2, 4 ... up to the cores)")
    add("--seconds", type=_positive, default=0.5, metavar="S", help="for each pair of settings (%(default)s)")
    add("--slo-ms", type=_positive, default=0.0, metavar="MS", help="what answers may take (the configuration's slo)")
    add("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command with what `add_arguments` declared; the exit status."""
    from server.config.config_reader import read_model_folder  # here, since every command declares its options
    from server.control.profile_store import cores
    from server.control.tuning import default_counts, sweep

    console, errors = open_console(highlight=False), open_console(stderr=True, highlight=False)
    path = args.folder.absolute()
    try:
        folder = read_model_folder(path, path.parent)
        slo_ms = args.slo_ms or folder.config.slo.p99_ms or 0.0
        counts = args.instances or default_counts(folder.config, cores())
        with errors.status("") as status:

            def told(point: Point) -> None:
                status.update(f"{point.instances} instances, {point.rows} rows: {point.rows_hz:,.0f} rows/s")

            found = sweep(folder, counts, args.seconds, int(slo_ms * NS_PER_MS), told)
    except ConfigError as error:
        for finding in error.findings:
            errors.print(Text(str(finding)), soft_wrap=True)
        return 1
    except HeadraceError as error:
        errors.print(Text(f"headrace tune: {error}"), soft_wrap=True)
        return 1
    if args.json:
        points = [asdict(point) for point in found.points]
        now, best = (point and asdict(point) for point in (found.now, found.best))
        console.print(json.dumps({"points": points, "now": now, "best": best}), markup=False, soft_wrap=True)
    else:
        _print(console, folder.name, found, slo_ms)
    return 0


def _print(console: Console, name: str, found: Sweep, slo_ms: float) -> None:
    counts = sorted({point.instances for point in found.points})
    table = Table("rows", *(f"{count} instance{'s' if count > 1 else ''}" for count in counts), title=name)
    by_place = {(point.instances, point.rows): point for point in found.points}
    for rows in sorted({point.rows for point in found.points}):
        cells = []
        for count in counts:
            point = by_place[count, rows]
            style = "bold green" if point == found.best else ""
            cells.append(Text(f"{point.rows_hz:,.0f}/s  {point.p95_ns / NS_PER_MS:.3g} ms", style))
        table.add_row(str(rows), *cells)
    console.print(fit_title(table, console.width))
    console.print("Rows a second of all instances together, and what 95 of 100 batches keep to.", style="dim")
    best, now = found.best, found.now
    if best is None:
        console.print(f"Nothing keeps to {slo_ms:g} ms: try a faster engine (`headrace build`), or promise less.")
        return
    within = f" within {slo_ms:g} ms" if slo_ms else ""
    console.print(f"Best{within}: {best.instances} x {best.rows} rows, {best.rows_hz:,.0f} rows/s", end="")
    if now is not None and now.rows_hz:
        told = f"{best.rows_hz / now.rows_hz:.2f} times that of the configuration ({now.instances} x {now.rows} rows)"
        console.print(f", {told}", end="")
    console.print(". In the configuration:\n")
    group = found.group.model_dump(mode="json", exclude_defaults=True, exclude={"name"}) | {"count": best.instances}
    said = ", ".join(f"{name}: {value}" for name, value in group.items())
    console.print(f"  instance_group: [{{{said}}}]", markup=False)
    if best.rows > 1:
        console.print(f"  max_batch_size: {best.rows}\n  dynamic_batching: {{}}", markup=False)


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and 0 < int(part) <= 64 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write numbers from 1 to 64, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number over 0")
    return value
