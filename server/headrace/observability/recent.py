"""What was counted over the last seconds, out of totals: what they are now less what they were.

Nothing is counted twice for it: once in a second the totals are put aside.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from headrace.core.clock import NS_PER_S
from headrace.observability.totals import SizeTotals, Totals

SECONDS = 10
"""The length of the window, at the most."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The last seconds.

    Attributes:
        seconds: how many, from the first event within the window on; `SECONDS` if there was none.
        totals: of them; `last_ms` is that of the whole life.
    """

    seconds: float
    totals: Totals


class Marks:
    """What the totals were at the first event of each of the last seconds.

    Not thread-safe: its owner's lock guards it.

    Attributes:
        second: the last that was marked, on the monotonic clock.
    """

    __slots__ = ("_kept", "second")

    def __init__(self) -> None:
        self._kept: deque[tuple[int, Totals]] = deque(maxlen=SECONDS)
        self.second = -1

    def put(self, second: int, totals: Totals) -> None:
        """Something is about to be counted in a second that has no mark yet.

        Args:
            second: on the monotonic clock.
            totals: a copy of what was counted before.
        """
        self._kept.append((second, totals))
        self.second = second

    def recent(self, now_ns: int, totals: Totals) -> Recent:
        """The window that ends now.

        Args:
            now_ns: on the same clock.
            totals: what was counted until now; a copy, which the answer may hold.
        """
        now_s = now_ns / NS_PER_S
        for second, then in self._kept:
            if second > now_s - SECONDS:
                return Recent(max(now_s - second, 1e-3), _difference(totals, then))
        return Recent(float(SECONDS), Totals(last_ms=totals.last_ms))


def _difference(now: Totals, then: Totals) -> Totals:
    sizes: dict[int, SizeTotals] = {}
    for rows, size in now.sizes.items():
        before = then.sizes.get(rows, SizeTotals())
        if size.count > before.count:
            sizes[rows] = SizeTotals(
                size.count - before.count,
                size.assembly_ns - before.assembly_ns,
                size.compute_ns - before.compute_ns,
                size.split_ns - before.split_ns,
            )
    found = Totals(
        failures=Counter(now.failures) - then.failures,
        last_ms=now.last_ms,
        sizes=sizes,
        reasons=Counter(now.reasons) - then.reasons,
    )
    for name in Totals.SUMS:
        setattr(found, name, getattr(now, name) - getattr(then, name))
    for phase, histogram in found.phases.items():
        histogram.fine = now.phases[phase].fine - then.phases[phase].fine
        histogram.sum_ns = now.phases[phase].sum_ns - then.phases[phase].sum_ns
    return found
