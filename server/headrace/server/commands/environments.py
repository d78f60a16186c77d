"""`headrace environments list | prune`: list the Python environments of models, and remove those that no server uses."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace_reports.command_line import number_parser, open_console, plain_table
from rich.text import Text

_UNUSED_DAYS = 30
_DAY_S = 86_400.0
_days = number_parser(float, lambda number: 0 <= number < 1e5, "is not a number of days")


def add_arguments(
    parser: argparse.ArgumentParser, declare: Sequence[Callable[[argparse.ArgumentParser], None]]
) -> None:
    """Declare the commands and their options.

    Args:
        parser: of `headrace environments`.
        declare: functions that declare the options of the server which name the folder.
    """
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="environments_command")
    lines = commands.add_parser("list", help="list the environments with their size and last use")
    prune = commands.add_parser("prune", help="remove environments that no server uses")
    text = "last used at least N days ago (%(default)s; 0: all); incomplete ones are always removed"
    prune.add_argument("--unused-days", type=_days, default=_UNUSED_DAYS, metavar="N", help=text)
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")
    for command in (lines, prune):
        for add in declare:
            add(command)


def main(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from headrace.python.environments import environments_root

    root = environments_root(args.environments_dir, Path(args.state_dir) if args.state_dir else None)
    if root is None:
        text = "headrace: there is no folder of environments: write --environments-dir DIR or --state-dir DIR"
        open_console(stderr=True, highlight=False).print(text, style="red", markup=False)
        return 1
    root = root.expanduser()
    try:
        return {"list": _list, "prune": _prune}[args.environments_command](args, root)
    except OSError as error:
        text = f"headrace: {error.filename or root}: {error.strerror or error}"
        open_console(stderr=True, highlight=False).print(text, style="red", markup=False)
        return 1


def _list(_args: argparse.Namespace, root: Path) -> int:
    from headrace.python.environments import list_environments

    console = open_console(highlight=False)
    table = plain_table("environment", "Python", "NumPy", "size", "last use", "made of")
    entries = list_environments(root)
    for entry in entries:
        facts = entry.facts
        used = "in use" if entry.in_use else f"{max(time.time() - entry.used_s, 0) / _DAY_S:.0f} days ago"
        cells = ("incomplete", "", "") if facts is None else (facts.python, facts.numpy, facts.source)
        table.add_row(*map(Text, (entry.name, cells[0], cells[1], _mebibytes(entry.bytes), used, cells[2])))
    console.print(table if entries else f"{root} has no environments", markup=False)
    return 0


def _prune(args: argparse.Namespace, root: Path) -> int:
    from headrace.python.environments import EnvironmentEntry, list_environments, prune_environments

    latest = time.time() - args.unused_days * _DAY_S

    def is_unused(entry: EnvironmentEntry) -> bool:
        return entry.facts is None or entry.used_s <= latest

    if args.dry_run:
        entries = [entry for entry in list_environments(root) if not entry.in_use and is_unused(entry)]
    else:
        entries = prune_environments(root, is_unused)
    console = open_console(highlight=False)
    for entry in entries:
        console.print(f"{entry.name}  {_mebibytes(entry.bytes)}", markup=False)
    verb = "would be removed" if args.dry_run else "removed"
    size = _mebibytes(sum(entry.bytes for entry in entries))
    console.print(f"{len(entries)} environments {verb}, {size}", markup=False)
    return 0


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
