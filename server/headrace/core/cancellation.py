"""Cancels work on another thread, such as the load of a model, by ending what that thread waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headrace.core.errors import HeadraceError


class Cancellation:
    """Cancellation of one piece of work. Any thread may call any method; `_lock` guards all attributes.

    Attributes:
        error: why the work is cancelled; None before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.error: HeadraceError | None = None

    def cancel(self, error: HeadraceError) -> None:
        """Cancel the work: `check` raises `error` from now on, and the callbacks of `calling` are called."""
        with self._lock:
            if self.error is not None:
                return
            self.error, callbacks = error, list(self._callbacks)
        for callback in callbacks:
            callback()

    def check(self) -> None:
        """Raise the error of a cancelled work."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def calling(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` if the work is cancelled within the block, or was before; it ends what the block waits for."""
        with self._lock:
            self._callbacks.append(callback)
            is_cancelled = self.error is not None
        if is_cancelled:
            callback()
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)


_local = threading.local()


def current_cancellation() -> Cancellation:
    """Return the cancellation of the work on this thread; one that nothing cancels if the work has none."""
    cancellation: Cancellation = getattr(_local, "cancellation", None) or Cancellation()
    return cancellation


@contextmanager
def cancellable(cancellation: Cancellation) -> Iterator[None]:
    """Make a cancellation that of the work on this thread, within the block."""
    _local.cancellation = cancellation
    try:
        yield
    finally:
        _local.cancellation = None
