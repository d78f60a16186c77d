"""TensorRT in a process of the model's own, on a simulated GPU there: overlapped, its memory booked here, with its fallback."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import headrace
import numpy as np
import pytest
from headrace.core.errors import ModelFailed
from headrace.core.request import InferRequest
from headrace.core.tensor import Array
from headrace.models import loader as loader_module
from headrace.models.batch_proofs import BatchProofs
from headrace.models.control_policy import ControlPolicy
from headrace.runtimes.isolated.backend import IsolatedBackend, IsolatedExecution
from headrace.runtimes.overlapped import InFlightBatch
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import fake_tensorrt_child
from tests.support import gpu_ragged_cases as cases
from tests.support.control_thread import index, infer_values, put, running, same
from tests.support.fake_gpu import install_gpu
from tests.support.models import affine
from tests.support.networks import network
from tests.support.processes import isolated_children_of_this_process

# Each of these starts processes of its own; together they take most of a minute.
pytestmark = pytest.mark.slow

ALL = ControlPolicy("none")
ISOLATED = "backend: tensorrt\nmax_batch_size: 8\nisolation: process\n"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU in this process too, whose name and size the control plane reads; no model of these tests may use it."""
    cuda = install_gpu(monkeypatch)
    factories = {**loader_module.FACTORIES, "tensorrt": fake_tensorrt_child.FACTORY}
    isolated = lambda runtime, config: IsolatedBackend(config.name, factories[runtime], 60.0)  # noqa: E731
    monkeypatch.setattr(loader_module, "isolated", isolated)
    yield
    assert not cuda.live
    assert isolated_children_of_this_process() == []


def with_plan(tmp_path: Path, config: str = "", plan: bytes | None = None) -> Path:
    repository = tmp_path / "repository"
    put(repository, 1, config=ISOLATED + config)
    if plan is None:
        path = tmp_path / "built.plan"
        order = TargetSpec("fp32", (ShapeRange({"X": ((1, 16), (8, 16), (8, 16))}),))
        TensorRtTarget().build(affine(seed=2), order, path, silent)
        plan = path.read_bytes()
    (repository / "m" / "1" / "model.plan").write_bytes(plan)
    return repository


async def test_it_serves_from_there_and_again_after_a_crash(tmp_path: Path) -> None:
    repository = with_plan(tmp_path, "dynamic_batching: {}\ninstance_group: [{kind: gpu, count: 2}]\n")
    async with running(repository, ALL) as (_, registry):
        handle = registry.lease("m", "")
        assert handle.spec.resident_devices == frozenset(), "that process does not read our memory"
        assert handle.policy.instances == 2
        for _round in range(2):
            answers = await asyncio.gather(*(infer_values(registry) for _ in range(20)))
            assert all(same(answer, 2) for answer in answers)
            (child,) = isolated_children_of_this_process()
            os.kill(child, signal.SIGKILL)
        assert same(await infer_values(registry), 2)
        handle.release()


async def test_a_model_without_a_batch_dimension_runs_in_the_process(tmp_path: Path) -> None:
    repository = with_plan(tmp_path)
    (repository / "m" / "config.yaml").write_text(ISOLATED.replace("max_batch_size: 8", "max_batch_size: 0"))

    async with running(repository, ALL) as (_, registry):
        assert same(await infer_values(registry), 2)


async def test_its_memory_is_booked_and_bounded(tmp_path: Path) -> None:
    async with running(with_plan(tmp_path, "gpu_memory_budget: 4096\n"), ALL) as (_, registry):
        state, reason = index(registry)["m", "1"]
        assert state == "UNAVAILABLE"
        assert "its gpu_memory_budget is 4.0 KiB" in reason


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (b"rubbish", "is no plan that TensorRT"),
        (b"crash", "its process died while it loaded the model: killed by SIGABRT"),
    ],
)
async def test_the_onnx_file_replaces_a_plan_that_does_not_load_in_the_process(
    tmp_path: Path, plan: bytes, why: str
) -> None:
    async with running(with_plan(tmp_path, "fallback: onnxruntime\n", plan), ALL) as (_, registry):
        assert same(await infer_values(registry), 1)
        state, reason = index(registry)["m", "1"]
        assert state == "READY"
        assert reason.startswith("model.onnx serves in place of model.plan, which cannot be loaded: ")
        assert why in reason
        assert len(isolated_children_of_this_process()) == 1, "the ONNX file has a process of its own as well"


async def test_ragged_batches_are_divided_and_run_in_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []
    begin: Callable[..., InFlightBatch] = IsolatedExecution.begin

    def recorded(execution: IsolatedExecution, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        sizes.append(like["ELEMENTS"].size)
        return begin(execution, like, rows)

    monkeypatch.setattr(IsolatedExecution, "begin", recorded)
    repository = cases.make_repository(tmp_path)
    with (repository / "plan" / "config.yaml").open("a") as file:
        file.write("isolation: process\n")

    async with headrace.Server(repository, state_dir="") as server:
        await cases.check_answers(server, "plan", list(range(1, 40)))
        assert 0 < max(sizes) <= cases.MOST
        await cases.check_bounds(server, "plan")


async def test_a_plan_that_contradicts_its_configuration(tmp_path: Path) -> None:
    tensors = "input: [{name: X, data_type: fp32, dims: [17]}]\noutput: [{name: Y, data_type: fp32, dims: [4]}]\n"
    repository = with_plan(tmp_path, tensors)
    (repository / "m" / "1" / "model.onnx").unlink()

    async with running(repository, ALL) as (_, registry):
        reason = next(reason for (name, _version), (_state, reason) in index(registry).items() if name == "m")
        assert "input 'X' has the shape [17] in the configuration, [16] in the plan" in reason


async def test_an_engine_that_mixes_rows_takes_single_rows_only(tmp_path: Path) -> None:
    """Its process pads batches, so that a request of several rows would not be whole."""
    text = "M = ReduceMean <axes: ints = [0]> (x)\n y = Sub (x, M)"
    order = TargetSpec("fp32", (ShapeRange({"x": ((1, 4), (8, 4), (8, 4))}),))
    TensorRtTarget().build(network(text, {}, ("N", 4)), order, tmp_path / "mixed.plan", silent)
    tensors = "input: [{name: x, data_type: fp32, dims: [4]}]\noutput: [{name: y, data_type: fp32, dims: [4]}]\n"
    repository = with_plan(tmp_path, tensors, (tmp_path / "mixed.plan").read_bytes())
    (repository / "m" / "1" / "model.onnx").unlink()
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        handle = registry.lease("m", "")
        x = np.ones((3, 4), np.float32)
        requests = [InferRequest(inputs={"x": x[:n]}, rows=n, shape_key=(4,), received_ns=0) for n in (1, 3)]
        try:
            await handle.infer(requests[0])
            with pytest.raises(ModelFailed, match="3 rows, of which no batch is proven"):
                await handle.infer(requests[1])
        finally:
            handle.release()
