"""Counters with labels, and those of the whole server, which its processes may share."""

from __future__ import annotations

import threading
from collections.abc import Callable, ItemsView, Iterable, Sequence

from headrace.core.limits import Cells


class LabelledCounter:
    """Counter with labels. Thread-safe.

    Label values come from the code or the operator, never from a client, because every combination is kept for ever.

    Args:
        labels: names of the labels, in the order of the values of `count`.
    """

    def __init__(self, *labels: str) -> None:
        self.labels = labels
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, ...], int] = {}
        self._shared: dict[tuple[str, ...], int] = {}
        self._cells: Cells = []
        self._totals: Callable[[], Iterable[tuple[tuple[str, ...], int]]] | None = None

    def share(
        self,
        cells: Cells,
        combinations: Sequence[tuple[str, ...]],
        totals: Callable[[], Iterable[tuple[tuple[str, ...], int]]] | None = None,
    ) -> None:
        """Count some combinations in memory that other processes read.

        Args:
            cells: one number for each combination.
            combinations: in the order of the cells; others are counted in this process.
            totals: returns the combinations with their numbers over all processes, for `items`; None for those of `cells`.
        """
        with self._lock:
            self._shared = {values: index for index, values in enumerate(combinations)}
            self._cells, self._totals = cells, totals
            for values, index in self._shared.items():
                if count := self._counts.get(values, 0):
                    cells[index] += count
                    self._counts[values] = 0

    def declare(self, *values: str) -> None:
        """Export a combination as 0 before it is first counted, so that `rate()` sees its first increase."""
        self.declare_each([values])

    def declare_each(self, combinations: Iterable[tuple[str, ...]]) -> None:
        """Declare several combinations at once."""
        with self._lock:
            for values in combinations:
                self._counts.setdefault(values, 0)

    def count(self, *values: str, by: int = 1) -> None:
        """Add `by` to the counter of a combination."""
        with self._lock:
            index = self._shared.get(values)
            if index is None:
                self._counts[values] = self._counts.get(values, 0) + by
            else:
                self._cells[index] += by

    def items(self) -> ItemsView[tuple[str, ...], int]:
        """Return the label values and count of every combination; of shared ones those that have been counted."""
        with self._lock:
            counts = dict(self._counts)
            if self._totals is None:
                shared: Iterable[tuple[tuple[str, ...], int]] = [
                    (values, self._cells[index]) for values, index in self._shared.items()
                ]
            else:
                shared = self._totals()
            for values, count in shared:
                if count:
                    counts[values] = counts.get(values, 0) + count
            return counts.items()


# Global counters: one process is one server, and the code that counts is far from where a counter could be passed in.
ERRORS = LabelledCounter("protocol", "reason")
"""Error responses by protocol (http, grpc) and the error's `reason`: headrace_errors_total."""
LOADS = LabelledCounter("model", "result")
"""Loads of models by result: loaded, reloaded, unloaded, failed: headrace_model_loads_total."""
BUILDS = LabelledCounter("model", "result")
"""Engines built while the server runs, by result: built, failed: headrace_engine_builds_total."""
STORE_SYNCS = LabelledCounter("repository", "result")
"""Comparisons with stores by result: unchanged, changed, failed: headrace_repository_syncs_total."""
STORE_BYTES = LabelledCounter("repository")
"""Bytes downloaded from stores: headrace_repository_downloaded_bytes_total."""
DROPPED = LabelledCounter("kind")
"""Dropped traces, spans, and lines of the request log and the log, by kind: headrace_telemetry_dropped_total."""
