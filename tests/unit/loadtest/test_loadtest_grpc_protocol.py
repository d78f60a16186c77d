"""The bench's own side of the protocol over gRPC, against the published wire types."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from loadtest.grpc_protocol import decode_answer, framed, infer_message


def test_requests_carry_raw_contents_in_order() -> None:
    first, second = np.arange(4, dtype=np.int32).reshape(1, 4), np.ones((1, 2), dtype=np.float32)
    request = service_pb2.ModelInferRequest.FromString(infer_message("add_sub", {"a": first, "b": second}))
    assert request.model_name == "add_sub"
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("a", "INT32", [1, 4]),
        ("b", "FP32", [1, 2]),
    ]
    assert list(request.raw_input_contents) == [first.tobytes(), second.tobytes()]


def test_messages_are_framed_with_their_length() -> None:
    assert framed(b"abc") == b"\x00\x00\x00\x00\x03abc"


def response() -> service_pb2.ModelInferResponse:
    output = service_pb2.ModelInferResponse.InferOutputTensor(name="y", datatype="FP32", shape=[1, 2])
    content = np.array([1, 2], dtype=np.float32).tobytes()
    return service_pb2.ModelInferResponse(model_name="m", outputs=[output], raw_output_contents=[content])


def test_answers_are_decoded() -> None:
    (y,) = decode_answer(response().SerializeToString()).values()
    np.testing.assert_array_equal(y, [[1, 2]])


def test_contents_without_outputs_are_no_answer() -> None:
    broken = response()
    broken.raw_output_contents.append(b"1234")
    with pytest.raises(ValueError, match="longer"):
        decode_answer(broken.SerializeToString())
