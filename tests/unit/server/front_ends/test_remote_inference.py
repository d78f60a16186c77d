"""Requests through a front end are answered as in one process: bodies, statuses, headers, counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import uvloop
from headrace.core.cache_options import CacheOptions
from headrace.core.clock import monotonic_ns
from headrace.core.errors import BadRequest, Cancelled, NotFound, Unavailable
from headrace.core.request import InferRequest, InferResponse
from headrace.core.shapes import CheckedShapes
from headrace.core.tensor import as_input
from headrace.server.front_ends import frames
from headrace.server.front_ends.remote_models import RemoteHandle, RemoteModels
from headrace.server.front_ends.remote_regions import RegionRange, RemoteRegions, rows_in_engine
from onnx import TensorProto

from tests.support import models
from tests.support.front_end_pair import Pair, open_pair, over_http
from tests.support.onnx_models import identity_model
from tests.support.python_models import ADD_SUB, ADD_SUB_CONFIG, ERRORS, ERRORS_CONFIG, add_python_model
from tests.support.waiting import until_async

BATCHES = "max_batch_size: 8"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    models.add_model(folder, "affine", models.affine(), config=BATCHES)
    models.add_model(folder, "pair", models.sum_difference(), config=BATCHES)
    models.add_model(folder, "unbatched", models.unbatched())
    text = identity_model({"x": (TensorProto.STRING, ["batch", 2])}, {"y": (TensorProto.STRING, ["batch", 2])})
    models.add_model(folder, "text", text, config=BATCHES)
    wide = identity_model({"x": (TensorProto.FLOAT16, ["batch", "n"])}, {"y": (TensorProto.FLOAT16, ["batch", "n"])})
    models.add_model(folder, "wide", wide, config=BATCHES)
    large = identity_model({"x": (TensorProto.FLOAT, ["batch", 20_000])}, {"y": (TensorProto.FLOAT, ["batch", 20_000])})
    models.add_model(folder, "large", large, config=BATCHES)
    models.add_model(folder, "means", models.channel_means(64, 64), config=BATCHES)
    models.add_model(folder, "bias", models.optional_bias(), config=BATCHES)
    models.add_model(folder, "cached", models.affine(), config=BATCHES + "\nresponse_cache { enable: true }")
    models.add_model(folder, "scores", models.scores(), config=BATCHES)
    step = ("affine", {"x": "x"}, {"y": "y"})
    spec = onnx.load_from_string(models.affine().SerializeToString())
    (given,), (result,) = spec.graph.input, spec.graph.output
    step = ("affine", {given.name: "IN"}, {result.name: "OUT"})
    ensemble = models.ensemble_config([step], {"IN": ("TYPE_FP32", [16])}, {"OUT": ("TYPE_FP32", [4])})
    models.add_pipeline(folder, "steps", ensemble)
    add_python_model(folder, "code", ADD_SUB, ADD_SUB_CONFIG)
    add_python_model(folder, "errors", ERRORS, ERRORS_CONFIG)
    return folder


@pytest.fixture
def run(repository: Path) -> Callable[..., Any]:
    """Runs a test with the data plane and its front ends."""

    def runner(test: Callable[[Pair], Coroutine[Any, Any, Any]], **options: Any) -> Any:
        async def main() -> Any:
            async with open_pair(repository, cache_config=CacheOptions(1 << 20), **options) as pair:
                return await test(pair)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())

    return runner


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": array.reshape(-1).tolist()}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def binary(name: str, array: np.ndarray[Any, Any], datatype: str, **more: Any) -> tuple[bytes, dict[str, str]]:
    parameters = {"binary_data_size": array.nbytes}
    head = {"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": parameters}
    header = json.dumps({"inputs": [head], "parameters": {"binary_data_output": True}, **more}).encode()
    return header + array.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


ROWS = np.arange(3 * 16, dtype=np.float32).reshape(3, 16) / 7
MANY = np.arange(50 * 16, dtype=np.float32).reshape(50, 16) / 7
STATUSES = {
    "Python model with an error": 404,
    "deadline in the past": 504,
    "wrong shape": 400,
    "unknown input": 400,
    "no JSON": 400,
    "wrong header": 400,
    "unknown output": 400,
}


def requests(names: dict[str, str]) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Requests by what they show: model, body, headers; `names` has the first input of each model."""

    def of(model: str, array: np.ndarray[Any, Any], datatype: str = "FP32", **more: Any) -> tuple[str, bytes]:
        return model, body(tensor(names[model], array, datatype), **more)

    four = np.array([[1, 2, 3, 4]], np.float32)
    integers = four.astype(np.int32)
    pair = body(tensor("A", integers, "INT32"), tensor("B", four * 2, "FP32"))
    code = body(tensor("INPUT0", four[0], "FP32"), tensor("INPUT1", four[0] * 2, "FP32"))
    text = {"name": names["text"], "datatype": "BYTES", "shape": [2, 2], "data": ["a", "", "ümlaut", "x" * 500]}
    return {
        "JSON": (*of("affine", ROWS), {}),
        "request id": (*of("affine", ROWS, id="mine"), {}),
        "binary": ("affine", *binary(names["affine"], ROWS, "FP32")),
        "larger than a batch": ("affine", *binary(names["affine"], MANY, "FP32")),
        "many parts of a batch": (*of("scores", np.zeros((2000, 5), np.float32)), {}),
        "no batch dimension": (*of("unbatched", np.ones((2, 3), np.float32)), {}),
        "two inputs and outputs": ("pair", pair, {}),
        "BYTES": ("text", body(text), {}),
        "dynamic shapes": ("wide", *binary(names["wide"], np.ones((2, 9), np.float16), "FP16")),
        "no elements": ("wide", *binary(names["wide"], np.ones((2, 0), np.float16), "FP16")),
        "pipeline": (*of("steps", ROWS), {}),
        "pipeline with an option": (*of("steps", ROWS, parameters={"priority": 1}), {}),
        "Python model": ("code", code, {}),
        "Python model with an error": (*of("errors", np.array([[2]], np.int32), "INT32"), {}),
        "Python model without an error": (*of("errors", np.array([[-1]], np.int32), "INT32"), {}),
        "parameters": (*of("affine", ROWS, parameters={"mine": 1, "other": "two", "third": True}), {}),
        "priority": (*of("affine", ROWS, parameters={"priority": 2, "timeout": 10_000_000}), {}),
        "deadline in the past": (*of("affine", ROWS, parameters={"headrace_deadline_us": 1}), {}),
        "wrong shape": (*of("affine", np.zeros((1, 3), np.float32)), {}),
        "unknown input": ("affine", body(tensor("nothing", ROWS, "FP32")), {}),
        "no JSON": ("affine", b"{", {}),
        "client": (*of("affine", ROWS), {"X-Client-Id": "one"}),
        "wrong header": (*of("affine", ROWS), {"X-Request-Timeout-Ms": "soon"}),
        "classification": (
            *of(
                "scores",
                np.eye(5, dtype=np.float32)[:2],
                outputs=[{"name": "SCORES", "parameters": {"classification": 2}}],
            ),
            {},
        ),
        "unknown output": (*of("affine", ROWS, outputs=[{"name": "nothing"}]), {}),
    }


def first_inputs(pair: Pair) -> dict[str, str]:
    return {handle.spec.name: next(iter(handle.spec.inputs)) for _, handle in pair.plane.registry.selections()}


def test_answers_equal_those_of_one_process(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        for subject, (model, content, headers) in requests(first_inputs(pair)).items():
            local = await over_http(pair.plane.registry, model, content, headers)
            remote = await over_http(pair.front_ends[0], model, content, headers)
            assert local[0] == STATUSES.get(subject, 200), (subject, local)
            if subject == "deadline in the past":  # the text has a time
                assert remote[0] == 504
                continue
            assert remote == local, subject

    run(test)


def test_timing_headers_name_the_phases(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        content = body(tensor(first_inputs(pair)["affine"], ROWS, "FP32"))
        local = await over_http(pair.plane.registry, "affine", content, {"Headrace-Timing": "1"})
        remote = await over_http(pair.front_ends[0], "affine", content, {"Headrace-Timing": "1"})
        assert remote[1].keys() == local[1].keys()
        phases = [part.partition(";")[0] for part in remote[1]["server-timing"].split(", ")]
        assert "compute" in phases

    run(test)


def infer_request(handle: Any, rows: np.ndarray[Any, Any]) -> InferRequest:
    return InferRequest(
        inputs={next(iter(handle.spec.inputs)): rows}, rows=len(rows), shape_key=None, received_ns=monotonic_ns()
    )


def test_a_response_cache_answers(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        handle = pair.front_ends[0].lease("cached", "")
        first = await handle.infer(infer_request(handle, ROWS))
        second = await handle.infer(infer_request(handle, ROWS))
        handle.release()
        assert (first.cached, second.cached) == (False, True)
        for name, array in first.outputs.items():
            np.testing.assert_array_equal(array, second.outputs[name])

    run(test)


def test_a_cancelled_request_is_counted_as_undelivered_or_never_runs(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end, local = pair.front_ends[0], pair.plane.registry.serving("affine", "")
        assert local is not None
        handle = front_end.lease("affine", "")
        cancelled, answered = (handle.infer(infer_request(handle, ROWS)) for _ in range(2))
        await asyncio.sleep(0)
        assert cancelled.abandon()
        await answered
        with pytest.raises(Cancelled):
            await cancelled
        handle.record_failure(Cancelled("gone"), monotonic_ns())
        handle.release()
        front_end.flush_counts()
        await until_async(lambda: bool(local.recorder.totals().failures))
        totals = local.recorder.totals()
        assert (totals.successes, dict(totals.failures)) == (1, {"cancelled": 1})
        assert not front_end.in_flight

    run(test)


def test_requests_of_one_turn_are_one_group_and_counted_one_by_one(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end, local = pair.front_ends[0], pair.plane.registry.serving("affine", "")
        assert local is not None
        handle = front_end.lease("affine", "")
        requests = [infer_request(handle, ROWS[: 1 + number % 2] + number) for number in range(5)]
        completions = [handle.infer(request) for request in requests]
        await asyncio.sleep(0)
        assert front_end.in_flight == 1
        for request, completion in zip(requests, completions, strict=True):
            alone = local.infer(request)
            for name, array in (await alone).outputs.items():
                np.testing.assert_allclose((await completion).outputs[name], array, rtol=1e-6)
        handle.release()
        totals = local.recorder.totals()
        assert (totals.successes, totals.rows) == (10, 14)
        await until_async(lambda: not local.in_flight)

    run(test)


def test_large_tensors_go_through_the_arena_and_leave_it(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end = pair.front_ends[0]
        handle = front_end.lease("large", "")

        async def one(number: int) -> None:
            rows = np.full((2, 20_000), number, np.float32)
            if number % 2:  # as a body that was received into a slot
                memory = front_end.allocate_body(rows.nbytes + 13, 13)
                memory[13:] = rows.reshape(-1).view(np.uint8)
                rows = memory[13:].view(np.float32).reshape(rows.shape)
                del memory
            request = infer_request(handle, rows)
            request.size_bytes = rows.nbytes
            response = await handle.infer(request)
            np.testing.assert_array_equal(response.outputs["y"], rows)

        await asyncio.gather(*(one(number) for number in range(1, 14)))
        assert front_end.arena_bytes_in_use >= 0
        handle.release()
        await until_async(lambda: front_end.arena_bytes_in_use == 0)

    run(test)


def picture(value: float, rows: int = 1) -> np.ndarray[Any, Any]:
    """Rows of 49,152 bytes each for the model "means", whose outputs are the value."""
    return np.full((rows, 3, 64, 64), value, np.float32)


def received(front_end: RemoteModels, rows: np.ndarray[Any, Any], head_bytes: int) -> np.ndarray[Any, Any]:
    """The same rows in a slot of the arena, behind a header, as a body that a front end has received."""
    memory = front_end.allocate_body(rows.nbytes + head_bytes, head_bytes)
    memory[head_bytes:] = rows.reshape(-1).view(np.uint8)
    return memory[head_bytes:].view(rows.dtype).reshape(rows.shape)


def test_large_requests_of_one_turn_are_one_group_whose_rows_stay_in_their_slots(run: Callable[..., Any]) -> None:
    """More rows than a batch has room for, so that the group is split; all are answered and counted each by itself."""

    async def test(pair: Pair) -> None:
        front_end, local = pair.front_ends[0], pair.plane.registry.serving("means", "")
        assert local is not None
        handle = front_end.lease("means", "")
        for sizes, groups in (([1] * 6, 1), ([2, 2, 2], 1), ([1, 2, 1, 2, 1], 2), ([1] * 19, 3)):
            rows = [picture(1 + number, count) for number, count in enumerate(sizes)]
            requests = [infer_request(handle, received(front_end, each, 13)) for each in rows]
            for request, each in zip(requests, rows, strict=True):
                request.size_bytes = each.nbytes
            completions = [handle.infer(request) for request in requests]
            del requests, request
            await asyncio.sleep(0)
            assert front_end.in_flight == groups
            for completion, each in zip(completions, rows, strict=True):
                np.testing.assert_allclose((await completion).outputs["LOGITS"], each[:, :, 0, 0], rtol=1e-5)
            await until_async(lambda: front_end.arena_bytes_in_use == 0)
        handle.release()
        totals = local.recorder.totals()
        assert (totals.successes, totals.rows) == (6 + 3 + 5 + 19, 6 + 6 + 7 + 19)
        await until_async(lambda: not local.in_flight)

    run(test)


def test_large_requests_are_sent_one_by_one_while_the_arena_is_full(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end = pair.front_ends[0]
        handle = front_end.lease("means", "")
        held = [front_end.allocate_body(64 << 20) for _ in range(3)]
        held += [front_end.allocate_body(size << 20) for size in (32, 16, 8)]  # 8 MiB are left: 32 slots
        requests = [infer_request(handle, picture(number, 4)) for number in range(40)]
        for request in requests:
            request.size_bytes = 4 * 49_152
        completions = [handle.infer(request) for request in requests]
        await asyncio.sleep(0)
        assert front_end.in_flight == 16 + 8
        for number, completion in enumerate(completions):
            np.testing.assert_allclose((await completion).outputs["LOGITS"], np.full((4, 3), number), rtol=1e-5)
        assert len(held) == 6  # alive until here
        handle.release()

    run(test)


def test_a_front_end_that_ends_releases_the_slots_of_its_groups(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end, local = pair.front_ends[0], pair.plane.registry.serving("means", "")
        assert local is not None
        handle = front_end.lease("means", "")
        requests = [infer_request(handle, picture(1)) for _ in range(6)]
        for request in requests:
            request.size_bytes = 49_152
        completions = [handle.infer(request) for request in requests]
        await asyncio.sleep(0)
        for completion in completions[:5]:
            completion.abandon()
        pair.engine.detach(0)
        for completion in completions:
            with pytest.raises((Unavailable, Cancelled)):
                await completion
        handle.release()
        await until_async(lambda: not local.in_flight)
        await pair.attach(0)
        handle = front_end.lease("means", "")
        again = [infer_request(handle, picture(number)) for number in range(3)]
        for request in again:
            request.size_bytes = 49_152
        for number, completion in enumerate([handle.infer(request) for request in again]):
            np.testing.assert_allclose((await completion).outputs["LOGITS"], np.full((1, 3), number), rtol=1e-5)
        handle.release()
        del again, request, requests
        await until_async(lambda: front_end.arena_bytes_in_use == 0)

    run(test)


def test_requests_larger_than_the_arena_go_with_the_frame(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end = pair.front_ends[0]
        handle = front_end.lease("large", "")
        held = [front_end.allocate_body(64 << 20) for _ in range(4)]
        request = infer_request(handle, np.full((2, 20_000), 7, np.float32))
        request.size_bytes = 160_000
        response = await handle.infer(request)
        np.testing.assert_array_equal(response.outputs["y"], np.full((2, 20_000), 7, np.float32))
        assert len(held) == 4
        handle.release()

    run(test)


def test_many_texts_go_with_the_frame(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        handle = pair.front_ends[0].lease("text", "")
        texts = np.array([str(number).encode() for number in range(2 * 5_000)], object).reshape(5_000, 2)
        requests = [infer_request(handle, texts[start : start + 5_000]) for start in (0, 0)]
        for request in requests:
            request.size_bytes = 90_000
        completions = [handle.infer(request) for request in requests]
        for completion in completions:
            np.testing.assert_array_equal((await completion).outputs["y"], texts)
        handle.release()

    run(test)


def shared(name: str, region: str, offset: int, size: int, **more: Any) -> dict[str, Any]:
    """A tensor in a region of shared memory."""
    parameters = {
        "shared_memory_region": region,
        "shared_memory_offset": offset,
        "shared_memory_byte_size": size,
    }
    return {"name": name, "parameters": parameters, **more}


def region_requests(name: str, output: str) -> dict[int, list[tuple[dict[str, Any], dict[str, Any] | None]]]:
    """Input and requested output of requests with the regions "in" and "out" of 2048 bytes, by the status of their answer."""
    given, size = {"datatype": "FP32", "shape": [3, 16]}, ROWS.nbytes
    good, to_region = shared(name, "in", 0, size, **given), shared(output, "out", 64, 512)
    return {
        200: [
            (good, None),
            (good, to_region),
            (tensor(name, ROWS, "FP32"), to_region),
            (shared(name, "in", 4, size, **given), to_region),
        ],
        400: [
            (shared(name, "in", 2000, size, **given), None),
            (shared(name, "in", 0, size - 4, **given), None),
            (good, shared(output, "out", 2000, 512)),
            (good, shared(output, "out", 0, 8)),
        ],
        404: [(shared(name, "none", 0, size, **given), None), (good, shared(output, "none", 0, 512))],
    }


@contextmanager
def client_memory(pair: Pair) -> Iterator[memoryview]:
    """4096 bytes of a client: the region "in" with `ROWS`, then the region "out"."""
    memory = SharedMemory(create=True, size=4096)
    try:
        pair.regions.register_system("in", memory.name, 0, 2048)
        pair.regions.register_system("out", memory.name, 2048, 2048)
        memory.buf[: ROWS.nbytes] = ROWS.tobytes()
        yield memory.buf
    finally:
        memory.close()
        memory.unlink()


def in_region(handle: RemoteHandle, region: str, offset: int) -> InferRequest:
    """A request with an input of the size of `ROWS` in a region, as a front end reads it."""
    rows = rows_in_engine(RegionRange(region, offset, ROWS.nbytes), ROWS.dtype, ROWS.shape)
    return infer_request(handle, as_input(rows))


def test_requests_in_shared_memory_of_one_turn_are_one_group(run: Callable[..., Any]) -> None:
    """Each is answered by itself, also if others name memory that is not there; no memory is used after its registration."""

    async def test(pair: Pair) -> None:
        front_end, local = pair.front_ends[0], pair.plane.registry.serving("affine", "")
        assert local is not None
        handle = front_end.lease("affine", "")
        (output,) = handle.spec.outputs
        with client_memory(pair) as memory:
            memory[2048 : 2048 + ROWS.nbytes] = (ROWS + 1).tobytes()

            async def outcomes(*ranges: tuple[str, int]) -> list[Any]:
                completions = [handle.infer(in_region(handle, *each)) for each in ranges]
                await asyncio.sleep(0)
                assert front_end.in_flight == 1
                return await asyncio.gather(*map(settled, completions), return_exceptions=True)

            async def settled(completion: Any) -> Any:
                return (await completion).outputs[output]

            async def expected(rows: Any) -> Any:
                return (await local.infer(infer_request(handle, rows))).outputs[output]

            first, second = await expected(ROWS), await expected(ROWS + 1)
            for answers in (await outcomes(("in", 0)), await outcomes(("in", 0), ("out", 0))):
                for answer, rows in zip(answers, (first, second), strict=False):
                    np.testing.assert_allclose(answer, rows, rtol=1e-6)
            for wrong, error in (("none", 0), NotFound), (("in", 2000), BadRequest):
                answers = await outcomes(wrong, ("out", 0))
                assert isinstance(answers[0], error)
                np.testing.assert_allclose(answers[1], second, rtol=1e-6)
            assert [type(each) for each in await outcomes(("none", 0))] == [NotFound]
            name = pair.regions.registered()[0][2][0]
            pair.regions.unregister("system", "in")
            assert [type(each) for each in await outcomes(("in", 0))] == [NotFound]
            pair.regions.register("system", "in", (name, 2048, 2048))
            for answer in await outcomes(("in", 0), ("in", 0)):
                np.testing.assert_allclose(answer, second, rtol=1e-6)
        handle.release()
        await until_async(lambda: not local.in_flight)

    run(test)


def test_the_engine_reads_and_writes_shared_memory_of_clients(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        handle, front_end = pair.plane.registry.serving("affine", ""), pair.front_ends[0]
        assert handle is not None
        (output,) = handle.spec.outputs
        with client_memory(pair) as memory:
            for status, requests in region_requests(first_inputs(pair)["affine"], output).items():
                for source, target in requests:
                    content = body(source, **({} if target is None else {"outputs": [target]}))
                    answers, written = [], []
                    for models_, regions in ((pair.plane.registry, pair.regions), (front_end, RemoteRegions())):
                        memory[2048:] = bytes(2048)
                        answers.append(await over_http(models_, "affine", content, regions=regions))  # type: ignore[arg-type]
                        written.append(bytes(memory[2048:]))
                    assert answers[0][0] == status, answers
                    assert answers[0] == answers[1]
                    assert written[0] == written[1]
                    assert any(written[0]) == (status == 200 and target is not None)
        front_end.flush_counts()
        await until_async(lambda: sum(handle.recorder.totals().failures.values()) == 12)
        # The output that is larger than its range was computed, by both.
        totals = handle.recorder.scraped_totals()
        assert totals.successes == 8
        assert not handle.in_flight
        assert front_end.serves_regions("affine", "")
        assert not front_end.serves_regions("text", "")

    run(test)


def test_without_an_engine_requests_are_refused_and_served_again_later(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end = pair.front_ends[0]
        handle = front_end.lease("affine", "")
        waiting = handle.infer(infer_request(handle, ROWS))
        await asyncio.sleep(0)
        pair.engine.detach(0)
        with pytest.raises(Unavailable) as lost:
            await waiting
        assert lost.value.retry_after_s > 0
        with pytest.raises(Unavailable):
            handle.infer(infer_request(handle, ROWS))
        handle.release()
        local = pair.plane.registry.serving("affine", "")
        assert local is not None
        await until_async(lambda: not local.in_flight)
        pair.apply_table()
        await pair.attach(0)
        again = front_end.lease("affine", "")
        assert isinstance(await again.infer(infer_request(again, ROWS)), InferResponse)
        again.release()

    run(test)


def test_a_replaced_version_serves_the_requests_that_leased_it(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        front_end, registry = pair.front_ends[0], pair.plane.registry
        old = front_end.lease("affine", "")
        local = registry.serving("affine", "")
        assert local is not None
        registry.publish("affine", None)
        pair.apply_table()
        assert not front_end.serves("affine", "")
        closing = asyncio.create_task(asyncio.to_thread(local.close, 30.0))
        await until_async(lambda: local.closing)
        assert isinstance(await old.infer(infer_request(old, ROWS)), InferResponse)
        assert not closing.done()
        old.release()
        assert await closing
        with pytest.raises(Unavailable):
            await old.infer(infer_request(old, ROWS))

    run(test)


def test_a_front_end_that_ends_frees_versions_and_cancels_requests(run: Callable[..., Any]) -> None:
    async def test(pair: Pair) -> None:
        handle = pair.front_ends[0].lease("errors", "")
        code = np.array([[0]], np.int32)
        pending = [handle.infer(infer_request(handle, code)) for _ in range(3)]
        await asyncio.sleep(0.01)
        pair.front_ends[0].detached()
        for each in pending:
            with pytest.raises(Unavailable):
                await each
        local = pair.plane.registry.serving("errors", "")
        assert local is not None
        await until_async(lambda: not local.in_flight)
        totals = local.recorder.totals()
        assert totals.successes + sum(totals.failures.values()) == 3

    run(test)


def test_random_requests_over_two_front_ends(run: Callable[..., Any]) -> None:
    """Random sizes and concurrency: each answer equals that of the request alone."""

    async def test(pair: Pair) -> None:
        random = np.random.default_rng(7)

        async def one(number: int) -> None:
            front_end = pair.front_ends[number % 2]
            model = ("affine", "wide", "scores", "text", "pair")[random.integers(5)]
            handle = front_end.lease(model, "")
            rows, width = int(random.integers(1, 12)), int(random.integers(0, 40))
            inputs: dict[str, Any] = {}
            for name, spec in handle.spec.inputs.items():
                shape = (rows, *(width if size < 0 else size for size in spec.shape[1:]))
                values = random.integers(-99, 99, shape)
                dtype = spec.datatype.dtype
                inputs[name] = (
                    np.array([str(value).encode() for value in values.flat], object).reshape(shape)
                    if dtype.hasobject
                    else values.astype(dtype)
                )
            rows, key = CheckedShapes(handle.spec).rows(inputs)
            request = InferRequest(inputs=inputs, rows=rows, shape_key=key, received_ns=monotonic_ns())
            response = await handle.infer(request)
            handle.release()
            local = pair.plane.registry.lease(model, "")
            alone = await local.infer(request)
            local.release()
            for name, array in alone.outputs.items():
                np.testing.assert_allclose(*map(_comparable, (response.outputs[name], array)), rtol=1e-6)

        for _ in range(20):
            await asyncio.gather(*(one(number) for number in range(int(random.integers(1, 30)))))
        assert not any(front_end.in_flight for front_end in pair.front_ends)

    run(test, front_ends=2)


def _comparable(array: Any) -> Any:
    return np.vectorize(lambda item: float(item), otypes=[float])(array) if array.dtype.hasobject else array


@pytest.mark.parametrize("size_bytes", [8, 24, 31])
def test_codec_times_of_part_of_a_response_end_the_stream(run: Callable[..., Any], size_bytes: int) -> None:
    async def test(pair: Pair) -> None:
        pair.front_ends[0].send(frames.message_frame(frames.COUNTS, bytes(size_bytes), 1))
        await until_async(lambda: not pair.engine._links)

    run(test)
