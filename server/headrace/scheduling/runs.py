"""Entries in the order of their keys, of which tens of thousands may wait: neither the ends nor the middle cost much.

They lie in runs of some thousands, each a list. To find a place is a search among the runs and one within a run, and to make room
there moves no more than the rest of that run; in one list or deque either would cost as much as what waits is long.
`sortedcontainers` was measured and is slower (docs/decisions/0002-sorted-runs-of-our-own.md).

Nothing here locks: the scheduler owns the lock under which every method is called.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.scheduling.queue import Entry

LONGEST = 2048
"""Entries that a run has when another one is begun."""

_KEY = attrgetter("key")


def _last_key(run: list[Entry]) -> int:
    return run[-1].key


class Runs:
    """Sorted by `Entry.key`; of equal keys, those that were added first come first.

    No run is empty but the only one.
    """

    __slots__ = ("_runs",)

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._runs: list[list[Entry]] = []
        self.refill(entries)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._runs)

    def __reversed__(self) -> Iterator[Entry]:
        return chain.from_iterable(map(reversed, reversed(self._runs)))

    def __bool__(self) -> bool:
        return bool(self._runs[0])

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def first(self) -> Entry:
        """The entry with the least key; only if there is one."""
        return self._runs[0][0]

    def head(self, count: int) -> Iterable[Entry]:
        """The first `count`, or all if there are less."""
        run = self._runs[0]
        return run[:count] if len(run) >= count else islice(self, count)

    def add(self, entry: Entry) -> bool:
        """Put an entry in its place; True if that is before another one."""
        runs, key = self._runs, entry.key
        run = runs[-1]
        if not run or key >= run[-1].key:
            if len(run) < LONGEST:
                run.append(entry)
            else:
                runs.append([entry])
            return False
        place = 0
        if len(runs) > 1:
            place = bisect_right(runs, key, key=_last_key)
            run = runs[place]
        insort_right(run, entry, key=_KEY)
        if len(run) >= 2 * LONGEST:
            runs.insert(place + 1, run[LONGEST:])
            del run[LONGEST:]
        return True

    def would_end(self, key: int) -> bool:
        """True if all come before an entry of this key, if it were added now."""
        run = self._runs[-1]
        return not run or key >= run[-1].key

    def before(self, key: int) -> int:
        """How many come before an entry of this key, if it were added now; only if not all do."""
        runs, count = self._runs, 0
        place = bisect_right(runs, key, key=_last_key) if len(runs) > 1 else 0
        for run in runs[:place]:
            count += len(run)
        return count + bisect_right(runs[place], key, key=_KEY)

    def take(self, count: int) -> list[Entry]:
        """Remove the first `count`, or all if there are less."""
        runs = self._runs
        run = runs[0]
        taken = run[:count]
        del run[:count]
        while not run and len(runs) > 1:
            del runs[0]
            run = runs[0]
            left = count - len(taken)
            taken += run[:left]
            del run[:left]
        return taken

    def put_back(self, entries: list[Entry]) -> None:
        """Put entries before all others, which have no lesser keys."""
        self._runs[0][:0] = entries

    def remove(self, entry: Entry) -> None:
        """Take out one that is there."""
        runs, key = self._runs, entry.key
        number = bisect_left(runs, key, key=_last_key)
        run = runs[number]
        place = bisect_left(run, key, key=_KEY)
        while place == len(run) or run[place] is not entry:  # equal keys are few, but where all requests came at once
            place += 1
            if place >= len(run):
                number, place = number + 1, 0
                run = runs[number]
        del run[place]
        if not run and len(runs) > 1:
            del runs[number]

    def refill(self, entries: Iterable[Entry]) -> None:
        """Have these instead, which are in the order of their keys."""
        each = list(entries)
        self._runs = [each[first : first + LONGEST] for first in range(0, len(each), LONGEST)] or [[]]
