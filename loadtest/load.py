"""`headrace bench` as the load of other measurements."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from loadtest.servers import HOST, ROOT, Running, pinned

# Over the time of the load: start of the client processes, encoding of the requests, requests in flight at the end.
_BENCH_S = 60.0


class LoadFailed(RuntimeError):
    """A run whose figures must not be used: the client failed, or not every request was answered with success."""


def url_of(server: Running, protocol: str) -> str:
    """Return the address of a server for "http" or "grpc"."""
    return server.url if protocol == "http" else f"grpc://{HOST}:{server.grpc_port}"


def bench_point(
    url: str, model: str, *words: str, seconds: float, cpus: tuple[int, ...] | None = None, failures: bool = False
) -> dict[str, Any]:
    """Put load on a server; return the figures of the first load.

    Args:
        url: address, http:// or grpc://.
        model: name of the model.
        words: further options of `headrace bench`.
        seconds: length of the sample.
        cpus: cores of the clients; None for all.
        failures: accept failed requests.

    Raises:
        LoadFailed: the command failed, or a request.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bench.json"
        command = [*pinned(cpus), sys.executable, "-m", "headrace", "bench", url, model, "--json", str(file)]
        command += ["--duration", str(seconds), *words]
        limit_s = _BENCH_S + 3 * seconds
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise LoadFailed(f"`headrace bench` of {model} did not end within {limit_s:.0f} s") from None
        if not file.exists() or (done.returncode and not failures):  # 1 too if no request succeeded
            raise LoadFailed(f"`headrace bench` of {model} ended with {done.returncode}: {done.stderr[-600:]}")
        point: dict[str, Any] = json.loads(file.read_text())["points"][0]
    if point["errors"] and not failures:
        raise LoadFailed(f"requests to {model} failed: {point['errors']}, {point['error_texts']}")
    return point
