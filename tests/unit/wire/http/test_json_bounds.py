"""Checks of a JSON text before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from headrace.core.errors import BadRequest
from headrace.core.limits import ClientLimits, Limits
from headrace.wire.http.json_text import check_json, check_unique, parse_non_finite
from hypothesis import given
from hypothesis import strategies as st

texts = st.text(alphabet=st.sampled_from('[]{}:"\\a,\n') | st.characters(), max_size=8)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda children: st.lists(children, max_size=4) | st.dictionaries(texts, children, max_size=4),
    max_leaves=30,
)


def keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(keys(child) for child in value.values())
    return sum(keys(child) for child in value) if isinstance(value, list) else 0


def depth(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    children = value.values() if isinstance(value, dict) else value
    return 1 + max((depth(child) for child in children), default=0)


@given(values, st.booleans(), st.sampled_from([None, 2]))
def test_keys_and_depth_are_those_of_the_parsed_value(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "replace")
    client_limits = ClientLimits(Limits(max_json_depth=2, max_json_keys=3))
    expected = "keys" if keys(value) > 3 else "deep" if depth(value) > 2 else ""
    if expected:
        with pytest.raises(BadRequest, match=expected):
            check_json(text, client_limits)
        assert sum(client_limits.hits.values()) == 1
    else:
        assert check_json(text, client_limits) == keys(value)


@given(st.binary(max_size=60) | st.text(alphabet='[]{}:"\\a, ', max_size=60).map(str.encode))
def test_any_bytes_are_scanned_without_an_error(text: bytes) -> None:
    client_limits = ClientLimits(Limits(max_json_depth=2, max_json_keys=3))
    try:
        assert check_json(text, client_limits) >= 0
    except BadRequest:
        assert sum(client_limits.hits.values()) == 1


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"a":1,"a":1}', "a"),
        (b'{"a":1,"\\u0061":1}', "a"),
        (b'[{"b":{"a":[{"c":1,"a":2,"c":3}]}}]', "c"),
    ],
)
def test_a_key_that_is_there_twice(text: bytes, key: str) -> None:
    with pytest.raises(BadRequest, match=f"'{key}' twice"):
        check_unique(text)


def test_the_same_key_in_two_objects_is_none_twice() -> None:
    check_unique(b'[{"a":1},{"a":{"a":2}}]')


def test_non_finite_numbers_in_a_text_that_is_too_long() -> None:
    with pytest.raises(
        ValueError, match="in JSON of 16777227 bytes, at most 16777216: send the tensors as binary data"
    ):
        parse_non_finite(b"[" + b" " * (16 << 20) + b"NaN,1" + b"     ")
    with pytest.raises(ValueError, match="beside more than 65536 strings: write Infinity and NaN"):
        parse_non_finite(b"[" + b'"",' * 70_000 + b"Inf]")
    assert len(parse_non_finite(b"[" + b'"",' * 70_000 + b"NaN]")) == 70_001
