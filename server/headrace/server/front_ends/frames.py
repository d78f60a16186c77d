"""Binary layout of the data stream between a front end and the engine, as pure functions.

A frame is a header of 16 bytes and a body; its size is a multiple of 8. Integers are little-endian. Times are monotonic
nanoseconds, which all processes of a machine share.

    header    size u32 (with the header), kind u8, flags u8, members u16, group u64
    REQUESTS  version u32, rows u32, tensor block u32, options u32 (sizes in bytes), received i64 and rows u32 of each member,
              options (msgpack), tensor block, data. With the flag SCATTERED all inputs are in slots: the block has the
              tensors of one member, in any slot; the data are slot u32, generation u32, offset u64 of each member, tensor by
              tensor. Or all inputs are in regions: then the slot is the number of the region, and the names of the regions
              follow (size u32, 0 u32, msgpack)
    ANSWERS   first member u32, batch rows u32, tensor block u32, extras u32, five times i64, extras (msgpack), tensor block, data
    CANCEL    nothing: all members of the group
    others    number u32, size u32, content (msgpack): see `MessageFrame`
      ERROR     `ErrorRecord` of members from the number on
      COUNTS    decode and encode times of responses of a version, alternating, as i64 nanoseconds
      EVENTS    list of `CountEvent`
      RELEASE   slots, each with its generation, that the engine reads no longer
      RETIRED   nil: the front end uses a version no longer
      CHARGE    name of a key: take a token from its quota
      CHARGED   `ErrorRecord` of the refused CHARGE, or nil
      NOTICE    name and content of a change, see `headrace.server.front_ends.frame_stream`
      ACKNOWLEDGED  nil: the NOTICE of this number is applied

A tensor block describes tensors: a text (u16 size), and for each tensor its number u16, datatype u8, dimensions u8, place u32,
size u64, dims i64. Blocks repeat from request to request, so that a receiver keeps their parsed form by their bytes. The data of
all members of a group are contiguous for each tensor, and start at multiples of 8.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import msgspec

from headrace.core.request import BatchTimes, InferRequest, InferResponse, PipelineStepTimes
from headrace.core.tensor import BYTES, DATATYPES

Buffer = bytes | memoryview

REQUESTS, ANSWERS, ERROR, CANCEL, COUNTS, EVENTS, RELEASE, RETIRED, CHARGE, CHARGED, NOTICE, ACKNOWLEDGED = range(1, 13)

CACHED, TIMED = 1, 2
"""Flags of ANSWERS: from the response cache; the times of a batch are present."""

SCATTERED = 1
"""Flag of REQUESTS: the inputs of the members are in slots, or in regions, with equal shapes."""

HEADER = struct.Struct("<IBBHQ")
HEADER_BYTES = HEADER.size
MAX_FRAME_BYTES = 1 << 31
MAX_MEMBERS = 4096
MAX_DIMENSIONS = 32

ROOM = 0xFFFF
"""Number of a tensor of a request that is no input: a slot for large outputs, of which the engine uses a part or nothing."""

OUTPUT = 0x8000
"""Added to the number of an output: a range of a client's region into which the engine writes it."""

INLINE, SLOT, REGION = range(3)
"""Places of a tensor: data of the frame; a slot of the front end's arena; shared memory that a client has registered."""

SIZE = struct.Struct("<I")
_REQUESTS = struct.Struct(HEADER.format + "IIII")
_ANSWERS = struct.Struct(HEADER.format + "IIIIqqqqq")
_PAIR = struct.Struct("<II")
_TENSOR = struct.Struct("<HBBIQ")
_SLOT = struct.Struct("<IIQ")
SLOT_BYTES = _SLOT.size
_REGION = struct.Struct("<QII")
_TEXT = struct.Struct("<H")
_PADDING = tuple(bytes(size) for size in range(8))

_NUMBERS = {datatype.name: number for number, datatype in enumerate(DATATYPES)}


class FrameError(Exception):
    """A frame does not follow the layout: the stream cannot be read any further."""


class TensorPlace(NamedTuple):
    """One tensor of a block.

    Attributes:
        number: position in the inputs or outputs of the model.
        datatype: position in `headrace.core.tensor.DATATYPES`.
        shape: dimensions, the rows of all members first if the model has a batch dimension.
        size_bytes: of its data; elements of BYTES follow their lengths.
        place: INLINE, SLOT or REGION.
        offset: of the data: within the frame's data, the slot or the region.
        slot, generation: of a SLOT.
        region: name of a REGION.
    """

    number: int
    datatype: int
    shape: tuple[int, ...]
    size_bytes: int
    place: int = INLINE
    offset: int = 0
    slot: int = 0
    generation: int = 0
    region: str = ""


class TensorBlock(NamedTuple):
    """Parsed tensor block.

    Attributes:
        text: close reason of a batch in ANSWERS, "" in REQUESTS.
        tensors: in the order of their data.
        data_bytes: size of the data of the INLINE tensors, with padding.
    """

    text: str
    tensors: tuple[TensorPlace, ...]
    data_bytes: int


class RequestExtras(msgspec.Struct, array_like=True, frozen=True, eq=True):
    """Options of a request that most requests do not have; see `headrace.core.request.InferRequest`."""

    id: str = ""
    priority: int = 0
    deadline_ns: int = 0
    queue_timeout_ns: int = 0
    client: str = ""
    outputs: tuple[str, ...] = ()
    parameters: dict[str, str | int | float | bool] = {}
    has_headers: bool = False


class AnswerExtras(msgspec.Struct, array_like=True, frozen=True, eq=True):
    """Parts of a response that most responses do not have; see `headrace.core.request.InferResponse`."""

    steps: tuple[PipelineStepTimes, ...] = ()
    parameters: dict[str, str | int | float | bool] | None = None


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True, eq=True):
    """An error; see `headrace.server.front_ends.errors`."""

    reason: str
    message: str
    details: dict[str, str | float | bool] = {}
    steps: tuple[PipelineStepTimes, ...] = ()


class CountEvent(msgspec.Struct, array_like=True, frozen=True, eq=True):
    """One event in a front end that the engine counts for a version.

    Attributes:
        version: number of the version.
        kind: "failure", "undelivered" or "exemplar".
        text: reason of a failure, trace id of an exemplar.
        time_ns: of the request.
        answered_ns: time with which a failed request was counted as answered; -1 if it was not.
    """

    version: int
    kind: str
    text: str
    time_ns: int
    answered_ns: int = -1


_extras_decoder = msgspec.msgpack.Decoder(RequestExtras)
_answer_extras_decoder = msgspec.msgpack.Decoder(AnswerExtras)
_encode = msgspec.msgpack.Encoder().encode
_names_decoder = msgspec.msgpack.Decoder(list[str])


@lru_cache(maxsize=256)
def _members_struct(members: int) -> struct.Struct:
    return struct.Struct(f"<{members}q{members}I{members % 2 * 4}x")


def padding(size_bytes: int) -> bytes:
    """Return the zeros between a part of this size and the next multiple of 8."""
    return _PADDING[-size_bytes & 7]


def frame_bytes(buffer: Buffer, offset: int) -> int:
    """Return the size of the frame at `offset`, of which at least 4 bytes are present; raises FrameError."""
    size: int = SIZE.unpack_from(buffer, offset)[0]
    if size < HEADER_BYTES or size > MAX_FRAME_BYTES or size & 7:
        raise FrameError(
            f"a frame has {size} bytes; sizes are multiples of 8 from {HEADER_BYTES} to {MAX_FRAME_BYTES}: close the stream"
        )
    return size


# --- Tensor blocks -----------------------------------------------------------------------------------------------------


def tensor_block(tensors: Iterable[TensorPlace], text: str = "") -> bytes:
    """Encode a tensor block; offsets of INLINE tensors follow from their order."""
    name = text.encode()
    parts = [_TEXT.pack(len(name)), name, padding(_TEXT.size + len(name))]
    for tensor in tensors:
        shape = tensor.shape
        parts.append(_TENSOR.pack(tensor.number, tensor.datatype, len(shape), tensor.place, tensor.size_bytes))
        parts.append(struct.pack(f"<{len(shape)}q", *shape))
        if tensor.place == SLOT:
            parts.append(_SLOT.pack(tensor.slot, tensor.generation, tensor.offset))
        elif tensor.place == REGION:
            region = tensor.region.encode()
            parts += (_REGION.pack(tensor.offset, len(region), 0), region, padding(len(region)))
    return b"".join(parts)


def slot_fields(block: bytes) -> tuple[int, int, int]:
    """Return slot, generation and offset at the end of a block whose last tensor is in a slot."""
    return _SLOT.unpack_from(block, len(block) - SLOT_BYTES)


def parse_tensor_block(block: bytes) -> TensorBlock:
    """Parse a tensor block.

    Raises:
        FrameError: it does not follow the layout, or the size of a tensor is not that of its shape.
    """
    try:
        text, offset = _text(block, 0, _TEXT.unpack_from(block, 0)[0], _TEXT.size)
        tensors: list[TensorPlace] = []
        data_bytes = 0
        while offset < len(block):
            tensor, offset = _tensor(block, offset, data_bytes)
            tensors.append(tensor)
            if tensor.place == INLINE:
                data_bytes += tensor.size_bytes + (-tensor.size_bytes & 7)
    except (struct.error, UnicodeDecodeError) as error:
        raise FrameError(f"a tensor block of {len(block)} bytes ends early or has invalid text: {error}") from None
    return TensorBlock(text, tuple(tensors), data_bytes)


def _tensor(block: bytes, offset: int, data_bytes: int) -> tuple[TensorPlace, int]:
    """Parse the tensor at `offset`; returns it and the offset behind it."""
    position, number, dimensions, place, size_bytes = _TENSOR.unpack_from(block, offset)
    offset += _TENSOR.size
    if number >= len(DATATYPES) or dimensions > MAX_DIMENSIONS or place > REGION:
        raise FrameError(f"a tensor has datatype {number}, {dimensions} dimensions and place {place}: out of range")
    shape = struct.unpack_from(f"<{dimensions}q", block, offset)
    offset += 8 * dimensions
    datatype, elements = DATATYPES[number], prod(shape)
    if min(shape, default=0) < 0 or size_bytes > MAX_FRAME_BYTES:
        raise FrameError(f"a tensor has shape {list(shape)} and {size_bytes} bytes: out of range")
    if elements * datatype.size_bytes != size_bytes if datatype is not BYTES else elements * 4 > size_bytes:
        raise FrameError(
            f"a tensor of {datatype} and shape {list(shape)} has {size_bytes} bytes: not the size of its shape"
        )
    if place == INLINE:
        return TensorPlace(position, number, shape, size_bytes, INLINE, data_bytes), offset
    if place == SLOT:
        slot, generation, start = _SLOT.unpack_from(block, offset)
        return TensorPlace(position, number, shape, size_bytes, SLOT, start, slot, generation), offset + _SLOT.size
    start, name_bytes, _ = _REGION.unpack_from(block, offset)
    name, offset = _text(block, offset, name_bytes, _REGION.size)
    return TensorPlace(position, number, shape, size_bytes, REGION, start, region=name), offset


def _text(block: bytes, start: int, size_bytes: int, prefix_bytes: int) -> tuple[str, int]:
    """Return the text behind a prefix at `start`, and the padded end of both."""
    begin = start + prefix_bytes
    end = begin + size_bytes
    if end > len(block):
        raise FrameError(f"a text of {size_bytes} bytes exceeds its tensor block")
    return block[begin:end].decode(), end + (-(prefix_bytes + size_bytes) & 7)


def datatype_number(name: str) -> int:
    """Return the number of a datatype in a tensor block; `name` as in the protocol, e.g. "FP32"."""
    return _NUMBERS[name]


# --- Requests ----------------------------------------------------------------------------------------------------------


class RequestsFrame(msgspec.Struct, eq=False):
    """Parsed REQUESTS frame; its data are in `buffer` from `data_start` to `data_end`.

    Attributes:
        group: number of the group, unique in its front end.
        version: number of the model version.
        rows: of all members.
        received_ns, member_rows: of each member.
        extras: options of the only member; None for none.
        block: bytes of the tensor block.
        is_scattered: the block has the tensors of one member, the data have the slots, or the regions, of all.
    """

    group: int
    version: int
    rows: int
    received_ns: tuple[int, ...]
    member_rows: tuple[int, ...]
    extras: RequestExtras | None
    block: bytes
    data_start: int
    data_end: int
    is_scattered: bool = False


def requests_frame(
    group: int,
    version: int,
    received_ns: Sequence[int],
    member_rows: Sequence[int],
    block: bytes,
    data: Sequence[Buffer],
    data_bytes: int,
    extras: RequestExtras | None = None,
    is_scattered: bool = False,
) -> list[Buffer]:
    """Encode a REQUESTS frame; returns its parts.

    Args:
        group, version, received_ns, member_rows, block, extras, is_scattered: see `RequestsFrame`.
        data: parts of the data, with padding.
        data_bytes: their size, a multiple of 8.
    """
    members, packed, extras_bytes = len(member_rows), b"", 0
    if extras is not None:
        packed = _encode(extras)
        extras_bytes = len(packed)
        packed += padding(extras_bytes)
    layout = _members_struct(members)
    size = _REQUESTS.size + layout.size + len(packed) + len(block) + data_bytes
    flags = SCATTERED if is_scattered else 0
    head = _REQUESTS.pack(size, REQUESTS, flags, members, group, version, sum(member_rows), len(block), extras_bytes)
    return [head, layout.pack(*received_ns, *member_rows), packed, block, *data]


def parse_requests(buffer: bytes, start: int, end: int) -> RequestsFrame:
    """Parse the REQUESTS frame in `buffer[start:end]`; raises FrameError."""
    try:
        _, _, flags, members, group, version, rows, block_bytes, extras_bytes = _REQUESTS.unpack_from(buffer, start)
        if not 0 < members <= MAX_MEMBERS:
            raise FrameError(f"a group has {members} members; 1 to {MAX_MEMBERS} are allowed")
        offset = start + _REQUESTS.size
        layout = _members_struct(members)
        values = layout.unpack_from(buffer, offset)
        extras_start = offset + layout.size
        block_start = extras_start + extras_bytes + (-extras_bytes & 7)
        data_start = block_start + block_bytes
        if data_start > end or block_bytes & 7:
            raise FrameError(f"the parts of a frame of {end - start} bytes exceed it")
        extras = _extras_decoder.decode(buffer[extras_start : extras_start + extras_bytes]) if extras_bytes else None
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"a frame of requests cannot be read: {error}") from None
    member_rows = values[members:]
    if sum(member_rows) != rows or (extras is not None and members > 1):
        raise FrameError(f"a group of {members} members has {sum(member_rows)} rows, its frame says {rows}")
    block = buffer[block_start:data_start]
    received_ns, is_scattered = values[:members], flags == SCATTERED
    return RequestsFrame(group, version, rows, received_ns, member_rows, extras, block, data_start, end, is_scattered)


Slot = tuple[int, int, int]
"""Slot, generation and offset in the arena of a tensor."""


def slots_data(slots: Iterable[Slot]) -> bytes:
    """Encode the data of a scattered group: the slots of all members, tensor by tensor."""
    return b"".join([_SLOT.pack(*slot) for slot in slots])


def parse_slots(frame: RequestsFrame, buffer: bytes, tensors: int) -> list[list[Slot]]:
    """Return the slots of all members of a scattered group, for each of its tensors; raises FrameError."""
    members, size_bytes = len(frame.member_rows), frame.data_end - frame.data_start
    if not tensors or size_bytes != members * tensors * SLOT_BYTES:
        raise FrameError(
            f"a group of {members} members with {tensors} tensors in slots has {size_bytes} bytes of slots"
        )
    slots = list(_SLOT.iter_unpack(memoryview(buffer)[frame.data_start : frame.data_end]))
    return [slots[first : first + members] for first in range(0, len(slots), members)]


def regions_data(ranges: Iterable[tuple[str, int]]) -> bytes:
    """Encode the data of a group in regions: name and offset of each member, tensor by tensor."""
    numbers: dict[str, int] = {}
    slots = [(numbers.setdefault(name, len(numbers)), 0, offset) for name, offset in ranges]
    names = _encode(list(numbers))
    return slots_data(slots) + _PAIR.pack(len(names), 0) + names + padding(len(names))


def parse_regions(frame: RequestsFrame, buffer: bytes, tensors: int) -> list[list[tuple[str, int]]]:
    """Return name and offset of the regions of each member of a group, for each of its tensors; raises FrameError."""
    members, start = len(frame.member_rows), frame.data_start
    end = start + members * tensors * SLOT_BYTES
    try:
        size_bytes, _ = _PAIR.unpack_from(buffer, end)
        names = _names_decoder.decode(buffer[end + _PAIR.size : min(end + _PAIR.size + size_bytes, frame.data_end)])
        ranges = [(names[number], offset) for number, _, offset in _SLOT.iter_unpack(memoryview(buffer)[start:end])]
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise FrameError(f"the regions of a group of {members} members cannot be read: {error}") from None
    return [ranges[first::members] for first in range(members)]


def slots_of(frame: RequestsFrame, buffer: bytes) -> list[tuple[int, int]]:
    """Return the slots that the tensors of a frame are in, each with its generation; raises FrameError."""
    tensors = [tensor for tensor in parse_tensor_block(frame.block).tensors if tensor.place == SLOT]
    if frame.is_scattered and tensors:
        return [slot[:2] for slots in parse_slots(frame, buffer, len(tensors)) for slot in slots]
    return [(tensor.slot, tensor.generation) for tensor in tensors]


def extras_of(request: InferRequest, has_details: bool) -> RequestExtras | None:
    """Return the options of a request, None for none.

    Args:
        request: the request.
        has_details: include id and requested outputs, which only some models read.
    """
    details = (request.id, request.outputs) if has_details else ("", ())
    if not (
        request.deadline_ns
        or request.priority
        or request.queue_timeout_ns
        or request.client
        or request.parameters
        or details[0]
        or details[1]
    ):
        return None
    return RequestExtras(
        details[0],
        request.priority,
        request.deadline_ns,
        request.queue_timeout_ns,
        request.client,
        details[1],
        dict(request.parameters),
        request.has_headers,
    )


# --- Answers -----------------------------------------------------------------------------------------------------------


class AnswersFrame(NamedTuple):
    """Parsed ANSWERS frame; its data are in the buffer from `data_start` to `data_end`.

    Attributes:
        group: of the request.
        first, members: the members that it answers.
        response: of all members, without outputs and close reason.
        block: bytes of the tensor block, whose text is the close reason.
    """

    group: int
    first: int
    members: int
    response: InferResponse
    block: bytes
    data_start: int
    data_end: int


def answers_frame(
    group: int,
    first: int,
    members: int,
    response: InferResponse,
    block: bytes,
    data: Sequence[Buffer],
    data_bytes: int,
) -> list[Buffer]:
    """Encode an ANSWERS frame; returns its parts. Arguments as in `AnswersFrame` and `requests_frame`."""
    packed, extras_bytes = b"", 0
    if response.steps or response.parameters is not None:
        parameters = None if response.parameters is None else dict(response.parameters)
        packed = _encode(AnswerExtras(response.steps, parameters))
        extras_bytes = len(packed)
        packed += padding(extras_bytes)
    times = response.times
    flags = (CACHED if response.cached else 0) | (0 if times is None else TIMED)
    size = _ANSWERS.size + len(packed) + len(block) + data_bytes
    sizes = first, response.batch_rows, len(block), extras_bytes
    head = _ANSWERS.pack(size, ANSWERS, flags, members, group, *sizes, *(times or _NO_TIMES), response.done_ns)
    return [head, packed, block, *data]


_NO_TIMES = BatchTimes(0, 0, 0, 0)


def parse_answers(buffer: bytes, start: int, end: int) -> AnswersFrame:
    """Parse the ANSWERS frame in `buffer[start:end]`; raises FrameError."""
    try:
        _, _, flags, members, group, *numbers = _ANSWERS.unpack_from(buffer, start)
        first, batch_rows, block_bytes, extras_bytes, *times, done_ns = numbers
        extras_start = start + _ANSWERS.size
        block_start = extras_start + extras_bytes + (-extras_bytes & 7)
        data_start = block_start + block_bytes
        if data_start > end or block_bytes & 7 or not members:
            raise FrameError(f"the parts of a frame of {end - start} bytes exceed it, or it answers no request")
        extras = (
            _answer_extras_decoder.decode(buffer[extras_start : extras_start + extras_bytes]) if extras_bytes else None
        )
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"a frame of answers cannot be read: {error}") from None
    response = InferResponse(
        {},
        BatchTimes(*times) if flags & TIMED else None,
        batch_rows,
        "",
        () if extras is None else extras.steps,
        bool(flags & CACHED),
        None if extras is None else extras.parameters,
        done_ns,
    )
    block = buffer[block_start:data_start]
    return AnswersFrame(group, first, members, response, block, data_start, end)


# --- Other frames ------------------------------------------------------------------------------------------------------


class MessageFrame(NamedTuple):
    """A frame whose content is msgpack.

    Attributes:
        kind: any but REQUESTS, ANSWERS and CANCEL.
        members: number of members that an ERROR ends.
        group: of an ERROR; number of a CHARGE or a NOTICE, and of its response. A NOTICE without a number has none.
        number: first member of an ERROR; version of COUNTS and RETIRED.
        content: see the table at the top.
    """

    kind: int
    members: int
    group: int
    number: int
    content: Any


_MESSAGE_DECODERS = {
    kind: msgspec.msgpack.Decoder(content)
    for kind, content in {
        ERROR: ErrorRecord,
        COUNTS: bytes,
        EVENTS: list[CountEvent],
        RELEASE: list[tuple[int, int]],
        RETIRED: None,
        CHARGE: str,
        CHARGED: ErrorRecord | None,
        NOTICE: tuple[str, Any],
        ACKNOWLEDGED: None,
    }.items()
}


def message_frame(kind: int, content: object = None, number: int = 0, group: int = 0, members: int = 0) -> bytes:
    """Encode a frame; arguments as in `MessageFrame`."""
    packed = _encode(content)
    pad = padding(len(packed))
    size = HEADER_BYTES + _PAIR.size + len(packed) + len(pad)
    return HEADER.pack(size, kind, 0, members, group) + _PAIR.pack(number, len(packed)) + packed + pad


def parse_message(buffer: bytes, start: int, end: int) -> MessageFrame:
    """Parse a frame of `message_frame`; raises FrameError, also for a frame of another kind."""
    if end - start < HEADER_BYTES + _PAIR.size:
        raise FrameError(f"a frame of {end - start} bytes ends within its first numbers")
    _, kind, _, members, group = HEADER.unpack_from(buffer, start)
    number, size_bytes = _PAIR.unpack_from(buffer, start + HEADER_BYTES)
    decoder, begin = _MESSAGE_DECODERS.get(kind), start + HEADER_BYTES + _PAIR.size
    if decoder is None or begin + size_bytes > end:
        raise FrameError(f"a frame of kind {kind} and {end - start} bytes has a message of {size_bytes} bytes")
    try:
        return MessageFrame(kind, members, group, number, decoder.decode(buffer[begin : begin + size_bytes]))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError(f"a message cannot be read: {error}") from None


def cancel_frame(group: int) -> bytes:
    """Encode the cancellation of all members of a group."""
    return HEADER.pack(HEADER_BYTES, CANCEL, 0, 0, group)
