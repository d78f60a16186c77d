"""Models of the engine process, as a front end sees them: `RemoteModels` and its handles implement the interfaces of
`headrace.wire.requests.services`.

Requests of one version that were decoded in one turn of the event loop are sent as one group, if they may share a batch. Each has
a completion of its own, which the answer of the engine settles on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.clock import monotonic_ns
from headrace.core.completion import LoopCompletion, Mailbox
from headrace.core.errors import HeadraceError, Unavailable
from headrace.core.request import InferRequest, InferResponse, ModelLoad
from headrace.core.tensor import Array, ModelSpec, ResidentRows, as_input, is_resident
from headrace.observability.counters import Recorder
from headrace.server.front_ends import frames
from headrace.server.front_ends.arena import ALIGNMENT, Arena
from headrace.server.front_ends.errors import restore_error
from headrace.server.front_ends.frame_stream import FrameStream
from headrace.server.front_ends.frames import CountEvent, FrameError, TensorPlace
from headrace.server.front_ends.remote_quotas import RemoteQuotas
from headrace.server.front_ends.remote_regions import RegionRange, can_name_regions, region_of, rows_in_engine
from headrace.server.front_ends.reported_loads import ReportedLoads
from headrace.server.front_ends.request_groups import MIN_SLOT_BYTES, are_in_regions, group_requests
from headrace.server.front_ends.tensors import BlockLayout, TensorReader, TensorWriter
from headrace.server.front_ends.version_table import VersionRow, decode_table
from headrace.wire.requests.tensor_codec import allocate_body

logger = logging.getLogger("headrace.front_ends")

ENGINE_LOST = "the engine process of this server is restarting: retry"
_REPLACED = "the model was replaced while the request arrived: retry"
# Codec times and events wait at most this long for a frame that carries them along.
_COUNTS_DELAY_S = 0.02
_MAX_CODEC_TIMES = 1024

_RECEIVED_NS, _ROWS, _INPUTS = attrgetter("received_ns"), attrgetter("rows"), attrgetter("inputs")

UINT8 = frames.datatype_number("UINT8")


class RemoteCompletion(LoopCompletion):
    """Completion of a request that the engine runs.

    Attributes:
        group: group of the request, None before it is sent and after the answer.
        received_ns: monotonic arrival of the request.
    """

    __slots__ = ("group", "received_ns")

    def __init__(self, mailbox: Mailbox, received_ns: int) -> None:
        super().__init__(mailbox)
        self.received_ns = received_ns
        self.group: Group | None = None

    def finish(self) -> None:
        """Remove a request that was not answered from its group: it was cancelled."""
        super().finish()
        group, self.group = self.group, None
        if group is not None:
            group.lose_member()


class Group:
    """Requests that were sent as one.

    Args:
        handle: of their version.
        number: of the group.
        completions: of the members.
        rows: of the members.
    """

    __slots__ = ("completions", "handle", "number", "room", "rows", "unanswered", "waiting")

    def __init__(
        self, handle: RemoteHandle, number: int, completions: Sequence[RemoteCompletion], rows: Sequence[int]
    ) -> None:
        self.handle, self.number = handle, number
        self.completions, self.rows = completions, rows
        self.room: npt.NDArray[np.uint8] | None = None  # slot for the outputs
        self.waiting = self.unanswered = len(completions)  # `waiting`: members that are not cancelled
        for completion in completions:
            completion.group = self

    def lose_member(self) -> None:
        """Count a cancelled member; without members that wait the engine stops the group."""
        self.waiting -= 1
        if not self.waiting:
            self.handle.models.cancel(self.number)


class RemoteRecorder(Recorder):
    """Passes the counts of a version that arise in the front end to the engine.

    Args:
        models: sends them.
        version: number of the version.
        histograms: the engine keeps histograms.
    """

    def __init__(self, models: RemoteModels, version: int, histograms: bool) -> None:
        super().__init__(histograms)
        self._models, self._version = models, version

    def record_codec_times(self, *times_ns: int) -> None:
        """Count the time to decode a request and to encode its response; `record_batch` counts the request itself."""
        if self._histograms:
            if not self._codecs_ns:
                self._models.expect_counts(self)
            self._codecs_ns.extend(times_ns)
            if len(self._codecs_ns) >= _MAX_CODEC_TIMES:
                self.flush()

    def flush(self) -> None:
        """Send the codec times."""
        if self._codecs_ns:
            self._models.send(frames.message_frame(frames.COUNTS, self._codecs_ns.tobytes(), self._version))
            del self._codecs_ns[:]

    def failure(self, reason: str, time_ns: int, answered_ns: int | None = None) -> None:
        """Count a request that failed."""
        if answered_ns is None and self._models.state.count_failure(self._version, reason, time_ns):
            return
        answered_ns = -1 if answered_ns is None else answered_ns
        self._models.add_event(CountEvent(self._version, "failure", reason, time_ns, answered_ns))

    def record_undelivered(self, requests: int, time_ns: int) -> None:
        """Count requests that were counted as answered although an error had ended them before; `failure` counts the error. One
        request at a time.
        """
        for _ in range(requests):
            self._models.add_event(CountEvent(self._version, "undelivered", "", time_ns // requests))

    def add_exemplar(self, total_ns: int, trace_id: str) -> None:
        """Make a traced request the exemplar of its bucket of `total`."""
        self._models.add_event(CountEvent(self._version, "exemplar", trace_id, total_ns))


class RemoteHandle:
    """A version that the engine serves; implements `headrace.wire.requests.services.Handle`. Ownership: the event loop.

    Args:
        models: sends its requests.
        row: of the version in the engine's table.

    Attributes:
        spec, recorder, has_cache: see `Handle`.
        number: of the version.
        pending: requests of this turn of the loop, with their completions.
        serves_regions: its requests may name shared memory of clients.
        row_bytes: outputs of one row, 0 if that differs from request to request.
    """

    def __init__(self, models: RemoteModels, row: VersionRow) -> None:
        self.models, self.row, self.number = models, row, row.number
        self.spec = row.spec
        self.recorder: Recorder = RemoteRecorder(models, row.number, row.histograms)
        self.has_cache = row.has_cache
        self.protocol_cache: dict[object, Any] = {}
        self.pending: list[tuple[InferRequest, RemoteCompletion]] = []
        self._mailbox = models.mailbox
        self._leases, self._is_retired = 0, False
        self.writer = TensorWriter(self.spec.inputs)
        self.reader = TensorReader(self.spec.outputs)
        self.row_bytes = _row_bytes(self.spec)
        self.serves_regions = can_name_regions(self.spec)

    def lease(self) -> None:
        """Take a lease."""
        self._leases += 1

    def release(self) -> None:
        """End a lease; the engine may close a retired version after the last one."""
        self._leases -= 1
        if self._is_retired and not self._leases:
            self.models.end_version(self)

    def retire(self) -> None:
        """Serve no further requests: the version is not in the table any more."""
        self._is_retired = True
        if not self._leases:
            self.models.end_version(self)

    def admit(self) -> None:
        """Accept: the engine checks the version."""

    def check_load(self, received_ns: int, deadline_ns: int, client: str) -> None:
        """Reject a request before it is decoded, if its model is overloaded by the engine's page; raises HeadraceError."""
        self.models.state.check_load(self.number, deadline_ns)

    def load(self, by_level: bool = True) -> ModelLoad:
        """Return the load of the version by the engine's page, without levels."""
        return self.models.state.load(self.number)

    def queue_load(self, _now_ns: int) -> tuple[int, int]:
        """Return the number of queued requests and the predicted wait in nanoseconds by the engine's page."""
        load = self.models.state.load(self.number)
        return load.depth, load.wait_ns

    def infer(self, request: InferRequest) -> LoopCompletion:
        """Send a request with the others of this turn of the loop; raises Unavailable while the engine restarts."""
        models = self.models
        if not models.is_attached:
            raise Unavailable(ENGINE_LOST)
        completion = RemoteCompletion(self._mailbox, request.received_ns)
        pending = self.pending
        if not pending:
            models.expect_requests(self)
        pending.append((request, completion))
        return completion

    def record_failure(self, error: HeadraceError, received_ns: int, answered: InferResponse | None = None) -> None:
        """Count a failed request; see `VersionHandle.record_failure`."""
        answered_ns = None if answered is None else answered.duration_ns(received_ns)
        self.recorder.failure(error.reason, max(monotonic_ns() - received_ns, 0), answered_ns)

    def groups(self) -> list[list[tuple[InferRequest, RemoteCompletion]]]:
        """Return the pending requests, cancelled ones excepted, as groups to send; there are none afterwards."""
        pending, self.pending = self.pending, []
        if len(pending) == 1:
            return [pending] if pending[0][1].outcome is None else []
        alive = [pair for pair in pending if pair[1].outcome is None]
        return group_requests(alive, self.row.max_group_rows, self.row_bytes)


def _row_bytes(spec: ModelSpec) -> int:
    start = 1 if spec.max_batch_size else 0
    sizes = [math.prod(each.shape[start:]) * each.datatype.size_bytes for each in spec.outputs.values()]
    return 0 if min(sizes, default=0) <= 0 else sum(sizes)


class RemoteModels:
    """The models of the engine. Ownership: the event loop.

    Args:
        loop: event loop of the front end.

    Attributes:
        mailbox: of the loop.
        is_attached: the engine is connected.
        state: page of the engine process; None before the first.
        quotas: of keys, which the engine charges.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._arena: Arena | None = None
        self.mailbox = Mailbox(loop)
        self.is_attached = False
        self.state = ReportedLoads()
        self.quotas = RemoteQuotas(loop, self.send)
        self._loop = loop
        self._stream: FrameStream | None = None
        self._on_closed: Callable[[], None] = lambda: None
        self._by_name: dict[tuple[str, str], RemoteHandle] = {}
        self._handles: dict[int, RemoteHandle] = {}
        self._groups: dict[int, Group] = {}
        self._next_group = 1
        self._dirty: list[RemoteHandle] = []
        self._counting: list[RemoteRecorder] = []
        self._events: list[CountEvent] = []
        self._counts_timer: asyncio.TimerHandle | None = None

    # Connection and table

    def new_arena(self) -> int:
        """Create the arena of the next connection; returns its descriptor, for the engine. Owned by this object."""
        self._close_arena()
        arena = self._arena = Arena()
        return arena.fd

    def _close_arena(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def allocate_body(self, size_bytes: int, head_bytes: int = 0) -> npt.NDArray[np.uint8]:
        """Allocate memory for a body, uint8[size_bytes], in the arena if it has room.

        Args:
            size_bytes: of the body.
            head_bytes: size of its header; the tensors behind it are aligned.
        """
        memory = None if self._arena is None else self._arena.allocate(size_bytes, head_bytes)
        return allocate_body(size_bytes, head_bytes) if memory is None else memory

    async def attached(
        self,
        sock: socket.socket,
        state: ReportedLoads | None = None,
        on_notice: Callable[[str, Any], None] = lambda *_: None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Use a connected stream; requests are accepted from now on.

        Args:
            sock: connected socket; owned by the stream from now on.
            state: shared page of this engine process; None for none.
            on_notice: called with name and content of each notice.
            on_closed: called once after the engine process has ended.
        """
        self.state = self.state if state is None else state
        self._on_closed = on_closed
        stream = self._stream = FrameStream(self._on_frame, self._on_lost, self._flush, on_notice)
        await stream.open(sock)
        self.is_attached = not stream.is_lost

    def detached(self) -> None:
        """End the stream: requests in flight fail as Unavailable, and new ones are refused until `attached`."""
        stream, self._stream = self._stream, None
        self.is_attached = False
        if stream is not None:
            stream.close()
        self._close_arena()
        self._fail_all()

    def apply_table(self, content: bytes) -> None:
        """Replace the table; raises ValueError for invalid content, which changes nothing.

        A version that is not in it any more serves the requests that have leased it.
        """
        by_name: dict[tuple[str, str], RemoteHandle] = {}
        handles: dict[int, RemoteHandle] = {}
        for row in decode_table(content):
            handle = self._handles.get(row.number)
            if handle is None:
                handle = RemoteHandle(self, row)
            handle.row = row  # names and limits may differ, tensor specs do not
            handles[row.number] = handle
            for version in row.requested_as:
                by_name[row.spec.name, version] = handle
        retired = [handle for number, handle in self._handles.items() if number not in handles]
        self._by_name, self._handles = by_name, handles
        for handle in retired:
            handle.retire()

    def serves(self, model: str, version: str) -> bool:
        """Return True if requests of this name and version are sent to the engine; they are passed whole otherwise."""
        handle = self._by_name.get((model, version))
        return handle is not None and not handle.spec.decoupled

    def is_decoupled(self, model: str, version: str) -> bool:
        """Return True for a version that sends any number of responses to a request."""
        handle = self._by_name.get((model, version))
        return handle is not None and handle.spec.decoupled

    def serves_regions(self, model: str, version: str) -> bool:
        """Return True if requests of a served model may name shared memory of clients; they are passed whole otherwise."""
        handle = self._by_name.get((model, version))
        return handle is not None and handle.serves_regions

    @property
    def in_flight(self) -> int:
        """Number of groups that wait for answers of the engine."""
        return len(self._groups)

    @property
    def arena_bytes_in_use(self) -> int:
        """Bytes of the arena that requests use."""
        return 0 if self._arena is None else self._arena.allocated_bytes

    def lease(self, name: str, version: str) -> RemoteHandle:
        """Lease a version; raises Unavailable, which a caller gets only if it has waited since `serves`."""
        handle = self._by_name.get((name, version))
        if handle is None:
            raise Unavailable(_REPLACED)
        handle.lease()
        return handle

    # Requests

    def expect_requests(self, handle: RemoteHandle) -> None:
        """Send the requests of a handle at the end of this turn of the loop."""
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.append(handle)

    def send(self, frame: frames.Buffer) -> None:
        """Send a frame; dropped while the engine is away."""
        if self._stream is not None:
            self._stream.write((frame,))

    def cancel(self, group: int) -> None:
        """Stop a group none of whose members waits. The engine answers it nevertheless, by an error or by a response."""
        self.send(frames.cancel_frame(group))

    def end_version(self, handle: RemoteHandle) -> None:
        """Release a retired version in the engine: it has no more requests here."""
        assert isinstance(handle.recorder, RemoteRecorder)
        handle.recorder.flush()
        self._flush_events()
        self.send(frames.message_frame(frames.RETIRED, number=handle.number))

    def _flush(self) -> None:
        """Send the requests of this turn; those of later turns too while the engine does not read."""
        stream = self._stream
        if stream is not None:
            if stream.is_full:
                return
            stream.is_scheduled = True
        dirty, self._dirty = self._dirty, []
        try:
            for handle in dirty:
                for pairs in handle.groups():
                    try:
                        self._send_group(handle, pairs)
                    except Exception as error:  # of one group: a parameter that has no form on the stream
                        logger.debug("a group of %d requests cannot be sent: %r", len(pairs), error)
                        for _, completion in pairs:
                            completion.settle(error)
        finally:
            if stream is not None:
                stream.flush()

    def _send_group(self, handle: RemoteHandle, pairs: Sequence[tuple[InferRequest, RemoteCompletion]]) -> None:
        if self._stream is None:
            raise Unavailable(ENGINE_LOST)
        number = self._next_group
        first = pairs[0][0]
        if ResidentRows in map(type, first.inputs.values()) and are_in_regions(first, handle.row_bytes):
            self._send_regions(handle, pairs)
            return
        if (
            first.size_bytes >= MIN_SLOT_BYTES
            or first.output_ranges
            or ResidentRows in map(type, first.inputs.values())
        ):
            if len(pairs) == 1 or not self._send_scattered(handle, pairs):
                for request, completion in pairs:
                    self._send_large(handle, request, completion)
            return
        requests, completions = zip(*pairs, strict=True)
        received_ns, member_rows = tuple(map(_RECEIVED_NS, requests)), tuple(map(_ROWS, requests))
        extras = frames.extras_of(first, handle.row.has_details) if len(requests) == 1 else None
        block, data, data_bytes = handle.writer.write(tuple(map(_INPUTS, requests)), sum(member_rows))
        parts = frames.requests_frame(number, handle.number, received_ns, member_rows, block, data, data_bytes, extras)
        self._next_group = number + 1
        self._groups[number] = Group(handle, number, completions, member_rows)
        self._stream.write(parts)

    def _send_large(self, handle: RemoteHandle, request: InferRequest, completion: RemoteCompletion) -> None:
        """Send a request whose large inputs are in slots of the arena, with a slot for large outputs; or which names regions."""
        arena, stream, number = self._arena, self._stream, self._next_group
        assert stream is not None
        inline: dict[str, Array] = {}
        places: list[TensorPlace] = []
        copies: list[Array] = []  # until the request counts as a user of their slots
        for name, array in request.inputs.items():
            if is_resident(array):
                places.append(handle.writer.region_place(name, array.shape, *region_of(array)))
                continue
            slot = None if array.nbytes < MIN_SLOT_BYTES else self._slot(handle, name, array, copies)
            if slot is None:
                inline[name] = array
            else:
                places.append(handle.writer.place(name, array, *slot))
        room = None
        if arena is not None and not request.output_ranges:
            room = self._room(arena, request.rows * handle.row_bytes, len(handle.spec.outputs), places)
        names = list(handle.spec.outputs)
        for name, (region, offset, size) in request.output_ranges.items():
            number_of = frames.OUTPUT + names.index(name)
            places.append(TensorPlace(number_of, UINT8, (size,), size, frames.REGION, offset, region=region))
        extras = frames.extras_of(request, handle.row.has_details)
        block, data, data_bytes = handle.writer.write((inline,), 0, "", places)
        parts = frames.requests_frame(
            number, handle.number, (request.received_ns,), (request.rows,), block, data, data_bytes, extras
        )
        self._next_group = number + 1
        group = self._groups[number] = Group(handle, number, (completion,), (request.rows,))
        group.room = room
        for place in places:
            if arena is not None and place.place == frames.SLOT:
                arena.use(place.slot)
        stream.write(parts)

    def _send_scattered(self, handle: RemoteHandle, pairs: Sequence[tuple[InferRequest, RemoteCompletion]]) -> bool:
        """Send requests with inputs of equal shapes as one group whose rows are in slots; False if the arena has no room."""
        arena, stream, number = self._arena, self._stream, self._next_group
        assert stream is not None
        if arena is None:
            return False
        copies: list[Array] = []  # until the requests count as users of their slots
        places: list[TensorPlace] = []
        slots: list[frames.Slot] = []
        for name, like in pairs[0][0].inputs.items():
            places.append(handle.writer.place(name, like, 0, 0, 0))
            for request, _ in pairs:
                slot = self._slot(handle, name, request.inputs[name], copies)
                if slot is None:
                    return False
                slots.append(slot)
        block, data = frames.tensor_block(places), frames.slots_data(slots)
        received_ns = [request.received_ns for request, _ in pairs]
        rows = [request.rows for request, _ in pairs]
        parts = frames.requests_frame(
            number, handle.number, received_ns, rows, block, (data,), len(data), is_scattered=True
        )
        self._next_group = number + 1
        self._groups[number] = Group(handle, number, [completion for _, completion in pairs], rows)
        for start, _, _ in slots:
            arena.use(start)
        stream.write(parts)
        return True

    def _send_regions(self, handle: RemoteHandle, pairs: Sequence[tuple[InferRequest, RemoteCompletion]]) -> None:
        """Send requests with inputs of equal shapes in shared memory of clients as one group."""
        stream, number, first = self._stream, self._next_group, pairs[0][0]
        assert stream is not None
        rows_of = [request.inputs[name] for name in first.inputs for request, _ in pairs]
        data = frames.regions_data([region_of(rows)[:2] for rows in rows_of if is_resident(rows)])
        received_ns = [request.received_ns for request, _ in pairs]
        rows = [request.rows for request, _ in pairs]
        extras = frames.extras_of(first, handle.row.has_details) if len(pairs) == 1 else None
        block = handle.writer.region_block(first.inputs)
        parts = frames.requests_frame(
            number, handle.number, received_ns, rows, block, (data,), len(data), extras, is_scattered=True
        )
        self._next_group = number + 1
        self._groups[number] = Group(handle, number, [completion for _, completion in pairs], rows)
        stream.write(parts)

    def _slot(self, handle: RemoteHandle, name: str, array: Array, copies: list[Array]) -> frames.Slot | None:
        """Return the slot of an input, into which it is copied if it was not received there; None if it cannot be in a slot.

        Args:
            handle: of the request.
            name: of the input.
            array: its elements.
            copies: gets the memory of a copy, to be kept until a request uses its slot.
        """
        arena = self._arena
        if arena is None or array.dtype.hasobject or array.dtype != handle.spec.inputs[name].datatype.dtype:
            return None
        slot = arena.find(array)
        if slot is None:
            memory = arena.allocate(array.nbytes)
            if memory is not None:
                np.copyto(np.ndarray(array.shape, array.dtype, memory.data), array)
                copies.append(memory)
                slot = arena.find(memory)
        return slot

    def _room(
        self, arena: Arena, size_bytes: int, outputs: int, places: list[TensorPlace]
    ) -> npt.NDArray[np.uint8] | None:
        """Allocate a slot for large outputs, and add it to the places of a request."""
        room = arena.allocate(size_bytes + ALIGNMENT * outputs) if size_bytes >= MIN_SLOT_BYTES else None
        if room is not None:
            slot = arena.find(room)
            assert slot is not None
            size = len(room)
            places.append(TensorPlace(frames.ROOM, UINT8, (size,), size, frames.SLOT, slot[2], slot[0], slot[1]))
        return room

    # Answers

    def _on_frame(self, buffer: bytes, start: int, end: int) -> None:
        if buffer[start + 4] == frames.ANSWERS:
            self._on_answers(frames.parse_answers(buffer, start, end), buffer)
            return
        kind, members, number, first, content = frames.parse_message(buffer, start, end)
        if kind == frames.ERROR:
            group = self._groups.get(number)
            if group is None:
                return
            completions = group.completions[first : first + members]
            self._end_members(group, completions)
            for completion in completions:
                completion.settle_now(restore_error(content))
        elif kind == frames.RELEASE:
            if self._arena is not None:
                for slot in content:
                    self._arena.release(*slot)
        elif kind == frames.CHARGED:
            self.quotas.on_charged(number, content)
        else:
            raise FrameError(f"the engine sent a frame of kind {kind}")

    def _on_answers(self, frame: frames.AnswersFrame, buffer: bytes) -> None:
        group = self._groups.get(frame.group)
        if group is None:
            raise FrameError(f"the engine answers group {frame.group}, which does not wait")
        handle, first, count = group.handle, frame.first, frame.members
        layout = handle.reader.layout(frame.block)
        outputs = handle.reader.read(layout, buffer, frame.data_start, frame.data_end)
        for spec, place in layout.regions:
            owner = RegionRange(place.region, place.offset, place.size_bytes)
            outputs[spec.name] = as_input(rows_in_engine(owner, spec.datatype.dtype, place.shape))
        if layout.slots:
            self._read_room(group, layout, outputs)
        response = frame.response
        response.closed = layout.text
        completions = group.completions[first : first + count]
        self._end_members(group, completions)
        if len(completions) != count:
            raise FrameError(f"an answer has {count} members from {first}, its group {len(group.completions)}")
        if count == 1:
            response.outputs = outputs
            _settle(handle, completions[0], response)
            return
        row, times, batch_rows, closed = 0, response.times, response.batch_rows, response.closed
        for completion, rows in zip(completions, group.rows[first : first + count], strict=True):
            end = row + rows
            part = {name: array[row:end] for name, array in outputs.items()}
            row = end
            _settle(
                handle,
                completion,
                InferResponse(part, times, batch_rows, closed, (), response.cached, None, response.done_ns),
            )

    def _read_room(self, group: Group, layout: BlockLayout, outputs: dict[str, Array]) -> None:
        """Add the outputs of an answer that are in the slot of its request, as views of the slot."""
        room, arena = group.room, self._arena
        if room is None or arena is None:
            raise FrameError(f"an answer to group {group.number} is in a slot that the request did not name")
        found = arena.find(room)
        assert found is not None
        for spec, place in layout.slots:
            start = place.offset - found[2]
            if not 0 <= start <= len(room) - place.size_bytes:
                raise FrameError(f"output '{spec.name}' is not in the slot of its request")
            outputs[spec.name] = np.ndarray(place.shape, spec.datatype.dtype, room.data, start)

    def _end_members(self, group: Group, completions: Sequence[RemoteCompletion]) -> None:
        """Count members as answered; the group ends with its last one."""
        for completion in completions:
            completion.group = None
        group.unanswered -= len(completions)
        if group.unanswered <= 0:
            self._groups.pop(group.number, None)

    def _on_lost(self, error: Exception | None) -> None:
        if self._stream is not None and self._stream.is_lost:
            logger.warning("the engine process has closed its stream: %s", error or "it ended")
            self._stream = None
            self.is_attached = False
            self._close_arena()
            self._fail_all()
            self._on_closed()

    def _fail_all(self) -> None:
        groups, self._groups = list(self._groups.values()), {}
        waiting = [completion for group in groups for completion in group.completions]
        dirty, self._dirty = self._dirty, []
        for handle in dirty:
            waiting += [completion for _, completion in handle.pending]
            handle.pending.clear()
        self._counting.clear()
        self._events.clear()
        for completion in waiting:
            completion.group = None
            completion.settle(Unavailable(ENGINE_LOST))
        self.quotas.fail_all(ENGINE_LOST)

    # Counts

    def expect_counts(self, recorder: RemoteRecorder) -> None:
        """Send the counts of a recorder soon."""
        self._counting.append(recorder)
        self._arm_counts()

    def add_event(self, event: CountEvent) -> None:
        """Send an event soon."""
        self._events.append(event)
        self._arm_counts()

    def _arm_counts(self) -> None:
        if self._counts_timer is None:
            self._counts_timer = self._loop.call_later(_COUNTS_DELAY_S, self.flush_counts)

    def flush_counts(self) -> None:
        """Send all counts now, e.g. before the engine answers a scrape."""
        if self._counts_timer is not None:
            self._counts_timer.cancel()
            self._counts_timer = None
        counting, self._counting = self._counting, []
        for recorder in counting:
            recorder.flush()
        self._flush_events()
        if self._stream is not None:
            self._stream.flush()

    def _flush_events(self) -> None:
        events, self._events = self._events, []
        if events:
            self.send(frames.message_frame(frames.EVENTS, events))


def _settle(handle: RemoteHandle, completion: RemoteCompletion, response: InferResponse) -> None:
    """Settle a request on the loop; an answer after its end counts as undelivered, since the engine has counted it."""
    if completion.claim(response):
        completion.wake()
    else:
        handle.recorder.record_undelivered(1, response.duration_ns(completion.received_ns))
