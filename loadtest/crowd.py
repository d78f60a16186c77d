"""Number of users over the time of a load test; `loadtest/shapes.py` passes it to locust."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

# From the share of the time that is over to the share of the users that are there.
SHAPES: Mapping[str, Callable[[float], float]] = {
    "steady": lambda time: 1.0,
    # Ever more for three quarters of the time, then all of them.
    "ramp": lambda time: min(time / 0.75, 1.0),
    # Four levels, as long as each other: where the server cannot follow is seen at a glance.
    "steps": lambda time: (math.floor(min(time, 0.999) * 4) + 1) / 4,
    # A fifth of the users, and all of them at once for a fifth of the time in the middle.
    "spike": lambda time: 1.0 if 0.4 <= time < 0.6 else 0.2,
    # Two days with their nights.
    "wave": lambda time: 0.55 - 0.45 * math.cos(4 * math.pi * time),
}


def users_at(shape: str, time: float, peak: int) -> int:
    """Number of users, at least one, after this share (0 to 1) of the time."""
    return max(1, round(SHAPES[shape](time) * peak))
