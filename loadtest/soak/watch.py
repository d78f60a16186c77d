"""Resources of the server's processes, read from outside under load and after all clients have disconnected."""

from __future__ import annotations

import http.client
import os
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from headrace_bench.processor import children, cpu_s
from prometheus_client.parser import text_string_to_metric_families

from loadtest.servers import HOST, Running
from loadtest.soak.clients import METRICS_KEY

_EVERY_S = 0.5
# How long a server may take to let go of what its clients have left behind.
_SETTLE_S = 15.0
_STILL_S = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of the server and its child processes.

    Attributes:
        at_s: when, of `time.monotonic`.
        memory_bytes: resident.
        descriptors, threads, processes: numbers.
        cpu_s: processor time used so far by the server's own process.
    """

    at_s: float
    memory_bytes: int
    descriptors: int
    threads: int
    processes: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Quiet:
    """A phase is over and all its clients have gone.

    Attributes:
        start_s, end_s: of the phase, of `time.monotonic`.
        held: some time later.
        in_flight, queued: requests that the server believes to have still.
        open_files: how many descriptors of each kind.
    """

    start_s: float
    end_s: float
    held: Held
    in_flight: int
    queued: int
    open_files: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counted:
    """The server's counters: successful requests of each model, and model processes that died."""

    answered: dict[str, int]
    restarts: int


class Watch:
    """Reads the resources twice a second, on a thread of its own, until it is stopped."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch")
        self.samples: list[Held] = []
        self._thread.start()

    def stop(self) -> None:
        """The samples are complete after that."""
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self.samples.append(look(self._server.pid))
            except (FileNotFoundError, ProcessLookupError):
                return  # the server has died, which its starter reports


def look(pid: int) -> Held:
    """Now.

    Raises:
        FileNotFoundError, ProcessLookupError: the server has gone.
    """
    memory = descriptors = threads = 0
    found = [pid, *children(pid)]
    for process in found:
        try:
            fields = _status(process)
            numbers = len(list(Path(f"/proc/{process}/fd").iterdir()))
        except (FileNotFoundError, ProcessLookupError, KeyError):
            if process == pid:
                raise FileNotFoundError(f"process {pid} has gone") from None
            continue
        memory += fields["VmRSS"] * 1024
        threads += fields["Threads"]
        descriptors += numbers
    return Held(time.monotonic(), memory, descriptors, threads, len(found), cpu_s(pid))


def settled(server: Running, start_s: float, end_s: float) -> Quiet:
    """Wait until the server's resources stop changing, and return them."""
    deadline_s = time.monotonic() + _SETTLE_S
    since_s, last = time.monotonic(), look(server.pid)
    while True:
        time.sleep(0.1)
        held = look(server.pid)
        in_flight, queued = _under_way(server)
        numbers = (held.descriptors, held.threads, held.processes)
        if numbers != (last.descriptors, last.threads, last.processes) or in_flight or queued:
            since_s, last = held.at_s, held
        if held.at_s - since_s > _STILL_S or held.at_s > deadline_s:
            return Quiet(start_s, end_s, held, in_flight, queued, _open_files(server.pid))


def counted(server: Running) -> Counted:
    """From the server's metrics."""
    answered, restarts = {}, 0
    for name, labels, value in _metrics(server):
        if name == "headrace_requests_total":
            answered[labels["model"]] = int(value)
        elif name == "headrace_model_process_restarts_total":
            restarts += int(value)
    return Counted(answered, restarts)


def _open_files(pid: int) -> dict[str, int]:
    """Descriptors of the server and its processes by what they are, less numbers: socket, pipe, anon_inode:[eventfd], a path."""
    kinds: Counter[str] = Counter()
    for process in (pid, *children(pid)):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                kinds[re.sub(r":\[\d+\]|\d+", "", os.readlink(descriptor))] += 1
            except FileNotFoundError:
                continue
    return dict(sorted(kinds.items()))


def _under_way(server: Running) -> tuple[int, int]:
    sums = {"headrace_in_flight": 0.0, "headrace_queue_depth": 0.0}
    for name, _, value in _metrics(server):
        if name in sums:
            sums[name] += value
    return int(sums["headrace_in_flight"]), int(sums["headrace_queue_depth"])


def _metrics(server: Running) -> list[tuple[str, dict[str, str], float]]:
    connection = http.client.HTTPConnection(HOST, server.port, timeout=10.0)
    try:
        connection.request("GET", "/metrics", headers=server.headers(METRICS_KEY))
        page = connection.getresponse().read().decode()
    finally:
        connection.close()
    families = text_string_to_metric_families(page)
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def _status(process: int) -> dict[str, int]:
    """Numbers of /proc/PID/status; those of memory are in KiB."""
    lines = (line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    found = {name: text.split() for name, text in lines}
    return {name: int(found[name][0]) for name in ("VmRSS", "Threads")}
