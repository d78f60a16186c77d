"""Decides which batches may enter the process of an isolated model, and which of them may have killed it."""

from __future__ import annotations

from headrace.runtimes.processes.supervisor import P, ProcessGate

# Number of batches that enter one at a time after a death: the members of a batch that killed the process are among
# them.
_SOLO_BATCHES = 32


class BatchAdmission(ProcessGate[P]):
    """Decides which batches may be sent to a child process, and which of them are suspected when it dies.

    All batches that were inside together when a process died are suspects: any of them may have killed it.

    A suspect enters the next process alone, and no other batch enters before all suspects have left. A second death
    then identifies the culprit. A batch that was alone inside needs no such proof. Its requests are retried one by
    one and must run alone as well, so after a death a number of batches enter one at a time.

    Ownership: see `ProcessGate`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._inside: set[object] = set()
        self._alone = False  # no other batch may join the one inside
        self._suspects: set[object] = set()
        self._solo_batches = 0  # number of batches that still enter one at a time

    def enter(self, batch: object, wait: bool) -> P | None:
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
                if self.process is not None and self._may_enter(suspect):
                    self._inside.add(batch)
                    self._alone = suspect or self._solo_batches > 0
                    return self.process
                self._check()
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

    def shut(self, refusal: str) -> int:
        """Stop admission after the process died; see `ProcessGate.shut`."""
        with self._changed:
            inside, self._inside, self._alone = self._inside, set(), False
            if inside:
                self._solo_batches = _SOLO_BATCHES
            if len(inside) > 1:
                self._suspects |= inside
            else:
                self._suspects -= inside
            self.process, self.refusal = None, refusal
            self._changed.notify_all()
            return len(inside)

    def _may_enter(self, suspect: bool) -> bool:
        if self._alone or (self._inside and (suspect or self._solo_batches)):
            return False
        return suspect or not self._suspects
