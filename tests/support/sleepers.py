"""Threads of instances that wait for a batch: tests wait until some sleep, and hold one."""

from __future__ import annotations

import threading

from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.scheduler import InlineDispatch, Scheduler


def sleepers(owner: ModelHandle | Scheduler) -> list[threading.Lock]:
    """Return the locks of the sleeping threads; the last one wakes first."""
    return _scheduler(owner)._sleepers


def inline_dispatches(owner: ModelHandle | Scheduler) -> dict[threading.Lock, InlineDispatch]:
    """Return what runs a batch in place of each thread that sleeps without a timeout."""
    return _scheduler(owner)._inline_dispatches


def _scheduler(owner: ModelHandle | Scheduler) -> Scheduler:
    return owner if isinstance(owner, Scheduler) else owner._scheduler
