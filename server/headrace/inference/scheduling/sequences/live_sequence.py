"""A sequence with its queued requests, and the slots of an instance."""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from heapq import heappop, heappush

from headrace.core.completion import Completion
from headrace.core.request import InferRequest
from headrace.inference.scheduling.queue import Entry

CorrelationId = int | str
SequenceKey = CorrelationId | tuple[str, CorrelationId]
"""A correlation id, or the name of a client and its correlation id."""


class EndReason(StrEnum):
    """Reason of the end of a sequence, a label of the metrics."""

    END = "end"
    RESTART = "restart"  # START on its id
    IDLE = "idle"
    CANCELLED = "cancelled"  # a queued request was cancelled or timed out
    DIED = "died"  # the instance with its state
    UNLOADED = "unloaded"
    SHARE = "share"  # its client has more slots than one that waits


class RefusalReason(StrEnum):
    """Reason of the refusal of a request, a label of the metrics."""

    NOT_LIVE = "not_live"  # no START, and the id is not live
    QUEUE_FULL = "queue_full"
    UNLOADING = "unloading"
    ENDED = "ended"  # it was queued when its sequence ended


class SequenceEntry(Entry):
    """A request of a sequence, from its arrival to its outcome.

    Attributes:
        sequence_key: id of the sequence, with the client that it belongs to.
        correlation_id: id that the model gets; another one than the client sent while a sequence of another client has that.
        is_start, is_end: first and last request of its sequence.
        sequence: the sequence, once it is queued.
        slot: slot of the sequence on its instance while the request runs.
        number: order of arrival among all requests of the version; a later step has a new number.
        ready_ns: monotonic time at which its next step was queued.
        steps: batches that it has been part of.
        is_rescheduled: the model has scheduled it again in the running batch.
        is_held: its client has not read enough of its responses: the next step waits.
    """

    __slots__ = (
        "correlation_id", "is_end", "is_held", "is_rescheduled", "is_start", "number", "ready_ns", "sequence",
        "sequence_key", "slot", "steps",
    )  # fmt: skip

    def __init__(
        self,
        request: InferRequest,
        completion: Completion,
        enqueued_ns: int,
        correlation_id: CorrelationId,
        is_start: bool = False,
        is_end: bool = False,
        objective_ns: int = 0,
        client: str = "",
    ) -> None:
        super().__init__(request, completion, 0, enqueued_ns, objective_ns)
        self.sequence_key: SequenceKey = (client, correlation_id) if client else correlation_id
        self.correlation_id = correlation_id
        self.is_start, self.is_end = is_start, is_end
        self.sequence: LiveSequence | None = None
        self.slot = self.number = self.steps = 0
        self.ready_ns = enqueued_ns
        self.is_rescheduled = self.is_held = False


class LiveSequence:
    """A sequence from its START to its end.

    Attributes:
        key: its `sequence_key`.
        correlation_id: see `SequenceEntry`.
        client: name of its client, "" without one.
        waiting: queued requests, in the order of arrival.
        running: the request in the running batch of the instance; None without one.
        instance: instance with its slot; None while it waits for one.
        slot: number of the slot on the instance.
        is_closed: it accepts no more requests, and ends once its queued ones have run.
        is_over: it has ended.
        abort_reason: the reason for which it ends after its running request; "" for none.
        heir: the next sequence of the same id, which waits for the end of this one.
        before: the sequence whose heir this one is; None without one.
        keeps_slot: as an heir it takes over a slot from the sequence before it, which had no END; else it joins the backlog.
        idle_since_ns: monotonic time since which it has no request.
        end_reason: reason with which its end will be counted.
        started_ns: monotonic time at which it got its slot; before that, at which it joined the backlog.
    """

    __slots__ = (
        "abort_reason", "before", "client", "correlation_id", "end_reason", "heir", "idle_since_ns", "instance",
        "is_closed", "is_over", "keeps_slot", "key", "running", "slot", "started_ns", "waiting",
    )  # fmt: skip

    def __init__(self, key: SequenceKey, correlation_id: CorrelationId, client: str) -> None:
        self.key, self.correlation_id, self.client = key, correlation_id, client
        self.waiting: deque[SequenceEntry] = deque()
        self.running: SequenceEntry | None = None
        self.instance: InstanceSlots | None = None
        self.slot = 0
        self.is_closed = self.is_over = self.keeps_slot = False
        self.abort_reason = ""
        self.heir: LiveSequence | None = None
        self.before: LiveSequence | None = None
        self.idle_since_ns = self.started_ns = 0
        self.end_reason = EndReason.END


class InstanceSlots:
    """Slots of one instance.

    Args:
        index: index of the instance.
        count: number of slots.

    Attributes:
        sequences: the sequence of each slot that was used so far; None for a free one.
        used: number of slots with a sequence.
        ready: sequences with a queued request and none that runs, in the order in which they became so.
        running: sequences with a request in the running batch.
        is_open: False once the instance has ended.
    """

    __slots__ = ("_count", "_free", "index", "is_open", "ready", "running", "sequences", "used")

    def __init__(self, index: int, count: int) -> None:
        self.index, self._count = index, count
        self.sequences: list[LiveSequence | None] = []
        self._free: list[int] = []  # a heap: low slots keep the batches of the direct strategy short
        self.used = 0
        self.ready: dict[LiveSequence, None] = {}
        self.running: list[LiveSequence] = []
        self.is_open = True

    @property
    def has_free(self) -> bool:
        """True if a slot is free."""
        return self.used < self._count

    def assign(self, sequence: LiveSequence) -> None:
        """Give a sequence the lowest free slot."""
        assert self.has_free, "a slot is free"
        if not self._free:
            self._free.append(len(self.sequences))
            self.sequences.append(None)
        slot = heappop(self._free)
        assert self.sequences[slot] is None, "a slot has at most one live sequence"
        self.sequences[slot] = sequence
        sequence.instance, sequence.slot = self, slot
        self.used += 1

    def release(self, sequence: LiveSequence) -> None:
        """Free the slot of a sequence."""
        slot = sequence.slot
        assert self.sequences[slot] is sequence, "a slot is released once, by its own sequence"
        self.sequences[slot] = None
        heappush(self._free, slot)
        self.ready.pop(sequence, None)
        sequence.instance = None
        self.used -= 1
