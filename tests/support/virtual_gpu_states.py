"""Sequences in virtual time whose states stay in the memory of a fake GPU, behind a TensorRT plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from headrace.core.ledger import MemoryAccount
from headrace.core.tensor import ModelSpec
from headrace.inference.scheduling.policy import SequencePolicy
from headrace.inference.scheduling.sequences.controls import ControlledExecution
from headrace.inference.scheduling.sequences.runner import SequenceRunner
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend, TensorRtModel
from headrace.runtimes.tensorrt.states import DeviceStates, PlanStates
from headrace_engines.targets.base import ShapeRange, TargetSpec

from tests.support.sequence_models import state_sums
from tests.support.tensorrt_case import build
from tests.support.virtual_sequences import VirtualInstance, random_run
from tests.support.virtual_states import Results, VirtualStates, spec

MAX_ROWS = 4


def build_sums(folder: Path) -> Path:
    """Build the plan of `state_sums` without HISTORY."""
    shapes = ((1, 1), (MAX_ROWS, 1), (MAX_ROWS, 1))
    return build(folder, state_sums(free=False), TargetSpec("fp32", (ShapeRange({"X": shapes, "SUM_IN": shapes}),)))


@contextmanager
def loaded(
    plan: Path, policy: SequencePolicy, account: MemoryAccount | None = None, **parameters: str
) -> Iterator[TensorRtModel]:
    """Load the plan, with its states on the GPU."""
    model = TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: str(MAX_ROWS), **parameters}, account)
    try:
        assert model.attach_states(PlanStates(policy.states, policy.slots, policy.is_direct)) == ""
        yield model
    finally:
        model.close()


class VirtualGpuStates(VirtualStates):
    """Versions of the plan: each instance has an execution with its states, which `close` closes.

    Attributes:
        model: the loaded plan; set before the first batch.
    """

    model: TensorRtModel
    _executions: list[ControlledExecution]

    @property
    def _names(self) -> tuple[str, ...]:
        return ("Y", "SUM_OUT") if self.policy.states[0].is_output else ("Y",)

    def _inputs(self, fails: bool) -> dict[str, np.ndarray]:
        assert not fails
        return {"X": np.full((1, 1), self._value, np.float32)}

    def _create_runner(self) -> SequenceRunner:
        model: ModelSpec = spec(True, self._names, fails=False)
        execution = ControlledExecution(self.model.execution(0), (), True, self.policy.states)
        self.__dict__.setdefault("_executions", []).append(execution)
        execution.run({"X": np.full((3, 1), 1e6, np.float32)})  # warm-up
        return SequenceRunner(0, execution, None, self.policy, model, Results(model), lambda: 0)  # type: ignore[arg-type]

    def _runner(self, instance: VirtualInstance) -> SequenceRunner:
        runner = super()._runner(instance)
        assert isinstance(runner._states, DeviceStates)
        return runner

    def close(self) -> None:
        """Close all executions."""
        for execution in self.__dict__.get("_executions", []):
            execution.close()


def check_random_interleavings(policy: SequencePolicy, folder: Path, graphs: str) -> None:
    """Run sequences in random interleavings on an engine that is built in `folder`; "1" runs it as CUDA graphs, "0" without."""
    answers = 0
    with loaded(build_sums(folder), policy, cuda_graphs=graphs) as model:

        def make(*arguments: Any, **options: Any) -> VirtualGpuStates:
            world = VirtualGpuStates(*arguments, **options)
            world.model = model
            return world

        for seed in range(8):
            world = random_run(seed, policy, steps=150, ids=6, make=make)
            assert isinstance(world, VirtualGpuStates)
            world.close()
            answers += world.answers
    assert answers > 50
