"""The client against a real socket: golden bytes out and in, and what it says when things go wrong."""

from __future__ import annotations

import json
import socket
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton

from server.client.http_client import Client, decode_response, encode_request
from server.core.errors import BadRequest, DeadlineExceeded, HeadraceError, ModelFailed, NotFound, TooLarge, Unavailable

INFER = "POST /v2/models/m/infer"
Array = np.ndarray[Any, Any]

# {"a": FP32 [1, 2] = 1.0 -2.0} and {"s": BYTES [2] = "hi", ""} as the protocol writes them.
GOLDEN_TENSORS = b"\x00\x00\x80\x3f\x00\x00\x00\xc0" + b"\x02\x00\x00\x00hi" + b"\x00\x00\x00\x00"
GOLDEN = [
    {"name": "a", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
    {"name": "s", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": 10}},
]


def golden_arrays() -> dict[str, Array]:
    return {"a": np.array([[1.0, -2.0]], dtype=np.float32), "s": np.array(["hi", b""], dtype=object)}


def answer(outputs: list[dict[str, Any]], tensors: bytes = b"") -> tuple[bytes, int]:
    header = json.dumps({"model_name": "m", "model_version": "1", "outputs": outputs}).encode()
    return header + tensors, len(header)


def test_infer_sends_and_reads_golden_bytes(server: Any) -> None:
    body, size = answer(GOLDEN, GOLDEN_TENSORS)
    server.say(INFER, body, headers={"Inference-Header-Content-Length": str(size)})
    outputs = Client(server.url).infer("m", golden_arrays())
    assert list(outputs) == ["a", "s"]
    assert outputs["a"].dtype == np.float32
    assert outputs["a"].tolist() == [[1.0, -2.0]]
    assert outputs["s"].tolist() == [b"hi", b""]
    (got,) = server.received
    size = int(got.headers["inference-header-content-length"])
    assert json.loads(got.body[:size]) == {"inputs": GOLDEN, "parameters": {"binary_data_output": True}}
    assert got.body[size:] == GOLDEN_TENSORS


def test_outputs_and_version_are_asked_for(server: Any) -> None:
    body, size = answer([{"name": "o", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 9}}])
    body += b"\x05\x00\x00\x000.5:7"
    server.say(
        "POST /v2/models/a%2Fb%20c/versions/3/infer", body, headers={"inference-header-content-length": str(size)}
    )
    wanted = {"o": {"classification": 2}}
    outputs = Client(server.url + "/").infer("a/b c", {"x": np.zeros(1, np.int8)}, "3", outputs=wanted)
    assert outputs["o"].tolist() == [b"0.5:7"]
    got = server.received[0]
    header = json.loads(got.body[: int(got.headers["inference-header-content-length"])])
    assert header["outputs"] == [{"name": "o", "parameters": {"binary_data": True, "classification": 2}}]


def test_an_answer_in_json_is_read_too(server: Any) -> None:
    outputs = [
        {"name": "f", "shape": [2, 2], "datatype": "FP16", "data": [[1, 2.5], [3, 4]]},
        {"name": "s", "shape": [1], "datatype": "BYTES", "data": ["ü"]},
        {"name": "b", "shape": [2], "datatype": "BOOL", "data": [True, False]},
    ]
    server.say(INFER, answer(outputs)[0])
    found = Client(server.url).infer("m", golden_arrays())
    assert found["f"].dtype == np.float16
    assert found["f"].tolist() == [[1, 2.5], [3, 4]]
    assert found["s"].tolist() == ["ü".encode()]
    assert found["b"].tolist() == [True, False]


def test_the_control_plane_routes(server: Any) -> None:
    server.say("GET /v2/models/m", b'{"name":"m"}')
    server.say("GET /v2/models/m/versions/2/config", b'{"max_batch_size":4}')
    server.say("GET /v2/models/m/stats", b'{"model_stats":[]}')
    server.say("GET /v2/health/ready", b"")
    client = Client(server.url.removeprefix("http://"))
    assert client.metadata("m") == {"name": "m"}
    assert client.config("m", "2") == {"max_batch_size": 4}
    assert client.statistics("m") == {"model_stats": []}
    assert client.ready()
    server.say("GET /v2/health/ready", b'{"error":"starting"}', 503)
    assert not client.ready()


def test_a_path_in_the_url_is_a_prefix(server: Any) -> None:
    server.say("GET /team/a/v2/models/m", b"{}")
    assert Client(server.url + "/team/a/").metadata("m") == {}


# --- what goes wrong ---------------------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused, and nobody else gets the port
        client = Client(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Unavailable, match=r"no server answers at .* start one with `headrace serve`"):
            client.metadata("m")
        assert not client.ready()


def test_no_answer_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        with pytest.raises(Unavailable, match=r"no answer .* within 0.05 s"):
            client.metadata("m")


def test_a_connection_that_breaks_off(server: Any) -> None:
    server.say("GET /v2/models/m", b"{}", headers={"Content-Length": "100"})
    with pytest.raises(Unavailable, match=r"talking to .* failed"):
        Client(server.url, timeout_s=5).metadata("m")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", ""])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BadRequest, match="write it like http://127"):
        Client(url)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, BadRequest),
        (401, BadRequest),
        (404, NotFound),
        (413, TooLarge),
        (429, Unavailable),
        (500, ModelFailed),
        (502, ModelFailed),
        (503, Unavailable),
        (504, DeadlineExceeded),
    ],
)
def test_a_status_becomes_the_error_it_means(server: Any, status: int, kind: type[HeadraceError]) -> None:
    server.say(INFER, b'{"error":"input \'a\' is wrong"}', status, {"Retry-After": "7"})
    with pytest.raises(kind) as caught:
        Client(server.url).infer("m", golden_arrays())
    assert type(caught.value) is kind
    assert str(caught.value) == f"the server says {status}: input 'a' is wrong"
    if isinstance(caught.value, Unavailable):
        assert caught.value.retry_after_s == 7


@pytest.mark.parametrize("body", [b"", b"<html>Not here</html>", b'{"detail":1}', b"[1]", b"\xff\xfe"])
def test_an_error_of_another_server_is_told_as_such(server: Any, body: bytes) -> None:
    server.say("GET /v2/models/m", body, 404)
    with pytest.raises(NotFound, match="is the URL that of a V2 inference server"):
        Client(server.url).metadata("m")


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"1"])
def test_a_page_that_is_no_json_object(server: Any, body: bytes) -> None:
    server.say("GET /v2/models/m", body)
    with pytest.raises(ModelFailed, match="is the URL that of a V2"):
        Client(server.url).metadata("m")


@pytest.mark.parametrize("length", ["99999", "-1", "x", "²"])
def test_a_wrong_header_length(server: Any, length: str) -> None:
    server.say(INFER, b"{}", headers={"Inference-Header-Content-Length": length})
    with pytest.raises(ModelFailed, match="Inference-Header-Content-Length"):
        Client(server.url).infer("m", golden_arrays())


def fp32(size: Any, shape: Any = (2,)) -> dict[str, Any]:
    return {"name": "a", "shape": shape, "datatype": "FP32", "parameters": {"binary_data_size": size}}


@pytest.mark.parametrize(
    ("outputs", "tensors", "message"),
    [
        ([fp32(8)], b"1234", "claims 8 bytes, 4 are left"),
        ([fp32(-1)], b"", "claims -1 bytes"),
        ([fp32(4)], b"1234", r"has 4 bytes, FP32 of shape \[2\] needs 8"),
        ([fp32(8)], b"123456789", "1 bytes are left over"),
        ([fp32("x")], b"", "no inference response"),
        ([fp32(8, (-1, -2))], b"12345678", "no inference response"),
        ([{"name": "a"}], b"", "no inference response: KeyError 'shape'"),
        ([{**fp32(8), "datatype": "FP31"}], b"12345678", "datatype 'FP31', expected one of"),
        ([{**fp32(8), "datatype": "BYTES"}], b"\xff\xff\xff\xff1234", "element 0 ends at byte"),
        ([{**fp32(4), "datatype": "BYTES"}], b"\0\0\0\0", "has 1 elements of BYTES, its shape needs 2"),
        ([{**fp32(3), "datatype": "BYTES"}], b"\0\0\0", "element 0 ends at byte 4"),
        ([{"name": "a", "shape": [2], "datatype": "INT8", "data": [1, 300]}], b"", "a value outside INT8"),
        ([{"name": "a", "shape": [2], "datatype": "INT8", "data": [1, True]}], b"", "holds True, which is no INT8"),
        ([{"name": "a", "shape": [2], "datatype": "INT8", "data": [1]}], b"", "has 1 elements"),
    ],
)
def test_answers_that_break_the_protocol(outputs: list[dict[str, Any]], tensors: bytes, message: str) -> None:
    with pytest.raises(ModelFailed, match=message):
        decode_response(*answer(outputs, tensors))


# --- the same request as Triton's own client ---------------------------------------------------------------------------


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ARRAYS: dict[str, Array] = {
    "BOOL": np.array([True, False, True]),
    **{kind.upper(): np.array([np.iinfo(kind).min, 1, np.iinfo(kind).max], dtype=kind) for kind in INTEGERS},
    "FP16": np.array([0.5, -np.inf, 65504], dtype=np.float16),
    "FP32": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    "FP64": np.array([np.nan, 1e300]),
    "BYTES": np.array([[b"a\0b", "ü".encode()], [b"", b"x" * 300]], dtype=object),
    "BF16": np.array([1.0, -3.5, 0.0], dtype=ml_dtypes.bfloat16),  # what Triton's client takes; ours takes the bits
    "FP32_empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_our_bytes_mean_what_tritons_client_means(case: str) -> None:
    array, datatype = ARRAYS[case], case.split("_")[0]
    theirs = triton.InferInput("x", list(array.shape), datatype)
    theirs.set_data_from_numpy(array, binary_data=True)
    body, size = triton.InferenceServerClient.generate_request_body([theirs])
    ours = array.view(np.uint16) if datatype == "BF16" else array
    header, tensors = encode_request({"x": ours}, datatypes={"x": datatype} if datatype == "BF16" else None)
    assert json.loads(header) == json.loads(body[:size])
    assert tensors == body[size:]

    asked = [triton.InferRequestedOutput("y", binary_data=True, class_count=3)]
    body, size = triton.InferenceServerClient.generate_request_body([theirs], outputs=asked)
    header, _ = encode_request({"x": ours}, outputs={"y": {"classification": 3}})
    assert json.loads(header)["outputs"] == json.loads(body[:size])["outputs"]

    # And back: an answer with these bytes gives the same array.
    output = {**json.loads(header)["inputs"][0], "name": "y", "datatype": datatype}
    found = decode_response(*answer([output], tensors))["y"]
    assert found.shape == array.shape
    assert found.dtype == ours.dtype
    assert np.array_equal(found, ours, equal_nan=datatype.startswith("FP"))


def test_arrays_are_sent_by_what_they_are() -> None:
    header, tensors = encode_request({"big": np.array([1, 2], dtype=">i4"), "s": np.array(["ü", "ab"])})
    assert [tensor["datatype"] for tensor in json.loads(header)["inputs"]] == ["INT32", "BYTES"]
    assert tensors == b"\1\0\0\0\2\0\0\0" + b"\2\0\0\0\xc3\xbc\2\0\0\0ab"


@pytest.mark.parametrize(
    ("array", "datatypes", "message"),
    [
        (np.zeros(1, np.complex64), None, "'x' is complex64, which the protocol has no datatype for"),
        (np.array([1], dtype=object), None, "'x' holds a int, BYTES needs text or bytes"),
        (np.zeros(1, np.float32), {"x": "BF16"}, "'x' is float32, BF16 needs uint16"),
        (np.zeros(1, np.float32), {"x": "FP33"}, "datatype 'FP33', expected one of BOOL"),
    ],
)
def test_arrays_that_cannot_be_sent(array: Array, datatypes: dict[str, str] | None, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        encode_request({"x": array}, datatypes=datatypes)
