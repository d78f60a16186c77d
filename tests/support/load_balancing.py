"""Envoy before three Headrace servers of different speed: `python -m tests.support.load_balancing` prints the figure of
docs/load-reports.md.

Their model sleeps for the time in its configuration, so that two cores suffice. Requests arrive at a fixed rate, whether earlier
ones are answered or not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.serving import HOST, ROOT, Server, free_port, serving
from tests.support.tools import tool

EXAMPLE = ROOT / "deploy" / "envoy" / "headrace.yaml"
ROUND_ROBIN = {
    "name": "envoy.load_balancing_policies.round_robin",
    "typed_config": {"@type": "type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"},
}
POLICIES = ("round robin", "weighted by load reports")
# Compute times of the replicas: together they serve 10 + 10 + 2.5 requests a second.
SPEEDS_MS = (100, 100, 400)
RATE_HZ = 15.0
TIMEOUT_MS = 2000
GOOD_MS = 1000

CONFIG = """
backend: "python"
max_batch_size: 1
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
parameters { key: "compute_ms" value { string_value: "MS" } }
"""
MODEL = """
import json
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seconds = int(json.loads(args["model_config"])["parameters"]["compute_ms"]["string_value"]) / 1000

    def execute(self, requests):
        responses = []
        for request in requests:
            time.sleep(self.seconds)
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("Y", x)]))
        return responses
"""
BODY = json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}]}).encode()


def add_timed_model(repository: Path, compute_ms: int) -> None:
    """Add the model `timed`, whose execution sleeps for `compute_ms`."""
    folder = repository / "timed"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG.replace("MS", str(compute_ms)))
    (folder / "1" / "model.py").write_text(MODEL)


@contextmanager
def replicas(folder: Path, *options: str, speeds_ms: Sequence[int] = SPEEDS_MS) -> Iterator[list[Server]]:
    """Servers with the model `timed` of different speed."""
    with ExitStack() as stack:
        servers = []
        for number, compute_ms in enumerate(speeds_ms):  # one after the other: each start takes seconds of all cores
            own = folder / f"replica_{number}"
            add_timed_model(own / "repository", compute_ms)
            servers.append(stack.enter_context(serving(own / "repository", own, *options)))
        yield servers


def example(ports: Sequence[int], listen: int, policy: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The shipped configuration with the ports of a test.

    Args:
        ports: of the servers.
        listen: port of Envoy.
        policy: one of `POLICIES`.
        changes: fields of the weighted policy.
    """
    config: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    listener["address"]["socket_address"]["port_value"] = listen
    (group,) = cluster["load_assignment"]["endpoints"]
    for endpoint, port in zip(group["lb_endpoints"], ports, strict=True):
        endpoint["endpoint"]["address"]["socket_address"]["port_value"] = port
    (choice,) = cluster["load_balancing_policy"]["policies"]
    if policy == POLICIES[0]:
        choice["typed_extension_config"] = ROUND_ROBIN
    else:
        choice["typed_extension_config"]["typed_config"].update(changes)
    return config


def find_envoy() -> str:
    """Return the path of Envoy, which a wheel of the tests brings."""
    beside = Path(sys.executable).parent.parent
    found = sorted(beside.glob("lib/python*/site-packages/envoy/_bin/envoy"))
    return str(found[0]) if found else tool("envoy")


@dataclass
class Envoy:
    """A running Envoy.

    Attributes:
        port: of the listener.
        admin_port: of its administration.
    """

    port: int
    admin_port: int

    def admin(self, path: str) -> str:
        """Answer of the administration."""
        with urllib.request.urlopen(f"http://{HOST}:{self.admin_port}{path}", timeout=30) as response:
            return str(response.read().decode())

    def endpoints(self) -> dict[int, tuple[int, int]]:
        """Requests and weight of each server by its port."""
        (cluster,) = json.loads(self.admin("/clusters?format=json"))["cluster_statuses"]
        found = {}
        for host in cluster["host_statuses"]:
            stats = {each["name"]: int(each.get("value", 0)) for each in host["stats"]}
            found[host["address"]["socket_address"]["port_value"]] = stats["rq_total"], host["weight"]
        return found


@contextmanager
def envoy(folder: Path, ports: Sequence[int], policy: str, **changes: Any) -> Iterator[Envoy]:
    """Envoy with the shipped configuration before servers on `ports`; see `example`."""
    running = Envoy(free_port(), free_port())
    config = example(ports, running.port, policy, changes)
    config["admin"] = {"address": {"socket_address": {"address": HOST, "port_value": running.admin_port}}}
    path, log = folder / "envoy.yaml", folder / "envoy.log"
    path.write_text(yaml.safe_dump(config))
    words = [find_envoy(), "-c", str(path), "--concurrency", "1", "--use-dynamic-base-id", "--log-path", str(log)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, log.read_text() if log.exists() else words
            assert time.monotonic() < deadline, log.read_text()
            try:
                if running.admin("/ready").strip() == "LIVE":
                    break
            except OSError:
                pass
            time.sleep(0.05)
        yield running
    finally:
        process.terminate()
        process.wait(30)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request.

    Attributes:
        status: of the response.
        ms: from the time at which it was due to the whole response.
    """

    status: int
    ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """Requests of one policy.

    Attributes:
        requests: requests that each server got, in the order of the servers.
        outcomes: of all requests.
        seconds: for which requests were sent.
    """

    requests: list[int]
    outcomes: list[Outcome]
    seconds: float

    @property
    def goodput_hz(self) -> float:
        """Answers within `GOOD_MS`, a second."""
        return sum(each.status == 200 and each.ms <= GOOD_MS for each in self.outcomes) / self.seconds

    @property
    def refused(self) -> int:
        """Requests without an answer."""
        return sum(each.status != 200 for each in self.outcomes)

    def percentile_ms(self, share: float) -> float:
        """Percentile of the latency of the answers; infinity without one."""
        answered = sorted(each.ms for each in self.outcomes if each.status == 200)
        if not answered:
            return math.inf
        return answered[min(math.ceil(share * len(answered)), len(answered)) - 1]


async def _send(port: int, due_s: float) -> Outcome:
    await asyncio.sleep(due_s - time.monotonic())
    lines = [
        "POST /v2/models/timed/infer HTTP/1.1",
        f"Host: {HOST}",
        "Connection: close",
        f"X-Request-Timeout-Ms: {TIMEOUT_MS}",
        f"Content-Length: {len(BODY)}",
    ]
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write("\r\n".join([*lines, "", ""]).encode() + BODY)
    content = await reader.read()
    writer.close()
    status = int(content.split(b" ", 2)[1]) if content else 0
    return Outcome(status, (time.monotonic() - due_s) * 1000)


def send_for(port: int, seconds: float, rate_hz: float = RATE_HZ) -> list[Outcome]:
    """Send requests at a fixed rate; their outcomes."""

    async def run() -> list[Outcome]:
        start_s = time.monotonic()
        return await asyncio.gather(
            *(_send(port, start_s + number / rate_hz) for number in range(int(seconds * rate_hz)))
        )

    return asyncio.run(run())


def measure(folder: Path, servers: Sequence[Server], policy: str, seconds: float, warm_up_s: float) -> Result:
    """Send requests through Envoy with a policy, after a warm-up that is not counted."""
    ports = [server.port for server in servers]
    with envoy(folder, ports, policy, blackout_period="1s", weight_update_period="0.5s") as proxy:
        send_for(proxy.port, warm_up_s)
        before = proxy.endpoints()
        outcomes = send_for(proxy.port, seconds)
        after = proxy.endpoints()
    return Result([after[port][0] - before[port][0] for port in ports], outcomes, seconds)


def main() -> None:
    """Measure both policies and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--warm-up-s", type=float, default=10)
    args = parser.parse_args()
    print("| policy | requests to each server | answered within 1 s, 1/s | p50, ms | p99, ms | refused |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary, replicas(Path(temporary), "--orca", "always") as servers:
        for policy in POLICIES:
            result = measure(Path(temporary), servers, policy, args.seconds, args.warm_up_s)
            shares = ", ".join(map(str, result.requests))
            p50_ms, p99_ms = result.percentile_ms(0.5), result.percentile_ms(0.99)
            print(f"| {policy} | {shares} | {result.goodput_hz:.1f} | {p50_ms:.0f} | {p99_ms:.0f} | {result.refused} |")


if __name__ == "__main__":
    main()
