"""Supervises the process of one instance of a Python model, and replaces it when it dies.

    starting -> loading -> ready -> dead -> pause -> starting ...            any -> closed

One supervisor thread for each instance owns the process: it starts it, forwards what it prints, waits for its end and starts the
next one. The kernel ends the process together with the thread that has started it. The pause grows while processes die young.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace_model.channel import Frames, Messages
from headrace_model.protocol import ProtocolError

from headrace.backends.base import BatchMember, ExecutionLost
from headrace.backends.process.lifetime import LOAD_LIMIT_S, TAIL_LINES, Supervisor, exit_cause, load_error
from headrace.backends.process.output import OutputLines
from headrace.backends.python.open_requests import OpenRequests
from headrace.backends.python.outputs import SentRegions, SlotPool
from headrace.backends.python.readiness import ReadinessProbes
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, Finding, Unavailable
from headrace.core.ledger import format_bytes

logger = logging.getLogger("headrace.python")

Message = dict[str, object]

# A blocked receive returns so often, to pass cancellations on and to notice a hang.
_POLL_S = 0.05
# A process that hangs gets this time to write its stacks.
_DUMP_S = 0.1
# A process whose sockets are closed gets this time to end before it is killed.
_EXIT_S = 1.0
# Lines of a process that are logged in a second; the others are counted.
_MAX_LINES_PER_S = 500
_MAX_LINE_BYTES = 8192


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
    """One process of an instance, and the sockets to it.

    Attributes:
        process: the operating system's process.
        frames: socket of the batches; the instance's thread uses it.
        control: socket that the supervisor's thread reads.
        slots: shared memory of the batches; the instance's thread uses it.
        regions: regions of GPU memory that the process has received.
        batches: number of the last batch.
        ended: set once the process is dead and `cause` is known.
        cause: reason for its end; "" while it lives.
        blame: reason why the server killed it, "" if it did not.
        last_lines: its last lines of output.
        probes: readiness checks of the model's code; None if the code has none.
        calls: its socket for calls to other models; None without one.
        running: the batch that it runs; None between batches. The instance's thread sets it, any thread reads it.
        open: its requests that end after their batch.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        frames: Frames,
        control: Messages,
        slots: SlotPool,
        responses: socket.socket,
        name: str,
    ) -> None:
        self.process = process
        self.frames = frames
        self.control = control
        self.slots = slots
        self.regions = SentRegions(frames)
        self.batches = 0
        self.ended = threading.Event()
        self.cause = ""
        self.blame = ""
        self.probes: ReadinessProbes | None = None
        self.calls: CallSocket | None = None
        self.running: RunningBatch | None = None
        self.started_ns = monotonic_ns()
        self.last_lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._reaping = threading.Lock()
        self._reaped = False
        self.open = OpenRequests(responses, name, self.kill, self.ended, lambda: self.cause)

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
        """Wait for the end of the process, with those that it has started, and return its cause; by the supervisor."""
        process = self.process
        # Not Popen.wait: it frees the number of the process, which is also that of its group.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            self._reaped = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        return exit_cause(process, self.blame)

    def kill_hanging(self, why: str) -> None:
        """Let the process write the stacks of its threads, then kill it; waits for its end."""
        self.signal(signal.SIGUSR1)
        if not self.ended.wait(_DUMP_S):
            self.kill(why)
        self.ended.wait()

    def close_calls(self) -> None:
        """Abandon the calls of the process to other models."""
        if self.calls is not None:
            self.calls.close()

    def shut(self) -> None:
        """End both directions of the batches' socket, so that the process finalizes the model and a blocked receive returns."""
        with suppress(OSError):
            self.frames.end.shutdown(socket.SHUT_RDWR)


class InstanceProcess:
    """Runs one instance of a Python model in a process, and replaces the process when it dies.

    Ownership: `_changed` guards the attributes that other threads read; all else belongs to the supervisor's thread.

    Args:
        name: of the instance, for logs and messages.
        model: name of the model, for messages to clients.
        options: how processes are started.

    Attributes:
        name, model: see above.
        limit_s: seconds that a batch may take.
        connection: the process that serves; None while there is none.
        refusal: reason why batches are refused at present; "" if they are not.
        restarts: number of processes that died while they served.
        versions: versions that the process has reported, e.g. of Python.
        on_change: called on the supervisor's thread after a process began or stopped to serve.
    """

    def __init__(self, name: str, model: str, options: ProcessOptions) -> None:
        self.name = name
        self.model = model
        self.limit_s = options.limit_s
        self.connection: ProcessConnection | None = None
        self.refusal = ""
        self.restarts = 0
        self.versions: Mapping[str, object] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._options = options
        self._lost = ""
        self._changed = threading.Condition()
        self._current: ProcessConnection | None = None  # the process that is loading or serving
        self._supervisor = Supervisor(
            name, self._run_process, self._fail_permanently, "it was closed while it was loading", logger
        )

    def start(self) -> None:
        """Start the supervisor's thread; `wait_loaded` waits for the result."""
        self._supervisor.start()

    def wait_loaded(self) -> None:
        """Wait until the process has loaded the model; raises ConfigError if it cannot."""
        self._supervisor.loaded.result()

    def describe(self) -> Message:
        """Run one process on this thread, without a supervisor, and return its answer to the load request.

        Raises:
            ConfigError: the process refuses the model, or dies.
        """
        try:
            connection = self._start_process()
        except OSError as error:
            raise load_error(self.name, f"a process for it cannot be started: {error.strerror}") from error
        assert connection is not None, "nothing closes this process but this thread"
        try:
            with _ProcessReader(self.name, connection, self._options.on_message) as reader:
                failure, answer = self._request_load(connection, reader)
                self._reap(connection)
                reader.drain()
        finally:
            connection.shut()
            connection.close_calls()
            connection.control.close()
        if failure is not None or answer is None:
            raise failure or load_error(self.model, "its process gave no answer")
        return answer

    def enter(self) -> ProcessConnection:
        """Return the process that serves, waiting for the next one if it is starting.

        Raises:
            Unavailable: there will be no process for some time.
            ExecutionLost: there will be no process any more.
        """
        connection = self.connection
        if connection is not None:
            return connection
        with self._changed:
            while self.connection is None:
                if self._lost or self._supervisor.closing.is_set():
                    raise ExecutionLost(self._lost or f"the process of {self.name} is closed")
                if self.refusal:
                    raise Unavailable(self.refusal)
                self._changed.wait()
            return self.connection

    def wait_change(self, timeout_s: float) -> None:
        """Wait until a process serves or dies, at most `timeout_s` seconds."""
        with self._changed:
            if self.connection is None and not self._lost:
                self._changed.wait(timeout_s)

    def close(self) -> None:
        """Let the process finalize the model, and wait until it is gone."""
        self.begin_close()
        self._supervisor.join(self._current)

    def begin_close(self) -> None:
        """Let the process finalize the model; `close` waits for its end."""
        with self._changed:
            self._supervisor.closing.set()
            self._changed.notify_all()
            current = self._current
        if current is None:
            return
        if self._supervisor.loaded.done():
            current.shut()
        else:  # the model's code runs, and reads no socket
            current.kill("it was closed while it was loading")

    # On the supervisor's thread

    def _run_process(self) -> float:
        """Run one process from start to end; return the pause before the next one in seconds."""
        try:
            connection = self._start_process()
        except OSError as error:
            return self._record_end(
                None, load_error(self.name, f"a process for it cannot be started: {error.strerror}")
            )
        if connection is None:
            return 0.0
        with _ProcessReader(self.name, connection, self._options.on_message) as reader:
            failure = self._load(connection, reader)
            if failure is None:
                self._publish(connection)
                reader.listen(None)
            reader.wait_end(_EXIT_S)
            self._reap(connection)
            reader.drain()
        return self._record_end(connection, failure)

    def _start_process(self) -> ProcessConnection | None:
        """Start a process; return None while closing."""
        kinds = (socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
        (batches, child_batches), (control, child_control), (responses, child_responses) = pairs
        open_calls = self._options.open_calls
        calls, child_calls = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if open_calls else (None, None)
        try:
            with self._changed:
                if self._supervisor.closing.is_set():
                    return None
                calls_end = -1 if child_calls is None else child_calls.fileno()
                ends = (child_batches.fileno(), calls_end, child_control.fileno(), child_responses.fileno())
                process = subprocess.Popen(
                    [*self._options.command, str(os.getpid()), *map(str, ends)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=[end for end in ends if end >= 0],
                    process_group=0,  # Ctrl-C reaches only the server
                )
                slots, frames = SlotPool(self.name, self._options.slot_bytes), Frames(batches)
                frames.set_timeouts(_POLL_S)
                self._current = connection = ProcessConnection(
                    process, frames, Messages(control), slots, responses, self.name
                )
                if open_calls is not None and calls is not None:
                    connection.calls = open_calls(calls, lambda: connection.running)
                return connection
        finally:
            for end in (child_batches, child_control, child_calls, child_responses):
                if end is not None:
                    end.close()

    def _load(self, connection: ProcessConnection, reader: _ProcessReader) -> ConfigError | None:
        """Make the process load the model; return the error if it cannot."""
        failure, answer = self._request_load(connection, reader)
        if failure is not None or answer is None:
            return failure
        loaded = answer.get("loaded")
        if not isinstance(loaded, dict):
            return load_error(self.model, "its process gave no answer that is known")
        self.versions = loaded
        if loaded.get("has_probe") is True:
            send = connection.control.send
            connection.probes = ReadinessProbes(lambda number: send({"probe": number}), monotonic_ns)
        return None

    def _request_load(
        self, connection: ProcessConnection, reader: _ProcessReader
    ) -> tuple[ConfigError | None, Message | None]:
        """Send the load request; return the error of the process, or its answer."""
        try:
            connection.control.send(dict(self._options.order))
            answer = reader.listen(LOAD_LIMIT_S)
        except TimeoutError:
            connection.kill(f"it did not load the model within {LOAD_LIMIT_S:g} s")
            answer = None
        except OSError:
            answer = None
        if answer is None:
            self._reap(connection)
            return load_error(self.model, f"its process died while it loaded the model: {connection.cause}"), None
        refused = answer.get("refused")
        if isinstance(refused, list) and len(refused) == 4:
            path, line, message, cure = refused
            place = line if isinstance(line, int) else None
            return ConfigError([Finding(str(path), place, str(message), str(cure))]), None
        return None, answer

    def _publish(self, connection: ProcessConnection) -> None:
        connection.started_ns = monotonic_ns()
        with self._changed:
            self.connection, self.refusal = connection, ""
            self._changed.notify_all()
        self.on_change()
        self._supervisor.serves(connection.process)

    def _reap(self, connection: ProcessConnection) -> None:
        """Wait for the end of the process, with those that it has started, and store its cause."""
        if connection.cause:
            return
        if (
            not self._supervisor.closing.is_set()
        ):  # else it finalizes the model; `close` kills it if that takes too long
            connection.signal(signal.SIGKILL)
        connection.cause = connection.reap()
        memory_bytes = self._options.memory_bytes
        if memory_bytes and connection.process.returncode != 0 and not connection.blame:
            connection.cause += f", which also happens at its isolation_memory_limit ({format_bytes(memory_bytes)})"

    def _record_end(self, connection: ProcessConnection | None, failure: ConfigError | None) -> float:
        """Record the end of a process, or a failed start; return the pause before the next one in seconds.

        Args:
            connection: the process that ended; None if none was started.
            failure: reason why it never served; None if it did.
        """
        pause_s, waits = self._supervisor.pause_after(failure, None if connection is None else connection.started_ns)
        closing = self._supervisor.closing.is_set()
        with self._changed:
            self._current = self.connection = None
            self.refusal = "" if waits else f"the process of model '{self.model}' has died and is being started again"
            if failure is None and not closing:
                self.restarts += 1
            self._changed.notify_all()
        self.on_change()
        if connection is not None:
            connection.slots.close()
            connection.shut()
            connection.open.shut()
            connection.close_calls()
            connection.control.close()
            if connection.probes is not None:
                connection.probes.close()
            connection.ended.set()
        if failure is not None and not self._supervisor.loaded.done():
            self._supervisor.loaded.set_exception(failure)
        elif not closing:
            cause = f"{failure}" if connection is None or failure is not None else connection.cause
            self._supervisor.log_end(cause, pause_s, () if connection is None else tuple(connection.last_lines))
        return pause_s

    def _fail_permanently(self) -> None:
        with self._changed:
            connection, self._current, self.connection = self._current, None, None
            self._lost = f"the process of {self.name} is no longer supervised"
            self._changed.notify_all()
        self.on_change()
        if connection is not None:
            connection.cause = "it is no longer supervised"
            connection.signal(signal.SIGKILL)
            connection.shut()
            connection.open.shut()
            connection.close_calls()
            connection.ended.set()


class _ProcessReader:
    """Reads messages on the control socket of a process, the lines that it prints, and its end.

    The end is seen by the process's own descriptor: a process that it has forked may hold its sockets open.
    """

    def __init__(self, name: str, connection: ProcessConnection, on_message: Callable[[Message], None]) -> None:
        self._name = name
        self._connection = connection
        self._on_message = on_message
        assert connection.process.stdout is not None, "the process was started with a pipe"
        self._output = OutputLines(connection.process.stdout, self._line, _MAX_LINE_BYTES)
        self._second = self._lines = 0
        self._selector = selectors.DefaultSelector()
        self._end = os.pidfd_open(connection.process.pid)
        for source in (connection.control, self._output, self._end):
            self._selector.register(source, selectors.EVENT_READ)

    def __enter__(self) -> _ProcessReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._selector.close()
        self._output.close()
        os.close(self._end)

    def listen(self, limit_s: float | None) -> Message | None:
        """Return the next answer to a load request; None if the process is gone.

        Raises:
            TimeoutError: nothing came for `limit_s`.
        """
        control = self._connection.control
        try:
            while True:
                while (message := control.next_received()) is not None:
                    if not _ANSWERS.isdisjoint(message):
                        return message
                    self._handle(message)
                ready = [key.fileobj for key, _events in self._selector.select(limit_s)]
                if not ready:
                    raise TimeoutError
                if self._output in ready and not self._output.read():
                    self._selector.unregister(self._output)
                if control in ready:
                    control.read_available()
                elif self._end in ready:
                    return None
        except (EOFError, ProtocolError):
            return None

    def _handle(self, message: Message) -> None:
        log = message.get("log")
        if isinstance(log, list) and len(log) == 2:
            if self._may_log():
                logger.log(_LEVELS.get(str(log[0]), logging.INFO), "%s: %s", self._name, str(log[1])[:_MAX_LINE_BYTES])
        elif "probed" in message:
            if self._connection.probes is not None:
                self._connection.probes.answered(message["probed"], message.get("ready") is True)
        else:
            self._on_message(message)

    def wait_end(self, limit_s: float) -> None:
        """Wait for the end of a process that has closed its socket: it has a status of its own unless it is killed."""
        poll = select.poll()  # select() takes no descriptors above 1023
        poll.register(self._end, select.POLLIN)
        poll.poll(limit_s * 1000)

    def drain(self) -> None:
        """Read the rest of the pipe."""
        self._output.drain()

    def _line(self, text: str) -> None:
        self._connection.last_lines.append(text)
        if text and self._may_log():
            logger.info("%s: %s", self._name, text)

    def _may_log(self) -> bool:
        """Return False for a line above the limit of this second."""
        second = monotonic_ns() // NS_PER_S
        if second != self._second:
            dropped, self._second, self._lines = self._lines - _MAX_LINES_PER_S, second, 0
            if dropped > 0:
                logger.warning("%s: %d lines of its output were dropped", self._name, dropped)
        self._lines += 1
        return self._lines <= _MAX_LINES_PER_S


# Answers of a process to its load request.
_ANSWERS = frozenset({"loaded", "refused", "described"})
_LEVELS = {
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "warn": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}
