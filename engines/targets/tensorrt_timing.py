"""Timing work that a GPU repeats, by the GPU's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from engines.targets.base import Timing
from server.cuda.driver import Event, Stream

_WARM_UP, _SINGLE, _SUSTAINED = 0.2, 0.4, 0.4
_LEAST_WARM_UPS = 3
_BURST = 16
_BURST_SHARE = 0.05


def measure(stream: Stream, launch: Callable[[], None], rows: int, seconds: float) -> Timing:
    """Time executions of one batch.

    Single executions are timed between events that are queued ahead in bursts, so that the GPU never waits for Python; the first
    of a burst, for which it does, is left out. Throughput is taken over one long row of executions between two events.

    Args:
        stream: where `launch` queues one execution.
        launch: queues it.
        rows: of the batch.
        seconds: about how long to measure in all.
    """
    begun = time.monotonic()
    warm = 0
    while warm < _LEAST_WARM_UPS or time.monotonic() - begun < _WARM_UP * seconds:
        launch()
        warm += 1
        # Not further ahead than needed: what is queued must be waited for.
        stream.synchronize()
    each_s = (time.monotonic() - begun) / warm

    burst = int(min(max(_BURST_SHARE * seconds / each_s, 2), _BURST))
    events = [Event() for _ in range(burst + 1)]
    singles: list[float] = []
    begun = time.monotonic()
    while not singles or time.monotonic() - begun < _SINGLE * seconds:
        for event in events:
            launch()
            event.record(stream)
        stream.synchronize()
        singles += [later.us_since(earlier) for earlier, later in pairwise(events)]
    median_us = float(np.median(singles))

    count = max(int(_SUSTAINED * seconds * 1e6 / max(median_us, 1.0)), 1)
    first, last = events[0], events[1]
    first.record(stream)
    for _ in range(count):
        launch()
    last.record(stream)
    stream.synchronize()
    rows_per_s = rows * count / (max(last.us_since(first), 1e-3) / 1e6)
    return Timing(rows, median_us, float(np.percentile(singles, 99)), rows_per_s)
