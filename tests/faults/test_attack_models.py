"""Attacks by models and configurations: instances, pipes, memory, shapes (S6, S10, S17, S23, S25 in docs/security.md)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from headrace.models.warmup import MAX_RANDOM_BYTES
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2

from loadtest.onnx_models import onnx_model
from tests.support.attacks import Attacked, attack, http_body, watched, x_json
from tests.support.models import add_model, affine, row_sums
from tests.support.processes import isolated_children
from tests.support.serving import Server, serving
from tests.support.waiting import until

pb: Any = service_pb2
INT64, FP32 = TensorProto.INT64, TensorProto.FLOAT
LOAD = "/v2/repository/models/{}/load"
ZEROS = {"data_type": "TYPE_FP32", "dims": [16], "zero_data": True}


def zeros() -> onnx.ModelProto:
    """Y FP32: as many zeros as SIZE INT64 (1) says."""
    return onnx_model(
        [helper.make_node("ConstantOfShape", ["SIZE"], ["Y"])], {"SIZE": (INT64, (1,))}, {"Y": (FP32, ("n",))}
    )


def repeated() -> onnx.ModelProto:
    """Y FP32 (rows, 2^20): each element of X FP32 (rows, 1), repeated."""
    shape = {"shape": np.array([1, 1 << 20])}
    node = helper.make_node("Expand", ["X", "shape"], ["Y"])
    return onnx_model([node], {"X": (FP32, ("N", 1))}, {"Y": (FP32, ("N", 1 << 20))}, shape)


def zeros_over_http(server: Attacked, size: int) -> tuple[int, str]:
    data = {"name": "SIZE", "datatype": "INT64", "shape": [1], "data": [size]}
    outputs = [{"name": "Y", "parameters": {"binary_data": True}}]
    path = "/v2/models/zeros/infer"
    status, _, content = server.server.request("POST", path, http_body(data, outputs=outputs))
    return status, "" if status == 200 else json.loads(content)["error"]


def zeros_over_grpc(server: Attacked, size: int) -> tuple[str, str]:
    request = pb.ModelInferRequest(model_name="zeros")
    request.inputs.add(name="SIZE", datatype="INT64", shape=[1])
    request.raw_input_contents.append(struct.pack("<q", size))
    return server.call(request)


# --- Instances ---------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_instances(attacked: Attacked) -> None:
    add_model(attacked.repository, "many", affine(), config="instance_group [ { count: 100000 } ]")
    with watched(attacked, "S10 instance_group of 100,000") as watch:
        status, error = attacked.post(LOAD.format("many"), b"")
        assert (status, "100000 instances, at most 256" in error) == (400, True), error
        several = {"max_batch_size": 64, "instance_group": [{"count": 200}, {"count": 200}]}
        status, error = attacked.post(
            LOAD.format("affine"), json.dumps({"parameters": {"config": json.dumps(several)}}).encode()
        )
        assert (status, "400 instances, at most 256" in error) == (400, True), error
    watch.check()
    attacked.still_serves()


def test_more_instances_than_the_system_has_threads(tmp_path: Path) -> None:
    """Threads cannot be started, since their stacks do not fit into the address space that is left."""
    with attack(tmp_path) as server:
        add_model(server.repository, "many", affine(), config="instance_group [ { count: 256 } ]")
        pid = server.server.process.pid
        with watched(server, "S10 no threads") as watch:
            address_space = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            limit = address_space + (256 << 20)
            resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            status, error = server.post(LOAD.format("many"), b"")
            resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert (status, "no more threads" in error) == (400, True), error
        watch.check()
        server.still_serves()
        assert server.post(LOAD.format("affine"), b"")[0] == 200
        assert server.post(LOAD.format("many"), b"")[0] == 200


MAX = 2**31 - 1
# The largest number that a field may have, where it decides on threads, memory or work.
NUMBERS: dict[str, tuple[int, dict[str, Any]]] = {
    "rows of a batch": (200, {"max_batch_size": MAX}),
    "requests in the queue": (200, {"dynamic_batching": {"default_queue_policy": {"max_queue_size": MAX}}}),
    "preferred rows": (400, {"max_batch_size": 8, "dynamic_batching": {"preferred_batch_size": [MAX]}}),
    "priorities": (400, {"dynamic_batching": {"priority_levels": MAX, "default_priority_level": 1}}),
    "priorities at their bound": (200, {"dynamic_batching": {"priority_levels": 1024, "default_priority_level": 1024}}),
    "instances": (400, {"instance_group": [{"count": MAX}]}),
    "GPU": (200, {"instance_group": [{"kind": "KIND_GPU", "gpus": [MAX]}]}),
    "versions": (200, {"version_policy": {"latest": {"num_versions": MAX}}}),
    "rows of the warm-up": (400, {"model_warmup": [{"name": "w", "batch_size": MAX, "inputs": {"X": ZEROS}}]}),
    "warm-ups": (400, {"model_warmup": [{"name": "w", "batch_size": 1, "count": MAX, "inputs": {"X": ZEROS}}]}),
    "sequences": (200, {"sequence_batching": {"oldest": {"max_candidate_sequences": MAX}}}),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_large_number_in_a_configuration_takes_no_memory(attacked: Attacked, number: str) -> None:
    expected, config = NUMBERS[number]
    add_model(attacked.repository, "large", affine())
    body = json.dumps({"parameters": {"config": json.dumps({"name": "large", **config})}}).encode()
    # Large batches are measured within 1 GiB; a place for each number would take 16 GiB.
    with attacked.flat_memory(1 << 30):
        status, error = attacked.post(LOAD.format("large"), body)
        assert status == expected, error
    attacked.still_serves()


LONG, LARGEST, DAY_S = 2**63 - 1, 2**31 - 1, 86400
DELAYED = "max_batch_size: 8\ndynamic_batching: "
SEQUENCES = f"max_batch_size: 8\nsequence_batching:\n  max_sequence_idle_microseconds: {LONG}\n  "
TRAFFIC_RULES = f"max_p99_ms: 3600000, min_requests: {LARGEST}, window_s: {DAY_S}"
# The largest and smallest values of fields that only config.yaml has, and of times; what a load answers.
YAML_NUMBERS: dict[str, tuple[int, str]] = {
    "labels": (200, f"labels: {{a: {LONG}}}"),
    "aging": (
        200,
        f"priority_aging_microseconds: {LONG}\ndynamic_batching: {{priority_levels: 9, default_priority_level: 1}}",
    ),
    "queue wait": (200, f"max_queue_wait_microseconds: {LONG}"),
    "queue delay": (200, f"{DELAYED}{{max_queue_delay_microseconds: {LONG}, preferred_batch_size: [1]}}"),
    "queue timeout": (200, f"{DELAYED}{{default_queue_policy: {{default_timeout_microseconds: {LONG}}}}}"),
    "rows on the CPU": (200, f"max_batch_size: {LARGEST}\ncpu_max_batch_size: {LARGEST}"),
    "GPU memory": (200, f"gpu_memory_budget: {LONG}"),
    "too much GPU memory": (400, f"gpu_memory_budget: {2**63}"),
    "isolation timeout": (200, f"isolation: process\nisolation_timeout_s: {DAY_S}\nexecution_timeout_s: {DAY_S}"),
    "isolation memory": (200, f"isolation: process\nisolation_memory_limit: {LONG}"),
    "execution timeout": (200, f"execution_timeout_s: {DAY_S}"),
    "open requests": (200, "max_open_requests: 65536"),
    "samples": (200, f"optimization: {{accuracy: {{samples: {LARGEST}}}, calibration: {{samples: {LARGEST}}}}}"),
    "workspace": (200, f"optimization: {{workspace_mb: {LARGEST}}}"),
    "age in the cache": (200, "response_cache: {enable: true}\ncache: {ttl_s: 1000000000}"),
    "no time in the cache": (400, "response_cache: {enable: true}\ncache: {ttl_s: 1.0e-300}"),
    "longer in the cache": (400, "response_cache: {enable: true}\ncache: {ttl_s: 1.0e+308}"),
    "bytes of the cache": (200, f"response_cache: {{enable: true}}\ncache: {{max_bytes: {LONG}}}"),
    "objective": (200, "slo: {p99_ms: 1000000000}"),
    "a late objective": (400, "slo: {p99_ms: 1.0e+308}"),
    "no objective": (400, "slo: {p99_ms: .inf}"),
    "rate": (200, f"rate_limits: {{default: {{requests_per_s: 1000000000.0, burst: {LARGEST}}}}}"),
    "low rate": (400, f"rate_limits: {{default: {{requests_per_s: 1.0e-300, burst: {LARGEST}}}}}"),
    "weights": (200, "max_batch_size: 8\nfair_sharing: {default_weight: 1000.0, weights: {a: 0.001}}"),
    "classes": (400, f"postprocess: {{top_k: {LARGEST}}}"),
    "size of images": (200, f"preprocess: {{resize_short_side: {LARGEST}, crop: [{LARGEST}, {LARGEST}]}}"),
    "pixels for the server": (
        400,
        f"preprocess: {{by: server, resize_short_side: {LARGEST}, crop: [1000, {LARGEST}]}}",
    ),
    "traffic": (200, f"traffic: {{stable: {LONG}, shadow: {{version: {LONG - 1}}}}}"),
    "traffic rules": (200, f'traffic: {{versions: {{1: "50%", {LONG}: "50%"}}, rules: {{{TRAFFIC_RULES}}}}}'),
    "versions": (200, f"version_policy: {{specific: {{versions: [1, {LONG}]}}}}"),
    "padding": (400, f"{DELAYED}{{}}\npad: {{X: 0, multiple_of: {LARGEST}}}"),
    "dimensions": (400, f"max_batch_size: 8\ninput: [{{name: X, data_type: TYPE_FP32, dims: [{LONG}]}}]"),
    "delay of sequences": (200, f"{SEQUENCES}direct: {{max_queue_delay_microseconds: {LONG}}}"),
    "candidates": (
        200,
        f"{SEQUENCES}oldest: {{max_candidate_sequences: {LARGEST}, max_queue_delay_microseconds: {LONG}}}",
    ),
}


@pytest.mark.parametrize("number", YAML_NUMBERS)
def test_a_large_number_in_a_yaml_file_takes_no_memory(attacked: Attacked, number: str) -> None:
    expected, config = YAML_NUMBERS[number]
    folder = add_model(attacked.repository, "large", affine(), files={"config.yaml": f"{config}\n"})
    start_s = time.monotonic()
    # A quick machine measures batches of up to so many bytes within the time for it.
    measured_bytes = 2 * MAX_RANDOM_BYTES if "cpu_max_batch_size" in config else 256 << 20
    try:
        with attacked.flat_memory(measured_bytes):
            status, error = attacked.post(LOAD.format("large"), b"")
            assert status == expected, error
            assert "could not be loaded" not in error
            if status == 200:
                status, error = attacked.infer(http_body(), model="large")
                assert status == 200 or "correlation ID" in error, error
    finally:
        attacked.post("/v2/repository/models/large/unload", b"")
        shutil.rmtree(folder)
    assert time.monotonic() - start_s < 60  # a process of its own takes 4 s to load
    attacked.still_serves()


def test_lengths_that_are_padded_to_a_large_multiple_take_no_memory(attacked: Attacked) -> None:
    config = f"{DELAYED}{{max_queue_delay_microseconds: 300000}}\npad: {{X: 0, multiple_of: {LARGEST}}}\n"
    add_model(attacked.repository, "padded", row_sums(), files={"config.yaml": config})
    with attacked.flat_memory(256 << 20), ThreadPoolExecutor(8) as pool:
        assert attacked.post(LOAD.format("padded"), b"")[0] == 200
        bodies = [http_body(x_json(shape=[1, width], data=[1.0] * width)) for width in range(1, 9)]
        assert set(pool.map(partial(attacked.infer, model="padded"), bodies)) == {(200, "")}
    attacked.still_serves()


# --- Pipes -------------------------------------------------------------------------------------------------------------


# Names of models by the file that is a pipe.
PIPES = {
    "config.yaml": "yaml",
    "config.pbtxt": "pbtxt",
    "labels.txt": "labels",
    "1/model.onnx": "onnx",
    "warmup/X": "warmup",
}


@pytest.fixture(scope="module")
def piped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a model for each file that may be a pipe; none delays its end."""
    repository = tmp_path_factory.mktemp("pipes") / "models"
    add_model(repository, "affine", affine())
    config = (
        'model_warmup { name: "w" inputs { key: "X" value { data_type: TYPE_FP32 dims: 16 input_data_file: "X" } } }\n'
        'output { name: "Y" data_type: TYPE_FP32 dims: 4 label_filename: "labels.txt" }\n'
    )
    for file, name in PIPES.items():
        folder = add_model(repository, name, affine(), config="" if file.startswith("config") else config)
        (folder / "warmup").mkdir()
        (folder / "warmup" / "X").write_bytes(bytes(64))
        (folder / "labels.txt").write_text("a\nb\nc\nd\n")
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)
    with serving(repository, repository.parent) as server:
        yield server


@pytest.mark.parametrize("file", PIPES)
def test_a_pipe_in_the_repository(piped: Server, file: str) -> None:
    assert piped.request("POST", "/v2/models/affine/infer", http_body())[0] == 200
    status, _, body = piped.request("POST", "/v2/repository/index", b"{}")
    (row,) = [row for row in json.loads(body) if row["name"] == PIPES[file]]
    assert (status, row["state"]) == (200, "UNAVAILABLE"), row


def test_a_pipe_does_not_hold_up_a_reload(attacked: Attacked) -> None:
    folder = add_model(attacked.repository, "piped", affine())
    with watched(attacked, "S17 FIFO as config.yaml") as watch:
        assert attacked.post(LOAD.format("piped"), b"") == (200, "")
        os.mkfifo(folder / "config.yaml")
        status, error = attacked.post(LOAD.format("piped"), b"")
        assert (status, "not a regular file" in error) == (400, True), error
        (folder / "config.yaml").unlink()
        assert attacked.post(LOAD.format("piped"), b"") == (200, "")
        assert attacked.post("/v2/repository/models/piped/unload", b"") == (200, "")
    watch.check()
    attacked.still_serves()


# --- Links -------------------------------------------------------------------------------------------------------------


def test_links_to_themselves(tmp_path: Path) -> None:
    """In the repository, as a version, and as external weights: each is refused by its name, all else serves and is watched."""
    repository = tmp_path / "models"
    add_model(repository, "affine", affine())
    (repository / "loop").symlink_to("loop")
    (repository / "long").symlink_to("x" * 300)
    folder = add_model(repository, "versions", affine())
    (folder / "2").symlink_to("2")
    weights = add_model(repository, "weights", affine()) / "1"
    model = onnx.load(weights / "model.onnx")
    onnx.save(model, weights / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    (weights / "data").unlink()
    (weights / "data").symlink_to("data")
    options = ("--model-control", "poll", "--poll-interval-s", "0.05")
    with serving(repository, tmp_path, *options) as server:
        for name in ("affine", "versions"):
            assert server.request("POST", f"/v2/models/{name}/infer", http_body())[0] == 200
        assert f"{repository / 'loop'} is skipped: it cannot be read: Too many levels of symbolic links" in server.text
        assert f"{repository / 'long'} is skipped: it cannot be read: File name too long" in server.text
        assert 'stored in "data", which does not exist' in server.text
        add_model(repository, "later", affine())
        until(lambda: server.request("POST", "/v2/models/later/infer", http_body())[0] == 200)
        assert "Traceback" not in server.text


# --- Shapes ------------------------------------------------------------------------------------------------------------


def test_a_model_that_returns_another_shape_than_it_declares(attacked: Attacked) -> None:
    node = helper.make_node("Compress", ["X", "mask"], ["Y"], axis=1)
    mask = {"mask": np.array([True, False])}
    narrow = onnx_model([node], {"X": (FP32, ("N", 2))}, {"Y": (FP32, ("N", 2))}, mask)
    add_model(attacked.repository, "narrow", narrow)
    assert attacked.post(LOAD.format("narrow"), b"") == (200, "")
    with watched(attacked, "S23 wrong shape") as watch:
        data = {"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [0, 1]}
        for _ in range(20):
            status, error = attacked.infer(http_body(data), "narrow")
            assert (status, "with the shape [1, 1]" in error) == (500, True), error
        request = pb.ModelInferRequest(model_name="narrow")
        request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
        request.raw_input_contents.append(bytes(8))
        code, error = attacked.call(request)
        assert (code, "The model is at fault" in error) == ("INTERNAL", True), error
    watch.check()
    attacked.still_serves()


# --- Memory ------------------------------------------------------------------------------------------------------------


def test_an_isolated_model_that_allocates_sixteen_gigabytes(tmp_path: Path) -> None:
    config = "isolation: process\nisolation_memory_limit: 640MiB\n"
    add_model(tmp_path / "models", "zeros", zeros(), files={"config.yaml": config})
    with attack(tmp_path) as server:
        (child,) = isolated_children(server.server.process.pid)
        with watched(server, "S25 isolated model of 16 GB") as watch:
            for size in (4 << 30, 1 << 28):
                status, error = zeros_over_http(server, size)
                assert (status, "isolation_memory_limit" in error) == (500, True), error
                code, error = zeros_over_grpc(server, size)
                assert (code, "isolation_memory_limit" in error) == ("INTERNAL", True), error
            assert zeros_over_http(server, 1000) == (200, "")
        watch.check()
        assert isolated_children(server.server.process.pid) == [child], "the process did not have to die"
        server.still_serves()


def test_memory_of_large_batches_is_returned(tmp_path: Path) -> None:
    add_model(tmp_path / "models", "repeated", repeated(), config="max_batch_size: 64")
    with attack(tmp_path) as server:
        until(
            lambda: server.memory_bytes() < 250 << 20
        )  # that of the batches that were measured at the load is returned
        with watched(server, "S6 memory of ONNX Runtime") as watch:
            rows = {"name": "X", "datatype": "FP32", "shape": [64, 1], "data": list(range(64))}
            body = http_body(rows, outputs=[{"name": "Y", "parameters": {"binary_data": True}}])
            for _ in range(2):
                status, _, answer = server.server.request("POST", "/v2/models/repeated/infer", body)
                assert (status, len(answer) > 256 << 20) == (200, True)
            assert struct.unpack("<f", answer[-4:]) == (63.0,)
        watch.check()
        server.still_serves()
