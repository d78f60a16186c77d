"""Program of a client process, `python -m headrace_bench.worker`: messages on standard input, answers on standard output.

    setup    connections, prepared requests, expected answers; answered by `ready` or `error`
    closed   a closed loop with `concurrency` callers until `end_s`
    open     an open loop with the due times behind the message
    stop     end the running load now

A load is answered by `progress` every half second and by `done` with the record of every request. The process ends with its
input.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import uvloop

from headrace_bench import pipes
from headrace_bench.answers import AnswerCheck
from headrace_bench.grpc_pool import GrpcPool
from headrace_bench.http_pool import HttpPool
from headrace_bench.loads import ClosedLoop, Load, OpenLoop
from headrace_bench.pool import Address, Answer, Pool, PoolOptions
from headrace_bench.target import tls_context

_PROGRESS_S = 0.5


class Worker:
    """Connections, requests and the running load of this process."""

    def __init__(self) -> None:
        self._setup: dict[str, Any] = {}
        self._requests: list[bytes] = []
        self._check: AnswerCheck | None = None
        self._address: Address
        self._load: Load | None = None
        self._task: asyncio.Task[None] | None = None

    def receive(self, message: pipes.Message) -> None:
        """Execute a message."""
        header = message.header
        match header["do"]:
            case "setup":
                self._prepare(header, message.blobs)
            case "closed":
                load: Load = ClosedLoop(len(self._requests), header["first"], header["end_s"], header["concurrency"])
                self._start(load, header)
            case "open":
                due_s = np.frombuffer(message.blobs[0], np.float64)
                self._start(OpenLoop(len(self._requests), header["first"], due_s), header)
            case "stop":
                if self._load is not None:
                    self._load.stop()

    def _prepare(self, header: dict[str, Any], blobs: list[bytes]) -> None:
        self._setup = header
        count = header["requests"]
        self._requests = blobs[:count]
        tls = header["tls"]
        context = tls_context(tls["ca"], tls["cert"], tls["key"], header["protocol"]) if tls else None
        self._address = Address(header["host"], header["port"], context)
        if header["check"]:
            expected = [Answer(body, size) for body, size in zip(blobs[count + 1 :], header["json_bytes"], strict=True)]
            self._check = AnswerCheck(header["protocol"], expected)
        self._headers = blobs[count]

    def _start(self, load: Load, header: dict[str, Any]) -> None:
        self._load = load
        self._task = asyncio.get_running_loop().create_task(self._run(load, header))

    def _pool(self, load: Load, connections: int) -> Pool:
        check = self._check.matches if self._check is not None else None
        options = PoolOptions(self._address, connections, self._setup["timeout_s"], load.finished, check)
        if self._setup["protocol"] == "http":
            return HttpPool(self._requests, options)
        return GrpcPool(self._requests, self._headers, options)

    async def _run(self, load: Load, header: dict[str, Any]) -> None:
        load.pool = pool = self._pool(load, header["connections"])
        progress = asyncio.create_task(_report_progress(load))
        try:
            await pool.connect(header["open_first"])
            await asyncio.sleep(max(0.0, header["start_s"] - time.monotonic()))
            cpu_s, begin_s = time.process_time(), time.monotonic()
            await load.run()
            cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - begin_s
        finally:
            progress.cancel()
            pool.close()
        self._load = None
        record = load.record
        send(
            {
                "do": "done",
                "statuses": record.statuses,
                "examples": record.examples,
                "end_s": load.end_s,
                "cpu_s": cpu_s,
                "wall_s": wall_s,
                "opened": pool.opened,
            },
            [record.due_s.tobytes(), record.sent_s.tobytes(), record.done_s.tobytes(), record.codes.tobytes()],
        )


async def _report_progress(load: Load) -> None:
    while True:
        await asyncio.sleep(_PROGRESS_S)
        record = load.record
        send({"do": "progress", "requests": len(record), "errors": record.errors})


def send(header: dict[str, Any], blobs: list[bytes] | None = None) -> None:
    """Write a message to standard output; blocks until it is written."""
    sys.stdout.buffer.writelines(pipes.encode(header, blobs or []))
    sys.stdout.buffer.flush()


async def serve() -> None:
    """Execute messages until the input ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", closefd=False))
    worker = Worker()
    while (message := await pipes.read(reader)) is not None:
        worker.receive(message)
        if message.header["do"] == "setup":
            send({"do": "ready", "pid": os.getpid()})


def main() -> None:
    """Run the program; Ctrl-C is the command's, which sends `stop`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    uvloop.run(serve())


if __name__ == "__main__":
    main()
