"""Body memory reserved by the requests of one stream, and the order of their responses."""

from __future__ import annotations

import asyncio

from headrace.core.errors import ModelFailed
from headrace.core.limits import ClientLimits, Limits
from headrace.grpc.infer import GrpcInference, InferStreams
from tritonclient.grpc import service_pb2

from tests.unit.grpc.test_service import Model, Streaming, message, run, until


def unordered(request_id: str) -> bytes:
    parsed = service_pb2.ModelInferRequest.FromString(message(request_id))
    parsed.parameters["headrace_unordered"].bool_param = True
    return bytes(parsed.SerializeToString())


def test_body_memory_of_a_stream_is_released_request_by_request() -> None:
    async def test() -> None:
        size = len(message("a"))
        client_limits = ClientLimits(Limits(max_body_bytes=size, max_total_body_bytes=2 * size))
        model, call = Model(), Streaming(client_limits)
        service = GrpcInference(model.services(), 1 << 20)
        serving = asyncio.ensure_future(InferStreams(service, max_bytes=1 << 20).serve(call))  # type: ignore[arg-type]
        for item in (b"\xff", message("x", "gone"), message("a"), message("b"), message("c")):
            call.sent.put_nowait(item)
        await until(lambda: len(call.got) == 2 and len(model.waiting) == 2)
        assert [response.infer_response.id for response in call.got] == ["", "x"]
        await until(lambda: client_limits.hits["max_total_body_bytes"])
        assert (client_limits.bodies.reserved_bytes, client_limits.hits["max_total_body_bytes"]) == (2 * size, 1)
        assert model.observer.failures[-1].reason == "overloaded"
        model.answer()
        await until(lambda: len(call.got) == 3)
        assert client_limits.bodies.reserved_bytes == size
        model.answer(outcome=ModelFailed("broke"))
        await until(lambda: len(call.got) == 5)
        call.sent.put_nowait(None)
        await serving
        assert [response.infer_response.id for response in call.got] == ["", "x", "a", "b", "c"]
        assert "together" in call.got[4].error_message, "the refusal came first and kept its place"
        assert (client_limits.bodies.reserved_bytes, model.leases) == (0, 0)

    run(test)


def test_an_answer_that_waits_for_an_earlier_one_counts_as_in_flight() -> None:
    async def test() -> None:
        model, call = Model(), Streaming()
        streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20, max_in_flight=4)
        serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
        for number in range(8):
            call.sent.put_nowait(message(str(number)))
        await until(lambda: len(model.waiting) == 4)
        first = model.waiting.pop(0)
        model.answer(3)
        await asyncio.sleep(0.05)
        assert (call.got, call.reads, len(model.waiting)) == ([], 4, 0), "the slow head holds the reader back"
        model.waiting.append(first)
        model.answer()
        await until(lambda: len(model.waiting) == 4)
        model.answer(4)
        call.sent.put_nowait(None)
        await serving
        assert [response.infer_response.id for response in call.got] == [str(number) for number in range(8)]
        assert model.leases == 0

    run(test)


def test_unordered_requests_are_answered_as_they_are_done() -> None:
    async def test() -> None:
        model, call = Model(), Streaming()
        streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20)
        serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
        for item in (message("0"), unordered("1"), message("2"), unordered("3")):
            call.sent.put_nowait(item)
        await until(lambda: len(model.waiting) == 4)
        model.waiting.reverse()
        model.answer(3)  # 3, 2, 1
        await until(lambda: len(call.got) == 2)
        assert [response.infer_response.id for response in call.got] == ["3", "1"]
        model.answer()
        call.sent.put_nowait(None)
        await serving
        assert [response.infer_response.id for response in call.got] == ["3", "1", "0", "2"]

    run(test)


def test_a_disconnect_drops_responses_that_wait_for_earlier_ones() -> None:
    async def test() -> None:
        model, call = Model(), Streaming()
        streams = InferStreams(GrpcInference(model.services(), 1 << 20), max_bytes=1 << 20)
        serving = asyncio.ensure_future(streams.serve(call))  # type: ignore[arg-type]
        for number in range(3):
            call.sent.put_nowait(message(str(number)))
        await until(lambda: len(model.waiting) == 3)
        model.waiting.append(model.waiting.pop(0))
        model.answer(2)
        await asyncio.sleep(0.05)
        serving.cancel()
        await asyncio.wait([serving])
        assert (model.leases, len(model.failures), call.got) == (0, 3, [])
        await asyncio.sleep(0)

    run(test)
