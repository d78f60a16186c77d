"""Repository control over both protocols with Triton's own clients, on servers in every mode."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.support import models
from tests.support.serving import Server, serving
from tests.support.triton_clients import Client, connect, infer
from tests.support.waiting import until

LABELS = "version_policy: {all: {}}\nlabels: {stable: 1, canary: 2}\n"
X = np.ones((1, 16), np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("control") / "repository"
    models.add_model(repository, "started", models.affine(seed=1))
    models.add_model(repository, "asleep", models.affine(seed=2))
    for version in (1, 2):
        models.add_model(
            repository, "labelled", models.affine(seed=version), version=version, files={"config.yaml": LABELS}
        )
    options = ["--model-control", "explicit", "--load-model", "started", "--allow-model-override"]
    with serving(repository, repository.parent, *options) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    with connect(server, request.param) as ours:
        yield ours


def answer(client: Client, model: str, version: str = "") -> np.ndarray:
    return np.asarray(infer(client, model, {"X": X}, model_version=version).as_numpy("Y"))


def index(client: Client) -> dict[str, tuple[str, str]]:
    if isinstance(client, triton_grpc.InferenceServerClient):
        return {row.name: (row.state, row.reason) for row in client.get_model_repository_index().models}
    return {row["name"]: (row["state"], row["reason"]) for row in client.get_model_repository_index()}


def expected(seed: int) -> np.ndarray:
    import onnxruntime as ort

    session = ort.InferenceSession(models.affine(seed=seed).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"X": X})[0]


def test_the_index_has_all_models_and_only_requested_ones_serve(client: Client) -> None:
    rows = index(client)
    assert rows["started"] == ("READY", "")
    assert {"asleep", "labelled"} <= rows.keys()
    assert client.is_server_ready()
    assert client.is_model_ready("started")


def test_a_model_is_loaded_used_and_unloaded(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="is not loaded"):
        answer(client, "asleep")
    client.load_model("asleep")
    assert client.is_model_ready("asleep")
    np.testing.assert_allclose(answer(client, "asleep"), expected(2), rtol=1e-5)
    client.load_model("asleep")  # nothing has changed: no error, no news
    client.unload_model("asleep", unload_dependents=True)
    assert not client.is_model_ready("asleep")
    until(lambda: index(client)["asleep"] == ("UNAVAILABLE", "unloaded"))


def test_versions_are_addressed_by_their_labels(client: Client) -> None:
    client.load_model("labelled")
    for label, seed in (("stable", 1), ("canary", 2), ("1", 1), ("2", 2), ("", 2)):
        np.testing.assert_allclose(answer(client, "labelled", label), expected(seed), rtol=1e-5)
        assert client.is_model_ready("labelled", label)
    with pytest.raises(InferenceServerException, match="nightly"):
        answer(client, "labelled", "nightly")


def test_a_configuration_and_files_sent_by_the_client(client: Client) -> None:
    content = models.affine(seed=7).SerializeToString()
    client.load_model("brought", config=json.dumps({"max_batch_size": 3}), files={"file:5/model.onnx": content})
    np.testing.assert_allclose(answer(client, "brought", "5"), expected(7), rtol=1e-5)
    config = client.get_model_config("brought")
    shown = config.config.max_batch_size if not isinstance(config, dict) else config["max_batch_size"]
    assert shown == 3
    with pytest.raises(InferenceServerException, match=r"outside of|not a file of a version"):
        client.load_model("brought", config="{}", files={"file:../../x": content, "file:1/model.onnx": content})
    with pytest.raises(InferenceServerException, match="config"):
        client.load_model("brought", files={"file:1/model.onnx": content})
    with pytest.raises(InferenceServerException, match="max_batch_sise"):
        client.load_model("brought", config='{"max_batch_sise": 1}')
    np.testing.assert_allclose(answer(client, "brought", "5"), expected(7), rtol=1e-5)
    client.unload_model("brought")
    with pytest.raises(InferenceServerException, match="brought"):
        client.load_model("brought")


@pytest.mark.parametrize("name", ["nobody", "..", "a%2Fb"])
def test_unknown_models_cannot_be_loaded(server: Server, name: str) -> None:
    for verb in ("load", "unload"):
        status, _, answer = server.request("POST", f"/v2/repository/models/{name}/{verb}", b"{}")
        assert status in (400, 404)
        assert json.loads(answer)["error"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"config": 3},
        {"config": "["},
        {"cofnig": "{}"},
        {"config": "{}", "file:1/model.onnx": "no base64!"},
        {"config": "{}", "file:1/model.onnx": base64.b64encode(b"no model").decode()},
        {"config": "{}", "file:/etc/cron.d/x": "eA=="},
        {"config": "{}", "file:": "eA=="},
        {"config": json.dumps({"model_warmup": [{"inputs": {"X": {"dims": [1 << 40], "zero_data": True}}}]})},
    ],
)
def test_a_malformed_load_request_changes_nothing(server: Server, parameters: dict[str, object]) -> None:
    body = json.dumps({"parameters": parameters}).encode()
    status, _, answer = server.request("POST", "/v2/repository/models/started/load", body)
    assert status == 400, answer
    assert "/repository" not in json.loads(answer)["error"]
    assert server.request("GET", "/v2/models/started/ready")[0] == 200


def test_overrides_need_their_option(tmp_path: Path) -> None:
    models.add_model(tmp_path / "repository", "m", models.affine())
    with serving(tmp_path / "repository", tmp_path, "--model-control", "explicit", "--load-model", "*") as server:
        body = json.dumps({"parameters": {"config": "{}"}}).encode()
        status, _, answer = server.request("POST", "/v2/repository/models/m/load", body)
        assert status == 403
        assert "--allow-model-override" in json.loads(answer)["error"]
        assert server.request("POST", "/v2/repository/models/m/load", b"{}")[0] == 200


def test_a_watched_repository_follows_its_files(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    models.add_model(repository, "m", models.affine(seed=1))
    options = ["--model-control", "poll", "--poll-interval-s", "0.1"]
    with serving(repository, tmp_path, *options) as server, connect(server, "http") as client:
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="--model-control explicit"):
                change("m")
        np.testing.assert_allclose(answer(client, "m"), expected(1), rtol=1e-5)
        models.add_model(repository, "m", models.affine(seed=2))
        models.add_model(repository, "late", models.affine(seed=3))
        until(lambda: index(client).get("late") == ("READY", ""))
        until(lambda: bool(np.allclose(answer(client, "m"), expected(2), rtol=1e-5)))
        shutil.rmtree(repository / "late")
        until(lambda: "late" not in index(client))
        assert client.is_server_ready()
