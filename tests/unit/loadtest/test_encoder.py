"""`python -m loadtest.onnx_models` writes an encoder."""

from __future__ import annotations

from pathlib import Path

import onnx

from loadtest.onnx_models import main


def test_an_encoder_is_written(tmp_path: Path) -> None:
    assert main([str(tmp_path / "e.onnx"), "--layers", "1", "--width", "64", "--heads", "2"]) == 0
    model = onnx.load(tmp_path / "e.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert [value.name for value in model.graph.output] == ["hidden", "pooled"]
