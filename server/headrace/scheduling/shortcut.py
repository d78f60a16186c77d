"""How whoever queues a request runs it in the place of an instance that sleeps: fewer threads to wake up for a single caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.scheduling.queue import Entry

if TYPE_CHECKING:
    from headrace.scheduling.selection import Batch


class Shortcut(Protocol):
    """What an instance lets whoever queues a request do in its place while its own thread sleeps: a wake-up less, or two."""

    def takes(self, entry: Entry, stays: bool) -> bool:
        """Under the scheduler's lock: True if `take`, or `run` if the caller `stays`, may be called now with this entry."""

    def take(self, batch: Batch) -> None:
        """Begin to run the batch; must not wait, nor raise."""

    def run(self, batch: Batch, go_on: Callable[[], None]) -> None:
        """Run the batch to its end, on a thread that may wait; calls `go_on` once it is under way and others may run behind it,
        whatever happens."""

    def calls(self) -> bool:
        """Under the scheduler's lock, after `take` or at `go_on`: True if the thread must wake up now. If it sleeps on, whatever
        wakes it later has `next_batch` answer None, since the instance is not what it was."""


class Claim(NamedTuple):
    """A sleeper in whose place a batch is run, the batch, and how."""

    sleeper: threading.Lock
    shortcut: Shortcut
    batch: Batch
