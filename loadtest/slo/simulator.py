"""Accuracy of the simulator with a latency objective: the same trace, by the clock and in virtual time."""

from __future__ import annotations

from headrace.scheduling.policy import Sharing
from headrace.simulation.traces import ArrivalPattern, Trace

from loadtest.bench.results import CaseResult, Comparison, Figure, at_most
from loadtest.bench.spread import Spread
from loadtest.slo.plan import Plan, figures
from loadtest.slo.subject import (
    USUAL,
    LoadFigures,
    Setting,
    added_us,
    arrivals,
    by_the_clock,
    fixed,
    judged,
    promising,
    simulated,
)

SLO_MS = 100.0
_QUANTITIES = ("p50_ms", "p99_ms", "goodput_hz")
_BURSTS = ArrivalPattern("bursty", burst_factor=4, burst_s=0.6, calm_s=1.8)
_TENANTS = (("calm", 0.3), ("flood", 1.2))

CASES = {
    "0.5 load": (0.5, None, (), promising(SLO_MS)),
    "0.8 load": (0.8, None, (), promising(SLO_MS)),
    "1.5 load": (1.5, None, (), promising(SLO_MS)),
    "bursts, 0.7 load": (0.7, _BURSTS, (), promising(SLO_MS)),
    "two clients, 1.5 load": (1.5, None, _TENANTS, promising(SLO_MS, Sharing())),
    "fixed, 0.8 load": (0.8, None, (), fixed(delay_ms=10)),
}


def run(plan: Plan) -> CaseResult:
    """p50, p99 and goodput of both, and how far they lie apart."""
    extra_us = added_us(plan.seconds)
    case_figures: list[Figure] = []
    compared: list[Comparison] = []
    for name, (load, shape, clients, setting) in CASES.items():
        pairs = [
            both(arrivals(load, plan.seconds, seed, shape, clients), setting, extra_us) for seed in range(plan.rounds)
        ]
        real, virtual = ([pair[which] for pair in pairs] for which in (0, 1))
        case_figures += figures({f"{name}, by the clock": real, f"{name}, simulated": virtual}, _QUANTITIES)
        for quantity in _QUANTITIES:
            apart = [abs(getattr(ours, quantity) / getattr(theirs, quantity) - 1) for theirs, ours in pairs]
            compared.append(
                Comparison(f"|simulated / by the clock - 1|, {quantity}, {name}", "", Spread.of(apart), at_most(0.1))
            )
    notes = (
        USUAL.description,
        f"SLO {SLO_MS:g} ms",
        f"a batch takes {extra_us:.0f} us longer than its device on average, which is passed to the simulator",
    )
    return CaseResult(
        "simulator", "the simulator against a real run of the same trace", tuple(case_figures), tuple(compared), notes
    )


def both(trace: Trace, setting: Setting, extra_us: float) -> tuple[LoadFigures, LoadFigures]:
    """By the clock, and in virtual time."""
    return judged(by_the_clock(trace, setting), SLO_MS), judged(simulated(trace, setting, extra_us), SLO_MS)
