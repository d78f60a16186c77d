"""Table, page and summary of a map; the list and the CPU references of the algorithms."""

from __future__ import annotations

import io
import json
import math

import pytest
from headrace_engines.__main__ import main
from headrace_lab import command as lab
from headrace_lab.check import Errors
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.layers import PLAIN
from headrace_lab.measure import summarize
from headrace_lab.page import conditions, map_page, show
from headrace_lab.results import CandidateResult, Cell, ConvMap
from headrace_lab.roofline import Roofline
from headrace_lab.summary import summarize_map
from rich.console import Console

from tests.support.convolutions import NumpyAlgorithm
from tests.support.fake_cuda import FakeCuda

HALF = Errors(0.2, 0.02, 0.002, 17.0, 100, half_share=0.4)
RIGHT, WRONG = Errors(0.1, 0.01, 0.001, 0.5, 100), Errors(9, 1, 1, 7.0, 100)
ALL = Epilogue(bias=True, residual=True, relu=True)


def result(name: str, time_us: float, errors: Errors = RIGHT, variant: str = "") -> CandidateResult:
    return CandidateResult(name, variant, "", summarize([time_us * 0.9, time_us, time_us * 1.2], 10), errors)


def cell(
    layer: str,
    n: int,
    *results: CandidateResult,
    epilogue: Epilogue = PLAIN,
    kernel: int = 3,
    precision: str = "fp16",
) -> Cell:
    shape = ConvShape(n, 64, 20, 20, 64, kernel, kernel, 1, kernel // 2)
    return Cell(layer, shape, precision, epilogue, 5.0, results)


def example(*cells: Cell) -> ConvMap:
    return ConvMap(
        title="a <model>",
        gpu="H200",
        capability="9.0",
        driver="580",
        versions={"cuDNN": "cuDNN 9"},
        notes=["<b>note</b>"],
        roofline=Roofline(4e12, {"fp16": 7e14}, "matrix"),
        cells=cells,
        rounds=3,
        summary=tuple(summarize_map(cells)),
    )


def test_the_roofline_is_the_longer_of_bytes_and_operations() -> None:
    roofline = Roofline(1e12, {"fp16": 1e14})
    shape = ConvShape(8, 64, 56, 56, 64, 3, 3, 1, 1)
    assert roofline.floor_us(shape, "fp16", 2, False) == pytest.approx(shape.flops / 1e14 * 1e6)
    small = ConvShape(8, 64, 56, 56, 64, 1, 1)
    bytes_ = 2 * (3 * 8 * 64 * 56 * 56 + 64 * 64)
    assert roofline.floor_us(small, "fp16", 2, True) == pytest.approx(bytes_ / 1e12 * 1e6)
    assert roofline.floor_us(small, "fp32", 4, True) == pytest.approx(2 * bytes_ / 1e12 * 1e6)


def test_medians_over_layers_with_the_worst_named() -> None:
    cells = [cell(f"layer {n}", n, result("cudnn", 10), result("implicit-gemm", 10 * n)) for n in (1, 2, 4)]
    lines = summarize_map(cells)
    (line,) = [line for line in lines if line.startswith("fp16 time(cuDNN)/time(implicit-gemm)")]
    assert "median 0.50 (n 1: 1.00, n 2: 0.50, n 4: 0.25)" in line
    assert "worst 0.25 (layer 4 n 4)" in line


def test_wrong_results_are_named_and_do_not_win() -> None:
    one = cell("layer", 1, result("cudnn", 10), result("implicit-gemm", 1, WRONG), result("direct", 5))
    winner = one.winner()
    assert winner is not None
    assert winner.name == "direct"
    lines = summarize_map([one])
    assert lines[0] == "2 of 3 results are within their bounds"
    assert lines[1].startswith("wrong: implicit-gemm")
    assert not any("time(implicit-gemm)" in line for line in lines)


def test_results_by_the_bound_of_float16_accumulation_are_named_everywhere() -> None:
    one = cell("layer", 1, result("tensorrt", 10, HALF), result("implicit-gemm", 12), epilogue=ALL)
    lines = summarize_map([one])
    assert lines[0] == "2 of 2 results are within their bounds"
    assert lines[1].startswith("FP16 accumulation: within its bound: 1 of 1 results of tensorrt, largest error 0.4 of")
    assert "17 times the bound of FP32 accumulation" in lines[1]
    document = one.to_json()["results"][0]
    assert (document["right"], document["check"]) == (True, "FP16 accumulation: within its bound")
    assert document["errors"]["half_share"] == 0.4
    assert "17; FP16 accumulation: 0.4" in map_page(example(one))
    console = Console(width=300, record=True, file=io.StringIO())
    show(console, example(one))
    assert "FP16 sums: tensorrt" in console.export_text()


def test_fused_kernels_are_compared_over_layers_with_a_residual() -> None:
    residual = cell("a", 1, result("cudnn-unfused", 30), result("implicit-gemm", 10), epilogue=ALL)
    other = cell("b", 1, result("cudnn-unfused", 10), result("implicit-gemm", 10), epilogue=Epilogue(bias=True))
    lines = summarize_map([residual, other])
    (line,) = [line for line in lines if "with a residual: time(cudnn-unfused)/time(faster implicit GEMM)" in line]
    assert "median 3.00, worst 3.00" in line


def test_winograd_wins_and_losses_by_batch() -> None:
    cells = [
        cell("small", 1, result("simt-gemm", 10), result("winograd-f4", 20), precision="fp32"),
        cell("large", 64, result("simt-gemm", 40), result("winograd-f4", 20), precision="fp32"),
    ]
    lines = summarize_map(cells)
    assert "  n 1: wins on none; loses on small" in lines
    assert "  n 64: wins on large; loses on none" in lines


def test_the_kernel_size_from_which_fft_wins() -> None:
    times = {3: (1, 9), 7: (9, 8), 9: (7, 8), 11: (12, 8), 15: (20, 8)}
    cells = [cell(str(r), 8, result("direct", d), result("fft", f), kernel=r) for r, (d, f) in times.items()]
    (line,) = [line for line in summarize_map(cells) if "FFT" in line]
    assert "FFT wins from 11x11 on against our other algorithms" in line


def test_the_page_has_every_result_without_scripts() -> None:
    cells = [
        cell("3x3 64->64", 1, result("cudnn", 10), result("implicit-gemm", 8, variant="128x64")),
        cell("3x3 64->64", 8, result("cudnn", 10), CandidateResult("fft", reason="kernel <too> small")),
        cell("3x3 64->64", 8, result("direct", 9, WRONG), epilogue=ALL),
    ]
    text = map_page(example(*cells))
    assert "<script" not in text
    assert "://" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "a &lt;model&gt;" in text
    assert "kernel &lt;too&gt; small" in text
    assert "&lt;b&gt;note" in text
    assert "128x64" in text
    assert "ours 1.25x" in text
    assert text.count("<details>") == 3


def test_json_has_rates_and_no_infinite_number() -> None:
    broken = CandidateResult("direct", errors=Errors(math.inf, math.inf, math.inf, math.inf, 10, 3))
    document = json.loads(json.dumps(example(cell("a", 1, result("cudnn", 10), broken)).to_json(), allow_nan=False))
    first, second = document["cells"][0]["results"]
    shape = ConvShape(1, 64, 20, 20, 64, 3, 3, 1, 1)
    assert first["tflops"] == pytest.approx(shape.flops / 10 / 1e6)
    assert first["roofline_share"] == pytest.approx(0.5)
    assert second["errors"]["worst_share"] is None
    assert not second["right"]


def test_conditions_name_ceilings_and_method() -> None:
    text = " ".join(conditions(example(cell("a", 1, result("cudnn", 10)))))
    assert "copy 4.00 TB/s" in text
    assert "fp16 700 TFLOP/s" in text
    assert "NVML does not respond" in text


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "conv", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in lab.names():
        assert any(line.startswith(name) for line in lines)
    (winograd,) = [line for line in lines if line.startswith("winograd-f4")]
    assert "Lavin" in winograd


def test_references_run_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "conv", "--reference", "--shape", "1,16,8,9,24,3,3,1,1", "--precision", "fp32"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "3x3 16->24" in line]
    assert len(rows) == 2 * len(lab.names())
    assert sum(line.rstrip().endswith("right") for line in rows) >= 6
    assert all("right" in line or "not supported" in line for line in rows)


def test_a_wrong_reference_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spoil(y: object) -> None:
        y[0, 0, 0, 0] += 0.1  # type: ignore[index]

    monkeypatch.setattr(lab, "ALGORITHMS", (NumpyAlgorithm(FakeCuda(), "spoilt", spoil=spoil),))
    assert main(["lab", "conv", "--reference", "--shape", "1,4,5,5,4,3,3,1,1"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layers", "resnet50", "--shape", "1,1,3,3,1,1,1,1,0"], "has 2 sources of layers"),
        ([], "has 0 sources of layers"),
        (["--layers", "resnet50", "--reference"], "GFLOP: at most"),
        (["--layers", "resnet50", "--kernel-sizes", "3,5"], "write exactly one"),
    ],
)
def test_contradicting_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "conv", *words]) == 2
    assert message in capsys.readouterr().err


def test_unknown_names_are_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lab", "conv", "--algorithms", "winograd-f3", "--layers", "resnet50"])
    assert "did you mean winograd-f" in capsys.readouterr().err


@pytest.mark.parametrize(("word", "replacement"), [("memory", "headrace bench"), ("overlap", "headrace explain")])
def test_earlier_commands_name_what_replaces_them(
    word: str, replacement: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lab", word, "--json", "x.json"])
    error = capsys.readouterr().err
    assert (ended.value.code, replacement in error) == (2, True)
    assert f"lab {word} of Headrace 0.1 is gone" in error


def test_without_a_gpu_the_reason_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pycuda", None)
    assert main(["lab", "conv", "--layers", "resnet50"]) == 1
    error = capsys.readouterr().err
    assert "the map needs a GPU: PyCUDA cannot be imported" in error
    assert len(error.strip().splitlines()) == 1
