"""Counts of what no model's recorder sees: refusals, limits, loads. Counted where it happens, read when Prometheus asks."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Tally:
    """Counts by labels; any thread may call any method.

    Labels come from the code or the operator, never from a client: each combination is kept for ever.

    Args:
        labels: their names, in the order in which `count` takes their values.
    """

    def __init__(self, *labels: str) -> None:
        self.labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}

    def declare(self, *values: str) -> None:
        """Show a combination before it is counted, as 0: what is not there cannot be seen to rise."""
        self.declare_each([values])

    def declare_each(self, combinations: Iterable[tuple[str, ...]]) -> None:
        """`declare` of several."""
        with self._lock:
            for values in combinations:
                self._counts.setdefault(values, 0)

    def count(self, *values: str, by: int = 1) -> None:
        """One more of these values, or `by`."""
        with self._lock:
            self._counts[values] = self._counts.get(values, 0) + by

    def items(self) -> list[tuple[tuple[str, ...], int]]:
        """Values and count of every combination."""
        with self._lock:
            return sorted(self._counts.items())


# One process is one server: these stand where what is counted is far from whoever could hand a counter in.
ERRORS = Tally("protocol", "reason")
"""Answers that were an error, by protocol (http, grpc) and the error's `reason`: headrace_errors_total."""
LOADS = Tally("model", "result")
"""Loads of models by result: loaded, reloaded, unloaded, failed: headrace_model_loads_total."""
BUILDS = Tally("model", "result")
"""Engines built while the server runs, by result: built, failed: headrace_engine_builds_total."""
DROPPED = Tally("kind")
"""Traces, spans and lines of the request log that were lost, by kind: headrace_telemetry_dropped_total."""
