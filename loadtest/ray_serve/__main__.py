"""`python -m loadtest.ray_serve`: Headrace in Ray Serve beside `@serve.batch` on the same model, in one cluster.

Each round measures, one after the other and in turning order: `@serve.batch` through Ray's ingress, Headrace through the same
ingress, and Headrace on the gRPC port of its replica. Both sides have one replica with one ONNX Runtime session of one thread,
and batches of 64 rows at most. Ray, the replicas and the client share all cores. The first answer of each is compared with ONNX
Runtime. HTTP is loaded by wrk, gRPC by the client of `headrace bench`; the processor time of both is reported.

Both sides run with `RAY_SERVE_THROUGHPUT_OPTIMIZED=1`, as Ray's guide to performance says. `--ingress haproxy` puts HAProxy in
place of Ray's proxy in Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from headrace.bench.processor import tree_cpu_s

from loadtest import servers
from loadtest.bench import machine, wrk
from loadtest.bench.inprocess import Oracle
from loadtest.bench.report import markdown_table, number
from loadtest.bench.spread import Spread, ratios
from loadtest.peers.__main__ import mlp
from loadtest.protocol import Array, HttpRequest, binary_request, decode_answer, send
from loadtest.servers import HOST, ROOT, Running, ServerCommand

BATCH, INGRESS, GRPC = "`@serve.batch`, ingress", "Headrace, ingress", "Headrace, gRPC of the replica"
START_TIMEOUT_S = 180.0
INGRESSES = {
    "proxy": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    "haproxy": {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"},
}


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one way.

    Attributes:
        requests_per_s: answers with success.
        p50_ms: median latency.
        server_us: processor time of Ray and the replicas for a request, in microseconds.
        client_us: that of the client.
    """

    requests_per_s: float
    p50_ms: float
    server_us: float
    client_us: float


@dataclass(frozen=True, slots=True)
class Session:
    """A running cluster with both applications.

    Attributes:
        server: process with the cluster.
        address: gRPC address of Headrace's replica.
        model: name of the model.
        requests: over HTTP, by way.
        callers: requests in flight.
        seconds: length of a measurement.
        scratch: folder of scripts and bodies.
    """

    server: Running
    address: str
    model: str
    requests: dict[str, HttpRequest]
    callers: int
    seconds: int
    scratch: Path

    def measure(self, way: str) -> Sample:
        """Warm up for a second and measure one way."""
        if way == GRPC:
            return self._measure_grpc()
        load = wrk.Load((self.requests[way],), self.callers, self.seconds)
        wrk.run(self.server.url, replace(load, seconds=1), self.scratch)
        before_s = tree_cpu_s(self.server.pid)
        sample = wrk.run(self.server.url, load, self.scratch)
        server_s = tree_cpu_s(self.server.pid) - before_s
        per_request = 1e6 / sample.requests
        return Sample(
            sample.requests_per_s, sample.p50_us / 1e3, server_s * per_request, sample.client_cpu_s * per_request
        )

    def _measure_grpc(self) -> Sample:
        path = self.scratch / "grpc.json"
        words = [sys.executable, "-m", "headrace", "bench", f"grpc://{self.address}", self.model, "--processes", "1"]
        words += ["--concurrency", str(self.callers), "--duration", str(self.seconds), "--json", str(path)]
        words += ["--server-pid", str(self.server.pid)]
        subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
        (point,) = json.loads(path.read_text())["points"]
        if point["errors"]:
            raise wrk.LoadFailed(f"requests over gRPC failed: {point['error_texts']}")
        return Sample(
            point["throughput_per_s"],
            point["latency_ms"]["p50"],
            point["server_cpu_us_per_request"],
            point["client_cpu_us_per_request"],
        )


def prepare(folder: Path, model: str) -> Path:
    """Write a repository with one model and the settings of both sides; returns the ONNX file."""
    path = folder / model / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    if model == "mlp":
        onnx.save(mlp(), path)
    else:
        shutil.copy(ROOT / "model_repository" / model / "1" / "model.onnx", path)
    (folder / model / "config.yaml").write_text(
        "max_batch_size: 64\ndynamic_batching: {}\nparameters: {intra_op_thread_count: '1'}\n"
    )
    return path


def check(server: Running, requests: dict[str, HttpRequest], oracle: Oracle, inputs: dict[str, Array]) -> None:
    """Compare the first answer of each application with ONNX Runtime; raises WrongAnswer."""
    (name,) = oracle.run(inputs)
    shape = oracle.run(inputs)[name].shape
    for way, request in requests.items():
        status, headers, body = send(HOST, server.port, request)
        if status != 200:
            raise servers.ServerFailed(f"{way} answered {status}: {body[:300]!r}")
        raw = way == BATCH
        outputs = {name: np.frombuffer(body, np.float32).reshape(shape)} if raw else decode_answer(headers, body)
        oracle.check(inputs, outputs)


def run(options: argparse.Namespace, scratch: Path) -> dict[str, list[Sample]]:
    """Start the cluster and measure all rounds; samples by way."""
    oracle = Oracle(prepare(scratch / "repository", options.model))
    inputs = oracle.example(rows=1)
    ((_, row),) = inputs.items()
    ours = binary_request(options.model, inputs)
    requests = {
        BATCH: HttpRequest("/batch", row.tobytes(), {"Content-Type": "application/octet-stream"}),
        INGRESS: replace(ours, path=f"/headrace{ours.path}"),
    }
    address = scratch / "address"
    words = [sys.executable, "-m", "loadtest.ray_serve.apps", "--repository", str(scratch / "repository")]
    words += ["--model", options.model, "--shape", json.dumps(row.shape[1:]), "--address", str(address)]
    words += ["--wait-ms", str(options.wait_ms)]
    environment = {"RAY_USAGE_STATS_ENABLED": "0", **INGRESSES[options.ingress]}
    command = ServerCommand("ray", tuple(words), ready_path="", own_group=True, env=tuple(environment.items()))
    with servers.running(command, scratch, START_TIMEOUT_S) as server:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not address.exists():
            if time.monotonic() > deadline:
                raise servers.ServerFailed("the applications were not ready in time")
            time.sleep(0.2)
        check(server, requests, oracle, inputs)
        session = Session(
            server, address.read_text(), options.model, requests, options.callers, options.seconds, scratch
        )
        samples: dict[str, list[Sample]] = {BATCH: [], INGRESS: [], GRPC: []}
        for index in range(options.rounds):
            for way in samples if index % 2 == 0 else reversed(samples):
                samples[way].append(session.measure(way))
                print(f"round {index + 1}: {way}: {samples[way][-1]}", file=sys.stderr, flush=True)
    return samples


def table(samples: dict[str, list[Sample]]) -> list[str]:
    """Markdown: medians of each way, and its ratio to `@serve.batch` by round."""
    theirs = [sample.requests_per_s for sample in samples[BATCH]]
    rows = []
    for way, rounds in samples.items():
        ratio = ratios([sample.requests_per_s for sample in rounds], theirs)
        medians = [
            Spread.of([getattr(sample, name) for sample in rounds]).median
            for name in ("requests_per_s", "p50_ms", "server_us", "client_us")
        ]
        rows.append((way, *map(number, medians), f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"))
    columns = ["way", "requests/s", "p50 ms", "server us", "client us", "times `@serve.batch`, by round"]
    return markdown_table(columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; 2 if wrk is not installed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.ray_serve", description=__doc__)
    parser.add_argument("--model", default="mlp", help="mlp, or a demo model with one FP32 input and one output")
    parser.add_argument("--ingress", choices=INGRESSES, default="proxy", help="what Ray puts in front of replicas")
    parser.add_argument("--callers", type=int, default=64, help="requests in flight")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement")
    parser.add_argument("--wait-ms", type=float, default=1.0, help="batch_wait_timeout_s of @serve.batch")
    options = parser.parse_args(arguments)
    if not wrk.is_installed():
        print(wrk.HOW_TO_INSTALL, file=sys.stderr)
        return 2
    busy = machine.busy_share()
    with tempfile.TemporaryDirectory() as scratch:
        samples = run(options, Path(scratch))
    print("\n".join(table(samples)))
    cores = len(machine.usable_cores())
    print(f"\n{machine.processor()}, {cores} cores, {busy:.0%} of them in use before, {machine.python()}, ", end="")
    print(f"ray {machine.package_version('ray')}, {machine.commit()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
