"""Tensors on the wire, byte by byte and value by value, for every datatype."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from headrace.core.errors import BadRequest
from headrace.core.shapes import check_shape
from headrace.core.tensor import BF16, BY_NAME, BYTES, DATATYPES, Array, Datatype, ModelSpec, TensorSpec
from headrace.wire.requests import tensor_codec
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

# Datatype, values as JSON has them, their bytes: little-endian, two's complement, IEEE 754, BYTES behind their length.
GOLDEN: list[tuple[str, list[Any], str]] = [
    ("BOOL", [True, False, True], "010001"),
    ("INT8", [-128, -1, 127], "80ff7f"),
    ("INT16", [-32768, 258], "0080 0201"),
    ("INT32", [-2, 16909060], "feffffff 04030201"),
    ("INT64", [-(2**63), 2**63 - 1], "0000000000000080 ffffffffffffff7f"),
    ("UINT8", [0, 255], "00ff"),
    ("UINT16", [65535, 1], "ffff 0100"),
    ("UINT32", [4294967295, 1], "ffffffff 01000000"),
    ("UINT64", [18446744073709551615, 1], "ffffffffffffffff 0100000000000000"),
    ("FP16", [1.0, -2.0, 65504.0], "003c 00c0 ff7b"),
    ("FP32", [1.0, -2.5], "0000803f 000020c0"),
    ("FP64", [1.0, -2.5], "000000000000f03f 00000000000004c0"),
    ("BF16", [1.0, -2.0, 3.140625], "803f 00c0 4940"),
    ("BYTES", ["a", "", "né"], "01000000 61 00000000 03000000 6e c3a9"),
]


def spec(datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec("X", BY_NAME[datatype], shape)


def read(tensor: TensorSpec, shape: tuple[int, ...], body: bytes, start: int = 0, size: int | None = None) -> Array:
    size = len(body) - start if size is None else size
    return tensor_codec.from_binary(tensor, shape, math.prod(shape), body, start, size)


def parse(tensor: TensorSpec, shape: tuple[int, ...], data: object) -> Array:
    return tensor_codec.from_json(tensor, shape, math.prod(shape), data)


def to_json(array: Array, datatype: Datatype) -> Any:
    return orjson.loads(orjson.dumps(tensor_codec.to_json(array, datatype), option=orjson.OPT_SERIALIZE_NUMPY))


def test_every_datatype_has_its_golden_bytes() -> None:
    assert {name for name, _, _ in GOLDEN} == {datatype.name for datatype in DATATYPES}


@pytest.mark.parametrize(("name", "values", "wire"), GOLDEN, ids=[name for name, _, _ in GOLDEN])
def test_golden_bytes(name: str, values: list[Any], wire: str) -> None:
    datatype, shape, body = BY_NAME[name], (len(values),), bytes.fromhex(wire)
    from_json = parse(spec(name, -1), shape, values)
    from_binary = read(spec(name, -1), shape, b"head" + body, 4)
    assert from_json.dtype == from_binary.dtype == datatype.dtype
    assert bytes(tensor_codec.to_binary(from_json, datatype)) == body
    assert bytes(tensor_codec.to_binary(from_binary, datatype)) == body
    assert to_json(from_binary, datatype) == values


NUMERIC = [datatype for datatype in DATATYPES if datatype is not BYTES]


@st.composite
def numeric_arrays(draw: st.DrawFn) -> tuple[Datatype, Array]:
    datatype = draw(st.sampled_from(NUMERIC))
    shape = draw(arrays.array_shapes(max_dims=4, max_side=5))
    return datatype, draw(arrays.arrays(datatype.dtype, shape))


@given(numeric_arrays())
def test_a_numeric_tensor_survives_the_binary_form(case: tuple[Datatype, Array]) -> None:
    datatype, array = case
    wire = bytes(tensor_codec.to_binary(array, datatype))
    assert wire == array.tobytes()
    again = read(TensorSpec("X", datatype, array.shape), array.shape, b"x" + wire, 1)
    assert again.tobytes() == wire
    assert again.shape == array.shape
    assert not again.flags.owndata, "a numeric tensor is a view of the body"


@given(numeric_arrays())
def test_a_finite_numeric_tensor_survives_json(case: tuple[Datatype, Array]) -> None:
    datatype, array = case
    values = array.view(ml_dtypes.bfloat16) if datatype is BF16 else array
    if datatype.name in ("FP16", "FP32", "FP64", "BF16") and not np.isfinite(values.astype(np.float64)).all():
        array = np.zeros_like(array)
    again = parse(TensorSpec("X", datatype, array.shape), array.shape, to_json(array, datatype))
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes()


@given(st.lists(st.binary(max_size=12), min_size=1, max_size=12))
def test_bytes_survive_the_binary_form(items: list[bytes]) -> None:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    wire = tensor_codec.to_binary(array, BYTES)
    assert read(spec("BYTES", -1), array.shape, bytes(wire)).tolist() == items


@given(st.lists(st.text(max_size=12), min_size=1, max_size=12))
def test_text_survives_json(items: list[str]) -> None:
    array = parse(spec("BYTES", -1), (len(items),), items)
    assert array.tolist() == [item.encode() for item in items]
    assert to_json(array, BYTES) == items


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_rounds_to_the_nearest_with_ties_to_even(value: float) -> None:
    with np.errstate(over="ignore"):
        expected = np.array(value, np.float32).astype(ml_dtypes.bfloat16)
    if not np.isfinite(expected.astype(np.float32)):
        with pytest.raises(BadRequest, match="BF16"):
            parse(spec("BF16", -1), (1,), [value])
    else:
        assert parse(spec("BF16", -1), (1,), [value]).tobytes() == expected.tobytes()


def test_a_non_contiguous_view_is_encoded_in_order() -> None:
    array = np.arange(12, dtype="<i4").reshape(3, 4)
    assert bytes(tensor_codec.to_binary(array.T, BY_NAME["INT32"])) == array.T.copy().tobytes()
    assert bytes(tensor_codec.to_binary(array[1:, ::2], BY_NAME["INT32"])) == array[1:, ::2].copy().tobytes()
    assert to_json(array.T, BY_NAME["INT32"]) == array.T.reshape(-1).tolist()


@pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3, 4, 5, 6],
        [[1, 2, 3], [4, 5, 6]],
        [[[1], [2], [3]], [[4], [5], [6]]],
        [[1, 2], [[3]], 4, [], [5, [[[6]]]]],
    ],
    ids=["flat", "rows of flat data", "nested", "in another way"],
)
def test_json_data_may_be_flat_or_nested(data: list[Any]) -> None:
    array = parse(spec("INT32", -1, 3, 1), (2, 3, 1), data)
    assert array.tolist() == [[[1], [2], [3]], [[4], [5], [6]]]


@pytest.mark.parametrize(
    ("name", "data", "dtype"),
    [
        ("UINT64", [2**63, 1], "uint64"),  # NumPy alone would make floats of these
        ("FP64", [10**20, 0.5], "float64"),  # JavaScript writes 1e20 with all its zeros
        ("FP32", [3.4028235e38, 0], "float32"),  # the shortest text for the largest FP32 lies above it
        ("FP16", [65519.0, 1], "float16"),  # rounds down to the largest
        ("BOOL", [True, 0], "bool"),
    ],
)
def test_numbers_that_must_not_be_refused(name: str, data: list[Any], dtype: str) -> None:
    array = parse(spec(name, -1), (2,), data)
    assert array.dtype == dtype
    assert array.tolist() == np.array([np.array(value, dtype) for value in data]).tolist()


REFUSED: list[tuple[str, tuple[int, ...], object, str]] = [
    ("INT32", (2,), "12", "data must be an array, not a string"),
    ("INT32", (2,), {"0": 1}, "data must be an array, not an object"),
    ("INT32", (2,), [1], r"1 elements came for shape \[2\], expected 2"),
    ("INT32", (2,), [1, 2, 3], r"3 elements came for shape \[2\], expected 2"),
    ("INT32", (1,), [[]], r"0 elements came for shape \[1\], expected 1"),
    ("BYTES", (4,), [["a", "b"], ["c"]], r"3 elements came for shape \[4\], expected 4"),
    ("INT32", (1,), [[1], {}], r"2 elements came for shape \[1\]"),
    ("INT32", (2,), [1, True], "INT32: data must be integers, not true or false"),
    ("INT32", (1,), [1.0], "integers, not a number with a fraction"),
    ("INT32", (1,), ["1"], "integers, not a string"),
    ("INT32", (1,), [None], "integers, not null"),
    ("INT32", (1,), [{}], "integers, not an object"),
    ("FP32", (2,), [0.5, "1"], "FP32: data must be numbers, not a string"),
    ("FP32", (1,), [False], "FP32: data must be numbers, not true or false"),
    ("BF16", (1,), ["1"], "BF16: data must be numbers, not a string"),
    ("BOOL", (1,), [2], "BOOL: data must be from 0 to 1, 2 is not"),
    ("BOOL", (1,), ["true"], "true, false, 0 or 1, not a string"),
    ("BYTES", (2,), ["a", 1], "BYTES: data must be strings, not a number"),
    ("INT8", (2,), [-128, 128], "from -128 to 127, 128 is not"),
    ("UINT8", (1,), [-1], "from 0 to 255, -1 is not"),
    ("INT64", (1,), [2**63], "9223372036854775808 is not"),
    ("UINT64", (1,), [2**64], "18446744073709551616 is not"),
    ("FP16", (2,), [1, 70000], "from -65504.0 to 65504.0, 70000.0 is not"),
    ("FP32", (1,), [-1e39], "-1e[+]39 is not"),
    ("FP64", (1,), [10**400], "is not"),
    ("BF16", (1,), [3.4e38], "3.4e[+]38 is not"),
]


@pytest.mark.parametrize(("name", "shape", "data", "message"), REFUSED)
def test_json_data_that_is_refused(name: str, shape: tuple[int, ...], data: object, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        parse(spec(name, *[-1] * len(shape)), shape, data)
    assert "'X'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_one_long_string_among_many_is_refused_without_an_array_of_long_ones() -> None:
    # As a NumPy array of text this would take 4 bytes * 10**6 * 10**5.
    with pytest.raises(BadRequest, match="numbers, not a string"):
        parse(spec("FP32", -1), (100_000,), [0.0] * 99_999 + ["x" * 1_000_000])


BROKEN_BINARY: list[tuple[str, tuple[int, ...], bytes, int, str]] = [
    ("FP32", (2,), bytes(12), 12, r"12 bytes came for shape \[2\] of FP32, expected 8"),
    ("FP32", (2,), bytes(4), 4, "4 bytes came .* expected 8"),
    ("FP32", (2,), bytes(7), 8, "binary_data_size is 8, but only 7 bytes are left"),
    ("BYTES", (3,), bytes(8), 8, "8 bytes cannot hold 3 BYTES elements"),
    ("BYTES", (2,), bytes.fromhex("04000000 61626364"), 8, "data end before element 1 of 2"),
    ("BYTES", (2,), bytes.fromhex("01000000 61 00"), 6, "6 bytes cannot hold 2 BYTES elements"),
    ("BYTES", (1,), bytes.fromhex("05000000 61"), 5, "element 0 says 5 bytes, only 1 are left"),
    ("BYTES", (1,), bytes.fromhex("ffffffff 61"), 5, "element 0 says 4294967295 bytes, only 1 are left"),
    ("BYTES", (1,), bytes.fromhex("00000000 61"), 5, "1 bytes are left over after 1 elements"),
]


@pytest.mark.parametrize(("name", "shape", "body", "size", "message"), BROKEN_BINARY)
def test_binary_data_that_is_refused(name: str, shape: tuple[int, ...], body: bytes, size: int, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        read(spec(name, *[-1] * len(shape)), shape, body, 0, size)
    assert "'X'" in str(caught.value)


@given(
    st.binary(max_size=64), st.sampled_from(DATATYPES), st.integers(1, 1 << 62), st.integers(0, 80), st.integers(0, 80)
)
def test_no_bytes_raise_anything_but_bad_request(
    body: bytes, datatype: Datatype, elements: int, start: int, size: int
) -> None:
    tensor = TensorSpec("X", datatype, (-1,))
    try:
        array = tensor_codec.from_binary(tensor, (elements,), elements, body, start, size)
    except BadRequest:
        return
    assert array.shape == (elements,)


def test_output_bytes_that_are_not_text_are_refused_in_json() -> None:
    array = np.empty(1, dtype=object)
    array[:] = [b"\xff\xfe"]
    with pytest.raises(BadRequest, match="binary_data"):
        tensor_codec.to_json(array, BYTES)


NON_FINITE = {
    "FP16": np.array([np.nan, np.inf, -np.inf, 1.5], "<f2"),
    "FP32": np.array([np.nan, np.inf, -np.inf, 1.5], "<f4"),
    "FP64": np.array([np.nan, np.inf, -np.inf, 1.5], "<f8"),
    "BF16": np.array([0x7FC0, 0x7F80, 0xFF80, 0x3FC0], "<u2"),
}


@pytest.mark.parametrize(("name", "array"), NON_FINITE.items())
def test_json_has_nan_and_infinities_as_triton_writes_them(name: str, array: Array) -> None:
    for times in (1, 64, 65, 1000):  # short texts and long ones are looked at in different ways
        data = tensor_codec.to_json(np.tile(array, times), BY_NAME[name])
        text = b",".join([b"NaN,Infinity,-Infinity,1.5"] * times)
        assert orjson.dumps({"data": data}) == b'{"data":[' + text + b"]}"


@pytest.mark.parametrize(("name", "array"), NON_FINITE.items())
def test_json_nan_and_infinities_are_read(name: str, array: Array) -> None:
    again = parse(spec(name, -1), (4,), [math.nan, math.inf, -math.inf, 1.5])
    assert again.tobytes() == array.tobytes()


def test_an_overflow_beside_an_infinity_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"from -65504\.0 to 65504\.0, 70000\.0 is not"):
        parse(spec("FP16", -1), (2,), [math.inf, 70000])


MODEL = ModelSpec("m", "1", "test", {}, {}, 8)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2,), r"'X' of model 'm' has shape \[2\], expected \[-1, 3\]"),
        ((2, 3, 1), r"has shape \[2, 3, 1\], expected \[-1, 3\]"),
        ((2, 4), r"has shape \[2, 4\], expected \[-1, 3\]"),
        ((), r"has shape \[\], expected \[-1, 3\]"),
        ((0, 3), "the first dimension is the batch, it must be at least 1"),
        ((-1, 3), "the first dimension is the batch, it must be at least 1"),
        ((1 << 62, 3), "more elements than any memory holds"),
        ((10**30, 3), "more elements than any memory holds"),
    ],
)
def test_shapes_that_are_refused(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_shape(spec("FP32", -1, 3), shape, MODEL)


FREE = ModelSpec("m", "1", "test", {}, {}, 0)


def test_shapes_without_elements() -> None:
    assert check_shape(spec("FP32", -1, -1, -1), (1, 0, 4), MODEL) == 0
    assert check_shape(spec("FP32", -1, 4), (0, 4), FREE) == 0
    with pytest.raises(BadRequest, match="every dimension must be at least 0"):
        check_shape(spec("FP32", -1, -1), (0, -1), FREE)
    with pytest.raises(BadRequest, match="beside a dimension of 0, the product of the others must be at most 16777216"):
        check_shape(spec("FP32", -1, -1, -1), (0, 1 << 12, (1 << 12) + 1), FREE)


@pytest.mark.parametrize("datatype", DATATYPES, ids=str)
def test_tensors_without_elements_survive(datatype: Datatype) -> None:
    for shape in ((1, 0), (2, 0, 3), (1, 3, 0, 2), (0,)):
        array: Array = np.empty(shape, datatype.dtype)
        assert bytes(tensor_codec.to_binary(array, datatype)) == b""
        again = tensor_codec.from_binary(TensorSpec("X", datatype, shape), shape, 0, b"", 0, 0)
        assert (again.shape, again.dtype) == (shape, datatype.dtype)
        for data in ([], array.tolist(), to_json(array, datatype)):
            again = parse(TensorSpec("X", datatype, shape), shape, data)
            assert (again.shape, again.dtype) == (shape, datatype.dtype)
        with pytest.raises(BadRequest, match="4 bytes"):
            tensor_codec.check_size(TensorSpec("X", datatype, shape), shape, 0, 4)


def test_a_shape_of_very_many_dimensions_is_abbreviated() -> None:
    with pytest.raises(BadRequest) as caught:
        check_shape(spec("FP32", -1, 3), [1] * 100_000, MODEL)
    assert len(str(caught.value)) < 300


def test_a_valid_shape_returns_its_number_of_elements() -> None:
    assert check_shape(spec("FP32", -1, 3), (5, 3), MODEL) == 15
    assert check_shape(spec("FP32"), (), MODEL) == 1
