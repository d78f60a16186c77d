"""The bench of split models: its transformer, and the comparison within a latency bound."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from loadtest.gpu.report import PartFindings, missed
from loadtest.gpu.split import compare_within_bound
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


@pytest.mark.parametrize(("two_gpus_rate", "verdict"), [(190.0, "PASS"), (170.0, "MISS")])
def test_both_layouts_are_compared_within_the_bound_of_one_gpu(two_gpus_rate: float, verdict: str) -> None:
    findings = PartFindings("resnet50", "64 rows a batch")
    points = {
        # 99 of 100 with two callers: the bound is 8 ms, not the 20 ms of the best rate.
        "one, 1 in flight": (60.0, 4.0),
        "one, 2 in flight": (99.0, 8.0),
        "one, 3 in flight": (100.0, 20.0),
        "small requests, one": (300.0, 1.0),
        "two, 1 in flight": (two_gpus_rate, 7.0),
        "two, 2 in flight": (220.0, 9.0),
    }
    for what, (rate, p99_ms) in points.items():
        findings.take("sample", {"what": what, "unit": "rows/s", "value": rate})
        findings.take("sample", {"what": what, "unit": "p99 ms", "value": p99_ms})
    compare_within_bound(findings)
    within, best = (comparison for _, comparison in findings.compared())
    assert within.label == "two GPUs / one within 8 ms"
    assert within.spread.median == pytest.approx(two_gpus_rate / 99)
    assert within.verdict == verdict
    assert best.spread.median == pytest.approx(2.2)
    assert missed([findings]) == (verdict == "MISS")


def test_no_load_of_two_gpus_within_the_bound_is_a_failure() -> None:
    findings = PartFindings("resnet50", "64 rows a batch")
    for what, p99_ms in (("one, 1 in flight", 4.0), ("two, 1 in flight", 7.0)):
        findings.take("sample", {"what": what, "unit": "rows/s", "value": 60.0})
        findings.take("sample", {"what": what, "unit": "p99 ms", "value": p99_ms})
    compare_within_bound(findings)
    assert findings.failure == "two GPUs exceed the latency bound of 4 ms at every load"
