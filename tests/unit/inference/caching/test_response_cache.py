"""The response cache in front of a real `ModelHandle` with a fake model: hits, requests in flight, failures, races."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.config.cache_config import CacheLimits, ResponseCache
from headrace.config.model_config import ModelConfig
from headrace.core.cache_options import CacheOptions
from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import Cancelled, DeadlineExceeded, ModelFailed, Overloaded, QuotaExceeded
from headrace.core.quota import Quota
from headrace.core.request import InferResponse, PipelineStepTimes
from headrace.inference.caching import cache_switch as benefit_module
from headrace.inference.caching.response_cache import LARGE_BYTES, VersionCache, VersionStates
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, QueueLimits, RateLimits

from tests.support.fakes import POISON, FakeModel, error_of, handle, infer_request, wait_started
from tests.support.virtual_time import advance_timers
from tests.support.waiting import until_async


def cached(mailbox: Mailbox, model: FakeModel, size: int = 1 << 20, **policy: Any) -> tuple[ModelHandle, VersionCache]:
    """A started handle with a response cache."""
    limits = policy.pop("cache_limits", None)
    served = handle(mailbox, model, **policy)
    config = ModelConfig(name="fake", backend="onnxruntime", response_cache=ResponseCache(enable=True), cache=limits)
    cache = ResponseCaches(CacheOptions(size), mailbox).open(served, config)
    assert cache is not None
    served.cache = cache
    return served, cache


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[tuple[ModelHandle, VersionCache, FakeModel]]:
    """A handle with a cache on a fake model."""
    model = FakeModel()
    served, cache = cached(Mailbox(asyncio.get_running_loop()), model, **options)
    try:
        yield served, cache, model
    finally:
        model.gate.set()
        assert await asyncio.to_thread(served.close, 60)


async def wait_queued(served: ModelHandle) -> None:
    """Wait until a request is queued."""
    await until_async(lambda: served.depth)


async def run_blocker(served: ModelHandle, model: FakeModel) -> LoopCompletion:
    """Occupy the one instance until the gate opens."""
    model.gate.clear()
    blocker = served.infer(infer_request(77))
    await wait_started(model)
    return blocker


async def test_a_model_without_the_field_has_no_cache() -> None:
    mailbox = Mailbox(asyncio.get_running_loop())
    caches, served = ResponseCaches(CacheOptions(1 << 20), mailbox), handle(mailbox, FakeModel())
    for field in (None, ResponseCache()):
        config = ModelConfig(name="fake", backend="onnxruntime", response_cache=field)
        assert caches.open(served, config) is None
    served.close(60)


async def test_a_second_request_is_answered_without_the_model() -> None:
    async with serving() as (served, cache, model):
        first = await served.infer(infer_request(3, rows=2))
        completion = served.infer(infer_request(3, rows=2))
        assert completion.woken, "a hit needs no other turn of the loop"
        second = await completion
        assert (first.cached, second.cached) == (False, True)
        assert second.outputs["y"].tobytes() == first.outputs["y"].tobytes()
        assert second.outputs["y"].dtype == first.outputs["y"].dtype
        assert not second.outputs["y"].flags.writeable
        called: list[InferResponse] = []
        third = served.infer(infer_request(3, rows=2))
        third.then(lambda: called.append(third.outcome))  # type: ignore[arg-type]
        assert called == [], "the callback never runs within `then`"
        await asyncio.sleep(0)
        assert called[0].cached
        assert (cache.hits, cache.misses, cache.merged) == (2, 1, 0)
    assert model.batches == [[3, 3]]


async def test_equal_requests_in_flight_run_once() -> None:
    async with serving() as (served, cache, model):
        blocker = await run_blocker(served, model)
        waiting = [served.infer(infer_request(5, id=str(number))) for number in range(6)]
        assert served.depth == 1
        assert not any(completion.is_settled for completion in waiting)
        model.gate.set()
        responses = await asyncio.gather(*waiting)
        assert [response.cached for response in responses] == [False] + [True] * 5
        assert {response.outputs["y"].tobytes() for response in responses} == {np.full(2, 10, np.float32).tobytes()}
        await blocker
        assert (cache.merged, cache.misses, cache.hits) == (5, 2, 0)
        assert served.recorder.totals().cache_hits == 5
        assert cache._pending == {}
    assert model.batches == [[77], [5]]


async def test_followers_get_the_error_of_a_model_that_fails_and_it_is_not_cached() -> None:
    async with serving() as (served, cache, model):
        blocker = await run_blocker(served, model)
        waiting = [served.infer(infer_request(POISON)) for _ in range(3)]
        model.gate.set()
        errors = [await error_of(completion) for completion in waiting]
        assert all(isinstance(error, ModelFailed) for error in errors)
        await blocker
        assert isinstance(await error_of(served.infer(infer_request(POISON))), ModelFailed)
        assert cache.report()["entries"] == 1, "only the request that blocked"
        assert cache._pending == {}
    assert model.batches.count([POISON]) == 2


async def test_a_cancelled_leader_leaves_its_followers_to_the_next() -> None:
    async with serving() as (served, _cache, model):
        blocker = await run_blocker(served, model)
        leader, *followers = [served.infer(infer_request(5)) for _ in range(4)]
        leader.abandon()
        followers[0].abandon()  # is not promoted
        await wait_queued(served)  # the second follower, in place of the leader
        model.gate.set()
        assert isinstance(await error_of(leader), Cancelled)
        assert isinstance(await error_of(followers[0]), Cancelled)
        responses = [await completion for completion in followers[1:]]
        assert [response.outputs["y"].tolist() for response in responses] == [[[10, 10]]] * 2
        await blocker
        assert (await served.infer(infer_request(5))).cached
    assert model.batches == [[77], [5]]


async def test_a_promoted_request_that_is_cancelled_leaves_the_queue() -> None:
    async with serving() as (served, cache, model):
        blocker = await run_blocker(served, model)
        leader, follower = [served.infer(infer_request(5)) for _ in range(2)]
        leader.abandon()
        await wait_queued(served)
        follower.abandon()
        assert served.depth == 0
        model.gate.set()
        await blocker
        assert cache._pending == {}
    assert model.batches == [[77]]


async def test_a_leader_past_its_deadline_leaves_its_followers_to_the_next() -> None:
    async with serving() as (served, cache, model):
        blocker = await run_blocker(served, model)
        now_ns = monotonic_ns()
        leader = served.infer(infer_request(5, deadline_ns=now_ns + 30 * NS_PER_S, received_ns=now_ns))
        follower = served.infer(infer_request(5))
        assert cache.merged == 0
        assert served.depth == 1
        advance_timers(30)
        assert isinstance(await error_of(leader), DeadlineExceeded)
        model.gate.set()
        assert (await follower).outputs["y"].tolist() == [[10, 10]]
        await blocker


async def test_a_follower_has_its_own_deadline() -> None:
    async with serving() as (served, _cache, model):
        blocker = await run_blocker(served, model)  # runs, so nothing is queued
        now_ns = monotonic_ns()
        follower = served.infer(infer_request(77, deadline_ns=now_ns + 30 * NS_PER_S, received_ns=now_ns))
        assert served.depth == 0
        advance_timers(30)
        error = await error_of(follower)
        assert isinstance(error, DeadlineExceeded)
        assert "30000000 us" in str(error)
        model.gate.set()
        assert not (await blocker).cached


@pytest.mark.parametrize("urgent", [{"priority": 1}, {"deadline_ns": 1 << 60}])
async def test_an_urgent_request_does_not_wait_for_a_queued_one(urgent: dict[str, int]) -> None:
    async with serving(levels=2, batch=BatchPolicy(1)) as (served, cache, model):
        blocker = await run_blocker(served, model)
        slow = served.infer(infer_request(5, priority=2))
        fast = served.infer(infer_request(5, **({"priority": 2} | urgent)))
        assert served.depth == 2
        model.gate.set()
        assert (await slow).outputs["y"].tolist() == (await fast).outputs["y"].tolist()
        await blocker
        assert cache.merged == 0


async def test_a_hit_is_charged_and_checked_like_any_request() -> None:
    async with serving(rate_limits=RateLimits(default=Quota(0.001, burst=2))) as (served, cache, _model):
        await served.infer(infer_request(1))
        await served.infer(infer_request(1))
        with pytest.raises(QuotaExceeded):
            served.infer(infer_request(1))
        assert (cache.hits, cache.misses) == (1, 1)

    async with serving() as (served, _cache, _model):
        await served.infer(infer_request(1))
        with pytest.raises(DeadlineExceeded):
            served.infer(infer_request(1, deadline_ns=1))


async def test_a_rejected_request_leaves_nothing_behind() -> None:
    async with serving(limits=QueueLimits(max_count=1)) as (served, cache, model):
        blocker = await run_blocker(served, model)
        queued = served.infer(infer_request(1))
        with pytest.raises(Overloaded):
            served.infer(infer_request(2))
        follower = served.infer(infer_request(1))  # needs no place in the queue
        model.gate.set()
        assert (await follower).outputs["y"].tolist() == [[2, 2]]
        await queued
        await blocker
        assert cache._pending == {}


async def test_responses_expire() -> None:
    async with serving(cache_limits=CacheLimits(ttl_s=0.05)) as (served, cache, _model):
        now_ns = NS_PER_S
        cache._clock = lambda: now_ns
        await served.infer(infer_request(1))
        assert (await served.infer(infer_request(1))).cached
        now_ns += 60 * NS_PER_MS
        assert not (await served.infer(infer_request(1))).cached
        assert cache.report()["expirations"] == 1


async def test_large_requests_are_hashed_on_a_thread() -> None:
    async with serving() as (served, cache, _model):
        threads: list[str] = []
        key = cache._keys.key

        def recorded(request: Any, state: bytes, reads_ids: bool) -> bytes | None:
            threads.append(threading.current_thread().name)
            return key(request, state, reads_ids)

        cache._keys.key = recorded  # type: ignore[method-assign]
        large = {"size_bytes": LARGE_BYTES + 1}
        for is_cached in (False, True):
            response = await served.infer(infer_request(4, **large))
            assert response.outputs["y"].tolist() == [[8, 8]]
            assert response.cached == is_cached
        assert all(name.startswith("headrace-cache-hash") for name in threads)
        assert isinstance(await error_of(served.infer(infer_request(POISON, **large))), ModelFailed)
        assert isinstance(await error_of(served.infer(infer_request(4, deadline_ns=1, **large))), DeadlineExceeded)


async def test_a_large_request_that_cannot_be_hashed_is_computed() -> None:
    async with serving() as (served, cache, _model):

        def broken(_request: Any, _state: bytes) -> bytes | None:
            raise MemoryError

        cache._keys.key = broken  # type: ignore[method-assign]
        response = await served.infer(infer_request(4, size_bytes=LARGE_BYTES + 1))
        assert (response.outputs["y"].tolist(), response.cached) == ([[8, 8]], False)


async def test_a_large_request_whose_caller_disconnects_leaves_the_queue() -> None:
    async with serving() as (served, _cache, model):
        blocker = await run_blocker(served, model)
        gone = served.infer(infer_request(6, size_bytes=LARGE_BYTES + 1))
        await wait_queued(served)
        gone.abandon()
        assert served.depth == 0, "its computed request is abandoned too"
        model.gate.set()
        await blocker


async def test_a_cache_that_never_hits_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benefit_module, "FIRST_REQUESTS", 30)
    monkeypatch.setattr(benefit_module, "OFF_REQUESTS", 50)
    monkeypatch.setattr(benefit_module, "TRIAL_REQUESTS", 10)

    async with serving() as (served, cache, _model):
        for value in range(30):
            await served.infer(infer_request(value))
        assert cache.report()["state"] == "off"
        for value in range(49):
            assert not (await served.infer(infer_request(value % 2))).cached
        assert cache.misses == 30
        for _ in range(10):
            await served.infer(infer_request(1))
        report = cache.report()
        assert report["state"] == "on"
        assert report["hits"] == 10, "entries stay while it is off"
        assert "us of compute time" in str(report["reason"])


async def test_a_closed_version_removes_its_entries() -> None:
    mailbox, model = Mailbox(asyncio.get_running_loop()), FakeModel()
    served, cache = cached(mailbox, model)
    await served.infer(infer_request(1))
    assert cache.report()["entries"] == 1
    assert await asyncio.to_thread(served.close, 60)
    assert cache.report()["entries"] == cache.report()["size_bytes"] == 0


async def test_many_clients_at_once_get_the_right_rows() -> None:
    """Leaders that end on instance threads while followers arrive, cancellations in between: nothing is lost or mixed up."""
    numbers = np.random.default_rng(3)

    async def client(served: ModelHandle, values: list[int]) -> SimpleNamespace:
        result = SimpleNamespace(right=0, cancelled=0)
        for value in values:
            completion = served.infer(infer_request(value))
            if value % 7 == 0 and numbers.random() < 0.3:
                await asyncio.sleep(0)
                completion.abandon()
            try:
                response = await completion
            except Cancelled:
                result.cancelled += 1
            else:
                result.right += response.outputs["y"].tolist() == [[2 * value] * 2]
        return result

    async with serving(size=20_000, instances=3) as (served, cache, _model):
        clients = [client(served, numbers.integers(0, 40, 150).tolist()) for _ in range(24)]
        results = await asyncio.gather(*clients)
        assert sum(result.right + result.cancelled for result in results) == 24 * 150
        assert cache.hits > 0
        assert cache._pending == {}


async def test_a_model_that_calls_others_computes_again_once_one_of_them_has_changed() -> None:
    numbers = [0]

    async with serving() as (served, cache, model):
        served.callee_revision = lambda: numbers[0]
        cache._versions = VersionStates(served)
        await served.infer(infer_request(3))
        assert (await served.infer(infer_request(3))).cached
        numbers[0] = 5  # its first call, or a load
        assert not (await served.infer(infer_request(3))).cached
        model.gate.clear()
        running = served.infer(infer_request(4))
        await wait_started(model)
        numbers[0] = 6  # a load while it runs: it may have used both versions
        model.gate.set()
        assert not (await running).cached
        numbers[0] = 5
        assert not (await served.infer(infer_request(4))).cached
        assert (await served.infer(infer_request(4))).cached


async def test_the_answer_of_a_fallback_is_not_stored() -> None:
    async with serving() as (served, _cache, _model):
        states = VersionStates(served)
        revision, _ = states.current()
        for outcome, stores in (("ok", True), ("cached", True), ("skipped", True), ("fallback", False)):
            step = PipelineStepTimes("a", "m", "1", 0, 1, None, 1, outcome)
            assert states.may_store(InferResponse({}, steps=(step,)), revision) is stores
        assert not states.may_store(InferResponse({}), (revision[0] + 1,))
