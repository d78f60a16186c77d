"""Supervises the process of a model, or of one instance of it, and replaces the process when it dies.

    starting -> loading -> ready -> dead -> pause -> starting ...            any -> closed

One supervisor thread owns the process: it starts it, reads its messages and output, waits for its end and starts the next one.
The pause grows while processes die young.
"""

from __future__ import annotations

import logging
import signal
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from headrace.core.cancellation import current_cancellation
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, Finding, Unavailable
from headrace.core.ledger import format_bytes
from headrace.runtimes.base import ExecutionLost
from headrace.runtimes.processes.child_process import ChildProcess, Message, ProcessReader, start_process

# Pause before the next process, by the number of deaths in a row; and the life time after which a death does not
# count.
PAUSES_S = (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 0.8, 2.0, 4.0, 8.0, 16.0, 30.0)
SETTLED_S = 10.0
# Batches wait for the next process if its pause is at most this long, else they are refused.
MAX_QUEUE_PAUSE_S = 1.0
LOAD_LIMIT_S = 900.0
CLOSE_GRACE_S = 15.0
# A process whose sockets are closed gets this time to end before it is killed.
_EXIT_S = 1.0


class SupervisedConnection(Protocol):
    """A process with the sockets of its batches.

    Attributes:
        child: the process.
    """

    child: ChildProcess

    def shut(self) -> None:
        """End the sockets, so that the process ends itself; from any thread."""

    def release(self) -> None:
        """Release everything that belongs to a dead process, and wake the threads that wait for it."""


P = TypeVar("P")
C = TypeVar("C", bound=SupervisedConnection)


class ProcessGate(Generic[P]):
    """The process that serves, for the threads that use it.

    Ownership: everything is guarded by `_changed`, under which no other lock is taken. All methods may be called from any thread.

    Attributes:
        process: the process that serves; None while there is none.
        refusal: reason why batches are refused at present; "" if they are not.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.process: P | None = None
        self.refusal = ""
        self._lost = ""

    @property
    def is_open(self) -> bool:
        """True while there is a process."""
        return self.process is not None

    def wait_open(self) -> P:
        """Return the process that serves, waiting for the next one if it is starting.

        Raises:
            Unavailable: there will be no process for some time.
            ExecutionLost: there will be no process any more.
        """
        process = self.process
        if process is not None:
            return process
        with self._changed:
            while self.process is None:
                self._check()
                self._changed.wait()
            return self.process

    def wait_change(self, timeout_s: float) -> bool:
        """Wait until a process serves or dies, at most `timeout_s` seconds; False if there will be no process any more."""
        with self._changed:
            if self.process is None and not self._lost:
                self._changed.wait(timeout_s)
            return not self._lost

    def open(self, process: P) -> None:
        """Admit batches to a new process."""
        with self._changed:
            self.process, self.refusal = process, ""
            self._changed.notify_all()

    def shut(self, refusal: str) -> int:
        """Stop admission after the process died.

        Args:
            refusal: reason to refuse batches until the next process; "" lets them wait.

        Returns:
            Number of batches that were inside, if the gate counts them.
        """
        with self._changed:
            self.process, self.refusal = None, refusal
            self._changed.notify_all()
        return 0

    def lose(self, reason: str) -> None:
        """Refuse batches once the present process has ended: no other one will be started."""
        with self._changed:
            self._lost = self._lost or reason
            self._changed.notify_all()

    def _check(self) -> None:
        """Raise the error of a batch that has no process to wait for; with `_changed` held."""
        if self._lost:
            raise ExecutionLost(self._lost)
        if self.process is None and self.refusal:
            raise Unavailable(self.refusal)


def load_error(name: str, message: str) -> ConfigError:
    """Return the error of a model that cannot be loaded.

    Args:
        name: of the model.
        message: the reason.
    """
    return ConfigError([Finding(name, None, message, "the server's log has more")])


@dataclass(eq=False, repr=False)
class ProcessSupervisor(ABC, Generic[C]):
    """Runs the processes of a model or an instance one after the other, on a thread of its own.

    Subclasses define the sockets of a process, and take its messages, by the methods under "For subclasses".

    Ownership: `_lock` guards `_current` against `begin_close`; all else belongs to the supervisor's thread.

    Attributes:
        name: of the model or the instance, for logs.
        model: name of the model, for errors of a load.
        subject: the model, in errors of requests.
        command: interpreter and program of the process.
        order: load request for the process.
        memory_bytes: maximum memory of a process without shared memory; 0 for no limit.
        gate: has the process that serves.
        logger: of the model's processes.
        restarts: number of processes that died while they served.
        on_change: called on the supervisor's thread after a process began or stopped to serve.
    """

    name: str
    model: str
    subject: str
    command: Sequence[str]
    order: Mapping[str, object]
    memory_bytes: int
    gate: ProcessGate[C]
    logger: logging.Logger

    def __post_init__(self) -> None:
        self.restarts = 0
        self.on_change: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._current: C | None = None  # the process that is loading or serving
        self._closing = threading.Event()  # set once no process may be started
        self._loaded: Future[None] = Future()  # result of the first load
        self._dead_in_row = 0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; `wait_loaded` has the error if the system starts no more."""
        # Not in the constructor: a thread that is never started keeps this object, and with it sockets, in a reference cycle.
        self._thread = threading.Thread(target=self._supervise, name=f"{self.name} supervisor", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._loaded.set_exception(load_error(self.model, f"the system starts no more threads ({error})"))

    def wait_loaded(self) -> None:
        """Wait until the process has loaded the model; raises ConfigError if it cannot, or if the load is cancelled."""
        with current_cancellation().calling(self.begin_close):
            self._loaded.result()

    def begin_close(self) -> None:
        """Let the process end; `close` waits for it."""
        with self._lock:
            self._closing.set()
            current = self._current
        self.gate.lose(f"the process of {self.name} is closed")
        if current is None:
            return
        if self._loaded.done():
            current.shut()
        else:  # the model is being loaded, and reads no socket
            current.child.kill("it was closed while it was loading")

    def close(self) -> None:
        """Let the process end, and wait until it is gone. All batches have left before."""
        self.begin_close()
        current = self._current
        if self._thread is None or self._thread.ident is None:
            return
        self._thread.join(CLOSE_GRACE_S if current is not None else None)
        if self._thread.is_alive() and current is not None:
            self.logger.warning("the process of %s does not end by itself and is killed", self.name)
            current.child.kill("it did not end by itself")
        self._thread.join()

    # For subclasses; all on the supervisor's thread

    @abstractmethod
    def _kinds(self) -> Sequence[socket.SocketKind]:
        """Return the types of the sockets of a process, beside its control socket."""

    @abstractmethod
    def _connect(self, child: ChildProcess, ends: list[socket.socket]) -> C:
        """Return a process with these sockets; owned."""

    @abstractmethod
    def _accept(self, connection: C, answer: Message) -> ConfigError | None:
        """Read the answer of a process that has loaded the model; return the error if it cannot serve."""

    @abstractmethod
    def _handle(self, connection: C, message: Message) -> None:
        """Take a message that is no answer to the load request."""

    @abstractmethod
    def _log_line(self, connection: C, text: str) -> None:
        """Log a line of the process's output."""

    # On the supervisor's thread

    def _supervise(self) -> None:
        try:
            pause_s = 0.0
            while not self._closing.wait(pause_s):
                pause_s = self._run()
                if not self._loaded.done():
                    self._loaded.set_exception(load_error(self.model, "it was closed while it was loading"))
                if self._loaded.exception() is not None:
                    return
        except BaseException as error:  # log any error that ends this thread
            self.logger.exception("the process of %s is no longer supervised", self.name)
            self._fail()
            if not self._loaded.done():
                self._loaded.set_exception(error)

    def _run(self) -> float:
        """Run one process from start to end; return the pause before the next one in seconds."""
        try:
            connection = self._start_process()
        except OSError as error:
            return self._record_end(None, self._start_error(error))
        if connection is None:
            return 0.0
        with self._reader(connection) as reader:
            failure, answer = self._request_load(connection.child, reader)
            failure = failure or self._accept(connection, answer)
            if failure is None:
                self._publish(connection)
                reader.listen()
            reader.wait_end(_EXIT_S)
            self._reap(connection.child)
            reader.drain()
        return self._record_end(connection, failure)

    def _start_process(self) -> C | None:
        """Start a process; return None while closing."""
        with self._lock:
            if self._closing.is_set():
                return None
            self._current = connection = self._connect(*start_process(self.command, self._kinds()))
            return connection

    def _start_error(self, error: OSError) -> ConfigError:
        return load_error(self.model, f"a process for it cannot be started: {error.strerror}")

    def _reader(self, connection: C) -> ProcessReader:
        return ProcessReader(
            connection.child,
            lambda message: self._handle(connection, message),
            lambda text: self._log_line(connection, text),
        )

    def _request_load(self, child: ChildProcess, reader: ProcessReader) -> tuple[ConfigError | None, Message]:
        """Send the load request; return the error of the process, or its answer."""
        try:
            child.control.send(dict(self.order))
            answer = reader.listen(LOAD_LIMIT_S)
        except TimeoutError:
            child.kill(f"it did not load the model within {LOAD_LIMIT_S:g} s")
            answer = None
        except OSError:
            answer = None
        if answer is None:
            self._reap(child)
            return load_error(self.model, f"its process died while it loaded the model: {child.cause}"), {}
        refused = answer.get("refused")
        if isinstance(refused, list) and all(isinstance(finding, list) and len(finding) == 4 for finding in refused):
            return ConfigError([_finding(*finding) for finding in refused]), {}
        return None, answer

    def _publish(self, connection: C) -> None:
        """Let batches enter a process that has loaded the model."""
        connection.child.started_ns = monotonic_ns()
        self.gate.open(connection)
        self.on_change()
        if self._loaded.done():
            self.logger.warning("%s has a new process, %d", self.name, connection.child.process.pid)
        else:
            self._loaded.set_result(None)

    def _reap(self, child: ChildProcess) -> None:
        """Wait for the end of the process, with those that it has started, and store its cause."""
        if child.cause:
            return
        if not self._closing.is_set():  # else it closes the model; `close` kills it if that takes too long
            child.signal(signal.SIGKILL)
        cause = child.reap()
        if self.memory_bytes and child.process.returncode != 0 and not child.blame:
            cause += f", which also happens at its isolation_memory_limit ({format_bytes(self.memory_bytes)})"
        child.cause = cause

    def _record_end(self, connection: C | None, failure: ConfigError | None) -> float:
        """Record the end of a process, or a failed start; return the pause before the next one in seconds.

        Args:
            connection: the process that ended; None if none was started.
            failure: reason why it never served; None if it did.
        """
        child = None if connection is None else connection.child
        settled = child is not None and monotonic_ns() - child.started_ns >= SETTLED_S * NS_PER_S
        self._dead_in_row = 1 if failure is None and settled else self._dead_in_row + 1
        pause_s = PAUSES_S[min(self._dead_in_row, len(PAUSES_S)) - 1]
        waits = failure is None and pause_s <= MAX_QUEUE_PAUSE_S
        with self._lock:
            closing, self._current = self._closing.is_set(), None
        inside = self.gate.shut("" if waits else f"the process of {self.subject} has died and is being started again")
        self.restarts += failure is None and not closing
        self.on_change()
        if failure is not None and not self._loaded.done():
            self._loaded.set_exception(failure)
        elif not closing:
            cause = child.cause if child is not None and failure is None else f"{failure}"
            self._log_end(cause + (f", with {inside} batches inside" if inside else ""), pause_s, child)
        if connection is not None:
            _release(connection)
        return pause_s

    def _log_end(self, cause: str, pause_s: float, child: ChildProcess | None) -> None:
        """Log an end that was not expected, with the last lines of output."""
        lines = "".join(f"\n  {line}" for line in child.last_lines) if child is not None else ""
        self.logger.error("the process of %s has died: %s; the next in %g s%s", self.name, cause, pause_s, lines)

    def _fail(self) -> None:
        """End the process and start no other one, after an error of this thread."""
        with self._lock:
            connection, self._current = self._current, None
        if connection is not None:
            connection.child.kill("it is no longer supervised")
            with suppress(ChildProcessError):  # it was reaped before
                connection.child.reap()
            connection.child.cause = "it is no longer supervised"
        self.gate.lose(f"the process of {self.name} is no longer supervised")
        self.gate.shut("")
        self.on_change()
        if connection is not None:
            _release(connection)


def _finding(path: object, line: object, message: object, cure: object) -> Finding:
    return Finding(str(path), line if isinstance(line, int) else None, str(message), str(cure))


def _release(connection: SupervisedConnection) -> None:
    """Release what belongs to a dead process, whose cause is known."""
    connection.release()
    connection.child.control.close()
    connection.child.ended.set()
