"""Requests of pipelines with a decoupled step: order, errors, cancellation, bounds, leases, and the rules of such pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS
from headrace.core.completion import LoopCompletion
from headrace.core.errors import (
    BadRequest,
    DeadlineExceeded,
    HeadraceError,
    ModelFailed,
    Unavailable,
)
from headrace.core.request import InferResponse
from headrace.core.response_stream import MAX_RESPONSE_BYTES, MAX_RESPONSES, ResponseStream
from headrace.inference.pipelines.decoupled_rules import decoupled_step, decoupled_step_problems
from headrace.inference.pipelines.decoupled_run import MAX_PARTS
from headrace.inference.pipelines.graph import build_graph
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.pipelines.yaml_steps import build_yaml_graph
from headrace.inference.scheduling.policy import HandlePolicy

from tests.support.fake_versions import spec_of
from tests.support.virtual_time import in_virtual_time
from tests.unit.inference.pipelines.test_graph import config, step
from tests.unit.inference.pipelines.test_run import NOW_NS, Case, turns
from tests.unit.inference.pipelines.test_run_branches import DESCRIBE, DETECT, YamlCase

# x -> before -> ticks (decoupled) -> after -> y; `after` also reads what `before` has computed.
BEFORE = step("before", {"X": "x"}, {"Y": "prepared"})
TICKS = step("ticks", {"X": "prepared"}, {"Y": "tick"})
AFTER = step("after", {"X": "tick"}, {"Y": "y"})
ONLY = step("ticks", {"X": "x"}, {"Y": "y"})


class StreamCase(Case):
    """A pipeline whose model `ticks` is decoupled; the test sends the responses of that step."""

    def __init__(self, steps: list[dict[str, Any]], **fields: Any) -> None:
        super().__init__(steps, **fields)
        self.stream_of: ResponseStream
        self.versions["ticks"].spec = replace(self.versions["ticks"].spec, decoupled=True)
        plain = self.handle
        self.handle = PipelineHandle(
            replace(plain.spec, decoupled=True), plain.graph, self.members, HandlePolicy(), self.mailbox, self.recorder,
            check=plain._check, clock=lambda: self.now_ns, decoupled=decoupled_step(plain.member_specs()),
        )  # fmt: skip

    def open(self, value: float = 1, **more: Any) -> tuple[LoopCompletion, ResponseStream]:
        stream = ResponseStream(self.mailbox)
        return self.send(value, responses=stream, **more), stream

    def tick(self, value: float, final: bool = False, number: int = 0, rows: int = 1) -> None:
        """Send a response of the decoupled step."""
        array = np.full((rows, 2), value, np.float32)
        self.respond(InferResponse({"Y": array}, final=final), array.nbytes, number)

    def respond(self, response: InferResponse | HeadraceError, size_bytes: int = 8, number: int = 0) -> None:
        responses = self.ticks.requests[number][0].responses
        assert responses is not None
        responses.send(response, size_bytes)


def read(stream: ResponseStream, consume: bool = True) -> list[Any]:
    """Take what has arrived: the first number of each response, or the text of an error; one for each response."""
    found: list[Any] = []
    while (response := stream.take()) is not None:
        is_error = isinstance(response, HeadraceError)
        found.append(str(response) if is_error else float(np.asarray(response.outputs["y"]).flat[0]))  # type: ignore[union-attr]
        if consume:
            stream.consumed()
    return found


async def test_each_response_runs_through_the_steps_behind_and_they_leave_in_order() -> None:
    case = StreamCase([BEFORE, TICKS, AFTER])
    waiting, stream = case.open(1, id="seven", client="web")
    case.before.answer()
    await turns()
    ((sent, _),) = case.ticks.requests
    assert (float(sent.inputs["X"].flat[0]), sent.id, sent.client, sent.outputs) == (2, "seven", "web", ("Y",))
    for value in (10, 20, 30):
        case.tick(value)
    await turns()
    assert [float(request.inputs["X"].flat[0]) for request, _ in case.after.requests] == [10, 20, 30]
    for number in (2, 1):
        case.after.answer(number)
    await turns()
    assert read(stream) == []  # the first one is not done
    case.after.answer(0)
    await turns()
    assert read(stream) == [20, 40, 60]
    assert (waiting.is_settled, case.leases) == (False, 3)
    case.ticks.answer(0, InferResponse({}))
    response = await waiting
    assert (response.outputs, [times.step for times in response.steps]) == ({}, ["before", "ticks"])
    assert (case.leases, case.handle.in_flight) == (0, 0)
    steps = case.handle.steps()
    assert [steps[name].requests for name in ("before", "ticks", "after")] == [1, 1, 3]
    assert case.recorder.totals().requests == 1


async def test_the_decoupled_step_may_be_first_last_or_alone() -> None:
    case = StreamCase([ONLY])
    waiting, stream = case.open()
    case.tick(5)
    case.tick(6, final=True)
    case.ticks.answer(0, InferResponse({}))
    await waiting
    first, last = stream.take(), stream.take()
    assert isinstance(first, InferResponse)
    assert isinstance(last, InferResponse)
    assert (first.final, last.final, stream.take()) == (False, True, None)
    assert first.outputs["y"].tolist() == [[5, 5]]


async def test_steps_behind_read_tensors_of_the_request_and_of_steps_before() -> None:
    join = step("d", {"L": "prepared", "R": "tick"}, {"Y": "y"})
    case = StreamCase([BEFORE, TICKS, join])
    _, stream = case.open(4)
    case.before.answer()
    await turns()
    case.tick(1)
    case.tick(2)
    await turns()
    pairs = [(float(r.inputs["L"].flat[0]), float(r.inputs["R"].flat[0])) for r, _ in case.d.requests]
    assert pairs == [(8, 1), (8, 2)]
    case.d.answer(0)
    await turns()
    assert read(stream) == [16]


async def test_outputs_that_need_no_decoupled_step_are_one_response() -> None:
    case = StreamCase(
        [BEFORE, TICKS, AFTER],
        output=[
            {"name": "y", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "prepared", "data_type": "TYPE_FP32", "dims": [2]},
        ],
    )
    waiting, stream = case.open(outputs=("prepared",))
    case.before.answer()
    await waiting
    response = stream.take()
    assert isinstance(response, InferResponse)
    assert (list(response.outputs), response.final, stream.take()) == (["prepared"], True, None)
    assert (case.ticks.requests, case.leases) == ([], 0)
    # Beside the output of the stream it is in every response.
    waiting, stream = case.open(3)
    case.before.answer(-1)
    await turns()
    case.tick(1)
    await turns()
    case.after.answer()
    await turns()
    response = stream.take()
    assert isinstance(response, InferResponse)
    assert {name: float(array.flat[0]) for name, array in response.outputs.items()} == {"y": 2, "prepared": 6}
    waiting.abandon()


@pytest.mark.parametrize("where", ["before", "rejected", "ticks", "in the stream", "after"])
async def test_errors_end_the_request_after_the_responses_before(where: str) -> None:
    case = StreamCase([BEFORE, TICKS, AFTER])
    error = BadRequest("bad input")
    if where == "rejected":
        case.ticks.rejection = error
    waiting, stream = case.open()
    case.before.answer(0, error if where == "before" else None)
    await turns()
    if where in ("ticks", "in the stream", "after"):
        case.tick(1)
        case.tick(2)
        if where == "ticks":
            case.ticks.answer(0, error)
        elif where == "in the stream":
            case.respond(error)
            case.tick(3)  # after the error: no step runs for it
        await turns()
        assert len(case.after.requests) == 2
        case.after.answer(1, error if where == "after" else None)
        await turns()
        assert not waiting.is_settled  # the first response comes before the error
        case.after.answer(0)
    step_name = {"in the stream": "ticks", "rejected": "ticks"}.get(where, where)
    with pytest.raises(BadRequest, match=f"^in ensemble 'e', step '{step_name}' .*: bad input$"):
        await waiting
    sent = {"ticks": [2, 4], "in the stream": [2, 4], "after": [2]}.get(where, [])
    assert read(stream) == sent
    assert case.leases == 0
    if case.ticks.requests:
        assert case.ticks.requests[0][1].is_settled
    assert case.handle.steps()[step_name].failures == 1


@in_virtual_time
async def test_the_deadline_ends_the_stream() -> None:
    case = StreamCase([TICKS | {"input_map": {"X": "x"}}, AFTER])
    waiting, stream = case.open(deadline_ns=NOW_NS + 30 * NS_PER_MS)
    case.tick(1)
    await turns()
    case.after.answer()
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert read(stream) == [2]
    assert isinstance(case.ticks.requests[0][1].outcome, DeadlineExceeded)
    assert case.leases == 0


async def test_the_step_has_credit_only_for_what_the_client_has_consumed() -> None:
    case = StreamCase([TICKS | {"input_map": {"X": "x"}}, AFTER])
    _, stream = case.open()
    credit: list[int] = []
    responses = case.ticks.requests[0][0].responses
    assert responses is not None
    responses.on_consumed = lambda count, _size: credit.append(count)
    for value in range(MAX_RESPONSES):
        case.tick(value)
    await turns()
    assert len(case.after.requests) == MAX_PARTS
    for number in range(MAX_RESPONSES):
        case.after.answer(number)
        await turns()
    assert (credit, stream.sent) == ([], MAX_RESPONSES)
    assert read(stream) == [2 * value for value in range(MAX_RESPONSES)]
    assert sum(credit) == MAX_RESPONSES


@pytest.mark.parametrize("steps", [[ONLY], [TICKS | {"input_map": {"X": "x"}}, AFTER]])
async def test_large_outputs_wait_for_the_client(steps: list[dict[str, Any]]) -> None:
    case = StreamCase(steps)
    _, stream = case.open()
    rows = MAX_RESPONSE_BYTES // 16  # half of the bound
    for value in range(6):
        case.tick(value, rows=rows)
    await turns()
    for number in range(len(case.after.requests) if len(steps) > 1 else 0):
        case.after.answer(number)
    await turns()
    # Outputs of the steps behind are as large as those of the step: what runs already is added to the bound.
    assert stream.sent == (2 if len(steps) == 1 else 6)
    assert read(stream) == [value * len(steps) for value in range(6)]


async def test_limits_of_the_steps_hold_for_the_decoupled_step_too() -> None:
    scheduling = {"step": [TICKS | {"input_map": {"X": "x"}}, AFTER], "max_inflight_requests": 1}
    case = StreamCase(scheduling["step"], ensemble_scheduling=scheduling)  # type: ignore[arg-type]
    first, stream = case.open()
    second, _ = case.open()
    third, _ = case.open()
    assert len(case.ticks.requests) == 1
    case.tick(1)
    case.tick(2)
    await turns()
    assert len(case.after.requests) == 1
    case.after.answer(0)
    await turns()
    assert len(case.after.requests) == 2
    second.abandon()
    assert len(case.ticks.requests) == 1
    first.abandon()
    await turns()
    assert (len(case.ticks.requests), read(stream)) == (2, [2])
    third.abandon()
    assert case.leases == 0


async def test_a_model_that_becomes_decoupled_makes_the_pipeline_unavailable() -> None:
    case = StreamCase([BEFORE, TICKS, AFTER])
    ticks = case.versions["ticks"]
    ticks.spec = replace(ticks.spec, decoupled=False)
    assert "no longer decoupled since the pipeline was loaded" in case.handle.problem()
    with pytest.raises(Unavailable, match="no longer decoupled"):
        case.open()
    assert case.leases == 0
    plain = Case([BEFORE, TICKS, AFTER])
    plain.versions["after"].spec = replace(plain.versions["after"].spec, decoupled=True)
    with pytest.raises(Unavailable, match="after is decoupled since the pipeline was loaded"):
        plain.send()


async def test_an_output_of_the_wrong_shape_fails_the_request_and_no_other() -> None:
    case = StreamCase([TICKS | {"input_map": {"X": "x"}}, AFTER])
    waiting, _ = case.open()
    case.respond(InferResponse({"Y": np.zeros((1, 3), np.float32)}))
    with pytest.raises(BadRequest, match="step 'after'"):
        await waiting
    waiting, _ = case.open()
    case.respond(InferResponse({}), number=1)  # a defect of the server: executors check the outputs
    with pytest.raises(ModelFailed, match="its log has the cause"):
        await waiting
    assert case.leases == 0


# --- Rules -------------------------------------------------------------------------------------------------------------------


def problems(steps: list[dict[str, Any]], decoupled: tuple[str, ...], has_cache: bool = False) -> list[str]:
    graph = build_graph(config(steps, max_batch_size=8))
    specs = {s.index: replace(spec_of(s.model), decoupled=s.model in decoupled) for s in graph.steps}
    return [problem.message for problem in decoupled_step_problems(graph, specs, has_cache)]


def test_two_decoupled_steps_are_refused() -> None:
    assert problems([BEFORE, TICKS, AFTER], ("ticks",)) == []
    (message,) = problems([BEFORE, TICKS, AFTER], ("ticks", "after"))
    assert message == "steps 'ticks' and 'after' are decoupled, and an ensemble has at most one such step"
    (message,) = problems([BEFORE, TICKS, AFTER], ("ticks",), has_cache=True)
    assert "response_cache" in message


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ({"detect": {"when": "x.max > 0"}}, ["step 'detect' is decoupled, and when, each and fallback"]),
        ({"detect": {"fallback": "spare"}}, ["step 'detect' is decoupled, and when, each and fallback"]),
        ({"describe": {"when": "found.max > 0"}}, []),
        ({"describe": {"fallback": "spare"}}, []),
    ],
)
async def test_fields_of_yaml_steps(field: dict[str, Any], words: list[str]) -> None:
    steps = {"detect": DETECT, "describe": DESCRIBE}
    case = YamlCase({name: {**part, **field.get(name, {})} for name, part in steps.items()})
    graph = build_yaml_graph(case.config)
    specs = case.handle.member_specs()
    specs[0] = replace(specs[0], decoupled=True)
    found = [problem.message for problem in decoupled_step_problems(graph, specs, False)]
    assert [word for word in words if any(word in message for message in found)] == words
    assert len(found) == len(words)


async def test_conditions_before_the_decoupled_step_and_rows_alone_are_refused() -> None:
    case = YamlCase({"detect": {**DETECT, "when": "x.max > 0"}, "describe": DESCRIBE})
    specs = case.handle.member_specs()
    specs[1] = replace(specs[1], decoupled=True)
    (problem,) = decoupled_step_problems(build_yaml_graph(case.config), specs, False)
    assert problem.message == "step 'detect' has a condition, and does not run behind the decoupled step 'describe'"
    case = YamlCase({"detect": DETECT, "describe": {**DESCRIBE, "each": "found"}}, dims=(-1, 2), rows=8)
    specs = case.handle.member_specs()
    specs[0] = replace(specs[0], decoupled=True)
    (problem,) = decoupled_step_problems(build_yaml_graph(case.config), specs, False)
    assert "every row runs alone" in problem.message
