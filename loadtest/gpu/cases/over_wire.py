"""(c) Client processes on the same host, 8 pictures a request, over every way: the best at least 0.8 of raw."""

from __future__ import annotations

import importlib
import time
from functools import partial
from statistics import median

from loadtest.bench.results import at_least
from loadtest.gpu.cases.in_process import time_raw
from loadtest.gpu.crowd import Crowd, CrowdFailed
from loadtest.gpu.messages import Compare, Reporter
from loadtest.gpu.raw import RawEngine
from loadtest.gpu.rounds import Measure, in_turns
from loadtest.gpu.setup import CLASSES, REQUEST_ROWS, Setup
from loadtest.gpu.subject import BEST, INPUT, Variant, pictures, variant
from loadtest.gpu.wire import ENGINES, open_way, sample_way, servers, ways_of
from loadtest.servers import HOST, Running

TARGET = 0.8
# INT8 has no target here: measure only the transports that can be the fastest.
_SHORT = ("http system", "http cuda", "grpc fast system", "grpc fast cuda")


def run(setup: Setup, reporter: Reporter) -> None:
    """All ways and the raw engine in interleaved rounds."""
    model = variant(setup, Variant(setup.instances))
    raw = f"raw engine, n={setup.max_rows}"
    whole = setup.precision != "int8"
    ways = [way for way in ways_of(setup) if whole or way.name in _SHORT]
    engines = tuple(engine for engine in ENGINES if any(way.engine == engine for way in ways))
    slots = max(setup.clients, setup.in_flight // REQUEST_ROWS)
    with (
        RawEngine(setup) as engine,
        servers(setup, model, engines) as served,
        Crowd(setup.clients, setup.scratch) as crowd,
    ):
        _published_clients(setup, reporter, served["fast"], model)
        best = _Best(setup, reporter, raw)
        contenders: dict[str, Measure] = {raw: partial(time_raw, setup, reporter, engine)}
        for way in ways:
            try:
                key = open_way(setup, crowd, way, served[way.engine], model, REQUEST_ROWS, slots)
            except CrowdFailed as error:
                reporter.note(f"{way.name} is left out: {error}")
                continue
            reporter.compare(Compare(f"{way.name} / {raw}", way.name, raw, "images/s"))
            sample = partial(sample_way, setup, reporter, crowd, key, way.name, served[way.engine], model)
            contenders[way.name] = partial(best.measure, way.name, sample)
        in_turns(reporter, setup.rounds, contenders)


class _Best:
    """Holds the best way so far against the raw engine."""

    def __init__(self, setup: Setup, reporter: Reporter, raw: str) -> None:
        self._reporter = reporter
        self._raw = raw
        self._target = at_least(TARGET) if setup.judged and setup.precision == "fp16" else None
        self._rates: dict[str, list[float]] = {}

    def measure(self, name: str, sample: partial[float], number: int) -> None:
        self._rates.setdefault(name, []).append(sample(number))
        best = max(self._rates, key=lambda way: median(self._rates[way]))
        label = f"the best way / {self._raw}"
        self._reporter.compare(Compare(label, best, self._raw, "images/s", target=self._target))


def _published_clients(setup: Setup, reporter: Reporter, served: Running, model: str) -> None:
    """tritonclient over either protocol: that it works, not how fast."""
    pixels = pictures(setup, REQUEST_ROWS)
    for name, port in (("http", served.port), ("grpc", served.grpc_port)):
        try:
            published = importlib.import_module(f"tritonclient.{name}")
            client = published.InferenceServerClient(f"{HOST}:{port}")
            tensor = published.InferInput(INPUT, list(pixels.shape), "UINT8")
            tensor.set_data_from_numpy(pixels)
            times_ms = []
            for _ in range(5):
                begun_s = time.perf_counter()
                shape = client.infer(model, [tensor]).as_numpy(BEST).shape
                times_ms.append((time.perf_counter() - begun_s) * 1e3)
            client.close()
        except Exception as error:
            reporter.note(f"tritonclient.{name} did not work here: {type(error).__name__}: {error}")
            continue
        what = f"tritonclient.{name}, one caller, {REQUEST_ROWS} pictures in the body"
        reporter.sample(what, "ms", median(times_ms))
        if shape != (REQUEST_ROWS, CLASSES):
            reporter.note(f"tritonclient.{name} got classes of the shape {shape}")
