"""Invalid gRPC requests get the right code and a text with the actual and the allowed value; none gets INTERNAL.

The unit tests of the codec have every invalid tensor and parameter; here are those that cross a socket.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.e2e.conftest import MAX_BODY_BYTES

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
RAW_A = np.arange(8, dtype=np.int32).tobytes()
RAW_B = np.arange(8, dtype=np.float32).tobytes()


def good() -> Any:
    request = pb.ModelInferRequest(model_name="sum_difference")
    request.inputs.add(name="A", datatype="INT32", shape=[2, 4])
    request.inputs.add(name="B", datatype="FP32", shape=[2, 4])
    request.raw_input_contents.extend([RAW_A, RAW_B])
    return request


def spoilt(spoil: Callable[[Any], object]) -> bytes:
    request = good()
    spoil(request)
    return bytes(request.SerializeToString())


def refusal(channel: grpc.Channel, message: bytes, **more: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(INFER)(message, timeout=20, **more)
    return caught.value.code().name, caught.value.details()


def shape(*dims: int) -> Callable[[Any], object]:
    def change(request: Any) -> None:
        request.inputs[0].ClearField("shape")
        request.inputs[0].shape.extend(dims)

    return change


def set_first(field: str, value: str) -> Callable[[Any], object]:
    return lambda request: setattr(request.inputs[0], field, value)


CASES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "unknown input": (lambda r: r.inputs.add(name="C", datatype="FP32", shape=[2, 4]), ("C",)),
    "another name": (set_first("name", "C"), ("'C'", "sum_difference", "'A', 'B'")),
    "no datatype": (set_first("datatype", ""), ("'A'", "INT32")),
    "no shape": (shape(), ("'A'", r"\[-1, 4\]")),
    "too many dimensions": (shape(*[1] * 100_000), ("'A'", r"\[-1, 4\]")),
    "too few bytes": (lambda r: r.raw_input_contents.__setitem__(0, RAW_A[:-1]), ("'A'", "31", "32")),
    "no contents": (lambda r: r.ClearField("raw_input_contents"), ("raw_input_contents", "0", "2")),
    "unknown output": (lambda r: r.outputs.add(name="Q"), ("'Q'", "'SUM', 'DIFFERENCE'")),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_requests(grpc_channel: grpc.Channel, case: str) -> None:
    spoil, patterns = CASES[case]
    code, text = refusal(grpc_channel, spoilt(spoil))
    assert code == "INVALID_ARGUMENT", text
    assert [pattern for pattern in patterns if not re.search(pattern, text)] == [], text
    assert len(text) < 1_000


@pytest.mark.parametrize("count", [1_000, 100_000])
def test_very_many_outputs(grpc_channel: grpc.Channel, count: int) -> None:
    request = good()
    for number in range(count):
        request.outputs.add(name=f"Q{number}")
    code, text = refusal(grpc_channel, request.SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert "'Q0'" in text or "more than 4096 fields" in text


@pytest.mark.parametrize(
    "message",
    [b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x0b" * 1000, bytes(100)],
    ids=["a tag", "a length over the end", "a cut text", "no UTF-8", "groups", "zeros"],
)
def test_malformed_messages(grpc_channel: grpc.Channel, message: bytes) -> None:
    code, _ = refusal(grpc_channel, message)
    assert code == "INVALID_ARGUMENT"


def test_an_empty_message_names_no_model(grpc_channel: grpc.Channel) -> None:
    code, _ = refusal(grpc_channel, b"")
    assert code in ("NOT_FOUND", "INVALID_ARGUMENT")


@pytest.mark.parametrize("name", ["nothing", "../affine", "a/b", "a\nb", "\0", "né東", "x" * 100_000, "$(id)"])
def test_names_that_are_no_models(grpc_channel: grpc.Channel, name: str) -> None:
    code, text = refusal(grpc_channel, pb.ModelInferRequest(model_name=name).SerializeToString())
    assert code in ("NOT_FOUND", "INVALID_ARGUMENT")
    assert "\n" not in text
    assert len(text) < 1_000


@pytest.mark.parametrize("version", ["2", "x", "-1", "../1", "1\0"])
def test_versions_that_are_not_there(grpc_channel: grpc.Channel, version: str) -> None:
    request = pb.ModelInferRequest(model_name="versioned", model_version=version)
    code, _ = refusal(grpc_channel, request.SerializeToString())
    assert code in ("NOT_FOUND", "INVALID_ARGUMENT")


def test_a_quarantined_model_is_unavailable(grpc_channel: grpc.Channel) -> None:
    code, text = refusal(grpc_channel, pb.ModelInferRequest(model_name="broken_file").SerializeToString())
    assert (code, "cannot be served" in text) == ("UNAVAILABLE", True)


def of_size(size: int) -> bytes:
    """A request for identity_uint8 that has exactly `size` bytes."""
    for length in range(size - 80, size):
        request = pb.ModelInferRequest(model_name="identity_uint8")
        request.inputs.add(name="X", datatype="UINT8", shape=[1, length])
        request.raw_input_contents.append(bytes(length))
        if len(message := request.SerializeToString()) == size:
            return bytes(message)
    raise AssertionError(f"no request has {size} bytes")


def test_the_limit_on_messages_is_exact(grpc_channel: grpc.Channel) -> None:
    assert len(grpc_channel.unary_unary(INFER)(of_size(MAX_BODY_BYTES), timeout=20)) > MAX_BODY_BYTES - 200
    code, text = refusal(grpc_channel, of_size(MAX_BODY_BYTES + 1))
    assert (code, str(MAX_BODY_BYTES) in text) == ("RESOURCE_EXHAUSTED", True)


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_the_size_limit_applies_to_decompressed_messages(
    grpc_channel: grpc.Channel, algorithm: grpc.Compression
) -> None:
    """100 MB of zeros, a few hundred KB on the wire."""
    bomb = bytes(100 << 20)
    assert len(zlib.compress(bomb, 6)) < MAX_BODY_BYTES
    code, _ = refusal(grpc_channel, bomb, compression=algorithm)
    assert code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("size_bytes", [20_000, 100_000])
def test_large_metadata_is_refused_and_the_next_call_served(grpc_channel: grpc.Channel, size_bytes: int) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        grpc_channel.unary_unary(INFER)(b"", metadata=[("x", "y" * size_bytes)], timeout=20)
    # A block beyond every measure may cost the connection: UNAVAILABLE.
    assert caught.value.code().name in ("RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE")
    assert grpc_channel.unary_unary(INFER)(good().SerializeToString(), timeout=20)


def test_a_message_that_is_compressed_and_is_not(grpc_channel: grpc.Channel) -> None:
    """Bytes that look compressed, but go as they are: no protobuf, no decompression."""
    code, _ = refusal(grpc_channel, gzip.compress(good().SerializeToString()))
    assert code == "INVALID_ARGUMENT"
