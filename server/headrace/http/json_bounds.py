"""Limits on JSON texts before they are parsed: nesting depth, number of keys, duplicate keys.

Parsers differ in which of two duplicate keys they use, so a proxy may check another value than the one the server runs. Deep
nesting and a million keys take far more memory as objects than on the wire. The checks read only brackets, colons and quotes,
of which inference requests have few: most of their text is numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

import numpy as np

from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits

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


def check_json(text: bytes, client_limits: ClientLimits) -> int:
    """Check the number of keys and the nesting depth of a JSON text before it is parsed.

    Args:
        text: UTF-8; the result is meaningless for a text that is not JSON, which the parser rejects afterwards.
        client_limits: `max_json_keys` and `max_json_depth`; counts violations.

    Returns:
        Number of keys in all objects of the text.

    Raises:
        BadRequest: the text has too many keys or is nested too deep.
    """
    outside = _outside_strings(text)
    limits = client_limits.limits
    keys = outside.count(b":")
    if keys > limits.max_json_keys:
        raise client_limits.refused(
            "max_json_keys", f"the JSON has {keys} keys, at most {limits.max_json_keys} are taken"
        )
    if outside.count(b"[") + outside.count(b"{") > limits.max_json_depth:
        steps = _STEPS[np.frombuffer(outside, np.uint8)]
        depth = int(np.max(np.cumsum(steps, dtype=np.int32)))
        if depth > limits.max_json_depth:
            detail = f"the JSON is nested {depth} deep, at most {limits.max_json_depth} is taken"
            raise client_limits.refused("max_json_depth", detail)
    return keys


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
    parsed = json.loads(text.decode(), object_pairs_hook=unique, parse_float=parse_float)
    if b"\\u" in text:  # lone surrogates are not valid UTF-8
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
