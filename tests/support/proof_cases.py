"""Proof of the batch sizes of engines: the same cases for a real GPU and for a fake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from headrace.core.request import InferRequest, InferResponse
from headrace.models.batch_proofs import BatchProofs
from headrace.models.control_policy import ControlPolicy
from headrace.models.explanation import explain
from headrace.models.idle_tasks import IdleTasks
from headrace.models.registry import Registry
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.control_thread import running
from tests.support.networks import network

Array = np.ndarray[Any, Any]
# TensorRT computes FP32 with TF32.
ATOL = 2e-2
ALL = ControlPolicy("none")
CONFIG = """backend: tensorrt
max_batch_size: 8
dynamic_batching: {max_queue_delay_microseconds: 50000}
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: y, data_type: fp32, dims: [4]}]
"""
RIGHT = "y = Tanh (x)"
MIXED = "m = ReduceMean <axes: ints = [0]> (x)\n y = Sub (x, m)"
# Right, which the analysis of the graph cannot prove.
UNKNOWN = "i = NonZero (x)\n j = Cast <to: int = 1> (i)\n s = ReduceSum (j)\n z = Mul (s, nothing)\n y = Add (x, z)"
# Wrong if eight rows run: the largest bucket, which each engine has.
WRONG_EIGHT = """t = Tanh (x)\n s = Shape (x)\n n = Gather (s, zero)\n is8 = Equal (n, eight)\n f = Cast <to: int = 1> (is8)
 e = Mul (f, tenth)\n y = Add (t, e)"""
CONSTANTS = {"zero": np.array(0), "eight": np.array(8), "tenth": np.array(0.1), "nothing": np.array(0.0)}


class HeldTasks(IdleTasks):
    """Work on idle models that waits for `release`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = True

    def look(self, registry: Registry, is_loading: Callable[[], bool]) -> int | None:
        return None if self.is_held else super().look(registry, is_loading)

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
        self.on_added()


def model_of(text: str) -> onnx.ModelProto:
    return network(text, {name: value for name, value in CONSTANTS.items() if f"{name})" in text}, ("N", 4))


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


async def check_right_engine(folder: Path, source: str) -> None:
    """A right engine is proven with its padding."""
    repository = add_engine(folder, RIGHT, source)
    async with running(repository, ALL, proofs=BatchProofs(folder)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for x, y in await infer(registry, 1, 3, 2):
            np.testing.assert_allclose(y, np.tanh(x), atol=ATOL)
    assert (batches["state"], batches["faults"]) == ("proven", {})
    assert set(batches["verified_batches"]) >= {1, 2, 3, 8}


async def check_wrong_size(folder: Path, config: str = CONFIG) -> None:
    """A size that only the engine computes wrongly is not used."""
    repository = add_engine(folder, WRONG_EIGHT, RIGHT, config)
    async with running(repository, ALL, proofs=BatchProofs(folder)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for rows in range(1, 9):
            for x, y in await infer(registry, rows):
                np.testing.assert_allclose(y, np.tanh(x), atol=ATOL)
    assert batches["state"] == "limited"
    assert "8" in batches["faults"]
    assert "of 8 differs by 0.1 from the row alone" in batches["reason"]


async def check_mixing_engine(folder: Path) -> None:
    """An engine that mixes the rows of a right model runs them one by one."""
    repository = add_engine(folder, MIXED, RIGHT)
    async with running(repository, ALL, proofs=BatchProofs(folder)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        ((x, y),) = await infer(registry, 3)
    assert (batches["state"], batches["verified_batches"]) == ("limited", [1])
    np.testing.assert_allclose(y, x - x, atol=ATOL)  # what the engine returns for each row alone


async def check_mixing_model(folder: Path, source: str) -> None:
    """Requests to a model that mixes rows run alone and whole, without padding."""
    repository = add_engine(folder, MIXED, source)
    async with running(repository, ALL, proofs=BatchProofs(folder)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for x, y in await infer(registry, 1, 3, 2, 5):
            np.testing.assert_allclose(y, x - x.mean(axis=0), atol=ATOL)
    assert batches["state"] == "alone"
