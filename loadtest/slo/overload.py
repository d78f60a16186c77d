"""Overload: goodput at more than the device's capacity."""

from __future__ import annotations

from functools import partial

from loadtest.bench.results import CaseResult, Comparison, Figure, at_least, at_most
from loadtest.bench.session import interleave
from loadtest.bench.spread import Spread, ratios
from loadtest.slo.plan import Plan, figures
from loadtest.slo.subject import USUAL, LoadFigures, Way, arrivals, fixed, judged, promising

SLO_MS = 100.0
LOADS = (1.5, 2.0)


def run(plan: Plan) -> CaseResult:
    """Goodput of both contenders at each load."""
    case_figures: list[Figure] = []
    compared: list[Comparison] = []
    for way, (how, rounds, seconds) in plan.ways.items():
        for load in LOADS:
            found = measure(how, load, rounds, seconds)
            where = f"{load:g} x capacity, {way}"
            case_figures += figures(
                {f"{name}, {where}": each for name, each in found.items()},
                ("goodput_hz", "throughput_hz", "p50_ms", "p99_ms", "refused", "late_ms"),
            )
            compared += _compared(where, found)
    title = f"goodput of an overloaded device, SLO {SLO_MS:g} ms"
    notes = (
        f"{USUAL.description}; its capacity is what the fixed batcher answers a second in the same round, late or not",
    )
    return CaseResult("overload", title, tuple(case_figures), tuple(compared), notes)


def measure(how: Way, load: float, rounds: int, seconds: float) -> dict[str, list[LoadFigures]]:
    """Rounds by contender, interleaved; every round has a trace of its own, the same for both."""
    seeds = {"slo": iter(range(rounds)), "fixed": iter(range(rounds))}
    contenders = {"slo": promising(SLO_MS), "fixed": fixed()}

    def measured(name: str) -> LoadFigures:
        return judged(how(arrivals(load, seconds, next(seeds[name])), contenders[name]), SLO_MS)

    return interleave({name: partial(measured, name) for name in contenders}, rounds)


def _compared(where: str, runs_by_setting: dict[str, list[LoadFigures]]) -> list[Comparison]:
    slo, plain = runs_by_setting["slo"], runs_by_setting["fixed"]
    capacity_hz = [run.throughput_hz for run in plain]
    return [
        Comparison(
            f"slo: goodput / capacity, {where}",
            "",
            ratios([run.goodput_hz for run in slo], capacity_hz),
            at_least(0.9),
        ),
        Comparison(
            f"fixed: goodput / capacity, {where}",
            "",
            ratios([run.goodput_hz for run in plain], capacity_hz),
            at_most(0.2),
        ),
        Comparison(
            f"slo: p99 of what is answered / SLO, {where}",
            "",
            Spread.of([run.p99_ms / SLO_MS for run in slo]),
            at_most(1.0),
        ),
    ]
