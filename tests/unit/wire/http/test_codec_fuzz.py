"""Hostile bytes: whatever comes, the codec gives a request or raises `HeadraceError`, and never anything else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from headrace.core.errors import HeadraceError
from headrace.core.limits import ClientLimits, Limits
from headrace.core.request import InferResponse
from headrace.core.tensor import BY_NAME, BYTES, Array, ModelSpec
from headrace.wire.http.codec import ModelCodec
from headrace.wire.requests import compression
from headrace.wire.requests.tensor_codec import to_binary
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.support.echo_tensors import FLAT_SPEC, NAMES, SPEC, check_decoded, good_inputs, some_output
from tests.support.examples import examples

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
sizes = st.integers(-2, 4) | st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30])
parameter_names = st.sampled_from(
    [
        "binary_data_size",
        "binary_data",
        "binary_data_output",
        "classification",
        "priority",
        "timeout",
        "headrace_deadline_us",
        "shared_memory_region",
        "sequence_id",
        "triton_x",
        "x",
    ]
)
parameters = st.dictionaries(parameter_names, sizes | st.booleans() | json_values, max_size=2)
# Most of a request is right, so that its one fault is reached.
shapes = st.lists(st.integers(1, 2), min_size=2, max_size=2) | st.lists(sizes, max_size=3)
elements = (
    st.integers(0, 1) | st.integers(-2, 300) | st.text(max_size=3) | st.floats(allow_nan=False, allow_infinity=False)
)


def tensor(name: str) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {"name": st.just(name), "datatype": st.just(name) | st.sampled_from(NAMES), "shape": shapes},
        optional={
            "data": st.lists(elements, min_size=1, max_size=4) | json_values,
            "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(0, 16)}) | parameters,
        },
    )


tensors = st.sampled_from(NAMES).flatmap(tensor)
requested = st.fixed_dictionaries({"name": st.sampled_from(NAMES)}, optional={"parameters": parameters})
messages = st.fixed_dictionaries(
    {"inputs": st.lists(tensors, max_size=3)},
    optional={"outputs": st.lists(requested, max_size=3), "parameters": parameters, "id": st.text(max_size=8)},
)


def feed(spec: ModelSpec, body: bytes, header_size: int | None) -> None:
    """Decode twice (the second time may come from what was remembered), and answer if it was a request."""
    codec = ModelCodec(spec)
    try:
        first, plan = codec.decode(body, header_size, 1)
    except HeadraceError as error:
        assert str(error)
        with pytest.raises(type(error)):
            codec.decode(body, header_size, 1)
        return
    event("a request")
    second, _ = codec.decode(body, header_size, 1)
    check_decoded(spec, first, second)
    try:
        size, parts = codec.encode(InferResponse({name: some_output(name, spec) for name in NAMES}), plan)
    except HeadraceError as error:
        assert "classification" in str(error)
        return
    content = b"".join(parts)
    json.loads(content if size is None else content[:size])


@given(st.binary(max_size=200), st.none() | st.integers(0, 250))
def test_any_bytes(body: bytes, header_size: int | None) -> None:
    feed(SPEC, body, header_size)


@given(json_values, st.binary(max_size=20))
def test_any_json(value: Any, tail: bytes) -> None:
    text = json.dumps(value).encode()
    feed(SPEC, text + tail, len(text))


@settings(max_examples=examples(400))
@given(messages, st.binary(max_size=64), st.sampled_from([SPEC, FLAT_SPEC]))
def test_anything_that_looks_like_a_request(message: Any, tail: bytes, spec: ModelSpec) -> None:
    text = json.dumps(message).encode()
    feed(spec, text + tail, len(text))


Good = tuple[dict[str, Array], dict[str, Any], bytes]


@st.composite
def good_requests(draw: st.DrawFn) -> Good:
    """Tensors, their header, and the bytes after it: some in JSON where it can hold them, some in binary."""
    inputs = draw(good_inputs())
    entries, tail = [], b""
    for name, array in inputs.items():
        entry: dict[str, Any] = {"name": name, "datatype": name, "shape": list(array.shape)}
        if array.dtype.kind in "biu" and name != "BF16" and draw(st.booleans()):
            entry["data"] = draw(st.sampled_from([array.tolist(), array.reshape(-1).tolist()]))
        else:
            wire = bytes(to_binary(array, BY_NAME[name]))
            entry["parameters"] = {"binary_data_size": len(wire)}
            tail += wire
        entries.append(entry)
    header: dict[str, Any] = {"inputs": entries}
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
        header["outputs"] = [{"name": name, "parameters": {"binary_data": draw(st.booleans())}} for name in names]
    return inputs, header, tail


@given(good_requests())
def test_requests_round_trip(good: Good) -> None:
    inputs, header, tail = good
    text = json.dumps(header).encode()
    request, _ = ModelCodec(SPEC).decode(text + tail, len(text), 0)
    assert request.inputs.keys() == inputs.keys()
    for name, array in inputs.items():
        came = request.inputs[name]
        assert came.shape == array.shape
        assert came.tolist() == array.tolist() if BY_NAME[name] is BYTES else came.tobytes() == array.tobytes()
    assert request.rows == next(iter(inputs.values())).shape[0]


@given(good_requests(), st.data())
def test_a_request_with_one_value_replaced(good: Good, data: st.DataObject) -> None:
    _, header, tail = good
    index = data.draw(st.sampled_from([header, *header["inputs"], *header.get("outputs", [])]))
    key = data.draw(st.sampled_from([*index, "parameters", "data", "x"]))
    index[key] = data.draw(parameters if key == "parameters" else json_values | shapes)
    text = json.dumps(header).encode()
    feed(SPEC, text + tail, len(text))


@given(good_requests(), st.data())
def test_a_request_with_some_bytes_changed(good: Good, data: st.DataObject) -> None:
    _, header, tail = good
    text = json.dumps(header).encode()
    body = bytearray(text + tail)
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    feed(SPEC, bytes(body), len(text))


@given(good_requests(), st.integers(1, 8), st.booleans())
def test_a_request_cut_or_stretched_is_refused(good: Good, count: int, cut: bool) -> None:
    _, header, tail = good
    text = json.dumps(header).encode()
    body = (text + tail)[:-count] if cut else text + tail + bytes(count)
    with pytest.raises(HeadraceError):
        ModelCodec(SPEC).decode(body, len(text), 0)


@given(st.binary(max_size=300), st.sampled_from(["", "identity", "gzip", "deflate", "br", "\x00", "gzip, gzip"]))
def test_any_bytes_as_a_packed_body(body: bytes, encoding: str) -> None:
    try:
        plain = compression.decompress(body, encoding, ClientLimits(Limits(max_body_bytes=1_000)))
    except HeadraceError as error:
        assert str(error)
        return
    assert len(plain) <= 1_000


@given(st.text(max_size=40))
def test_any_accept_encoding(text: str) -> None:
    assert compression.select_encoding(text) in ("", "gzip", "deflate")


def test_the_declared_number_of_elements_is_checked() -> None:
    for name in NAMES:
        shape = [1 << 30, 1 << 31]
        tensor = {"name": name, "datatype": name, "shape": shape, "parameters": {"binary_data_size": 16}}
        text = json.dumps({"inputs": [tensor]}).encode()
        assert math.prod(shape) < 1 << 62
        with pytest.raises(HeadraceError, match=f"'{name}'"):
            ModelCodec(SPEC).decode(text + bytes(16), len(text), 0)
