"""Python models are loaded several at a time, each once; one that hangs stops neither the others nor the server's end."""

from __future__ import annotations

import itertools
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.models import add_pipeline, ensemble_config
from tests.support.serving import free_port, serving, start
from tests.support.waiting import until

CONFIG = """
backend: "python"
input { name: "x", data_type: TYPE_FP32, dims: [ 1 ] }
output { name: "y", data_type: TYPE_FP32, dims: [ 1 ] }
"""
CODE = """
import os, time
from pathlib import Path
import triton_python_backend_utils as pb_utils

EVENTS = Path(__file__).parents[2] / "events"

def write(*words):
    with EVENTS.open("a") as stream:
        stream.write(" ".join(map(str, words)) + "\\n")

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        write("complete", Path(__file__).parents[1].name)
        return config

    def initialize(self, args):
        name = args["model_name"]
        began = time.monotonic()
        write("initialize", name)
        time.sleep(0.5)
        write("interval", began, time.monotonic())

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]

    def finalize(self):
        write("finalize")
"""
NUMBERS = {"x": ("TYPE_FP32", (1,))}, {"z": ("TYPE_FP32", (1,))}
BROKEN = CODE.replace('write("interval"', 'raise ValueError("no weights")\n        write("interval"')


def add_model(repository: Path, name: str, code: str = CODE) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG)
    (folder / "model.py").write_text(code)


def test_models_start_at_the_same_time_and_once(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    names = [f"m{index}" for index in range(6)]
    for name in names:
        add_model(repository, name)
    add_model(repository, "broken", BROKEN)
    with serving(repository, tmp_path) as server:
        rows = {row["name"]: row for row in json.loads(server.request("POST", "/v2/repository/index")[2])}
        assert {name: row["state"] for name, row in rows.items()} == {
            "broken": "UNAVAILABLE",
            **dict.fromkeys(names, "READY"),
        }
        assert "initialize raised ValueError" in rows["broken"]["reason"]
        # The table of the banner.
        assert all(re.search(rf"^{name} +1 +READY ", server.text, re.MULTILINE) for name in names), server.text
    lines = [line.split() for line in (repository / "events").read_text().splitlines()]
    for name in (*names, "broken"):
        assert lines.count(["complete", name]) == 1
        assert lines.count(["initialize", name]) == 1
    assert lines.count(["finalize"]) == len(names)
    intervals = sorted((float(line[1]), float(line[2])) for line in lines if line[0] == "interval")
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(intervals))


def test_a_server_that_stops_while_models_start_leaves_no_process(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for index in range(4):
        add_model(repository, f"m{index}", CODE.replace("time.sleep(0.5)", "time.sleep(600)"))
    with start(repository, tmp_path / "log", "--drain-timeout-s", "1") as server:
        events = repository / "events"
        until(lambda: events.exists() and "initialize" in events.read_text(), 60)
        server.process.terminate()
        server.process.wait(30)
    until(lambda: not _processes_with(str(tmp_path)), 10)


def test_a_model_that_hangs_while_it_starts_delays_no_other(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    add_model(repository, "a_hanging", CODE.replace("time.sleep(0.5)", "time.sleep(600)"))
    for name in ("b", "c"):
        add_model(repository, name)
    pair = ensemble_config([("a_hanging", {"x": "x"}, {"y": "y"}), ("b", {"x": "y"}, {"y": "z"})], *NUMBERS, "")
    add_pipeline(repository, "a_pair", pair)
    port = free_port()
    with start(repository, tmp_path / "log", "--drain-timeout-s", "1", "--http-port", str(port)) as server:
        url = f"http://127.0.0.1:{port}/v2/models"
        until(lambda: _status(f"{url}/b/ready") == _status(f"{url}/c/ready") == 200, 60)
        assert _status(f"{url}/a_hanging/ready") != 200
        assert _status(f"{url}/a_pair/ready") != 200
        began = time.monotonic()
        server.process.terminate()
        server.process.wait(30)
        assert time.monotonic() - began < 20


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _processes_with(text: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in words:
                found.append(folder.name)
    return found
