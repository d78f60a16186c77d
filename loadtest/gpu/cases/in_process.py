"""(b) Through the in-process scheduler: single pictures in pinned memory, at least 0.95 of raw at saturation."""

from __future__ import annotations

from functools import partial

from headrace.scheduling.handle import ModelHandle

from loadtest.bench.results import at_least
from loadtest.gpu.inprocess import InProcess, requests_of
from loadtest.gpu.messages import Compare, Reporter
from loadtest.gpu.raw import RawEngine, agreement
from loadtest.gpu.rounds import in_turns
from loadtest.gpu.setup import REQUEST_ROWS, Setup
from loadtest.gpu.subject import Variant, pictures, variant
from loadtest.protocol import Array

TARGET = 0.95
_CHECKED = 16
_LEAST_AGREEMENT = 0.5
# What the part is about, then what it is to be seen beside: name, pictures a request, in pinned memory.
_CONTENDERS = (
    ("1 picture a request, pinned", 1, True),
    (f"{REQUEST_ROWS} pictures a request, pinned", REQUEST_ROWS, True),
    ("1 picture a request, ordinary memory", 1, False),
)


class WrongAnswers(RuntimeError):
    """The served outputs differ from those of the engine."""


def run(setup: Setup, reporter: Reporter) -> None:
    """Raw and served in interleaved rounds, after the answers were checked."""
    raw = f"raw engine, n={setup.max_rows}"
    pixels = pictures(setup, 2 * setup.max_rows)
    with RawEngine(setup) as engine, InProcess(setup) as served:
        handle = served.open(variant(setup, Variant(setup.instances)))
        _check(setup, reporter, engine, served, handle)
        contenders = {raw: partial(time_raw, setup, reporter, engine)}
        for number, (name, rows, in_pinned_memory) in enumerate(_CONTENDERS):
            target = at_least(TARGET) if number == 0 and setup.judged else None
            reporter.compare(Compare(f"{name} / {raw}", name, raw, "images/s", target=target))
            requests = requests_of(setup, pixels, rows, in_pinned_memory=in_pinned_memory)
            contenders[name] = partial(saturate, setup, reporter, served, handle, name, requests)
        in_turns(reporter, setup.rounds, contenders)


def time_raw(setup: Setup, reporter: Reporter, engine: RawEngine, number: int) -> None:
    """One sample of the engine alone, at the largest batch."""
    timing = engine.time(setup.max_rows, setup.seconds)
    reporter.sample(f"raw engine, n={setup.max_rows}", "images/s", timing.rows_per_s, number)


def saturate(
    setup: Setup,
    reporter: Reporter,
    served: InProcess,
    handle: ModelHandle,
    name: str,
    requests: list[Array],
    number: int,
) -> None:
    """Take and report one sample at saturation."""
    callers = max(2, setup.in_flight // len(requests[0]))
    found = served.measure(handle, requests, callers, setup.seconds)
    detail = {"mean_batch": round(found.mean_rows, 1), "cores": round(found.cpu_cores, 2)}
    reporter.sample(name, "images/s", found.images_per_s, number, **detail)


def _check(setup: Setup, reporter: Reporter, engine: RawEngine, served: InProcess, handle: ModelHandle) -> None:
    pixels = pictures(setup, _CHECKED, seed=3)
    same, apart = agreement(served.ask(handle, pixels), engine.classes(pixels))
    reporter.note(
        f"answers: {same:.0%} of {_CHECKED} pictures have the engine's best class, probabilities differ by {apart:.2g}"
    )
    if same < _LEAST_AGREEMENT:
        raise WrongAnswers(f"only {same:.0%} of the answers agree with the engine's")
