"""Pipelines under load in virtual time: one deadline over three steps, and what overload costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import Completion, LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import ModelSpec
from headrace.inference.pipelines.graph import build_graph
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.inference.simulation import replay
from headrace.inference.simulation.replay import LatencyProfile, SimulatedModel, StepLatency, VirtualDevice
from headrace.inference.simulation.virtual_time import VirtualLoop
from headrace.observability.counters import Recorder

from tests.support.fake_versions import FakeMembers, spec_of
from tests.unit.inference.pipelines.test_graph import config, step

MAX_ROWS = 8
STEPS = [step("a", {"X": "x"}, {"Y": "m"}), step("b", {"X": "m"}, {"Y": "n"}), step("c", {"X": "n"}, {"Y": "y"})]


class SimulatedVersion(replay._Handle):
    """A simulated model whose instances pull as soon as a step is queued."""

    def compute(self, request: InferRequest) -> LoopCompletion:
        completion = super().compute(request)
        self._loop.call_soon(self.pull)
        return completion


@dataclass
class Result:
    """Outcome of a load.

    Attributes:
        capacity_hz: most requests a second of the slowest step.
        goodput_hz: requests a second that were answered in time.
        late: answers after their deadline.
        wasted: share of the busy time that was spent on requests without an answer.
        outcomes: reasons of errors.
    """

    capacity_hz: float
    goodput_hz: float
    late: int
    wasted: float
    outcomes: dict[str, int]


def pipeline(
    loop: VirtualLoop,
    devices: Mapping[str, VirtualDevice],
    batch_us: Mapping[str, float],
    variation: float,
    recorder: Recorder,
) -> PipelineHandle:
    """A pipeline of three simulated models.

    Args:
        loop: event loop with virtual time.
        devices: of each model.
        batch_us, variation: as in `offered`.
        recorder: counters of the pipeline.
    """
    mailbox, members = Mailbox(cast("Any", loop)), []
    for name, each_us in batch_us.items():
        policy = HandlePolicy(BatchPolicy(MAX_ROWS))
        model = SimulatedModel(policy, LatencyProfile(StepLatency.line(each_us), variation=variation))
        member = SimulatedVersion(name, model, loop, mailbox, [devices[name]], np.random.default_rng(0))
        member.spec = spec_of(name)
        members.append(member)
    given = config(STEPS, max_batch_size=MAX_ROWS)
    tensors = [spec_of("e", ("x",)).inputs, spec_of("e", ("y",)).inputs]
    spec = ModelSpec("e", "1", "ensemble", tensors[0], tensors[1], MAX_ROWS)
    return PipelineHandle(
        spec, build_graph(given), FakeMembers(*members), HandlePolicy(), mailbox, recorder, clock=loop.clock
    )


def offered(
    monkeypatch: pytest.MonkeyPatch,
    batch_us: dict[str, float],
    factor: float,
    deadline_ms: float,
    seconds: float = 1.0,
    variation: float = 0.0,
) -> Result:
    """Offer `factor` times the capacity to a pipeline of three models.

    Args:
        monkeypatch: gives simulated batches an output.
        batch_us: time of a batch of each model; rows are free.
        factor: of the capacity.
        deadline_ms: of each request.
        seconds: of virtual time.
        variation: coefficient of variation of the times of batches.
    """
    monkeypatch.setattr(replay, "_NO_OUTPUTS", {"Y": np.zeros((1, 2), np.float32)})
    loop = VirtualLoop()
    devices = {name: VirtualDevice() for name in batch_us}
    recorder = Recorder(False, loop.clock)
    handle = pipeline(loop, devices, batch_us, variation, recorder)
    capacity_hz = MAX_ROWS * 1e6 / max(batch_us.values())
    gaps = np.random.default_rng(1).exponential(NS_PER_S / (capacity_hz * factor), int(capacity_hz * factor * seconds))
    x = np.zeros((1, 2), np.float32)
    outcomes: dict[str, int] = {}
    in_time = late = 0

    def settled(completion: Completion, deadline_ns: int) -> None:
        nonlocal in_time, late
        if isinstance(completion.outcome, InferResponse):
            in_time += loop.now_ns <= deadline_ns
            late += loop.now_ns > deadline_ns
        elif isinstance(completion.outcome, HeadraceError):
            outcomes[completion.outcome.reason] = outcomes.get(completion.outcome.reason, 0) + 1

    for time_ns in np.cumsum(gaps).astype(np.int64).tolist():
        loop.advance(time_ns)
        deadline_ns = time_ns + int(deadline_ms * NS_PER_MS)
        request = InferRequest(inputs={"x": x}, rows=1, shape_key=None, received_ns=time_ns, deadline_ns=deadline_ns)
        try:
            completion = handle.infer(request)
        except HeadraceError as error:
            outcomes[error.reason] = outcomes.get(error.reason, 0) + 1
        else:
            completion.then(lambda completion=completion, due=deadline_ns: settled(completion, due))
        loop.settle()
    end_s = loop.now_ns / NS_PER_S
    loop.finish()
    busy_ns = sum(device.busy_ns for device in devices.values())
    return Result(capacity_hz, in_time / end_s, late, recorder.totals().wasted_ns / max(busy_ns, 1), outcomes)


SLOW_AT = {
    "first": {"a": 4000.0, "b": 500.0, "c": 500.0},
    "middle": {"a": 500.0, "b": 4000.0, "c": 500.0},
    "last": {"a": 500.0, "b": 500.0, "c": 4000.0},
    "equal": {"a": 2000.0, "b": 2000.0, "c": 2000.0},
}


@pytest.mark.parametrize("variation", [0.0, 0.2])
@pytest.mark.parametrize("slow", SLOW_AT)
def test_at_twice_the_capacity_goodput_stays_and_little_work_is_wasted(
    monkeypatch: pytest.MonkeyPatch, slow: str, variation: float
) -> None:
    result = offered(monkeypatch, SLOW_AT[slow], 2.0, 40.0, variation=variation)
    print(slow, result)
    assert result.goodput_hz >= 0.9 * result.capacity_hz, result
    assert result.wasted < 0.05, result
    assert result.late == 0, result


def test_below_the_capacity_everything_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    result = offered(monkeypatch, SLOW_AT["middle"], 0.6, 60.0)
    assert result.outcomes == {}
    assert result.late == 0


def test_a_deadline_below_the_sum_of_the_steps_is_refused_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = offered(monkeypatch, SLOW_AT["equal"], 0.5, 5.0)
    refused = sum(result.outcomes.values())
    assert set(result.outcomes) <= {"would_miss", "deadline"}
    assert refused > 1900
    assert result.wasted < 0.05
