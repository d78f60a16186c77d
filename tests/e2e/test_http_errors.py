"""Invalid requests get the right 4xx and an {"error": text} with the actual and the allowed value; none gets a 500.

The unit tests of the codecs have every invalid tensor, parameter and compression, `tests/faults/test_attack_messages.py` and
`test_attack_names.py` hostile lengths and names; here are those that cross a socket.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

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
    "deep JSON": (b"[" * 100_000, ("nested 100000 deep, at most 64",)),
    "invalid UTF-8": (b'{"inputs":[],"id":"\xff"}', ("not valid JSON|not an inference request",)),
    "unknown input": (with_inputs(A, B, a(name="C")), ("'C'", "sum_difference", "'A', 'B'")),
    "wrong size": (with_inputs(a(shape=[4, 2]), B), ("'A'", r"\[4, 2\]", r"\[-1, 4\]")),
    "too few elements": (with_inputs(a(data=[1, 2, 3]), B), ("'A'", "3 elements", r"\[2, 4\]", "expected 8")),
    "out of range": (with_inputs(a(data=[2**31] * 8), B), ("'A'", "INT32", "2147483647", "2147483648")),
    "unknown output": (with_inputs(A, B, outputs=[{"name": "Q"}]), ("'Q'", "'SUM', 'DIFFERENCE'")),
}


@pytest.mark.parametrize(("body", "patterns"), INFER_CASES.values(), ids=INFER_CASES)
def test_bad_requests(server: Server, body: bytes, patterns: tuple[str, ...]) -> None:
    status, text, _ = post(server, body)
    assert (status, lacks(text, *patterns)) == (400, []), text


def test_a_header_length_that_is_wrong(server: Server) -> None:
    body = with_inputs(BINARY_A, B) + bytes(32)
    for value, words in (("0", "JSON"), ("1", "JSON"), (str(len(body)), "JSON"), ("0x10", "content-length.*0x10")):
        status, text, _ = post(server, body, headers={"Inference-Header-Content-Length": value})
        assert (status, lacks(text, words)) == (400, []), text


@pytest.mark.parametrize("name", ["nothing", "", "%ff", "%F0%9F%9A%80"])
@pytest.mark.parametrize("rest", ["/infer", "/versions/1/infer", "", "/ready", "/config", "/stats", "/versions/1"])
def test_models_that_are_not_there(server: Server, name: str, rest: str) -> None:
    method = "POST" if rest.endswith("infer") else "GET"
    body = with_inputs(X) if method == "POST" else None
    status, headers, content = server.request(method, f"/v2/models/{name}{rest}", body)
    text = error_text(headers, content)
    assert status == (404 if name in ("nothing", "") else 400), "what can be no name is a bad request"
    assert name != "nothing" or name in text or "no such path" in text


@pytest.mark.parametrize("version", ["2", "0", "01", "latest"])
@pytest.mark.parametrize("rest", ["/infer", "", "/ready", "/config", "/stats"])
def test_versions_that_are_not_there(server: Server, version: str, rest: str) -> None:
    method = "POST" if rest == "/infer" else "GET"
    body = with_inputs(X) if method == "POST" else None
    status, headers, content = server.request(method, f"/v2/models/row_sums/versions/{version}{rest}", body)
    assert status == 404
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
