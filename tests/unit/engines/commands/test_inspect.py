"""`headrace inspect` on real artefacts: the opened file, the output, and the escaping of names."""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx
import pytest
from headrace.config.digests import config_digest, onnx_digest
from headrace.config.manifest import Stamp, artefact_name, read_layers, write_stamp
from headrace.config.model_folder import read_model_folder
from headrace.models.folders import fingerprint_version, without_builds
from headrace_engines.commands.inspect import add_arguments, run
from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.progress import silent
from headrace_engines.targets.base import Array, BatchTiming, TargetSpec
from headrace_engines.targets.onnxruntime import OnnxRuntimeEngine, OnnxRuntimeTarget
from onnx import numpy_helper
from rich.console import Console

CONFIG = """backend: onnxruntime
max_batch_size: {batch}
input: [{{name: x, data_type: TYPE_FP32, dims: [16, 8, 8]}}]
output: [{{name: y, data_type: TYPE_FP32, dims: [16, 8, 8]}}]
"""
KEY = "0123456789abcdef" * 4


def add_model(repository: Path, batch: int = 16, names: tuple[str, str] = ("conv", "relu")) -> Path:
    first = "N" if batch else "1"
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[{first},16,8,8] x) => (float[{first},16,8,8] y)
        {{ c = Conv(x, w) y = Relu(c) }}"""
    )
    if not batch:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim.pop(0)
        weights = np.zeros((16, 1, 1, 1), "f4")
        model.graph.node[0].op_type = "Mul"
        model.graph.initializer.append(numpy_helper.from_array(weights[0], "w"))
    else:
        weights = np.random.default_rng(0).standard_normal((16, 16, 1, 1)).astype("f4")
        model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    folder = repository / "small"
    (folder / "1").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG.format(batch=batch))
    onnx.save(model, folder / "1" / "model.onnx")
    return folder


def publish(folder: Path, precision: str = "int8") -> Path:
    """Publish an engine as `headrace build` does, with a copy of the model as the artefact."""
    source = folder / "1" / "model.onnx"
    target = OnnxRuntimeTarget()
    artefact = folder / "1" / artefact_name(KEY, ".onnx")
    target.build(read_onnx(source), TargetSpec("fp32"), artefact, silent)
    config = read_model_folder(folder, folder.parent).config
    stamp = Stamp(
        key=KEY,
        artefact=artefact.name,
        artefact_sha256=onnx_digest(artefact),
        size_bytes=artefact.stat().st_size,
        onnx_sha256=onnx_digest(source),
        config_digest=config_digest(config),
        spec_digest=KEY,
        precision=precision,
        requested=precision,
        overridden=False,
        machine=target.describe(),
    )
    write_stamp(folder / "1", stamp)
    return artefact


def inspect(*words: str | Path, width: int = 160) -> str:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = io.StringIO()
    given = [str(word) for word in ("small", "--target", "onnxruntime", *words)]
    assert run(parser.parse_args(given), Console(file=out, width=width, color_system=None)) == 0
    return out.getvalue()


class Outline(HTMLParser):
    """Fails where a page is not well-formed; collects its tags and what it would fetch."""

    VOID = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def test_without_an_engine_the_onnx_file_is_inspected(tmp_path: Path) -> None:
    add_model(tmp_path)
    text = inspect("--model-repository", tmp_path)
    assert "This is the model itself: no engine is built; `headrace build small` builds an engine." in text
    assert "model.onnx" in text
    assert "conv, relu" in text


def test_the_engine_of_this_machine_is_opened(tmp_path: Path) -> None:
    artefact = publish(add_model(tmp_path))
    inspect("--model-repository", tmp_path, "--json", tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert (document["artefact"], document["precision"], document["reason"]) == (artefact.name, "int8", "")
    assert [layer["nodes"] for layer in document["layers"] if layer["nodes"]] == [["conv", "relu"]]


def test_an_artefact_that_no_longer_fits_is_not_opened(tmp_path: Path) -> None:
    folder = add_model(tmp_path)
    publish(folder)
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("max_batch_size: 16", "max_batch_size: 8"))
    text = inspect("--model-repository", tmp_path)
    assert "another configuration" in text
    assert "model.onnx" in text


def test_the_json_keeps_its_form(tmp_path: Path) -> None:
    add_model(tmp_path)
    inspect("--model-repository", tmp_path, "--batch", "4", "--json", tmp_path / "deep" / "a.json")
    document = json.loads((tmp_path / "deep" / "a.json").read_text())
    assert list(document) == [
        "format", "model", "version", "artefact", "precision", "machine", "reason", "shapes", "rows", "median_us", "p99_us",
        "rows_per_s", "total_us", "layers",
    ]  # fmt: skip
    assert list(document["layers"][0]) == ["name", "kind", "nodes", "precision", "tactic", "time_us", "share"]
    assert (document["format"], document["rows"], document["shapes"]) == (1, 4, {"x": [4, 16, 8, 8]})
    assert sum(layer["share"] for layer in document["layers"]) == pytest.approx(1)
    assert sum(layer["time_us"] for layer in document["layers"]) == pytest.approx(document["total_us"])


def test_the_page_needs_nothing_and_has_a_bar_a_layer(tmp_path: Path) -> None:
    add_model(tmp_path)
    inspect("--model-repository", tmp_path, "--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    page = (tmp_path / "a.html").read_text()
    layers = json.loads((tmp_path / "a.json").read_text())["layers"]
    outline = Outline(page)
    assert outline.fetched == []
    assert "script" not in outline.tags
    assert "http" not in re.sub(r"http-equiv|http://www\.w3\.org/2000/svg", "", page)
    assert page.count('class="bar"') == len(layers)
    assert '<meta name="viewport"' in page
    assert "prefers-color-scheme" in page


HOSTILE = ("<script>alert(1)</script>", "\x1b[2J</li>[red]'\"&")


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    add_model(tmp_path, names=HOSTILE)
    text = inspect(
        "--model-repository", tmp_path, "--html", tmp_path / "a.html", "--json", tmp_path / "a.json", width=400
    )
    page = (tmp_path / "a.html").read_text()
    assert "script" not in Outline(page).tags
    assert "&lt;script&gt;" in page
    assert "\x1b" not in text
    assert "</li>[red]" in text
    nodes = [name for layer in json.loads((tmp_path / "a.json").read_text())["layers"] for name in layer["nodes"]]
    assert tuple(nodes) == HOSTILE


@pytest.mark.slow
def test_the_longest_layers_come_first(demo_repository: Callable[[str], Path], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    out = io.StringIO()
    words = ["digits", "--target", "onnxruntime", "--model-repository", str(demo_repository("digits")), "--top", "3"]
    assert run(parser.parse_args(words), Console(file=out, width=160)) == 0
    times = [float(number) for number in re.findall(r" ([\d.]+) +[\d.]+% ", out.getvalue())]
    assert len(times) == 3
    assert times == sorted(times, reverse=True)


def test_a_model_without_a_batch_dimension_has_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Fixed times: on a busy machine the median and the throughput of a real run are far apart.
    measure = OnnxRuntimeEngine.time

    def time(engine: OnnxRuntimeEngine, inputs: Mapping[str, Array], seconds: float) -> BatchTiming:
        rows = measure(engine, inputs, 0.01).rows
        return BatchTiming(rows, 100.0, 200.0, rows * 10_000.0)

    monkeypatch.setattr(OnnxRuntimeEngine, "time", time)
    add_model(tmp_path, batch=0)
    inspect("--model-repository", tmp_path, "--json", tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert (document["rows"], document["shapes"]) == (1, {"x": [16, 8, 8]})
    assert (document["median_us"], document["rows_per_s"]) == (100.0, 10_000.0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--top", "0"), "--top is 0"),
        (("--batch", "-1"), "--batch is -1"),
        (("--batch", "17"), "takes 1 to 16 rows"),
        (("--version", "7"), "version 7"),
        (("--html", "{file}/a.html"), "cannot be written"),
    ],
)
def test_invalid_options_are_reported(words: tuple[str, str], expected: str, tmp_path: Path) -> None:
    folder = add_model(tmp_path)
    with pytest.raises(BuildError, match=expected):
        inspect("--model-repository", tmp_path, words[0], words[1].format(file=folder / "config.yaml"))


def test_a_server_can_show_the_published_layers(tmp_path: Path) -> None:
    artefact = publish(add_model(tmp_path))
    before = fingerprint_version(artefact.parent)
    assert "A server shows it now" in inspect("--model-repository", tmp_path, "--publish")
    report = read_layers(artefact.parent)
    assert report is not None
    assert (report.artefact, report.precision, report.model) == (artefact.name, "int8", "small")
    assert sum(layer.share for layer in report.layers) == pytest.approx(1, abs=0.01)
    # A server that watches the folder does not load the model anew for it.
    after = fingerprint_version(artefact.parent)
    assert after != before
    assert without_builds(after, "model.onnx") == without_builds(before, "model.onnx")
