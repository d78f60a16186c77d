"""Pipelines of models on GPUs, whose tensors stay there between the steps: the same cases for real GPUs and for fakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from headrace.core.tensor import Array
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from tests.support.models import add_pipeline, affine, ensemble_config
from tests.support.serving import Server
from tests.support.shared_memory_cases import Export, cuda_region

OPTIONS = ("--allow-client-shm", "--model-control", "explicit", "--load-model", "*")
ROWS = 8
WIDTH = 16
CONFIG = f"""
backend: tensorrt
max_batch_size: {ROWS}
dynamic_batching: {{}}
input:
- {{name: X, data_type: TYPE_FP32, dims: [{WIDTH}]}}
output:
- {{name: Y, data_type: TYPE_FP32, dims: [{WIDTH}]}}
"""
TENSOR = ("TYPE_FP32", [WIDTH])


# Tensors of `first` on GPU 0 are all read on another GPU, those on GPU 1 are not copied, and batches may have both.
TWO_GPUS = ((0, 1), (1,))


def make_repository(folder: Path, gpus: Sequence[Sequence[int]] = ((0,), (0,))) -> Path:
    """A repository with two models that have only plans, `first` and `second`, and the pipelines `chain` and `both`.

    `chain` returns what `second` makes of the output of `first`; `both` returns that output as well.

    Args:
        folder: parent of the repository.
        gpus: GPU numbers of `first` and of `second`.
    """
    repository = folder / "repository"
    for seed, (name, numbers) in enumerate(zip(("first", "second"), gpus, strict=True)):
        version = repository / name / "1"
        version.mkdir(parents=True)
        shapes = ShapeRange({"X": ((1, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH))})
        model = affine(features=WIDTH, classes=WIDTH, seed=seed)
        TensorRtTarget(optimization_level=1).build(model, TargetSpec("fp32", (shapes,)), version / "model.plan", silent)
        group = f"instance_group: [{{kind: gpu, count: 2, gpus: {list(numbers)}}}]\n"
        (version.parent / "config.yaml").write_text(CONFIG + group)
    steps = [("first", {"X": "in"}, {"Y": "between"}), ("second", {"X": "between"}, {"Y": "out"})]
    for name, outputs in (("chain", ("out",)), ("both", ("out", "between"))):
        config = ensemble_config(steps, {"in": TENSOR}, dict.fromkeys(outputs, TENSOR))
        add_pipeline(repository, name, config)
    return repository


def infer(server: Server, model: str, name: str, values: Array) -> dict[str, Array]:
    """The outputs of a request by name."""
    tensor = {"name": name, "datatype": "FP32", "shape": list(values.shape), "data": values.reshape(-1).tolist()}
    status, _, body = server.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}).encode())
    assert status == 200, body
    outputs = json.loads(body)["outputs"]
    return {output["name"]: np.array(output["data"], np.float32).reshape(output["shape"]) for output in outputs}


def check_same_as_one_after_the_other(server: Server) -> None:
    """Requests of many clients through both pipelines, beside direct callers of the models."""

    def client(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            x = rng.standard_normal((int(rng.integers(1, ROWS + 1)), WIDTH)).astype(np.float32)
            between = infer(server, "first", "X", x)["Y"]
            out = infer(server, "second", "X", between)["Y"]
            for model in ("chain", "both"):
                answer = infer(server, model, "in", x)
                np.testing.assert_allclose(answer["out"], out, rtol=1e-3, atol=1e-4)
                if model == "both":
                    np.testing.assert_allclose(answer["between"], between, rtol=1e-3, atol=1e-4)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(client, range(8)))


def check_outputs_in_a_region(server: Server, export: Export, gpu: int = 0) -> None:
    """Outputs in CUDA shared memory of a GPU, then inputs of another model; beside callers that get theirs in the response."""
    size_bytes = ROWS * WIDTH * 4
    clients = 8

    def request(model: str, values: Array | None, rows: int, source: int, target: int | None) -> dict[str, Any]:
        tensor: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [rows, WIDTH]}
        if values is None:
            tensor["parameters"] = region(source, rows * WIDTH * 4)
        else:
            tensor["data"] = values.reshape(-1).tolist()
        output: dict[str, Any] = {"name": "Y"}
        if target is not None:
            output["parameters"] = region(target, size_bytes)
        body = json.dumps({"inputs": [tensor], "outputs": [output]}).encode()
        status, _, answer = server.request("POST", f"/v2/models/{model}/infer", body)
        assert status == 200, answer
        result: dict[str, Any] = json.loads(answer)["outputs"][0]
        assert ("data" in result) == (target is None)
        return result

    def region(offset: int, length: int) -> dict[str, object]:
        return {"shared_memory_region": "g", "shared_memory_offset": offset, "shared_memory_byte_size": length}

    def client(number: int) -> None:
        rng, offset = np.random.default_rng(number), number * size_bytes
        for _ in range(25):
            x = rng.standard_normal((int(rng.integers(1, ROWS + 1)), WIDTH)).astype(np.float32)
            out = infer(server, "second", "X", infer(server, "first", "X", x)["Y"])["Y"]
            request("first", x, len(x), 0, offset)
            answer = np.array(request("second", None, len(x), offset, None)["data"], np.float32)
            np.testing.assert_allclose(answer.reshape(out.shape), out, rtol=1e-3, atol=1e-4)
            request("second", None, len(x), offset, offset)

    with cuda_region(server, bytes(clients * size_bytes), export, gpu), ThreadPoolExecutor(clients) as pool:
        list(pool.map(client, range(clients)))
    with cuda_region(server, bytes(size_bytes - 1), export, gpu):
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [ROWS, WIDTH], "data": [0.5] * ROWS * WIDTH}]}
        small = region(0, size_bytes - 1)
        status, _, text = server.request(
            "POST",
            "/v2/models/first/infer",
            json.dumps(body | {"outputs": [{"name": "Y", "parameters": small}]}).encode(),
        )
        assert (status, f"output 'Y' has {size_bytes} bytes".encode() in text) == (400, True), text


def check_unloading(server: Server) -> None:
    """A model is loaded anew under load: every answer is right, or says that the model is not served now."""

    def reload() -> None:
        for _ in range(3):
            status, _, body = server.request("POST", "/v2/repository/models/first/load", b"{}")
            assert status == 200, body

    with ThreadPoolExecutor(2) as pool:
        loading = pool.submit(reload)
        check_same_as_one_after_the_other(server)
        loading.result()
