"""Starts the client processes of a run, sends them the prepared requests, runs each load on all at once, and stops them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from headrace.core.errors import HeadraceError

from headrace_bench import pipes
from headrace_bench.loads import Floats
from headrace_bench.pool import Answer

# From the order to the moment at which all processes begin: connections open meanwhile.
_LEAD_S = 0.3
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class ClientSetup:
    """Connection and prepared requests of every client process.

    Attributes:
        protocol: "http" or "grpc".
        host: name or address of the server.
        port: TCP port.
        tls: paths of ca, cert and key by these names; None without TLS.
        timeout_s: time from sending to the answer.
        requests: bytes of each prepared request: the whole request of HTTP, the message of gRPC.
        grpc_headers: header block of every call; b"" for HTTP.
        expected: answer to each prepared request; empty without the check of answers.
    """

    protocol: str
    host: str
    port: int
    tls: dict[str, str] | None
    timeout_s: float
    requests: Sequence[bytes]
    grpc_headers: bytes = b""
    expected: Sequence[Answer] = ()


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """Load of one run, over all processes.

    Attributes:
        concurrency: callers of a closed loop; 0 for an open loop.
        times_s: due times of an open loop in seconds from the start, float64[n], ascending; None for a closed loop.
        seconds: length of a closed loop, warm-up included.
        connections: number of connections at most.
        open_first: number of connections that are opened before the start.
    """

    concurrency: int
    times_s: Floats | None
    seconds: float
    connections: int
    open_first: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """Outcome of every request of a run.

    Attributes:
        start_s: start of the load on the monotonic clock.
        end_s: end of sending.
        due_s, sent_s, done_s: times of each request on the monotonic clock, float64[n].
        codes: index of each outcome in `statuses`, uint16[n].
        statuses: names of outcomes; "" is success, the first.
        examples: first error text of each status.
        busy: share of a core that each process used.
        cpu_s: processor time of all client processes.
        opened: number of connections that were opened.
    """

    start_s: float
    end_s: float
    due_s: Floats
    sent_s: Floats
    done_s: Floats
    codes: npt.NDArray[np.uint16]
    statuses: list[str]
    examples: dict[str, str]
    busy: list[float]
    cpu_s: float
    opened: int


# Requests and errors so far, over all processes.
Progress = Callable[[int, int], None]


@dataclass(eq=False)
class _Process:
    process: asyncio.subprocess.Process
    requests: int = 0
    errors: int = 0
    done: pipes.Message | None = None
    replied: asyncio.Event = field(default_factory=asyncio.Event)

    def write(self, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        assert self.process.stdin is not None
        self.process.stdin.writelines(pipes.encode(header, blobs))


class ClientProcesses:
    """Processes of `headrace_bench.worker`.

    Args:
        count: number of processes.
        setup: of each.

    Raises:
        HeadraceError: a process ended before its answer; from every method.
    """

    def __init__(self, count: int, setup: ClientSetup) -> None:
        self._count = count
        self._setup = setup
        self._processes: list[_Process] = []
        self._readers: list[asyncio.Task[None]] = []
        self._progress: Progress = lambda _requests, _errors: None
        self._is_closing = False

    async def __aenter__(self) -> Self:
        for _ in range(self._count):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "headrace_bench.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=1 << 24,
                start_new_session=True,
            )
            self._processes.append(_Process(process))
        self._readers = [asyncio.create_task(self._read(each)) for each in self._processes]
        setup = self._setup
        header = {
            "do": "setup",
            "protocol": setup.protocol,
            "host": setup.host,
            "port": setup.port,
            "tls": setup.tls,
            "timeout_s": setup.timeout_s,
            "requests": len(setup.requests),
            "check": bool(setup.expected),
            "json_bytes": [answer.json_bytes for answer in setup.expected],
        }
        blobs = [*setup.requests, setup.grpc_headers, *(answer.body for answer in setup.expected)]
        for each in self._processes:
            each.write(header, blobs)
        await self._wait(self._processes)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._is_closing = True
        for each in self._processes:
            if each.process.stdin is not None:
                each.process.stdin.close()
        for each in self._processes:
            try:
                async with asyncio.timeout(_END_S):
                    await each.process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    each.process.kill()
                await each.process.wait()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def run(self, load: PlannedLoad, progress: Progress, started: Callable[[float], None]) -> Outcomes:
        """Run a load.

        Args:
            load: the load over all processes.
            progress: is called every half second.
            started: is called with the start on the monotonic clock.
        """
        self._progress = progress
        start_s = time.monotonic() + _LEAD_S
        used = self._processes[: load.concurrency or len(self._processes)]
        for number, each in enumerate(used):
            each.requests = each.errors = 0
            each.done = None
            header: dict[str, Any] = {
                "start_s": start_s,
                "first": number * len(self._setup.requests) // len(used),
                "connections": max(1, _share(load.connections, number, len(used))),
                "open_first": _share(load.open_first, number, len(used)),
            }
            if load.times_s is None:
                callers = _share(load.concurrency, number, len(used))
                header |= {"do": "closed", "concurrency": callers, "end_s": start_s + load.seconds}
                each.write(header)
            else:
                due_s = np.ascontiguousarray(start_s + load.times_s[number :: len(used)])
                each.write({**header, "do": "open"}, [due_s.tobytes()])
        started(start_s)
        await self._wait(used)
        return _joined([each.done for each in used if each.done is not None], start_s)

    def stop(self) -> None:
        """End the running load now; `run` returns what was measured so far."""
        for each in self._processes:
            each.write({"do": "stop"})

    async def _wait(self, processes: Sequence[_Process]) -> None:
        """Wait until each process has replied.

        Raises:
            HeadraceError: a process ended instead.
        """
        await asyncio.gather(*(each.replied.wait() for each in processes))
        for each in processes:
            each.replied.clear()
            if each.process.stdout is not None and each.process.stdout.at_eof():
                raise HeadraceError(
                    f"a client process (id {each.process.pid}) ended early; its error stands above: lower --processes or "
                    "--connections if memory or descriptors ran out"
                )

    async def _read(self, each: _Process) -> None:
        assert each.process.stdout is not None
        while (message := await pipes.read(each.process.stdout)) is not None:
            match message.header["do"]:
                case "progress":
                    each.requests, each.errors = message.header["requests"], message.header["errors"]
                    self._progress(sum(p.requests for p in self._processes), sum(p.errors for p in self._processes))
                case "done":
                    each.done = message
                    each.replied.set()
                case _:
                    each.replied.set()
        each.replied.set()


def _share(total: int, number: int, count: int) -> int:
    return total // count + (number < total % count)


def _joined(messages: Sequence[pipes.Message], start_s: float) -> Outcomes:
    """Join the records of all processes; statuses get common numbers."""
    statuses, examples = [""], dict[str, str]()
    columns: list[list[Floats]] = [[], [], []]
    codes = []
    for message in messages:
        header = message.header
        examples = {**header["examples"], **examples}
        statuses += [status for status in header["statuses"] if status not in statuses]
        numbers = np.array([statuses.index(status) for status in header["statuses"]], np.uint16)
        codes.append(numbers[np.frombuffer(message.blobs[3], np.uint16)])
        for column, blob in zip(columns, message.blobs, strict=False):
            column.append(np.frombuffer(blob, np.float64))
    headers = [message.header for message in messages]
    due_s, sent_s, done_s = (np.concatenate(column) if column else np.empty(0) for column in columns)
    return Outcomes(
        start_s=start_s,
        end_s=max((header["end_s"] for header in headers), default=start_s),
        due_s=due_s,
        sent_s=sent_s,
        done_s=done_s,
        codes=np.concatenate(codes) if codes else np.empty(0, np.uint16),
        statuses=statuses,
        examples=examples,
        busy=[header["cpu_s"] / max(header["wall_s"], 1e-3) for header in headers],
        cpu_s=sum(header["cpu_s"] for header in headers),
        opened=sum(header["opened"] for header in headers),
    )


def default_processes() -> int:
    """Return the number of client processes without --processes: half of the usable cores, at most four."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // 2))
