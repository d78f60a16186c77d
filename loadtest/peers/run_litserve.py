"""LitServe with an API around ONNX Runtime, one worker.

Runs in the environment of requirements/litserve.txt. `--batching` merges up to 64 requests within 1 ms. `fast_queue` (ZeroMQ
between the processes) is on, as the documentation recommends for small requests. `--identity` returns the rows without ONNX
Runtime.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import litserve
import numpy as np
import onnxruntime as ort


class OnnxApi(litserve.LitAPI):
    """One session with one thread."""

    def setup(self, device: str) -> None:
        """Open the session in the worker."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.environ["PEER_MODEL"]
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) if path else None

    def decode_request(self, request) -> np.ndarray:
        """Rows of one request."""
        return np.asarray(request["input"], np.float32)

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Rows of several requests, one row each."""
        return np.concatenate(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Run a batch."""
        if self._session is None:
            return x
        outputs: np.ndarray = self._session.run(None, {"input": x})[0]
        return outputs

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        """One row for each request."""
        return list(output[:, None])

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        """Lists for JSON."""
        return {"output": output.tolist()}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batching", action="store_true")
    parser.add_argument("--identity", action="store_true")
    options = parser.parse_args()
    os.environ["PEER_MODEL"] = "" if options.identity else str(options.model.resolve())
    api = OnnxApi(max_batch_size=64, batch_timeout=0.001) if options.batching else OnnxApi()
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=options.port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()
