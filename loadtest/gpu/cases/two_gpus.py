"""(g) `instance_group` on GPU 0 against the same on GPUs 0 and 1: at least 1.9 times one.

The figure is that in process with 8 pictures a request, as many as (c) sends: it shows what scheduler and GPUs make of it. Larger
requests, and those over the wire, stand beside it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from loadtest.bench.results import at_least
from loadtest.gpu.cases.in_process import saturate
from loadtest.gpu.crowd import Crowd
from loadtest.gpu.inprocess import InProcess, requests_of
from loadtest.gpu.messages import Compare, Reporter
from loadtest.gpu.rounds import Measure, in_turns
from loadtest.gpu.setup import REQUEST_ROWS, Setup
from loadtest.gpu.subject import Variant, pictures, variant
from loadtest.gpu.wire import open_way, sample_way, server, way_called

TARGET = 1.9
ONE, TWO = "one GPU", "two GPUs"
# With 32 pictures in a request the interpreter is not what holds two GPUs back.
_ROWS = (REQUEST_ROWS, 4 * REQUEST_ROWS)


class TooFewGpus(RuntimeError):
    """This machine has not what is to be compared."""


def run(setup: Setup, reporter: Reporter) -> None:
    """One and two, in process and over the wire, in interleaved rounds."""
    if setup.on_gpu and len(setup.gpus) < 2:
        raise TooFewGpus(f"this machine has {len(setup.gpus)} GPU, two are needed")
    both = setup.gpus[:2] if setup.on_gpu else (0,)
    # On a CPU two instances stand for two GPUs.
    models = {
        ONE: variant(setup, Variant(setup.instances, gpus=both[:1])),
        TWO: variant(setup, Variant(setup.instances if setup.on_gpu else 2, gpus=both)),
    }
    setup = replace(setup, in_flight=2 * setup.in_flight)
    _in_process(setup, reporter, models)
    _over_wire(setup, reporter, models)


def _in_process(setup: Setup, reporter: Reporter, models: dict[str, str]) -> None:
    pixels = pictures(setup, 4 * setup.max_rows)
    with InProcess(setup) as served:
        handles = {name: served.open(model) for name, model in models.items()}
        contenders: dict[str, Measure] = {}
        for rows in _ROWS:
            requests = requests_of(setup, pixels, rows, in_pinned_memory=True)
            for name, handle in handles.items():
                what = f"{name}, in process, {rows} a request"
                contenders[what] = partial(saturate, setup, reporter, served, handle, what, requests)
            target = at_least(TARGET) if rows == REQUEST_ROWS and setup.judged else None
            ours, theirs = (f"{name}, in process, {rows} a request" for name in (TWO, ONE))
            reporter.compare(Compare(f"{ours} / one", ours, theirs, "images/s", target=target))
        in_turns(reporter, setup.rounds, contenders)


def _over_wire(setup: Setup, reporter: Reporter, models: dict[str, str]) -> None:
    way = way_called(setup.best_way)
    with (
        server(setup, models[ONE], way.engine) as one,
        server(setup, models[TWO], way.engine) as two,
        Crowd(setup.clients, setup.scratch) as crowd,
    ):
        contenders: dict[str, Measure] = {}
        for rows in _ROWS:
            slots = max(setup.clients, setup.in_flight // rows)
            labels = {name: f"{name}, {way.name}, {rows} a request" for name in models}
            reporter.compare(Compare(f"{labels[TWO]} / one", labels[TWO], labels[ONE], "images/s"))
            for name, served in ((ONE, one), (TWO, two)):
                key = open_way(setup, crowd, way, served, models[name], rows, slots, key=f"{name} {rows}")
                sample = partial(sample_way, setup, reporter, crowd, key, labels[name], served, models[name], rows=rows)
                contenders[labels[name]] = partial(_sample, sample)
        in_turns(reporter, setup.rounds, contenders)


def _sample(sample: partial[float], number: int) -> None:
    sample(number)
