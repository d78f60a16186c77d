"""HTTP/2 frames (RFC 9113, sections 4 and 6) and header compression (HPACK, RFC 7541): encoding, decoding, errors of a peer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import lru_cache
from struct import Struct
from typing import Generic, TypeVar

from hpack.exceptions import HPACKDecodingError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

# Flags.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
DEFAULT_WINDOW = 65535
DEFAULT_FRAME_BYTES = 16384
MAX_FRAME_BYTES = 2**24 - 1
MAX_WINDOW = 2**31 - 1

# Header of a frame: length and kind in one 32-bit number (length << 8 | kind), flags, stream id.
FRAME_HEADER = Struct(">IBI")
UINT32 = Struct(">I")
_TWO_UINT32 = Struct(">II")
_SETTING = Struct(">HI")


class Setting(IntEnum):
    """Names of settings (RFC 9113, section 6.5.2)."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY that the server sends (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class Http2ConnectionError(Exception):
    """Connection error (RFC 9113, section 5.4.1): the connection is closed with GOAWAY.

    Args:
        code: of the GOAWAY frame.
        text: debug data of the GOAWAY frame.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode a frame of any kind."""
    return FRAME_HEADER.pack(len(payload) << 8 | kind, flags, stream_id) + payload


def settings(values: dict[Setting, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0)
SETTING_BYTES = _SETTING.size
"""Size of one entry of a SETTINGS frame."""


def ping(payload: bytes, ack: bool) -> bytes:
    """Encode a PING frame; `payload` has 8 bytes."""
    return frame(PING, ACK if ack else 0, 0, payload)


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Encode a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, UINT32.pack(code))


def window_update(stream_id: int, increment_bytes: int) -> bytes:
    """Encode a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, UINT32.pack(increment_bytes))


def goaway(last_stream_id: int, code: ErrorCode, text: str = "") -> bytes:
    """Encode a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, _TWO_UINT32.pack(last_stream_id, code) + text.encode())


def parse_uint32(payload: bytes, frame_name: str) -> int:
    """Decode a payload of one 32-bit number; raises Http2ConnectionError if its size is not 4 bytes."""
    if len(payload) != 4:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"a {frame_name} of {len(payload)} bytes instead of 4")
    number: int = UINT32.unpack(payload)[0]
    return number


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Decode the (name, value) pairs of a SETTINGS frame in order, unknown names included; raises Http2ConnectionError."""
    if len(payload) % _SETTING.size:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, not a multiple of 6")
    pairs: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for name, value in pairs:
        if name == Setting.ENABLE_PUSH and value > 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH is {value} instead of 0 or 1")
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE is {value}")
        if name == Setting.MAX_FRAME_SIZE and not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE is {value}")
    return pairs


def depends_on(payload: bytes, position: int) -> int:
    """Decode the stream id of the priority fields (RFC 7540, section 6.3) that begin at `position`."""
    word: int = UINT32.unpack_from(payload, position)[0]
    return word & MAX_WINDOW


def unpad(payload: bytes, flags: int) -> bytes:
    """Strip padding and priority fields from a HEADERS payload (RFC 9113, section 6.2); raises Http2ConnectionError."""
    start, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without a padding length")
        start, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        start += 5
    if end < start:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding or priority fields longer than their frame")
    return payload[start:end]


# --- HPACK, for a server that receives the same few header blocks repeatedly -------------------------------------------
#
# The decoder is ours; of the `hpack` package it uses the Huffman table. It is about four times faster, every step is bounded, and
# it reports whether a block changed the dynamic table. While no block does, equal blocks have equal header fields, and decoding
# is one dictionary look-up (`HeaderCache`). Responses are encoded without Huffman code and dynamic table, mostly once, as
# constants.

HeaderField = tuple[bytes, bytes]
T = TypeVar("T")

_STATIC: tuple[HeaderField, ...] = tuple(HeaderTable.STATIC_TABLE)
_STATIC_COUNT = len(_STATIC)
_STATIC_NAMES = {name: index for index, (name, _) in reversed(list(enumerate(_STATIC, 1)))}
_STATIC_INDEX = {field: index for index, field in enumerate(_STATIC, 1)}
# Overhead of a table entry beside its name and value (RFC 7541, section 4.1).
_ENTRY_BYTES = 32
# The default of SETTINGS_HEADER_TABLE_SIZE; the server announces no other value.
TABLE_BYTES = 4096
# No accepted header block needs a larger integer.
_MAX_INTEGER = 1 << 24
# A block whose fields are larger than this multiple of the accepted size ends the connection: decoding stops there, and with it
# the dynamic tables of both sides differ. Blocks below the multiple are decoded to the end and refused one by one.
_MAX_LIST_MULTIPLE = 4
# RFC 7541, section 4.2: the size of the table changes at most twice between two header blocks.
_MAX_TABLE_RESIZES = 2
# Cost of decoding a block, in frames of the frame budget. One frame is one field, also if it is a reference, or as many bytes of
# Huffman code as take as long. An honest client's fields are free. Literal bytes cost nothing: they are copied and searched as a
# whole, and clients send keys and tokens of kilobytes with each call.
_FREE_FIELDS = 32
_HUFFMAN_BYTES_PER_FRAME = 16
# Size of the cache of a connection, with an overhead for each block.
_CACHE_BYTES = 64 << 10
_CACHED_BLOCK_OVERHEAD = 512

_short_huffman = lru_cache(maxsize=1024)(decode_huffman)


class HpackDecoder:
    """HPACK decoder of one connection, with its dynamic table.

    Args:
        max_list_bytes: largest decoded header block: names, values and 32 bytes per field.

    Attributes:
        changes: number of blocks that changed the dynamic table.
        cost: cost of the last block in frames of the frame budget; 0 for a block of usual size.
    """

    def __init__(self, max_list_bytes: int) -> None:
        self._max_list_bytes = max_list_bytes
        self._entries: list[HeaderField] = []  # the newest last
        self._size = 0
        self._capacity = TABLE_BYTES
        self._huffman_bytes = 0
        self.changes = self.cost = 0

    def decode(self, block: bytes) -> list[HeaderField] | None:
        """Decode a complete header block.

        Returns:
            The fields in order, or None if they exceed `max_list_bytes`; the dynamic table is updated either way.

        Raises:
            Http2ConnectionError: the block is invalid (COMPRESSION_ERROR), or its fields are far larger than `max_list_bytes`
                (ENHANCE_YOUR_CALM).
        """
        try:
            return self._decode(block)
        except (IndexError, HPACKDecodingError):
            raise _compression_error("a header block that ends too early or holds invalid Huffman code") from None

    def _decode(self, block: bytes) -> list[HeaderField] | None:
        fields: list[HeaderField] = []
        position, end, total, changed = 0, len(block), 0, False
        count, resizes, self._huffman_bytes = 0, 0, 0
        max_total = _MAX_LIST_MULTIPLE * self._max_list_bytes
        while position < end:
            first = block[position]
            if first >= 0x80:
                index, position = _integer(block, position, 0x7F)
                field = self._field(index)
            elif first >= 0x40:
                index, position = _integer(block, position, 0x3F)
                field, position = self._literal(block, index, position)
                self._insert(field)
                changed = True
            elif first >= 0x20:
                capacity, position = _integer(block, position, 0x1F)
                resizes += 1
                if total or resizes > _MAX_TABLE_RESIZES:
                    raise _compression_error("a change of the table size after the first field, or a third one")
                changed = changed or capacity != self._capacity
                self._resize(capacity)
                continue
            else:
                index, position = _integer(block, position, 0x0F)
                field, position = self._literal(block, index, position)
            count += 1
            total += len(field[0]) + len(field[1]) + _ENTRY_BYTES
            if total <= self._max_list_bytes:
                fields.append(field)
            elif total > max_total:
                text = f"header fields of more than {max_total} bytes; at most {self._max_list_bytes} are accepted"
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, text)
        self.changes += changed
        self.cost = max(0, count + self._huffman_bytes // _HUFFMAN_BYTES_PER_FRAME - _FREE_FIELDS)
        return fields if total <= self._max_list_bytes else None

    def _field(self, index: int) -> HeaderField:
        if 0 < index <= _STATIC_COUNT:
            return _STATIC[index - 1]
        index -= _STATIC_COUNT
        if not 0 < index <= len(self._entries):
            raise _compression_error("an index outside the tables")
        return self._entries[-index]

    def _literal(self, block: bytes, index: int, position: int) -> tuple[HeaderField, int]:
        if index:
            name = self._field(index)[0]
        else:
            name, position = self._string(block, position)
        value, position = self._string(block, position)
        return (name, value), position

    def _string(self, block: bytes, position: int) -> tuple[bytes, int]:
        """Decode a string (RFC 7541, section 5.2).

        Raises:
            IndexError: the block ends before the string.
            HPACKDecodingError: the Huffman code is invalid.
        """
        coded = block[position] >= 0x80
        length, position = _integer(block, position, 0x7F)
        end = position + length
        if end > len(block):
            raise IndexError
        text = block[position:end]
        if not coded:
            return text, end
        self._huffman_bytes += length
        return (_short_huffman(text) if length <= 64 else decode_huffman(text)), end

    def _insert(self, field: HeaderField) -> None:
        self._size += len(field[0]) + len(field[1]) + _ENTRY_BYTES
        self._entries.append(field)
        self._evict()

    def _resize(self, capacity: int) -> None:
        if capacity > TABLE_BYTES:
            raise _compression_error("a dynamic table larger than announced")
        self._capacity = capacity
        self._evict()

    def _evict(self) -> None:
        count = 0
        while self._size > self._capacity:
            name, value = self._entries[count]
            self._size -= len(name) + len(value) + _ENTRY_BYTES
            count += 1
        del self._entries[:count]


class HeaderCache(Generic[T]):
    """Cache of decoded and parsed header blocks of one connection, bounded in bytes; of blocks up to `max_list_bytes`.

    Args:
        max_list_bytes: see `HpackDecoder`.
        parse: parses header fields (None: too large). Its result must depend on the fields only.

    Attributes:
        entries: parsed value by header block; valid until the next `decode`. The connection looks here first.
        size_bytes: size of the cache: its blocks, and an overhead for the value of each.
    """

    def __init__(self, max_list_bytes: int, parse: Callable[[list[HeaderField] | None], T]) -> None:
        self._decoder = HpackDecoder(max_list_bytes)
        self._max_list_bytes = max_list_bytes
        self._parse = parse
        self.entries: dict[bytes, T] = {}
        self.size_bytes = 0

    @property
    def cost(self) -> int:
        """Cost of the last block in frames of the frame budget, as in `HpackDecoder`."""
        return self._decoder.cost

    def decode(self, block: bytes) -> T:
        """Decode and parse a block that is not in `entries`.

        Raises:
            Http2ConnectionError: the block is invalid.
            Exception: any error of `parse`.
        """
        decoder = self._decoder
        before = decoder.changes
        fields = decoder.decode(block)
        if decoder.changes != before:
            self.clear()
            return self._parse(fields)
        value = self._parse(fields)
        if len(block) <= self._max_list_bytes:
            self.size_bytes += len(block) + _CACHED_BLOCK_OVERHEAD
            if self.size_bytes > _CACHE_BYTES:
                self.clear()
                self.size_bytes = len(block) + _CACHED_BLOCK_OVERHEAD
            self.entries[block] = value
        return value

    def clear(self) -> None:
        """Empty the cache."""
        self.entries.clear()
        self.size_bytes = 0


def encode(fields: Iterable[HeaderField]) -> bytes:
    """Encode a header block without Huffman code and dynamic table."""
    block = bytearray()
    for name, value in fields:
        if index := _STATIC_INDEX.get((name, value)):
            block += encode_integer(index, 0x80, 0x7F)
            continue
        if index := _STATIC_NAMES.get(name):
            block += encode_integer(index, 0, 0x0F)
        else:
            block += b"\0" + encode_integer(len(name), 0, 0x7F) + name
        block += encode_integer(len(value), 0, 0x7F) + value
    return bytes(block)


def _integer(block: bytes, position: int, mask: int) -> tuple[int, int]:
    """Decode an integer (RFC 7541, section 5.1); raises IndexError at the end of the block."""
    number = block[position] & mask
    position += 1
    if number < mask:
        return number, position
    shift = 0
    while True:
        byte = block[position]
        position += 1
        number += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise _compression_error("an integer of too many bytes")
    if number > _MAX_INTEGER:
        raise _compression_error(f"an integer above {_MAX_INTEGER}")
    return number, position


def encode_integer(number: int, pattern: int, mask: int) -> bytes:
    """Encode an integer (RFC 7541, section 5.1) behind the bits of `pattern` in its first byte."""
    if number < mask:
        return bytes((pattern | number,))
    coded = bytearray((pattern | mask,))
    number -= mask
    while number >= 0x80:
        coded.append(number & 0x7F | 0x80)
        number >>= 7
    coded.append(number)
    return bytes(coded)


def _compression_error(text: str) -> Http2ConnectionError:
    return Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, text)
