"""The whole of `headrace lab conv` on a fake GPU, with algorithms in NumPy."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from headrace_engines.__main__ import main
from headrace_lab import command as lab
from headrace_lab import conv as module
from headrace_lab.kernels.base import ConvShape
from headrace_lab.roofline import Roofline
from headrace_lab.tensorrt import has_half_sums

from tests.support.convolutions import NumpyAlgorithm
from tests.support.fake_gpu import cuda, trt, trt_version
from tests.support.fake_streams import LateCuda
from tests.support.kernels_on_host import install_host_kernels

__all__ = ["cuda", "trt", "trt_version"]
SHAPE = "2,4,5,6,3,3,3,1,1"


@pytest.fixture
def algorithms(cuda: LateCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[NumpyAlgorithm]:
    """List of the algorithms that the command measures; kernels of the lab itself are compiled for the host."""
    install_host_kernels(monkeypatch, cuda)
    result: list[Any] = []
    monkeypatch.setattr(lab, "ALGORITHMS", result)
    return result


def conv(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run the command and return its exit status and JSON."""
    output = tmp_path / "out"
    words = ["lab", "conv", "--rounds", "3", "--output", str(output), *options]
    status = main(words if "--baselines" in options else [*words, "--baselines", "none"])
    return status, json.loads((output / "conv.json").read_text())


def results_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [result for cell in document["cells"] for result in cell["results"]]


def test_every_result_is_checked_and_timed(
    algorithms: list[Any], cuda: LateCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithms += [NumpyAlgorithm(cuda, "fast"), NumpyAlgorithm(cuda, "slow", pieces=3)]
    status, document = conv(tmp_path, "--shape", SHAPE)
    assert status == 0
    cells = document["cells"]
    assert [(cell["precision"], cell["epilogue"]["relu"]) for cell in cells] == [
        ("fp16", False),
        ("fp16", True),
        ("fp32", False),
        ("fp32", True),
    ]
    assert {cell["winner"] for cell in cells} == {"fast"}
    for result in results_of(document):
        assert result["right"]
        assert 0 < result["errors"]["worst_share"] <= 1
        expected_us = cuda.work_us * (3 if result["name"] == "slow" else 1)
        assert result["timing"]["median_us"] == pytest.approx(expected_us)
        assert result["timing"]["rounds"] == 3
    assert "16 of 16 results" in capsys.readouterr().out or "8 of 8 results" in json.dumps(document["summary"])


def _spoil_last(y: np.ndarray) -> None:
    y.reshape(-1)[-1] += 1


def _unwritten(y: np.ndarray) -> None:
    y.reshape(-1).view(np.uint8)[7 * y.itemsize : 8 * y.itemsize] = 0xFF


@pytest.mark.parametrize("spoil", [_spoil_last, _unwritten])
def test_a_wrong_result_is_named_and_fails_the_command(
    spoil: Any, algorithms: list[Any], cuda: LateCuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithms += [NumpyAlgorithm(cuda, "right", pieces=2), NumpyAlgorithm(cuda, "broken", spoil=spoil)]
    status, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp32")
    assert status == 1
    assert {result["name"]: result["right"] for result in results_of(document)} == {"right": True, "broken": False}
    assert {cell["winner"] for cell in document["cells"]} == {"right"}
    assert "broken" in "".join(document["summary"])


def test_reasons_of_refusals_and_failures(algorithms: list[Any], cuda: LateCuda, tmp_path: Path) -> None:
    algorithms += [
        NumpyAlgorithm(cuda, "right"),
        NumpyAlgorithm(cuda, "small", refused="the picture is too small"),
        NumpyAlgorithm(cuda, "broken", failure="no compiler"),
    ]
    status, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp32")
    assert status == 0
    reasons = {result["name"]: result["reason"] for result in results_of(document)}
    assert reasons == {"right": "", "small": "the picture is too small", "broken": "no compiler"}


def test_the_fastest_variant_is_measured(algorithms: list[Any], cuda: LateCuda, tmp_path: Path) -> None:
    tiles = [NumpyAlgorithm(cuda, "gemm", f"tile {pieces}", pieces=pieces) for pieces in (4, 2, 3)]
    algorithms += tiles
    _, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp16")
    assert {(result["variant"], result["tried"]) for result in results_of(document)} == {("tile 2", 3), ("tile 2", 1)}
    assert not any(tile.opened for tile in tiles)


def test_tensorrt_is_checked_and_timed_on_the_whole_layer(
    algorithms: list[Any], trt: Any, cuda: LateCuda, tmp_path: Path
) -> None:
    algorithms.append(NumpyAlgorithm(cuda, "slow", pieces=9))
    options = ["--epilogue", "bias,residual,relu", "--baselines", "tensorrt", "--precision", "fp32"]
    status, document = conv(tmp_path, "--shape", SHAPE, *options)
    assert status == 0
    plain, whole = document["cells"]
    assert [result["name"] for result in plain["results"]] == ["slow"]
    (engine,) = [result for result in whole["results"] if result["name"] == "tensorrt"]
    assert engine["right"]
    assert engine["errors"]["samples"] == 2 * 5 * 6 * 3
    assert engine["variant"] == "fake_conv + fake_add + fake_relu (LINEAR to LINEAR)"
    assert "not TF32" in trt.state.config.flags
    assert document["versions"]["TensorRT"].startswith("TensorRT 10.6.0")


def test_layers_are_measured_while_kernels_of_later_ones_are_compiled(
    algorithms: list[Any], cuda: LateCuda, tmp_path: Path
) -> None:
    measured = threading.Event()
    waited: list[bool] = []

    class Slow(NumpyAlgorithm):
        def open(self, device: int, shape: ConvShape, *rest: Any, **options: Any) -> Any:
            if threading.current_thread().name.startswith("lab-compile") and shape.n == 2:
                waited.append(measured.wait(20))
            return super().open(device, shape, *rest, **options)

        def reference(self, shape: ConvShape, *rest: Any, **options: Any) -> Any:
            if shape.n == 1:
                measured.set()
            return super().reference(shape, *rest, **options)

    algorithms.append(Slow(cuda, "slow"))
    words = ("--precision", "fp32", "--batch", "1,2", "--work", "conv")
    status, document = conv(tmp_path, "--shape", SHAPE, *words)
    assert status == 0
    assert [cell["shape"]["n"] for cell in document["cells"]] == [1, 2]
    assert waited == [True]


def test_kernels_of_layers_behind_the_budget_are_not_compiled(
    algorithms: list[Any], cuda: LateCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    class Counted(NumpyAlgorithm):
        def open(self, device: int, shape: ConvShape, *rest: Any, **options: Any) -> Any:
            opened.append(shape.n)
            time.sleep(0.02)
            return super().open(device, shape, *rest, **options)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    algorithms.append(Counted(cuda, "counted"))
    batches = ",".join(map(str, range(1, 41)))
    words = ["--baselines", "none", "--batch", batches, "--precision", "fp32", "--work", "conv", "--budget", "1e-9"]
    assert main(["lab", "conv", "--shape", SHAPE, *words]) == 1
    assert len(opened) < 40


def test_the_effort_of_tensorrts_builder(algorithms: list[Any], trt: Any, cuda: LateCuda, tmp_path: Path) -> None:
    options = ["--baselines", "tensorrt", "--precision", "fp32", "--work", "layer", "--optimization-level", "1"]
    _, document = conv(tmp_path, "--shape", SHAPE, *options)
    assert trt.state.config.builder_optimization_level == 1
    assert document["versions"]["TensorRT"].endswith("optimization level 1")


@pytest.mark.parametrize(
    ("tactics", "expected"),
    [
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize256x64x64 (HWC8 to HWC8)", True),
        ("Reformat + sm80_xmma_gemm_f16f16_f16f16_f16_tn_n_tilesize128x64x64 (LINEAR to HWC8)", True),
        ("sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc (HWC8 to HWC8)", False),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nhwckrsc_nhwc (HWC to HWC)", False),
        ("CaskConvolution (LINEAR to LINEAR)", False),
    ],
)
def test_the_type_of_tensorrts_sums_is_in_its_kernels_name(tactics: str, expected: bool) -> None:
    assert has_half_sums(tactics) is expected


@pytest.mark.parametrize("work", ["conv", "layer"])
def test_one_kind_of_work_can_be_selected(work: str, algorithms: list[Any], cuda: LateCuda, tmp_path: Path) -> None:
    algorithms.append(NumpyAlgorithm(cuda, "right"))
    _, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp32", "--work", work)
    assert [cell["epilogue"]["relu"] for cell in document["cells"]] == [work == "layer"]


def test_nothing_is_measured_after_the_budget(
    algorithms: list[Any], cuda: LateCuda, capsys: pytest.CaptureFixture[str]
) -> None:
    algorithms.append(NumpyAlgorithm(cuda, "right"))
    assert main(["lab", "conv", "--shape", SHAPE, "--baselines", "none", "--budget", "1e-9"]) == 1
    assert "2 of 2 layers and batch sizes are not measured: the budget of 1e-09 s is spent" in capsys.readouterr().err


def test_proposals_of_a_cost_model_are_timed(algorithms: list[Any], cuda: LateCuda, tmp_path: Path) -> None:
    tiles = [NumpyAlgorithm(cuda, "gemm", f"tile {pieces}", pieces=pieces) for pieces in (4, 2, 3)]
    model = NumpyAlgorithm(cuda, "gemm", "auto")
    model.variants = lambda shape: tiles  # type: ignore[attr-defined]
    algorithms.append(model)
    _, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp16")
    assert {result["variant"] for result in results_of(document)} == {"tile 2"}


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings with which the example takes 1 us."""
    monkeypatch.setattr(module, "measure_roofline", lambda *_: Roofline(1e15, {"fp16": 4320e6 * 3}))


@pytest.mark.parametrize(
    ("options", "is_measured"),
    [((), False), (("--prune", "12"), True), (("--prune", "0"), True), (("--kernel-sizes", "3"), True)],
)
def test_algorithms_with_a_long_prediction_are_left_out(
    options: tuple[str, ...], is_measured: bool, algorithms: list[Any], roofline: None, cuda: LateCuda, tmp_path: Path
) -> None:
    slow = NumpyAlgorithm(cuda, "slow")
    slow.estimate_us = lambda shape: 10.0  # type: ignore[attr-defined]
    algorithms += [NumpyAlgorithm(cuda, "fast"), slow]
    _, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp16", "--work", "conv", *options)
    (cell,) = document["cells"]
    assert cell["floor_us"] == pytest.approx(1.0)
    by_name = {result["name"]: result for result in cell["results"]}
    assert (by_name["slow"]["timing"] is not None) is is_measured
    assert by_name["fast"]["timing"] is not None
    if not is_measured:
        assert by_name["slow"]["reason"].startswith(
            "left out: its cost model predicts 10 us, more than 8 times the 1.0 us"
        )


def test_named_algorithms_are_measured_whatever_the_prediction(
    algorithms: list[Any], roofline: None, cuda: LateCuda, tmp_path: Path
) -> None:
    slow = NumpyAlgorithm(cuda, "direct")
    slow.estimate_us = lambda shape: 1e6  # type: ignore[attr-defined]
    algorithms.append(slow)
    _, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp16", "--algorithms", "direct")
    assert all(result["timing"] for result in results_of(document))


def test_the_cells_so_far_are_in_the_files_of_an_interrupted_measurement(
    algorithms: list[Any], cuda: LateCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHECKPOINT_S", -1.0)
    output = tmp_path / "out"

    class Interrupted(NumpyAlgorithm):
        def open(self, *arguments: Any, **options: Any) -> Any:
            if (output / "conv.json").exists():
                raise KeyboardInterrupt
            return super().open(*arguments, **options)

    algorithms.append(Interrupted(cuda, "right"))
    words = ["--shape", SHAPE, "--baselines", "none", "--precision", "fp32", "--batch", "1,2,3", "--work", "conv"]
    with contextlib.suppress(KeyboardInterrupt):
        main(["lab", "conv", *words, "--kernel-cache", "none", "--output", str(output)])
    document = json.loads((output / "conv.json").read_text())
    assert [cell["shape"]["n"] for cell in document["cells"]] == [1]
    assert document["summary"][0] == "1 of 1 results are within their bounds"
    assert "3x3" in (output / "conv.html").read_text()


def test_the_parts_of_a_cells_duration_are_recorded(algorithms: list[Any], cuda: LateCuda, tmp_path: Path) -> None:
    algorithms.append(NumpyAlgorithm(cuda, "right"))
    _, document = conv(tmp_path, "--shape", SHAPE, "--precision", "fp32")
    for cell in document["cells"]:
        assert list(cell["phases_s"]) == ["operands", "open right", "check", "rounds"]
        assert sum(cell["phases_s"].values()) == pytest.approx(cell["seconds"])
