"""JSON looked at before it is parsed: how deep it is nested, how many keys it has, and whether any is there twice.

Parsers differ in what they do with a key that is there twice (the first counts, the last counts), so what a proxy has checked
need not be what a server runs; and deep nesting or a million keys cost far more in objects than on the wire. Only the brackets,
colons and quotes of a text are looked at, and those are few in what inference sends: numbers.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from server.core.errors import BadRequest
from server.core.limits import Door

_KEPT = b'[]{}:"'
_DROPPED = bytes(set(range(256)) - set(_KEPT))
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


def check_json(text: bytes, door: Door) -> int:
    """Hold a JSON text against the limits; how many keys it has.

    What is no JSON may be told anything: the parser is still to come.

    Raises:
        BadRequest: nested too deep, or too many keys; counted.
    """
    outside = _outside_strings(text)
    limits = door.limits
    keys = outside.count(b":")
    if keys > limits.max_json_keys:
        raise door.refused("max_json_keys", f"the JSON has {keys} keys, at most {limits.max_json_keys} are taken")
    if outside.count(b"[") + outside.count(b"{") > limits.max_json_depth:
        steps = _STEPS[np.frombuffer(outside, np.uint8)]
        depth = int(np.max(np.cumsum(steps, dtype=np.int32)))
        if depth > limits.max_json_depth:
            told = f"the JSON is nested {depth} deep, at most {limits.max_json_depth} is taken"
            raise door.refused("max_json_depth", told)
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


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its members; raises BadRequest if a key is there twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise BadRequest(f"the JSON has the key {twice[:64]!r} twice in one object")
    return found


def _outside_strings(text: bytes) -> bytes:
    r"""Brackets, braces and colons that are not in a string."""
    if b'\\"' in text:  # a quote inside of a string; first all pairs, of which the second backslash escapes nothing
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    kept = text.translate(None, _DROPPED)
    return b"".join(kept.split(b'"')[::2])
