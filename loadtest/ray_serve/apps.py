"""A Ray cluster of one node with two applications of one model: `/batch` has Ray Serve's `@serve.batch`, `/headrace` Headrace.

Each has one replica with one core and one ONNX Runtime session of one thread, no access log, and batches of 64 rows at most.
`/batch` takes and returns raw float32, the cheapest body there is, and parses no header.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import headrace.ray
import numpy as np
import onnxruntime as ort
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

MAX_ROWS = 64
# Both sides take every request of the load at once.
MAX_ONGOING_REQUESTS = 1000


@serve.deployment(num_replicas=1, max_ongoing_requests=MAX_ONGOING_REQUESTS, ray_actor_options={"num_cpus": 1})
class Batched:
    """One ONNX Runtime session with one thread behind `@serve.batch`; a body is one row of float32.

    Args:
        path: ONNX file.
        shape: of a row.
        wait_s: longest wait for a full batch, in seconds.
    """

    def __init__(self, path: str, shape: tuple[int, ...], wait_s: float) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._shape = shape
        self.merged.set_batch_wait_timeout_s(wait_s)

    @serve.batch(max_batch_size=MAX_ROWS)
    async def merged(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Run the rows of concurrent requests as one batch."""
        return list(self._session.run(None, {self._input: np.stack(rows)})[0])

    async def __call__(self, request: Request) -> Response:
        """Raw bytes in and out."""
        row = np.frombuffer(await request.body(), np.float32).reshape(self._shape)
        outputs = await self.merged(row)
        return Response(outputs.tobytes(), media_type="application/octet-stream")


def main() -> None:
    """Serve until SIGTERM; writes the gRPC address of the replica to `--address` when both applications are ready."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--repository", type=Path, required=True, help="with the model's folder alone")
    parser.add_argument("--model", required=True)
    parser.add_argument("--shape", required=True, help="of a row, as JSON")
    parser.add_argument("--wait-ms", type=float, required=True)
    parser.add_argument("--address", type=Path, required=True)
    options = parser.parse_args()
    path = options.repository.resolve() / options.model / "1" / "model.onnx"
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, _temp_dir=folder)
        ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: ended.set())  # `ray.init` sets a handler that aborts the process
        logging_config = {"enable_access_log": False, "log_level": "WARNING"}
        serve.start(http_options={"host": "127.0.0.1", "port": options.port}, logging_config=logging_config)
        batched = Batched.options(logging_config=logging_config)
        bound = batched.bind(str(path), tuple(json.loads(options.shape)), options.wait_ms / 1000)
        serve.run(bound, name="batch", route_prefix="/batch")
        ours = headrace.ray.deployment(
            options.repository,
            state_dir="",
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            ray_actor_options={"num_cpus": 1},
            logging_config=logging_config,
        )
        handle = serve.run(ours.bind(), name="headrace", route_prefix="/headrace")
        options.address.write_text(asyncio.run(_grpc_address(handle)))
        ended.wait()
        serve.shutdown()
        ray.shutdown()


async def _grpc_address(handle: DeploymentHandle[Any]) -> str:
    # In a coroutine: with RAY_SERVE_THROUGHPUT_OPTIMIZED=1 a handle needs a running event loop.
    (replica,) = await handle.broadcast("describe").results_async()
    return str(replica["grpc_address"])


if __name__ == "__main__":
    main()
