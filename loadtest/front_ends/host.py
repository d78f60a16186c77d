"""Cores of server and clients, servers on them, and `headrace bench` as the load."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.bench.processor import tree_cpu_s

from loadtest.servers import ROOT, Running, cpu_seconds, descendants, headrace, pinned, running

_READY_S = 90.0
# Over the time of the load: start of the client processes, encoding of the requests, requests in flight at the end.
_BENCH_S = 40.0
_SHARE_OF_SERVER = 0.625  # 10 of 16 cores


class LoadFailed(RuntimeError):
    """`headrace bench` ended with an error, or some requests failed."""


class TimeSpent(RuntimeError):
    """The time of a part is over; its figures so far are reported."""


@dataclass(frozen=True, slots=True)
class Host:
    """Cores and folders of a run.

    Attributes:
        server_cores: cores of the server, all its processes.
        client_cores: cores of the clients; on a small machine the same ones.
        scratch: folder for logs and results of `headrace bench`.
        seconds: length of a sample.
        deadline_s: time on the monotonic clock after which no further sample begins.
    """

    server_cores: tuple[int, ...]
    client_cores: tuple[int, ...]
    scratch: Path
    seconds: float
    deadline_s: float = math.inf

    @contextmanager
    def serve(
        self,
        repository: Path,
        models: Sequence[str],
        front_ends: int | str,
        *options: str,
        cores: tuple[int, ...] | None = None,
    ) -> Iterator[Running]:
        """Start a server with these models and so many front ends, on all cores of the server or on others."""
        words = (
            "--front-ends",
            str(front_ends),
            "--keep-alive-timeout-s",
            "3600",
            "--header-timeout-s",
            "300",
            *options,
        )
        name = f"{models[0]} with {front_ends} front ends"
        command = headrace(repository, name=name, models=models, options=words, cpus=cores or self.server_cores)
        with running(command, self.scratch, _READY_S) as server:
            yield server

    def bench(self, url: str, model: str, *words: str, seconds: float = 0.0, failures: bool = False) -> dict[str, Any]:
        """Put load on a server; return the figures of the first load.

        Args:
            url: address, http:// or grpc://.
            model: name of the model.
            words: further options of `headrace bench`.
            seconds: length of the sample; 0 for the usual one.
            failures: accept failed requests.

        Raises:
            LoadFailed: the command failed, or a request.
            TimeSpent: the deadline of the part is over.
        """
        length_s = seconds or self.seconds
        if time.monotonic() > self.deadline_s:
            raise TimeSpent(f"no time was left for {model}: raise the part's limit, or measure less")
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            file = Path(folder) / "bench.json"
            command = [
                *pinned(self.client_cores),
                sys.executable,
                "-m",
                "headrace",
                "bench",
                url,
                model,
                "--json",
                str(file),
            ]
            command += ["--duration", str(length_s), *words]
            try:
                done = subprocess.run(
                    command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=_BENCH_S + 3 * length_s
                )
            except subprocess.TimeoutExpired:
                raise LoadFailed(f"`headrace bench` of {model} did not end") from None
            if not file.exists() or (done.returncode and not failures):  # 1 too if no request succeeded
                raise LoadFailed(f"`headrace bench` of {model} ended with {done.returncode}: {done.stderr[-600:]}")
            point: dict[str, Any] = json.loads(file.read_text())["points"][0]
        if point["errors"] and not failures:
            raise LoadFailed(f"requests to {model} failed: {point['errors']}, {point['error_texts']}")
        return point

    def loaded(self, server: Running, url: str, model: str, *words: str, **more: Any) -> dict[str, Any]:
        """Put load on a server; return the figures, with `cores`: processor time of each process in cores."""
        before = process_times(server.pid)
        point = self.bench(url, model, "--server-pid", str(server.pid), *words, **more)
        after = process_times(server.pid)
        used = {name: after[name] - before.get(name, 0.0) for name in after}
        # The differences hold the start of the load too: they give the shares, the bench gives the sum.
        total = sum(used.values()) or 1.0
        return point | {"cores": {name: share / total * point["server_cores"] for name, share in used.items()}}


def grpc_url(server: Running) -> str:
    """Return the address of the gRPC port."""
    return f"grpc://127.0.0.1:{server.grpc_port}"


def process_times(pid: int) -> dict[str, float]:
    """Return the processor time in seconds of a server's processes by their titles: "engine", "front end 1", ..."""
    times: dict[str, float] = {}
    for process in (pid, *descendants(pid)):
        try:
            title = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
            seconds = cpu_seconds(process)
        except (OSError, IndexError):  # it has ended
            continue
        name = title.partition("headrace: ")[2].strip() or ("server" if process == pid else f"process {process}")
        times[name] = seconds
    return times


def idle_cores(pids: Sequence[int], seconds: float, wait: Any) -> list[float]:
    """Return the processor time of each process tree in cores, while nothing is sent.

    Args:
        pids: of the servers.
        seconds: length of the sample.
        wait: waits for so many seconds.
    """
    before = [tree_cpu_s(pid) for pid in pids]
    wait(seconds)
    return [(tree_cpu_s(pid) - first) / seconds for pid, first in zip(pids, before, strict=True)]


def divide(
    cores: Sequence[int], siblings: Sequence[tuple[int, ...]], limit: int = 0
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide cores into those of the server and those of the clients; hardware threads of one core stay together.

    Args:
        cores: usable logical cores.
        siblings: hardware threads of each physical core.
        limit: number of cores to use; 0 for all.

    Returns:
        Cores of the server and of the clients; twice the same core on a machine with one.
    """
    order = [core for group in siblings for core in group if core in cores]
    order += [core for core in cores if core not in order]
    order = order[: limit or None]
    if len(order) < 2:
        return tuple(order), tuple(order)
    count = max(1, min(len(order) - 1, round(_SHARE_OF_SERVER * len(order))))
    return tuple(order[:count]), tuple(order[count:])


def siblings_of(cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the hardware threads of each physical core, as the kernel lists them."""
    groups: list[tuple[int, ...]] = []
    for core in cores:
        try:
            text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
        except OSError:
            continue
        group = parse_cores(text.strip())
        if group not in groups:
            groups.append(group)
    return groups


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the numbers of a list like "0-3,8".

    Raises:
        ValueError: the text is no such list.
    """
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def usable() -> tuple[int, ...]:
    """Return the logical cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))
