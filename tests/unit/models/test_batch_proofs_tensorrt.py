"""Proof of the batch sizes of engines on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.request import InferRequest
from headrace.core.tensor import as_input
from headrace.models.batch_proofs import BatchProofs
from headrace.models.explanation import explain
from headrace.runtimes.onnxruntime_cuda import CudaExecution

from tests.support import proof_cases as cases
from tests.support.control_thread import running
from tests.support.cuda_provider import FakeProvider
from tests.support.fake_streams import LateCuda
from tests.support.kernels_on_host import install_host_kernels
from tests.support.resident_rows import resident
from tests.support.waiting import until_async
from tests.unit.models.test_loader_cuda_provider import provider as provider


@pytest.mark.parametrize("source", ["", cases.RIGHT])
async def test_a_right_engine_is_proven_with_its_padding(trt: Any, tmp_path: Path, source: str) -> None:
    await cases.check_right_engine(tmp_path, source)


async def test_a_size_that_only_the_engine_computes_wrongly_is_not_used(trt: Any, tmp_path: Path) -> None:
    await cases.check_wrong_size(tmp_path)


async def test_a_size_that_only_the_engine_computes_wrongly_is_not_used_on_a_later_gpu(
    trt: Any, cuda: LateCuda, tmp_path: Path
) -> None:
    cuda.devices = 2
    await cases.check_wrong_size(tmp_path, cases.CONFIG + "instance_group: [{kind: gpu, gpus: [1]}]\n")


async def test_a_size_that_only_the_second_gpu_computes_wrongly_is_not_used(
    trt: Any, cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.runtimes.tensorrt.backend import TensorRtExecution

    cuda.devices = 2
    gpus = cases.CONFIG + "instance_group: [{kind: gpu, gpus: [0, 1]}]\n"
    repository, finish = cases.add_engine(tmp_path, cases.RIGHT, cases.RIGHT, gpus), TensorRtExecution.finish

    def wrong_on_the_second(self: Any, batch: Any) -> dict[str, cases.Array]:
        outputs = finish(self, batch)
        return {"y": outputs["y"] + 0.1} if self._on_device._device == 1 and len(outputs["y"]) == 8 else outputs

    monkeypatch.setattr(TensorRtExecution, "finish", wrong_on_the_second)
    async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert (batches["state"], list(batches["faults"])) == ("limited", ["8"])


async def test_an_engine_that_mixes_rows_of_a_right_model_runs_them_one_by_one(trt: Any, tmp_path: Path) -> None:
    await cases.check_mixing_engine(tmp_path)


@pytest.mark.parametrize("has_source", [False, True])
@pytest.mark.parametrize("engine", cases.MIXING, ids=["reduction", "attention", "reshape", "past the row"])
async def test_requests_to_a_model_that_mixes_rows_run_alone_and_whole_without_padding(
    trt: Any, tmp_path: Path, engine: str, has_source: bool
) -> None:
    await cases.check_mixing_model(tmp_path, engine, has_source)


@pytest.mark.parametrize(
    ("engine", "state"), [(cases.RIGHT, "proven"), (cases.WRONG_EIGHT, "limited"), (cases.MIXED, "limited")]
)
async def test_sizes_of_an_engine_for_which_the_time_is_too_short_run_until_one_fails_while_it_is_idle(
    trt: Any, tmp_path: Path, engine: str, state: str
) -> None:
    repository = cases.add_engine(tmp_path, engine, cases.RIGHT)
    held = cases.HeldTasks()
    async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path, 0.0), idle_tasks=held) as (_, registry):
        before = explain(registry, "m")["batches"]
        await cases.infer(registry, 3, 2, 3)
        held.release()
        ((_, _, handle),) = registry.sources()
        await until_async(lambda: handle.batch_verdict.state != "partial")
        held.hold()
        batches = explain(registry, "m")["batches"]
        for rows in (1, 3, 8):
            for x, y in await cases.infer(registry, rows):
                alone = x - x if engine == cases.MIXED else np.tanh(x)
                np.testing.assert_allclose(y, alone, atol=cases.ATOL)
    assert (before["state"], before["verified_batches"], before["faults"]) == ("partial", [1], {})
    assert "others run untested, and are tested while the model is idle" in before["reason"]
    assert batches["state"] == state


async def test_a_second_start_runs_no_tests(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = cases.add_engine(tmp_path, cases.WRONG_EIGHT, cases.RIGHT)
    seen = []
    for _ in range(2):
        async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
            seen.append(explain(registry, "m")["batches"])
        monkeypatch.setattr("headrace.models.proof_run.ProofRun.run", None)
    assert seen[0] == seen[1]


async def test_a_size_that_only_the_cuda_provider_computes_wrongly_is_not_used(
    provider: FakeProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = tmp_path / "repository" / "m" / "1"
    version.mkdir(parents=True)
    onnx.save(cases.model_of(cases.UNKNOWN), version / "model.onnx")
    gpu = "instance_group: [{kind: gpu, count: 1}]\n"
    (version.parent / "config.yaml").write_text(cases.CONFIG.replace("backend: tensorrt\n", gpu))
    run = CudaExecution.run

    def wrong_for_three(self: CudaExecution, inputs: dict[str, cases.Array]) -> dict[str, cases.Array]:
        outputs = run(self, inputs)
        return {"y": outputs["y"] + 0.1} if len(inputs["x"]) == 3 else outputs

    monkeypatch.setattr(CudaExecution, "run", wrong_for_three)
    async with running(tmp_path / "repository", cases.ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for rows in range(1, 9):
            for x, y in await cases.infer(registry, rows):
                np.testing.assert_allclose(y, x, atol=1e-6)
    assert (batches["state"], list(batches["faults"])) == ("limited", ["3"])
    assert batches["verified_batches"] == [1, 2, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("source", "state"), [(cases.RIGHT, "limited"), ("", "alone")])
async def test_an_engine_that_becomes_wrong_in_one_size_does_not_run_it_any_more(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, state: str
) -> None:
    from headrace.runtimes.tensorrt.backend import TensorRtExecution

    repository = cases.add_engine(tmp_path, cases.RIGHT, source, cases.CONFIG + "proof_sample: 8\n")
    finish, wrong = TensorRtExecution.finish, list[bool]()

    def wrong_for_eight(self: Any, batch: Any) -> dict[str, cases.Array]:
        outputs = finish(self, batch)
        return {"y": outputs["y"] + 0.1} if wrong and len(outputs["y"]) == 8 else outputs

    monkeypatch.setattr(TensorRtExecution, "finish", wrong_for_eight)
    async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        assert handle.batch_verdict.state == "proven"
        wrong.append(True)
        ((x, y),) = await cases.infer(registry, 8)
        assert np.abs(y - np.tanh(x)).max() > 0.05
        await until_async(lambda: handle.batch_verdict.state != "proven")
        batches = explain(registry, "m")["batches"]
        assert handle._instance_group._model.prove.args[-1]()._references is None, "it is as large as the model"
        wrong_rows = [8] if state == "alone" else []
        for rows in range(1, 9):
            for x, y in await cases.infer(registry, rows):
                assert bool(np.abs(y - np.tanh(x)).max() < cases.ATOL) is (rows not in wrong_rows)
    assert (batches["state"], list(batches["faults"])) == (state, ["8"])


async def test_a_difference_in_a_part_of_a_batch_is_one_of_the_size_of_the_part(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.runtimes.tensorrt.backend import TensorRtExecution

    repository = cases.add_engine(tmp_path, cases.WRONG_EIGHT, cases.RIGHT, cases.CONFIG + "proof_sample: 8\n")
    run, wrong = TensorRtExecution.run, list[bool]()

    def wrong_for_four(self: Any, inputs: dict[str, cases.Array]) -> dict[str, cases.Array]:
        outputs = run(self, inputs)
        return {"y": outputs["y"] + 0.1} if wrong and len(outputs["y"]) == 4 else outputs

    monkeypatch.setattr(TensorRtExecution, "run", wrong_for_four)
    async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        assert handle.batch_verdict.allowed == (1, 2, 3, 4)
        wrong.append(True)
        await cases.infer(registry, 8)
        await until_async(lambda: 4 in handle.batch_verdict.faults)
        for rows in range(1, 9):
            for x, y in await cases.infer(registry, rows):
                np.testing.assert_allclose(y, np.tanh(x), atol=cases.ATOL)
    assert handle.batch_verdict.allowed == (1, 2)


@pytest.mark.parametrize("strategy", ["direct: {}", "oldest: {max_candidate_sequences: 20}"])
@pytest.mark.parametrize(("fault", "source"), [("", None), ("mixed", None), ("mixed", "mixed"), ("eight", "")])
@pytest.mark.parametrize("limit_s", [20.0, 0.0], ids=["at the load", "while idle"])
async def test_sequences_whose_states_stay_on_the_gpu_run_in_proven_sizes(
    trt: Any, tmp_path: Path, strategy: str, fault: str, source: str | None, limit_s: float
) -> None:
    await cases.check_sequences(tmp_path, strategy, fault, source, limit_s)


@pytest.mark.parametrize("source", ["", cases.RIGHT])
@pytest.mark.parametrize("fault", ["", "inputs", "outputs"])
async def test_tensors_that_stay_on_the_gpu_between_steps_are_tested(
    trt: Any, cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, source: str
) -> None:
    install_host_kernels(monkeypatch, cuda)
    await cases.check_steps(tmp_path, monkeypatch, fault, source)


@pytest.mark.parametrize("is_wrong", [True, False])
async def test_rows_of_a_client_in_gpu_memory_are_run_again_alone(
    trt: Any, cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """Wrong rows are found; rows that the client changes while they are served are no difference."""
    install_host_kernels(monkeypatch, cuda)
    repository = cases.add_engine(tmp_path, cases.RIGHT, cases.RIGHT, cases.CONFIG + "proof_sample: 8\n")
    rows = resident(np.random.default_rng(4).standard_normal((8, 4)).astype(np.float32))
    async with running(repository, cases.ALL, proofs=BatchProofs(tmp_path, 20.0)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        assert handle.batch_verdict.state == "proven"
        if is_wrong:
            cases.fetch_wrongly(monkeypatch)
        else:
            rows.host_copy = lambda _address, size_bytes: np.zeros(size_bytes, np.uint8)
        request = InferRequest(inputs={"x": as_input(rows)}, rows=8, shape_key=(4,), received_ns=0)
        leased = registry.lease("m", "")
        await leased.infer(request)
        leased.release()
        sampler = handle._batch_results.sampler
        await until_async(lambda: sampler.sample is None)
        await until_async(lambda: handle.batch_verdict.state == ("limited" if is_wrong else "proven"))
        assert (sampler._count, handle.row_differences) == (1, is_wrong)


@pytest.mark.parametrize("fault", cases.FAULTS)
async def test_faults_around_a_right_engine_are_found(
    trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    await cases.check_fault(tmp_path, monkeypatch, fault)
