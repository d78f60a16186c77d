"""Models that do not all fit into the memory of a GPU: refused, parked, brought back; on a GPU that is not there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.errors import ConfigError, DeadlineExceeded, Unavailable
from headrace.core.request import InferRequest
from headrace.models.command_queue import CommandQueue
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.idle_tasks import IdleTasks
from headrace.models.registry import Registry
from headrace.observability.metrics_server import MemoryCollector
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.control_thread import X, index, infer_values, running, same
from tests.support.fake_streams import LateCuda
from tests.support.models import add_model, affine
from tests.support.virtual_time import advance_timers
from tests.support.waiting import until_async
from tests.unit.models.test_gpu_backend import plan_of

# Which model is evicted depends on the order of the loads.
ALL = ControlPolicy("none", load_threads=1)
EXPLICIT = ControlPolicy("explicit", load_threads=1)
TENSORRT = "backend: tensorrt\nmax_batch_size: 8\n"
pytestmark = pytest.mark.usefixtures("trt")
READY, EVICTED = ("READY", ""), ("READY", "evicted: loaded on demand")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for seed, name in enumerate("abc", 1):
        add(tmp_path, name, seed)
    return tmp_path / "repository"


def add(tmp_path: Path, name: str, seed: int, config: str = "") -> None:
    folder = tmp_path / "repository" / name
    add_model(tmp_path / "repository", name, affine(seed=seed))
    (folder / "config.yaml").write_text(TENSORRT + config)
    (folder / "1" / "model.plan").write_bytes(plan_of(tmp_path, seed))


async def need(repository: Path) -> int:
    """Bytes of GPU memory that one of the models takes; all take the same."""
    models = GpuModelCache()
    async with running(repository, names=frozenset({"a"}), gpu_model_cache=models):
        size = models.ledger.reserved_bytes(0)
    assert size > 4096
    return size


def room(size_bytes: float) -> float:
    """The fraction of the fake GPU's memory that is so many bytes."""
    return (size_bytes + 0.5) / (1 << 30)


async def infer_value(registry: Registry, name: str, seed: int) -> None:
    assert same(await infer_values(registry, name), seed)


async def test_an_idle_model_gives_its_memory_back(repository: Path) -> None:
    (repository / "a" / "config.yaml").write_text(TENSORRT + "unload_after_s: 60\n")
    models, commands = GpuModelCache(), CommandQueue()

    async with running(repository, ALL, frozenset("a"), gpu_model_cache=models, idle_tasks=IdleTasks(commands)) as (
        _,
        registry,
    ):
        size = models.ledger.reserved_bytes(0)
        for _round in range(2):
            models.clock = lambda: time.monotonic_ns() + 60 * NS_PER_S
            commands.wake()
            await until_async(lambda: index(registry) == {("a", "1"): EVICTED})
            assert models.ledger.reserved_bytes(0) == 0
            models.clock = time.monotonic_ns
            await infer_value(registry, "a", 1)
            await until_async(lambda: index(registry) == {("a", "1"): READY})
            assert models.ledger.reserved_bytes(0) == size


async def test_a_separate_budget_does_not_affect_others(repository: Path) -> None:
    size = await need(repository)
    (repository / "b" / "config.yaml").write_text(TENSORRT + f"gpu_memory_budget: {size - 1}\n")
    (repository / "c" / "config.yaml").write_text(TENSORRT + f"gpu_memory_budget: {size}\n")

    async with running(repository, ALL) as (_, registry):
        states = index(registry)
        assert (states["a", "1"], states["c", "1"]) == (READY, READY)
        assert "its gpu_memory_budget is" in states["b", "1"][1]
        await infer_value(registry, "c", 3)


async def test_a_model_that_is_to_stay_stays(repository: Path) -> None:
    size = await need(repository)
    (repository / "a" / "config.yaml").write_text(TENSORRT + "keep_loaded: true\n")

    async with running(repository, ALL, gpu_memory_fraction=room(2 * size)) as (_, registry):
        assert index(registry) == {("a", "1"): READY, ("b", "1"): EVICTED, ("c", "1"): READY}
        await infer_value(registry, "b", 2)
        await until_async(lambda: index(registry) == {("a", "1"): READY, ("b", "1"): READY, ("c", "1"): EVICTED})

    async with running(repository, ALL, gpu_memory_fraction=room(size)) as (_, registry):
        states = index(registry)
        assert states["a", "1"] == READY
        for name in "bc":
            assert states[name, "1"][0] == "UNAVAILABLE"
            assert "a/1" in states[name, "1"][1], "the holder is named"
        await infer_value(registry, "a", 1)


async def test_loading_and_unloading_move_memory(repository: Path) -> None:
    size = await need(repository)
    models = GpuModelCache()

    async with running(repository, EXPLICIT, frozenset(), gpu_model_cache=models, gpu_memory_fraction=room(size)) as (
        reconciler,
        registry,
    ):
        for name in "abc":
            await reconciler.load(name, None, {})
        assert index(registry)["b", "1"] == EVICTED
        await reconciler.unload("c", False)
        await reconciler.load("b", None, {})  # as it was: it is loaded by its next request
        await infer_value(registry, "b", 2)
        await until_async(lambda: index(registry)["b", "1"] == READY)
        await reconciler.unload("b", False)
        await reconciler.load("a", None, {})
        await infer_value(registry, "a", 1)
        await reconciler.unload("a", False)
        await until_async(lambda: models.ledger.reserved_bytes(0) == 0)
        assert models.loads() == []


async def test_an_evicted_model_with_requests_is_unloaded_once_they_are_answered(repository: Path) -> None:
    size = await need(repository)

    async with running(repository, EXPLICIT, frozenset("abc"), gpu_memory_fraction=room(size)) as (
        reconciler,
        registry,
    ):
        assert index(registry)["a", "1"] == EVICTED
        answer = asyncio.create_task(infer_value(registry, "a", 1))
        await asyncio.sleep(0)
        await reconciler.unload("a", False)
        await answer
        await until_async(lambda: index(registry)["a", "1"] == ("UNAVAILABLE", "unloaded"))


async def test_deadlines_apply_to_waiting_requests_and_shutdown_answers_them(repository: Path) -> None:
    size = await need(repository)
    waiting: list[Any] = []
    async with running(repository, ALL, frozenset("a"), gpu_memory_fraction=room(size)) as (_, registry):
        handle = registry.lease("a", "")
        assert handle.evict(5)
        now = time.monotonic_ns()
        for deadline_ns in (now + 30 * NS_PER_S, 0):
            request = InferRequest(inputs={"X": X}, rows=1, shape_key=(16,), received_ns=now, deadline_ns=deadline_ns)
            handle._restore_requested = True  # no callback is called
            waiting.append(handle.infer(request))
        advance_timers(30)
        with pytest.raises(DeadlineExceeded):
            await waiting[0]
        handle.release()
    with pytest.raises(Unavailable, match="stopping"):
        await waiting[1]


async def test_a_full_gpu_counts_like_a_full_budget(cuda: LateCuda, repository: Path) -> None:
    """The driver has less memory than the ledger: another process uses the GPU."""
    await need(repository)
    allocated: list[int] = []

    async with running(repository, EXPLICIT, frozenset()) as (reconciler, registry):
        await reconciler.load("a", None, {})
        allocated.append(len(cuda.live))
        cuda.room_bytes = 4000  # less than the scratch memory of one
        with pytest.raises(ConfigError, match="the GPU's memory is full"):
            await reconciler.load("b", None, {})
        assert index(registry)["a", "1"] == EVICTED, "that it made room was not enough"
        cuda.room_bytes = 1 << 20
        await reconciler.load("b", None, {})
        await infer_value(registry, "a", 1)
        await infer_value(registry, "b", 2)


async def test_metrics_report_the_memory_of_each_model(repository: Path) -> None:
    size = await need(repository)
    models = GpuModelCache()
    pages: list[str] = []

    async with running(repository, ALL, gpu_model_cache=models, gpu_memory_fraction=room(2 * size)) as (_, registry):
        await infer_value(registry, "a", 1)
        await until_async(lambda: index(registry)["a", "1"] == READY)
        prometheus = CollectorRegistry()
        prometheus.register(MemoryCollector(models))
        pages.append(generate_latest(prometheus).decode())
    page = pages[0]
    assert 'headrace_gpu_memory_bytes{gpu="0",kind="scratch",model="a",version="1"} 8192.0' in page
    assert 'headrace_gpu_memory_bytes{gpu="host",kind="buffers",model="c",version="1"}' in page
    assert f'headrace_gpu_memory_limit_bytes{{gpu="0"}} {float(2 * size)}' in page
    assert 'headrace_evictions_total{model="b",version="1"} 1.0' in page
    assert 'headrace_on_demand_loads_total{model="a",version="1"} 1.0' in page
    assert 'headrace_load_seconds_count{model="a",version="1"} 2.0' in page
    assert 'model="b",version="1",kind' not in page
    assert 'kind="weights",model="b"' not in page, "it is parked"


async def test_each_gpu_has_a_budget_and_evictions_of_its_own(cuda: LateCuda, repository: Path, tmp_path: Path) -> None:
    size, cuda.devices, models = await need(repository), 2, GpuModelCache()
    add(tmp_path, "d", 1)
    for name, gpus in {"a": "[0, 1]", "b": "[1]", "c": "[1]", "d": "[0]"}.items():
        group = f"instance_group: [{{kind: gpu, count: 2, gpus: {gpus}}}]\n"
        (repository / name / "config.yaml").write_text(TENSORRT + group)
    options: dict[str, Any] = {"gpu_model_cache": models, "gpu_memory_fraction": room(2 * size)}
    async with running(repository, ALL, **options) as (_, registry):
        for _round in range(3):
            for name, seed in (("a", 1), ("b", 2), ("c", 3), ("d", 1)):
                await infer_value(registry, name, seed)
                assert max(models.ledger.reserved_bytes(gpu) for gpu in (0, 1)) <= 2 * size
        evictions = {name: each.evictions for name, _, each in models.loads()}
    assert evictions["d"] == 0
    assert min(evictions[name] for name in "abc") > 0


@pytest.mark.parametrize("names_gpus", [False, True])
async def test_a_model_that_names_no_gpus_leaves_out_a_full_one(
    cuda: LateCuda, repository: Path, names_gpus: bool
) -> None:
    size, cuda.devices, models = await need(repository), 2, GpuModelCache()
    first = "instance_group: [{kind: gpu, count: 2, gpus: [0]}]\nkeep_loaded: true\n"
    (repository / "a" / "config.yaml").write_text(TENSORRT + first)
    (repository / "b" / "config.yaml").write_text(
        TENSORRT + "instance_group: [{kind: gpu, count: 2, gpus: [0, 1]}]\n" * names_gpus
    )
    options: dict[str, Any] = {"gpu_model_cache": models, "gpu_memory_fraction": room(size)}
    async with running(repository, EXPLICIT, frozenset({"a"}), **options) as (reconciler, registry):
        if names_gpus:
            with pytest.raises(ConfigError, match="a/1"):
                await reconciler.load("b", None, {})
            return
        await reconciler.load("b", None, {})
        await infer_value(registry, "b", 2)
        handle = registry.lease("b", "")
        handle.release()
        assert (handle.alive, handle.spec.parameters["headrace.device"]) == (2, "GPU 1")
        assert models.ledger.reserved_bytes(0) == models.ledger.reserved_bytes(1) == size
        await reconciler.load("c", None, {})  # takes the place of `b`, which returns there
        await infer_value(registry, "b", 2)
        assert index(registry)["c", "1"] == EVICTED
        await until_async(lambda: models.ledger.reserved_bytes(1) == size)  # its second instance is open, too
        assert models.ledger.reserved_bytes(0) == size
