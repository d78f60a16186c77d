"""A model of 1 GB of weights, and 100 pipelines in one repository: start, reload, unload, and the memory that comes back."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests.support import models
from tests.support.models import add_model, add_pipeline, ensemble_config
from tests.support.processes import processor_s
from tests.support.serving import Server, serving
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

WIDTH, LAYERS = 4096, 16
WEIGHTS_BYTES = LAYERS * WIDTH * WIDTH * 4
ROTATION = LAYERS * (LAYERS + 1) // 2
MIB = 1 << 20


def write_weights(file: Path) -> None:
    """Write `LAYERS` matrices that rotate a row by 1, 2, ...; 1 GiB in pieces of 64 MiB.

    They differ, since ONNX Runtime keeps one copy of equal weights.
    """
    with file.open("wb") as stream:
        for layer in range(LAYERS):
            stream.write(np.roll(np.eye(WIDTH, dtype=np.float32), layer + 1, axis=1).data)


def large_model(factor: float) -> onnx.ModelProto:
    """Y = factor * X, rotated by `ROTATION`: FP32 (rows, WIDTH), with the matrices of `write_weights` in weights.bin."""
    size, nodes, weights = WIDTH * WIDTH * 4, [], []
    for layer in range(LAYERS):
        weight = TensorProto(name=f"W{layer}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
        weight.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights.bin", "offset": layer * size, "length": size}.items():
            weight.external_data.add(key=key, value=str(value))
        weights.append(weight)
        nodes.append(helper.make_node("MatMul", [f"X{layer}" if layer else "X", weight.name], [f"X{layer + 1}"]))
    nodes.append(helper.make_node("Mul", [f"X{LAYERS}", "factor"], ["Y"]))
    weights.append(helper.make_tensor("factor", TensorProto.FLOAT, [], [factor]))
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", WIDTH]) for name in ("X", "Y")]
    graph = helper.make_graph(nodes, "large", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


def memory_mib(server: Server, name: str = "VmRSS") -> int:
    """Return a value of the server's memory in MiB."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) // 1024


def post(server: Server, path: str, **document: object) -> dict[str, object]:
    status, _, body = server.request("POST", path, json.dumps(document).encode(), timeout_s=120)
    assert status == 200, body
    result: dict[str, object] = json.loads(body or b"{}")
    return result


def infer(server: Server, model: str, name: str, values: np.ndarray) -> np.ndarray:
    tensor = {"name": name, "datatype": "FP32", "shape": values.shape, "data": values.ravel().tolist()}
    outputs = post(server, f"/v2/models/{model}/infer", inputs=[tensor])["outputs"]
    assert isinstance(outputs, list)
    return np.array(outputs[0]["data"], np.float32).reshape(outputs[0]["shape"])


def test_a_model_of_one_gigabyte_is_loaded_reloaded_and_unloaded(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    version = repository / "large" / "1"
    version.mkdir(parents=True)
    write_weights(version / "weights.bin")
    try:
        check_large_model(repository, tmp_path)
    finally:  # pytest keeps the folders of several runs
        (version / "weights.bin").unlink()


def check_large_model(repository: Path, folder: Path) -> None:
    file = repository / "large" / "1" / "model.onnx"
    (repository / "large" / "config.pbtxt").write_text("max_batch_size: 4 dynamic_batching {}")
    onnx.save(large_model(2), file)
    row = np.arange(WIDTH, dtype=np.float32)[None]
    rotated = np.roll(row, ROTATION, axis=1)
    with serving(repository, folder, "--model-control", "explicit", "--profile-s", "0") as server:
        empty_mib = memory_mib(server)
        post(server, "/v2/repository/models/large/load")
        np.testing.assert_array_equal(infer(server, "large", "X", row), 2 * rotated)
        loaded_mib = memory_mib(server)
        assert loaded_mib - empty_mib > 0.9 * WEIGHTS_BYTES / MIB
        onnx.save(large_model(3), file)
        with ThreadPoolExecutor(1) as pool:
            reload = pool.submit(post, server, "/v2/repository/models/large/load")
            answers = []
            while not reload.done():  # the old version serves until the new one does
                answers.append(infer(server, "large", "X", row)[0])
            reload.result()
        assert all(any(np.array_equal(answer, factor * rotated[0]) for factor in (2, 3)) for answer in answers)
        np.testing.assert_array_equal(infer(server, "large", "X", row), 3 * rotated)
        assert memory_mib(server, "VmHWM") < empty_mib + 3.5 * WEIGHTS_BYTES / MIB, (
            "two versions, and what loading takes"
        )
        wait_for_memory(server, loaded_mib + 256)
        post(server, "/v2/repository/models/large/unload")
        wait_for_memory(server, empty_mib + 256)
        status, _, _ = server.request("GET", "/v2/models/large/ready")
        assert status != 200


def wait_for_memory(server: Server, limit_mib: int) -> None:
    """Wait until the server's memory is below a limit: a version is closed once its requests have ended."""
    until(lambda: memory_mib(server) <= limit_mib, 30)


PIPELINES, MEMBERS, FEATURES = 100, 10, 16


def member(number: int) -> str:
    return f"member{number % MEMBERS}"


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pipelines of two steps, each over two of ten models."""
    repository = tmp_path_factory.mktemp("pipelines") / "repository"
    for number in range(MEMBERS):
        add_model(repository, member(number), models.affine(FEATURES, FEATURES, number), config="max_batch_size: 8")
    for number in range(PIPELINES):
        steps = [(member(number), {"X": "x"}, {"Y": "middle"}), (member(number + 1), {"X": "middle"}, {"Y": "y"})]
        tensors = {"x": ("TYPE_FP32", (FEATURES,))}, {"y": ("TYPE_FP32", (FEATURES,))}
        add_pipeline(repository, f"pipeline{number}", ensemble_config(steps, *tensors))
    return repository


@pytest.fixture(scope="module")
def server(pipelines: Path) -> Iterator[Server]:
    options = "--model-control", "explicit", "--load-model", "*", "--profile-s", "0.05"
    with serving(pipelines, pipelines.parent, *options) as running:
        yield running


def reference(number: int, x: np.ndarray) -> np.ndarray:
    for offset in (0, 1):
        random = np.random.default_rng((number + offset) % MEMBERS)
        weights = random.standard_normal((FEATURES, FEATURES)).astype(np.float32)
        x = np.maximum(x @ weights + random.standard_normal(FEATURES).astype(np.float32), 0)
    return x


@pytest.mark.timing
def test_the_time_to_start_is_bounded_by_the_work(pipelines: Path, tmp_path: Path) -> None:
    """A pipeline loads nothing of its own, so 100 of them cost little beside their ten models."""

    def start_s(*patterns: str) -> tuple[float, float]:
        loads = [word for pattern in patterns for word in ("--load-model", pattern)]
        begun_s = time.monotonic()
        with serving(pipelines, tmp_path, "--model-control", "explicit", *loads, "--profile-s", "0") as running:
            took_s = time.monotonic() - begun_s
            stat = Path(f"/proc/{running.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return took_s, (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    _, models_cpu_s = start_s(*[member(number) for number in range(MEMBERS)])
    all_s, all_cpu_s = start_s("*")
    assert all_s < 60
    assert all_cpu_s < models_cpu_s + 0.05 * PIPELINES, (
        f"{all_cpu_s:.2f} s of CPU time, {models_cpu_s:.2f} s without them"
    )


def test_every_pipeline_is_listed_ready_and_answers(server: Server) -> None:
    index = post(server, "/v2/repository/index")
    assert len(index) == PIPELINES + MEMBERS
    assert {row["state"] for row in index} == {"READY"}  # type: ignore[index]
    x = np.random.default_rng(7).standard_normal((2, FEATURES)).astype(np.float32)

    def check(number: int) -> None:
        assert server.request("GET", f"/v2/models/pipeline{number}/ready")[0] == 200
        np.testing.assert_allclose(
            infer(server, f"pipeline{number}", "x", x), reference(number, x), rtol=1e-4, atol=1e-4
        )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(PIPELINES)))


def test_one_pipeline_is_reloaded_alone(server: Server, pipelines: Path) -> None:
    config = pipelines / "pipeline5" / "config.pbtxt"
    text = config.read_text()
    loads = server.text.count("loaded")
    config.write_text(text.replace('"member6"', '"member9"'))
    begun_s = processor_s(server.process.pid)
    post(server, "/v2/repository/models/pipeline5/load")
    took_s = processor_s(server.process.pid) - begun_s
    x = np.random.default_rng(8).standard_normal((1, FEATURES)).astype(np.float32)
    middle = infer(server, "member5", "X", x)
    np.testing.assert_allclose(
        infer(server, "pipeline5", "x", x), infer(server, "member9", "X", middle), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(infer(server, "pipeline4", "x", x), reference(4, x), rtol=1e-4, atol=1e-4)
    assert took_s < 5
    assert server.text.count("loaded") - loads <= 3, "the other models and pipelines stay as they are"


def test_pipelines_without_a_member_are_not_ready(server: Server) -> None:
    """Runs last: a member of 20 pipelines is unloaded, then loaded again."""
    post(server, "/v2/repository/models/member0/unload")
    x = np.zeros((1, FEATURES), np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    states = {}
    for number in range(PIPELINES):
        status, _, answer = server.request("POST", f"/v2/models/pipeline{number}/infer", body)
        states[number] = status
        assert status == 200 or b"member0" in answer, answer
    without = {number for number in range(PIPELINES) if number % MEMBERS in (0, MEMBERS - 1)}
    assert {number for number, status in states.items() if status != 200} == without
    post(server, "/v2/repository/models/member0/load")
    for number in sorted(without):
        np.testing.assert_allclose(infer(server, f"pipeline{number}", "x", x), reference(number, x), rtol=1e-4)
