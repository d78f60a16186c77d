"""Calls of the driver that may take long and that nobody waits for: pinning, unpinning, closing what clients shared."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from headrace.core.errors import HeadraceError
from headrace.cuda.driver import loaded

logger = logging.getLogger("headrace.cuda")


class DriverThread:
    """Runs jobs one after the other on a daemon thread, which is started with the first one of `start`.

    Ownership: `start` is called from one thread, which thereby notices that the other has died; `submit` may be called from any,
    also by a finalizer in the middle of whatever that thread was doing: it takes no lock that is not reentrant.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """See to it that the thread lives."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job when those before it are done; an error of the driver goes to the log."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except (HeadraceError, loaded().Error) as error:
                logger.warning("on the thread '%s': %s", self._name, error)
            del job  # it may hold memory, and the next may be long in coming
