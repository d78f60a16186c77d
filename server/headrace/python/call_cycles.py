"""Processes of models that wait for each other's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from headrace_model.protocol import ProtocolError
from headrace_model.slots import START

from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError
from headrace.core.request import InferResponse
from headrace.core.response_stream import ResponseStream
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.python.process import RunningBatch
from headrace.runtimes.members import BatchMember


@dataclass(slots=True, eq=False, repr=False)
class ModelCall:
    """A call that is queued or running. On the event loop only.

    Attributes:
        caller: connection of the calling process.
        batch: number of the batch that makes the call; 0 for a call outside of a batch.
        parents: requests of the batch that wait for the call.
        chain: models that wait for the call, outermost first; the last one makes it.
        target: name and version of the called model.
        handle: the called version, leased.
        completion: of the call.
        end: first offset behind its inputs in the slot.
        replies: of a decoupled model; None for a call with one reply.
    """

    caller: CallingProcess
    batch: int
    parents: Sequence[BatchMember]
    chain: tuple[str, ...]
    target: str
    handle: VersionHandle
    completion: LoopCompletion | None = None
    end: int = START
    replies: CallReplies | None = None


class CallReplies:
    """Sends the responses of a decoupled model to the process that calls it. On the event loop only.

    One response at a time is in the slot of the call, until the process has taken it; the model's `send` has the bounds of any
    other request.

    Args:
        mailbox: of the event loop.
        write: sends a response, or an error in place of one; raises nothing.

    Attributes:
        stream: the responses on their way.
    """

    def __init__(self, mailbox: Mailbox, write: Callable[[InferResponse | HeadraceError], None]) -> None:
        self.stream = ResponseStream(mailbox)
        self._write = write
        self._is_in_slot = self._is_dropped = False
        self._on_end: Callable[[], None] | None = None

    def begin(self, completion: LoopCompletion, on_end: Callable[[], None]) -> None:
        """Send responses as they arrive; call `on_end` once the call is complete and all responses are taken or dropped."""
        self.stream.then(self._advance)
        completion.then(partial(self._end, on_end))
        self._advance()

    def take(self) -> None:
        """The process has taken the response in the slot; raises ProtocolError if there is none."""
        if not self._is_in_slot:
            raise ProtocolError("a response is taken that was not sent")
        self._is_in_slot = False
        self.stream.consumed()
        self._advance()

    def drop(self) -> None:
        """Send no more: the process waits for the end alone."""
        self._is_in_slot, self._is_dropped = False, True
        self._advance()

    def _end(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._advance()

    def _advance(self) -> None:
        if self._is_in_slot:
            return
        response = None if self._is_dropped else self.stream.take()
        if response is not None:
            self._is_in_slot = True
            self._write(response)
        elif self._on_end is not None:
            # The two refer to this object: without an end they would keep each other, and the slots, until a collection.
            on_end, self._on_end = self._on_end, None
            self.stream.close()
            on_end()


class CallingProcess:
    """The process of an instance, and its calls. On the event loop only, but for its construction.

    Args:
        caller: name and version of the calling model.
        running: returns the batch that the process runs.

    Attributes:
        caller: see above.
        calls: calls that are queued or running, by their numbers.
    """

    def __init__(self, caller: str, running: Callable[[], RunningBatch | None]) -> None:
        self.caller = caller
        self.calls: dict[int, ModelCall] = {}
        self._running_batch = running

    @property
    def running(self) -> RunningBatch | None:
        """The batch that the process runs; None between batches."""
        return self._running_batch()

    def blocking_calls(self) -> list[ModelCall]:
        """Return the calls for which the running batch waits."""
        running = self._running_batch()
        return [] if running is None else [call for call in self.calls.values() if call.batch == running.number]


def find_cycle(call: ModelCall, connections: Sequence[CallingProcess]) -> list[str]:
    """Return the models that would wait for each other for ever if a call were queued.

    The process of an instance waits until all calls of its batch are answered. A call waits for the instances that run it, or
    else until one instance of its model is free. An instance is stuck if no order of answers ever frees it: a knot of the
    wait-for graph. Models that make no calls, and pipelines between their steps, are never stuck.

    Args:
        call: the call, not queued yet.
        connections: connections of all processes that can make calls.

    Returns:
        The models in the order of their calls, the first one again at the end; empty if the call will be answered.
    """
    providers = [other for other in connections if other.caller == call.target]
    if len(providers) < max(call.handle.policy.instances, 1) or any(
        not other.calls and other is not call.caller for other in providers
    ):
        return []
    waits = {other: other.blocking_calls() for other in connections}
    waits[call.caller] = [*waits[call.caller], call]
    runs: dict[object, list[CallingProcess]] = {}
    for other in connections:
        running = other.running
        for member in () if running is None else running.members:
            if member.call is not None:
                runs.setdefault(member.call, []).append(other)
    free = {other for other, calls in waits.items() if not calls}

    def blockers(waiting: ModelCall) -> list[CallingProcess]:
        """Return the stuck instances that a call waits for; empty if it will be answered."""
        running = runs.get(waiting)
        if running is not None:
            return [other for other in running if other not in free]
        able = [other for other in connections if other.caller == waiting.target]
        if len(able) < waiting.handle.policy.instances or any(other in free for other in able):
            return []
        return able

    changed = True
    while changed:
        freed = {other for other in waits if other not in free and not any(map(blockers, waits[other]))}
        changed = bool(freed)
        free |= freed
    if call.caller in free:
        return []
    path = [call.caller]
    following = blockers(call)[0]
    while following not in path:
        path.append(following)
        following = next(found[0] for found in map(blockers, waits[following]) if found)
    return [other.caller for other in (*path[path.index(following) :], following)]
