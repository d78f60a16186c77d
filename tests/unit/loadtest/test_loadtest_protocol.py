"""The bench's own side of the protocol."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loadtest.protocol import HEADER_LENGTH, binary_request, decode_answer, json_request


def test_binary_request_puts_raw_tensors_behind_the_header() -> None:
    first = np.arange(4, dtype=np.int32).reshape(1, 4)
    second = np.ones((1, 2), dtype=np.float32)
    request = binary_request("add_sub", {"a": first, "b": second})
    length = int(request.headers[HEADER_LENGTH])
    header = json.loads(request.body[:length])
    assert request.path == "/v2/models/add_sub/infer"
    assert header["inputs"] == [
        {"name": "a", "shape": [1, 4], "datatype": "INT32", "parameters": {"binary_data_size": 16}},
        {"name": "b", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
    ]
    assert header["parameters"] == {"binary_data_output": True}
    assert request.body[length:] == first.tobytes() + second.tobytes()


def test_json_request_has_flat_data() -> None:
    request = json_request("tiny", {"input": np.array([[1.5, 2.0]], dtype=np.float32)})
    assert json.loads(request.body) == {
        "inputs": [{"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [1.5, 2.0]}]
    }


def test_answers_are_decoded_in_both_forms() -> None:
    values = np.array([[1.0, 2.0]], dtype=np.float32)
    plain = {"outputs": [{"name": "y", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}
    np.testing.assert_array_equal(decode_answer({}, json.dumps(plain).encode())["y"], values)
    raw = {"outputs": [{"name": "y", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}}]}
    header = json.dumps(raw).encode()
    answer = decode_answer({HEADER_LENGTH.lower(): str(len(header))}, header + values.tobytes())
    np.testing.assert_array_equal(answer["y"], values)


def test_a_response_with_extra_bytes_is_refused() -> None:
    header = json.dumps(
        {"outputs": [{"name": "y", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]}
    ).encode()
    with pytest.raises(ValueError, match="describes"):
        decode_answer({HEADER_LENGTH: str(len(header))}, header + bytes(8))
