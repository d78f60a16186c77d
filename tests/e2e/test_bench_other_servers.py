"""`headrace bench` against servers of other projects: MLServer and KServe's ModelServer, where they are installed.

`mlserver` is on the path or in `.venv/peers/mlserver`, as `python -m loadtest.peers` makes it. KServe's interpreter is
`.venv/peers/kserve/bin/python`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import free_port
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".venv" / "peers"
MLSERVER = shutil.which("mlserver") or shutil.which("mlserver", path=str(PEERS / "mlserver" / "bin"))
KSERVE = shutil.which("python", path=str(PEERS / "kserve" / "bin"))
START_S = 120.0
SHORT = ("--duration", "0.4", "--warm-up", "0.1", "--processes", "2")

MISSING = {
    "mlserver": None if MLSERVER else "needs MLServer: python -m loadtest.peers --only MLServer installs 1.7.1",
    "kserve": None
    if KSERVE
    else "needs KServe: python -m venv .venv/peers/kserve, then its pip install kserve==0.21.0",
}
pytestmark = pytest.mark.timeout(300)

RUNTIME = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Affine(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        rows = NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("Y", rows * 2 + 1)])
"""


KSERVE_PROGRAM = """
import sys

import numpy as np
from kserve import InferOutput, InferResponse, Model, ModelServer


class Affine(Model):
    def __init__(self):
        super().__init__("described")
        self.ready = True

    async def get_input_types(self):
        return [{"name": "X", "datatype": "FP32", "shape": [-1, 16]}]

    async def get_output_types(self):
        return [{"name": "Y", "datatype": "FP32", "shape": [-1, 16]}]

    async def predict(self, payload, headers=None, response_headers=None):
        rows = (payload.inputs[0].as_numpy() * 2 + 1).astype(np.float32)
        output = InferOutput("Y", list(rows.shape), "FP32")
        output.set_data_from_numpy(rows, binary_data=payload.inputs[0]._raw_data is not None)
        return InferResponse("1", self.name, [output])


ModelServer().start([Affine()])
"""


@dataclass(frozen=True)
class OtherServer:
    name: str
    http_port: int
    grpc_port: int
    folder: Path

    def url(self, protocol: str) -> str:
        return f"http://127.0.0.1:{self.http_port}" if protocol == "http" else f"grpc://127.0.0.1:{self.grpc_port}"

    def run(self, protocol: str, *words: str) -> tuple[int, str, dict[str, Any]]:
        """Status, error output and document of a run; HTTP bodies are JSON for MLServer, which lacks the binary extension."""
        file = self.folder / "result.json"
        file.unlink(missing_ok=True)
        form = (
            ["--body", "json"]
            if self.name == "mlserver" and protocol == "http" and "--shared-memory" not in words
            else []
        )
        line = [
            sys.executable,
            "-m",
            "headrace",
            "bench",
            self.url(protocol),
            *words,
            *SHORT,
            *form,
            "--json",
            str(file),
        ]
        done = subprocess.run(line, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stderr, json.loads(file.read_text()) if file.exists() else {}


@pytest.fixture(scope="module", params=["mlserver", "kserve"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherServer]:
    if reason := MISSING[request.param]:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp(request.param)
    started = OtherServer(request.param, free_port(), free_port(), folder)
    command = mlserver_command(started) if request.param == "mlserver" else kserve_command(started)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
        try:
            until(partial(_ready_or_ended, started, "described", process), timeout_s=START_S)
            assert process.poll() is None, (folder / "log").read_text()
            yield started
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def kserve_command(server: OtherServer) -> list[str]:
    assert KSERVE is not None
    (server.folder / "server.py").write_text(KSERVE_PROGRAM)
    return [KSERVE, "server.py", "--http_port", str(server.http_port), "--grpc_port", str(server.grpc_port)]


def mlserver_command(server: OtherServer) -> list[str]:
    assert MLSERVER is not None
    folder = server.folder
    settings = {"host": "127.0.0.1", "http_port": server.http_port, "grpc_port": server.grpc_port}
    settings |= {"metrics_port": free_port(), "parallel_workers": 0, "debug": False}
    (folder / "runtime.py").write_text(RUNTIME)
    (folder / "settings.json").write_text(json.dumps(settings))
    shape = {"datatype": "FP32", "shape": [-1, 16]}
    models: dict[str, dict[str, Any]] = {
        "plain": {},
        "described": {"inputs": [{"name": "X", **shape}], "outputs": [{"name": "Y", **shape}]},
    }
    for name, more in models.items():
        (folder / name).mkdir()
        document = {"name": name, "implementation": "runtime.Affine", **more}
        (folder / name / "model-settings.json").write_text(json.dumps(document))
    return [MLSERVER, "start", str(folder)]


def is_ready(server: OtherServer, model: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url('http')}/v2/models/{model}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _ready_or_ended(server: OtherServer, model: str, process: subprocess.Popen[bytes]) -> bool:
    return is_ready(server, model) or process.poll() is not None


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_closed_loop_is_answered_and_checked(server: OtherServer, protocol: str) -> None:
    status, errors, document = server.run(protocol, "described", "--batch", "3", "--check", "--concurrency", "4")
    assert status == 0, errors
    (point,) = document["points"]
    assert point["errors"] == {}
    assert point["succeeded"] > 0
    assert document["server"]["name"] == server.name
    # Neither has the statistics extension.
    assert point["server"] is None


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_inputs_without_metadata_are_described(server: OtherServer, protocol: str) -> None:
    if server.name != "mlserver":
        pytest.skip("this model has metadata")
    status, errors, _ = server.run(protocol, "plain")
    assert status == 1
    assert "describe each with --input" in " ".join(errors.split())
    status, errors, document = server.run(protocol, "plain", "--input", "X:FP32:-1,16", "--check")
    assert status == 0, errors
    assert document["points"][0]["errors"] == {}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_open_loop_is_answered(server: OtherServer, protocol: str) -> None:
    status, errors, document = server.run(protocol, "described", "--rate", "20")
    assert status == 0, errors
    (point,) = document["points"]
    assert point["errors"] == {}
    assert point["succeeded"] == point["requests"] > 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_missing_extension_is_named(server: OtherServer, protocol: str) -> None:
    status, errors, _ = server.run(protocol, "described", "--shared-memory")
    assert status == 1
    assert "leave --shared-memory out" in " ".join(errors.split())
