"""(e) 1, 2 and 4 instances, with CUDA graphs and without: throughput at saturation, and what one caller waits."""

from __future__ import annotations

from functools import partial

from headrace.core.errors import HeadraceError
from headrace.scheduling.handle import ModelHandle

from loadtest.gpu.cases.in_process import saturate, time_raw
from loadtest.gpu.inprocess import InProcess, requests_of
from loadtest.gpu.messages import Compare, Reporter
from loadtest.gpu.raw import RawEngine
from loadtest.gpu.rounds import Measure, in_turns
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import Variant, pictures, variant
from loadtest.protocol import Array

COUNTS = (1, 2, 4)
# Of a sample's length: one caller needs less time to show what he waits.
_LONE_SHARE = 0.4


def run(setup: Setup, reporter: Reporter) -> None:
    """All variants loaded beside each other, measured in turns."""
    raw = f"raw engine, n={setup.max_rows}"
    with RawEngine(setup) as engine, InProcess(setup) as served:
        requests = requests_of(setup, pictures(setup, 2 * setup.max_rows), 1, in_pinned_memory=True)
        contenders: dict[str, Measure] = {raw: partial(time_raw, setup, reporter, engine)}
        for graphs in (True, False) if setup.on_gpu else (True,):
            for count in COUNTS:
                name = f"{count} instance{'s' * (count > 1)}, graphs {'on' if graphs else 'off'}"
                try:
                    handle = served.open(variant(setup, Variant(count, graphs)))
                except HeadraceError as error:
                    reporter.note(f"{name} is left out: {error}")
                    continue
                reporter.compare(Compare(f"{name} / {raw}", name, raw, "images/s"))
                contenders[name] = partial(_both, setup, reporter, served, handle, name, requests)
        in_turns(reporter, setup.rounds, contenders)


def _both(
    setup: Setup,
    reporter: Reporter,
    served: InProcess,
    handle: ModelHandle,
    name: str,
    requests: list[Array],
    number: int,
) -> None:
    saturate(setup, reporter, served, handle, name, requests, number)
    lone = served.measure(handle, requests, 1, _LONE_SHARE * setup.seconds)
    p99_us = round(lone.percentile_us(99), 1)
    reporter.sample(name, "p50 us of one caller", lone.percentile_us(50), number, p99_us=p99_us)
