"""Child processes of the supervisor: start, heartbeat, end and the pause before the next start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.front_ends.channel import Start, SupervisorChannel, close_all, process_name, send_start
from headrace.processes.child_process import killed_by

logger = logging.getLogger("headrace")

# Interval of the heartbeat.
PING_S = 0.5
# Pause before the next process, by the number of ends in a row within `_SETTLED_S` after "ready", or before it.
_PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SETTLED_S = 1.0
_PROGRAM = (sys.executable, "-P", "-m", "headrace.front_ends")


class Child:
    """One child process after the other with the same task: the engine, or a front end.

    Ownership: the event loop.

    Args:
        start: first message.
        descriptors: that the process inherits.
        hang_timeout_s: time without an answer after which the process is killed.
        on_message: called with the child, name and content of each message.
        on_ended: called with the child, its exit status, as of `subprocess.Popen`, and its processor time, nanoseconds, once for
            each process.

    Attributes:
        number: of the front end, from 1; 0 for the engine.
        is_ready: the process has reported "ready".
        is_running: there is a process.
    """

    def __init__(
        self,
        start: Start,
        descriptors: Sequence[int],
        hang_timeout_s: float,
        on_message: Callable[[Child, str, Any], None],
        on_ended: Callable[[Child, int, int], None],
    ) -> None:
        self.number = start.number
        self.is_ready = False
        self._start = start
        self._descriptors = descriptors
        self._max_unanswered = max(2, round(hang_timeout_s / PING_S))
        self._on_message = on_message
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: SupervisorChannel | None = None
        self._watched = -1
        self._unanswered = 0
        self._deaths = 0
        self._ready_ns = 0  # monotonic time of "ready"; 0 before it
        self._ping_timer: asyncio.TimerHandle | None = None
        self._restart_timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """Name in logs."""
        return process_name(self.number)

    @property
    def is_running(self) -> bool:
        """True while there is a process."""
        return self._process is not None

    @property
    def is_late(self) -> bool:
        """True if the process has missed a heartbeat."""
        return self._unanswered > 1

    @property
    def pid(self) -> int:
        """Process id; 0 without a process."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; raises OSError if the system starts none."""
        self._restart_timer = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            send_start(ours, self._start)
            self._process = subprocess.Popen(
                [*_PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *self._descriptors),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.is_ready = False
        self._unanswered = 0
        self._ready_ns = 0
        self._channel = SupervisorChannel(ours, self._receive, self._channel_closed)
        self._watched = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._watched, self._reap)

    def send(self, name: str, content: object = None, descriptors: Sequence[int] = ()) -> bool:
        """Send a message; False if there is no process, or it does not read."""
        return self._channel is not None and self._channel.send(name, content, descriptors)

    def insist(self, name: str) -> None:
        """Send a message without content that must arrive, also if the process does not read now."""
        if self._channel is not None:
            self._channel.insist(name)

    def when_writable(self, callback: Callable[[], None]) -> None:
        """Call back once, when the process has read earlier messages; see `SupervisorChannel.when_writable`."""
        if self._channel is not None:
            self._channel.when_writable(callback)

    def kill(self) -> None:
        """Kill the process, if there is one, and start no other."""
        self.cancel_restart()
        self._kill()

    def _kill(self) -> None:
        """Send SIGKILL. `Popen.kill` would wait for a process that has just ended, before `_reap` does."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def cancel_restart(self) -> None:
        """Start no other process."""
        if self._restart_timer is not None:
            self._restart_timer.cancel()
            self._restart_timer = None

    def restart_later(self) -> float:
        """Start the next process after a pause, which grows while processes end soon after their start.

        Returns:
            The pause in seconds.
        """
        served_s = (monotonic_ns() - self._ready_ns) / NS_PER_S if self._ready_ns else 0.0
        self._deaths = 1 if served_s >= _SETTLED_S else self._deaths + 1
        pause_s = _PAUSES_S[min(self._deaths, len(_PAUSES_S)) - 1]
        self._restart_timer = self._loop.call_later(pause_s, self._restart)
        return pause_s

    def _restart(self) -> None:
        try:
            self.start()
        except OSError as error:
            logger.error("the process '%s' cannot be started: %s", self.name, error)
            self.restart_later()

    def _receive(self, name: str, content: Any, descriptors: Sequence[int]) -> None:
        close_all(descriptors)
        if name == "pong":
            self._unanswered = 0
            return
        if name == "ready":
            self.is_ready = True
            self._ready_ns = monotonic_ns()
            self._ping()
        self._on_message(self, name, content)

    def _ping(self) -> None:
        """Send a heartbeat. It counts those without an answer, not time: a machine or a supervisor may be suspended."""
        self._ping_timer = None
        if self._process is None:
            return
        if self._unanswered >= self._max_unanswered and self._is_hung():
            seconds = self._unanswered * PING_S
            logger.error("the process '%s' (%d) has not answered for %g s and is killed", self.name, self.pid, seconds)
            self._kill()
            return
        self._unanswered += 1
        self.send("ping")
        self._ping_timer = self._loop.call_later(PING_S, self._ping)

    def _is_hung(self) -> bool:
        """Return False for a process that has ended, or waits for a processor or a disk: that gets four times the time."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text("latin-1").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = ""
        if state == "Z":  # `_reap` follows
            return False
        return state not in ("R", "D") or self._unanswered >= 4 * self._max_unanswered

    def _channel_closed(self) -> None:
        """The process is about to end: `_reap` follows."""

    def _reap(self) -> None:
        process = self._process
        assert process is not None
        _, wait_status, usage = os.wait4(process.pid, 0)
        status = process.returncode = os.waitstatus_to_exitcode(wait_status)
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None
        if self._channel is not None:
            self._channel.close()
        self._channel = self._process = None
        self.is_ready = False
        self._on_ended(self, status, round((usage.ru_utime + usage.ru_stime) * NS_PER_S))


def describe_end(status: int) -> str:
    """Return how a process has ended, from the status of `subprocess.Popen`."""
    return f"ended with status {status}" if status >= 0 else f"was {killed_by(status)}"
