"""Inference over gRPC with Triton's client: every form of request and response, every datatype."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from headrace.core.tensor import DATATYPES
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.e2e.conftest import Reference
from tests.e2e.test_http_infer import values
from tests.support.grpc_requests import tensor

pb: Any = service_pb2


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16), np.float32)


# ONNX's text is Unicode: the model itself cannot take the bytes that are not.
@pytest.mark.parametrize("datatype", [d.name for d in DATATYPES if d.name != "BYTES"])
def test_every_number_type_raw(grpc_client: triton.InferenceServerClient, datatype: str) -> None:
    array = values(datatype)
    result = grpc_client.infer(f"identity_{datatype.lower()}", [tensor("X", array, datatype)])
    answer = result.as_numpy("Y")
    assert (answer.dtype, answer.shape) == (array.dtype, array.shape)
    assert answer.tobytes() == array.tobytes()
    assert result.get_output("Y").datatype == datatype


def test_bytes_raw(grpc_client: triton.InferenceServerClient) -> None:
    texts = [["", "né 東京 \U0001f680"], ["a" * 5_000, "\0"]]
    array = np.array([[text.encode() for text in row] for row in texts], dtype=object)
    assert grpc_client.infer("identity_bytes", [tensor("X", array, "BYTES")]).as_numpy("Y").tolist() == array.tolist()


def test_outputs_as_requested(grpc_client: triton.InferenceServerClient) -> None:
    a, b = np.arange(8, dtype=np.int32).reshape(2, 4), np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
    inputs = [tensor("A", a, "INT32"), tensor("B", b)]
    result = grpc_client.infer("sum_difference", inputs)
    assert [output.name for output in result.get_response().outputs] == ["SUM", "DIFFERENCE"]
    assert result.as_numpy("SUM").tolist() == (a + b).astype(np.float32).tolist()
    assert result.as_numpy("DIFFERENCE").tolist() == (a - b).astype(np.float32).tolist()
    requested_outputs = [triton.InferRequestedOutput("DIFFERENCE")]
    result = grpc_client.infer("sum_difference", inputs, outputs=requested_outputs)
    assert [output.name for output in result.get_response().outputs] == ["DIFFERENCE"]
    assert result.as_numpy("DIFFERENCE").tolist() == (a - b).astype(np.float32).tolist()


def test_ids_and_parameters(grpc_client: triton.InferenceServerClient, reference: Reference) -> None:
    x = rows(1)
    result = grpc_client.infer(
        "affine", [tensor("X", x)], request_id="né-7", priority=1, timeout=5_000_000, parameters={"mine": "x", "n": 1.5}
    )
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == ("né-7", "affine", "1")
    assert np.allclose(result.as_numpy("Y"), reference.affine(x), atol=1e-5)
    assert grpc_client.infer("affine", [tensor("X", x)]).get_response().id == ""


def test_classification(grpc_client: triton.InferenceServerClient) -> None:
    x = np.array([[0.5, -1, 3, 2, 2], [9, 8, 7, 6, 5]], np.float32)
    outputs = [triton.InferRequestedOutput("SCORES", class_count=3), triton.InferRequestedOutput("BEST")]
    result = grpc_client.infer("scores", [tensor("X", x)], outputs=outputs)
    assert result.as_numpy("SCORES").tolist() == [
        [b"3.000000:2:cherry", b"2.000000:3", b"2.000000:4"],
        [b"9.000000:0:apple", b"8.000000:1:banana", b"7.000000:2:cherry"],
    ]
    assert result.as_numpy("BEST").tolist() == [[2], [0]]
    assert result.get_output("SCORES").datatype == "BYTES"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("length", [2, 300_000])
def test_compressed_requests(grpc_client: triton.InferenceServerClient, algorithm: str, length: int) -> None:
    x = np.arange(length, dtype=np.float32).reshape(2, -1)
    result = grpc_client.infer("row_sums", [tensor("X", x)], compression_algorithm=algorithm)
    assert result.as_numpy("DOUBLE").tobytes() == (2 * x).tobytes()


def test_large_messages_both_ways(grpc_client: triton.InferenceServerClient) -> None:
    """Many times the windows and frames of HTTP/2; every byte counts."""
    for length in (16_383, 65_536, 1_000_000):
        x = np.random.default_rng(length).standard_normal((1, length), np.float32)
        answer = grpc_client.infer("identity_fp32", [tensor("X", x)]).as_numpy("Y")
        assert answer.tobytes() == x.tobytes()


def test_a_request_that_the_client_builds_for_others_to_send(grpc_channel: grpc.Channel) -> None:
    request = pb.ModelInferRequest(model_name="row_sums", id="1")
    request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(np.array([1, 2], np.float32).tobytes())
    request.outputs.add(name="SUM")
    answer = service_pb2_grpc.GRPCInferenceServiceStub(grpc_channel).ModelInfer(request)
    assert (answer.model_name, answer.model_version, answer.id) == ("row_sums", "1", "1")
    (output,) = answer.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("SUM", "FP32", [1, 1])
    assert np.frombuffer(answer.raw_output_contents[0], np.float32).tolist() == [3]
