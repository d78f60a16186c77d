"""Who is inside of a process that runs a model, and who may enter it."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from headrace.backends.base import ExecutionLost
from headrace.core.errors import Unavailable

Inside = TypeVar("Inside")

# So many batches go one at a time after a death, as the members of one that was to blame do.
_CAREFUL = 32


class Gate(Generic[Inside]):
    """Batches enter a process and leave it. When it dies, those inside together are suspects: any of them may have killed it.

    A suspect enters the next process alone, and nobody else does before all suspects have left; so a second death shows which one
    it was. A batch that was alone inside needs no such proof; its members, which come next one by one, shall be alone as well. So
    after a death some batches enter one at a time.

    Ownership: everything is guarded by `_changed`, under which nothing else is taken. Any thread may call anything.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._process: Inside | None = None
        self._inside: set[object] = set()
        self._alone = False  # who is inside is not to be joined
        self._suspects: set[object] = set()
        self._careful = 0  # batches that still enter one at a time
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

    def enter(self, batch: object, wait: bool) -> Inside | None:
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
                    self._alone = suspect or self._careful > 0
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
                self._careful -= self._alone and self._careful > 0
                self._alone = False
            self._suspects.discard(batch)
            self._changed.notify_all()

    def suspected(self, batch: object) -> bool:
        """True if a batch was inside of a process that has died, and is to enter the next one alone."""
        with self._changed:
            return batch in self._suspects

    def open(self, process: Inside) -> None:
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
                self._careful = _CAREFUL
            if len(inside) > 1:
                self._suspects |= inside
            else:
                self._suspects -= inside
            self._process, self._refusal = None, refusal
            self._changed.notify_all()
            return len(inside)

    def lose(self, reason: str) -> None:
        """There will be no process any more."""
        with self._changed:
            self._process, self._lost = None, reason
            self._changed.notify_all()

    def _may_enter(self, suspect: bool) -> bool:
        if self._alone or (self._inside and (suspect or self._careful)):
            return False
        return suspect or not self._suspects
