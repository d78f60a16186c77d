"""Invalid requests get the right 4xx and an {"error": text} with the actual and the allowed value; none gets a 500.

The unit tests of the codec have every invalid tensor and parameter; here are those that cross a socket.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from typing import Any

import pytest

from tests.e2e.conftest import MAX_BODY_BYTES
from tests.support.serving import Server

A = {"name": "A", "datatype": "INT32", "shape": [2, 4], "data": [1, 2, 3, 4, 5, 6, 7, 8]}
B = {"name": "B", "datatype": "FP32", "shape": [2, 4], "data": [[0, 1, 2, 3], [4, 5, 6, 7]]}
BINARY_A = {"name": "A", "datatype": "INT32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}
X = {"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}


def a(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**A, **changes}.items() if value is not None}


def with_inputs(*inputs: object, **rest: Any) -> bytes:
    return json.dumps({"inputs": inputs, **rest}).encode()


def post(
    server: Server, body: bytes, model: str = "sum_difference", headers: dict[str, str] | None = None
) -> tuple[int, str, dict[str, str]]:
    """Status, the error's text, headers."""
    status, answered, content = server.request("POST", f"/v2/models/{model}/infer", body, headers)
    return status, error_text(answered, content), dict(answered)


def error_text(headers: Any, content: bytes) -> str:
    assert headers["content-type"] == "application/json"
    message = json.loads(content)
    assert list(message) == ["error"]
    assert isinstance(message["error"], str)
    assert 0 < len(message["error"]) < 600
    return str(message["error"])


def lacks(text: str, *patterns: str) -> list[str]:
    return [pattern for pattern in patterns if not re.search(pattern, text)]


INFER_CASES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "no JSON": (b"inputs=1", ("not valid JSON",)),
    "NaN": (
        b'{"inputs":[{"name":"A","datatype":"INT32","shape":[1,4],"data":[NaN,1,2,3]}]}',
        ("'A'", "INT32", "integers"),
    ),
    "deep JSON": (b"[" * 100_000, ("nested 100000 deep, at most 64",)),
    "deep data": (
        b'{"inputs":[{"name":"A","datatype":"INT32","shape":[1,4],"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        ("nested 10000. deep",),
    ),
    "invalid UTF-8": (b'{"inputs":[],"id":"\xff"}', ("not valid JSON|not an inference request",)),
    "unknown input": (with_inputs(A, B, a(name="C")), ("'C'", "sum_difference", "'A', 'B'")),
    "unknown datatype": (with_inputs(a(datatype="TYPE_INT32"), B), ("'A'", "'TYPE_INT32'", "INT32")),
    "wrong rank": (with_inputs(a(shape=[8]), B), ("'A'", r"\[8\]", r"\[-1, 4\]")),
    "wrong size": (with_inputs(a(shape=[4, 2]), B), ("'A'", r"\[4, 2\]", r"\[-1, 4\]")),
    "shape of texts": (with_inputs(a(shape=["2", 4]), B), ("`int`", r"inputs\[")),
    "negative dimension": (with_inputs(a(shape=[-2, 4]), B), ("'A'", r"\[-2, 4\]", "batch", "at least 1")),
    "zero dimension": (with_inputs(a(shape=[0, 4], data=[]), B), ("'A'", r"\[0, 4\]", "at least 1")),
    "overflowing shape": (with_inputs(a(shape=[2**62, 4]), B), ("'A'", "4611686018427387904", "memory")),
    "overflowing dimension": (with_inputs(a(shape=[10**30, 4]), B), ("'A'", "1" + "0" * 30, "memory")),
    "a dimension of 5000 digits": (
        b'{"inputs":[{"name":"A","datatype":"INT32","shape":[' + b"9" * 5000 + b',4],"data":[1]}]}',
        ("shape",),
    ),
    "too many dimensions": (with_inputs(a(shape=[1] * 100_000), B), ("'A'", r"\[-1, 4\]")),
    "too few elements": (with_inputs(a(data=[1, 2, 3]), B), ("'A'", "3 elements", r"\[2, 4\]", "expected 8")),
    "too many elements": (with_inputs(a(data=list(range(9))), B), ("'A'", "9 elements", "expected 8")),
    "data that is no array": (with_inputs(a(data="12345678"), B), ("'A'", "array", "a string")),
    "fractions for integers": (with_inputs(a(data=[1.5] * 8), B), ("'A'", "INT32", "integers")),
    "texts for integers": (with_inputs(a(data=["1"] * 8), B), ("'A'", "INT32", "integers", "a string")),
    "null": (with_inputs(a(data=[[1, 2, 3, None]] * 2), B), ("'A'", "INT32", "null")),
    "out of range": (with_inputs(a(data=[2**31] * 8), B), ("'A'", "INT32", "2147483647", "2147483648")),
    "unknown output": (with_inputs(A, B, outputs=[{"name": "Q"}]), ("'Q'", "'SUM', 'DIFFERENCE'")),
    "1,000 outputs": (with_inputs(A, B, outputs=[{"name": f"Q{i}"} for i in range(1_000)]), ("'Q0'",)),
    "shared memory in": (
        with_inputs(B, {**BINARY_A, "parameters": {"shared_memory_region": "r"}}),
        ("shared_memory_byte_size",),
    ),
    "shared memory out": (
        with_inputs(A, B, outputs=[{"name": "SUM", "parameters": {"shared_memory_region": "r"}}]),
        ("shared_memory_byte_size",),
    ),
}


@pytest.mark.parametrize(("body", "patterns"), INFER_CASES.values(), ids=INFER_CASES)
def test_bad_requests(server: Server, body: bytes, patterns: tuple[str, ...]) -> None:
    status, text, _ = post(server, body)
    assert (status, lacks(text, *patterns)) == (400, []), text


def binary(*tensors: bytes) -> tuple[bytes, str]:
    header = with_inputs(BINARY_A, B)
    return b"".join((header, *tensors)), str(len(header))


@pytest.mark.parametrize("value", ["-1", "+9", "text", "1.0", "0x10", "9" * 10, "9" * 19, "9" * 400])
def test_header_lengths_that_are_none(server: Server, value: str) -> None:
    status, text, _ = post(server, binary(bytes(32))[0], headers={"Inference-Header-Content-Length": value})
    assert status == 400
    assert "inference-header-content-length" in text.lower()
    assert value[:32] in text


def test_a_header_length_that_is_wrong(server: Server) -> None:
    body, _ = binary(bytes(32))
    for value in ("0", "1", str(len(body))):
        status, text, _ = post(server, body, headers={"Inference-Header-Content-Length": value})
        assert status == 400
        assert "JSON" in text


@pytest.mark.parametrize(
    ("size", "patterns"),
    [(31, ("'A'", "32", "only 31")), (0, ("'A'", "32", "only 0")), (33, ("1 bytes are left over", "32", "33"))],
)
def test_binary_data_of_another_length(server: Server, size: int, patterns: tuple[str, ...]) -> None:
    body, length = binary(bytes(size))
    status, text, _ = post(server, body, headers={"Inference-Header-Content-Length": length})
    assert (status, lacks(text, *patterns)) == (400, []), text


def test_a_declared_size_that_the_shape_does_not_have(server: Server) -> None:
    header = with_inputs({**BINARY_A, "parameters": {"binary_data_size": 28}}, B)
    headers = {"Inference-Header-Content-Length": str(len(header))}
    status, text, _ = post(server, header + bytes(28), headers=headers)
    assert (status, lacks(text, "'A'", "28 bytes", r"\[2, 4\]", "INT32", "expected 32")) == (400, []), text


@pytest.mark.parametrize(
    ("raw", "patterns"),
    [
        (b"\x09\0\0\0abcd", ("'X'", "element 0 says 9 bytes", "only 4")),
        (b"\xff\xff\xff\xffabcd", ("'X'", "4294967295")),
        (b"\0\0\0\0", ("'X'", "4 bytes", "2 BYTES elements")),
        (b"\0\0\0\0\0\0\0\0abc", ("'X'", "3 bytes are left over")),
    ],
)
def test_bytes_with_wrong_length_prefixes(server: Server, raw: bytes, patterns: tuple[str, ...]) -> None:
    tensor = {"name": "X", "datatype": "BYTES", "shape": [1, 2], "parameters": {"binary_data_size": len(raw)}}
    header = with_inputs(tensor)
    headers = {"Inference-Header-Content-Length": str(len(header))}
    status, text, _ = post(server, header + raw, "identity_bytes", headers)
    assert (status, lacks(text, *patterns)) == (400, []), text


BOMB = gzip.compress(os.urandom(1 << 16) + bytes(MAX_BODY_BYTES))
GOOD = gzip.compress(with_inputs(A, B))
ENCODED: dict[str, tuple[bytes, str, int, str]] = {
    "unknown": (GOOD, "br", 400, "'br'.*gzip, deflate"),
    "several": (GOOD, "gzip, gzip", 400, "'gzip, gzip'"),
    "not gzip": (with_inputs(A, B), "gzip", 400, "not valid gzip"),
    "not deflate": (with_inputs(A, B), "deflate", 400, "not valid deflate"),
    "corrupt": (GOOD[:20] + b"\0\0\0\0" + GOOD[24:], "gzip", 400, "gzip"),
    "cut gzip": (GOOD[:-9], "gzip", 400, "are truncated"),
    "cut deflate": (zlib.compress(with_inputs(A, B))[:-5], "deflate", 400, "are truncated"),
    "something behind": (GOOD + b"x", "gzip", 400, "1 bytes follow"),
    "a bomb": (BOMB, "gzip", 413, str(MAX_BODY_BYTES)),
    "a bomb of zeros": (gzip.compress(bytes(MAX_BODY_BYTES)), "gzip", 413, "more than 200 times its size"),
}


@pytest.mark.parametrize(("body", "encoding", "status", "pattern"), ENCODED.values(), ids=ENCODED)
def test_bad_content_encodings(server: Server, body: bytes, encoding: str, status: int, pattern: str) -> None:
    actual, text, _ = post(server, body, headers={"Content-Encoding": encoding})
    assert (actual, lacks(text, pattern)) == (status, []), text


NAMES_OF_NOTHING = {
    "nothing": "nothing",
    "..": "..",
    "%2e%2e": "..",
    "a%2Fb": "a/b",
    "..%2F..%2Fetc%2Fpasswd": "etc",
    "a%00b": "a\\x00b",
    "a%0Ab": "a\\nb",
    "%ff": "",
    "": "",
    "%F0%9F%9A%80": "\U0001f680",
    "x" * 5_000: "xxx",
}


@pytest.mark.parametrize("name", NAMES_OF_NOTHING, ids=lambda name: name[:20])
@pytest.mark.parametrize("rest", ["/infer", "/versions/1/infer", "", "/ready", "/config", "/stats", "/versions/1"])
def test_models_that_are_not_there(server: Server, name: str, rest: str) -> None:
    method = "POST" if rest.endswith("infer") else "GET"
    body = with_inputs(X) if method == "POST" else None
    status, headers, content = server.request(method, f"/v2/models/{name}{rest}", body)
    text = error_text(headers, content)
    assert status == (404 if name in ("nothing", "") else 400), "what can be no name is a bad request"
    assert "\n" not in text
    assert "\0" not in text
    assert NAMES_OF_NOTHING[name] in text or "no such path" in text


@pytest.mark.parametrize("version", ["2", "0", "01", "-1", "latest", "%00", "1%2F2", "9" * 400])
@pytest.mark.parametrize("rest", ["/infer", "", "/ready", "/config", "/stats"])
def test_versions_that_are_not_there(server: Server, version: str, rest: str) -> None:
    method = "POST" if rest == "/infer" else "GET"
    body = with_inputs(X) if method == "POST" else None
    status, headers, content = server.request(method, f"/v2/models/row_sums/versions/{version}{rest}", body)
    possible = version in ("2", "0", "01", "latest")
    assert status == (404 if possible else 400), "what can be no version is a bad request"
    assert lacks(error_text(headers, content), "row_sums|no such path") == []


def test_an_empty_version_in_the_path_is_no_version(server: Server) -> None:
    status, _, _ = server.request("POST", "/v2/models/row_sums/versions//infer", with_inputs(X))
    assert status == 404


@pytest.mark.parametrize(
    "path", ["/index.html", "/v1", "/v2/model", "/v2/models/row_sums/nothing", "/v2/models/row_sums/infer/"]
)
def test_paths_that_are_not_there(server: Server, path: str) -> None:
    for method in ("GET", "POST"):
        status, headers, content = server.request(method, path, b"{}" if method == "POST" else None)
        assert status == 404
        error_text(headers, content)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_methods_that_inference_does_not_take(server: Server, method: str) -> None:
    for path in ("/v2/models/row_sums/infer", "/v2/models/row_sums/versions/1/infer"):
        status, headers, content = server.request(method, path)
        assert (status, headers.get("allow")) == (405, "POST")
        error_text(headers, content)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize(
    "path", ["/v2", "/v2/health/live", "/v2/models/row_sums", "/v2/models/row_sums/config", "/metrics"]
)
def test_methods_that_the_control_plane_does_not_take(server: Server, method: str, path: str) -> None:
    status, headers, content = server.request(method, path)
    assert (status, headers.get("allow")) == (405, "GET, HEAD")
    error_text(headers, content)


def test_a_request_that_no_queue_could_ever_hold_is_not_put_off(server: Server) -> None:
    # 4 rows a batch, 4096 places in the queue: coming back later cannot help.
    rows = 4 * 4096 + 1
    header = with_inputs(
        {"name": "X", "datatype": "FP32", "shape": [rows, 1], "parameters": {"binary_data_size": 4 * rows}}
    )
    headers = {"Inference-Header-Content-Length": str(len(header))}
    status, text, answered = post(server, header + bytes(4 * rows), "row_sums", headers)
    assert 400 <= status < 500, text
    assert "retry-after" not in answered


def test_the_server_still_serves_and_logged_no_failure(server: Server) -> None:
    """Last in this file: what came before left neither a wound nor a stack trace."""
    status, _, content = server.request("POST", "/v2/models/row_sums/infer", with_inputs(X))
    assert status == 200
    assert json.loads(content)["outputs"][1]["data"] == [3.0]
    assert "Traceback" not in server.text
    assert "reference" not in server.text
