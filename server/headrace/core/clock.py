"""Clock of the data plane: monotonic, in nanoseconds, replaceable by a virtual one."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], int]

monotonic_ns: Clock = time.monotonic_ns

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
