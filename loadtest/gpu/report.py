"""Reports of a running part, and the results made of them: figures and comparisons, tables, files.

A part sends one JSON object a line, on a pipe of its own, so that libraries may print anything.

{"sample": {...}}     one measurement of one contender in one round
{"compare": {...}}    two contenders to compare, and the target
{"note": text}        remark for the reader of the figures
{"machine": {...}}    label to text
{"failure": text}     reason for an early end

The results are valid at any moment, however much is still missing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from loadtest.bench.report import Report, markdown_table, number, to_json
from loadtest.bench.results import CaseResult, Comparison, Figure, Spread, Target

Kind = Literal["ratio", "difference"]
_TARGETS = ("part", "comparison", "target", "median", "")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        what: the contender.
        unit: of the value, e.g. "images/s".
        value: what was found.
        round: that it was measured in; what is compared is compared within a round.
        detail: more of the same moment, e.g. the mean batch, for the log and the JSON.
    """

    what: str
    unit: str
    value: float
    round: int = 0
    detail: dict[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Compare:
    """Two contenders side by side: ours over theirs, or ours minus theirs, round by round.

    Attributes:
        label: what the report calls it.
        ours, theirs: contenders, as samples name them.
        unit: of the samples that are compared.
        kind: what is made of the two.
        target: what the median should be.
    """

    label: str
    ours: str
    theirs: str
    unit: str
    kind: Kind = "ratio"
    target: Target | None = None


class Reporter:
    """The part's end of the pipe.

    Args:
        descriptor: where to write; stays open.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def sample(self, what: str, unit: str, value: float, number: int = 0, **detail: float | str) -> None:
        """Report a measurement of round `number`."""
        self._send("sample", asdict(Sample(what, unit, float(value), number, detail)))

    def compare(self, compare: Compare) -> None:
        """Report a comparison; the samples may come later. One of the same label replaces it."""
        self._send("compare", asdict(compare))

    def note(self, text: str) -> None:
        """Report a remark for the reader."""
        self._send("note", text)

    def machine(self, properties: dict[str, str]) -> None:
        """Report the machine's properties."""
        self._send("machine", properties)

    def failure(self, text: str) -> None:
        """Report the reason for an early end."""
        self._send("failure", text)

    def _send(self, kind: str, content: object) -> None:
        data = json.dumps({kind: content}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


@dataclass(slots=True, eq=False)
class PartFindings:
    """One part of the run.

    Attributes:
        name: letter and precision, e.g. "b fp16".
        title: what is measured, in a line.
        samples: in the order in which they were taken.
        compares: comparisons between contenders.
        notes: remarks for the reader.
        failure: reason for an early end, "" if complete.
        seconds: that it took.
        command: of the run that it belongs to.
        date: of that run.
    """

    name: str
    title: str
    samples: list[Sample] = field(default_factory=list)
    compares: list[Compare] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
    command: str = ""
    date: str = ""

    @classmethod
    def from_plain(cls, document: Mapping[str, Any]) -> PartFindings:
        """Read the result of `asdict`."""
        lists = ("samples", "compares")
        part = cls(**{name: value for name, value in document.items() if name not in lists})
        for kind, name in (("sample", "samples"), ("compare", "compares")):
            for content in document[name]:
                part.take(kind, content)
        return part

    def take(self, kind: str, content: Any) -> None:
        """One message of the part; those about the machine are not for it."""
        match kind:
            case "sample":
                self.samples.append(Sample(**content))
            case "compare":
                target = Target(**content["target"]) if content["target"] else None
                compare = Compare(**{**content, "target": target})
                self.compares = [other for other in self.compares if other.label != compare.label] + [compare]
            case "note":
                self.notes.append(content)
            case "failure":
                self.failure = content

    def medians(self, unit: str) -> dict[str, float]:
        """By contender, of all samples in a unit."""
        found: dict[str, list[float]] = {}
        for sample in self.samples:
            if sample.unit == unit:
                found.setdefault(sample.what, []).append(sample.value)
        return {what: Spread.of(values).median for what, values in found.items()}

    def result(self) -> CaseResult:
        """Result for the report; a failed part keeps the figures that it has reported."""
        values: dict[tuple[str, str], list[float]] = {}
        for sample in self.samples:
            values.setdefault((sample.what, sample.unit), []).append(sample.value)
        figures = tuple(Figure(what, unit, Spread.of(found)) for (what, unit), found in values.items())
        comparisons = tuple(comparison for _, comparison in self.compared())
        notes = [*self.notes, *([f"FAILED: {self.failure}"] if self.failure else [])]
        return CaseResult(
            self.name, self.title, figures, comparisons, tuple(notes), self.failure if not figures else ""
        )

    def compared(self) -> list[tuple[Compare, Comparison]]:
        """Result of each comparison; those whose contenders share no round are left out."""
        found = ((compare, self._compared(compare)) for compare in self.compares)
        return [(compare, comparison) for compare, comparison in found if comparison is not None]

    def _compared(self, compare: Compare) -> Comparison | None:
        """None where no round has both."""
        ours, theirs = ({s.round: s.value for s in self.samples if (s.what, s.unit) == (what, compare.unit)}
                        for what in (compare.ours, compare.theirs))  # fmt: skip
        pairs = [(ours[number], theirs[number]) for number in sorted(ours.keys() & theirs.keys())]
        if compare.kind == "ratio":
            found, unit = [a / b for a, b in pairs if b], ""
        else:
            found, unit = [a - b for a, b in pairs], compare.unit
        return Comparison(compare.label, unit, Spread.of(found), compare.target) if found else None


def missed(parts: Iterable[PartFindings]) -> bool:
    """Whether any target was missed."""
    return any(part.result().missed for part in parts)


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
    remarks: dict[str, list[str]] = {}
    for sample in part.samples:
        if text := sample.detail.get("remark"):
            remarks.setdefault(sample.what, []).append(str(text))
    most = max(len(found) for by_unit in values.values() for found in by_unit.values())
    compared = part.compared()
    columns, rows = ["", *units], []
    beside: dict[str, tuple[Compare, Comparison]] = {}
    for compare, comparison in compared:
        beside.setdefault(compare.ours, (compare, comparison))
    if beside:
        columns += [_heading(compare for compare, _ in beside.values())]
    columns += ["remark"] * bool(remarks)
    for what, by_unit in values.items():
        cells = [_spread_text(Spread.of(by_unit[unit])) if unit in by_unit else "" for unit in units]
        fewer = min(len(found) for found in by_unit.values())
        name = what if fewer == most or most == 1 else f"{what} ({fewer} round{'s' * (fewer > 1)})"
        if beside:
            cells.append(_spread_text(beside[what][1].spread) if what in beside else "")
        if remarks:
            cells.append("; ".join(dict.fromkeys(remarks.get(what, []))))
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


class Output:
    """The folder of one run; everything is written as soon as it is known.

    Args:
        folder: created if missing.
        command: as it was typed.
        add: keep the parts that are in the folder, but for those that this run measures again.

    Attributes:
        log: of the run; the parts' processes write into it too.
        machine: label to text.
        parts: in the order in which they ran, those of earlier runs first.
    """

    def __init__(self, folder: Path, command: str, *, add: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._command = command
        self._date = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._begun_s = time.monotonic()
        self.log: IO[bytes] = (folder / "log.txt").open("ab", buffering=0)
        self.machine: dict[str, str] = {}
        self.parts: list[PartFindings] = []
        if not add:
            self.log.truncate(0)
        elif (folder / "results.json").exists():
            whole = json.loads((folder / "results.json").read_text())
            self.machine |= whole["machine"]
            self.parts += map(PartFindings.from_plain, whole["parts"])

    def begin(self, part: PartFindings) -> None:
        """Begin a part, which replaces the results of an earlier run."""
        part.command, part.date = self._command, self._date
        self.parts = [other for other in self.parts if other.name != part.name] + [part]

    def say(self, text: str) -> None:
        """A line on the terminal and in the log."""
        line = f"[{time.monotonic() - self._begun_s:6.1f} s] {text}"
        print(line, flush=True)
        self.log.write(line.encode(errors="replace") + b"\n")

    def figure(self, part: PartFindings, sample: Sample) -> None:
        """A figure has come."""
        detail = "".join(f", {name} {value}" for name, value in sample.detail.items())
        self.say(f"{part.name} | {sample.what} | round {sample.round} | {number(sample.value)} {sample.unit}{detail}")
        self.write_data()

    def part_ended(self, part: PartFindings) -> None:
        """Print what follows from a part, and write the report anew."""
        result = part.result()
        for compared in result.comparisons:
            target = f", target {compared.target}: {compared.verdict}" if compared.target else ""
            spread = compared.spread
            span = f"({number(spread.low)} to {number(spread.high)}, {spread.rounds} rounds)"
            self.say(f"{part.name} = {compared.label}: {number(spread.median)} {compared.unit} {span}{target}")
        self.say(f"{part.name} {'FAILED: ' + part.failure if part.failure else 'done'}, {part.seconds:.1f} s")
        self.write_data()
        self._replace("report.md", to_markdown(self.parts, self.machine))

    def write_data(self) -> None:
        """Everything so far as JSON."""
        whole = json.loads(to_json(self._report()))
        whole["parts"] = [asdict(part) for part in self.parts]
        self._replace("results.json", json.dumps(whole, indent=1) + "\n")

    def _report(self) -> Report:
        results: Sequence = [part.result() for part in self.parts]  # type: ignore[type-arg]
        return Report(self._command, self._date, self.machine, results)

    def _replace(self, name: str, text: str) -> None:
        beside = self._folder / f".{name}"
        beside.write_text(text)
        os.replace(beside, self._folder / name)
