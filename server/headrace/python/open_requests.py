"""Requests of one process that end after their batch, or have any number of responses: the server's end.

A thread reads the responses of the process from a socket of their own (`headrace_model.streams` has the other end), and passes
credit and cancellations on. It starts with the first such request.

    begin(batch) -> RUN ... DONE -> returned(batch) or discard(batch)      instance's thread
    RESPONSE, RESPONSE, ..., final flag                                    reader's thread

The process runs foreign code: frames are checked, and a process that sends more than its credit is killed.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from headrace_model import protocol
from headrace_model.channel import Frames
from headrace_model.protocol import CREDIT_BYTES, HEADER, RESPONSE_HEAD, ProtocolError
from headrace_model.slots import START, Slot, SlotLease

from headrace.core.clock import NS_PER_MS, monotonic_ns
from headrace.core.completion import Completion
from headrace.core.errors import BatchLost, HeadraceError, ModelFailed, Overloaded
from headrace.core.limits import GIVE_WAY_NS
from headrace.core.request import InferResponse
from headrace.core.response_stream import MAX_RESPONSE_BYTES, MAX_RESPONSES
from headrace.core.tensor import Array
from headrace.python.outputs import ResponseOutputs, error_of, is_parameters
from headrace.runtimes.members import BatchMember, LateResult, MemberOutputs, MemberResult, Rescheduled, ResponseSink

logger = logging.getLogger("headrace.python")

# Cancelled requests are looked for so often while requests are open: one that is cancelled while its batch begins wakes nothing.
_POLL_MS = 50
# Consumed responses, or bytes of them, after which credit is sent without a WANT.
_CREDIT_AT = MAX_RESPONSES // 4
_CREDIT_BYTES_AT = MAX_RESPONSE_BYTES // 4
# A request with more responses or bytes that its client has not read waits for it before its next step: else the model would wait
# in `send`, and all other requests of the batch with it.
_ROOM_AT = MAX_RESPONSES // 2
_ROOM_BYTES_AT = MAX_RESPONSE_BYTES // 2
# Frames that are read before cancellations are passed on.
_MAX_FRAMES = 256
# A process whose end is known has its last responses in the socket.
_DRAIN_S = 10.0
# A process that has closed its socket is ending by itself; after this time it is killed.
_CLOSED_S = 3.0
_NO_FINAL_FLAG = (
    "the model dropped the response sender of the request without the final flag: its code must send "
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL with or after the last response"
)
_GAVE_WAY = (
    "the request has given way to a queued one: its client has not read its responses for 2 s, or has more open requests than "
    "another client that waits; read responses as they come, and send fewer requests at once"
)


class OpenMember:
    """One open request.

    Attributes:
        batch, index: number of its batch, and its place there.
        member: the request.
        late: its result; used if it has no sink.
        unconsumed, unconsumed_bytes: responses that its reader has not consumed.
        uncredited, uncredited_bytes: consumed responses that the process has no credit for yet.
        wants: the process waits for credit.
        cancelled: the process has been notified that nothing waits.
        ended: the process has ended the request.
        is_suspended: it is between two steps, in no batch.
        is_lost: the batch of its latest step has failed: its responses are dropped.
        unread_since_ns: monotonic time of the latest consumed response, or of the one that took the last room if that is later.
    """

    __slots__ = (
        "batch", "cancelled", "ended", "index", "is_lost", "is_suspended", "late", "member", "on_room",
        "unconsumed", "unconsumed_bytes", "uncredited", "uncredited_bytes", "unread_since_ns", "wants",
    )  # fmt: skip

    def __init__(self, batch: OpenBatch, index: int, member: BatchMember) -> None:
        self.batch = batch
        self.index = index
        self.member = member
        self.late = LateResult()
        self.unconsumed = self.unconsumed_bytes = self.uncredited = self.uncredited_bytes = self.unread_since_ns = 0
        self.wants = self.cancelled = self.ended = self.is_suspended = self.is_lost = False
        self.on_room: Callable[[], object] | None = None

    @property
    def key(self) -> tuple[int, int]:
        """Number of its first batch, and its index there."""
        return self.batch.number, self.index

    def when_room(self, callback: Callable[[], object]) -> bool:
        """Return True if its client has read enough of its responses; else the callback is called once it has."""
        with self.batch.lock:
            if self.has_room or self.ended:
                return True
            self.on_room = callback
            return False

    @property
    def has_room(self) -> bool:
        """True if the next step may send responses without waiting for their reader; with the lock."""
        return self.unconsumed < _ROOM_AT and self.unconsumed_bytes < _ROOM_BYTES_AT

    def is_unread(self, now_ns: int) -> bool:
        """Return True if its client has read none of many responses for `GIVE_WAY_NS`; with the lock."""
        return not self.has_room and now_ns - self.unread_since_ns >= GIVE_WAY_NS

    @property
    def sink(self) -> ResponseSink | None:
        """Takes its responses; None for a late result."""
        return self.member.sink

    def fail(self, error: HeadraceError) -> None:
        """Settle the request with an error, unless it is settled."""
        if self.sink is None:
            self.late.set(error)
        else:
            self.sink.end(error)


class OpenBatch:
    """Batch with requests that may be open.

    Attributes:
        number: number of the batch.
        members: its requests.
        lease: its slot; kept while a late result is missing, since its code may read the inputs.
        lock: that of `OpenRequests`.
        open: open requests by index.
        resumed: by index, open requests of earlier batches that have a further step in this one.
        left: requests without an end, without those of earlier batches.
        returned: `execute` has returned.
    """

    __slots__ = ("lease", "left", "lock", "members", "number", "open", "resumed", "returned")

    def __init__(
        self, number: int, members: Sequence[BatchMember], lease: SlotLease | None, lock: threading.Lock
    ) -> None:
        self.number = number
        self.lock = lock
        self.resumed: dict[int, OpenMember] = {}
        self.members = members
        self.lease = lease
        self.open: dict[int, OpenMember] = {}
        self.left = len(members)
        self.returned = False


class OpenRequests:
    """The open requests of one process. Any thread may call.

    Args:
        end: socket of the responses; owned.
        name: of the instance, for logs.
        kill: kills the process for the given reason.
        ended: set once the process is dead and its cause is known.
        cause: returns the cause of its end.

    Attributes:
        progress_ns: monotonic time of the latest frame.
        tensors: reads the outputs of responses; set before the first batch.
        decoupled: its requests have any number of responses; set before the first batch.
    """

    def __init__(
        self,
        end: socket.socket,
        name: str,
        kill: Callable[[str], None],
        ended: threading.Event,
        cause: Callable[[], str],
    ) -> None:
        end.setblocking(False)
        self.progress_ns = 0
        self.tensors: ResponseOutputs | None = None
        self.decoupled = False
        self._frames = Frames(end, protocol.RESPONSE_FRAME_BYTES)
        self._name = name
        self._kill, self._ended, self._cause = kill, ended, cause
        self._lock = threading.Lock()  # guards all that follows, and the attributes of members
        self._changed = threading.Condition(self._lock)
        self._batches: dict[int, OpenBatch] = {}
        self._open = 0  # requests without an end, of all batches
        self._wake = -1  # eventfd; wakes the thread
        self._has_cancelled = False  # a request was settled without its process
        self._wait_calls = self._read = 0  # calls of `wait_read`, and those that the thread has answered
        self._thread: threading.Thread | None = None
        self._drained = threading.Event()

    # On the instance's thread

    def begin(self, number: int, members: Sequence[BatchMember], lease: SlotLease) -> None:
        """Register a batch, before the process gets it."""
        batch = OpenBatch(number, members, None if self.decoupled else lease, self._lock)
        with self._lock:
            if self.decoupled:
                for index, member in enumerate(members):
                    if isinstance(member.open, OpenMember):
                        self._resume(batch, index, member.open)
                        continue
                    batch.open[index] = open_member = OpenMember(batch, index, member)
                    if member.sink is not None:
                        member.sink.responses.on_consumed = partial(self._consumed, open_member)
                        self._watch(member.completion)
            self._batches[number] = batch
            self._open += len(members)
        if self.decoupled:
            self._start()

    def _watch(self, completion: Completion) -> None:
        """Wake the thread as soon as a request is cancelled, so that its process is notified."""
        before = completion.after

        def after() -> None:
            if before is not None:
                before()
            if not isinstance(completion.outcome, InferResponse):
                with self._lock:
                    self._has_cancelled = True
                    if self._wake >= 0:
                        os.eventfd_write(self._wake, 1)

        completion.after = after

    def returned(self, number: int, results: list[MemberResult], has_open: bool) -> None:
        """Record that a batch has returned; late results take their places in `results`."""
        with self._lock:
            batch = self._batches[number]
            batch.returned = True
            for index, result in enumerate(results):
                if isinstance(result, LateResult):
                    results[index] = self._member(batch, index).late
                elif isinstance(result, Rescheduled) and self.decoupled:
                    result.open = member = batch.resumed.get(index) or batch.open[index]
                    self._suspend(member)
                elif result is not None:
                    self._end(batch, self._member(batch, index) if index in batch.open else None)
            if not batch.left:
                self._remove(batch)
        if has_open and not self.decoupled:
            self._start()

    def discard(self, number: int) -> None:
        """Forget a batch that has failed as a whole: the caller settles its requests."""
        with self._lock:
            batch = self._batches.get(number)
            if batch is not None:
                for member in batch.resumed.values():
                    member.is_lost = True
                    self._end(member.batch, member)
                    self._remove_ended(member.batch)
                self._open -= batch.left
                self._remove(batch)
                self._changed.notify_all()

    def fail(self, error: HeadraceError) -> None:
        """Settle the requests of batches that have returned with an error; the others are those of the instance's thread."""
        with self._lock:
            returned = [batch for batch in self._batches.values() if batch.returned]
            lost = [member for batch in returned for member in batch.open.values() if not member.ended]
            for batch in returned:
                self._remove(batch)
            running = self._batches.values()
            self._open = sum(
                batch.left + sum(not member.ended for member in batch.resumed.values()) for batch in running
            )
            self._changed.notify_all()
        for member in lost:
            member.fail(error)

    def wait_below(self, limit: int, timeout_s: float) -> bool:
        """Wait until fewer than `limit` requests are open, at most `timeout_s` seconds; True if they are."""
        with self._lock:
            return self._changed.wait_for(lambda: self._open < limit, timeout_s)

    def give_way(self, client: str, since_ns: int) -> None:
        """End an open request, so that the instance has room for a queued one; without effect if none must give way.

        One whose client has read nothing for `GIVE_WAY_NS` gives way to any request. Once the queued one has waited for as long,
        so does the latest of the client with the most, if that one has at least two more than the client of the queued one.

        Args:
            client: of the queued request.
            since_ns: its monotonic arrival.
        """
        now_ns = monotonic_ns()
        with self._lock:
            members = [
                member
                for batch in self._batches.values()
                for member in batch.open.values()
                if not (member.ended or member.is_suspended or member.member.completion.is_settled)
            ]
            counts = Counter(member.member.client for member in members)
            chosen = [member for member in members if member.is_unread(now_ns)]
            if not chosen and now_ns - since_ns >= GIVE_WAY_NS:
                chosen = [member for member in members if counts[member.member.client] > counts[client] + 1]
        if chosen:
            member = max(chosen, key=lambda each: (counts[each.member.client], each.key))
            member.fail(Overloaded(_GAVE_WAY))

    def wait_read(self) -> None:
        """Wait until all that the process has sent before is passed on: the failure of a batch must not overtake responses."""
        with self._lock:
            if self._thread is None or self._wake < 0:
                return
            self._wait_calls = wait_calls = self._wait_calls + 1
            os.eventfd_write(self._wake, 1)
            self._changed.wait_for(lambda: self._read >= wait_calls, _DRAIN_S)

    def wait_drained(self) -> None:
        """Wait until all responses of a dead process are passed on."""
        if self._thread is not None and not self._drained.wait(_DRAIN_S):
            logger.error("%s: the responses of its dead process were not read within %g s", self._name, _DRAIN_S)

    @property
    def is_waiting(self) -> bool:
        """True while a request has no room for further responses: the model may wait for its reader."""
        with self._lock:
            members = [member for batch in self._batches.values() for member in batch.open.values()]
            return any(member.wants and not member.ended and not member.cancelled for member in members)

    @property
    def count(self) -> int:
        """Number of open requests."""
        return self._open

    def shut(self) -> None:
        """End both directions of the socket, so that its reader ends after the last response."""
        with suppress(OSError):
            self._frames.end.shutdown(socket.SHUT_RDWR)

    # On the event loop

    def _consumed(self, member: OpenMember, count: int, size_bytes: int) -> None:
        with self._lock:
            member.unconsumed -= count
            member.unconsumed_bytes -= size_bytes
            member.uncredited += count
            member.uncredited_bytes += size_bytes
            member.unread_since_ns = monotonic_ns()
            self._credit(member)
            on_room = None
            if member.has_room:
                on_room, member.on_room = member.on_room, None
        if on_room is not None:
            on_room()

    # With `_lock` held

    def _resume(self, batch: OpenBatch, index: int, member: OpenMember) -> None:
        """Count a request in the batch of its next step."""
        batch.resumed[index] = member
        batch.left -= 1
        member.is_suspended = False
        if member.ended:  # its thread has sent the final flag between the steps
            self._open -= 1

    def _suspend(self, member: OpenMember) -> None:
        """Count a request that is scheduled again in no batch: it must not keep its instance from the next one."""
        if not member.ended:
            member.is_suspended = True
            self._open -= 1
            self._changed.notify_all()

    def _remove_ended(self, batch: OpenBatch) -> None:
        if batch.returned and not batch.left:
            self._remove(batch)

    def _member(self, batch: OpenBatch, index: int) -> OpenMember:
        member = batch.open.get(index)
        if member is None:
            member = batch.open[index] = OpenMember(batch, index, batch.members[index])
        return member

    def _remove(self, batch: OpenBatch) -> None:
        """Forget a batch, and break its reference cycles: they would keep its memory."""
        self._batches.pop(batch.number, None)
        for member in batch.open.values():
            if member.sink is not None:
                member.sink.responses.on_consumed = None
            member.on_room = None
        # Its `members` stay: the end of the last reference to a request runs code that takes the lock.
        batch.open, batch.resumed, batch.lease = {}, {}, None

    def _end(self, batch: OpenBatch, member: OpenMember | None) -> None:
        """Count a request as ended; `member` is None for one that was never open."""
        if member is not None:
            if member.ended:
                return
            member.ended = True
        batch.left -= 1
        if member is None or not member.is_suspended:
            self._open -= 1
        self._changed.notify_all()

    def _credit(self, member: OpenMember) -> None:
        """Send credit if there is enough of it, or the process waits for it."""
        if member.ended or member.cancelled or not member.uncredited:
            return
        enough = member.uncredited >= _CREDIT_AT or member.uncredited_bytes >= _CREDIT_BYTES_AT
        if enough or member.wants:
            body = CREDIT_BYTES.pack(member.uncredited_bytes)
            if self._send(protocol.CREDIT, member, member.uncredited, body):
                member.uncredited = member.uncredited_bytes = 0
                member.wants = False

    def _send(self, kind: int, member: OpenMember, count: int = 0, body: bytes = b"") -> bool:
        """Send a frame without waiting; False if the socket is full: the reader's thread tries again."""
        try:
            self._frames.send(kind, member.index, member.batch.number, count, body)
        except BlockingIOError:
            member.wants = member.wants or kind == protocol.CREDIT
            return False
        except OSError:  # it is dead
            return True
        return True

    # On the reader's thread

    def _start(self) -> None:
        """Start the thread, or wake it: it looks for cancelled requests only while there are requests."""
        with self._lock:
            if self._thread is None:
                self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                self._thread = threading.Thread(target=self._serve, name=f"{self._name} responses", daemon=True)
                self._thread.start()
            elif self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        poll, socket_fd = select.poll(), self._frames.end.fileno()
        poll.register(socket_fd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        passed_ns = 0
        try:
            while True:
                ready = [descriptor for descriptor, _events in poll.poll(_POLL_MS if self._batches else None)]
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                wait_calls = self._wait_calls
                if (socket_fd in ready or wait_calls != self._read) and not self._read_available(wait_calls):
                    break
                now_ns = monotonic_ns()
                if self._has_cancelled or now_ns - passed_ns >= _POLL_MS * NS_PER_MS:
                    passed_ns, self._has_cancelled = now_ns, False
                    self._pass_on()
        except Exception as error:  # anything that foreign code can send
            logger.exception("%s: a response does not follow the protocol", self._name)
            self._kill(f"a response does not follow the protocol: {error}")
        self._drained.set()
        self._confirm(sys.maxsize)
        if not self._ended.wait(_CLOSED_S):
            self._kill("it closed its socket of responses")
            self._ended.wait()
        with self._lock:
            os.close(self._wake)
            self._wake = -1
        model = self._name.partition("#")[0]
        ended = f"the process of model '{model}' ended while the request was open, which is not run again"
        self.fail(BatchLost(f"{ended}: {self._cause()}"))

    def _confirm(self, wait_calls: int) -> None:
        """End the waits for the frames that are read now."""
        if wait_calls != self._read:
            with self._lock:
                self._read = wait_calls
                self._changed.notify_all()

    def _read_available(self, wait_calls: int) -> bool:
        """Read the frames that are there, for `wait_calls` calls of `wait_read`; False if the socket has ended."""
        frames = self._frames
        for _ in range(_MAX_FRAMES):
            descriptors: list[int] = []
            try:
                size = frames.receive(descriptors)
                if not size:
                    return False
                self.progress_ns = monotonic_ns()
                self._handle(bytes(memoryview(frames.buffer)[:size]), descriptors)
            except BlockingIOError:
                self._confirm(wait_calls)
                return True
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
        return True

    def _handle(self, frame: bytes, descriptors: list[int]) -> None:
        _version, kind, flags, index, number, _count, size = HEADER.unpack_from(frame)
        if size != len(frame) - HEADER.size:
            raise ProtocolError(f"a body of {size} bytes in a frame of {len(frame)}")
        with self._lock:
            batch = self._batches.get(number)
            if batch is None:  # it has failed
                return
            if index >= len(batch.members):
                raise ProtocolError(f"a response of the request {index} of {len(batch.members)}")
            member = self._member(batch, index)
            if member.is_lost:
                return
            if kind == protocol.WANT:
                member.wants = True
                self._credit(member)
                return
        if kind != protocol.RESPONSE or member.ended:
            raise ProtocolError(f"a frame of the kind {kind}")
        if not flags & protocol.EMPTY:
            self._pass_response(member, frame, flags, descriptors)
        if flags & protocol.FINAL:
            self._finish(member, bool(flags & protocol.DROPPED))

    def _finish(self, member: OpenMember, is_dropped: bool) -> None:
        """End a request after its last response."""
        if member.sink is None:
            member.late.set(ModelFailed(_NO_FINAL_FLAG))  # without effect if the response was sent
        else:
            member.sink.end(ModelFailed(_NO_FINAL_FLAG) if is_dropped else None)
        with self._lock:
            self._end(member.batch, member)
            self._remove_ended(member.batch)

    def _pass_response(self, member: OpenMember, frame: bytes, flags: int, descriptors: list[int]) -> None:
        code, tensors, text_bytes, parameter_bytes, data_bytes = RESPONSE_HEAD.unpack_from(frame, HEADER.size)
        memory: bytes | Slot = frame
        if flags & protocol.SPILLED:
            if len(descriptors) != 1:
                raise ProtocolError(f"{len(descriptors)} memory files with a response")
            memory = Slot.received(descriptors.pop())
            memory.reach(START, data_bytes)
        inline = 0 if flags & protocol.SPILLED else data_bytes
        size_bytes = len(frame) - HEADER.size - inline + data_bytes
        if inline > len(frame) - HEADER.size - RESPONSE_HEAD.size:
            raise ProtocolError(f"values of {inline} bytes in a frame of {len(frame)}")
        self._count(member, size_bytes)
        reader = self.tensors
        assert reader is not None, "set before the first batch"
        at = HEADER.size + RESPONSE_HEAD.size
        end = len(frame) - inline
        start = START if isinstance(memory, Slot) else end
        outputs, error, at = reader.read(frame, at, tensors, memory, start, data_bytes)
        if at + text_bytes + parameter_bytes != end:
            raise ProtocolError(f"a response of {end - at} bytes behind its tensors")
        result: dict[str, Array] | HeadraceError = outputs
        if code != protocol.OK:
            text = frame[at : at + text_bytes].decode("utf-8", "replace")
            result = error_of(code, text or "the model returned an error without a text")
        elif parameter_bytes:
            parameters = json.loads(frame[at + text_bytes : end])
            if not is_parameters(parameters):
                raise ProtocolError("parameters of a response that are none")
            result = MemberOutputs(outputs, parameters)
        if error is not None:
            member.fail(error)
        elif member.sink is None:
            member.late.set(result)
        else:
            member.sink.send(result, size_bytes, bool(flags & protocol.FINAL))

    def _count(self, member: OpenMember, size_bytes: int) -> None:
        """Count a response against the credit of the process."""
        if member.sink is None:
            return
        with self._lock:
            # Consumed responses without credit count: the process has not been notified of them.
            held = member.unconsumed + member.uncredited
            held_bytes = member.unconsumed_bytes + member.uncredited_bytes
            if held and (held >= MAX_RESPONSES or held_bytes + size_bytes > MAX_RESPONSE_BYTES):
                raise ProtocolError(f"a response above the bound of {MAX_RESPONSES} responses of a request")
            had_room = member.has_room
            member.unconsumed += 1
            member.unconsumed_bytes += size_bytes
            if had_room:
                member.unread_since_ns = monotonic_ns()

    def _pass_on(self) -> None:
        """Notify the process of cancelled requests, and send credit for which the socket had no room."""
        with self._lock:
            for batch in self._batches.values():
                for member in batch.open.values():
                    if member.ended or member.cancelled:
                        continue
                    if member.member.completion.is_settled:
                        if batch.lease is not None and member.sink is None:
                            batch.lease.slot.cancel(member.index)
                            member.cancelled = True
                        else:
                            member.cancelled = self._send(protocol.CANCEL, member)
                    else:
                        self._credit(member)
