"""The report: targets and results, then a table for each part with a line for each contender."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loadtest.bench.report import markdown_table, number
from loadtest.bench.results import Comparison
from loadtest.bench.spread import Spread
from loadtest.gpu.findings import PartFindings
from loadtest.gpu.messages import Compare

_TARGETS = ("part", "what", "asked", "found", "")


def to_markdown(parts: Sequence[PartFindings], machine: Mapping[str, str]) -> str:
    """Everything so far.

    Args:
        parts: in their order.
        machine: label to text.
    """
    lines = []
    for command, date in dict.fromkeys((part.command, part.date) for part in parts):
        lines += [
            f"    {command}",
            "",
            f"{date}; {'; '.join(f'{label}: {text}' for label, text in machine.items())}.",
            "",
        ]
    lines += [
        "Median of the rounds, in brackets the lowest and the highest; ratios and differences are taken within a round.",
        "",
    ]
    targets = [
        (part.name, compare.label, str(found.target), _spread_text(found.spread, found.unit), found.verdict)
        for part in parts
        for compare, found in part.compared()
        if found.target
    ]
    if targets:
        lines += [*markdown_table(_TARGETS, targets), ""]
    for part in parts:
        lines += [f"**{part.name}**: {part.title}", ""]
        if part.samples:
            lines += [*_table(part), ""]
        notes = [*part.notes, *([f"FAILED: {part.failure.splitlines()[0]}"] if part.failure else [])]
        lines += [f"- {note}" for note in notes] + [""] * bool(notes)
    return "\n".join(lines)


def _table(part: PartFindings) -> list[str]:
    """A contender a line, a unit a column, and what it is beside another one."""
    units = list(dict.fromkeys(sample.unit for sample in part.samples))
    values: dict[str, dict[str, list[float]]] = {}
    for sample in part.samples:
        values.setdefault(sample.what, {}).setdefault(sample.unit, []).append(sample.value)
    most = max(len(found) for by_unit in values.values() for found in by_unit.values())
    compared = part.compared()
    columns, rows = ["", *units], []
    beside: dict[str, tuple[Compare, Comparison]] = {}
    for compare, comparison in compared:
        beside.setdefault(compare.ours, (compare, comparison))
    if beside:
        columns += [_heading(compare for compare, _ in beside.values())]
    for what, by_unit in values.items():
        cells = [_spread_text(Spread.of(by_unit[unit])) if unit in by_unit else "" for unit in units]
        fewer = min(len(found) for found in by_unit.values())
        name = what if fewer == most or most == 1 else f"{what} ({fewer} round{'s' * (fewer > 1)})"
        if beside:
            cells.append(_spread_text(beside[what][1].spread) if what in beside else "")
        rows.append((name, *cells))
    return markdown_table(columns, rows)


def _heading(compares: Iterable[Compare]) -> str:
    kinds = {(compare.kind, compare.theirs, compare.unit) for compare in compares}
    if len(kinds) > 1:
        return "ratio" if {kind for kind, _, _ in kinds} == {"ratio"} else "compared"
    ((kind, theirs, unit),) = kinds
    return f"/ {theirs}" if kind == "ratio" else f"{unit} above {theirs}"


def _spread_text(spread: Spread, unit: str = "") -> str:
    text = number(spread.median)
    if spread.rounds > 1:
        text += f" ({number(spread.low)}-{number(spread.high)})"
    return f"{text} {unit}".rstrip()
