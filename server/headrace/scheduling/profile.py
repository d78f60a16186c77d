"""How long a version computes on a batch, by its rows and by how many instances are at work: measured when it is loaded,
corrected by every batch that it runs.

Instances disturb each other where they share a processor or its memory. So there is a table for 1, for 2, for up to 4, 8, 16 ...
instances at work as a batch begins, itself included: what whoever plans a batch can see. One that is first heard of begins as a
copy of the next smaller one, and follows from there.
"""

from __future__ import annotations

import threading

from headrace.core.clock import NS_PER_US
from headrace.scheduling.timings import RUN, WINDOW, Curve, Known, Table, Times, read

__all__ = ["RUN", "WINDOW", "Known", "Profile", "Times"]

_SMOOTHING = 8  # batches, of the number of instances at work
_TABLES = 8  # of 1, 2, up to 4 ... and of more than 64 instances at work


class Profile:
    """Compute times of one version; any thread may call any method.

    Ownership: `_lock` guards everything; `_tables` is replaced under it and read without, `_crowd` read without.

    Attributes:
        buckets: rows to which the backend pads batches, ascending; empty if it does not, or if it does not say.
    """

    def __init__(self) -> None:
        self.buckets: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._first = first = Table(1)
        self._one = True  # the first table stands for all
        self._tables = (first,) * _TABLES  # by `_place` of the instances at work; one may stand for several
        self._crowd = 1.0  # instances at work of late, smoothed

    def seed(self, measured_ns: Times, instances: int = 1, source: str = "load") -> None:
        """Times that were measured before any caller's batch; numbers of rows of which something is known stay as they are.

        Args:
            measured_ns: by rows one time or more.
            instances: at work.
            source: of the times, for `Known`.
        """
        with self._lock:
            self._table(instances).seed(measured_ns, source)

    def observe(self, rows: int, time_ns: int, instances: int = 1) -> None:
        """A batch of `rows` was computed in `time_ns`, begun with so many instances at work, its own included."""
        with self._lock:
            if instances > 1 or self._crowd > 1.0:
                self._crowd += (instances - self._crowd) / _SMOOTHING
            (self._first if instances == 1 else self._table(instances)).observe(rows, time_ns)

    def estimate_ns(self, rows: int, instances: int = 0) -> int:
        """How long a batch of `rows` computes as a rule: to plan with; 0 if nothing is known.

        Args:
            rows: in the batch.
            instances: at work, its own included; 0: as many as of late.
        """
        table = self._first if self._one else self._tables[_place(instances or round(self._crowd))]
        curve = table.curve or self._drawn(table)
        return read(curve.rows, curve.medians_ns, rows)

    def promise_ns(self, rows: int, instances: int = 0) -> int:
        """What 95 of 100 batches keep to: to promise with; 0 if nothing is known. Never less than the estimate.

        Args:
            rows, instances: as of `estimate_ns`.
        """
        table = self._first if self._one else self._tables[_place(instances or round(self._crowd))]
        curve = table.curve or self._drawn(table)
        return read(curve.rows, curve.p95s_ns, rows)

    def known(self) -> list[Known]:
        """What was measured, by instances and rows, ascending; without what `estimate_ns` does to it."""
        with self._lock:
            return [known for table in dict.fromkeys(self._tables) for known in table.known()]

    def table(self) -> list[dict[str, object]]:
        """`known` in JSON."""
        return [
            {
                "instances": known.instances,
                "rows": known.rows,
                "median_us": known.median_ns / NS_PER_US,
                "p95_us": known.p95_ns / NS_PER_US,
                "observations": known.observations,
                "source": known.source,
            }
            for known in self.known()
        ]

    def times(self, most: int = WINDOW) -> dict[int, dict[int, list[int]]]:
        """By instances and rows the last `most` times that were measured, nanoseconds: to be kept and seeded again."""
        with self._lock:
            return {table.instances: table.times(most) for table in dict.fromkeys(self._tables)}

    def summary(self) -> list[tuple[int, int, int]]:
        """Rows, estimate and promise in nanoseconds: of 1, 2, 4 ... and the largest number of rows known."""
        most = max((known.rows for known in self.known()), default=0)
        sizes = sorted({most, *(1 << power for power in range(most.bit_length()))} - {0})
        return [(rows, self.estimate_ns(rows), self.promise_ns(rows)) for rows in sizes]

    def _table(self, instances: int) -> Table:
        """To be written: the table of so many, made if there is none; while nothing is known the first one is everybody's."""
        place = _place(instances)
        tables = self._tables
        found = tables[place]
        if found.instances == 1 << place or not self._first.windows:
            return found
        made = found.copy(1 << place)
        self._tables = tuple(made if at >= place and table is found else table for at, table in enumerate(tables))
        self._one = False
        return made

    def _drawn(self, table: Table) -> Curve:
        with self._lock:
            return table.draw()


def _place(instances: int) -> int:
    """0 of 1 instance, 1 of 2, 2 of up to 4, 3 of up to 8 ..."""
    return min((instances - 1).bit_length(), _TABLES - 1) if instances > 1 else 0
