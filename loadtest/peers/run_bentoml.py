"""BentoML with a service around ONNX Runtime, one worker.

Runs in the environment of requirements/bentoml.txt. The documentation's two ways are both there: `--batching` takes the adaptive
batching (64 rows), without it every request runs alone. `--identity` returns the rows without ONNX Runtime.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import bentoml
import numpy as np
import onnxruntime as ort


def _session() -> ort.InferenceSession | None:
    if not os.environ["PEER_MODEL"]:
        return None
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(os.environ["PEER_MODEL"], options, providers=["CPUExecutionProvider"])


@bentoml.service(workers=1, traffic={"timeout": 30, "max_concurrency": 1000}, logging={"access": {"enabled": False}})
class Plain:
    """Each request alone."""

    def __init__(self) -> None:
        self._session = _session()

    @bentoml.api(route="/predict")
    async def predict(self, input: np.ndarray) -> np.ndarray:  # noqa: A002
        """Run the rows of one request."""
        if self._session is None:
            return input
        outputs: np.ndarray = self._session.run(None, {"input": input.astype(np.float32, copy=False)})[0]
        return outputs


@bentoml.service(workers=1, traffic={"timeout": 30, "max_concurrency": 1000}, logging={"access": {"enabled": False}})
class Batching:
    """Requests merged by BentoML."""

    def __init__(self) -> None:
        self._session = _session()

    @bentoml.api(route="/predict", batchable=True, max_batch_size=64, max_latency_ms=1000)
    async def predict(self, input: np.ndarray) -> np.ndarray:  # noqa: A002
        """Run a batch."""
        if self._session is None:
            return input
        outputs: np.ndarray = self._session.run(None, {"input": input.astype(np.float32, copy=False)})[0]
        return outputs


def main() -> None:
    """Become `bentoml serve`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batching", action="store_true")
    parser.add_argument("--identity", action="store_true")
    options = parser.parse_args()
    here = str(Path(__file__).parent)
    environment = os.environ | {
        "PEER_MODEL": "" if options.identity else str(options.model.resolve()),
        "BENTOML_DO_NOT_TRACK": "True",
        "PYTHONPATH": here,
    }
    name = "Batching" if options.batching else "Plain"
    words = [sys.executable, "-m", "bentoml", "serve", f"run_bentoml:{name}", "--working-dir", here]
    words += ["--host", "127.0.0.1", "--port", str(options.port)]
    os.execve(sys.executable, words, environment)


if __name__ == "__main__":
    main()
