"""Proof of the batch sizes of engines that TensorRT builds, on a real GPU: seeded faults are found, right networks pass."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from headrace.models.batch_proofs import BatchProofs
from headrace.models.explanation import explain
from headrace.runtimes.overlapped import InFlightBatch
from headrace.runtimes.tensorrt.backend import TensorRtExecution
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import proof_cases as cases
from tests.support.control_thread import running
from tests.support.gpu_marks import gpu_marks
from tests.support.models import pictures
from tests.support.serving import run_headrace
from tests.support.tensorrt_networks import FLOAT, HALF, convolutions

pytestmark = gpu_marks(180, "pydantic", "onnx", "onnxruntime")

ROWS = 64
NETWORK = f"""backend: tensorrt
max_batch_size: {ROWS}
dynamic_batching: {{}}
input: [{{name: x, data_type: fp32, dims: [3, 16, 16]}}]
output: [{{name: logits, data_type: fp32, dims: [10]}}]
"""


@pytest.mark.parametrize("source", ["", cases.RIGHT])
async def test_a_right_engine_is_proven_with_its_padding(tmp_path: Path, source: str) -> None:
    await cases.check_right_engine(tmp_path, source)


async def test_a_size_that_only_the_engine_computes_wrongly_is_not_used(tmp_path: Path) -> None:
    await cases.check_wrong_size(tmp_path)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("gpus", [[1], [0, 1]], ids=str)
async def test_a_size_that_the_engine_computes_wrongly_is_used_on_no_gpu(tmp_path: Path, gpus: list[int]) -> None:
    await cases.check_wrong_size(tmp_path, f"{cases.CONFIG}instance_group: [{{kind: gpu, gpus: {gpus}}}]\n")


async def test_an_engine_that_mixes_rows_of_a_right_model_runs_them_one_by_one(tmp_path: Path) -> None:
    await cases.check_mixing_engine(tmp_path)


@pytest.mark.parametrize("has_source", [False, True])
@pytest.mark.parametrize("engine", cases.MIXING, ids=["reduction", "attention", "reshape", "past the row"])
async def test_requests_to_a_model_that_mixes_rows_run_alone_and_whole_without_padding(
    tmp_path: Path, engine: str, has_source: bool
) -> None:
    await cases.check_mixing_model(tmp_path, engine, has_source)


@pytest.mark.parametrize("element", [FLOAT, HALF])
@pytest.mark.parametrize("has_source", [False, True])
async def test_a_right_network_raises_no_false_alarm(
    tmp_path: Path, element: int, has_source: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "headrace.proof")
    version = tmp_path / "repository" / "m" / "1"
    version.mkdir(parents=True)
    profile = ShapeRange({"x": ((1, 3, 16, 16), (8, 3, 16, 16), (ROWS, 3, 16, 16))})
    spec = TargetSpec("fp32" if element == FLOAT else "fp16", (profile,))
    TensorRtTarget(optimization_level=1).build(convolutions(element), spec, version / "model.plan", silent)
    if has_source:
        onnx.save(convolutions(), version / "model.onnx")
    (version.parent / "config.yaml").write_text(NETWORK)
    async with running(tmp_path / "repository", cases.ALL, proofs=BatchProofs(tmp_path, 20.0)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert (batches["state"], batches["faults"]) == ("proven", {}), batches
    print([record.getMessage() for record in caplog.records if "to prove" in record.getMessage()])


PICTURES = """backend: tensorrt
preprocess: {by: server, interpolation: bicubic, mean: [127.0, 127.0, 127.0], std: [128.0, 128.0, 128.0]}
postprocess: {softmax: true, top_k: 3}
output: [{name: LOGITS, label_filename: labels.txt}]
max_batch_size: 8
dynamic_batching: {}
"""


async def test_the_kernels_of_images_and_classes_are_proven_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes, begin = set[str](), TensorRtExecution.begin

    def collect(self: TensorRtExecution, like: Mapping[str, Any], rows: int) -> InFlightBatch:
        dtypes.update(values.dtype.name for values in like.values())
        return begin(self, like, rows)

    monkeypatch.setattr(TensorRtExecution, "begin", collect)
    version = tmp_path / "repository" / "m" / "1"
    version.mkdir(parents=True)
    model, pixels = pictures(), (3, 224, 224)
    profile = ShapeRange({"IMAGE": ((1, *pixels), (8, *pixels), (8, *pixels))})
    TensorRtTarget().build(model, TargetSpec("fp32", (profile,)), version / "model.plan", silent)
    onnx.save(model, version / "model.onnx")
    (version.parent / "config.yaml").write_text(PICTURES)
    (version.parent / "labels.txt").write_text("".join(f"class {number}\n" for number in range(10)))
    async with running(tmp_path / "repository", cases.ALL, proofs=BatchProofs(tmp_path, 20.0)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert (batches["state"], batches["faults"]) == ("proven", {}), batches
    assert dtypes == {"uint8"}, "the CPU converts the images"


async def test_a_load_has_nothing_to_prove_after_a_build(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace.proof")
    folder = tmp_path / "repository" / "m"
    (folder / "1").mkdir(parents=True)
    onnx.save(convolutions(), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(NETWORK)
    options = ("--precision", "fp32", "--cache", str(tmp_path / "cache"), "--state-dir", str(tmp_path / "state"))
    built = run_headrace("build", str(folder), "--publish-slower", *options)
    assert built.returncode == 0, built
    assert f"batch sizes proven, up to {ROWS} rows" in built.stdout
    async with running(folder.parent, cases.ALL, proofs=BatchProofs(tmp_path / "state")) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert (batches["state"], batches["faults"]) == ("proven", {}), batches
    assert not [record for record in caplog.records if "to prove" in record.getMessage()]


@pytest.mark.parametrize("strategy", ["direct: {}", "oldest: {max_candidate_sequences: 20}"])
@pytest.mark.parametrize(("fault", "source"), [("", None), ("mixed", None), ("mixed", "mixed"), ("eight", "")])
async def test_sequences_whose_states_stay_on_the_gpu_run_in_proven_sizes(
    tmp_path: Path, strategy: str, fault: str, source: str | None
) -> None:
    await cases.check_sequences(tmp_path, strategy, fault, source)


@pytest.mark.parametrize("source", ["", cases.RIGHT])
@pytest.mark.parametrize("fault", ["", "inputs", "outputs"])
async def test_tensors_that_stay_on_the_gpu_between_steps_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, source: str
) -> None:
    await cases.check_steps(tmp_path, monkeypatch, fault, source)


@pytest.mark.parametrize("fault", cases.FAULTS)
async def test_faults_around_a_right_engine_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    await cases.check_fault(tmp_path, monkeypatch, fault)
