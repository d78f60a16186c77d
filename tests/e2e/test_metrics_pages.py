"""The page of metrics of a real server by promtool, full and lean, and buckets that a model's configuration chooses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import models
from tests.support.serving import serving
from tests.support.tools import tool

BUCKETS = """
max_batch_size: 8
model_metrics {
  metric_control {
    metric_identifier { family: "nv_inference_first_response_histogram_ms" }
    histogram_options { buckets: [ 0.5, 10, 250 ] }
  }
}
"""


@pytest.mark.parametrize("preset", ["full", "lean"])
def test_promtool_finds_nothing_wrong_but_with_tritons_names(tmp_path: Path, preset: str) -> None:
    models.add_model(tmp_path / "repository", "affine", models.affine(), config=BUCKETS)
    with serving(tmp_path / "repository", tmp_path, "--metrics-config", f"preset={preset}") as server:
        page = server.request("GET", "/metrics")[2]
        assert "model_metrics" not in server.text, "no warning"
    checked = subprocess.run([tool("promtool"), "check", "metrics"], input=page, capture_output=True, timeout=60)
    complaints = (checked.stdout + checked.stderr).decode().splitlines()
    assert [line for line in complaints if not line.startswith("nv_inference_")] == []
    lines = [line for line in page.decode().splitlines() if not line.startswith("#") and 'model="affine"' in line]
    histograms = {re.split("[{ ]", line)[0].removesuffix("_bucket") for line in lines if "_bucket" in line}
    if preset == "lean":
        assert (checked.returncode, complaints) == (0, [])
        assert histograms == {"headrace_total_seconds"}
        assert len(lines) < 90
    else:
        assert len(histograms) > 5
        bounds = re.findall(r'nv_inference_first_response_histogram_ms_bucket{le="([^"]+)"', page.decode())
        assert bounds == ["0.5", "10.0", "250.0", "+Inf"]


def test_buckets_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    config = BUCKETS.replace("0.5, 10", "10, 0.5")
    models.add_model(tmp_path / "repository", "affine", models.affine(), config=config)
    with serving(tmp_path / "repository", tmp_path) as server:
        assert "the buckets do not ascend from above 0 (write e.g. [10, 100, 1000])" in server.text
