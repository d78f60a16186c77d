"""Attacks by load requests that bring code: Python models in files or configurations of clients (S29 in docs/security.md)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import python_models
from tests.support.models import add_model, affine
from tests.support.python_models import add_python_model
from tests.support.serving import Server, serving

OPTIONS = ("--model-control", "explicit", "--load-model", "python", "--load-model", "mixed", "--allow-model-override")
TENSORS = '"input":[{"name":"x","data_type":"TYPE_FP32","dims":[1]}],"output":[{"name":"y","data_type":"TYPE_FP32","dims":[1]}]'


def hostile(folder: Path) -> tuple[str, Path]:
    """Return code that writes a file when it is imported, and the file."""
    proof = folder / "the-code-was-run"
    return f"open({str(proof)!r}, 'w').close()\n{python_models.ADD_SUB}", proof


def build(folder: Path) -> Path:
    """Write a repository whose folders have more code than the models run."""
    repository = folder / "repository"
    add_python_model(repository, "python", python_models.ADD_SUB, python_models.ADD_SUB_CONFIG)
    (repository / "python" / "1" / "other.py").write_text(hostile(folder)[0])
    add_model(repository, "mixed", affine(seed=1))
    (repository / "mixed" / "1" / "model.py").write_text(hostile(folder)[0])
    return repository


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uploads")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(build(folder), folder, *OPTIONS, "--profile-s", "0") as running:
        yield running


def load(server: Server, name: str, config: str, files: dict[str, bytes] | None = None) -> tuple[int, str]:
    parameters: dict[str, Any] = {"config": config}
    for path, content in (files or {}).items():
        parameters[f"file:{path}"] = base64.b64encode(content).decode()
    body = json.dumps({"parameters": parameters}).encode()
    status, _, content = server.request("POST", f"/v2/repository/models/{name}/load", body)
    return status, content.decode()


@pytest.mark.parametrize(
    ("config", "file"),
    [
        ("{}", "1/model.py"),
        ('{"backend":"python"}', "1/model.py"),
        ('{"backend":"python","default_model_filename":"run.txt",' + TENSORS + "}", "1/run.txt"),
        ('{"default_model_filename":"m.py"}', "1/m.py"),
        ('{"platform":"python","parameters":{"EXECUTION_ENV_PATH":{"string_value":"/tmp/env.tar.gz"}}}', "1/model.py"),
    ],
)
def test_uploaded_code_is_refused_before_it_is_run(server: Server, folder: Path, config: str, file: str) -> None:
    code, proof = hostile(folder)
    for name in ("new", "mixed", "python"):
        status, text = load(server, name, config, {file: code.encode()})
        assert status == 400, text
        assert "run as code, which clients may not send" in text
        assert "--allow-python-uploads" in text
    assert not proof.exists()


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("mixed", '{"backend":"python",' + TENSORS + "}"),
        ("mixed", '{"default_model_filename":"model.py"}'),
        ("python", '{"backend":"python","parameters":{"EXECUTION_ENV_PATH":{"string_value":"/tmp/env.tar.gz"}}}'),
        ("python", '{"backend":"python","default_model_filename":"other.py"}'),
    ],
)
def test_a_configuration_cannot_choose_other_code(server: Server, folder: Path, model: str, config: str) -> None:
    status, text = load(server, model, config)
    assert status == 400, text
    assert "changes the code that the model runs or its interpreter" in text
    assert not hostile(folder)[1].exists()


def test_a_configuration_that_keeps_the_code_is_accepted(server: Server) -> None:
    tensors = [{"name": f"INPUT{i}", "data_type": "TYPE_FP32", "dims": [4]} for i in range(2)]
    outputs = [{"name": f"OUTPUT{i}", "data_type": "TYPE_FP32", "dims": [4]} for i in range(2)]
    config = {"backend": "python", "max_batch_size": 4, "input": tensors, "output": outputs}
    status, text = load(server, "python", json.dumps(config))
    assert status == 200, text
    status, _, content = server.request("GET", "/v2/models/python/config")
    assert json.loads(content)["max_batch_size"] == 4


def test_the_option_allows_uploads_of_code(tmp_path: Path) -> None:
    code, proof = hostile(tmp_path)
    config = json.dumps({"backend": "python"})
    files = {"1/model.py": code.replace(python_models.ADD_SUB, python_models.AUTO_COMPLETE_BATCH).encode()}
    with serving(build(tmp_path), tmp_path, *OPTIONS, "--allow-python-uploads", "--profile-s", "0") as server:
        status, text = load(server, "new", config, files)
        assert status == 200, text
    assert proof.exists()
