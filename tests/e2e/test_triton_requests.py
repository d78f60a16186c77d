"""Less common requests of Triton's clients: raw binary bodies, empty tensors, HEAD, health as JSON."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.http as triton_http
from headrace.core.tensor import DATATYPES
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support import models
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, module_of

FREE_TEXT = """
max_batch_size: 4
input { name: "X" data_type: TYPE_STRING dims: 1 }
output { name: "Y" data_type: TYPE_STRING dims: 1 }
"""
SMALL_BATCHES = """
max_batch_size: 2
input { name: "X" data_type: TYPE_FP32 dims: [-1, 4] }
output { name: "Y" data_type: TYPE_FP32 dims: [-1, 4] }
dynamic_batching { max_queue_delay_microseconds: 2000 }
"""

# A datatype of each size.
NUMBERS = ("BOOL", "FP16", "FP32", "INT64")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Models for odd requests, with client shared memory."""
    folder = tmp_path_factory.mktemp("odd")
    for datatype in (*NUMBERS, "BYTES"):
        models.add_model(folder / "models", f"identity_{datatype.lower()}", models.identity(datatype))
    boxes = models.identity("FP32", ("batch", "n", 4))
    models.add_model(folder / "models", "boxes", boxes)
    models.add_model(folder / "models", "small_batches", boxes, config=SMALL_BATCHES)
    models.add_model(folder / "models", "boxes_apart", boxes, files={"config.yaml": "isolation: process\n"})
    models.add_model(folder / "models", "no_batch", models.identity("FP32", (2, "n")), config="max_batch_size: 0")
    models.add_model(folder / "models", "text", models.identity("BYTES", ("batch", 1)), config=FREE_TEXT)
    models.add_model(folder / "models", "affine", models.affine())
    models.add_model(folder / "models", "sum_difference", models.sum_difference())
    models.add_model(folder / "models", "broken", b"this is no ONNX file")
    options = ("--allow-client-shm", "--id", "triton")
    with serving(folder / "models", folder, *options) as running:
        yield running
        assert "Traceback" not in running.text


@pytest.fixture
def http(odd: Server) -> Iterator[Any]:
    with triton_http.InferenceServerClient(odd.address) as connected:
        yield connected


@pytest.fixture(params=["http", "grpc"])
def either(request: pytest.FixtureRequest, odd: Server) -> Iterator[Any]:
    """Triton's client over one protocol: (module, client)."""
    with connect(odd, request.param) as connected:
        yield module_of(connected), connected


# --- Raw binary requests ------------------------------------------------------------------------------------------------


def raw(server: Server, model: str, body: bytes, **headers: str) -> tuple[int, Any, bytes]:
    """A raw binary request: status, the JSON of the answer, and what follows it."""
    headers = {"Inference-Header-Content-Length": "0", "Content-Type": "application/octet-stream", **headers}
    status, answer, content = server.request("POST", f"/v2/models/{model}/infer", body, headers)
    size = int(answer.get("inference-header-content-length", len(content)))
    return status, json.loads(content[:size]), content[size:]


@pytest.mark.parametrize("datatype", NUMBERS)
def test_a_raw_request_fills_the_free_dimension(odd: Server, datatype: str) -> None:
    size = {d.name: d.size_bytes for d in DATATYPES}[datatype]
    body = bytes(number % 2 for number in range(size * 6))
    status, answer, data = raw(odd, f"identity_{datatype.lower()}", body)
    assert status == 200, answer
    expected = {"name": "Y", "datatype": datatype, "shape": [1, 6], "parameters": {"binary_data_size": len(body)}}
    assert answer["outputs"] == [expected]
    assert data == body


def test_raw_requests_of_fixed_shapes(odd: Server, http: Any) -> None:
    array = np.arange(16, dtype=np.float32).reshape(1, 16)
    body = http.generate_request_body([triton_http.InferInput("X", [1, 16], "FP32").set_data_from_numpy(array)])[0]
    assert body.endswith(array.tobytes())
    expected = http.infer("affine", [triton_http.InferInput("X", [1, 16], "FP32").set_data_from_numpy(array)])
    for _ in range(2):  # read, and remembered
        status, answer, data = raw(odd, "affine", array.tobytes())
        assert (status, answer["outputs"][0]["shape"]) == (200, [1, 4])
        assert data == expected.as_numpy("Y").tobytes()
    packed = gzip.compress(array.tobytes())
    assert raw(odd, "affine", packed, **{"Content-Encoding": "gzip"})[2] == data


def test_a_raw_request_of_text_is_one_element(odd: Server) -> None:
    for text in ("né 東京".encode(), b"", b"a" * 300_000):
        status, answer, data = raw(odd, "text", text)
        assert (status, answer["outputs"][0]["shape"]) == (200, [1, 1])
        assert data == len(text).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    ("model", "body", "words"),
    [
        ("sum_difference", b"abcd", "data of one input, model 'sum_difference' has ['A', 'B']"),
        ("affine", bytes(60), "60 bytes came for shape [1, 16] of FP32, expected 64"),
        ("affine", b"", "0 bytes came for shape [1, 16]"),
        ("boxes", bytes(20), "of 20 bytes does not fill shape [-1, -1, 4] of FP32: send a multiple of 16 bytes"),
        ("identity_bytes", b"text", "one element of BYTES, input 'X' has shape [-1, -1]"),
    ],
)
def test_raw_requests_that_do_not_fit(odd: Server, model: str, body: bytes, words: str) -> None:
    status, answer, _ = raw(odd, model, body)
    assert status == 400
    assert words in answer["error"]


def test_a_large_raw_request(odd: Server) -> None:
    body = np.random.default_rng(0).bytes(16 * 50_000)
    status, answer, data = raw(odd, "boxes", body)
    assert (status, answer["outputs"][0]["shape"]) == (200, [1, 50_000, 4])
    assert data == body


# --- Tensors without elements -------------------------------------------------------------------------------------------


def empty(module: Any, shape: list[int], datatype: str = "FP32", **options: Any) -> Any:
    dtype = {d.name: d.dtype for d in DATATYPES}[datatype]
    return module.InferInput("X", shape, datatype).set_data_from_numpy(np.empty(shape, dtype), **options)


@pytest.mark.parametrize("model", ["boxes", "small_batches", "boxes_apart"])
def test_a_dimension_of_zero(either: Any, model: str) -> None:
    module, client = either
    for shape in ([1, 0, 4], [2, 0, 4], [1, 3, 4]):
        assert client.infer(model, [empty(module, shape)]).as_numpy("Y").shape == tuple(shape)
    result = client.infer("no_batch", [empty(module, [2, 0])])
    assert result.as_numpy("Y").shape == (2, 0)


def test_a_dimension_of_zero_in_a_request_that_is_split(either: Any) -> None:
    module, client = either
    assert client.infer("small_batches", [empty(module, [7, 0, 4])]).as_numpy("Y").shape == (7, 0, 4)


def test_typed_contents_without_elements(odd: Server) -> None:
    with grpc.insecure_channel(odd.grpc_address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=[1, 0, 4])
        for raw_contents in ([], [b""], []):
            request = service_pb2.ModelInferRequest(
                model_name="boxes", inputs=[tensor], raw_input_contents=raw_contents
            )
            answer = stub.ModelInfer(request, timeout=30)
            assert list(answer.outputs[0].shape) == [1, 0, 4]
            assert list(answer.raw_output_contents) == [b""]
        tensor.contents.fp32_contents.extend([])
        tensor.contents.SetInParent()
        answer = stub.ModelInfer(service_pb2.ModelInferRequest(model_name="boxes", inputs=[tensor]), timeout=30)
        assert list(answer.outputs[0].shape) == [1, 0, 4]


@contextmanager
def region(client: Any, name: str, size_bytes: int) -> Iterator[Any]:
    key = f"/triton_requests_{name}_{os.getpid()}"
    handle = shared_memory.create_shared_memory_region(name, key, size_bytes, create_only=True)
    try:
        client.register_system_shared_memory(name, key, size_bytes)
        yield handle
    finally:
        client.unregister_system_shared_memory(name)
        shared_memory.destroy_shared_memory_region(handle)


def test_a_dimension_of_zero_through_shared_memory(either: Any) -> None:
    module, client = either
    with region(client, f"zero_{module.__name__}", 64) as handle:
        name = f"zero_{module.__name__}"
        tensor, output = module.InferInput("X", [1, 0, 4], "FP32"), module.InferRequestedOutput("Y")
        for offset in (0, 64):
            tensor.set_shared_memory(name, 0, offset=offset)
            output.set_shared_memory(name, 0, offset=offset)
            result = client.infer("boxes", [tensor], outputs=[output])
            response_output = result.get_output("Y")
            shape = response_output["shape"] if module is triton_http else response_output.shape
            assert list(shape) == [1, 0, 4]
        tensor.set_shared_memory(name, 0, offset=65)
        with pytest.raises(InferenceServerException, match=r"'X': .*do not lie in the region"):
            client.infer("boxes", [tensor], outputs=[output])
        tensor.set_shared_memory(name, 16)
        with pytest.raises(InferenceServerException, match=r"16 bytes came for shape \[1, 0, 4\] of FP32, expected 0"):
            client.infer("boxes", [tensor], outputs=[output])
        full = module.InferInput("X", [1, 2, 4], "FP32").set_data_from_numpy(np.ones((1, 2, 4), np.float32))
        output.set_shared_memory(name, 0)
        with pytest.raises(InferenceServerException, match="has 32 bytes, its shared_memory_byte_size is only 0"):
            client.infer("boxes", [full], outputs=[output])
        assert bytes(shared_memory.get_contents_as_numpy(handle, np.uint8, [64])) == bytes(64)


# --- Accept-Encoding ----------------------------------------------------------------------------------------------------


# --- Health, lists and names --------------------------------------------------------------------------------------------


def test_health_answers_as_kserve_reads_it(odd: Server) -> None:
    for path, answer in {
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        "/v2/models/boxes/ready": {"name": "boxes", "ready": True},
        "/v2/models/boxes/versions/1/ready": {"name": "boxes", "ready": True},
    }.items():
        status, headers, content = odd.request("GET", path)
        assert (status, headers["content-type"], json.loads(content)) == (200, "application/json", answer)


@pytest.mark.parametrize(
    "path",
    [
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/boxes/ready",
        "/v2/models/boxes",
        "/v2/models",
        "/metrics",
    ],
)
def test_head_is_get_without_a_body(odd: Server, path: str) -> None:
    status, headers, content = odd.request("HEAD", path)
    expected, answer, _ = odd.request("GET", path)
    assert (status, content) == (expected, b"") == (200, b"")
    assert headers["content-type"].partition(";")[0] == answer["content-type"].partition(";")[0]
    status, headers, content = odd.request("HEAD", "/v2/models/broken/ready")
    assert (status, content) == (503, b"")


def test_the_list_of_models(odd: Server) -> None:
    status, _, content = odd.request("GET", "/v2/models")
    listed = {model["name"]: model for model in json.loads(content)["models"]}
    index = json.loads(odd.request("POST", "/v2/repository/index", b"{}")[2])
    assert status == 200
    assert listed.keys() == {row["name"] for row in index}
    assert listed["boxes"] == {
        "name": "boxes",
        "platform": "onnxruntime_onnx",
        "versions": [{"version": "1", "state": "READY", "reason": ""}],
    }
    broken = listed["broken"]
    assert (broken["platform"], broken["versions"], broken["state"]) == ("", [], "UNAVAILABLE")
    assert broken["reason"]


def test_the_servers_name_is_an_option(either: Any) -> None:
    module, client = either
    metadata = client.get_server_metadata()
    assert (metadata["name"] if module is triton_http else metadata.name) == "triton"


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("boxe", "", "Request for unknown model: 'boxe' is not found; did you mean 'boxes'?"),
        ("Small-Batches", "", "did you mean 'small_batches'?"),
        ("identity_fp23", "", "did you mean 'identity_fp32'"),
        ("wrong_model_name", "", "Request for unknown model: 'wrong_model_name' is not found; the repository index"),
        ("boxes", "7", "Request for unknown model: 'boxes' version '7' is not found: it has 1"),
        ("boxes", "wrong", "failed to get model version from specified version string 'wrong', it has 1"),
        ("bo xes", "", "Request for unknown model: 'bo xes' is not a valid name"),
    ],
)
def test_a_model_that_is_not_there(either: Any, name: str, version: str, words: str) -> None:
    module, client = either
    for call in (
        lambda: client.infer(name, [empty(module, [1, 0, 4])], model_version=version),
        lambda: client.get_model_metadata(name, version),
        lambda: client.get_model_config(name, version),
        lambda: client.get_inference_statistics(name, version),
    ):
        with pytest.raises(InferenceServerException) as caught:
            call()
        assert caught.value.message().startswith("Request for unknown model: ")
        assert words in caught.value.message()
