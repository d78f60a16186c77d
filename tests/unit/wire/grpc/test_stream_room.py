"""Body memory reserved by the requests of one stream, and the order of their responses."""

from __future__ import annotations

import asyncio
from typing import Any

from headrace.core.errors import ModelFailed, Overloaded
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.infer_streams import InferStreams
from headrace.wire.grpc.response_room import ResponseRoom
from tritonclient.grpc import service_pb2

from tests.support.waiting import until_async
from tests.unit.wire.grpc.test_service import Model, Streaming, message


def unordered(request_id: str) -> bytes:
    parsed = service_pb2.ModelInferRequest.FromString(message(request_id))
    parsed.parameters["headrace_unordered"].bool_param = True
    return bytes(parsed.SerializeToString())


async def test_body_memory_of_a_stream_is_released_request_by_request() -> None:
    size = len(message("a"))
    client_limits = ClientLimits(Limits(max_body_bytes=size, max_total_body_bytes=2 * size))
    model, call = Model(), Streaming(client_limits)
    service = GrpcInference(model.services(), 1 << 20)
    serving = asyncio.ensure_future(InferStreams(service, max_bytes=1 << 20).serve(call))  # type: ignore[arg-type]
    for item in (b"\xff", message("x", "gone"), message("a"), message("b"), message("c")):
        call.sent.put_nowait(item)
    await until_async(lambda: len(call.got) == 2 and len(model.waiting) == 2)
    assert [response.infer_response.id for response in call.got] == ["", "x"]
    await until_async(lambda: client_limits.hits["max_total_body_bytes"])
    assert (client_limits.bodies.reserved_bytes, client_limits.hits["max_total_body_bytes"]) == (2 * size, 1)
    assert model.observer.failures[-1].reason == "overloaded"
    model.answer()
    await until_async(lambda: len(call.got) == 3)
    assert client_limits.bodies.reserved_bytes == size
    model.answer(outcome=ModelFailed("broke"))
    await until_async(lambda: len(call.got) == 5)
    call.sent.put_nowait(None)
    await serving
    assert [response.infer_response.id for response in call.got] == ["", "x", "a", "b", "c"]
    assert "together" in call.got[4].error_message, "the refusal came first and kept its place"
    assert (client_limits.bodies.reserved_bytes, model.leases) == (0, 0)


async def test_an_answer_that_waits_for_an_earlier_one_counts_as_in_flight() -> None:
    model, call = Model(), Streaming()
    streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20, max_in_flight=4)
    serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
    for number in range(8):
        call.sent.put_nowait(message(str(number)))
    await until_async(lambda: len(model.waiting) == 4)
    first = model.waiting.pop(0)
    model.answer(3)
    await asyncio.sleep(0.05)
    assert (call.got, call.reads, len(model.waiting)) == ([], 4, 0), "the slow head holds the reader back"
    model.waiting.append(first)
    model.answer()
    await until_async(lambda: len(model.waiting) == 4)
    model.answer(4)
    call.sent.put_nowait(None)
    await serving
    assert [response.infer_response.id for response in call.got] == [str(number) for number in range(8)]
    assert model.leases == 0


async def test_unordered_requests_are_answered_as_they_are_done() -> None:
    model, call = Model(), Streaming()
    streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20)
    serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
    for item in (message("0"), unordered("1"), message("2"), unordered("3")):
        call.sent.put_nowait(item)
    await until_async(lambda: len(model.waiting) == 4)
    model.waiting.reverse()
    model.answer(3)  # 3, 2, 1
    await until_async(lambda: len(call.got) == 2)
    assert [response.infer_response.id for response in call.got] == ["3", "1"]
    model.answer()
    call.sent.put_nowait(None)
    await serving
    assert [response.infer_response.id for response in call.got] == ["3", "1", "0", "2"]


async def test_a_disconnect_drops_responses_that_wait_for_earlier_ones() -> None:
    model, call = Model(), Streaming()
    streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20)
    serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
    for number in range(3):
        call.sent.put_nowait(message(str(number)))
    await until_async(lambda: len(model.waiting) == 3)
    model.waiting.append(model.waiting.pop(0))
    model.answer(2)
    await asyncio.sleep(0.05)
    serving.cancel()
    await asyncio.wait([serving])
    assert (model.leases, len(model.failures), call.got) == (0, 3, [])
    await asyncio.sleep(0)


async def test_expected_responses_take_no_memory_of_other_clients() -> None:
    """One response of 100 MB made small calls on all connections fail: each reserved 100 MB of the memory of all."""
    client_limits = ClientLimits(Limits())
    rooms = [ResponseRoom(client_limits, lambda: False) for _ in range(16)]
    for room in rooms:
        await asyncio.wait_for(room.start(100 << 20), 1)
    assert client_limits.bodies.unread_bytes == 0
    rooms[0].admit(1 << 20)
    client_limits.reserve().check(100 << 20)
    for room in rooms:
        room.end(100 << 20)
    rooms[0].queue(1 << 20)
    rooms[0].update(2 << 20)
    assert client_limits.bodies.unread_bytes == 3 << 20, "bytes that exist count"
    rooms[0].close()
    assert client_limits.bodies.unread_bytes == 0


async def test_large_responses_that_are_read_at_once_run_together() -> None:
    """64 calls with responses of 20 MiB ran one at a time."""
    room = ResponseRoom(ClientLimits(Limits()), lambda: False)
    calls = [asyncio.ensure_future(room.start(20 << 20)) for _ in range(64)]

    def count_started() -> int:
        return sum(call.done() for call in calls)

    await until_async(lambda: count_started() >= 2)
    await asyncio.sleep(0.01)
    started = count_started()
    assert started <= 3
    room.update(1 << 20)  # the client reads slowly
    for _ in range(started):
        room.end(20 << 20)
        await asyncio.sleep(0.01)
    await until_async(lambda: count_started() > started)
    await asyncio.sleep(0.01)
    assert count_started() == started + 1, "one at a time"
    room.update(0)
    await until_async(lambda: count_started() >= started + 2)
    for call in calls:
        call.cancel()


async def test_a_response_that_memory_refuses_ends_its_request_and_not_the_stream() -> None:
    class Full(Streaming):
        def write_now(self, parts: list[Any], *, last: bool) -> bool:
            return False

        async def write(self, parts: list[Any]) -> None:
            self.writes += 1
            if self.writes == 1:
                raise Overloaded("memory is full")
            await super().write(parts)

        writes = 0

    model, call = Model(), Full()
    streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20)
    serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
    for name in "ab":
        call.sent.put_nowait(message(name))
    await until_async(lambda: len(model.waiting) == 2)
    model.answer(2)
    call.sent.put_nowait(None)
    await serving
    assert [(each.infer_response.id, each.error_message) for each in call.got] == [
        ("a", "memory is full"),
        ("b", ""),
    ]
