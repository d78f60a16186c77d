"""ONNX Runtime's CUDA provider on a real GPU: answers of the CPU, instances beside each other, shared memory, memory returned.

Needs onnxruntime-gpu in place of onnxruntime; docs/gpu.md, "ONNX Runtime's CUDA provider".
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace.config.serving_plan import CUDA_RUNTIME
from headrace.core.errors import ConfigError
from headrace.core.ledger import Ledger
from headrace.core.tensor import Array, ResidentRows
from headrace.models.loader import FACTORIES
from headrace.runtimes.cuda.driver import current, loaded
from headrace.runtimes.cuda.memory import DeviceBuffer, pinned_empty, pinned_rows
from headrace.runtimes.isolated.backend import IsolatedBackend
from headrace.runtimes.onnxruntime_cuda import PROVIDER, OnnxRuntimeCudaBackend, provider_problem
from headrace.runtimes.overlapped import is_overlapped
from headrace.runtimes.tensorrt.backend import MAX_BATCH_SIZE
from headrace_engines.errors import BuildError
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support import shared_memory_cases as cases
from tests.support.cuda_provider import answers, features, launched, opened, saved
from tests.support.exported_memory import Owner, export
from tests.support.gpu_marks import every_gpu, gpu_marks
from tests.support.models import affine, integer_matrix, optional_bias, pictures, ramp, sum_difference
from tests.support.random_models import sample
from tests.support.serving import Server, serving
from tests.support.tensorrt_networks import convolutions
from tests.support.waiting import on_threads

pytestmark = [
    *gpu_marks(180, "fastapi", "uvicorn"),
    pytest.mark.skipif(PROVIDER not in ort.get_available_providers(), reason="needs onnxruntime-gpu"),
]

ROWS = 32


def same(actual: dict[str, Array], expected: dict[str, Array], tolerance: float = 1e-4) -> None:
    """Integers are equal; floats differ by the order of sums, and by TF32 where the tolerance allows that."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape)
        if array.dtype.kind == "f":
            largest = float(np.abs(array).max()) if array.size else 0.0
            np.testing.assert_allclose(actual[name], array, atol=tolerance * max(largest, 1.0))
        else:
            np.testing.assert_array_equal(actual[name], array)


def free_bytes() -> int:
    with current(0):
        return int(loaded().mem_get_info()[0])


def test_the_provider_runs_here() -> None:
    assert provider_problem() == ""


def test_the_answers_are_those_of_the_cpu(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    image = {"IMAGE": rng.random((5, 3, 224, 224), np.float32)}
    a_b = {"A": rng.integers(0, 9, (3, 4)).astype(np.int32), "B": rng.integers(0, 9, (3, 4)).astype(np.float32)}
    for model, inputs in ((affine(), features(7)), (pictures(), image), (sum_difference(), a_b)):
        path = saved(tmp_path, model)
        with opened(path, ROWS, use_tf32="0") as execution:
            for _ in range(3):
                same(execution.run(inputs), answers(path, inputs))
    path = saved(tmp_path, optional_bias())
    x = np.ones((2, 3), np.float32)
    with opened(path, ROWS) as execution:
        np.testing.assert_array_equal(execution.run({"X": x})["Y"], x + 100)
    # An input that a node on the CPU reads, and an output of any size.
    path = saved(tmp_path, ramp())
    with opened(path, 0) as execution:
        for count in (3, 1000, 5):
            counts = {"COUNT": np.array([count], np.int64)}
            same(execution.run(counts), answers(path, counts))


@pytest.mark.parametrize("first", [0, 10, 20])
def test_random_models_in_batches_of_any_size(tmp_path: Path, first: int) -> None:
    served = 0
    for seed in range(first, first + 10):
        chosen = sample(seed)
        # Another order of sums may round to another step, and may choose another one of boxes with equal scores.
        softmax = "row_softmax" in chosen.steps or "softmax" in chosen.steps
        if "quantise" in chosen.steps or (softmax and any(step.endswith("=boxes") for step in chosen.steps)):
            continue
        path = saved(tmp_path / str(seed), chosen.model)
        rng = np.random.default_rng(seed)
        with opened(path, ROWS, use_tf32="0") as execution:
            for rows in (1, 8, 3, 32, 2):
                inputs = {"X": rng.standard_normal((rows, chosen.width)).astype(np.float32)}
                try:
                    expected = answers(path, inputs)
                except Exception as error:
                    print(f"seed {seed} does not take {rows} rows: {error}")
                    continue
                same(execution.run(inputs), expected)
                served += 1
    assert served > 20


def test_batches_overlap_and_come_back_in_order(tmp_path: Path) -> None:
    path = saved(tmp_path, convolutions())
    rng = np.random.default_rng(1)
    with opened(path, ROWS, use_tf32="0") as execution:
        assert is_overlapped(execution)
        under_way: list[tuple[Any, dict[str, Array]]] = []
        for number in range(60):
            inputs = {"x": rng.standard_normal((1 + number % ROWS, 3, 16, 16)).astype(np.float32)}
            under_way.append((launched(execution, inputs, len(inputs["x"])), inputs))
            if len(under_way) == execution.depth or number == 59:
                while under_way:
                    batch, inputs = under_way.pop(0)
                    result, expected = execution.finish(batch), answers(path, inputs)
                    same({"logits": result["logits"]}, {"logits": expected["logits"]}, 1e-3)


def test_instances_run_beside_each_other(tmp_path: Path) -> None:
    path = saved(tmp_path, pictures(64, 64))
    with closing(OnnxRuntimeCudaBackend().load(path, 3, {MAX_BATCH_SIZE: str(ROWS), "use_tf32": "0"})) as model:

        def work(index: int) -> None:
            rng = np.random.default_rng(index)
            with closing(model.execution(index)) as execution:
                for number in range(60):
                    inputs = {"IMAGE": rng.random((1 + number % ROWS, 3, 64, 64), np.float32)}
                    same(execution.run(inputs), answers(path, inputs), 1e-3)

        on_threads(work, range(3))


def test_a_model_that_tensorrt_refuses(tmp_path: Path) -> None:
    path = saved(tmp_path, integer_matrix())
    shapes = ShapeRange({"X": ((1, 16), (8, 16), (ROWS, 16))})
    with pytest.raises((BuildError, ConfigError), match="MatMulInteger"):
        TensorRtTarget(optimization_level=1).build(
            integer_matrix(), TargetSpec("fp32", (shapes,)), tmp_path / "model.plan", silent
        )
    with opened(path, ROWS) as execution:
        for rows in (1, 5, ROWS):
            x = np.random.default_rng(rows).integers(-100, 100, (rows, 16)).astype(np.int8)
            same(execution.run({"X": x}), answers(path, {"X": x}))


def test_rows_on_the_gpu_and_in_pinned_memory(tmp_path: Path) -> None:
    path = saved(tmp_path, affine())
    inputs = features(8)
    x = inputs["X"]
    expected = answers(path, inputs)
    pinned = pinned_empty((8, 16), np.float32)
    pinned[:] = x
    with opened(path, ROWS, use_tf32="0") as execution:
        assert execution.begin(inputs, 8).device == 0, "the kernel is not available: see the log"
        execution._free.extend(slot for slot in execution._slots if slot not in execution._free)
        with current(0):
            memory = DeviceBuffer(4096)
            loaded().memcpy_htod(memory.address, x)
            loaded().memcpy_htod(memory.address + 2048 + 4, x)

        def on_gpu(start: int, count: int, row: int = 0) -> ResidentRows:
            address = memory.address + start + row * 64
            return ResidentRows(address, 0, x.dtype, (count, 16), memory, _no_copy)

        batches: list[list[tuple[str, int, ResidentRows]]] = [
            [("X", 0, on_gpu(0, 8))],  # bound where it lies
            [("X", 0, on_gpu(2048 + 4, 8))],  # not aligned: gathered
            [("X", 0, pinned_rows(pinned))],
            [("X", 5, on_gpu(0, 3, 5)), ("X", 0, pinned_rows(pinned)[0:2])],
        ]
        for residents in batches:
            batch = execution.begin(inputs, 8)
            batch.inputs["X"][:] = np.nan
            covered = {row for _, first, rows in residents for row in range(first, first + len(rows))}
            for row in set(range(8)) - covered:
                batch.inputs["X"][row] = x[row]
            batch.resident_inputs.extend(residents)
            execution.launch(batch)
            same(execution.finish(batch), expected)
        with current(0):
            memory.free()


def _no_copy(address: int, size_bytes: int) -> Array:
    raise AssertionError("nothing is copied by the host")


@pytest.mark.whole_gpu
def test_memory_is_returned_and_booked(tmp_path: Path) -> None:
    path = saved(tmp_path, pictures())
    ledger = Ledger()
    account = ledger.account("m", "1")
    free = []
    for cycle in range(6):  # the first ones load the libraries' kernels, which stay
        before = free_bytes()
        with (
            closing(OnnxRuntimeCudaBackend().load(path, 1, {MAX_BATCH_SIZE: str(ROWS)}, account)) as model,
            closing(model.execution(0)) as execution,
        ):
            for _ in range(3):
                execution.run({"IMAGE": np.ones((ROWS, 3, 224, 224), np.float32)})
            taken, booked = before - free_bytes(), ledger.reserved_bytes(0)
        free.append(free_bytes())
        print(f"taken {taken / 1e6:.1f} MB, booked {booked / 1e6:.1f} MB, then free {free[-1] / 1e6:.1f} MB")
        assert booked >= 3 * ROWS * 3 * 224 * 224 * 4
        assert cycle < 2 or booked >= 0.7 * taken
        assert ledger.reserved_bytes(0) == 0
    assert free[2] - free[-1] < 16 << 20, "memory was not returned"


def test_a_process_of_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path, affine())
    inputs = features(5)
    backend = IsolatedBackend("m", FACTORIES[CUDA_RUNTIME], 60.0)
    with closing(backend.load(path, 1, {MAX_BATCH_SIZE: str(ROWS), "use_tf32": "0"})) as model:
        execution = model.execution(0)
        same(execution.run(inputs), answers(path, inputs))
        execution.close()


def test_a_failed_build_names_the_provider_that_serves_instead(tmp_path: Path) -> None:
    version = tmp_path / "repository" / "n" / "1"
    version.mkdir(parents=True)
    onnx.save(integer_matrix(), version / "model.onnx")
    (version.parent / "config.yaml").write_text(REFUSED_CONFIG)
    words = ["build", "n", "--model-repository", str(tmp_path / "repository"), "--cache", str(tmp_path / "cache")]
    command = [sys.executable, "-m", "headrace_engines", *words]
    environment = {**os.environ, "COLUMNS": "400", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, text=True, capture_output=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "MatMulInteger" in done.stdout + done.stderr
    assert "served without it: model.onnx, ONNX Runtime's CUDA provider" in done.stdout + done.stderr


PROVIDER_CONFIG = cases.CONFIG.replace(
    "backend: tensorrt\n",
    "instance_group: [{kind: gpu}]\n"
    "optimization: {execution_accelerators: {gpu_execution_accelerator: [{name: cuda}]}}\n",
)
REFUSED_CONFIG = "max_batch_size: 32\ninstance_group: [{kind: gpu}]\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("provider")
    repository = folder / "repository"
    for name, model, config in (("m", convolutions(), PROVIDER_CONFIG), ("n", integer_matrix(), REFUSED_CONFIG)):
        version = repository / name / "1"
        version.mkdir(parents=True)
        onnx.save(model, version / "model.onnx")
        (version.parent / "config.yaml").write_text(config)
    with serving(repository, folder, *cases.OPTIONS) as started:
        yield started
        assert "Traceback" not in started.text, started.text


def document(server: Server, path: str) -> dict[str, Any]:
    status, _, body = server.request("GET", f"/v2/models/{path}")
    assert status == 200, body
    result: dict[str, Any] = json.loads(body)
    return result


@pytest.fixture(scope="module")
def right() -> tuple[Array, Array]:
    return cases.inputs_and_answers()


def test_a_server_serves_what_tensorrt_refuses_and_explains_why(server: Server) -> None:
    parameters = document(server, "n")["parameters"]
    assert (parameters["headrace.runtime"], parameters["headrace.device"]) == (CUDA_RUNTIME, every_gpu()), server.text
    x = np.random.default_rng(0).integers(-100, 100, (3, 16)).astype(np.int8)
    weights = onnx.numpy_helper.to_array(integer_matrix().graph.initializer[0]).astype(np.int32)
    request = {"inputs": [{"name": "X", "shape": [3, 16], "datatype": "INT8", "data": x.reshape(-1).tolist()}]}
    status, _, body = server.request("POST", "/v2/models/n/infer", json.dumps(request).encode())
    assert status == 200, body
    actual = np.array(json.loads(body)["outputs"][0]["data"]).reshape(3, 8)
    np.testing.assert_array_equal(actual, x.astype(np.int32) @ weights)
    deadline = time.monotonic() + 120
    while "building its engine failed" not in str(parameters.get("headrace.not_on_tensorrt")):
        assert time.monotonic() < deadline, parameters
        time.sleep(0.05)
        parameters = document(server, "n")["parameters"]
    assert "MatMulInteger" in parameters["headrace.not_on_tensorrt"]
    findings = document(server, "n/explain")["findings"]
    assert [one["explanation"] for one in findings if one["kind"] == "not_on_tensorrt"], findings


@pytest.mark.parametrize("case", cases.CASES)
def test_inputs_in_shared_memory(server: Server, right: tuple[Array, Array], case: str) -> None:
    cases.CASES[case](server, right, export)


def test_outputs_in_a_cuda_region(server: Server, right: tuple[Array, Array]) -> None:
    x, y = right
    rows = 5
    content = x[:rows].tobytes()
    with closing(Owner(content)) as owner:
        raw_handle = {"b64": base64.b64encode(owner.handle).decode()}
        cases.call(
            server,
            "cudasharedmemory/region/both/register",
            {"raw_handle": raw_handle, "device_id": 0, "byte_size": len(content)},
        )
        try:
            request = cases.question("both", rows, 0)
            place = {"shared_memory_region": "both", "shared_memory_byte_size": rows * 40}
            request["outputs"] = [{"name": "logits", "parameters": place}]
            status, body = cases.sent(server, request)
            assert status == 200, body
            logits = np.frombuffer(owner.content(), np.float32)[: rows * 10].reshape(rows, 10)
            cases.same(logits, y[:rows])
        finally:
            cases.call(server, "cudasharedmemory/region/both/unregister")
