"""Sequences with states on TensorRT, over gRPC streams; the GPU is a fake in the server's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton_grpc

from tests.support import gpu_sequence_cases as cases
from tests.support.gpu_servers import gpu_serving
from tests.support.serving import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("sequences")
    with gpu_serving(cases.make_repository, folder) as started:
        yield started


@pytest.mark.parametrize("model", cases.MODELS)
def test_answers_are_those_of_an_oracle(server: Server, model: str) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        cases.check_model(client, model)
        cases.check_model(client, model, requests=100)
    assert "are in host memory" not in server.text
