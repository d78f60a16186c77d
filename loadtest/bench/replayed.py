"""Accuracy of the simulator: the same requests through a real data plane and through `headrace.simulation`, side by side.

    python -m loadtest.bench.replayed

The real one is a `ModelHandle` with its threads and locks, in this process; its model sleeps as long as a device of a
given speed would take. The mean overhead of a batch is measured on one trace before and passed to the simulator,
which has no other data about this machine. A case is a trace and a policy; goodput counts answers within 20 ms.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from headrace.core.clock import NS_PER_US
from headrace.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits
from headrace.simulation.replay import LatencyProfile, SimulatedModel, StepLatency, replay
from headrace.simulation.report import Figures, report
from headrace.simulation.traces import ArrivalPattern, Workload, make_trace

from loadtest.bench.clocked import Played, play
from loadtest.bench.dataplane import Device
from loadtest.bench.report import markdown_table, number
from loadtest.bench.spread import Spread, ratios

_SLO_MS = 20.0
_BATCH_US, _ROW_US, _ROWS = 2000, 200, 16
_CAPACITY_HZ = _ROWS / (_BATCH_US + _ROW_US * _ROWS) * 1e6


@dataclass(frozen=True, slots=True)
class Case:
    """A trace and a policy.

    Attributes:
        share: offered load relative to the device's capacity, on average.
        shape: how the rate changes.
        delay_us: the policy's.
        depth: batches in flight; 1: one after the other.
        queue: requests that may wait.
    """

    share: float
    shape: ArrivalPattern = field(default_factory=ArrivalPattern)
    delay_us: int = 0
    depth: int = 1
    queue: int = 4096


CASES = {
    "half load": Case(0.5),
    "half load, delay 5 ms": Case(0.5, delay_us=5000),
    "0.8 load": Case(0.8),
    "0.8 load, overlapped": Case(0.8, depth=2),
    "bursts, 0.5 load": Case(0.5, ArrivalPattern("bursty", burst_factor=4, burst_s=0.3, calm_s=1.2)),
    "1.5 load, 32 may wait": Case(1.5, queue=32),
}


def _policy(case: Case) -> HandlePolicy:
    return HandlePolicy(BatchPolicy(_ROWS, max_delay_ns=case.delay_us * NS_PER_US), QueueLimits(max_count=case.queue))


def _real(case: Case, seconds: float, seed: int) -> Played:
    load = Workload(case.share * _CAPACITY_HZ, seconds, case.shape)
    trace = make_trace(load, ["sleeper"], np.random.default_rng(seed))
    return play(trace, _policy(case), Device(_BATCH_US * NS_PER_US, _ROW_US * NS_PER_US, case.depth))


def compared(case: Case, seconds: float, seed: int, added_us: float) -> tuple[Figures, Figures]:
    """The real replay, and the simulated one.

    Args:
        case: a trace and a policy.
        seconds: how long the trace is.
        seed: of the trace.
        added_us: what a batch takes besides its time on the device.
    """
    real = _real(case, seconds, seed).replay
    profile = LatencyProfile(StepLatency.line(_BATCH_US, _ROW_US), fill=StepLatency.line(added_us))
    simulated = replay(real.trace, [SimulatedModel(_policy(case), profile, case.depth)])
    return report(real, [_SLO_MS]).total, report(simulated, [_SLO_MS]).total


def _by_name(figures: Figures) -> dict[str, float]:
    p50_us, _, p99_us, _ = figures.percentiles_us
    return {
        "p50 ms": p50_us / 1000,
        "p99 ms": p99_us / 1000,
        "goodput/s": figures.goodput_hz or 0.0,
        "rows a batch": figures.mean_rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="a trace takes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="traces of each case (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="cases by name")
    options = parser.parse_args(arguments)
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # as the server has it
    before = _real(Case(0.5), options.seconds, seed=options.rounds)
    added_us = statistics.fmean(before.added_ns) / NS_PER_US
    lines = []
    for name, case in CASES.items():
        if options.only and name not in options.only:
            continue
        rounds = [compared(case, options.seconds, seed, added_us) for seed in range(options.rounds)]
        real, simulated = ([_by_name(figures) for figures in column] for column in zip(*rounds, strict=True))
        for what in real[0]:
            ours, theirs = [each[what] for each in simulated], [each[what] for each in real]
            ratio = ratios(ours, theirs)
            ratio_text = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            lines.append((name, what, number(Spread.of(theirs).median), number(Spread.of(ours).median), ratio_text))
    print(f"a batch takes {added_us:.0f} us longer than its device, on average\n")
    print("\n".join(markdown_table(("case", "", "real", "simulated", "simulated / real"), lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
