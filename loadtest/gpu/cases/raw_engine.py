"""(a) The engine alone, at every batch size, in interleaved rounds."""

from __future__ import annotations

from loadtest.gpu.messages import Reporter
from loadtest.gpu.raw import RawEngine
from loadtest.gpu.setup import Setup

_SHARE = 0.35


def run(setup: Setup, reporter: Reporter) -> None:
    """Time the batch sizes in turns."""
    with RawEngine(setup) as engine:
        reporter.note(f"{engine.file.name}, {engine.file.stat().st_size / 1e6:.0f} MB")
        for number in range(setup.rounds):
            for rows in setup.sizes:
                timing = engine.time(rows, _SHARE * setup.seconds)
                percentiles = {"p50_us": round(timing.median_us, 1), "p99_us": round(timing.p99_us, 1)}
                reporter.sample(f"n={rows}", "images/s", timing.rows_per_s, number, **percentiles)
                reporter.sample(f"n={rows}", "p50 us", timing.median_us, number)
