"""Large messages of ModelInfer: received into their final memory, piece by piece, with aligned tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from headrace.config.triton_messages import service_pb2
from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits, Limits
from headrace.server.front_ends.arena import ALIGNMENT, Arena
from headrace.wire.grpc.codec import scan
from headrace.wire.grpc.framing import PREFIX, MessageReader
from headrace.wire.grpc.message_memory import MIN_DIRECT_BYTES, first_content, message_allocator
from hypothesis import given
from hypothesis import strategies as st

ELEMENTS = MIN_DIRECT_BYTES // 4


def serialized(elements: int = ELEMENTS, request_id: str = "7") -> bytes:
    message: Any = service_pb2.ModelInferRequest(model_name="pictures", model_version="1", id=request_id)
    message.inputs.add(name="X", datatype="FP32", shape=[1, elements])
    message.raw_input_contents.append(np.arange(elements, dtype=np.float32).tobytes())
    content: bytes = message.SerializeToString()
    return content


def read(message: bytes, sizes: list[int], reader: MessageReader, flag: int = 0) -> bytes | memoryview:
    """Feed a message in pieces of these sizes, the last one repeatedly."""
    wire, start = PREFIX.pack(flag, len(message)) + message, 0
    for size in [*sizes, *[len(wire)]]:
        stop = min(start + size, len(wire))
        reader.feed(wire, start, stop)
        start = stop
    assert reader.complete == 1
    assert reader.missing_bytes == 0
    return reader.pop()[0]


@given(st.lists(st.integers(1, 60_000), max_size=12))
def test_pieces_of_any_size_give_the_message(sizes: list[int]) -> None:
    limits = ClientLimits(Limits())
    message = serialized()
    result = read(message, sizes, MessageReader("", limits, message_allocator(limits)))
    assert bytes(result) == message
    assert read(message, sizes, MessageReader("", limits)) == message


def test_a_tensor_in_the_arena_is_aligned_and_has_its_values() -> None:
    arena, limits = Arena(1 << 20), ClientLimits(Limits())
    limits.bodies.allocate = arena.allocate
    for request_id in ("", "1", "a longer id"):
        message = serialized(request_id=request_id)
        result = read(message, [70_000], MessageReader("", limits, message_allocator(limits)))
        assert isinstance(result, memoryview)
        envelope = scan(result)
        assert (envelope.header, envelope.spans) == (scan(message).header, scan(message).spans)
        assert isinstance(envelope.header, bytes)
        assert (envelope.model_name, envelope.model_version, envelope.id) == ("pictures", "1", request_id)
        ((start, size_bytes),) = envelope.spans
        tensor = np.ndarray((1, ELEMENTS), np.float32, result, start)
        assert size_bytes == tensor.nbytes
        np.testing.assert_array_equal(tensor[0], np.arange(ELEMENTS))
        assert tensor.ctypes.data % ALIGNMENT == 0
        assert arena.find(tensor) is not None
        del tensor, result
        assert arena.allocated_bytes == 0


def test_small_and_compressed_messages_are_bytes() -> None:
    def refuse(_size_bytes: int, _beginning: memoryview) -> memoryview:
        raise AssertionError("no memory for this message")

    limits = ClientLimits(Limits())
    small = serialized(100)
    assert read(small, [9], MessageReader("", limits, refuse)) == small
    reader = MessageReader("gzip", limits, refuse)
    with pytest.raises(BadRequest):  # it is no gzip data; but it was received
        read(serialized(), [70_000], reader, flag=1)


@pytest.mark.parametrize(
    ("beginning", "position"),
    [
        (serialized()[:200], serialized().index(np.arange(3, dtype=np.float32).tobytes())),
        (serialized()[:5], 0),
        (b"", 0),
        (b"\x08\x01" + serialized()[:200], 0),  # a field that no ModelInferRequest has
        (b"\x0a\xff\xff\xff\xff\xff\xff", 0),
    ],
)
def test_the_first_content_is_found(beginning: bytes, position: int) -> None:
    assert first_content(memoryview(beginning)) == position
