"""Which names come up most often of late, in bounded memory whatever names there are."""

from __future__ import annotations

from collections import Counter


class HeavyHitters:
    """Counts names in two windows of time: the one that runs, and the one before.

    Each window keeps a few names, by Space-Saving (A. Metwally, D. Agrawal, A. El Abbadi, Efficient Computation of Frequent and
    Top-k Elements in Data Streams, ICDT 2005): a name that finds no room takes that of the smallest, with its count. So whoever
    comes more often than one time in `kept` is there, and what a count has of others before it is known.

    Not thread-safe: its owner's lock guards it.

    Args:
        window_ns: how long a window is.
        kept: names that a window keeps.
    """

    def __init__(self, window_ns: int, kept: int = 32) -> None:
        self._window_ns = window_ns
        self._kept = kept
        self._number = 0  # of the window that runs
        self._now: dict[str, tuple[int, int]] = {}  # count, and what of it is others'
        self._before: dict[str, tuple[int, int]] = {}
        self._totals = (0, 0)  # of both

    def add(self, name: str, now_ns: int) -> None:
        """A name came up at `now_ns`, monotonic."""
        self._turn(now_ns)
        counts = self._now
        found = counts.get(name)
        if found is not None:
            counts[name] = found[0] + 1, found[1]
        elif len(counts) < self._kept:
            counts[name] = 1, 0
        else:
            least = min(counts, key=counts.__getitem__)
            others = counts.pop(least)[0]
            counts[name] = others + 1, others
        self._totals = self._totals[0] + 1, self._totals[1]

    def top(self, now_ns: int, most: int = 3) -> list[tuple[str, float]]:
        """The names that came up most, and the share that each had at the least, of everything in both windows.

        Args:
            now_ns: monotonic.
            most: names.
        """
        self._turn(now_ns)
        own: Counter[str] = Counter()
        for window in (self._now, self._before):
            for name, (count, others) in window.items():
                own[name] += count - others
        return [(name, count / sum(self._totals)) for name, count in own.most_common(most)]

    def _turn(self, now_ns: int) -> None:
        number = now_ns // self._window_ns
        if number == self._number:
            return
        follows = number == self._number + 1
        self._before, self._totals = (self._now, (0, self._totals[0])) if follows else ({}, (0, 0))
        self._now, self._number = {}, number
