"""The bench of split models: its transformer, and the comparison within a latency bound."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from loadtest.gpu.split import FigureLog, _Session
from loadtest.gpu.split_models import write_transformer


def test_the_transformer_is_valid_and_its_rows_are_independent(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    size_bytes = write_transformer(path, layers=2, width=64, length=8)
    assert (tmp_path / "model.onnx.data").stat().st_size == size_bytes == 2 * 12 * 64 * 64 * 2
    onnx.checker.check_model(path, full_check=True)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    ids = np.random.default_rng(0).integers(0, 1000, (3, 8)).astype(np.int64)
    (pooled,) = session.run(None, {"ids": ids})
    (alone,) = session.run(None, {"ids": ids[1:2]})
    assert np.isfinite(pooled).all()
    np.testing.assert_allclose(pooled[1:2].astype(np.float32), alone.astype(np.float32), atol=5e-3)


@pytest.mark.parametrize(("two_gpus_rate", "is_met"), [(190.0, True), (170.0, False)])
def test_both_layouts_are_compared_within_the_bound_of_one_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_gpus_rate: float, is_met: bool
) -> None:
    points: dict[str, list[dict[str, Any]]] = {
        # 99 of 100 with two callers: the bound is 8 ms, not the 20 ms of the best rate.
        "one": [
            {"rows_per_s": 60.0, "p99_ms": 4.0},
            {"rows_per_s": 99.0, "p99_ms": 8.0},
            {"rows_per_s": 100.0, "p99_ms": 20.0},
        ],
        "two": [{"rows_per_s": two_gpus_rate, "p99_ms": 7.0}, {"rows_per_s": 220.0, "p99_ms": 9.0}],
    }
    session = _Session(argparse.Namespace(), FigureLog(tmp_path / "split.jsonl"))
    monkeypatch.setattr(session, "_process", lambda name, layout, limit_s: points[layout])
    session._compare("resnet50")
    (line,) = (tmp_path / "split.jsonl").read_text().splitlines()
    figures = json.loads(line)
    assert figures["latency_bound_ms"] == 8.0
    assert (figures["one_gpu_rows_per_s"], figures["two_gpus_rows_per_s"]) == (99.0, two_gpus_rate)
    assert figures["ratio"] == round(two_gpus_rate / 99, 3)
    assert (figures["met"], session._missed) == (is_met, not is_met)
