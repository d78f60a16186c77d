"""MLServer with a runtime of its own kind around ONNX Runtime.

Runs in the environment of requirements/mlserver.txt. Adaptive batching is on with 64 requests and 1 ms. `parallel_workers` is 0:
the documentation recommends that for models that need no second process, and it is faster here. `--identity` returns the rows
without ONNX Runtime.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxRuntime(MLModel):
    """One session with one thread."""

    async def load(self) -> bool:
        """Open the session."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.environ["PEER_MODEL"]
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) if path else None
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Run a batch."""
        rows = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32, copy=False)
        outputs = rows if self._session is None else self._session.run(None, {"input": rows})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", outputs)])


def main() -> None:
    """Write the settings, then become `mlserver start`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--identity", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="peer-mlserver-"))
    server = {"host": "127.0.0.1", "http_port": options.port, "grpc_port": options.port + 1, "metrics_endpoint": None}
    server |= {"parallel_workers": 0, "debug": False, "gzip_enabled": False}
    model = {
        "name": "model",
        "implementation": "run_mlserver.OnnxRuntime",
        "max_batch_size": 64,
        "max_batch_time": 0.001,
    }
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(model))
    path = "" if options.identity else str(options.model.resolve())
    environment = os.environ | {"PEER_MODEL": path, "PYTHONPATH": str(Path(__file__).parent)}
    os.execve(sys.executable, [sys.executable, "-m", "mlserver.cli.main", "start", str(folder)], environment)


if __name__ == "__main__":
    main()
