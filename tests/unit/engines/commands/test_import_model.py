"""`headrace import torch | keras | savedmodel`: options, errors of the command line, and the table."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from headrace_engines import __main__ as program
from headrace_engines.commands import import_model as command
from headrace_engines.errors import BuildError
from headrace_engines.importers.check import BOUNDS, ImportCheck, OutputErrors
from headrace_engines.importers.model_import import ImportOptions, ImportOutcome
from headrace_engines.importers.source import ImportRequest
from rich.console import Console


class Recorder:
    """Takes the place of the import."""

    def __init__(self) -> None:
        self.request = ImportRequest("")
        self.options = ImportOptions(Path(), "", ())
        self.faults: list[str] = []
        self.error = ""

    def __call__(self, request: ImportRequest, options: ImportOptions, _report: Any) -> ImportOutcome:
        if self.error:
            raise BuildError(self.error)
        self.request, self.options = request, options
        output = OutputErrors("scores", "float32", BOUNDS["float32"], 2e-6, 3e-7, elements=5, finite=5)
        check = ImportCheck({"scores": output}, ["random, 1 row"], [], self.faults)
        return ImportOutcome(
            options.repository / options.name, check, "torch 2.15.0", 20, 1_500_000, ("random weights",)
        )


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr("headrace_engines.importers.environment.installation_text", lambda *_, **__: "")
    monkeypatch.setattr(command, "import_model", made)
    return made


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("net.py", "net.pt2", "net.pt", "net.keras", "layers.py"):
        (tmp_path / name).touch()
    (tmp_path / "saved").mkdir()
    return tmp_path


def call(*words: str) -> int:
    return program.main(["import", *words])


@pytest.mark.parametrize(
    ("words", "form", "name"),
    [
        (["torch", "net.py:make"], "factory", "net"),
        (["torch", "net.pt2"], "program", "net"),
        (["torch", "--torchvision", "resnet50"], "torchvision", "resnet50"),
        (["keras", "net.keras"], "", "net"),
        (["savedmodel", "saved"], "", "saved"),
        (["savedmodel", "saved", "--name", "other"], "", "other"),
    ],
)
def test_the_name_is_that_of_the_source(
    recorder: Recorder, files: Path, words: list[str], form: str, name: str
) -> None:
    assert call(*words) == 0
    assert recorder.request.form == form
    assert recorder.request.program == f"{words[0]}_program"
    assert recorder.options.name == name
    assert recorder.request.dynamic_batch
    if recorder.request.path:
        assert Path(recorder.request.path).is_absolute()


def test_options_reach_the_request(recorder: Recorder, files: Path) -> None:
    shapes = ["--input-shape", "ids=1,S:16", "--input-shape", "mask=1,S:16", "--input-dtype", "ids=int64"]
    others = ["--opset", "18", "--static-batch", "--weights", "none", "--output-names", "a, b", "--requirement", "timm"]
    assert call("torch", "--torchvision", "vit_b_16", *shapes, *others) == 0
    request = recorder.request
    assert request.shapes == {"ids": (("", 1), ("S", 16)), "mask": (("", 1), ("S", 16))}
    assert request.dtypes == {"ids": "int64"}
    assert (request.opset, request.dynamic_batch, request.weights) == (18, False, "none")
    assert request.output_names == ("a", "b")
    assert {"timm", "torchvision>=0.21", "torch>=2.6"} <= set(recorder.options.requirements)


def test_keras_code_is_off_by_default(recorder: Recorder, files: Path) -> None:
    assert call("keras", "net.keras", "--custom-objects", "layers.py") == 0
    assert not recorder.request.allow_code
    assert recorder.request.custom_objects == str(files / "layers.py")
    assert any("tensorflow" in requirement for requirement in recorder.options.requirements)
    assert call("keras", "net.keras", "--allow-code") == 0
    assert recorder.request.allow_code


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["torch"], "name one model: FILE.py:factory"),
        (["torch", "net.py:make", "--torchvision", "resnet18"], "name one model"),
        (["torch", "net.py"], "net.py has no function: write net.py:FUNCTION"),
        (["torch", "gone.py:make"], "there is no file gone.py: name a Python file"),
        (["torch", "net.pt"], "has weights or TorchScript, not an exported program"),
        (["torch", "net.pt2", "--weights", "none"], "--weights is for --torchvision"),
        (["torch", "net.pt2", "--input-names", "a,a"], "write different names"),
        (["torch", "net.py:f", "--input-shape", "x=1,H"], "write NAME=1,3,224,224"),
        (["torch", "net.py:f", "--input-shape", "1,3"], "write NAME=1,3,224,224"),
        (["torch", "net.py:f", "--input-shape", "x=0,3"], "write NAME=1,3,224,224"),
        (["torch", "net.py:f", "--input-shape", "x=1,H:1"], "the free dimension H is 1 in it"),
        (["torch", "net.py:f", "--input-dtype", "x=int64"], "for an input of --input-shape"),
        (["torch", "net.py:f", "--input-shape", "x=1,3", "--input-dtype", "x=int4"], "TYPE one of float16"),
        (["keras", "gone.keras"], "there is no file gone.keras"),
        (["keras", "net.keras", "--custom-objects", "gone.py"], "there is no file gone.py"),
        (["keras", "net.py"], "net.py is no file of Keras: name a .keras or .h5 file"),
        (["savedmodel", "gone"], "there is no folder gone"),
        (["keras", "net.keras", "--max-batch-size", "0"], "write 1 or more, or --static-batch"),
    ],
)
def test_wrong_options_end_with_status_2(
    recorder: Recorder, files: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert call(*words) == 2
    assert message in capsys.readouterr().err


def test_a_failed_import_ends_with_status_1(
    recorder: Recorder, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.error = "the exporter has no ONNX form of the operator x: write another"
    assert call("torch", "net.py:make") == 1
    assert "headrace import torch: the exporter has no ONNX form" in capsys.readouterr().err


def test_a_failed_comparison_ends_with_status_1(
    recorder: Recorder, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.faults = ["output scores differs from the framework"]
    assert call("torch", "net.py:make") == 1
    text = capsys.readouterr().out
    assert "output scores differs from the framework" in text
    assert "not imported: net" in text


def test_the_table_has_errors_and_bounds() -> None:
    stream = io.StringIO()
    check = ImportCheck({"y": OutputErrors("y", "float32", BOUNDS["float32"], 2e-6, 3e-7)}, ["a", "b"])
    outcome = ImportOutcome(Path("repo/net"), check, "torch 2.15.0", 20, 1_500_000, ("random weights",), ("a remark",))
    command.show_outcome(Console(file=stream, width=120), outcome)
    lines = stream.getvalue()
    for word in (
        "2.0e-06",
        "3.0e-07",
        "0.0001 / 1e-05",
        "Note: random weights",
        "Note: a remark",
        "1.5 MB, 2 comparisons",
    ):
        assert word in lines
    assert "imported repo/net (torch 2.15.0, opset 20" in lines


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("", 2), (None, 2)])
def test_nothing_is_installed_unasked(
    files: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: str | None,
    status: int,
) -> None:
    text = "torch is installed into a folder of /x: about 1 GB"
    monkeypatch.setattr("headrace_engines.importers.environment.installation_text", lambda *_, **__: text)
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer if question == "Install? [y/N] " else None)
    words = ("torch", "net.py:make", "--input-shape", "x=1,3")
    assert call(*words) == status
    captured = capsys.readouterr()
    assert text in captured.out
    if status:
        assert "--python PATH" in captured.err
    if answer is None:
        assert "add --yes" in captured.err
        assert call(*words, "--yes") == 0
