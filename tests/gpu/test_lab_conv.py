"""`headrace lab conv` on a real GPU: every result is right, and kernels are compiled beside the measurements."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace_engines.__main__ import main

from tests.support.gpu_marks import gpu_marks

pytestmark = gpu_marks(300)


def lab(folder: Path, *words: str) -> dict[str, Any]:
    output = folder / "out"
    common = ["--rounds", "3", "--kernel-cache", str(folder / "kernels"), "--output", str(output)]
    assert main(["lab", "conv", *words, *common]) == 0
    document: dict[str, Any] = json.loads((output / "conv.json").read_text())
    return document


def test_all_algorithms_of_a_layer_are_right(tmp_path: Path) -> None:
    baselines = "cudnn,tensorrt" if importlib.util.find_spec("torch") else "tensorrt"
    words = ("--shape", "1,64,14,14,64,3,3,1,1", "--epilogue", "bias,residual,relu", "--batch", "1,4", "--prune", "0")
    document = lab(tmp_path, *words, "--baselines", baselines, "--optimization-level", "1")
    assert {cell["precision"] for cell in document["cells"]} == {"fp16", "fp32"}
    assert len(document["cells"]) == 8
    for cell in document["cells"]:
        measured = {result["name"]: result for result in cell["results"] if result["timing"]}
        assert all(result["right"] for result in measured.values())
        assert {"direct", "winograd-f2", "winograd-f4"} <= set(measured)
        assert ("implicit-gemm" if cell["precision"] == "fp16" else "simt-gemm") in measured
        assert ("tensorrt" in measured) is cell["epilogue"]["relu"]
    assert "optimization level 1" in document["versions"]["TensorRT"]


def test_kernels_of_a_second_process_are_read_from_files(tmp_path: Path) -> None:
    words = ["--shape", "1,32,9,9,32,3,3,1,1", "--precision", "fp32", "--work", "conv", "--baselines", "none"]
    words += ["--algorithms", "direct,simt-gemm", "--rounds", "3", "--kernel-cache", str(tmp_path / "kernels")]
    times: list[dict[Path, int]] = []
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "headrace", "lab", "conv", *words], check=True, timeout=120)
        times.append({path: path.stat().st_mtime_ns for path in (tmp_path / "kernels").iterdir()})
    assert len(times[0]) >= 2
    assert times[1] == times[0]
