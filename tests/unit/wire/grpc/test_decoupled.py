"""Requests of decoupled models on a stream: any number of responses, interleaved, final flags, credit, errors, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError, ModelFailed, Overloaded
from headrace.core.limits import ClientLimits
from headrace.core.request import InferRequest, InferResponse, ModelLoad
from headrace.core.response_stream import ResponseStream
from headrace.core.tensor import BYTES, FP32, ModelSpec, TensorSpec
from headrace.wire.grpc.infer import GrpcInference
from headrace.wire.grpc.infer_streams import InferStreams
from headrace.wire.grpc.response_room import ResponseRoom
from headrace.wire.requests.request_options import NO_OPTIONS, RequestOptions
from headrace.wire.requests.services import ControlServices
from tritonclient.grpc import service_pb2

from tests.support.access_recorder import AccessRecorder
from tests.support.fake_handles import FakeHandle

pb: Any = service_pb2
INPUTS = {"x": TensorSpec("x", FP32, (-1, 1))}
SPECS = {
    "many": ModelSpec("many", "1", "python", INPUTS, {"y": TensorSpec("y", FP32, (-1, 1))}, 8, decoupled=True),
    "text": ModelSpec("text", "1", "python", INPUTS, {"y": TensorSpec("y", BYTES, (-1, 1))}, 8, decoupled=True),
    "one": ModelSpec("one", "1", "test", INPUTS, {"y": TensorSpec("y", FP32, (-1, 1))}, 8),
}
END = InferResponse({})


def message(request_id: str, model: str = "many", **parameters: bool) -> bytes:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    request.raw_input_contents.append(np.zeros((1, 1), np.float32).tobytes())
    for name, value in parameters.items():
        request.parameters[name].bool_param = value
    return bytes(request.SerializeToString())


def response(value: float, final: bool = False) -> InferResponse:
    return InferResponse({"y": np.full((1, 1), value, np.float32)}, final=final)


class Handle(FakeHandle):
    """A leased version of one of the models."""

    report = ModelLoad(3, 5, 4, 2, 1, 1_500, 9_000, 100.0, 0, ())

    def __init__(self, models: Models, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._models, self.failures = models, models.failures

    def release(self) -> None:
        self._models.leases -= 1

    def infer(self, request: InferRequest) -> LoopCompletion:
        completion = LoopCompletion(self._models.mailbox)
        self._models.requests[request.id] = request, completion
        self._models.queued.set()
        if request.responses is not None:
            request.responses.on_consumed = lambda count, _size: self._models.count(request.id, count)
        return completion


class Models:
    """Models whose responses the test sends, by request id.

    Attributes:
        consumed: responses that the server has given credit for, by request id.
    """

    def __init__(self) -> None:
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.failures: list[HeadraceError] = []
        self.handles = {name: Handle(self, spec) for name, spec in SPECS.items()}
        self.requests: dict[str, tuple[InferRequest, LoopCompletion]] = {}
        self.consumed: dict[str, int] = {}
        self.observer = AccessRecorder(active=True)
        self.leases = 0
        self.queued = asyncio.Event()

    def lease(self, name: str, version: str) -> Handle:
        self.leases += 1
        return self.handles[name]

    def count(self, request_id: str, count: int) -> None:
        self.consumed[request_id] = self.consumed.get(request_id, 0) + count

    def send(self, request_id: str, *items: Any) -> None:
        stream = self.requests[request_id][0].responses
        assert isinstance(stream, ResponseStream)
        for item in items:
            stream.send(item)

    def end(self, request_id: str, outcome: InferResponse | Exception = END) -> None:
        self.requests[request_id][1].settle(outcome)


class Call:
    """A stream call; the client reads while `open` is set, and by `write_now` if `is_quick`."""

    deadline_ns = 0
    stopping = False
    load_report = b""
    take: Callable[[bytes], bool] | None = None

    def __init__(self, options: RequestOptions, is_quick: bool) -> None:
        limits = ClientLimits()
        self.options = options
        self.reservation = limits.reserve()
        self.room = ResponseRoom(limits, lambda: False)
        self.sent: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.answers: list[Any] = []
        self.open = asyncio.Event()
        self.open.set()
        self.refuses: HeadraceError | None = None
        self._is_quick = is_quick
        self._changed = asyncio.Event()

    async def read(self) -> bytes | None:
        item = await self.sent.get()
        if isinstance(item, Exception):
            raise item
        return item

    def write_now(self, parts: list[Any], *, last: bool) -> bool:
        if not self._is_quick or not self.open.is_set() or self.refuses is not None:
            return False
        self._add(parts)
        return True

    async def write(self, parts: list[Any]) -> None:
        await self.open.wait()
        refuses, self.refuses = self.refuses, None
        if refuses is not None:
            raise refuses
        self._add(parts)

    def _add(self, parts: list[Any]) -> None:
        self.answers.append(pb.ModelStreamInferResponse.FromString(b"".join(parts)))
        self._changed.set()

    async def answered(self, count: int) -> None:
        """Wait until so many answers have come."""
        while len(self.answers) < count:
            self._changed.clear()
            await self._changed.wait()

    @property
    def brief(self) -> list[tuple[str, Any, bool]]:
        """Id, value (None for no outputs, the text of an error) and final flag of each answer."""
        result = []
        for answer in self.answers:
            inner = answer.infer_response
            contents = inner.raw_output_contents
            value = float(np.frombuffer(contents[0], np.float32)[0]) if contents else None
            final = inner.parameters["triton_final_response"].bool_param
            result.append((inner.id, answer.error_message or value, final))
        return result


Scenario = Callable[[Models, Call], Awaitable[None]]
WRITES = pytest.mark.parametrize("is_quick", [True, False], ids=["write_now", "write"])


def run(scenario: Scenario, is_quick: bool = True, options: RequestOptions = NO_OPTIONS) -> Models:
    """Run a scenario on one stream; afterwards no lease and no memory is held."""

    async def main() -> Models:
        models, call = Models(), Call(options, is_quick)
        this: Any = models
        services = ControlServices(
            models=this,
            repository=this,
            regions=this,
            traces=this,
            observer=models.observer,
            logs=this,
            overview=this,
            version="1",
            extensions=(),
            explain=this,
        )
        streams = InferStreams(GrpcInference(services, 1 << 20), 1 << 20)
        serving = asyncio.ensure_future(streams.serve(call))
        call.serving = serving  # type: ignore[attr-defined]
        await asyncio.wait_for(scenario(models, call), 30)
        await asyncio.wait({serving}, timeout=30)
        assert serving.done()
        assert models.leases == 0
        if serving.exception() is None:  # else the server releases it
            assert call.reservation.held_bytes == 0
        return models

    return asyncio.run(main())


async def queued(models: Models, *request_ids: str) -> None:
    """Wait until the server has queued requests."""
    while not all(request_id in models.requests for request_id in request_ids):
        models.queued.clear()
        await models.queued.wait()


@WRITES
def test_decoupled_requests_interleave_and_ordinary_ones_keep_their_order(is_quick: bool) -> None:
    async def scenario(models: Models, call: Call) -> None:
        for item in (message("o1", "one"), message("a"), message("o2", "one"), message("b"), None):
            call.sent.put_nowait(item)
        await queued(models, "o1", "a", "o2", "b")
        models.end("o2", response(20))  # waits for o1
        models.send("b", response(1))
        models.send("a", response(2))
        await call.answered(2)
        models.send("b", response(3, final=True))
        models.end("b")
        await call.answered(3)
        models.end("o1", response(10))
        await call.answered(5)
        models.end("a")
        assert [identity for identity, *_ in call.brief] == ["b", "a", "b", "o1", "o2"]
        assert [final for *_, final in call.brief] == [False, False, True, True, True]

    run(scenario, is_quick)


@WRITES
def test_a_client_that_does_not_read_gives_no_credit(is_quick: bool) -> None:
    async def scenario(models: Models, call: Call) -> None:
        call.sent.put_nowait(message("a"))
        call.sent.put_nowait(message("b"))
        await queued(models, "a", "b")
        call.open.clear()
        for number in range(10):
            models.send("a", response(number))
            models.send("b", response(number))
        for _ in range(200):
            await asyncio.sleep(0)
        assert (call.answers, models.consumed) == ([], {})
        call.open.set()
        await call.answered(20)
        assert [value for identity, value, _ in call.brief if identity == "a"] == list(range(10))
        models.end("a")
        models.end("b")
        call.sent.put_nowait(None)

    assert run(scenario, is_quick).consumed == {"a": 10, "b": 10}


@WRITES
def test_an_error_between_responses_does_not_end_its_request(is_quick: bool) -> None:
    async def scenario(models: Models, call: Call) -> None:
        call.sent.put_nowait(message("a", triton_enable_empty_final_response=True))
        call.sent.put_nowait(None)
        await queued(models, "a")
        models.send("a", response(1), ModelFailed("one token"), response(2))
        models.end("a")
        await call.answered(4)
        assert call.brief == [("a", 1.0, False), ("a", "one token", False), ("a", 2.0, False), ("a", None, True)]

    assert [str(error) for error in run(scenario, is_quick).failures] == ["one token"]


@pytest.mark.parametrize("is_item", [True, False], ids=["response", "end"])
def test_an_error_ends_the_stream_if_the_client_wants_that(is_item: bool) -> None:
    async def scenario(models: Models, call: Any) -> None:
        call.sent.put_nowait(message("a"))
        call.sent.put_nowait(message("b"))
        await queued(models, "a", "b")
        models.send("a", response(1))
        await call.answered(1)
        if is_item:
            models.send("a", ModelFailed("no"))
        else:
            models.end("a", ModelFailed("no"))
        with pytest.raises(ModelFailed, match="no"):
            await call.serving
        assert models.requests["b"][1].is_settled
        assert len(call.answers) == 1

    models = run(scenario, options=replace(NO_OPTIONS, ends_stream=True))
    assert sorted(error.reason for error in models.failures) == ["cancelled", "model_failed"]


@WRITES
def test_texts_and_large_texts(is_quick: bool) -> None:
    def text(value: bytes) -> InferResponse:
        return InferResponse({"y": np.array([[value]], object)})

    async def scenario(models: Models, call: Call) -> None:
        call.sent.put_nowait(message("a", "text"))
        call.sent.put_nowait(None)
        await queued(models, "a")
        models.send("a", text(b"x"), text(b"y" * 200_000), text(b"z"))
        models.end("a")
        await call.answered(3)
        contents = [answer.infer_response.raw_output_contents[0][4:] for answer in call.answers]
        assert contents == [b"x", b"y" * 200_000, b"z"]

    run(scenario, is_quick)


def test_a_full_memory_for_unread_responses_ends_the_request() -> None:
    async def scenario(models: Models, call: Call) -> None:
        call.sent.put_nowait(message("a"))
        call.sent.put_nowait(None)
        await queued(models, "a")
        call.refuses = Overloaded("the memory is full")
        models.send("a", response(1), response(2))
        await call.answered(1)
        assert call.brief == [("a", "the memory is full", True)]
        assert models.requests["a"][1].is_settled

    assert [error.reason for error in run(scenario, is_quick=False).failures] == ["overloaded"]


def test_the_final_parameter_of_ordinary_models_is_ignored() -> None:
    async def scenario(models: Models, call: Call) -> None:
        call.sent.put_nowait(message("a", "one", triton_enable_empty_final_response=True))
        call.sent.put_nowait(None)
        await queued(models, "a")
        assert dict(models.requests["a"][0].parameters) == {}
        models.end("a", response(1))
        await call.answered(1)
        assert call.brief == [("a", 1.0, True)]

    run(scenario)
