"""Two clients of one model, of which one floods it: what the other notices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from headrace.scheduling.policy import Sharing
from headrace.simulation.traces import Trace

from loadtest.bench.results import CaseResult, Comparison, Figure, at_least, at_most
from loadtest.bench.session import interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.slo.plan import Plan, figures
from loadtest.slo.subject import (
    SLOWED_H200,
    USUAL,
    Setting,
    Speed,
    Told,
    Way,
    arrivals,
    by_the_clock,
    fixed,
    judged,
    promising,
)

SLO_MS = 100.0
# Of the capacity: what the quiet client asks for (less than its half), and what the other one does.
CALM, FLOOD = 0.3, 2.0


def run(plan: Plan) -> CaseResult:
    """The quiet client's latencies alone, beside the flood, and beside it without shares."""
    told: list[Figure] = []
    compared: list[Comparison] = []
    for speed in (SLOWED_H200, USUAL):
        for way, (how, rounds, seconds) in plan.ways.items():
            if speed is USUAL and how is by_the_clock:
                continue  # it shows only what cannot be helped
            found = measure(how, speed, rounds, seconds)
            where = f"{speed.rows} rows, {way}"
            told += figures(
                {f"{name}, {where}": each for name, each in found.items()},
                ("goodput_hz", "p50_ms", "p99_ms", "refused"),
            )
            compared += _compared(where, found, 1.2 if speed is SLOWED_H200 else None)
    title = f"a client that asks for {CALM:g} of the capacity beside one that asks for {FLOOD:g}"
    notes = (
        f"8 rows: {SLOWED_H200.told}",
        f"32 rows: {USUAL.told}. Beside a flood all batches are full, and none is interrupted: who comes waits for one, runs in "
        "the next, 48 ms here, where alone two small ones take 22 ms. No order of serving changes that",
        f"SLO {SLO_MS:g} ms",
    )
    return CaseResult("tenants", title, tuple(told), tuple(compared), notes)


@dataclass(frozen=True, slots=True)
class _Contender:
    setting: Setting
    flooded: bool


def measure(how: Way, speed: Speed, rounds: int, seconds: float) -> dict[str, list[Told]]:
    """Rounds by contender, of the quiet client only; it asks the same at the same times whether or not there is a flood."""
    shared = promising(SLO_MS, Sharing(), speed)
    contenders = {
        "alone": _Contender(shared, False),
        "beside a flood": _Contender(shared, True),
        "fixed, beside a flood": _Contender(fixed(speed=speed), True),
    }
    seeds = {name: iter(range(rounds)) for name in contenders}

    def measured(name: str) -> Told:
        contender = contenders[name]
        trace = asked(speed, seconds, next(seeds[name]), contender.flooded)
        return judged(how(trace, contender.setting), SLO_MS, "calm")

    return interleave({name: partial(measured, name) for name in contenders}, rounds)


def asked(speed: Speed, seconds: float, seed: int, flooded: bool) -> Trace:
    """Both clients' requests, or the quiet one's alone."""
    trace = arrivals(CALM + FLOOD, seconds, seed, clients=(("calm", CALM), ("flood", FLOOD)), speed=speed)
    assert trace.clients is not None
    return trace if flooded else trace.of(trace.clients == 0)


def _compared(where: str, found: dict[str, list[Told]], bound: float | None) -> list[Comparison]:
    alone, beside, plain = (found[name] for name in ("alone", "beside a flood", "fixed, beside a flood"))
    return [
        Comparison(
            f"p99 beside a flood / alone, {where}",
            "",
            ratios([told.p99_ms for told in beside], [told.p99_ms for told in alone]),
            at_most(bound) if bound else None,
        ),
        Comparison(
            f"goodput beside a flood / alone, {where}",
            "",
            ratios([told.goodput_hz for told in beside], [told.goodput_hz for told in alone]),
            at_least(0.98),
        ),
        Comparison(
            f"p99 beside a flood, fixed / slo, {where}",
            "",
            Spread.of([a.p99_ms / b.p99_ms for a, b in zip(plain, beside, strict=True)]),
        ),
    ]
