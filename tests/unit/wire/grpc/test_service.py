"""The gRPC service without an engine: leases, streams that end early, faults of ours, traces, what a failed call says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import (
    BadRequest,
    Cancelled,
    HeadraceError,
    ModelFailed,
    NotFound,
    Overloaded,
    TooLarge,
    Unavailable,
)
from headrace.core.limits import ClientLimits
from headrace.core.request import InferRequest, InferResponse, ModelLoad, Probe
from headrace.core.tensor import FP32, ModelSpec, TensorSpec
from headrace.observability.labelled_counter import ERRORS
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.infer_streams import InferStreams
from headrace.wire.grpc.response_room import ResponseRoom
from headrace.wire.grpc.status import error_status
from headrace.wire.requests.request_options import NO_OPTIONS, RequestOptions
from headrace.wire.requests.services import ControlServices
from tritonclient.grpc import service_pb2

from tests.support.access_recorder import AccessRecorder
from tests.support.fake_handles import FakeHandle
from tests.support.reference_cycles import leaked_frames
from tests.support.waiting import until_async

pb: Any = service_pb2
SPEC = ModelSpec(
    "fake", "1", "test", {"x": TensorSpec("x", FP32, (-1, 2))}, {"y": TensorSpec("y", FP32, (-1, 2))}, max_batch_size=8
)


def message(request_id: str = "", model: str = "fake") -> bytes:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(np.array([1, 2], np.float32).tobytes())
    return bytes(request.SerializeToString())


class Model(FakeHandle):
    """Registry, handle and tracer in one: answers when the test says so."""

    report = ModelLoad(3, 5, 4, 2, 1, 1_500, 9_000, 100.0, 0, ())

    def __init__(self, active: bool = False) -> None:
        super().__init__(SPEC)
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.waiting: list[tuple[InferRequest, LoopCompletion]] = []
        self.raises: Exception | None = None
        self.observer = AccessRecorder(active)

    def lease(self, name: str, version: str) -> Model:
        if name != "fake":
            raise NotFound(f"model {name!r} is not found")
        self.leases += 1
        return self

    def probes(self) -> list[Probe]:
        return []

    def infer(self, request: InferRequest) -> LoopCompletion:
        if self.raises is not None:
            raise self.raises
        completion = LoopCompletion(self.mailbox)
        self.waiting.append((request, completion))
        return completion

    def answer(self, count: int = 1, outcome: Any = None) -> None:
        for _ in range(count):
            request, completion = self.waiting.pop(0)
            completion.settle(outcome or InferResponse({"y": request.inputs["x"] * 2}))

    def services(self) -> ControlServices:
        this: Any = self
        return ControlServices(
            models=this,
            repository=this,
            regions=this,
            traces=this,
            observer=self.observer,
            logs=this,
            overview=this,
            version="1",
            extensions=(),
            explain=this,
        )


class Call:
    received_ns = 1
    peer = "client:1"
    deadline_ns = 0
    options: RequestOptions = NO_OPTIONS
    completion: LoopCompletion | None = None
    load_report = b""

    def admit(self, size_bytes: int) -> None:
        pass


class Streaming:
    """A stream call of a client under the test's control."""

    deadline_ns = 0
    options: RequestOptions = NO_OPTIONS
    stopping = False
    load_report = b""
    take: Callable[[bytes], bool] | None = None

    def __init__(self, client_limits: ClientLimits | None = None) -> None:
        self.reservation = (client_limits or ClientLimits()).reserve()
        self.room = ResponseRoom(client_limits or ClientLimits(), lambda: False)
        self.sent: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.got: list[Any] = []
        self.reads = 0
        self.open = asyncio.Event()
        self.open.set()

    async def read(self) -> bytes | None:
        given = await self.sent.get()
        self.reads += 1
        if isinstance(given, Exception):
            raise given
        return given

    def write_now(self, parts: list[Any], *, last: bool) -> bool:
        if self.open.is_set():
            self.got.append(pb.ModelStreamInferResponse.FromString(b"".join(parts)))
        return self.open.is_set()

    async def write(self, parts: list[Any]) -> None:
        await self.open.wait()
        self.got.append(pb.ModelStreamInferResponse.FromString(b"".join(parts)))


@pytest.mark.parametrize("outcome", [ModelFailed("no"), Overloaded("full"), Cancelled("gone")], ids=type)
async def test_failed_requests_are_counted_and_release_the_lease(outcome: HeadraceError) -> None:
    model = Model()
    service = GrpcInference(model.services(), 1 << 20)
    pending = asyncio.ensure_future(service.infer(message(), Call()))
    await until_async(lambda: model.waiting)
    model.answer(outcome=outcome)
    with pytest.raises(type(outcome)):
        await pending
    model.raises = outcome
    with pytest.raises(type(outcome)):
        await service.infer(message(), Call())
    assert (model.leases, model.failures) == (0, [outcome, outcome])


@pytest.mark.parametrize("size", [8, 1 << 20], ids=["small", "large"])
async def test_overload_rejects_requests_before_they_are_decoded(size: int) -> None:
    """Unary calls with and without a task, and streams: each is counted once."""

    model = Model()
    model.overloaded = Overloaded("full", 0.5)
    service = GrpcInference(model.services(), 2 << 20)
    request = pb.ModelInferRequest.FromString(message("x"))
    request.raw_input_contents[0] = bytes(size + 1)  # an error if it was decoded
    content = request.SerializeToString()
    with pytest.raises(Overloaded):
        await service.infer(content, Call())
    with pytest.raises(Overloaded):
        service.start(content, Call())
    model.failures = model.failures[:1]
    call, serving = stream(model, max_bytes=4 << 20)
    call.sent.put_nowait(content)
    call.sent.put_nowait(None)
    await serving
    assert [each.error_message for each in call.got] == ["full"]
    assert (model.leases, model.failures) == (0, [model.overloaded] * 2)
    model.overloaded = None
    with pytest.raises(BadRequest):
        await service.infer(content, Call())


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
async def test_a_large_request_needs_no_task_if_its_inputs_are_views(datatype: str) -> None:
    model = Model()
    service = GrpcInference(model.services(), 2 << 20)
    request = pb.ModelInferRequest(model_name="fake")
    request.inputs.add(name="x", datatype=datatype, shape=[40_000, 2])
    request.raw_input_contents.append(bytes(320_000))
    started = service.start(request.SerializeToString(), Call())
    assert (started is not None) is (datatype == "FP32")
    if started is not None:
        model.answer()
        service.finish(started)
    assert not model.leases


async def test_internal_errors_are_logged_and_hidden_from_the_client(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.raises = RuntimeError("secret path")
    with pytest.raises(ModelFailed) as caught:
        await GrpcInference(model.services(), 1 << 20).infer(message(), Call())
    assert "secret" not in str(caught.value)
    assert caught.value.reference in caplog.text
    assert "secret path" in caplog.text
    assert model.leases == 0


@pytest.mark.parametrize("active", [True, False])
async def test_requests_are_recorded_while_an_observer_is_active(active: bool) -> None:
    model = Model(active)
    pending = asyncio.ensure_future(GrpcInference(model.services(), 1 << 20).infer(message("t"), Call()))
    await until_async(lambda: model.waiting)
    model.answer()
    await pending
    records = model.observer.answers
    assert [account.request_id for account in records] == (["t"] if active else [])
    assert all(0 < account.queued_ns <= account.done_ns <= account.ended_ns for account in records)
    assert all((account.protocol, account.status, account.rows) == ("grpc", "OK", 1) for account in records)
    for wrong in (message("u", model="other"), b"\xff"):
        with pytest.raises(HeadraceError):
            await GrpcInference(model.services(), 1 << 20).infer(wrong, Call())
    unknown, unreadable = model.observer.failures
    assert (unknown.request_id, unknown.model, unknown.status) == ("u", "other", "NOT_FOUND")
    assert (unreadable.model, unreadable.status) == ("", "INVALID_ARGUMENT")


def stream(model: Model, **more: Any) -> tuple[Streaming, asyncio.Task[None]]:
    call = Streaming()
    served = InferStreams(GrpcInference(model.services(), 1 << 20), **{"max_bytes": 1 << 20, **more}).serve(call)
    return call, asyncio.ensure_future(served)  # type: ignore[return-value]


async def test_an_error_in_a_stream_has_a_retry_delay_and_is_counted() -> None:
    model, before = Model(), dict(ERRORS.items())
    call, serving = stream(model)
    for item in (message("full"), message("broke"), message("unknown", "other"), None):
        call.sent.put_nowait(item)
    await until_async(lambda: len(model.waiting) == 2)
    model.answer(outcome=Overloaded("the queue is full", 0.0121))
    model.answer(outcome=ModelFailed("broke"))
    await serving
    records = {each.infer_response.id: dict(each.infer_response.parameters) for each in call.got}
    assert records.keys() == {"full", "broke", "unknown"}
    assert records["full"]["headrace_retry_after_ms"].int64_param == 13
    assert [records["broke"], records["unknown"]] == [{}, {}], "coming back makes no sense"
    more = {values: count - before.get(values, 0) for values, count in ERRORS.items()}
    counted = {reason for (protocol, reason), count in more.items() if protocol == "grpc" and count == 1}
    assert counted == {"overloaded", "model_failed", "not_found"}


def test_failed_requests_of_a_stream_are_freed_at_once() -> None:
    async def test() -> None:
        model = Model()
        call, serving = stream(model)
        for item in (message("a"), message("b", "other"), None):
            call.sent.put_nowait(item)
        await until_async(lambda: len(model.waiting) == 1)
        model.answer(outcome=ModelFailed("broke"))
        await serving
        assert [response.error_message != "" for response in call.got] == [True, True]

    with leaked_frames() as left:
        asyncio.run(test())
    assert not [name for name in left if name.startswith(("GrpcInference", "_Stream"))]


async def test_a_stream_reads_no_more_than_may_be_in_flight() -> None:
    model = Model()
    for limits in ({"max_in_flight": 3}, {"max_bytes": 3 * len(message())}):
        call, serving = stream(model, **limits)
        for _ in range(10):
            call.sent.put_nowait(message())
        call.sent.put_nowait(None)
        await until_async(lambda: len(model.waiting) == 3)
        await asyncio.sleep(0.05)
        assert call.reads == 3
        call.open.clear()  # the client reads no answers: theirs count as in flight
        model.answer(3)
        await asyncio.sleep(0.05)
        assert call.reads == 3
        call.open.set()
        for _ in range(7):
            await until_async(lambda: model.waiting)
            model.answer()
        await serving
        assert (len(call.got), model.leases) == (10, 0)


@pytest.mark.parametrize("how", ["cancelled", "left while reading", "left while writing"])
async def test_a_stream_that_ends_early_abandons_all(how: str) -> None:
    model = Model()
    call, serving = stream(model)
    for _ in range(5):
        call.sent.put_nowait(message())
    await until_async(lambda: len(model.waiting) == 5)
    waiting = [completion for _, completion in model.waiting]
    if how == "cancelled":
        serving.cancel()
    elif how == "left while reading":
        call.sent.put_nowait(Cancelled("the client has left"))
    else:

        async def write(parts: list[Any]) -> None:
            raise Cancelled("the client has left")

        call.write = write  # type: ignore[method-assign]
        call.open.clear()  # `write_now` sends nothing
        model.answer()
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else Cancelled):
        await serving
    assert all(completion.is_settled for completion in waiting)
    assert model.leases == 0
    # The late call-backs have no caller, and raise nothing.
    await until_async(lambda: len([error for error in model.failures if isinstance(error, Cancelled)]) >= 4)


async def test_a_stream_is_drained() -> None:
    model = Model()
    call, serving = stream(model)
    call.sent.put_nowait(message("a"))
    call.sent.put_nowait(Unavailable("the server is shutting down"))
    await until_async(lambda: call.reads == 2)
    assert not serving.done()
    model.answer()
    with pytest.raises(Unavailable, match="shutting down"):
        await serving
    assert [response.infer_response.id for response in call.got] == ["a"]
    assert model.leases == 0


def test_outcomes_of_a_call() -> None:
    assert (error_status(TooLarge("big")).code, error_status(TooLarge("big")).text) == ("RESOURCE_EXHAUSTED", "big")
    assert dict(error_status(Overloaded("full", 2.4)).metadata)["retry-after"] == "3"
    assert error_status(BadRequest("bad")).metadata == ()


@pytest.mark.parametrize("text", ["a" * 100_000, "東" * 100_000, "\n" * 100_000, "\udcff" * 100_000])
def test_texts_fit_into_trailers(text: str) -> None:
    encoded = error_status(BadRequest(text)).text.encode()
    percent = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in encoded)
    assert percent < 8 << 10


def test_a_strange_exception_is_internal(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise RuntimeError("secret")
    except RuntimeError as error:
        end = error_status(error)
    assert (end.code, "secret" in end.text, "secret" in caplog.text) == ("INTERNAL", False, True)
