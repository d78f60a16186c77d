"""Supervises the child process that runs a model, and replaces it when it dies.

One supervisor thread per model owns the process. It starts the process, forwards its log, waits for its end, and starts the next
one after a pause. The pause grows while processes die young. `BatchAdmission` decides which batches may enter.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from headrace.backends.base import ExecutionLost
from headrace.backends.process.child import Channel, Message, SharedSlot
from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, Finding, Unavailable
from headrace.core.ledger import Holding, NoRoom

Process = TypeVar("Process")

# So many batches go one at a time after a death, as the members of one that was to blame do.
_SOLO_BATCHES = 32


class BatchAdmission(Generic[Process]):
    """Decides which batches may be sent to a child process, and which of them are suspected when it dies.

    All batches that were inside together when a process died are suspects: any of them may have killed it.

    A suspect enters the next process alone, and nobody else does before all suspects have left; so a second death shows which one
    it was. A batch that was alone inside needs no such proof; its members, which come next one by one, shall be alone as well. So
    after a death some batches enter one at a time.

    Ownership: everything is guarded by `_changed`, under which nothing else is taken. Any thread may call anything.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: Process | None = None
        self._inside: set[object] = set()
        self._alone = False  # who is inside is not to be joined
        self._suspects: set[object] = set()
        self._solo_batches = 0  # batches that still enter one at a time
        self._refusal = ""
        self._lost = ""

    @property
    def is_open(self) -> bool:
        """True while there is a process."""
        return self._process is not None

    @property
    def refusal(self) -> str:
        """Why batches are refused for the time being; "" if they are not."""
        return self._refusal

    def enter(self, batch: object, wait: bool) -> Process | None:
        """Let a batch in.

        Args:
            batch: whatever it is known by.
            wait: until it may enter.

        Returns:
            The process that it is in; None if it would have to wait.

        Raises:
            Unavailable: there will be no process for some time.
            ExecutionLost: there will be none any more.
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
        """A batch is over, or nobody wants it any more; no error if it is not inside."""
        with self._changed:
            if batch in self._inside:
                self._inside.discard(batch)
                self._solo_batches -= self._alone and self._solo_batches > 0
                self._alone = False
            self._suspects.discard(batch)
            self._changed.notify_all()

    def suspected(self, batch: object) -> bool:
        """True if a batch was inside of a process that has died, and is to enter the next one alone."""
        with self._changed:
            return batch in self._suspects

    def open(self, process: Process) -> None:
        """There is a process."""
        with self._changed:
            self._process, self._refusal = process, ""
            self._changed.notify_all()

    def shut(self, refusal: str) -> int:
        """The process is gone.

        Args:
            refusal: why batches are refused until there is another one; "" lets them wait.

        Returns:
            How many were inside.
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
        """There will be no process any more."""
        with self._changed:
            self._process, self._lost = None, reason
            self._changed.notify_all()

    def _may_enter(self, suspect: bool) -> bool:
        if self._alone or (self._inside and (suspect or self._solo_batches)):
            return False
        return suspect or not self._suspects


CHILD: tuple[str, ...] = (sys.executable, "-P", "-m", "headrace.backends.process.child")

# Before the next process is started, by how many have died in a row; and how long one must have lived not to count.
_PAUSES_S = (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 0.8, 2.0, 4.0, 8.0, 16.0, 30.0)
_SETTLED_S = 10.0
# Batches wait for the next process if its pause is no longer than that, and are refused otherwise.
_MAX_QUEUE_PAUSE_S = 1.0
_LOAD_LIMIT_S = 900.0
_CLOSE_GRACE_S = 15.0
_TAIL_LINES = 100  # a dump of all threads, of which the one that matters comes first

logger = logging.getLogger("headrace.isolated")


class ChildProcess:
    """One process.

    Attributes:
        process: it.
        control: the socket that the supervisor thread listens to.
        channels: one an instance.
        ended: set once it is dead and what was inside is dealt with.
        cause: why it ended, for people; "" while it lives.
        blame: why we ended it, "" if we did not.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: Channel, channels: list[Channel]) -> None:
        self.process = process
        self.control = control
        self.channels = channels
        self.ended = threading.Event()
        self.cause = ""
        self.blame = ""
        self.born_ns = monotonic_ns()
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def kill(self, why: str) -> None:
        """End it; from any thread."""
        self.blame = self.blame or why
        self.process.kill()

    def shut(self) -> None:
        """Let it end by itself."""
        for channel in (*self.channels, self.control):
            channel.shut()


class ModelProcess:
    """Runs one version of a model in a process of its own, and in another one when that dies.

    Ownership: `_lock` guards `_generation` against `close`; everything else belongs to the
    supervisor thread, which alone changes what other threads read.

    Args:
        name: of the model, for the log and messages.
        order: what the child is to load.
        instances: how many run at the same time.
        limit_s: how long a batch may take, in seconds, before the process is taken to hang.
        slot_bytes: shared memory for a batch, to begin with.
        command: of the child.

    Attributes:
        gate: to the process.
        restarts: how many processes have died while they served.
        tensors: by "inputs" and "outputs", name, dtype and shape of those that the file tells of; None where it tells of none.
        slots: by instance the memory for its batches, which the process has too.
        held: memory of GPUs that the process has booked.
    """

    def __init__(
        self,
        name: str,
        order: Message,
        instances: int,
        limit_s: float,
        slot_bytes: int,
        command: Sequence[str] = CHILD,
    ) -> None:
        self.name = name
        self.admission: BatchAdmission[ChildProcess] = BatchAdmission()
        self.restarts = 0
        self.tensors: dict[str, list[tuple[str, str, list[int]]] | None] = {}
        self.slots: list[list[SharedSlot]] = []
        self.held: list[Holding] = []
        self._order = order
        self._instances = instances
        self._limit_s = limit_s
        self._slot_bytes = slot_bytes
        self._command = tuple(command)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._child: ChildProcess | None = None  # that is loading or serves
        self._dead_in_row = 0
        self._loaded: Future[None] = Future()
        self._thread = threading.Thread(target=self._supervise, name=f"{name} supervisor", daemon=True)

    def start(self) -> None:
        """Start the process and wait until it has loaded the model.

        Raises:
            ConfigError: it cannot be loaded.
        """
        self._thread.start()
        try:
            self._loaded.result()
        except BaseException:
            self._thread.join()
            self._free_slots()
            raise

    def close(self) -> None:
        """End the process; returns when it is gone. All batches have left."""
        with self._lock:
            self._closing.set()
            child = self._child
        if child is not None:
            child.shut()
        self._thread.join(_CLOSE_GRACE_S)
        if self._thread.is_alive() and child is not None:
            logger.warning("the process of %s does not end by itself and is killed", self.name)
            child.kill("it did not end by itself")
        self._thread.join()
        self._free_slots()

    def _free_slots(self) -> None:
        for slots in self.slots:
            for slot in slots:
                slot.close()
        self.slots = []

    # On the supervisor thread's thread

    def _supervise(self) -> None:
        try:
            pause_s = 0.0
            while not self._closing.wait(pause_s):
                pause_s = self._run_child()
                if not self._loaded.done():
                    self._loaded.set_exception(_load_error(self.name, "its process could not be kept alive"))
                if self._loaded.exception() is not None:
                    return
        except BaseException as error:  # a dying thread says so, whatever it dies of
            logger.exception("the process of %s is no longer supervised", self.name)
            self._fail_permanently(error)

    def _run_child(self) -> float:
        """One process from its start to its end; the pause before the next one in seconds."""
        try:
            child = self._start_child()
        except OSError as error:
            return self._record_exit(
                None, _load_error(self.name, f"a process for it cannot be started: {error.strerror}")
            )
        if child is None:
            return 0.0
        with _OutputReader(child) as output:
            failure = self._load_model(child, output)
            if failure is None:
                self._admit_batches(child)
                output.listen()
            child.cause = _exit_cause(child)
            output.drain()
        return self._record_exit(child, failure)

    def _start_child(self) -> ChildProcess | None:
        """Start a process; None if none is wanted any more."""
        pairs = [socket.socketpair() for _ in range(self._instances + 1)]
        theirs = [pair[1] for pair in pairs]
        channels = [Channel(pair[0], self._limit_s) for pair in pairs[1:]]
        control = Channel(pairs[0][0])
        try:
            with self._lock:
                if self._closing.is_set():
                    return None
                words = [*self._command, str(os.getpid()), *(str(end.fileno()) for end in theirs)]
                # By this thread, which lives as long as the server: the child asks to be killed when it ends.
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    pass_fds=[end.fileno() for end in theirs],
                    process_group=0,  # Ctrl-C reaches us alone
                )
                self._child = ChildProcess(process, control, channels)
                return self._child
        finally:
            for end in theirs:
                end.close()

    def _load_model(self, child: ChildProcess, output: _OutputReader) -> ConfigError | None:
        """Have the model loaded; why it cannot be."""
        try:
            child.control.send(self._order)
            answer = output.listen(_LOAD_LIMIT_S)
        except TimeoutError:
            child.kill(f"it did not load the model within {_LOAD_LIMIT_S:g} s")
            answer = None
        except OSError:
            answer = None
        if answer is None:
            cause = _exit_cause(child)
            return _load_error(self.name, f"its process died while it loaded the model: {cause}")
        if "no_room" in answer:
            return NoRoom(*answer["no_room"])
        if "refused" in answer:
            return ConfigError([Finding(*finding) for finding in answer["refused"]])
        if "loaded" not in answer:
            return _load_error(self.name, f"could not be loaded ({answer.get('broken')})")
        depths = answer["loaded"]
        if not self.slots:
            self.tensors = answer["tensors"]
            self.held = [Holding(*holding) for holding in answer["held"]]
            name = f"headrace {self.name}"
            for depth in depths:
                self.slots.append([])
                self.slots[-1].extend(SharedSlot.create(name, self._slot_bytes) for _ in range(depth))
        if depths != [len(slots) for slots in self.slots]:
            return _load_error(self.name, "its file runs otherwise than before")
        try:
            for channel, slots in zip(child.channels, self.slots, strict=True):
                channel.send({"do": "share"}, [slot.fd for slot in slots])
        except OSError:
            return _load_error(self.name, f"its process died at its start: {_exit_cause(child)}")
        return None

    def _admit_batches(self, child: ChildProcess) -> None:
        child.born_ns = monotonic_ns()
        self.admission.open(child)
        if self._loaded.done():
            logger.warning("%s has a new process, %d", self.name, child.process.pid)
        else:
            self._loaded.set_result(None)

    def _record_exit(self, child: ChildProcess | None, failure: ConfigError | None) -> float:
        """A process is gone, or none could be had; the pause before the next one in seconds.

        Args:
            child: that is gone.
            failure: why it never served.
        """
        with self._lock:
            closing, self._child = self._closing.is_set(), None
        settled = child is not None and monotonic_ns() - child.born_ns >= _SETTLED_S * NS_PER_S
        self._dead_in_row = 1 if failure is None and settled else self._dead_in_row + 1
        pause_s = _PAUSES_S[min(self._dead_in_row, len(_PAUSES_S)) - 1]
        waits = failure is None and pause_s <= _MAX_QUEUE_PAUSE_S
        inside = self.admission.shut("" if waits else f"the process of {self.name} has died and is being started again")
        if failure is not None and not self._loaded.done():
            self._loaded.set_exception(failure)
        elif not closing:
            self.restarts += failure is None
            cause = f"{failure}" if child is None or failure is not None else child.cause
            lost_batches = f", with {inside} batches inside" if inside else ""
            output_lines = "".join(f"\n  {line}" for line in child.tail) if child is not None else ""
            logger.error(
                "the process of %s has died: %s%s; the next in %g s%s",
                self.name,
                cause,
                lost_batches,
                pause_s,
                output_lines,
            )
        if child is not None:
            child.ended.set()
        return pause_s

    def _fail_permanently(self, error: BaseException) -> None:
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
        if not self._loaded.done():
            self._loaded.set_exception(error)


class _OutputReader:
    """What a process says: messages on its control socket, and lines on its standard output and error."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._control = child.control
        assert child.process.stdout is not None, "the process was started with a pipe"
        self._output = child.process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    def __enter__(self) -> _OutputReader:
        return self

    def __exit__(self, *_error: object) -> None:
        self._selector.close()
        self._output.close()

    def listen(self, limit_s: float | None = None) -> Message | None:
        """The next message that is no log record; None if the process is gone.

        Raises:
            TimeoutError: nothing came for `limit_s`.
        """
        while True:
            ready = [key.fileobj for key, _events in self._selector.select(limit_s)]
            if not ready:
                raise TimeoutError
            if self._output in ready and not self._read():
                self._selector.unregister(self._output)
            if self._control not in ready:
                continue
            try:
                message, _fds = self._control.receive()
            except EOFError:
                return None
            if "log" not in message:
                return message
            name, level, text = message["log"]
            logging.getLogger(name).log(level, "%s", text)

    def drain(self) -> None:
        """What is still in the pipe."""
        while self._read():
            pass

    def _read(self) -> bool:
        """Take what is there; False if there is no more."""
        try:
            data = self._output.read(1 << 16)
        except OSError:
            return False
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip()
            self._child.tail.append(text)
            logger.debug("%d: %s", self._child.process.pid, text)
        return True


def _exit_cause(child: ChildProcess) -> str:
    """Wait for the end of a process whose control socket is closed, or that is of no use, and say what it died of."""
    process = child.process
    process.kill()
    status = process.wait()
    if child.blame:
        return child.blame
    if status >= 0:
        return f"it ended with status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    return f"killed by {name}" + (": is there enough memory?" if name == "SIGKILL" else "")


def _load_error(name: str, message: str) -> ConfigError:
    return ConfigError([Finding(name, None, message, "the server's log has more")])
