"""Sequences whose states stay in the memory of a real GPU: direct and oldest, with controls, compared with an oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from headrace.core.sequence_state import StateTensor
from headrace.core.tensor import BY_NAME
from headrace.inference.scheduling.policy import SequencePolicy

from tests.support import gpu_sequence_cases as cases
from tests.support.gpu_marks import gpu_marks
from tests.support.serving import Server, serving
from tests.support.virtual_gpu_states import check_random_interleavings

pytestmark = gpu_marks(300, "pydantic", "onnx", "onnxruntime")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("sequences")
    with serving(cases.make_repository(folder), folder) as started:
        yield started
        assert "Traceback" not in started.text, started.text


@pytest.mark.parametrize("model", cases.MODELS)
def test_answers_are_those_of_an_oracle(server: Server, model: str) -> None:
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        cases.check_model(client, model, requests=3000)
        cases.check_model(client, model, requests=500)
    assert "are in host memory" not in server.text


@pytest.mark.parametrize("graphs", ["1", "0"])
@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.parametrize("is_direct", [True, False])
def test_random_interleavings(is_direct: bool, is_output: bool, graphs: str, tmp_path: Path) -> None:
    state = StateTensor("SUM_IN", "SUM_OUT", BY_NAME["FP32"], (1,), np.zeros(1, np.float32), is_output)
    slots = 4 if is_direct else 6
    policy = SequencePolicy(slots=slots, is_direct=is_direct, max_rows=4, idle_ns=100, states=(state,))
    check_random_interleavings(policy, tmp_path, graphs)
