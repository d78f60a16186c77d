"""Base of executions around another one."""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.errors import HeadraceError
from headrace.runtimes.base import Execution
from headrace.runtimes.members import MemberExecution, NextWaiting, runs_by_member
from headrace.runtimes.overlapped import InFlightBatch, OverlappedExecution, is_overlapped


class WrappedExecution(Execution):
    """Base of executions around another one; overlapped if that one is. The state of a batch is the inner batch.

    Args:
        inner: the wrapped execution.

    Attributes:
        inner: as in the argument.
        depth, prompt, any_thread, slot_states, renew_state: those of the wrapped execution.
    """

    def __init__(self, inner: Execution) -> None:
        self.inner = inner
        self.depth, self.prompt, self.any_thread = inner.depth, inner.prompt, inner.any_thread
        self.slot_states, self.renew_state = inner.slot_states, inner.renew_state

    def wait_ready(self, stopped: Callable[[], bool], next_waiting: NextWaiting) -> None:
        """Wait as the wrapped execution does."""
        self._members().wait_ready(stopped, next_waiting)

    def launch(self, batch: InFlightBatch) -> None:
        """Launch the inner batch."""
        self._overlapped().launch(self._inner_batch(batch))

    def discard(self, batch: InFlightBatch) -> None:
        """Discard the inner batch."""
        self._overlapped().discard(self._inner_batch(batch))

    def give_up(self, error: HeadraceError) -> None:
        """Settle the open requests of the wrapped execution with an error; see `MemberExecution`."""
        if runs_by_member(self.inner):
            self.inner.give_up(error)

    def close(self) -> None:
        """Close the wrapped execution."""
        self.inner.close()

    def _overlapped(self) -> OverlappedExecution:
        if not is_overlapped(self.inner):
            raise TypeError("the wrapped execution runs one batch at a time: call run() instead of begin()")
        return self.inner

    def _members(self) -> MemberExecution:
        if not runs_by_member(self.inner):
            raise TypeError("the wrapped execution runs batches as a whole: call run() instead of run_members()")
        return self.inner

    def _inner_batch(self, batch: InFlightBatch) -> InFlightBatch:
        assert isinstance(batch.state, InFlightBatch), "the batch was begun by another execution"
        return batch.state
