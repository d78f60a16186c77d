"""The inference route as a bare ASGI callable: what goes over `send` for what comes by `receive`, behind any ASGI server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    ModelFailed,
    NotFound,
    Overloaded,
    QueueTimeout,
    QuotaExceeded,
    Unavailable,
    WouldMiss,
)
from headrace.core.limits import ClientLimits, Limits
from headrace.core.request import BatchTimes, InferRequest, InferResponse, LevelLoad, ModelLoad
from headrace.core.telemetry import TraceContext
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.wire.http.codec import IMAGE_BODY
from headrace.wire.http.infer_endpoint import InferEndpoint, InferHeaders
from headrace.wire.requests.request_options import RequestOptionsReader
from headrace.wire.requests.services import InferenceServices

from tests.support.access_recorder import AccessRecorder
from tests.support.fake_handles import FakeHandle
from tests.support.reference_cycles import leaked_frames
from tests.support.waiting import until_async

LIMIT = 4_000
LOAD = ModelLoad(3, 5, 4, 2, 1, 1_500, 9_000_000, 100.0, 1, (LevelLoad(1, 3, 5, 1_500),))
BUSY = {"headrace-queue-depth": "3", "headrace-predicted-wait-us": "1"}
X = TensorSpec("X", BY_NAME["FP32"], (-1, -1))
SPEC = ModelSpec("twice", "1", "test", {"X": X}, {"Y": TensorSpec("Y", BY_NAME["FP32"], (-1, -1))}, 8)


def timed(outputs: dict[str, Any]) -> InferResponse:
    """The response of a batch of three rows that is closed now and takes 2 us."""
    at_ns = monotonic_ns()
    return InferResponse(outputs, BatchTimes(at_ns, at_ns, at_ns + 2_000, at_ns + 2_000), 3, "full")


class Handle(FakeHandle):
    """A leased model that answers with twice the input, at once, or with an error, or never."""

    report = LOAD

    def __init__(
        self, error: HeadraceError | Exception | None = None, silent: bool = False, timed: bool = False
    ) -> None:
        super().__init__(SPEC)
        self.timed = timed
        self.error = error
        self.silent = silent
        self.requests: list[InferRequest] = []
        self.completions: list[LoopCompletion] = []
        self.loads = 0

    def infer(self, request: InferRequest) -> LoopCompletion:
        self.requests.append(request)
        completion = LoopCompletion(Mailbox(asyncio.get_running_loop()))
        self.completions.append(completion)
        if not self.silent:
            outputs = {"Y": request.inputs["X"] * 2}  # type: ignore[operator]
            completion.settle(self.error or (timed(outputs) if self.timed else InferResponse(outputs)))
        return completion

    def load(self, by_level: bool = True) -> Any:
        self.loads += 1
        return super().load()

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        assert received_ns > 0
        super().record_failure(error, received_ns)
        self.recorder.failure(error.reason, 0, None if answered is None else answered.duration_ns(received_ns))


class Models:
    """A model source with one model."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def lease(self, name: str, version: str) -> Handle:
        if name != "twice":
            raise NotFound(f"model {name!r} is not found")
        self.handle.leases += 1
        return self.handle


def services(handle: Handle, observer: AccessRecorder | None = None) -> InferenceServices:
    nothing: Any = None
    models: Any = Models(handle)
    recorder = observer or AccessRecorder()
    return InferenceServices(models=models, regions=nothing, observer=recorder, extensions=())


Answer = tuple[int, dict[str, str], bytes]


def call(
    handle: Handle,
    *bodies: bytes,
    headers: Sequence[tuple[bytes, bytes]] = (),
    then: Sequence[dict[str, Any]] = (),
    model: str = "twice",
    observer: AccessRecorder | None = None,
) -> Answer | None:
    """One request in as many parts as there are bodies; None if nothing was answered."""
    incoming: list[dict[str, Any]] = [
        {"type": "http.request", "body": part, "more_body": index < len(bodies) - 1}
        for index, part in enumerate(bodies)
    ]
    incoming += then
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop(0)
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def run() -> None:
        endpoint = InferEndpoint(services(handle, observer), ClientLimits(Limits(max_body_bytes=LIMIT)))
        await asyncio.wait_for(endpoint({"headers": list(headers)}, receive, send, model, ""), 60)

    asyncio.run(run())
    assert handle.leases == 0, "the lease was not given back"
    if not sent:
        return None
    start, body = sent
    assert (start["type"], body["type"]) == ("http.response.start", "http.response.body")
    named = {name.decode(): value.decode() for name, value in start["headers"]}
    assert named["content-length"] == str(len(body["body"]))
    return start["status"], named, body["body"]


def request(columns: int = 2) -> bytes:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, columns], "data": [0.5] * columns}
    return json.dumps({"inputs": [tensor]}).encode()


ANSWER = b'{"model_name":"twice","model_version":"1","outputs":[{"name":"Y","datatype":"FP32","shape":[1,2],"data":[1.0,1.0]}]}'


def test_a_json_request() -> None:
    assert call(Handle(), request()) == (
        200,
        {"content-type": "application/json", "content-length": str(len(ANSWER)), **BUSY},
        ANSWER,
    )


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("full", 3.0), 503, "3"),
        (WouldMiss("late", 0.02), 503, "1"),
        (QuotaExceeded("too many", 1.5), 429, "2"),
        (QueueTimeout("late"), 503, "1"),
        (Unavailable("away"), 503, "1"),
        (DeadlineExceeded("late"), 504, None),
        (ModelFailed("broken"), 500, None),
    ],
)
def test_errors_of_the_data_plane(error: HeadraceError, status: int, retry_after: str | None) -> None:
    handle = Handle(error)
    answer = call(handle, request())
    assert answer is not None
    assert (answer[0], answer[1].get("retry-after")) == (status, retry_after)
    assert json.loads(answer[2]) == {"error": str(error)}
    assert handle.failures == [error]
    delay_s = getattr(error, "retry_after_s", None)
    assert answer[1].get("retry-after-ms") == (None if delay_s is None else f"{delay_s * 1000:.0f}")


def test_an_unknown_model_is_answered_without_reading_its_body() -> None:
    answer = call(Handle(), model="other")
    assert answer is not None
    assert (answer[0], json.loads(answer[2])) == (404, {"error": "model 'other' is not found"})


def test_a_model_that_refuses_early_reads_no_body() -> None:
    handle = Handle()
    handle.refuses = Unavailable("dead")
    answer = call(handle)
    assert answer is not None
    assert answer[0] == 503
    assert not handle.requests


def test_an_unexpected_error_hides_its_text_and_names_the_log_reference(caplog: pytest.LogCaptureFixture) -> None:
    handle = Handle(RuntimeError("/secret/path"))
    answer = call(handle, request())
    assert answer is not None
    message = json.loads(answer[2])["error"]
    assert answer[0] == 500
    assert "secret" not in message
    reference = message.rpartition("(")[2].rstrip(")")
    assert reference in caplog.text
    assert "/secret/path" in caplog.text
    assert [failure.reason for failure in handle.failures] == ["model_failed"]


def test_a_response_that_cannot_be_written_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def head(*_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr("headrace.wire.http.infer_endpoint.success_head", head)
    handle = Handle()
    answer = call(handle, request())
    assert answer is not None
    assert answer[0] == 500
    assert [type(error) for error in handle.failures] == [ModelFailed]
    assert (handle.recorder.totals().undelivered, handle.leases) == (1, 0)


def test_a_disconnect_before_the_body_is_complete_gets_no_response() -> None:
    handle = Handle()
    incoming = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    assert call(handle, then=incoming) is None
    assert isinstance(handle.failures[0], Cancelled)
    assert not handle.requests


def test_a_disconnect_while_waiting_drops_the_request() -> None:
    handle = Handle(silent=True)
    assert call(handle, request(), then=[{"type": "http.disconnect"}]) is None
    assert handle.completions[0].is_settled
    assert isinstance(handle.failures[0], Cancelled)


def test_every_sampled_request_is_recorded() -> None:
    observer = AccessRecorder(active=True)
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    headers = [(b"traceparent", traceparent.encode()), (b"x-headrace-client", b"me")]
    assert call(Handle(timed=True), request(), headers=headers, observer=observer) is not None
    (record,) = observer.answers
    assert observer.contexts == [("twice", TraceContext("a" * 32, "b" * 16, True))]
    assert (record.protocol, record.model, record.version, record.status, record.reason) == (
        "http",
        "twice",
        "1",
        "200",
        "ok",
    )
    assert (record.rows, record.client, record.batch_rows, record.closed) == (1, "me", 3, "full")
    assert 0 < record.received_ns <= record.queued_ns <= record.done_ns <= record.ended_ns
    assert record.times is not None
    assert call(Handle(ModelFailed("no")), request(), observer=observer) is not None
    assert len(observer.answers) == 1, "an error was recorded as a response"
    (failed,) = observer.failures
    assert (failed.status, failed.reason, failed.error, failed.rows) == ("500", "model_failed", "no", 1)


def test_without_sampling_only_failures_are_recorded() -> None:
    observer = AccessRecorder()
    assert call(Handle(), request(), observer=observer) is not None
    assert observer.answers == observer.failures == []
    assert call(Handle(), request(), model="other", observer=observer) is not None
    assert call(Handle(), b"{", observer=observer) is not None
    assert call(Handle(RuntimeError("/secret/path")), request(), observer=observer) is not None
    unknown, unreadable, fault = observer.failures
    assert (unknown.model, unknown.status, unknown.reason) == ("other", "404", "not_found")
    assert (unreadable.model, unreadable.version, unreadable.status) == ("twice", "1", "400")
    assert fault.status == "500"
    assert "secret" not in fault.error
    assert observer.untraced == 3


def test_a_request_interrupted_by_the_shutdown_gets_an_error() -> None:
    sent: list[Any] = []
    handle = Handle(silent=True)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": request(), "more_body": False} if not handle.requests else await never()

    async def never() -> Any:
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        endpoint = InferEndpoint(services(handle), ClientLimits(Limits(max_body_bytes=LIMIT)))
        task = asyncio.ensure_future(endpoint({"headers": []}, receive, send, "twice", ""))
        await until_async(lambda: handle.requests)
        task.cancel()
        await task

    asyncio.run(run())
    assert sent[0]["status"] == 503
    assert "shutting down" in json.loads(sent[1]["body"])["error"]
    assert [failure.reason for failure in handle.failures] == ["unavailable"]
    assert handle.leases == 0


@pytest.mark.parametrize("kind", [DeadlineExceeded, Cancelled, ModelFailed])
def test_the_body_of_a_failed_request_is_freed_at_once(kind: type[HeadraceError]) -> None:
    with leaked_frames() as left:
        call(Handle(kind("broken")), request())  # no other object references the error
    assert not [name for name in left if name.startswith(("InferEndpoint", "_wait"))]


def test_headers_that_fail_again_for_the_error_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(endpoint: InferEndpoint, scope: Any) -> Any:
        raise RecursionError("unexpected")

    monkeypatch.setattr(InferEndpoint, "parse_headers", fail)
    answer = call(Handle(), request())
    assert answer is not None
    assert answer[0] == 500
    assert b"its log has the cause" in answer[2]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([(b"content-type", b"image/jpeg")], IMAGE_BODY),
        ([(b"content-type", b"Image/WebP; q=1")], IMAGE_BODY),
        ([(b"content-type", b"application/x-www-form-urlencoded")], None),
        ([(b"content-type", b"application/json")], None),
        ([], None),
        ([(b"inference-header-content-length", b"12"), (b"content-type", b"image/jpeg")], 12),
        ([(b"content-type", b"image/jpeg"), (b"inference-header-content-length", b"0")], 0),
    ],
)
def test_a_content_type_of_images_makes_the_body_one_image(
    headers: list[tuple[bytes, bytes]], expected: int | None
) -> None:
    assert InferHeaders(headers, RequestOptionsReader()).header_size == expected
