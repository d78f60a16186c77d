"""Inputs of Python models in CUDA shared memory, behind a real server; the GPU and the driver of the model's process are fakes.

The memory of the GPU is a file that its handle names: see `tests.support.fake_ipc_driver`. The case of a real GPU is in
tests/gpu/test_python_model_tensors.py.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.core.tensor import Array

from tests.support.fake_ipc_driver import HANDLE_BYTES
from tests.support.gpu_servers import COMMAND
from tests.support.serving import ROOT, Server, serving
from tests.support.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="shared memory needs /dev/shm"),
]

CONFIG = """
backend: "python"
max_batch_size: 8
input [
  {{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] {reshape} }},
  {{ name: "wait" data_type: TYPE_STRING dims: [ 1 ] optional: true }}
]
output [
  {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] {reshape} }},
  {{ name: "facts" data_type: TYPE_INT64 dims: [ 4 ] }}
]
dynamic_batching {{ max_queue_delay_microseconds: {delay_us} }}
{parameters}
"""
NO = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
YES = NO.replace('"no"', '"yes"')
# facts: is_cpu, requests of the batch, opens of the process so far, open regions. `wait` names a file to wait for.
CODE = """
import os, time
import numpy as np
import triton_python_backend_utils as pb_utils
import fake_ipc_driver

driver = fake_ipc_driver.install()

def double(x):
    if x.is_cpu():
        return x.as_numpy() * 2
    try:
        x.as_numpy()
        raise AssertionError("as_numpy of a tensor on a GPU")
    except pb_utils.TritonModelException:
        return fake_ipc_driver.host_array(x.to_dlpack()) * 2

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            x = request.inputs()[0]
            assert (x.name(), x.triton_dtype()) == ("x", pb_utils.numpy_to_triton_type(np.float32))
            wait = pb_utils.get_input_tensor_by_name(request, "wait")
            while wait is not None and not os.path.exists(wait.as_numpy()[0, 0].decode()):
                open(wait.as_numpy()[0, 0].decode() + ".began", "w").close()
                time.sleep(0.01)
            y = double(x)
            facts = [x.is_cpu(), len(requests), driver.opened, len(driver.sizes)]
            facts = np.array([facts] * len(y), np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y), pb_utils.Tensor("facts", facts)]))
        return responses
"""
# A model in our own form gets arrays of the whole batch.
OWN = """
import numpy as np

class Doubled:
    def predict(self, batch):
        x = batch["x"]
        return {"y": x * 2, "facts": np.ones((len(x), 4), np.int64)}
"""

PIPELINE = """
platform: "ensemble"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "facts" data_type: TYPE_INT64 dims: [ 4 ] } ]
ensemble_scheduling { step {
  model_name: "gpu" model_version: -1
  input_map { key: "x" value: "x" }
  output_map [ { key: "y" value: "y" }, { key: "facts" value: "facts" } ]
} }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("devices")
    models = {
        "gpu": (NO, "", 0, CODE),
        "batched": (NO, "", 300_000, CODE),
        "reshaped": (NO, "reshape { shape: [ 2, 2 ] }", 0, CODE),
        "cpu": (YES, "", 0, CODE),
        "default": ("", "", 0, CODE),
        "own": (NO, "", 0, OWN),
    }
    for name, (parameters, reshape, delay_us, code) in models.items():
        version = folder / "repository" / name / "1"
        version.mkdir(parents=True)
        config = CONFIG.format(parameters=parameters, reshape=reshape, delay_us=delay_us)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(code)
        shutil.copy(ROOT / "tests" / "support" / "fake_ipc_driver.py", version)
    pipeline = folder / "repository" / "pipeline"
    (pipeline / "1").mkdir(parents=True)
    (pipeline / "config.pbtxt").write_text(PIPELINE)
    with serving(folder / "repository", folder, "--allow-client-shm", command=COMMAND) as started:
        yield started
        assert "Traceback" not in started.text, started.text


@contextmanager
def region(server: Server, values: Array) -> Iterator[tuple[str, Path]]:
    """Values in a registered region of the fake GPU: its name, and its file."""
    path = Path("/dev/shm", f"test-{uuid.uuid4().hex}")
    path.write_bytes(values.tobytes())
    handle = path.name.encode().ljust(HANDLE_BYTES, b"\0")
    document = {"raw_handle": {"b64": base64.b64encode(handle).decode()}, "device_id": 0, "byte_size": values.nbytes}
    call(server, f"cudasharedmemory/region/{path.name}/register", document)
    try:
        yield path.name, path
    finally:
        call(server, f"cudasharedmemory/region/{path.name}/unregister")
        path.unlink(missing_ok=True)


def call(server: Server, path: str, document: dict[str, Any] | None = None) -> None:
    status, _, body = server.request("POST", f"/v2/{path}", json.dumps(document or {}).encode())
    assert status == 200, body


def infer(server: Server, model: str, *inputs: dict[str, Any]) -> tuple[int, Any]:
    body = json.dumps({"inputs": inputs}).encode()
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", body)
    return status, json.loads(content)


def shared(name: str, rows: int, offset: int = 0) -> dict[str, Any]:
    where = {"shared_memory_region": name, "shared_memory_offset": offset, "shared_memory_byte_size": 16 * rows}
    return {"name": "x", "datatype": "FP32", "shape": [rows, 4], "parameters": where}


def data(values: Array) -> dict[str, Any]:
    return {"name": "x", "datatype": "FP32", "shape": list(values.shape), "data": values.reshape(-1).tolist()}


def result(answer: tuple[int, Any]) -> tuple[list[float], list[int]]:
    """Values of `y`, and `facts` of the first row."""
    status, document = answer
    assert status == 200, document
    outputs = {output["name"]: output["data"] for output in document["outputs"]}
    return outputs["y"], outputs["facts"][:4]


def failures(server: Server, model: str) -> float:
    """Sum of the counter `headrace_failures_total` of a model with the reason `bad_request`."""
    _, _, text = server.request("GET", "/metrics")
    lines = [line for line in text.decode().splitlines() if line.startswith("headrace_failures_total{")]
    mine = [line for line in lines if f'model="{model}"' in line and 'reason="bad_request"' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in mine)


def facts(server: Server, model: str = "gpu") -> list[int]:
    """`facts` of a request in host memory."""
    return result(infer(server, model, data(np.zeros((1, 4), np.float32))))[1]


X = np.arange(40, dtype=np.float32).reshape(10, 4)


@pytest.mark.parametrize("model", ["gpu", "reshaped"])
def test_rows_on_the_gpu_stay_there(server: Server, model: str) -> None:
    opened = facts(server, model)[2]
    with region(server, X) as (name, path):
        for first, rows in [(0, 1), (2, 3), (1, 8)]:
            y, (is_cpu, _, opens, now) = result(infer(server, model, shared(name, rows, 16 * first)))
            assert y == (X[first : first + rows] * 2).reshape(-1).tolist()
            assert (is_cpu, opens, now) == (0, opened + 1, 1)  # opened once for all requests
        # What the client writes is what the next request sees.
        path.write_bytes((X + 1).tobytes())
        assert result(infer(server, model, shared(name, 1)))[0] == [2.0, 4.0, 6.0, 8.0]
        assert facts(server, model) == [1, 1, opened + 1, 1]
    until(lambda: facts(server, model)[3] == 0)


@pytest.mark.parametrize("model", ["cpu", "default", "own"])
def test_rows_are_copied_to_the_host_without_the_parameter(server: Server, model: str) -> None:
    with region(server, X) as (name, _):
        y, seen = result(infer(server, model, shared(name, 3, 16)))
        assert y == (X[1:4] * 2).reshape(-1).tolist()
        assert seen[0] == 1
    if model != "own":
        assert facts(server, model)[2] == 0


def test_a_step_of_a_pipeline_reads_the_rows_of_its_request(server: Server) -> None:
    with region(server, X) as (name, _):
        y, seen = result(infer(server, "pipeline", shared(name, 3, 16)))
        assert (y, seen[0]) == ((X[1:4] * 2).reshape(-1).tolist(), 0)


def test_an_offset_within_an_element_is_copied_to_the_host(server: Server) -> None:
    with region(server, np.frombuffer(b"?" + X.tobytes(), np.uint8)) as (name, _):
        y, seen = result(infer(server, "gpu", shared(name, 2, 1)))
        assert (y, seen[0]) == ((X[:2] * 2).reshape(-1).tolist(), 1)


def test_requests_of_a_batch_lie_where_they_lie(server: Server) -> None:
    with region(server, X) as (one, _), region(server, X + 100) as (two, _), ThreadPoolExecutor(8) as pool:
        requests = [shared(one, 1), shared(one, 2, 32), data(X[4:5]), shared(two, 1, 16), data(X[7:9])]
        rights = [X[:1], X[2:4], X[4:5], X[1:2] + 100, X[7:9]]
        batch_sizes = set()
        for _ in range(5):
            answers = list(pool.map(lambda each: infer(server, "batched", each), requests))
            for answer, right, request in zip(answers, rights, requests, strict=True):
                y, (is_cpu, batch_size, _, now) = result(answer)
                assert y == (right * 2).reshape(-1).tolist()
                assert is_cpu == ("data" in request)
                assert now <= 2
                batch_sizes.add(batch_size)
        assert max(batch_sizes) > 2, "no batch had several requests"


def test_memory_that_cannot_be_opened_fails_its_request_alone(server: Server) -> None:
    before = failures(server, "batched")
    with region(server, X) as (gone, path), region(server, X) as (name, _), ThreadPoolExecutor(8) as pool:
        path.unlink()
        requests = [shared(gone, 1), shared(name, 2), data(X[2:4])]
        for _ in range(3):
            lost, *others = pool.map(lambda each: infer(server, "batched", each), requests)
            assert lost[0] == 400
            assert "input 'x': the CUDA shared memory cannot be opened (cuIpcOpenMemHandle failed" in lost[1]["error"]
            assert result(others[0])[0] == (X[:2] * 2).reshape(-1).tolist()
            assert result(others[1])[0] == (X[2:4] * 2).reshape(-1).tolist()
        assert infer(server, "batched", shared(gone, 1))[0] == 400  # a batch without any other request
    assert failures(server, "batched") == before + 4


def test_a_region_is_unregistered_while_a_batch_reads_it(server: Server, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = {"name": "wait", "datatype": "BYTES", "shape": [1, 1], "data": [str(go)]}
    with ThreadPoolExecutor(1) as pool:
        with region(server, X) as (name, _):
            running = pool.submit(infer, server, "gpu", shared(name, 1), wait)
            until(Path(f"{go}.began").exists, before=running)
        # Unregistered, and its file is gone.
        go.touch()
        assert result(running.result())[0] == [0.0, 2.0, 4.0, 6.0]
    until(lambda: facts(server)[3] == 0)


def test_regions_come_and_go_under_load(server: Server) -> None:
    opened = facts(server)[2]

    def one(number: int) -> None:
        values = X + number
        with region(server, values) as (name, _):
            for first in range(5):
                y, seen = result(infer(server, "gpu", shared(name, 2, 16 * first)))
                assert y == (values[first : first + 2] * 2).reshape(-1).tolist()
                assert seen[0] == 0

    with ThreadPoolExecutor(6) as pool:
        for _ in pool.map(one, range(40)):
            pass
    until(lambda: facts(server)[3] == 0)
    assert facts(server)[2] == opened + 40
