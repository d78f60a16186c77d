"""Rows of a batch by slot and by arrival, on a real table and an execution that returns its inputs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import HeadraceError, ModelFailed
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.inference.scheduling.batch_proof import BatchVerdict
from headrace.inference.scheduling.policy import ControlTensor, QueueLimits, SequencePolicy
from headrace.inference.scheduling.proven_sizes import ProvenSizes
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.inference.scheduling.sequences.runner import SequenceRunner
from headrace.inference.scheduling.sequences.scheduler import SequenceScheduler
from headrace.runtimes.base import Execution, ExecutionLost
from headrace.runtimes.wrapped_execution import WrappedExecution

from tests.support.waiting import until

SPEC = ModelSpec(
    "m",
    "1",
    "",
    {"x": TensorSpec("x", BY_NAME["FP32"], (-1, 1)), "t": TensorSpec("t", BY_NAME["BYTES"], (-1, 1))},
    {"x": TensorSpec("x", BY_NAME["FP32"], (-1, 1))},
    4,
)


class Results:
    """Settles at once, without metrics; `check` accepts every shape."""

    layout = None
    names = ("x",)

    def __init__(self) -> None:
        self.busy_runners: set[object] = set()
        self.check_rows: list[int] = []

    @property
    def check(self) -> Results:
        return self

    def begin(self, runner: object) -> None:
        self.busy_runners.add(runner)

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)

    def settle(self, batch: object, _times: object, results: object, _busy_ns: int, _defer: object = None) -> None:
        for entry, outputs in zip(batch.entries, results, strict=True):  # type: ignore[attr-defined, call-overload]
            entry.completion.settle(InferResponse(outputs))

    def failed(self, batch: object, error: Exception, _with_cancelled: bool = False) -> list[object]:
        for entry in batch.entries:  # type: ignore[attr-defined]
            entry.completion.settle(error)
        return []

    def give_up(self, entries: list[SequenceEntry], error: HeadraceError) -> None:
        for entry in entries:
            entry.completion.settle(error)


class CheckedResults(Results):
    """Records the rows that are checked."""

    class Check:
        names = ("x",)

        def __init__(self) -> None:
            self.rows: list[int] = []

        def check(self, outputs: dict[str, np.ndarray], rows: int) -> None:
            assert outputs["x"].shape[0] == rows
            self.rows.append(rows)

    def __init__(self) -> None:
        super().__init__()
        self.own_check = self.Check()

    @property
    def check(self) -> CheckedResults.Check:  # type: ignore[override]
        return self.own_check


class Recording(Execution):
    """Returns its input x, and keeps all inputs; a value below 0 fails, a value below -1 ends the execution."""

    def __init__(self) -> None:
        self.inputs: list[dict[str, np.ndarray]] = []

    def run(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.inputs.append({name: array.copy() for name, array in inputs.items()})
        if inputs["x"].min() < -1:
            raise ExecutionLost("gone")
        if inputs["x"].min() < 0:
            raise ModelFailed("a negative value")
        return {"x": inputs["x"].copy()}

    def close(self) -> None:
        pass


class World:
    """One instance on a thread that begins with `start`, so that requests before it share batches."""

    def __init__(self, is_direct: bool) -> None:
        controls = (ControlTensor("ready", "READY", BY_NAME["INT32"]), ControlTensor("id", "CORRID", BY_NAME["UINT64"]))
        policy = SequencePolicy(slots=4, is_direct=is_direct, max_rows=4, idle_ns=10**15, controls=controls)
        self.scheduler = SequenceScheduler(policy, QueueLimits())
        self.execution, self.results = Recording(), CheckedResults()
        self.error: BaseException | None = None
        self.runner = SequenceRunner(
            0,
            self.execution,
            self.scheduler,
            policy,
            SPEC,
            self.results,
            lambda: 0,  # type: ignore[arg-type]
        )
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            self.runner.serve()
        except BaseException as error:
            self.error = error
            self.runner.give_up(ModelFailed("it died"))

    def send(self, correlation_id: int, value: float, start: bool = False, end: bool = False) -> ThreadCompletion:
        inputs = {"x": np.full((1, 1), value, np.float32), "t": np.full((1, 1), b"text", object)}
        request = InferRequest(inputs=inputs, rows=1, shape_key=None, received_ns=0)
        completion = ThreadCompletion()
        self.scheduler.enqueue([SequenceEntry(request, completion, 0, correlation_id, start, end)])
        return completion

    def close(self) -> None:
        self.scheduler.close()
        self.thread.join(60)
        assert not self.thread.is_alive()


def value(completion: ThreadCompletion) -> float:
    assert completion.wait(60)
    outcome = completion.outcome
    assert isinstance(outcome, InferResponse), outcome
    return float(outcome.outputs["x"][0, 0])


@pytest.mark.parametrize("is_direct", [True, False])
def test_rows(is_direct: bool) -> None:
    world = World(is_direct)
    first = [world.send(number, number, start=True) for number in (1, 2, 3)]
    world.thread.start()
    assert [value(each) for each in first] == [1, 2, 3]
    assert world.execution.inputs[0]["x"].reshape(-1).tolist() == [1, 2, 3]
    # The slots of the first and the last sequence have no request.
    assert value(world.send(3, 30)) == 30
    last = world.execution.inputs[-1]
    if is_direct:
        assert last["x"].reshape(-1).tolist() == [0, 0, 30]
        assert last["t"].reshape(-1).tolist() == [b"", b"", b"text"]
        assert last["ready"].reshape(-1).tolist() == [0, 0, 1]
        assert last["id"].reshape(-1).tolist() == [0, 0, 3]
    else:
        assert last["x"].reshape(-1).tolist() == [30]
        assert (last["ready"].tolist(), last["id"].tolist()) == ([[1]], [[3]])
    assert world.results.own_check.rows == [3, 3 if is_direct else 1]
    world.close()


def test_a_failing_batch_leaves_its_sequence_alive() -> None:
    world = World(is_direct=True)
    world.thread.start()
    failed = world.send(1, -1, start=True)
    assert failed.wait(60)
    assert isinstance(failed.outcome, ModelFailed)
    assert value(world.send(1, 4)) == 4
    world.close()


def test_a_lost_execution_ends_its_sequences() -> None:
    world = World(is_direct=True)
    world.thread.start()
    assert value(world.send(1, 1, start=True)) == 1
    lost = world.send(1, -2)
    assert lost.wait(60)
    assert isinstance(lost.outcome, ModelFailed)
    until(lambda: world.error is not None)
    assert isinstance(world.error, ExecutionLost)
    assert not world.scheduler.accepts(1)
    assert world.scheduler.figures().slots == 0


def test_wrappers_pass_the_state_on() -> None:
    class Stateful(Recording):
        def renew_state(self) -> bool:
            return False

    inner = Stateful()
    wrapped = ProvenSizes(WrappedExecution(inner), BatchVerdict)
    assert wrapped.renew_state == inner.renew_state
    assert ProvenSizes(WrappedExecution(Recording()), BatchVerdict).renew_state is None
