"""Messages of a running part: one JSON object a line, on a pipe of its own, so that libraries may print anything.

{"sample": {...}}     one measurement of one contender in one round
{"compare": {...}}    two contenders to compare, and the target
{"note": text}        remark for the reader of the figures
{"machine": {...}}    label to text
{"failure": text}     reason for an early end
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
