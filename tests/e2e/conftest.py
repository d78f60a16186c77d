"""One repository with every kind of small model, and one real server over it, for all end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import onnxruntime as ort
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from headrace.core.tensor import DATATYPES

from tests.support import models
from tests.support.attacks import UNBOUNDED_WAITS
from tests.support.browser import Browser, chromium
from tests.support.python_models import Gate
from tests.support.serving import Server, serving

MAX_BODY_BYTES = 4 << 20
FRUITS = "apple\nbanana\ncherry\n"  # fewer than there are classes: the others have no label

COUNTED = """
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: 16 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""
DELAYED = COUNTED + "dynamic_batching { max_queue_delay_microseconds: 5000 }\n" + UNBOUNDED_WAITS
PATIENT = COUNTED + "dynamic_batching { preferred_batch_size: 2 max_queue_delay_microseconds: 60000000 }\n"
REJECTING = COUNTED + 'parameters { key: "headrace.oversize" value { string_value: "reject" } }\n'
VERSIONED = COUNTED + "version_policy { all {} }\n"
RESHAPED = """
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 6 reshape { shape: [2, 3] } }
output { name: "Y" data_type: TYPE_FP32 dims: 6 reshape { shape: [3, 2] } }
"""
LABELLED = """
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 5 }
output { name: "SCORES" data_type: TYPE_FP32 dims: 5 label_filename: "fruits.txt" }
output { name: "BEST" data_type: TYPE_INT64 dims: 1 }
"""
OPTIONAL = """
max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 3 }
input { name: "BIAS" data_type: TYPE_FP32 dims: 3 optional: true }
output { name: "Y" data_type: TYPE_FP32 dims: 3 }
"""
CONTRADICTING = """
max_batch_size: 8
input { name: "X" data_type: TYPE_INT32 dims: 16 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }
"""


def build(repository: Path) -> Path:
    """All models; the models whose statistics a test counts are used by that test alone."""
    for datatype in DATATYPES:
        models.add_model(repository, f"identity_{datatype.name.lower()}", models.identity(datatype.name))
    for name, config in {
        "affine": DELAYED,
        "counted": COUNTED,
        "counted_failures": COUNTED,
        "measured": COUNTED,
        "batched": DELAYED,
        "patient": PATIENT,
        "rejecting": REJECTING,
    }.items():
        models.add_model(repository, name, models.affine(), config=config)
    for version in (1, 3, 20):
        models.add_model(repository, "versioned", models.affine(seed=version), version=version, config=VERSIONED)
    models.add_model(repository, "sum_difference", models.sum_difference())
    models.add_model(repository, "row_sums", models.row_sums())
    models.add_model(repository, "unbatched", models.unbatched())
    models.add_model(repository, "reshaped", models.transposed(), config=RESHAPED)
    models.add_model(repository, "scores", models.scores(), config=LABELLED, files={"fruits.txt": FRUITS})
    models.add_model(repository, "optional_bias", models.optional_bias(), config=OPTIONAL)
    models.add_model(repository, "table_lookup", models.table_lookup())
    models.add_model(repository, "busy", models.busy(), config=UNBOUNDED_WAITS)
    models.add_model(repository, "broken_file", b"this is no ONNX file")
    models.add_model(repository, "broken_config", models.affine(), config=CONTRADICTING)
    return repository


BROKEN = ("broken_config", "broken_file")


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("e2e") / "repository")


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(repository, tmp_path_factory.mktemp("log"), "--max-body-bytes", str(MAX_BODY_BYTES)) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.address, concurrency=8) as connected:
        yield connected


class Reference:
    """Models in process, to compare answers with."""

    def __init__(self) -> None:
        self._sessions: dict[str, ort.InferenceSession] = {}

    def affine(self, x: np.ndarray, seed: int = 0) -> np.ndarray:
        """Outputs of `models.affine` for `x`, computed by ONNX Runtime."""
        key = f"affine {seed}"
        if key not in self._sessions:
            content = models.affine(seed=seed).SerializeToString()
            self._sessions[key] = ort.InferenceSession(content, providers=["CPUExecutionProvider"])
        return self._sessions[key].run(None, {"X": x})[0]


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="session")
def grpc_server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with every option switched on; `server` has the same models and every option off."""
    options = ("--model-control", "explicit", "--load-model", "*", "--allow-model-override", "--allow-client-shm")
    folder = tmp_path_factory.mktemp("log_grpc")
    with serving(repository, folder, "--max-body-bytes", str(MAX_BODY_BYTES), *options) as running:
        assert running.grpc_port, f"the banner does not contain the gRPC port:\n{running.text}"
        yield running


@pytest.fixture
def grpc_client(grpc_server: Server) -> Iterator[triton_grpc.InferenceServerClient]:
    with triton_grpc.InferenceServerClient(grpc_server.grpc_address) as connected:
        yield connected


@pytest.fixture(scope="session")
def grpc_channels() -> Iterator[dict[str, grpc.Channel]]:
    """Open channels by address, closed at the end of the session."""
    channels: dict[str, grpc.Channel] = {}
    yield channels
    for channel in channels.values():
        channel.close()


@pytest.fixture
def grpc_channel(grpc_server: Server, grpc_channels: dict[str, grpc.Channel]) -> grpc.Channel:
    """For what Triton's client cannot send; takes and sends messages of any size."""
    unbounded = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    if grpc_server.grpc_address not in grpc_channels:
        grpc_channels[grpc_server.grpc_address] = grpc.insecure_channel(grpc_server.grpc_address, options=unbounded)
    return grpc_channels[grpc_server.grpc_address]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Gate:
    return Gate(tmp_path_factory.mktemp("gated") / "models")


@pytest.fixture(scope="module")
def gated(gate: Gate) -> Iterator[Server]:
    """A server with the models `gate` and `row_sums`."""
    models.add_model(gate.repository, "row_sums", models.row_sums())
    with serving(gate.repository, gate.repository.parent) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as running:
        yield running
