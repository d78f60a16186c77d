"""The GPU bench on a GPU, with a model of a few hundred weights: that every part comes to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from loadtest.servers import ROOT
from tests.support.gpu_marks import gpu_marks

pytestmark = gpu_marks(240, "fastapi", "uvicorn", "tritonclient", "onnx", "onnxruntime")


def test_every_part_completes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest.gpu", "--model", "small", "--quick", "--seconds", "0.2"]
    command += ["--limit-s", "200", "--output", str(tmp_path), "--work", str(tmp_path / "work")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=230)
    print(finished.stdout)
    assert finished.returncode == 0, finished.stdout[-3000:]
    results = {result["name"]: result for result in json.loads((tmp_path / "results.json").read_text())["results"]}
    assert [name.split()[0] for name in results] == ["prepare", "a", "b", "d", "c"]
    ways = {figure["contender"] for figure in results["c fp16"]["figures"]}
    assert {"http body", "http system", "http cuda", "grpc system", "grpc cuda"} <= ways
    assert {figure["contender"] for figure in results["d fp16"]["figures"]} >= {"in process, pinned", "http cuda"}
