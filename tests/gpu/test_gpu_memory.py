"""Models that do not all fit into what a real GPU's memory may be used for: booked, refused, parked, brought back."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from headrace.core.errors import ConfigError
from headrace.models.control_policy import ControlPolicy
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.reconciler import Reconciler
from headrace.models.registry import Registry
from headrace.runtimes.cuda.devices import describe
from headrace.runtimes.cuda.driver import current
from headrace.runtimes.cuda.memory import DeviceBuffer
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.gpu.test_tensorrt_failures import full_gpu
from tests.support.control_thread import EXPLICIT, expected, index, infer_values, run
from tests.support.gpu_marks import gpu_marks
from tests.support.gpu_process_memory import process_gpu_bytes
from tests.support.models import add_model, affine
from tests.support.waiting import until_async

pytestmark = [*gpu_marks(180), pytest.mark.whole_gpu]

ALL = ControlPolicy("none")
# An instance's berths are 8 MB then; what TensorRT and the driver take beside them is more (33 MB on an H200).
ROWS = 1 << 15
CONFIG = f"backend: tensorrt\nmax_batch_size: {ROWS}\nparameters: {{cuda_graphs: '0'}}\n"
READY, EVICTED = ("READY", ""), ("READY", "evicted: loaded on demand")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate("abc", 1):
        model = affine(seed=seed)
        target = add_model(folder / "repository", name, model)
        (target / "config.yaml").write_text(CONFIG)
        profile = ShapeRange({"X": ((1, 16), (ROWS, 16), (ROWS, 16))})
        TensorRtTarget().build(model, TargetSpec("fp32", (profile,)), target / "1" / "model.plan", silent)
    return folder / "repository"


def same(answer: list[float], seed: int) -> bool:
    """In TF32, whose products have 10 bits of their factors; the other models' answers are far away."""
    right = np.array(expected(seed))
    return bool(np.allclose(answer, right, rtol=0, atol=0.01 * right.max()))


def test_no_model_answers_for_another() -> None:
    for seed in (1, 2, 3):
        assert [other for other in (1, 2, 3) if same(expected(other), seed)] == [seed]


@pytest.fixture(scope="module")
def needs(repository: Path) -> dict[str, int]:
    """GPU memory booked by each model: it varies, as TensorRT selects kernels by time."""
    result: dict[str, int] = {}
    for name in "abc":
        gpu_model_cache = GpuModelCache()

        async def check(
            _: Reconciler, __: Registry, name: str = name, gpu_model_cache: GpuModelCache = gpu_model_cache
        ) -> None:
            result[name] = gpu_model_cache.ledger.reserved_bytes(0)

        run(repository, check, names=frozenset({name}), gpu_model_cache=gpu_model_cache)
    return result


def test_own_bytes_are_those_of_this_process() -> None:
    with current():
        before, block = process_gpu_bytes(), DeviceBuffer(64 << 20)
        used = process_gpu_bytes() - before
        block.free()
        remaining = process_gpu_bytes() - before
    assert (64 << 20) <= used < (80 << 20)
    assert remaining < 16 << 20


def room(size_bytes: int) -> float:
    return (size_bytes + 0.5) / describe().memory_bytes


def test_booked_memory_equals_used_memory(repository: Path, needs: dict[str, int]) -> None:
    booked = needs["a"]  # and what the driver loads once is there
    before = process_gpu_bytes()
    used: list[int] = []

    async def check(_: Reconciler, registry: Registry) -> None:
        assert same(await infer_values(registry, "a"), 1)
        used.append(process_gpu_bytes() - before)

    run(repository, check, names=frozenset({"a"}))
    print(f"booked {booked >> 10} KiB, taken {used[0] >> 10} KiB", flush=True)
    assert 0.5 * booked < used[0] < booked + (64 << 20)


def test_models_share_the_gpu_in_turn_with_correct_responses(repository: Path, needs: dict[str, int]) -> None:
    two = sum(sorted(needs.values())[1:])  # any two of them have room, all three have not
    gpu_model_cache = GpuModelCache()

    async def check(_: Reconciler, registry: Registry) -> None:
        states = index(registry)  # loads run side by side: any one may be the last that finds room
        assert states.keys() == {(name, "1") for name in "abc"}
        assert sorted(states.values()) == sorted([EVICTED, READY, READY])

        async def caller(name: str, seed: int) -> int:
            count, end = 0, time.monotonic() + 8
            while time.monotonic() < end:
                assert same(await infer_values(registry, name), seed)
                count += 1
            return count

        counts = await asyncio.gather(*[caller(name, seed) for seed, name in enumerate("abc", 1)])
        loads = [(name, loads) for name, _, loads in gpu_model_cache.loads()]
        seconds = {name: round(each.time_ns / each.count / 1e9, 3) for name, each in loads}
        print(f"answers {counts}, loads {[each.count for _, each in loads]}, seconds a load {seconds}", flush=True)
        assert min(counts) > 10
        assert gpu_model_cache.ledger.reserved_bytes(0) <= two

    run(repository, check, ALL, gpu_model_cache=gpu_model_cache, gpu_memory_fraction=room(two))


@pytest.mark.usefixtures("two_gpus")
def test_each_gpu_has_a_budget_and_evictions_of_its_own(
    repository: Path, needs: dict[str, int], tmp_path: Path
) -> None:
    mine = shutil.copytree(repository, tmp_path / "repository")
    shutil.copytree(mine / "a", mine / "d")
    for name, gpus in {"a": "[0, 1]", "b": "[1]", "c": "[1]", "d": "[0]"}.items():
        (mine / name / "config.yaml").write_text(f"{CONFIG}instance_group: [{{kind: gpu, count: 2, gpus: {gpus}}}]\n")
    two = sum(sorted(needs.values())[1:])  # any two have room on GPU 1, all three have not; `a` and `d` on GPU 0 have
    gpu_model_cache = GpuModelCache()

    async def check(_: Reconciler, registry: Registry) -> None:
        for _round in range(5):
            for name, seed in (("a", 1), ("b", 2), ("c", 3), ("d", 1)):
                assert same(await infer_values(registry, name), seed)
                assert max(gpu_model_cache.ledger.reserved_bytes(gpu) for gpu in (0, 1)) <= two
        evictions = {name: each.evictions for name, _, each in gpu_model_cache.loads()}
        print(f"evictions {evictions}", flush=True)
        assert evictions["d"] == 0
        assert evictions["b"] + evictions["c"] > 2

    run(mine, check, ALL, gpu_model_cache=gpu_model_cache, gpu_memory_fraction=room(two))


def test_eviction_frees_all_memory(repository: Path, needs: dict[str, int]) -> None:
    own: list[int] = []

    async def check(_: Reconciler, registry: Registry) -> None:
        for _round in range(12):
            for seed, name in enumerate("abc", 1):
                assert same(await infer_values(registry, name), seed)
            await until_async(lambda: index(registry)["c", "1"] == READY)
            own.append(process_gpu_bytes())

    run(repository, check, ALL, gpu_memory_fraction=room(max(needs.values())))
    print("MiB of this process", [size_bytes >> 20 for size_bytes in own], flush=True)
    assert own[-1] - own[2] < 16 << 20


def test_idle_models_free_all_memory(repository: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(repository, tmp_path / "repository")
    for name in "abc":
        (mine / name / "config.yaml").write_text(CONFIG + "unload_after_s: 1\n")
    models, own = GpuModelCache(), list[int]()

    async def check(_: Reconciler, registry: Registry) -> None:
        for _round in range(4):
            for seed, name in enumerate("abc", 1):
                assert same(await infer_values(registry, name), seed)
            await until_async(lambda: models.ledger.reserved_bytes(0) == 0)
            own.append(process_gpu_bytes())

    run(mine, check, ALL, gpu_model_cache=models)
    print("MiB of this process", [size_bytes >> 20 for size_bytes in own], flush=True)
    assert own[-1] - own[1] < 16 << 20


def test_a_gpu_filled_by_others_refuses_loads_and_keeps_serving(repository: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(repository, tmp_path / "repository")
    placed = CONFIG + "instance_group: [{kind: gpu, gpus: [0]}]\n"  # else `b` goes to another GPU, where there is one
    (mine / "a" / "config.yaml").write_text(placed + "keep_loaded: true\n")
    (mine / "b" / "config.yaml").write_text(placed)

    async def check(reconciler: Reconciler, registry: Registry) -> None:
        await reconciler.load("a", None, {})
        with full_gpu(2 << 20), pytest.raises(ConfigError) as caught:
            await reconciler.load("b", None, {})
        print(caught.value, flush=True)
        assert "memory" in str(caught.value)
        assert same(await infer_values(registry, "a"), 1)
        await reconciler.load("b", None, {})
        assert same(await infer_values(registry, "b"), 2)

    run(mine, check, EXPLICIT, frozenset())
