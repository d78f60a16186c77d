"""Starts the processes of Python models ahead of their load, several at a time.

The control thread loads one model after the other, so that only one thread changes what is served. The slow part of a Python
model is the start of its processes: an interpreter, NumPy, and the code of the model. Threads of `LoadAhead` do this part for
the next models, and the control thread takes the results.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from headrace.config.manifest import usable_cores

logger = logging.getLogger("headrace.loader")

_MIN_THREADS, _MAX_THREADS = 4, 8
_T = TypeVar("_T")


class RunStart(Protocol):
    """Runs the start of a process, or returns the result of the same start that ran before."""

    def __call__(self, key: Hashable, start: Callable[[], _T]) -> _T:
        """Return the result of `start`.

        Args:
            key: everything that the result depends on.
            start: starts the process.
        """


def run_now(key: Hashable, start: Callable[[], _T]) -> _T:
    """Run a start that nothing has run ahead; a `RunStart`."""
    return start()


class LoadAhead:
    """Runs jobs on a few threads, and keeps the results of the starts in them. Thread-safe: `_lock` guards all attributes.

    A start that fails ahead is forgotten: the load runs it again, alone, and reports its error.

    Args:
        threads: number of threads; 0 for one per core, at least 4 and at most 8. Loads read files as well as compute.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads or min(max(usable_cores(), _MIN_THREADS), _MAX_THREADS)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._jobs: dict[str, Callable[[], None]] = {}  # jobs that have not begun
        self._open: set[str] = set()  # names of jobs that have not ended
        self._results: dict[Hashable, Any] = {}
        self._running = 0
        self._closed = False

    def begin(self, jobs: Mapping[str, Callable[[], None]]) -> None:
        """Queue a job for each name, and start threads for them.

        Args:
            jobs: by name of the model; they call `record`.
        """
        with self._lock:
            self._closed = False
            self._jobs.update(jobs)
            self._open.update(jobs)
            count = min(self._threads - self._running, len(self._jobs))
            for index in range(count):
                thread = threading.Thread(target=self._work, name=f"load ahead {index}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: the loads run the starts themselves
                    break
                self._running += 1

    def next_name(self, names: Iterable[str], timeout_s: float) -> str | None:
        """Return the first name without an open job, so that a model whose start hangs delays no other.

        Args:
            names: models that may be loaded now.
            timeout_s: longest wait for the end of a job, in seconds.

        Returns:
            None if a job has ended meanwhile or the time is over: call it again. If no thread runs, the job of the first name is
            dropped, and the caller does its work.
        """
        with self._changed:
            first = ""
            for name in names:
                if name not in self._open:
                    return name
                first = first or name
            if first and not self._running:
                self._open.discard(first)
                self._jobs.pop(first, None)
                return first
            self._changed.wait(timeout_s)
            return None

    def record(self, key: Hashable, start: Callable[[], _T]) -> _T:
        """Run a start in a job, and keep its result for `take`; a `RunStart`."""
        result = start()
        with self._lock:
            if not self._closed:
                self._results[key] = result
                return result
        _close(result)
        return result

    def take(self, key: Hashable, start: Callable[[], _T]) -> _T:
        """Return the result of the same start in a job, else run it; a `RunStart`."""
        with self._lock:
            if key in self._results:
                result: _T = self._results.pop(key)
                return result
        return start()

    def close(self) -> None:
        """Drop the jobs that have not begun, and close the results that no load has taken."""
        with self._lock:
            self._closed = True
            self._jobs.clear()
            self._open.clear()
            unused, self._results = list(self._results.values()), {}
        for result in unused:
            _close(result)

    def _work(self) -> None:
        while True:
            with self._lock:
                name = next(iter(self._jobs), None)
                if name is None:
                    self._running -= 1
                    self._changed.notify_all()
                    return
                job = self._jobs.pop(name)
            try:
                job()
            except Exception as error:  # the load runs it again, and reports the error
                logger.debug("model %s could not be started ahead: %s", name, error)
            finally:
                with self._changed:
                    self._open.discard(name)
                    self._changed.notify_all()


def _close(result: object) -> None:
    """Close the result of a start, if it is a model."""
    close = getattr(result, "close", None)
    if close is not None:
        close()
