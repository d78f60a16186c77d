"""JSON looked at before it is parsed: how deep it is nested, how many keys it has, and whether any is there twice.

Parsers differ in what they do with a key that is there twice (the first counts, the last counts), so what a proxy has checked
need not be what a server runs; and deep nesting or a million keys cost far more in objects than on the wire. Only the brackets,
colons and quotes of a text are looked at, and those are few in what inference sends: numbers.
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

# An exponent of three digits, or 300 digits in a row: every number beyond FP64 has one of the two.
_HUGE = re.compile(rb"[eE]\+?0*[1-9][0-9]{2}|[0-9]{300}")
# The parser that reads NaN takes ten times as long as the other: a second for this many bytes.
_MAX_NON_FINITE_BYTES = 16 << 20
# Each part of a text between two quotes is an object; texts with Inf or -NaN have few strings.
_MAX_QUOTES = 1 << 17
_STRUCTURE = b'[]{}:"'
_NOT_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


def check_json(text: bytes, client_limits: ClientLimits) -> int:
    """Hold a JSON text against the limits; how many keys it has.

    What is no JSON may be told anything: the parser is still to come.

    Raises:
        BadRequest: nested too deep, or too many keys; counted.
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
    """Parse a text for nothing but its keys.

    Raises:
        BadRequest: one is there twice in one object.
    """
    try:
        json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is not valid JSON: {str(error)[:200]}") from None


def parse_non_finite(text: bytes) -> Any:
    """Parse JSON that has the literals NaN, Inf and Infinity, with or without a sign, as Triton's parser does.

    Slower than the parser of ordinary requests: for texts that the latter has refused.

    Args:
        text: UTF-8, already within the limits (`check_json`).

    Returns:
        The value, of plain Python types; every key is there once in its object.

    Raises:
        BadRequest: a key is there twice in one object.
        ValueError: not JSON, not UTF-8, or a number beyond FP64.
    """
    if len(text) > _MAX_NON_FINITE_BYTES:
        raise ValueError(
            f"NaN or Infinity in JSON of {len(text)} bytes, at most {_MAX_NON_FINITE_BYTES}: send the tensors as binary data"
        )
    if b"Inf" in text or b"-NaN" in text:
        text = _standard_literals(text)
    # A call for each number costs ten times the parsing: only where a number may be beyond FP64.
    parse_float = _finite if _HUGE.search(text) else None
    parsed = json.loads(text.decode(), object_pairs_hook=unique, parse_float=parse_float)
    if b"\\u" in text:  # halves of surrogate pairs: no text in UTF-8 has them
        json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def _standard_literals(text: bytes) -> bytes:
    """Replace Inf by Infinity and -NaN by NaN, outside strings."""
    masked = text
    if b'\\"' in text:
        # Same length, and every quote left is an end of a string.
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
    """An object of its members; raises BadRequest if a key is there twice."""
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadRequest(f"the JSON has the key {twice[:64]!r} twice in one object")
    return members


def _outside_strings(text: bytes) -> bytes:
    r"""Brackets, braces and colons that are not in a string."""
    if b'\\"' in text:  # a quote inside of a string; first all pairs, of which the second backslash escapes nothing
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = text.translate(None, _NOT_STRUCTURE)
    return b"".join(structure.split(b'"')[::2])
