"""The gRPC client of `headrace infer`: tensors in and out, and its errors."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
from headrace.core.errors import BadRequest, HeadraceError, ModelFailed, Unavailable
from headrace.server.commands.infer_client import InferClient, parse_address
from tritonclient.grpc import service_pb2_grpc

from tests.support.certificates import Certificates
from tests.unit.server.commands.conftest import Abort, ScriptedGrpcServer, respond

Array = np.ndarray[Any, Any]

# {"a": FP32 [1, 2] = 1.0 -2.0} and {"s": BYTES [2] = "hi", ""} as the protocol writes them.
GOLDEN_TENSORS = [b"\x00\x00\x80\x3f\x00\x00\x00\xc0", b"\x02\x00\x00\x00hi\x00\x00\x00\x00"]


def golden_arrays() -> dict[str, Array]:
    return {"a": np.array([[1.0, -2.0]], dtype=np.float32), "s": np.array(["hi", b""], dtype=object)}


def test_infer_sends_and_reads_golden_bytes(grpc_server: Any) -> None:
    first, second = GOLDEN_TENSORS
    grpc_server.infer["m"] = lambda _: respond(("a", "FP32", [1, 2], first), ("s", "BYTES", [2], second))
    with InferClient(grpc_server.address) as client:
        outputs = client.infer("m", golden_arrays())
    assert list(outputs) == ["a", "s"]
    assert outputs["a"].dtype == np.float32
    assert outputs["a"].tolist() == [[1.0, -2.0]]
    assert outputs["s"].tolist() == [b"hi", b""]
    (request,) = grpc_server.requests
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("a", "FP32", [1, 2]),
        ("s", "BYTES", [2]),
    ]
    assert list(request.raw_input_contents) == GOLDEN_TENSORS
    assert not request.outputs


def test_outputs_and_version_are_requested(grpc_server: Any) -> None:
    grpc_server.infer["a/b c"] = lambda _: respond(("o", "BYTES", [1], b"\x05\x00\x00\x000.5:7"))
    with InferClient("grpc://" + grpc_server.address + "/") as client:
        outputs = client.infer("a/b c", {"x": np.zeros(1, np.int8)}, "3", {"o": 2, "p": 0})
    assert outputs["o"].tolist() == [b"0.5:7"]
    (request,) = grpc_server.requests
    assert request.model_version == "3"
    assert [(output.name, output.parameters["classification"].int64_param) for output in request.outputs] == [
        ("o", 2),
        ("p", 0),
    ]


def test_the_descriptions_of_a_model(grpc_server: Any) -> None:
    grpc_server.metadata["m"] = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]}
    grpc_server.configs["m"] = {"name": "m", "max_batch_size": 4}
    with InferClient(grpc_server.address) as client:
        assert client.metadata("m")["inputs"][0]["datatype"] == "FP32"
        assert client.config("m", "2") == {"name": "m", "max_batch_size": 4}
        assert client.successes("m") is None
        grpc_server.successes = lambda: (0, 0)
        assert client.successes("m") == (0, 0)


def test_tls_trusts_the_systems_authorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates = Certificates(tmp_path)
    pair = certificates.server
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    with ThreadPoolExecutor(1) as pool:
        served = grpc.server(pool)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(ScriptedGrpcServer(), served)
        address = f"grpcs://127.0.0.1:{served.add_secure_port('127.0.0.1:0', credentials)}"
        served.start()
        try:
            with pytest.raises(Unavailable, match=r"the connection to grpcs.* failed"), InferClient(address, 5):
                pass
            monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
            with InferClient(address, 5) as client:
                assert client.successes("m") is None
        finally:
            served.stop(None).wait()


# --- errors ------------------------------------------------------------------------------------------------------------


def test_no_server_listens() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused, and no other process gets the port
        with (
            pytest.raises(Unavailable, match=r"no server answers at 127.* start one with `headrace serve`"),
            InferClient(f"127.0.0.1:{used.getsockname()[1]}"),
        ):
            pass


def test_no_answer_in_time() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(Unavailable, match=r"no response .* within 0.05 s"),
        InferClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05),
    ):
        pass


def test_a_server_of_http_is_no_server_of_grpc(server: Any) -> None:
    with (
        pytest.raises(HeadraceError, match=r"the connection to .* failed: the server speaks no gRPC on this port"),
        InferClient(server.url.removeprefix("http://"), timeout_s=5),
    ):
        pass


@pytest.mark.parametrize("address", ["ftp://x", "grpc://", "grpc://x:port", "", "http://", "x:8001/team/a"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(BadRequest, match=r"write HOST:PORT of its gRPC, e.g. 127.0.0.1:8001"):
        InferClient(address)


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("host", ("host:8001", False)),
        ("host:9", ("host:9", False)),
        ("[::1]:9", ("[::1]:9", False)),
        ("grpc://host:9", ("host:9", False)),
        ("grpcs://host", ("host:8001", True)),
    ],
)
def test_an_address_becomes_a_target(address: str, target: tuple[str, bool]) -> None:
    assert parse_address(address) == target


@pytest.mark.parametrize(
    ("url", "instead"), [("http://h:8000", "--url h:8001"), ("https://[::1]:1/p", r"--url grpcs://\[::1\]:8001")]
)
def test_a_url_of_http_is_answered_with_the_address_of_grpc(url: str, instead: str) -> None:
    with pytest.raises(BadRequest, match=f"is one of HTTP, `headrace infer` speaks gRPC: .* {instead}$"):
        parse_address(url)


@pytest.mark.parametrize("status", ["INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_a_status_is_shown_with_the_servers_text(grpc_server: Any, status: str) -> None:
    def fail(_: Any) -> None:
        raise Abort(grpc.StatusCode[status], "input 'a' is wrong")

    grpc_server.infer["m"] = fail
    with InferClient(grpc_server.address) as client, pytest.raises(HeadraceError) as caught:
        client.infer("m", golden_arrays())
    assert str(caught.value) == f"the server returned {status}: input 'a' is wrong"


def test_a_deadline_of_the_server_is_the_servers_error(grpc_server: Any) -> None:
    def fail(_: Any) -> None:
        raise Abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the request's deadline passed in the queue")

    grpc_server.infer["m"] = fail
    with InferClient(grpc_server.address) as client, pytest.raises(HeadraceError, match="passed in the queue"):
        client.infer("m", golden_arrays())


@pytest.mark.parametrize(
    "output",
    [
        ("a", "FP32", [2], b"1234"),
        ("a", "FP32", [2], b"123456789"),
        ("a", "FP32", [-1, -2], b"12345678"),
        ("a", "BYTES", [1], b"\xff\xff\xff\x0f1234"),
        ("a", "BYTES", [2], b"\0\0\0\0"),
        ("a", "BYTES", [1], b"\0\0\0"),
    ],
)
def test_answers_that_break_the_protocol(grpc_server: Any, output: Any) -> None:
    grpc_server.infer["m"] = lambda _: respond(output)
    with InferClient(grpc_server.address) as client, pytest.raises(ModelFailed, match="the server's response is wrong"):
        client.infer("m", golden_arrays())


# --- arrays ------------------------------------------------------------------------------------------------------------


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
ARRAYS: dict[str, Array] = {
    "BOOL": np.array([True, False, True]),
    **{kind.upper(): np.array([np.iinfo(kind).min, 1, np.iinfo(kind).max], dtype=kind) for kind in INTEGERS},
    "FP16": np.array([0.5, -np.inf, 65504], dtype=np.float16),
    "FP32": np.arange(6, dtype=np.float32).reshape(2, 3).T,  # not contiguous
    "FP64": np.array([np.nan, 1e300]),
    "BYTES": np.array([[b"a\0b", "ü".encode()], [b"", b"x" * 300]], dtype=object),
    "BF16": np.array([1.0, -3.5, 0.0], dtype=ml_dtypes.bfloat16),
    "FP32_empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_round_trip(grpc_server: Any, case: str) -> None:
    array, datatype = ARRAYS[case], case.split("_")[0]

    def echo(request: Any) -> Any:
        (tensor,), (data,) = request.inputs, request.raw_input_contents
        assert tensor.datatype == datatype
        return respond(("y", tensor.datatype, list(tensor.shape), data))

    grpc_server.infer["m"] = echo
    with InferClient(grpc_server.address) as client:
        result = client.infer("m", {"x": array})["y"]
    assert (result.shape, result.dtype) == (array.shape, array.dtype)
    assert np.array_equal(result, array, equal_nan=datatype.startswith("FP"))


def test_arrays_are_sent_by_dtype(grpc_server: Any) -> None:
    grpc_server.infer["m"] = lambda _: respond()
    with InferClient(grpc_server.address) as client:
        client.infer("m", {"big": np.array([1, 2], dtype=">i4"), "s": np.array(["ü", "ab"])})
    (request,) = grpc_server.requests
    assert [tensor.datatype for tensor in request.inputs] == ["INT32", "BYTES"]
    assert list(request.raw_input_contents) == [b"\1\0\0\0\2\0\0\0", b"\2\0\0\0\xc3\xbc\2\0\0\0ab"]


def test_arrays_that_cannot_be_sent(grpc_server: Any) -> None:
    with (
        InferClient(grpc_server.address) as client,
        pytest.raises(BadRequest, match="'x' is complex64, which the protocol has no datatype for"),
    ):
        client.infer("m", {"x": np.zeros(1, np.complex64)})
