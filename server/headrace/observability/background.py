"""Work that must not keep the event loop: a bounded queue, and the thread that works it off."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.observability.counters import DROPPED

logger = logging.getLogger("headrace.background")

T = TypeVar("T")

CAPACITY = 4096
# What comes meanwhile is worked off together: a thread that wakes for each item would compete with the event loop.
_GATHER_S = 0.05


class BackgroundWorker(Generic[T]):
    """Hands items to a thread of its own, many at a time.

    `put` and `close` are called by one thread, the event loop's or who ends it; the thread is started by the first item. It is
    a daemon: a disk or a network that hangs must not keep the process from ending.

    Args:
        name: of the thread.
        kind: under which what is dropped is counted (`tally.DROPPED`).
        work: called with what has gathered, on the thread; gives the seconds after which it wants to be called again if nothing
            comes, None for not at all. What it raises ends the work for good.
        capacity: items that may wait.
        gather_s: how long the first of them waits for company.
        on_failed: called on the thread once `failed` is set.

    Attributes:
        failed: `work` has raised; the log says why, and whatever is put is dropped.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        work: Callable[[list[T]], float | None],
        capacity: int = CAPACITY,
        gather_s: float = _GATHER_S,
        on_failed: Callable[[], None] | None = None,
    ) -> None:
        self.failed = False
        self._on_failed = on_failed
        self._name, self._kind, self._work = name, kind, work
        self._capacity, self._gather_s = capacity, gather_s
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        DROPPED.declare(kind)

    def put(self, item: T) -> None:
        """Hand over an item; drops and counts it if the thread is behind or has failed."""
        if self.failed or self._closing.is_set() or self._queue.qsize() >= self._capacity:
            DROPPED.count(self._kind)
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(item)

    def close(self, timeout_s: float) -> bool:
        """Work off what waits; False if that was not over after `timeout_s`. Whatever is put from here on is dropped."""
        self._closing.set()
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        items: list[T] = []
        try:
            again_s: float | None = None
            last = False
            while not last:
                items, last = self._gather(again_s)
                again_s = self._work(items)
            return
        except OSError as error:
            logger.error("%s: stops, %s", self._name, error.strerror or error)
        except Exception:
            logger.exception("%s: has died", self._name)
        self.failed = True
        if self._on_failed is not None:
            self._on_failed()
        rest = 0
        while not self._queue.empty():
            rest += self._queue.get_nowait() is not None
        DROPPED.count(self._kind, by=len(items) + rest)

    def _gather(self, timeout_s: float | None) -> tuple[list[T], bool]:
        """What waits, after waiting for it; and whether it is the last."""
        items: list[T] = []
        try:
            item = self._queue.get(timeout=timeout_s)
            self._closing.wait(self._gather_s)
            while item is not None:
                items.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return items, False
        return items, True
