"""The server sends no telemetry: libraries in it must not report to their makers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import add_model, affine
from tests.support.serving import serving


@pytest.mark.parametrize("config", ["", "isolation: process\n"], ids=["within", "apart"])
def test_onnx_runtime_writes_no_usage_data(tmp_path: Path, config: str) -> None:
    home, repository = tmp_path / "home", tmp_path / "repository"
    home.mkdir()
    add_model(repository, "affine", affine(seed=1), files={"config.yaml": config})
    # Its telemetry would begin with an identifier and a database in the user's folder.
    with serving(repository, tmp_path, env={"HOME": str(home), "ORT_DISABLE_TELEMETRY": "0"}) as server:
        assert server.request("GET", "/v2/models/affine/ready")[0] == 200
    assert [path.name for path in home.rglob("*")] == []
