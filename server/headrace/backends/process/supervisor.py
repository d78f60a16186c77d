"""Supervises the child process that runs a model, and replaces it when it dies.

One supervisor thread for each model owns the process. It starts the process, forwards its log, waits for its end, and
starts the next one after a pause. The pause grows while processes die young. `BatchAdmission` decides which batches
may enter.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from headrace_model.channel import Frames, Messages
from headrace_model.protocol import SHARE, ProtocolError
from headrace_model.slots import Slot

from headrace.backends.base import ExecutionLost
from headrace.backends.process.child import Message
from headrace.backends.process.lifetime import LOAD_LIMIT_S, TAIL_LINES, Supervisor, exit_cause, load_error
from headrace.backends.process.output import OutputLines
from headrace.core.clock import monotonic_ns
from headrace.core.errors import ConfigError, Finding, Unavailable
from headrace.core.ledger import Holding, NoRoom, format_bytes

Process = TypeVar("Process")

# Number of batches that enter one at a time after a death: the members of a batch that killed the process are among
# them.
_SOLO_BATCHES = 32


class BatchAdmission(Generic[Process]):
    """Decides which batches may be sent to a child process, and which of them are suspected when it dies.

    All batches that were inside together when a process died are suspects: any of them may have killed it.

    A suspect enters the next process alone, and no other batch enters before all suspects have left. A second death
    then identifies the culprit. A batch that was alone inside needs no such proof. Its requests are retried one by
    one and must run alone as well, so after a death a number of batches enter one at a time.

    Ownership: everything is guarded by `_changed`, under which no other lock is taken. All methods may be called from
    any thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._inside: set[object] = set()
        self._alone = False  # no other batch may join the one inside
        self._suspects: set[object] = set()
        self._solo_batches = 0  # number of batches that still enter one at a time
        self._refusal = ""
        self._lost = ""

    @property
    def is_open(self) -> bool:
        """True while there is a process."""
        return self._process is not None

    @property
    def refusal(self) -> str:
        """Reason why batches are refused at present; "" if they are not."""
        return self._refusal

    def enter(self, batch: object, wait: bool) -> Process | None:
        """Admit a batch to the process.

        Args:
            batch: identity of the batch.
            wait: wait until it may enter.

        Returns:
            The process that it has entered; None if it would have to wait.

        Raises:
            Unavailable: there will be no process for some time.
            ExecutionLost: there will be no process any more.
        """
        with self._changed:
            while True:
                suspect = batch in self._suspects
                if self._process is not None and self._may_enter(suspect):
                    self._inside.add(batch)
                    self._alone = suspect or self._solo_batches > 0
                    return self._process
                if self._lost:
                    raise ExecutionLost(self._lost)
                if self._process is None and self._refusal:
                    raise Unavailable(self._refusal)
                if not wait:
                    return None
                self._changed.wait()

    def leave(self, batch: object) -> None:
        """Remove a batch that is finished or abandoned; no error if it is not inside."""
        with self._changed:
            if batch in self._inside:
                self._inside.discard(batch)
                self._solo_batches -= self._alone and self._solo_batches > 0
                self._alone = False
            self._suspects.discard(batch)
            self._changed.notify_all()

    def suspected(self, batch: object) -> bool:
        """Return True if a batch was inside a process that died, and must enter the next one alone."""
        with self._changed:
            return batch in self._suspects

    def open(self, process: Process) -> None:
        """Admit batches to a new process."""
        with self._changed:
            self._process, self._refusal = process, ""
            self._changed.notify_all()

    def shut(self, refusal: str) -> int:
        """Stop admission after the process died.

        Args:
            refusal: reason to refuse batches until the next process; "" lets them wait.

        Returns:
            Number of batches that were inside.
        """
        with self._changed:
            inside, self._inside, self._alone = self._inside, set(), False
            if inside:
                self._solo_batches = _SOLO_BATCHES
            if len(inside) > 1:
                self._suspects |= inside
            else:
                self._suspects -= inside
            self._process, self._refusal = None, refusal
            self._changed.notify_all()
            return len(inside)

    def fail(self, reason: str) -> None:
        """Refuse all batches from now on: no process will be started."""
        with self._changed:
            self._process, self._lost = None, reason
            self._changed.notify_all()

    def _may_enter(self, suspect: bool) -> bool:
        if self._alone or (self._inside and (suspect or self._solo_batches)):
            return False
        return suspect or not self._suspects


CHILD: tuple[str, ...] = (sys.executable, "-P", "-m", "headrace.backends.process.child")

logger = logging.getLogger("headrace.isolated")


class ChildProcess:
    """One child process.

    Attributes:
        process: the operating system's process.
        control: socket that the supervisor thread reads.
        instances: socket of the batches of each instance.
        ended: set once the process is dead and its batches are handled.
        cause: reason for its end, as text; "" while it lives.
        blame: reason why the server killed it, "" if it did not.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: Messages, instances: list[Frames]) -> None:
        self.process = process
        self.control = control
        self.instances = instances
        self.ended = threading.Event()
        self.cause = ""
        self.blame = ""
        self.started_ns = monotonic_ns()
        self.last_lines: deque[str] = deque(maxlen=TAIL_LINES)

    def kill(self, why: str) -> None:
        """Kill the process; from any thread."""
        self.blame = self.blame or why
        self.process.kill()

    def shut(self) -> None:
        """End the sending side of the sockets, so that the process ends itself after its last answers."""
        for end in (*(frames.end for frames in self.instances), self.control.end):
            with suppress(OSError):  # the other end has closed already
                end.shutdown(socket.SHUT_WR)


class ModelProcess:
    """Runs one version of a model in a child process, and replaces the process when it dies.

    Ownership: `_lock` guards `_child` against `close`; everything else belongs to the supervisor thread, the only one
    that changes state which other threads read.

    Args:
        name: of the model, for logs and messages.
        order: load request for the child.
        instances: number of executions that run at the same time.
        limit_s: seconds that a batch may take before the process counts as hanging.
        slot_bytes: initial shared memory for a batch.
        spare_slots: further slots of each execution, for outputs that are lent to callers.
        command: of the child.

    Attributes:
        limit_s, spare_slots: see above.
        admission: decides which batches enter the process.
        restarts: number of processes that died while they served.
        tensors: by "inputs" and "outputs", name, dtype and shape of the file's tensors; empty if the backend does not
            read them.
        ranges: smallest and largest shape by input, for each range of shapes that the file supports; empty without bounds.
        slots: by instance, the shared memory slots for its batches.
        held: GPU memory that the process has booked.
    """

    def __init__(
        self,
        name: str,
        order: Message,
        instances: int,
        limit_s: float,
        slot_bytes: int,
        spare_slots: int = 0,
        command: Sequence[str] = CHILD,
    ) -> None:
        self.name = name
        self.admission: BatchAdmission[ChildProcess] = BatchAdmission()
        self.restarts = 0
        self.tensors: dict[str, list[tuple[str, str, list[int]]]] = {}
        self.ranges: list[dict[str, list[list[int]]]] = []
        self.slots: list[list[Slot]] = []
        self.held: list[Holding] = []
        self._order = order
        self._instances = instances
        self.limit_s = limit_s
        self._slot_bytes = slot_bytes
        self.spare_slots = spare_slots
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None  # the process that is loading or serving
        self._supervisor = Supervisor(
            name, self._run_child, self._fail_permanently, "its process could not be kept alive", logger
        )

    def start(self) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        self._supervisor.start()
        try:
            self._supervisor.loaded.result()
        except BaseException:
            self._supervisor.join()
            self._free_slots()
            raise

    def close(self) -> None:
        """End the process and wait until it is gone. All batches have left before."""
        with self._lock:
            self._supervisor.closing.set()
            child = self._child
        if child is not None:
            child.shut()
        self._supervisor.join(child)
        self._free_slots()

    def _free_slots(self) -> None:
        self.slots = []

    # Called on the supervisor thread.

    def _run_child(self) -> float:
        """Run one process from start to end; return the pause before the next one in seconds."""
        try:
            child = self._start_child()
        except OSError as error:
            return self._record_exit(
                None, load_error(self.name, f"a process for it cannot be started: {error.strerror}")
            )
        if child is None:
            return 0.0
        with _OutputReader(child) as output:
            failure = self._load_model(child, output)
            if failure is None:
                self._admit_batches(child)
                output.listen()
            child.cause = exit_cause(child.process, child.blame)
            if self._order["memory_bytes"] and child.process.returncode < 0 and not child.blame:
                limit = format_bytes(self._order["memory_bytes"])
                child.cause += f", which also happens at its isolation_memory_limit ({limit})"
            output.drain()
        return self._record_exit(child, failure)

    def _start_child(self) -> ChildProcess | None:
        """Start a process; return None while closing."""
        kinds = [socket.SOCK_STREAM] + [socket.SOCK_SEQPACKET] * self._instances
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
        child_ends = [pair[1] for pair in pairs]
        control, instances = Messages(pairs[0][0]), [Frames(pair[0]) for pair in pairs[1:]]
        try:
            with self._lock:
                if self._supervisor.closing.is_set():
                    return None
                command_line = [*self._command, str(os.getpid()), *(str(end.fileno()) for end in child_ends)]
                # Started on this thread, which lives as long as the server: the kernel kills the child when its
                # parent thread ends.
                process = subprocess.Popen(
                    command_line,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=[end.fileno() for end in child_ends],
                    process_group=0,  # Ctrl-C reaches only the server
                )
                self._child = ChildProcess(process, control, instances)
                return self._child
        finally:
            for end in child_ends:
                end.close()

    def _load_model(self, child: ChildProcess, output: _OutputReader) -> ConfigError | None:
        """Make the process load the model; return the error if it cannot."""
        try:
            child.control.send(self._order)
            answer = output.listen(LOAD_LIMIT_S)
        except TimeoutError:
            child.kill(f"it did not load the model within {LOAD_LIMIT_S:g} s")
            answer = None
        except OSError:
            answer = None
        if answer is None:
            cause = exit_cause(child.process, child.blame)
            return load_error(self.name, f"its process died while it loaded the model: {cause}")
        if "no_room" in answer:
            return NoRoom(*answer["no_room"])
        if "refused" in answer:
            return ConfigError([Finding(*finding) for finding in answer["refused"]])
        if "loaded" not in answer:
            return load_error(self.name, f"could not be loaded ({answer.get('broken')})")
        depths = answer["loaded"]
        if not self.slots:
            self.tensors, self.ranges = answer["tensors"], answer["ranges"]
            self.held = [Holding(*holding) for holding in answer["held"]]
            name = f"headrace {self.name}"
            for depth in depths:
                self.slots.append([])
                self.slots[-1].extend(Slot.create(name, self._slot_bytes) for _ in range(depth + self.spare_slots))
        if depths != [len(slots) - self.spare_slots for slots in self.slots]:
            return load_error(self.name, "its file runs otherwise than before")
        try:
            for frames, slots in zip(child.instances, self.slots, strict=True):
                frames.share(SHARE, 0, [slot.fd for slot in slots])
        except OSError:
            return load_error(self.name, f"its process died at its start: {exit_cause(child.process, child.blame)}")
        return None

    def _admit_batches(self, child: ChildProcess) -> None:
        child.started_ns = monotonic_ns()
        self.admission.open(child)
        self._supervisor.serves(child.process)

    def _record_exit(self, child: ChildProcess | None, failure: ConfigError | None) -> float:
        """Record the end of a process, or a failed start; return the pause before the next one in seconds.

        Args:
            child: the process that ended; None if none was started.
            failure: reason why it never served; None if it did.
        """
        with self._lock:
            closing, self._child = self._supervisor.closing.is_set(), None
        pause_s, waits = self._supervisor.pause_after(failure, None if child is None else child.started_ns)
        inside = self.admission.shut("" if waits else f"the process of {self.name} has died and is being started again")
        if failure is not None and not self._supervisor.loaded.done():
            self._supervisor.loaded.set_exception(failure)
        elif not closing:
            self.restarts += failure is None
            cause = f"{failure}" if child is None or failure is not None else child.cause
            lost_batches = f", with {inside} batches inside" if inside else ""
            self._supervisor.log_end(cause + lost_batches, pause_s, () if child is None else tuple(child.last_lines))
        if child is not None:
            child.ended.set()
        return pause_s

    def _fail_permanently(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.process.kill()
            child.process.wait()
            child.cause = "it is no longer supervised"
        self.admission.fail(f"the process of {self.name} is no longer supervised")
        self.admission.shut("")
        if child is not None:
            child.ended.set()


class _OutputReader:
    """Reads messages on a process's control socket, and lines of its standard output and error."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._control = child.control
        assert child.process.stdout is not None, "the process was started with a pipe"
        self._output = OutputLines(child.process.stdout, self._line)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    def __enter__(self) -> _OutputReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._selector.close()
        self._output.close()

    def listen(self, limit_s: float | None = None) -> Message | None:
        """Return the next message that is not a log record; None if the process is gone.

        Raises:
            TimeoutError: no message came for `limit_s`.
        """
        try:
            while True:
                while (message := self._control.next_received()) is not None:
                    if "log" not in message:
                        return message
                    name, level, text = message["log"]
                    logging.getLogger(name).log(level, "%s", text)
                ready = [key.fileobj for key, _events in self._selector.select(limit_s)]
                if not ready:
                    raise TimeoutError
                if self._output in ready and not self._output.read():
                    self._selector.unregister(self._output)
                if self._control in ready:
                    self._control.read_available()
        except (EOFError, ProtocolError):
            return None

    def drain(self) -> None:
        """Read the rest of the pipe."""
        self._output.drain()

    def _line(self, text: str) -> None:
        self._child.last_lines.append(text)
        logger.debug("%d: %s", self._child.process.pid, text)
