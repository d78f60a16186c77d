"""Entries of a queue, sorted by key.

`SortedEntries` holds tens of thousands of entries in runs of some thousands, each a list. Finding a position is a search among
the runs and one within a run. An insertion moves at most the rest of that run; in one list or deque both would cost as much as
the queue is long. `sortedcontainers` was measured and is slower (docs/decisions/0002-sorted-runs-of-our-own.md).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Generic, Protocol, TypeVar


class HasKey(Protocol):
    """An entry.

    Attributes:
        key: sort key, the smallest first; does not change while the entry is held.
    """

    key: int


E = TypeVar("E", bound=HasKey)

MAX_RUN = 2048
"""Entries of a run from which another run is started."""

_KEY = attrgetter("key")


def _last_key(run: Sequence[HasKey]) -> int:
    return run[-1].key


class SortedEntries(Generic[E]):
    """Entries sorted by key; entries with equal keys are in the order of insertion.

    Attributes:
        runs: the entries, in order. Only a single run may be empty.
    """

    __slots__ = ("runs",)

    def __init__(self, entries: Iterable[E] = ()) -> None:
        self.runs: list[list[E]] = []
        self.refill(entries)

    def __iter__(self) -> Iterator[E]:
        return chain.from_iterable(self.runs)

    def __reversed__(self) -> Iterator[E]:
        return chain.from_iterable(map(reversed, reversed(self.runs)))

    def __bool__(self) -> bool:
        return bool(self.runs[0])

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    @property
    def first(self) -> E:
        """The entry with the smallest key; requires an entry."""
        return self.runs[0][0]

    def head(self, count: int) -> Iterable[E]:
        """Return the first `count` entries, or all if there are fewer."""
        run = self.runs[0]
        return run[:count] if len(run) >= count else islice(self, count)

    def add(self, entry: E) -> bool:
        """Insert an entry; True if it is not the last."""
        runs, key = self.runs, entry.key
        run = runs[-1]
        if not run or key >= run[-1].key:
            if len(run) < MAX_RUN:
                run.append(entry)
            else:
                runs.append([entry])
            return False
        index = 0
        if len(runs) > 1:
            index = bisect_right(runs, key, key=_last_key)
            run = runs[index]
        insort_right(run, entry, key=_KEY)
        if len(run) >= 2 * MAX_RUN:
            runs.insert(index + 1, run[MAX_RUN:])
            del run[MAX_RUN:]
        return True

    def is_at_end(self, key: int) -> bool:
        """Return True if an entry of this key would be added at the end."""
        run = self.runs[-1]
        return not run or key >= run[-1].key

    def before(self, key: int) -> int:
        """Return the number of entries before an entry of this key; requires that `is_at_end` is False."""
        runs, count = self.runs, 0
        index = bisect_right(runs, key, key=_last_key) if len(runs) > 1 else 0
        for run in runs[:index]:
            count += len(run)
        return count + bisect_right(runs[index], key, key=_KEY)

    def take(self, count: int) -> list[E]:
        """Remove and return the first `count` entries, or all if there are fewer."""
        runs = self.runs
        run = runs[0]
        removed = run[:count]
        del run[:count]
        while not run and len(runs) > 1:
            del runs[0]
            run = runs[0]
            missing = count - len(removed)
            removed += run[:missing]
            del run[:missing]
        return removed

    def put_back(self, entries: list[E]) -> None:
        """Insert entries at the front; no other entry may have a smaller key."""
        self.runs[0][:0] = entries

    def remove(self, entry: E) -> None:
        """Remove an entry; it must be present."""
        runs, key = self.runs, entry.key
        number = bisect_left(runs, key, key=_last_key)
        run = runs[number]
        index = bisect_left(run, key, key=_KEY)
        # Few keys are equal, except of requests that arrive together.
        while index == len(run) or run[index] is not entry:
            index += 1
            if index >= len(run):
                number, index = number + 1, 0
                run = runs[number]
        del run[index]
        if not run and len(runs) > 1:
            del runs[number]

    def refill(self, entries: Iterable[E]) -> None:
        """Replace all entries by these, which are sorted by key."""
        each = list(entries)
        self.runs = [each[first : first + MAX_RUN] for first in range(0, len(each), MAX_RUN)] or [[]]
