"""Versions that serve no more but still have requests: each is closed on a thread of its own, and its end is noticed here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.repository.lifecycle import State
from headrace.repository.registry import Registry
from headrace.scheduling.handle import ModelHandle

logger = logging.getLogger("headrace.control")


@dataclass(frozen=True, slots=True, eq=False)
class _Drain:
    name: str
    version: str
    handle: ModelHandle
    after: Callable[[], None]
    thread: threading.Thread


class Drains:
    """Closes handles in the background, and tells the registry when the last one of an unloaded version has ended.

    Ownership: `_active` is guarded by `_lock`; the registry's lock may be taken under it, never the other way round.

    Args:
        registry: that learns of the end.
        on_closed: called with every handle that was closed.
    """

    def __init__(self, registry: Registry, on_closed: Callable[[ModelHandle], None] = lambda _handle: None) -> None:
        self._registry = registry
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._active: set[_Drain] = set()

    def begin(self, name: str, version: str, handle: ModelHandle, after: Callable[[], None]) -> None:
        """Close a handle once its requests are answered, however long that takes.

        Args:
            name: of the model.
            version: its number.
            handle: that nobody can lease any more.
            after: called when it is closed, and once more if that comes too late for `wait`.
        """
        thread = threading.Thread(target=lambda: self._run(drain), name=f"drain {name}/{version}", daemon=True)
        drain = _Drain(name, version, handle, after, thread)
        with self._lock:
            self._active.add(drain)
        thread.start()

    def wait(self, timeout_s: float) -> bool:
        """At the end of the process: wait for all drains; what has not ended after `timeout_s` answers with an error.

        Returns:
            False if something still runs.
        """
        deadline_ns = monotonic_ns() + int(timeout_s * NS_PER_S)
        with self._lock:
            drains = list(self._active)
        for drain in drains:
            drain.thread.join(max((deadline_ns - monotonic_ns()) / NS_PER_S, 0.0))
        late = [drain for drain in drains if drain.thread.is_alive() and not drain.handle.close(0.0)]
        for drain in late:
            drain.after()  # the process is about to end without it
            logger.error("model %s version %s did not stop within %g s", drain.name, drain.version, timeout_s)
            if self._registry.state(drain.name, drain.version) is State.UNLOADING:
                self._registry.mark(drain.name, drain.version, State.UNAVAILABLE, "it did not stop in time")
        return not late

    def _run(self, drain: _Drain) -> None:
        try:
            drain.handle.close(None)
            self._on_closed(drain.handle)
            drain.after()
            logger.info("model %s version %s has ended", drain.name, drain.version)
        except BaseException:  # the index must not say for ever that it is being unloaded
            logger.exception("model %s version %s could not be closed", drain.name, drain.version)
        finally:
            with self._lock:
                self._active.discard(drain)
                others = any((other.name, other.version) == (drain.name, drain.version) for other in self._active)
                if not others:
                    self._registry.drained(drain.name, drain.version)
