"""Decoupled Python models, from a process to the reader of a stream: order, ends, backpressure, cancellation, deaths."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox, ThreadCompletion
from headrace.core.errors import (
    BatchLost,
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    ModelFailed,
    Unavailable,
)
from headrace.core.request import InferResponse
from headrace.core.response_stream import ResponseStream
from headrace.core.tensor import ModelSpec
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.python.backend import PythonModel
from headrace.python.open_requests import OpenRequests
from headrace.python.outputs import ModelTensors, ResponseOutputs
from headrace.runtimes.members import BatchMember
from headrace_model import protocol

from tests.support.completions import responses_of
from tests.support.decoupled_models import (
    ACTIONS,
    REPEAT,
    decoupled_handle,
    decoupled_spec,
    open_decoupled,
    stream_request,
)
from tests.support.waiting import more, record_calls, until_async

Answers = list[Any]


class Client:
    """Sends requests to a model on an event loop.

    Attributes:
        handle: the model.
        model: its processes.
    """

    def __init__(self, mailbox: Mailbox, model: PythonModel, spec: ModelSpec) -> None:
        self.mailbox = mailbox
        self.model = model
        self.handle: ModelHandle = decoupled_handle(mailbox, model, spec)

    def start(self, *values: int, **fields: Any) -> tuple[LoopCompletion, ResponseStream]:
        """Send a request; its lease ends with it."""
        array = np.array(values, np.int32)
        if self.handle.spec.max_batch_size:
            array = array.reshape(1, -1)
        request, stream = stream_request(self.mailbox, {"IN": array}, **fields)
        assert self.handle.lease()
        completion = self.handle.infer(request)

        async def release() -> None:
            await asyncio.wait([asyncio.ensure_future(settled(completion))])
            self.handle.release()

        self.leases = [*getattr(self, "leases", []), asyncio.get_running_loop().create_task(release())]
        return completion, stream

    async def ask(self, *values: int, **fields: Any) -> tuple[Answers, InferResponse | HeadraceError]:
        """Send a request; return the values of its responses, and its end."""
        return await read(*self.start(*values, **fields))

    async def state(self) -> tuple[list[int], str]:
        """Return responses that the model has sent, cancellations that it has seen, errors of `send` and their texts."""
        completion, stream = self.start(7, 0)
        (response,) = [response async for response in responses_of(stream, completion)]
        assert isinstance(response, InferResponse)
        assert response.parameters is not None
        return response.outputs["OUT"].tolist(), str(response.parameters["errors"])  # type: ignore[attr-defined]


async def settled(completion: LoopCompletion) -> None:
    """Wait until a completion is settled, beside its reader."""
    await until_async(lambda: completion.is_settled)


async def read(completion: LoopCompletion, stream: ResponseStream) -> tuple[Answers, InferResponse | HeadraceError]:
    return [shown(response) async for response in responses_of(stream, completion)], await ended(completion)


def shown(response: InferResponse | HeadraceError | None) -> Any:
    """Return the values of a response, or the text of an error."""
    assert response is not None
    return response.outputs["OUT"].tolist() if isinstance(response, InferResponse) else str(response)  # type: ignore[attr-defined]


async def ended(completion: LoopCompletion) -> InferResponse | HeadraceError:
    try:
        return await completion
    except HeadraceError as error:
        return error


@asynccontextmanager
async def serving(
    folder: Path, code: str = ACTIONS, spec: ModelSpec | None = None, **options: Any
) -> AsyncIterator[Client]:
    """A client of a fresh model."""
    served = spec or decoupled_spec({"IN": "INT32"})
    model = open_decoupled(folder / "m", code, served, **options)
    client = Client(Mailbox(asyncio.get_running_loop()), model, served)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.handle.close, 20.0)
        await asyncio.gather(*client.leases)


def counted(number: int) -> Answers:
    return [[element] for element in range(number)]


async def test_requests_interleave_and_keep_their_order(tmp_path: Path) -> None:
    spec = decoupled_spec({"IN": "INT32", "DELAY": "UINT32", "WAIT": "UINT32"})
    spec.outputs["IDX"] = decoupled_spec({"IDX": "UINT32"}).inputs["IDX"]

    async with serving(tmp_path, REPEAT, spec) as client:
        streams = []
        for values in ([4, 2, 0, 1], [7], []):
            inputs = {"IN": np.array(values, np.int32), "DELAY": np.full(len(values), 5, np.uint32)}
            request, stream = stream_request(client.mailbox, {**inputs, "WAIT": np.zeros(1, np.uint32)})
            streams.append((client.handle.infer(request), stream))
        client.leases: list[Any] = []
        for (completion, stream), values in zip(streams, ([4, 2, 0, 1], [7], []), strict=True):
            responses: list[Any] = [response async for response in responses_of(stream, completion)]
            assert [response.outputs["OUT"].tolist() for response in responses] == [[element] for element in values]
            assert [response.outputs["IDX"].tolist() for response in responses] == counted(len(values))
            await completion


async def test_responses_may_follow_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        for action in (3, 23):
            answers, end = await client.ask(action, 3)
            assert answers == [*counted(3), "after 3", [99]]
            assert isinstance(end, InferResponse)
        assert (await client.ask(1, 2))[0] == counted(2)


@pytest.mark.parametrize(("action", "number"), [(4, 0), (4, 2), (24, 2), (0, 0)])
async def test_a_sender_that_is_dropped_ends_its_request_with_an_error(
    tmp_path: Path, action: int, number: int
) -> None:
    async with serving(tmp_path) as client:
        answers, end = await client.ask(action, number)
        assert answers == counted(number)
        assert isinstance(end, ModelFailed)
        assert "dropped the response sender" in str(end)
        await until_async(lambda: client.handle.recorder.totals().executions)


async def test_errors_of_execute(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        answers, end = await client.ask(20, 0)
        assert answers == []
        assert isinstance(end, ModelFailed)
        assert "secret" not in str(end)
        answers, end = await client.ask(21, 0)
        assert "the model is decoupled, and its execute returned responses" in str(end)
        assert (await client.ask(1, 1))[0] == counted(1), "the instance goes on"


async def test_a_failure_does_not_overtake_the_responses_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = OpenRequests._read_available

    def read_late(requests: OpenRequests, *args: Any) -> bool:
        time.sleep(0.05)
        return read(requests, *args)

    monkeypatch.setattr(OpenRequests, "_read_available", read_late)
    raising = """if action == 25:
                self.act(request, request.get_response_sender(), 4, number)
                raise ValueError("after its responses")
            if action == 20:"""
    code = ACTIONS.replace("if action == 20:", raising)
    async with serving(tmp_path, code) as client:
        for number in (3, 0):
            answers, end = await client.ask(25, number)
            assert answers == counted(number)
            assert isinstance(end, ModelFailed)
            assert "failed on this request" in str(end)


async def test_a_response_after_the_final_flag_is_an_error_in_the_model(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        answers, end = await client.ask(8, 0)
        assert answers == [[1]]
        assert isinstance(end, InferResponse)
        await until_async(lambda: has_errors(client, 2))
        _numbers, texts = await client.state()
        assert texts.count("after the final flag") == 2


async def has_errors(client: Client, count: int) -> bool:
    return (await client.state())[0][2] == count


async def test_threads_of_the_model_send_to_one_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        answers, end = await client.ask(9, 200)
        values = [value for (value,) in answers]
        assert isinstance(end, InferResponse)
        assert sorted(values) == sorted(start * 1000 + element for start in range(4) for element in range(200))
        for start in range(4):
            own = [value for value in values if value // 1000 == start]
            assert own == sorted(own), "the responses of one thread keep their order"


async def test_inputs_outlive_their_batch(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        first = client.start(10, 1, 2, 3)
        second = client.start(10, 4, 5, 6)
        for _ in range(20):
            assert (await client.ask(1, 1, 9, 9))[0] == counted(1)
        await client.ask(11, 0)
        assert (await read(*first))[0] == [[10, 1, 2, 3]]
        assert (await read(*second))[0] == [[10, 4, 5, 6]]


async def test_a_slow_reader_blocks_its_own_sender_only(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        completion, stream = client.start(1, 500)
        await until_async(lambda: is_blocked(client))
        assert stream.sent == 64
        assert await has_sent(client, 64), "the 65th send has not returned"
        assert (await client.ask(2, 300))[0] == counted(300), "other requests go on"
        assert stream.sent == 64
        assert not completion.is_settled
        for number in range(8):
            assert shown(stream.take()) == [number]
            stream.consumed()
        await until_async(lambda: stream.sent == 72)
        answers, end = await read(completion, stream)
        assert answers == counted(500)[8:]
        assert isinstance(end, InferResponse)


async def test_a_slow_reader_bounds_the_bytes(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        elements = 500_000  # 2 MB each: two are allowed
        completion, stream = client.start(12, elements)
        await until_async(lambda: is_blocked(client))
        assert stream.sent == 2
        assert await has_sent(client, 2)
        answers, end = await read(completion, stream)
        assert [(len(answer), answer[0], answer[-1]) for answer in answers] == [(elements, n, n) for n in range(4)]
        assert isinstance(end, InferResponse)
        # Larger than the bound: alone.
        completion, stream = client.start(12, 1_500_000)
        await until_async(lambda: stream.sent == 1)
        assert [len(answer) for answer in (await read(completion, stream))[0]] == [1_500_000] * 4


async def test_the_model_sees_a_cancelled_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        completion, stream = client.start(6, 2)
        await until_async(lambda: stream.sent == 2)
        completion.abandon()
        assert isinstance(await ended(completion), Cancelled)
        await until_async(lambda: is_cancelled(client, 1))
        # A blocked sender goes on, and its responses are dropped.
        completion, stream = client.start(1, 100)
        await until_async(lambda: stream.sent == 64)
        completion.abandon()
        await until_async(lambda: has_sent(client, 102))
        assert stream.sent == 64
        connection = client.model._processes[0].connection
        assert connection is not None
        await until_async(lambda: connection.open.count == 0)


async def test_a_cancellation_does_not_wait_for_the_next_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.python.open_requests._POLL_MS", 3_600_000)

    async with serving(tmp_path) as client:
        completion, stream = client.start(6, 2)
        await until_async(lambda: stream.sent == 2)
        completion.abandon()
        await until_async(lambda: is_cancelled(client, 1))


async def is_cancelled(client: Client, count: int) -> bool:
    return (await client.state())[0][1] == count


def is_blocked(client: Client) -> bool:
    """Return True while a `send` of the model waits for its reader."""
    connection = client.model._processes[0].connection
    assert connection is not None
    return connection.open.is_waiting


async def has_sent(client: Client, count: int) -> bool:
    return (await client.state())[0][0] == count


async def test_a_deadline_ends_an_open_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        now_ns = monotonic_ns()
        answers, end = await client.ask(6, 2, deadline_ns=now_ns + 5000 * NS_PER_MS, id="late")
        assert answers == counted(len(answers))
        assert isinstance(end, DeadlineExceeded)
        await until_async(lambda: is_cancelled(client, 1))


async def test_the_end_of_a_process_fails_its_open_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        waiting = [client.start(15, 0) for _ in range(3)]
        for _completion, stream in waiting:
            await until_async(lambda stream=stream: stream.sent == 1)
        answers, end = await client.ask(5, 3)
        assert answers == counted(3), "what was sent before the end arrives"
        assert isinstance(end, BatchLost)
        for completion, stream in waiting:
            answers, end = await read(completion, stream)
            assert answers == [[1]]
            assert isinstance(end, BatchLost)
            assert "SIGKILL" in str(end)
        answers, end = await client.ask(1, 2)
        assert answers == counted(2), "the next process serves"


async def test_the_end_of_a_process_within_execute(tmp_path: Path) -> None:
    code = ACTIONS.replace("if action in (22, 23, 24):", "if action in (22, 23, 24, 25):")
    async with serving(tmp_path, code) as client:
        answers, end = await client.ask(1, 0)
        completion, stream = client.start(22, 1)
        await read(completion, stream)
        crash = ACTION_IN_EXECUTE
        answers, end = await client.ask(*crash)
        assert answers == counted(3)
        assert isinstance(end, BatchLost)
        assert (await client.ask(1, 1))[0] == counted(1)


ACTION_IN_EXECUTE = (25, 3)


async def test_open_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = record_calls(monkeypatch, OpenRequests, "wait_below")

    async with serving(tmp_path, max_open=2) as client:
        kept = [client.start(15, 0) for _ in range(2)]
        for _completion, stream in kept:
            await until_async(lambda stream=stream: stream.sent == 1)
        waiting = client.start(16, 0)
        await until_async(more(waits, 2))  # the instance has waited for room in vain
        assert client.handle.depth == 1, "the third request stays in the queue"
        kept[0][0].abandon()
        await until_async(more(waits, 2))  # the instance has waited for room in vain
        assert client.handle.depth == 1, "the model has not ended it"
        assert not waiting[0].is_settled
        waiting[0].abandon()
        kept[1][0].abandon()


async def test_closing_waits_for_open_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        completion, stream = client.start(10, 5)
        opened = client.start(15, 0)
        await until_async(lambda: opened[1].sent == 1)
        closing = asyncio.get_running_loop().run_in_executor(None, client.handle.close, None)
        await until_async(lambda: client.handle.closing)
        assert not closing.done()
        opened[0].abandon()
        connection = client.model._processes[0].connection
        assert connection is not None
        request, _stream = stream_request(client.mailbox, {"IN": np.array([11, 0], np.int32)})
        await client.handle.infer(request)
        assert (await read(completion, stream))[0] == [[10, 5]]
        await asyncio.gather(*client.leases)
        assert await closing


async def test_closing_with_a_limit_fails_open_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        completion, stream = client.start(15, 0)
        await until_async(lambda: stream.sent == 1)
        await asyncio.to_thread(client.handle.close, 0.1)
        answers, end = await read(completion, stream)
        assert answers == [[1]]
        assert isinstance(end, BatchLost | Unavailable)


async def test_wrong_responses_end_the_request_with_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        _answers, end = await client.ask(13, 0)
        assert "returned output 'OUT' as FP32, its configuration declares INT32" in str(end)
        _answers, end = await client.ask(14, 0)
        assert "returned no output 'OUT'" in str(end)
        assert (await client.ask(1, 1))[0] == counted(1)


async def test_a_response_has_any_number_of_rows(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for rows in range(3):
                tensor = pb_utils.Tensor("OUT", np.full((rows, 2), rows, np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(3, np.int32))]), flags=FINAL)
"""

    async with serving(tmp_path, code, decoupled_spec({"IN": "INT32"}, batched=True)) as client:
        answers, end = await client.ask(1, 2)
        assert answers == [[], [[1, 1]], [[2, 2], [2, 2]]]
        assert "returned output 'OUT' with the shape [3]" in str(end)


async def test_a_model_that_waits_for_its_reader_does_not_hang(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        completion, stream = client.start(22, 200)
        await until_async(lambda: stream.sent == 64)
        connection = client.model._processes[0].connection
        assert connection is not None
        await until_async(lambda: connection.open.is_waiting)
        execution, now_ns = client.model.execution(0), monotonic_ns()
        assert execution._progress_limit_ns(connection, now_ns) == now_ns + 60 * NS_PER_S, "the limit begins anew"
        answers, end = await read(completion, stream)
        assert answers == counted(200)
        assert isinstance(end, InferResponse)
        assert not connection.open.is_waiting
        assert execution._progress_limit_ns(connection, now_ns) == connection.open.progress_ns + 60 * NS_PER_S


async def test_a_model_that_hangs_is_replaced(tmp_path: Path) -> None:
    code = ACTIONS.replace(
        "            if action == 20:\n",
        "            if action == 30:\n                request.get_response_sender().send(answer(1))\n"
        "                time.sleep(600)\n            if action == 20:\n",
    )
    async with serving(tmp_path, code, limit_s=2.0) as client:
        answers, end = await client.ask(30, 0)
        assert answers in ([], [[1]])  # a busy machine may be too slow for the first
        assert isinstance(end, BatchLost)
        await until_async(lambda: client.model.process_status.restarts == 1)


async def test_a_process_that_exceeds_its_credit_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path, bounds=(1000, 4 << 20)) as client:
        completion, stream = client.start(1, 500)
        await asyncio.wait_for(settled(completion), 60)
        assert stream.sent <= 64
        answers, end = await read(completion, stream)
        assert isinstance(end, BatchLost)
        assert "does not follow the protocol" in str(end)
        assert answers == counted(len(answers))


def test_a_warm_up_request_runs_to_its_end(tmp_path: Path) -> None:
    spec = decoupled_spec({"IN": "INT32"})
    model = open_decoupled(tmp_path / "m", ACTIONS, spec)
    execution = model.execution(0)
    try:
        assert execution.run({"IN": np.array([1, 100], np.int32)}) == {}
        with pytest.raises(HeadraceError, match="after 2"):
            execution.run({"IN": np.array([3, 2], np.int32)})
    finally:
        model.close()


def test_a_process_that_dies_with_unread_credit_loses_no_response() -> None:
    server, process = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ended = threading.Event()
    requests = OpenRequests(server, "m#0", lambda _why: None, ended, lambda: "by the test")
    requests.tensors = ResponseOutputs(ModelTensors("m", (), (), batched=False, decoupled=True))
    requests.decoupled = True
    sink = Sink()
    member = BatchMember(1, "", {}, (), 0, 0, {}, ThreadCompletion(), sink=sink)
    body = protocol.RESPONSE_HEAD.pack(protocol.OK, 0, 0, 0, 0)
    for _ in range(3):
        process.send(protocol.HEADER.pack(protocol.VERSION, protocol.RESPONSE, 0, 0, 1, 0, len(body)) + body)
    server.send(b"credit that the process does not read")
    process.close()
    requests.begin(1, [member], None)  # type: ignore[arg-type]
    requests.wait_drained()
    ended.set()
    assert sink.count == 3


class Sink:
    """Counts responses."""

    def __init__(self) -> None:
        self.count = 0
        self.responses: Any = SimpleNamespace(on_consumed=None)

    def send(self, result: object, size_bytes: int, is_final: bool) -> None:
        self.count += 1

    def end(self, error: HeadraceError | None) -> None:
        raise AssertionError("the process has sent no end")
