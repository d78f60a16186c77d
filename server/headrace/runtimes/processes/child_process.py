"""One process that runs a model: its start, its control messages and output, and its end."""

from __future__ import annotations

import ctypes
import os
import select
import selectors
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from headrace_model.channel import Messages
from headrace_model.protocol import ProtocolError

from headrace.core.clock import monotonic_ns

Message = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_TAIL_LINES = 100  # enough for a dump of all threads, of which the failing one comes first
# A longer line is passed on in parts of about this size.
_MAX_LINE_BYTES = 8192
# Answers of a process to its load request.
_ANSWERS = frozenset({"loaded", "refused", "described", "no_room", "broken"})


class ChildProcess:
    """One process, and its control socket.

    Args:
        process: the operating system's process, the leader of its process group.
        control: socket that the supervisor's thread reads.

    Attributes:
        process, control: see above.
        started_ns: time at which it began to serve.
        ended: set once the process is dead and `cause` is known.
        cause: reason for its end; "" while it lives.
        blame: reason why the server killed it, "" if it did not.
        last_lines: its last lines of output.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: Messages) -> None:
        self.process = process
        self.control = control
        self.started_ns = monotonic_ns()
        self.ended = threading.Event()
        self.cause = ""
        self.blame = ""
        self.last_lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._reaping = threading.Lock()
        self._reaped = False

    def kill(self, why: str) -> None:
        """Kill the process; from any thread."""
        self.blame = self.blame or why
        self.signal(signal.SIGKILL)

    def signal(self, number: int) -> None:
        """Send a signal to the process; from any thread. Does nothing once the process may be reaped."""
        with self._reaping:
            if not self._reaped:
                os.kill(self.process.pid, number)

    def reap(self) -> str:
        """Wait for the end of the process, kill those that it has started, and return its cause; by the supervisor."""
        process = self.process
        # Not Popen.wait: it frees the number of the process, which is also that of its group.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            self._reaped = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        if self.blame:
            return self.blame
        return f"it ended with status {status}" if status >= 0 else killed_by(status)


def ends_with_parent(parent: int) -> bool:
    """Let the kernel kill this process together with the thread that has started it; False if that has ended already.

    A process that hangs in native code would not notice that its sockets are closed.

    Args:
        parent: process id of the parent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def killed_by(status: int) -> str:
    """Return the signal that has ended a process, from the negative status of `subprocess.Popen`."""
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    return f"killed by {name}" + (": is there enough memory?" if name == "SIGKILL" else "")


def signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that leads its group, and to its children; no error if it has ended."""
    with suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, number)


def start_process(
    command: Sequence[str], kinds: Sequence[socket.SocketKind]
) -> tuple[ChildProcess, list[socket.socket]]:
    """Start a process: COMMAND PARENT_PID CONTROL_FD FD...

    The program sets PR_SET_PDEATHSIG: the kernel then ends the process together with the thread that has started it.

    Args:
        command: interpreter and program.
        kinds: types of its sockets beside the control socket.

    Returns:
        The process, and the server's ends of these sockets.

    Raises:
        OSError: the system starts no more processes, or opens no more files.
    """
    pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in (socket.SOCK_STREAM, *kinds)]
    ends, child_ends = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    descriptors = [end.fileno() for end in child_ends]
    try:
        process = subprocess.Popen(
            [*command, str(os.getpid()), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            pass_fds=descriptors,
            process_group=0,  # Ctrl-C reaches only the server
        )
    except BaseException:
        for end in ends:
            end.close()
        raise
    finally:
        for end in child_ends:
            end.close()
    return ChildProcess(process, Messages(ends[0])), ends[1:]


class ProcessReader:
    """Reads messages on the control socket of a process, the lines that it prints, and its end.

    The end is seen by the process's own descriptor: a process that it has forked may hold its sockets open.

    Args:
        child: the process.
        on_message: called with every message that is no answer to the load request.
        on_line: called with every line.
    """

    def __init__(
        self, child: ChildProcess, on_message: Callable[[Message], None], on_line: Callable[[str], None]
    ) -> None:
        self._control = child.control
        self._on_message = on_message
        self._on_line = on_line
        assert child.process.stdout is not None, "the process was started with a pipe"
        self._output = child.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._last_lines = child.last_lines
        self._line = b""  # the last line, which has no end yet
        self._selector = selectors.DefaultSelector()
        self._end = os.pidfd_open(child.process.pid)
        for source in (self._control, self._output, self._end):
            self._selector.register(source, selectors.EVENT_READ)

    def __enter__(self) -> ProcessReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._selector.close()
        self._output.close()
        os.close(self._end)

    def listen(self, limit_s: float | None = None) -> Message | None:
        """Return the next answer to a load request; None if the process is gone.

        Raises:
            TimeoutError: nothing came for `limit_s`.
        """
        control = self._control
        try:
            while True:
                while (message := control.next_received()) is not None:
                    if not _ANSWERS.isdisjoint(message):
                        return message
                    self._on_message(message)
                ready = [key.fileobj for key, _events in self._selector.select(limit_s)]
                if not ready:
                    raise TimeoutError
                if self._output in ready and not self._read_lines():
                    self._selector.unregister(self._output)
                if control in ready:
                    control.read_available()
                elif self._end in ready:
                    return None
        except (EOFError, ProtocolError):
            return None

    def wait_end(self, limit_s: float) -> None:
        """Wait for the end of a process that has closed its socket: it has a status of its own unless it is killed."""
        poll = select.poll()  # select() takes no descriptors above 1023
        poll.register(self._end, select.POLLIN)
        poll.poll(limit_s * 1000)

    def drain(self) -> None:
        """Read the rest of the pipe, also a last line without an end."""
        while self._read_lines():
            pass
        if self._line:
            self._pass_line(self._line)
            self._line = b""

    def _read_lines(self) -> bool:
        """Read available output; return False if there is none."""
        try:
            data = self._output.read(1 << 16)
        except OSError:
            return False
        if not data:
            return False
        *lines, self._line = (self._line + data).split(b"\n")
        if len(self._line) > _MAX_LINE_BYTES:
            lines.append(self._line)
            self._line = b""
        for line in lines:
            self._pass_line(line)
        return True

    def _pass_line(self, line: bytes) -> None:
        text = line[:_MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        self._last_lines.append(text)
        self._on_line(text)
