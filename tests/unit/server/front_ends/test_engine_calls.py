"""Number of Python functions of ours that groups of requests call in the engine process, from their frames to their answers.

Each costs about 0.1 us, and the event loop of that process is the limit of small models on a GPU. A rise changes the bound, and
its commit gives the reason.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import Counter
from types import FrameType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from headrace.core.clock import NS_PER_S
from headrace.core.completion import Mailbox
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.policy import BatchPolicy, HandlePolicy
from headrace.models.registry import Registry
from headrace.observability.counters import Recorder
from headrace.server.front_ends import frames
from headrace.server.front_ends.front_end_requests import FrontEndRequests
from headrace.server.front_ends.tensors import TensorWriter

from tests.support.fake_overlapped import FakeOverlapped
from tests.support.fakes import SPEC
from tests.support.sleepers import inline_dispatches
from tests.support.waiting import until

GROUPS, MEMBERS = 10, 4
# Of ten groups that share a batch on the event loop: 33 for each of them, and those of the batch.
BOUND = 406


class Brief(FakeOverlapped):
    """Its batches run on the event loop."""

    any_thread = True


def frame_of(group: int, handle: ModelHandle, writer: TensorWriter) -> bytes:
    block, data, size_bytes = writer.write(({"x": np.full((MEMBERS, 2), group, np.float32)},), 0)
    times, rows = [1] * MEMBERS, [1] * MEMBERS
    return b"".join(frames.requests_frame(group, handle.serial, times, rows, block, data, size_bytes))


@pytest.mark.skipif(sys.platform != "linux", reason="front ends need Linux")
async def test_calls_of_groups(mailbox: Mailbox) -> None:
    model = Brief(prompt=True, brief_rows=64)
    policy = HandlePolicy(batch=BatchPolicy(64), inline_bound_ns=3600 * NS_PER_S)
    handle = ModelHandle(SPEC, policy, model, mailbox, Recorder())
    handle.start()
    until(lambda: bool(inline_dispatches(handle)))  # its instance sleeps
    registry: Any = SimpleNamespace(
        selections=lambda: [("1", handle)], traffic=lambda _name: None, serving=lambda *_: None
    )
    requests, writer = FrontEndRequests(cast("Registry", registry)), TensorWriter(SPEC.inputs)
    requests.table_bytes()
    here, there = socket.socketpair()
    here.setblocking(False)
    await requests.attach(1).open(there)
    loop, counts, counter = asyncio.get_running_loop(), [], Counter[str]()

    def count(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and "/headrace/" in frame.f_code.co_filename:
            counter[frame.f_code.co_qualname] += 1

    for turn in range(5):
        counter.clear()
        await loop.sock_sendall(
            here, b"".join([frame_of(GROUPS * turn + index, handle, writer) for index in range(GROUPS)])
        )
        sys.setprofile(count)
        received, answered = b"", 0
        while answered < GROUPS * MEMBERS:
            received += await loop.sock_recv(here, 1 << 16)
            while len(received) >= frames.HEADER_BYTES:
                size, kind, _, members, _ = frames.HEADER.unpack_from(received)
                if len(received) < size:
                    break
                assert kind == frames.ANSWERS
                answered, received = answered + members, received[size:]
        sys.setprofile(None)
        counts.append(counter.copy())
    fewest = min(counts, key=Counter.total)
    assert handle.recorder.totals().inline_runs == 5
    listed = "\n".join(f"{number:4} {name}" for name, number in sorted(fewest.items()))
    assert 100 < fewest.total() <= BOUND, f"{fewest.total()} calls:\n{listed}"
    here.close()
    requests.detach(1)
    assert await asyncio.to_thread(handle.close, 60)
