"""`headrace import onnx`: the folder that it writes, what it prints, and what it refuses."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.model_folder import read_model_folder
from headrace_engines.commands.import_onnx import add_arguments, run
from headrace_engines.errors import BuildError
from onnx import numpy_helper
from rich.console import Console

from tests.support.onnx_blocks import Network


def fixed(batch: int = 1) -> onnx.ModelProto:
    net = Network()
    x = net.input("x", [batch, 3, 4, 4])
    flat = net.node("Reshape", net.conv(x, (3, 4), "conv"), net.constant([batch, 64], np.int64), name="flat")
    return net.model(net.node("Gemm", flat, net.weight(64, 5), net.weight(5), name="scores"))


def imported(tmp_path: Path, *words: str, model: onnx.ModelProto | None = None) -> str:
    source = tmp_path / "my net.onnx"
    if model is not None or not source.exists():
        onnx.save(model or fixed(), source)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    output = io.StringIO()
    options = parser.parse_args([str(source), "--model-repository", str(tmp_path / "models"), *words])
    assert run(options, Console(file=output, width=200)) == 0
    return output.getvalue()


def test_a_file_is_copied_as_it_is(tmp_path: Path) -> None:
    assert "without batching" in imported(tmp_path, "--name", "net")
    folder = tmp_path / "models" / "net"
    assert (folder / "1" / "model.onnx").read_bytes() == (tmp_path / "my net.onnx").read_bytes()
    assert read_model_folder(folder, folder.parent).config.max_batch_size == 0


def test_external_data_come_along(tmp_path: Path) -> None:
    onnx.save(fixed(), tmp_path / "my net.onnx", save_as_external_data=True, location="w.bin", size_threshold=16)
    imported(tmp_path)
    version = tmp_path / "models" / "my_net" / "1"
    assert (version / "w.bin").read_bytes() == (tmp_path / "w.bin").read_bytes()
    imported(tmp_path, "--dynamic-batch")
    freed = onnx.load(version.with_name("2") / "model.onnx")
    kept = {tensor.name: numpy_helper.to_array(tensor) for tensor in freed.graph.initializer}
    for tensor in fixed().graph.initializer:
        if tensor.name in kept:
            np.testing.assert_array_equal(kept[tensor.name], numpy_helper.to_array(tensor))


def test_a_second_version_keeps_the_configuration(tmp_path: Path) -> None:
    imported(tmp_path, "--dynamic-batch", "--max-batch-size", "3")
    config = tmp_path / "models" / "my_net" / "config.yaml"
    config.write_text(config.read_text() + "# mine\n")
    imported(tmp_path, "--dynamic-batch")
    assert config.read_text().endswith("# mine\n")
    assert "max_batch_size: 3" in config.read_text()
    assert sorted(path.name for path in config.parent.iterdir()) == ["1", "2", "config.yaml"]


def test_a_version_that_does_not_suit_the_configuration_is_refused(tmp_path: Path) -> None:
    imported(tmp_path, "--dynamic-batch")
    with pytest.raises(BuildError, match="does not suit the configuration"):
        imported(tmp_path)
    assert not (tmp_path / "models" / "my_net" / "2").exists()


def test_an_existing_version_is_refused(tmp_path: Path) -> None:
    imported(tmp_path)
    with pytest.raises(BuildError, match="exists: choose another --name or --version"):
        imported(tmp_path, "--version", "1")


def test_a_graph_that_mixes_rows_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    net = Network()
    model = net.model(net.node("Softmax", net.input("x", [1, 6]), axis=0, name="culprit"))
    with pytest.raises(BuildError, match='Softmax node "culprit" computes across the rows'):
        imported(tmp_path, "--dynamic-batch", model=model)
    assert not (tmp_path / "models").exists()


def test_a_batch_of_four_is_freed(tmp_path: Path) -> None:
    assert "Reshape node 'flat': [4, 64] is [-1, 64] now." in imported(tmp_path, "--dynamic-batch", model=fixed(4))


def test_options_are_checked(tmp_path: Path) -> None:
    for words, reason in (
        (["--max-batch-size", "4"], "belongs to --dynamic-batch"),
        (["--dynamic-batch", "--max-batch-size", "0"], "one row or more"),
        (["--version", "0"], "versions are positive"),
        (["--name", "a/b"], "cannot be a model's name"),
    ):
        with pytest.raises(BuildError, match=reason):
            imported(tmp_path, *words)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my net.onnx").write_bytes(b"no model")
    with pytest.raises(BuildError, match="not a readable ONNX model"):
        imported(tmp_path)
    (tmp_path / "my net.onnx").unlink()
    net = Network()
    model = net.model(net.node("MatMul", net.input("x", [1, 6]), net.weight(6, 2)))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros((5, 2), np.float32), "constant0"))
    with pytest.raises(BuildError, match="not a valid model"):
        imported(tmp_path, model=model)
