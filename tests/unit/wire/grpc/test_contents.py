"""Typed contents of gRPC: every datatype in its field, its range, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import BY_NAME, Array, ModelSpec, TensorSpec
from headrace.wire.grpc.codec import GrpcCodec, scan
from headrace.wire.grpc.large_contents import varint
from tritonclient.grpc import service_pb2 as pb

TYPED: list[tuple[str, str, list[Any]]] = [
    ("BOOL", "bool_contents", [True, False]),
    ("INT8", "int_contents", [-128, 127]),
    ("INT16", "int_contents", [-32768, 32767]),
    ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1]),
    ("UINT8", "uint_contents", [0, 255]),
    ("UINT16", "uint_contents", [0, 65535]),
    ("UINT32", "uint_contents", [0, 2**32 - 1]),
    ("UINT64", "uint64_contents", [0, 2**64 - 1]),
    ("FP32", "fp32_contents", [-0.5, float("inf")]),
    ("FP64", "fp64_contents", [0.1, -1e300]),
    ("BYTES", "bytes_contents", [b"", b"\xff\0x"]),
]
FIELDS = sorted({field for _, field, _ in TYPED})


def decode(message: pb.ModelInferRequest, datatype: str) -> Array:
    spec = TensorSpec("X", BY_NAME[datatype], (-1, -1))
    one = GrpcCodec(ModelSpec("m", "1", "test", {"X": spec}, {"Y": spec}, 8))
    content = message.SerializeToString()
    return one.decode(content, scan(content), 1)[0].inputs["X"]


def contents(datatype: str, field: str, values: Sequence[Any], shape: Sequence[int] = (1, 2)) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    getattr(message.inputs.add(name="X", datatype=datatype, shape=shape).contents, field).extend(values)
    return message


@pytest.mark.parametrize(("datatype", "field", "values"), TYPED, ids=[case[0] for case in TYPED])
def test_typed_contents(datatype: str, field: str, values: list[Any]) -> None:
    array = decode(contents(datatype, field, values), datatype)
    assert array.tolist() == [values]
    assert array.dtype == BY_NAME[datatype].dtype


@pytest.mark.parametrize(("datatype", "field"), [case[:2] for case in TYPED], ids=[case[0] for case in TYPED])
def test_typed_contents_in_another_field(datatype: str, field: str) -> None:
    for other in FIELDS:
        if other != field:
            value = b"1" if other == "bytes_contents" else 1
            with pytest.raises(BadRequest, match=f"'X' is {datatype}: its contents go into {field}, not {other}"):
                decode(contents(datatype, other, [value, value]), datatype)


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [
        ("INT8", "int_contents", 300),
        ("INT8", "int_contents", -129),
        ("INT16", "int_contents", 32768),
        ("UINT8", "uint_contents", 256),
        ("UINT16", "uint_contents", 65536),
    ],
)
def test_typed_contents_out_of_range(datatype: str, field: str, value: int) -> None:
    with pytest.raises(BadRequest, match=rf"'X' is {datatype}: contents must be from -?\d+ to \d+, {value} is not"):
        decode(contents(datatype, field, [1, value]), datatype)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
@pytest.mark.parametrize("field", ["fp32_contents", "uint_contents", "bytes_contents"])
def test_half_precision_has_no_contents(datatype: str, field: str) -> None:
    value = b"1" if field == "bytes_contents" else 1
    with pytest.raises(BadRequest, match=f"'X' is {datatype}, which has no contents: send it as raw_input_contents"):
        decode(contents(datatype, field, [value, value]), datatype)


LARGE: list[tuple[str, str, Any]] = [
    ("BOOL", "bool_contents", lambda index: index % 3 == 0),
    ("INT8", "int_contents", lambda index: index % 256 - 128),
    ("INT32", "int_contents", lambda index: (index * 7919 - 2**31) % 2**32 - 2**31),
    ("INT64", "int64_contents", lambda index: (index * 0x9E3779B97F4A7C15) % 2**64 - 2**63),
    ("UINT16", "uint_contents", lambda index: index % 65536),
    ("UINT64", "uint64_contents", lambda index: (index * 0x9E3779B97F4A7C15) % 2**64 >> index % 64),
    ("FP32", "fp32_contents", lambda index: index / 8),
    ("FP64", "fp64_contents", lambda index: index / 7),
    ("BYTES", "bytes_contents", lambda index: b"x" * (index % 5)),
]


@pytest.mark.parametrize(("datatype", "field", "value"), LARGE, ids=[each[0] for each in LARGE])
def test_large_contents_are_decoded_as_small_ones(datatype: str, field: str, value: Any) -> None:
    values = [value(index) for index in range(200_000)]
    message = contents(datatype, field, values, (1, len(values)))
    assert len(message.SerializeToString()) > 128 << 10
    assert decode(message, datatype).reshape(-1).tolist() == values
    message.inputs[0].shape[1] += 1
    with pytest.raises(BadRequest, match="elements came"):
        decode(message, datatype)
    wrong = contents("FP32" if datatype != "FP32" else "INT64", field, values, (1, len(values)))
    with pytest.raises(BadRequest, match="go into"):
        decode(wrong, wrong.inputs[0].datatype)


def test_large_contents_that_are_not_packed_or_damaged() -> None:
    def request(contents: bytes) -> bytes:
        tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="INT64", shape=[1, 2]).SerializeToString()
        tensor += b"\x2a" + varint(len(contents)) + contents
        return b"\x0a\x01m\x2a" + varint(len(tensor)) + tensor

    spec = TensorSpec("X", BY_NAME["INT64"], (-1, -1))
    one = GrpcCodec(ModelSpec("m", "1", "test", {"X": spec}, {"Y": spec}, 8))
    size = 200_000
    for damaged, text in {
        b"\x18\x01" * size: "packed|fields",
        b"\x1a" + varint(size) + b"\x80" * size: "elements",
        b"\x1a" + varint(size) + b"\x80" * (size - 2) + b"\x01\x01": "more than 10 bytes",
        b"\x1a" + varint(2 * size) + b"\x01" * size: "middle of a field",
        b"\x7b" * size: "wire type",
    }.items():
        content = request(damaged)
        with pytest.raises(BadRequest, match=text):
            one.decode(content, scan(content), 1)
