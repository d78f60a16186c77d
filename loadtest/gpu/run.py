"""The parts of a run, one after the other, and how long each may take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from loadtest.gpu import place
from loadtest.gpu.parts import PARTS, PREPARE, TWO_GPUS, Part, engine_name
from loadtest.gpu.report import Output, PartFindings
from loadtest.gpu.setup import Setup
from loadtest.gpu.table import TABLE
from loadtest.gpu.watch import watch
from loadtest.gpu.wire import remove_left

BY_LETTER = {part.letter: part for part in (*PARTS, TWO_GPUS, TABLE)}
BY_NAME = {part.run.__name__: part for part in (PREPARE, *BY_LETTER.values())}


@dataclass(frozen=True, slots=True)
class Step:
    """One part for one precision; engines are prepared for several at once where there are GPUs enough."""

    part: Part
    precisions: tuple[str, ...]

    @property
    def name(self) -> str:
        """As logs and reports have it, e.g. "b fp16"."""
        return " ".join((self.part.letter, *self.precisions))

    def usual_s(self, gpus: int) -> float:
        """Usual duration in seconds."""
        if self.part is PREPARE:
            return self.part.usual_s * ceil(len(self.precisions) / gpus)
        return self.part.usual(self.precisions[0])


def steps_of(only: Sequence[tuple[str, str]], precisions: Sequence[str], gpus: int) -> list[Step]:
    """Return the steps in order.

    Args:
        only: letters of parts, each with a precision or ""; empty: all but two-gpus and table. If any has a precision,
            their order is kept; else the first precision is complete before the next one begins, should the time run out.
        precisions: of the parts that name none.
        gpus: engines that can be built at the same time.
    """
    if any(precision for _, precision in only):
        wanted = [
            (BY_LETTER[letter], precision)
            for letter, requested in only
            for precision in ([requested] if requested else precisions)
        ]
    else:
        letters = {letter for letter, _ in only} or {part.letter for part in PARTS}
        chosen = [part for part in BY_LETTER.values() if part.letter in letters]
        wanted = [(part, precision) for precision in precisions for part in chosen]
    needed = list(dict.fromkeys(precision for _, precision in wanted))
    steps = [Step(part, (precision,)) for part, precision in wanted]
    if len(needed) <= gpus:
        return [Step(PREPARE, tuple(needed)), *steps]
    for precision in needed:
        at = next(n for n, step in enumerate(steps) if step.precisions == (precision,))
        steps.insert(at, Step(PREPARE, (precision,)))
    return steps


class Run:
    """The parts, as long as there is time.

    A part that takes longer than usual uses spare time, and never the usual time of the parts after it.

    Args:
        output: files of the run.
        setup: of all parts; the precision is theirs.
        deadline_s: on the clock, when the run must be over.
        run_part: as `watch`.
        clock: in seconds.
    """

    def __init__(
        self,
        output: Output,
        setup: Setup,
        deadline_s: float,
        run_part: Callable[..., str] = watch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._output = output
        self._setup = setup
        self._deadline_s = deadline_s
        self._run_part = run_part
        self._clock = clock

    def all(self, steps: Sequence[Step]) -> None:
        """Do everything; a part whose engine is missing is left out."""
        built = set[str]()
        for number, step in enumerate(steps):
            later_s = sum(other.usual_s(len(self._setup.gpus)) for other in steps[number + 1 :])
            if step.part is PREPARE:
                medians = self._one(step, later_s).medians("s to build or find")
                built |= {precision for precision in step.precisions if engine_name(precision) in medians}
            elif step.precisions[0] not in built:
                self._output.say(f"{step.name} is left out: its engine could not be built")
            else:
                self._one(step, later_s)

    def _one(self, step: Step, later_s: float) -> PartFindings:
        """One part in its process; what goes wrong is its finding."""
        output, part, begun_s = self._output, step.part, self._clock()
        findings = PartFindings(step.name, part.title)
        output.begin(findings)
        left_s = self._deadline_s - begun_s
        if left_s < part.least_s:
            findings.failure = "no time was left: raise --limit-s, or measure fewer parts by --only"
        else:
            output.say(f"{findings.name}: {part.title}")
            limit_s = min(part.limit_s, left_s, max(step.usual_s(len(self._setup.gpus)), left_s - later_s))
            self._watched(step, findings, limit_s)
            remove_left()
            if self._setup.on_gpu:
                output.say(f"{findings.name} | the GPUs now: {'; '.join(place.states())}")
        findings.seconds = round(self._clock() - begun_s, 1)
        output.part_ended(findings)
        return findings

    def _watched(self, step: Step, findings: PartFindings, limit_s: float) -> None:
        output = self._output
        several = step.part in (PREPARE, TWO_GPUS) or not self._setup.on_gpu
        setup = replace(self._setup, precision=step.precisions[0], precisions=step.precisions, limit_s=limit_s)
        setup = setup if several else replace(setup, gpus=(0,))
        command = [sys.executable, "-u", "-m", "loadtest.gpu.part_process", step.part.run.__name__]
        command += ["--setup", setup.to_json()]

        def on_message(kind: str, content: object) -> None:
            findings.take(kind, content)
            if kind == "sample":
                output.figure(findings, findings.samples[-1])
            elif kind == "machine" and isinstance(content, dict):
                output.machine |= content
            elif kind == "note":
                output.say(f"{findings.name} | {content}")

        environment = {} if several else place.seeing(0)
        reason = self._run_part(command, limit_s, output.log, on_message, environment)
        findings.failure = findings.failure or reason
