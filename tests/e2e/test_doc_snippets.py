"""Runs the commands in README.md and docs/, and reads the configurations that they show.

Commands run in a folder that looks like the root of the repository after `make serve`, against one server on free ports.
A command that cannot run here stands in `NOT_RUN`, with the reason.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from headrace.wire.access.keys_file import parse_keys
from headrace_engines.demo.build import CATALOGUE, build_demo_model
from PIL import Image

from loadtest.onnx_models import transformer
from tests.support.models import read_config_text
from tests.support.serving import COMMAND as COMMAND_LINE
from tests.support.serving import HOST, ROOT, Server, free_port, run_headrace, serving, start_process
from tests.support.tools import tool

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
# What a line of an indented or unnamed block begins with if a shell is to run it.
COMMAND = re.compile(
    r"(headrace|\.venv/bin/\w+|make|curl|docker|kubectl|pip|python|pytest|cd|source|perf_analyzer|jq|[A-Z_]+=\S+) "
)
# What is not run, and why. `make` and `python -m loadtest` are not run either, but checked: see `checked`.
NOT_RUN = (
    (
        r"docker |(\w+=\S+ )*docker |cd deploy",
        "needs Docker; tests/unit/deploy/test_containers.py and `make image-test`",
    ),
    (r"kubectl ", "needs a cluster; tests/unit/deploy/test_containers.py"),
    (r"(perf_analyzer|jq) ", "programs of others"),
    (r"pip install ", "needs a package index"),
    (
        r"headrace (serve|validate|tune|simulate) .*(s3|hf)://",
        "needs a store; tests/e2e/test_store_repositories.py and tests/unit/stores",
    ),
    (r"headrace import (torch|keras|savedmodel) ", "needs a framework; tests/e2e/test_import_command.py"),
    (r"headrace optimize \S+ --prune channels", "needs PyTorch; tests/unit/engines/commands/test_optimize.py"),
    (r"headrace (build|compare) ", "takes minutes; tests/e2e/test_build_command.py"),
    (r"headrace lab conv (?!--list|--reference)", "needs a GPU; tests/unit/headrace_lab/test_conv_map.py"),
    (r"headrace proof ", "needs a row that differed; tests/e2e/test_proof.py"),
)
# So that a command takes seconds.
SHORTER = (
    (r"^(headrace simulate.*?) --seconds [\d.]+", r"\g<1>"),
    (r"^headrace simulate ", "headrace simulate --seconds 0.2 "),
    (r"^headrace bench ((?:http|grpc)://)", r"headrace bench --duration 0.2 --warm-up 0 --processes 1 \g<1>"),
    (r"^headrace bisect efficientnet_lite0 ", "headrace bisect digits "),
    (r"^headrace tune ", "headrace tune --seconds 0.02 --instances 1 --repeats 1 --max-batch-size 4 "),
    (r"^(headrace serve .*--model-repository )model_repository", r"\g<1>my_models"),
)
# Python that imports one of these runs where it is installed: the environment of the tests has none of them.
FRAMEWORKS = frozenset({"keras", "tensorflow", "torch", "torchvision"})
# Followed from its first line to its last by tests/e2e/test_first_repository.py.
FOLLOWED = "docs/first-repository.md"
SERVED = ("add_sub", "classify", "digits", "efficientnet_lite0", "markov_text", "resnet50", "tiny")
COMMAND_TIMEOUT_S = 240.0  # a bisection of precisions took over 60 s on busy cores


@dataclass(frozen=True)
class Snippet:
    """A block of a page.

    Attributes:
        page: its file.
        line: number of the block's first line.
        kind: language of a fenced block, "" if it has none, "indented" for the others.
        text: without fence and indent.
    """

    page: str
    line: int
    kind: str
    text: str

    def commands(self) -> list[str]:
        """Shell commands, continued lines joined, comments behind them removed."""
        result: list[str] = []
        open_ = ""
        for line in self.text.splitlines() if self.kind in ("indented", "", "sh", "bash") else ():
            if not open_ and not COMMAND.match(line.strip() + " "):
                continue
            open_ = f"{open_}\n{line}" if open_ else line.strip()
            if open_.endswith("\\") or not _is_complete(open_):
                continue
            result.append(re.sub(r"\s+#.*$", "", open_) if "\n" not in open_ else open_)
            open_ = ""
        return [re.split(r" {3,}", command)[0] if command.startswith("make ") else command for command in result]


def _is_complete(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return False
    return True


def snippets(page: str) -> list[Snippet]:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    result, index = [], 0
    while index < len(lines):
        fence = re.match(r"(\s*)```(\w*)", lines[index])
        if fence:
            end = next(i for i in range(index + 1, len(lines)) if lines[i].strip().startswith("```"))
            text = "\n".join(line.removeprefix(fence[1]) for line in lines[index + 1 : end])
            result.append(Snippet(page, index + 2, fence[2], text))
        elif lines[index].startswith("    ") and not (index and lines[index - 1].strip()):
            end = index
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            result.append(
                Snippet(page, index + 1, "indented", "\n".join(line[4:] for line in lines[index:end]).rstrip())
            )
            end -= 1
        else:
            end = index
        index = end + 1
    return result


ALL = [snippet for page in PAGES for snippet in snippets(page)]
COMMANDS = [(f"{snippet.page}:{snippet.line}", command) for snippet in ALL for command in snippet.commands()]


def not_run(command: str) -> str:
    """Reason why a command is not run; "" if it is run."""
    return next((why for pattern, why in NOT_RUN if re.match(pattern, command)), "")


@dataclass
class Shell:
    """A folder like the repository's root after `make serve`, and a server.

    Attributes:
        folder: the folder.
        server: it runs on free ports in place of 8000 and 8001.
    """

    folder: Path
    server: Server

    def run(self, command: str, environment: dict[str, str], timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command in bash; what it prints.

        Raises:
            AssertionError: its exit status is not 0.
        """
        command = re.sub(r"(127\.0\.0\.1|localhost):8000", self.server.address, command)
        command = re.sub(r"grpc://127\.0\.0\.1:8001", f"grpc://{self.server.grpc_address}", command)
        command = re.sub(r"\bcurl\b", "curl --fail-with-body -sS", command)
        if re.match(r"(\.venv/bin/)?headrace infer ", command):
            command += f" --url {self.server.grpc_address}"
        if re.match(r"(\.venv/bin/)?headrace explain ", command):
            command += f" --url {self.server.url}"
        command = shorter(command)
        if arguments := self._arguments(command):
            done = run_headrace(*arguments, env=environment, cwd=self.folder, timeout_s=timeout_s)
        else:
            words = ["bash", "-c", command]
            done = subprocess.run(
                words,
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
            )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout + done.stderr

    def _arguments(self, command: str) -> list[str]:
        """Arguments of `headrace` as bash expands them; empty for a command that needs bash, or another program.

        Such a command runs in a fork. Those of the README run as the installed program.
        """
        if not command.startswith("headrace ") or re.search(r"[|&;<>$`]", command):
            return []
        words = ["bash", "-c", f"headrace() {{ printf '%s\\0' \"$@\"; }}; {command}"]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout.split("\0")[:-1]

    def serve(self, command: str, environment: dict[str, str]) -> None:
        """Start a server by a command, wait until it is ready, end it by SIGTERM."""
        port = free_port()
        # Without a repository on the command line a small one is served.
        settings = {
            "HEADRACE_HTTP_PORT": str(port),
            "HEADRACE_GRPC_PORT": "0",
            "HEADRACE_MODEL_REPOSITORY": "my_models",
        }
        log = self.folder / "serve.log"
        with log.open("wb") as stream:
            arguments = self._arguments(shorter(command))
            words = [*COMMAND_LINE, *arguments] if arguments else ["bash", "-c", f"exec {shorter(command)}"]
            process = start_process(words, environment | settings, stream, stream, self.folder)
        try:
            end = time.monotonic() + COMMAND_TIMEOUT_S
            while not _is_ready(port):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


def shorter(command: str) -> str:
    """The same command for less data or time."""
    for pattern, replacement in SHORTER:
        command = re.sub(pattern, replacement, command)
    return command


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v2/health/ready", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    tool("curl")
    import skops.io
    from sklearn.linear_model import LogisticRegression

    folder = tmp_path_factory.mktemp("root")
    shutil.copytree(ROOT / "model_repository", folder / "model_repository", copy_function=os.link)
    if not (folder / "model_repository" / "digits" / "1" / "model.onnx").exists():
        pytest.skip("the demo models are not built: make models")
    # Built in half a second: a folder of earlier demo models does for the others.
    build_demo_model(CATALOGUE["markov_text"], folder / "model_repository", False, lambda *_: None)
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / "docs").symlink_to(ROOT / "docs")
    # A small stand-in for the reader's own models.
    for name in ("resnet50", "bert"):
        shutil.copytree(folder / "model_repository" / "tiny", folder / "my_models" / name)
        config = folder / "my_models" / name / "config.pbtxt"
        config.write_text(re.sub(r'name: "tiny"', f'name: "{name}"', config.read_text()))
    shutil.copytree(folder / "model_repository" / "tiny", folder / "signed_models" / "tiny")
    _add_pipeline(folder)
    np.savez(folder / "requests.npz", input=np.ones((4, 16), np.float32))
    np.zeros((1, 3, 224, 224), np.float32).tofile(folder / "image.f32")
    (folder / "pictures").mkdir()
    (folder / "pictures" / "cat.jpg").symlink_to(folder / "cat.jpg")
    (folder / "model.onnx").symlink_to(folder / "model_repository" / "tiny" / "1" / "model.onnx")
    onnx.save(transformer(layers=1, width=64, heads=2, words=50), folder / "encoder.onnx")
    skops.io.dump(LogisticRegression().fit(np.eye(4), [0, 1, 0, 1]), folder / "churn.skops")
    options = ["--model-control", "explicit", *(word for name in SERVED for word in ("--load-model", name))]
    with serving(folder / "model_repository", folder, *options) as server:
        yield Shell(folder, server)


def _add_pipeline(folder: Path) -> None:
    """Add the example of docs/pipelines.md to the repository, and a photograph for it."""
    classify = folder / "model_repository" / "classify"
    (classify / "1").mkdir(parents=True)
    example = next(
        each for each in snippets("docs/pipelines.md") if each.kind == "yaml" and "decode_image" in each.text
    )
    (classify / "config.yaml").write_text(example.text + "\n")
    (classify / "labels.txt").write_text("".join(f"class {number}\n" for number in range(1000)))
    Image.effect_noise((500, 375), 64).convert("RGB").save(folder / "cat.jpg")


def environment(with_venv: bool) -> dict[str, str]:
    """Variables of a reader's shell; with or without the environment's programs on the path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    folder = str(Path(sys.prefix) / "bin")
    path = [entry for entry in inherited["PATH"].split(os.pathsep) if entry != folder and not _has_headrace(entry)]
    return inherited | {"PATH": os.pathsep.join([folder, *path] if with_venv else path), "COLUMNS": "120"}


def _has_headrace(folder: str) -> bool:
    return (Path(folder) / "headrace").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page != FOLLOWED and any(where.startswith(f"{page}:") for where, _ in COMMANDS)],
)
def test_the_commands_of_a_page_run_as_typed(page: str, shell: Shell) -> None:
    # The README is read first, in a shell without `headrace` on the path; the other pages are read after it.
    variables = environment(with_venv=page != "README.md")
    for where, command in COMMANDS:
        if not where.startswith(f"{page}:") or not_run(command):
            continue
        try:
            if command.startswith("source .venv/bin/activate"):
                assert "VIRTUAL_ENV" in shell.run(f"{command} && env", variables)
                variables = environment(with_venv=True)
            elif re.match(r"(\.venv/bin/)?headrace serve\b", command):
                shell.serve(command, variables)
            elif checked(command) is None:
                shell.run(command, variables)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            raise AssertionError(f"{where}: {error}") from None


def checked(command: str) -> list[str] | None:
    """Replacement for a command that takes minutes: a dry run of make, or the help of a program; None for others."""
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    if words[0] == "make":
        return ["make", "-n", *words[1:]]
    if words[0].endswith("python") and words[1:2] == ["-m"]:
        return [sys.executable, "-m", words[2], "--help"]
    return None


CHECKED = sorted({" ".join(map(shlex.quote, words)) for _, command in COMMANDS if (words := checked(command))})


@pytest.mark.parametrize("command", CHECKED)
def test_targets_of_make_and_modules_are_there(command: str) -> None:
    done = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]


# A `model.py`, which a server loads.
MODEL_CODE = [
    snippet
    for snippet in ALL
    if snippet.kind == "python" and re.search(r"class TritonPythonModel|@model\(|def predict\(self", snippet.text)
]
# The blocks of docs/ray.md are one program on a Ray cluster: tests/e2e/test_ray_serve.py runs it.
PYTHON = [each for each in ALL if each.kind == "python" and each not in MODEL_CODE and each.page != "docs/ray.md"]
READ_MODEL = """
import importlib.util, sys
from headrace_model import forms, python_backend
sys.modules["triton_python_backend_utils"] = python_backend
spec = importlib.util.spec_from_file_location("model", "model.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(forms.find_form(module, "model.py").name)
"""


@pytest.mark.parametrize("snippet", MODEL_CODE, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_python_models_are_found(snippet: Snippet, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(snippet.text)
    (tmp_path / "labels.txt").write_text("cat\ndog\n")  # which some of them read
    words = [sys.executable, "-c", READ_MODEL]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ("triton" if "TritonPythonModel" in snippet.text else "predict")


@pytest.mark.parametrize("snippet", PYTHON, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_python_runs(snippet: Snippet, shell: Shell) -> None:
    if missing := missing_frameworks(snippet.text):
        pytest.skip(f"{', '.join(missing)}: not installed")
    code = snippet.text.replace("127.0.0.1:8000", shell.server.address)
    code = code.replace("127.0.0.1:8001", shell.server.grpc_address)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=shell.folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    # A file that a command loads defines functions; other code shows its result.
    assert done.stdout or re.match(r"# \w+\.py\n", snippet.text)


def missing_frameworks(code: str) -> list[str]:
    """Frameworks that Python code imports and that are not installed, sorted."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imported.add(node.module.partition(".")[0])
    return sorted(name for name in imported & FRAMEWORKS if importlib.util.find_spec(name) is None)


def test_missing_frameworks_are_read_from_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.util.find_spec("numpy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed if name == "keras" else None)
    code = "import torch.nn, numpy\nimport keras\n\ndef make():\n    from tensorflow import io\n    from . import torchvision"
    assert missing_frameworks(code) == ["tensorflow", "torch"]
    # Another missing package fails the snippet.
    assert missing_frameworks("import missing_package") == []


CONFIGURATIONS = [
    snippet
    for snippet in ALL
    if snippet.kind == "yaml"
    or (snippet.kind in ("", "pbtxt") and re.search(r"^\w+ \{ .*\}|^parameters \{", snippet.text, re.M))
]


def containers(manifest: Any) -> list[dict[str, Any]]:
    """The containers of a Kubernetes manifest with a pod template; [] without one."""
    result: list[dict[str, Any]] = manifest.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    return result


@pytest.mark.parametrize("snippet", CONFIGURATIONS, ids=lambda snippet: f"{snippet.page}:{snippet.line}")
def test_configurations_are_read(snippet: Snippet) -> None:
    if snippet.text.startswith("clients:"):
        assert parse_keys(snippet.text, "keys.yaml").clients
        return
    if container := re.match(r"# of the container, in (\S+)\n", snippet.text):
        manifests = yaml.safe_load_all((ROOT / container[1]).read_text())
        (deployed,) = [found for manifest in manifests for found in containers(manifest)]
        assert set(yaml.safe_load(snippet.text)) <= set(deployed)
        return
    name = "config.yaml" if snippet.kind == "yaml" else "config.pbtxt"
    config, findings = read_config_text(snippet.text, f"m/{name}")
    assert [str(finding) for finding in findings if "is missing" not in str(finding)] == []
    assert config is not None or not snippet.text.strip("# \n")


@pytest.mark.parametrize(
    "snippet",
    [snippet for snippet in ALL if snippet.kind == "json"],
    ids=lambda snippet: f"{snippet.page}:{snippet.line}",
)
def test_json_is_json(snippet: Snippet) -> None:
    json.loads(snippet.text)


def test_every_reason_not_to_run_something_is_needed() -> None:
    unused = [why for pattern, why in NOT_RUN if not any(re.match(pattern, command) for _, command in COMMANDS)]
    assert unused == []
