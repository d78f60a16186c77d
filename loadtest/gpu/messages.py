"""What a part tells while it runs: one JSON object a line, on a pipe of its own, so that libraries may print what they like.

{"sample": {...}}     one measurement of one contender in one round
{"compare": {...}}    which two contenders are held against each other, and what should come of it
{"note": text}        what a reader has to know beside the figures
{"machine": {...}}    label to text
{"failure": text}     why there is nothing more
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Literal

from loadtest.bench.results import Target

Kind = Literal["ratio", "difference"]


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
        descriptor: where to write; kept open by whoever opened it.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def sample(self, what: str, unit: str, value: float, number: int = 0, **detail: float | str) -> None:
        """Tell a measurement of round `number`."""
        self._tell("sample", asdict(Sample(what, unit, float(value), number, detail)))

    def compare(self, compare: Compare) -> None:
        """Tell what is to be held against what; the samples may come later. One of the same label takes its place."""
        self._tell("compare", asdict(compare))

    def note(self, text: str) -> None:
        """Tell what a reader has to know."""
        self._tell("note", text)

    def machine(self, told: dict[str, str]) -> None:
        """Tell where this runs."""
        self._tell("machine", told)

    def failure(self, text: str) -> None:
        """Tell why the part ends here."""
        self._tell("failure", text)

    def _tell(self, kind: str, content: object) -> None:
        data = json.dumps({kind: content}).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]
