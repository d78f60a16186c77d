"""Before everything: the model, its engines, and what this machine is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue

from headrace_engines.targets import choose_target

from loadtest.gpu import place
from loadtest.gpu.cases import PREPARE
from loadtest.gpu.messages import Reporter
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import prepare, prepare_demo


def run(setup: Setup, reporter: Reporter) -> None:
    """Build, or find it built: as many engines at the same time as there are GPUs, each on its own."""
    # TensorRT's machine is described before the long work: if there is none, it is known at once.
    machine = choose_target(setup.backend).describe()
    reporter.machine({setup.backend: str(machine)})
    prepare_demo(setup, PREPARE.limit_s)
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in setup.gpus:
        free.put(gpu)

    def build(precision: str) -> None:
        gpu, begun_s = free.get(), time.monotonic()
        try:
            prepare(replace(setup, precision=precision), PREPARE.limit_s, place.seeing(gpu) if setup.on_gpu else None)
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
