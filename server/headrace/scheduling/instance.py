"""One instance of a model: a thread that opens an execution, warms it up and serves with it until there is no more to do."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from headrace.backends.base import Execution
from headrace.core.errors import ModelFailed
from headrace.scheduling.outlook import UnderWay

logger = logging.getLogger("headrace.instance")

WarmUp = Callable[[Execution], None]
OnDeath = Callable[[BaseException], None]


class Runner(Protocol):
    """How an instance takes batches to its execution: `SerialRunner` or `Pipeline`."""

    def serve(self) -> None:
        """On the instance's thread: run batches until the scheduler is closed and empty and all are settled."""

    def give_up(self, error: Exception) -> None:
        """From any thread: answer everything that is under way with an error, since the backend does not come back."""

    def under_way(self) -> UnderWay:
        """From any thread: what is being run."""


MakeRunner = Callable[[Execution, OnDeath], Runner]


class Instance:
    """Serves one model version on its own thread until the scheduler is closed and empty.

    Args:
        name: of the thread, for logs and profilers.
        open_execution: makes the execution, on the instance's thread.
        make_runner: chooses how batches are run, by what the execution offers; a runner with threads of its own calls its second
            argument from one that dies.
        on_exit: called once when the instance ends or dies, with the error that killed it, or None; from whichever of its
            threads is the first to know.

    Attributes:
        opened: done once the execution is open and warm; holds the error if it is not to be had.
    """

    def __init__(
        self,
        name: str,
        open_execution: Callable[[], Execution],
        make_runner: MakeRunner,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self.name = name
        self._open_execution = open_execution
        self._make_runner = make_runner
        self._on_exit = on_exit
        self._runner: Runner | None = None
        self._lock = threading.Lock()  # guards _dead; `on_exit` is called under it, and nothing else taken
        self._dead = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._warm_up: WarmUp | None = None
        self.opened: Future[None] = Future()

    def start(self, warm_up: WarmUp | None = None) -> None:
        """Start the thread.

        Args:
            warm_up: called on the thread with the execution, before the first batch is pulled.
        """
        self._warm_up = warm_up
        self._thread.start()

    def join(self, timeout_s: float | None) -> bool:
        """Wait for the thread to end, for ever if `timeout_s` is None; False if it has not after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def dead(self) -> bool:
        """True once it has died."""
        return self._dead

    @property
    def ended_well(self) -> bool:
        """True once the thread has ended, having served to the end."""
        return not self._dead and not self._thread.is_alive()

    def give_up(self, error: Exception) -> None:
        """From any thread: answer what is being run with an error, since the backend does not come back."""
        runner = self._runner
        if runner is not None:
            runner.give_up(error)

    @property
    def under_way(self) -> UnderWay | None:
        """What it runs; None if it is not open (yet, or any more)."""
        runner = self._runner
        return None if runner is None or self._dead else runner.under_way()

    def _main(self) -> None:
        try:
            execution = self._open_execution()
            try:
                self._prepare(execution)
                self._runner = runner = self._make_runner(execution, self._died)
                self.opened.set_result(None)
                runner.serve()
            finally:
                execution.close()
        except BaseException as error:  # a dying instance says so, whatever it dies of
            self._died(error)
        else:
            self._on_exit(None)
        finally:
            self._runner = None  # it points back here: without the circle the memory is free at once

    def _died(self, cause: BaseException) -> None:
        """Say so once; answer what is held each time, since more may have been pulled meanwhile."""
        # First the count, then the answers: who has been told that it died finds the model no longer ready.
        try:
            with self._lock:
                first, self._dead = not self._dead, True
                if first:
                    self._on_exit(cause)
        finally:
            if not self.opened.done():
                self.opened.set_exception(cause)
            else:
                self.give_up(ModelFailed("the instance that ran the request died"))
                if first:
                    logger.error("instance %s died", self.name, exc_info=cause)

    def _prepare(self, execution: Execution) -> None:
        warm_up, self._warm_up = self._warm_up, None  # its arrays may be large
        if warm_up is not None:
            warm_up(execution)
