"""Large JSON is read in steps, with the same results as small JSON."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from headrace.core.errors import BadRequest, TooLarge
from headrace.core.limits import ClientLimits, Limits
from headrace.core.tensor import BY_NAME, ModelSpec, TensorSpec
from headrace.wire.http import json_text
from headrace.wire.http.codec import ModelCodec
from hypothesis import given
from hypothesis import strategies as st


def codec(datatype: str, *shape: int, **limits: Any) -> ModelCodec:
    spec = TensorSpec("X", BY_NAME[datatype], shape or (-1, -1))
    model = ModelSpec(name="m", version="1", platform="p", max_batch_size=0, inputs={"X": spec}, outputs={"Y": spec})
    return ModelCodec(model, client_limits=ClientLimits(Limits(**limits)))


def body(datatype: str, shape: list[int], data: str, before: str = "", after: str = "") -> bytes:
    tensor = f'{{"name":"X","datatype":"{datatype}","shape":{json.dumps(shape)},"data":{data}{after}}}'
    return f'{{{before}"inputs":[{tensor}]}}'.encode()


def read(datatype: str, content: bytes) -> np.ndarray:
    _, inputs, _ = codec(datatype).read(content, None)
    return np.asarray(inputs["X"])


@pytest.fixture(params=["steps", "one step"])
def steps(request: pytest.FixtureRequest) -> Any:
    """Small texts are read as large ones, in tiny steps."""
    scanned, decoded = (64, 24) if request.param == "steps" else (1 << 20, 1 << 20)
    names = {"MAX_WHOLE_BYTES": 0, "_MIN_CUT_BYTES": 2, "_SCANNED_BYTES": scanned, "_DECODED_BYTES": decoded}
    with patch.multiple(json_text, **names):
        yield request.param


numbers = st.one_of(st.integers(-100, 100), st.floats(width=32), st.sampled_from([0.5, 1e30, -0.0, float("nan")]))
texts = st.text(alphabet=st.sampled_from('[]{}:"\\a,\né€') | st.characters(codec="utf-8"), max_size=8)


@given(
    st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=20),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_numbers_are_those_of_the_small_path(rows: list[list[float]], indent: int | None, flat: bool) -> None:
    data = json.dumps([*chain(*rows)] if flat else rows, indent=indent)
    content = body("FP32", [len(rows), 3], data)
    expected = read("FP32", content)
    with patch.multiple(json_text, MAX_WHOLE_BYTES=0, _MIN_CUT_BYTES=2, _SCANNED_BYTES=64, _DECODED_BYTES=80):
        assert read("FP32", content).tobytes() == expected.tobytes()


@given(st.lists(st.lists(texts, min_size=2, max_size=2), min_size=1, max_size=10), st.booleans(), st.booleans())
def test_texts_are_those_of_the_small_path(rows: list[list[str]], ascii_only: bool, flat: bool) -> None:
    content = body("BYTES", [len(rows), 2], json.dumps([*chain(*rows)] if flat else rows, ensure_ascii=ascii_only))
    expected = read("BYTES", content)
    with patch.multiple(json_text, MAX_WHOLE_BYTES=0, _MIN_CUT_BYTES=2, _SCANNED_BYTES=64, _DECODED_BYTES=24):
        assert read("BYTES", content).tolist() == expected.tolist()


nestings = st.recursive(
    st.integers(0, 9), lambda inner: st.lists(inner, max_size=3).map(lambda rows: rows or [[]]), max_leaves=12
)


@given(st.lists(nestings, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_elements_count_in_whatever_nesting_as_in_triton(data: list[Any], indent: int | None, is_text: bool) -> None:
    def elements(value: Any) -> list[Any]:
        return [*chain(*map(elements, value))] if isinstance(value, list) else [value]

    expected = elements(data)
    datatype, shape = ("BYTES" if is_text else "INT64"), [len(expected), 1]
    text = json.dumps(data, indent=indent)
    if is_text:
        expected = [b"%d [," % value for value in expected]
        text = re.sub(r"(\d)", r'"\1 [,"', text)
    for limits in ({}, {"MAX_WHOLE_BYTES": 0, "_MIN_CUT_BYTES": 2, "_SCANNED_BYTES": 16, "_DECODED_BYTES": 160}):
        with patch.multiple(json_text, **limits) if limits else nullcontext():
            assert read(datatype, body(datatype, shape, text)).reshape(-1).tolist() == expected
            assert read(datatype, body(datatype, shape, "[" * 50 + text + "]" * 50)).reshape(-1).tolist() == expected
            with pytest.raises(BadRequest, match="elements came"):
                read(datatype, body(datatype, [len(expected) + 1, 1], text))


@given(st.text(alphabet="[],1 .x", max_size=24))
def test_malformed_arrays_are_refused_as_on_the_small_path(inner: str) -> None:
    content = body("INT64", [2, 2], f"[{inner}]")
    try:
        expected: object = read("INT64", content).tolist()
    except BadRequest:
        expected = None
    with patch.multiple(json_text, MAX_WHOLE_BYTES=0, _MIN_CUT_BYTES=2, _SCANNED_BYTES=16):
        try:
            got: object = read("INT64", content).tolist()
        except BadRequest:
            got = None
    assert got == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("[1,2,3]", "3 elements came for shape|at most 3|hold"),
        ("[1,2,3,4,5]", "more than 4 elements"),
        ("[[1,2],[3,4,5]]", "more than 4"),
        ("[1[,2],3,4]", "not valid JSON"),
        ("[[1,2]3,[4,5]]", "not valid JSON"),
        ("[10,,2,30]", "not valid JSON"),
        ("[1,2,3,4}", "not valid JSON"),
        ("[1,2,3,true]", "must be integers, not true or false"),
        ("[1,2,3,0.5]", "must be integers, not a number with a fraction"),
        ('[1,2,3,"4"]', "must be integers, not a string"),
        ('[1,2,3,{"a":1}]', "must be integers, not an object"),
        ("[1,2,3,NaN]", "must be integers"),
        ("[1,2,3,9223372036854775808]", "must be from"),
        ("[1,2,3,null]", "must be integers, not null"),
    ],
)
def test_arrays_that_are_refused(data: str, message: str, steps: str) -> None:
    with pytest.raises(BadRequest, match=message):
        read("INT64", body("INT64", [2, 2], data))


def test_brackets_and_escapes_in_strings_are_none(steps: str) -> None:
    content = body("INT64", [1, 3], "[1,2,3]", before='"id":"]}\\\\\\"[[{",')
    _, inputs, request_id = codec("INT64").read(content, None)
    assert (inputs["X"].tolist(), request_id) == ([[1, 2, 3]], ']}\\"[[{')


def test_duplicate_keys_and_foreign_arrays_are_refused(steps: str) -> None:
    with pytest.raises(BadRequest, match="'data' twice"):
        read("INT64", body("INT64", [1, 1], "[1]", after=',"data":[1]'))
    with pytest.raises(BadRequest, match="large array that is not the data of an input"):
        read("INT64", body("INT64", [1, 1], "[1]", before='"x":[{"data":[1,2]}],'))


def test_an_enormous_shape_commits_no_memory(steps: str) -> None:
    with pytest.raises(BadRequest, match="at most 2 elements came"):
        read("INT64", body("INT64", [1 << 30, 1 << 30], "[1,2]"))


def test_the_rest_of_a_large_text_is_bounded() -> None:
    with pytest.raises(BadRequest, match="bytes besides strings and the data of its inputs, at most 524288"):
        read("INT64", b'{"a":[' + b"[]," * 600_000 + b"[]]}")


def test_json_over_its_limit() -> None:
    content = body("INT64", [1, 1], "[" + " " * (200 << 10) + "1]")
    with pytest.raises(
        TooLarge, match=r"at most 131072 are allowed \(--max-json-bytes\): send the tensors as binary data"
    ):
        codec("INT64", max_json_bytes=128 << 10).read(content, None)
    assert codec("INT64").read(content, None)[1]["X"].tolist() == [[1]]


def test_brackets_around_a_scalar_are_refused(steps: str) -> None:
    content = body("FP32", [], "[[[1" + " " * 600 + "]]]")
    with pytest.raises(BadRequest):
        ModelCodec(codec("FP32").spec).read(content, None)
