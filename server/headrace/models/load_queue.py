"""Runs the loads of models side by side: which wait, which run, and the threads that run them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from headrace.core.cancellation import Cancellation, cancellable
from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import HeadraceError

logger = logging.getLogger("headrace.control")

# A load that takes longer leaves its place to another one, so that loads that hang do not stop those of other models.
_LONG_NS = 5 * NS_PER_S

OnEnd = Callable[[BaseException | None], None]
"""Called with the error of a load, None if it succeeded, on the thread that ends it."""


@dataclass(eq=False, slots=True)
class _Load:
    key: str
    action: Callable[[], None]
    on_end: OnEnd
    earlier: set[_Load]  # loads that end before this one begins
    later: list[_Load] = field(default_factory=list)  # loads that wait for this one
    cancellation: Cancellation = field(default_factory=Cancellation)
    begun_ns: int = 0
    is_settled: bool = False  # `on_end` has been called, or is being called


class LoadQueue:
    """Loads that wait or run, at most `threads` at once. Any thread may call any method; `_lock` guards all attributes.

    Loads with one key run in the order of `add`. No callback runs with the lock held.

    Args:
        threads: number of loads that run at once, without those that take longer than 5 s.
        on_thread_end: called on each thread when no load is left for it.
        clock: monotonic nanoseconds.
    """

    def __init__(
        self, threads: int, on_thread_end: Callable[[], object] = lambda: None, clock: Clock = monotonic_ns
    ) -> None:
        self._limit = threads
        self._on_thread_end = on_thread_end
        self._clock = clock
        self._lock = threading.Lock()
        # Loads that wait or run, by key in the order of `add`, without those that were dropped.
        self._loads: dict[str, list[_Load]] = {}
        self._ready: dict[_Load, None] = {}  # those of `_loads` that wait for no other
        self._running: set[_Load] = set()  # with those that were dropped and have not ended
        self._threads: set[threading.Thread] = set()
        self._stopped: HeadraceError | None = None

    def add(self, key: str, action: Callable[[], None], on_end: OnEnd, after: Collection[str] = ()) -> None:
        """Queue a load.

        Args:
            key: name of the model, or of what else is loaded.
            action: loads it, on a thread with the load's `current_cancellation`.
            on_end: called once. Loads that wait for this one begin after it, unless the load was dropped.
            after: keys; loads with one of them that are in the queue end first.
        """
        with self._lock:
            refusal = self._stopped
            if refusal is None:
                earlier = {load for each in {key, *after} for load in self._loads.get(each, ())}
                load = _Load(key, action, on_end, earlier)
                for other in earlier:
                    other.later.append(load)
                self._loads.setdefault(key, []).append(load)
                if not earlier:
                    self._ready[load] = None
        if refusal is not None:
            on_end(refusal)
        self.start_threads()

    def start_threads(self) -> None:
        """Start threads for the loads that may run now; called after `next_start_ns`, too."""
        while True:
            with self._lock:
                load = self._claim()
                if load is None:
                    return
                thread = threading.Thread(target=self._work, args=(load,), name=f"load {load.key}", daemon=True)
                try:
                    thread.start()  # with the lock: `join` meets no thread that has not started
                    self._threads.add(thread)
                    continue
                except RuntimeError as error:
                    reason = str(error)
            logger.warning("no thread for the load of %s (%s), so others wait for it", load.key, reason)
            self._run(load)

    def next_start_ns(self) -> int | None:
        """Return the time at which a running load becomes a long one, if loads wait for that; monotonic nanoseconds."""
        with self._lock:
            recent = self._recent()
            return min(load.begun_ns for load in recent) + _LONG_NS if recent and self._ready else None

    def keys(self) -> list[str]:
        """Return the keys of all loads that wait or run."""
        with self._lock:
            return list(self._loads)

    def has(self, key: str) -> bool:
        """Return True if a load with this key waits or runs."""
        with self._lock:
            return key in self._loads

    def is_running(self, key: str) -> bool:
        """Return True if a load with this key runs."""
        with self._lock:
            return any(load.key == key for load in self._running)

    @property
    def is_empty(self) -> bool:
        """True if no load waits or runs."""
        with self._lock:
            return not self._loads and not self._running

    def drop(self, key: str, error: HeadraceError) -> None:
        """End the loads with a key: they fail with `error` at once, and what a running one has loaded is to be closed.

        The loads that wait for them do so no longer.
        """
        with self._lock:
            dropped = self._drop(list(self._loads.get(key, ())))
        self._end(dropped, error)
        self.start_threads()

    def stop(self, error: HeadraceError) -> None:
        """End all loads, as `drop`, and refuse others."""
        with self._lock:
            self._stopped = error
            dropped = self._drop([load for loads in self._loads.values() for load in loads])
        self._end(dropped, error)

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads after `stop`; returns False if one still runs after `timeout_s`, in seconds."""
        end_ns = monotonic_ns() + int(timeout_s * NS_PER_S)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(end_ns - monotonic_ns(), 0) / NS_PER_S)
        return not any(thread.is_alive() for thread in threads)

    # With the lock held

    def _recent(self) -> list[_Load]:
        """Return the running loads that take a place."""
        now_ns = self._clock()
        return [load for load in self._running if now_ns - load.begun_ns < _LONG_NS]

    def _claim(self) -> _Load | None:
        """Return the next load, which runs from now on; None if none may run."""
        load = next(iter(self._ready), None)
        if load is None or len(self._recent()) >= self._limit:
            return None
        del self._ready[load]
        load.begun_ns = self._clock()
        self._running.add(load)
        return load

    def _remove(self, load: _Load) -> None:
        """Remove a load that has ended or is dropped, unless it is removed already."""
        loads = self._loads.get(load.key, [])
        if load not in loads:
            return
        loads.remove(load)
        if not loads:
            del self._loads[load.key]
        self._ready.pop(load, None)
        for other in load.later:
            other.earlier.discard(load)
            if not other.earlier and not other.is_settled:
                self._ready[other] = None

    def _drop(self, loads: Collection[_Load]) -> list[_Load]:
        """Remove loads; returns those that are not settled yet, as settled ones."""
        dropped = [load for load in loads if not load.is_settled]
        for load in dropped:
            load.is_settled = True
        for load in loads:
            self._remove(load)
        return dropped

    # Without it

    @staticmethod
    def _end(dropped: Collection[_Load], error: HeadraceError) -> None:
        for load in dropped:
            load.cancellation.cancel(error)
        for load in dropped:
            load.on_end(error)

    def _work(self, load: _Load | None) -> None:
        while load is not None:
            self._run(load)
            with self._lock:
                load = self._claim()
            self.start_threads()  # several loads may have waited for the one that has ended
        self._on_thread_end()
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _run(self, load: _Load) -> None:
        error: BaseException | None = None
        try:
            with cancellable(load.cancellation):
                load.action()
        except BaseException as raised:  # reported to `on_end`
            error = raised
        with self._lock:
            is_settled, load.is_settled = load.is_settled, True
        try:
            if not is_settled:
                load.on_end(error)
        except Exception:
            logger.exception("the end of the load of %s could not be reported", load.key)
        finally:
            with self._lock:
                self._running.discard(load)
                self._remove(load)
