"""`headrace split` on real models: files, table, JSON, refusals, and answers of the served parts."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import headrace
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import yaml
from headrace.config.model_folder import read_model_folder
from headrace_engines import onnx_graph
from headrace_engines.commands import split as split_command
from headrace_engines.commands.split import add_arguments, run
from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import Array
from headrace_engines.targets import onnxruntime as target
from rich.console import Console

from loadtest.onnx_models import convolution, transformer
from tests.support.split_graphs import layer_report

NAMES = ["net_part1", "net_part2", "net_split"]


def add_model(repository: Path, model: onnx.ModelProto, config: str = "") -> Path:
    folder = repository / "net"
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(f"max_batch_size: 8\ndynamic_batching: {{}}\n{config}")
    return folder


def split(repository: Path, *words: str) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    console = Console(file=io.StringIO(), width=160)
    options = parser.parse_args(["net", "--model-repository", str(repository), "--target", "onnxruntime", *words])
    assert run(options, console) == 0
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def whole(repository: Path, inputs: dict[str, Array]) -> dict[str, Array]:
    session = ort.InferenceSession(str(repository / "net/1/model.onnx"), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def check_served(repository: Path, inputs: dict[str, Array], names: list[str] = NAMES) -> None:
    with headrace.Server(repository, models=names, state_dir="") as server:
        outputs = server.model(names[-1]).infer(inputs)
    for name, expected in whole(repository, inputs).items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-4)


def test_parts_are_served_on_the_cpu(tmp_path: Path) -> None:
    add_model(tmp_path, convolution((8, 8, 8, 8), side=16), "cpu_max_batch_size: 4\nslo: {p99_ms: 900}\n")
    text = split(tmp_path, "--json", str(tmp_path / "split.json"))
    assert "bit for bit" in text
    document = json.loads((tmp_path / "split.json").read_text())
    assert [part["model"] for part in document["parts"]] == NAMES[:2]
    assert document["outputs_compared"]
    assert document["parts"][0]["received"] == []
    received = document["parts"][1]["received"]
    assert received, "measured times decide which tensor it is"
    assert document["parts"][1]["received_bytes_per_row"] == sum(each["bytes_per_row"] for each in received)
    config = read_model_folder(tmp_path / NAMES[0], tmp_path).config
    assert (config.cpu_max_batch_size, config.instance_group[0].kind) == (4, "KIND_CPU")
    assert read_model_folder(tmp_path / NAMES[2], tmp_path).config.slo.p99_ms == 900
    pixels = np.random.default_rng(0).standard_normal((5, 3, 16, 16)).astype(np.float32)
    check_served(tmp_path, {"pixels": pixels})


def test_a_transformer_in_three_parts_with_texts_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = "optimization: {profiles: [{shapes: {ids: [[4], [16], [64]], mask: [[4], [16], [64]]}}]}\n"
    add_model(tmp_path, transformer(layers=3, width=32, heads=2, words=50), profile)
    # One product of each layer has all of its time, so that the cut is the same in each run.
    report = layer_report([((f"l{layer}_narrow",), 30.0) for layer in range(3)])
    monkeypatch.setattr(split_command, "_measure", lambda project, options: report)
    split(tmp_path, "--parts", "3", "--gpus", "0,1,0")
    config = yaml.safe_load((tmp_path / "net_part2/config.yaml").read_text())
    assert config["instance_group"] == [{"kind": "KIND_GPU", "count": 2, "gpus": [1]}]
    (shapes,) = [each["shapes"] for each in config["optimization"]["profiles"]]
    states = [three for three in shapes.values() if len(three[0]) == 2]
    assert states == [[[4, 32], [16, 32], [64, 32]]]
    split(tmp_path, "--parts", "3", "--gpus", "none", "--replace")
    ids = np.random.default_rng(0).integers(0, 50, (3, 7)).astype(np.int64)
    check_served(
        tmp_path, {"ids": ids, "mask": np.ones_like(ids)}, ["net_part1", "net_part2", "net_part3", "net_split"]
    )


def test_files_larger_than_a_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are lowered: weights lie beside the files, and are measured node by node."""
    folder = add_model(tmp_path, convolution((8, 8, 8, 8), side=8))
    model = onnx.load(folder / "1" / "model.onnx")
    onnx.save(model, folder / "1" / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    monkeypatch.setattr(onnx_graph, "_PROTOBUF_LIMIT_BYTES", 100)
    monkeypatch.setattr(target, "_MAX_REWRITTEN_BYTES", 100)
    split(tmp_path)
    assert list(tmp_path.glob("net_part?/1/model.onnx.data")), "the measured times decide which part has the weights"
    check_served(tmp_path, {"pixels": np.ones((2, 3, 8, 8), np.float32)})


def test_a_second_split_needs_replace(tmp_path: Path) -> None:
    add_model(tmp_path, convolution((8, 8), side=8))
    split(tmp_path, "--no-check")
    with pytest.raises(BuildError, match=r"has net_part1, net_part2, net_split already: add --replace"):
        split(tmp_path)
    split(tmp_path, "--replace")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["net", *NAMES])


@pytest.mark.parametrize(
    ("config", "feature"),
    [
        ("postprocess: {output: scores, top_k: 2}\n", "postprocess"),
        ("preprocess: {by: server, input: pixels, crop: [8, 8]}\n", "preprocess.by: server"),
    ],
)
def test_a_model_that_does_more_than_its_graph_is_refused(tmp_path: Path, config: str, feature: str) -> None:
    add_model(tmp_path, convolution((8, 8), side=8), config)
    with pytest.raises(BuildError, match=f"net has {feature}, which a pipeline of parts does not have"):
        split(tmp_path)


def test_int8_is_left_out_with_a_note(tmp_path: Path) -> None:
    add_model(tmp_path, convolution((8, 8), side=8), "optimization: {precision: int8}\n")
    assert "needs samples of the tensors between the parts" in split(tmp_path)
    assert "optimization" not in yaml.safe_load((tmp_path / "net_part1/config.yaml").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "1"), "--parts is 1: write a number from 2 to 16"),
        (("--gpus", "0"), "--gpus is '0': write 2 numbers"),
        (("--gpus", "0,x"), "--gpus is '0,x'"),
        (("--batch", "0"), "--batch is 0"),
        (("--slack", "-1"), "--slack is -1"),
    ],
)
def test_wrong_options(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    add_model(tmp_path, convolution((8, 8), side=8))
    with pytest.raises(CallError, match=message):
        split(tmp_path, *words)
