"""Which loaded versions are in the memory of GPUs, who makes room for another, and who comes back when.

A version that does not fit because of others is let in by parking those that were used longest ago. A request to a parked
version brings it back the same way. So that two models that do not fit together take turns instead of chasing each other, a
version stays for a while once it is loaded, unless nobody uses it; who waits for room is served first come first.

    loaded --(make_room: used longest ago)--> parked --(wanted, and there is or can be room)--> loaded
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.ledger import HOST, Account, Ledger, NoRoom, format_bytes
from headrace.scheduling.handle import ModelHandle

logger = logging.getLogger("headrace.memory")

# Once loaded a version that is in use stays this long, or as long as the loading took: at least half of the time is served.
_MIN_RESIDENCE_NS = NS_PER_S
# A version that nobody has used for so long is not in use.
_IDLE_NS = NS_PER_S // 10
# What a version may take to answer what it runs before it is parked; one that does not is left alone for longer.
_EVICT_TIMEOUT_S = 10.0
_RETRY_EVICTION_NS = 60 * NS_PER_S
# How long the end of versions that are unloaded is waited for before others are parked in their place.
_DRAIN_S = 2.0
_MAX_BACKOFF_S = 30
# Between two attempts for somebody who waits for others to leave.
_MIN_WAIT_NS = NS_PER_S // 100


@dataclass(slots=True, eq=False)
class CachedModel:
    """A version that has been loaded.

    Attributes:
        handle: of it.
        keep: it is never parked.
        reopen: loads it anew and unparks the handle; gives the account of what it holds then.
        needs: what it holds by GPU while it is loaded, in bytes.
        loaded_ns: monotonic, when it was loaded last.
        stays_ns: monotonic, until when it stays while it is in use.
        stuck_ns: monotonic, before when nobody tries to park it again.
        failures: loads on demand that have failed since it was loaded last.
        problem: why the last one did; "" if it did not.
        next_ns: monotonic, before when it is not tried again.
    """

    handle: ModelHandle
    keep: bool
    reopen: Callable[[], Account]
    needs: dict[int, int] = field(default_factory=dict)
    loaded_ns: int = 0
    stays_ns: int = 0
    stuck_ns: int = 0
    failures: int = 0
    problem: str = ""
    next_ns: int = 0

    @property
    def name(self) -> str:
        """Model and version."""
        return f"{self.handle.spec.name}/{self.handle.spec.version}"

    @property
    def serves(self) -> bool:
        """It is in memory, and does not end by itself."""
        return self.handle.alive > 0 and not self.handle.parked and not self.handle.closing

    @property
    def last_ns(self) -> int:
        """Monotonic, when it was used last, or loaded."""
        return max(self.handle.used_ns, self.loaded_ns)

    def leaves_ns(self) -> int:
        """Monotonic, when it may be parked for somebody who waits."""
        handle = self.handle
        if handle.in_flight or handle.depth:
            return self.stays_ns
        return min(self.stays_ns, handle.used_ns + _IDLE_NS) if handle.used_ns else 0


@dataclass(slots=True)
class LoadCounts:
    """Of one version.

    Attributes:
        count: how often it was loaded.
        time_ns: what that took, all together.
        last_ns: what the last load took.
        on_demand: how often because a request waited.
        evictions: how often it was parked for another.
    """

    count: int = 0
    time_ns: int = 0
    last_ns: int = 0
    on_demand: int = 0
    evictions: int = 0


class GpuModelCache:
    """The tenants of all GPUs.

    Ownership: `_wanted`, `_notified`, `_loads` and `_ended` are guarded by `_lock`, as is who comes into `_models` and leaves it;
    `_gone` tells under it that somebody left. Tenants belong to the control thread.

    Args:
        ledger: of their memory.
        clock: monotonic nanoseconds.

    Attributes:
        ledger: as given.
        clock: as given.
        on_wanted: called from any thread when a request waits for a parked version: `serve` is to be called.
        on_change: called on the control thread when a version was parked, is back, or could not be loaded.
    """

    def __init__(self, ledger: Ledger | None = None, clock: Clock = monotonic_ns) -> None:
        self.ledger = ledger or Ledger()
        self.clock = clock
        self.on_wanted: Callable[[], None] = lambda: None
        self.on_change: Callable[[ModelHandle], None] = lambda _handle: None
        self._lock = threading.Lock()
        self._gone = threading.Condition(self._lock)
        self._models: dict[ModelHandle, CachedModel] = {}
        self._wanted: dict[ModelHandle, None] = {}  # in the order in which they were asked for
        self._loads: dict[tuple[str, str], LoadCounts] = {}
        self._notified = False  # `on_wanted` was called, and `serve` has not been since
        self._ended: HeadraceError | None = None

    # For the loader, on the control thread

    def add(
        self, handle: ModelHandle, account: Account, keep: bool, reopen: Callable[[], Account], begun_ns: int
    ) -> None:
        """A version has been loaded.

        Args:
            handle: of it.
            account: of what it holds.
            keep: it is never parked.
            reopen: loads it anew and unparks the handle.
            begun_ns: monotonic, when the loading began.
        """
        model = CachedModel(handle, keep, reopen)
        with self._lock:
            self._models[handle] = model
        self._settle_in(model, account, begun_ns)

    def make_room(self, error: NoRoom, name: str) -> bool:
        """Park others for a version that is to be loaded now, those in use too if it must be.

        Args:
            error: why it could not be loaded.
            name: model and version.

        Returns:
            False if there is nothing to be done.
        """
        if not error.others:
            return False
        if self._await_ends(error.gpu):
            return True
        now_ns = self.clock()
        victims = [model for model in self._candidates(error.gpu) if model.name != name]
        if sum(model.needs[error.gpu] for model in victims) < error.lacking_bytes:
            return False
        victims.sort(key=lambda model: (model.leaves_ns() > now_ns, model.last_ns))
        return self._park(victims, error.gpu, error.lacking_bytes, name)

    # For the control thread

    def serve(self) -> int | None:
        """Bring back what is wanted, as far as there can be room now.

        Returns:
            Monotonic, when to call again for what still has to wait; None if nothing does.
        """
        with self._lock:
            wanted, self._wanted = list(self._wanted), {}  # who asks from here on asks anew
            self._notified = False
        waiting: list[ModelHandle] = []
        due_ns: int | None = None
        blocked: set[int] = set()  # GPUs that somebody who came earlier waits for
        for handle in wanted:
            model = self._models.get(handle)
            if model is None or not handle.parked:
                continue
            if not blocked & model.needs.keys():
                at_ns = self._possible_ns(model)
                if at_ns <= self.clock():
                    at_ns = self._bring_back(model)
                if not at_ns:
                    continue
                due_ns = at_ns if due_ns is None else min(due_ns, at_ns)
            blocked |= model.needs.keys()
            waiting.append(handle)
        with self._lock:
            self._wanted = {**dict.fromkeys(waiting), **self._wanted}
        return due_ns

    def end(self, error: HeadraceError) -> None:
        """Bring nothing back any more: what waits for a parked version, and what comes, is answered with an error."""
        with self._lock:
            self._ended = error
            handles = [*self._models]
        for handle in handles:
            if handle.parked:
                handle.refuse(error)

    # From any thread

    def wanted(self, handle: ModelHandle) -> None:
        """A request waits for a version that is parked."""
        with self._lock:
            ended = self._ended
            news = ended is None and not self._notified
            if ended is None:
                self._wanted[handle], self._notified = None, True
        if news:
            self.on_wanted()
        if ended is not None:
            handle.refuse(ended)

    def forget(self, handle: ModelHandle) -> None:
        """A version has been closed."""
        with self._gone:
            self._wanted.pop(handle, None)
            if self._models.pop(handle, None) is not None:
                key = _key(handle)
                if all(_key(other) != key for other in self._models):
                    self._loads.pop(key, None)
            self._gone.notify_all()

    def problem(self, handle: ModelHandle) -> str:
        """Why a parked version could not be brought back; "" if it was not tried, or is back."""
        model = self._models.get(handle)
        return "" if model is None else model.problem

    def loads(self) -> list[tuple[str, str, LoadCounts]]:
        """Model, version and counts of all that is loaded or parked."""
        with self._lock:
            return [(model, version, replace(loads)) for (model, version), loads in sorted(self._loads.items())]

    # Within, on the control thread

    def _candidates(self, gpu: int) -> list[CachedModel]:
        """Who might make room on a GPU at some time."""
        now_ns = self.clock()
        return [
            model
            for model in list(self._models.values())
            if gpu in model.needs and not model.keep and model.serves and model.stuck_ns <= now_ns
        ]

    def _lacking(self, gpu: int, need_bytes: int) -> int:
        limit = self.ledger.limits.get(gpu)
        return 0 if limit is None else max(self.ledger.held(gpu) + need_bytes - limit, 0)

    def _possible_ns(self, model: CachedModel) -> int:
        """Monotonic, when a version can come back: once enough of the others may be parked; now if that is never."""
        at_ns = model.next_ns
        for gpu, need_bytes in model.needs.items():
            lacking = self._lacking(gpu, need_bytes)
            leaving = sorted((other.leaves_ns(), other.needs[gpu]) for other in self._candidates(gpu))
            if lacking > sum(size_bytes for _, size_bytes in leaving):
                continue
            for leaves_ns, size_bytes in leaving:
                if lacking <= 0:
                    break
                lacking -= size_bytes
                at_ns = max(at_ns, leaves_ns)
        return at_ns

    def _bring_back(self, model: CachedModel) -> int:
        """Load a version anew; 0 if it is back or those who wait have been refused, else when to try again."""
        for gpu, need_bytes in model.needs.items():
            if self._lacking(gpu, need_bytes):
                self._await_ends(gpu)
            if (lacking_bytes := self._lacking(gpu, need_bytes)) > 0:
                self._park_idle(gpu, lacking_bytes, model)
        begun_ns = self.clock()
        while True:
            try:
                account = model.reopen()
            except NoRoom as error:
                if error.others and (
                    self._await_ends(error.gpu) or self._park_idle(error.gpu, error.lacking_bytes, model)
                ):
                    continue
                later = self._candidates(error.gpu) if error.others else []
                if later and sum(other.needs[error.gpu] for other in later) >= error.lacking_bytes:
                    leaves_ns = min(other.leaves_ns() for other in later)
                    return max(leaves_ns, self.clock() + _MIN_WAIT_NS)
                self._put_off(model, error)
            except HeadraceError as error:
                self._put_off(model, error)
            except Exception:
                logger.exception("model %s could not be loaded again", model.name)
                self._put_off(model, HeadraceError("the server's log has the cause"))
            else:
                self._settle_in(model, account, begun_ns, on_demand=True)
                logger.info("model %s is back: a request waited for it", model.name)
                self.on_change(model.handle)
            return 0

    def _settle_in(self, model: CachedModel, account: Account, begun_ns: int, on_demand: bool = False) -> None:
        now_ns = self.clock()
        model.needs = {gpu: size_bytes for gpu, size_bytes in account.held().items() if gpu != HOST}
        model.loaded_ns, model.stays_ns = now_ns, now_ns + max(_MIN_RESIDENCE_NS, now_ns - begun_ns)
        model.failures, model.problem, model.next_ns = 0, "", 0
        with self._lock:
            loads = self._loads.setdefault(_key(model.handle), LoadCounts())
            loads.count += 1
            loads.last_ns = now_ns - begun_ns
            loads.time_ns += loads.last_ns
            loads.on_demand += on_demand

    def _put_off(self, model: CachedModel, error: HeadraceError) -> None:
        """It cannot be loaded: those who wait are told, and who comes next waits for a while."""
        wait_s = min(1 << model.failures, _MAX_BACKOFF_S)
        model.failures += 1
        model.problem = str(error)
        model.next_ns = self.clock() + wait_s * NS_PER_S
        logger.error("model %s could not be loaded for a request: %s", model.name, error)
        self.on_change(model.handle)
        message = f"model '{model.handle.spec.name}' is out of memory and could not be loaded again: {error}"
        model.handle.refuse(Unavailable(message, wait_s))

    def _park_idle(self, gpu: int, lacking_bytes: int, requester: CachedModel) -> bool:
        """Park those that may leave now, used longest ago first; False if nobody was: none may, or it would not help."""
        now_ns, candidates = self.clock(), self._candidates(gpu)
        if sum(model.needs[gpu] for model in candidates) < lacking_bytes:
            return False
        victims = [model for model in candidates if model.leaves_ns() <= now_ns]
        victims.sort(key=lambda model: model.last_ns)
        return self._park(victims, gpu, lacking_bytes, requester.name)

    def _park(self, victims: Iterable[CachedModel], gpu: int, lacking_bytes: int, requester: str) -> bool:
        freed_bytes = 0
        for victim in victims:
            if freed_bytes and freed_bytes >= lacking_bytes:
                break
            if not victim.handle.park(_EVICT_TIMEOUT_S):
                logger.warning("model %s cannot make room for %s: it does not come to an end", victim.name, requester)
                victim.stuck_ns = self.clock() + _RETRY_EVICTION_NS
                continue
            freed_bytes += victim.needs[gpu]
            freed = format_bytes(victim.needs[gpu])
            logger.info("model %s makes room for %s: %s of GPU %d", victim.name, requester, freed, gpu)
            with self._lock:
                self._loads[_key(victim.handle)].evictions += 1
            self.on_change(victim.handle)
        return freed_bytes > 0

    def _await_ends(self, gpu: int) -> bool:
        """Wait for a version that is being closed to give back what it holds of a GPU; False if none does soon."""

        def ending() -> int:
            found = [t for t in self._models.values() if gpu in t.needs and t.handle.closing and not t.handle.parked]
            return len(found)

        with self._gone:
            before = ending()
            return before > 0 and self._gone.wait_for(lambda: ending() < before, _DRAIN_S)


def _key(handle: ModelHandle) -> tuple[str, str]:
    return handle.spec.name, handle.spec.version
