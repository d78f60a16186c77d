"""Inference over a real socket with Triton's client: every form of request and response, every datatype."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from headrace.core.tensor import DATATYPES
from tritonclient.utils import InferenceServerException

from tests.e2e.conftest import Reference
from tests.support.serving import Server

NUMPY_TYPES = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    **{f"{sign}INT{bits}": np.dtype(f"{sign.lower()}int{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)},
}


def values(datatype: str) -> np.ndarray:
    """(2, 3) with the extremes of the type among them."""
    if datatype == "BYTES":
        rows = [[b"", b"\xff\x00 no text", "né 東京 \U0001f680".encode()], [b"a" * 5_000, b"\n", b"\0"]]
        return np.array(rows, dtype=object)
    if datatype == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    if datatype == "BF16":
        return np.array([[0.0, -1.5, 3.140625], [-0.0, 2.0**127, 2.0**-126]], ml_dtypes.bfloat16)
    dtype = np.dtype(NUMPY_TYPES[datatype])
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    rest = [-1.5, -0.0, info.tiny, 1] if dtype.kind == "f" else [0, 1, 7, 100]
    return np.array([info.min, info.max, *rest], dtype).reshape(2, 3)


def tensor(name: str, array: np.ndarray, datatype: str = "FP32", binary: bool = True) -> triton.InferInput:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array, binary_data=binary)


def requested(name: str, binary: bool = True, classes: int = 0) -> triton.InferRequestedOutput:
    return triton.InferRequestedOutput(name, binary_data=binary, class_count=classes)


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 16), np.float32)


# ONNX's text is Unicode: the model itself cannot take the bytes that are not.
@pytest.mark.parametrize("datatype", [d.name for d in DATATYPES if d.name != "BYTES"])
def test_every_number_type_in_binary(client: triton.InferenceServerClient, datatype: str) -> None:
    array = values(datatype)
    result = client.infer(f"identity_{datatype.lower()}", [tensor("X", array, datatype)], outputs=[requested("Y")])
    answer = result.as_numpy("Y")
    assert (answer.dtype, answer.shape) == (array.dtype, array.shape)
    assert answer.tobytes() == array.tobytes()
    assert result.get_output("Y")["datatype"] == datatype


TEXTS = np.array([["", "né 東京 \U0001f680", 'quote " \\ \n'], ["a" * 5_000, "\u0000", "z"]], dtype=object)


@pytest.mark.parametrize("sent", [True, False], ids=["binary in", "json in"])
@pytest.mark.parametrize("got", [True, False], ids=["binary out", "json out"])
def test_bytes_both_ways(client: triton.InferenceServerClient, sent: bool, got: bool) -> None:
    array = np.array([[text.encode() for text in row] for row in TEXTS], dtype=object)
    result = client.infer("identity_bytes", [tensor("X", array, "BYTES", sent)], outputs=[requested("Y", got)])
    answer = result.as_numpy("Y")
    assert answer.shape == (2, 3)
    assert [item if isinstance(item, bytes) else item.encode() for item in answer.reshape(-1)] == list(
        array.reshape(-1)
    )


def test_text_that_is_not_utf8_is_the_callers_fault(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"'X'.*UTF-8") as caught:
        client.infer("identity_bytes", [tensor("X", values("BYTES"), "BYTES")])
    assert caught.value.status() == "400"


@pytest.mark.parametrize("a_binary", [True, False])
@pytest.mark.parametrize("sum_binary", [True, False])
def test_mixed_forms(client: triton.InferenceServerClient, a_binary: bool, sum_binary: bool) -> None:
    a = np.arange(8, dtype=np.int32).reshape(2, 4)
    b = np.linspace(0, 1, 8, dtype=np.float32).reshape(2, 4)
    result = client.infer(
        "sum_difference",
        [tensor("A", a, "INT32", a_binary), tensor("B", b, binary=not a_binary)],
        outputs=[requested("DIFFERENCE", not sum_binary), requested("SUM", sum_binary)],
    )
    assert result.as_numpy("SUM").tolist() == (a + b).astype(np.float32).tolist()
    assert result.as_numpy("DIFFERENCE").tolist() == (a - b).astype(np.float32).tolist()
    names = [output["name"] for output in result.get_response()["outputs"]]
    assert names == ["DIFFERENCE", "SUM"]
    assert ("parameters" in result.get_output("SUM")) == sum_binary


def test_binary_data_output_and_no_outputs_named(server: Server, client: triton.InferenceServerClient) -> None:
    x = np.array([[1, 2]], np.float32)
    result = client.infer("row_sums", [tensor("X", x)])  # the client sets binary_data_output then
    assert result.get_output("DOUBLE")["parameters"] == {"binary_data_size": 8}
    assert result.as_numpy("SUM").tolist() == [[3]]
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    status, headers, content = server.request("POST", "/v2/models/row_sums/infer", json.dumps(body).encode())
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(content) == {
        "model_name": "row_sums",
        "model_version": "1",
        "outputs": [
            {"name": "DOUBLE", "datatype": "FP32", "shape": [1, 2], "data": [2.0, 4.0]},
            {"name": "SUM", "datatype": "FP32", "shape": [1, 1], "data": [3.0]},
        ],
    }


def test_ids_and_parameters(client: triton.InferenceServerClient, reference: Reference) -> None:
    x = rows(1)
    result = client.infer(
        "affine", [tensor("X", x)], request_id="né-7", priority=1, timeout=5_000_000, parameters={"mine": "x", "n": 1.5}
    )
    assert result.get_response()["id"] == "né-7"
    assert np.allclose(result.as_numpy("Y"), reference.affine(x), atol=1e-5)
    assert "id" not in client.infer("affine", [tensor("X", x)]).get_response()


def test_an_expired_request_is_answered_with_504(client: triton.InferenceServerClient) -> None:
    steps = np.array([3_000], np.int64)
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        client.infer("busy", [tensor("STEPS", steps, "INT64")], parameters={"headrace_deadline_us": 2_000})
    assert caught.value.status() == "504"


def test_versions(client: triton.InferenceServerClient, reference: Reference) -> None:
    x = rows(2)
    for version in ("1", "3", "20"):
        result = client.infer("versioned", [tensor("X", x)], model_version=version)
        assert result.get_response()["model_version"] == version
        assert np.allclose(result.as_numpy("Y"), reference.affine(x, seed=int(version)), atol=1e-5)
    # Numbers, not texts, are compared: 20 is the latest.
    assert client.infer("versioned", [tensor("X", x)]).get_response()["model_version"] == "20"


def test_classification(client: triton.InferenceServerClient) -> None:
    x = np.array([[0.5, -1, 3, 2, 2], [9, 8, 7, 6, 5]], np.float32)
    for binary in (True, False):
        result = client.infer("scores", [tensor("X", x)], outputs=[requested("SCORES", binary, 3), requested("BEST")])
        labels = result.as_numpy("SCORES")
        assert labels.shape == (2, 3)
        assert [item.decode() if isinstance(item, bytes) else item for item in labels.reshape(-1)] == [
            "3.000000:2:cherry",
            "2.000000:3",
            "2.000000:4",
            "9.000000:0:apple",
            "8.000000:1:banana",
            "7.000000:2:cherry",
        ]
        assert result.as_numpy("BEST").tolist() == [[2], [0]]


def test_classification_of_non_numeric_outputs(client: triton.InferenceServerClient) -> None:
    text = np.array([[b"a"]], dtype=object)
    with pytest.raises(InferenceServerException, match="'Y' is BYTES, classification needs numbers") as caught:
        client.infer("identity_bytes", [tensor("X", text, "BYTES")], outputs=[requested("Y", classes=1)])
    assert caught.value.status() == "400"


def test_classification_of_bf16(client: triton.InferenceServerClient) -> None:
    x = np.array([[-2, 1, 0.5]], ml_dtypes.bfloat16)
    result = client.infer("identity_bf16", [tensor("X", x, "BF16")], outputs=[requested("Y", classes=2)])
    assert result.as_numpy("Y").tolist() == [[b"1.000000:1", b"0.500000:2"]]


def test_optional_inputs(client: triton.InferenceServerClient) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert client.infer("optional_bias", [tensor("X", x)]).as_numpy("Y").tolist() == (x + 100).tolist()
    bias = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    result = client.infer("optional_bias", [tensor("X", x), tensor("BIAS", bias)])
    assert result.as_numpy("Y").tolist() == (x + bias).tolist()


def test_models_without_a_batch_dimension_and_with_another_shape(client: triton.InferenceServerClient) -> None:
    x = np.arange(6, dtype=np.float32)
    assert client.infer("unbatched", [tensor("X", x.reshape(2, 3))]).as_numpy("Y").tolist() == [
        [0, -1, -2],
        [-3, -4, -5],
    ]
    both = np.stack([x, x + 10])
    expected = [array.reshape(2, 3).T.reshape(6).tolist() for array in both]
    assert client.infer("reshaped", [tensor("X", both)]).as_numpy("Y").tolist() == expected


@pytest.mark.parametrize("sent", [None, "gzip", "deflate"])
@pytest.mark.parametrize("got", [None, "gzip", "deflate"])
@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_compression_both_ways(
    client: triton.InferenceServerClient, sent: str | None, got: str | None, binary: bool
) -> None:
    x = np.arange(600, dtype=np.float32).reshape(2, 300)
    result = client.infer(
        "row_sums",
        [tensor("X", x, binary=binary)],
        outputs=[requested("DOUBLE", binary)],
        request_compression_algorithm=sent,
        response_compression_algorithm=got,
    )
    assert result.as_numpy("DOUBLE").tolist() == (2 * x).tolist()


@pytest.mark.parametrize(("encoding", "unpack"), [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_answers_are_really_packed(server: Server, encoding: str, unpack: Any) -> None:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, 2_000], "data": [1.0] * 2_000}
    status, headers, content = server.request(
        "POST",
        "/v2/models/row_sums/infer",
        json.dumps({"inputs": [tensor], "outputs": [{"name": "DOUBLE"}]}).encode(),
        {"Accept-Encoding": encoding},
    )
    assert (status, headers["content-encoding"]) == (200, encoding)
    assert len(content) < 500
    assert json.loads(unpack(content))["outputs"][0]["data"] == [2.0] * 2_000


@pytest.mark.parametrize("count", [9, 16, 37])
def test_a_request_larger_than_a_batch_is_split_and_joined(
    client: triton.InferenceServerClient, reference: Reference, count: int
) -> None:
    x = rows(count, seed=count)
    answer = client.infer("affine", [tensor("X", x)]).as_numpy("Y")
    assert answer.shape == (count, 4)
    assert np.allclose(answer, reference.affine(x), atol=1e-5)


def test_oversize_reject_refuses_it(client: triton.InferenceServerClient) -> None:
    client.infer("rejecting", [tensor("X", rows(8))])
    with pytest.raises(InferenceServerException, match=r"9 rows, model 'rejecting' accepts at most 8") as caught:
        client.infer("rejecting", [tensor("X", rows(9))])
    assert caught.value.status() == "400"


def test_values_that_the_model_refuses_are_the_callers_fault(client: triton.InferenceServerClient) -> None:
    index = np.array([[99]], np.int64)
    with pytest.raises(InferenceServerException, match="the model refused the values") as caught:
        client.infer("table_lookup", [tensor("X", index, "INT64")])
    assert caught.value.status() == "400"
    assert client.infer("table_lookup", [tensor("X", np.array([[3]]), "INT64")]).as_numpy("Y").tolist() == [[30]]


def test_a_body_that_the_client_builds_for_others_to_send(server: Server, client: triton.InferenceServerClient) -> None:
    body, size = client.generate_request_body([tensor("X", np.array([[1, 2]], np.float32))], outputs=[requested("SUM")])
    for _ in range(3):
        headers = {"Inference-Header-Content-Length": str(size), "Content-Type": "application/octet-stream"}
        status, headers, content = server.request("POST", "/v2/models/row_sums/infer", body, headers)
        assert status == 200
        header_size = int(headers["inference-header-content-length"])
        result = client.parse_response_body(content, header_length=header_size)
        assert result.as_numpy("SUM").tolist() == [[3]]
