"""Frames between the server and the process of a Python model instance; imported by both.

Runs on Python 3.8 and later with the standard library and NumPy. docs/decisions/0012 and 0013 have the reasons.

A frame is one message on a socket of the type SOCK_SEQPACKET. Tensors are not in it: they lie in a slot, memory that both
processes share (`headrace_model.slots`). All numbers are little-endian.

    header   version u8, kind u8, flags u16, slot u32, number u64, count u32, body_bytes u32
    RUN      server -> model   u16 tensors, each `TENSOR`, its dims (i64), and `REGION` if it lies on a GPU; then `count` members:
                               each `MEMBER`, `FIRST_BATCH` for a later step of a request, id, parameters
    DONE     model -> server   `count` codes (u8) of members; u32 length and text for each code of an error; u16 tensors, each
                               `OUTPUT` and its dims; up to the end `PARAMETERS` and JSON of members whose responses have them
    FAILED   model -> server   code u8, u32 length and text for the client, then the traceback for the log
    SHARE    server -> model   `count` slots follow as file descriptors (SCM_RIGHTS); `slot` is the index of the first
    CLOSE    server -> model   the region of GPU memory with the number `number` is not used any more

Responses of requests that outlive their batch, or have any number of them, come on a socket of their own. `number` is the batch,
`slot` the index of the request in it:

    RESPONSE model -> server   `RESPONSE_HEAD`, its tensors: `OUTPUT` and dims, the text of an error, parameters (JSON), the
                               values of the tensors. With the flag `SPILLED` these are in a memory file (SCM_RIGHTS), from
                               `headrace_model.slots.START` on. Flags: `FINAL`: the last frame of the request, `EMPTY`: it has no
                               response, `DROPPED`: the model has dropped the sender without a final flag
    WANT     model -> server   `send` waits for credit
    CREDIT   server -> model   `count` responses of `CREDIT_BYTES` bytes are consumed
    CANCEL   server -> model   nothing waits for the responses any more

A body of more than `SPILL_BYTES` is in the slot: the frame has the flag `SPILLED`, and its body is `SPILL` (offset, size). The
kernel limits a message to the socket's buffer of about 200 KB.
"""

from __future__ import annotations

import struct
from numbers import Number
from typing import Any, Sequence

import numpy as np

VERSION = 1
# Thread of a child that runs `is_ready`.
PROBE_THREAD = "is_ready"

RUN, DONE, FAILED, SHARE, CALL, REPLY, CANCEL, CLOSE, RESPONSE, WANT, CREDIT = range(1, 12)
# Flags of frames. OPEN_MEMBERS: of a DONE that has requests without a result yet. MORE: of a REPLY after which others follow.
SPILLED, FINAL, EMPTY, DROPPED, OPEN_MEMBERS, MORE = 1, 2, 4, 8, 16, 32

HEADER = struct.Struct("<BBHIQII")
# Index of the input, datatype code, number of dims, flags, member (`SEPARATE`), offset in the slot or region, size in bytes.
TENSOR = struct.Struct("<HBBHHQQ")
# Region of GPU memory: its number, number of the GPU, CUDA IPC handle.
REGION = struct.Struct("<QI64s")
# Rows, bytes of the id, bytes of the parameters (JSON), index of an open request in its first batch plus 1 (0: it has none),
# requested outputs (bit i: output i; 0: all), deadline, priority.
MEMBER = struct.Struct("<IIIIQQII")
# Number of the first batch of an open request that was scheduled again.
FIRST_BATCH = struct.Struct("<Q")
# Member or `ALL_MEMBERS`, index of the output, datatype code, number of dims, memory, offset in the slot, size in bytes.
OUTPUT = struct.Struct("<HHBBHQQ")
SPILL = struct.Struct("<QQ")
# Index of a member, and bytes of the parameters of its response (JSON).
PARAMETERS = struct.Struct("<HI")
COUNT = struct.Struct("<H")
LENGTH = struct.Struct("<I")
# Code, tensors, bytes of the error's text, bytes of the parameters, bytes of the values.
RESPONSE_HEAD = struct.Struct("<BxHIIQ")
CREDIT_BYTES = struct.Struct("<Q")

SPILL_BYTES = 32 * 1024
# Parameters of one response, as JSON.
MAX_PARAMETER_BYTES = 64 * 1024
# A received frame is never longer: header, and a body of at most SPILL_BYTES.
FRAME_BYTES = HEADER.size + SPILL_BYTES
# The same on the socket of responses: their parameters are never in a slot.
RESPONSE_FRAME_BYTES = 128 * 1024
# Values of a response up to this size are in its frame.
MAX_INLINE_BYTES = 16 * 1024
ALL_MEMBERS = 0xFFFF
# The slot has a cancel flag for each member.
MAX_MEMBERS = 4032
# Models with more outputs get no mask: each request counts as one for all outputs.
MAX_MASKED_OUTPUTS = 64
# Flags of a tensor in RUN; SEPARATE: of one member, DEVICE: in a region of GPU memory (of one member, too).
RAGGED, TEXT, SEPARATE, DEVICE = 1, 2, 4, 8

# Codes of a member's result; from 1 on the codes of Triton's TritonError, plus 1.
OK, UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(9)
# Code of a member in DONE that is answered by a RESPONSE.
OPEN = 9
# Code of a member in DONE that the model has scheduled again, without a text.
RESCHEDULED = 10

# Numbers of Triton's `DataType` -> name in the protocol, dtype in memory. BF16 has no dtype in NumPy: its bit patterns.
DATATYPES: dict[int, tuple[str, np.dtype[Any]]] = {
    code: (name, np.dtype(dtype))
    for code, (name, dtype) in enumerate(
        (
            ("BOOL", "?"),
            ("UINT8", "<u1"),
            ("UINT16", "<u2"),
            ("UINT32", "<u4"),
            ("UINT64", "<u8"),
            ("INT8", "<i1"),
            ("INT16", "<i2"),
            ("INT32", "<i4"),
            ("INT64", "<i8"),
            ("FP16", "<f2"),
            ("FP32", "<f4"),
            ("FP64", "<f8"),
            ("BYTES", "O"),
            ("BF16", "<u2"),
        ),
        1,
    )
}
CODES: dict[str, int] = {name: code for code, (name, _dtype) in DATATYPES.items()}
BYTES, BF16 = CODES["BYTES"], CODES["BF16"]
DTYPES: dict[int, np.dtype[Any]] = {code: dtype for code, (_name, dtype) in DATATYPES.items()}
# Codes of dtypes that outputs may have; text in fixed-size elements is converted.
CODE_OF_DTYPE: dict[np.dtype[Any], int] = {dtype: code for code, dtype in DTYPES.items() if code != BF16}


class ProtocolError(Exception):
    """A frame does not follow the protocol."""


class WrongResultError(Exception):
    """The model returned something that is no result; the text is for the client."""


def dims_struct(ndim: int) -> struct.Struct:
    """Return the struct of `ndim` dims."""
    known = _DIMS.get(ndim)
    if known is None:
        known = _DIMS[ndim] = struct.Struct(f"<{ndim}q")
    return known


_DIMS: dict[int, struct.Struct] = {}


def pack_texts(array: np.ndarray[Any, Any], tensor: str = "a BYTES tensor") -> bytes:
    """Return the elements of a text tensor, each after its length in four bytes.

    Args:
        array: elements `bytes`; or text, numbers and None, which are `str(element)` in UTF-8, as in Triton.
        tensor: name of the tensor, for the error.

    Raises:
        WrongResultError: an element is something else, or has no UTF-8.
    """
    parts: list[bytes] = []
    for index, item in enumerate(array.reshape(-1).tolist()):
        if type(item) is not bytes:
            try:
                if isinstance(item, (bytes, bytearray, memoryview)):
                    item = bytes(memoryview(item))
                elif item is None or isinstance(item, (str, Number, np.generic)):
                    item = str(item).encode("utf-8")
                else:
                    raise TypeError("an element of a BYTES tensor is bytes, text, a number or None")
            except (TypeError, ValueError) as error:
                kind = type(item).__name__
                raise WrongResultError(f"element {index} of {tensor}, {kind}, cannot be encoded: {error}") from None
        parts.append(LENGTH.pack(len(item)))
        parts.append(item)
    return b"".join(parts)


def text(value: Any) -> Any:
    """Return a text that a model's code passes: `bytes` as UTF-8, as Triton's binding reads them; anything else as it is."""
    return value.decode("utf-8") if isinstance(value, bytes) else value


def unpack_texts(content: bytes, shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return a text tensor: an object array of `bytes`.

    Args:
        content: elements, each after its length in four bytes.
        shape: of the tensor.

    Raises:
        ProtocolError: the content does not have the elements of the shape.
    """
    count = 1
    for size in shape:
        count *= size
    items: list[bytes] = []
    offset, end = 0, len(content)
    while offset < end and len(items) < count:
        if offset + 4 > end:
            raise ProtocolError("a text tensor ends within a length")
        (size,) = LENGTH.unpack_from(content, offset)
        offset += 4 + size
        if offset > end:
            raise ProtocolError("a text tensor ends within an element")
        items.append(content[offset - size : offset])
    if len(items) != count or offset != end:
        raise ProtocolError(f"a text tensor has {len(items)} elements or more, its shape has {count}")
    array = np.empty(count, dtype=object)
    if count:
        array[:] = items
    return array.reshape(tuple(shape))
