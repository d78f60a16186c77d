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
    LoadFigures,
    Setting,
    Speed,
    Way,
    arrivals,
    by_the_clock,
    fixed,
    judged,
    promising,
)

SLO_MS = 100.0
# Offered load relative to the capacity: of the quiet client (less than its half), and of the other one.
CALM, FLOOD = 0.3, 2.0


def run(plan: Plan) -> CaseResult:
    """The quiet client's latencies alone, beside the flood, and beside it without shares."""
    case_figures: list[Figure] = []
    compared: list[Comparison] = []
    for speed in (SLOWED_H200, USUAL):
        for way, (how, rounds, seconds) in plan.ways.items():
            if speed is USUAL and how is by_the_clock:
                continue  # it shows only what cannot be helped
            found = measure(how, speed, rounds, seconds)
            where = f"{speed.rows} rows, {way}"
            case_figures += figures(
                {f"{name}, {where}": each for name, each in found.items()},
                ("goodput_hz", "p50_ms", "p99_ms", "refused"),
            )
            compared += _compared(where, found, 1.2 if speed is SLOWED_H200 else None)
    title = f"a client that asks for {CALM:g} of the capacity beside one that asks for {FLOOD:g}"
    notes = (
        f"8 rows: {SLOWED_H200.description}",
        f"32 rows: {USUAL.description}. Beside a flood all batches are full, and none is interrupted: a new one waits, runs in "
        "the next, 48 ms here, where alone two small ones take 22 ms. No order of serving changes that",
        f"SLO {SLO_MS:g} ms",
    )
    return CaseResult("tenants", title, tuple(case_figures), tuple(compared), notes)


@dataclass(frozen=True, slots=True)
class _Contender:
    setting: Setting
    flooded: bool


def measure(how: Way, speed: Speed, rounds: int, seconds: float) -> dict[str, list[LoadFigures]]:
    """Rounds by contender, of the quiet client only; it sends the same requests at the same times with and without a flood."""
    shared = promising(SLO_MS, Sharing(), speed)
    contenders = {
        "alone": _Contender(shared, False),
        "beside a flood": _Contender(shared, True),
        "fixed, beside a flood": _Contender(fixed(speed=speed), True),
    }
    seeds = {name: iter(range(rounds)) for name in contenders}

    def measured(name: str) -> LoadFigures:
        contender = contenders[name]
        trace = client_trace(speed, seconds, next(seeds[name]), contender.flooded)
        return judged(how(trace, contender.setting), SLO_MS, "calm")

    return interleave({name: partial(measured, name) for name in contenders}, rounds)


def client_trace(speed: Speed, seconds: float, seed: int, flooded: bool) -> Trace:
    """Both clients' requests, or the quiet one's alone."""
    trace = arrivals(CALM + FLOOD, seconds, seed, clients=(("calm", CALM), ("flood", FLOOD)), speed=speed)
    assert trace.clients is not None
    return trace if flooded else trace.of(trace.clients == 0)


def _compared(where: str, runs_by_setting: dict[str, list[LoadFigures]], bound: float | None) -> list[Comparison]:
    alone, beside, plain = (runs_by_setting[name] for name in ("alone", "beside a flood", "fixed, beside a flood"))
    return [
        Comparison(
            f"p99 beside a flood / alone, {where}",
            "",
            ratios([run.p99_ms for run in beside], [run.p99_ms for run in alone]),
            at_most(bound) if bound else None,
        ),
        Comparison(
            f"goodput beside a flood / alone, {where}",
            "",
            ratios([run.goodput_hz for run in beside], [run.goodput_hz for run in alone]),
            at_least(0.98),
        ),
        Comparison(
            f"p99 beside a flood, fixed / slo, {where}",
            "",
            Spread.of([a.p99_ms / b.p99_ms for a, b in zip(plain, beside, strict=True)]),
        ),
    ]
