"""First steps after `make serve`: the curl command of the banner, and a photograph."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import skimage

from tests.support.serving import ROOT, Server, run_headrace, serving

PICTURES = Path(skimage.__file__).parent / "data"
DEMO = ROOT / "model_repository"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    for name in ("efficientnet_lite0", "add_sub"):
        assert (DEMO / name / "1" / "model.onnx").is_file(), "the demo models are not built: make models"
    options = ["--model-control", "explicit", "--load-model", "efficientnet_lite0", "--load-model", "add_sub"]
    with serving(DEMO, tmp_path_factory.mktemp("demo"), *options) as server:
        yield server


def test_the_line_to_try_works_as_it_is_printed(demo: Server) -> None:
    (line,) = [line for line in demo.text.splitlines() if line.startswith("Try:")]
    words = shlex.split(line.removeprefix("Try:"))
    assert words[:2] == ["curl", "-s"]
    assert words[2].startswith(demo.url)
    status, _, body = demo.request("POST", words[2].removeprefix(demo.url), words[words.index("-d") + 1].encode())
    assert status == 200
    outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    assert outputs == {"OUTPUT0": [n + 1 for n in range(16)], "OUTPUT1": [n - 1 for n in range(16)]}


def test_the_command_for_a_photograph_works_as_it_is_printed(demo: Server) -> None:
    (line,) = [line for line in demo.text.splitlines() if line.startswith("or:")]
    program, *words = shlex.split(line.removeprefix("or:"))
    assert program == "headrace"
    words[words.index("photo.jpg")] = str(PICTURES / "coffee.png")
    done = run_headrace(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "espresso" in done.stdout


@pytest.mark.parametrize(
    ("picture", "label", "at_least"), [("coffee.png", "espresso", 90), ("camera.png", "tripod", 90)]
)
def test_a_photograph_is_named(demo: Server, picture: str, label: str, at_least: float) -> None:
    done = run_headrace("infer", "efficientnet_lite0", PICTURES / picture, "--url", demo.grpc_address)
    assert (done.returncode, done.stderr) == (0, "")
    _, first, *rest = done.stdout.splitlines()
    assert first.split()[0] == label
    assert float(first.split()[-1].rstrip("%")) >= at_least
    assert len(rest) == 5  # four more labels, and how long it took


def test_a_photograph_for_a_model_that_is_not_there(demo: Server) -> None:
    done = run_headrace("infer", "nothing", PICTURES / "coffee.png", "--url", demo.grpc_address)
    assert done.returncode == 1
    assert "Request for unknown model: 'nothing' is not found" in done.stderr
    assert "Traceback" not in done.stderr
