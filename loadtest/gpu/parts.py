"""The parts of the bench: each is a function of the setup and the reporter, called by `part_process` in a process of its own."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from statistics import median

from headrace.core.errors import HeadraceError
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace_engines.targets import choose_target

from loadtest.bench.results import at_least, at_most
from loadtest.callers import CallersFailed
from loadtest.gpu import place, subject
from loadtest.gpu.inprocess import InProcess, RawEngine, agreement, requests_of
from loadtest.gpu.report import Compare, Reporter
from loadtest.gpu.setup import REQUEST_ROWS, Setup
from loadtest.gpu.subject import Variant, pictures, variant
from loadtest.gpu.wire import CROWD_WARM_S, LOOP, Way, sample_way, server, ways_of
from loadtest.load import LoadFailed
from loadtest.protocol import Array, Refused
from loadtest.servers import Running, ServerFailed

FAILURES = (HeadraceError, CallersFailed, LoadFailed, ServerFailed, Refused, OSError)

# Takes and reports one sample of a round.
Measure = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the run.

    Attributes:
        letter: as `--only` takes it.
        run: measures and reports.
        title: one-line description of the measurement.
        limit_s: longest duration for one precision.
        usual_s: duration on an H200, reserved for the part while the parts before it run.
        usual_int8_s: the same for INT8, where less is measured.
        least_s: with less time left it is not begun.
    """

    letter: str
    run: Callable[[Setup, Reporter], None]
    title: str
    limit_s: float
    usual_s: float
    usual_int8_s: float = 0.0
    least_s: float = 15.0

    def usual(self, precision: str) -> float:
        """Usual duration for one precision, in seconds."""
        return (precision == "int8" and self.usual_int8_s) or self.usual_s


class NothingMeasured(RuntimeError):
    """Every contender has failed; the notes have the reasons."""


class WrongAnswers(RuntimeError):
    """The served outputs differ from those of the engine."""


class TooFewGpus(RuntimeError):
    """This machine has fewer GPUs than the part compares."""


def in_turns(
    reporter: Reporter, rounds: int, contenders: Mapping[str, Measure], has_time: Callable[[], bool] = lambda: True
) -> None:
    """Measure every contender once a round, every second round in the opposite order; one that fails is left out from then on.

    Raises:
        NothingMeasured: all of them failed.
    """
    alive = dict(contenders)
    for number in range(rounds):
        if not has_time():
            reporter.note(f"no time was left for more than {number} rounds")
            break
        for name in list(alive) if number % 2 == 0 else list(reversed(alive)):
            try:
                alive[name](number)
            except FAILURES as error:
                traceback.print_exc()
                reporter.note(f"{name} failed in round {number} and is left out: {type(error).__name__}: {error}")
                del alive[name]
    if not alive:
        raise NothingMeasured("every contender failed, see the notes")


def prepare(setup: Setup, reporter: Reporter) -> None:
    """Build the model and its engines before everything: as many engines at the same time as there are GPUs, each on its own."""
    # TensorRT's machine is described before the long work, so that a missing GPU fails at once.
    machine = choose_target(setup.backend).describe()
    reporter.machine({setup.backend: str(machine)})
    subject.prepare_demo(setup, PREPARE.limit_s)
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in setup.gpus:
        free.put(gpu)

    def build(precision: str) -> None:
        gpu, begun_s = free.get(), time.monotonic()
        try:
            subject.prepare(
                replace(setup, precision=precision), PREPARE.limit_s, place.seeing(gpu) if setup.on_gpu else None
            )
        finally:
            free.put(gpu)
        reporter.sample(engine_name(precision), "s to build or find", time.monotonic() - begun_s)

    failures = list[Exception]()
    with ThreadPoolExecutor(len(setup.gpus)) as builders:
        under_way = {precision: builders.submit(build, precision) for precision in setup.precisions}
        for precision, building in under_way.items():
            try:
                building.result()
            except Exception as error:
                reporter.note(f"{precision}: {type(error).__name__}: {error}")
                failures.append(error)
    if failures:
        raise failures[0]


def engine_name(precision: str) -> str:
    """Name under which a built engine is reported."""
    return f"{precision} engine"


_RAW_SHARE = 0.35  # of a sample's length: a batch size needs less time than a server


def raw_engine(setup: Setup, reporter: Reporter) -> None:
    """(a) The engine alone, at every batch size, in interleaved rounds."""
    with RawEngine(setup) as engine:
        reporter.note(f"{engine.file.name}, {engine.file.stat().st_size / 1e6:.0f} MB")
        for number in range(setup.rounds):
            for rows in setup.sizes:
                timing = engine.time(rows, _RAW_SHARE * setup.seconds)
                percentiles = {"p50_us": round(timing.median_us, 1), "p99_us": round(timing.p99_us, 1)}
                reporter.sample(f"n={rows}", "images/s", timing.rows_per_s, number, **percentiles)
                reporter.sample(f"n={rows}", "p50 us", timing.median_us, number)


def time_raw(setup: Setup, reporter: Reporter, engine: RawEngine, number: int) -> None:
    """One sample of the engine alone, at the largest batch."""
    timing = engine.time(setup.max_rows, setup.seconds)
    reporter.sample(raw_name(setup), "images/s", timing.rows_per_s, number)


def raw_name(setup: Setup) -> str:
    """Name of the engine alone at the largest batch."""
    return f"raw engine, n={setup.max_rows}"


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A contender in process: a model, and requests for it.

    Attributes:
        setup: of the part.
        reporter: of the part.
        bench: the event loop.
        handle: the model.
        name: in reports.
        requests: pictures.
    """

    setup: Setup
    reporter: Reporter
    bench: InProcess
    handle: ModelHandle
    name: str
    requests: list[Array]

    def saturate(self, number: int) -> None:
        """Take and report one sample at saturation."""
        rows = len(self.requests[0])
        callers = max(2, self.setup.in_flight // rows)
        answered = self.bench.measure(self.handle, self.requests, callers, self.setup.seconds)
        detail = {"mean_batch": round(answered.mean_rows, 1), "cores": round(answered.cores, 2)}
        self.reporter.sample(self.name, "images/s", answered.per_s * rows, number, **detail)

    def call_alone(self, number: int, *, blocking: bool = False) -> None:
        """Take and report one sample of a single caller."""
        answered = self.bench.measure(self.handle, self.requests, 1, self.setup.seconds, blocking=blocking)
        p99_us = round(answered.percentile_us(99), 1)
        self.reporter.sample(self.name, "p50 us", answered.percentile_us(50), number, p99_us=p99_us)


_CHECKED = 16
_LEAST_AGREEMENT = 0.5
# Contenders: the part's subject first. Name, pictures a request, in pinned memory.
_IN_PROCESS = (
    ("1 picture a request, pinned", 1, True),
    (f"{REQUEST_ROWS} pictures a request, pinned", REQUEST_ROWS, True),
    ("1 picture a request, ordinary memory", 1, False),
)


def in_process(setup: Setup, reporter: Reporter) -> None:
    """(b) Through the in-process scheduler: single pictures in pinned memory, at least 0.95 of raw at saturation."""
    raw = raw_name(setup)
    pixels = pictures(setup, 2 * setup.max_rows)
    with RawEngine(setup) as engine, InProcess(setup) as bench:
        handle = bench.open(variant(setup, Variant(setup.instances)))
        _check(setup, reporter, engine, bench, handle)
        contenders: dict[str, Measure] = {raw: partial(time_raw, setup, reporter, engine)}
        for number, (name, rows, in_pinned_memory) in enumerate(_IN_PROCESS):
            target = at_least(0.95) if number == 0 and setup.judged else None
            reporter.compare(Compare(f"{name} / {raw}", name, raw, "images/s", target=target))
            requests = requests_of(setup, pixels, rows, in_pinned_memory=in_pinned_memory)
            contenders[name] = Served(setup, reporter, bench, handle, name, requests).saturate
        in_turns(reporter, setup.rounds, contenders)


def _check(setup: Setup, reporter: Reporter, engine: RawEngine, bench: InProcess, handle: ModelHandle) -> None:
    pixels = pictures(setup, _CHECKED, seed=3)
    same, apart = agreement(bench.ask(handle, pixels), engine.classes(pixels))
    reporter.note(
        f"answers: {same:.0%} of {_CHECKED} pictures have the engine's best class, probabilities differ by {apart:.2g}"
    )
    if same < _LEAST_AGREEMENT:
        raise WrongAnswers(f"only {same:.0%} of the answers agree with the engine's")


RAW, PINNED, ORDINARY = "raw engine, n=1", "in process, pinned", "in process, ordinary memory"
BLOCKING = "in process, pinned, blocking call"
TARGETS_US = {PINNED: 100.0, BLOCKING: 100.0, "http system": 400.0}


def lone(setup: Setup, reporter: Reporter) -> None:
    """(d) Batch 1, one caller: what the server adds to a replayed graph, in process and over HTTP with shared memory."""
    model = variant(setup, Variant(setup.instances))
    pixels = pictures(setup, 64)
    with ExitStack() as stack:
        engine = stack.enter_context(RawEngine(setup))

        def time_one(number: int) -> None:
            timing = engine.time(1, 0.5 * setup.seconds)
            reporter.sample(RAW, "p50 us", timing.median_us, number, p99_us=round(timing.p99_us, 1))

        contenders: dict[str, Measure] = {RAW: time_one}
        bench = stack.enter_context(InProcess(setup))
        handle = bench.open(model)
        for name, in_pinned_memory in ((PINNED, True), (BLOCKING, True), (ORDINARY, False)):
            requests = requests_of(setup, pixels, 1, in_pinned_memory=in_pinned_memory)
            served = Served(setup, reporter, bench, handle, name, requests)
            contenders[name] = partial(served.call_alone, blocking=name == BLOCKING)
        served_alone = stack.enter_context(server(setup, model))
        for way in ways_of(setup):
            contenders[way.name] = partial(_call, setup, reporter, way, served_alone, model)
        for name in list(contenders)[1:]:
            target = at_most(TARGETS_US[name]) if name in TARGETS_US and setup.judged else None
            reporter.compare(Compare(f"{name} - {RAW}, p50", name, RAW, "p50 us", "difference", target))
        in_turns(reporter, setup.rounds, contenders)


def _call(setup: Setup, reporter: Reporter, way: Way, served: Running, model: str, number: int) -> None:
    sampled = sample_way(setup, way, served, model, 1, 1)
    reporter.sample(way.name, "p50 us", sampled.p50_ms * 1e3, number, p99_us=round(sampled.p99_ms * 1e3, 1))


# INT8 has no target here: measure only the transports that can be the fastest.
_INT8_DATA = ("system", "cuda")


def over_wire(setup: Setup, reporter: Reporter) -> None:
    """(c) Client processes on the same host, 8 pictures a request, over every transport: the best at least 0.8 of raw."""
    model = variant(setup, Variant(setup.instances))
    raw = raw_name(setup)
    ways = [way for way in ways_of(setup) if setup.precision != "int8" or way.data in _INT8_DATA]
    callers = max(setup.clients, setup.in_flight // REQUEST_ROWS)
    target = at_least(0.8) if setup.judged and setup.precision == "fp16" else None
    rates: dict[str, list[float]] = {}

    def measure(name: str, sample: partial[float], number: int) -> None:
        """Take a sample, and compare the best transport so far with the raw engine."""
        rates.setdefault(name, []).append(sample(number))
        best = max(rates, key=lambda way: median(rates[way]))
        reporter.compare(Compare(f"the best way / {raw}", best, raw, "images/s", target=target))

    with RawEngine(setup) as engine, server(setup, model) as served:
        contenders: dict[str, Measure] = {raw: partial(time_raw, setup, reporter, engine)}
        for way in ways:
            reporter.compare(Compare(f"{way.name} / {raw}", way.name, raw, "images/s"))
            sample = partial(_saturate, setup, reporter, way, way.name, served, model, REQUEST_ROWS, callers)
            contenders[way.name] = partial(measure, way.name, sample)
        in_turns(reporter, setup.rounds, contenders)


def _saturate(
    setup: Setup,
    reporter: Reporter,
    way: Way,
    name: str,
    served: Running,
    model: str,
    rows: int,
    callers: int,
    number: int,
    **warm_up: float,
) -> float:
    """Take and report one sample at saturation; return images a second."""
    sampled = sample_way(setup, way, served, model, rows, callers, **warm_up)
    detail = {
        "p50_ms": round(sampled.p50_ms, 2),
        "p99_ms": round(sampled.p99_ms, 2),
        "mean_batch": round(sampled.mean_batch, 1),
    }
    reporter.sample(name, "images/s", sampled.images_per_s, number, **detail)
    reporter.sample(name, "client core share", sampled.busiest_client, number)
    report_server(reporter, name, sampled.server_us, number)
    return sampled.images_per_s


def report_server(reporter: Reporter, name: str, us: Mapping[str, float], number: int) -> None:
    """Report the processor time of a server for a request in microseconds, of all its processes and by role."""
    reporter.sample(name, "server us", sum(value for role, value in us.items() if not role.endswith(LOOP)), number)
    for role, value in us.items():
        reporter.sample(name, f"{role} us", value, number)


ONE, TWO = "one GPU", "two GPUs"
# With 32 pictures in a request the interpreter does not limit two GPUs.
_ROWS = (REQUEST_ROWS, 4 * REQUEST_ROWS)


def two_gpus(setup: Setup, reporter: Reporter) -> None:
    """(g) `instance_group` on GPU 0 against the same on GPUs 0 and 1: at least 1.95 times one without bodies.

    Servers have front ends by default; that with two GPUs is also measured in the other modes of `--front-ends`, where the
    engine process has the most to do: small requests in shared memory.
    """
    if setup.on_gpu and len(setup.gpus) < 2:
        raise TooFewGpus(f"this machine has {len(setup.gpus)} GPU, two are needed")
    both = setup.gpus[:2] if setup.on_gpu else (0,)
    # On a CPU two instances stand for two GPUs.
    models = {
        ONE: variant(setup, Variant(setup.instances, gpus=both[:1])),
        TWO: variant(setup, Variant(setup.instances if setup.on_gpu else 2, gpus=both)),
    }
    setup = replace(setup, in_flight=2 * setup.in_flight)
    _two_in_process(setup, reporter, models)
    _two_over_wire({ONE: replace(setup, gpus=both[:1]), TWO: replace(setup, gpus=both)}, reporter, models)


def _two_in_process(setup: Setup, reporter: Reporter, models: dict[str, str]) -> None:
    pixels = pictures(setup, 4 * setup.max_rows)
    with InProcess(setup) as bench:
        handles = {name: bench.open(model) for name, model in models.items()}
        contenders: dict[str, Measure] = {}
        for rows in _ROWS:
            requests = requests_of(setup, pixels, rows, in_pinned_memory=True)
            labels = {name: f"{name}, in process, {rows} a request" for name in models}
            for name, handle in handles.items():
                contenders[labels[name]] = Served(setup, reporter, bench, handle, labels[name], requests).saturate
            _compare_two(setup, reporter, labels[TWO], labels[ONE], is_judged=True)
        in_turns(reporter, setup.rounds, contenders)


def _compare_two(setup: Setup, reporter: Reporter, two: str, one: str, is_judged: bool) -> None:
    target = at_least(1.95) if is_judged and setup.judged else None
    reporter.compare(Compare(f"{two} / one", two, one, "images/s", target=target))


def _two_over_wire(setups: dict[str, Setup], reporter: Reporter, models: dict[str, str]) -> None:
    """Each server reads memory of its own GPUs."""
    setup = setups[ONE]
    memory = Way("http", "cuda" if setup.on_gpu else "system")
    loads = [(memory, rows) for rows in _ROWS] + [(Way(each, "body"), REQUEST_ROWS) for each in ("http", "grpc")]
    modes = [mode for mode in setup.front_ends if mode != "auto"]
    contenders: dict[str, Measure] = {}
    with ExitStack() as stack:
        served = {name: stack.enter_context(server(setup, model)) for name, model in models.items()}
        others = {mode: stack.enter_context(server(setup, models[TWO], "--front-ends", mode)) for mode in modes}

        def add(label: str, name: str, running: Running, way: Way, rows: int) -> None:
            args = (setups[name], reporter, way, label, running, models[name], rows)
            callers = max(setup.clients, setup.in_flight // rows)
            contenders[label] = partial(_saturate, *args, callers, warm_s=CROWD_WARM_S)

        for way, rows in loads:
            labels = {name: f"{name}, {way.name}, {rows} a request" for name in models}
            for name, running in served.items():
                add(labels[name], name, running, way, rows)
            _compare_two(setup, reporter, labels[TWO], labels[ONE], is_judged=way is memory)
            if (way, rows) == loads[0]:
                for mode, running in others.items():
                    label = f"{labels[TWO]}, --front-ends {mode}"
                    add(label, TWO, running, way, rows)
                    _compare_two(setup, reporter, label, labels[ONE], is_judged=False)
        in_turns(reporter, setup.rounds, contenders)


PREPARE = Part("prepare", prepare, "the model and its engine", 300.0, 90.0, least_s=5.0)
PARTS = (
    Part("a", raw_engine, "the engine alone: CUDA graph replay, inputs on the device", 45.0, 12.0, least_s=10.0),
    Part("b", in_process, "`ModelHandle` in process, uint8 pictures, closed loop", 90.0, 20.0),
    Part("d", lone, "one caller at a time, one picture", 150.0, 75.0),
    Part("c", over_wire, "client processes on the same host, 8 uint8 pictures a request", 240.0, 100.0, 60.0),
)
TWO_GPUS = Part("two-gpus", two_gpus, "two GPUs against one", 280.0, 150.0)
