"""Closes replaced and unloaded versions in the background, each on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.registry import Registry, State

logger = logging.getLogger("headrace.control")


@dataclass(frozen=True, slots=True, eq=False)
class _ClosingVersion:
    handle: VersionHandle
    after: Callable[[], None]
    thread: threading.Thread
    ended: threading.Event


class VersionCloser:
    """Closes handles in the background, and updates the registry when the last handle of an unloaded version is closed.

    Ownership: `_closing` and `_counts` are guarded by `_lock`. The registry's lock may be acquired while `_lock` is held,
    never the reverse.

    Args:
        registry: receives the state of closed versions.
        on_closed: called with every closed handle, on the thread that closed it.
    """

    def __init__(self, registry: Registry, on_closed: Callable[[VersionHandle], None] = lambda _handle: None) -> None:
        self._registry = registry
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._closing: set[_ClosingVersion] = set()
        self._counts: Counter[tuple[str, str]] = Counter()  # of `_closing`, by model and version

    def begin(self, handle: VersionHandle, after: Callable[[], None] = lambda: None) -> None:
        """Close a handle after its requests have completed, without a timeout; returns at once.

        Args:
            handle: a handle that can no longer be leased.
            after: called when the handle is closed. Called a second time if the handle closes after `wait` timed out.
        """
        name = f"drain {handle.spec.name}/{handle.spec.version}"
        thread = threading.Thread(target=lambda: self._run(closing), name=name, daemon=True)
        closing = _ClosingVersion(handle, after, thread, threading.Event())
        with self._lock:
            self._closing.add(closing)
            self._counts[handle.spec.name, handle.spec.version] += 1
        if handle.is_unused and handle.end_leases():  # nothing to wait for: thousands of threads would take seconds
            self._run(closing)
            return
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("%s: no thread for it (%s), so the caller waits", name, error)
            self._run(closing)

    def wait(self, timeout_s: float) -> bool:
        """Wait for all handles at the end of the process; requests that remain after the timeout fail.

        Args:
            timeout_s: maximum wait in seconds for all handles together.

        Returns:
            False if a request still runs.
        """
        deadline_ns = monotonic_ns() + int(timeout_s * NS_PER_S)
        with self._lock:
            all_closing = list(self._closing)
        for closing in all_closing:
            closing.handle.drain_sequences()
        for closing in all_closing:  # some by the threads of loads
            if closing.ended.wait(max((deadline_ns - monotonic_ns()) / NS_PER_S, 0.0)) and closing.thread.ident:
                closing.thread.join()
        late = [closing for closing in all_closing if not closing.ended.is_set() and not closing.handle.close(0.0)]
        for closing in late:
            closing.after()  # the process ends without this thread
            name, version = closing.handle.spec.name, closing.handle.spec.version
            logger.error("model %s version %s did not stop within %g s; its requests failed", name, version, timeout_s)
            if self._registry.state(name, version) is State.UNLOADING:
                reason = "its requests did not end before the shutdown timeout"
                self._registry.mark(name, version, State.UNAVAILABLE, reason)
        return not late

    def _run(self, closing: _ClosingVersion) -> None:
        name, version = key = closing.handle.spec.name, closing.handle.spec.version
        try:
            closing.handle.close(None)
            self._on_closed(closing.handle)
            closing.after()
            logger.info("model %s version %s is closed", name, version)
        except BaseException:  # the index must not show UNLOADING for ever
            logger.exception("model %s version %s could not be closed", name, version)
        finally:
            with self._lock:
                self._closing.discard(closing)
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]
                    self._registry.mark_unloaded(name, version)
            closing.ended.set()
