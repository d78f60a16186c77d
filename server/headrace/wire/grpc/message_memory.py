"""Memory of large request messages: each piece that arrives is copied to its final place once.

In a front end that is memory shared with the engine process, so that the tensors of a message are sent by reference.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits
from headrace.wire.grpc.large_contents import read_varint
from headrace.wire.requests.tensor_codec import BodyBytes, allocate_body

MIN_DIRECT_BYTES = 128 << 10
"""Smaller messages are joined from their pieces."""

AllocateMessage = Callable[[int, memoryview], memoryview]
"""Returns memory for a message, for its size in bytes and its first piece."""

_RAW_INPUT, _LENGTH_DELIMITED, _MAX_LENGTH_BYTES = 0x3A, 2, 5
# Fields before the raw contents: model_name, model_version, id, parameters, inputs, outputs.
_MAX_FIELDS = 64


def message_allocator(limits: ClientLimits) -> AllocateMessage:
    """Return the function that allocates messages of ModelInfer.

    Args:
        limits: of the port; their `bodies.allocate` is used if it is set.
    """

    def allocate(size_bytes: int, beginning: memoryview) -> memoryview:
        memory: BodyBytes = (limits.bodies.allocate or allocate_body)(size_bytes, first_content(beginning))
        return memory.data

    return allocate


def first_content(beginning: memoryview) -> int:
    """Return the position of the first raw content of a ModelInferRequest; 0 if it is not within the beginning of the message."""
    position = 0
    try:
        for _ in range(_MAX_FIELDS):
            tag = beginning[position]
            if tag & 7 != _LENGTH_DELIMITED:
                return 0
            size, start = read_varint(beginning, position + 1, _MAX_LENGTH_BYTES)
            if tag == _RAW_INPUT:
                return start
            position = start + size
    except (IndexError, BadRequest):
        pass
    return 0
