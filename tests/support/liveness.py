"""Probe of a server's liveness, in a process of its own: `python -m tests.support.liveness HOST PORT PID`.

Every probe is GET /v2/health/live on a new connection. The process of a test is no place for it: an attack keeps that process
busy, and the probe would measure the attacker. Nor is the time counted in which the probe, or the event loop of the server or of
its front ends, is ready to run and other programs have the processors (the run delay of /proc/PID/schedstat). A probe that waited
so between its connection and its request, and has no answer, is sent again: its idle connection may have given way. The program
ends when its standard input closes, and prints a JSON array of the latencies in seconds; a probe that got no answer counts as the
time that it waited, with a minus sign.
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

from tests.support.processes import words

INTERVAL_S = 0.02  # a stall that a test refuses takes 0.5 s or more
TIMEOUT_S = 30.0
# An idle connection that gives way has had more time than this for its request.
LATE_S = 0.005


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


def front_end_delays_s(pid: int) -> dict[str, float]:
    """Return the run delay of each front end of a server; see `run_delay_s`."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return {}
    return {child: run_delay_s(child) for child in children if any("front end" in word for word in words(int(child)))}


def probe(host: str, port: int, pid: int) -> float:
    """Send one probe; returns its latency in seconds, negative without an answer of status 200."""
    own, is_late, data = os.getpid(), False, b""
    own_s, server_s, front_ends_s = run_delay_s(own), run_delay_s(pid), front_end_delays_s(pid)
    start = time.perf_counter()
    try:
        with socket.create_connection((host, port), timeout=TIMEOUT_S) as sock:
            try:
                sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            finally:
                is_late = run_delay_s(own) - own_s > LATE_S
            while part := sock.recv(4096):
                data += part
    except OSError:
        pass
    taken = time.perf_counter() - start
    if not data and is_late:
        return probe(host, port, pid)
    delays_s = (delay_s - front_ends_s.get(child, delay_s) for child, delay_s in front_end_delays_s(pid).items())
    delayed_s = run_delay_s(own) - own_s + run_delay_s(pid) - server_s + max(delays_s, default=0.0)
    taken = max(1e-6, taken - delayed_s)
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
