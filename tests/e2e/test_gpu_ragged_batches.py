"""Ragged batches on one GPU, over real sockets; the GPU is a fake in the server's process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.support import gpu_ragged_cases as cases
from tests.support.gpu_servers import gpu_serving
from tests.support.serving import Server
from tests.support.triton_clients import ask

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("ragged")
    with gpu_serving(cases.make_repository, folder) as started:
        yield started


def by_http(server: Server, elements: np.ndarray) -> tuple[int, bytes]:
    tensor = {"name": "ELEMENTS", "datatype": "FP32", "shape": list(elements.shape), "data": elements.ravel().tolist()}
    status, _, body = server.request("POST", "/v2/models/plan/infer", json.dumps({"inputs": [tensor]}).encode())
    return status, body


def by_grpc(server: Server, elements: np.ndarray) -> dict[str, np.ndarray]:
    return ask(server, "grpc", "plan", {"ELEMENTS": elements})


def test_concurrent_requests_get_their_own_answers(server: Server) -> None:
    texts = [cases.text(1 + seed * 7 % cases.MOST, seed) for seed in range(96)]

    def check(elements: np.ndarray) -> None:
        cases.check_answer(by_grpc(server, elements), elements)
        status, body = by_http(server, elements)
        assert status == 200, body
        outputs = {each["name"]: np.reshape(each["data"], each["shape"]) for each in json.loads(body)["outputs"]}
        cases.check_answer(outputs, elements)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(check, texts))


@pytest.mark.parametrize("length", [0, cases.MOST + 1])
def test_a_request_beyond_the_profile_is_a_client_error(server: Server, length: int) -> None:
    elements = cases.text(length, 1)
    status, body = by_http(server, elements)
    assert status == 400, body
    assert f"ELEMENTS [{length}]" in json.loads(body)["error"]
    with pytest.raises(InferenceServerException) as refused:
        by_grpc(server, elements)
    assert refused.value.status() == str(grpc.StatusCode.INVALID_ARGUMENT)
    assert f"ELEMENTS [1] to [{cases.MOST}]" in refused.value.message()
