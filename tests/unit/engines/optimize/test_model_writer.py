"""A smaller model in the repository: a new model or a new version, complete or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace_engines.errors import BuildError
from headrace_engines.optimize.model_writer import staged_model
from headrace_engines.project import Project, open_project
from onnx import numpy_helper

from tests.support.engine_projects import write_project


def matmul(classes: int = 3) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,4] x) => (float[N,{classes}] y) {{ y = MatMul(x, w) }}"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, classes), np.float32), "w"))
    return model


@pytest.fixture
def original(tmp_path: Path) -> Project:
    project = write_project(tmp_path / "models", matmul(), {"x": np.ones((8, 4), np.float32)})
    (project.folder.path / "labels.txt").write_text("a\nb\nc\n")
    return project


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_new_model_has_configuration_samples_and_report(original: Project, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    with staged_model(original, matmul(), "net_pruned", repository) as staged:
        assert staged.project.config.max_batch_size == 8
        assert not (repository / "net_pruned").exists()
        staged.publish({"points_lost": 0.25})
    files = ["1/model.onnx", "1/optimize.json", "calibration.npz", "config.yaml", "labels.txt"]
    assert contents(repository / "net_pruned") == files
    assert json.loads((repository / "net_pruned/1/optimize.json").read_text()) == {"points_lost": 0.25}
    project = open_project("net_pruned", repository)
    assert project.config.name == "net_pruned"
    assert project.config.optimization.calibration.data == "calibration.npz"
    assert sorted(path.name for path in repository.iterdir()) == ["net", "net_pruned"]


@pytest.mark.parametrize("text", ["# demo\nname: net\nmax_batch_size: 8\n", "max_batch_size: 8\n"])
def test_name_in_yaml_is_that_of_the_new_model(text: str, original: Project, tmp_path: Path) -> None:
    (original.folder.path / "config.yaml").write_text(text)
    with staged_model(original, matmul(), "other", tmp_path / "models") as staged:
        assert staged.project.config.name == "other"


def test_name_in_pbtxt_is_that_of_the_new_model(original: Project, tmp_path: Path) -> None:
    (original.folder.path / "config.yaml").unlink()
    (original.folder.path / "config.pbtxt").write_text('name: "net"\nbackend: "onnxruntime"\nmax_batch_size: 8\n')
    original = open_project("net", tmp_path / "models")
    with staged_model(original, matmul(), "other", tmp_path / "models") as staged:
        staged.publish({})
    assert open_project("other", tmp_path / "models").config.name == "other"


def test_existing_model_gets_a_new_version(original: Project, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    with staged_model(original, matmul(), "net", repository) as staged:
        assert staged.project.version == 2
        staged.publish({})
    assert open_project("net", repository).version == 2
    assert (repository / "net/1/model.onnx").exists()
    assert [path.name for path in repository.iterdir()] == ["net"]


def test_nothing_remains_without_publishing(original: Project, tmp_path: Path) -> None:
    before = contents(tmp_path / "models")
    with staged_model(original, matmul(), "net_pruned", tmp_path / "models"):
        pass
    with pytest.raises(RuntimeError), staged_model(original, matmul(), "net", tmp_path / "models"):
        raise RuntimeError
    assert contents(tmp_path / "models") == before


def test_model_that_does_not_fit_the_configuration_is_refused(original: Project, tmp_path: Path) -> None:
    (original.folder.path / "config.yaml").write_text(
        "max_batch_size: 8\ninput: [{name: x, data_type: TYPE_FP32, dims: [4]}]\n"
        "output: [{name: y, data_type: TYPE_FP32, dims: [3]}]\n"
    )
    before = contents(tmp_path / "models")
    with (
        pytest.raises(BuildError, match="y"),
        staged_model(original, matmul(5), "net", tmp_path / "models") as staged,
    ):
        staged.publish({})
    assert contents(tmp_path / "models") == before


def test_names_outside_of_the_repository_are_refused(original: Project, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="--name"), staged_model(original, matmul(), "../net", tmp_path / "models"):
        pass
