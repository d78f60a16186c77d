"""Child processes of the supervisor: start, heartbeat, end and the pause before the next start."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib
import logging
import os
import random
import signal
import socket
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.runtimes.processes.child_process import killed_by
from headrace.server.front_ends import child_main as program
from headrace.server.front_ends.channel import Start, SupervisorChannel, close_all, process_name, send_start
from headrace.server.program import leave

logger = logging.getLogger("headrace")

# Interval of the heartbeat.
PING_S = 0.5
# Pause before the next process, by the number of ends in a row within `_SETTLED_S` after "ready", or before it.
_PAUSES_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_SETTLED_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What the programs of all children import: they share the memory, and start in milliseconds.
_MODULES = (
    "headrace.server.front_ends.engine_process",
    "headrace.server.front_ends.front_end",
    "headrace.wire.grpc.service",
)


class Child:
    """One child process after the other with the same task: the engine, or a front end.

    Ownership: the event loop.

    Args:
        start: first message.
        descriptors: that the process inherits.
        hang_timeout_s: time without an answer after which the process is killed.
        on_message: called with the child, name, content and descriptors of each message; it owns the descriptors.
        on_ended: called with the child, its exit status, negative for a signal, and its processor time in nanoseconds, once for
            each process.

    Attributes:
        number: of the front end, from 1; 0 for the engine.
        is_ready: the process has reported "ready".
        pid: process id; 0 without a process.
    """

    def __init__(
        self,
        start: Start,
        descriptors: Sequence[int],
        hang_timeout_s: float,
        on_message: Callable[[Child, str, Any, Sequence[int]], None],
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
        self.pid = 0
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
        return self.pid != 0

    @property
    def is_late(self) -> bool:
        """True if the process has missed a heartbeat."""
        return self._unanswered > 1

    def start(self) -> None:
        """Start the process; raises OSError if the system starts none."""
        self._restart_timer = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            send_start(ours, self._start)
            self.pid = _fork(theirs.fileno(), self._descriptors)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.is_ready = False
        self._unanswered = 0
        self._ready_ns = 0
        self._channel = SupervisorChannel(ours, self._receive, self._channel_closed)
        self._watched = os.pidfd_open(self.pid)
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
        if self.is_running:
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
        if name == "pong":
            close_all(descriptors)
            self._unanswered = 0
            return
        if name == "ready":
            self.is_ready = True
            self._ready_ns = monotonic_ns()
            self._ping()
        self._on_message(self, name, content, descriptors)

    def _ping(self) -> None:
        """Send a heartbeat. It counts those without an answer, not time: a machine or a supervisor may be suspended."""
        self._ping_timer = None
        if not self.is_running:
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
        _, wait_status, usage = os.wait4(self.pid, 0)
        self._loop.remove_reader(self._watched)
        os.close(self._watched)
        if self._ping_timer is not None:
            self._ping_timer.cancel()
            self._ping_timer = None
        if self._channel is not None:
            self._channel.close()
        self._channel, self.pid = None, 0
        self.is_ready = False
        status = os.waitstatus_to_exitcode(wait_status)
        self._on_ended(self, status, round((usage.ru_utime + usage.ru_stime) * NS_PER_S))


def describe_end(status: int) -> str:
    """Return how a process has ended, from its exit status, negative for a signal."""
    return f"ended with status {status}" if status >= 0 else f"was {killed_by(status)}"


def prepare_forks() -> None:
    """Import what all children need, before the first of them starts."""
    for name in _MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # collections in a child would copy the pages that it shares


def _fork(channel: int, descriptors: Sequence[int]) -> int:
    """Fork a process that runs the program of the children; returns its process id, raises OSError.

    Args:
        channel: descriptor of its end of the channel.
        descriptors: that it inherits beside the standard streams.
    """
    waiting = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a child's signals are not the supervisor's
    try:
        pid = os.fork()
    except OSError:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        raise
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, waiting)
        return pid
    status = 1
    try:
        status = _run_forked(channel, descriptors)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(status)  # never back into the event loop of the supervisor


def _run_forked(channel: int, descriptors: Sequence[int]) -> int:
    """Run the program in a fork of the supervisor: nothing of its event loop, files, signals and exit handlers is left."""
    gc.freeze()  # objects of the supervisor are never collected here: they own numbers of descriptors that are free now
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    kept = {0, 1, 2, channel, *descriptors}
    close_all([number for number in map(int, os.listdir("/proc/self/fd")) if number not in kept])
    random.seed()
    np.random.seed()
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    try:
        return program.run(socket.socket(fileno=channel))
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
