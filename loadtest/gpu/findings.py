"""Results of the parts so far, and conclusions from them; valid at any moment, however much is still missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from loadtest.bench.results import CaseResult, Comparison, Figure, Target
from loadtest.bench.spread import Spread
from loadtest.gpu.messages import Compare, Sample


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
