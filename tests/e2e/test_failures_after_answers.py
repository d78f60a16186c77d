"""Requests that fail after the model has answered count as failures only: every protocol, pipelines and cache hits."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, shared_memory

from tests.support import models
from tests.support.prometheus import read_page
from tests.support.serving import Server, serving
from tests.support.triton_clients import connect, inputs_of
from tests.support.waiting import until

MODELS = ("affine", "cached", "pipeline")
OPTIONS = ("--allow-client-shm", "--cache-config", "local,size=16MiB")
KEY = f"/failures_after_answers_{os.getpid()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("answers")
    repository = folder / "repository"
    models.add_model(repository, "affine", models.affine(), config="max_batch_size: 8\n")
    cached = "max_batch_size: 8\nresponse_cache { enable: true }\n"
    models.add_model(repository, "cached", models.affine(), config=cached)
    models.add_model(repository, "step", models.affine(), config="max_batch_size: 8\n")
    steps = [("step", {"X": "X"}, {"Y": "Y"})]
    tensors = {"X": ("TYPE_FP32", (16,))}, {"Y": ("TYPE_FP32", (4,))}
    models.add_pipeline(repository, "pipeline", models.ensemble_config(steps, *tensors))
    with serving(repository, folder, *OPTIONS) as running:
        region = shared_memory.create_shared_memory_region("small", KEY, 16, create_only=True)
        with triton_http.InferenceServerClient(running.address) as client:
            client.register_system_shared_memory("small", KEY, 16)
        try:
            yield running
        finally:
            shared_memory.destroy_shared_memory_region(region)


def call(server: Server, how: str, model: str, output_bytes: int) -> bool:
    """Run one request whose output of 16 bytes goes to `output_bytes` of shared memory; False if it fails."""
    module = triton_http if how == "http" else triton_grpc
    inputs = inputs_of(module, {"X": np.ones((1, 16), np.float32)})
    output = module.InferRequestedOutput("Y")
    output.set_shared_memory("small", output_bytes)
    with connect(server, "http" if how == "http" else "grpc") as connected:
        if how == "stream":
            answers: queue.Queue[Any] = queue.Queue()
            connected.start_stream(partial(lambda result, error: answers.put(error)))
            connected.async_stream_infer(model, inputs, outputs=[output])
            error = answers.get(timeout=20)
            connected.stop_stream()
            return error is None
        try:
            connected.infer(model, inputs, outputs=[output])
        except InferenceServerException:
            return False
        return True


def success_ns(server: Server, model: str) -> int:
    """Time of the successful requests in the statistics."""
    content = server.request("GET", f"/v2/models/{model}/stats")[2]
    time_ns: int = json.loads(content)["model_stats"][0]["inference_stats"]["success"]["ns"]
    return time_ns


def counts(server: Server, model: str) -> list[tuple[float, float]]:
    """Successes and failures in the statistics, in both families of metrics and on the page."""
    status, _, content = server.request("GET", f"/v2/models/{model}/stats")
    assert status == 200
    stats = json.loads(content)["model_stats"][0]["inference_stats"]
    found: list[tuple[float, float]] = [(stats["success"]["count"], stats["fail"]["count"])]
    sums: dict[str, float] = {}
    for family in read_page(server.request("GET", "/metrics")[2].decode()):
        for sample in family.samples:
            if sample.labels.get("model") == model:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
    found.append((sums["headrace_requests_total"], sums["headrace_failures_total"]))
    found.append((sums["nv_inference_request_success"], sums["nv_inference_request_failure"]))
    document = json.loads(server.request("GET", "/v2/status")[2])
    (entry,) = (entry for entry in document["models"] if entry["name"] == model)
    found.append((entry["serving"]["requests"], sum(entry["serving"]["failures"].values())))
    return found


@pytest.mark.parametrize("how", ["http", "grpc", "stream"])
@pytest.mark.parametrize("model", MODELS)
def test_a_response_that_cannot_be_encoded_counts_once(server: Server, model: str, how: str) -> None:
    (successes, failures), *others = counts(server, model)
    assert call(server, how, model, 16)
    until(lambda: counts(server, model) == [(successes + 1, failures)] * 4)
    succeeded_ns = success_ns(server, model)
    assert not call(server, how, model, 15), "the output does not fit"
    assert not call(server, how, model, 15)
    until(lambda: counts(server, model) == [(successes + 1, failures + 2)] * 4)
    until(lambda: success_ns(server, model) == succeeded_ns)
    assert others == [(successes, failures)] * 3
