"""Output files of the run: log.txt line by line, results.json after every figure, report.md and sweep.svg after every part."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO

from loadtest.bench.report import Report, number, to_json
from loadtest.gpu.chart import sweep_chart
from loadtest.gpu.findings import PartFindings
from loadtest.gpu.messages import Sample
from loadtest.gpu.tables import to_markdown


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
        """A part begins: it takes the place of what an earlier run had found of it."""
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
            target = f", asked for {compared.target}: {compared.verdict}" if compared.target else ""
            spread = compared.spread
            span = f"({number(spread.low)} to {number(spread.high)}, {spread.rounds} rounds)"
            self.say(f"{part.name} = {compared.label}: {number(spread.median)} {compared.unit} {span}{target}")
        self.say(f"{part.name} {'FAILED: ' + part.failure if part.failure else 'done'}, {part.seconds:.1f} s")
        self.write_data()
        self._replace("report.md", to_markdown(self.parts, self.machine))
        drawn = sweep_chart(self.parts, f"resnet50, {self.machine.get('GPU 0', 'no GPU').split(',')[0]}")
        if drawn:
            self._replace("sweep.svg", drawn)

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
