"""Files that commit cba777c wrote (repository, store of engines, latency tables) are read without a rebuild or a measurement."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.support.fixed_machine import MACHINE
from tests.support.serving import ROOT, Server
from tests.support.serving import serving as support_serving

WRITTEN = ROOT / "tests" / "fixtures" / "written_by_cba777c"
ENGINE = "model.ae6c9fe70fe0.onnx"
COMMAND = (sys.executable, "-m", "tests.support.fixed_machine")
ROWS = np.random.default_rng(7).standard_normal((8, 16)).astype(np.float32)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy that may be changed; `idle_ns` 0 stands for a machine of unknown speed (see the README)."""
    shutil.copytree(WRITTEN, tmp_path / "files")
    for table in tables(tmp_path / "files"):
        document = json.loads(table.read_text())
        assert document["idle_ns"] > 0
        table.write_text(json.dumps({**document, "idle_ns": 0}, separators=(",", ":")))
    return tmp_path / "files"


def tables(files: Path) -> list[Path]:
    return sorted((files / "state" / "profiles").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def environment(files: Path) -> dict[str, str]:
    return {MACHINE: str(files / "machine.json"), "COLUMNS": "200", "NO_COLOR": "1"}


def headrace(files: Path, *words: str) -> str:
    """Run one of the builder's commands on the copy; what it prints."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    ran = subprocess.run(
        [*COMMAND, *words, "--model-repository", str(files / "models"), "--cache", str(files / "engines")],
        cwd=ROOT,
        env={**inherited, **environment(files)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def serving(files: Path, folder: Path) -> AbstractContextManager[Server]:
    options = ("--state-dir", str(files / "state"), "--profile-s", "0")
    return support_serving(files / "models", folder, *options, env=environment(files), command=COMMAND)


def get(server: Server, path: str) -> Any:
    status, _, content = server.request("GET", path)
    assert status == 200, content
    return json.loads(content)


def test_the_stored_engine_and_the_stored_latencies_serve(files: Path, tmp_path: Path) -> None:
    before = contents(files)
    with serving(files, tmp_path) as server:
        parameters = get(server, "/v2/models/affine")["parameters"]
        assert (parameters["engine.file"], parameters["engine.precision"]) == (ENGINE, "int8")
        assert get(server, "/v2/models/affine/layers")["artefact"] == ENGINE
        for table in tables(files):
            document = json.loads(table.read_text())
            profile = get(server, f"/v2/models/{document['model']}/profile")["profile"]
            stored = {
                (int(n), int(rows)): ns for n, table in document["times_ns"].items() for rows, ns in table.items()
            }
            assert {(entry["instances"], entry["rows"]): entry["source"] for entry in profile} == dict.fromkeys(
                stored, "stored"
            )
            for entry in profile:
                times_ns = stored[entry["instances"], entry["rows"]]
                assert min(times_ns) <= round(1000 * entry["median_us"]) <= max(times_ns)
        tensor = {"name": "X", "datatype": "FP32", "shape": [8, 16], "data": ROWS.ravel().tolist()}
        body = json.dumps({"inputs": [tensor]}).encode()
        status, _, content = server.request("POST", "/v2/models/affine/infer", body)
        assert status == 200, content
        answer = np.array(json.loads(content)["outputs"][0]["data"], np.float32).reshape(8, 4)
    folder = files / "models" / "affine" / "1"
    engine, source = (ort.InferenceSession(folder / name).run(None, {"X": ROWS})[0] for name in (ENGINE, "model.onnx"))
    assert np.abs(answer - engine).max() < 1e-5 < np.abs(answer - source).max()
    after = contents(files)
    assert {str(Path(name).parent) for name in set(after) - set(before)} == {"state/tried"}
    assert set(before) <= set(after)
    changed = {name for name in after if after[name] != before.get(name)}
    assert all(name.startswith("state") for name in changed), changed  # the request's batch is one more measurement


def test_the_builder_finds_the_stored_engine(files: Path) -> None:
    before = contents(files)
    listed = json.loads(headrace(files, "engines", "ls", "--json"))
    assert "2 checked, 2 as built, 0 wrong" in headrace(files, "engines", "verify")
    assert "0 of 1 engines removed" in headrace(files, "engines", "gc", "--keep-days", "100000")
    assert json.dumps(listed).count("ae6c9fe70fe0") >= 2, listed
    built = headrace(files, "build", "affine", "--publish-slower", "--target", "onnxruntime")
    assert re.search(r"int8 +published", built), built
    assert "stored" in built, built
    after = contents(files)
    assert {name for name in after if after[name] != before.get(name)} == set(), built
    assert set(before) == set(after)


def test_another_machine_is_distinguished(files: Path, tmp_path: Path) -> None:
    """The test above would be worth nothing if any machine took the files."""
    machine = json.loads((files / "machine.json").read_text())
    (files / "machine.json").write_text(json.dumps({**machine, "cpuinfo": "flags\t\t: avx2\n"}))
    with serving(files, tmp_path) as server:
        assert "engine.file" not in get(server, "/v2/models/affine")["parameters"]
        assert get(server, "/v2/models/row_sums/profile")["profile"] == []
