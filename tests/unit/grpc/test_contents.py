"""Typed contents of gRPC: every datatype in its field, its range, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import BY_NAME, Array, ModelSpec, TensorSpec
from headrace.grpc.codec import GrpcCodec, scan
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
