"""The generate extension as bare ASGI callables: events one by one, exactly one response, errors, cancellation, heartbeats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import ModelFailed, NotFound, Overloaded
from headrace.core.limits import ClientLimits, Limits
from headrace.core.request import InferRequest, InferResponse, LevelLoad, ModelLoad
from headrace.core.response_stream import ResponseStream
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.wire.http.generate_endpoint import GenerateEndpoint
from headrace.wire.http.infer_endpoint import InferEndpoint
from headrace.wire.requests.services import InferenceServices

from tests.support.access_recorder import AccessRecorder
from tests.support.fake_handles import FakeHandle

LIMITS = ClientLimits(Limits(max_body_bytes=4_000))
LOAD = ModelLoad(3, 5, 4, 2, 1, 1_500, 9_000_000, 100.0, 1, (LevelLoad(1, 3, 5, 1_500),))
TEXT = TensorSpec("PROMPT", BY_NAME["BYTES"], (-1, 1))
SPEC = ModelSpec(
    "chat", "2", "python", {"PROMPT": TEXT}, {"TEXT": TensorSpec("TEXT", BY_NAME["BYTES"], (-1, 1))}, 8, decoupled=True
)
END = InferResponse({})


def text(value: str | bytes, **more: Any) -> InferResponse:
    """A response of the model."""
    content = value if isinstance(value, bytes) else value.encode()
    return InferResponse({"TEXT": np.array([[content]], object)}, **more)


class Handle(FakeHandle):
    """A leased model whose responses the test sends."""

    report = LOAD
    has_cache = False

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        super().__init__(spec)
        self.requests: list[InferRequest] = []
        self.completions: list[LoopCompletion] = []
        self.consumed = 0
        self.started = asyncio.Event()

    def infer(self, request: InferRequest) -> LoopCompletion:
        self.requests.append(request)
        completion = LoopCompletion(Mailbox(asyncio.get_running_loop()))
        self.completions.append(completion)
        if request.responses is not None:
            request.responses.on_consumed = self._on_consumed
        self.started.set()
        return completion

    def _on_consumed(self, count: int, size_bytes: int) -> None:
        self.consumed += count

    async def send(self, *responses: InferResponse) -> None:
        """Send responses to the latest request."""
        await self.started.wait()
        stream = self.requests[-1].responses
        assert isinstance(stream, ResponseStream)
        for response in responses:
            stream.send(response)

    async def end(self, outcome: InferResponse | Exception = END) -> None:
        await self.started.wait()
        self.completions[-1].settle(outcome)


class Client:
    """One request over ASGI.

    Attributes:
        sent: messages of the server.
    """

    def __init__(self, handle: Handle, heartbeat_s: float = 0.0, observer: AccessRecorder | None = None) -> None:
        class Models:
            def lease(self, name: str, version: str) -> Handle:
                if name != "chat":
                    raise NotFound(f"model {name!r} is not found")
                handle.leases += 1
                return handle

        nothing: Any = None
        models: Any = Models()
        services = InferenceServices(
            models=models, regions=nothing, observer=observer or AccessRecorder(), extensions=()
        )
        services = replace(services, heartbeat_s=heartbeat_s)
        self._endpoint = GenerateEndpoint(services, LIMITS, InferEndpoint(services, LIMITS))
        self._gone = asyncio.Event()
        self._wrote = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.sent: list[dict[str, Any]] = []

    async def post(
        self, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), model: str = "chat"
    ) -> None:
        """Send the request and wait until the server has answered it."""
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop(0)
            await self._gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await self._may_write.wait()
            self.sent.append(dict(message))
            self._wrote.set()

        serve = {"generate": self._endpoint.respond_once, "generate_stream": self._endpoint.respond_each}[path]
        await serve({"headers": list(headers)}, receive, send, model, "")

    def disconnect(self) -> None:
        self._gone.set()

    def stall(self, stalled: bool) -> None:
        """Stop reading, or read on."""
        if stalled:
            self._may_write.clear()
        else:
            self._may_write.set()

    async def wrote(self, text: bytes) -> None:
        """Wait until the body has a text."""
        while text not in self.body:
            self._wrote.clear()
            await self._wrote.wait()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def events(self) -> list[Any]:
        return [
            json.loads(part.removeprefix(b"data: ")) for part in self.body.split(b"\n\n") if part.startswith(b"data")
        ]


@asynccontextmanager
async def serving(handle_spec: ModelSpec = SPEC) -> AsyncIterator[Handle]:
    """A handle; every lease must have been given back after the block."""
    handle = Handle(handle_spec)
    yield handle
    assert handle.leases == 0, "the lease was not given back"


BODY = b'{"PROMPT": "hi", "id": "7"}'


async def test_each_response_is_an_event_as_soon_as_it_is_sent() -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        for word in ("a", "b", "c"):
            await handle.send(text(word))
            await client.wrote(b'"TEXT":"%b"' % word.encode())
            assert not call.done()
        await handle.end()
        await call
        assert handle.consumed == 3
        assert client.status == 200
        assert client.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert client.headers["cache-control"] == "no-store, no-transform"
        assert client.headers["x-accel-buffering"] == "no"
        assert client.headers["headrace-queue-depth"] == "3"
        assert "content-length" not in client.headers
        head = {"model_name": "chat", "model_version": "2", "id": "7"}
        assert client.events == [{**head, "TEXT": word} for word in "abc"]
        assert client.sent[-1].get("more_body", False) is False
    assert handle.failures == []


@pytest.mark.parametrize(("count", "words"), [(0, "sent no response"), (2, "sent more than one response")])
async def test_generate_takes_exactly_one_response(count: int, words: str) -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate", BODY))
        await handle.send(*[text("x")] * count)
        if not count:
            await handle.end()
        await call
        assert client.status == 400
        error = json.loads(client.body)["error"]
        assert error == f"model 'chat' {words}, /generate returns exactly one: send the request to /generate_stream"
        assert handle.completions[0].is_settled  # the rest of the work is cancelled
    assert [error.reason for error in handle.failures] == ["bad_request"]


async def test_a_later_error_is_the_last_event() -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await handle.send(text("a"))
        await handle.end(ModelFailed("out of memory"))
        await call
        assert client.status == 200
        assert [event.get("TEXT") or event for event in client.events] == ["a", {"error": "out of memory"}]
        assert client.sent[-1].get("more_body", False) is False
    assert [error.reason for error in handle.failures] == ["model_failed"]


async def test_a_response_that_is_no_text_ends_the_stream_and_the_work() -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await handle.send(text("a"), text(b"\xff"))
        await call
        assert "is not UTF-8 text" in client.events[-1]["error"]
        assert handle.completions[0].is_settled


async def test_a_stream_is_recorded_once_at_its_end() -> None:
    observer = AccessRecorder(active=True)

    async with serving() as handle:
        client = Client(handle, observer=observer)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await handle.send(*map(text, "abc"))
        await client.wrote(b'"c"')
        assert observer.answers == []
        await handle.end()
        await call
    assert [(record.status, record.request_id, record.rows) for record in observer.answers] == [("200", "7", 1)]
    assert observer.failures == []


async def test_a_stalled_reader_gives_the_model_no_credit() -> None:
    async with serving() as handle:
        client = Client(handle)
        client.stall(True)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await handle.send(*[text("x")] * 20)
        for _ in range(100):
            await asyncio.sleep(0)
        assert handle.consumed == 0
        client.stall(False)
        await handle.end()
        await call
        assert (handle.consumed, len(client.events)) == (20, 20)


async def test_heartbeats_come_while_the_model_sends_nothing() -> None:
    async with serving() as handle:
        client = Client(handle, heartbeat_s=0.01)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await client.wrote(b":\n\n:\n\n")  # the head is sent with the first one
        await handle.send(text("a"))
        await client.wrote(b"data:")
        await handle.end(ModelFailed("late"))
        await call
        assert client.status == 200
        assert [event.get("TEXT") or event for event in client.events] == ["a", {"error": "late"}]
        assert set(client.body.split(b"\n\n")) - {b":", b""} == {
            part for part in client.body.split(b"\n\n") if part.startswith(b"data: ")
        }


async def test_no_heartbeats_without_an_interval() -> None:
    async with serving() as handle:
        client = Client(handle, heartbeat_s=0.0)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await asyncio.sleep(0.05)
        assert client.sent == []
        await handle.end()
        await call
        assert client.body == b""


async def test_the_shutdown_is_the_last_event() -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await handle.send(text("a"))
        await client.wrote(b"data:")
        call.cancel()
        await call
        assert "shutting down" in client.events[-1]["error"]
        assert handle.completions[0].is_settled
    assert [error.reason for error in handle.failures] == ["unavailable"]


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "headers", "model", "status", "words"),
    [
        (b'{"PROMPT": 3}', (), "chat", 400, "data must be strings"),
        (b"{", (), "chat", 400, "not valid JSON"),
        (BODY, [(b"inference-header-content-length", b"3")], "chat", 400, "is one JSON object, send tensors"),
        (BODY, [(b"content-type", b"image/png")], "chat", 400, "is one JSON object, send tensors"),
        (BODY, [(b"x-request-timeout-ms", b"soon")], "chat", 400, "x-request-timeout-ms"),
        (BODY, (), "other", 404, "not found"),
        (b'{"PROMPT": "' + b"a" * 5000 + b'"}', (), "chat", 413, "4000"),
        (b"xx", [(b"content-encoding", b"gzip")], "chat", 400, "gzip"),
        (b"xx", [(b"content-length", b"5000")], "chat", 413, "5000"),
    ],
)
async def test_an_invalid_request_has_a_status(
    path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]], model: str, status: int, words: str
) -> None:
    async with serving() as handle:
        client = Client(handle)
        await client.post(path, body, headers, model)
        assert client.status == status
        assert words in json.loads(client.body)["error"]


async def test_a_version_that_refuses_requests_has_a_status() -> None:
    async with serving() as handle:
        handle.refuses = Overloaded("loading")
        client = Client(handle)
        await client.post("generate_stream", BODY)
        assert (client.status, client.headers["retry-after"]) == (503, "1")


async def test_a_large_response_is_encoded_beside_the_loop() -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        await handle.send(text("\u00e9" * 200_000))
        await handle.end()
        await call
        assert client.events[0]["TEXT"] == "\u00e9" * 200_000


async def test_an_error_between_responses_is_an_event_and_the_request_fails() -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post("generate_stream", BODY))
        error: Any = ModelFailed("one token")
        await handle.send(text("a"), error, text("b"))
        await handle.end()
        await call
        assert [event.get("TEXT") or event for event in client.events] == ["a", {"error": "one token"}, "b"]
        assert handle.consumed == 3
    assert [str(error) for error in handle.failures] == ["one token"]


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
async def test_an_error_as_the_first_response_is_the_status(path: str) -> None:
    async with serving() as handle:
        client = Client(handle)
        call = asyncio.create_task(client.post(path, BODY))
        error: Any = ModelFailed("no prompt")
        await handle.send(error, text("b"))
        await call
        assert (client.status, json.loads(client.body)) == (500, {"error": "no prompt"})
        assert handle.completions[0].is_settled
    assert [str(error) for error in handle.failures] == ["no prompt"]
