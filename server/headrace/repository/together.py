"""Batches that several instances run at the same time: how long they take beside each other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from headrace.backends.base import Execution
from headrace.core.clock import Clock
from headrace.core.tensor import Array

_ABANDONED_S = 30.0  # an instance whose batch takes longer holds the others up no more


class Together:
    """Runs the same size on several instances at once, one size after the other; each takes part on its own thread.

    Args:
        instances: how many take part.
        sizes: rows of the batches, in the order in which they are run.
        feed: makes inputs of so many rows.
        in_time: whether a batch of so many rows may still be begun.
        clock: monotonic nanoseconds.

    Attributes:
        found_ns: by rows the times of all who took part.
    """

    def __init__(
        self,
        instances: int,
        sizes: Iterable[int],
        feed: Callable[[int], dict[str, Array]],
        in_time: Callable[[int], bool],
        clock: Clock,
    ) -> None:
        self.instances = instances
        self.found_ns: dict[int, list[int]] = {}
        self._sizes = iter(sizes)
        self._feed = feed
        self._in_time = in_time
        self._clock = clock
        self._rows = 0  # what comes next; 0: nothing more
        self._chosen = threading.Barrier(instances, self._choose, _ABANDONED_S)
        self._fed = threading.Barrier(instances, timeout=_ABANDONED_S)

    def take_part(self, execution: Execution) -> None:
        """Run what is to be run, beside the others; returns early if one of them fails.

        Raises:
            Exception: what the execution raises, for whose instance it is; the others stop then.
        """
        try:
            while True:
                self._chosen.wait()
                rows = self._rows
                if not rows:
                    return
                inputs = self._feed(rows)
                self._fed.wait()
                begun_ns = self._clock()
                execution.run(inputs)
                # One dictionary and one list each: both calls are one step of the interpreter.
                self.found_ns.setdefault(rows, []).append(self._clock() - begun_ns)
        except threading.BrokenBarrierError:
            return
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Have all who take part return once their batch is done."""
        self._chosen.abort()
        self._fed.abort()

    def _choose(self) -> None:
        """By one of them, while the others wait."""
        rows = next(self._sizes, 0)
        self._rows = rows if rows and self._in_time(rows) else 0
