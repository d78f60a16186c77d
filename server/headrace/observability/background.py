"""Background worker: a bounded queue and the thread that empties it, for work that would block the event loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from headrace.core.threads import start_thread
from headrace.observability.labelled_counter import DROPPED

logger = logging.getLogger("headrace.background")

T = TypeVar("T")

CAPACITY = 4096
# Items are processed in groups: a thread that wakes up for each item would compete with the event loop.
_GATHER_S = 0.05


class BackgroundWorker(Generic[T]):
    """Processes items in groups on its own thread.

    `put` and `close` are called by one thread at a time: the event loop's, and after its end the one that shuts down. The
    constructor starts the thread: later, under an attack, the system may start no more threads. The thread is a daemon: a disk
    or a network that hangs must not keep the process from ending.

    Args:
        name: of the thread.
        kind: label under which dropped items are counted (`counters.DROPPED`).
        work: called on the thread with the queued items. Returns the seconds after which it is called again if no item
            arrives, None for no such call. An exception stops the worker for good: the rest of the list counts as dropped.
        capacity: maximum number of queued items.
        gather_s: time that the first item of a group waits for more items.
        on_failed: called on the thread once `failed` is set.
        start: start the thread; without it all items are dropped.

    Raises:
        Unavailable: the thread cannot be started.

    Attributes:
        failed: `work` has raised an exception, which is in the log. All further items are dropped.
        dropped: number of dropped items.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        work: Callable[[list[T]], float | None],
        capacity: int = CAPACITY,
        gather_s: float = _GATHER_S,
        on_failed: Callable[[], None] | None = None,
        start: bool = True,
    ) -> None:
        self.failed = False
        self.dropped = 0
        self._on_failed = on_failed
        self._name, self._kind, self._work = name, kind, work
        self._capacity, self._gather_s = capacity, gather_s
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        DROPPED.declare(kind)
        self._thread: threading.Thread | None = None
        if start:
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            start_thread(thread)
            self._thread = thread

    def put(self, item: T) -> None:
        """Queue an item. Drops and counts it if the queue is full, or the worker has failed or is closed."""
        if self._thread is None or self.failed or self._closing.is_set() or self._queue.qsize() >= self._capacity:
            self._drop()
            return
        self._queue.put(item)

    def close(self, timeout_s: float) -> bool:
        """Process the queued items and stop; later items are dropped.

        Returns:
            False if the items were not processed within `timeout_s`.
        """
        self._closing.set()
        if self._thread is None:
            return True
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        items: list[T] = []
        try:
            next_call_s: float | None = None
            last = False
            while not last:
                items, last = self._gather(next_call_s)
                next_call_s = self._work(items)
            return
        except OSError as error:
            logger.error("%s stops: %s", self._name, error.strerror or error)
        except Exception:
            logger.exception("%s stops: unexpected exception", self._name)
        self.failed = True
        if self._on_failed is not None:
            self._on_failed()
        remaining = 0
        while not self._queue.empty():
            remaining += self._queue.get_nowait() is not None
        self._drop(len(items) + remaining)

    def _drop(self, count: int = 1) -> None:
        self.dropped += count
        DROPPED.count(self._kind, by=count)

    def _gather(self, timeout_s: float | None) -> tuple[list[T], bool]:
        """Wait for items; return them, and whether the worker closes after them."""
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
