"""Keeps the most recently used model versions in memory, evicts others, and loads evicted versions on demand.

The memory is that of each GPU, and the budget of host memory (`CPU`) for the models that the CPU runs. Under that budget a
version begins evicted: its first request loads it.

A version that does not fit evicts the least recently used versions. A request to an evicted version loads it again in the same
way. Each loaded version stays for a minimum time while it is in use, so that two models that do not fit together take turns
instead of evicting each other at once. Versions that wait for memory are served first come, first served.

    loaded --(make_room: least recently used)--> evicted --(requested, and memory is or can be freed)--> loaded
    loaded --(evict_idle: no request for `idle_ns`)--> evicted
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from headrace.core.cancellation import current_cancellation
from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.ledger import CPU, HOST, Ledger, MemoryAccount, NoRoom, format_bytes
from headrace.core.telemetry import LoadCounts
from headrace.inference.scheduling.version_handle import VersionHandle

logger = logging.getLogger("headrace.memory")

_T = TypeVar("_T")

# Minimum time in memory of a version in use, or its load time if longer: at least half of the time is spent serving.
_MIN_RESIDENCE_NS = NS_PER_S
# A version without a request for this long is not in use.
_IDLE_NS = NS_PER_S // 10
# Timeout for the requests that a version runs when it is evicted; after a timeout it is not evicted again for a while.
_EVICT_TIMEOUT_S = 10.0
_RETRY_EVICTION_NS = 60 * NS_PER_S
# Maximum wait for versions that are being closed before other versions are evicted instead.
_DRAIN_S = 2.0
_MAX_BACKOFF_S = 30
# A load that waits for others looks so often, in seconds, whether it is cancelled.
_LOOK_S = 0.2
# Looks at a version within its `idle_ns`, for requests in flight.
_IDLE_LOOKS = 8
# Minimum time between two attempts to load a version that waits for evictions.
_MIN_WAIT_NS = NS_PER_S // 100


OnChange = Callable[[VersionHandle], None]


def ignore_change(_handle: VersionHandle) -> None:
    """Default of `on_change`."""


@dataclass(slots=True, eq=False)
class CachedModel:
    """A model version in the cache, loaded or evicted. Times are monotonic nanoseconds.

    Attributes:
        handle: handle of the version.
        is_pinned: the version is never evicted (`keep_loaded`).
        reopen: loads the version again and returns the account of its memory.
        on_change: called with the handle, on the thread of a load, when the version was evicted or loaded again, or could not be
            loaded.
        idle_ns: time without a request after which it is evicted; 0 for never.
        memory_bytes: bytes that it holds while loaded, by GPU, or of `CPU`; expected bytes before its first load.
        loaded_ns: time of the last load.
        busy_ns: time of the last `evict_idle` that found it in use.
        protected_until_ns: end of its minimum time in memory while it is in use.
        retry_eviction_ns: no eviction is attempted before this time.
        failures: failed loads on demand since the last successful load.
        problem: error of the last load on demand; "" if it succeeded.
        is_broken: that error is none of lacking memory, so that requests are refused until the next attempt.
        retry_load_ns: no load is attempted before this time.
        is_loading: a load on demand of it waits or runs.
        is_evicting: an eviction after `idle_ns` waits or runs.
    """

    handle: VersionHandle
    is_pinned: bool
    reopen: Callable[[], MemoryAccount]
    on_change: OnChange
    idle_ns: int = 0
    memory_bytes: dict[int, int] = field(default_factory=dict)
    loaded_ns: int = 0
    busy_ns: int = 0
    protected_until_ns: int = 0
    retry_eviction_ns: int = 0
    failures: int = 0
    problem: str = ""
    is_broken: bool = False
    retry_load_ns: int = 0
    is_loading: bool = False
    is_evicting: bool = False

    @property
    def name(self) -> str:
        """Model and version."""
        return f"{self.handle.spec.name}/{self.handle.spec.version}"

    @property
    def is_serving(self) -> bool:
        """True while it is in memory and not being closed."""
        return self.handle.alive > 0 and not self.handle.evicted and not self.handle.closing

    @property
    def last_used_ns(self) -> int:
        """Time of its last request or load, in monotonic nanoseconds."""
        return max(self.handle.used_ns, self.loaded_ns)

    @property
    def is_in_use(self) -> bool:
        """True while it has requests, a pipeline that runs has a lease, or a sequence is live."""
        return bool(self.handle.in_flight or self.handle.depth or self.handle.live_sequences)

    @property
    def idle_end_ns(self) -> int:
        """Time from which it is evicted without another request, in monotonic nanoseconds."""
        return max(self.last_used_ns, self.busy_ns) + self.idle_ns

    def evictable_ns(self) -> int:
        """Time from which it may be evicted for a version that waits, in monotonic nanoseconds."""
        handle = self.handle
        if handle.in_flight or handle.depth:
            return self.protected_until_ns
        return min(self.protected_until_ns, handle.used_ns + _IDLE_NS) if handle.used_ns else 0


class GpuModelCache:
    """LRU cache of model versions in the memory of all GPUs, and in the budget of host memory.

    Ownership: `_lock` guards `_requests`, `_notified`, `_loads`, `_load_error`, `_handles`, `_attempts`, `_ended` and the keys of
    `_models`. `_changed` is its condition and signals removals and ends of attempts. A `CachedModel` object belongs to the load
    that has set `is_loading`, else to the holder of `_eviction_lock`. `_short_of_memory` is held by a load from the first
    reservation that fails to its end. Lock order: `_short_of_memory`, `_eviction_lock`, `_lock`.

    Args:
        ledger: memory accounts of the GPUs and the host.
        clock: monotonic nanoseconds.

    Attributes:
        ledger: memory accounts of the GPUs and the host.
        clock: monotonic nanoseconds.
    """

    def __init__(self, ledger: Ledger | None = None, clock: Clock = monotonic_ns) -> None:
        self.ledger = ledger or Ledger()
        self.clock = clock
        self._short_of_memory = threading.Lock()
        self._eviction_lock = threading.Lock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._attempts = self._ended = 0  # loads that reserve memory now, and those that did
        self._models: dict[VersionHandle, CachedModel] = {}
        self._handles: Counter[tuple[str, str]] = Counter()  # number of `_models`, by model and version
        self._requests: dict[VersionHandle, None] = {}  # in the order of the requests
        self._started: list[CachedModel] = []  # loads that `load_requested` has started, of the control thread
        self._loads: dict[tuple[str, str], LoadCounts] = {}
        self._notified = False  # `request` has returned True, and `load_requested` was not called since
        self._lost: deque[str] = deque()  # models whose GPUs have all failed
        self._load_error: HeadraceError | None = None

    # For the loader

    def load(self, load: Callable[[], _T], name: str) -> _T:
        """Call `load`, which reserves memory, and return its result; evicts other versions if memory is short.

        Loads side by side may need the memory that another one has reserved: one that fails for it is called again once another
        has ended. Such loads take turns.

        Args:
            load: loads a version; called again after evictions.
            name: model and version.

        Raises:
            NoRoom: it does not fit, and evictions cannot help.
        """
        with self._turn() as take_turn:
            while True:
                begun_after = self._ended
                try:
                    with self._attempt():
                        return load()
                except NoRoom as error:
                    take_turn(error)
                    if not self.make_room(error, name) and not (error.others and self._wait_for_loads(begun_after + 1)):
                        raise

    def add(
        self,
        handle: VersionHandle,
        account: MemoryAccount,
        is_pinned: bool,
        reopen: Callable[[], MemoryAccount],
        begun_ns: int,
        on_change: OnChange = ignore_change,
        idle_ns: int = 0,
    ) -> None:
        """Add a version that has been loaded.

        Args:
            handle: handle of the version.
            account: account of its memory.
            is_pinned: never evict it.
            reopen: loads it again after an eviction.
            begun_ns: start of the load, monotonic nanoseconds.
            on_change, idle_ns: see `CachedModel`.
        """
        model = CachedModel(handle, is_pinned, reopen, on_change, idle_ns)
        self._add(model)
        self._record_load(model, account, begun_ns)

    def add_evicted(
        self,
        handle: VersionHandle,
        expected_bytes: dict[int, int],
        reopen: Callable[[], MemoryAccount],
        on_change: OnChange = ignore_change,
        idle_ns: int = 0,
    ) -> None:
        """Add a version that its first request loads.

        Args:
            handle: handle of the version, which is evicted.
            expected_bytes: memory that it will need, by GPU or of `CPU`.
            reopen: loads it.
            on_change, idle_ns: see `CachedModel`.
        """
        self._add(CachedModel(handle, False, reopen, on_change, idle_ns, expected_bytes))

    def make_room(self, error: NoRoom, name: str) -> bool:
        """Evict other versions for a version that is loaded now; versions in use only if there are no others.

        Args:
            error: the failed allocation.
            name: model and version.

        Returns:
            True if memory was freed, False if evictions cannot help.
        """
        if not error.others:
            return False
        return self._wait_for_closing(error.gpu) or self._evict(error.gpu, error.lacking_bytes, name)

    @contextmanager
    def _turn(self) -> Iterator[Callable[[NoRoom], None]]:
        """Yield a function that takes the turn of loads that lack memory, once; the turn ends with the block."""
        with ExitStack() as stack:
            has_turn = False

            def take_turn(error: NoRoom) -> None:
                nonlocal has_turn
                if error.others and not has_turn:
                    stack.enter_context(self._short_of_memory)
                    has_turn = True

            yield take_turn

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        with self._changed:
            self._attempts += 1
        try:
            yield
        finally:
            with self._changed:
                self._attempts -= 1
                self._ended += 1
                self._changed.notify_all()

    def _wait_for_loads(self, ended: int) -> bool:
        """Wait until more than `ended` attempts have ended; False if no other load runs."""
        cancellation = current_cancellation()
        with self._changed:
            while self._ended <= ended and self._attempts:
                self._changed.wait(_LOOK_S)
                cancellation.check()
            return self._ended > ended

    # For the control thread

    def load_requested(self, start_load: Callable[[VersionHandle, Callable[[], None]], None]) -> int | None:
        """Start the loads of the requested versions for which there is memory now.

        Args:
            start_load: runs the load of a version on another thread, after which the control thread wakes up.

        Returns:
            Time of the next call for versions that still wait, in monotonic nanoseconds; None if none waits.
        """
        with self._lock:
            requests, self._requests = list(self._requests), {}  # later requests are new entries
            self._notified = False
        self._started = [each for each in self._started if each.is_loading and each.handle in self._models]
        waiting: list[VersionHandle] = []
        due_ns: int | None = None
        blocked: set[int] = set()  # GPUs that an earlier request waits for
        for handle in requests:
            model = self._models.get(handle)
            if model is None or not handle.evicted or model.is_loading:
                continue
            if model.is_broken and self.clock() < model.retry_load_ns:
                self._refuse(model)
                continue
            if not blocked & model.memory_bytes.keys():
                load_ns = self._possible_ns(model)
                if load_ns <= self.clock():
                    model.is_loading = True
                    self._started.append(model)
                    start_load(handle, partial(self._load_requested, model))
                    continue
                due_ns = load_ns if due_ns is None else min(due_ns, load_ns)
            blocked |= model.memory_bytes.keys()
            waiting.append(handle)
        with self._lock:
            self._requests = {**dict.fromkeys(waiting), **self._requests}
        return due_ns

    def evict_idle(self, start: Callable[[VersionHandle, Callable[[], None]], None]) -> int | None:
        """Start the evictions of the versions that had no request for their `idle_ns`.

        Args:
            start: runs an eviction on another thread, as a load in `load_requested`.

        Returns:
            Time of the next call, in monotonic nanoseconds; None if no loaded version has an `idle_ns`.
        """
        now_ns, looks_ns = self.clock(), list[int]()
        for model in list(self._models.values()):
            if not model.idle_ns or not model.is_serving or model.is_loading or model.is_evicting:
                continue
            if model.is_in_use:
                model.busy_ns = now_ns
            elif now_ns >= model.idle_end_ns and now_ns >= model.retry_eviction_ns:
                model.is_evicting = True
                start(model.handle, partial(self._evict_idle, model))
            look_ns = now_ns + model.idle_ns // _IDLE_LOOKS
            looks_ns.append(min(look_ns, model.idle_end_ns) if model.idle_end_ns > now_ns else look_ns)
        return min(looks_ns, default=None)

    def stop(self, error: HeadraceError) -> None:
        """Stop loading on demand: queued and future requests to evicted versions fail with `error`."""
        with self._lock:
            self._load_error = error
            handles = [*self._models]
        for handle in handles:
            if handle.evicted:
                handle.refuse(error)

    # From any thread

    def request(self, handle: VersionHandle) -> bool:
        """Queue an evicted version for which a request waits; callable from any thread.

        Args:
            handle: handle of the version.

        Returns:
            True if the control thread must wake up, to call `load_requested`.
        """
        with self._lock:
            load_error = self._load_error
            should_notify = load_error is None and not self._notified
            if load_error is None:
                self._requests[handle], self._notified = None, True
        if load_error is not None:
            handle.refuse(load_error)
        return should_notify

    def add_lost(self, name: str) -> None:
        """Note a model whose GPUs have all failed; the control thread must wake up, to call `take_lost`."""
        self._lost.append(name)

    def take_lost(self) -> Iterator[str]:
        """Remove and yield the models whose GPUs have all failed."""
        while self._lost:
            yield self._lost.popleft()

    def end_on(self, gpus: frozenset[int]) -> None:
        """End the instances on GPUs that have failed; the memory of these GPUs is not needed for a load any more."""
        for model in list(self._models.values()):
            if gpus.isdisjoint(model.memory_bytes):
                continue
            if model.handle.evicted:
                model.memory_bytes = {gpu: each for gpu, each in model.memory_bytes.items() if gpu not in gpus}
            model.handle.end_on(gpus)

    def remove(self, handle: VersionHandle) -> None:
        """Remove a version that has been closed."""
        with self._changed:
            self._requests.pop(handle, None)
            if self._models.pop(handle, None) is not None:
                key = _key(handle)
                self._handles[key] -= 1
                if not self._handles[key]:
                    del self._handles[key]
                    self._loads.pop(key, None)
            self._changed.notify_all()

    def describe(self, handle: VersionHandle) -> str:
        """Return the state of an evicted version for the index, with the error of its last load on demand."""
        model = self._models.get(handle)
        state = "evicted" if model is None or model.loaded_ns else "not loaded"
        if model is not None and model.problem:
            return f"{state}: loading on demand failed: {model.problem}"
        return f"{state}: loaded on demand"

    def loads(self) -> list[tuple[str, str, LoadCounts]]:
        """Model, version and counters of all loaded and evicted versions."""
        with self._lock:
            return [(model, version, replace(loads)) for (model, version), loads in sorted(self._loads.items())]

    # Within

    def _add(self, model: CachedModel) -> None:
        with self._lock:
            if model.handle not in self._models:
                self._handles[_key(model.handle)] += 1
            self._models[model.handle] = model

    def _candidates(self, gpu: int) -> list[CachedModel]:
        """Versions on a GPU that may be evicted at some time."""
        now_ns = self.clock()
        return [
            model
            for model in list(self._models.values())
            if gpu in model.memory_bytes
            and not model.is_pinned
            and model.is_serving
            and not model.is_loading
            and model.retry_eviction_ns <= now_ns
        ]

    def _lacking(self, gpu: int, need_bytes: int) -> int:
        limit = self.ledger.limits.get(gpu)
        return 0 if limit is None else max(self.ledger.reserved_bytes(gpu) + need_bytes - limit, 0)

    def _possible_ns(self, model: CachedModel) -> int:
        """Earliest load time: when enough of the others may be evicted; `retry_load_ns` if that never frees enough.

        Loads that were started before have their memory first; if the rest is too small, the next look is in `_LOOK_S`.
        """
        load_ns = model.retry_load_ns
        for gpu, need_bytes in model.memory_bytes.items():
            started_bytes = sum(each.memory_bytes.get(gpu, 0) for each in self._started)
            lacking = self._lacking(gpu, need_bytes + started_bytes)
            if not lacking:
                continue
            evictable = sorted((other.evictable_ns(), other.memory_bytes[gpu]) for other in self._candidates(gpu))
            if lacking > sum(size_bytes for _, size_bytes in evictable):
                if started_bytes:
                    load_ns = max(load_ns, self.clock() + int(_LOOK_S * NS_PER_S))
                continue
            for evictable_ns, size_bytes in evictable:
                if lacking <= 0:
                    break
                lacking -= size_bytes
                load_ns = max(load_ns, evictable_ns)
        return load_ns

    def _load_requested(self, model: CachedModel) -> None:
        """Load a version on a thread of its own; it is requested again if it must wait."""
        load_ns = 0
        try:
            load_ns = self._reload(model)
        finally:
            model.retry_load_ns = load_ns or model.retry_load_ns
            model.is_loading = False
            # `load_requested` skips versions that load: a request that came after the refusal of a failed load is queued here.
            if load_ns or (model.handle.evicted and model.handle.depth):
                self.request(model.handle)

    def _reload(self, model: CachedModel) -> int:
        """Load a version again; returns 0 if it is loaded or its requests were refused, else the time of the next attempt."""
        for gpu, need_bytes in model.memory_bytes.items():
            if self._lacking(gpu, need_bytes):
                self._wait_for_closing(gpu)
            if (lacking_bytes := self._lacking(gpu, need_bytes)) > 0:
                self._evict(gpu, lacking_bytes, model.name, idle_only=True)
        with self._turn() as take_turn:
            return self._try_to_reload(model, self.clock(), take_turn)

    def _try_to_reload(self, model: CachedModel, begun_ns: int, take_turn: Callable[[NoRoom], None]) -> int:
        while True:
            begun_after = self._ended
            try:
                with self._attempt():
                    account = model.reopen()
            except NoRoom as error:
                take_turn(error)
                if error.others and (
                    self._wait_for_closing(error.gpu)
                    or self._evict(error.gpu, error.lacking_bytes, model.name, idle_only=True)
                ):
                    continue
                candidates = self._candidates(error.gpu) if error.others else []
                if candidates and sum(other.memory_bytes[error.gpu] for other in candidates) >= error.lacking_bytes:
                    evictable_ns = min(other.evictable_ns() for other in candidates)
                    return max(evictable_ns, self.clock() + _MIN_WAIT_NS)
                if error.others and self._wait_for_loads(begun_after + 1):
                    continue
                self._back_off(model, error)
            except HeadraceError as error:
                self._back_off(model, error)
            except Exception:
                logger.exception("model %s could not be loaded again", model.name)
                self._back_off(model, HeadraceError("see the server's log for the cause"))
            else:
                self._record_load(model, account, begun_ns, on_demand=True)
                level = logging.DEBUG if CPU in model.memory_bytes else logging.INFO  # thousands of models, many times
                logger.log(level, "model %s is loaded again for a request", model.name)
                model.on_change(model.handle)
            return 0

    def _record_load(self, model: CachedModel, account: MemoryAccount, begun_ns: int, on_demand: bool = False) -> None:
        now_ns = self.clock()
        model.memory_bytes = {gpu: size_bytes for gpu, size_bytes in account.reserved_bytes().items() if gpu != HOST}
        model.loaded_ns, model.protected_until_ns = now_ns, now_ns + max(_MIN_RESIDENCE_NS, now_ns - begun_ns)
        model.failures, model.problem, model.is_broken, model.retry_load_ns = 0, "", False, 0
        with self._lock:
            loads = self._loads.setdefault(_key(model.handle), LoadCounts())
            loads.count += 1
            loads.last_ns = now_ns - begun_ns
            loads.time_ns += loads.last_ns
            loads.on_demand += on_demand

    def _back_off(self, model: CachedModel, error: HeadraceError) -> None:
        """Refuse the requests that wait for a version that cannot be loaded, and back off."""
        wait_s = min(1 << min(model.failures, 5), _MAX_BACKOFF_S)
        model.failures += 1
        model.problem = str(error)
        model.is_broken = model.memory_bytes.keys() <= {CPU} and not isinstance(error, NoRoom)
        model.retry_load_ns = self.clock() + wait_s * NS_PER_S
        logger.error("model %s could not be loaded for a request: %s", model.name, error)
        model.on_change(model.handle)
        self._refuse(model)

    def _refuse(self, model: CachedModel) -> None:
        """Refuse the requests that wait for a version, until the next attempt to load it."""
        wait_s = -(-max(model.retry_load_ns - self.clock(), 0) // NS_PER_S)
        state = "is out of memory and could not be loaded again" if model.loaded_ns else "could not be loaded"
        message = f"model '{model.handle.spec.name}' {state}: {model.problem}"
        model.handle.refuse(Unavailable(message, wait_s))

    def _evict(self, gpu: int, lacking_bytes: int, requester: str, idle_only: bool = False) -> bool:
        """Evict idle versions, then others unless `idle_only`, least recently used first.

        Returns:
            False if none was evicted: there is none, or all together would not help.
        """
        with self._eviction_lock:
            return self._evict_victims(gpu, lacking_bytes, requester, idle_only)

    def _evict_victims(self, gpu: int, lacking_bytes: int, requester: str, idle_only: bool) -> bool:
        now_ns, freed_bytes = self.clock(), 0
        victims = [model for model in self._candidates(gpu) if model.name != requester]
        if sum(model.memory_bytes[gpu] for model in victims) < lacking_bytes:
            return False
        if idle_only:
            victims = [model for model in victims if model.evictable_ns() <= now_ns]
        victims.sort(key=lambda model: (model.evictable_ns() > now_ns, model.last_used_ns))
        for victim in victims:
            if freed_bytes and freed_bytes >= lacking_bytes:
                break
            freed = format_bytes(victim.memory_bytes[gpu])
            memory = "host memory" if gpu == CPU else f"GPU {gpu}"
            if self._evict_one(victim, f"for {requester}: frees {freed} of {memory}"):
                freed_bytes += victim.memory_bytes[gpu]
        return freed_bytes > 0

    def _evict_idle(self, model: CachedModel) -> None:
        """Evict a version, unless it was used since `evict_idle`; a request that comes now loads it again."""
        try:
            with self._eviction_lock:
                if model.is_serving and not model.is_in_use and self.clock() >= model.idle_end_ns:
                    self._evict_one(model, f"after {model.idle_ns / NS_PER_S:g} s without a request")
        finally:
            model.is_evicting = False

    def _evict_one(self, victim: CachedModel, reason: str) -> bool:
        if not victim.handle.evict(_EVICT_TIMEOUT_S):
            logger.warning("model %s cannot be evicted %s: its requests did not end in time", victim.name, reason)
            victim.retry_eviction_ns = self.clock() + _RETRY_EVICTION_NS
            return False
        level = logging.DEBUG if CPU in victim.memory_bytes else logging.INFO  # thousands of models, many times
        logger.log(level, "model %s is evicted %s", victim.name, reason)
        with self._lock:
            if (loads := self._loads.get(_key(victim.handle))) is not None:  # not removed meanwhile
                loads.evictions += 1
        victim.on_change(victim.handle)
        return True

    def _wait_for_closing(self, gpu: int) -> bool:
        """Wait for a version that is being closed to free its GPU memory; False if none does in time."""

        def count_closing() -> int:
            on_gpu = [model.handle for model in self._models.values() if gpu in model.memory_bytes]
            return sum(handle.closing and not handle.evicted for handle in on_gpu)

        with self._changed:
            before = count_closing()
            return before > 0 and self._changed.wait_for(lambda: count_closing() < before, _DRAIN_S)


def _key(handle: VersionHandle) -> tuple[str, str]:
    return handle.spec.name, handle.spec.version
