"""Runs a part in a process of its own with a time limit, and forwards its messages line by line."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from loadtest.servers import ROOT

# Between SIGTERM and SIGKILL, and for an orderly end after the last message.
GRACE_S = 3.0
END_S = 20.0
_CHUNK = 1 << 16

OnMessage = Callable[[str, Any], None]


def watch(
    words: Sequence[str],
    limit_s: float,
    log: IO[bytes],
    on_message: OnMessage,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command until it ends, or kill it and all its children.

    Args:
        words: the command; `--report-fd N` is added to it.
        limit_s: how long it may take.
        log: takes its output and that of its children.
        on_message: called with kind and content of each message.
        environment: of the command, beside this process's.

    Returns:
        The reason for a failure, "" on success.
    """
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            [*words, "--report-fd", str(write)],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write,),
            # A group, so that servers and clients go with it; the session stays that of the bench.
            process_group=0,
        )
    finally:
        os.close(write)
    try:
        over = _listen(read, limit_s, on_message)
        return over or _ended(process)
    finally:
        os.close(read)
        _end(process)


def _listen(read: int, limit_s: float, on_message: OnMessage) -> str:
    """Hand on what comes until the other end is closed; the reason if it takes too long."""
    deadline_s = time.monotonic() + limit_s
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(read, selectors.EVENT_READ)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(read, _CHUNK)
            if not data:
                return ""
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                for kind, content in json.loads(line).items():
                    on_message(kind, content)
    return f"took longer than {limit_s:.0f} s and was ended"


def _ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return f"sent all results, but did not end within {END_S:.0f} s"
    return "" if status in (0, 1) else f"its process ended with {status}: see the log"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    # Its children, should it have left some, are in its group still.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # A process that hangs in a driver ignores SIGKILL: waiting for it would hang too.
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
