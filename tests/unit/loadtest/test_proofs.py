"""The table of proofs, on a simulated GPU."""

from __future__ import annotations

import json
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
    arguments = ["--onnx", str(tmp_path), "--max-rows", "8", "--precisions", "fp32,int8"]
    results = ["--results", str(tmp_path / "results")]
    assert proofs.main([*arguments, *results]) == 1
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith(("| cnn", "| mixed"))]
    assert [row[:2] for row in rows] == [["| cnn", "fp32"], ["| mixed", "fp32"], ["| cnn", "int8"], ["| mixed", "int8"]]
    of_runtime, alone, batches = map(float, rows[0][3].split(", "))
    assert max(of_runtime, alone, batches) < 1e-4
    tests_ms, all_ms = map(int, rows[0][4].split(" of "))
    assert 0 <= tests_ms <= all_ms
    assert rows[0][5] == "0"  # at the second load
    assert rows[0][7].startswith("1 2 3")
    assert rows[0][8] == "- |"
    assert rows[2][7].startswith("1 2 3")
    assert "influence: output 'y' of row 0 of 2 changes" in rows[1][8]
    assert proofs.main([*arguments, "--limit-s", "0", *results]) == 1
    assert "no time left" not in capsys.readouterr().out, "what is measured is measured again"


@pytest.mark.slow
def test_each_network_has_its_rows_if_processes_cannot_build_it(tmp_path: Path) -> None:
    onnx.save(small_cnn(), tmp_path / "cnn.onnx")
    onnx.save(small_cnn(), tmp_path / "other.onnx")
    arguments = ["--onnx", str(tmp_path), "--precisions", "fp32,fp16", "--processes", "2"]
    assert proofs.main([*arguments, "--results", str(tmp_path / "results")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert sorted((row["network"], row["precision"]) for row in rows) == [
        ("cnn", "fp16"), ("cnn", "fp32"), ("other", "fp16"), ("other", "fp32"),
    ]  # fmt: skip
    assert all(row["reason"].startswith("BuildError: ") for row in rows)


def test_a_process_that_ends_before_its_rows_leaves_rows_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proofs.sys, "executable", "/bin/false")
    arguments = ["a", "b", "--precisions", "fp16", "--processes", "2"]
    assert proofs.main([*arguments, "--results", str(tmp_path / "results")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert {row["reason"] for row in rows} == {"its process ended with status 1"}
