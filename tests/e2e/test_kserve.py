"""KServe's SDK as a client of a server that runs with the arguments of deploy/kserve, and its models of the manifests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import yaml

from tests.support.grpc_requests import fail_count
from tests.support.models import affine
from tests.support.python_models import NAPPING, NAPPING_CONFIG, add_python_model
from tests.support.serving import COMMAND, HOST, ROOT, Server, free_port, serving, start_process

pytestmark = pytest.mark.slow

KSERVE = ROOT / "deploy" / "kserve"
RUNTIME = KSERVE / "cluster-serving-runtime.yaml"
SERVICE = KSERVE / "inference-service.yaml"
PYTHON = ROOT / ".venv" / "kserve" / "bin" / "python"

needs_sdk = pytest.mark.skipif(not PYTHON.exists(), reason="`make .venv/.kserve` installs KServe's SDK")


def container() -> dict[str, Any]:
    (result,) = yaml.safe_load(RUNTIME.read_text())["spec"]["containers"]
    assert isinstance(result, dict)
    return result


def sdk(*words: str) -> Any:
    """Result of a command of tests/support/kserve_client.py."""
    program = ROOT / "tests" / "support" / "kserve_client.py"
    done = subprocess.run([PYTHON, program, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=["model.onnx", "1/model.onnx", "anything/1/model.onnx"])
def mounted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    """A server with the arguments of the runtime, and the name of its model: bare files, bare versions, a repository."""
    folder = tmp_path_factory.mktemp("kserve")
    file = folder / "models" / request.param
    file.parent.mkdir(parents=True)
    file.write_bytes(affine().SerializeToString())
    places = {
        "/mnt/models": str(folder / "models"),
        "--http-port=8080": "--http-port=0",
        "--grpc-port=9000": "--grpc-port=0",
        "--metrics-port=8002": f"--metrics-port={free_port()}",
    }
    args = container()["args"]
    assert set(places) < set(args)
    words = [places.get(word, word).replace("{{.Name}}", "digits") for word in args]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    # The variables of the image, but for the address.
    variables = {
        "HEADRACE_HOST": HOST,
        "HEADRACE_MODEL_REPOSITORY": "/models",
        "HEADRACE_STATE_DIR": str(folder / "state"),
    }
    with (folder / "log").open("wb") as log:
        process = start_process([*COMMAND, *words], inherited | variables, log, log)
    server = Server(process, folder / "log")
    try:
        server.wait_until_ready()
        yield server, "anything" if "anything" in request.param else "digits"
    finally:
        server.stop()


def test_the_arguments_serve_each_form_of_a_model_and_the_probes(mounted: tuple[Server, str]) -> None:
    server, model = mounted
    index = json.loads(server.request("POST", "/v2/repository/index")[2])
    assert [(row["name"], row["state"]) for row in index] == [(model, "READY")]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server.request("GET", container()[probe]["httpGet"]["path"])[0] == 200


def test_the_manifests_agree_with_the_server_and_with_each_other() -> None:
    runtime, service = yaml.safe_load(RUNTIME.read_text())["spec"], yaml.safe_load(SERVICE.read_text())["spec"]
    one = container()
    assert one["name"] == "kserve-container"
    ports = [port["containerPort"] for port in one["ports"]]
    assert ports == [8080, 9000, 8002]
    assert runtime["protocolVersions"] == ["v2", "grpc-v2"]
    assert runtime["annotations"]["prometheus.kserve.io/port"] == "8002"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[probe]["httpGet"]["port"] == 8080
    predictor = service["predictor"]
    formats = [{name: form[name] for name in ("name", "version")} for form in runtime["supportedModelFormats"]]
    assert predictor["model"]["modelFormat"] in formats
    assert predictor["model"]["protocolVersion"] in runtime["protocolVersions"]
    (drain,) = [float(word.partition("=")[2]) for word in one["args"] if word.startswith("--drain-timeout-s=")]
    pause = float(one["lifecycle"]["preStop"]["exec"]["command"][1])
    assert predictor["terminationGracePeriodSeconds"] > drain + pause
    volumes = {volume["name"] for volume in runtime["volumes"]}
    assert {mount["name"] for mount in one["volumeMounts"]} == volumes


@needs_sdk
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_sdk_is_answered(mounted: tuple[Server, str], protocol: str) -> None:
    server, model = mounted
    session = onnxruntime.InferenceSession(affine().SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"X": np.ones((1, 16), np.float32)})
    result = sdk(protocol, server.address if protocol == "http" else server.grpc_address, model)
    np.testing.assert_allclose(result.pop("answer"), expected[0], rtol=1e-5)
    assert result == {"live": True, "ready": True, "model": True}


@needs_sdk
def test_the_retries_of_the_sdk_wait_until_the_queue_is_shorter(tmp_path: Path) -> None:
    """Its own pauses, 0.1 s and 0.2 s, end before the model that runs for a second."""
    add_python_model(tmp_path / "repository", "napping", NAPPING, NAPPING_CONFIG)
    with serving(tmp_path / "repository", tmp_path) as server:
        assert sdk("overload", server.grpc_address, "napping") == {"answers": [[1.0] * 16] * 3}
        assert fail_count(server, "napping") >= 1


@needs_sdk
@pytest.mark.parametrize(
    ("kind", "path"), [("V1alpha1ClusterServingRuntime", RUNTIME), ("V1beta1InferenceService", SERVICE)]
)
def test_the_sdk_has_every_field_of_the_manifests(kind: str, path: Path, tmp_path: Path) -> None:
    assert sdk("manifest", kind, str(path)) == {"problems": []}
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(path.read_text().replace("\nmetadata:", "\nmeta:").replace("\nspec:", "\nspec:\n  minReplica: 1"))
    problems = sdk("manifest", kind, str(wrong))["problems"]
    assert f"{kind}.meta: unknown" in problems
    assert f"{kind}.spec.minReplica: unknown" in problems
