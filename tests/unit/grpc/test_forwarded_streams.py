"""Requests of a stream that another process serves: order, several answers, errors, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from headrace.core.errors import Cancelled, HeadraceError, Unavailable
from headrace.grpc.codec import Envelope, sequence_of
from headrace.grpc.infer import GrpcInference, InferStreams
from headrace.grpc.methods import Message
from headrace.grpc.status import ErrorStatus, StatusError
from headrace.inference.request_options import RequestOptions
from tritonclient.grpc import service_pb2

from tests.support.waiting import until_async
from tests.unit.grpc.test_service import Model, Streaming, message

pb: Any = service_pb2


class Elsewhere:
    """A forwarder for all models but `fake`; the test gives the responses."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[str | Exception | None]] = {}
        self.unordered = False
        self.ended: list[str] = []

    def takes(self, envelope: Envelope) -> bool:
        return envelope.model_name != "fake"

    def is_unordered(self, envelope: Envelope) -> bool:
        return self.unordered

    def sequence_of(self, envelope: Envelope) -> object:
        return sequence_of(envelope)

    async def responses(self, content: bytes, call: Any) -> AsyncGenerator[Message]:
        request_id = pb.ModelInferRequest.FromString(content).id
        queue = self.queues[request_id] = asyncio.Queue()
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                response = pb.ModelStreamInferResponse()
                response.infer_response.id = item
                yield [response.SerializeToString()]
        finally:
            self.ended.append(request_id)

    def put(self, request_id: str, *items: str | Exception | None) -> None:
        for item in items:
            self.queues[request_id].put_nowait(item)


def open_stream(
    model: Model, elsewhere: Elsewhere, options: RequestOptions | None = None
) -> tuple[Streaming, asyncio.Task[None]]:
    call = Streaming()
    call.options = options or call.options
    streams = InferStreams(GrpcInference(model.services(), 1 << 20), 1 << 20, forwarder=elsewhere)
    return call, asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]


def ids(call: Streaming) -> list[str]:
    return [each.infer_response.id for each in call.got]


def send(call: Streaming, *messages: bytes | None) -> None:
    for each in messages:
        call.sent.put_nowait(each)


async def test_a_forwarded_request_keeps_its_place() -> None:
    model, elsewhere = Model(), Elsewhere()
    call, serving = open_stream(model, elsewhere)
    send(call, message("a", "other"), message("b"), message("c", "other"), None)
    await until_async(lambda: len(elsewhere.queues) == 2 and model.waiting)
    model.answer()
    elsewhere.put("c", "c", None)
    await until_async(lambda: "c" in elsewhere.ended)
    assert ids(call) == []
    elsewhere.put("a", "a", None)
    await serving
    assert ids(call) == ["a", "b", "c"]
    assert (model.leases, call.reservation.held_bytes) == (0, 0)


def of_sequence(request_id: str, sequence_id: int) -> bytes:
    request = pb.ModelInferRequest.FromString(message(request_id, "other"))
    request.parameters["sequence_id"].int64_param = sequence_id
    return bytes(request.SerializeToString())


async def test_requests_of_a_sequence_are_sent_one_after_the_other() -> None:
    model, elsewhere = Model(), Elsewhere()
    call, serving = open_stream(model, elsewhere)
    send(call, of_sequence("a", 1), of_sequence("b", 1), of_sequence("c", 2), message("d", "other"), None)
    await until_async(lambda: set(elsewhere.queues) == {"a", "c", "d"})
    for request_id in ("d", "c", "a"):
        elsewhere.put(request_id, request_id, None)
    await until_async(lambda: "b" in elsewhere.queues)
    assert set(elsewhere.ended) == {"a", "c", "d"}
    elsewhere.put("b", "b", None)
    await serving
    assert ids(call) == ["a", "b", "c", "d"]


async def test_several_answers_are_passed_on_as_they_come_and_delay_no_other() -> None:
    model, elsewhere = Model(), Elsewhere()
    elsewhere.unordered = True
    call, serving = open_stream(model, elsewhere)
    send(call, message("many", "other"), message("none", "other"), message("b"), None)
    await until_async(lambda: len(elsewhere.queues) == 2 and model.waiting)
    elsewhere.put("many", "1", "2", "3")
    await until_async(lambda: ids(call) == ["1", "2", "3"])
    model.answer()
    await until_async(lambda: ids(call) == ["1", "2", "3", "b"])
    elsewhere.put("none", None)
    elsewhere.put("many", "4", None)
    await serving
    assert ids(call) == ["1", "2", "3", "b", "4"]


async def test_a_slow_reader_stops_the_answers() -> None:
    model, elsewhere = Model(), Elsewhere()
    elsewhere.unordered = True
    call, serving = open_stream(model, elsewhere)
    call.open.clear()
    send(call, message("many", "other"), None)
    await until_async(lambda: elsewhere.queues)
    elsewhere.put("many", *map(str, range(9)), None)
    queue = elsewhere.queues["many"]
    await until_async(lambda: queue.qsize() < 10)
    await asyncio.sleep(0.05)
    assert queue.qsize() == 9, "one is being written"
    call.open.set()
    await serving
    assert ids(call) == [str(n) for n in range(9)]


@pytest.mark.parametrize("is_first", [True, False])
async def test_errors_of_the_other_process(is_first: bool) -> None:
    model, elsewhere = Model(), Elsewhere()
    call, serving = open_stream(model, elsewhere)
    send(call, message("a", "other"), message("b"), None)
    await until_async(lambda: elsewhere.queues and model.waiting)
    model.answer()
    elsewhere.put("a", *([] if is_first else ["part"]), Unavailable("the engine has ended", 0.5))
    await serving
    assert [each.error_message for each in call.got] == [*([] if is_first else [""]), "the engine has ended", ""]
    assert call.got[-2].infer_response.id == "a"
    assert call.got[-2].infer_response.parameters["headrace_retry_after_ms"].int64_param == 500


@pytest.mark.parametrize(
    "error", [Unavailable("gone"), StatusError(ErrorStatus("NOT_FOUND", "no such model"))], ids=type
)
async def test_errors_end_the_stream_on_request(error: Exception) -> None:
    model, elsewhere = Model(), Elsewhere()
    call, serving = open_stream(model, elsewhere, RequestOptions(ends_stream=True))
    send(call, message("a", "other"), message("b"), None)
    await until_async(lambda: elsewhere.queues and model.waiting)
    elsewhere.put("a", error)
    with pytest.raises(type(error)) as caught:
        await serving
    assert caught.value is error
    assert (call.got, model.leases) == ([], 0)


async def test_a_client_that_disconnects_ends_the_forwarded_requests() -> None:
    model, elsewhere = Model(), Elsewhere()
    call, serving = open_stream(model, elsewhere)
    send(call, message("a", "other"), message("b", "other"))
    await until_async(lambda: len(elsewhere.queues) == 2)
    call.sent.put_nowait(Cancelled("the client disconnected"))
    with pytest.raises(HeadraceError):
        await serving
    await until_async(lambda: sorted(elsewhere.ended) == ["a", "b"])
