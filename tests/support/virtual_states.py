"""Sequences in virtual time whose states the server keeps: a real ONNX Runtime model behind the runner of each instance."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from headrace.core.completion import settle_all
from headrace.core.errors import Cancelled
from headrace.core.request import InferResponse
from headrace.core.sequence_state import StateTensor
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.inference.scheduling.output_check import OutputCheck
from headrace.inference.scheduling.policy import SequencePolicy
from headrace.inference.scheduling.selector import Batch
from headrace.inference.scheduling.sequences.live_sequence import SequenceEntry
from headrace.inference.scheduling.sequences.runner import SequenceRunner
from headrace.runtimes.onnxruntime import OnnxRuntimeBackend, OnnxRuntimeModel

from tests.support.sequence_models import state_sums
from tests.support.virtual_sequences import VirtualInstance, VirtualSequences

FP32, INT64 = BY_NAME["FP32"], BY_NAME["INT64"]


def state_tensors(history_initial: int = 1, sum_is_output: bool = False) -> tuple[StateTensor, ...]:
    """Return the states of `state_sums`; the history begins with so many zeros."""
    return (
        StateTensor("SUM_IN", "SUM_OUT", FP32, (1,), np.zeros(1, np.float32), sum_is_output),
        StateTensor("HISTORY_IN", "HISTORY_OUT", FP32, (-1,), np.zeros(history_initial, np.float32)),
    )


def spec(batched: bool, outputs: tuple[str, ...], fails: bool = True) -> ModelSpec:
    """Return the tensors of `state_sums` as clients see them."""
    rows = (-1,) if batched else ()
    inputs = {"X": TensorSpec("X", FP32, (*rows, 1))}
    if fails:
        inputs["FAIL"] = TensorSpec("FAIL", INT64, (*rows, 1))
    return ModelSpec(
        "sums", "1", "", inputs, {name: TensorSpec(name, FP32, (*rows, 1)) for name in outputs}, 4 * batched
    )


@cache
def loaded(batched: bool, free: bool) -> OnnxRuntimeModel:
    """Load the model once."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        file.write_bytes(state_sums(batched, fails=True, free=free).SerializeToString())
        return OnnxRuntimeBackend().load(file, 1, {"intra_op_thread_count": "1"})


class Results:
    """Settles the requests of a batch, without metrics."""

    layout = None

    def __init__(self, model: ModelSpec) -> None:
        self.check = OutputCheck(model)
        self.busy_runners: set[object] = set()

    def begin(self, runner: object) -> None:
        self.busy_runners.add(runner)

    def settle(self, batch: Batch, _times: object, results: list[dict[str, np.ndarray]], *_: object) -> None:
        settle_all([(e.completion, InferResponse(r)) for e, r in zip(batch.entries, results, strict=True)])

    def failed(self, batch: Batch, error: Exception, with_cancelled: bool) -> list[Batch]:
        assert with_cancelled
        if len(batch.entries) > 1:
            return [Batch([entry], batch.reason, 0, 1) for entry in batch.entries]
        settle_all([(batch.entries[0].completion, error)])
        return []


class VirtualStates(VirtualSequences):
    """Versions of `state_sums`: each instance has a runner with its states."""

    failures = 0

    def _inputs(self, fails: bool) -> dict[str, np.ndarray]:
        shape = (1, 1) if self._batched else (1,)
        return {"X": np.full(shape, self._value, np.float32), "FAIL": np.full(shape, int(fails))}

    @property
    def _batched(self) -> bool:
        return self.policy.max_rows > 1

    @property
    def _names(self) -> tuple[str, ...]:
        return ("Y", "TOTAL")[: len(self.policy.states)]

    def _runner(self, instance: VirtualInstance) -> SequenceRunner:
        runner = instance.sums.get("runner")  # lost with the instance
        if runner is None:
            runner = instance.sums["runner"] = self._create_runner()  # type: ignore[assignment]
        return runner  # type: ignore[return-value]

    def _create_runner(self) -> SequenceRunner:
        model = spec(self._batched, self._names)
        execution = loaded(self._batched, "TOTAL" in self._names).execution(0)
        return SequenceRunner(0, execution, None, self.policy, model, Results(model), lambda: 0)  # type: ignore[arg-type]

    def _compute(self, instance: VirtualInstance, batch: Batch) -> list[SequenceEntry]:
        self._runner(instance)._run_sequences(batch)
        for entry in batch.entries:
            assert isinstance(entry, SequenceEntry)
            expected, outcome = self.expected.pop(entry), entry.completion.outcome  # type: ignore[attr-defined]
            if isinstance(outcome, Cancelled):
                continue
            if "FAIL" in entry.inputs and entry.inputs["FAIL"].any():
                assert isinstance(outcome, Exception)
                self.failures += 1
                continue
            assert isinstance(outcome, InferResponse), outcome
            assert set(outcome.outputs) == set(self._names)
            for name, array in outcome.outputs.items():
                assert array.reshape(-1).tolist() == [expected], f"{name} has read another state"
            self.answers += 1
        return []

    def lose_state(self, version: object, index: int) -> None:
        """Do nothing: the states are not in a process that may be replaced."""


def policies() -> list[SequencePolicy]:
    """Return rules of both strategies, with and without a dimension of rows."""
    tensors = state_tensors()
    return [
        SequencePolicy(slots=3, is_direct=True, max_rows=3, idle_ns=100, states=tensors),
        SequencePolicy(slots=4, is_direct=True, max_rows=4, idle_ns=100, states=tensors[:1]),
        SequencePolicy(slots=4, is_direct=False, max_rows=3, idle_ns=100, states=tensors),
        SequencePolicy(slots=3, is_direct=False, max_rows=4, idle_ns=100, states=tensors[:1]),
        SequencePolicy(slots=1, is_direct=True, max_rows=1, idle_ns=100, states=tensors),
        SequencePolicy(slots=3, is_direct=False, max_rows=1, idle_ns=100, states=tensors),
    ]
