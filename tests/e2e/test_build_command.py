"""`headrace build` as a child process: files, exit statuses, and the built engine served over a real socket."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.http as triton

from tests.support import models
from tests.support.serving import ROOT, Server, run_headrace, serving
from tests.support.waiting import until

pytestmark = pytest.mark.slow

FEATURES = 16
CLASSES = 4


def headrace(*words: str, cache: Path, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    slower = ["--publish-slower"] if words[0] == "build" else []  # INT8 is slower in networks this small
    return run_headrace(*words, *slower, "--target", "onnxruntime", "--cache", cache, timeout_s=timeout_s)


def write_model(
    repository: Path, optimization: str, name: str = "affine", model: onnx.ModelProto | None = None
) -> Path:
    """A model with samples for calibration (192) and held-out ones with the FP32 model's own answers as labels (64)."""
    config = f"max_batch_size: 8\noptimization: {optimization}\n"
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    onnx.save_model(model or models.affine(FEATURES, CLASSES), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(config)
    rows = np.random.default_rng(1).standard_normal((256, FEATURES)).astype(np.float32)
    session = ort.InferenceSession(str(folder / "1" / "model.onnx"))
    if [node.shape[1:] for node in session.get_inputs()] == [[FEATURES]]:
        answers = session.run(None, {"X": rows})[0].argmax(axis=1)
        np.savez(folder / "calibration.npz", X=rows[:192])
        np.savez(folder / "accuracy.npz", X=rows[192:], labels=answers[192:])
    return folder


INT8 = "{precision: int8, calibration: {data: calibration.npz, method: minmax}, accuracy: {data: accuracy.npz%s}}"


def stamp(folder: Path) -> dict[str, object]:
    (build,) = json.loads((folder / "1" / "build.json").read_text())["builds"]
    assert isinstance(build, dict)
    return build


def leftovers(folder: Path, cache: Path) -> list[str]:
    """Artefacts, stamps and store entries, none of which a failed build may leave."""
    files = [p.name for p in (folder / "1").iterdir() if p.name != "model.onnx" and not p.name.startswith(".")]
    return files + [str(p) for p in cache.rglob("*.onnx")]


def test_a_build_reads_from_top_to_bottom(tmp_path: Path) -> None:
    """Packages that a build enters again (`tests.support.build_walk`): a rise needs a reason."""
    repository = tmp_path / "models"
    write_model(repository, INT8 % ", min_top1_agreement: 0.9, max_drop: 0.1")
    words = ["build", "affine", "--publish-slower", "--target", "onnxruntime", "--model-repository", str(repository)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.build_walk", *words, "--cache", str(tmp_path / "cache")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    returns = re.findall("^return .*", done.stdout, re.MULTILINE)
    assert 10 < len(returns) <= 22, "\n".join(returns)
    assert "\nclimb " not in done.stdout


def test_an_int8_model_is_built_published_and_served(tmp_path: Path) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    folder = write_model(repository, INT8 % ", min_top1_agreement: 0.9, max_drop: 0.1")
    done = headrace("build", "affine", "--model-repository", str(repository), cache=cache)
    assert done.returncode == 0, done.stderr
    assert "published" in done.stdout
    build = stamp(folder)
    assert build["precision"] == "int8"
    assert not build["forced"]
    artefact = onnx.load(folder / "1" / str(build["artefact"]))
    assert {"QuantizeLinear", "DequantizeLinear"} <= {node.op_type for node in artefact.graph.node}
    accuracy = build["accuracy"]
    assert isinstance(accuracy, dict)
    assert accuracy["samples"] == 64
    assert 0.9 <= accuracy["top1_agreement"] <= 1
    assert accuracy["reference_accuracy"] == 1, "the labels are the FP32 model's answers"

    rows = np.random.default_rng(2).standard_normal((8, FEATURES)).astype(np.float32)
    quantized = ort.InferenceSession(str(folder / "1" / str(build["artefact"]))).run(None, {"X": rows})[0]
    plain = ort.InferenceSession(str(folder / "1" / "model.onnx")).run(None, {"X": rows})[0]
    assert not np.array_equal(quantized, plain)
    with serving(repository, tmp_path) as server:
        client = triton.InferenceServerClient(server.address)
        tensor = triton.InferInput("X", list(rows.shape), "FP32").set_data_from_numpy(rows)
        np.testing.assert_allclose(client.infer("affine", [tensor]).as_numpy("Y"), quantized, rtol=1e-4, atol=1e-4)
        client.close()


def artefact_served(server: Server) -> str:
    """Name of the file that serves "affine" now; "" if the server reports no engine."""
    metadata = json.loads(server.request("GET", "/v2/models/affine")[2])
    return str(metadata.get("parameters", {}).get("engine.file", ""))


@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_a_running_server_swaps_in_the_engine_as_the_command_prints(tmp_path: Path, mode: str) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    folder = write_model(repository, INT8 % "")
    load = ("--load-model", "affine") if mode == "explicit" else ("--poll-interval-s", "0.2")
    with serving(repository, tmp_path, "--model-control", mode, *load) as server:
        until(lambda: server.request("GET", "/v2/models/affine/ready")[0] == 200)
        assert artefact_served(server) == ""
        done = headrace("build", "affine", "--model-repository", str(repository), cache=cache)
        assert done.returncode == 0, done.stderr
        assert "a running server loads it automatically with --model-control poll" in done.stdout
        command = "curl -X POST http://127.0.0.1:8000/v2/repository/models/affine/load"
        assert f"  {command}\n" in done.stdout
        assert f"  headrace serve --model-repository {repository}\n" in done.stdout
        if mode == "explicit":
            path = urlsplit(command.split()[-1]).path
            assert server.request("POST", path, b"{}")[0] == 200
        until(lambda: artefact_served(server) == stamp(folder)["artefact"])


def test_a_precision_that_is_written_after_the_build_finds_its_engine(tmp_path: Path) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    folder = write_model(repository, INT8.replace("precision: int8, ", "") % "")
    done = headrace("build", "affine", "--precision", "int8", "--model-repository", str(repository), cache=cache)
    assert done.returncode == 0, done.stderr
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("{calibration", "{precision: int8, calibration"))
    with serving(repository, tmp_path) as server:
        assert artefact_served(server) == stamp(folder)["artefact"]


def test_the_file_that_serves_after_the_build_is_printed(tmp_path: Path) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    folder = write_model(repository, INT8 % "")
    done = headrace("build", "affine", "--model-repository", str(repository), cache=cache)
    assert "affine: serves from now on: ONNX Runtime INT8 on the CPU\n" in done.stdout
    assert re.search(
        r"^affine: [\d.,]+ times as fast as what serves now \(model\.onnx, ONNX Runtime on the CPU, [\d.,]+ rows/s\)",
        done.stdout,
        re.MULTILINE,
    ), done.stdout
    done = headrace("build", "affine", "--model-repository", str(repository), cache=cache)
    assert "what serves now" not in done.stdout, "it is this very engine"
    done = headrace("build", "affine", "--precision", "fp16", "--model-repository", str(repository), cache=cache)
    assert "times as fast as what serves now (the INT8 engine, ONNX Runtime on the CPU, " in done.stdout

    shutil.copytree(folder / "1", folder / "2")
    done = headrace("build", "affine", "--version", "1", "--model-repository", str(repository), cache=cache)
    assert done.returncode == 0, done.stderr
    assert "published" not in done.stdout
    assert "not served" in done.stdout
    assert "version_policy serves 2: write version_policy: {specific: {versions: [1]}} in config.yaml" in done.stderr


def test_the_second_build_comes_from_the_store_with_its_speed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = write_model(tmp_path, INT8 % "")
    times_ns = set()
    for expected_text in ("int8", "stored"):
        done = headrace("build", str(folder), cache=cache)
        assert done.returncode == 0, done.stderr
        assert expected_text in done.stdout, "the second one has its figures from the store"
        match = re.search(r"^affine: .*?([\d.,]+) times as fast as FP32", done.stdout, re.MULTILINE)
        assert match, done.stdout
        assert float(match[1].replace(",", "")) > 0
        times_ns.add((folder / "1" / str(stamp(folder)["artefact"])).stat().st_mtime_ns)
        (folder / "1" / "build.json").unlink()
    assert len(times_ns) == 1


def test_an_inaccurate_engine_is_refused_and_marked_when_forced(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = write_model(tmp_path, "{precision: fp16, accuracy: {data: accuracy.npz, min_cosine: 1.0}}")
    done = headrace("build", str(folder), cache=cache)
    assert done.returncode == 1
    assert "cosine" in done.stdout + done.stderr
    assert "--force" in done.stdout + done.stderr
    assert not (folder / "1" / "build.json").exists()
    done = headrace("build", str(folder), "--force", cache=cache)
    assert done.returncode == 0, done.stderr
    assert stamp(folder)["forced"]
    with serving(tmp_path, cache) as server:
        client = triton.InferenceServerClient(server.address)
        rows = client.get_model_repository_index()
        assert any("accuracy" in row.get("reason", "") for row in rows if row["name"] == "affine"), rows
        client.close()


def test_every_model_of_a_repository(tmp_path: Path) -> None:
    repository, cache = tmp_path / "models", tmp_path / "cache"
    write_model(repository, "{precision: fp16}", "half")
    write_model(repository, "{}", "plain")
    write_model(repository, "{precision: int8}", "unsampled")
    done = headrace("build", "--all", "--model-repository", str(repository), cache=cache)
    assert done.returncode == 1
    assert "unsampled" in done.stderr
    assert "optimization.calibration.data" in done.stderr
    assert stamp(repository / "half")["precision"] == "fp16"
    assert stamp(repository / "plain")["precision"] == "fp32"
    assert leftovers(repository / "unsampled", tmp_path / "nothing") == []


def test_best_selects_the_fastest_accurate_precision(tmp_path: Path) -> None:
    folder = write_model(tmp_path, INT8.replace("int8", "best") % "")
    done = headrace("build", str(folder), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    build = stamp(folder)
    assert build["asked"] == "best"
    assert build["precision"] in ("fp32", "fp16", "int8")


def test_an_int8_engine_with_next_to_nothing_in_int8_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, INT8 % ", min_cosine: 1.0")
    done = headrace("build", str(folder), cache=tmp_path / "cache")
    assert done.returncode == 1, "leaving its only layer in floating point would have held the bar"
    assert "half" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("optimization", "words", "expected_text"),
    [
        ("{precision: int8}", [], ["calibration.data", "folder of pictures"]),
        ("{precision: int8, calibration: {data: ../../etc}}", [], ["../../etc"]),
        ("{precision: int8, calibration: {data: wrong.npz}}", [], ["wrong.npz", "16"]),
        ("{profiles: [{batch: [1, 64, 64]}]}", [], ["64", "max_batch_size", "8"]),
        ("{precision: int8, calibration: {data: calibration.npz, keep: [nosuch]}}", [], ["nosuch"]),
        ("{}", ["--version", "7"], ["version 7"]),
    ],
)
def test_a_build_that_is_impossible_is_refused_with_the_reason(
    tmp_path: Path, optimization: str, words: Sequence[str], expected_text: list[str]
) -> None:
    cache = tmp_path / "cache"
    folder = write_model(tmp_path, optimization)
    np.savez(folder / "wrong.npz", X=np.zeros((8, 3), np.float32))
    done = headrace("build", str(folder), *words, cache=cache)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "Traceback" not in output
    flat = " ".join(output.split())
    for word in expected_text:
        assert word in flat
    assert [name for name in leftovers(folder, cache) if name != "wrong.npz"] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_killed_builder_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    cache = tmp_path / "cache"
    folder = write_model(tmp_path, "{precision: int8, calibration: {data: slow.py:samples}}")
    (folder / "slow.py").write_text(
        "import pathlib, time\nimport numpy as np\n"
        "def samples():\n"
        "    pathlib.Path(__file__).with_name('began').touch()\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "        yield {'X': np.zeros(16, np.float32)}\n"
    )
    command = [sys.executable, "-m", "headrace", "build", str(folder), "--cache", str(cache)]
    builder = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # What a shell starts in the background ignores SIGINT, and so would all that the tests start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (folder / "began").exists():
        assert builder.poll() is None, builder.stdout and builder.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    builder.send_signal(number)
    output, _ = builder.communicate(timeout=30)
    assert builder.returncode != 0
    assert "Traceback" not in output
    assert [name for name in leftovers(folder, cache) if name.startswith(("model.", "build"))] == []
    # The next one is not kept out by a lock, nor does it find half an entry.
    (folder / "config.yaml").write_text(f"max_batch_size: 8\noptimization: {INT8 % ''}\n")
    assert headrace("build", str(folder), cache=cache).returncode == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_the_engine_of_a_folder_that_cannot_be_written_goes_to_the_state_folder(tmp_path: Path) -> None:
    folder, state = write_model(tmp_path, "{}"), tmp_path / "state"
    (folder / "1").chmod(0o555)
    try:
        done = headrace("build", str(folder), "--state-dir", str(state), cache=tmp_path / "cache")
        state.chmod(0o555)
        refused = headrace("build", str(folder), "--state-dir", str(state / "other"), cache=tmp_path / "cache")
    finally:
        (folder / "1").chmod(0o755)
        state.chmod(0o755)
    assert done.returncode == 0
    assert len(list(state.glob("engines/*/1/build.json"))) == 1
    assert refused.returncode == 1
    assert "permission" in (refused.stdout + refused.stderr).lower()
