"""Calls of Python models at the server's end: frames, requests that a call belongs to, cycles, and shared memory."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox, ThreadCompletion
from headrace.core.errors import (
    Aborted,
    BadRequest,
    Cancelled,
    Conflict,
    DeadlineExceeded,
    HeadraceError,
    ModelFailed,
    NotFound,
    TooLarge,
    Unavailable,
    Unsupported,
)
from headrace.core.request import InferRequest, InferResponse, Probe
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.python.call_cycles import CallReplies, ModelCall, find_cycle
from headrace.python.model_calls import ModelCalls
from headrace.python.process import RunningBatch
from headrace.runtimes.members import BatchMember
from headrace_model import protocol
from headrace_model.channel import Frames
from headrace_model.slots import START, Slot

from tests.support.waiting import until_async

FP32 = protocol.CODES["FP32"]


class NoVersions:
    """A registry without models."""

    generation = 1

    def lease(self, name: str, version: str) -> Any:
        raise NotFound(f"no model {name}")

    def serving(self, name: str, version: str) -> Any:
        return None


def exchange(
    *frames: tuple[int, bytes], shared: bool = True, running: RunningBatch | None = None, versions: Any = None
) -> bytes:
    """Send frames to a connection and return the answer to the last; b"" if the connection was closed."""

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ModelCalls(loop, versions or NoVersions()).open(theirs, "caller", "1", lambda: running)
        sender, slot = Frames(ours), Slot.create("test", 1 << 16)
        if shared:
            sender.share(protocol.SHARE, 0, [slot.fd])
        for kind, body in frames:
            sender.send(kind, 0, 7, 1, body)
        ours.setblocking(False)
        answer = await asyncio.wait_for(loop.sock_recv(ours, 1 << 16), 60)
        ours.close()
        return answer

    return asyncio.run(run())


def body(**fields: Any) -> bytes:
    message = {"op": "infer", "model": "m", "version": "", "id": "", "outputs": [], "parameters": {}, "timeout_us": 0}
    return json.dumps({**message, "batch": 0, "member": -1, "inputs": [], **fields}).encode()


def parent(chain: tuple[str, ...] = (), **values: Any) -> BatchMember:
    """Return a request of a running batch; `chain` are the models that wait for it."""
    call = None
    if chain:
        call = ModelCall.__new__(ModelCall)
        call.chain = chain
    fields: dict[str, Any] = {"id": "", "parameters": {}, "outputs": (), "deadline_ns": 0, "priority": 0, "shapes": {}}
    return BatchMember(1, completion=ThreadCompletion(), call=call, **{**fields, **values})


def test_a_chain_that_is_too_long_is_refused() -> None:
    running = RunningBatch(3, [parent(tuple(f"m{number}/1" for number in range(16)))])
    answer = exchange((protocol.CALL, body(batch=3)), running=running)
    assert "17 levels deep, at most 16" in json.loads(answer[protocol.HEADER.size :])["error"][1]


async def test_a_circle_of_models_that_wait_for_each_other_is_found() -> None:
    calls = ModelCalls(asyncio.get_running_loop(), NoVersions())
    probe = Probe(Future(), monotonic_ns())
    results: list[bool] = []
    calls.wait_for_probes("a/1", frozenset({"b/1"}), [probe], results.append)
    calls.wait_for_probes("b/1", frozenset({"c/1", "d/1"}), [probe], results.append)
    calls.wait_for_probes("", frozenset({"a/1"}), [probe], results.append)  # from `execute`: delays no probe
    assert calls.is_probe_cycle("a/1", frozenset({"a/1"}))
    assert calls.is_probe_cycle("d/1", frozenset({"a/1"}))
    assert not calls.is_probe_cycle("e/1", frozenset({"a/1"}))
    assert not calls.is_probe_cycle("a/1", frozenset({"d/1"}))
    probe.answer.set_result(True)
    await asyncio.gather(*calls.probe_waits)
    assert (results, calls.probe_waits) == ([True] * 3, {})
    assert not calls.is_probe_cycle("d/1", frozenset({"a/1"}))
    late = Probe(Future(), monotonic_ns() - 6 * NS_PER_S)
    calls.wait_for_probes("a/1", frozenset({"b/1"}), [probe, late], results.append)
    await asyncio.gather(*calls.probe_waits)
    calls.wait_for_probes("a/1", frozenset({"b/1"}), [], results.append)
    assert results[3:] == [False, True]


@pytest.mark.parametrize(
    "frame",
    [
        (protocol.CALL, b"no JSON"),
        (protocol.CALL, b"[]"),
        (protocol.CALL, b"{}"),
        (protocol.CALL, b'{"op":"infer","model":"m","version":""}'),
        (protocol.CALL, b"[" * 20_000),  # deeper than the parser's recursion
        (protocol.CALL, body(batch=1e400)),
        (protocol.RUN, body()),
        (protocol.SHARE, b""),
    ],
)
def test_a_frame_that_is_no_call_closes_the_connection(frame: tuple[int, bytes]) -> None:
    assert exchange(frame) == b""


def test_a_call_without_its_slot_closes_the_connection() -> None:
    assert exchange((protocol.CALL, body()), shared=False) == b""


@pytest.mark.parametrize(
    "tensor",
    [
        (11, (4,), START, 12),
        (11, (4,), 0, 16),
        (11, (-4,), START, 16),
        (11, (1 << 40,), START, 4 << 40),
        (13, (1,), START, 1 << 40),
        (13, (9,), START, 16),
    ],
)
def test_tensors_outside_of_the_slot_are_no_tensors(tensor: tuple[int, tuple[int, ...], int, int]) -> None:
    from headrace.python.model_calls import _array

    slot = Slot.create("test", 1 << 16)
    code, shape, offset, size = tensor
    with pytest.raises(protocol.ProtocolError):
        _array(slot, code, shape, offset, size)


class OneVersion:
    """A served version `m/1` with the inputs and outputs a and b, and the registry that has it; requests wait for the test."""

    policy = SimpleNamespace(instances=1)
    alive = 1
    calls: frozenset[str] = frozenset()
    cache: object = None

    def __init__(self) -> None:
        tensors = {name: TensorSpec(name, BY_NAME["FP32"], (-1,)) for name in ("a", "b")}
        self.spec = ModelSpec("m", "1", "", tensors, tensors, 0)
        self.requests: list[tuple[InferRequest, LoopCompletion]] = []
        self.leases = 0
        self.failures: list[str] = []

    def lease(self, name: str, version: str) -> Any:
        self.leases += 1
        return self

    def serving(self, name: str, version: str) -> Any:
        return None

    def release(self) -> None:
        self.leases -= 1

    def record_failure(self, error: Exception, received_ns: int, answered: InferResponse | None = None) -> None:
        self.failures.append(type(error).__name__ + " after its answer" * (answered is not None))

    def infer(self, request: InferRequest) -> LoopCompletion:
        completion = LoopCompletion(Mailbox(asyncio.get_running_loop()))
        self.requests.append((request, completion))
        return completion


class Caller:
    """The process of a model, as the server sees it: one slot, and the batch that it runs."""

    def __init__(self, version: OneVersion, name: str = "caller") -> None:
        self.loop = asyncio.get_running_loop()
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.setblocking(False)
        self.running: RunningBatch | None = None
        self.frames, self.slot = Frames(self.end), Slot.create("test", 1 << 16)
        self.calls = ModelCalls(self.loop, version)
        self.connection = self.calls.open(theirs, name, "1", lambda: self.running)
        self.frames.share(protocol.SHARE, 0, [self.slot.fd])

    def send(self, a: Iterable[float] = (1, 2), b: Iterable[float] = (3, 4), number: int = 7, **fields: Any) -> None:
        inputs, end = [], START
        for name, values in (("a", a), ("b", b)):
            array = np.array(list(values), np.float32)
            size = self.slot.put(end, array, FP32)
            inputs.append([name, FP32, [len(array)], end, size])
            end += size
        self.frames.send(protocol.CALL, 0, number, 1, body(inputs=inputs, **fields))

    async def reply(self) -> dict[str, Any]:
        frame = await asyncio.wait_for(self.loop.sock_recv(self.end, 1 << 16), 60)
        return json.loads(frame[protocol.HEADER.size :])  # type: ignore[no-any-return]

    def outputs(self, reply: dict[str, Any]) -> dict[str, list[float]]:
        arrays = {}
        for name, code, dims, offset, size in reply["outputs"]:
            self.slot.reach(offset, size)
            arrays[name] = np.ndarray(dims, protocol.DTYPES[code], self.slot.memory, offset).tolist()
        return arrays


@asynccontextmanager
async def calling() -> AsyncIterator[tuple[Caller, OneVersion]]:
    """A caller of one version, whose leases must have been given back after the block."""
    version = OneVersion()
    caller = Caller(version)
    yield caller, version
    caller.connection.close()
    caller.end.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert version.leases == 0


async def until_called(version: OneVersion, count: int = 1) -> tuple[InferRequest, LoopCompletion]:
    await until_async(lambda: len(version.requests) >= count)
    return version.requests[count - 1]


async def test_outputs_that_are_views_of_the_inputs_arrive_unchanged() -> None:
    async with calling() as (caller, version):
        caller.send()
        request, completion = await until_called(version)
        completion.settle(InferResponse({"a": request.inputs["b"], "b": request.inputs["a"]}))
        assert caller.outputs(await caller.reply()) == {"a": [3, 4], "b": [1, 2]}


async def test_a_reply_that_cannot_be_written_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with calling() as (caller, version):
        caller.send()
        request, completion = await until_called(version)
        monkeypatch.setattr(Slot, "put", _fail)
        completion.settle(InferResponse({"a": request.inputs["b"], "b": request.inputs["a"]}))
        assert await asyncio.wait_for(caller.loop.sock_recv(caller.end, 1), 60) == b"", "the connection is closed"
        assert version.failures == ["ModelFailed after its answer"]


def _fail(*_arguments: object) -> None:
    raise OSError("no memory")


async def test_a_call_has_the_latest_deadline_and_the_client_of_its_batch() -> None:
    async with calling() as (caller, version):
        far = 1 << 60
        caller.running = RunningBatch(4, [parent(deadline_ns=far, client="x"), parent(deadline_ns=far + 5, client="y")])
        caller.send(batch=4)
        request, _completion = await until_called(version)
        assert (request.deadline_ns, request.client) == (far + 5, "x")
        caller.send(batch=4, member=1, number=8)
        request, _completion = await until_called(version, 2)
        assert (request.deadline_ns, request.client) == (far + 5, "y")
        caller.send(batch=4, member=0, number=9, timeout_us=1000)
        request, _completion = await until_called(version, 3)
        assert 0 < request.deadline_ns - request.received_ns <= 1_000_000
        caller.send(batch=3, number=10)  # a batch that has ended
        request, _completion = await until_called(version, 4)
        assert (request.deadline_ns, request.client) == (0, "")


async def test_inputs_of_a_call_are_copied_for_a_response_cache() -> None:
    async with calling() as (caller, version):
        version.cache = object()
        caller.send()
        request, _completion = await until_called(version)
        caller.slot.write(START, bytes(16))
        assert request.inputs["a"].tolist() == [1, 2]


async def test_a_reply_that_cannot_be_written_closes_the_connection_only() -> None:
    async with calling() as (caller, version):
        caller.send()
        _request, completion = await until_called(version)
        completion.settle(InferResponse({"no output of the model": np.zeros(1)}))
        assert await asyncio.wait_for(caller.loop.sock_recv(caller.end, 100), 60) == b""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotFound("text"), protocol.NOT_FOUND),
        (BadRequest("text"), protocol.INVALID_ARG),
        (TooLarge("text"), protocol.INVALID_ARG),
        (Conflict("text"), protocol.ALREADY_EXISTS),
        (Aborted("text"), protocol.UNAVAILABLE),
        (Unsupported("text"), protocol.UNSUPPORTED),
        (Unavailable("text"), protocol.UNAVAILABLE),
        (DeadlineExceeded("text"), protocol.UNAVAILABLE),
        (Cancelled("text"), protocol.CANCELLED),
        (ModelFailed("text"), protocol.INTERNAL),
    ],
)
async def test_errors_of_the_called_model_have_tritons_codes(error: HeadraceError, code: int) -> None:
    async with calling() as (caller, version):
        caller.send()
        _request, completion = await until_called(version)
        completion.settle(error)
        assert (await caller.reply())["error"] == [code, "text"]


async def test_several_calls_that_are_sent_at_once_are_all_read() -> None:
    async with calling() as (caller, version):
        for number in range(50):
            caller.send(number=number + 1)
        await until_called(version, 50)
        for _request, completion in version.requests:
            completion.settle(Unavailable("text"))
        for _ in range(50):
            assert (await caller.reply())["error"] == [protocol.UNAVAILABLE, "text"]


async def test_a_response_that_was_not_sent_cannot_be_taken() -> None:
    replies = CallReplies(Mailbox(asyncio.get_running_loop()), lambda _part: None)
    with pytest.raises(protocol.ProtocolError):
        replies.take()


async def test_responses_after_a_drop_are_not_sent() -> None:
    mailbox, sent, ended = Mailbox(asyncio.get_running_loop()), list[object](), list[bool]()
    replies, completion = CallReplies(mailbox, sent.append), LoopCompletion(mailbox)
    replies.begin(completion, lambda: ended.append(True))
    for _ in range(3):
        replies.stream.send(InferResponse({}))
    await until_async(lambda: sent)
    replies.drop()
    replies.stream.send(InferResponse({}))
    completion.settle(Cancelled("text"))
    await until_async(lambda: ended)
    assert len(sent) == len(ended) == 1


async def test_wrong_parameters_are_refused() -> None:
    async with calling() as (caller, _version):
        caller.send(parameters={"a": [1]})
        assert (await caller.reply())["error"] == [
            protocol.INVALID_ARG,
            "parameters of a call are texts, numbers and booleans",
        ]


def test_memory_that_can_be_made_smaller_is_refused() -> None:
    """A read behind the end of such memory would end the server by SIGBUS."""

    async def run(descriptor: int) -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ModelCalls(loop, NoVersions()).open(theirs, "caller", "1", lambda: None)
        sender = Frames(ours)
        sender.share(protocol.SHARE, 0, [descriptor])
        ours.setblocking(False)
        answer = await asyncio.wait_for(loop.sock_recv(ours, 100), 60)
        sender.close()
        return answer

    unsealed = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        for descriptor in (unsealed, file.fileno()):
            assert asyncio.run(run(descriptor)) == b""
    os.close(unsealed)


async def test_descriptors_of_a_refused_frame_are_closed() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    loop = asyncio.get_running_loop()
    slot = Slot.create("test", 1 << 16)
    before = count()
    for kind, first in ((protocol.CALL, 0), (protocol.SHARE, 5)):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ModelCalls(loop, NoVersions()).open(theirs, "caller", "1", lambda: None)
        sender = Frames(ours)
        sender.share(kind, first, [slot.fd] * 3)
        ours.setblocking(False)
        assert await asyncio.wait_for(loop.sock_recv(ours, 100), 60) == b""
        sender.close()
    assert count() == before


# Cycles


class Instance:
    """The connection of one instance, as `find_cycle` reads it."""

    def __init__(self, name: str) -> None:
        self.caller = name
        self.calls: dict[int, ModelCall] = {}
        self.running: RunningBatch | None = None

    def blocking_calls(self) -> list[ModelCall]:
        return list(self.calls.values())


def wait(source: Instance, target: str, instances: int = 1) -> ModelCall:
    """Return a call that is not queued yet."""
    call = ModelCall.__new__(ModelCall)
    call.caller, call.target, call.handle = source, target, SimpleNamespace(policy=SimpleNamespace(instances=instances))  # type: ignore[assignment]
    return call


def queue(source: Instance, target: str, instances: int = 1, runs_on: Instance | None = None) -> ModelCall:
    call = wait(source, target, instances)
    source.calls[len(source.calls)] = call
    if runs_on is not None:
        runs_on.running = RunningBatch(1, [parent()._replace(call=call)])
    return call


def cycle(call: ModelCall, *instances: Instance) -> list[str]:
    return find_cycle(call, instances)  # type: ignore[arg-type]


def test_two_models_whose_instances_all_wait_for_each_other() -> None:
    a, b = Instance("a/1"), Instance("b/1")
    queue(a, "b/1")
    assert cycle(wait(b, "a/1"), a, b) == ["b/1", "a/1", "b/1"]


def test_a_free_instance_serves_the_call() -> None:
    a, b, free = Instance("a/1"), Instance("b/1"), Instance("a/1")
    queue(a, "b/1")
    assert cycle(wait(b, "a/1", 2), a, b, free) == []
    queue(free, "onnx/1")  # is answered in any case
    assert cycle(wait(b, "a/1", 2), a, b, free) == []


def test_the_last_instance_of_a_model_that_calls_itself() -> None:
    first, second = Instance("a/1"), Instance("a/1")
    queue(first, "a/1", 2)
    assert cycle(wait(second, "a/1", 2), first, second) == ["a/1", "a/1"]


def test_an_instance_that_is_being_restarted_will_serve() -> None:
    a, b = Instance("a/1"), Instance("b/1")
    queue(a, "b/1")
    assert cycle(wait(b, "a/1", instances=2), a, b) == []


def test_a_call_that_runs_waits_for_its_own_instance() -> None:
    """A second instance of the called model is free, but the first one runs the call and waits for its caller."""
    a, b, free = Instance("a/1"), Instance("b/1"), Instance("b/1")
    queue(a, "b/1", 2, runs_on=b)
    assert cycle(wait(b, "a/1"), a, b, free) == ["b/1", "a/1", "b/1"]


def test_longer_cycles_are_named_in_the_order_of_the_calls() -> None:
    a, b, c, outside = Instance("a/1"), Instance("b/1"), Instance("c/1"), Instance("d/1")
    queue(a, "b/1", runs_on=b)
    queue(b, "c/1", runs_on=c)
    queue(outside, "a/1")
    assert cycle(wait(c, "a/1"), a, b, c, outside) == ["c/1", "a/1", "b/1", "c/1"]
    assert cycle(wait(c, "onnx/1"), a, b, c, outside) == []
