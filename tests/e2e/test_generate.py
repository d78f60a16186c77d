"""The generate extension over real sockets, in one process and behind front ends: framing, errors, keys, metrics, disconnects."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.event_streams import events
from tests.support.python_models import WAITER, add_python_model
from tests.support.serving import HOST, Server, serving
from tests.support.waiting import until

WAITER_CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
BEGUN_WAITER = WAITER.replace("begun = time", "print('waiter: begun'); begun = time")
ECHO_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "TIMES" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
ECHO = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            prompt = pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy()
            times = pb_utils.get_input_tensor_by_name(request, "TIMES")
            count = 1 if times is None else int(times.as_numpy()[0, 0])
            text = prompt[0, 0].decode() * count + json.dumps(json.loads(request.parameters() or "{}"), sort_keys=True)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([[text.encode()]], object))]))
        return responses
"""
PATH = "/v2/models/echo/generate"
STREAM = "/v2/models/echo/generate_stream"


@pytest.fixture(scope="module", params=[(), ("--front-ends", "2")], ids=["one process", "front ends"])
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("generate")
    add_python_model(folder / "repository", "echo", ECHO, ECHO_CONFIG)
    add_python_model(folder / "repository", "waiter", BEGUN_WAITER, WAITER_CONFIG)
    with serving(folder / "repository", folder, *request.param) as server:
        yield server


def post(server: Server, path: str, document: object, **headers: str) -> tuple[int, Any, bytes]:
    """Status, headers and body of a request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.request("POST", path, json.dumps(document).encode(), named)


def raw(server: Server, text: bytes) -> bytes:
    """The bytes of the answer up to the end of the connection."""
    with socket.create_connection((HOST, server.port), timeout=30) as connection:
        connection.sendall(text)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def request_bytes(path: str, body: bytes, version: str = "1.1", *lines: str) -> bytes:
    head = [f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(body)}", *lines, "", ""]
    return "\r\n".join(head).encode() + body


def test_fields_reach_the_model_and_its_output_is_a_field(running: Server) -> None:
    document = {"PROMPT": "ab", "id": "9", "seed": 1, "parameters": {"TIMES": 2, "stop": "x"}}
    for version in ("", "/versions/1"):
        status, headers, body = post(running, f"/v2/models/echo{version}/generate", document)
        assert (status, headers["content-type"]) == (200, "application/json")
        expected = {"model_name": "echo", "model_version": "1", "id": "9", "TEXT": 'abab{"seed": 1, "stop": "x"}'}
        assert json.loads(body) == expected
        status, headers, body = post(running, f"/v2/models/echo{version}/generate_stream", document)
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert headers["transfer-encoding"] == "chunked"
        assert events(body) == [expected]


@pytest.mark.parametrize("path", [PATH, STREAM])
def test_errors_have_a_status(running: Server, path: str) -> None:
    for document, target, status in (
        ({}, path, 400),
        ({"PROMPT": 3}, path, 400),
        ({"PROMPT": "a"}, path.replace("echo", "missing"), 404),
        ({"PROMPT": "a"}, path.replace("echo", "echo/versions/7"), 404),
    ):
        answer = post(running, target, document)
        assert (answer[0], answer[1]["content-type"]) == (status, "application/json")
        assert json.loads(answer[2])["error"]
    status, headers, _ = running.request("GET", path)
    assert (status, headers["allow"]) == (405, "POST")


def test_a_compressed_request_and_response(running: Server) -> None:
    body = gzip.compress(json.dumps({"PROMPT": "a" * 5000}).encode())
    headers = {"content-encoding": "gzip", "accept-encoding": "gzip"}
    status, answer, content = running.request("POST", PATH, body, headers)
    assert (status, answer["content-encoding"]) == (200, "gzip")
    assert json.loads(gzip.decompress(content))["TEXT"] == "a" * 5000 + "{}"
    status, answer, content = running.request("POST", STREAM, body, headers)
    assert (status, "content-encoding" in answer, len(events(content))) == (200, False, 1)


def test_the_connection_serves_further_requests_after_a_stream(running: Server) -> None:
    body = b'{"PROMPT": "a"}'
    answer = raw(running, request_bytes(STREAM, body) + request_bytes(STREAM, body, "1.1", "Connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert answer.count(b"\r\n0\r\n\r\n") == 2


def test_http_1_0_ends_a_stream_by_the_close(running: Server) -> None:
    answer = raw(running, request_bytes(STREAM, b'{"PROMPT": "a"}', "1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events(body)[0]["TEXT"] == "a{}"
    assert raw(running, request_bytes(PATH, b'{"PROMPT": "a"}', "1.0")).count(b'"TEXT":"a{}"') == 1


@pytest.mark.parametrize("action", ["generate", "generate_stream"])
def test_a_client_that_leaves_cancels_the_work(running: Server, action: str) -> None:
    begun, cancelled = (running.text.count(f"waiter: {word}") for word in ("begun", "cancelled"))
    with socket.create_connection((HOST, running.port), timeout=30) as connection:
        connection.sendall(request_bytes(f"/v2/models/waiter/{action}", b'{"X": 1}'))
        until(lambda: running.text.count("waiter: begun") > begun)
    until(lambda: running.text.count("waiter: cancelled") > cancelled)
    last = running.text[running.text.rindex("waiter: cancelled after") :]
    assert float(last.split()[3]) < 19, "the model ended by itself"


def test_the_extension_is_listed_and_documented(running: Server) -> None:
    assert "generate" in json.loads(running.request("GET", "/v2")[2])["extensions"]
    page = json.loads(running.request("GET", "/openapi.json")[2])
    operation = page["paths"]["/v2/models/{model}/generate_stream"]["post"]
    assert "text/event-stream" in operation["responses"]["200"]["content"]
