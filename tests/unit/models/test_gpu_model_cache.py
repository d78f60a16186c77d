"""Evictions and reloads of the GPU model cache, in virtual time, with fake versions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.errors import ConfigError, Finding, Unavailable
from headrace.core.ledger import Kind, Ledger, MemoryAccount, NoRoom
from headrace.models.gpu_model_cache import GpuModelCache
from hypothesis import given
from hypothesis import strategies as st

MS = NS_PER_S // 1000


class FakeVersion:
    """Stands for a `ModelHandle` and for what loads it: books `needs` while it is not parked."""

    def __init__(self, world: World, name: str, needs: dict[int, int], load_ns: int, keep: bool, idle_ns: int) -> None:
        self.world = world
        self.spec = SimpleNamespace(name=name, version="1")
        self.needs = needs
        self.load_ns = load_ns
        self.alive = 1
        self.evicted = self.closing = False
        self.in_flight = self.depth = self.used_ns = self.live_sequences = 0
        self.stuck = False
        self.refused: list[str] = []
        self.failure: Exception | None = None
        self.account = self.open()
        begun_ns, on_change = world.now_ns - load_ns, world.changes.append
        world.gpu_model_cache.add(self, self.account, keep, self.reopen, begun_ns, on_change, idle_ns)  # type: ignore[arg-type]

    def open(self) -> MemoryAccount:
        account = self.world.gpu_model_cache.ledger.account(self.spec.name, "1")
        try:
            for gpu, size_bytes in self.needs.items():
                account.reservation(gpu, Kind.WEIGHTS, size_bytes)
        except NoRoom:
            account.close()
            raise
        return account

    def reopen(self) -> MemoryAccount:
        self.world.log.append(f"load {self.spec.name}")
        if self.failure is not None:
            raise self.failure
        self.account = self.open()
        self.world.now_ns += self.load_ns
        self.evicted, self.alive = False, 1
        return self.account

    def evict(self, timeout_s: float) -> bool:
        assert not self.evicted
        if self.stuck:
            self.world.now_ns += int(timeout_s * NS_PER_S)
            return False
        self.world.log.append(f"park {self.spec.name}")
        self.account.close()
        self.evicted, self.alive = True, 0
        if self.depth:
            self.world.notifications += self.world.gpu_model_cache.request(self)  # type: ignore[arg-type]
        return True

    def refuse(self, error: Exception) -> None:
        self.refused.append(str(error))
        self.depth = 0

    # What the test does

    def add_request(self) -> None:
        """A request comes and waits."""
        self.depth += 1
        self.used_ns = self.world.now_ns
        if self.evicted:
            self.world.notifications += self.world.gpu_model_cache.request(self)  # type: ignore[arg-type]


class World:
    def __init__(self, **limits: int) -> None:
        self.now_ns = 100 * NS_PER_S
        self.log: list[str] = []
        self.notifications = 0
        ledger = Ledger()
        for gpu, limit in limits.items():
            ledger.set_limit(int(gpu.removeprefix("gpu")), limit)
        self.gpu_model_cache = GpuModelCache(ledger, lambda: self.now_ns)
        self.changes: list[Any] = []
        self.started: list[Callable[[], None]] = []  # loads on other threads, which run later

    def load_requested(self) -> int | None:
        return self.gpu_model_cache.load_requested(lambda _handle, load: self.started.append(load))

    def evict_idle(self) -> int | None:
        """As the control thread does it; evictions run at once."""
        due_ns = self.gpu_model_cache.evict_idle(lambda _handle, evict: self.started.append(evict))
        while self.started:
            self.started.pop(0)()
        return due_ns

    def load(
        self,
        name: str,
        size: int | dict[int, int] = 10,
        load_ns: int = 0,
        keep: bool = False,
        idle_ns: int = 0,
    ) -> FakeVersion:
        """As the loader does it."""
        needs = {0: size} if isinstance(size, int) else size
        while True:
            try:
                return FakeVersion(self, name, needs, load_ns, keep, idle_ns)
            except NoRoom as error:
                if not self.gpu_model_cache.make_room(error, f"{name}/1"):
                    raise

    def serve(self, after_ns: int = 0) -> int | None:
        self.now_ns += after_ns
        due_ns = self.load_requested()
        while self.started:
            self.started.pop(0)()
        return due_ns


def test_the_least_recently_used_model_is_evicted() -> None:
    world = World(gpu0=30)
    a, b, c = (world.load(name) for name in "abc")
    for version in (c, a, b):
        world.now_ns += NS_PER_S
        version.used_ns = world.now_ns
    world.now_ns += NS_PER_S
    world.load("d")
    assert world.log == ["park c"]
    world.load("e", 20)
    assert world.log == ["park c", "park a", "park b"]


def test_busy_models_are_evicted_last_and_only_if_that_makes_enough_room() -> None:
    world = World(gpu0=30)
    a, b, _ = (world.load(name) for name in "abc")
    a.in_flight = 1
    a.used_ns = world.now_ns
    b.used_ns = world.now_ns + 1
    world.now_ns += NS_PER_S // 2
    world.load("d", 20)
    assert world.log == ["park c", "park b"]
    with pytest.raises(NoRoom):
        world.load("e", 31)
    world.load("f", 30)
    assert world.log == ["park c", "park b", "park d", "park a"]


def test_pinned_models_and_other_gpus_are_not_touched() -> None:
    world = World(gpu0=20, gpu1=20)
    world.load("pinned", 10, keep=True)
    world.load("elsewhere", {1: 20})
    world.load("here", 10)
    with pytest.raises(NoRoom):
        world.load("large", 15)
    assert world.log == [], "no model is evicted in vain"
    world.load("small", 10)
    assert world.log == ["park here"]


def test_a_request_reloads_a_version_at_once_if_no_other_is_busy() -> None:
    world = World(gpu0=10)
    a = world.load("a")
    b = world.load("b")
    assert world.log == ["park a"]
    a.add_request()
    assert world.notifications == 1
    assert world.serve() is None
    assert world.log == ["park a", "park b", "load a"]
    assert (a.evicted, b.evicted) == (False, True)
    assert world.gpu_model_cache.describe(a) == "evicted: loaded on demand"  # type: ignore[arg-type]


def test_a_request_evicts_the_least_recently_used_model() -> None:
    world = World(gpu0=30)
    a = world.load("a")
    b, c, d = (world.load(name) for name in "bcd")
    for version in (c, d, b):
        world.now_ns += NS_PER_S
        version.used_ns = world.now_ns
    world.now_ns += NS_PER_S
    a.add_request()
    assert world.serve() is None
    assert world.log == ["park a", "park c", "load a"]


@pytest.mark.parametrize(("load_ms", "stay_ms"), [(0, 1000), (300, 1000), (4000, 4000)])
def test_a_busy_model_stays_for_its_load_time_and_at_least_a_second(load_ms: int, stay_ms: int) -> None:
    world = World(gpu0=10)
    a = world.load("a", load_ns=load_ms * MS)
    b = world.load("b", load_ns=load_ms * MS)
    b.add_request()
    a.add_request()
    due_ns = world.serve(100 * MS)
    assert due_ns == world.now_ns + (stay_ms - 100) * MS
    assert world.serve(10 * MS) == due_ns
    assert world.log == ["park a"]
    world.now_ns = due_ns
    notifications = world.notifications
    assert world.serve() is None
    assert world.log == ["park a", "park b", "load a"]
    assert world.notifications == notifications + 1, "requests wait for b"
    assert world.serve() == world.now_ns + stay_ms * MS, "and it is its turn again later"


def test_an_idle_model_is_evicted_earlier() -> None:
    world = World(gpu0=10)
    a = world.load("a")
    b = world.load("b")
    b.used_ns = world.now_ns
    world.now_ns += 30 * MS
    a.add_request()
    assert world.serve() == b.used_ns + 100 * MS
    world.now_ns = b.used_ns + 100 * MS
    assert world.serve() is None
    assert world.log[-2:] == ["park b", "load a"]


def test_two_models_alternate_and_a_large_one_is_not_starved() -> None:
    world = World(gpu0=20)
    large = world.load("large", 20)
    a, b = world.load("a"), world.load("b")
    small = [a, b, world.load("c")]
    shares: dict[str, int] = dict.fromkeys(["large", "a", "b", "c"], 0)
    for version in (*small, large):
        version.add_request()
    end_ns = world.now_ns + 60 * NS_PER_S
    while world.now_ns < end_ns:
        due_ns = world.serve()
        for version in (*small, large):
            if not version.evicted:
                shares[version.spec.name] += 1
                version.used_ns = world.now_ns
        world.now_ns = max(world.now_ns + 50 * MS, min(due_ns or 0, world.now_ns + 50 * MS))
        for version in (*small, large):
            if not version.evicted and version.depth == 0:
                version.depth = 1
    assert min(shares.values()) > 100, shares
    assert not any(version.refused for version in (*small, large))
    loads = [line for line in world.log if line.startswith("load")]
    assert len(loads) < 150, "it would be loading all the time"


def test_a_failed_load_is_reported_and_retried_with_backoff() -> None:
    world = World(gpu0=10)
    a = world.load("a")
    world.load("b")
    a.failure = ConfigError([Finding("a", None, "is gone")])
    world.changes.clear()
    waits = []
    for _ in range(8):
        a.add_request()
        due_ns = world.serve()
        if due_ns is not None:
            assert a.depth == 1, "it waits meanwhile"
            waits.append((due_ns - world.now_ns) // NS_PER_S)
            world.now_ns = due_ns
            assert world.serve() is None
        assert a.depth == 0
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert all("'a' is out of memory and could not be loaded again: a: error: is gone" in text for text in a.refused)
    assert "is gone" in world.gpu_model_cache.describe(a)  # type: ignore[arg-type]
    assert world.changes.count(a) == 8
    a.failure = RuntimeError("/secret")
    world.now_ns += 30 * NS_PER_S
    a.add_request()
    assert world.serve() is None
    assert "secret" not in a.refused[-1]
    a.failure = None
    world.now_ns += 30 * NS_PER_S
    a.add_request()
    assert world.serve() is None
    assert not a.evicted
    assert world.gpu_model_cache.describe(a) == "evicted: loaded on demand"  # type: ignore[arg-type]


def test_a_retry_that_comes_before_a_failed_load_has_ended_is_served() -> None:
    world = World(gpu0=10)
    a = world.load("a")
    world.load("b")
    a.failure = ConfigError([Finding("a", None, "is gone")])
    refuse = a.refuse

    def retry(error: Exception) -> None:
        refuse(error)
        a.refuse, a.failure = refuse, None  # type: ignore[method-assign]
        a.add_request()
        assert world.load_requested() is None, "the first load still runs"

    a.refuse = retry  # type: ignore[method-assign]
    a.add_request()
    assert world.serve() is None
    due_ns = world.serve()
    assert due_ns is not None
    world.now_ns = due_ns
    assert world.serve() is None
    assert not a.evicted


def test_a_model_larger_than_the_gpu_is_refused_and_evicts_nothing() -> None:
    world = World(gpu0=20)
    a = world.load("a", 20)
    b = world.load("b", 10)
    world.gpu_model_cache.ledger.set_limit(0, 15)
    a.add_request()
    assert world.serve() is None
    assert "needs 20 B more of GPU 0" in a.refused[0]
    assert not b.evicted


def test_one_that_does_not_end_is_passed_over_for_a_while() -> None:
    world = World(gpu0=20)
    a, b = world.load("a"), world.load("b")
    a.stuck = True
    world.load("c")
    assert world.log == ["park b"]
    b.add_request()
    world.serve()
    assert world.log == ["park b", "park c", "load b"]
    world.now_ns += 61 * NS_PER_S
    a.stuck = False
    world.load("d")
    assert world.log[-1] == "park a"


def test_memory_of_a_version_that_ends_is_waited_for() -> None:
    world = World(gpu0=20)
    a = world.load("a")
    world.load("b")
    a.closing = True

    def ended() -> None:
        a.account.close()
        world.gpu_model_cache.remove(a)  # type: ignore[arg-type]

    timer = threading.Timer(0.1, ended)
    timer.start()
    world.load("c")
    timer.join()
    assert world.log == [], "no model was evicted"
    assert [name for name, _, _ in world.gpu_model_cache.loads()] == ["b", "c"]


def test_close_fails_all_waiting_loads() -> None:
    world = World(gpu0=10)
    a = world.load("a")
    world.load("b")
    a.add_request()
    world.gpu_model_cache.stop(Unavailable("the server is stopping"))
    assert a.refused == ["the server is stopping"]
    a.add_request()
    assert len(a.refused) == 2
    assert world.notifications == 1


def test_a_version_that_was_closed_is_not_brought_back() -> None:
    world = World(gpu0=10)
    a = world.load("a")
    world.load("b")
    a.add_request()
    world.gpu_model_cache.remove(a)  # type: ignore[arg-type]
    assert world.serve() is None
    assert world.log == ["park a"]


@given(
    sizes=st.lists(st.dictionaries(st.integers(0, 1), st.integers(1, 20), min_size=1), min_size=2, max_size=5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2000), st.booleans()), max_size=40),
)
def test_every_request_is_served_within_the_memory_limit(
    sizes: list[dict[int, int]], steps: list[tuple[int, int, bool]]
) -> None:
    world = World(gpu0=20, gpu1=20)
    versions = [world.load(str(number), needs, load_ns=number * 100 * MS) for number, needs in enumerate(sizes)]
    for number, pause_ms, done in steps:
        world.now_ns += pause_ms * MS
        version = versions[number % len(versions)]
        version.add_request()
        world.serve()
        for other in versions:
            if done and not other.evicted:
                other.depth = 0
    for _ in range(200):
        for version in versions:
            if not version.evicted:
                version.depth = 0  # what has waited is answered once it is loaded
        due_ns = world.serve()
        if due_ns is None:
            break
        world.now_ns = max(due_ns, world.now_ns)
    assert not any(version.depth for version in versions if version.evicted)
    assert not any(version.refused for version in versions)
    for gpu in (0, 1):
        held = sum(version.needs.get(gpu, 0) for version in versions if not version.evicted)
        assert held == world.gpu_model_cache.ledger.reserved_bytes(gpu) <= 20


HOUR_NS = 3600 * NS_PER_S


def until_evicted(world: World, version: FakeVersion) -> int:
    """Look when the cache says so; return the time without a request until the eviction, in nanoseconds."""
    begun_ns = world.now_ns
    for _ in range(100):
        due_ns = world.evict_idle()
        if version.evicted:
            return world.now_ns - begun_ns
        assert due_ns is not None
        world.now_ns = due_ns
    raise AssertionError("it is not evicted")


@pytest.mark.parametrize("size", [{}, {0: 10}, {0: 10, 1: 10}], ids=["Python or no budget", "GPU", "two GPUs"])
def test_a_version_without_requests_is_evicted_and_loaded_by_the_next_one(size: dict[int, int]) -> None:
    world = World(gpu0=30, gpu1=30)
    a, b = world.load("a", size, idle_ns=HOUR_NS), world.load("b", size)
    world.now_ns += HOUR_NS // 2
    a.used_ns = world.now_ns
    assert until_evicted(world, a) == HOUR_NS
    world.now_ns += 10 * HOUR_NS
    assert world.evict_idle() is None
    assert (world.log, world.changes) == (["park a"], [a]), "b has no limit"
    assert world.gpu_model_cache.describe(a) == "evicted: loaded on demand"  # type: ignore[arg-type]
    a.add_request()
    world.serve()
    a.depth = 0
    assert (a.evicted, b.evicted) == (False, False)
    assert until_evicted(world, a) == HOUR_NS
    loads = {name: (each.on_demand, each.evictions) for name, _, each in world.gpu_model_cache.loads()}
    assert loads == {"a": (1, 2), "b": (0, 0)}


@pytest.mark.parametrize("use", ["in_flight", "depth", "live_sequences"])
def test_a_version_in_use_is_not_idle(use: str) -> None:
    """A request, or a lease of a pipeline, or a sequence, that lasts for longer than the limit."""
    world = World(gpu0=30)
    a = world.load("a", idle_ns=HOUR_NS)
    setattr(a, use, 1)
    end_ns = world.now_ns + 5 * HOUR_NS
    while world.now_ns < end_ns:
        due_ns = world.evict_idle()
        assert due_ns is not None
        assert due_ns > world.now_ns
        world.now_ns = due_ns
    assert not a.evicted
    setattr(a, use, 0)
    assert HOUR_NS * 7 // 8 <= until_evicted(world, a) <= HOUR_NS, "it counts from the end"


def test_a_request_before_the_eviction_begins_keeps_the_version() -> None:
    world = World(gpu0=30)
    a = world.load("a", idle_ns=HOUR_NS)
    world.now_ns += HOUR_NS
    world.gpu_model_cache.evict_idle(lambda _handle, evict: world.started.append(evict))
    assert len(world.started) == 1
    assert world.gpu_model_cache.evict_idle(lambda *_: pytest.fail("two evictions at once")) is None
    a.add_request()
    a.depth = 0  # it has its response
    world.started.pop()()
    assert not a.evicted
    assert until_evicted(world, a) == HOUR_NS


def test_an_eviction_that_fails_is_tried_again_later() -> None:
    world = World(gpu0=30)
    a = world.load("a", idle_ns=30 * NS_PER_S)
    world.now_ns += 30 * NS_PER_S
    a.stuck = True
    world.evict_idle()
    a.stuck = False
    assert 60 * NS_PER_S <= until_evicted(world, a) < 64 * NS_PER_S


def test_a_version_without_memory_of_its_own_is_refused_until_the_next_attempt() -> None:
    world = World()
    a = world.load("a", {}, idle_ns=HOUR_NS)
    until_evicted(world, a)
    a.failure = ConfigError([Finding("a", None, "is gone")])
    for count in (1, 2):  # the second one is refused without a load
        a.add_request()
        assert world.serve() is None
        assert len(a.refused) == count
    assert world.log == ["park a", "load a"]
    a.failure = None
    world.now_ns += NS_PER_S
    a.add_request()
    world.serve()
    assert not a.evicted
