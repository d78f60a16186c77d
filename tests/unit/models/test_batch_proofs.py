"""Proof of batch sizes at the load of an ONNX model: what is tested, what a failure does, and what is stored."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import headrace
import numpy as np
import onnx
import pytest
from headrace.core.errors import ModelFailed
from headrace.core.ledger import CPU
from headrace.core.request import InferRequest, InferResponse
from headrace.inference.scheduling.ragged import PaddedLayout
from headrace.inference.scheduling.row_sampler import MAX_SAMPLES
from headrace.models.batch_proofs import BatchProofs, StoredDifference
from headrace.models.control_policy import ControlPolicy
from headrace.models.explanation import explain
from headrace.models.gpu_model_cache import GpuModelCache
from headrace.models.proof_run import ProofRun
from headrace.models.registry import Registry
from headrace.observability.metrics import MetricsPage
from headrace.runtimes.onnxruntime import OnnxRuntimeExecution
from headrace.server.commands.validate import trial_load

from loadtest.onnx_models import onnx_model
from tests.support.control_thread import running
from tests.support.models import add_model
from tests.support.networks import network
from tests.support.prometheus import read_page
from tests.support.proof_cases import HeldTasks, run_sequences
from tests.support.ragged_models import PADDED_CONFIG, RAGGED_CONFIG, ragged_sums, token_sums
from tests.support.waiting import until, until_async

Array = np.ndarray[Any, Any]
ALL = ControlPolicy("none")
MIXED = "M = ReduceMean <axes: ints = [0]> (x)\n y = Sub (x, M)"
# The analysis of the graph cannot prove it, and it is right.
APART = "i = NonZero (x)\n j = Cast <to: int = 1> (i)\n s = ReduceSum (j)\n z = Mul (s, zero)\n y = Add (x, z)"
PROVEN = "y = Tanh (x)"
BATCHES = "max_batch_size: 8\ndynamic_batching: {max_queue_delay_microseconds: 50000}\n"
SIZES = tuple(range(1, 9))


def option(name: str, text: str) -> str:
    return f'parameters {{ key: "headrace.{name}" value {{ string_value: "{text}" }} }}\n'


def model_of(text: str) -> onnx.ModelProto:
    return network(text, {"zero": np.array(0.0)}, ("N", 4))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each run of ONNX Runtime."""
    rows: list[int] = []
    run = OnnxRuntimeExecution.run

    def count(self: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
        rows.append(len(inputs["x"]))
        return run(self, inputs)

    monkeypatch.setattr(OnnxRuntimeExecution, "run", count)
    return rows


async def infer(registry: Registry, *requests: Array) -> list[Array]:
    """Return the outputs of requests that are queued together."""
    handle = registry.lease("m", "")
    try:
        pending = [
            handle.infer(InferRequest(inputs={"x": x}, rows=len(x), shape_key=(4,), received_ns=0)) for x in requests
        ]
        responses = [await completion for completion in pending]
        return [np.asarray(response.outputs["y"]) for response in responses if isinstance(response, InferResponse)]
    finally:
        handle.release()


def inputs(*rows: int) -> list[Array]:
    random = np.random.default_rng(2)
    return [random.standard_normal((count, 4)).astype(np.float32) for count in rows]


async def test_requests_to_a_model_with_mixed_rows_run_alone_and_whole(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add_model(repository, "m", model_of(MIXED), config=BATCHES)
    requests = inputs(1, 3, 2)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        answers = await infer(registry, *requests)
        document = explain(registry, "m")
        ((_, _, source),) = registry.sources()
        parameters = source.spec.parameters
        page = MetricsPage(registry.sources).render()[1].decode()
        gauges = [s.value for f in read_page(page) if f.name == "headrace_unproven_batch_sizes" for s in f.samples]
    for x, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer, x - x.mean(axis=0), atol=1e-6)
    assert document["batches"]["state"] == "alone"
    assert document["findings"][0].kind == "unproven_batches"
    reason = document["batches"]["reason"]
    assert reason.startswith("influence: output 'y' of row 0 of 2 changes by")
    assert parameters["headrace.verified_batches"] == "1"
    assert gauges == [1.0]
    assert parameters["headrace.unproven_batches"] == reason
    assert [r for r in caplog.records if r.name == "headrace.proof" and reason in r.getMessage()]


async def test_a_larger_request_is_refused_instead_of_cut(repository: Path) -> None:
    add_model(repository, "m", model_of(MIXED), config=BATCHES + option("oversize", "split"))
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        with pytest.raises(ModelFailed, match=r"no longer split because its outputs are wrong.*influence"):
            await infer(registry, *inputs(9))
        assert len(await infer(registry, *inputs(8))) == 1


@pytest.mark.parametrize(("mode", "state"), [("warn", "warned"), ("off", None)])
async def test_a_model_may_run_in_spite_of_the_proof(repository: Path, mode: str, state: str | None) -> None:
    add_model(repository, "m", model_of(MIXED), config=BATCHES + option("proof", mode))
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        answers = await infer(registry, *inputs(1, 1))
        document = explain(registry, "m")
    assert np.abs(answers[0]).max() > 0  # it shared a batch
    assert document.get("batches", {"state": None})["state"] == state


async def test_a_model_that_only_the_proof_knows_to_be_right_serves_all_sizes(
    repository: Path, tmp_path: Path, sizes: list[int]
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        document = explain(registry, "m")
        assert set(sizes) == set(SIZES)
        sizes.clear()
        await infer(registry, *inputs(2, 3))
        assert sizes == [5]
    assert document["batches"] == {"state": "proven", "reason": "", "verified_batches": list(SIZES), "faults": {}}
    sizes.clear()
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        assert explain(registry, "m")["batches"] == document["batches"]
    assert sizes == []  # a second start costs nothing


@pytest.mark.parametrize("config", ["", "max_batch_size: 8\n", BATCHES])
async def test_a_graph_that_keeps_rows_apart_is_not_run(repository: Path, sizes: list[int], config: str) -> None:
    add_model(repository, "m", model_of(PROVEN), config=config)
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        assert "batches" not in explain(registry, "m")
    assert sizes == []


@pytest.mark.parametrize("config", ["", "max_batch_size: 8\n"])
async def test_a_model_whose_requests_run_alone_anyway_is_not_run(
    repository: Path, sizes: list[int], config: str
) -> None:
    add_model(repository, "m", model_of(MIXED), config=config)
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        assert "batches" not in explain(registry, "m")
    assert sizes == []


async def test_a_model_that_its_first_request_loads_is_proven_then(repository: Path) -> None:
    add_model(repository, "m", model_of(MIXED), config=BATCHES)
    models = GpuModelCache()
    models.ledger.set_limit(CPU, 1 << 30)
    requests = inputs(1, 3)
    async with running(repository, ALL, proofs=BatchProofs(None), gpu_model_cache=models) as (_, registry):
        answers = await infer(registry, *requests)
        document = explain(registry, "m")
    for x, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer, x - x.mean(axis=0), atol=1e-6)
    assert document["batches"]["state"] == "alone"


def state_of(registry: Registry) -> object:
    ((_, _, handle),) = registry.sources()
    return handle.batch_verdict.state


class RowClock:
    """A clock for which each row takes a second.

    Args:
        sizes: rows of each run.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __call__(self) -> int:
        return sum(self.sizes) * 10**9


async def test_sizes_for_which_the_time_is_too_short_are_not_used_until_they_are_proven_while_the_model_is_idle(
    repository: Path, tmp_path: Path, sizes: list[int]
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    held = HeldTasks()
    proofs = BatchProofs(tmp_path, 30.0, clock=RowClock(sizes))
    async with running(repository, ALL, proofs=proofs, idle_tasks=held) as (_, registry):
        before = explain(registry, "m")["batches"]
        sizes.clear()
        await infer(registry, *inputs(5))
        assert sizes == [3, 2]
        held.release()
        await until_async(lambda: state_of(registry) == "proven")
        ((_, _, handle),) = registry.sources()
        assert "headrace.unproven_batches" not in handle.spec.parameters
        sizes.clear()
        await infer(registry, *inputs(5))
        assert sizes == [5]
    assert (before["state"], before["verified_batches"]) == ("limited", [1, 2, 3])
    assert "`headrace validate`" in before["reason"]
    sizes.clear()
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        assert explain(registry, "m")["batches"]["verified_batches"] == list(SIZES)
    assert sizes == []


async def test_a_model_that_is_too_slow_for_two_rows_runs_requests_alone_until_it_is_idle(
    repository: Path, tmp_path: Path, sizes: list[int]
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    for _ in range(2):  # a later load takes no time for it
        sizes.clear()
        held, proofs = HeldTasks(), BatchProofs(tmp_path, 2.0, clock=RowClock(sizes))
        async with running(repository, ALL, proofs=proofs, idle_tasks=held) as (_, registry):
            assert state_of(registry) == "alone"
            assert sizes in ([1, 1], [])
            sizes.clear()
            await infer(registry, *inputs(2, 3))
            assert sizes == [2, 3]
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        await until_async(lambda: state_of(registry) == "proven")
        sizes.clear()
        await infer(registry, *inputs(2, 3))
        assert sizes == [5]


async def test_a_size_that_fails_while_the_model_is_idle_is_not_used_any_more(
    repository: Path, tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    held, run = HeldTasks(), OnnxRuntimeExecution.run

    def mixed_in_eights(self: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
        outputs = run(self, inputs)
        return {"y": outputs["y"] + inputs["x"][-1:]} if len(inputs["x"]) == 8 else outputs

    monkeypatch.setattr(OnnxRuntimeExecution, "run", mixed_in_eights)
    proofs = BatchProofs(tmp_path, 30.0, clock=RowClock(sizes))
    async with running(repository, ALL, proofs=proofs, idle_tasks=held) as (_, registry):
        assert state_of(registry) == "limited"
        held.release()
        await until_async(lambda: state_of(registry) == "alone")
        requests = inputs(5, 3)
        for x, answer in zip(requests, await infer(registry, *requests), strict=True):
            np.testing.assert_array_equal(answer, x)
    (record,) = (tmp_path / "proofs").iterdir()
    assert list(json.loads(record.read_text())["verdict"]["faults"]) == ["8"]


class Gate:
    """Runs of ONNX Runtime that wait, once it is closed.

    Attributes:
        began: released by each run.
        rows: rows of each run since it was closed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.began, self.rows = threading.Event(), threading.Semaphore(0), list[int]()
        self.open.set()
        run = OnnxRuntimeExecution.run

        def wait(execution: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
            if not self.open.is_set():
                self.rows.append(len(inputs["x"]))
                self.began.release()
                assert self.open.wait(20), "the test forgot to open the gate"
            return run(execution, inputs)

        monkeypatch.setattr(OnnxRuntimeExecution, "run", wait)

    async def block(self, held: HeldTasks) -> None:
        """Let the tests of an idle model begin, and return within its first batch."""
        self.open.clear()
        held.release()
        assert await asyncio.to_thread(self.began.acquire, timeout=20)


async def test_a_request_waits_for_one_batch_of_the_tests_at_most(
    repository: Path, tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    held, gate = HeldTasks(), Gate(monkeypatch)
    proofs = BatchProofs(tmp_path, 30.0, clock=RowClock(sizes))
    async with running(repository, ALL, proofs=proofs, idle_tasks=held) as (_, registry):
        await gate.block(held)
        held.hold()
        sizes.clear()
        request = asyncio.create_task(infer(registry, *inputs(2)))
        ((_, _, handle),) = registry.sources()
        await until_async(lambda: handle.depth == 1)
        gate.open.set()
        await request
        assert sizes == [1, 2], "the test's batch, and then the request"
        assert state_of(registry) == "limited"
        held.release()
        await until_async(lambda: state_of(registry) == "proven")


@pytest.mark.parametrize("how", ["unload", "reload", "stop"])
async def test_tests_of_an_idle_model_end_with_it(
    repository: Path, tmp_path: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    held, gate = HeldTasks(), Gate(monkeypatch)
    proofs = BatchProofs(tmp_path, 30.0, clock=RowClock(sizes))
    control = ControlPolicy("explicit")
    async with running(repository, control, proofs=proofs, idle_tasks=held) as (reconciler, registry):
        ((_, _, handle),) = registry.sources()
        await gate.block(held)
        held.hold()
        if how == "unload":
            await reconciler.unload("m", False)
        elif how == "reload":
            add_model(
                repository, "m", model_of(APART), config=BATCHES + option("max_queue_wait_microseconds", "1000000")
            )
            await reconciler.load("m", None, {})
        stopping = asyncio.create_task(asyncio.to_thread(reconciler.stop, 10)) if how == "stop" else None
        await until_async(lambda: handle.closing)
        gate.open.set()
        if stopping is not None:
            assert await stopping
        await until_async(lambda: handle.alive == 0)
    assert gate.rows == [1]
    (record, *_) = (tmp_path / "proofs").iterdir()
    assert json.loads(record.read_text())["starts"] == 0
    assert not [task for task in held._tasks if task is handle]


async def test_a_process_that_ended_twice_while_proving_serves_one_request_at_a_time(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)

    class Ended(BaseException):
        """Stands for the end of the process."""

    def end(*_args: object) -> None:
        raise Ended

    with monkeypatch.context() as patch:
        patch.setattr(ProofRun, "run", end)
        for _ in range(2):
            async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
                assert not registry.used_sources()
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert (batches["state"], batches["reason"]) == (
        "alone",
        "the process has ended while the batch sizes were being proven",
    )


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 1, "verdict": {"verified": 7}}'])
async def test_a_broken_record_is_replaced(repository: Path, tmp_path: Path, content: str) -> None:
    add_model(repository, "m", model_of(MIXED), config=BATCHES)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)):
        (record,) = (tmp_path / "proofs").iterdir()
    stored = json.loads(record.read_text())
    record.write_text(content)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        assert explain(registry, "m")["batches"]["state"] == "alone"
    assert json.loads(record.read_text())["verdict"]["alone"] == stored["verdict"]["alone"] is True


async def test_random_inputs_that_the_model_refuses_prove_nothing(
    repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text = "n = Constant <value_float: float = nan> ()\n M = ReduceMean <axes: ints = [0]> (x)\n s = Sub (x, M)\n y = Add (s, n)"
    add_model(repository, "m", model_of(text), config=BATCHES)
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert (batches["state"], batches["verified_batches"]) == ("untested", [])
    assert batches["reason"] == "random inputs prove nothing: output 'y' of a row alone is not finite"
    assert "batches are not proven, and run" in caplog.text


def shifted_sums() -> onnx.ModelProto:
    """`ragged_sums` with a fault: each sum begins one element too late, but for the first request."""
    model = ragged_sums()
    one = onnx.helper.make_node("Min", ["starts", "one"], ["after_first"])
    late = onnx.helper.make_node("Add", ["starts", "after_first"], ["late"])
    index = next(number for number, node in enumerate(model.graph.node) if node.output[0] == "until_start")
    model.graph.node[index].input[1] = "late"
    model.graph.node.insert(index, late)
    model.graph.node.insert(index, one)
    return model


@pytest.mark.parametrize(("build", "state"), [(ragged_sums, "proven"), (shifted_sums, "alone")])
async def test_joined_rows_are_tested_with_different_lengths(
    repository: Path, build: Callable[[], onnx.ModelProto], state: str
) -> None:
    add_model(repository, "m", build(), config=RAGGED_CONFIG)
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert batches["state"] == state, batches


SEQUENCE_CONFIG = """max_batch_size: 4
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: y, data_type: fp32, dims: [4]}]
sequence_batching:
  control_input: [{name: READY, control: [{kind: CONTROL_SEQUENCE_READY, fp32_false_true: [0, 1]}]}]
  state: [{input_name: before, output_name: after, data_type: TYPE_FP32, dims: [4]}]
"""


@pytest.mark.parametrize("limit_s", [20.0, 0.0])
@pytest.mark.parametrize("strategy", ["", "  oldest: {max_candidate_sequences: 9}\n"], ids=["direct", "oldest"])
@pytest.mark.parametrize(
    ("axis", "state"), [(1, "proven"), (0, "alone")], ids=["mean of a row", "mean over the sequences"]
)
async def test_sequences_share_batches_that_are_proven(
    repository: Path,
    sizes: list[int],
    caplog: pytest.LogCaptureFixture,
    axis: int,
    state: str,
    strategy: str,
    limit_s: float,
) -> None:
    """The model adds to each state the mean of state and input of its own row, or of all rows."""
    row = (onnx.TensorProto.FLOAT, ("rows", 4))
    node = onnx.helper.make_node
    model = onnx_model(
        [
            node("Add", ["before", "x"], ["moved"]),
            node("ReduceMean", ["moved", "axes"], ["mean"], keepdims=1),
            node("Add", ["before", "mean"], ["sum"]),
            node("Mul", ["sum", "READY"], ["after"]),
            node("NonZero", ["x"], ["places"]),  # the analysis of the graph cannot prove it
            node("Cast", ["places"], ["floats"], to=onnx.TensorProto.FLOAT),
            node("ReduceSum", ["floats"], ["total"], keepdims=0),
            node("Mul", ["total", "nothing"], ["zero"]),
            node("Add", ["after", "zero"], ["y"]),
        ],
        {"x": row, "before": row, "READY": (onnx.TensorProto.FLOAT, ("rows", 1))},
        {"y": row, "after": row},
        {"nothing": np.array(0, np.float32), "axes": np.array([axis], np.int64)},
    )
    add_model(repository, "m", model)
    (repository / "m" / "config.yaml").write_text(SEQUENCE_CONFIG + strategy)
    steps = np.random.default_rng(1).standard_normal((3, 4, 4)).astype(np.float32)
    async with running(repository, ALL, proofs=BatchProofs(None, limit_s)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        assert ("the load was too short" in caplog.text) == (not limit_s)
        await until_async(lambda: "too short" not in handle.batch_verdict.reason)
        batches = explain(registry, "m")["batches"]
        sizes.clear()
        outputs = await run_sequences(registry, steps)
        parameters = handle.spec.parameters
    before = np.zeros((4, 4), np.float32)
    for x, y in zip(steps, outputs, strict=True):
        before = before + ((before + x).mean(axis=1, keepdims=True) if axis else before + x)
        np.testing.assert_allclose(y, before, atol=1e-5)
    assert batches["state"] == state, batches
    if state == "alone":
        assert set(sizes) == {1}
        assert batches["reason"].startswith("influence: output 'y' of row")
        assert parameters["headrace.unproven_batches"] == batches["reason"]
    else:
        assert max(sizes) == 4
        assert batches["verified_batches"] == [1, 2, 3, 4]


CLASSES = """max_batch_size: 4
dynamic_batching: {}
input: [{name: x, data_type: fp32, dims: [4]}]
output: [{name: y, data_type: fp32, dims: [4], label_filename: labels.txt}]
"""


@pytest.mark.parametrize("error", [1e-7, 1e-3])
@pytest.mark.parametrize(
    "config", [CLASSES, CLASSES + "postprocess: {top_k: 2}\n", CLASSES + "postprocess: {softmax: true}\n"]
)
async def test_a_near_tie_of_two_classes_is_no_fault(
    repository: Path, monkeypatch: pytest.MonkeyPatch, config: str, error: float
) -> None:
    add_model(repository, "m", model_of(APART))
    (repository / "m" / "config.yaml").write_text(config)
    (repository / "m" / "labels.txt").write_text("a\nb\nc\nd\n")
    run = OnnxRuntimeExecution.run

    def tied(self: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
        """Let the second class have the score of the first one, or more than that in a batch."""
        y = run(self, inputs)["y"]
        y[:, 1] = y[:, 0] + error * (len(y) > 1)
        return {"y": y}

    monkeypatch.setattr(OnnxRuntimeExecution, "run", tied)
    async with running(repository, ALL, proofs=BatchProofs(None, 20.0)) as (_, registry):
        batches = explain(registry, "m")["batches"]
    assert batches["state"] == ("proven" if error < 1e-5 else "alone"), batches


async def test_whole_numbers_fill_the_table_that_they_index(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, 4)).astype(np.float32)
    text = "r = Gather (table, x)\n M = ReduceMean <axes: ints = [0]> (r)\n y = Sub (r, M)"
    model = network(text, {"table": table}, ("N", 2))
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    add_model(repository, "m", onnx.shape_inference.infer_shapes(model), config=BATCHES)
    values: list[int] = []
    run = OnnxRuntimeExecution.run

    def collect(self: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
        values.extend(inputs["x"].reshape(-1).tolist())
        return run(self, inputs)

    monkeypatch.setattr(OnnxRuntimeExecution, "run", collect)
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        assert explain(registry, "m")["batches"]["state"] == "alone"
    assert 20 < max(values) < 50
    assert min(values) >= 0


class Fault:
    """Adds 0.5 to the outputs of each batch of a size, once it is set.

    Args:
        size: rows of the wrong batches.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.is_set = False
        run = OnnxRuntimeExecution.run

        def wrong(execution: OnnxRuntimeExecution, inputs: dict[str, Array]) -> dict[str, Array]:
            outputs = run(execution, inputs)
            if self.is_set and len(inputs["x"]) == size:
                outputs["y"] += 0.5
            return outputs

        monkeypatch.setattr(OnnxRuntimeExecution, "run", wrong)


@pytest.mark.parametrize("text", [PROVEN, APART])
async def test_a_batch_that_changes_an_answer_while_it_serves_is_not_run_any_more(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    add_model(repository, "m", model_of(text), config=BATCHES + option("proof_sample", "5"))
    fault = Fault(monkeypatch, 5)
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        ((_, _, handle),) = registry.sources()
        before = state_of(registry)
        await infer(registry, *inputs(2, 3))
        await until_async(lambda: handle._batch_results.sampler.sample is None)
        assert (state_of(registry), handle.row_differences) == (before, 0)
        fault.is_set = True
        await infer(registry, *inputs(2, 3))
        await until_async(lambda: state_of(registry) == "alone")
        requests = inputs(2, 3)
        answers = await infer(registry, *requests)
        page = MetricsPage(registry.sources).render()[1].decode()
        reason = explain(registry, "m")["batches"]["reason"]
    counts = [s.value for f in read_page(page) if f.name == "headrace_row_differences" for s in f.samples]
    assert counts == [1.0]
    for x, answer in zip(requests, answers, strict=True):
        np.testing.assert_allclose(answer, np.tanh(x) if text == PROVEN else x, atol=1e-6)
    assert reason.startswith("alone: output 'y' of row 2 of 5 differs by 0.5 from the row alone")
    assert "a row of a batch of 5: alone: output 'y'" in caplog.text
    case = tmp_path / "proofs" / "differences" / "m.npz"
    assert case.stat().st_mode & 0o077 == 0
    with np.load(case) as stored:
        assert stored["case"].tolist() == [5, 2]
        np.testing.assert_array_equal(stored["in.x"], np.concatenate(requests))
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        assert state_of(registry) == "alone", "a later start does not forget it"


async def test_rows_with_text_are_run_again_alone_and_stored(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 2]>
        g (string[N, 2] x) => (float[N, 2] y) {
          y = ai.onnx.ml.LabelEncoder <keys_strings: strings = ["a", "b"], values_floats: floats = [0.25, 0.5]> (x)
        }""")
    add_model(repository, "m", model, config=BATCHES + option("proof_sample", "3"))
    fault = Fault(monkeypatch, 3)
    rows = [np.array([[b"a", b"b\0"]], object), np.array([[b"", b"b"], [b"other", b"a"]], object)]
    async with running(repository, ALL, proofs=BatchProofs(tmp_path)) as (_, registry):
        fault.is_set = True
        await infer(registry, *rows)
        await until_async(lambda: state_of(registry) == "alone")
    repeated = StoredDifference(tmp_path, "m")
    assert repeated.sample is not None
    assert repeated.sample.inputs["x"].tolist() == np.concatenate(rows).tolist()
    trial_load("m", repository / "m", repository, tmp_path, proofs=repeated)
    assert [differs for _, differs in repeated.results] == [True]


@pytest.mark.parametrize(
    ("build", "config", "name", "output"),
    [(ragged_sums, RAGGED_CONFIG, "config.pbtxt", "SUM"), (token_sums, PADDED_CONFIG, "config.yaml", "total")],
)
def test_rows_of_requests_of_different_length_are_run_again_alone(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], onnx.ModelProto],
    config: str,
    name: str,
    output: str,
) -> None:
    add_model(repository, "m", build())
    text = option("proof_sample", "2") if name == "config.pbtxt" else "proof_sample: 2\n"
    (repository / "m" / name).write_text(config + text)
    # As on a GPU: on a CPU, times decide whether requests are padded.
    always = property(lambda _layout: True, lambda _layout, _value: None)
    monkeypatch.setattr(PaddedLayout, "always", always, raising=False)
    is_wrong, run = [], OnnxRuntimeExecution.run

    def wrong(execution: OnnxRuntimeExecution, arrays: dict[str, Array]) -> dict[str, Array]:
        outputs = run(execution, arrays)
        if is_wrong and len(outputs[output]) == 2:
            outputs[output] = outputs[output] + 1
        return outputs

    monkeypatch.setattr(OnnxRuntimeExecution, "run", wrong)
    texts = [np.arange(length, dtype=np.int64)[None] for length in (5, 9)]
    input_name = "ELEMENTS" if build is ragged_sums else "ids"

    def ask(server: headrace.Server, values: Array) -> Array:
        arrays = {input_name: values} | ({} if build is ragged_sums else {"mask": np.ones_like(values)})
        return server.model("m").infer(arrays)[output]

    with (
        headrace.Server(repository, state_dir=tmp_path, trial_limit_s=0, profile_s=0) as server,
        ThreadPoolExecutor(2) as pool,
    ):

        def send() -> object:
            list(pool.map(partial(ask, server), texts))
            return server.model("m").spec.parameters.get("headrace.unproven_batches", "")

        assert [send() for _ in range(4)] == [""] * 4  # the first ones check the mask
        is_wrong.append(True)
        until(lambda: "alone: output" in str(send()), pause_s=0.5)
        assert f"'{output}' of row" in str(send())
    repeated = StoredDifference(tmp_path, "m")
    assert repeated.sample is not None
    assert (repeated.sample.size, len(repeated.sample.inputs[input_name])) == (2, 1)
    trial_load("m", repository / "m", repository, tmp_path, proofs=repeated)
    assert [differs for _, differs in repeated.results] == [True]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (MIXED, option("proof_sample", "1")),
        (PROVEN, option("proof_sample", "0")),
        (PROVEN, option("proof_sample", "1") + option("proof", "off")),
    ],
)
async def test_no_rows_are_taken_where_they_prove_nothing(repository: Path, text: str, config: str) -> None:
    """A model that runs each request alone and whole may mix its rows."""
    add_model(repository, "m", model_of(text), config=BATCHES + config)
    async with running(repository, ALL, proofs=BatchProofs(None)) as (_, registry):
        await infer(registry, *inputs(2, 3))
        ((_, _, handle),) = registry.sources()
        assert handle._batch_results.sampler is None


async def test_a_sample_that_waits_is_dropped_with_its_model(repository: Path) -> None:
    add_model(repository, "m", model_of(PROVEN), config=BATCHES + option("proof_sample", "2"))
    proofs = BatchProofs(None)
    async with running(repository, ControlPolicy("explicit"), proofs=proofs, idle_tasks=HeldTasks()) as (
        reconciler,
        registry,
    ):
        await infer(registry, *inputs(2, 3))
        assert proofs._slots._value == MAX_SAMPLES - 1
        await reconciler.unload("m", False)
        await until_async(lambda: proofs._slots._value == MAX_SAMPLES)


@pytest.mark.parametrize("text", [PROVEN, APART])
@pytest.mark.parametrize("limit_s", [2.0, 30.0])
async def test_the_memory_of_a_model_is_freed_with_its_end(
    repository: Path, sizes: list[int], text: str, limit_s: float
) -> None:
    add_model(repository, "m", model_of(text), config=BATCHES + option("proof_sample", "2"))
    proofs = BatchProofs(None, limit_s, clock=RowClock(sizes))
    async with running(repository, ControlPolicy("explicit"), proofs=proofs, idle_tasks=HeldTasks()) as (
        reconciler,
        registry,
    ):
        await infer(registry, *inputs(2, 3))
        ((_, _, handle),) = registry.sources()
        session = weakref.ref(handle._instance_group._model.inner._sessions[0][0])
        gc.disable()
        try:
            if text == PROVEN:
                await reconciler.unload("m", False)
            else:
                assert await asyncio.to_thread(handle.evict, 60)
            await until_async(lambda: session() is None)
        finally:
            gc.enable()


async def test_tests_that_a_request_ends_go_on_where_they_were(repository: Path, sizes: list[int]) -> None:
    add_model(repository, "m", model_of(APART), config=BATCHES)
    proofs = BatchProofs(None, 30.0, clock=RowClock(sizes))
    async with running(repository, ALL, proofs=proofs, idle_tasks=HeldTasks()) as (_, registry):
        ((_, _, handle),) = registry.sources()
        model = handle._instance_group._model
        passes = []
        for runs in (7, 4, 100):
            sizes.clear()
            model.prove(model.execution(0), lambda runs=runs: len(sizes) == runs)
            passes.append((set(sizes), model.verdict.verified, model.has_left))
    assert passes == [
        ({1, 8}, (1, 2, 3, 8), True),
        ({4, 5}, (1, 2, 3, 4, 8), True),  # one batch of five was too late
        ({5, 6, 7}, SIZES, False),
    ]
