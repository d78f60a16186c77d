"""Timeouts and priorities that mean harm: each is clamped or refused, on both protocols, and the model serves on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.support.models import add_model, affine
from tests.support.serving import Server, serving

pb: Any = service_pb2
INFER = "/inference.GRPCInferenceService/ModelInfer"
X = np.ones((1, 16), np.float32)
CONFIG = "max_batch_size: 8\ndynamic_batching { priority_levels: 2 default_priority_level: 2 }\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("abuse")
    add_model(folder / "repository", "affine", affine(), config=CONFIG)
    with serving(folder / "repository", folder) as running:
        yield running


def over_http(server: Server, parameters: str, headers: dict[str, str]) -> int:
    """The status; `parameters` are JSON as it stands in the request."""
    tensor = json.dumps({"name": "X", "datatype": "FP32", "shape": [1, 16], "data": X[0].tolist()})
    body = f'{{"inputs": [{tensor}], "parameters": {parameters}}}'.encode()
    return server.request("POST", "/v2/models/affine/infer", body, headers)[0]


def over_grpc(server: Server, metadata: tuple[tuple[str, str], ...] = (), **parameters: dict[str, Any]) -> str:
    """The name of the code."""
    request = pb.ModelInferRequest(model_name="affine")
    request.inputs.add(name="X", datatype="FP32", shape=X.shape)
    request.raw_input_contents.append(X.tobytes())
    for name, value in parameters.items():
        request.parameters[name].CopyFrom(pb.InferParameter(**value))
    with grpc.insecure_channel(server.grpc_address) as channel:
        try:
            channel.unary_unary(INFER)(request.SerializeToString(), metadata=metadata, timeout=20)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "OK"


@pytest.mark.parametrize("name", ["timeout", "headrace_deadline_us", "priority"])
@pytest.mark.parametrize(
    ("value", "status"),
    [
        *((value, 200) for value in ("0", "-1", str(-(2**63)), str(2**31), str(2**63), str(2**64), "1" + "0" * 300)),
        *((value, 400) for value in ("1.5", "1e6", "true", "null", '"1"', "[1]", "{}")),
        *((value, 400) for value in ("NaN", "Infinity", "0x10", "1" + "0" * 5000)),
    ],
)
def test_parameters_over_http(server: Server, name: str, value: str, status: int) -> None:
    assert over_http(server, f'{{"{name}": {value}}}', {}) == status
    assert over_http(server, "{}", {}) == 200


@pytest.mark.parametrize("name", ["timeout", "headrace_deadline_us", "priority"])
@pytest.mark.parametrize(
    ("value", "code"),
    [
        *(({"int64_param": value}, "OK") for value in (0, -1, -(2**63), 2**63 - 1)),
        ({"uint64_param": 2**64 - 1}, "OK"),
        *(
            (value, "INVALID_ARGUMENT")
            for value in ({"double_param": 1.0}, {"string_param": "1"}, {"bool_param": True})
        ),
        ({}, "INVALID_ARGUMENT"),
    ],
)
def test_parameters_over_grpc(server: Server, name: str, value: dict[str, Any], code: str) -> None:
    assert over_grpc(server, **{name: value}) == code
    assert over_grpc(server) == "OK"


@pytest.mark.parametrize(
    ("value", "status"),
    [
        *((value, 200) for value in ("0", "00020000", "86400001", str(2**63), "9" * 20)),
        *((value, 400) for value in ("-1", "+1", "1.5", "1e3", "0x10", "1_0", "1 000", "soon", "9" * 21, "9" * 5000)),
    ],
)
def test_the_header_of_the_deadline(server: Server, value: str, status: int) -> None:
    assert over_http(server, "{}", {"X-Request-Timeout-Ms": value}) == status
    code = {200: "OK", 400: "INVALID_ARGUMENT"}[status]
    assert over_grpc(server, (("x-request-timeout-ms", value),)) == code
    assert over_http(server, "{}", {}) == 200


def test_a_repeated_header_counts_once(server: Server) -> None:
    assert over_grpc(server, (("x-request-timeout-ms", "20000"), ("x-request-timeout-ms", "20000"))) == "OK"


def test_a_new_name_with_every_request_is_as_good_as_one(server: Server) -> None:
    for number in range(300):
        assert over_http(server, "{}", {"X-Headrace-Client": f"{number:0>128}"}) == 200
