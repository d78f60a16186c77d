"""Frames of the data stream: what is encoded is parsed again, and other bytes are refused with FrameError alone."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from headrace.core.errors import Overloaded, QuotaExceeded, Unavailable
from headrace.core.request import BatchTimes, InferResponse, PipelineStepTimes
from headrace.core.tensor import BY_NAME, DATATYPES, TensorSpec
from headrace.server.front_ends import frames
from headrace.server.front_ends.errors import describe_error, restore_error
from headrace.server.front_ends.frame_stream import FrameStream
from headrace.server.front_ends.frames import CountEvent, ErrorRecord, FrameError, RequestExtras, TensorPlace
from headrace.server.front_ends.tensors import TensorReader, TensorWriter
from hypothesis import given
from hypothesis import strategies as st

u32, u64, i64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=20)
values = st.one_of(st.text(max_size=5), st.integers(-(2**63), 2**63), st.booleans(), st.floats(allow_nan=False))
extras = st.builds(
    RequestExtras, texts, u32, i64, i64, texts, st.lists(texts, max_size=3).map(tuple), st.dictionaries(texts, values)
)
times = st.builds(BatchTimes, i64, i64, i64, i64)
steps = st.lists(
    st.builds(PipelineStepTimes, texts, texts, texts, i64, i64, st.none() | times, u32, texts, u32), max_size=2
).map(tuple)


@st.composite
def places(draw: Any) -> TensorPlace:
    datatype = draw(st.integers(0, len(DATATYPES) - 1))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    elements = int(np.prod(shape))
    size = elements * (DATATYPES[datatype].size_bytes or 4 + draw(st.integers(0, 5)))
    place = draw(st.integers(0, 2))
    more: dict[str, Any] = {}
    if place == frames.SLOT:
        more = {"offset": draw(u64), "slot": draw(u32), "generation": draw(u32)}
    elif place == frames.REGION:
        more = {"offset": draw(u64), "region": draw(texts)}
    return TensorPlace(draw(st.integers(0, 2**16 - 1)), datatype, shape, size, place, **more)


def joined(parts: list[frames.Buffer]) -> bytes:
    frame = b"".join(parts)
    assert frames.frame_bytes(frame, 0) == len(frame)
    return frame


@given(texts, st.lists(places(), max_size=4))
def test_tensor_blocks(text: str, tensors: list[TensorPlace]) -> None:
    block = frames.tensor_block(tensors, text)
    parsed = frames.parse_tensor_block(block)
    assert len(block) % 8 == 0
    assert parsed.text == text
    assert [t._replace(offset=0) if t.place == frames.INLINE else t for t in parsed.tensors] == tensors
    inline = [tensor for tensor in parsed.tensors if tensor.place == frames.INLINE]
    ends = [*(each.offset for each in inline[1:]), parsed.data_bytes]
    for tensor, following in zip(inline, ends, strict=bool(inline)):
        assert following == tensor.offset + tensor.size_bytes + -tensor.size_bytes % 8


@given(u64, u32, st.lists(st.tuples(i64, st.integers(0, 99)), min_size=1, max_size=9), extras, st.binary(max_size=40))
def test_requests(
    group: int, version: int, members: list[tuple[int, int]], options: RequestExtras, data: bytes
) -> None:
    data += frames.padding(len(data))
    block = frames.tensor_block([TensorPlace(0, 1, (2,), 2)])
    received_ns, rows = (tuple(column) for column in zip(*members, strict=True))
    given_extras = options if len(members) == 1 else None
    frame = joined(frames.requests_frame(group, version, received_ns, rows, block, [data], len(data), given_extras))
    parsed = frames.parse_requests(b"x" * 8 + frame, 8, 8 + len(frame))
    assert msgspec.structs.astuple(parsed)[:7] == (group, version, sum(rows), received_ns, rows, given_extras, block)
    assert (b"x" * 8 + frame)[parsed.data_start : parsed.data_end] == data


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_requests_in_regions(members: int, tensors: int, data: Any) -> None:
    count = members * tensors
    ranges = data.draw(
        st.lists(st.tuples(st.sampled_from(["a", "b", "a region"]), u64), min_size=count, max_size=count)
    )
    block = frames.tensor_block([TensorPlace(number, 1, (2, 3), 6, frames.REGION) for number in range(tensors)])
    content = frames.regions_data(ranges)
    frame = joined(
        frames.requests_frame(7, 8, [1] * members, [2] * members, block, (content,), len(content), is_scattered=True)
    )
    parsed = frames.parse_requests(frame, 0, len(frame))
    found = frames.parse_regions(parsed, frame, tensors)
    assert found == [[ranges[tensor * members + member] for tensor in range(tensors)] for member in range(members)]
    assert frames.slots_of(parsed, frame) == []
    parsed.data_end -= 8  # the end of the names is missing
    with pytest.raises(FrameError):
        frames.parse_regions(parsed, frame, tensors)


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_scattered_requests(members: int, tensors: int, data: Any) -> None:
    count = members * tensors
    slots = data.draw(st.lists(st.tuples(u32, u32, u64), min_size=count, max_size=count))
    block = frames.tensor_block([TensorPlace(number, 1, (2, 3), 6, frames.SLOT) for number in range(tensors)])
    content = frames.slots_data(slots)
    frame = joined(
        frames.requests_frame(7, 8, [1] * members, [2] * members, block, (content,), len(content), is_scattered=True)
    )
    parsed = frames.parse_requests(b"x" * 8 + frame, 8, 8 + len(frame))
    assert parsed.is_scattered
    found = frames.parse_slots(parsed, b"x" * 8 + frame, tensors)
    assert found == [slots[first : first + members] for first in range(0, count, members)]
    assert frames.slots_of(parsed, b"x" * 8 + frame) == [slot[:2] for slot in slots]
    for other in {tensors + 1, 0}:
        with pytest.raises(FrameError):
            frames.parse_slots(parsed, b"x" * 8 + frame, other)


@given(
    u64,
    u32,
    st.integers(1, 2**16 - 1),
    st.builds(
        InferResponse,
        st.just({}),
        st.none() | times,
        u32,
        st.just(""),
        steps,
        st.booleans(),
        st.none() | st.dictionaries(texts, values),
        i64,
    ),
)
def test_answers(group: int, first: int, members: int, response: InferResponse) -> None:
    block = frames.tensor_block([], "full")
    frame = joined(frames.answers_frame(group, first, members, response, block, [b"12345678"], 8))
    parsed = frames.parse_answers(frame, 0, len(frame))
    assert (parsed.group, parsed.first, parsed.members) == (group, first, members)
    for name in ("times", "batch_rows", "steps", "cached", "parameters", "done_ns"):
        assert getattr(parsed.response, name) == getattr(response, name), name
    assert (parsed.block, frame[parsed.data_start : parsed.data_end]) == (block, b"12345678")


records = st.builds(ErrorRecord, texts, texts, st.dictionaries(texts, texts | st.floats(0, 9) | st.booleans()), steps)
CONTENTS = {
    frames.ERROR: records,
    frames.COUNTS: st.binary(),
    frames.EVENTS: st.lists(st.builds(CountEvent, u32, texts, texts, i64, i64)),
    frames.RELEASE: st.lists(st.tuples(u32, u32)),
    frames.RETIRED: st.none(),
    frames.CHARGE: texts,
    frames.CHARGED: st.none() | records,
}


@given(st.sampled_from(sorted(CONTENTS)), u32, u64, st.integers(0, 2**16 - 1), st.data())
def test_messages(kind: int, number: int, group: int, members: int, data: Any) -> None:
    content = data.draw(CONTENTS[kind])
    frame = joined([frames.message_frame(kind, content, number, group, members)])
    assert frames.parse_message(b"x" * 8 + frame, 8, 8 + len(frame)) == (kind, members, group, number, content)


PARSERS = (frames.parse_requests, frames.parse_answers, frames.parse_message)


@given(st.binary(max_size=200), st.sampled_from(PARSERS))
def test_other_bytes_are_refused(content: bytes, parse: Any) -> None:
    with suppress(FrameError):
        parse(content, 0, len(content))
    with suppress(FrameError):
        frames.parse_tensor_block(content)


@given(st.data())
def test_changed_frames_are_refused_or_parsed(data: Any) -> None:
    specs = {"x": TensorSpec("x", BY_NAME["FP32"], (-1, 2)), "t": TensorSpec("t", BY_NAME["BYTES"], (-1, 1))}
    texts_array = np.array([[b"a"], [b"longer"]], object)
    block, parts, size = TensorWriter(specs).write([{"x": np.ones((2, 2), np.float32), "t": texts_array}], 2)
    frame = bytearray(joined(frames.requests_frame(1, 2, [3], [2], block, parts, size)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FrameError):
        parsed = frames.parse_requests(bytes(frame), 0, len(frame))
        reader = TensorReader(specs)
        reader.read(reader.layout(parsed.block), bytes(frame), parsed.data_start, parsed.data_end)


def test_errors_keep_their_class_and_what_they_have() -> None:
    overloaded = restore_error(describe_error(Overloaded("full", 2.5)))
    assert (type(overloaded), str(overloaded), overloaded.retry_after_s) == (Overloaded, "full", 2.5)
    for can_retry in (True, False):
        unavailable = restore_error(describe_error(Unavailable("the sequence has ended", 1.0, can_retry)))
        assert isinstance(unavailable, Unavailable)
        assert unavailable.can_retry is can_retry
    quota = restore_error(describe_error(QuotaExceeded("slow down", 0.5, "me")))
    assert (type(quota), quota.retry_after_s, quota.client) == (QuotaExceeded, 0.5, "me")


def test_an_exception_of_the_engine_has_a_reference_and_no_text(caplog: pytest.LogCaptureFixture) -> None:
    record = describe_error(ValueError("secret"))
    assert record.reason == "model_failed"
    assert str(record.details["reference"]) in record.message
    assert "secret" not in record.message
    assert str(record.details["reference"]) in caplog.text


@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(1, 300))
def test_a_stream_cut_at_any_byte_delivers_every_frame_once(sizes: list[int], step: int) -> None:
    sent = [frames.message_frame(frames.COUNTS, bytes(16 * size), number) for number, size in enumerate(sizes)]
    received: list[int] = []
    stream = FrameStream(
        lambda buffer, start, end: received.append(frames.parse_message(buffer, start, end).number), print
    )
    content = b"".join(sent)
    for start in range(0, len(content), step):
        stream.data_received(content[start : start + step])
    assert received == list(range(len(sizes)))


def test_a_wrong_size_ends_the_stream() -> None:
    lost: list[Exception | None] = []
    stream = FrameStream(lambda *_: None, lost.append)
    stream.data_received(b"\x07" + bytes(40))
    assert isinstance(lost[0], FrameError)
    assert stream.is_lost


async def test_large_and_small_frames_over_a_socket() -> None:
    received: list[bytes] = []
    done = asyncio.Event()

    def on_frame(buffer: bytes, start: int, end: int) -> None:
        received.append(bytes(buffer[start:end]))
        if len(received) == 4:
            done.set()

    near, far = socket.socketpair()
    writer, reader = FrameStream(lambda *_: None, lambda _: None), FrameStream(on_frame, lambda _: None)
    await writer.open(near)
    await reader.open(far)
    sent = [frames.message_frame(frames.COUNTS, bytes(count), 1) for count in (16, 4_000_000, 32, 700_000)]
    for frame in sent:
        writer.write([frame[:24], memoryview(frame)[24:]])
    await asyncio.wait_for(done.wait(), 30)
    assert received == sent
    writer.close()
    reader.close()


def place_of(array: np.ndarray[Any, Any], slot: int, writer: TensorWriter) -> TensorPlace:
    return writer.place("a", array, slot, slot + 1, slot * 65536)


def test_blocks_that_differ_in_their_slot_are_parsed_once() -> None:
    specs = {"a": TensorSpec("a", BY_NAME["FP32"], (-1, -1)), "b": TensorSpec("b", BY_NAME["FP32"], (-1, 3))}
    writer, reader = TensorWriter(specs), TensorReader(specs)
    square, wide, row = np.zeros((4, 4), np.float32), np.zeros((2, 8), np.float32), np.zeros((1, 3), np.float32)
    keys = set()
    for slot in (3, 0, 70_000, 3):
        for array in (square, wide):
            layout = reader.layout(writer.write(({},), 0, "", [place_of(array, slot, writer)])[0])
            ((spec, tensor),) = layout.slots
            assert spec.name == "a"
            assert tensor == place_of(array, slot, writer)
            keys.add(layout.key)
    assert len(keys) == 2
    assert b"" not in keys
    # With a tensor in the frame beside it, or a region, the whole block counts.
    both = reader.layout(writer.write(({"b": row},), 0, "", [place_of(square, 5, writer)])[0])
    assert (both.key, len(both.views), both.slots[0][1].slot) == (b"", 1, 5)
    regions = [writer.region_place("a", (4, 4), "cats", offset, 64) for offset in (0, 64, 0)]
    layouts = [reader.layout(writer.write(({},), 0, "", [region])[0]) for region in regions]
    assert [layout.regions[0][1].offset for layout in layouts] == [0, 64, 0]
    assert layouts[0] is layouts[2]
