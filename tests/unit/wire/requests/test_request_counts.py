"""Each request counts once, as a success or as a failure: requests that fail after the model has answered them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from headrace.config.cache_config import ResponseCache
from headrace.config.model_config import ModelConfig
from headrace.core.cache_options import CacheOptions
from headrace.core.completion import Mailbox
from headrace.core.errors import Cancelled, DeadlineExceeded, HeadraceError, ModelFailed, Overloaded
from headrace.core.request import BatchTimes, InferRequest
from headrace.core.tensor import Array
from headrace.inference.caching.response_cache import LARGE_BYTES
from headrace.inference.caching.response_caches import ResponseCaches
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy
from headrace.observability.counters import BatchRecord, Recorder
from headrace.observability.totals import to_triton
from headrace.wire.grpc.codec import scan
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.infer_streams import InferStreams
from headrace.wire.requests.services import InferenceServices
from tritonclient.grpc import service_pb2 as pb

from tests.support.access_recorder import AccessRecorder
from tests.support.fakes import POISON, FakeModel, handle, infer_request
from tests.support.waiting import until, until_async
from tests.unit.wire.grpc.test_service import Call, Streaming, message

HELD = 50.0
"""A batch with this value waits for the gate in `Holding`, and no other does."""


class Holding(FakeModel):
    """Holds batches with the value `HELD` only; fails those with `POISON` after that."""

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        x = np.asarray(inputs["x"])
        if HELD in x:
            self.started.release()
            assert self.gate.wait(20)
        if POISON in x:
            raise RuntimeError("poisoned")
        return {"y": x * 2}


def services(served: ModelHandle) -> InferenceServices:
    class Models:
        def lease(self, name: str, version: str) -> ModelHandle:
            assert served.lease()
            return served

    nothing: Any = None
    models: Any = Models()
    return InferenceServices(models=models, regions=nothing, observer=AccessRecorder(), extensions=())


def wait_counted(served: ModelHandle, requests: int) -> None:
    """Block the event loop until the batches of so many requests are counted."""
    until(lambda: served.recorder.totals().requests >= requests)


def counts(served: ModelHandle) -> tuple[int, dict[str, int]]:
    """Successes and failures by reason; all views of the counters must agree on them."""
    totals = served.recorder.totals()
    statistics: Any = to_triton("fake", "1", totals)["inference_stats"]
    successes, failures = statistics["success"]["count"], dict(totals.failures)
    assert served.recorder.request_counts() == (successes, sum(failures.values()))
    assert statistics["fail"]["count"] == sum(failures.values())
    assert (statistics["success"]["ns"] > 0) == (successes > 0), "the time of failed requests is none of successes"
    assert served.in_flight == 0
    return successes, failures


def break_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_arguments: object) -> None:
        raise ModelFailed("an output cannot be encoded")

    monkeypatch.setattr("headrace.wire.grpc.codec.GrpcCodec.encode", encode)


async def test_a_call_that_is_cancelled_once_its_request_is_answered(mailbox: Mailbox, model: FakeModel) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    waiting = asyncio.ensure_future(GrpcInference(services(served), 1 << 20).infer(message(), Call()))
    await until_async(model.batches.__len__)
    model.gate.set()
    wait_counted(served, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert counts(served) == (0, {"cancelled": 1})


async def test_a_unary_response_for_which_there_is_no_memory(mailbox: Mailbox, model: FakeModel) -> None:
    class FullCall(Call):
        def admit(self, size_bytes: int) -> None:
            raise Overloaded("memory for unread responses is full")

    served = handle(mailbox, model)
    inference = GrpcInference(services(served), 1 << 20)
    inference.large_responses["fake"] = 1 << 20  # small responses of this model are checked too
    call = FullCall()
    call.room = Streaming().room
    with pytest.raises(Overloaded):
        await inference.infer(message(), call)
    request = inference.begin(message(), scan(message()), 1, 0, call.options)
    await request.completion
    with pytest.raises(Overloaded):
        inference.end(request, call)
    wait_counted(served, 2)
    assert counts(served) == (0, {"overloaded": 2})


@pytest.mark.parametrize("case", ["cannot be encoded", "no memory"])
async def test_answered_requests_of_a_stream(
    case: str, monkeypatch: pytest.MonkeyPatch, mailbox: Mailbox, model: FakeModel
) -> None:
    class Refusing(Streaming):
        refused = 0

        def write_now(self, parts: list[Any], *, last: bool) -> bool:
            return False

        async def write(self, parts: list[Any]) -> None:
            if not self.refused:
                self.refused += 1
                raise Overloaded("memory for unread responses is full")
            await super().write(parts)

    served = handle(mailbox, model)
    call = Refusing() if case == "no memory" else Streaming()
    if case == "cannot be encoded":
        break_encode(monkeypatch)
    streams = InferStreams(GrpcInference(services(served), 1 << 20), max_bytes=1 << 20)
    serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
    call.sent.put_nowait(message("a"))
    await until_async(lambda: len(call.got) == 1)
    assert call.got[0].error_message
    call.sent.put_nowait(None)
    await serving
    wait_counted(served, 1)
    assert counts(served) == (0, {"model_failed" if case == "cannot be encoded" else "overloaded": 1})


async def test_a_stream_that_ends_while_a_response_waits_for_an_earlier_one(mailbox: Mailbox) -> None:
    model = Holding()
    served = handle(mailbox, model, instances=2, batch=BatchPolicy(1))
    model.gate.clear()
    call = Streaming()
    streams = InferStreams(GrpcInference(services(served), 1 << 20), max_bytes=1 << 20)
    serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
    held = pb.ModelInferRequest.FromString(message("held"))
    held.raw_input_contents[0] = np.array([HELD, HELD], np.float32).tobytes()
    call.sent.put_nowait(held.SerializeToString())
    await until_async(lambda: served.in_flight == 1)
    assert await asyncio.to_thread(model.started.acquire, timeout=60)
    call.sent.put_nowait(message("answered"))
    await asyncio.to_thread(wait_counted, served, 1)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert counts(served) == (0, {"cancelled": 2})
    model.gate.set()
    served.close(60)
    assert counts(served) == (0, {"cancelled": 2})


def failed(served: ModelHandle, error: HeadraceError | Exception | None) -> None:
    """Count the outcome of a request as a front end does."""
    assert isinstance(error, HeadraceError)
    served.record_failure(error, 1)


async def test_a_split_request_that_is_cancelled_before_its_last_part_is_done(
    mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model)
    model.gate.clear()
    waiting = served.infer(infer_request(3, rows=10))
    await until_async(lambda: len(model.batches) == 1)
    model.gate.set()
    await until_async(lambda: len(model.batches) == 2)
    await waiting
    model.gate.clear()
    waiting = served.infer(infer_request(4, rows=3 * 8))
    for batches in (3, 4, 5):
        await until_async(lambda batches=batches: len(model.batches) == batches)  # type: ignore[misc]
        if batches < 5:
            model.pass_one()
    assert waiting.abandon()
    model.gate.set()
    failed(served, waiting.outcome)  # type: ignore[arg-type]
    assert served.close(20), "the instances count lost answers after others"
    assert counts(served) == (1, {"cancelled": 1})


async def test_a_split_request_whose_first_part_fails_after_the_last_is_done(mailbox: Mailbox) -> None:
    model = Holding()
    served = handle(mailbox, model, instances=2)
    model.gate.clear()
    x = np.full((10, 2), 3, np.float32)
    x[0], x[1] = HELD, POISON
    waiting = served.infer(InferRequest(inputs={"x": x}, rows=10, shape_key=None, received_ns=1))
    await asyncio.to_thread(wait_counted, served, 1)
    model.gate.set()
    with pytest.raises(ModelFailed) as caught:
        await waiting
    failed(served, caught.value)
    assert served.close(20), "the instances count lost answers after others"
    assert counts(served) == (0, {"model_failed": 1})


@pytest.mark.parametrize("rows", [1, 10])
async def test_an_ordered_request_that_ends_while_its_response_waits_for_earlier_ones(
    rows: int, mailbox: Mailbox
) -> None:
    model = Holding()
    served = handle(mailbox, model, instances=2, preserve_ordering=True, batch=BatchPolicy(8))
    model.gate.clear()
    first = served.infer(infer_request(HELD))
    assert await asyncio.to_thread(model.started.acquire, timeout=60)
    late = served.infer(infer_request(3, rows=rows))
    await asyncio.to_thread(wait_counted, served, 1)
    assert late.settle(DeadlineExceeded("the request's deadline passed"))
    failed(served, late.outcome)  # type: ignore[arg-type]
    model.gate.set()
    await first
    assert served.close(20), "the instances count lost answers after others"
    assert counts(served) == (1, {"deadline": 1})


async def test_a_cached_request_that_is_cancelled_before_its_computed_response_is_passed_on(
    mailbox: Mailbox, model: FakeModel
) -> None:
    served = handle(mailbox, model)
    config = ModelConfig(name="fake", backend="onnxruntime", response_cache=ResponseCache(enable=True))
    served.cache = ResponseCaches(CacheOptions(1 << 20), mailbox).open(served, config)
    model.gate.clear()
    large = served.infer(infer_request(3, size_bytes=LARGE_BYTES + 1))
    await until_async(model.batches.__len__)
    model.gate.set()
    wait_counted(served, 1)
    assert large.abandon()
    failed(served, large.outcome)  # type: ignore[arg-type]
    assert served.close(20)
    await until_async(lambda: served.recorder.request_counts() == (0, 1))
    assert counts(served) == (0, {"cancelled": 1})


def test_a_scrape_between_answer_and_failure_reads_no_smaller_number_later() -> None:
    recorder = Recorder()

    def answer() -> None:
        recorder.record_batch(BatchRecord(1, 1, "idle", BatchTimes(1, 2, 3, 4), [1], [2]))

    answer()
    answer()
    scraped = [recorder.scraped_totals()]
    recorder.failure(Cancelled.reason, 5, answered_ns=2)
    assert (recorder.totals().successes, recorder.totals().success_ns) == (1, 2)
    scraped.append(recorder.scraped_totals())
    answer()
    scraped.append(recorder.scraped_totals())
    answer()
    scraped.append(recorder.scraped_totals())
    assert [totals.successes for totals in scraped] == [2, 2, 2, 3]
    assert [totals.success_ns for totals in scraped] == [4, 4, 4, 6]
    assert (recorder.totals().successes, recorder.totals().success_ns) == (3, 6)
