"""Before everything: the model, its engine, and what this machine is."""

from __future__ import annotations

import time

from engines.targets.choice import choose_target
from loadtest.gpu.cases import PREPARE
from loadtest.gpu.messages import Reporter
from loadtest.gpu.setup import Setup
from loadtest.gpu.subject import prepare


def run(setup: Setup, reporter: Reporter) -> None:
    """Build, or find it built."""
    # TensorRT's machine is described before the long work: if there is none, it is known at once.
    machine = choose_target(setup.backend).describe()
    reporter.machine({setup.backend: str(machine)})
    begun_s = time.monotonic()
    prepare(setup, PREPARE.limit_s)
    reporter.sample(f"{setup.precision} engine", "s to build or find", time.monotonic() - begun_s)
