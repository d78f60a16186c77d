"""`headrace tune --apply` as a child process: the written configuration is valid, and a server uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import tritonclient.http as triton

from tests.support.models import affine
from tests.support.serving import run_headrace, serving

pytestmark = pytest.mark.slow

CONFIG = """\
# Rows by guess.
max_batch_size: 1024  # the most that callers send

instance_group:
  - kind: KIND_CPU  # no GPU here
metric_tags: {team: search}
# With both of these nothing is completed: requests are not merged.
input: [{name: X, data_type: TYPE_FP32, dims: [16]}]
output: [{name: Y, data_type: TYPE_FP32, dims: [4]}]
"""


def headrace(*words: str | Path) -> str:
    done = run_headrace(*words, timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_written_configuration_is_valid_and_served(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    folder = repository / "affine"
    (folder / "1").mkdir(parents=True)
    onnx.save_model(affine(), folder / "1" / "model.onnx")
    (folder / "config.yaml").write_text(CONFIG)
    rows = np.random.default_rng(0).standard_normal((64, 16)).astype(np.float32)
    np.savez(tmp_path / "rows.npz", X=rows)

    # A call costs more than a row: a thousand rows give hundreds of times what one does, however busy the machine is.
    printed = headrace(
        "tune", folder, "--instances", "1", "--seconds", "0.2", "--input", tmp_path / "rows.npz", "--apply"
    )
    assert "beyond the spread of the runs" in printed
    assert f"Inputs: of {tmp_path / 'rows.npz'}." in printed
    assert "+dynamic_batching: {}" in printed
    text = (folder / "config.yaml").read_text()
    unchanged = [line for line in CONFIG.splitlines() if not line.startswith("max_batch_size")]
    assert [line for line in text.splitlines() if line in unchanged] == unchanged
    assert "  # the most that callers send\n" in text
    assert "OK affine" in headrace("validate", repository)

    with serving(repository, tmp_path) as server:
        client = triton.InferenceServerClient(server.address)
        config = client.get_model_config("affine")
        assert "dynamic_batching" in config
        assert f"max_batch_size: {config['max_batch_size']}  # the most that callers send\n" in text
        tensor = triton.InferInput("X", [8, 16], "FP32").set_data_from_numpy(rows[:8])
        expected = ort.InferenceSession(str(folder / "1" / "model.onnx")).run(None, {"X": rows[:8]})[0]
        np.testing.assert_allclose(client.infer("affine", [tensor]).as_numpy("Y"), expected, rtol=1e-4, atol=1e-5)
        client.close()


def test_a_model_without_a_configuration_gets_one(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "affine"
    (folder / "1").mkdir(parents=True)
    onnx.save_model(affine(), folder / "1" / "model.onnx")
    printed = headrace("tune", folder, "--instances", "1", "--seconds", "0.05", "--apply")
    assert "Inputs: random values." in printed
    rows = [int(line.split()[1]) for line in printed.splitlines() if line.startswith("│")]
    assert max(rows) > 4, "the automatic max_batch_size does not bound the search"
    if (folder / "config.yaml").exists():  # unless a busy machine spread the runs of 4 rows too far
        assert "max_batch_size: " in (folder / "config.yaml").read_text()
        assert "OK affine" in headrace("validate", folder.parent)
    else:
        assert "the configuration is unchanged" in printed
