"""What predictions learn from: how wrong they have been, and who comes and goes before those who wait already.

Both are kept apart by kinds of requests, of which urgent ones have the lower numbers: a low priority's or a flooding client's
requests are overtaken by others, and what is learned of them is not true of those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from headrace.core.clock import NS_PER_S

_LATE = 0.005  # of those that were promised most, what may be late: half of what a 99th percentile leaves
_STEP = 8  # a batch that is late as a whole makes a reserve longer by one part in so many of what a batch takes
LATELY_NS = NS_PER_S


class Reserves:
    """What predictions of each kind are wrong by, beyond a small share of them; the caller's lock guards `learn`."""

    def __init__(self) -> None:
        self._ns: defaultdict[int, int] = defaultdict(int)

    def ns(self, kind: int) -> int:
        """Nanoseconds to be added to what is predicted."""
        return self._ns[kind]

    def learn(self, errors_ns: Mapping[int, Sequence[int]], cycle_ns: int) -> None:
        """Follow the quantile: H. Robbins, S. Monro, A stochastic approximation method, 1951.

        Args:
            errors_ns: by kind, how much later requests of one batch were answered than predicted without the reserve.
            cycle_ns: what a batch takes.
        """
        for kind, wrong_ns in errors_ns.items():
            reserve_ns = self._ns[kind]
            beyond = sum([error_ns > reserve_ns for error_ns in wrong_ns]) / len(wrong_ns)
            self._ns[kind] = max(reserve_ns + int(cycle_ns / _STEP * (beyond - _LATE)), 0)

    def doubt(self, kind: int, cycle_ns: int) -> None:
        """A request was refused for the reserve's sake: nobody will know whether that was needed, and it must not stay so."""
        self._ns[kind] = max(self._ns[kind] - int(cycle_ns / _STEP * _LATE / 4), 0)


class Arrivals:
    """Rows that have come of late, by kind; no lock: of two at the same time one is lost, which does not matter."""

    def __init__(self) -> None:
        self._came: dict[int, tuple[float, int]] = {}  # rows, those of longer ago counting less, and when the last came

    def came(self, kind: int, rows: int, now_ns: int) -> None:
        """Rows were queued."""
        before, last_ns = self._came.get(kind, (0.0, now_ns))
        self._came[kind] = _left(before, now_ns - last_ns) + rows, now_ns

    def below(self, kind: int, now_ns: int) -> float:
        """Of kinds more urgent than this one, in about the last `LATELY_NS`."""
        rows = 0.0
        for each, (came, last_ns) in list(self._came.items()):
            if each < kind:
                rows += _left(came, now_ns - last_ns)
        return rows


def _left(rows: float, age_ns: int) -> float:
    return rows * (1 - age_ns / LATELY_NS) if age_ns < LATELY_NS else 0.0
