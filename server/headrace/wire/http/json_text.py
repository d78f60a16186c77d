"""JSON texts of clients: limits before they are parsed, NaN and infinities, and large arrays of numbers and texts.

A large inference request is JSON whose tensors are long arrays. `outline` cuts those arrays out of the text in steps, so that the
rest is small and can be parsed at once. Once their shape is checked, `read_array` decodes each array in steps, into memory of the
size that its shape says. So a text of 100 MB never becomes a hundred million Python objects.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections import Counter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.core.clock import pause
from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits
from headrace.core.tensor import BYTES, Array, TensorSpec
from headrace.wire.requests import tensor_codec
from headrace.wire.requests.codec_threads import LARGE_BYTES

# --- Limits on JSON texts before they are parsed: nesting depth, number of keys, duplicate keys ------------------------
#
# Parsers differ in which of two duplicate keys they use, so a proxy may check another value than the one the server runs. Deep
# nesting and a million keys take far more memory as objects than on the wire. The checks read only brackets, colons and quotes,
# of which inference requests have few: most of their text is numbers.

# An exponent of three digits, or 300 digits in a row: every number outside the range of FP64 has one of the two.
_HUGE = re.compile(rb"[eE]\+?0*[1-9][0-9]{2}|[0-9]{300}")
# The parser that accepts NaN is ten times slower than the other: it needs one second for this many bytes.
_MAX_NON_FINITE_BYTES = 16 << 20
# Splitting at quotes creates an object for each part; texts with Inf or -NaN have few strings.
_MAX_QUOTES = 1 << 17
_STRUCTURE = b'[]{}:"'
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


def check_json(text: bytes, client_limits: ClientLimits, tensors: int = 0) -> int:
    """Check the number of keys and the nesting depth of a JSON text before it is parsed.

    Args:
        text: UTF-8; the result is meaningless for a text that is not JSON, which the parser rejects afterwards.
        client_limits: `max_json_keys` and `max_json_depth`; counts violations.
        tensors: of the model, each of which allows `KEYS_OF_TENSOR` further keys.

    Returns:
        Number of keys in all objects of the text.

    Raises:
        BadRequest: the text has too many keys or is nested too deep.
    """
    outside = _outside_strings(text)
    keys, depth = outside.count(b":"), 0
    if outside.count(b"[") + outside.count(b"{") > client_limits.limits.max_json_depth:
        depth = int(np.max(np.cumsum(_STEPS[np.frombuffer(outside, np.uint8)], dtype=np.int32)))
    _check_counts(keys, depth, client_limits, tensors)
    return keys


# Of an input: name, datatype, shape, data, parameters, and three of shared memory. An output has fewer.
KEYS_OF_TENSOR = 8


def _check_counts(keys: int, depth: int, client_limits: ClientLimits, tensors: int) -> None:
    limits = client_limits.limits
    max_keys = limits.max_json_keys + KEYS_OF_TENSOR * tensors
    if keys > max_keys:
        raise client_limits.refused("max_json_keys", f"the JSON has {keys} keys, at most {max_keys} are allowed")
    if depth > limits.max_json_depth:
        detail = f"the JSON is nested {depth} deep, at most {limits.max_json_depth} levels are allowed"
        raise client_limits.refused("max_json_depth", detail)


def check_unique(text: bytes) -> None:
    """Check that no object of a JSON text has a key twice.

    Raises:
        BadRequest: an object has a key twice, or the text is not JSON.
    """
    try:
        json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not valid JSON: {str(error)[:200]}") from None


def parse_non_finite(text: bytes) -> Any:
    """Parse JSON with the literals NaN, Inf and Infinity, with or without a sign, which Triton's parser accepts.

    This parser is slower than the one of ordinary requests: use it only for texts that the other has rejected.

    Args:
        text: UTF-8, within the limits of `check_json`.

    Returns:
        The value, in plain Python types.

    Raises:
        BadRequest: an object has a key twice.
        ValueError: the text is not JSON or not UTF-8, or a number is outside the range of FP64.
    """
    if len(text) > _MAX_NON_FINITE_BYTES:
        raise ValueError(
            f"NaN or Infinity in JSON of {len(text)} bytes, at most {_MAX_NON_FINITE_BYTES}: send the tensors as binary data"
        )
    if b"Inf" in text or b"-NaN" in text:
        text = _standard_literals(text)
    # A call for each number makes parsing ten times slower: only where a number may be outside FP64.
    parse_float = _finite if _HUGE.search(text) else None
    return parse_json(text, parse_float=parse_float)


def parse_json(text: bytes, **hooks: Any) -> Any:
    """Parse JSON without duplicate keys, by `json.loads` with further hooks.

    Raises:
        BadRequest: an object has a key twice.
        ValueError: the text is not JSON or not UTF-8, or has a lone surrogate, which is not valid UTF-8.
    """
    parsed = json.loads(text.decode(), object_pairs_hook=unique, **hooks)
    if b"\\u" in text:
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def _standard_literals(text: bytes) -> bytes:
    """Replace Inf by Infinity and -NaN by NaN outside of strings."""
    masked = text
    if b'\\"' in text:
        # The text keeps its length, and every remaining quote begins or ends a string.
        masked = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if masked.count(b'"') > _MAX_QUOTES:
        raise ValueError(f"Inf and -NaN beside more than {_MAX_QUOTES // 2} strings: write Infinity and NaN")
    parts: list[bytes] = []
    position = 0
    for index, masked_part in enumerate(masked.split(b'"')):
        part = text[position : position + len(masked_part)]
        position += len(part) + 1
        if index % 2 == 0:  # outside strings
            part = part.replace(b"Infinity", b"Inf").replace(b"Inf", b"Infinity").replace(b"-NaN", b"NaN")
        parts.append(part)
    return b'"'.join(parts)


def _finite(text: str) -> float:
    number = float(text)
    if number in (math.inf, -math.inf):
        raise ValueError(f"the number {text[:32]} is beyond FP64")
    return number


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of the members of a JSON object; raises BadRequest for a duplicate key."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadRequest(f"the JSON has the key {twice[:64]!r} twice in one object")
    return members


def _outside_strings(text: bytes) -> bytes:
    r"""Return the brackets, braces and colons of a text that are not in a string."""
    if b'\\"' in text:  # quotes within strings; escaped backslashes first, whose second character escapes nothing
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = text.translate(None, _NOT_STRUCTURE)
    return b"".join(structure.split(b'"')[::2])


# --- Large texts -------------------------------------------------------------------------------------------------------

# Texts within both limits are parsed at once: that is faster by a third, and takes about 10 ms.
MAX_WHOLE_BYTES = 1280 << 10
_MAX_WHOLE_BRACKETS = 1 << 16
# A step of a codec thread: scanning or decoding so many bytes takes about a millisecond.
_SCANNED_BYTES = 128 << 10
_DECODED_BYTES = 64 << 10
# Arrays of fewer bytes stay in the outline.
_MIN_CUT_BYTES = 512
# Limit on the outline, without its strings: a byte may become an object of 60 bytes.
MAX_OUTLINE_BYTES = 512 << 10
# Limit on the outline with its strings, which one step parses.
_MAX_OUTLINE_TEXT_BYTES = 4 << 20
# Depth of the data of a tensor: {"inputs": [{"data": [
_DATA_DEPTH = 4
# An array stays in the outline if more bytes than these, nearly all blanks, stand between it and the begin of its key.
_MAX_KEY_BYTES = 64
# Stands for an array in the outline, with its number. No client can guess it.
_TOKEN = secrets.token_hex(16)
_ALL_BRACKETS = (b"[", b"]", b"{", b"}")
_BLANKS = b" \t\r\n"
# Every byte of a number is x.
_CLASSES = bytes(byte if byte in b"[]," else ord("x") for byte in range(256))
_FILLED = bytes(byte not in b"[]," + _BLANKS for byte in range(256))
_NO_JSON = (b"x[", b"]x", b"][", b"[,", b",]")
_NO_NUMBERS = (b"t", b"f", b"n", b"N", b'"', b"{")
_FLOATS = (b".", b"e", b"E", b"I")
_decoder = msgspec.json.Decoder(list[Any])


class Outline(NamedTuple):
    """A JSON text without its large arrays.

    Attributes:
        text: JSON with a string in place of each large array.
        keys: number of keys in all objects of the complete text.
        arrays: start and end of each large array in the complete text, brackets included.
    """

    text: bytes
    keys: int
    arrays: list[tuple[int, int]]

    def array(self, data: object) -> tuple[int, int] | None:
        """Return the array that a string of the outline stands for; None if the value is none of these strings."""
        if type(data) is not str or not data.startswith(_TOKEN):
            return None
        return self.arrays[int(data[len(_TOKEN) :])]


def needs_outline(text: bytes) -> bool:
    """Return True for a text that takes more than about ten milliseconds to parse at once."""
    return len(text) > MAX_WHOLE_BYTES or (
        len(text) > LARGE_BYTES and text.count(b"[") + text.count(b"{") > _MAX_WHOLE_BRACKETS
    )


def outline(text: bytes | memoryview, client_limits: ClientLimits, tensors: int = 0) -> Outline:
    """Cut the large arrays that may be the data of tensors out of a JSON text, and check its keys and its depth.

    Args:
        text: UTF-8, a view if it is large: to copy or to hash 30 MB is a step of 40 ms. Of a text that is not JSON, the outline
            or an array is none either.
        client_limits, tensors: as in `check_json`.

    Raises:
        BadRequest: the text has too many keys or is nested too deep, or the outline is too large.
    """
    keys = depth = max_depth = start = copied = 0
    begin = -1  # of the array of depth 4 that has not ended
    in_string = False
    parts: list[bytes | memoryview] = []
    arrays: list[tuple[int, int]] = []
    while start < len(text):
        if start:
            pause()
        window, in_string = _mask_strings(_window(text, start, start + _SCANNED_BYTES), in_string)
        keys += window.count(b":")
        if any(bracket in window for bracket in _ALL_BRACKETS):
            brackets = window.translate(None, _NOT_STRUCTURE)
            depths = depth + np.cumsum(_STEPS[np.frombuffer(brackets, np.uint8)], dtype=np.int32)
            max_depth = max(max_depth, int(depths.max()))
            if depth < _DATA_DEPTH or depths.min() < _DATA_DEPTH:
                for first, end in _spans(window, depth, begin - start):
                    if end < 0:
                        begin = first + start
                    elif end - first >= _MIN_CUT_BYTES and _is_data(text, first + start):
                        parts += (text[copied : first + start], b'"%s%d"' % (_TOKEN.encode(), len(arrays)))
                        copied = end + start
                        arrays.append((first + start, copied))
            depth = int(depths[-1])
        start += len(window)
    parts.append(text[copied:])
    _check_counts(keys, max_depth, client_limits, tensors)
    size = sum(map(len, parts))
    if size > _MAX_OUTLINE_TEXT_BYTES:
        raise BadRequest(
            f"the JSON has {size} bytes besides the data of its inputs, at most {_MAX_OUTLINE_TEXT_BYTES} are allowed"
        )
    rest = b"".join(parts)
    if len(rest) > MAX_OUTLINE_BYTES:
        check_size_without_strings(rest)
    return Outline(rest, keys, arrays)


def _is_data(text: bytes | memoryview, position: int) -> bool:
    """Return True if an array begins at the position and is the member `data` of an object."""
    before = bytes(text[max(0, position - _MAX_KEY_BYTES) : position]).rstrip(_BLANKS)
    return text[position] == ord("[") and before.endswith(b":") and before[:-1].rstrip(_BLANKS).endswith(b'"data"')


def check_size_without_strings(text: bytes) -> None:
    """Check the size of a JSON text without its strings, in steps, before it is parsed.

    Raises:
        BadRequest: it has more than `MAX_OUTLINE_BYTES`, strings and blanks left out.
    """
    size = start = 0
    in_string = False
    while start < len(text):
        window, in_string = _mask_strings(_window(text, start, start + _SCANNED_BYTES), in_string)
        size += len(window.translate(None, _BLANKS))
        start += len(window)
        pause()
    if size > MAX_OUTLINE_BYTES:
        raise BadRequest(
            f"the JSON has {size} bytes besides strings and the data of its inputs, at most {MAX_OUTLINE_BYTES} are allowed"
        )


def _spans(window: bytes, depth: int, begin: int) -> list[tuple[int, int]]:
    """Find the large arrays and objects of depth 4 in a part of a text.

    Args:
        window: part of the text, without strings.
        depth: before the window.
        begin: position of the array or object that begins before the window; meaningless if none does.

    Returns:
        Start and end of those that end in the window, in order; and with the end -1, the start of the one that does not.
    """
    codes = np.frombuffer(window, np.uint8)
    positions = np.flatnonzero(_STEPS[codes])
    steps = _STEPS[codes[positions]]
    depths = depth + np.cumsum(steps, dtype=np.int32)
    starts = positions[(steps == 1) & (depths == _DATA_DEPTH)]
    ends = positions[(steps == -1) & (depths == _DATA_DEPTH - 1)] + 1
    if depth >= _DATA_DEPTH:
        starts = np.concatenate(([begin], starts))
    complete = len(ends)
    large = ends - starts[:complete] >= _MIN_CUT_BYTES
    spans = list(zip(starts[:complete][large].tolist(), ends[large].tolist(), strict=True))
    return spans if len(starts) == complete else [*spans, (int(starts[-1]), -1)]


def _window(text: bytes | memoryview, start: int, stop: int) -> bytes:
    """Return a part of a text that does not end within an escape sequence."""
    window = bytes(text[start:stop])
    if window.endswith(b"\\") and (len(window) - len(window.rstrip(b"\\"))) & 1 and len(window) > 1:
        return window[:-1]
    return window


def _mask_strings(window: bytes, in_string: bool) -> tuple[bytes, bool]:
    """Return a part of a text with a blank for each byte of a string, and True if a string continues after it."""
    if b"\\" in window:
        window = window.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    if b'"' not in window:
        return (b" " * len(window) if in_string else window), in_string
    codes = np.frombuffer(window, np.uint8)
    inside = np.cumsum(codes == ord('"'), dtype=np.uint8) & 1
    if in_string:
        inside ^= 1
    return np.where(inside, np.uint8(ord(" ")), codes).tobytes(), bool(inside[-1])


def read_array(
    spec: TensorSpec, shape: tuple[int, ...], elements: int, text: bytes | memoryview, span: tuple[int, int]
) -> Array:
    """Decode a large array as a tensor.

    Args:
        spec: tensor spec of the input.
        shape: declared and checked shape.
        elements: product of the shape.
        text: complete JSON text.
        span: start and end of the array, from `outline`.

    Returns:
        Array of the given shape.

    Raises:
        BadRequest: the data are no JSON, have another number of elements, or elements of another datatype.
    """
    position, end = span[0] + 1, span[1] - 1
    if text[end] != ord("]"):
        raise _invalid(spec, "a bracket does not match")
    if 2 * elements - 1 > end - position:
        raise _wrong_count(spec, shape, f"at most {(end - position + 1) // 2}", elements)
    array: Array = np.empty(elements, spec.datatype.dtype)
    filled = 0
    while position < end:
        chunk, masked = _next_chunk(spec, text, position, end)
        position += len(chunk) + 1
        if b"[" in masked or b"]" in masked:
            chunk = _without_brackets(spec, chunk, masked)
        values = _values(spec, b"[%s]" % chunk)
        if filled + len(values) > elements:
            raise _wrong_count(spec, shape, f"more than {elements}", elements)
        array[filled : filled + len(values)] = tensor_codec.from_values(spec, values, _kinds(chunk, values))
        filled += len(values)
        pause()
    if filled != elements:
        raise _wrong_count(spec, shape, str(filled), elements)
    return array.reshape(shape)


def _next_chunk(spec: TensorSpec, text: bytes | memoryview, position: int, end: int) -> tuple[bytes, bytes]:
    """Return the next elements of an array, without the comma after them; and the same without the content of strings."""
    if spec.datatype is not BYTES:
        chunk = bytes(text[position : min(position + _DECODED_BYTES, end)])
        if end - position > _DECODED_BYTES:
            stop = chunk.rfind(b",")
            if stop < 0:
                raise _invalid(spec, f"a number has more than {_DECODED_BYTES} bytes")
            chunk = chunk[:stop]
        return chunk, chunk
    size = _DECODED_BYTES
    while size < end - position:
        window = _window(text, position, position + size)
        masked, _ = _mask_strings(window, in_string=False)
        stop = masked.rfind(b",")
        if stop >= 0:
            return window[:stop], masked[:stop]
        size *= 2  # within a long string
        pause()
    chunk = bytes(text[position:end])
    return chunk, _mask_strings(chunk, in_string=False)[0]


def _without_brackets(spec: TensorSpec, chunk: bytes, masked: bytes) -> bytes:
    """Replace the brackets of nested elements by blanks; raises BadRequest where no JSON has one.

    Args:
        spec: of the input.
        chunk: between two commas of the data.
        masked: the same with a blank for each byte of a string.
    """
    classes = b",%s," % masked.translate(_CLASSES, _BLANKS)
    if any(pair in classes for pair in _NO_JSON):
        raise _invalid(spec, "a comma or a bracket is missing or misplaced")
    codes = np.frombuffer(masked, np.uint8)
    is_blank = (codes == ord("[")) | (codes == ord("]"))
    if b"[]" in classes:  # no element between two commas: one of them goes too
        commas = np.flatnonzero(codes == ord(","))
        filled = np.frombuffer(masked.translate(_FILLED), np.uint8).cumsum(dtype=np.int32)
        before, after = filled[commas], np.append(filled[commas[1:]], filled[-1])
        is_blank[commas[(before == 0) | (before == after)]] = True
    return np.where(is_blank, np.uint8(ord(" ")), np.frombuffer(chunk, np.uint8)).tobytes()


def _values(spec: TensorSpec, text: bytes) -> list[Any]:
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if b"NaN" not in text and b"Inf" not in text:
            raise _invalid(spec, str(error)) from None
    try:
        values: list[Any] = parse_non_finite(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(spec, str(error)) from None
    return values


def _kinds(chunk: bytes, values: list[Any]) -> set[type]:
    """Return the types of the values. Where the text has only numbers, a search in it is faster than a call for each value."""
    if not values or any(mark in chunk for mark in _NO_NUMBERS):
        return set(map(type, values))
    return {int, float} if any(mark in chunk for mark in _FLOATS) else {int}


def _invalid(spec: TensorSpec, text: str) -> BadRequest:
    return BadRequest(f"the request is not valid JSON: data of input '{spec.name}': {text[:200]}")


def _wrong_count(spec: TensorSpec, shape: tuple[int, ...], count: str, elements: int) -> BadRequest:
    return BadRequest(f"input '{spec.name}': {count} elements came for shape {list(shape)}, expected {elements}")
