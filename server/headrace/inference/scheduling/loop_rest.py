"""Rests of the event loop between groups of rejected requests, under overload."""

from __future__ import annotations

from headrace.core.clock import NS_PER_MS, NS_PER_S
from headrace.core.completion import Mailbox

_MAX_REST_NS = 2 * NS_PER_MS
# One part in so many of the objective.
_OBJECTIVE_PARTS = 10


class LoopRest:
    """Schedules one rest for all rejections of one turn of the event loop. Ownership: the event loop.

    Under overload most requests are rejected as soon as they are read. If the loop woke up for each of them, on a full core each
    wake-up would interrupt a computation and replace the contents of its caches. So the loop takes them in groups, as network
    drivers moderate interrupts (J. C. Mogul, K. K. Ramakrishnan, Eliminating Receive Livelock in an Interrupt-Driven Kernel,
    USENIX 1996). A response that is done ends a rest.

    Args:
        mailbox: of the loop.
        objective_ns: latency objective of the model, 0 for none; a rest takes at most a tenth of it, and at most 2 ms.
    """

    __slots__ = ("_is_scheduled", "_limit_s", "_mailbox")

    def __init__(self, mailbox: Mailbox, objective_ns: int) -> None:
        self._mailbox = mailbox
        self._limit_s = min(objective_ns / _OBJECTIVE_PARTS or _MAX_REST_NS, _MAX_REST_NS) / NS_PER_S
        self._is_scheduled = False

    def schedule(self) -> None:
        """Rest after the events that the loop has read already."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._mailbox.loop.call_soon(self._rest)

    def _rest(self) -> None:
        self._is_scheduled = False
        self._mailbox.rest(self._limit_s)
