"""Values for Redis: what was encoded comes back, and nothing else is served."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from headrace.core.tensor import BY_NAME, DATATYPES, Array, ModelSpec, TensorSpec
from headrace.inference.caching.values import MAX_VALUE_BYTES, ValueRefused, decode, encode
from hypothesis import given
from hypothesis import strategies as st

SECRET, KEY = b"s" * 32, b"k" * 32


def spec(*outputs: tuple[str, str, tuple[int, ...]], rows: int = 8) -> ModelSpec:
    tensors = {name: TensorSpec(name, BY_NAME[datatype], shape) for name, datatype, shape in outputs}
    return ModelSpec("m", "1", "test", {}, tensors, max_batch_size=rows)


def request(rows: int = 1, *outputs: str) -> tuple[int, tuple[str, ...]]:
    """Rows and requested outputs."""
    return rows, outputs


MODEL = spec(("y", "FP32", (-1, 2)), ("t", "BYTES", (-1, -1)))


def texts(*rows: tuple[bytes, ...]) -> Array:
    array = np.empty((len(rows), len(rows[0])), object)
    for index, row in enumerate(rows):
        array[index] = row
    return array


OUTPUTS: dict[str, Array] = {"y": np.array([[1, 2]], np.float32), "t": texts((b"a", b"", b"xyz"))}


def value(outputs: dict[str, Array] = OUTPUTS, model: ModelSpec = MODEL) -> bytes:
    encoded = encode(KEY, outputs, model, 5, 7, SECRET)
    assert encoded is not None
    return encoded


def forged(document: Any, content: bytes = b"") -> bytes:
    """A value with the right digest: of another version of the server, or of one that holds the secret."""
    head = json.dumps(document).encode()
    body = len(head).to_bytes(4, "little") + head + content
    return b"HRC1" + blake3(KEY + body, key=SECRET).digest() + body


def test_a_value_comes_back() -> None:
    response = decode(value(), KEY, MODEL, *request(), SECRET)
    assert (response.compute_ns, response.expires_ms) == (5, 7)
    for name, array in OUTPUTS.items():
        assert response.outputs[name].dtype == array.dtype
        assert response.outputs[name].tolist() == array.tolist()
        assert not response.outputs[name].flags.writeable


@given(st.data())
def test_arrays_of_every_datatype_come_back(data: st.DataObject) -> None:
    datatype = data.draw(st.sampled_from(DATATYPES))
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(0, 3)))
    model = spec(("y", datatype.name, (-1, -1)))
    count = shape[0] * shape[1]
    array: Array
    if datatype.name == "BYTES":
        array = np.empty(count, object)
        array[:] = data.draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count))
    elif datatype.name == "BOOL":
        array = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    else:
        size = count * datatype.size_bytes
        array = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), datatype.dtype)
    array = array.reshape(shape)
    response = decode(value({"y": array}, model), KEY, model, *request(shape[0]), SECRET)
    assert response.outputs["y"].dtype == array.dtype
    assert response.outputs["y"].shape == array.shape
    assert response.outputs["y"].tobytes() == array.tobytes() or response.outputs["y"].tolist() == array.tolist()


@given(st.integers(0, len(value()) - 1), st.integers(1, 255))
def test_one_changed_byte_is_refused(position: int, change: int) -> None:
    changed = bytearray(value())
    changed[position] ^= change
    with pytest.raises(ValueRefused):
        decode(bytes(changed), KEY, MODEL, *request(), SECRET)


@given(st.integers(0, len(value()) - 1))
def test_a_shortened_value_is_refused(size: int) -> None:
    with pytest.raises(ValueRefused):
        decode(value()[:size], KEY, MODEL, *request(), SECRET)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(content: bytes) -> None:
    for candidate in (content, b"HRC1" + content, value() + content + b"x"):
        with pytest.raises(ValueRefused):
            decode(candidate, KEY, MODEL, *request(), SECRET)


def test_the_value_of_another_key_or_secret_is_refused() -> None:
    for key, secret in ((b"j" * 32, SECRET), (KEY, b"r" * 32)):
        with pytest.raises(ValueRefused, match="digest"):
            decode(value(), key, MODEL, *request(), secret)


Y = np.array([[1, 2]], np.float32).tobytes()


@pytest.mark.parametrize(
    ("document", "content", "message"),
    [
        ([1, 0, [["y", "FP32", [1, 2], 8]]], Y, "missing"),
        ([1, 0, [["y", "FP64", [1, 1], 8]]], Y, "datatype"),
        ([1, 0, [["y", "INT32", [1, 2], 8]]], Y, "datatype"),
        ([1, 0, [["y", "FP32", [2, 1], 8]]], Y, "shape"),
        ([1, 0, [["y", "FP32", [2, 2], 8]]], Y, "shape"),
        ([1, 0, [["y", "FP32", [1, -2], 8]]], Y, "shape"),
        ([1, 0, [["y", "FP32", [True, 2], 8]]], Y, "shape"),
        ([1, 0, [["y", "FP32", [1.0, 2], 8]]], Y, "shape"),
        ([1, 0, [["y", "FP32", [2], 8]]], Y, "shape"),
        ([1, 0, [["y", "FP32", [1, 2], 4]]], Y, "length"),
        ([1, 0, [["y", "FP32", [1, 2], -8]]], Y, "length"),
        ([1, 0, [["y", "FP32", [1, 2], 8.0]]], Y, "length"),
        ([1, 0, [["y", "FP32", [1, 2], 1 << 60]]], Y, "length"),
        ([1, 0, [["y", "FP32", [1, 2], 8]]], Y + b"x", "more bytes"),
        ([1, 0, [["y", "FP32", [1, 2], 8], ["y", "FP32", [1, 2], 8]]], Y + Y, "twice"),
        ([1, 0, [["other", "FP32", [1, 2], 8]]], Y, "cannot be read: KeyError"),
        ([1, 0, [["t", "BYTES", [1, 1 << 40], 4]]], b"\0\0\0\0", "BYTES"),
        ([1, 0, [["t", "BYTES", [1, 1], 4]]], b"\xff\xff\xff\xff", "BYTES"),
        ([1, 0, [["t", "BYTES", [1, 1], 5]]], b"\0\0\0\0x", "BYTES"),
        ([1, 0, {"y": 1}], Y, "cannot be read"),
        ([1, 0], Y, "cannot be read"),
        ({"a": 1}, Y, "cannot be read"),
        ([1e400, 0, [["y", "FP32", [1, 2], 8], ["t", "BYTES", [1, 0], 0]]], Y, "OverflowError"),
        (["x", 0, []], b"", "missing|cannot be read"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_in_spite_of_its_digest(
    document: Any, content: bytes, message: str
) -> None:
    with pytest.raises(ValueRefused, match=message):
        decode(forged(document, content), KEY, MODEL, *request(), SECRET)


def test_a_value_without_a_requested_output_is_refused() -> None:
    part = value({"y": OUTPUTS["y"]})
    assert decode(part, KEY, MODEL, *request(1, "y"), SECRET).outputs.keys() == {"y"}
    with pytest.raises(ValueRefused, match="missing"):
        decode(part, KEY, MODEL, *request(1, "t"), SECRET)
    with pytest.raises(ValueRefused, match="missing"):
        decode(part, KEY, MODEL, *request(), SECRET)
    with pytest.raises(ValueRefused, match="shape"):
        decode(value(), KEY, MODEL, *request(2), SECRET)


def test_deep_json_and_other_bools_are_refused() -> None:
    head = b"[" * 60_000
    body = len(head).to_bytes(4, "little") + head
    with pytest.raises(ValueRefused):
        decode(b"HRC1" + blake3(KEY + body, key=SECRET).digest() + body, KEY, MODEL, *request(), SECRET)
    model = spec(("b", "BOOL", (-1, 2)))
    with pytest.raises(ValueRefused, match="BOOL"):
        decode(forged([1, 0, [["b", "BOOL", [1, 2], 2]]], b"\x01\x02"), KEY, model, *request(), SECRET)


def test_what_would_be_refused_is_not_encoded() -> None:
    large = spec(("y", "FP32", (-1, -1)))
    for outputs, model in (
        ({"y": np.zeros((1, MAX_VALUE_BYTES // 4), np.float32)}, large),
        ({"y": np.zeros((1, 2), np.float64)}, MODEL),
        ({"y": np.zeros((1, 3), np.float32)}, MODEL),
        ({"x": np.zeros((1, 2), np.float32)}, MODEL),
        ({"t": np.array([["a text"]], object)}, MODEL),
        ({"t": texts((b"x" * (MAX_VALUE_BYTES + 1),))}, MODEL),
    ):
        assert encode(KEY, outputs, model, 1, 0, SECRET) is None  # type: ignore[arg-type]
