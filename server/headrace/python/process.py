"""The process of one instance of a Python model, and the sockets to it."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace_model.channel import Frames

from headrace.core.cancellation import current_cancellation
from headrace.core.clock import NS_PER_MS, NS_PER_S, Clock, monotonic_ns
from headrace.core.errors import ConfigError
from headrace.core.request import Probe
from headrace.python.open_requests import OpenRequests
from headrace.python.outputs import SentRegions, SlotPool
from headrace.runtimes.members import BatchMember
from headrace.runtimes.processes.child_process import ChildProcess, Message
from headrace.runtimes.processes.supervisor import ProcessGate, ProcessSupervisor, load_error

logger = logging.getLogger("headrace.python")

# A blocked receive returns so often, to pass cancellations on and to notice a hang.
_POLL_S = 0.05
# A process that hangs gets this time to write its stacks.
_DUMP_S = 0.1
# Lines of a process that are logged in a second; the others are counted.
_MAX_LINES_PER_S = 500
_MAX_LINE_CHARS = 8192
_LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}


# An answer serves all callers for this time.
_FRESH_NS = 100 * NS_PER_MS


class ReadinessProbes:
    """Checks of one process, one at a time; all callers share the answer. Thread-safe: `_lock` guards all attributes.

    Args:
        send: sends the number of a check to the process; raises OSError if it is gone. The socket is never full, because the
            process has at most one open check.
        clock: returns monotonic nanoseconds.
    """

    def __init__(self, send: Callable[[int], None], clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._lock = threading.Lock()
        self._number = 0
        self._probe: Probe | None = None
        self._answered_ns = 0

    def start(self) -> Probe:
        """Return the probe that is running, the last one if it is fresh, or a new one; never blocks."""
        with self._lock:
            now_ns, probe = self._clock(), self._probe
            if probe is not None and (not probe.answer.done() or now_ns - self._answered_ns < _FRESH_NS):
                return probe
            self._number += 1
            self._probe = probe = Probe(Future(), now_ns)
            try:
                self._send(self._number)
            except OSError:
                self._settle(probe, False)
            return probe

    def answered(self, number: object, is_ready: bool) -> None:
        """Record the answer of the process."""
        with self._lock:
            probe = self._probe
            if probe is not None and number == self._number:
                self._settle(probe, is_ready)

    def close(self) -> None:
        """Answer a running probe with no: the process is gone."""
        with self._lock:
            if self._probe is not None:
                self._settle(self._probe, False)

    def _settle(self, probe: Probe, is_ready: bool) -> None:
        if not probe.answer.done():
            self._answered_ns = self._clock()
            probe.answer.set_result(is_ready)


class RunningBatch(NamedTuple):
    """The batch that a process runs.

    Attributes:
        number: number of the batch.
        members: its requests.
    """

    number: int
    members: Sequence[BatchMember]


class CallSocket(Protocol):
    """The server's end of the socket on which a process calls other models."""

    def close(self) -> None:
        """Abandon all calls and close the socket; any thread."""

    def abandon(self) -> None:
        """Cancel the calls whose requests are settled; any thread."""


OpenCalls = Callable[[socket.socket, Callable[[], RunningBatch | None]], CallSocket]
"""Receives the socket for calls of a process, and a function that returns its running batch."""


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Options to start the processes of a model.

    Attributes:
        command: interpreter and program.
        order: load request for the process.
        limit_s: seconds that a batch may take before the process counts as hanging.
        slot_bytes: initial shared memory for a batch.
        memory_bytes: maximum memory of a process without shared memory; 0 for no limit.
        on_message: called on the supervisor's thread with every message that is not handled here.
        open_calls: opens the socket for calls to other models; None without calls.
    """

    command: Sequence[str]
    order: Mapping[str, object]
    limit_s: float
    slot_bytes: int
    memory_bytes: int = 0
    on_message: Callable[[Message], None] = lambda _message: None
    open_calls: OpenCalls | None = None


class ProcessConnection:
    """One process of an instance, and the sockets to it; see `headrace.runtimes.processes.supervisor.SupervisedConnection`.

    Nothing that it owns references it: its sockets are closed with its last reference.

    Attributes:
        child: the process.
        frames: socket of the batches; the instance's thread uses it.
        slots: shared memory of the batches; the instance's thread uses it.
        regions: regions of GPU memory that the process has received.
        batches: number of the last batch.
        probes: readiness checks of the model's code; None if the code has none.
        calls: its socket for calls to other models; None without one.
        running: the batch that it runs; None between batches. The instance's thread sets it, any thread reads it.
        open: its requests that end after their batch.
    """

    def __init__(
        self, child: ChildProcess, frames: Frames, slots: SlotPool, responses: socket.socket, name: str
    ) -> None:
        self.child = child
        self.frames = frames
        self.slots = slots
        self.regions = SentRegions(frames)
        self.batches = 0
        self.probes: ReadinessProbes | None = None
        self.calls: CallSocket | None = None
        self.running: RunningBatch | None = None
        self.open = OpenRequests(responses, name, child.kill, child.ended, lambda: child.cause)

    def kill_hanging(self, why: str) -> None:
        """Let the process write the stacks of its threads, then kill it; waits for its end."""
        self.child.signal(signal.SIGUSR1)
        if not self.child.ended.wait(_DUMP_S):
            self.child.kill(why)
        self.child.ended.wait()

    def shut(self) -> None:
        """End both directions of the batches' socket, so that the process finalizes the model and a blocked receive returns."""
        with suppress(OSError):
            self.frames.end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Release everything that belongs to the dead process."""
        self.slots.close()
        self.shut()
        self.open.shut()
        if self.calls is not None:
            self.calls.close()
        if self.probes is not None:
            self.probes.close()


class InstanceProcess(ProcessSupervisor[ProcessConnection]):
    """Runs one instance of a Python model in a process, and replaces the process when it dies.

    Args:
        name: of the instance, for logs and messages.
        model: name of the model, for messages to clients.
        options: how processes are started.

    Attributes:
        limit_s: seconds that a batch may take.
        versions: versions that the process has reported, e.g. of Python.
    """

    def __init__(self, name: str, model: str, options: ProcessOptions) -> None:
        gate: ProcessGate[ProcessConnection] = ProcessGate()
        subject = f"model '{model}'"
        super().__init__(name, model, subject, options.command, options.order, options.memory_bytes, gate, logger)
        self.limit_s = options.limit_s
        self.versions: Mapping[str, object] = {}
        self._options = options
        self._second = self._lines = 0  # the second of the last line, and the number of lines in it
        self._in_traceback = False  # the last line of output was one of a traceback, and not its last

    @property
    def connection(self) -> ProcessConnection | None:
        """The process that serves; None while there is none."""
        return self.gate.process

    def describe(self) -> Message:
        """Run one process on this thread, without a supervisor, and return its answer to the load request.

        Raises:
            ConfigError: the process refuses the model, or dies, or the load is cancelled.
        """
        try:
            connection = self._start_process()
        except OSError as error:
            raise self._start_error(error) from error
        assert connection is not None, "nothing closes this process before it is started"
        try:
            with self._reader(connection) as reader, current_cancellation().calling(self.begin_close):
                failure, answer = self._request_load(connection.child, reader)
                self._reap(connection.child)
                reader.drain()
        finally:
            connection.release()
            connection.child.control.close()
        if failure is not None:
            raise failure
        return answer

    # On the supervisor's thread

    def _kinds(self) -> Sequence[socket.SocketKind]:
        return [socket.SOCK_SEQPACKET] * (2 if self._options.open_calls is None else 3)

    def _connect(self, child: ChildProcess, ends: list[socket.socket]) -> ProcessConnection:
        batches, responses, *calls = ends
        frames = Frames(batches)
        frames.set_timeouts(_POLL_S)
        slots = SlotPool(self.name, self._options.slot_bytes)
        connection = ProcessConnection(child, frames, slots, responses, self.name)
        if self._options.open_calls is not None:
            connection.calls = self._options.open_calls(calls[0], lambda: connection.running)
        return connection

    def _accept(self, connection: ProcessConnection, answer: Message) -> ConfigError | None:
        loaded = answer.get("loaded")
        if not isinstance(loaded, dict):
            return load_error(self.model, "its process gave no answer that is known")
        self.versions = loaded
        if loaded.get("has_probe") is True:
            send = connection.child.control.send
            connection.probes = ReadinessProbes(lambda number: send({"probe": number}), monotonic_ns)
        return None

    def _handle(self, connection: ProcessConnection, message: Message) -> None:
        log = message.get("log")
        if isinstance(log, list) and len(log) == 2:
            if self._may_log():
                logger.log(_LEVELS.get(str(log[0]), logging.INFO), "%s: %s", self.name, str(log[1])[:_MAX_LINE_CHARS])
        elif "probed" in message:
            if connection.probes is not None:
                connection.probes.answered(message["probed"], message.get("ready") is True)
        else:
            self._options.on_message(message)

    def _log_line(self, connection: ProcessConnection, text: str) -> None:
        # A traceback ends with the first line that is not indented: type and text of the exception.
        if is_header := text.lstrip(" +|").startswith("Traceback (most recent call last)"):
            self._in_traceback = True
        level = logging.ERROR if self._in_traceback else logging.INFO
        self._in_traceback = self._in_traceback and (is_header or text.startswith(" "))
        if text and self._may_log():
            logger.log(level, "%s: %s", self.name, text)

    def _may_log(self) -> bool:
        """Return False for a line above the limit of this second."""
        second = monotonic_ns() // NS_PER_S
        if second != self._second:
            dropped, self._second, self._lines = self._lines - _MAX_LINES_PER_S, second, 0
            if dropped > 0:
                logger.warning("%s: %d lines of its output were dropped", self.name, dropped)
        self._lines += 1
        return self._lines <= _MAX_LINES_PER_S
