"""Runs work on models while the server is idle: one task at a time, each on the thread of an instance that sleeps.

The control thread looks for tasks and offers them (`look`). A request never waits for more than one run of the model: a task
returns when its `is_busy` does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from headrace.core.clock import NS_PER_S, Clock, monotonic_ns
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.models.command_queue import CommandQueue
from headrace.models.registry import Registry
from headrace.runtimes.base import Execution, ExecutionLost

logger = logging.getLogger("headrace.control")

# Time between two looks while a task waits.
_LOOK_NS = NS_PER_S // 4
# The server is idle if no model had a request for this long.
_QUIET_NS = NS_PER_S // 10

IdleWork = Callable[[Execution, Callable[[], bool]], None]
"""Works with the execution of an instance until the second argument returns True; called before each run of the model."""


class IdleTasks:
    """The tasks of all models. Any thread may call `set`; the control thread calls `look`.

    Ownership: single steps of the interpreter change `_tasks`; the task that runs holds `_running`.

    Args:
        commands: wakes the control thread for the first task of a model, so that it calls `look`; None for commands of its own.
        clock: monotonic nanoseconds.

    Attributes:
        commands: those of the control thread.
    """

    def __init__(self, commands: CommandQueue | None = None, clock: Clock = monotonic_ns) -> None:
        self.commands = commands or CommandQueue()
        self._clock = clock
        self._tasks: dict[ModelHandle, IdleWork] = {}
        self._running = threading.Lock()

    def set(self, handle: ModelHandle, task: IdleWork | None) -> None:
        """Set the task of a version, which is offered until it is replaced; None for none."""
        if task is None:
            self._tasks.pop(handle, None)
            return
        is_new = handle not in self._tasks
        self._tasks[handle] = task
        if is_new:
            self.commands.wake()

    def look(self, registry: Registry, is_loading: Callable[[], bool]) -> int | None:
        """Offer the tasks to their models, if the server is idle.

        Args:
            registry: versions that serve.
            is_loading: returns True while a model is being loaded.

        Returns:
            Time of the next call in monotonic nanoseconds; None without tasks.
        """
        if not self._tasks:
            return None
        is_busy = partial(self._is_busy, registry, is_loading)
        if not self._running.locked() and not is_busy():
            for handle, task in list(self._tasks.items()):
                handle.offer(partial(self._run, handle, task, is_busy))
        return self._clock() + _LOOK_NS

    def _is_busy(self, registry: Registry, is_loading: Callable[[], bool]) -> bool:
        recent_ns = self._clock() - _QUIET_NS
        return is_loading() or any(
            handle.in_flight or handle.used_ns > recent_ns for _, _, handle in registry.used_sources()
        )

    def _run(self, handle: ModelHandle, task: IdleWork, is_busy: Callable[[], bool], execution: Execution) -> None:
        """Run a task on the thread of an instance, unless another one runs."""
        if not self._running.acquire(blocking=False):
            return
        try:
            task(execution, lambda: handle.is_ending or is_busy())
        except ExecutionLost:  # ends the instance
            raise
        except Exception:
            logger.exception("model %s: work while it was idle failed, and is not repeated", handle.spec.name)
            self.set(handle, None)
        finally:
            self._running.release()
