"""A graph with a fixed batch, imported with a free one and served in batches: responses are the single runs of the original."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.random_weights import random_weights, with_weights

from tests.support.serving import Server, serving
from tests.support.triton_clients import ask, connect

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_shufflenet.onnx"
INPUT, OUTPUT = "gpu_0/data_0", "gpu_0/softmax_1"
ROWS = 7


def classes(server: Server, rows: np.ndarray) -> np.ndarray:
    return ask(server, "http", "shufflenet", {INPUT: rows})[OUTPUT]


@pytest.mark.skipif(not LIGHT.exists(), reason="this version of the ONNX package comes without the light models")
def test_responses_of_batches_are_single_runs_of_the_original(tmp_path: Path) -> None:
    rows = np.random.default_rng(3).standard_normal((ROWS, 3, 224, 224)).astype(np.float32)
    light = onnx.load(LIGHT)
    # The file's weights are constant, so that all pictures would give the same classes.
    weights = random_weights(free_batch(light).model, {INPUT: rows}, 7)
    source = tmp_path / "shufflenet.onnx"
    onnx.save(with_weights(light, weights), source)
    repository = tmp_path / "models"
    words = ["import", "onnx", str(source), "--dynamic-batch", "--model-repository", str(repository)]
    subprocess.run([sys.executable, "-P", "-m", "headrace", *words], check=True, timeout=300)
    config = repository / "shufflenet" / "config.yaml"
    delayed = "dynamic_batching: {max_queue_delay_microseconds: 200000}"
    config.write_text(config.read_text().replace("dynamic_batching: {}", delayed))
    assert delayed in config.read_text()

    session = ort.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    expected = np.concatenate([session.run(None, {INPUT: row[np.newaxis]})[0] for row in rows])
    assert np.abs(expected[0] - expected[1]).max() > 1e-4
    with serving(repository, tmp_path) as server:
        np.testing.assert_allclose(classes(server, rows[:5]), expected[:5], rtol=1e-3, atol=1e-7)
        with ThreadPoolExecutor(ROWS) as pool:
            single = list(pool.map(lambda row: classes(server, row[np.newaxis]), rows))
        np.testing.assert_allclose(np.concatenate(single), expected, rtol=1e-3, atol=1e-7)
        with connect(server, "http") as client:
            (statistics,) = client.get_inference_statistics("shufflenet")["model_stats"]
    assert 5 in [int(entry["batch_size"]) for entry in statistics["batch_stats"]]
