"""`headrace infer` against a scripted gRPC server: its requests for pictures and tensors, and its printed results."""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skimage
from headrace.inference.pipelines.image import ImageRecipe, decode, prepare
from headrace.server.commands import infer as infer_command
from headrace.server.commands.infer import Classified, RankedClass, server_time_ns
from rich.console import Console

from tests.unit.server.commands.conftest import respond

PHOTOGRAPHS = Path(skimage.__file__).parent / "data"
CAT, COFFEE, CAMERA = (str(PHOTOGRAPHS / name) for name in ("chelsea.png", "coffee.png", "camera.png"))
PARAMETERS = {
    "headrace.preprocess.input": "image",
    "headrace.preprocess.resize_short_side": "32",
    "headrace.preprocess.crop": "[24, 28]",
    "headrace.preprocess.mean": "[127.0]",
    "headrace.preprocess.std": "[128.0]",
}
RECIPE = ImageRecipe.from_parameters(PARAMETERS)
LINES = {
    "cat": ["0.700000:1:tiger cat", "0.200000:0:tabby"],
    "other": ["0.900000:2:espresso: a small one", "0.050000:0:tabby"],
}


def bytes_tensor(texts: list[str]) -> bytes:
    return b"".join(len(t.encode()).to_bytes(4, "little") + t.encode() for t in texts)


def describe(
    server: Any,
    parameters: dict[str, str] = PARAMETERS,
    max_batch_size: int = 2,
    shape: tuple[int, ...] = (-1, 3, 24, 28),
    datatype: str = "FP32",
) -> None:
    config = {
        "name": "net",
        "max_batch_size": max_batch_size,
        "parameters": {key: {"string_value": text} for key, text in parameters.items()},
        "output": [{"name": "features"}, {"name": "scores", "label_filename": "labels.txt"}],
    }
    metadata = {
        "name": "net",
        "inputs": [{"name": "image", "datatype": datatype, "shape": list(shape)}],
        "outputs": [{"name": "features", "datatype": "FP32"}, {"name": "scores", "datatype": "FP32"}],
    }
    server.configs["net"] = config
    server.metadata["net"] = metadata


@pytest.fixture
def net(grpc_server: Any) -> Any:
    """A classifier of batches of two; `sent` keeps the tensors, statistics count the requests."""
    grpc_server.sent = sent = []

    def infer(request: Any) -> Any:
        (tensor,), (output,), (data,) = request.inputs, request.outputs, request.raw_input_contents
        assert (output.name, output.parameters["classification"].int64_param) == ("scores", 2)
        array = np.frombuffer(data, {"FP32": "<f4", "UINT8": "u1"}[tensor.datatype]).reshape(tensor.shape)
        sent.append(array)
        rows = len(array) if array.ndim == 4 else 1
        # The first picture of the first request is taken for the cat.
        texts = [text for row in range(rows) for text in LINES["cat" if len(sent) == 1 and row == 0 else "other"]]
        return respond(("scores", "BYTES", [rows, 2] if array.ndim == 4 else [2], bytes_tensor(texts)))

    describe(grpc_server)
    grpc_server.infer["net"] = infer
    grpc_server.successes = lambda: (len(sent), len(sent) * 2_500_000)
    return grpc_server


@pytest.fixture
def headrace(grpc_server: Any) -> Callable[..., tuple[int, str, str]]:
    """Run the command with arguments as typed; (status, standard output, standard error)."""

    def run(*typed: str, width: int = 80, encoding: str = "utf-8") -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        infer_command.add_arguments(parser)
        args = parser.parse_args(["--url", grpc_server.address, "--top", "2", *typed])
        raw, errors = io.BytesIO(), io.StringIO()
        with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as out:
            console = Console(file=out, width=width, highlight=False)
            status = infer_command.main(args, console, Console(file=errors))
            return status, raw.getvalue().decode(encoding), errors.getvalue()

    return run


def test_images_are_sent_in_batches_by_the_recipe_of_the_model(net: Any, headrace: Any) -> None:
    assert RECIPE is not None
    status, out, errors = headrace("net", CAT, COFFEE, CAMERA)
    assert (status, errors) == (0, "")
    assert [array.shape for array in net.sent] == [(2, 3, 24, 28), (1, 3, 24, 28)]
    expected = [prepare(decode(Path(file).read_bytes()), RECIPE) for file in (CAT, COFFEE, CAMERA)]
    assert np.array_equal(np.concatenate(net.sent), np.concatenate(expected))
    lines = out.splitlines()
    assert [line for line in lines if line.endswith(".png")] == [CAT, COFFEE, CAMERA]
    assert lines[1].split("█")[0].strip() == "tiger cat"
    assert lines[1].endswith(" 70.0%")
    assert "espresso: a small one" in lines[4]
    assert lines[-1].startswith("3 pictures in 2 requests: ")
    assert lines[-1].endswith(", 5.0 ms of it in the server")
    assert "\x1b" not in out


def test_json_output(net: Any, headrace: Any) -> None:
    status, out, _ = headrace("net", CAT, "--json")
    shown = json.loads(out)
    assert status == 0
    assert shown["results"] == [
        {
            "file": CAT,
            "classes": [
                {"score": 0.7, "index": 1, "label": "tiger cat"},
                {"score": 0.2, "index": 0, "label": "tabby"},
            ],
        }
    ]
    assert shown["server_ms"] == 2.5
    assert shown["total_ms"] > 0


def test_a_model_without_a_batch_dimension(net: Any, headrace: Any) -> None:
    unscaled = {**PARAMETERS, "headrace.preprocess.mean": "0", "headrace.preprocess.std": "1"}
    describe(net, unscaled, max_batch_size=0, shape=(3, 24, 28), datatype="UINT8")
    status, out, _ = headrace("net", CAT, COFFEE)
    assert status == 0
    assert [(array.shape, array.dtype) for array in net.sent] == [((3, 24, 28), np.uint8)] * 2
    assert net.sent[0].max() > 150
    assert "2 pictures in 2 requests" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {}}, "add a `preprocess` section to its config.yaml"),
        ({"parameters": {"headrace.preprocess.crop": "[0, 1]"}}, "crop is [0, 1]"),
        ({"parameters": {"headrace.preprocess.input": "photo"}}, "'photo' is none of them"),
        ({"datatype": "INT64"}, "input 'image' of 'net' is INT64; pictures go to one of FP32"),
    ],
)
def test_a_model_without_an_image_input(net: Any, headrace: Any, change: dict[str, Any], message: str) -> None:
    describe(net, **change)
    status, out, errors = headrace("net", CAT)
    assert (status, out) == (1, "")
    assert message in errors
    assert net.sent == []


def test_files_that_cannot_be_used_are_named(net: Any, headrace: Any, tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no picture")
    assert f"{text}: this is no picture" in headrace("net", str(text))[2]
    missing = str(tmp_path / "missing.jpg")
    status, _, errors = headrace("net", CAT, missing)
    assert status == 1
    assert f"{missing}: cannot be read: No such file" in errors
    assert "cannot be read: Is a directory" in headrace("net", str(tmp_path))[2]


def test_a_server_without_classification(net: Any, headrace: Any) -> None:
    net.infer["net"] = lambda _: respond(("scores", "FP32", [1], b"\0\0\x80\x3f"))
    status, _, errors = headrace("net", CAT)
    assert status == 1
    assert "did not classify output 'scores'" in errors


def test_exactly_one_kind_of_input_is_required(net: Any, headrace: Any) -> None:
    for typed in (("net",), ("net", CAT, "--raw", "x.npz"), ("net", "--raw", "x.npz", "--json-input", "x.json")):
        status, _, errors = headrace(*typed)
        assert status == 2
        assert "exactly one" in errors


def test_every_call_carries_the_version(net: Any) -> None:
    args = argparse.ArgumentParser()
    infer_command.add_arguments(args)
    typed = ["net", CAT, "--url", net.address, "--model-version", "3", "--top", "2", "--json"]
    assert infer_command.main(args.parse_args(typed)) == 0
    assert set(net.versions) == {"3"}


def test_a_server_without_statistics_shows_no_time_of_its_own(net: Any, headrace: Any) -> None:
    net.successes = None
    status, out, _ = headrace("net", CAT)
    assert status == 0
    assert "in the server" not in out


# --- tensors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def adder(grpc_server: Any) -> Any:
    tensors = [{"name": "x", "datatype": "BF16", "shape": [2]}, {"name": "s", "datatype": "BYTES", "shape": [1]}]
    grpc_server.metadata["add"] = {
        "name": "add",
        "inputs": tensors,
        "outputs": [{"name": "y", "datatype": "BF16"}, {"name": "t", "datatype": "BYTES"}],
    }
    response = respond(("y", "BF16", [2], b"\x80\x3f\x20\xc0"), ("t", "BYTES", [1], bytes_tensor(["ok\x1b[31m"])))
    grpc_server.infer["add"] = lambda _: response
    return grpc_server


def test_raw_arrays(adder: Any, headrace: Any, tmp_path: Path) -> None:
    file = tmp_path / "in.npz"
    np.savez(file, x=np.array([0x3F80, 0xC020], dtype=np.uint16), s=np.array(["hi"]))
    status, out, errors = headrace("add", "--raw", str(file))
    assert (status, errors) == (0, "")
    request = adder.requests[-1]
    assert [tensor.datatype for tensor in request.inputs] == ["BF16", "BYTES"]
    assert list(request.raw_input_contents) == [b"\x80\x3f\x20\xc0", b"\2\0\0\0hi"]
    assert out.splitlines()[1].split() == ["y", "BF16", "[2]", "-2.5", "-0.75", "1", "1", "-2.5"]
    assert "\x1b" not in out
    status, out, _ = headrace("add", "--raw", str(file), "--json")
    assert json.loads(out)["outputs"]["y"] == {"datatype": "BF16", "shape": [2], "data": [0x3F80, 0xC020]}


def test_json_input(adder: Any, headrace: Any, tmp_path: Path) -> None:
    file = tmp_path / "in.json"
    tensors = [
        {"name": "x", "datatype": "INT16", "shape": [2, 1], "data": [[-1], [2]]},
        {"name": "s", "datatype": "BYTES", "shape": [1], "data": ["hi"]},
        {"name": "b", "datatype": "BF16", "shape": [2], "data": [1, -2.5]},
    ]
    file.write_text(json.dumps({"inputs": tensors}))
    assert headrace("add", "--json-input", str(file))[0] == 0
    request = adder.requests[-1]
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in request.inputs] == [
        ("x", "INT16", [2, 1]),
        ("s", "BYTES", [1]),
        ("b", "BF16", [2]),
    ]
    assert list(request.raw_input_contents) == [b"\xff\xff\x02\x00", b"\x02\x00\x00\x00hi", b"\x80\x3f\x20\xc0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected"),
        ('{"inputs": [{"name": "x"}]}', "missing required field `shape` - at `$.inputs[0]`"),
        ('{"inputs": [], "id": "1"}', "nothing else"),
        ('{"inputs": [{"name":"x","shape":[-1],"datatype":"INT8","data":[1]}]}', "`$.inputs[0].shape[0]`"),
        (
            '{"inputs": [{"name":"x","shape":[2],"datatype":"INT8","data":[1]}]}',
            "inputs[0]: input 'x': 1 elements came",
        ),
        ('{"inputs": [{"name":"x","shape":[1],"datatype":"INT8","data":[1.5]}]}', "data must be integers"),
        ('{"inputs": [{"name":"x","shape":[1],"datatype":"INT9","data":[1]}]}', "datatype 'INT9'"),
        ('{"inputs": [%s, %s]}' % (('{"name":"x","shape":[1],"datatype":"INT8","data":[1]}',) * 2), "'x' occurs twice"),
    ],
)
def test_json_input_that_is_wrong(adder: Any, headrace: Any, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "in.json"
    file.write_text(text)
    status, _, errors = headrace("add", "--json-input", str(file))
    assert status == 1
    assert message in errors


def test_raw_files_that_are_wrong(adder: Any, headrace: Any, tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    for make, message in (
        (lambda: file.write_bytes(b"text"), "cannot be read as an .npz of plain arrays"),
        (lambda: np.savez(file, x=np.array([{}], dtype=object)), "cannot be read as an .npz of plain arrays"),
        (lambda: np.savez(file), "holds no array"),
        (lambda: np.save(file.open("wb"), np.zeros(1)), "is one array without a name"),
        (file.unlink, "cannot be read: No such file"),
    ):
        make()
        status, _, errors = headrace("add", "--raw", str(file))
        assert status == 1
        assert message in errors


# --- what is drawn -----------------------------------------------------------------------------------------------------


def drawn(scores: list[float], labels: list[str], width: int = 60, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as out:
        ranked = [RankedClass(score, 7, label) for score, label in zip(scores, labels, strict=True)]
        infer_command.print_classes(Console(file=out, width=width), [Classified("[red]a.jpg", ranked)])
        return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [10, 16, 20, 30, 40, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_lines_fit_any_width_and_encoding(width: int, encoding: str) -> None:
    _, *lines = drawn([0.5, 0.25], ["a label that is far too long for most terminals", "ü"], width, encoding)
    assert len(lines) == 2
    assert all(len(line) <= width for line in lines)
    assert len({len(line) for line in lines}) == 1
    assert lines[0].endswith("50.0%")
    block = "█" if encoding == "utf-8" else "#"
    assert lines[0].count(block) // 2 == lines[1].count(block)
    assert (lines[0].count(block) > 0) == (width >= 20)


def test_scores_that_are_no_probabilities_are_shown_as_they_are() -> None:
    name, first, second, third = drawn([8.0, 4.0, -1.0], ["a", "b", ""])
    assert name == "[red]a.jpg"
    assert first.endswith(" 8.000")
    assert first.count("█") == 2 * second.count("█") == 40
    assert third.count("█") == 0
    assert third.split() == ["class", "7", "-1.000"]
    assert all(line.endswith("0") for line in drawn([-1.0, -2.0], ["a", "b"])[1:])
    assert drawn([-1.0, -2.0], ["a", "b"])[2].count("█") == 20
    drawn([float("nan"), float("inf")], ["a", "b"])
    assert drawn([0.9, 0.2], ["a", "b"])[1].endswith("0.900")  # over 1 together


def test_control_characters_of_a_label_do_not_reach_the_terminal() -> None:
    assert "\x1b" not in "".join(drawn([0.5], ["\x1b]0;title\x07cat"]))


@pytest.mark.parametrize(("ratio", "cells"), [(0, ""), (0.0625, "▌"), (0.5, "████"), (1, "████████"), (9, "████████")])
def test_bar(ratio: float, cells: str) -> None:
    assert infer_command.bar(ratio, 8) == cells.ljust(8)
    assert infer_command.bar(float("nan"), 8) == " " * 8


def test_server_time_is_shown_only_for_headrace_servers() -> None:
    assert server_time_ns((5, 100), (7, 160), 2) == 60
    assert server_time_ns((5, 100), (8, 160), 2) is None
    assert server_time_ns(None, (8, 160), 2) is None
    assert server_time_ns((5, 100), None, 0) is None


@pytest.mark.parametrize("typed", [["--top", "0"], ["--top", "x"], ["--timeout", "0"], ["--timeout", "nan"]])
def test_numbers_that_make_no_sense(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    infer_command.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["net", *typed])
    assert repr(typed[1]) in capsys.readouterr().err
