"""A child process that ends at once: the pauses before its next start grow, and it serves again once it starts well."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from headrace.server.front_ends import children
from headrace.server.front_ends.channel import Ports, Start
from headrace.server.front_ends.children import Child
from headrace.server.settings import Settings

from tests.support.waiting import until as wait_until
from tests.support.waiting import until_async

ENDS_AT_ONCE = (sys.executable, "-S", "-c", "raise SystemExit(3)")
# Reports "ready" and ends when it is drained.
SERVES = (
    *(sys.executable, "-c"),
    "import socket, sys\nsock = socket.socket(fileno=int(sys.argv[1]))\nsock.recv(1 << 20)\n"
    "sock.send(b'\\x92\\xa5ready\\xc0')\nwhile (data := sock.recv(100)) and b'drain' not in data: pass\nsys.exit(4)",
)
PAUSES_S = (0.0, 0.01, 0.02, 0.05)


def run(patch: pytest.MonkeyPatch, program: Sequence[str]) -> None:
    """Start a program in place of a fork: a process that has run gRPC, as that of the tests may have, is none to fork from."""

    def start(channel: int, descriptors: Sequence[int]) -> int:
        process = subprocess.Popen([*program, str(channel)], pass_fds=(channel, *descriptors))
        process.returncode = 0  # the child waits for it
        return process.pid

    patch.setattr(children, "_fork", start)


class Watched:
    """A front end's process whose ends the test counts; it starts again as in the supervisor."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.pauses_s: list[float] = []
        self.is_over = False
        start = Start(Settings((Path("models"),)), 1, 0, b"", b"", -1, Ports("", "", ""), {}, "", [])
        self.child = Child(start, (), 60, self._on_message, self._on_ended)

    def _on_message(self, child: Child, name: str, _content: Any, _descriptors: Sequence[int]) -> None:
        assert name == "ready"

    def _on_ended(self, child: Child, status: int, _cpu_ns: int) -> None:
        self.statuses.append(status)
        if not self.is_over:
            self.pauses_s.append(child.restart_later())


async def test_pauses_grow_until_the_process_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, ENDS_AT_ONCE)
    monkeypatch.setattr(children, "_PAUSES_S", PAUSES_S)

    watched = Watched()
    watched.child.start()
    await until_async(lambda: len(watched.statuses) >= len(PAUSES_S) + 1)
    assert watched.pauses_s[: len(PAUSES_S) + 1] == [*PAUSES_S, PAUSES_S[-1]]
    assert set(watched.statuses) == {3}
    run(monkeypatch, SERVES)
    await until_async(lambda: watched.child.is_ready)
    monkeypatch.setattr(children, "_SETTLED_S", 0.0)
    count = len(watched.statuses)
    watched.child.send("drain")
    await until_async(lambda: len(watched.statuses) > count)
    assert (watched.statuses[count], watched.pauses_s[count]) == (4, 0.0), "it had served: the next starts at once"
    await until_async(lambda: watched.child.is_ready)
    watched.is_over = True
    watched.child.kill()
    await until_async(lambda: len(watched.statuses) > count + 1)


async def test_a_process_that_has_just_ended_can_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, ENDS_AT_ONCE)

    watched = Watched()
    watched.is_over = True
    watched.child.start()
    stat = Path(f"/proc/{watched.child.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")  # the loop has not seen its end
    assert not watched.child._is_hung()
    watched.child.kill()
    await until_async(lambda: watched.statuses == [3])
    assert not watched.child.is_running


async def test_a_process_that_did_not_read_is_drained_once_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, SERVES)
    watched = Watched()
    watched.is_over = True
    watched.child.start()
    await until_async(lambda: watched.child.is_ready)
    os.kill(watched.child.pid, signal.SIGSTOP)
    while watched.child.send("ping"):
        pass
    called: list[str] = []
    watched.child.insist("reload")
    watched.child.when_writable(lambda: called.append("writable"))
    watched.child.insist("drain")
    os.kill(watched.child.pid, signal.SIGCONT)
    await until_async(lambda: watched.statuses == [4])
    assert called == ["writable"]


def test_the_last_pause_is_ten_seconds() -> None:
    pauses_s = children._PAUSES_S
    assert list(pauses_s) == sorted(pauses_s)
    assert (pauses_s[0], pauses_s[-1]) == (0.0, 10.0)
