"""Triton's ensembles over HTTP and gRPC: results, deadlines, errors by step, statistics."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.models import add_model, add_pipeline, ensemble_config
from tests.support.prometheus import read_page
from tests.support.serving import HOST, Server, serving

FP32 = "TYPE_FP32"
AFFINE = ("affine", {"X": "features"}, {"Y": "logits"})
SCORES = ("scores", {"X": "logits"}, {"SCORES": "probabilities", "BEST": "best"})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ensembles") / "repository"
    add_model(folder, "affine", models.affine(), config="max_batch_size: 8 dynamic_batching {}")
    add_model(folder, "scores", models.scores(4), config="max_batch_size: 8", files={})
    add_model(folder, "lookup", models.table_lookup(), config="max_batch_size: 8")
    add_model(folder, "bias", models.optional_bias(), config=(
        'max_batch_size: 8 input [ { name: "X" data_type: TYPE_FP32 dims: [3] }, '
        '{ name: "BIAS" data_type: TYPE_FP32 dims: [3] optional: true } ]'
    ))  # fmt: skip
    add_model(folder, "negative", models.unbatched())
    add_model(folder, "wide", models.identity("FP32", ("batch", 2, 3)), config="max_batch_size: 8")
    features, out = {"features": (FP32, (16,))}, {"probabilities": (FP32, (4,)), "best": ("TYPE_INT64", (1,))}
    add_pipeline(folder, "classify", ensemble_config([AFFINE, SCORES], features, out))
    # The steps in the reverse order: what is ready decides.
    add_pipeline(folder, "reverse", ensemble_config([SCORES, AFFINE], features, out))
    chain = [("lookup", {"X": "index"}, {"Y": "tens"}), ("lookup", {"X": "tens"}, {"Y": "hundreds"})]
    numbers = {"index": ("TYPE_INT64", (1,))}, {"tens": ("TYPE_INT64", (1,)), "hundreds": ("TYPE_INT64", (1,))}
    add_pipeline(folder, "twice", ensemble_config(chain, *numbers))
    optional = ensemble_config(
        [("bias", {"X": "rows", "BIAS": "bias"}, {"Y": "sum"})],
        {"rows": (FP32, (3,)), "bias": (FP32, (3,))},
        {"sum": (FP32, (3,))},
    ).replace(
        'name: "bias" data_type: TYPE_FP32 dims: [3]', 'name: "bias" data_type: TYPE_FP32 dims: [3] optional: true'
    )
    add_pipeline(folder, "biased", optional)
    mixed = [("wide", {"X": "x"}, {"Y": "copy"}), ("negative", {"X": "copy"}, {"Y": "y"})]
    add_pipeline(
        folder, "mixed", ensemble_config(mixed, {"x": (FP32, (2, 3))}, {"y": (FP32, (2, 3))}, "max_batch_size: 4")
    )
    add_model(folder, "busy", models.busy())
    number = {"steps": ("TYPE_INT64", (1,))}, {"y": (FP32, (1,))}
    add_pipeline(folder, "slow", ensemble_config([("busy", {"STEPS": "steps"}, {"Y": "y"})], *number, ""))
    unbatched = [("negative", {"X": "x"}, {"Y": "n"}), ("wide", {"X": "n"}, {"Y": "y"})]
    add_pipeline(folder, "unbatched", ensemble_config(unbatched, {"x": (FP32, (2, 3))}, {"y": (FP32, (1, 2, 3))}, ""))
    return folder


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[Server]:
    with serving(repository, repository.parent) as started:
        yield started


def infer(server: Server, model: str, inputs: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any]]:
    datatypes = {"float32": "FP32", "int64": "INT64"}
    tensors = [
        {"name": n, "datatype": datatypes[a.dtype.name], "shape": a.shape, "data": a.ravel().tolist()}
        for n, a in inputs.items()
    ]
    body = json.dumps({"inputs": tensors, **more}).encode()
    status, _, content = server.request("POST", f"/v2/models/{model}/infer", body)
    return status, json.loads(content)


def arrays(response: dict[str, Any]) -> dict[str, np.ndarray]:
    return {o["name"]: np.asarray(o["data"]).reshape(o["shape"]) for o in response["outputs"]}


def expected(repository: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(repository / "affine/1/model.onnx"))
    result: np.ndarray = session.run(None, {"X": x})[0]
    return result


@pytest.mark.parametrize("model", ["classify", "reverse"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_ensemble_answers_as_its_models_one_after_the_other(
    server: Server, repository: Path, model: str, protocol: str
) -> None:
    module: Any = http_client if protocol == "http" else grpc_client
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    address = server.address if protocol == "http" else server.grpc_address
    with module.InferenceServerClient(address) as client:
        tensor = module.InferInput("features", [3, 16], "FP32").set_data_from_numpy(x)
        result = client.infer(model, [tensor], request_id="seven")
        metadata = client.get_model_metadata(model)
    reference = expected(repository, x)
    np.testing.assert_allclose(result.as_numpy("probabilities"), reference, rtol=1e-6)
    assert result.as_numpy("best").ravel().tolist() == reference.argmax(axis=1).tolist()
    names = [o["name"] for o in metadata["outputs"]] if protocol == "http" else [o.name for o in metadata.outputs]
    assert names == ["probabilities", "best"]
    assert (metadata["platform"] if protocol == "http" else metadata.platform) == "ensemble"


def executions(server: Server, model: str) -> int:
    _, _, content = server.request("GET", f"/v2/models/{model}/stats")
    return int(json.loads(content)["model_stats"][0]["execution_count"])


def test_steps_that_no_requested_output_needs_are_not_run(server: Server) -> None:
    before = executions(server, "lookup")
    status, response = infer(server, "twice", {"index": np.array([[0]])}, outputs=[{"name": "tens"}])
    assert (status, arrays(response)["tens"].tolist()) == (200, [[0]])
    assert executions(server, "lookup") == before + 1
    status, response = infer(server, "twice", {"index": np.array([[0]])})
    assert (status, executions(server, "lookup")) == (200, before + 3)
    assert {o["name"] for o in response["outputs"]} == {"tens", "hundreds"}


def test_errors_name_the_ensemble_and_the_step(server: Server) -> None:
    status, response = infer(server, "twice", {"index": np.array([[3]])})
    assert status == 400
    assert response["error"].startswith("in ensemble 'twice', step 'lookup#2' (model lookup/1): "), response
    status, response = infer(server, "twice", {"index": np.array([[77]])})
    assert response["error"].startswith("in ensemble 'twice', step 'lookup' (model lookup/1): "), response


def test_requests_of_one_failed_batch_have_errors_of_their_own(server: Server) -> None:
    """An error that members of a batch share must not collect one prefix for each of them."""
    with http_client.InferenceServerClient(server.address, concurrency=8) as client:
        waiting = []
        for _ in range(8):
            tensor = http_client.InferInput("index", [1, 1], "INT64").set_data_from_numpy(np.array([[3]]))
            waiting.append(client.async_infer("twice", [tensor]))
        for each in waiting:
            with pytest.raises(InferenceServerException, match="step") as error:
                each.get_result()
            assert str(error.value).count("in ensemble") == 1


def test_an_omitted_optional_input_is_left_out_of_its_steps(server: Server) -> None:
    rows = np.zeros((2, 3), np.float32)
    status, response = infer(server, "biased", {"rows": rows})
    assert (status, arrays(response)["sum"].tolist()) == (200, [[100] * 3] * 2)
    status, response = infer(server, "biased", {"rows": rows, "bias": rows + 7})
    assert (status, arrays(response)["sum"].tolist()) == (200, [[7] * 3] * 2)


def test_models_with_and_without_batches_are_mixed(server: Server) -> None:
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    status, response = infer(server, "mixed", {"x": x})
    assert (status, arrays(response)["y"].tolist()) == (200, (-x).tolist())
    status, response = infer(server, "unbatched", {"x": x[0]})
    assert (status, arrays(response)["y"].tolist()) == (200, (-x).tolist())
    status, response = infer(server, "mixed", {"x": np.concatenate([x, x])})
    assert status == 400
    assert "step 'negative'" in response["error"]
    assert "has shape [2, 2, 3]" in response["error"]


def test_more_rows_than_the_ensemble_allows_are_refused(server: Server) -> None:
    status, response = infer(server, "mixed", {"x": np.zeros((5, 2, 3), np.float32)})
    assert status == 400
    assert "has 5 rows, ensemble 'mixed' accepts at most 4" in response["error"]


def test_statistics_count_the_ensemble_and_its_models(server: Server) -> None:
    def stats(model: str) -> dict[str, Any]:
        _, _, content = server.request("GET", f"/v2/models/{model}/stats")
        result: dict[str, Any] = json.loads(content)["model_stats"][0]
        return result

    def ns(row: dict[str, Any], name: str) -> int:
        return int(row["inference_stats"][name]["ns"])

    names = ("classify", "affine", "scores")
    before = {name: stats(name) for name in names}
    assert infer(server, "classify", {"features": np.zeros((2, 16), np.float32)})[0] == 200
    after = {name: stats(name) for name in names}
    for name in names:
        assert after[name]["inference_count"] - before[name]["inference_count"] == 2
        assert after[name]["execution_count"] - before[name]["execution_count"] == 1
        success = [row[name]["inference_stats"]["success"]["count"] for row in (before, after)]
        assert success[1] == success[0] + 1
    for phase in ("compute_input", "compute_infer", "compute_output"):
        spent = {name: ns(after[name], phase) - ns(before[name], phase) for name in names}
        assert spent["classify"] == spent["affine"] + spent["scores"]
    times = ("queue", "compute_input", "compute_infer", "compute_output")
    parts = [ns(after["classify"], name) - ns(before["classify"], name) for name in times]
    assert sum(parts) == ns(after["classify"], "success") - ns(before["classify"], "success")


def test_a_deadline_covers_all_steps(server: Server) -> None:
    long = {"steps": np.array([30_000])}
    status, response = infer(server, "slow", long, parameters={"headrace_deadline_us": 60_000})
    assert status in (503, 504), response
    assert "deadline" in response["error"] or "admission control" in response["error"]
    # What it computed for nothing does not stop the next one.
    status, response = infer(server, "slow", {"steps": np.array([1])}, parameters={"headrace_deadline_us": 30_000_000})
    assert (status, arrays(response)["y"].tolist()) == (200, [1.0])


def test_a_grpc_deadline_and_requested_outputs(server: Server) -> None:
    with grpc_client.InferenceServerClient(server.grpc_address) as client:
        tensor = grpc_client.InferInput("steps", [1], "INT64").set_data_from_numpy(np.array([30_000]))
        with pytest.raises(InferenceServerException, match=r"[Dd]eadline|admission"):
            client.infer("slow", [tensor], client_timeout=0.06)
        index = grpc_client.InferInput("index", [1, 1], "INT64").set_data_from_numpy(np.array([[3]]))
        result = client.infer("twice", [index], outputs=[grpc_client.InferRequestedOutput("tens")])
        assert result.as_numpy("tens").tolist() == [[30]]
        with pytest.raises(InferenceServerException, match="in ensemble 'twice', step 'lookup#2'"):
            client.infer("twice", [index])


def test_a_client_that_disconnects_frees_the_models(server: Server) -> None:
    body = json.dumps({"inputs": [{"name": "steps", "datatype": "INT64", "shape": [1], "data": [20_000]}]}).encode()
    with socket.create_connection((HOST, server.port)) as connection:
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        time.sleep(0.05)
    for _ in range(1000):
        text = server.request("GET", "/metrics")[2].decode()
        waiting = [line for line in text.splitlines() if line.startswith('headrace_in_flight{model="slow"')]
        if waiting and waiting[0].endswith(" 0.0"):
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the ensemble still counts a request that its client gave up")
    status, response = infer(server, "slow", {"steps": np.array([2])})
    assert (status, arrays(response)["y"].tolist()) == (200, [2.0])


def test_explain_names_the_longest_step_of_an_idle_pipeline(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path) as idle:
        document = json.loads(idle.request("GET", "/v2/models/classify/explain")[2])
    assert document["limit"] == "idle"
    assert re.search(
        r"step '(affine|scores)' takes the longest: [\d.e-]+ ms of [\d.e-]+ ms compute", document["summary"]
    )


def test_explain_names_the_slowest_step_with_the_cure_of_its_model(server: Server) -> None:
    for _ in range(3):
        assert infer(server, "classify", {"features": np.zeros((1, 16), np.float32)})[0] == 200
    status, _, content = server.request("GET", "/v2/models/classify/explain")
    document = json.loads(content)
    assert (status, document["limit"]) == (200, "slowest_step")
    steps = document["numbers"]["steps"]
    assert steps.keys() == {"affine", "scores"}
    slowest = max(steps, key=lambda name: steps[name]["total_us"])
    assert document["summary"].startswith(f"step '{slowest}' (model {slowest}) takes ")
    assert document["findings"][1]["explanation"].startswith(f"step '{slowest}': ")


def test_metrics_count_and_time_each_step(server: Server) -> None:
    def metrics(model: str = "twice") -> dict[tuple[str, ...], float]:
        return {
            (
                sample.name.removeprefix("headrace_step_"),
                sample.labels["step"],
                *(value for label, value in sample.labels.items() if label in ("outcome", "le")),
            ): sample.value
            for family in read_page(server.request("GET", "/metrics")[2].decode())
            for sample in family.samples
            if sample.name.startswith("headrace_step_") and sample.labels["model"] == model
        }

    before = metrics()
    assert before["requests_total", "lookup#2", "fallback"] == 0  # before the first one
    assert infer(server, "twice", {"index": np.array([[0]])})[0] == 200
    assert infer(server, "twice", {"index": np.array([[3]])})[0] != 200  # its second step fails
    added = {key: value - before[key] for key, value in metrics().items()}
    counts = {
        step: [added["requests_total", step, outcome] for outcome in ("ok", "error", "skipped")]
        for step in ("lookup", "lookup#2")
    }
    assert counts == {"lookup": [2, 0, 0], "lookup#2": [1, 1, 0]}
    assert added["seconds_count", "lookup"] == 2
    assert added["seconds_bucket", "lookup#2", "+Inf"] == 1
    assert 0 < added["seconds_sum", "lookup"] < 60
    assert 0 < added["wasted_seconds_total", "lookup"] < 60
    assert added["wasted_seconds_total", "lookup#2"] == 0
    assert metrics("lookup") == {}, "models have no steps"


def test_the_configuration_in_force_shows_the_steps(server: Server) -> None:
    _, _, content = server.request("GET", "/v2/models/classify/config")
    steps = json.loads(content)["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["affine", "scores"]
    assert steps[1]["input_map"] == {"X": "logits"}
