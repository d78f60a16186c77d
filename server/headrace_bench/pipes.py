"""Messages between the command and its client processes: a JSON header and raw bytes behind it, each with its length."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

import orjson

_LENGTH = Struct("<I")


class Message(NamedTuple):
    """A message.

    Attributes:
        header: JSON object; its field `do` names the kind.
        blobs: raw bytes.
    """

    header: dict[str, Any]
    blobs: list[bytes]


def encode(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> list[bytes]:
    """Encode a message as parts for `writelines`."""
    text = orjson.dumps({**header, "blobs": [len(blob) for blob in blobs]}, option=orjson.OPT_SERIALIZE_NUMPY)
    return [_LENGTH.pack(len(text)) + text, *blobs]


async def read(stream: asyncio.StreamReader) -> Message | None:
    """Read a message; None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await stream.readexactly(_LENGTH.size))
        header: dict[str, Any] = orjson.loads(await stream.readexactly(length))
        blobs = [await stream.readexactly(size) for size in header.pop("blobs")]
    except asyncio.IncompleteReadError:
        return None
    return Message(header, blobs)
