"""Requests on their way through a pipeline: order of the steps, errors, cancellation, deadlines, leases, limits."""

from __future__ import annotations

import asyncio
import threading
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.config.model_config import ModelConfig
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    ModelFailed,
    Overloaded,
    QuotaExceeded,
    Unavailable,
    WouldMiss,
)
from headrace.core.quota import Quota
from headrace.core.request import InferRequest, InferResponse
from headrace.core.tensor import ModelSpec
from headrace.inference.pipelines.graph import build_graph, check_members
from headrace.inference.pipelines.pipeline_handle import PipelineHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy, RateLimits
from headrace.inference.scheduling.version_handle import Prediction
from headrace.observability.counters import Recorder

from tests.support.fake_versions import FakeMembers, FakeVersion, spec_of
from tests.support.waiting import until_async
from tests.unit.inference.pipelines.test_graph import CHAIN, DIAMOND, config, step

NO_CACHE: Any = SimpleNamespace(close=lambda: None)
JOIN = spec_of("d", ("L", "R"))
# The time in these tests: only they advance it, so that a pause of the process uses up no deadline.
NOW_NS = 1000 * NS_PER_S


class Case:
    """A pipeline over fake versions; enter it on a running loop."""

    def __init__(
        self, steps: list[dict[str, Any]], policy: HandlePolicy | None = None, rows: int = 8, **fields: Any
    ) -> None:
        given: ModelConfig = config(steps, max_batch_size=rows, **fields)
        self.mailbox = Mailbox(asyncio.get_running_loop())
        names = dict.fromkeys(str(part["model_name"]) for part in steps)
        self.versions = {name: FakeVersion(JOIN if name == "d" else spec_of(name), self.mailbox) for name in names}
        self.members = FakeMembers(*self.versions.values())
        graph = build_graph(given)
        shape = (-1, 2) if rows else (2,)
        spec = ModelSpec(
            "e", "1", "ensemble",
            {tensor.name: _tensor(tensor.name, shape) for tensor in given.input},
            {tensor.name: _tensor(tensor.name, shape) for tensor in given.output},
            rows,
        )  # fmt: skip
        self.recorder, self.now_ns = Recorder(), NOW_NS
        self.handle = PipelineHandle(
            spec, graph, self.members, policy or HandlePolicy(), self.mailbox, self.recorder,
            check=lambda specs: check_members(graph, given, specs), clock=lambda: self.now_ns,
        )  # fmt: skip

    def __getattr__(self, name: str) -> FakeVersion:
        return self.versions[name]

    def send(self, value: float = 1, rows: int = 1, **more: Any) -> LoopCompletion:
        return self.handle.infer(request(value, rows, **more))

    @property
    def leases(self) -> int:
        return sum(version.in_flight for version in self.versions.values())


def _tensor(name: str, shape: tuple[int, ...]) -> Any:
    return next(iter(spec_of("t", (name,), rows=len(shape) - 1).inputs.values()))


def request(value: float = 1, rows: int = 1, **more: Any) -> InferRequest:
    x = np.full((rows, 2), value, np.float32)
    return InferRequest(inputs={"x": x}, rows=rows, shape_key=None, received_ns=NOW_NS, **more)


async def turns(count: int = 3) -> None:
    """Let callbacks run."""
    for _ in range(count):
        await asyncio.sleep(0)


def first(response: InferResponse, name: str = "y") -> float:
    return float(np.asarray(response.outputs[name]).flat[0])


async def test_a_step_starts_when_all_its_inputs_are_ready() -> None:
    case = Case(DIAMOND)
    waiting = case.send(1)
    assert (len(case.a.requests), len(case.b.requests)) == (1, 0)
    case.a.answer()
    await turns()
    assert (len(case.b.requests), len(case.c.requests), len(case.d.requests)) == (1, 1, 0)
    case.c.answer()
    await turns()
    assert not case.d.requests
    case.b.answer()
    await turns()
    case.d.answer()
    response = await waiting
    assert first(response) == 8
    assert [times.step for times in response.steps] == ["a", "c", "b", "d"]
    assert {times.outcome for times in response.steps} == {"ok"}
    assert case.leases == 0


async def test_the_first_step_runs_the_next_request_while_the_second_runs_this_one() -> None:
    case = Case(CHAIN)
    this, following = case.send(1, rows=8), case.send(2, rows=8)
    assert len(case.a.requests) == 2, "the next request is queued before the first one ends"
    case.a.answer(0)
    await turns()
    assert [request.rows for request, _ in case.b.requests] == [8], "a request keeps its rows together"
    case.a.answer(1)
    await turns()
    assert len(case.b.requests) == 2, "the second step still holds this request"
    case.b.answer(0)
    case.b.answer(1)
    assert [first(await waiting) for waiting in (this, following)] == [4, 8]


async def test_the_outputs_of_a_step_are_the_inputs_of_the_next_without_a_copy() -> None:
    case = Case(CHAIN)
    sent = request(3)
    waiting = case.handle.infer(sent)
    assert case.a.requests[0][0].inputs["X"] is sent.inputs["x"]
    output = np.full((1, 2), 7, np.float32)
    case.a.answer(0, InferResponse({"Y": output}))
    await turns()
    assert case.b.requests[0][0].inputs["X"] is output
    case.b.answer()
    assert first(await waiting) == 14


async def test_outputs_that_only_gpus_read_may_stay_there() -> None:
    """Not those of the pipeline, nor those that a model on the CPU, a condition, a fallback or a response cache reads."""

    async def resident(
        steps: list[dict[str, Any]], gpus: str, outputs: str = "y", cached: str = ""
    ) -> dict[str, frozenset[str]]:
        case = Case(steps, outputs=outputs)
        for name, version in case.versions.items():
            if name in gpus:
                version.spec = replace(version.spec, resident_devices=frozenset({0}))
            if name in cached:
                version._cache = NO_CACHE
        case.send()
        found = {}
        while len(found) < len(steps):
            for name, version in case.versions.items():
                if version.requests and name not in found:
                    found[name] = version.requests[0][0].resident_outputs
                    version.answer()
            await turns()
        return found

    kept, none = frozenset({"Y"}), frozenset[str]()
    assert await resident(CHAIN, "ab") == {"a": kept, "b": none}
    for gpus in ("a", "b", ""):
        assert await resident(CHAIN, gpus) == {"a": none, "b": none}
    assert await resident(CHAIN, "ab", "y m") == {"a": none, "b": none}
    assert await resident(CHAIN, "ab", cached="a") == {"a": none, "b": none}
    assert await resident(CHAIN, "ab", cached="b") == {"a": none, "b": none}
    assert await resident(DIAMOND, "abcd") == {"a": kept, "b": kept, "c": kept, "d": none}
    assert await resident(DIAMOND, "abd") == {"a": none, "b": kept, "c": none, "d": none}


async def test_every_step_gets_the_attributes_of_the_request() -> None:
    case = Case(CHAIN)
    deadline_ns = NOW_NS + NS_PER_S
    case.send(id="seven", priority=2, deadline_ns=deadline_ns, client="web", parameters={"k": 1}, queue_timeout_ns=5)
    case.a.answer()
    await turns()
    for version in (case.a, case.b):
        inner = version.requests[0][0]
        assert (inner.id, inner.priority, inner.client, inner.deadline_ns) == ("seven", 2, "web", deadline_ns)
        assert (dict(inner.parameters), inner.queue_timeout_ns, inner.rows) == ({"k": 1}, 5, 1)


async def test_an_error_names_the_step_keeps_its_type_and_cancels_the_others() -> None:
    case = Case(DIAMOND)
    waiting = case.send()
    case.a.answer()
    await turns()
    error = ModelFailed("the model failed", "ref")
    case.b.answer(0, error)
    with pytest.raises(ModelFailed, match=r"^in ensemble 'e', step 'b' \(model b/1\): the model failed$") as caught:
        await waiting
    assert caught.value.reference == "ref"
    assert [(times.step, times.outcome) for times in caught.value.steps] == [("a", "ok"), ("b", "model_failed")]
    assert error.steps == ()
    assert str(error) == "the model failed"  # other requests of the batch have the same object
    assert isinstance(case.c.requests[0][1].outcome, Cancelled)
    assert (case.leases, len(case.d.requests)) == (0, 0)


@pytest.mark.parametrize("model", ["a", "b"])
async def test_a_rejected_step_settles_the_request(model: str) -> None:
    case = Case(CHAIN)
    case.versions[model].rejection = Overloaded("the queue is full", 3.5)
    waiting = case.send()
    if model == "b":
        case.a.answer()
    with pytest.raises(Overloaded, match=f"step '{model}'") as caught:
        await waiting
    assert caught.value.retry_after_s == 3.5
    assert case.leases == 0


async def test_the_deadline_ends_the_request_and_its_steps() -> None:
    case = Case(CHAIN)
    waiting = case.send(deadline_ns=NOW_NS + 20 * NS_PER_MS)
    with pytest.raises(DeadlineExceeded, match="deadline passed after"):
        await waiting
    assert isinstance(case.a.requests[0][1].outcome, DeadlineExceeded)
    with pytest.raises(DeadlineExceeded, match="before its first step"):
        case.send(deadline_ns=NOW_NS)
    assert case.leases == 0
    await turns()
    assert failures(case) == {"a": {"deadline": 1}, "b": {}}


def failures(case: Case) -> dict[str, dict[str, int]]:
    """Failures that each model counts, by reason."""
    return {name: dict(version.recorder.totals().failures) for name, version in case.versions.items()}


async def test_the_failure_of_a_step_counts_at_its_model() -> None:
    case = Case(DIAMOND)
    waiting = case.send()
    case.a.answer()
    await turns()
    case.b.answer(0, ModelFailed("the model failed"))
    with pytest.raises(ModelFailed):
        await waiting
    await turns()
    expected: dict[str, dict[str, int]] = {"a": {}, "b": {"model_failed": 1}, "c": {"cancelled": 1}, "d": {}}
    assert failures(case) == expected
    case.a.rejection = Overloaded("the queue is full")
    with pytest.raises(Overloaded):
        await case.send()
    assert failures(case) == expected | {"a": {"overloaded": 1}}


async def test_a_dropped_request_counts_once_at_the_models_of_its_running_steps() -> None:
    case = Case(DIAMOND)
    waiting = case.send()
    case.a.answer()
    await turns()
    case.b.answer()  # settled, but not passed on yet: the model has counted it as answered
    waiting.abandon()
    await turns()
    assert failures(case) == {"a": {}, "b": {}, "c": {"cancelled": 1}, "d": {}}


async def test_a_step_is_due_before_the_steps_behind_it() -> None:
    case = Case(DIAMOND)
    for name, compute_ms in (("a", 1), ("b", 10), ("c", 20), ("d", 100)):
        case.versions[name].prediction = Prediction(0, compute_ms * NS_PER_MS)
    deadline_ns = NOW_NS + NS_PER_S
    case.send(deadline_ns=deadline_ns)
    case.a.answer()
    await turns()
    due = [(deadline_ns - v.requests[0][0].due_ns) // NS_PER_MS for v in (case.a, case.b, case.c)]
    assert due == [120, 100, 100]


async def test_without_a_deadline_steps_have_no_due_time() -> None:
    case = Case(CHAIN)
    case.send()
    assert case.a.requests[0][0].due_ns == 0


async def test_an_objective_orders_the_steps() -> None:
    case = Case(CHAIN, HandlePolicy(BatchPolicy(objective_ns=50 * NS_PER_MS)))
    case.b.prediction = Prediction(0, 10 * NS_PER_MS)
    sent = request()
    case.handle.infer(sent)
    inner = case.a.requests[0][0]
    assert (inner.due_ns, inner.deadline_ns) == (sent.received_ns + 40 * NS_PER_MS, 0)


async def test_admission_sums_the_longest_path_and_names_the_slowest_step() -> None:
    case = Case(CHAIN)
    case.a.prediction, case.b.prediction = Prediction(30 * NS_PER_MS, 5 * NS_PER_MS), Prediction(0, 20 * NS_PER_MS)
    with pytest.raises(WouldMiss, match=r"complete in 55 ms, due in 50 ms; step 'a' takes 35 ms of it"):
        case.send(deadline_ns=NOW_NS + 50 * NS_PER_MS)
    assert (case.leases, len(case.a.requests)) == (0, 0)
    assert case.send(deadline_ns=NOW_NS + 200 * NS_PER_MS) is not None


async def test_queues_that_empty_meanwhile_are_not_waited_for_twice() -> None:
    case = Case(CHAIN)
    case.a.prediction, case.b.prediction = (
        Prediction(30 * NS_PER_MS, 5 * NS_PER_MS),
        Prediction(35 * NS_PER_MS, NS_PER_MS),
    )
    assert case.send(deadline_ns=NOW_NS + 45 * NS_PER_MS) is not None


async def test_rows_on_their_way_are_announced_to_later_steps() -> None:
    case = Case(CHAIN)
    case.send(rows=3)
    gone = case.send(rows=2)
    assert (case.a.announced_rows, case.b.announced_rows) == (0, 5)
    case.a.answer()
    await turns()
    assert case.b.announced_rows == 2
    gone.abandon()
    assert case.b.announced_rows == 0


async def test_an_idle_pipeline_tries_one_late_request_a_second() -> None:
    case = Case(CHAIN)
    case.a.prediction = Prediction(0, NS_PER_S)
    case.send(deadline_ns=NOW_NS + 50 * NS_PER_MS)
    case.now_ns += NS_PER_S - 1
    with pytest.raises(WouldMiss):
        case.send(deadline_ns=case.now_ns + 50 * NS_PER_MS)
    case.now_ns += 1
    case.send(deadline_ns=case.now_ns + 50 * NS_PER_MS)


async def test_all_versions_are_leased_before_the_first_step() -> None:
    case = Case(CHAIN)
    del case.members.versions["b"]
    with pytest.raises(Unavailable, match=r"in ensemble 'e', step 'b' \(model b/latest\): .*not found"):
        case.send()
    assert (case.leases, len(case.a.requests)) == (0, 0)


async def test_a_request_sees_one_version_of_each_model() -> None:
    case = Case(CHAIN)
    waiting = case.send()
    old, new = case.b, FakeVersion(spec_of("b"), case.mailbox)
    case.members.versions["b"] = new
    case.a.answer()
    await turns()
    assert (len(old.requests), len(new.requests)) == (1, 0)
    old.answer()
    await waiting
    case.send()
    case.a.answer(1)
    await turns()
    assert len(new.requests) == 1


async def test_a_version_that_no_longer_fits_is_refused() -> None:
    case = Case(CHAIN)
    case.members.versions["b"] = FakeVersion(spec_of("b", ("OTHER",)), case.mailbox)
    with pytest.raises(Unavailable, match='does not fit its models: model b has no input "X"'):
        case.send()
    assert case.leases == 0
    assert "does not fit its models" in case.handle.problem()
    case.members.versions["b"] = FakeVersion(spec_of("b"), case.mailbox)
    assert case.handle.problem() == ""
    assert case.send() is not None


async def test_a_missing_or_dead_model_is_the_problem_of_the_pipeline() -> None:
    case = Case(CHAIN)
    case.handle.admit()
    case.b.is_ready = False
    assert case.handle.problem() == "it needs model 'b', which is not served"
    with pytest.raises(Unavailable, match="step 'b'"):
        case.handle.admit()
    del case.members.versions["a"]
    with pytest.raises(Unavailable, match="it needs model 'a'"):
        case.handle.admit()
    assert (case.handle.ready, case.handle.alive) == (False, 0)


async def test_steps_that_no_output_needs_are_neither_leased_nor_run() -> None:
    case = Case([*CHAIN, step("c", {"X": "x"}, {"Y": "z"})], outputs="y z")
    leased: list[str] = []
    case.members.on_lease = leased.append
    waiting = case.send(outputs=("z",))
    assert leased == ["c"]
    case.c.answer()
    assert list((await waiting).outputs) == ["z"]


async def test_rows_quota_and_limits() -> None:
    case = Case(CHAIN, HandlePolicy(rate_limits=RateLimits({}, Quota(1, 1))), rows=4)
    with pytest.raises(BadRequest, match="has 5 rows, ensemble 'e' accepts at most 4"):
        case.send(rows=5)
    case.send()
    with pytest.raises(QuotaExceeded):
        case.send()


async def test_max_inflight_requests_bounds_each_step() -> None:
    case = Case(CHAIN, ensemble_scheduling={"step": CHAIN, "max_inflight_requests": 2})
    waiting = [case.send(value) for value in range(4)]
    assert len(case.a.requests) == 2
    waiting[2].abandon()  # waits for the step: it never starts
    case.a.answer(0)
    await turns()
    assert (len(case.a.requests), len(case.b.requests)) == (3, 1)
    assert first_input(case.a, 2) == 3
    waiting[1].abandon()  # runs the step: its place is free
    await turns()
    case.a.answer(2)
    await turns()
    for number in range(2):
        case.b.answer(number)
    assert [first(await waiting[number]) for number in (0, 3)] == [0, 12]
    assert len(case.a.requests) == 3


def first_input(version: FakeVersion, number: int) -> float:
    return float(np.asarray(version.requests[number][0].inputs["X"]).flat[0])


async def test_statistics_and_wasted_time() -> None:
    case = Case(CHAIN)
    done = case.send(rows=3)
    case.a.answer()
    await turns()
    case.b.answer()
    case.now_ns += 3000
    await done
    totals = case.recorder.totals()
    assert (totals.requests, totals.rows, totals.executions) == (1, 3, 1)
    assert (totals.assemble_ns, totals.compute_ns, totals.split_ns) == (200, 2000, 200)
    assert (totals.request_ns, totals.queue_ns) == (3000, 600)
    failed = case.send()
    case.a.answer(1)
    await turns()
    case.b.answer(1, ModelFailed("no"))
    with pytest.raises(HeadraceError):
        await failed
    assert case.recorder.totals().wasted_ns == 1000


async def test_a_thread_blocks_until_its_response() -> None:
    case = Case(CHAIN)
    blocked = asyncio.create_task(asyncio.to_thread(case.handle.infer_blocking, request(5)))
    await until_async(lambda: case.a.requests)
    case.a.answer()
    await turns()
    case.b.answer()
    assert first(await blocked) == 20
    case.a.rejection = Overloaded("full")
    with pytest.raises(Overloaded):
        await asyncio.to_thread(case.handle.infer_blocking, request(5))


async def test_closing_waits_for_the_last_request() -> None:
    case = Case(CHAIN)
    assert case.handle.lease()
    assert not case.handle.close(0.01)
    assert not case.handle.lease()
    case.handle.release()
    assert case.handle.close(60)


async def test_predictions_and_load_of_a_pipeline() -> None:
    case = Case(DIAMOND)
    for name, wait_ns, compute_ns in (("a", 1, 10), ("b", 2, 20), ("c", 30, 5), ("d", 4, 40)):
        case.versions[name].prediction = Prediction(wait_ns, compute_ns)
    prediction = case.handle.predict_ns(1, 0, 0)
    # a ends at 11, b at 31, c at 35 (its queue is longer than a), d at 75.
    assert prediction == Prediction(5, 70)
    load = case.handle.load()
    assert (load.depth, load.rows, load.instances, load.drain_ns, load.rows_hz) == (8, 12, 1, 7, 10.0)


def broken(_request: InferRequest) -> LoopCompletion:
    raise KeyError("a defect of the server")


@pytest.mark.parametrize("model", ["a", "b"])
async def test_a_defect_in_a_step_fails_the_request_with_a_reference(
    model: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(CHAIN)
    case.versions[model].infer = broken
    waiting = case.send()
    if model == "b":
        case.a.answer()
    with pytest.raises(ModelFailed, match=r"step '.' .*the server failed on this request") as caught:
        await waiting
    assert caught.value.reference
    assert caught.value.reference in caplog.text
    assert "a defect of the server" in caplog.text
    assert "a defect" not in str(caught.value)
    assert (case.leases, case.b.announced_rows) == (0, 0)


async def test_a_response_without_a_mapped_output_fails_the_request(caplog: pytest.LogCaptureFixture) -> None:
    case = Case(CHAIN)
    waiting, neighbour = case.send(), case.send(2)
    case.a.answer(0, InferResponse({}))
    case.a.answer(1)  # settled in the same pass of the loop
    with pytest.raises(ModelFailed, match="step 'a'"):
        await waiting
    await turns()
    case.b.answer()
    assert first(await neighbour) == 8
    assert case.leases == 0
    assert "KeyError" in caplog.text


async def test_a_defect_of_the_statistics_does_not_leave_the_caller_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(CHAIN)

    def fail(*_: object) -> None:
        raise RuntimeError("statistics")

    monkeypatch.setattr(case.handle.recorder, "record_pipeline", fail)
    waiting = case.send()
    case.a.answer()
    await turns()
    case.b.answer()
    assert first(await waiting) == 4
    assert case.leases == 0


async def test_a_defect_does_not_leave_a_blocked_thread_waiting() -> None:
    case = Case(CHAIN)
    case.handle.infer = broken
    errors: list[Exception] = []

    def blocked() -> None:
        try:
            case.handle.infer_blocking(request(5))
        except KeyError as error:
            errors.append(error)

    thread = threading.Thread(target=blocked, daemon=True)  # a regression blocks it for ever
    thread.start()
    await until_async(lambda: not thread.is_alive())
    assert len(errors) == 1


async def test_a_long_queue_at_a_limit_that_is_rejected_at_once_fails_every_request() -> None:
    case = Case(CHAIN, ensemble_scheduling={"step": CHAIN, "max_inflight_requests": 1})
    waiting = [case.send() for _ in range(3000)]
    case.a.rejection = Overloaded("full")
    case.a.answer()
    await turns()
    outcomes = await asyncio.gather(*(asyncio.ensure_future(_awaited(each)) for each in waiting[1:]))
    assert {type(outcome) for outcome in outcomes} == {Overloaded}
    case.b.answer()
    assert first(await waiting[0]) == 4
    assert case.leases == 0
    case.a.rejection = None
    case.send()
    assert len(case.a.requests) == 2  # the limit is free again


async def _awaited(completion: LoopCompletion) -> object:
    try:
        return await completion
    except HeadraceError as error:
        return error


async def test_a_request_that_is_cancelled_at_a_limit_releases_its_inputs() -> None:
    case = Case(CHAIN, ensemble_scheduling={"step": CHAIN, "max_inflight_requests": 1})
    case.send()
    sent = request(2)
    alive = weakref.ref(sent.inputs["x"])
    waiting = case.handle.infer(sent)
    waiting.abandon()
    del sent, waiting
    await turns()
    assert alive() is None
    assert len(case.a.requests) == 1


async def test_a_cancelled_request_releases_the_outputs_of_its_steps() -> None:
    case = Case(CHAIN)
    waiting = case.send()
    output = np.full((1, 2), 7, np.float32)
    alive = weakref.ref(output)
    case.a.answer(0, InferResponse({"Y": output}))
    del output
    case.a.requests.clear()
    await turns()
    assert alive() is not None
    waiting.abandon()
    await turns()
    assert isinstance(case.b.requests[0][1].outcome, Cancelled)
    case.b.requests.clear()
    del waiting
    await turns()
    assert alive() is None
    assert case.leases == 0


async def test_a_pipeline_within_a_pipeline_is_due_before_the_steps_behind_it() -> None:
    case = Case(CHAIN)
    case.b.prediction = Prediction(0, 10 * NS_PER_MS)
    deadline_ns, due_ns = NOW_NS + NS_PER_S, NOW_NS + 100 * NS_PER_MS
    case.send(deadline_ns=deadline_ns, due_ns=due_ns)
    inner = case.a.requests[0][0]
    assert (inner.due_ns, inner.deadline_ns) == (due_ns - 10 * NS_PER_MS, deadline_ns)
    case.b.prediction = Prediction(0, 200 * NS_PER_MS)
    case.send(deadline_ns=deadline_ns, due_ns=due_ns)  # one request a second is tried
    with pytest.raises(WouldMiss, match="due in"):
        case.send(deadline_ns=deadline_ns, due_ns=due_ns)
