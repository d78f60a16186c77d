"""States by slot in host memory, and the runner around a real model with states."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import Cancelled, HeadraceError
from headrace.core.request import InferRequest, InferResponse
from headrace.core.sequence_state import BatchSlots, StateTensor
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.inference.scheduling.batching import CloseReason
from headrace.inference.scheduling.output_check import OutputMismatch
from headrace.inference.scheduling.policy import QueueLimits, SequencePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.controls import ControlledExecution
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.inference.scheduling.sequences.runner import SequenceRunner
from headrace.inference.scheduling.sequences.sequence_table import SequenceTable
from headrace.inference.scheduling.sequences.state import HostStates
from headrace.runtimes.onnxruntime import OnnxRuntimeBackend
from onnx import helper

from loadtest.onnx_models import onnx_model
from tests.support.virtual_states import Results, loaded, spec, state_tensors

FP32 = BY_NAME["FP32"]
ROW = StateTensor("in", "out", FP32, (2,), np.array([1, 2], np.float32))


def host(*states: StateTensor, slots: int = 4, batched: bool = True) -> HostStates:
    return HostStates(states or (ROW,), slots, batched, "m")


def filled(rows: int, value: float, size: int = 2) -> dict[str, np.ndarray]:
    return {"out": np.full((rows, size), value, np.float32)}


def test_a_sequence_starts_with_the_initial_state() -> None:
    states = host()
    states.reset(1)
    assert states.load(BatchSlots([1], [0]))["in"].tolist() == [[1, 2]]
    states.save(filled(1, 9), BatchSlots([1], [0]))
    assert states.load(BatchSlots([1], [0]))["in"].tolist() == [[9, 9]]
    states.reset(1)
    assert states.load(BatchSlots([1], [0]))["in"].tolist() == [[1, 2]]
    assert ROW.initial.tolist() == [1, 2]


@pytest.mark.parametrize("state", [ROW, StateTensor("in", "out", FP32, (-1,), np.array([1, 2], np.float32))])
def test_states_take_memory_as_slots_are_used(state: StateTensor) -> None:
    states = host(state, slots=2**31 - 1)
    for slot in range(3):
        states.reset(slot)
        states.save(filled(1, slot), BatchSlots([slot], [0]))
    assert states.load(BatchSlots([0, 1, 2], [0, 1, 2]))["in"].tolist() == [[0, 0], [1, 1], [2, 2]]


def test_a_batch_of_all_live_sequences_is_not_copied() -> None:
    states, rows = host(), BatchSlots([0, 1], [0, 1])
    states.reset(0)
    states.reset(1)
    outputs = filled(2, 5)
    states.save(outputs, rows)
    assert np.shares_memory(states.load(rows)["in"], outputs["out"])
    assert np.shares_memory(states.load(BatchSlots([1], [0]))["in"], outputs["out"])
    states.reset(3)  # beyond the rows of the last batch
    assert states.load(BatchSlots([0, 1, 3], [0, 1, 2]))["in"].tolist() == [[5, 5], [5, 5], [1, 2]]
    states.release(3)
    outputs = filled(2, 6)
    states.save(outputs, rows)
    assert np.shares_memory(states.load(rows)["in"], outputs["out"])


def test_a_live_sequence_outside_of_the_batch_keeps_its_state() -> None:
    states = host()
    for slot in range(3):
        states.reset(slot)
    states.save({"out": np.arange(6, dtype=np.float32).reshape(3, 2)}, BatchSlots([0, 1, 2], [0, 1, 2]))
    # Row 1 has no request, as with the strategy direct; slots 0 and 2 of the strategy oldest are not neighbours.
    states.save(filled(3, 7), BatchSlots([0, 1, 2], [0, 2]))
    assert states.load(BatchSlots([0, 1, 2], [0, 1, 2]))["in"].tolist() == [[7, 7], [2, 3], [7, 7]]
    states.save(filled(2, 8), BatchSlots([0, 2], [0, 1]))
    assert states.load(BatchSlots([0, 1, 2], [0, 1, 2]))["in"].tolist() == [[8, 8], [2, 3], [8, 8]]


def test_a_state_that_clients_read_is_not_their_memory() -> None:
    states = host(StateTensor("in", "out", FP32, (2,), ROW.initial, is_output=True))
    states.reset(0)
    outputs = filled(1, 3)
    states.save(outputs, BatchSlots([0], [0]))
    assert not np.shares_memory(states.load(BatchSlots([0], [0]))["in"], outputs["out"])
    free = host(StateTensor("in", "out", FP32, (-1,), np.zeros(1, np.float32), is_output=True))
    free.reset(0)
    free.save(outputs, BatchSlots([0], [0]))
    assert not np.shares_memory(free.load(BatchSlots([0], [0]))["in"], outputs["out"])


def test_states_of_variable_size() -> None:
    states = host(StateTensor("in", "out", FP32, (-1,), np.array([4], np.float32)))
    for slot in (0, 1):
        states.reset(slot)
    assert states.key(0) == states.key(1) == ((1, 1),)
    outputs = filled(1, 5, size=3)
    states.save(outputs, BatchSlots([1], [0]))
    assert states.key(1) == ((1, 3),)
    assert np.shares_memory(states.load(BatchSlots([1], [0]))["in"], outputs["out"])
    assert states.load(BatchSlots([0, 1], [1]))["in"].tolist() == [[0, 0, 0], [5, 5, 5]]
    both = filled(2, 6, size=1)
    states.save(both, BatchSlots([0, 1], [0, 1]))
    assert not np.shares_memory(states.load(BatchSlots([1], [0]))["in"], both["out"])
    assert states.load(BatchSlots([0, 1], [0, 1]))["in"].tolist() == [[6], [6]]


def test_texts_and_models_without_rows() -> None:
    text = StateTensor("in", "out", BY_NAME["BYTES"], (1,), np.array([b"a"], object))
    states = host(text, batched=False)
    states.reset(2)
    assert states.load(BatchSlots([2], [0]))["in"].tolist() == [b"a"]
    states.save({"out": np.array([b"bc"], object)}, BatchSlots([2], [0]))
    assert states.load(BatchSlots([2], [0]))["in"].tolist() == [b"bc"]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({}, "returned no output 'out', which is a state"),
        (
            filled(1, 1, size=3),
            r"state 'out' as float32 with the shape \[1, 3\], its configuration declares FP32 with \[1, 2\]",
        ),
        ({"out": np.zeros((1, 2))}, "state 'out' as float64"),
    ],
)
def test_outputs_that_are_no_state(outputs: dict[str, np.ndarray], message: str) -> None:
    other = StateTensor("first", "also", FP32, (1,), np.zeros(1, np.float32))
    states, rows = host(other, ROW), BatchSlots([0], [0])
    states.reset(0)
    with pytest.raises(OutputMismatch, match=message):
        states.save({"also": np.ones((1, 1), np.float32), **outputs}, rows)
    assert {name: array.tolist() for name, array in states.load(rows).items()} == {"first": [[0]], "in": [[1, 2]]}


class World:
    """A runner on real states; batches are given by hand."""

    def __init__(self, is_direct: bool, names: tuple[str, ...] = ("Y", "TOTAL")) -> None:
        tensors = state_tensors(sum_is_output="SUM_OUT" in names)
        policy = SequencePolicy(slots=4, is_direct=is_direct, max_rows=4, states=tensors)
        model = spec(True, names)
        results = Results(model)
        execution = ControlledExecution(loaded(True, True).execution(0), (), True, tensors)
        self.execution = execution
        self.runner = SequenceRunner(0, execution, None, policy, model, results, lambda: 0)  # type: ignore[arg-type]

    def entry(self, slot: int, value: float, start: bool = False, fails: bool = False) -> SequenceEntry:
        inputs = {"X": np.full((1, 1), value, np.float32), "FAIL": np.full((1, 1), int(fails))}
        request = InferRequest(inputs=inputs, rows=1, shape_key=None, received_ns=0)
        entry = SequenceEntry(request, ThreadCompletion(), 0, slot + 1, start)
        entry.slot = slot
        return entry

    def run(self, *entries: SequenceEntry) -> list[object]:
        self.runner._run_sequences(Batch(list(entries), CloseReason.IDLE, 0, len(entries)))
        return [self.value(entry.completion.outcome) for entry in entries]

    @staticmethod
    def value(outcome: object) -> object:
        return outcome.outputs["Y"].item() if isinstance(outcome, InferResponse) else type(outcome)


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_failing_request_keeps_the_state_before_it(is_direct: bool) -> None:
    world = World(is_direct)
    assert world.run(world.entry(0, 1, start=True), world.entry(1, 10, start=True)) == [1, 10]
    failed, passed = world.run(world.entry(0, 5, fails=True), world.entry(1, 20))
    assert isinstance(failed, type)
    assert issubclass(failed, HeadraceError)
    assert passed == 30
    # The history of slot 1 is longer now: the two do not share a run.
    assert world.run(world.entry(0, 2), world.entry(1, 30)) == [3, 60]


def test_requests_of_a_batch_in_any_order_of_slots() -> None:
    world = World(is_direct=False)
    world.run(*[world.entry(slot, 10**slot, start=True) for slot in range(4)])
    assert world.run(world.entry(1, 1), world.entry(0, 2), world.entry(3, 3)) == [11, 3, 1003]
    assert world.run(*[world.entry(slot, 0) for slot in range(4)]) == [3, 11, 100, 1003]


def test_a_request_cancelled_in_a_failing_batch_is_in_the_state() -> None:
    world = World(is_direct=False)
    world.run(world.entry(0, 1, start=True), world.entry(1, 10, start=True))
    cancelled = world.entry(0, 4)
    cancelled.completion.settle(Cancelled("cancelled"))
    world.run(cancelled, world.entry(1, 20, fails=True))
    assert world.run(world.entry(0, 2)) == [7]


def test_a_state_among_the_outputs() -> None:
    world = World(is_direct=True, names=("Y", "SUM_OUT"))
    first = world.entry(0, 1, start=True)
    world.run(first)
    world.run(world.entry(0, 2))
    outcome = first.completion.outcome
    assert isinstance(outcome, InferResponse)
    assert {name: array.tolist() for name, array in outcome.outputs.items()} == {"Y": [[1]], "SUM_OUT": [[1]]}


VALUES: dict[str, list[object]] = {
    "BYTES": [b"", b"a", "\u00e9".encode(), b"bc"],
    "BOOL": [False, True, False, True],
    "INT8": [-128, 1, 2, 127],
    "UINT8": [0, 1, 2, 255],
    "INT64": [2**62, -1, 2, 3],
    "FP16": [0.5, 1, -2, 3],
    "FP64": [1e300, 1, 2, 3],
    "BF16": [0x3F80, 0x4000, 0x4040, 1],
}


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("name", VALUES)
def test_states_of_a_datatype(name: str, is_direct: bool, tmp_path: Path) -> None:
    """Y is the value of the request before it."""
    datatype, (first, *values) = BY_NAME[name], VALUES[name]
    kind = datatype.onnx_number, ("batch", 1)
    nodes = [helper.make_node("Identity", ["IN"], ["Y"]), helper.make_node("Identity", ["X"], ["OUT"])]
    file = tmp_path / "model.onnx"
    file.write_bytes(onnx_model(nodes, {"X": kind, "IN": kind}, {"Y": kind, "OUT": kind}).SerializeToString())
    state = StateTensor("IN", "OUT", datatype, (1,), np.array([first], datatype.dtype))
    policy = SequencePolicy(slots=4, is_direct=is_direct, max_rows=4, states=(state,))
    tensors = ({each: TensorSpec(each, datatype, (-1, 1))} for each in ("X", "Y"))
    model = ModelSpec("m", "1", "", *tensors, 4)
    with closing(OnnxRuntimeBackend().load(file, 1, {})) as loaded_model:
        execution = loaded_model.execution(0)
        runner = SequenceRunner(0, execution, None, policy, model, Results(model), lambda: 0)  # type: ignore[arg-type]
        for step in range(3):
            slots = (0, 3) if step == 1 else (0, 1, 3)  # slot 1 pauses, slot 2 has no sequence
            entries = []
            for slot in slots:
                x = np.array([[values[step - slot]]], datatype.dtype)
                request = InferRequest(inputs={"X": x}, rows=1, shape_key=None, received_ns=0)
                entries.append(SequenceEntry(request, ThreadCompletion(), 0, slot + 1, step == 0))
                entries[-1].slot = slot
            runner._run_sequences(Batch(entries, CloseReason.IDLE, 0, len(entries)))
            for slot, entry in zip(slots, entries, strict=True):
                outcome = entry.completion.outcome
                assert isinstance(outcome, InferResponse), outcome
                before = step - 2 if slot == 1 else step - 1
                expected = first if step == 0 else values[before - slot]
                assert outcome.outputs["Y"].tolist() == np.array([[expected]], datatype.dtype).tolist()
        execution.close()


def test_a_sequence_that_has_ended_without_an_end_is_released() -> None:
    world = World(is_direct=True)
    table = SequenceTable(SequencePolicy(slots=4, idle_ns=100, max_rows=4), QueueLimits())
    table.open_instance(0)
    entries = [world.entry(slot, 1, start=True) for slot in range(3)]
    for entry in entries:
        table.add(entry, 0)
    batch = table.take(0, 0)
    assert isinstance(batch, Batch)
    world.runner._run_sequences(batch)
    table.finish_batch(0, 0)
    later = world.entry(0, 2)
    table.add(later, 50)
    states = world.runner._states
    assert states is not None
    assert states.live == {0, 1, 2}
    table.expire(120)  # sequences 1 and 2
    batch = table.take(0, 120)
    assert isinstance(batch, Batch)
    world.runner._run_sequences(batch)
    assert states.live == {0}
    assert world.value(later.completion.outcome) == 3


def test_runs_without_states_do_not_touch_live_ones() -> None:
    world = World(is_direct=True)
    world.run(world.entry(0, 1, start=True))
    warmup = {"X": np.full((3, 1), 5, np.float32), "FAIL": np.zeros((3, 1), np.int64)}
    outputs = world.execution.run(warmup)
    assert outputs["Y"].tolist() == outputs["TOTAL"].tolist() == [[5]] * 3
    assert world.run(world.entry(0, 2)) == [3]
