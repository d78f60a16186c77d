"""Assertions of the soak, one verdict each; pure functions of the record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.soak.ledger import Event, Line, Outcome, times_between, total
from loadtest.soak.models import APART, LARGEST_BATCH, PICTURES, STEADY, UNDISTURBED
from loadtest.soak.operations import KILL, Operator
from loadtest.soak.watch import Counted, Held, Quiet

# Never reloaded, so the server counts them from its start: its counts can be compared with those of the clients.
_ACCOUNTED = (STEADY, PICTURES, APART)
_MIB = 1 << 20
_LEAST_PHASES = 3


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of changes from the end of the warm-up to the end.

    Attributes:
        memory_bytes: resident memory of the quiet server; allocators keep a little.
        memory_share: the same, of what it held after the warm-up; the larger of both counts.
        descriptors, threads: of the quiet server.
        p99_ratio: of the later phases to the earlier ones, each by their median.
        p99_slack_s: and so much above that.
    """

    memory_bytes: int = 24 * _MIB
    memory_share: float = 0.05
    descriptors: int = 2
    threads: int = 2
    p99_ratio: float = 1.5
    p99_slack_s: float = 0.010


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that was written down.

    Attributes:
        lines: of the ledger.
        details: of what ended badly.
        events: what was done to the server.
        phases: the first is the warm-up.
        samples: what the server held all the time.
        counted: the server's counters at the end.
        tracebacks: lines of the server's log in which it did not expect what happened.
    """

    lines: Sequence[Line]
    details: Sequence[str]
    events: Sequence[Event]
    phases: Sequence[Quiet]
    samples: Sequence[Held]
    counted: Counted
    tracebacks: Sequence[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One assertion, whether it held, and the figures."""

    name: str
    passed: bool
    found: str


def verdicts(run: Run, bounds: Bounds) -> list[Verdict]:
    """All of them; each is independent of the others."""
    return [
        _lost(run),
        _accounts(run),
        _wrong(run),
        _under_way(run),
        _memory(run, bounds),
        _descriptors(run, bounds),
        _flat("threads flat", [phase.held.threads for phase in run.phases], bounds.threads),
        _p99(run, bounds),
        _disturbed(run),
        _log(run),
    ]


def phase_p99s(run: Run) -> list[float]:
    """In seconds, of each phase, of the undisturbed requests; nan for one without an answer."""
    lines = [line for line in run.lines if line.model in UNDISTURBED and line.way in ("HTTP", "gRPC", "stream")]
    times = [times_between(lines, phase.start_s, phase.end_s) for phase in run.phases]
    return [float(np.percentile(each, 99)) if len(each) else float("nan") for each in times]


def _lost(run: Run) -> Verdict:
    sent = total(run.lines, *Outcome)
    lost = total(run.lines, Outcome.LOST)
    return Verdict("nothing lost", lost == 0 < sent, f"{sent:,} requests, {lost:,} without an answer")


def _accounts(run: Run) -> Verdict:
    """Answers that the server counts have been received, unless the client had disconnected."""
    wrong, counts = [], []
    for model in _ACCOUNTED:
        received = total(run.lines, Outcome.RIGHT, Outcome.WRONG, model=model)
        gone = total(run.lines, Outcome.LEFT, model=model)
        answered = run.counted.answered.get(model, 0)
        counts.append(f"{model} {answered:,}")
        if not received <= answered <= received + gone or not received:
            wrong.append(f"{model}: {answered:,} by the server, {received:,} received, {gone:,} had left")
    return Verdict("the server's own count agrees", not wrong, "; ".join(wrong) or "answered: " + ", ".join(counts))


def _wrong(run: Run) -> Verdict:
    right, wrong = total(run.lines, Outcome.RIGHT), total(run.lines, Outcome.WRONG)
    failed, struck = total(run.lines, Outcome.FAILED), total(run.lines, Outcome.STRUCK)
    kills = sum(event.name == KILL for event in run.events)
    found = f"{right:,} answers compared, {wrong:,} wrong, {failed:,} unexpected errors"
    found += f", {struck:,} answered that their process was killed ({kills} were)"
    return Verdict("nothing wrong", wrong == failed == 0 < right and struck <= kills * LARGEST_BATCH, found)


def _under_way(run: Run) -> Verdict:
    left = [phase.in_flight + phase.queued for phase in run.phases]
    found = f"{max(left, default=0)} requests in flight or queued after all clients have disconnected"
    return Verdict("nothing left behind", bool(left) and not any(left), found)


def _memory(run: Run, bounds: Bounds) -> Verdict:
    held = [phase.held.memory_bytes for phase in run.phases]
    if len(held) < _LEAST_PHASES:
        return Verdict("memory flat", False, f"{len(held)} phases are too few for a verdict")
    allowed = max(bounds.memory_bytes, bounds.memory_share * held[0])
    grown = held[-1] - held[0]
    found = f"{held[0] / _MIB:,.1f} MiB after the warm-up, {held[-1] / _MIB:,.1f} at the end; allowed +{allowed / _MIB:,.1f}"
    return Verdict("memory flat", grown <= allowed, found)


def _descriptors(run: Run, bounds: Bounds) -> Verdict:
    """And of which kind there are more than there were."""
    verdict = _flat("descriptors flat", [phase.held.descriptors for phase in run.phases], bounds.descriptors)
    first, last = (run.phases[0].open_files, run.phases[-1].open_files) if run.phases else ({}, {})
    more = [f"{kind} {first.get(kind, 0)} -> {count}" for kind, count in last.items() if count > first.get(kind, 0)]
    return Verdict(verdict.name, verdict.passed, "; ".join([verdict.found, *more]))


def _flat(name: str, held: Sequence[int], allowed: int) -> Verdict:
    if len(held) < _LEAST_PHASES:
        return Verdict(name, False, f"{len(held)} phases are too few for a verdict")
    found = f"{held[0]} after the warm-up, {held[-1]} at the end, {max(held)} at most; allowed +{allowed}"
    return Verdict(name, held[-1] - held[0] <= allowed, found)


def _p99(run: Run, bounds: Bounds) -> Verdict:
    measured = phase_p99s(run)[1:]
    if len(measured) < _LEAST_PHASES - 1 or not all(each == each for each in measured):
        return Verdict("p99 stable", False, "there is not a p99 for every phase")
    middle = len(measured) // 2
    early, late = statistics.median(measured[:middle]), statistics.median(measured[-middle:])
    allowed = early * bounds.p99_ratio + bounds.p99_slack_s
    found = f"{early * 1e3:.1f} ms in the first half, {late * 1e3:.1f} ms in the second; allowed {allowed * 1e3:.1f} ms"
    return Verdict("p99 stable", late <= allowed, found)


def _disturbed(run: Run) -> Verdict:
    """A soak in which nothing happens proves nothing."""
    done = {name: sum(event.name == name for event in run.events) for name in dict.fromkeys(Operator.STEPS)}
    left, refused = total(run.lines, Outcome.LEFT), total(run.lines, Outcome.REFUSED)
    missing = [name for name, count in done.items() if count < len(run.phases) * Operator.STEPS.count(name)]
    enough = run.phases and not missing and left and refused and run.counted.restarts >= done[KILL]
    reloads = done["reload"] + done["reload over gRPC"]
    found = f"{reloads} reloads, {done['broken']} broken files, {done['unload']} unloads, {done[KILL]} processes killed"
    found += f" ({run.counted.restarts} replaced), {left:,} requests left, {refused:,} refused"
    return Verdict("disturbed enough", bool(enough), found + "".join(f"; too few: {name}" for name in missing))


def _log(run: Run) -> Verdict:
    found = f"{len(run.tracebacks)} tracebacks"
    return Verdict("the log expects everything", not run.tracebacks, "; ".join([found, *run.tracebacks[:3]]))
