"""Requests with several rows of a pipeline with `each`: every row runs alone, and the results are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    ModelFailed,
    Overloaded,
    WouldMiss,
)
from headrace.core.request import InferResponse
from headrace.core.tensor import FP32, Array, ModelSpec, TensorSpec
from headrace.inference.pipelines.graph import check_members
from headrace.inference.pipelines.row_runs import MAX_RUNNING_ROWS, join_rows
from headrace.inference.scheduling.version_handle import Prediction

from tests.support.fake_versions import FakeVersion
from tests.unit.inference.pipelines.test_run import NOW_NS, turns
from tests.unit.inference.pipelines.test_run_branches import DESCRIBE, DETECT, YamlCase, answer

STEPS = {"detect": DETECT, "describe": {**DESCRIBE, "each": "found"}}


def each_case(rows: int = 8, steps: dict[str, Any] = STEPS) -> YamlCase:
    """A detector with batches whose boxes (n, 2) go to a second model; its dims are those of `spec_of`, its answers are not."""
    return YamlCase(steps, dims=(-1, 2), rows=rows)


def boxes(count: int, value: float = 1) -> Array:
    """Boxes of one row as a model with batches returns them."""
    return np.arange(count * 2, dtype=np.float32).reshape(1, count, 2) + value


def answer_rows(version: FakeVersion, counts: Sequence[int], first: int = 0) -> None:
    """Answer the requests of the rows with boxes of these counts, each row with values of its own."""
    for row, count in enumerate(counts, first):
        version.answer(row, InferResponse({"Y": boxes(count, 10 * row)}))


async def test_every_row_is_a_request_of_its_own_and_the_results_are_joined() -> None:
    case = each_case()
    waiting = case.send(3, rows=3, id="seven", client="web", size_bytes=24)
    sent = [request for request, _ in case.detect.requests]
    assert [(request.rows, request.inputs["X"].tolist()) for request in sent] == [(1, [[3, 3]])] * 3
    assert [(request.id, request.client) for request in sent] == [("seven", "web")] * 3
    answer_rows(case.detect, [2, 2, 2])
    await turns()
    assert [request.rows for request, _ in case.describe.requests] == [2, 2, 2]
    for row in (2, 0, 1):  # in any order
        case.describe.answer(row)
    response = await waiting
    expected = np.stack([boxes(2, 10 * row)[0] * 2 for row in range(3)])
    assert response.outputs["y"].tolist() == expected.tolist()
    assert [(times.step, times.outcome) for times in response.steps] == [("detect", "ok"), ("describe", "ok")] * 3
    assert case.handle.recorder.totals().rows == 3
    assert (case.handle.recorder.totals().requests, case.leases, case.handle.in_flight) == (1, 0, 0)


async def test_one_row_keeps_its_batch_dimension_without_a_copy() -> None:
    case = each_case()
    waiting = case.send(rows=1)
    answer_rows(case.detect, [3])
    await turns()
    result = np.ones((3, 2), np.float32)
    answer(case.describe, result)
    joined = (await waiting).outputs["y"]
    assert joined.shape == (1, 3, 2)
    assert np.shares_memory(joined, result)


async def test_rows_without_elements_are_joined_and_skip_the_model() -> None:
    case = each_case()
    waiting = case.send(rows=2)
    answer_rows(case.detect, [0, 0])
    await turns()
    assert (await waiting).outputs["y"].shape == (2, 0, 2)
    assert (case.describe.requests, case.leases) == ([], 0)


@pytest.mark.parametrize(
    ("counts", "shapes"), [([2, 3], r"\[2, 2\] for row 0 and \[3, 2\] for row 1"), ([1, 1, 0], "row 2")]
)
async def test_rows_with_results_of_different_shapes_are_refused(counts: list[int], shapes: str) -> None:
    case = each_case()
    waiting = case.send(rows=len(counts))
    answer_rows(case.detect, counts)
    await turns()
    for number in range(len(case.describe.requests)):
        case.describe.answer(number)
    with pytest.raises(BadRequest, match=f"^in pipeline 'p', output 'y' has shape .*{shapes}") as caught:
        await waiting
    assert len(caught.value.steps) == 2 * len(counts)
    assert case.leases == 0


async def test_the_elements_of_all_rows_are_bounded_together() -> None:
    case = each_case()
    waiting = case.send(rows=3)
    answer_rows(case.detect, [2000, 2000, 97])
    with pytest.raises(
        BadRequest, match=r"row 2 of the request: in pipeline 'p', step 'describe' .* 4096 rows in all rows"
    ):
        await waiting
    assert case.leases == 0
    waiting = case.send(rows=3)
    answer_rows(case.detect, [2000, 2000, 96], first=3)
    await turns()
    assert [request.rows for request, _ in case.describe.requests[-3:]] == [2000, 2000, 96]
    waiting.abandon()


async def test_an_error_of_a_row_ends_the_request_and_cancels_the_others() -> None:
    case = each_case()
    waiting = case.send(rows=3)
    answer_rows(case.detect, [1])
    failure = ModelFailed("broken")
    case.detect.requests[1][1].settle(failure)
    with pytest.raises(
        ModelFailed, match=r"^row 1 of the request: in pipeline 'p', step 'detect' .*: broken$"
    ) as caught:
        await waiting
    assert str(failure) == "broken"  # requests of one batch share it
    assert {"ok", failure.reason} == {times.outcome for times in caught.value.steps}
    await turns()
    assert isinstance(case.detect.requests[2][1].outcome, Cancelled)
    assert isinstance(case.describe.requests[0][1].outcome, Cancelled)
    assert (case.leases, case.handle.in_flight) == (0, 0)
    assert (case.detect.announced_rows, case.describe.announced_rows) == (0, 0)


async def test_a_rejected_row_settles_the_request() -> None:
    case = each_case()
    case.detect.rejection = Overloaded("full")
    with pytest.raises(Overloaded, match=r"row 0 of the request: in pipeline 'p', step 'detect' .*: full"):
        await case.send(rows=4)
    assert (case.leases, case.detect.requests) == (0, [])


async def test_a_cancelled_request_leaves_the_queues_of_all_rows() -> None:
    case = each_case()
    waiting = case.send(rows=3)
    answer_rows(case.detect, [1])
    await turns()
    waiting.abandon()
    await turns()
    left = [*case.detect.requests[1:], *case.describe.requests]
    assert [type(completion.outcome) for _, completion in left] == [Cancelled] * 3
    assert (case.leases, case.handle.in_flight) == (0, 0)


async def test_the_deadline_ends_all_rows_and_is_that_of_every_step() -> None:
    case = each_case()
    deadline_ns = NOW_NS + 20 * NS_PER_MS
    waiting = case.send(rows=2, deadline_ns=deadline_ns)
    assert {request.deadline_ns for request, _ in case.detect.requests} == {deadline_ns}
    with pytest.raises(DeadlineExceeded, match="deadline passed after"):
        await waiting
    await turns()
    assert all(completion.is_settled for _, completion in case.detect.requests)
    assert (case.leases, case.handle.in_flight) == (0, 0)
    assert dict(case.detect.recorder.totals().failures) == {"deadline": 2}


async def test_a_model_without_batches_is_predicted_to_run_once_for_each_row() -> None:
    case = each_case()
    case.detect.spec = ModelSpec(
        "detect", "1", "test", {"X": TensorSpec("X", FP32, (2,))}, {"Y": TensorSpec("Y", FP32, (-1, 2))}, 0
    )
    case.detect.prediction = Prediction(0, 10 * NS_PER_MS)
    assert case.handle.predict_ns(1, 0, NOW_NS).compute_ns == 10 * NS_PER_MS
    assert case.handle.predict_ns(4, 0, NOW_NS).compute_ns == 40 * NS_PER_MS
    case.send(rows=4, deadline_ns=NOW_NS + NS_PER_S)
    case.send(rows=4, deadline_ns=NOW_NS + 30 * NS_PER_MS)  # one request a second is tried
    with pytest.raises(WouldMiss):
        case.send(rows=4, deadline_ns=NOW_NS + 30 * NS_PER_MS)


async def test_many_rows_start_as_others_end() -> None:
    case = each_case(rows=4096)
    count = MAX_RUNNING_ROWS + 10
    waiting = case.send(rows=count)
    assert len(case.detect.requests) == MAX_RUNNING_ROWS
    answer_rows(case.detect, [0] * 5)
    await turns()
    assert len(case.detect.requests) == MAX_RUNNING_ROWS + 5
    answer_rows(case.detect, [0] * (MAX_RUNNING_ROWS - 5), first=5)
    await turns()
    assert len(case.detect.requests) == count
    answer_rows(case.detect, [0] * 10, first=MAX_RUNNING_ROWS)
    assert (await waiting).outputs["y"].shape == (count, 0, 2)


async def test_conditions_are_those_of_the_row() -> None:
    steps = {**STEPS, "describe": {**STEPS["describe"], "when": "found.max > 5"}}
    case = each_case(steps=steps)
    waiting = case.send(rows=2)
    case.detect.answer(0, InferResponse({"Y": np.full((1, 2, 2), 9, np.float32)}))
    case.detect.answer(1, InferResponse({"Y": np.zeros((1, 2, 2), np.float32)}))
    await turns()
    assert len(case.describe.requests) == 1
    case.describe.answer()
    with pytest.raises(BadRequest, match=r"has shape \[2, 2\] for row 0 and \[0, 2\] for row 1"):
        await waiting
    waiting = case.send(rows=2)
    for number in (2, 3):
        case.detect.answer(number, InferResponse({"Y": np.zeros((1, 2, 2), np.float32)}))
    assert (await waiting).outputs["y"].shape == (2, 0, 2)


async def test_large_results_are_copied_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(is_cancelled: bool) -> None:
        case = each_case()
        loop = asyncio.get_running_loop()
        used: list[bool] = []
        run = loop.run_in_executor

        def spy(*args: Any) -> Any:
            used.append(True)
            return run(*args)

        monkeypatch.setattr(loop, "run_in_executor", spy)
        waiting = case.send(rows=2)
        answer_rows(case.detect, [1, 1])
        await turns()
        large = np.arange(1 << 18, dtype=np.float32).reshape(-1, 2)
        for number in range(2):
            case.describe.answer(number, InferResponse({"Y": large + number}))
        if is_cancelled:
            await turns(1)
            waiting.abandon()
            with pytest.raises(Cancelled):
                await waiting
        else:
            assert np.array_equal((await waiting).outputs["y"], np.stack([large, large + 1]))
            assert used == [True]
        assert case.leases == 0

    await scenario(False)
    await scenario(True)


async def test_a_defect_fails_the_request_with_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("headrace.inference.pipelines.row_runs.join_rows", broken)
    case = each_case()
    waiting = case.send(rows=2)
    answer_rows(case.detect, [0, 0])
    with pytest.raises(ModelFailed, match="its log has the cause"):
        await waiting
    assert case.leases == 0


def test_texts_are_joined() -> None:
    texts = np.array([b"a", b"bc"], np.object_)
    assert join_rows("", [{"t": texts}, {"t": texts}])["t"].tolist() == [[b"a", b"bc"]] * 2


async def test_the_shapes_of_each_are_checked_on_load() -> None:
    """A step with `each` reads tensors whose dims have the rows in front, of models with batches and without."""

    case = each_case()
    graph = case.handle.graph

    def detector(dims: tuple[int, ...], rows: int) -> ModelSpec:
        shape, x = ((-1, *dims), (-1, 2)) if rows else (dims, (2,))
        return ModelSpec(
            "detect", "1", "test", {"X": TensorSpec("X", FP32, x)}, {"Y": TensorSpec("Y", FP32, shape)}, rows
        )

    def messages(spec: ModelSpec) -> list[str]:
        return [problem.message for problem in check_members(graph, case.config, {0: spec, 1: case.describe.spec})]

    assert messages(detector((-1, 2), 8)) == []
    assert messages(detector((-1, 2), 2)) == []  # each row runs alone: fewer rows are enough
    assert messages(detector((-1, 2), 0)) == []
    assert messages(detector((-1, 3), 8)) == [
        'tensor "found" has dims [-1, 3] as output "Y" of model detect, [2] or [-1, 2] as input "X" of model describe'
    ]
    assert messages(detector((-1, 5, 2), 8)) != []
