"""What is counted of one model version."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.observability.histogram import Histogram

PHASES = ("decode", "queue", "assembly", "compute", "split", "encode", "total")


@dataclass(slots=True)
class SizeTotals:
    """Executions of one batch size.

    Attributes:
        count: executions.
        assembly_ns, compute_ns, split_ns: their time, summed.
    """

    count: int = 0
    assembly_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0

    def add(self, assembly_ns: int, compute_ns: int, split_ns: int) -> None:
        """One more."""
        self.count += 1
        self.assembly_ns += assembly_ns
        self.compute_ns += compute_ns
        self.split_ns += split_ns


@dataclass(slots=True)
class Totals:
    """Everything counted since the version was loaded.

    Attributes:
        requests: answered with success.
        request_ns: their time from arrival to settled answer, summed.
        failures: requests that got an error, by reason.
        failure_ns: their time, summed.
        rows: rows of the successful requests.
        executions: batches run, whatever became of them.
        queue_ns, assembly_ns, compute_ns, split_ns: per successful request, summed (a batch's time counts for each member).
        busy_ns: how long instances were kept by the batches that were answered, summed.
        shape_changes: batches of another shape than the one before.
        last_ms: wall clock of the last batch, milliseconds since 1970, 0 if there was none.
        sizes: per batch size in rows.
        reasons: batches by the reason why they were closed.
        phases: histograms by phase.
    """

    requests: int = 0
    request_ns: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    failure_ns: int = 0
    rows: int = 0
    executions: int = 0
    queue_ns: int = 0
    assembly_ns: int = 0
    compute_ns: int = 0
    split_ns: int = 0
    busy_ns: int = 0
    shape_changes: int = 0
    last_ms: int = 0
    sizes: dict[int, SizeTotals] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    phases: dict[str, Histogram] = field(default_factory=lambda: {phase: Histogram() for phase in PHASES})

    SUMS: ClassVar[tuple[str, ...]] = (
        "requests", "request_ns", "failure_ns", "rows", "executions", "queue_ns", "assembly_ns", "compute_ns", "split_ns",
        "busy_ns", "shape_changes",
    )  # fmt: skip
    """The names of those that are plain sums."""

    def copy(self) -> Totals:
        """One that does not change; what histograms hold is folded for it."""
        copy = Totals(
            failures=Counter(self.failures),
            last_ms=self.last_ms,
            sizes={
                rows: SizeTotals(size.count, size.assembly_ns, size.compute_ns, size.split_ns)
                for rows, size in self.sizes.items()
            },
            reasons=Counter(self.reasons),
        )
        for name in self.SUMS:
            setattr(copy, name, getattr(self, name))
        for phase, histogram in self.phases.items():
            histogram.fold()
            copy.phases[phase].add(histogram)
        return copy
