"""The oracle that every server's answers are checked against."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from loadtest.bench.inprocess import Oracle, WrongAnswer, rows_per_s


@pytest.fixture
def model_path(tmp_path: Path) -> Path:
    """y = x + x, rows of four."""
    node = helper.make_node("Add", ["x", "x"], ["y"])
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", 4]) for name in ("x", "y")]
    graph = helper.make_graph([node], "double", tensors[:1], tensors[1:])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_right_answers_pass_and_wrong_ones_do_not(model_path: Path) -> None:
    oracle = Oracle(model_path)
    inputs = oracle.example(rows=3)
    assert inputs["x"].shape == (3, 4)
    right = inputs["x"] * 2
    oracle.check(inputs, {"y": right})
    wrong = right.copy()
    wrong[2, 3] += 0.1
    with pytest.raises(WrongAnswer, match="differs"):
        oracle.check(inputs, {"y": wrong})
    with pytest.raises(WrongAnswer, match="shape"):
        oracle.check(inputs, {"y": right[:1]})
    with pytest.raises(WrongAnswer, match="missing"):
        oracle.check(inputs, {"z": right})


def test_not_a_number_is_wrong(model_path: Path) -> None:
    oracle = Oracle(model_path)
    inputs = oracle.example(rows=1)
    with pytest.raises(WrongAnswer, match="differs"):
        oracle.check(inputs, {"y": np.full((1, 4), np.nan, dtype=np.float32)})


def test_rate_counts_rows(model_path: Path) -> None:
    assert rows_per_s(model_path, batch=4, threads=1, seconds=0.02) > 0
