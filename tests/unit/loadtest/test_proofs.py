"""The table of proofs, on a simulated GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from loadtest import proofs
from tests.support import proof_cases as cases
from tests.support.fake_gpu import cuda as cuda
from tests.support.fake_gpu import trt as trt
from tests.support.fake_gpu import trt_version as trt_version
from tests.support.onnx_blocks import small_cnn


@pytest.mark.slow
def test_the_table_has_a_row_for_each_engine(trt: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(small_cnn(), tmp_path / "cnn.onnx")
    onnx.save(cases.model_of(cases.MIXED), tmp_path / "mixed.onnx")
    assert proofs.main(["--onnx", str(tmp_path), "--max-rows", "8", "--precisions", "fp32,int8"]) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| cnn", "| mixed"))]
    assert len(rows) == 4
    assert rows[0].startswith("| cnn | fp32 | 1 2 3")
    assert rows[0].endswith("| - |")
    assert rows[1].startswith("| cnn | int8 | 1 2 3")
    assert "influence: output 'y' of row 0 of 2 changes" in rows[2]
