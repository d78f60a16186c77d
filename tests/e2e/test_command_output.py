"""Tables and messages of the commands in a pipe: one line for each row, however narrow `COLUMNS` says the terminal is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.support.models import add_model, affine
from tests.support.serving import run_headrace, serving

NODE = "/backbone/stage_{}/block_with_a_long_name/convolution_and_activation/Relu"
CONFIG = """max_batch_size: 4
input: [{name: x, data_type: TYPE_FP32, dims: [16, 8, 8]}]
output: [{name: y, data_type: TYPE_FP32, dims: [16, 8, 8]}]
"""


def command(*words: str | Path, status: int = 0) -> tuple[list[str], list[str]]:
    """Lines of standard output and of standard error, both pipes."""
    done = run_headrace(*words, env={**os.environ, "COLUMNS": "30"}, timeout_s=100)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model whose layers have names that no terminal is wide enough for."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[N,16,8,8] x) => (float[N,16,8,8] y)
        { c = Conv(x, w) a = Relu(c) d = Conv(a, w) y = Sigmoid(d) }"""
    )
    for number, node in enumerate(model.graph.node):
        node.name = NODE.format(number)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((16, 16, 1, 1), np.float32), "w"))
    folder = tmp_path / "models" / "a_model_with_a_name_longer_than_the_terminal"
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(CONFIG)
    return folder.parent


def line_with(lines: list[str], *texts: str) -> str:
    """Return the only line with all the texts."""
    matches = [line for line in lines if all(text in line for text in texts)]
    assert len(matches) == 1, "\n".join([*texts, "in", *lines])
    return matches[0]


def test_tables_of_the_builders_have_a_line_for_each_row(repository: Path, tmp_path: Path) -> None:
    (model,) = [folder.name for folder in repository.iterdir()]
    where = ("--model-repository", repository, "--target", "onnxruntime")
    cache = ("--cache", tmp_path / "cache")
    lines, _ = command("build", model, "--publish-slower", *where, *cache)
    line_with(lines, "Engines for ", " with ONNX Runtime ")
    line_with(lines, "model ", "engine", "rows/s", "size", "time")
    line_with(lines, model, "fp32", "published", " s")

    lines, _ = command("inspect", model, *where)
    for number in range(4):
        line_with(lines, NODE.format(number), "%")
    line_with(lines, "ONNX nodes", "kind", "precision", "tactic", "share")

    lines, _ = command("compare", model, *where, *cache, "--precisions", "fp32,fp16", "--seconds", "0.05")
    line_with(lines, "fp16", " MB" if " MB" in "\n".join(lines) else " kB")

    lines, _ = command("engines", "ls", "--model-repository", repository, *cache)
    rows = [line for line in lines if model in line and ", onnxruntime " in line]
    assert len(rows) == 3, "\n".join(lines)  # two stored, one published
    line_with(lines, "key", "published")


def test_tables_of_the_server_commands_have_a_line_for_each_row(repository: Path) -> None:
    (folder,) = repository.iterdir()
    lines, _ = command("tune", folder, "--instances", "1,2", "--seconds", "0.02")
    line_with(lines, "rows", "1 instance", "2 instances")
    lines, _ = command("simulate", folder, "--seconds", "0.2")
    line_with(lines, folder.name, "single 100.0%", "none")
    lines, _ = command("validate", repository)
    line_with(lines, "OK", folder.name, "x FP32[-1,16,8,8] -> y FP32[-1,16,8,8], batches of up to 4")


def test_output_of_a_running_server_has_one_line_per_fact(tmp_path: Path) -> None:
    name = "a_model_with_a_name_longer_than_the_terminal"
    add_model(tmp_path / "models", name, affine(), config="max_batch_size: 4\n")
    with serving(tmp_path / "models", tmp_path) as server:
        lines, _ = command("explain", name, "--url", server.url)
        assert lines[0] == f"{name}, version 1"
        assert all(line == line.rstrip() for line in lines), "nothing is padded"
        assert command("health", "--url", server.url) == (["ready"], [])
        _, errors = command("explain", "no_model_of_this_name_is_on_that_server", "--url", server.url, status=1)
        assert len(errors) == 1
