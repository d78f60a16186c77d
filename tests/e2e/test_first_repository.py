"""docs/first-repository.md, followed from its first line to its last: files, commands, the server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_doc_snippets import Snippet, environment, snippets
from tests.support.serving import ROOT, Server
from tests.support.tools import tool

PAGE = "docs/first-repository.md"
TIMEOUT_S = 180.0


def file_of(snippet: Snippet) -> str:
    """Path that the text before a block names; "" for none."""
    before = (ROOT / PAGE).read_text().splitlines()[: snippet.line - 2]
    names = re.findall(r"`([\w/.]+)`:", " ".join(before[-4:]))
    return names[-1] if names else ""


class Reader:
    """Types the commands of the page.

    Args:
        folder: the checkout.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = environment(with_venv=True) | {"HEADRACE_HTTP_PORT": "0", "HEADRACE_GRPC_PORT": "0"}
        self._server: Server | None = None

    def run(self, command: str) -> str:
        if self._server is not None:
            command = command.replace("127.0.0.1:8000", self._server.address)
            command = command.replace("127.0.0.1:8001", self._server.grpc_address)
            if command.startswith("headrace explain"):
                command += f" --url {self._server.url}"
        command = re.sub(r"\bcurl\b", "curl --fail-with-body -sS", command)
        command = command.replace("X-Request-Timeout-Ms: 500", "X-Request-Timeout-Ms: 60000")  # for a busy machine
        done = subprocess.run(
            ["bash", "-c", command], cwd=self._folder, env=self._environment, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def serve(self, command: str) -> None:
        log = self._folder / "serve.log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self._folder, env=self._environment, stdout=stream, stderr=stream
            )
        self._server = Server(process, log)
        self._server.wait_until_ready(TIMEOUT_S)

    def close(self) -> None:
        if self._server is not None:
            self._server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.process.wait(30)
            self._server.process.kill()
            self._server.process.wait()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    tool("curl")
    if not (ROOT / "model_repository/efficientnet_lite0/1/model.onnx").exists():
        pytest.skip("the demo models are not built: make models")
    source = ROOT / "model_repository/efficientnet_lite0"
    shutil.copytree(source, tmp_path / "model_repository/efficientnet_lite0", copy_function=os.link)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    typed = Reader(tmp_path)
    yield typed
    typed.close()


@pytest.mark.timeout(600)
def test_the_page_leads_from_a_photograph_to_its_label(reader: Reader, tmp_path: Path) -> None:
    answers = []
    for snippet in snippets(PAGE):
        if snippet.kind != "indented":
            (tmp_path / file_of(snippet)).write_text(snippet.text + "\n")
            continue
        for command in snippet.text.splitlines():
            if command.startswith("headrace serve"):
                reader.serve(command)
            else:
                result = reader.run(command)
                if command.startswith("curl"):
                    answers.append(json.loads(result))
                elif command.startswith("headrace explain"):
                    assert "step" in result
    assert len(answers) == 2
    outputs = {output["name"]: output["data"] for output in answers[0]["outputs"]}
    classes = reader.run("headrace infer efficientnet_lite0 china.jpg --url 127.0.0.1:8001 --json")
    best = json.loads(classes)["results"][0]["classes"][0]
    assert outputs["label"] == [best["label"]]
    assert outputs["score"] == pytest.approx([best["score"]], abs=0.02)
    assert {output["name"]: output["data"] for output in answers[1]["outputs"]} == outputs
