"""Requests of pipelines in YAML: skipped steps, rows of a tensor, fallbacks, and the leases of all of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import (
    BadRequest,
    HeadraceError,
    ModelFailed,
    Overloaded,
    QuotaExceeded,
    Unavailable,
    WouldMiss,
)
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import BF16, FP32, Array, Datatype, ModelSpec, TensorSpec
from headrace.inference.pipelines.graph import check_members
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.pipelines.run import StepLimit
from headrace.inference.pipelines.yaml_steps import build_yaml_graph
from headrace.inference.scheduling.policy import HandlePolicy
from headrace.inference.scheduling.version_handle import Prediction
from headrace.observability.counters import Recorder

from tests.support.fake_versions import FakeMembers, FakeVersion, spec_of
from tests.unit.inference.pipelines.test_run import NOW_NS, first, turns

DETECT = {"model": "detect", "inputs": {"X": "x"}, "outputs": {"Y": "found"}}
DESCRIBE = {"model": "describe", "inputs": {"X": "found"}, "outputs": {"Y": "y"}}


class YamlCase:
    """A pipeline in YAML over fake versions of tensors with two numbers a row; enter it on a running loop."""

    def __init__(
        self, steps: dict[str, Any], dims: tuple[int, ...] = (-1,), rows: int = 0, dtype: Datatype = FP32
    ) -> None:
        given = ModelConfig.model_validate(
            {
                "name": "p",
                "max_batch_size": rows,
                "input": [{"name": "x", "data_type": dtype.config_name, "dims": [2]}],
                "output": [{"name": "y", "data_type": dtype.config_name, "dims": dims}],
                "pipeline": {"steps": steps},
            }
        )
        self.mailbox = Mailbox(asyncio.get_running_loop())
        names = [step["model"] for step in steps.values()] + [step.get("fallback", "") for step in steps.values()]
        self.versions = {name: FakeVersion(spec_of(name, dtype=dtype), self.mailbox) for name in filter(None, names)}
        self.members = FakeMembers(*self.versions.values())
        self.config, self.now_ns = given, NOW_NS
        graph = build_yaml_graph(given)
        shapes = ((-1, 2), (-1, *dims)) if rows else ((2,), tuple(dims))
        spec = ModelSpec(
            "p",
            "1",
            "ensemble",
            {"x": TensorSpec("x", dtype, shapes[0])},
            {"y": TensorSpec("y", dtype, shapes[1])},
            rows,
        )
        self.handle = PipelineHandle(
            spec, graph, self.members, HandlePolicy(), self.mailbox, Recorder(),
            check=lambda specs: check_members(graph, given, specs), clock=lambda: self.now_ns,
        )  # fmt: skip

    def __getattr__(self, name: str) -> FakeVersion:
        return self.versions[name]

    def send(self, value: float = 1, rows: int = 1, **more: Any) -> LoopCompletion:
        x = np.full((rows, 2) if self.handle.spec.max_batch_size else (2,), value, np.float32)
        return self.handle.infer(InferRequest(inputs={"x": x}, rows=rows, shape_key=None, received_ns=NOW_NS, **more))

    @property
    def leases(self) -> int:
        return sum(version.in_flight for version in self.versions.values())


def answer(version: FakeVersion, array: Array) -> None:
    version.answer(-1, InferResponse({"Y": array}))


async def test_too_many_rows_fail_the_step() -> None:
    case = YamlCase({"detect": DETECT, "describe": {**DESCRIBE, "each": "found"}}, dims=(-1, 2))
    waiting = case.send()
    answer(case.detect, np.zeros((4097, 2), np.float32))
    with pytest.raises(BadRequest, match=r"in pipeline 'p', step 'describe' .*: each: found has 4097 rows"):
        await waiting
    assert case.leases == 0


SAFE = {"detect": {**DETECT, "outputs": {"Y": "y"}, "fallback": "simple"}}


@pytest.mark.parametrize(
    "error", [ModelFailed("broken"), Unavailable("no process"), Overloaded("full"), WouldMiss("late")]
)
@pytest.mark.parametrize("rejected", [False, True])
async def test_a_fallback_replaces_a_step_that_failed(error: HeadraceError, rejected: bool) -> None:
    case = YamlCase(SAFE, dims=(2,))
    if rejected:
        case.detect.rejection = error
    waiting = case.send(3)
    if not rejected:
        case.detect.requests[0][1].settle(error)
        await turns()
    assert case.simple.in_flight == 1
    assert case.simple.requests[0][0].inputs["X"].tolist() == [[3, 3]]
    case.simple.answer()
    response = await waiting
    assert first(response) == 6
    assert [(times.model, times.outcome) for times in response.steps] == [("simple", "fallback")]
    assert case.leases == 0
    assert dict(case.detect.recorder.totals().failures) == {error.reason: 1}
    assert not case.simple.recorder.totals().failures


@pytest.mark.parametrize("error", [BadRequest("wrong"), QuotaExceeded("too many")])
async def test_errors_of_the_request_have_no_fallback(error: HeadraceError) -> None:
    case = YamlCase(SAFE, dims=(2,))
    waiting = case.send()
    case.detect.requests[0][1].settle(error)
    with pytest.raises(type(error), match=str(error)):
        await waiting
    assert not case.simple.requests
    assert case.leases == 0


async def test_a_fallback_that_fails_names_itself_and_runs_once() -> None:
    case = YamlCase(SAFE, dims=(2,))
    waiting = case.send()
    case.detect.requests[0][1].settle(ModelFailed("first"))
    await turns()
    case.simple.requests[0][1].settle(ModelFailed("second"))
    with pytest.raises(ModelFailed, match=r"step 'detect' \(model simple/1\): second"):
        await waiting
    assert len(case.simple.requests) == 1
    assert case.leases == 0
    for version in (case.detect, case.simple):
        assert dict(version.recorder.totals().failures) == {"model_failed": 1}


async def test_without_its_fallback_a_step_fails_with_its_own_error() -> None:
    case = YamlCase(SAFE, dims=(2,))
    del case.members.versions["simple"]
    waiting = case.send()
    case.detect.requests[0][1].settle(ModelFailed("first"))
    with pytest.raises(ModelFailed, match=r"\(model detect/1\): first"):
        await waiting
    assert case.leases == 0


async def test_a_step_that_would_be_late_is_replaced_at_once() -> None:
    case = YamlCase({"detect": DETECT, "describe": {**DESCRIBE, "fallback": "simple"}}, dims=(2,))
    case.describe.prediction = Prediction(0, 20 * NS_PER_MS)
    waiting = case.send(deadline_ns=NOW_NS + NS_PER_S)
    # The queue of the second step grows while the first one runs.
    case.describe.prediction = Prediction(2 * NS_PER_S, 20 * NS_PER_MS)
    case.detect.answer()
    await turns()
    assert (len(case.describe.requests), len(case.simple.requests)) == (0, 1)
    case.simple.answer()
    response = await waiting
    assert [times.outcome for times in response.steps] == ["ok", "fallback"]
    # In time, the model itself runs.
    case.describe.prediction = Prediction(0, 20 * NS_PER_MS)
    waiting = case.send(deadline_ns=NOW_NS + NS_PER_S)
    case.detect.answer(-1)
    await turns()
    assert (len(case.describe.requests), len(case.simple.requests)) == (1, 1)
    case.describe.answer()
    await waiting
    assert case.leases == 0


async def test_a_cancelled_request_releases_its_fallback() -> None:
    case = YamlCase(SAFE, dims=(2,))
    waiting = case.send()
    case.detect.requests[0][1].settle(ModelFailed("first"))
    await turns()
    assert case.leases == 2
    waiting.abandon()
    await turns()
    assert case.leases == 0
    assert case.simple.requests[0][1].is_settled


async def test_a_fallback_that_is_in_time_admits_a_request_that_the_model_would_miss() -> None:
    steps = {"detect": DETECT, "describe": {**DESCRIBE, "fallback": "simple"}}
    case = YamlCase(steps, dims=(2,))
    case.detect.prediction = Prediction(0, 10 * NS_PER_MS)
    case.describe.prediction = Prediction(5 * NS_PER_S, NS_PER_S)
    case.simple.prediction = Prediction(0, 20 * NS_PER_MS)
    deadline_ns = NOW_NS + NS_PER_S
    waiting = case.send(deadline_ns=deadline_ns)
    assert case.detect.requests[0][0].due_ns == deadline_ns - 20 * NS_PER_MS  # the fallback runs behind it
    case.detect.answer()
    await turns()
    assert (len(case.describe.requests), len(case.simple.requests)) == (0, 1)
    case.simple.answer()
    assert [times.outcome for times in (await waiting).steps] == ["ok", "fallback"]
    case.simple.prediction = Prediction(5 * NS_PER_S, NS_PER_S)
    with pytest.raises(WouldMiss, match="step 'describe'"):
        case.send(deadline_ns=NOW_NS + NS_PER_S)
    assert case.leases == 0


async def test_rows_and_fallbacks_take_one_place_of_their_limit() -> None:
    case = YamlCase({"detect": {**DETECT, "fallback": "simple"}, "describe": {**DESCRIBE, "each": "found"}}, (-1, 2))
    case.handle._limits = [StepLimit(1), StepLimit(1)]
    for _ in range(3):  # zero rows run nothing
        waiting = case.send()
        answer(case.detect, np.zeros((0, 2), np.float32))
        assert (await waiting).outputs["y"].shape == (0, 2)
    failing = case.send()
    case.detect.requests[-1][1].settle(ModelFailed("broken"))
    await turns()
    waits = [case.send(), case.send()]
    assert (len(case.detect.requests), len(case.simple.requests)) == (4, 1)  # the fallback has the place
    answer(case.simple, np.zeros((0, 2), np.float32))
    await failing
    assert len(case.detect.requests) == 5
    for each in waits:
        answer(case.detect, np.zeros((0, 2), np.float32))
        await each
    assert len(case.detect.requests) == 6
    assert case.leases == 0


async def test_a_condition_on_bf16_compares_values() -> None:
    case = YamlCase({"detect": DETECT, "describe": {**DESCRIBE, "when": "found.max > 0.5"}}, dtype=BF16)
    for value, runs in ((0.25, 0), (-1.0, 0), (1.0, 1)):
        waiting = case.send()
        bits = (np.full((1, 2), value, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        answer(case.detect, bits)
        await turns()
        assert len(case.describe.requests) == runs
        if runs:
            case.describe.answer()
        await waiting


async def test_a_fallback_replaces_a_step_whose_response_lacks_an_output() -> None:
    case = YamlCase(SAFE, dims=(2,))
    waiting = case.send(3)
    case.detect.answer(0, InferResponse({}))
    await turns()
    case.simple.answer()
    response = await waiting
    assert first(response) == 6
    assert [times.outcome for times in response.steps] == ["fallback"]
    assert case.leases == 0


async def test_a_defect_while_a_fallback_is_bound_releases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    case = YamlCase(SAFE, dims=(2,))
    waiting = case.send()

    def fail(*_: object) -> None:
        raise KeyError("a defect of the server")

    monkeypatch.setattr(case.handle, "_check", fail)
    case.detect.requests[0][1].settle(ModelFailed("first"))
    with pytest.raises(ModelFailed, match="first"):
        await waiting
    assert case.leases == 0
