"""Request options in headers and metadata, with Triton's clients: deadline, client, timing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from tests.support.grpc_requests import STEPS_PER_S, Collector, message, steps, tensor
from tests.support.models import add_model, affine
from tests.support.serving import Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
PARTS = ("decode", "queue", "assemble", "compute", "split", "encode")
X = np.ones((2, 16), np.float32)


def plain_values(parameters: Any) -> dict[str, int | str]:
    """The parameters of a gRPC answer as plain values."""
    return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}


def check(timing: dict[str, Any]) -> None:
    assert timing["headrace_batch_rows"] == 2
    assert timing["headrace_batch_closed"] in ("delay", "immediate", "full", "preferred")
    parts = sum(timing[f"headrace_{part}_us"] for part in PARTS)
    assert abs(parts - timing["headrace_total_us"]) <= len(PARTS)


def http_inputs(array: np.ndarray, name: str = "X", datatype: str = "FP32") -> list[triton.InferInput]:
    return [triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)]


def test_a_deadline_in_a_header_of_http(client: triton.InferenceServerClient) -> None:
    slow = http_inputs(np.array([STEPS_PER_S], np.int64), "STEPS", "INT64")
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        client.infer("busy", slow, headers={"X-Request-Timeout-Ms": "20"})
    assert caught.value.status() == "504"
    assert client.infer("affine", http_inputs(X), headers={"X-Request-Timeout-Ms": "20000"}) is not None


def test_a_deadline_in_the_metadata_of_grpc(grpc_client: triton_grpc.InferenceServerClient) -> None:
    slow = [tensor("STEPS", np.array([STEPS_PER_S], np.int64), "INT64")]
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        grpc_client.infer("busy", slow, headers={"x-request-timeout-ms": "20"})
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(InferenceServerException, match="x-request-timeout-ms") as caught:
        grpc_client.infer("busy", slow, headers={"x-request-timeout-ms": "soon"})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_a_deadline_in_the_metadata_of_a_stream(grpc_client: triton_grpc.InferenceServerClient) -> None:
    collect = Collector()
    grpc_client.start_stream(collect, headers={"x-request-timeout-ms": "20", "headrace-timing": "1"})
    grpc_client.async_stream_infer("busy", [tensor("STEPS", np.array([STEPS_PER_S], np.int64), "INT64")])
    ((_, error),) = collect.take(1)
    assert "deadline" in str(error)
    results = []

    def is_answered() -> bool:
        """A busy machine takes longer than the deadline now and then."""
        grpc_client.async_stream_infer("affine", [tensor("X", X)])
        ((result, error),) = collect.take(1)
        results.append(result)
        assert error is None or "deadline" in str(error), error
        return error is None

    until(is_answered)
    grpc_client.stop_stream()
    check(plain_values(results[-1].get_response().parameters))


def test_a_response_over_http_has_its_timing(client: triton.InferenceServerClient, server: Server) -> None:
    result = client.infer("affine", http_inputs(X), headers={"headrace-timing": "1"})
    check(result.get_response()["parameters"])
    again = client.infer("affine", http_inputs(X), parameters={"headrace_timing": True})
    check(again.get_response()["parameters"])
    assert "parameters" not in client.infer("affine", http_inputs(X)).get_response()
    body = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [2, 16], "data": X.tolist()}]}).encode()
    status, headers, content = server.request("POST", "/v2/models/affine/infer", body, {"Headrace-Timing": "1"})
    assert status == 200
    timing = json.loads(content)["parameters"]
    check(timing)
    assert headers["headrace-timing"].endswith(f"total_us={timing['headrace_total_us']}")
    metrics = dict(metric.split(";", 1) for metric in headers["server-timing"].split(", ", 6) if ";dur=" in metric)
    assert float(metrics["compute"].removeprefix("dur=")) * 1000 == pytest.approx(timing["headrace_compute_us"])


def test_a_response_over_grpc_has_its_timing(grpc_client: triton_grpc.InferenceServerClient) -> None:
    result = grpc_client.infer("affine", [tensor("X", X)], headers={"headrace-timing": "1"})
    check(plain_values(result.get_response().parameters))
    again = grpc_client.infer("affine", [tensor("X", X)], parameters={"headrace_timing": True})
    check(plain_values(again.get_response().parameters))
    assert not grpc_client.infer("affine", [tensor("X", X)]).get_response().parameters


@pytest.mark.parametrize("value", [b"\xff\xfe", b"a b", b"x" * 129])
def test_invalid_client_names(grpc_channel: grpc.Channel, server: Server, value: bytes) -> None:
    status, _, content = server.request(
        "POST", "/v2/models/affine/infer", b"{}", {"x-headrace-client": value.decode("latin-1")}
    )
    assert status == 400
    assert "x-headrace-client" in json.loads(content)["error"]
    if value.isascii():
        with pytest.raises(grpc.RpcError) as caught:
            grpc_channel.unary_unary(INFER)(message("affine", "", X), metadata=(("x-headrace-client", value.decode()),))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_with_invalid_metadata_is_refused(grpc_channel: grpc.Channel) -> None:
    stream = grpc_channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    with pytest.raises(grpc.RpcError) as caught:
        list(stream(iter([steps("", 1)]), metadata=(("headrace-timing", "perhaps"),)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_operator_names_the_header_of_the_client(tmp_path: Path) -> None:
    add_model(tmp_path / "repository", "affine", affine())
    options = ("--client-header", "X-Api-Key")
    with serving(tmp_path / "repository", tmp_path, *options) as server:
        path, body = "/v2/models/affine/infer", b"{}"
        for name in ("x-api-key", "x-headrace-client"):
            _, _, content = server.request("POST", path, body, {name: "not one name"})
            assert ("x-api-key" in json.loads(content)["error"]) == (name == "x-api-key")
        with triton_grpc.InferenceServerClient(server.grpc_address) as connected:
            with pytest.raises(InferenceServerException, match="x-api-key"):
                connected.infer("affine", [tensor("X", X)], headers={"x-api-key": "not one name"})
            assert connected.infer("affine", [tensor("X", X)], headers={"x-headrace-client": "a b"}) is not None
