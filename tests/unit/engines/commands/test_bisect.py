"""`headrace bisect`: output, JSON, options, and the lines for the configuration."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
import yaml
from headrace_engines.commands.bisect import add_arguments, higher_bound, override_text, run
from headrace_engines.errors import BuildError, CallError
from headrace_engines.project import Project, open_project, read_spec
from rich.console import Console

from tests.support import networks
from tests.support.deviating_models import deviating_model
from tests.support.engine_projects import write_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    model = deviating_model()
    return write_project(tmp_path / "models", model, networks.inputs_of(model, 32), calibration={"method": "minmax"})


def called(project: Project, *words: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    repository = project.folder.path.parent
    cache = repository.parent / "cache"
    arguments = [project.name, "--model-repository", str(repository), "--cache", str(cache), *words]
    console = Console(file=io.StringIO(), width=120)
    assert run(parser.parse_args([*arguments, "--target", "onnxruntime"]), console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_layer_its_figures_and_the_override_are_printed(project: Project, tmp_path: Path) -> None:
    text = called(project, "--json", str(tmp_path / "out.json"))
    assert "First layer that deviates: loud (Conv, output [N, 8, 6, 6])" in text
    assert "before: wide" in text
    assert "after: loud" in text
    assert "The error is the layer's own" in text
    assert "loud in floating point repairs the output. In config.yaml:" in text
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["layer"]["node"] == "loud"
    assert document["repaired"] is True
    assert document["output"]["difference"]["cosine"] < 0.95 < document["repairs"][0]["difference"]["cosine"]
    # The printed lines are valid, and a search with them finds nothing.
    config = json.loads((project.folder.path / "config.yaml").read_text())
    override = yaml.safe_load(document["override"])
    config["optimization"]["calibration"] |= override["optimization"]["calibration"]
    (project.folder.path / "config.yaml").write_text(json.dumps(config))
    again = open_project(str(project.folder.path), project.folder.path.parent)
    assert "no output deviates" in called(again)


def test_fp16_nodes_are_kept_by_their_own_field(project: Project) -> None:
    spec = read_spec(project.config, "fp16")
    assert yaml.safe_load(override_text("a/b [c]", spec)) == {"optimization": {"keep_fp32": ["a/b [c]"]}}


def test_nodes_that_the_configuration_keeps_stay_in_the_override(tmp_path: Path) -> None:
    model = deviating_model()
    project = write_project(tmp_path, model, networks.inputs_of(model, 8), calibration={"keep": ["a"]})
    spec = read_spec(project.config, "int8")
    assert yaml.safe_load(override_text("d", spec)) == {"optimization": {"calibration": {"keep": ["a", "d"]}}}


def test_an_output_within_the_bound_is_one_sentence(project: Project) -> None:
    text = called(project, "--precision", "fp16")
    assert "no output deviates" in text
    assert "First layer" not in text


def test_rows_of_a_right_engine_have_the_same_outputs_in_a_batch(project: Project) -> None:
    text = called(project, "--rows", "8", "--precision", "fp16")
    assert text == "Batches of 8 rows in fp16: rows have the same outputs in a batch and alone.\n"


def test_without_repairs_no_layer_is_tried(project: Project) -> None:
    text = called(project, "--no-repair", "--samples", "4")
    assert "First layer that deviates: loud" in text
    assert "config.yaml" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--samples", "0"), "--samples is 0: write a number from 1 on"),
        (("--rows", "1"), "--rows is 1: write a number from 2 on"),
        (("--bound", "2"), "--bound is 2: write a cosine above 0, 1 at most"),
        (("--precision", "fp8"), "fp8 does not run on this machine: ONNX Runtime has no FP8 kernels"),
    ],
)
def test_wrong_options_are_named(project: Project, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(CallError) as raised:
        called(project, *words)
    assert message in str(raised.value)


def test_a_model_without_layers_in_the_precision_is_an_error(tmp_path: Path) -> None:
    model = networks.network("y = Relu(x)", {}, ("N", 4))
    project = write_project(tmp_path, model, networks.inputs_of(model, 8))
    with pytest.raises(BuildError, match="no convolution and no product"):
        called(project, "--precision", "int8")


@pytest.mark.parametrize(
    ("cosine", "bound"),
    [(0.5, "0.75"), (0.96, "0.980"), (1 - 8.8e-7, "0.99999956"), (-1.0, "0.00"), (1.0, ""), (float("nan"), "")],
)
def test_a_bound_above_the_cosine_is_proposed(cosine: float, bound: str) -> None:
    assert higher_bound(cosine) == bound
    if bound:
        assert cosine < float(bound) < 1
