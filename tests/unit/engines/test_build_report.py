"""Output of `headrace build` on eighty columns, and its exit statuses."""

from __future__ import annotations

import io
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from headrace.config.machine import Machine, onnxruntime_machine
from headrace.config.model_folder import read_model_folder
from headrace_engines.__main__ import main
from headrace_engines.accuracy import Accuracy
from headrace_engines.build import BuildResult
from headrace_engines.build_publication import Published
from headrace_engines.build_report import BuildOutcome, show_outcomes
from headrace_engines.project import BuildSpec, read_spec
from headrace_engines.report import BuildDisplay
from headrace_engines.targets.base import BatchTiming
from rich.console import Console

from tests.support.models import add_model, affine

HERE: Machine = onnxruntime_machine()
ACCURACY = Accuracy(48, "accuracy/ (48 pictures)", 1.0, 0.999, 0.1, 0.989, 0.989)


@pytest.fixture
def spec(tmp_path: Path) -> BuildSpec:
    return read_spec(read_model_folder(add_model(tmp_path, "m", affine()), tmp_path).config)


def outcome(spec: BuildSpec, published: bool = True, error: str = "", **changes: object) -> BuildOutcome:
    built = BuildResult(
        Path("x.onnx"), spec, HERE, "0" * 64, ACCURACY, [], (), (BatchTiming(1, 1.0, 2.0, 13_995_487.0),), 102_100_000, 9.1, False
    )  # fmt: skip
    done = Published(None) if published else None
    return BuildOutcome("efficientnet_lite0", None, replace(built, **changes), done, error, 9.1)


def shown(*outcomes: BuildOutcome) -> tuple[str, str]:
    out, errors = io.StringIO(), io.StringIO()
    show_outcomes(Console(file=out, width=80), Console(file=errors, width=80), outcomes)
    return out.getvalue(), errors.getvalue()


def test_a_row_has_all_columns_in_eighty_characters(spec: BuildSpec) -> None:
    text, errors = shown(outcome(spec))
    (row,) = [line for line in text.splitlines() if line.startswith("efficientnet_lite0 ")]
    assert row.split() == [
        "efficientnet_lite0",
        "fp32",
        "published",
        "100.0%",
        "98.9%",
        "13,995,487",
        "102.1",
        "MB",
        "9.1",
        "s",
    ]
    assert max(map(len, text.splitlines())) <= 80
    assert errors == ""


def test_the_state_is_what_happened(spec: BuildSpec) -> None:
    reason = "efficientnet_lite0: the disk is full: make room"
    text, errors = shown(outcome(spec, published=False, error=reason, float_nodes=("a",), cached=True))
    assert "refused" not in text, "nothing is wrong with its accuracy"
    assert re.search(r"fp32, 1 +not ", text)
    assert "stored" in text
    assert errors == "efficientnet_lite0 was not published: the disk is full: make room\n", "it is named once"
    assert "refused" in shown(outcome(spec, published=False, error="x", refusal=["too bad"]))[0]


class _Terminal:
    """Content of a terminal of eighty columns after each drawing."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.console = Console(file=self.out, width=80, height=12, force_terminal=True, color_system=None)

    def lines(self) -> list[str]:
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.out.getvalue())
        return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_a_bar_names_the_phase_and_is_not_cut() -> None:
    terminal = _Terminal()
    with BuildDisplay(terminal.console, ["efficientnet_lite0"]) as display:
        report = display.report("efficientnet_lite0")
        for note in (
            "calibrating, 12 of 64 samples",
            "comparing with FP32, 48 of 48",
            "a phase that nobody can name in short",
        ):
            report(0.5, note)
            display._progress.refresh()
    text = "\n".join(terminal.lines())
    for note in ("calibrating, 12 of 64 samples", "comparing with FP32, 48 of 48", "a phase that nobody"):
        assert re.search(rf"^efficientnet_lite0 .+ 50% 0:00:\d\d {note}", text, re.MULTILINE), text


def test_of_many_models_the_one_at_work_is_seen() -> None:
    terminal = _Terminal()
    names = [f"model_{number:02}" for number in range(40)]
    display = BuildDisplay(terminal.console, names)
    # Without the display's thread, which on a busy machine refreshes between any two lines of this test.
    display._progress.live.auto_refresh = False
    with display:
        for name in names:
            report = display.report(name)
            report(0.5, "building")
            terminal.out.truncate(terminal.out.seek(0))
            display._progress.refresh()
            assert any(line.startswith(name) and "building" in line for line in terminal.lines())
            assert len({line.split()[0] for line in terminal.lines()}) <= 8, "fewer than the terminal has lines"


def test_a_warning_does_not_run_into_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = _Terminal()
    root = logging.getLogger()
    others, root.handlers = root.handlers, []
    try:
        main(["build", "nothing", "--model-repository", "nowhere"])
        with BuildDisplay(terminal.console, ["m"]) as display:
            display.report("m")(0.5, "building")
            logging.getLogger("engines.somewhere").warning("layers stay in floating point")
    finally:
        root.handlers = others
    assert "layers stay in floating point" in terminal.lines(), "a line of its own, above the bar"
    assert "layers" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("build", 2, "name the models to build, or use --all"),
        ("build m --all", 2, "both models and --all are given"),
        ("build --all --version 1", 2, "both --version and --all are given"),
        ("build nothing", 1, "headrace build: there is no model 'nothing' in "),
        ("build mm", 1, "(did you mean m?): it has m: name one of them, a model's folder, or another repository with"),
        ("build {root}", 1, "is a repository of models, not a model: name one of its models (m), e.g. "),
        ("build {root}/m/1/model.onnx", 1, "is a file, a model is a folder: move it to MODEL/1/model.onnx"),
        ("build /no/such/m", 1, "there is no folder /no/such/m: name the folder of a model"),
        ("inspect nothing", 1, "headrace inspect: there is no model 'nothing'"),
        ("build {root}/m/1", 1, "is a version of a model: write m --version 1"),
        ("inspect m --batch 0", 2, "--batch is 0"),
        ("compare m --seconds 0", 2, "--seconds is 0"),
    ],
)
def test_a_wrong_call_has_another_status_than_a_failed_build(
    words: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_model(tmp_path, "m", affine())
    given = [word.format(root=tmp_path) for word in words.split()]
    assert main([*given, "--model-repository", str(tmp_path)]) == status
    assert message in capsys.readouterr().err


def test_a_missing_repository_is_reported_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["build", "m"], ["build", "--all"]):
        assert main([*words, "--model-repository", str(tmp_path / "none")]) == 1
        message = capsys.readouterr().err
        assert (
            f"there is no model repository {tmp_path / 'none'} here: name a repository with --model-repository DIR"
            in message
        )
        assert "`headrace models build` builds a demo" in message


def test_missing_tensorrt_is_reported_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_engines.targets.tensorrt.target.available", lambda: "TensorRT cannot be imported")
    add_model(tmp_path, "m", affine())
    assert main(["build", "m", "--target", "tensorrt", "--model-repository", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert message.startswith(
        "headrace build: engines for TensorRT cannot be built on this machine: TensorRT cannot be imported: "
    )
    assert "`make gpu-packages` installs TensorRT; --target onnxruntime builds for the CPU" in message
