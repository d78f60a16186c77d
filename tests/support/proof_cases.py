"""Proof of the batch sizes of engines: the same cases for a real GPU and for a fake."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.core.request import InferRequest, InferResponse, SequenceFields
from headrace.models.batch_proofs import BatchProofs
from headrace.models.control_policy import ControlPolicy
from headrace.models.explanation import explain
from headrace.models.idle_tasks import IdleTasks
from headrace.models.registry import Registry
from headrace.runtimes.overlapped import InFlightBatch
from headrace.runtimes.tensorrt.backend import TensorRtExecution
from headrace.runtimes.tensorrt.contexts import PreparedContext
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from loadtest.onnx_models import onnx_model
from tests.support.control_thread import running
from tests.support.models import add_pipeline, ensemble_config
from tests.support.networks import network
from tests.support.waiting import until_async

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
# An attention without the mask that keeps a row from the others, and a reshape that moves rows.
UNMASKED = "t = Transpose (x)\n s = MatMul (x, t)\n p = Softmax (s)\n y = MatMul (p, x)"
MOVED = "t = Transpose (x)\n y = Reshape (t, fours)"
# Each value gets the next one in memory: the last one of a row that of another row.
PAST = """f = Reshape (x, all)\n t = Slice (f, one, far)\n c = Concat <axis: int = 0> (t, end)
 n = Reshape (c, fours)\n y = Add (x, n)"""
# Right, which the analysis of the graph cannot prove.
UNKNOWN = "i = NonZero (x)\n j = Cast <to: int = 1> (i)\n s = ReduceSum (j)\n z = Mul (s, nothing)\n y = Add (x, z)"
# Wrong if eight rows run: the largest bucket, which each engine has.
WRONG_EIGHT = """t = Tanh (x)\n s = Shape (x)\n n = Gather (s, zero)\n is8 = Equal (n, eight)\n f = Cast <to: int = 1> (is8)
 e = Mul (f, tenth)\n y = Add (t, e)"""
CONSTANTS = {
    "zero": np.array(0),
    "eight": np.array(8),
    "tenth": np.array(0.1),
    "nothing": np.array(0.0),
    "fours": np.array([-1, 4]),
    "all": np.array([-1]),
    "one": np.array([1]),
    "far": np.array([1 << 30]),
    "end": np.array([0.0]),
}


def attended(x: Array) -> Array:
    scores = np.exp(x @ x.T)
    return scores / scores.sum(axis=1, keepdims=True) @ x


# What a model that mixes rows returns for a whole request.
MIXING: dict[str, Callable[[Array], Array]] = {
    MIXED: lambda x: x - x.mean(axis=0),
    UNMASKED: attended,
    MOVED: lambda x: x.T.reshape(-1, 4),
    PAST: lambda x: x + np.append(x.reshape(-1)[1:], 0.0).reshape(x.shape),
}


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
        self.commands.wake()


def model_of(text: str) -> onnx.ModelProto:
    return network(
        text, {name: value for name, value in CONSTANTS.items() if re.search(rf"[ ,(]{name}[,)]", text)}, ("N", 4)
    )


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


async def infer(registry: Registry, *rows: int, model: str = "m") -> list[tuple[Array, Array]]:
    """Return inputs and outputs of requests that are queued together."""
    random, handle = np.random.default_rng(2), registry.lease(model, "")
    (source,), (target,) = handle.spec.inputs, handle.spec.outputs
    requests = [random.standard_normal((count, 4)).astype(np.float32) for count in rows]
    try:
        pending = [
            handle.infer(InferRequest(inputs={source: x}, rows=len(x), shape_key=(4,), received_ns=0)) for x in requests
        ]
        responses = [await completion for completion in pending]
        outputs = [response.outputs[target] for response in responses if isinstance(response, InferResponse)]
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


async def check_mixing_model(folder: Path, engine: str, has_source: bool) -> None:
    """Requests to a model that mixes rows run alone and whole, without padding."""
    repository = add_engine(folder, engine, engine if has_source else "")
    async with running(repository, ALL, proofs=BatchProofs(folder)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for x, y in await infer(registry, 1, 3, 2, 5):
            np.testing.assert_allclose(y, MIXING[engine](x), atol=ATOL)
    assert batches["state"] == "alone"


def fetch_wrongly(patch: pytest.MonkeyPatch) -> None:
    """Let GPUs fetch the rows of a batch in another order."""
    launch = TensorRtExecution.launch

    def launch_wrongly(self: TensorRtExecution, batch: InFlightBatch) -> None:
        moved = [(name, first, rows[1:]) for name, first, rows in batch.resident_inputs if len(rows) > 1]
        last = [(name, first + len(rows) - 1, rows[:1]) for name, first, rows in batch.resident_inputs]
        batch.resident_inputs[:] = moved + last
        launch(self, batch)

    patch.setattr(TensorRtExecution, "launch", launch_wrongly)


def _leak(patch: pytest.MonkeyPatch) -> None:
    """Add to each output what the padding of its batch has in the memory of the slot."""
    finish = TensorRtExecution.finish

    def leaking(self: TensorRtExecution, batch: InFlightBatch) -> dict[str, Array]:
        inputs: Any = batch.state.slot.inputs["x"]  # type: ignore[attr-defined]
        padding = inputs.view((8, 4))[batch.rows if batch.rows > 2 else 8 :]
        return {"y": finish(self, batch)["y"] + np.float32(1e-9) * padding.sum()}

    patch.setattr(TensorRtExecution, "finish", leaking)


def _share(patch: pytest.MonkeyPatch) -> None:
    """Return outputs in the memory of a slot, which later batches use."""
    finish = TensorRtExecution.finish

    def sharing(self: TensorRtExecution, batch: InFlightBatch) -> dict[str, Array]:
        views: dict[str, Array] = batch.state.views.outputs  # type: ignore[attr-defined]
        return {name: views[name] for name in finish(self, batch)} if batch.rows > 1 else finish(self, batch)

    patch.setattr(TensorRtExecution, "finish", sharing)


def _keep_pointer(patch: pytest.MonkeyPatch) -> None:
    """Let all slots replay the graph of the slot that was the first to capture one for eight rows."""
    launch, first = PreparedContext.launch_batch_graph, list[PreparedContext]()

    def stale(self: PreparedContext, gathered: bool) -> None:
        if self.rows == 8 and not first:
            first.append(self)
        launch(first[0] if self.rows == 8 else self, gathered)

    patch.setattr(PreparedContext, "launch_batch_graph", stale)


FAULTS = {"padding": _leak, "memory": _share, "stale pointer": _keep_pointer}


async def check_fault(folder: Path, patch: pytest.MonkeyPatch, fault: str) -> None:
    """Faults around a right engine are found at its load, and its batches are right afterwards."""
    FAULTS[fault](patch)
    repository = add_engine(folder, RIGHT, RIGHT, f"{CONFIG}parameters: {{one_graph_rows: {{string_value: '8'}}}}\n")
    async with running(repository, ALL, proofs=BatchProofs(folder, 20.0)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        for x, y in await infer(registry, 1, 3, 5, 8):
            np.testing.assert_allclose(y, np.tanh(x), atol=ATOL)
    assert batches["state"] == "limited", batches
    print(fault, batches["faults"])


CHAIN = [("m", {"x": "in"}, {"y": "between"}), ("m", {"x": "between"}, {"y": "out"})]


async def check_steps(folder: Path, patch: pytest.MonkeyPatch, fault: str, source: str) -> None:
    """Tensors that stay on the GPU between the steps of a pipeline are proven; they do not stay if rows are wrong there."""
    finish = TensorRtExecution.finish

    def finish_wrongly(self: TensorRtExecution, batch: InFlightBatch) -> dict[str, Array]:
        """Return rows in host memory in place of those on the GPU, the last one first."""
        has_stayed = bool(batch.resident_outputs) and batch.rows > 1
        outputs = finish(self, batch)
        return {name: np.asarray(values)[::-1] for name, values in outputs.items()} if has_stayed else outputs

    if fault == "inputs":
        fetch_wrongly(patch)
    elif fault == "outputs":
        patch.setattr(TensorRtExecution, "finish", finish_wrongly)
    repository = add_engine(folder, RIGHT, source)
    tensor = ("TYPE_FP32", [4])
    add_pipeline(repository, "chain", ensemble_config(CHAIN, {"in": tensor}, {"out": tensor}))
    async with running(repository, ALL, proofs=BatchProofs(folder, 20.0)) as (_, registry):
        batches = explain(registry, "m")["batches"]
        devices = {name: handle.spec.resident_devices for name, _, handle in registry.sources()}["m"]
        pairs = [pair for rows in (2, 3, 8) for pair in await infer(registry, rows, model="chain")]
    for x, y in pairs:
        np.testing.assert_allclose(y, np.tanh(np.tanh(x)), atol=ATOL)
    assert bool(devices) is not bool(fault)
    assert batches["state"] == ("proven" if not fault else "limited" if source else "alone"), batches


def sequence_model(fault: str) -> onnx.ModelProto:
    """y is the state `before` plus x, "mixed": plus the mean of x over all rows, "eight": plus 1 in a batch of eight rows.

    `after` is the same.
    """
    node, row = onnx.helper.make_node, (onnx.TensorProto.FLOAT, ("rows", 4))
    nodes = {
        "": [node("Identity", ["x"], ["added"])],
        "mixed": [node("ReduceMean", ["x", "zero"], ["added"], keepdims=1)],
        "eight": [
            node("Shape", ["x"], ["shape"]),
            node("Gather", ["shape", "zero"], ["rows"]),
            node("Equal", ["rows", "eight"], ["is8"]),
            node("Cast", ["is8"], ["one"], to=onnx.TensorProto.FLOAT),
            node("Add", ["x", "one"], ["added"]),
        ],
    }[fault] + [
        node("Add", ["before", "added"], ["sum"]),
        node("Mul", ["sum", "READY"], ["y"]),
        node("Identity", ["y"], ["after"]),
    ]
    inputs = {"x": row, "before": row, "READY": (onnx.TensorProto.FLOAT, ("rows", 1))}
    constants = {"zero": np.array([0]), "eight": np.array([8])}
    used = {name for each in nodes for name in each.input}
    return onnx_model(
        nodes, inputs, {"y": row, "after": row}, {name: constants[name] for name in constants if name in used}
    )


SEQUENCES = """backend: tensorrt
max_batch_size: 8
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: y, data_type: fp32, dims: [4]}]
sequence_batching:
  STRATEGY
  control_input: [{name: READY, control: [{kind: ready, fp32_false_true: [0, 1]}]}]
  state: [{input_name: before, output_name: after, data_type: fp32, dims: [4]}]
"""


async def run_sequences(registry: Registry, steps: Array) -> Array:
    """Return y of sequences side by side for x, both of shape (requests, sequences, 4)."""
    handle, outputs = registry.lease("m", ""), []
    try:
        for step, rows in enumerate(steps):
            pending = []
            for number, x in enumerate(rows, 1):
                fields = SequenceFields(number, step == 0, step == len(steps) - 1)
                request = InferRequest(inputs={"x": x[None]}, rows=1, shape_key=(4,), received_ns=0, sequence=fields)
                pending.append(handle.infer(request))
            outputs.append([np.asarray((await each).outputs["y"])[0] for each in pending])
        return np.array(outputs)
    finally:
        handle.release()


async def check_sequences(folder: Path, strategy: str, fault: str, source: str | None, limit_s: float = 20.0) -> None:
    """States that stay on the GPU are proven with the rows; a size that is wrong is not used."""
    version = folder / "repository" / "m" / "1"
    version.mkdir(parents=True)
    sizes = dict.fromkeys(("x", "before"), ((1, 4), (8, 4), (8, 4))) | {"READY": ((1, 1), (8, 1), (8, 1))}
    plan, spec = version / "model.plan", TargetSpec("fp32", (ShapeRange(sizes),))
    TensorRtTarget().build(sequence_model(fault), spec, plan, silent)
    if source is not None:
        onnx.save(sequence_model(source), version / "model.onnx")
    (version.parent / "config.yaml").write_text(SEQUENCES.replace("STRATEGY", strategy))
    steps = np.random.default_rng(3).standard_normal((4, 8, 4)).astype(np.float32)
    async with running(folder / "repository", ALL, proofs=BatchProofs(folder, limit_s)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        await until_async(lambda: handle.batch_verdict.state != "partial")
        batches = explain(registry, "m")["batches"]
        outputs = await run_sequences(registry, steps)
        execution = handle._instance_group._model.execution(0)
        on_gpu = execution.slot_states is not None
        execution.close()
    np.testing.assert_allclose(outputs, steps.cumsum(axis=0), atol=ATOL)
    state = "proven" if not fault else "limited" if source == "" else "alone"
    assert (batches["state"], on_gpu) == (state, not fault), batches
    if fault == "mixed":
        assert batches["reason"].startswith("influence: output 'y' of row")
    elif fault:
        assert "8" in batches["faults"]
    else:
        assert set(batches["verified_batches"]) >= {1, 2, 3, 8}
