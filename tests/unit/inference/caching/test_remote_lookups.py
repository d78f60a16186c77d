"""Lookups in Redis in front of a real `ModelHandle`, with a store whose answers the test gives."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from headrace.config.cache_config import ResponseCache
from headrace.config.model_config import ModelConfig
from headrace.core.cache_options import CacheOptions, RedisOptions
from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.completion import Mailbox
from headrace.core.errors import Cancelled, ConfigError, QuotaExceeded
from headrace.core.quota import Quota
from headrace.core.request import InferRequest
from headrace.inference.caching.response_cache import RemoteEntries, VersionCache
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.inference.caching.values import Lookup, RemoteWrite, StoredResponse
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import RateLimits
from headrace.observability.totals import to_triton

from tests.support.fakes import FakeModel, handle, infer_request
from tests.support.waiting import until_async


class FakeStore:
    """Records lookups and writes."""

    address, is_up, problem, tls = "redis:1", True, "", ""

    def __init__(self, wait_ns: int) -> None:
        self._wait_ns = wait_ns
        self.lookups: list[Lookup] = []
        self.writes: list[bytes] = []
        self.late = 0

    def wait_ns(self, request: InferRequest, now_ns: int) -> int:
        return self._wait_ns

    def read(self, lookup: Lookup) -> None:
        self.lookups.append(lookup)

    def write(self, write: RemoteWrite) -> None:
        self.writes.append(write.key)

    def report_late(self) -> None:
        self.late += 1


STORED = StoredResponse({"y": np.array([[8, 8]], np.float32)}, 10**9, 0)


@asynccontextmanager
async def serving(
    wait_ms: int = 5000, size: int = 1 << 20, **policy: Any
) -> AsyncIterator[tuple[ModelHandle, VersionCache, FakeModel, FakeStore]]:
    """A handle with a cache whose store is under the test's control."""
    mailbox, model, store = Mailbox(asyncio.get_running_loop()), FakeModel(), FakeStore(wait_ms * NS_PER_MS)
    served = handle(mailbox, model, **policy)
    config = ModelConfig(name="fake", backend="onnxruntime", response_cache=ResponseCache(enable=True))
    cache = ResponseCaches(CacheOptions(size), mailbox).open(served, config)
    assert cache is not None
    cache._remote = RemoteEntries(store, served.spec, 0)  # type: ignore[arg-type]
    served.cache = cache
    yield served, cache, model, store
    model.gate.set()
    assert await asyncio.to_thread(served.close, 5)


async def test_a_response_of_redis_answers_all_equal_requests_and_is_kept() -> None:
    async with serving() as (served, cache, model, store):
        crowd = [served.infer(infer_request(4)) for _ in range(10)]
        assert len(store.lookups) == 1
        assert store.lookups[0].resume(STORED)
        for completion in crowd:
            response = await completion
            assert response.cached
            assert response.outputs["y"].tolist() == [[8, 8]]
        assert (await served.infer(infer_request(4))).cached
        assert len(store.lookups) == 1, "the second time it comes from memory"
        assert not store.lookups[0].resume(STORED), "an answer counts once"
        assert (cache.hits, cache.merged, cache.misses, model.batches, store.writes) == (2, 9, 0, [], [])
        statistics: Any = to_triton("fake", "1", served.recorder.totals())["inference_stats"]
        assert (statistics["cache_hit"]["count"], statistics["cache_miss"]["count"]) == (11, 0)


async def test_without_an_answer_in_time_it_is_computed_and_written() -> None:
    async with serving(wait_ms=5) as (served, cache, model, store):
        crowd = [served.infer(infer_request(4)) for _ in range(3)]
        for completion in crowd:
            assert (await completion).outputs["y"].tolist() == [[8, 8]]
        assert not store.lookups[0].resume(STORED)
        assert (store.late, len(store.writes), model.batches, cache.misses) == (1, 1, [[4]], 1)


async def test_a_miss_is_computed_at_once() -> None:
    async with serving() as (served, cache, _model, store):
        waiting = served.infer(infer_request(4))
        store.lookups[0].resume(None)
        assert not (await waiting).cached
        assert (store.late, len(store.writes), cache.misses) == (0, 1, 1)


async def test_the_first_caller_leaves_during_the_lookup() -> None:
    async with serving() as (served, _cache, model, store):
        first, second, third = (served.infer(infer_request(4)) for _ in range(3))
        first.abandon()
        for completion in (second, third):
            assert (await completion).outputs["y"].tolist() == [[8, 8]]
        assert isinstance(first.outcome, Cancelled)
        store.lookups[0].resume(STORED)
        assert model.batches == [[4]]


async def test_an_answer_that_a_busy_loop_has_not_delivered_is_used() -> None:
    async with serving(wait_ms=5) as (served, _cache, _model, store):
        waiting = served.infer(infer_request(4))
        lookup = store.lookups[0]
        lookup.response, lookup.is_answered = STORED, True  # by the reader
        time.sleep(0.05)  # noqa: ASYNC251  # the loop is busy for longer than the wait
        assert (await waiting).cached
        assert store.late == 0


async def test_a_late_lookup_holds_no_inputs() -> None:
    async with serving(wait_ms=5) as (served, _cache, model, store):
        request = infer_request(4)
        inputs = weakref.ref(request.inputs["x"])
        await served.infer(request)
        del request
        model.batches.clear()
        gc.collect()
        assert store.lookups

        async def is_released() -> bool:
            await served.infer(infer_request(5))  # the instance releases its batch
            return inputs() is None

        await until_async(is_released)


async def test_a_hit_of_redis_is_charged_to_the_quota() -> None:
    async with serving(rate_limits=RateLimits(default=Quota(0.001, burst=1))) as (served, _cache, _model, store):
        errors = []
        for value in (4, 5):
            waiting = served.infer(infer_request(value, client="a"))
            store.lookups[-1].resume(STORED)
            try:
                await waiting
            except QuotaExceeded as error:
                errors.append(error)
        assert len(errors) == 1


async def test_the_remaining_time_to_live_of_redis_counts_here() -> None:
    async with serving() as (served, cache, _model, store):
        waiting = served.infer(infer_request(4))
        store.lookups[0].resume(STORED._replace(expires_ms=int(time.time() * 1000) + 200_000))
        await waiting
        (entry,) = cache._entries._store._entries.values()
        assert 0 < entry.expires_ns - monotonic_ns() <= 200 * NS_PER_S


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RedisOptions("", 1), "the cache redis has no host"),
        (RedisOptions("a", secret_file="/nonexistent/secret"), "secret_file of the cache redis cannot be read"),
        (RedisOptions("a", secret_file="~unknown-account/x"), "secret_file of the cache redis cannot be read"),
    ],
)
async def test_wrong_options_are_refused_at_the_start(options: RedisOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ResponseCaches(CacheOptions(0, options), Mailbox(asyncio.get_running_loop()))
