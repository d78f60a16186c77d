"""Request options in the metadata of a gRPC call, and the response parameters for them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from headrace.core.clock import monotonic_ns
from headrace.core.errors import BadRequest
from headrace.core.request import BatchTimes, InferResponse
from headrace.grpc.infer import GrpcInference, InferStreams
from headrace.grpc.methods import Methods
from headrace.grpc.wire import parse_request_head
from headrace.inference.request_options import RequestOptions, RequestOptionsReader
from tritonclient.grpc import service_pb2

from tests.support.waiting import until_async
from tests.unit.grpc.test_service import Call, Model, Streaming, message

pb: Any = service_pb2


async def test_metadata_set_client_deadline_and_timing() -> None:
    model, call = Model(), Call()
    call.options = RequestOptions("shop", timeout_ns=1_000, timing=True)
    call.received_ns = monotonic_ns()
    call.deadline_ns = call.received_ns + 5_000
    pending = asyncio.ensure_future(GrpcInference(model.services(), 1 << 20).infer(message(), call))
    await until_async(lambda: model.waiting)
    request, _ = model.waiting[0]
    assert (request.client, request.deadline_ns) == ("shop", call.received_ns + 1_000)
    at_ns = monotonic_ns()  # after the request was queued
    times = BatchTimes(at_ns + 2_000, at_ns + 3_000, at_ns + 7_000, at_ns + 8_000)
    model.answer(outcome=InferResponse({"y": request.inputs["x"]}, times, 5, "preferred"))
    response_parameters = pb.ModelInferResponse.FromString(b"".join(await pending)).parameters
    assert response_parameters["headrace_queue_us"].int64_param >= 2
    assert response_parameters["headrace_compute_us"].int64_param == 4
    assert response_parameters["headrace_total_us"].int64_param >= response_parameters["headrace_encode_us"].int64_param
    assert response_parameters["headrace_batch_rows"].int64_param == 5
    assert response_parameters["headrace_batch_closed"].string_param == "preferred"


async def test_the_metadata_of_a_stream_count_for_each_of_its_requests() -> None:
    model = Model()
    call = Streaming()
    call.options = RequestOptions("shop", timeout_ns=10**9, timing=True)
    serving = asyncio.ensure_future(InferStreams(GrpcInference(model.services(), 1 << 20), 1 << 20).serve(call))
    call.sent.put_nowait(message("1"))
    call.sent.put_nowait(message("2"))
    call.sent.put_nowait(None)
    await until_async(lambda: len(model.waiting) == 2)
    for request, _ in model.waiting:
        assert (request.client, request.deadline_ns) == ("shop", request.received_ns + 10**9)
    model.answer(2)
    await serving
    for response in call.got:
        assert set(response.infer_response.parameters) == {"headrace_total_us", "triton_final_response"}


async def test_the_load_report_is_sent_if_the_metadata_request_it() -> None:
    model, call = Model(), Call()
    call.options = RequestOptions(load_format="text")
    pending = asyncio.ensure_future(GrpcInference(model.services(), 1 << 20).infer(message(), call))
    await until_async(lambda: model.waiting)
    model.answer()
    response_parameters = pb.ModelInferResponse.FromString(b"".join(await pending)).parameters
    assert {name: value.int64_param for name, value in response_parameters.items()} == {
        "headrace_queue_depth": 3,
        "headrace_predicted_wait_us": 1,
    }


async def test_cached_templates_of_a_version_are_freed_with_it() -> None:
    models = [Model()]
    nothing: Any = None
    service = GrpcInference(replace(models[0].services(), regions=nothing), 1 << 20)
    pending = asyncio.ensure_future(service.infer(message(), Call()))
    await until_async(lambda: models[0].waiting)
    models[0].answer()
    await pending
    steps = service.service
    codec = weakref.ref(models[0].protocol_cache[steps])
    assert codec() is not None
    steps._models = nothing
    del pending
    models.clear()
    gc.collect()
    assert codec() is None


async def test_a_request_parameter_enables_timing() -> None:
    model = Model()
    timed = pb.ModelInferRequest.FromString(message())
    timed.parameters["headrace_timing"].bool_param = True
    service = GrpcInference(model.services(), 1 << 20)
    pending = asyncio.ensure_future(service.infer(timed.SerializeToString(), Call()))
    await until_async(lambda: model.waiting)
    model.answer()
    response = pb.ModelInferResponse.FromString(b"".join(await pending))
    assert set(response.parameters) == {"headrace_total_us"}
    timed.parameters["headrace_timing"].int64_param = 1
    with pytest.raises(BadRequest, match="headrace_timing"):
        await service.infer(timed.SerializeToString(), Call())
    assert model.leases == 0


def test_an_exception_of_the_server_in_a_head_ends_the_call_with_a_reference(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(RequestOptionsReader):
        def read(self, *args: Any, **fields: Any) -> RequestOptions:
            raise RecursionError("unexpected")

    async def method(message: bytes, call: Any) -> Any:
        raise AssertionError

    fields = [
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m"), (b":authority", b"x"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc"),
    ]  # fmt: skip
    head = parse_request_head(Methods({"/s/m": method}, {}, Broken()), fields)
    assert head.method is None
    assert head.rejection
    (record,) = caplog.records
    reference = record.getMessage().partition("(reference ")[2].rstrip(")")
    assert len(reference) == 12
    assert reference.encode() in head.rejection
