"""(d) Batch 1, one caller: what the server adds to a replayed graph, in process and over HTTP with shared memory."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from headrace.scheduling.handle import ModelHandle

from loadtest.bench.results import at_most
from loadtest.gpu.crowd import Crowd, CrowdFailed
from loadtest.gpu.inprocess import InProcess, requests_of
from loadtest.gpu.messages import Compare, Reporter
from loadtest.gpu.raw import RawEngine
from loadtest.gpu.rounds import Measure, in_turns
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import Variant, pictures, variant
from loadtest.gpu.wire import open_way, server, ways_of
from loadtest.protocol import Array

RAW, PINNED, ORDINARY = "raw engine, n=1", "in process, pinned", "in process, ordinary memory"
BLOCKING = "in process, pinned, blocking call"
TARGETS_US = {PINNED: 100.0, BLOCKING: 100.0, "http system": 400.0}
_OVER_WIRE = ("http system", "http cuda", "http body", "grpc fast system", "grpc fast cuda")


def run(setup: Setup, reporter: Reporter) -> None:
    """Measure the contenders in turn, one request after the other."""
    model = variant(setup, Variant(setup.instances))
    pixels = pictures(setup, 64)
    with ExitStack() as stack:
        engine = stack.enter_context(RawEngine(setup))
        contenders: dict[str, Measure] = {RAW: partial(_time_raw, setup, reporter, engine)}
        served = stack.enter_context(InProcess(setup))
        handle = served.open(model)
        for name, in_pinned_memory in ((PINNED, True), (ORDINARY, False)):
            requests = requests_of(setup, pixels, 1, in_pinned_memory=in_pinned_memory)
            contenders[name] = partial(_in_process, setup, reporter, served, handle, name, requests)
            if in_pinned_memory:
                contenders[BLOCKING] = partial(_blocking, setup, reporter, served, handle, requests)
        contenders |= _over_wire(setup, reporter, stack, model)
        for name in list(contenders)[1:]:
            target = at_most(TARGETS_US[name]) if name in TARGETS_US and setup.judged else None
            reporter.compare(Compare(f"{name} - {RAW}, p50", name, RAW, "p50 us", "difference", target))
        in_turns(reporter, setup.rounds, contenders)


def _time_raw(setup: Setup, reporter: Reporter, engine: RawEngine, number: int) -> None:
    timing = engine.time(1, 0.5 * setup.seconds)
    reporter.sample(RAW, "p50 us", timing.median_us, number, p99_us=round(timing.p99_us, 1))


def _in_process(
    setup: Setup,
    reporter: Reporter,
    served: InProcess,
    handle: ModelHandle,
    name: str,
    requests: list[Array],
    number: int,
) -> None:
    found = served.measure(handle, requests, 1, setup.seconds)
    reporter.sample(name, "p50 us", found.percentile_us(50), number, p99_us=round(found.percentile_us(99), 1))


def _blocking(
    setup: Setup, reporter: Reporter, served: InProcess, handle: ModelHandle, requests: list[Array], number: int
) -> None:
    found = served.measure_blocking(handle, requests, setup.seconds)
    reporter.sample(BLOCKING, "p50 us", found.percentile_us(50), number, p99_us=round(found.percentile_us(99), 1))


def _call(setup: Setup, reporter: Reporter, crowd: Crowd, key: str, number: int) -> None:
    taken = crowd.lone(key, setup.seconds)
    p99_us = round(taken.percentile_ms(99) * 1e3, 1)
    reporter.sample(key, "p50 us", taken.percentile_ms(50) * 1e3, number, p99_us=p99_us)


def _over_wire(setup: Setup, reporter: Reporter, stack: ExitStack, model: str) -> dict[str, Measure]:
    served = stack.enter_context(server(setup, model))
    crowd = stack.enter_context(Crowd(1, setup.scratch))
    found: dict[str, Measure] = {}
    for way in [way for way in ways_of(setup) if way.name in _OVER_WIRE]:
        try:
            key = open_way(setup, crowd, way, served, model, 1, 1)
        except CrowdFailed as error:
            reporter.note(f"{way.name} is left out: {error}")
            continue
        found[key] = partial(_call, setup, reporter, crowd, key)
    return found
