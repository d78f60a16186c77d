"""The latency table over HTTP: present before the first request, updated by requests, in the metrics, not in the statistics."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from prometheus_client.parser import text_string_to_metric_families

from tests.support import models
from tests.support.serving import Server, serving
from tests.support.triton_clients import ask

CONFIG = "max_batch_size: 6\ndynamic_batching { }\n"


def profile(server: Server, model: str, path: str = "") -> Any:
    status, headers, content = server.request("GET", f"/v2/models/{model}{path}/profile")
    assert (status, headers["content-type"]) == (200, "application/json")
    return json.loads(content)


def profile_after(server: Server, model: str, batches: int) -> Any:
    """Once so many have been counted, which is a moment after they were answered."""
    deadline = time.monotonic() + 20
    while True:
        document = profile(server, model)
        if sum(row["observations"] for row in document["profile"]) >= batches:
            return document
        assert time.monotonic() < deadline, document


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models.add_model(tmp_path / "repository", "affine", models.affine(), config=CONFIG)
    return tmp_path


def test_a_model_is_measured_before_it_serves_and_by_its_batches(folder: Path) -> None:
    with serving(folder / "repository", folder) as server:
        at_first = profile(server, "affine")
        assert (at_first["name"], at_first["version"]) == ("affine", "1")
        assert [row["rows"] for row in at_first["profile"]] == [1, 2, 4, 6]
        for row in at_first["profile"]:
            assert 0 < row["median_us"] <= row["p95_us"] < 10e6
            assert (row["observations"], row["source"], row["instances"]) == (0, "load", 1)
        with triton.InferenceServerClient(server.address) as client:
            (stats,) = client.get_inference_statistics("affine")["model_stats"]
            assert (stats["execution_count"], stats["inference_count"]) == (0, 0)
        for rows in (1, 3, 3):
            ask(server, "http", "affine", {"X": np.zeros((rows, 16), np.float32)})
        seen = {
            row["rows"]: (row["observations"], row["source"]) for row in profile_after(server, "affine", 3)["profile"]
        }
        assert seen == {1: (1, "requests"), 2: (0, "load"), 3: (2, "requests"), 4: (0, "load"), 6: (0, "load")}
        _, _, page = server.request("GET", "/metrics")
        family = next(
            metric
            for metric in text_string_to_metric_families(page.decode())
            if metric.name == "headrace_profile_seconds"
        )
        values = {(sample.labels["rows"], sample.labels["percentile"]): sample.value for sample in family.samples}
        assert set(values) == {(rows, quantile) for rows in "1246" for quantile in ("50", "95")}
        assert all(sample.labels["model"] == "affine" for sample in family.samples)
        assert all(0 < values[rows, "50"] <= values[rows, "95"] for rows in "1246")


def test_it_can_be_switched_off(folder: Path) -> None:
    with serving(folder / "repository", folder, "--profile-s", "0") as server:
        assert profile(server, "affine")["profile"] == []
        ask(server, "http", "affine", {"X": np.zeros((2, 16), np.float32)})
        (row,) = profile_after(server, "affine", 1)["profile"]
        assert (row["rows"], row["observations"], row["source"]) == (2, 1, "requests")


def test_every_version_has_its_own_latency_table(server: Server) -> None:
    assert profile(server, "versioned")["version"] == "20"
    assert profile(server, "versioned", "/versions/3")["version"] == "3"
    assert profile(server, "versioned", "/versions/3")["profile"]


def test_models_without_synthetic_inputs_are_not_measured(server: Server) -> None:
    assert not [row for row in profile(server, "identity_bytes")["profile"] if row["source"] == "load"]


@pytest.mark.parametrize("path", ["/v2/models/nobody/profile", "/v2/models/versioned/versions/4/profile"])
def test_unknown_models_have_no_latency_table(server: Server, path: str) -> None:
    status, _, content = server.request("GET", path)
    assert status == 404
    assert "not found" in json.loads(content)["error"]


def test_a_restarted_server_reads_the_saved_latency_table(tmp_path: Path) -> None:
    """Of a model that cannot be measured at load, and whose folder cannot be written."""
    repository, state = tmp_path / "repository", tmp_path / "state"
    folder = models.add_model(
        repository, "texts", models.identity("BYTES", ("batch", 3)), config="max_batch_size: 4\ndynamic_batching { }\n"
    )
    for path in (folder, folder / "1"):
        path.chmod(0o555)
    try:
        with serving(repository, tmp_path, "--state-dir", str(state)) as server:
            assert profile(server, "texts")["profile"] == []
            with triton.InferenceServerClient(server.address) as client:
                for rows in (1, 1, 3):
                    array = np.full((rows, 3), b"x", dtype=object)
                    client.infer("texts", [triton.InferInput("X", [rows, 3], "BYTES").set_data_from_numpy(array)])
            learned = {row["rows"]: row["median_us"] for row in profile_after(server, "texts", 3)["profile"]}
            assert set(learned) == {1, 3}
        with serving(repository, tmp_path, "--state-dir", str(state)) as server:
            again = profile(server, "texts")["profile"]
            assert {row["rows"]: row["median_us"] for row in again} == learned
            assert {(row["source"], row["observations"]) for row in again} == {("stored", 0)}
        with serving(repository, tmp_path, "--state-dir", "") as server:
            assert profile(server, "texts")["profile"] == []
    finally:
        for path in (folder, folder / "1"):
            path.chmod(0o755)


def test_two_instances_are_measured_beside_each_other(tmp_path: Path) -> None:
    config = CONFIG + "instance_group [ { count: 2 kind: KIND_CPU } ]\n"
    models.add_model(tmp_path / "repository", "affine", models.affine(), config=config)
    with serving(tmp_path / "repository", tmp_path, "--profile-s", "1") as server:
        table_rows = profile(server, "affine")["profile"]
        assert [(row["instances"], row["rows"]) for row in table_rows] == [
            (instances, rows) for instances in (1, 2) for rows in (1, 2, 4, 6)
        ]
