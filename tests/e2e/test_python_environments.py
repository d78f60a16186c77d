"""Python models in environments of their own: requirements, archives, interpreters of other versions, and installations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pythons import python_of
from tests.support.serving import Server, serving
from tests.support.waiting import until
from tests.support.wheels import OFFLINE, add_numpy, add_uv, add_wheel

CODE = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils

try:
    import gauge
except ImportError:
    gauge = None


class TritonPythonModel:
    def initialize(self, args):
        self.facts = "%s|%d.%d|%s" % (sys.prefix, *sys.version_info[:2], getattr(gauge, "value", None))

    def execute(self, requests):
        facts = np.array([self.facts.encode()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("FACTS", facts)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input { name: "X", data_type: TYPE_FP32, dims: [ 1 ] }
output { name: "FACTS", data_type: TYPE_STRING, dims: [ 1 ] }
"""


@pytest.fixture(autouse=True)
def small_uv(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `small_uv` install the packages; a slow test takes the machine's uv or pip."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setenv("PATH", f"{add_uv(tmp_path / 'programs').parent}{os.pathsep}{os.environ['PATH']}")


def add_model(repository: Path, name: str, config: str = "") -> Path:
    """Write a model that answers with its prefix, its Python and what the package `gauge` says; returns its folder."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG + config)
    (folder / "1" / "model.py").write_text(CODE)
    return folder


def add_requirements(folder: Path, text: str = "gauge\n", value: str = "'gauge 1'") -> None:
    (folder / "1" / "requirements.txt").write_text(OFFLINE + text)
    add_wheel(folder / "1" / "wheels", "gauge", "1.0", {"gauge.py": f"value = {value}\n"})
    add_numpy(folder / "1" / "wheels")


def facts(server: Server, name: str) -> list[str]:
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1]}]}
    status, _, content = server.request("POST", f"/v2/models/{name}/infer", json.dumps(body).encode())
    assert status == 200, content
    text: str = json.loads(content)["outputs"][0]["data"][0]
    return text.split("|")


def is_ready(server: Server, name: str) -> Callable[[], bool]:
    return lambda: server.request("GET", f"/v2/models/{name}/ready")[0] == 200


def row(server: Server, name: str) -> dict[str, str]:
    rows = json.loads(server.request("POST", "/v2/repository/index")[2])
    (found,) = (row for row in rows if row["name"] == name)
    return dict(found)


@pytest.mark.slow
def test_requirements_are_installed_while_other_models_serve(tmp_path: Path) -> None:
    repository, state = tmp_path / "repository", tmp_path / "state"
    add_requirements(add_model(repository, "measured"))
    add_model(repository, "plain")
    # The installation ends when this file exists, so that everything before can be observed.
    release = tmp_path / "release"
    slow = repository / "measured" / "1" / "slow"
    slow.mkdir()
    (slow / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
        '[project]\nname = "slow"\nversion = "1"\n'
    )
    (slow / "build.py").write_text(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(release)!r}).exists():\n    time.sleep(0.02)\n"
        "def build_wheel(folder, *_):\n"
        f"    wheel = next(pathlib.Path({str(slow.parent / 'wheels')!r}).glob('slow-*.whl'))\n"
        "    (pathlib.Path(folder) / wheel.name).write_bytes(wheel.read_bytes())\n    return wheel.name\n"
    )
    add_wheel(slow.parent / "wheels", "slow", "1", {"slow.py": ""})
    with (slow.parent / "requirements.txt").open("a") as stream:
        stream.write("./slow\n")
    with serving(repository, tmp_path, "--state-dir", str(state)) as server:
        assert facts(server, "plain")[2] == "None"
        assert not is_ready(server, "measured")()
        entry = row(server, "measured")
        assert entry["state"] == "LOADING"
        assert entry["reason"] == "its Python environment is being installed"
        release.touch()
        until(is_ready(server, "measured"), 60)
        prefix, _, value = facts(server, "measured")
        assert value == "gauge 1"
        assert prefix.startswith(str(state / "environments" / "venv-"))
    (made,) = (state / "environments").glob("venv-*/headrace.json")
    assert json.loads(made.read_text())["python"] == ".".join(map(str, sys.version_info[:3]))
    # A second start finds it: the model is served before the server says that it listens, and nothing is installed.
    with serving(repository, tmp_path, "--state-dir", str(state)) as server:
        assert facts(server, "measured")[2] == "gauge 1"
        assert "is made of" not in server.text


def test_a_load_returns_when_the_environment_is_installed(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_requirements(add_model(repository, "measured"))
    options = ("--environments-dir", str(tmp_path / "environments"), "--model-control", "explicit")
    with serving(repository, tmp_path, *options) as server:
        status, _, content = server.request("POST", "/v2/repository/models/measured/load", b"{}")
        assert status == 200, content
        prefix, _, value = facts(server, "measured")
        assert value == "gauge 1"
        assert prefix.startswith(str(tmp_path / "environments" / "venv-"))
        # Other requirements: another environment, without a restart.
        add_wheel(repository / "measured" / "1" / "wheels", "gauge", "2.0", {"gauge.py": "value = 'gauge 2'\n"})
        (repository / "measured" / "1" / "requirements.txt").write_text(f"{OFFLINE}gauge==2.0\n")
        assert server.request("POST", "/v2/repository/models/measured/load", b"{}")[0] == 200
        assert facts(server, "measured")[2] == "gauge 2"


def test_a_failed_installation_is_the_error_of_the_load_and_a_missing_archive_is_named(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_requirements(add_model(repository, "measured"), "package-that-is-not-there\n")
    add_model(repository, "plain")
    parameter = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/opt/gone.tar.gz" } }'
    add_model(repository, "gone", parameter)
    options = ("--state-dir", str(tmp_path / "state"), "--model-control", "explicit", "--load-model", "*")
    with serving(repository, tmp_path, *options) as server:
        assert facts(server, "plain")
        assert row(server, "gone")["state"] == "UNAVAILABLE"
        assert "EXECUTION_ENV_PATH '/opt/gone.tar.gz' does not exist" in row(server, "gone")["reason"]
        until(lambda: row(server, "measured")["state"] == "UNAVAILABLE", 60)
        assert "package-that-is-not-there" in row(server, "measured")["reason"]
        status, _, content = server.request("POST", "/v2/repository/models/measured/load", b"{}")
        assert status == 400
        assert b"package-that-is-not-there" in content
        add_requirements(repository / "measured")
        assert server.request("POST", "/v2/repository/models/measured/load", b"{}")[0] == 200
        assert facts(server, "measured")[2] == "gauge 1"


def test_a_server_that_stops_ends_an_installation(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    folder = add_model(repository, "measured")
    started = tmp_path / "started"
    (folder / "1" / "slow").mkdir()
    (folder / "1" / "slow" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n'
    )
    (folder / "1" / "slow" / "build.py").write_text(
        f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(600)\n"
    )
    add_requirements(folder, "./slow\n")
    with serving(repository, tmp_path, "--state-dir", str(tmp_path / "state")) as server:
        until(started.exists, 30)
        server.stop(10)
    assert list((tmp_path / "state" / "environments").glob("venv-*/headrace.json")) == []


def test_the_servers_path_does_not_reach_another_interpreter(tmp_path: Path) -> None:
    repository, stray = tmp_path / "repository", tmp_path / "stray"
    stray.mkdir()
    (stray / "gauge.py").write_text("value = 'of PYTHONPATH'\n")
    add_requirements(add_model(repository, "measured"))
    add_model(repository, "plain")
    options = ("--state-dir", str(tmp_path / "state"), "--strict")
    with serving(repository, tmp_path, *options, env={"PYTHONPATH": str(stray)}) as server:
        assert facts(server, "plain")[2] == "of PYTHONPATH"
        assert facts(server, "measured")[2] == "gauge 1"


def pack(python: str, archive: Path, *packages: str) -> None:
    """Pack an environment as conda-pack does: without links that lead out of it."""
    folder = archive.parent / "packed"
    subprocess.run([python, "-m", "venv", "--copies", str(folder)], check=True)
    words = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(packages)} cannot be installed: {done.stderr[-200:]}")
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        packed.add(folder, ".")
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "numpy"), [("3.8", "numpy==1.24.4"), ("3.13", "numpy")])
def test_an_archive_brings_an_interpreter_of_its_own(tmp_path: Path, version: str, numpy: str) -> None:
    archive, repository = tmp_path / "env.tar.gz", tmp_path / "repository"
    pack(python_of(version), archive, numpy)
    parameter = 'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "%s" } }'
    add_model(repository, "absolute", parameter % archive)
    within = add_model(repository, "within", parameter % "$$TRITON_MODEL_DIRECTORY/env.tar.gz")
    shutil.copy(archive, within / "env.tar.gz")
    with serving(repository, tmp_path, "--state-dir", str(tmp_path / "state"), "--strict") as server:
        for name in ("absolute", "within"):
            prefix, python, _ = facts(server, name)
            assert python == version
            assert prefix.startswith(str(tmp_path / "state" / "environments" / "archive-"))
        assert len(re.findall(r"is made of env.tar.gz", server.text)) == 1
