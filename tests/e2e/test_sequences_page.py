"""The example of docs/sequences.md runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import tritonclient.http as triton_http
from onnx import TensorProto, helper

from loadtest.onnx_models import onnx_model
from tests.support.models import add_model
from tests.support.python_models import add_python_model
from tests.support.serving import ROOT, serving


def test_the_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/sequences.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:python|py)?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (config, code, client, state_config, countdown_config, countdown) = blocks
    add_python_model(tmp_path / "repository", "counters", code, config)
    add_model(tmp_path / "repository", "sums", _sums(), config=state_config)
    add_python_model(tmp_path / "repository", "countdown", countdown, countdown_config)
    with serving(tmp_path / "repository", tmp_path) as server:
        done = subprocess.run(
            [sys.executable, "-c", client.replace("127.0.0.1:8000", server.address)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        with triton_http.InferenceServerClient(server.address) as http:
            values = [_send(http, number, step == 0, step == 2) for step, number in enumerate((5, 6, 7))]
        events = server.request("POST", "/v2/models/countdown/generate_stream", b'{"COUNT": 3}')[2]
    assert values == [5, 11, 18]
    assert [int(number) for number in re.findall(rb'"NUMBER":(\d+)', events)] == [2, 1, 0]
    assert (done.returncode, done.stdout.split()) == (0, ["5", "11", "18"]), done.stderr


def _sums() -> onnx.ModelProto:
    kind = TensorProto.FLOAT, ("batch", 1)
    nodes = [helper.make_node("Add", ["VALUE", "SUM_IN"], [name]) for name in ("SUM", "SUM_OUT")]
    return onnx_model(nodes, dict.fromkeys(("VALUE", "SUM_IN"), kind), dict.fromkeys(("SUM", "SUM_OUT"), kind))


def _send(client: triton_http.InferenceServerClient, value: float, start: bool, end: bool) -> float:
    tensor = triton_http.InferInput("VALUE", (1, 1), "FP32").set_data_from_numpy(np.full((1, 1), value, np.float32))
    result = client.infer("sums", [tensor], sequence_id=7, sequence_start=start, sequence_end=end)
    return float(result.as_numpy("SUM").item())
