"""The figure of many models: its repository, and its table."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx
from headrace.config.model_folder import read_model_folder

from loadtest.many_models import Round, report, write_repository


def test_the_models_are_many_different_ones(tmp_path: Path) -> None:
    write_repository(tmp_path, 3)
    files = sorted(tmp_path.glob("*/1/model.onnx"))
    assert [file.parent.parent.name for file in files] == ["m0000", "m0001", "m0002"]
    assert len({file.read_bytes() for file in files}) == 3
    onnx.checker.check_model(onnx.load(files[2]))
    folder = read_model_folder(tmp_path / "m0002", tmp_path)
    assert (folder.config.max_batch_size, folder.findings) == (8, ())


def test_the_table_has_the_ratio_of_each_pair_of_rounds() -> None:
    one = [Round([100.0] * 100), Round([200.0] * 100), Round([400.0] * 100)]
    many = [Round([110.0] * 100), Round([200.0] * 100), Round([360.0] * 100)]
    options = argparse.Namespace(models=9, hot=3, rate=50.0, rounds=3, seconds=2.0, model_control="poll", scrape_s=5.0)
    lines = report((one, many), options).splitlines()
    assert "9 models, 3 of them hot, 50 requests/s, 3 pairs of rounds of 2 s, --model-control poll" in lines[0]
    assert "| p99 | 200 (100 to 400) | 200 (110 to 360) | 1.00 (0.90 to 1.10) |" in lines
