"""Checks of the answers of a Python model's process: hostile code can send anything, and nothing else is read."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from headrace.core.completion import ThreadCompletion
from headrace.core.errors import Conflict, ModelFailed, NotFound, Unavailable, Unsupported
from headrace.python.outputs import ModelTensors, RequestWriter, ResultReader, SlotPool, prepare
from headrace.runtimes.members import BatchMember, Rescheduled
from headrace_model import protocol
from headrace_model.protocol import ALL_MEMBERS, COUNT, DONE, HEADER, OUTPUT, ProtocolError, dims_struct
from headrace_model.requests import BatchReader, ResultWriter
from headrace_model.slots import START, Slot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FP32, INT32 = protocol.CODES["FP32"], protocol.CODES["INT32"]
TENSORS = ModelTensors("m", (("x", FP32), ("text", protocol.BYTES)), (("y", FP32), ("words", protocol.BYTES)), True)


def member(rows: int = 1, **values: Any) -> BatchMember:
    fields: dict[str, Any] = {"id": "", "parameters": {}, "outputs": (), "deadline_ns": 0, "priority": 0, "shapes": {}}
    return BatchMember(rows=rows, **{**fields, **values}, completion=ThreadCompletion())


def record(shape: tuple[int, ...], offset: int, size: int, index: int = 0, code: int = FP32, number: int = 0) -> bytes:
    return OUTPUT.pack(number, index, code, len(shape), 0, offset, size) + dims_struct(len(shape)).pack(*shape)


def done(*records: bytes, codes: bytes = b"\0", texts: bytes = b"", flags: int = 0, count: int = 1) -> memoryview:
    body = codes + texts + COUNT.pack(len(records)) + b"".join(records)
    return memoryview(HEADER.pack(1, DONE, flags, 0, 1, count, len(body)) + body)


@pytest.fixture
def pool() -> SlotPool:
    return SlotPool("test", 1 << 12)


def test_a_batch_crosses_both_ends(pool: SlotPool) -> None:
    lease = pool.take()
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    text = np.array([[b"a"], [b""], [b"ccc"]], object)
    members = [member(2, id="first", parameters={"a": True}, outputs=("words",)), member(1, priority=3, deadline_ns=9)]
    batch = prepare(lease, {"x": x, "text": text}, 3, batched=True)
    batch.arrays["x"][0][:] = x
    body, flags = RequestWriter(TENSORS).write(batch, {"x": batch.arrays["x"][0], "text": text}, members)
    frame = HEADER.pack(1, protocol.RUN, flags, 0, 7, 2, len(body)) + body
    slot = Slot(os.dup(lease.slot.fd))
    received = BatchReader(["x", "text"], ["y", "words"]).read(frame, slot)
    assert received.inputs["x"].tolist() == x.tolist()
    assert received.inputs["text"].tolist() == text.tolist()
    first, second = received.members
    assert (first.rows, first.id, first.parameters, first.output_names) == (2, "first", {"a": True}, ("words",))
    assert (second.rows, second.priority, second.deadline_ns, second.output_names) == (1, 3, 9, ())
    writer = ResultWriter([("y", FP32), ("words", protocol.BYTES)])
    answer, flags = writer.done_members(received, [{1: text[:2]}, {0: received.inputs["x"][2:] + 1, 1: text[2:]}])
    results = ResultReader(TENSORS).done(
        memoryview(HEADER.pack(1, DONE, flags, 0, 7, 2, len(answer)) + answer), lease, members, copy=False
    )
    one, two = results
    assert isinstance(one, dict)
    assert isinstance(two, dict)
    assert one["words"].tolist() == [[b"a"], [b""]]
    assert two["y"].tolist() == [[9, 10, 11, 12]]


@pytest.mark.parametrize(
    "frame",
    [
        done(record((1, 4), START, 15)),  # size and shape differ
        done(record((1, 4), 1 << 40, 16)),  # behind the memory
        done(record((1 << 30, 1 << 30), START, 4 << 60)),
        done(record((-1, 4), START, 16)),
        done(record((1, 4), START, 16, index=2)),  # no such output
        done(record((1, 4), START, 16, code=99)),
        done(record((1,) * 40, START, 4)),
        done(record((1, 4), START, 16, number=1)),  # no such member
        done(record((1, 4), START, 16)[:-3]),  # ends early
        done(count=2, codes=b"\0\0"),
        done(texts=b"\0\0" + b"\0"),  # parameters that end within their head
        done(texts=b"\0\0" + protocol.PARAMETERS.pack(1, 2) + b"{}"),  # no such member
        done(texts=b"\0\0" + protocol.PARAMETERS.pack(0, 9) + b"{}"),  # end early
        done(texts=b"\0\0" + protocol.PARAMETERS.pack(0, 4) + b"null"),
        done(texts=b"\0\0" + protocol.PARAMETERS.pack(0, 14) + b'{"a":"\\ud800"}'),
        done(texts=b"\0\0" + protocol.PARAMETERS.pack(0, 8) + b'{"a":[]}'),
        done(codes=b"\2"),  # an error without its text
        done(codes=b"\2", texts=struct.pack("<I", 1 << 30)),
        done(record((3, 1), START, 8, index=1, code=protocol.BYTES)),  # text without its elements
        memoryview(HEADER.pack(1, DONE, protocol.SPILLED, 0, 1, 1, 16) + struct.pack("<QQ", 1 << 50, 8)),
    ],
)
def test_answers_that_do_not_follow_the_protocol_are_refused(pool: SlotPool, frame: memoryview) -> None:
    with pytest.raises((ProtocolError, struct.error)):
        ResultReader(TENSORS).done(frame, pool.take(), [member()], copy=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(st.binary(max_size=120), st.integers(1, 4), st.integers(0, 1))
def test_any_answer_is_results_or_refused(pool: SlotPool, body: bytes, count: int, flags: int) -> None:
    frame = memoryview(HEADER.pack(1, DONE, flags, 0, 1, count, len(body)) + body)
    try:
        results = ResultReader(TENSORS).done(frame, pool.take(), [member() for _ in range(count)], copy=True)
    except (ProtocolError, struct.error, ValueError, IndexError):  # all of them end the process
        return
    assert len(results) == count


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (1, ModelFailed),
        (2, ModelFailed),
        (3, NotFound),
        (5, Unavailable),
        (6, Unsupported),
        (7, Conflict),
        (200, ModelFailed),
    ],
)
def test_codes_of_errors(pool: SlotPool, code: int, error: type[Exception]) -> None:
    frame = done(codes=bytes([code]), texts=struct.pack("<I", 4) + b"text")
    (result,) = ResultReader(TENSORS).done(frame, pool.take(), [member()], copy=False)
    assert type(result) is error
    assert str(result) == "text"


def test_outputs_hold_their_slot(pool: SlotPool) -> None:
    lease = pool.take()
    (result,) = ResultReader(TENSORS).done(
        done(record((1, 4), START, 16, number=ALL_MEMBERS)), lease, [member()], copy=False
    )
    assert isinstance(result, dict)
    row = result["y"][0]
    del lease, result
    gc.collect()
    second = pool.take()
    assert second.index == 1
    del row
    gc.collect()
    assert pool.take().index == 0


def test_the_memory_of_a_batch_that_outlasts_a_look_returns_after_it(pool: SlotPool) -> None:
    lease = pool.take()
    lease.slot.reserve(START + (8 << 20))
    lease.slot.write(START, bytes(8 << 20))
    descriptor = lease.slot.fd
    for _ in range(3):
        pool.trim()
    assert os.fstat(descriptor).st_blocks * 512 >= 8 << 20, "its batch runs"
    del lease
    for _ in range(2):
        pool.trim()
    assert os.fstat(descriptor).st_blocks * 512 < 1 << 20
    assert pool.take().index == 0


def test_rows_of_all_members_must_add_up(pool: SlotPool) -> None:
    frame = done(record((3, 4), START, 48, number=ALL_MEMBERS), codes=b"\0\0", count=2)
    results = ResultReader(TENSORS).done(frame, pool.take(), [member(), member()], copy=False)
    assert all(isinstance(result, ModelFailed) and "for 2 rows" in str(result) for result in results)


def test_an_output_of_another_datatype_is_named(pool: SlotPool) -> None:
    frame = done(record((1, 4), START, 16, code=INT32, number=ALL_MEMBERS))
    (result,) = ResultReader(TENSORS).done(frame, pool.take(), [member()], copy=False)
    assert "output 'y' as INT32, its configuration declares FP32" in str(result)


def test_numbers_behind_a_text_that_has_grown_the_memory_are_read(pool: SlotPool) -> None:
    """The map of the first output ends before the last one."""
    tensors = ModelTensors("m", (), (("first", FP32), ("words", protocol.BYTES), ("last", FP32)), True)
    lease = pool.take()
    other = Slot(os.dup(lease.slot.fd))
    text = struct.pack("<I", 4 * lease.slot.size) + bytes(4 * lease.slot.size)
    last = START + 64 + len(text) - 80
    other.reserve(last + 80)
    other.write(START + 64, text)
    frame = done(
        record((1, 4), START, 16),
        record((1,), START + 64, len(text), index=1, code=protocol.BYTES),
        record((1, 4), last, 16, index=2),
    )
    (result,) = ResultReader(tensors).done(frame, lease, [member()], copy=False)
    assert isinstance(result, dict)
    assert result["last"].tolist() == result["first"].tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    "frame",
    [
        memoryview(HEADER.pack(1, DONE, protocol.SPILLED, 0, 1, 1, 16) + struct.pack("<QQ", START, 1 << 32)),
        done(record((1,), START, 1 << 32, index=1, code=protocol.BYTES)),
    ],
)
def test_a_process_cannot_make_the_server_copy_gigabytes(pool: SlotPool, frame: memoryview) -> None:
    lease = pool.take()
    os.ftruncate(lease.slot.fd, 1 << 36)  # a file with holes needs no memory
    with pytest.raises(ProtocolError, match="bytes"):
        ResultReader(TENSORS).done(frame, lease, [member()], copy=False)


def test_the_other_end_cannot_seal_the_memory_of_a_batch(pool: SlotPool) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.take().slot.fd, 1033, 4)  # F_ADD_SEALS, F_SEAL_GROW: a larger batch could not be written


def test_only_a_request_of_an_iterative_model_may_be_scheduled_again(pool: SlotPool) -> None:
    frame = done(codes=bytes([protocol.RESCHEDULED]))
    with pytest.raises(ProtocolError, match="without iterative sequences"):
        ResultReader(TENSORS).done(frame, pool.take(), [member()], copy=False)
    (result,) = ResultReader(replace(TENSORS, iterative=True)).done(frame, pool.take(), [member()], copy=False)
    assert isinstance(result, Rescheduled)
