"""The response cache of a real server, over HTTP and gRPC."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from tests.support import models
from tests.support.python_models import add_python_model
from tests.support.serving import Server, run_headrace, serving
from tests.support.waiting import at_rest, until

CACHED = "max_batch_size: 8\nresponse_cache { enable: true }\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cache")
    repository = folder / "repository"
    for name in ("affine", "grpc", "metrics"):
        models.add_model(repository, name, models.affine(), config=CACHED)
    models.add_model(repository, "plain", models.affine(), config="max_batch_size: 8\n")
    limits = "max_batch_size: 8\nresponse_cache: {enable: true}\ncache: {ttl_s: 0.2, max_bytes: 64KiB}\n"
    models.add_model(repository, "limited", models.affine(), files={"config.yaml": limits})
    models.add_model(repository, "step", models.affine(), config=CACHED)
    models.add_model(repository, "scores", models.scores(4), config="max_batch_size: 8")
    steps = [("step", {"X": "x"}, {"Y": "logits"}), ("scores", {"X": "logits"}, {"BEST": "best"})]
    tensors = {"x": ("TYPE_FP32", (16,))}, {"best": ("TYPE_INT64", (1,))}
    models.add_pipeline(repository, "steps", models.ensemble_config(steps, *tensors, "max_batch_size: 8"))
    for name in ("logits", "best"):
        models.add_model(
            repository, name, models.affine() if name == "logits" else models.scores(4), config="max_batch_size: 8"
        )
    steps = [("logits", {"X": "x"}, {"Y": "logits"}), ("best", {"X": "logits"}, {"BEST": "best"})]
    enabled = "max_batch_size: 8 response_cache { enable: true }"
    models.add_pipeline(repository, "whole", models.ensemble_config(steps, *tensors, enabled))
    with serving(repository, folder, "--cache-config", "local,size=16MiB") as running:
        yield running


def statistics(server: Server, model: str) -> dict[str, int]:
    status, _, content = server.request("GET", f"/v2/models/{model}/stats")
    assert status == 200
    (version,) = json.loads(content)["model_stats"]
    counts = {name: figures["count"] for name, figures in version["inference_stats"].items()}
    return counts | {name: version[name] for name in ("inference_count", "execution_count")}


def explained(server: Server, model: str) -> dict[str, Any]:
    status, _, content = server.request("GET", f"/v2/models/{model}/explain")
    assert status == 200
    document: dict[str, Any] = json.loads(content)
    return document


def body(value: float, rows: int = 1) -> bytes:
    array = np.full((rows, 16), value, np.float32)
    inputs = [{"name": "X", "shape": [rows, 16], "datatype": "FP32", "data": array.ravel().tolist()}]
    return json.dumps({"id": f"{value}", "inputs": inputs}).encode()


def post(server: Server, model: str, content: bytes) -> bytes:
    status, _, answer = server.request("POST", f"/v2/models/{model}/infer", content)
    assert status == 200, answer
    return answer


def test_a_hit_has_the_bytes_of_the_computed_response(server: Server) -> None:
    first = post(server, "affine", body(1.5, rows=3))
    assert post(server, "affine", body(1.5, rows=3)) == first
    assert post(server, "plain", body(1.5, rows=3)).replace(b"plain", b"affine") == first
    assert post(server, "affine", body(2.5, rows=3)) != first
    counts = statistics(server, "affine")
    assert counts == {
        "success": 3,
        "fail": 0,
        "queue": 3,
        "compute_input": 2,
        "compute_infer": 2,
        "compute_output": 2,
        "cache_hit": 1,
        "cache_miss": 2,
        "inference_count": 6,
        "execution_count": 2,
    }
    assert statistics(server, "plain")["cache_miss"] == 0


def test_http_and_grpc_share_responses(server: Server) -> None:
    array = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)
    results = []
    with triton_http.InferenceServerClient(server.address) as client:
        for _ in range(2):
            tensor = triton_http.InferInput("X", [2, 16], "FP32").set_data_from_numpy(array)
            results.append(client.infer("grpc", [tensor]).as_numpy("Y"))
    with triton_grpc.InferenceServerClient(server.grpc_address) as client:
        for _ in range(2):
            tensor = triton_grpc.InferInput("X", [2, 16], "FP32").set_data_from_numpy(array)
            results.append(client.infer("grpc", [tensor]).as_numpy("Y"))
    assert len({result.tobytes() for result in results}) == 1
    counts = statistics(server, "grpc")
    assert counts["cache_hit"] + counts["cache_miss"] == 4
    assert counts["execution_count"] == counts["cache_miss"] == 1


def test_entries_expire_and_a_model_keeps_to_its_limit(server: Server) -> None:
    for value in range(200):
        post(server, "limited", body(value))
    cache = explained(server, "limited")["cache"]
    assert cache["max_bytes"] == 64 << 10
    assert 0 < cache["size_bytes"] <= cache["max_bytes"]
    assert cache["evictions"] + cache["expirations"] + cache["entries"] == cache["insertions"] == 200
    post(server, "limited", body(1000))
    before = at_rest(lambda: statistics(server, "limited")["execution_count"])

    def executions() -> int:
        post(server, "limited", body(1000))
        return statistics(server, "limited")["execution_count"] - before

    until(executions)  # once the entry has expired


def test_a_step_of_a_pipeline_is_answered_from_the_cache_of_its_model(server: Server) -> None:
    content = body(4).replace(b'"X"', b'"x"')
    answers = {post(server, "steps", content) for _ in range(3)}
    assert len(answers) == 1
    counts = {model: statistics(server, model) for model in ("steps", "step", "scores")}
    assert (counts["step"]["cache_hit"], counts["step"]["execution_count"]) == (2, 1)
    assert counts["steps"]["success"] == counts["scores"]["execution_count"] == 3
    assert counts["steps"]["cache_miss"] == 0


def test_a_cached_pipeline_skips_all_its_steps(server: Server) -> None:
    content = body(4).replace(b'"X"', b'"x"')
    answers = {post(server, "whole", content) for _ in range(3)}
    assert answers == {post(server, "steps", content).replace(b'"steps"', b'"whole"')}
    counts = {model: statistics(server, model) for model in ("whole", "logits", "best")}
    assert counts["logits"]["success"] == counts["best"]["success"] == 1
    assert (counts["whole"]["success"], counts["whole"]["cache_hit"], counts["whole"]["cache_miss"]) == (3, 2, 1)
    assert explained(server, "whole")["cache"]["entries"] == 1
    assert 'nv_cache_num_hits_per_model{model="whole",version="1"} 2.0' in server.request("GET", "/metrics")[2].decode()


def test_a_cached_pipeline_computes_again_with_other_weights_of_a_model(tmp_path: Path) -> None:
    repository, enabled = tmp_path / "repository", "max_batch_size: 8 response_cache { enable: true }"
    models.add_model(repository, "m", models.affine(seed=1), config="max_batch_size: 8")
    tensors = {"x": ("TYPE_FP32", (16,))}, {"y": ("TYPE_FP32", (4,))}
    models.add_pipeline(repository, "p", models.ensemble_config([("m", {"X": "x"}, {"Y": "y"})], *tensors, enabled))
    options = ("--model-control", "explicit", "--load-model", "p", "--cache-config", "local,size=1MiB")
    content = body(1).replace(b'"X"', b'"x"')
    with serving(repository, tmp_path, *options) as server:
        first = post(server, "p", content)
        assert post(server, "p", content) == first
        answers = []
        for seed in (2, 1):
            models.add_model(repository, "m", models.affine(seed=seed), config="max_batch_size: 8")
            assert server.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200
            answers.append(post(server, "p", content))
            assert post(server, "p", content) == answers[-1]
        assert answers[0] != first
        assert answers[1] == first
        assert statistics(server, "p")["cache_miss"] == 3
        assert server.request("POST", "/v2/repository/models/m/unload", b"{}")[0] == 200
        assert server.request("POST", "/v2/models/p/infer", content)[0] == 503


def test_metrics_and_explain_have_the_figures(server: Server) -> None:
    for _ in range(4):
        post(server, "metrics", body(3))
    text = server.request("GET", "/metrics")[2].decode()
    labels = '{model="metrics",version="1"}'
    for name, value in {
        "nv_cache_num_hits_per_model": 3,
        "nv_cache_num_misses_per_model": 1,
        "nv_cache_hit_summary_us_count": 3,
        "nv_cache_miss_summary_us_count": 1,
        "nv_inference_request_success": 4,
        "nv_inference_count": 1,
        "headrace_cache_hits_total": 3,
        "headrace_cache_merged_total": 0,
        "headrace_cache_misses_total": 1,
        "headrace_cache_entries": 1,
        "headrace_cache_enabled": 1,
        "headrace_requests_total": 4,
    }.items():
        assert f"{name}{labels} {float(value)}" in text, name
    for name in ("nv_cache_hit_duration_per_model", "nv_cache_miss_summary_us_sum"):
        assert float(text.split(f"{name}{labels} ")[1].split()[0]) > 0, name
    assert 'headrace_cache_hits_total{model="plain"' not in text
    assert "cache" not in explained(server, "plain")
    printed = run_headrace("explain", "metrics", "--url", server.url).stdout
    assert "response cache" in printed
    assert "on: it is first judged after 2048 requests" in " ".join(printed.split())


def test_a_model_that_calls_others_is_computed_again_after_a_load(tmp_path: Path) -> None:
    repository, config = tmp_path / "repository", "max_batch_size: 8\n"
    models.add_model(repository, "inner", models.affine(seed=1), config=config)
    code = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            call = pb_utils.InferenceRequest(model_name="inner", requested_output_names=["Y"], inputs=request.inputs())
            responses.append(pb_utils.InferenceResponse(call.exec().output_tensors()))
        return responses
"""
    tensors = (
        'input [{ name: "X" data_type: TYPE_FP32 dims: [16] }] output [{ name: "Y" data_type: TYPE_FP32 dims: [4] }]\n'
    )
    add_python_model(repository, "outer", code, f'backend: "python"\n{CACHED}{tensors}')
    options = ("--model-control", "explicit", "--load-model", "inner", "--load-model", "outer")
    with serving(repository, tmp_path, *options, "--cache-config", "local,size=1MiB") as server:
        first = post(server, "outer", body(1))
        assert post(server, "outer", body(1)) == post(server, "outer", body(1)) == first
        # The first response came before the server had seen that the model calls others.
        assert statistics(server, "outer")["cache_miss"] == 2
        models.add_model(repository, "inner", models.affine(seed=2), config=config)
        assert server.request("POST", "/v2/repository/models/inner/load", b"{}")[0] == 200
        second = post(server, "outer", body(1))
        assert second != first
        assert post(server, "outer", body(1)) == second
        assert statistics(server, "outer")["cache_miss"] == 3
        assert statistics(server, "outer")["cache_hit"] == 2


def test_a_server_without_a_cache_warns_and_computes(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "m", models.affine(), config=CACHED)
    with serving(tmp_path / "repository", tmp_path) as server:
        assert post(server, "m", body(1)) == post(server, "m", body(1))
        assert statistics(server, "m")["execution_count"] == 2
        assert (
            "response_cache.enable has no effect: the server has no cache, start it with --cache-config" in server.text
        )
        assert "headrace_cache_" not in "".join(
            line for line in server.request("GET", "/metrics")[2].decode().splitlines() if not line.startswith("#")
        )
