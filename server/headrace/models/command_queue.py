"""Commands for the control thread: loads and unloads of clients, and what other threads have found to do."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from headrace.core.errors import HeadraceError, Overloaded, Unavailable

logger = logging.getLogger("headrace.control")

# Each command may hold the files of an upload.
MAX_WAITING_COMMANDS = 64
STOPPING = "the server is stopping"


@dataclass(frozen=True, slots=True)
class Command:
    """A step of the control thread.

    Attributes:
        action: runs on the control thread.
        outcome: settled once the action has ended.
        settles: the action settles the outcome later, unless it raises an error.
    """

    action: Callable[[], None]
    outcome: Future[None]
    settles: bool = False


class CommandQueue:
    """Commands that wait for the control thread. It is built before what posts commands, and before the thread.

    Ownership: any thread may post or settle a command; the control thread calls `get` and `refuse`. `_lock` guards `_waiting` and
    `_is_ended`.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: dict[Future[None], str] = {}  # commands that have not ended, with the model that they load
        self._is_ended = False

    @property
    def waiting(self) -> int:
        """Number of commands that have not ended."""
        return len(self._waiting)

    def add(self, command: Command, name: str, may_exceed: Callable[[Collection[str]], bool]) -> None:
        """Queue a command of a client.

        Args:
            command: the command.
            name: name of the model that it loads; "" if it loads none.
            may_exceed: called with the names of the models that waiting commands load, if too many commands wait; returns True if
                this one is taken nevertheless.

        Raises:
            Overloaded: too many commands wait.
            Unavailable: the server is stopping.
        """
        with self._lock:
            if self._is_ended:
                raise Unavailable(STOPPING)
            if len(self._waiting) >= MAX_WAITING_COMMANDS and not may_exceed(self._waiting.values()):
                raise Overloaded(f"{len(self._waiting)} loads and unloads are queued, the maximum: try again later")
            self._waiting[command.outcome] = name
            self._commands.put(command)

    def post(self, action: Callable[[], None]) -> None:
        """Queue an action of the server itself; dropped once the control thread has ended."""
        with self._lock:
            if not self._is_ended:
                command = Command(action, Future())
                self._waiting[command.outcome] = ""
                self._commands.put(command)

    def wake(self) -> None:
        """Let the control thread look for what it may start now."""
        self.post(lambda: None)

    def settle(self, outcome: Future[None], error: BaseException | None) -> None:
        """Settle the outcome of a command."""
        with self._lock:
            self._waiting.pop(outcome, None)
        if error is None:
            outcome.set_result(None)
        elif isinstance(error, HeadraceError):
            outcome.set_exception(error)
        elif isinstance(error, Exception):
            logger.error("a load or unload failed", exc_info=error)
            outcome.set_exception(HeadraceError("the command failed: see the server's log for the cause"))
        else:
            outcome.set_exception(Unavailable(STOPPING))

    def get(self, timeout_s: float | None) -> Command | None:
        """Wait for the next command; None after `stop`. Raises queue.Empty after `timeout_s` seconds."""
        return self._commands.get(timeout=timeout_s)

    def stop(self) -> None:
        """End the control thread after the commands that wait."""
        self._commands.put(None)

    def refuse(self) -> None:
        """Fail the commands that wait, and those that follow."""
        with self._lock:
            self._is_ended = True
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command.outcome.set_exception(Unavailable(STOPPING))
