"""Live sequences of a model version, their slots on the instances, and the backlog of sequences that wait for a slot.

    START -> slot -> (request, request, ...) -> END, idle time over, a queued request cancelled, or instance lost -> slot is free
      |                                                                                                             |
      +-> backlog, the client with the fewest slots first ----------------------------------------------------------+

`SequenceTable` neither locks nor reads a clock nor settles a completion: tests drive it in virtual time. Its invariants:

- A slot has at most one sequence, and a sequence at most one slot, from its first request to its end.
- At most one request of a sequence runs at a time, in the order of arrival.
- At most one of the sequences with one correlation id has a slot: a later one waits until the earlier one has ended.
- A request that leaves the queue without running ends its sequence: later requests would read a state that lacks it.
- A client with fewer slots gets the next one first. After GIVE_WAY_NS a sequence of a client with more slots gives way.
- A request of an iterative model is a sequence of its own. While the model schedules it again, it keeps its slot.

The rules are those of Triton's sequence batcher where they are documented; docs/sequences.md lists the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import nsmallest
from operator import attrgetter

from headrace.core.clock import NS_PER_MS, NS_PER_US
from headrace.core.errors import BadRequest, HeadraceError, Unavailable
from headrace.core.limits import GIVE_WAY_NS
from headrace.inference.scheduling.batching import CloseReason, WaitUntil
from headrace.inference.scheduling.policy import QueueLimits, SequencePolicy
from headrace.inference.scheduling.queue import Entry
from headrace.inference.scheduling.selector import Batch, queue_full
from headrace.inference.scheduling.sequences.backlog import Backlog
from headrace.inference.scheduling.sequences.live_sequence import (
    CorrelationId,
    EndReason,
    InstanceSlots,
    LiveSequence,
    RefusalReason,
    SequenceEntry,
    SequenceKey,
)

# Parameters by which the code of a Python model gets the sequence of a request; clients cannot send these names.
ID_PARAMETER = "headrace.sequence_id"
FLAGS_PARAMETER = "headrace.sequence_flags"
START_FLAG, END_FLAG = 1, 2

# Ended sequences whose reason is kept for the error of a later request.
_MAX_REASONS = 4096
_ENDED = "it has ended"
_MORE_THAN_ITS_SHARE = "its client uses more than its share of the slots and the queue, and another client waits"
# Weight of the latest sequence in the mean lifetime: one part in so many.
_LIFETIME_PARTS = 8
# Largest id that the server makes up; every CORRID input can hold it.
_MAX_NEW_ID = 2**31 - 1
# Predicted ends of the slots are used again for so long while no sequence starts or ends.
_SLOT_ENDS_NS = 10 * NS_PER_MS


class SequenceTable:
    """Decides which request of which sequence runs when and where; see the module.

    Args:
        policy: rules of the model.
        limits: bounds of all queued requests.
        retry_s: returns the delay in seconds after which a client should retry if the queue is full.

    Attributes:
        count: queued requests.
        size_bytes: memory of the queued requests.
        live: sequences between START and end.
        ends: sequences that have ended, by reason.
        refusals: requests that were refused because of their sequence, by reason.
        refused: queued requests that will not run, with their errors; the caller settles them.
        ended: sequences that have ended since the caller has set it to 0.
        touched: indices of instances with new work; the caller wakes and clears them.
        is_draining: no sequence starts any more, and those without a queued request have ended.
    """

    def __init__(self, policy: SequencePolicy, limits: QueueLimits, retry_s: Callable[[], float] = lambda: 1.0) -> None:
        self.policy, self.limits, self._retry_s = policy, limits, retry_s
        self.count = self.size_bytes = self.live = self.ended = 0
        self.ends: dict[str, int] = dict.fromkeys(EndReason, 0)
        self.refusals: dict[str, int] = dict.fromkeys(RefusalReason, 0)
        self.refused: list[tuple[SequenceEntry, HeadraceError]] = []
        self.touched: set[int] = set()
        self.is_draining = False
        self._sequences: dict[SequenceKey, LiveSequence] = {}  # the latest sequence of each id
        self._model_ids: set[CorrelationId] = set()  # ids of these sequences that the model gets
        self._instances: dict[int, InstanceSlots] = {}
        self._backlog = Backlog[LiveSequence]()
        self._idle: OrderedDict[LiveSequence, None] = OrderedDict()  # in the order of `idle_since_ns`
        self._reasons: OrderedDict[SequenceKey, str] = OrderedDict()
        self._numbers = self._ids = self._now_ns = 0
        self._lifetime_ns = 0.0  # mean time of the latest sequences on their slots; 0 before the first end
        self._slot_ends: list[int] = []  # cached result of `_predicted_ends`; [] after a change
        self._slot_ends_ns = 0

    # Requests

    def accepts(self, key: SequenceKey) -> bool:
        """Return True if a request without START may follow for this id."""
        sequence = self._sequences.get(key)
        return sequence is not None and not sequence.is_closed

    def add(self, entry: SequenceEntry, now_ns: int) -> None:
        """Queue a request of a sequence.

        Raises:
            BadRequest: the sequence is not live, and the request has no START.
            Overloaded: the queue is full; the sequence is as before.
            Unavailable: the version is being unloaded, and the request would start a sequence.
        """
        self._now_ns = now_ns
        if self._idle or self._backlog.count:
            self.expire(now_ns)
        sequence = self._sequences.get(entry.sequence_key)
        if entry.is_start:
            if self.is_draining:
                self.refusals[RefusalReason.UNLOADING] += 1
                raise Unavailable(
                    "the model is being unloaded and starts no sequences: start it again once the model is loaded"
                )
        elif sequence is None or sequence.is_closed:
            self.refusals[RefusalReason.NOT_LIVE] += 1
            raise BadRequest(self._not_live(entry.sequence_key))
        limits = self.limits
        if self.count >= limits.max_count and entry.is_start:
            self._make_room(entry.client)
        if self.count >= limits.max_count or (
            self.count and self.size_bytes + entry.size_bytes > limits.max_size_bytes
        ):
            self.refusals[RefusalReason.QUEUE_FULL] += 1
            raise queue_full(self.count, self.size_bytes, limits.max_count, limits.max_size_bytes, self._retry_s())
        if entry.is_start or sequence is None:
            sequence = self._begin(entry, sequence)
        if entry.correlation_id != sequence.correlation_id:
            entry.correlation_id = sequence.correlation_id
            if entry.member is not None and ID_PARAMETER in entry.member.parameters:
                parameters = {**entry.member.parameters, ID_PARAMETER: entry.correlation_id}
                entry.member = entry.member._replace(parameters=parameters)
        sequence.is_closed = entry.is_end or self.policy.is_iterative
        entry.sequence = sequence
        self._idle.pop(sequence, None)
        self._queue(sequence, entry)

    def slot_wait_ns(self, key: SequenceKey, now_ns: int) -> int:
        """Predict the time until a sequence that starts now has a slot, in nanoseconds; 0 if it gets one at once.

        Args:
            key: its id; it takes over the slot of a live sequence of this id.
            now_ns: monotonic.
        """
        self.expire(now_ns)
        latest, ahead = self._sequences.get(key), self._backlog.count
        if (latest is not None and not latest.is_closed) or not self._instances:
            return 0
        if not ahead and any(instance.has_free for instance in self._instances.values()):
            return 0
        ends = self._slot_ends
        if not ends or now_ns - self._slot_ends_ns >= _SLOT_ENDS_NS:
            ends = self._slot_ends = self._predicted_ends(now_ns)
            self._slot_ends_ns = now_ns
        rounds, place = divmod(ahead, len(ends))
        return max(ends[place] - now_ns, 0) + int(rounds * (self._lifetime_ns or self.policy.idle_ns)) + 1

    def _predicted_ends(self, now_ns: int) -> list[int]:
        """Return the predicted end of the sequence of each slot, monotonic and ascending; the present for a free slot.

        A sequence lives as long as the latest ones, one that is older for that time again. An idle one ends with its idle time.
        """
        idle_ns = self.policy.idle_ns
        lifetime_ns = int(self._lifetime_ns or idle_ns)
        ends: list[int] = []
        for instance in self._instances.values():
            for sequence in instance.sequences:
                if sequence is None or (sequence.is_closed and not self.policy.is_iterative):  # END has arrived
                    ends.append(now_ns)
                    continue
                end_ns = sequence.started_ns + lifetime_ns
                if end_ns <= now_ns:
                    end_ns = now_ns + lifetime_ns
                ends.append(min(end_ns, sequence.idle_since_ns + idle_ns) if sequence in self._idle else end_ns)
        ends.sort()
        return ends

    def release(self, entry: SequenceEntry) -> None:
        """Let the next step of a request run: its client has read enough of its responses."""
        entry.is_held = False
        if entry.queued and entry.sequence is not None:
            self._mark_ready(entry.sequence)

    def new_id(self, limit: int, is_text: bool) -> CorrelationId:
        """Return an id that no live sequence has, for a request without one.

        Args:
            limit: largest number of the model's ids.
            is_text: ids of the model are texts.
        """
        while True:
            self._ids = self._ids % limit + 1
            correlation_id: CorrelationId = str(self._ids) if is_text else self._ids
            if correlation_id not in self._model_ids:
                return correlation_id

    def discard(self, entry: SequenceEntry) -> None:
        """End the sequence of a queued request that was cancelled or timed out; a no-op once the request runs."""
        if entry.queued:
            assert entry.sequence is not None, "a queued request has a sequence"
            entry.sequence.end_reason = EndReason.CANCELLED
            self._abort(entry.sequence, "a queued request of it was cancelled or timed out", entry)

    def supersede(self, key: SequenceKey) -> None:
        """End the live sequence of an id once its queued requests have run: another version has a new sequence of that id."""
        sequence = self._sequences.get(key)
        if sequence is None or sequence.is_closed:
            return
        sequence.is_closed, sequence.end_reason = True, EndReason.RESTART
        if not sequence.waiting and sequence.running is None:
            self._finish(sequence, _ENDED)

    def expire(self, now_ns: int) -> None:
        """End the sequences that had no request for the idle time, and those that give way to clients with fewer slots."""
        self._now_ns = now_ns
        while self._backlog.count and now_ns - self._backlog.next.started_ns >= GIVE_WAY_NS and self._give_way():
            pass
        idle = self._idle
        while idle:
            sequence = next(iter(idle))
            if now_ns - sequence.idle_since_ns < self.policy.idle_ns:
                return
            sequence.end_reason = EndReason.IDLE
            self._finish(sequence, f"it had no request for {self.policy.idle_ns // NS_PER_US} us")

    @property
    def next_expiry_ns(self) -> int | None:
        """Monotonic time of the next call of `expire`: an idle sequence ends, or one gives way; None for none."""
        times_ns = [next(iter(self._idle)).idle_since_ns + self.policy.idle_ns] if self._idle else []
        if self._backlog.count:
            time_ns = self._backlog.next.started_ns + GIVE_WAY_NS
            if time_ns > self._now_ns:  # else it waits for the end of a running batch
                times_ns.append(time_ns)
        return min(times_ns, default=None)

    def _give_way(self) -> bool:
        """End a sequence of the client with the most slots, an idle one first, none that runs; False if there is none."""
        backlog = self._backlog
        client = max(backlog.slots, key=backlog.slots.__getitem__, default="")
        if not backlog.holds_more(client):
            return False
        candidates = [
            sequence
            for instance in self._instances.values()
            for sequence in instance.sequences
            if sequence is not None and sequence.client == client and sequence.running is None
        ]
        if not candidates:
            return False
        sequence = max(candidates, key=lambda each: (each in self._idle, each.started_ns))
        sequence.end_reason = EndReason.SHARE
        self._abort(sequence, _MORE_THAN_ITS_SHARE)
        return True

    def _make_room(self, client: str) -> None:
        """Refuse the last waiting sequence of the client with the most, if the queue is full and `client` has fewer."""
        waiting = {name: len(sequences) for name, sequences in self._backlog.clients.items()}
        other = max(waiting, key=waiting.__getitem__, default=client)
        if waiting.get(other, 0) > waiting.get(client, 0) + 1:
            sequence = next(reversed(self._backlog.clients[other]))
            sequence.end_reason = EndReason.SHARE
            self._abort(sequence, _MORE_THAN_ITS_SHARE)

    # Instances

    def open_instance(self, index: int) -> None:
        """Add the free slots of an instance."""
        self._instances[index] = InstanceSlots(index, self.policy.slots)
        self._fill()

    def close_instance(self, index: int, reason: str) -> None:
        """Remove an instance with its slots; its sequences end, those without a state wait for another slot."""
        instance = self._instances.pop(index, None)
        if instance is not None:
            instance.is_open = False
            self._end_all(instance, reason)

    def lose_state(self, index: int, reason: str) -> None:
        """End the sequences of an instance that has lost their state; it stays open for new ones."""
        self._end_all(self._instances[index], reason)

    def take(self, index: int, now_ns: int, closed: bool = False) -> Batch | WaitUntil | None:
        """Return the next batch of an idle instance.

        Args:
            index: the instance.
            now_ns: monotonic.
            closed: True if no request will arrive, so that waiting gains nothing.

        Returns:
            The batch, of one request each of several sequences; the time at which to call again; None without work.
        """
        instance = self._instances[index]
        assert not instance.running, "an instance runs one batch at a time"
        while instance.ready:
            answer = self._select(instance, now_ns, closed)
            if isinstance(answer, WaitUntil):
                return answer
            sequences, reason = answer
            entries: list[Entry] = []
            for sequence in sequences:
                entry = sequence.waiting[0]
                if entry.completion.is_settled:  # cancelled just now
                    self.discard(entry)
                    continue
                sequence.waiting.popleft()
                entry.queued, entry.slot = False, sequence.slot
                entry.is_rescheduled, entry.steps = False, entry.steps + 1
                self.count -= 1
                self.size_bytes -= entry.size_bytes
                sequence.running = entry
                instance.running.append(sequence)
                instance.ready.pop(sequence, None)
                entries.append(entry)
            if entries:
                return Batch(entries, reason, now_ns, len(entries))
        return None

    def finish_batch(self, index: int, now_ns: int) -> None:
        """Record the end of the running batch of an instance; a no-op without one."""
        self._now_ns = now_ns
        instance = self._instances.get(index)
        if instance is None:
            return
        finished, instance.running = instance.running, []
        for sequence in finished:
            entry, sequence.running = sequence.running, None
            if entry is not None and entry.is_rescheduled and self._requeue(sequence, entry, now_ns):
                continue
            if entry is not None and entry.steps > 1:
                entry.member = None
            if sequence.waiting:
                self._mark_ready(sequence)
            elif sequence.is_closed:
                self._finish(sequence, _ENDED)
            elif self.is_draining:
                sequence.end_reason = EndReason.UNLOADED
                self._finish(sequence, _ENDED)
            else:
                sequence.idle_since_ns = now_ns
                self._idle[sequence] = None

    # The version

    def drain(self) -> None:
        """Start no sequence any more; sequences end once they have no queued request, without an END."""
        self.is_draining = True
        for sequence in list(self._idle):
            sequence.end_reason = EndReason.UNLOADED
            self._finish(sequence, "the model was unloaded")

    def clear(self, reason: str) -> list[SequenceEntry]:
        """End all sequences; return the queued requests for the caller to settle. Running ones run to their end."""
        before, self.refused = self.refused, []
        for latest in list(self._sequences.values()):
            same_id = [latest]
            while (earlier := same_id[-1].before) is not None:
                same_id.append(earlier)
            for sequence in same_id:
                sequence.end_reason = EndReason.UNLOADED
                self._abort(sequence, reason)
        entries = [entry for entry, _ in self.refused]
        self.refused = before
        return entries

    @property
    def backlog(self) -> int:
        """Sequences that wait for a slot."""
        return self._backlog.count

    @property
    def slots(self) -> int:
        """Slots of all open instances."""
        return len(self._instances) * self.policy.slots

    @property
    def used_slots(self) -> int:
        """Slots with a sequence."""
        return sum(instance.used for instance in self._instances.values())

    # Steps of a sequence

    def _begin(self, entry: SequenceEntry, latest: LiveSequence | None) -> LiveSequence:
        key, correlation_id = entry.sequence_key, entry.correlation_id
        if latest is not None:
            correlation_id = latest.correlation_id
        elif correlation_id in self._model_ids:  # of another client: the model must not mix both
            correlation_id = self.new_id(_MAX_NEW_ID, isinstance(correlation_id, str))
        self._model_ids.add(correlation_id)
        sequence = self._sequences[key] = LiveSequence(key, correlation_id, entry.client)
        self._reasons.pop(key, None)
        self.live += 1
        if latest is None:
            self._backlog.add(sequence, self._now_ns)
            self._fill()
            if sequence.instance is None and any(map(self._backlog.holds_more, self._backlog.slots)):
                self.touched.update(self._instances)  # idle instances wait for a later time than that of `expire`
            return sequence
        sequence.keeps_slot = not latest.is_closed
        if not latest.is_closed:
            latest.end_reason = EndReason.RESTART
        latest.heir, sequence.before, latest.is_closed = sequence, latest, True
        if not latest.waiting and latest.running is None:
            self._finish(latest, _ENDED)
        return sequence

    def _fill(self) -> None:
        """Give free slots to the sequences of the backlog, on the instance with the fewest sequences first."""
        while self._backlog.count:
            free = [instance for instance in self._instances.values() if instance.has_free]
            if not free:
                return
            sequence = self._backlog.pop()
            self._assign(min(free, key=attrgetter("used", "index")), sequence)
            self._mark_ready(sequence)

    def _assign(self, instance: InstanceSlots, sequence: LiveSequence) -> None:
        instance.assign(sequence)
        self._backlog.count_slot(sequence.client, 1)
        sequence.started_ns, self._slot_ends = self._now_ns, []

    def _queue(self, sequence: LiveSequence, entry: SequenceEntry) -> None:
        self._numbers += 1
        entry.queued, entry.number = True, self._numbers
        sequence.waiting.append(entry)
        self.count += 1
        self.size_bytes += entry.size_bytes
        self._mark_ready(sequence)

    def _requeue(self, sequence: LiveSequence, entry: SequenceEntry, now_ns: int) -> bool:
        """Queue the next step of a request that the model has scheduled again; False if its sequence ends instead."""
        if sequence.abort_reason:
            self.refusals[RefusalReason.ENDED] += 1
            self.refused.append((entry, self._ended(sequence, sequence.abort_reason)))
            return False
        assert not sequence.waiting, "a sequence of an iterative model has one request"
        entry.ready_ns = now_ns
        self._queue(sequence, entry)
        if entry.completion.is_settled:  # cancelled or timed out while it ran
            self.discard(entry)
        return True

    def _mark_ready(self, sequence: LiveSequence) -> None:
        instance = sequence.instance
        if instance is not None and sequence.running is None and sequence.waiting and not sequence.waiting[0].is_held:
            instance.ready[sequence] = None
            self.touched.add(instance.index)

    def _abort(self, sequence: LiveSequence, reason: str, cause: SequenceEntry | None = None) -> None:
        """Refuse the queued requests of a sequence and end it, after its running one; `cause` is settled already."""
        for entry in sequence.waiting:
            entry.queued = False
            self.count -= 1
            self.size_bytes -= entry.size_bytes
            if entry.steps:
                entry.member = None  # it refers to the open request, whose sink refers to this entry
            if entry is not cause:
                self.refusals[RefusalReason.ENDED] += 1
                self.refused.append((entry, self._ended(sequence, reason)))
        sequence.waiting.clear()
        sequence.is_closed = True
        if sequence.instance is not None:
            sequence.instance.ready.pop(sequence, None)
        if sequence.running is None:
            self._finish(sequence, reason)
        else:
            sequence.abort_reason = reason
            self._remember(sequence, reason)

    def _end_all(self, instance: InstanceSlots, reason: str) -> None:
        instance.running = []
        for sequence in [each for each in instance.sequences if each is not None]:
            if sequence.running is None and sequence.waiting and sequence.waiting[0].is_start:
                instance.release(sequence)
                self._backlog.count_slot(sequence.client, -1)
                self._backlog.add(sequence, self._now_ns)
                continue
            sequence.running = None  # settled by the instance
            sequence.end_reason = EndReason.DIED
            self._abort(sequence, reason)
        self._slot_ends = []
        self._fill()

    def _finish(self, sequence: LiveSequence, reason: str) -> None:
        """End a sequence without requests: its slot goes to its heir or to the backlog."""
        if sequence.is_over:
            return
        sequence.is_over = sequence.is_closed = True
        self.live -= 1
        self.ended += 1
        self.ends[sequence.end_reason] += 1
        self._idle.pop(sequence, None)
        self._remember(sequence, reason)
        instance, heir, before = sequence.instance, sequence.heir, sequence.before
        self._backlog.discard(sequence)
        if instance is not None:
            instance.release(sequence)
            self._backlog.count_slot(sequence.client, -1)
            self._slot_ends = []
            lived_ns = self._now_ns - sequence.started_ns
            self._lifetime_ns += (lived_ns - self._lifetime_ns) / (_LIFETIME_PARTS if self._lifetime_ns else 1)
        sequence.heir = sequence.before = None
        if before is not None:  # it never had a slot: the sequence before it has
            before.heir = heir
        if heir is not None:
            heir.before = before
        elif before is not None:
            self._sequences[sequence.key] = before
        elif self._sequences.get(sequence.key) is sequence:
            del self._sequences[sequence.key]
            self._model_ids.discard(sequence.correlation_id)
        if heir is not None and before is None:
            self._succeed(heir, instance)
        self._fill()

    def _succeed(self, heir: LiveSequence, instance: InstanceSlots | None) -> None:
        """Give an heir a slot of the instance if it keeps it, else a place in the backlog."""
        if heir.keeps_slot and instance is not None and instance.is_open:
            self._assign(instance, heir)
            self._mark_ready(heir)
        else:
            self._backlog.add(heir, self._now_ns)

    def _select(
        self, instance: InstanceSlots, now_ns: int, closed: bool
    ) -> WaitUntil | tuple[list[LiveSequence], CloseReason]:
        """Return the sequences of the next batch, or the time until which it waits for more."""
        policy, ready = self.policy, list(instance.ready)
        oldest = min(ready, key=_head_number)
        shape_key = oldest.waiting[0].shape_key
        alike = [sequence for sequence in ready if sequence.waiting[0].shape_key == shape_key]
        count = min(len(alike), policy.max_rows)
        reason = CloseReason.IDLE
        if count == policy.max_rows:
            reason = CloseReason.FULL
        elif preferred := [rows for rows in policy.preferred_rows if rows <= count]:
            count, reason = max(preferred), CloseReason.PREFERRED
        elif self._is_held(len(alike)):
            until_ns = oldest.waiting[0].ready_ns + policy.max_delay_ns
            if closed or self.is_draining:
                reason = CloseReason.DRAIN
            elif now_ns < until_ns:
                return WaitUntil(until_ns)
            else:
                reason = CloseReason.DELAY
        return nsmallest(count, alike, key=_head_number), reason

    def _is_held(self, ready: int) -> bool:
        """Return True if a batch of `ready` sequences waits for more."""
        policy = self.policy
        if not policy.max_delay_ns:
            return False
        if not policy.is_direct:
            return True
        return policy.min_utilization > 0 and ready < policy.min_utilization * policy.slots

    # Errors

    def _remember(self, sequence: LiveSequence, reason: str) -> None:
        if reason is _ENDED or sequence.heir is not None:
            return
        self._reasons.setdefault(sequence.key, reason)
        if len(self._reasons) > _MAX_REASONS:
            self._reasons.popitem(last=False)

    def _ended(self, sequence: LiveSequence, reason: str) -> Unavailable:
        is_iterative = self.policy.is_iterative
        cure = "send the request again" if is_iterative else "start it again with sequence_start"
        text = f"sequence {_quoted(sequence.key)} has ended: {reason}; {cure}"
        return Unavailable(text, can_retry=is_iterative)

    def _not_live(self, key: SequenceKey) -> str:
        if self.policy.is_iterative:
            return (
                f"inference request for sequence {_quoted(key)} must specify the START flag on the first request of "
                "the sequence: the model is iterative, and each request is a sequence of its own; send it with sequence_start, "
                "or without sequence_id"
            )
        reason = self._reasons.get(key)
        detail = f" has ended: {reason}" if reason else " is not live: it was not started, or has ended"
        # The middle is Triton's text, which clients search for.
        return (
            f"inference request for sequence {_quoted(key)} must specify the START flag on the first request of the "
            f"sequence: sequence {_quoted(key)}{detail}; send its first request with sequence_start"
        )


def _head_number(sequence: LiveSequence) -> int:
    return sequence.waiting[0].number


def _quoted(key: SequenceKey) -> str:
    correlation_id = key[1] if isinstance(key, tuple) else key
    return str(correlation_id) if isinstance(correlation_id, int) else repr(correlation_id[:128])
