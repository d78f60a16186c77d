"""Probe of a server's liveness, in a process of its own: `python -m tests.support.liveness HOST PORT PID`.

Every probe is GET /v2/health/live on a new connection. The process of a test is no place for it: an attack keeps that process
busy, and the probe would measure the attacker. Nor is the time counted in which the probe, or the event loop of the server, is
ready to run and other programs have the processors (the run delay of /proc/PID/schedstat). The program ends when its standard
input closes, and prints a JSON array of the latencies in seconds; a probe that got no answer counts as the time that it waited,
with a minus sign.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

INTERVAL_S = 0.02  # a stall that a test refuses takes 0.5 s or more
TIMEOUT_S = 30.0


class LivenessProbe:
    """Runs the probe during a `with`.

    Args:
        host: address of the server.
        port: its HTTP port.
        pid: its process.

    Attributes:
        latencies_s: latency of every answered probe, in seconds; filled at the end of the `with`.
        failed_s: time waited by every probe without an answer, in seconds.
    """

    def __init__(self, host: str, port: int, pid: int) -> None:
        self._arguments = [sys.executable, "-m", "tests.support.liveness", host, str(port), str(pid)]
        self.latencies_s: list[float] = []
        self.failed_s: list[float] = []

    def __enter__(self) -> LivenessProbe:
        self._process = subprocess.Popen(self._arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # the first probe is answered
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        output, _ = self._process.communicate(timeout=2 * TIMEOUT_S)
        samples = json.loads(output)
        self.latencies_s = [sample for sample in samples if sample >= 0]
        self.failed_s = [-sample for sample in samples if sample < 0]

    def quantile_s(self, share: float) -> float:
        """Return a quantile of the latencies, in seconds; probes without an answer count as the slowest."""
        samples = sorted(self.latencies_s) + [TIMEOUT_S] * len(self.failed_s)
        return samples[min(len(samples) - 1, int(share * len(samples)))]


def run_delay_s(pid: int | str) -> float:
    """Return how long the main thread of a process was ready and did not run, in seconds; 0 if the system does not count it."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def probe(host: str, port: int, pid: int) -> float:
    """Send one probe; returns its latency in seconds, negative without an answer of status 200."""
    own = os.getpid()
    delay_s = run_delay_s(pid) + run_delay_s(own)
    start = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as sock:
            sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            data = b""
            while part := sock.recv(4096):
                data += part
    except OSError:
        data = b""
    taken = time.perf_counter() - start
    taken = max(1e-6, taken - (run_delay_s(pid) + run_delay_s(own) - delay_s))
    return taken if data.startswith(b"HTTP/1.1 200 ") else -taken


def main() -> None:
    host, port, pid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    samples = [probe(host, port, pid)]
    print(flush=True)
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        samples.append(probe(host, port, pid))
    json.dump(samples, sys.stdout)


if __name__ == "__main__":
    main()
