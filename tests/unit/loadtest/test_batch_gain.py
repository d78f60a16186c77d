"""`python -m loadtest.batch_gain` prints a row for each file."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from loadtest.batch_gain import main
from tests.support.onnx_blocks import Network


def test_a_table_of_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Network()
    x = net.input("x", [1, 8])
    onnx.save(net.model(net.node("MatMul", x, net.weight(8, 4))), tmp_path / "light_small.onnx")
    assert main([str(tmp_path / "light_small.onnx"), "--rows", "4", "--rounds", "2", "--seconds", "0"]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    name, *rates, gain = [cell.strip() for cell in line.strip("|").split("|")]
    assert name == "small"
    assert len(rates) == 2
    assert float(gain) > 0
