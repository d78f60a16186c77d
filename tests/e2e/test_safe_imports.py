"""Commands, their child processes and `exec`s import nothing from the current folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.models import add_model, affine
from tests.support.serving import HOST, free_port

HOSTILE = (
    "server.py",
    "engines/__init__.py",
    "headrace.py",
    "headrace_engines.py",
    "json.py",
    "numpy.py",
    "onnx.py",
    "onnxruntime.py",
)
FAILS = 'raise SystemExit("a file of the current folder was imported: " + __file__)\n'
SCRIPT = str(Path(sys.executable).with_name("headrace"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    for name in HOSTILE:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(FAILS)
    add_model(folder / "models", "affine", affine(), config="max_batch_size: 8\ndynamic_batching {}\n")
    add_model(folder / "models", "apart", affine(), files={"config.yaml": "max_batch_size: 8\nisolation: process\n"})
    rows = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    np.savez(folder / "rows.npz", X=rows)
    return folder


def environment(folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHON"))}
    return {**inherited, "HEADRACE_STATE_DIR": str(folder / "state"), "HOME": str(folder), "COLUMNS": "200"}


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=110)
    output = done.stdout + done.stderr
    assert "was imported" not in output, output
    assert "Traceback" not in output, output
    assert done.returncode == 0, f"{words}: {output}"
    return output


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[tuple[int, int]]:
    http, grpc = free_port(), free_port()
    words = [SCRIPT, "serve", "--model-repository", "models", "--http-port", str(http), "--grpc-port", str(grpc)]
    log = folder / "serve.log"
    with log.open("wb") as out:
        process = subprocess.Popen(words, cwd=folder, env=environment(folder), stdout=out, stderr=subprocess.STDOUT)
    try:
        while "Ctrl-C stops it" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield http, grpc
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    assert "was imported" not in log.read_text()


def test_commands_of_a_running_server(folder: Path, ports: tuple[int, int]) -> None:
    http, grpc = f"http://{HOST}:{ports[0]}", f"{HOST}:{ports[1]}"
    run(folder, SCRIPT, "health", "--url", http)
    run(folder, SCRIPT, "explain", "affine", "--url", http)
    for model in ("affine", "apart"):
        assert "Y" in run(folder, SCRIPT, "infer", model, "--raw", "rows.npz", "--url", grpc)


COMMANDS = [
    ("--version",),
    ("validate", "models"),
    ("simulate", "--seconds", "0.2"),
    ("tune", "models/affine", "--seconds", "0.02", "--instances", "1", "--repeats", "1", "--max-batch-size", "4"),
    ("models", "build", "--output", "demo", "--only", "tiny"),
    (
        "build",
        "models/affine",
        "--publish-slower",
        "--target",
        "onnxruntime",
        "--precision",
        "fp32",
        "--cache",
        "store",
    ),
    ("inspect", "models/affine", "--target", "onnxruntime"),
    (
        "compare",
        "models/affine",
        "--target",
        "onnxruntime",
        "--precisions",
        "fp32",
        "--cache",
        "store",
        "--batch",
        "1",
        "--seconds",
        "0.05",
    ),
    ("engines", "ls", "--cache", "store", "--model-repository", "models"),
    ("engines", "verify", "--cache", "store", "--model-repository", "models"),
    ("engines", "gc", "--dry-run", "--cache", "store", "--model-repository", "models"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=[" ".join(words[:2]) for words in COMMANDS])
def test_a_command(folder: Path, words: tuple[str, ...]) -> None:
    run(folder, SCRIPT, *words)
    assert not list(folder.glob("__pycache__"))


def test_python_safe_path(folder: Path) -> None:
    assert run(folder, sys.executable, "-P", "-m", "headrace", "--version").strip()
    run(
        folder,
        sys.executable,
        "-P",
        "-m",
        "headrace",
        "engines",
        "ls",
        "--cache",
        "store",
        "--model-repository",
        "models",
    )


def test_the_files_fail_loudly_where_they_are_imported(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "--version"],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert "was imported" in done.stderr
    assert done.returncode != 0
