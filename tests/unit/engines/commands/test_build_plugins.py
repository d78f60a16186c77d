"""`headrace build --plugins`: what is refused, and the table of the choice."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path

import onnx
import pytest
from headrace_engines.__main__ import main
from headrace_engines.build_report import show_plugins
from headrace_engines.progress import PLUGIN_PHASES, with_lines
from headrace_engines.project import open_project, read_spec
from headrace_engines.targets.tensorrt.plugin_choice import PluginReport, PluginRow
from onnx import TensorProto
from rich.console import Console

from tests.support.plugin_case import residual_block


def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "m" / "1"
    folder.mkdir(parents=True)
    onnx.save_model(residual_block(element=TensorProto.FLOAT), folder / "model.onnx")
    return folder.parent.parent


@pytest.mark.parametrize("plugins", ["auto", "conv1,conv2"])
def test_onnx_runtime_refuses_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str], plugins: str) -> None:
    words = ["build", "m", "--model-repository", str(repository(tmp_path)), "--cache", str(tmp_path / "cache")]
    assert main([*words, "--target", "onnxruntime", "--plugins", plugins]) == 1
    printed = " ".join("".join(capsys.readouterr()).split())
    reason = f"--plugins {plugins} is given for onnxruntime, plug-ins run in TensorRT engines only"
    assert f"{reason}: build with --target tensorrt on a machine with a GPU, or leave out --plugins" in printed


def test_an_engine_without_plugins_keeps_its_key(tmp_path: Path) -> None:
    config = open_project("m", repository(tmp_path)).config
    plain = read_spec(config).digest()
    assert replace(read_spec(config), plugins_budget_s=5.0).digest() == plain
    others = [{"plugins": "auto"}, {"plugins": "conv1"}, {"plugins": "auto", "plugins_budget_s": 5.0}]
    assert len({plain, *(replace(read_spec(config), **values).digest() for values in others)}) == 4


def report() -> PluginReport:
    rows = (
        PluginRow("conv1", "n 8 c 64", 50.0, 40.0, 41.0, "implicit-gemm 128x128", True, ratio=1.22),
        PluginRow("conv[2]", "n 8 c 64", 20.0, 30.0, reason="our kernel is not 3 % faster", ratio=0.667),
    )
    return PluginReport("auto", 8, rows, 200.0, 190.0, 1.0526, 0.0031, "1 layer of 2 replaced by our kernels")


def test_the_table_has_times_and_the_verdict() -> None:
    text = StringIO()
    show_plugins(Console(file=text, width=200), "m", asdict(report()))
    lines = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    assert "Convolutions of m, 8 rows" in lines
    assert "conv1 n 8 c 64 50.0 40.0 41.0 1.22 implicit-gemm 128x128 yes" in lines
    assert "conv[2] n 8 c 64 20.0 30.0 0.67 no our kernel is not 3 % faster" in lines
    assert "m: 200.0 us without plug-ins, 190.0 us with: 1.053 +- 0.003 times as fast" in lines
    assert lines[-1] == "m: 1 layer of 2 replaced by our kernels"


def test_a_choice_without_candidates_is_one_line() -> None:
    text = StringIO()
    verdict = "the engine has no FP16 convolution that the plug-in can run: nothing is replaced"
    show_plugins(Console(file=text, width=200), "m", asdict(PluginReport("auto", 1, (), verdict=verdict)))
    assert text.getvalue().splitlines() == [f"m: {verdict}"]


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan", "inf"])
def test_a_budget_is_a_positive_number_of_seconds(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["build", "m", "--plugins-budget", text])
    assert f"'{text}' is no number of seconds above 0: write e.g. 120" in capsys.readouterr().err


def test_lines_of_the_plugins_are_written_once() -> None:
    lines: list[str] = []
    shares: list[float] = []
    report = with_lines(lambda share, phase: shares.append(share), PLUGIN_PHASES, lines.append)
    for share, phase in (
        (0.1, "reading"),
        (0.2, "plug-ins: a"),
        (0.3, "plug-ins: a"),
        (0.4, "x"),
        (0.5, "plug-ins: b"),
    ):
        report(share, phase)
    assert lines == ["plug-ins: a", "plug-ins: b"]
    assert shares == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_outcomes_as_json(tmp_path: Path) -> None:
    words = ["build", "m", "--publish-slower", "--model-repository", str(repository(tmp_path))]
    words += ["--cache", str(tmp_path / "cache")]
    assert main([*words, "--target", "onnxruntime", "--json", str(tmp_path / "out.json")]) == 0
    (model,) = json.loads((tmp_path / "out.json").read_text())["models"]
    assert (model["model"], model["error"], model["published"], model["plugins"]) == ("m", "", True, None)
    assert model["timings"][0]["median_us"] > 0
    assert main([*words, "--target", "onnxruntime", "--json", str(tmp_path / "out.json" / "none.json")]) == 1
