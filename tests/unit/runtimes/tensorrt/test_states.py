"""States of sequences in the memory of a GPU: TensorRT on the host, with work that the GPU does late."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import ModelFailed
from headrace.core.ledger import Ledger
from headrace.core.sequence_state import BatchSlots, StateTensor
from headrace.core.tensor import BY_NAME
from headrace.inference.scheduling.policy import SequencePolicy
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.cuda.driver import DeviceError
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE, TensorRtBackend
from headrace.runtimes.tensorrt.states import PlanStates
from headrace_engines.targets.base import ShapeRange, TargetSpec

from tests.support.fake_streams import LateCuda
from tests.support.sequence_models import state_sums
from tests.support.tensorrt_case import build
from tests.support.virtual_gpu_states import build_sums, check_random_interleavings, loaded

FP32 = BY_NAME["FP32"]


def sums(initial: float = 0, is_output: bool = False) -> tuple[StateTensor, ...]:
    return (StateTensor("SUM_IN", "SUM_OUT", FP32, (1,), np.full(1, initial, np.float32), is_output),)


def policy_of(is_direct: bool, slots: int = 4, **options: Any) -> SequencePolicy:
    return SequencePolicy(slots=slots, is_direct=is_direct, max_rows=4, idle_ns=100, states=sums(**options))


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("graphs", ["1", "0"])
@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.parametrize("is_direct", [True, False])
def test_random_interleavings(is_direct: bool, is_output: bool, graphs: str, tmp_path: Path) -> None:
    policy = policy_of(is_direct, slots=4 if is_direct else 6, is_output=is_output)
    check_random_interleavings(policy, tmp_path, graphs)


def run(execution: Any, slots: list[int], values: list[float], ready: list[int] | None = None) -> list[float]:
    rows = BatchSlots(slots, list(range(len(slots))) if ready is None else ready)
    assert execution.slot_states.load(rows) == {}
    outputs = execution.run({"X": np.array(values, np.float32)[:, None]})
    assert set(outputs) == {"Y"}
    execution.slot_states.save(outputs, rows)
    return list(outputs["Y"].reshape(-1).tolist())


@pytest.mark.usefixtures("trt")
def test_direct_swaps_and_keeps_rows_without_a_request(tmp_path: Path) -> None:
    with loaded(build_sums(tmp_path), policy_of(True, initial=100)) as model, closing(model.execution(0)) as execution:
        states = execution.slot_states
        assert states is not None
        for slot in range(3):
            states.reset(slot)
        assert run(execution, [0, 1, 2], [1, 2, 3]) == [101, 102, 103]
        assert run(execution, [0, 1], [5, 5], ready=[1])[1] == 107  # the padding to 4 rows is not that of slot 2
        assert run(execution, [0, 1, 2], [0, 0, 0]) == [101, 107, 103]
        states.release(2)
        states.reset(1)
        assert run(execution, [0, 1], [0, 0]) == [101, 100]


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("slots", [1, 3])
def test_a_plan_without_a_dimension_of_rows(slots: int, tmp_path: Path) -> None:
    shapes = ((1,), (1,), (1,))
    spec = TargetSpec("fp32", (ShapeRange({"X": shapes, "SUM_IN": shapes}),))
    plan = build(tmp_path, state_sums(batched=False, free=False), spec)
    policy = policy_of(slots == 1, slots=slots, initial=10)
    with closing(TensorRtBackend().load(plan, 1, {MAX_BATCH_SIZE: "0"})) as model:
        assert model.attach_states(PlanStates(policy.states, slots, slots == 1)) == ""
        with closing(model.execution(0)) as execution:
            states = execution.slot_states
            assert states is not None
            for slot in range(slots):
                states.reset(slot)
            for step in range(3):
                for slot in range(slots):
                    rows = BatchSlots([slot], [0])
                    states.load(rows)
                    outputs = execution.run({"X": np.full(1, slot + 1, np.float32)})
                    states.save(outputs, rows)
                    assert outputs["Y"].tolist() == [10 + (slot + 1) * (step + 1)]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_run_that_fails_keeps_the_states(is_direct: bool, trt: Any, tmp_path: Path) -> None:
    policy = policy_of(is_direct)
    with loaded(build_sums(tmp_path), policy, cuda_graphs="0") as model, closing(model.execution(0)) as execution:
        states = execution.slot_states
        assert states is not None
        states.reset(0)
        assert run(execution, [0], [7]) == [7]
        trt.state.broken = True
        with pytest.raises(ModelFailed, match="not launched"):
            run(execution, [0], [1])
        trt.state.broken = False
        assert run(execution, [0], [2]) == [9]


@pytest.mark.usefixtures("trt")
def test_states_that_cannot_be_copied_are_lost(cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(build_sums(tmp_path), policy_of(False)) as model, closing(model.execution(0)) as execution:
        states = execution.slot_states
        assert states is not None
        states.reset(0)
        rows = BatchSlots([0], [0])
        states.load(rows)
        outputs = execution.run({"X": np.ones((1, 1), np.float32)})

        def refuse(*_: object) -> None:
            raise DeviceError("refused")

        monkeypatch.setattr("headrace.runtimes.tensorrt.states.copy_on_gpu", refuse)
        with pytest.raises(ExecutionLost, match="the states of sequences are lost"):
            states.save(outputs, rows)
    assert cuda.depth == 0


@pytest.mark.usefixtures("trt")
@pytest.mark.parametrize("is_direct", [True, False])
def test_the_memory_of_states_is_in_the_ledger(is_direct: bool, cuda: LateCuda, tmp_path: Path) -> None:
    plan, used = build_sums(tmp_path), []
    for slots in (4, 4000):
        ledger = Ledger()
        ledger.set_limit(0, 1 << 30)
        account = ledger.account("m", "1", None)
        with loaded(plan, policy_of(is_direct, slots=slots), account) as model, closing(model.execution(0)):
            used.append(account.reserved_bytes()[0])
            assert cuda.used_bytes() > 0
    assert used[1] - used[0] == (0 if is_direct else 4 * 3996)


@pytest.mark.usefixtures("trt")
def test_states_whose_shape_may_change_stay_in_host_memory(tmp_path: Path) -> None:
    free = StateTensor("SUM_IN", "SUM_OUT", FP32, (-1,), np.zeros(1, np.float32))
    model = TensorRtBackend().load(build_sums(tmp_path), 1, {MAX_BATCH_SIZE: "4"})
    with closing(model):
        assert model.attach_states(PlanStates((free,), 4, True)) == "the shape of state 'SUM_IN' may change"
        with closing(model.execution(0)) as execution:
            assert execution.slot_states is None
            inputs = {"X": np.ones((2, 1), np.float32), "SUM_IN": np.ones((2, 1), np.float32)}
            assert execution.run(inputs)["SUM_OUT"].tolist() == [[2], [2]]
