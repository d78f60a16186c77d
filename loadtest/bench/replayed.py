"""Accuracy of the simulator: the same requests through a real data plane and through `headrace.simulation`, side by side.

    python -m loadtest.bench.replayed

The real one is a `ModelHandle` with its threads and locks, in this process; its model sleeps as long as a device of a
given speed would take. The mean overhead of a batch is measured on one trace before and passed to the simulator,
which has no other data about this machine. A case is a trace and a policy; goodput counts answers within 20 ms.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence

from headrace.core.clock import NS_PER_US
from headrace.scheduling.policy import BatchPolicy, HandlePolicy, QueueLimits
from headrace.simulation.traces import ArrivalPattern

from loadtest.bench.report import markdown_table, number
from loadtest.bench.results import values_of
from loadtest.bench.spread import Spread, ratios
from loadtest.slo.parts import both
from loadtest.slo.subject import Setting, Speed, added_us, arrivals

_SLO_MS = 20.0
_SPEED = Speed(2000, 200, 16, "a device that takes 2 ms a batch and 0.2 ms a row")
_QUANTITIES = {"p50_ms": "p50 ms", "p99_ms": "p99 ms", "goodput_hz": "goodput/s", "rows": "rows a batch"}


def _setting(delay_us: int = 0, depth: int = 1, queue: int = 4096) -> Setting:
    """A queue delay, batches in flight, and requests that may wait."""
    batch = BatchPolicy(_SPEED.rows, max_delay_ns=delay_us * NS_PER_US)
    return Setting("", HandlePolicy(batch, QueueLimits(max_count=queue)), _SPEED, depth)


# Offered load relative to the device's capacity, on average; how the rate changes; policy.
CASES = {
    "half load": (0.5, None, _setting()),
    "half load, delay 5 ms": (0.5, None, _setting(delay_us=5000)),
    "0.8 load": (0.8, None, _setting()),
    "0.8 load, overlapped": (0.8, None, _setting(depth=2)),
    "bursts, 0.5 load": (0.5, ArrivalPattern("bursty", burst_factor=4, burst_s=0.3, calm_s=1.2), _setting()),
    "1.5 load, 32 may wait": (1.5, None, _setting(queue=32)),
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
    extra_us = added_us(_setting(), options.seconds)
    lines = []
    for name, (share, shape, setting) in CASES.items():
        if options.only and name not in options.only:
            continue
        rounds = [
            both(arrivals(share, options.seconds, seed, shape, speed=_SPEED), setting, extra_us, _SLO_MS, 0.0)
            for seed in range(options.rounds)
        ]
        for quantity, what in _QUANTITIES.items():
            real, simulated = (values_of(column, quantity) for column in zip(*rounds, strict=True))
            ratio = ratios(simulated, real)
            ratio_text = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            lines.append((name, what, number(Spread.of(real).median), number(Spread.of(simulated).median), ratio_text))
    print(f"a batch takes {extra_us:.0f} us longer than its device, on average\n")
    print("\n".join(markdown_table(("case", "", "real", "simulated", "simulated / real"), lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
