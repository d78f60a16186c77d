"""Proof of the batch sizes of engines: padding, sizes that only the engine computes wrongly, engines without an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.request import InferRequest, InferResponse
from headrace.repository.batch_proofs import BatchProofs
from headrace.repository.explanation import explain
from headrace.repository.reconciler import ControlPolicy
from headrace.repository.registry import Registry
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.control_thread import running
from tests.support.networks import network

Array = np.ndarray[Any, Any]
ALL = ControlPolicy("none")
CONFIG = """backend: tensorrt
max_batch_size: 8
dynamic_batching: {max_queue_delay_microseconds: 50000}
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: y, data_type: fp32, dims: [4]}]
"""
RIGHT = "y = Tanh (x)"
MIXED = "m = ReduceMean <axes: ints = [0]> (x)\n y = Sub (x, m)"
# Wrong if four rows run.
WRONG_FOUR = """t = Tanh (x)\n s = Shape (x)\n n = Gather (s, zero)\n is4 = Equal (n, four)\n f = Cast <to: int = 1> (is4)
 e = Mul (f, tenth)\n y = Add (t, e)"""
CONSTANTS = {"zero": np.array(0), "four": np.array(4), "tenth": np.array(0.1)}


def model_of(text: str) -> onnx.ModelProto:
    return network(text, CONSTANTS if "Gather" in text else {}, ("N", 4))


def add_engine(folder: Path, engine: str, source: str = "", config: str = CONFIG) -> Path:
    """Write the model "m" with the plan of one graph, beside the ONNX file of another; return the repository."""
    version = folder / "repository" / "m" / "1"
    version.mkdir(parents=True)
    profile = ShapeRange({"x": ((1, 4), (8, 4), (8, 4))})
    TensorRtTarget().build(model_of(engine), TargetSpec("fp32", (profile,)), version / "model.plan", silent)
    if source:
        onnx.save(model_of(source), version / "model.onnx")
    (version.parent / "config.yaml").write_text(config)
    return folder / "repository"


async def infer(registry: Registry, *rows: int) -> list[tuple[Array, Array]]:
    """Return inputs and outputs of requests that are queued together."""
    random, handle = np.random.default_rng(2), registry.lease("m", "")
    requests = [random.standard_normal((count, 4)).astype(np.float32) for count in rows]
    try:
        pending = [
            handle.infer(InferRequest(inputs={"x": x}, rows=len(x), shape_key=(4,), received_ns=0)) for x in requests
        ]
        responses = [await completion for completion in pending]
        outputs = [response.outputs["y"] for response in responses if isinstance(response, InferResponse)]
        return [(x, np.asarray(y)) for x, y in zip(requests, outputs, strict=True)]
    finally:
        handle.release()


@pytest.mark.parametrize("source", ["", RIGHT])
async def test_a_right_engine_is_proven_with_its_padding(trt: Any, tmp_path: Path, source: str) -> None:
    repository = add_engine(tmp_path, RIGHT, source)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for x, y in await infer(registry, 1, 3, 2):
            np.testing.assert_allclose(y, np.tanh(x), atol=1e-6)
    assert (batches["state"], batches["faults"]) == ("proven", {})
    assert set(batches["verified_batches"]) >= {1, 2, 3, 8}


async def test_a_size_that_only_the_engine_computes_wrongly_is_not_used(trt: Any, tmp_path: Path) -> None:
    repository = add_engine(tmp_path, WRONG_FOUR, RIGHT)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for rows in range(1, 9):
            for x, y in await infer(registry, rows):
                np.testing.assert_allclose(y, np.tanh(x), atol=1e-6)
    assert batches["state"] == "limited"
    assert "4" in batches["faults"] or "3" in batches["faults"]
    assert "of 3 differs by 0.1 from the row alone" in batches["reason"]


async def test_an_engine_that_mixes_rows_of_a_right_model_runs_them_one_by_one(trt: Any, tmp_path: Path) -> None:
    repository = add_engine(tmp_path, MIXED, RIGHT)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        ((x, y),) = await infer(registry, 3)
    assert (batches["state"], batches["verified_batches"]) == ("limited", [1])
    np.testing.assert_allclose(y, x - x, atol=1e-6)  # what the engine returns for each row alone


@pytest.mark.parametrize("source", ["", MIXED])
async def test_requests_to_a_model_that_mixes_rows_run_alone_and_whole_without_padding(
    trt: Any, tmp_path: Path, source: str
) -> None:
    repository = add_engine(tmp_path, MIXED, source)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for x, y in await infer(registry, 1, 3, 2, 5):
            np.testing.assert_allclose(y, x - x.mean(axis=0), atol=1e-6)
    assert batches["state"] == "alone"


async def test_a_second_start_runs_no_tests(trt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = add_engine(tmp_path, WRONG_FOUR, RIGHT)
    seen = []
    for _ in range(2):
        async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
            seen.append(explain(registry, "m")["batches"])
        monkeypatch.setattr("headrace.repository.batch_proofs._Proof.run", None)
    assert seen[0] == seen[1]
