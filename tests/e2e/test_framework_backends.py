"""Ready-made backends over HTTP: scikit-learn, XGBoost and LightGBM answer as the frameworks do in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace.models.folders import open_paths

from tests.support.serving import Server, serving

RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=(80, 4))
CLASSES = (ROWS[:, 0] > 0).astype(int) + (ROWS[:, 1] > 0.5)
CONFIG = """
backend: "%s"
max_batch_size: 32
input { name: "x", data_type: TYPE_FP64, dims: [ 4 ] }
output { name: "label", data_type: TYPE_INT64, dims: [ 1 ] }
output { name: "probabilities", data_type: TYPE_FP64, dims: [ 3 ] }
dynamic_batching { }
"""
SCORES = """
backend: "%s"
max_batch_size: 32
input { name: "x", data_type: TYPE_FP64, dims: [ 4 ] }
output { name: "scores", data_type: TYPE_FP32, dims: [ 3 ] }
output { name: "margin", data_type: TYPE_FP32, dims: [ 3 ] }
dynamic_batching { }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""


def _folder(repository: Path, name: str, config: str) -> Path:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    return repository / name / "1"


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    """Trained models by name."""
    from sklearn.linear_model import LogisticRegression

    xgboost, lightgbm = import_module("xgboost"), import_module("lightgbm")
    booster = xgboost.train(
        {"objective": "multi:softprob", "num_class": 3, "nthread": 1}, xgboost.DMatrix(ROWS, CLASSES), 4
    )
    options = {"objective": "multiclass", "num_class": 3, "num_threads": 1, "verbose": -1, "min_data_in_leaf": 2}
    forest = lightgbm.train(options, lightgbm.Dataset(ROWS, CLASSES), 4)
    return {"logistic": LogisticRegression().fit(ROWS, CLASSES), "boosted": booster, "forest": forest}


def _write_repository(repository: Path, models: dict[str, Any]) -> Path:
    """Write models with configurations."""
    import_module("skops.io").dump(
        models["logistic"], _folder(repository, "logistic", CONFIG % "sklearn") / "model.skops"
    )
    boosted = _folder(repository, "boosted_scores", SCORES % "xgboost" + 'default_model_filename: "model.ubj"\n')
    models["boosted"].save_model(boosted / "model.ubj")
    models["forest"].save_model(_folder(repository, "forest_scores", SCORES % "lightgbm") / "model.txt")
    (_folder(repository, "broken", SCORES % "xgboost") / "model.json").write_text("not a model")
    return repository


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Any]) -> Iterator[Server]:
    """A server of a repository, and, without any configuration, of files, of a folder with one, and of version folders."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.preprocessing import StandardScaler

    folder = tmp_path_factory.mktemp("files")
    repository = _write_repository(folder / "repository", models)
    skops, joblib = import_module("skops.io"), import_module("joblib")
    for name in ("in_folder", "versions/in_version/1", "versions/unnamed/1", "versions/torch/1"):
        (folder / name).mkdir(parents=True)
    joblib.dump(models["logistic"], folder / "pickled.joblib")
    models["boosted"].save_model(folder / "boosted.json")
    models["forest"].save_model(folder / "forest.txt")
    skops.dump(StandardScaler().fit(ROWS), folder / "in_folder" / "model.skops")
    (folder / "in_folder" / "notes.txt").write_text("a tree\n")
    (folder / "in_folder" / "metrics.json").write_text('{"accuracy": 1}')
    regressor = RandomForestRegressor(3).fit(ROWS, ROWS[:, 0])
    skops.dump(regressor, folder / "versions" / "in_version" / "1" / "model.skops")
    joblib.dump(models["logistic"], folder / "versions" / "unnamed" / "1" / "churn.joblib")
    (folder / "versions" / "torch" / "1" / "model.pt").write_bytes(b"x")
    single = ("pickled.joblib", "boosted.json", "forest.txt", "in_folder")
    with open_paths([folder / name for name in (*single, "versions")], str(folder / "state")) as served:
        options = [word for each in served.repositories for word in ("--model-repository", str(each))]
        with serving(repository, folder, "--profile-s", "0", *options) as started:
            yield started


def infer(server: Server, name: str, rows: Any) -> dict[str, Any]:
    body = {"inputs": [{"name": "x", "datatype": "FP64", "shape": list(rows.shape), "data": rows.ravel().tolist()}]}
    status, _, content = server.request("POST", f"/v2/models/{name}/infer", json.dumps(body).encode())
    assert status == 200, content
    outputs = json.loads(content)["outputs"]
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in outputs}


def test_scikit_learn(server: Server, models: dict[str, Any]) -> None:
    result = infer(server, "logistic", ROWS[:7])
    np.testing.assert_array_equal(result["label"][:, 0], models["logistic"].predict(ROWS[:7]))
    np.testing.assert_allclose(result["probabilities"], models["logistic"].predict_proba(ROWS[:7]), rtol=1e-12)


def test_xgboost(server: Server, models: dict[str, Any]) -> None:
    matrix = import_module("xgboost").DMatrix(ROWS[:7])
    result = infer(server, "boosted_scores", ROWS[:7])
    np.testing.assert_allclose(result["scores"], models["boosted"].predict(matrix), rtol=1e-6)
    np.testing.assert_allclose(result["margin"], models["boosted"].predict(matrix, output_margin=True), rtol=1e-5)


def test_lightgbm(server: Server, models: dict[str, Any]) -> None:
    result = infer(server, "forest_scores", ROWS[:7])
    np.testing.assert_allclose(result["scores"], models["forest"].predict(ROWS[:7]), rtol=1e-6)
    np.testing.assert_allclose(result["margin"], models["forest"].predict(ROWS[:7], raw_score=True), rtol=1e-5)


def test_a_file_that_the_framework_cannot_read_is_the_models_error(server: Server) -> None:
    rows = json.loads(server.request("POST", "/v2/repository/index")[2])
    (broken,) = (row for row in rows if row["name"] == "broken")
    assert broken["state"] == "UNAVAILABLE"
    assert "initialize raised" in broken["reason"] or "load raised" in broken["reason"]


def test_the_server_imports_no_framework(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "sklearn" not in maps
    assert "xgboost" not in maps
    assert "lightgbm" not in maps


def test_parameters_of_these_models_are_not_reported_as_useless(server: Server) -> None:
    assert "has no effect" not in server.text


def test_files_without_a_configuration_have_the_tensors_of_the_model(server: Server, models: dict[str, Any]) -> None:
    logistic, matrix = models["logistic"], import_module("xgboost").DMatrix(ROWS[:7])
    result = infer(server, "pickled", ROWS[:7])
    np.testing.assert_array_equal(result["label"][:, 0], logistic.predict(ROWS[:7]))
    np.testing.assert_allclose(result["probabilities"], logistic.predict_proba(ROWS[:7]), rtol=1e-12)
    assert infer(server, "in_version", ROWS[:7])["prediction"].shape == (7, 1)
    np.testing.assert_allclose(infer(server, "in_folder", ROWS)["transform"].mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(
        infer(server, "boosted", ROWS[:7])["prediction"], models["boosted"].predict(matrix), rtol=1e-6
    )
    np.testing.assert_allclose(infer(server, "forest", ROWS[:7])["prediction"], models["forest"].predict(ROWS[:7]))


def test_a_pickle_is_read_with_a_warning(server: Server) -> None:
    assert ".joblib runs code in it; skops.io.dump writes files without code" in server.text


def test_the_cure_of_a_file_names_its_backend(server: Server) -> None:
    rows = {row["name"]: row for row in json.loads(server.request("POST", "/v2/repository/index")[2])}
    assert 'write backend: "sklearn" and default_model_filename: "churn.joblib"' in rows["unnamed"]["reason"]
    assert "input is missing" in rows["torch"]["reason"]
    assert "model.pt lacks it: write it in config.pbtxt" in rows["torch"]["reason"]
    assert not any("ONNX" in row.get("reason", "") for row in rows.values())
