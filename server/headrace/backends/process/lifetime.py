"""Start, death and restart of processes that run models: pauses, limits, and the reasons of an end."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from headrace.core.clock import NS_PER_S, monotonic_ns
from headrace.core.errors import ConfigError, Finding

# Pause before the next process, by the number of deaths in a row; and the life time after which a death does not
# count.
PAUSES_S = (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 0.8, 2.0, 4.0, 8.0, 16.0, 30.0)
SETTLED_S = 10.0
# Batches wait for the next process if its pause is at most this long, else they are refused.
MAX_QUEUE_PAUSE_S = 1.0
LOAD_LIMIT_S = 900.0
CLOSE_GRACE_S = 15.0
TAIL_LINES = 100  # enough for a dump of all threads, of which the failing one comes first


def exit_cause(process: subprocess.Popen[bytes], blame: str) -> str:
    """Kill and wait for a process that is of no use any more; return the reason for its end.

    Args:
        process: the process.
        blame: reason why the server killed it, "" if it did not.
    """
    process.kill()
    status = process.wait()
    if blame:
        return blame
    if status >= 0:
        return f"it ended with status {status}"
    name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
    return f"killed by {name}" + (": is there enough memory?" if name == "SIGKILL" else "")


def load_error(name: str, message: str) -> ConfigError:
    """Return the error of a model that cannot be loaded.

    Args:
        name: of the model.
        message: the reason.
    """
    return ConfigError([Finding(name, None, message, "the server's log has more")])


class Killable(Protocol):
    """A process that a supervisor kills."""

    def kill(self, why: str) -> None:
        """Kill the process; from any thread."""


class Supervisor:
    """The thread that runs the processes of a model one after the other, and the pauses between them.

    `closing` and `loaded` may be used by any thread; `pause_after` and `log_end` belong to the supervisor's own.

    Args:
        name: of the model or the instance, for logs.
        run: runs one process from start to end; returns the pause before the next one in seconds.
        fail: called after an error has ended the thread: no process is started any more.
        unloaded: reason for the load error if the first run ends without a result.
        logger: of the model's processes.

    Attributes:
        closing: set once no process may be started.
        loaded: result of the first load; ConfigError if it failed.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], float],
        fail: Callable[[], None],
        unloaded: str,
        logger: logging.Logger,
    ) -> None:
        self.closing = threading.Event()
        self.loaded: Future[None] = Future()
        self._name = name
        self._run = run
        self._fail = fail
        self._unloaded = unloaded
        self._logger = logger
        self._dead_in_row = 0
        self._thread = threading.Thread(target=self._supervise, name=f"{name} supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread; `loaded` has the error if the system starts no more."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self.loaded.set_exception(load_error(self._name, f"the system starts no more threads ({error})"))

    def join(self, process: Killable | None = None) -> None:
        """Wait until the thread has ended.

        Args:
            process: killed if the thread does not end by itself.
        """
        if self._thread.ident is None:
            return
        self._thread.join(CLOSE_GRACE_S if process is not None else None)
        if self._thread.is_alive() and process is not None:
            self._logger.warning("the process of %s does not end by itself and is killed", self._name)
            process.kill("it did not end by itself")
        self._thread.join()

    def serves(self, process: subprocess.Popen[bytes]) -> None:
        """Record that a process has loaded the model."""
        if self.loaded.done():
            self._logger.warning("%s has a new process, %d", self._name, process.pid)
        else:
            self.loaded.set_result(None)

    def pause_after(self, failure: ConfigError | None, started_ns: int | None) -> tuple[float, bool]:
        """Count the end of a process; return the seconds until the next one, and whether batches wait for it.

        Args:
            failure: reason why the process never served; None if it did.
            started_ns: time at which it began to serve; None if no process was started.
        """
        settled = started_ns is not None and monotonic_ns() - started_ns >= SETTLED_S * NS_PER_S
        self._dead_in_row = 1 if failure is None and settled else self._dead_in_row + 1
        pause_s = PAUSES_S[min(self._dead_in_row, len(PAUSES_S)) - 1]
        return pause_s, failure is None and pause_s <= MAX_QUEUE_PAUSE_S

    def log_end(self, cause: str, pause_s: float, lines: Sequence[str]) -> None:
        """Log the end of a process that was not expected.

        Args:
            cause: of its end.
            pause_s: seconds until the next one.
            lines: its last lines of output.
        """
        output = "".join(f"\n  {line}" for line in lines)
        self._logger.error("the process of %s has died: %s; the next in %g s%s", self._name, cause, pause_s, output)

    def _supervise(self) -> None:
        try:
            pause_s = 0.0
            while not self.closing.wait(pause_s):
                pause_s = self._run()
                if not self.loaded.done():
                    self.loaded.set_exception(load_error(self._name, self._unloaded))
                if self.loaded.exception() is not None:
                    return
        except BaseException as error:  # log any error that ends this thread
            self._logger.exception("the process of %s is no longer supervised", self._name)
            self._fail()
            if not self.loaded.done():
                self.loaded.set_exception(error)
