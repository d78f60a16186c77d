"""Models on the CPU under a budget of host memory: loaded by their first request, evicted by use, broken, replaced."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.errors import DeadlineExceeded, Unavailable
from headrace.core.ledger import CPU
from headrace.core.request import InferRequest
from headrace.models import accounted_model
from headrace.models.command_queue import CommandQueue
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.idle_tasks import IdleTasks
from headrace.models.registry import Registry
from headrace.observability.metrics_server import MemoryCollector
from headrace.runtimes.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeModel
from prometheus_client import CollectorRegistry

from tests.support.control_thread import X, index, infer_values, put, running, same
from tests.support.models import add_model, affine
from tests.support.virtual_time import advance_timers
from tests.support.waiting import until_async

ALL, POLL = ControlPolicy("none"), ControlPolicy("poll", poll_interval_s=0.05, settle_s=0.05)
READY, EVICTED, UNLOADED = (
    ("READY", ""),
    ("READY", "evicted: loaded on demand"),
    ("READY", "not loaded: loaded on demand"),
)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc", 1):
        add_model(tmp_path / "repository", name, affine(seed=seed))
    return tmp_path / "repository"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models of each load of ONNX Runtime. The heap is not looked at: other tests allocate meanwhile."""
    names: list[str] = []
    load = OnnxRuntimeBackend.load

    def count(self: OnnxRuntimeBackend, file: Path, instances: int, parameters: dict[str, str]) -> OnnxRuntimeModel:
        names.append(file.parent.parent.name)
        return load(self, file, instances, parameters)

    monkeypatch.setattr(OnnxRuntimeBackend, "load", count)
    monkeypatch.setattr(accounted_model, "heap_bytes", lambda: None)
    return names


def need(repository: Path) -> int:
    """Bytes that each of the models needs."""
    return accounted_model._SESSION_BYTES + (repository / "a" / "1" / "model.onnx").stat().st_size


def cache(budget_bytes: int) -> GpuModelCache:
    gpu_model_cache = GpuModelCache()
    gpu_model_cache.ledger.set_limit(CPU, budget_bytes)
    return gpu_model_cache


async def infer_value(registry: Registry, name: str, seed: int) -> None:
    assert same(await infer_values(registry, name), seed)


async def test_concurrent_first_requests_share_one_load(repository: Path, loads: list[str]) -> None:
    async with running(repository, ALL, gpu_model_cache=cache(1 << 30)) as (_, registry):
        answers = await asyncio.gather(*[infer_values(registry, "a") for _ in range(20)])
        assert all(same(answer, 1) for answer in answers)
        assert loads == ["a"]


async def test_a_first_request_waits_no_longer_than_its_deadline(
    repository: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = asyncio.Event()
    load = OnnxRuntimeBackend.load

    async with running(repository, ALL, gpu_model_cache=cache(1 << 30)) as (_, registry):
        loop = asyncio.get_running_loop()

        def wait(*arguments: Any) -> OnnxRuntimeModel:
            asyncio.run_coroutine_threadsafe(may_load.wait(), loop).result()
            return load(*arguments)

        monkeypatch.setattr(OnnxRuntimeBackend, "load", wait)
        handle = registry.lease("a", "")
        now_ns = time.monotonic_ns()
        request = InferRequest(
            inputs={"X": X}, rows=1, shape_key=(16,), received_ns=now_ns, deadline_ns=now_ns + 30 * NS_PER_S
        )
        waiting = handle.infer(request)
        advance_timers(30)
        with pytest.raises(DeadlineExceeded):
            await waiting
        handle.release()
        assert handle.evicted
        may_load.set()
        await infer_value(registry, "a", 1)
        assert loads == ["a"]


async def test_a_leased_version_is_evicted_only_between_its_batches(repository: Path, loads: list[str]) -> None:
    """Requests on all models at once, with room for one: each gets the answer of its model."""

    async with running(repository, ALL, gpu_model_cache=cache(need(repository))) as (_, registry):

        async def caller(name: str, seed: int) -> None:
            for _ in range(3):
                await infer_value(registry, name, seed)

        await asyncio.gather(*[caller(name, seed) for seed, name in enumerate("abc", 1) for _ in range(3)])
        assert set(loads) == {"a", "b", "c"}


async def test_a_pinned_model_is_loaded_at_start_and_stays(repository: Path, loads: list[str]) -> None:
    (repository / "b" / "config.yaml").write_text("keep_loaded: true\n")

    async with running(repository, ALL, gpu_model_cache=cache(2 * need(repository))) as (_, registry):
        assert loads == ["b"]
        await infer_value(registry, "a", 1)
        await infer_value(registry, "c", 3)
        await infer_value(registry, "b", 2)
        assert loads == ["b", "a", "c"]


@pytest.mark.parametrize("budget", [None, 1 << 30], ids=["no budget", "budget"])
async def test_requests_around_evictions_of_idle_models_do_not_fail(
    repository: Path, loads: list[str], budget: int | None
) -> None:
    """Each look of the control thread finds all of them idle: an hour has passed for the cache."""
    (repository / "a" / "config.yaml").write_text("unload_after_s: 60\n")
    models = GpuModelCache() if budget is None else cache(budget)
    models.clock, commands = partial(next, count(10**18, 3600 * NS_PER_S)), CommandQueue()

    async with running(repository, ALL, gpu_model_cache=models, idle_tasks=IdleTasks(commands)) as (_, registry):
        await infer_value(registry, "b", 2)
        await infer_value(registry, "a", 1)
        handle = registry.serving("a", "")
        assert handle is not None
        for _round in range(20):  # requests come while an eviction runs, or has just ended
            while not handle.evicted:
                commands.wake()
                await asyncio.sleep(0)
            await asyncio.gather(*[infer_value(registry, "a", 1) for _ in range(3)])
        commands.wake()
        first = budget is None  # without a budget the first load is that of the start

        def loads_of(name: str) -> tuple[int, int]:
            return next((each.on_demand, each.evictions) for model, _, each in models.loads() if model == name)

        await until_async(lambda: handle.evicted and loads_of("a")[0] + first == loads_of("a")[1])
        assert loads_of("a")[1] > 5  # a round may see the eviction of the one before
        assert loads_of("b") == (not first, 0)
        left = 0 if first else need(repository)
        await until_async(lambda: models.ledger.reserved_bytes(CPU) == left)
        await until_async(lambda: index(registry)["a", "1"] == EVICTED)


async def test_a_broken_model_is_refused_until_the_next_attempt(repository: Path, loads: list[str]) -> None:
    """The file is whole when the server starts, and another one when the first request comes."""
    models = cache(1 << 30)

    async with running(repository, ALL, gpu_model_cache=models) as (_, registry):
        put(repository, 9)
        (repository / "m" / "1" / "model.onnx").rename(repository / "a" / "1" / "model.onnx")
        with pytest.raises(
            Unavailable, match=r"'a' could not be loaded: .*changed since the load.*load the model again"
        ):
            await infer_values(registry, "a")
        models.clock = lambda: 0  # time stands still: the next attempt is later
        with pytest.raises(Unavailable, match="could not be loaded") as refusal:
            await infer_values(registry, "a")
        assert refusal.value.retry_after_s
        assert index(registry)[("a", "1")][1].startswith("not loaded: loading on demand failed: ")
        assert not loads
        models.clock = lambda: time.monotonic_ns() + 60 * NS_PER_S
        await infer_value(registry, "b", 2)
        assert loads == ["b"]


async def test_a_model_larger_than_the_budget_is_refused(repository: Path, loads: list[str]) -> None:
    async with running(repository, ALL, gpu_model_cache=cache(need(repository) - 1)) as (_, registry):
        with pytest.raises(Unavailable, match=r"needs .* of host memory: .*raise --host-memory-budget"):
            await infer_values(registry, "a")
        assert not loads


async def test_polling_replaces_a_resident_model_by_a_loaded_one(repository: Path, loads: list[str]) -> None:
    async with running(repository, POLL, gpu_model_cache=cache(1 << 30)) as (_, registry):
        await until_async(lambda: len(index(registry)) == 3 and registry.serving("a", "") is not None)
        await infer_value(registry, "a", 1)
        for name, seed in (("a", 7), ("b", 8)):
            add_model(repository.parent / "new", name, affine(seed=seed))
            (repository.parent / "new" / name / "1" / "model.onnx").rename(repository / name / "1" / "model.onnx")
        olds = [registry.serving(name, "") for name in "ab"]
        await until_async(
            lambda: not any(registry.serving(name, "") is old for name, old in zip("ab", olds, strict=True))
        )
        assert loads == ["a", "a"]
        await infer_value(registry, "a", 7)
        assert loads == ["a", "a"]
        await infer_value(registry, "b", 8)


async def test_the_growth_of_the_heap_counts_up_to_a_bound(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = need(repository)
    heap = iter([0, 2 * size, 0, 100 * size])
    monkeypatch.setattr(accounted_model, "heap_bytes", lambda: next(heap))
    models = cache(10 * size)

    async with running(repository, ALL, gpu_model_cache=models) as (_, registry):
        await infer_value(registry, "a", 1)
        assert models.ledger.reserved_bytes(CPU) == 2 * size
        await infer_value(registry, "b", 2)
        assert models.ledger.reserved_bytes(CPU) == 6 * size
        prometheus = CollectorRegistry()
        prometheus.register(MemoryCollector(models))
        assert prometheus.get_sample_value("headrace_host_memory_bytes", {"model": "b", "version": "1"}) == 4 * size
        assert prometheus.get_sample_value("headrace_host_memory_limit_bytes") == 10 * size
        assert prometheus.get_sample_value("headrace_host_resident_versions") == 2
        families = {metric.name: metric.samples for metric in prometheus.collect()}
        assert not families["headrace_gpu_memory_bytes"]
        assert not families["headrace_gpu_memory_limit_bytes"]
