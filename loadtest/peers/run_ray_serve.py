"""Ray Serve with a deployment around ONNX Runtime, one replica.

Runs in the environment of requirements/ray_serve.txt, with `RAY_SERVE_THROUGHPUT_OPTIMIZED=1` as the performance guide says.
Its HAProxy ingress needs a binary that the wheel does not have. `--batching` merges up to 64 requests within 1 ms.
`--identity` returns the rows without ONNX Runtime.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

os.environ.setdefault("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import onnxruntime as ort
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 1})
class Model:
    """One session with one thread; a body is one row of float32."""

    def __init__(self, path: str, batching: bool) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) if path else None
        self._batching = batching

    def _run(self, rows: np.ndarray) -> np.ndarray:
        if self._session is None:
            return rows
        outputs: np.ndarray = self._session.run(None, {"input": rows})[0]
        return outputs

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.001)
    async def _merged(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        return list(self._run(np.stack(rows)))

    async def __call__(self, request: Request) -> Response:
        """Raw bytes in and out."""
        row = np.frombuffer(await request.body(), np.float32)
        if not row.size:
            return Response(b"ready")
        outputs = await self._merged(row) if self._batching else self._run(row[None])[0]
        return Response(outputs.tobytes(), media_type="application/octet-stream")


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batching", action="store_true")
    parser.add_argument("--identity", action="store_true")
    options = parser.parse_args()
    ended = threading.Event()
    ray.init(num_cpus=2, include_dashboard=False, configure_logging=False)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    path = "" if options.identity else str(options.model.resolve())
    serve.run(Model.bind(path, options.batching), route_prefix="/")
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    ended.wait()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
