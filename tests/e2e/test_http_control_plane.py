"""Health, metadata, configuration, repository index and statistics with Triton's client."""

from __future__ import annotations

import json
from importlib.metadata import version

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.support.serving import Server

BROKEN = {"broken_config", "broken_file"}


def test_health(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    # A quarantined model does not take the others' server out of service.
    assert client.is_server_ready()


def test_server_metadata(client: triton.InferenceServerClient) -> None:
    metadata = client.get_server_metadata()
    assert metadata["name"] == "headrace"
    assert metadata["version"] == version("headrace")
    assert {"binary_tensor_data", "classification", "statistics"} <= set(metadata["extensions"])


def test_model_metadata(client: triton.InferenceServerClient) -> None:
    expected = {
        "name": "versioned",
        "versions": ["1", "3", "20"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 16]}],
        "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 4]}],
        "parameters": {
            "headrace.runtime": "onnxruntime",
            "headrace.device": "CPU",
            "headrace.precision": "as in model.onnx",
            "headrace.artefact": "model.onnx",
        },
    }
    assert client.get_model_metadata("versioned") == expected
    assert client.get_model_metadata("versioned", "3") == expected


def test_metadata_of_models_without_a_configuration(client: triton.InferenceServerClient) -> None:
    unbatched = client.get_model_metadata("unbatched")
    assert unbatched["inputs"] == [{"name": "X", "datatype": "FP32", "shape": [2, 3]}]
    text = client.get_model_metadata("identity_bytes")
    assert text["inputs"] == [{"name": "X", "datatype": "BYTES", "shape": [-1, -1]}]


def test_callers_see_the_shape_before_reshape(client: triton.InferenceServerClient) -> None:
    metadata = client.get_model_metadata("reshaped")
    assert metadata["inputs"][0]["shape"] == metadata["outputs"][0]["shape"] == [-1, 6]


def test_a_written_configuration(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("scores")
    assert config == client.get_model_config("scores", "1")
    assert (config["name"], config["max_batch_size"], config["backend"]) == ("scores", 4, "onnxruntime")
    assert [(o["name"], o["data_type"], o["dims"], o["label_filename"]) for o in config["output"]] == [
        ("SCORES", "TYPE_FP32", [5], "fruits.txt"),
        ("BEST", "TYPE_INT64", [1], ""),
    ]
    assert client.get_model_config("affine")["dynamic_batching"]["max_queue_delay_microseconds"] == 5000
    # No dynamic_batching block, no dynamic batching: as Triton has it.
    assert "dynamic_batching" not in config


def test_a_derived_configuration(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("row_sums")
    assert config["max_batch_size"] == 4
    assert "dynamic_batching" in config
    assert [(i["name"], i["data_type"], i["dims"]) for i in config["input"]] == [("X", "TYPE_FP32", [-1])]
    assert [(o["name"], o["data_type"], o["dims"]) for o in config["output"]] == [
        ("DOUBLE", "TYPE_FP32", [-1]),
        ("SUM", "TYPE_FP32", [1]),
    ]
    assert config["instance_group"][0]["count"] == 1
    unbatched = client.get_model_config("unbatched")
    assert (unbatched["max_batch_size"], unbatched["input"][0]["dims"]) == (0, [2, 3])


def test_model_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_model_ready("affine")
    assert client.is_model_ready("versioned", "20")
    assert not client.is_model_ready("versioned", "2")
    assert not client.is_model_ready("nothing")
    for name in BROKEN:
        assert not client.is_model_ready(name)


def test_repository_index(client: triton.InferenceServerClient) -> None:
    index = client.get_model_repository_index()
    states = {(row["name"], row["version"]): row["state"] for row in index}
    assert states["affine", "1"] == "READY"
    assert {version for name, version in states if name == "versioned"} == {"1", "3", "20"}
    reasons = {row["name"]: row["reason"] for row in index if row["state"] != "READY"}
    assert set(reasons) == BROKEN
    assert all(not row["reason"] for row in index if row["state"] == "READY")
    assert {row["state"] for row in index} == {"READY", "UNAVAILABLE"}
    # File, line, what is wrong, the cure.
    assert "broken_config/config.pbtxt:3: error:" in reasons["broken_config"]
    assert "TYPE_INT32" in reasons["broken_config"]
    assert "write TYPE_FP32" in reasons["broken_config"]
    assert "broken_file/1/model.onnx" in reasons["broken_file"]


def test_the_index_of_ready_models(server: Server) -> None:
    status, _, body = server.request("POST", "/v2/repository/index", b'{"ready": true}')
    assert status == 200
    rows = json.loads(body)
    assert {row["state"] for row in rows} == {"READY"}
    assert BROKEN.isdisjoint(row["name"] for row in rows)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_quarantined_model_has_its_reason(client: triton.InferenceServerClient, name: str) -> None:
    for call in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match=f"'{name}' cannot be served: {name}/") as caught:
            call(name)
        assert caught.value.status() == "503"
    tensor = triton.InferInput("X", [1, 16], "FP32").set_data_from_numpy(np.zeros((1, 16), np.float32))
    with pytest.raises(InferenceServerException, match=f"'{name}' cannot be served"):
        client.infer(name, [tensor])


def send(client: triton.InferenceServerClient, model: str, rows: int) -> None:
    tensor = triton.InferInput("X", [rows, 16], "FP32").set_data_from_numpy(np.zeros((rows, 16), np.float32))
    client.infer(model, [tensor])


def test_statistics_count_exactly(client: triton.InferenceServerClient) -> None:
    (before,) = client.get_inference_statistics("counted")["model_stats"]
    assert (before["inference_count"], before["execution_count"], before["batch_stats"]) == (0, 0, [])
    for rows in (1, 1, 3, 8, 3, 1):
        send(client, "counted", rows)
    (stats,) = client.get_inference_statistics("counted")["model_stats"]
    assert (stats["name"], stats["version"]) == ("counted", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (17, 6)
    inference = stats["inference_stats"]
    for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert inference[phase]["count"] == 6, phase
    assert inference["fail"] == inference["cache_hit"] == inference["cache_miss"] == {"count": 0, "ns": 0}
    parts = sum(inference[p]["ns"] for p in ("queue", "compute_input", "compute_infer", "compute_output"))
    assert 0 < parts <= inference["success"]["ns"] < 6e9
    assert [(size["batch_size"], size["compute_infer"]["count"]) for size in stats["batch_stats"]] == [
        (1, 3),
        (3, 2),
        (8, 1),
    ]
    assert stats["last_inference"] > 1_600_000_000_000


def test_failures_are_counted_apart(client: triton.InferenceServerClient) -> None:
    send(client, "counted_failures", 2)
    for _ in range(3):
        tensor = triton.InferInput("X", [1, 15], "FP32").set_data_from_numpy(np.zeros((1, 15), np.float32))
        with pytest.raises(InferenceServerException):
            client.infer("counted_failures", [tensor])
    (stats,) = client.get_inference_statistics("counted_failures")["model_stats"]
    assert stats["inference_stats"]["success"]["count"] == 1
    assert stats["inference_stats"]["fail"]["count"] == 3
    assert stats["inference_count"] == 2


def test_statistics_of_all_models_and_of_one_version(client: triton.InferenceServerClient) -> None:
    everything = client.get_inference_statistics()["model_stats"]
    names = {row["name"] for row in everything}
    assert {"counted", "versioned", "identity_bf16"} <= names
    assert BROKEN.isdisjoint(names)
    assert [row["version"] for row in client.get_inference_statistics("versioned")["model_stats"]] == ["1", "3", "20"]
    (one,) = client.get_inference_statistics("versioned", "3")["model_stats"]
    assert one["version"] == "3"
