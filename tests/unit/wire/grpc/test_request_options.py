"""Request options in the metadata of a gRPC call, and the response parameters for them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
from headrace.wire.grpc.framing import parse_request_head
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.methods import Methods
from headrace.wire.requests.request_options import RequestOptions, RequestOptionsReader
from tritonclient.grpc import service_pb2

from tests.support.waiting import until_async
from tests.unit.wire.grpc.test_service import Call, Model, message

pb: Any = service_pb2


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
