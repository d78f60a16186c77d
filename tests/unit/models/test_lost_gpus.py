"""A GPU that fails for good: other GPUs and the CPU run the requests, and loads leave it out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from headrace.core.errors import ConfigError, Unavailable
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.registry import Registry
from headrace.runtimes.cuda import devices, driver

from tests.support import fake_nvml
from tests.support.control_thread import EXPLICIT, index, infer_values, put, running, same
from tests.support.fake_streams import LateCuda
from tests.support.models import add_model, affine
from tests.support.waiting import until_async
from tests.unit.models.test_gpu_backend import TENSORRT, plan_of

BOTH = "instance_group: [{kind: gpu, count: 2, gpus: [0, 1]}]\n"
FIRST = "instance_group: [{kind: gpu, gpus: [0]}]\n"


@pytest.fixture(autouse=True)
def two_gpus(trt: Any, cuda: LateCuda) -> None:
    cuda.devices = 2


def add(repository: Path, name: str, config: str) -> None:
    folder = add_model(repository, name, affine(seed=2))
    (folder / "1" / "model.plan").write_bytes(plan_of(repository.parent, 2))
    (folder / "config.yaml").write_text(TENSORRT + config)


async def lose(cuda: LateCuda, registry: Registry, gpu: int, name: str = "m") -> None:
    """Let a GPU fail under requests, until a batch has met the failure."""
    cuda.lost = {gpu}
    alive = registry.lease(name, "")
    alive.release()
    before = alive.alive
    while alive.alive == before:
        await asyncio.gather(*[infer_values(registry, name) for _ in range(8)], return_exceptions=True)


async def test_other_gpus_take_the_queue_at_once(
    cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "mn":
        add(tmp_path / "repository", name, BOTH)
    async with running(tmp_path / "repository") as (_, registry):
        await lose(cuda, registry, 0)
        # Instances without a request there have ended, too, those of other models included: no request meets the failure.
        for name in "mn":
            await until_async(lambda name=name: index(registry)[name, "1"] == ("READY", "2 of 4 instances live"))
            answers = await asyncio.gather(*[infer_values(registry, name) for _ in range(20)])
            assert all(same(answer, 2) for answer in answers)
        assert registry.ready()
        assert not driver.has_lost_all(), "the process goes on with GPU 1"
        fake_nvml.install(monkeypatch, fake_nvml.FakeNvml())
        readings = devices.Nvml(lambda: ["0000:01:00.0", "0000:02:00.0"]).readings()
        assert [reading.up for reading in readings] == [False, True]
        cuda.lost = {0, 1}
        assert driver.has_lost_all()
        assert driver.lost_gpus() == {0, 1}


@pytest.mark.parametrize("fallback", ["", "fallback: onnxruntime\n"])
async def test_a_model_without_another_gpu(cuda: LateCuda, tmp_path: Path, fallback: str) -> None:
    add(tmp_path / "repository", "m", FIRST + fallback)
    async with running(tmp_path / "repository") as (_, registry):
        await lose(cuda, registry, 0)
        if fallback:
            await until_async(lambda: "GPU 0 has failed" in index(registry)["m", "1"][1])
            await until_async(lambda: index(registry)["m", "1"][0] == "READY")
            assert same(await infer_values(registry), 2)
        else:
            await until_async(lambda: "GPU 0 has failed in this server" in index(registry)["m", "1"][1])
            assert index(registry)["m", "1"][0] == "UNAVAILABLE"
            with pytest.raises(Unavailable):
                await infer_values(registry)
        assert registry.ready() is bool(fallback)


async def test_loads_leave_a_lost_gpu_out(cuda: LateCuda, tmp_path: Path) -> None:
    repository, cache = tmp_path / "repository", GpuModelCache()
    add(repository, "m", BOTH)
    add(repository, "n", BOTH)
    async with running(repository, EXPLICIT, frozenset({"m", "n"}), gpu_model_cache=cache) as (reconciler, registry):
        handle = registry.lease("n", "")
        handle.release()
        assert await asyncio.to_thread(handle.evict, 60)
        await lose(cuda, registry, 0)
        assert same(await infer_values(registry, "n"), 2)
        await until_async(lambda: (handle.alive, index(registry)["n", "1"]) == (2, ("READY", "")))
        add(repository, "o", "")
        await reconciler.load("o", None, {})
        assert same(await infer_values(registry, "o"), 2)
        assert set(cache.ledger.account("o", "1", None).ledger.limits) == {0, 1}
        put(repository, 2, config=TENSORRT + FIRST)
        with pytest.raises(ConfigError, match="GPU 0 has failed in this server"):
            await reconciler.load("m", None, {})
        assert same(await infer_values(registry), 2)
