"""Invalid gRPC requests get the right code and a text with the actual and the allowed value; none gets INTERNAL.

The unit tests of the codec have every invalid tensor and parameter, `tests/faults/test_attack_messages.py` and
`test_attack_names.py` hostile messages and names; here are those that cross a socket.
"""

from __future__ import annotations

import re
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


def set_first(field: str, value: str) -> Callable[[Any], object]:
    return lambda request: setattr(request.inputs[0], field, value)


CASES: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "another name": (set_first("name", "C"), ("'C'", "sum_difference", "'A', 'B'")),
    "no datatype": (set_first("datatype", ""), ("'A'", "INT32")),
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


@pytest.mark.parametrize(
    ("model", "version", "code"),
    [("nothing", "", "NOT_FOUND"), ("", "", "NOT_FOUND"), ("versioned", "2", "NOT_FOUND")],
)
def test_models_that_are_not_there(grpc_channel: grpc.Channel, model: str, version: str, code: str) -> None:
    message = pb.ModelInferRequest(model_name=model, model_version=version).SerializeToString()
    assert refusal(grpc_channel, message)[0] == code


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
