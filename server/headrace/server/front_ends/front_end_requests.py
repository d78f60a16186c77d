"""Requests of the front ends in the engine process: groups from their streams become requests of a version, and its responses
answers.

`FrontEndRequests` also makes the table of versions. A version in a front end's table is held for it: it is not closed before the
front end has stopped using it, so that requests that arrive during a reload are served.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.config.traffic_config import Traffic
from headrace.core.completion import GroupCompletion, LoopCompletion, Outcome
from headrace.core.errors import BadRequest, Cancelled, HeadraceError, Unavailable
from headrace.core.request import NO_PARAMETERS, NO_RANGES, GroupMembers, InferRequest, InferResponse
from headrace.core.scattered_rows import keep_apart
from headrace.core.shapes import CheckedShapes
from headrace.core.tensor import Array, Region, TensorSpec
from headrace.inference.scheduling.model_handle import ModelHandle
from headrace.inference.scheduling.version_handle import VersionHandle
from headrace.models.registry import Registry
from headrace.models.shared_memory import Pin, SharedMemoryRegions
from headrace.server.front_ends import frames
from headrace.server.front_ends.arena import ALIGNMENT, MappedArena
from headrace.server.front_ends.errors import describe_error
from headrace.server.front_ends.frame_stream import FrameStream
from headrace.server.front_ends.frames import (
    CountEvent,
    FrameError,
    RequestExtras,
    RequestsFrame,
    TensorPlace,
    parse_regions,
    parse_slots,
)
from headrace.server.front_ends.tensors import BlockLayout, TensorReader, TensorWriter
from headrace.server.front_ends.version_table import VersionRow, encode_table
from headrace.wire.requests.request_options import SharedRange
from headrace.wire.requests.request_template import RawInput, named_tensor, read_shared_input, write_shared_output
from headrace.wire.requests.services import Regions

logger = logging.getLogger("headrace.inference")

_REPLACED = "the model was replaced while the request arrived: retry"
_GONE = "the front-end process of the request has ended"


# Tensor blocks with checked shapes, for each version.
_MAX_BLOCKS = 4096


class ServedVersion:
    """A version that front ends send requests to. Ownership: the event loop.

    Args:
        handle: of the version.

    Attributes:
        handle: see Args.
        reader, writer: of its inputs and outputs.
    """

    def __init__(self, handle: VersionHandle) -> None:
        self.handle = handle
        self.reader = TensorReader(handle.spec.inputs)
        self.writer = TensorWriter(handle.spec.outputs)
        self._shapes = CheckedShapes(handle.spec)
        self._checked: dict[bytes, tuple[int, object]] = {}  # rows and shape key, by the key of a layout

    def region_request(
        self,
        frame: RequestsFrame,
        layout: BlockLayout,
        ranges: Sequence[Sequence[tuple[str, int]]],
        regions: Regions,
        first: int = 0,
    ) -> InferRequest:
        """Make the request of members of a group whose inputs are all in shared memory of clients.

        Args:
            frame: of the group.
            layout: its tensors, of one member.
            ranges: name and offset of the regions of each of the members, for each tensor.
            regions: of clients.
            first: number of the first member.

        Raises:
            FrameError: a tensor is not in a region.
            NotFound, BadRequest: a region does not exist, its range exceeds it, or names or shapes do not fit the model.
        """
        if layout.views or layout.slots or layout.ranges or layout.room:
            raise FrameError(f"a group of {len(frame.member_rows)} members has tensors that are not in regions")
        rows, shape_key = self._check_members(frame, layout, layout.regions)
        devices, size_bytes = self.handle.spec.resident_devices, frame.data_end - frame.data_start
        inputs: dict[str, Array] = {}
        pieces: dict[str, list[Array]] = {spec.name: [] for spec, _ in layout.regions}
        entries = [RawInput(spec, place.shape, prod(place.shape), place.size_bytes) for spec, place in layout.regions]
        for member in ranges:
            for entry, (name, offset) in zip(entries, member, strict=True):
                size_bytes += read_shared_input(entry, regions.find(name), offset, devices, inputs)
                pieces[entry.spec.name].append(inputs[entry.spec.name])
        if len(ranges) > 1:
            inputs = {name: keep_apart(parts) for name, parts in pieces.items()}
        received_ns = frame.received_ns[first : first + len(ranges)]
        request = InferRequest(
            inputs=inputs,
            rows=rows * len(ranges),
            shape_key=shape_key,
            received_ns=min(received_ns),
            size_bytes=size_bytes,
        )
        return request if frame.extras is None else _with_extras(request, frame.extras)

    def _check_members(
        self, frame: RequestsFrame, layout: BlockLayout, tensors: Sequence[tuple[TensorSpec, TensorPlace]]
    ) -> tuple[int, object]:
        """Return rows and shape key of each member of a scattered group; raises BadRequest."""
        checked = self._checked.get(layout.key)
        if checked is None:
            checked = self._shapes.rows({spec.name: _like(spec, piece) for spec, piece in tensors})
            self._add_checked(layout.key, checked)
        if frame.member_rows.count(checked[0]) != len(frame.member_rows):
            raise BadRequest(
                f"each request of a group has {checked[0]} rows, their frame says {list(frame.member_rows)[:16]}"
            )
        return checked

    def scattered_request(
        self, frame: RequestsFrame, layout: BlockLayout, buffer: bytes, arena: MappedArena | None
    ) -> InferRequest:
        """Make the request of a scattered group, for all its members; its inputs are `ScatteredRows` in the arena.

        Raises:
            FrameError: the frame does not follow the layout.
            BadRequest: names or shapes do not fit the model.
        """
        members = len(frame.member_rows)
        if arena is None or members < 2 or layout.views or layout.regions or layout.ranges or layout.room:
            raise FrameError(f"a group of {members} members has tensors that are not in slots, or no arena")
        slots_of = parse_slots(frame, buffer, len(layout.slots))
        on_gpu, size_bytes = bool(self.handle.spec.resident_devices), frame.data_end - frame.data_start
        inputs: dict[str, Array] = {}
        for (spec, piece), slots in zip(layout.slots, slots_of, strict=True):
            inputs[spec.name] = arena.scattered(piece, slots, spec.datatype.dtype, on_gpu)
            size_bytes += piece.size_bytes * members
        rows, shape_key = self._check_members(frame, layout, layout.slots)
        return InferRequest(
            inputs=inputs,
            rows=rows * members,
            shape_key=shape_key,
            received_ns=min(frame.received_ns),
            size_bytes=size_bytes,
        )

    def _add_checked(self, key: bytes, checked: tuple[int, object]) -> None:
        if key:
            if len(self._checked) >= _MAX_BLOCKS:
                self._checked.clear()
            self._checked[key] = checked

    def request(
        self,
        frame: RequestsFrame,
        layout: BlockLayout,
        buffer: bytes,
        size_bytes: int,
        arena: MappedArena | None,
        regions: Regions,
    ) -> InferRequest:
        """Make the request of a frame, for all its members; its inputs are views of the buffer and of the arena.

        Raises:
            FrameError: the frame does not follow the layout.
            BadRequest: names or shapes do not fit the model.
        """
        checked = self._checked.get(layout.key)
        inputs = self.reader.read(layout, buffer, frame.data_start, frame.data_end)
        for spec, tensor in layout.slots:  # none in most requests, and no regions
            if arena is None:
                raise FrameError(f"input '{spec.name}' is in a slot, and the front end has no arena")
            on_gpu = bool(self.handle.spec.resident_devices)
            inputs[spec.name] = arena.tensor(tensor, spec.datatype.dtype, on_gpu)
            size_bytes += tensor.size_bytes
        for spec, tensor in layout.regions:
            entry = RawInput(spec, tensor.shape, prod(tensor.shape), tensor.size_bytes)
            region, devices = regions.find(tensor.region), self.handle.spec.resident_devices
            size_bytes += read_shared_input(entry, region, tensor.offset, devices, inputs)
        if checked is None:
            checked = self._shapes.rows(inputs)
            self._add_checked(layout.key, checked)
        rows, shape_key = checked
        if rows != frame.rows:
            raise BadRequest(f"the inputs have {rows} rows, their frame says {frame.rows}")
        request = InferRequest(
            inputs=inputs,
            rows=rows,
            shape_key=shape_key,
            received_ns=frame.received_ns[0] if len(frame.received_ns) == 1 else min(frame.received_ns),
            size_bytes=size_bytes,
            parameters=NO_PARAMETERS,  # with the ranges: their defaults are functions
            output_ranges=NO_RANGES,
        )
        return request if frame.extras is None else _with_extras(request, frame.extras)


def _with_extras(request: InferRequest, extras: RequestExtras) -> InferRequest:
    request.id, request.priority, request.deadline_ns = extras.id, extras.priority, extras.deadline_ns
    request.queue_timeout_ns, request.client = extras.queue_timeout_ns, extras.client
    request.outputs, request.parameters = extras.outputs, extras.parameters or NO_PARAMETERS
    request.has_headers = extras.has_headers
    return request


def _like(spec: TensorSpec, place: TensorPlace) -> Array:
    """Return an array with the shape of a tensor that uses no memory."""
    array: Array = np.broadcast_to(spec.datatype.dtype.type(0), place.shape)
    return array


class FrontEndRequests:
    """Runs the requests of all front ends. Ownership: the event loop.

    Args:
        registry: its versions.
        on_traffic: called with a version whose requests have arrived and wait; cheap.
        pin: pins arenas for models on GPUs, as in `headrace.models.shared_memory`; None without GPUs.
        regions: shared memory that clients have registered; None if it is disabled.
        charge: takes a token from the quota of a key by its name; raises QuotaExceeded.
        on_answered: called with a version and the number of its requests before their answer is sent; cheap.

    Attributes:
        on_traffic, pin, regions, charge, on_answered: see Args.
        versions: by number, those of the last table, and those that a front end still holds.
    """

    def __init__(
        self,
        registry: Registry,
        on_traffic: Callable[[VersionHandle], None] = lambda _handle: None,
        pin: Pin | None = None,
        regions: Regions | None = None,
        charge: Callable[[str], None] = lambda _name: None,
        on_answered: Callable[[VersionHandle, int], None] = lambda _handle, _members: None,
    ) -> None:
        self.on_traffic, self.on_answered, self.pin, self.charge = on_traffic, on_answered, pin, charge
        self.regions: Regions = SharedMemoryRegions(False, None) if regions is None else regions
        self.versions: dict[int, ServedVersion] = {}
        self._registry = registry
        self._listed: frozenset[int] = frozenset()
        self._links: dict[int, FrontEndLink] = {}

    def table_bytes(self) -> bytes:
        """Return the table of the versions that serve now, for `RemoteModels.apply_table`.

        Every attached front end holds the versions of the table until it no longer uses them.
        """
        names: dict[VersionHandle, list[str]] = {}
        for version, handle in self._registry.selections():
            # The frames of the stream carry no sequence: requests of these models come through the proxy.
            if not handle.closing and not self._has_sequences(handle):
                names.setdefault(handle, []).append(version)
        self._listed = frozenset(handle.serial for handle in names)
        for handle in names:
            if handle.serial not in self.versions:
                self.versions[handle.serial] = ServedVersion(handle)
        for link in self._links.values():
            link.hold(names)
            link.pin_arena()
        self._forget_versions()
        return encode_table(
            _row(handle, versions, self._registry.traffic(handle.spec.name)) for handle, versions in names.items()
        )

    def attach(
        self,
        number: int,
        arena: int | None = None,
        on_notice: Callable[[str, Any], None] = lambda *_: None,
        on_closed: Callable[[], None] = lambda: None,
    ) -> FrameStream:
        """Return the stream that serves a front end, which the caller opens.

        Args:
            number: of the front end; an earlier process with this number is detached.
            arena: descriptor of its arena, owned from now on; None for none.
            on_notice: called with name and content of each notice.
            on_closed: called once after the stream has ended.
        """
        self.detach(number)
        link = self._links[number] = FrontEndLink(self, number, arena, on_notice, on_closed)
        link.hold(version.handle for serial, version in self.versions.items() if serial in self._listed)
        return link.stream

    def detach(self, number: int) -> None:
        """End the stream of a front end: its queued requests are cancelled, its versions and its arena released."""
        link = self._links.get(number)
        if link is not None:
            link.stream.close()

    def end_link(self, link: FrontEndLink) -> None:
        """Forget a front end whose stream has ended."""
        if self._links.get(link.number) is link:
            del self._links[link.number]
        self._forget_versions()

    def devices(self) -> frozenset[int]:
        """Return the numbers of the GPUs whose instances read inputs without a host copy."""
        devices: frozenset[int] = frozenset()
        return devices.union(*(version.handle.spec.resident_devices for version in self.versions.values()))

    def _has_sequences(self, handle: VersionHandle) -> bool:
        """Return True for a model with sequences, and for a pipeline that calls one."""
        if handle.policy.sequences is not None:
            return True
        steps = [self._registry.serving(name, "") for name in handle.calls]
        return any(self._has_sequences(step) for step in steps if step is not None)

    def _forget_versions(self) -> None:
        held = self._listed.union(*(link.held for link in self._links.values()))
        for number in [number for number in self.versions if number not in held]:
            del self.versions[number]


def _row(handle: VersionHandle, versions: Sequence[str], traffic: Traffic | None) -> VersionRow:
    is_model = isinstance(handle, ModelHandle)
    return VersionRow(
        handle.spec,
        handle.serial,
        tuple(versions),
        has_cache=handle.has_cache,
        has_details=not is_model or handle.policy.by_member,
        max_group_rows=handle.max_group_rows if isinstance(handle, ModelHandle) else 1,
        histograms=handle.recorder.has_histograms,
        sticky_header="" if traffic is None else traffic.sticky_header,
    )


class _Group(msgspec.Struct, eq=False):
    """A group of requests between its arrival and its last answer."""

    number: int  # given by the front end
    version: ServedVersion  # of its requests
    received_ns: Sequence[int]  # monotonic arrival of each member
    unanswered: int  # members without an answer
    completions: list[LoopCompletion] = []  # of its parts, to cancel them
    room: Room | None = None  # slot for its outputs, None for none
    targets: dict[str, OutputTarget] = {}  # shared memory of clients for outputs, by their names


class OutputTarget(NamedTuple):
    """Range of a client's shared memory that receives an output."""

    region: Region
    shared_range: SharedRange


def _write_targets(group: _Group, response: InferResponse) -> tuple[dict[str, Array], list[TensorPlace]]:
    """Write outputs to shared memory of clients; returns the other outputs, and the places of those.

    Raises:
        BadRequest: an output is larger than its range, or the memory no longer exists.
    """
    inline: dict[str, Array] = {}
    places: list[TensorPlace] = []
    for name, array in response.outputs.items():
        target = group.targets.get(name)
        if target is None:
            inline[name] = array
            continue
        region, (region_name, offset) = target.region, (target.shared_range.region, target.shared_range.offset)
        datatype = group.version.handle.spec.outputs[name].datatype
        size_bytes = write_shared_output(name, region, target.shared_range, array, datatype)
        places.append(group.version.writer.region_place(name, array.shape, region_name, offset, size_bytes))
    return inline, places


Room = tuple[npt.NDArray[np.uint8], TensorPlace]
"""Slot for the outputs of a request: its memory and its place."""


def _fill_room(
    room: Room, outputs: Mapping[str, Array], writer: TensorWriter
) -> tuple[dict[str, Array], list[TensorPlace]]:
    """Copy outputs into a slot; returns those that must go with the frame, and the places of the others."""
    memory, place = room
    inline: dict[str, Array] = {}
    places: list[TensorPlace] = []
    offset = 0
    for name, array in outputs.items():
        end = offset + array.nbytes
        if array.dtype.hasobject or not array.nbytes or end > len(memory):
            inline[name] = array
            continue
        np.copyto(np.ndarray(array.shape, array.dtype, memory.data, offset), array)
        places.append(writer.place(name, array, place.slot, place.generation, place.offset + offset))
        offset = end + -end % ALIGNMENT
    return inline, places


class FrontEndLink:
    """The engine's end of one front end. Ownership: the event loop.

    Args:
        requests: versions, and all links.
        number: of the front end.
        arena, on_notice, on_closed: see `FrontEndRequests.attach`.

    Attributes:
        number: see Args.
        stream: of the front end.
        held: versions that the front end may use, by number.
    """

    def __init__(
        self,
        requests: FrontEndRequests,
        number: int,
        arena: int | None,
        on_notice: Callable[[str, Any], None],
        on_closed: Callable[[], None],
    ) -> None:
        self.number = number
        self.stream = FrameStream(self._on_frame, self._on_lost, on_notice=on_notice)
        self._on_closed = on_closed
        self.held: dict[int, VersionHandle] = {}
        self._requests = requests
        self._groups: dict[int, _Group] = {}
        self._loop = asyncio.get_running_loop()
        self._released: deque[tuple[int, int]] = deque()  # appended by any thread
        self._is_releasing = False
        self._arena = None if arena is None else MappedArena(arena, self._release)
        self.pin_arena()

    def hold(self, handles: Iterable[VersionHandle]) -> None:
        """Keep versions open that are in the table of the front end from now on."""
        for handle in handles:
            if handle.serial not in self.held and handle.hold():
                self.held[handle.serial] = handle

    def _release_version(self, number: int) -> None:
        handle = self.held.pop(number, None)
        if handle is not None:
            handle.end_hold()

    def _on_frame(self, buffer: bytes, start: int, end: int) -> None:
        kind = buffer[start + 4]
        if kind == frames.REQUESTS:
            self._on_requests(frames.parse_requests(buffer, start, end), buffer, end - start)
        elif kind == frames.CANCEL:
            group = self._groups.get(frames.HEADER.unpack_from(buffer, start)[4])
            for completion in () if group is None else tuple(group.completions):
                completion.abandon()
        else:
            self._on_message(frames.parse_message(buffer, start, end))

    def _on_message(self, message: frames.MessageFrame) -> None:
        kind, content = message.kind, message.content
        if kind == frames.COUNTS:
            if len(content) % 16:
                raise FrameError(f"decode and encode times have {len(content)} bytes; each response has 16")
            version = self._requests.versions.get(message.number)
            if version is not None:
                version.handle.recorder.add_codec_times(content)
        elif kind == frames.EVENTS:
            for event in content:
                self._count(event)
        elif kind == frames.RETIRED:
            self._release_version(message.number)
        elif kind == frames.CHARGE:
            self._charge(message.group, content)
        else:
            raise FrameError(f"front end {self.number} sent a frame of kind {kind}")

    def _charge(self, number: int, name: str) -> None:
        """Charge the quota of a key, and send the result."""
        refusal = None
        try:
            self._requests.charge(name)
        except HeadraceError as error:
            refusal = describe_error(error)
        self.stream.write((frames.message_frame(frames.CHARGED, refusal, group=number),))

    def _count(self, event: CountEvent) -> None:
        version = self._requests.versions.get(event.version)
        if version is None:
            return
        recorder = version.handle.recorder
        if event.kind == "failure":
            recorder.failure(event.text, event.time_ns, None if event.answered_ns < 0 else event.answered_ns)
        elif event.kind == "undelivered":
            recorder.record_undelivered(1, event.time_ns)
        elif event.kind == "exemplar":
            recorder.add_exemplar(event.time_ns, event.text)

    def _on_requests(self, frame: RequestsFrame, buffer: bytes, size_bytes: int) -> None:
        members, number = len(frame.member_rows), frame.group
        version = self._requests.versions.get(frame.version) if frame.version in self.held else None
        if number in self._groups:
            raise FrameError(f"front end {self.number} sent group {number} twice")
        if version is None or not version.handle.lease(members):
            self._release(frames.slots_of(frame, buffer))
            self._write_error(number, 0, members, Unavailable(_REPLACED))
            return
        group = self._groups[number] = _Group(number, version, frame.received_ns, members)
        layout = version.reader.layout(frame.block, frame.is_scattered)
        ranges: Sequence[Sequence[tuple[str, int]]] = ()
        try:
            if frame.is_scattered and layout.regions:
                version.handle.admit()
                ranges = parse_regions(frame, buffer, len(layout.regions))
                request = version.region_request(frame, layout, ranges, self._requests.regions)
            elif frame.is_scattered:
                request = version.scattered_request(frame, layout, buffer, self._arena)
            else:
                if layout.room is not None or layout.ranges:
                    self._find_memory(group, layout)
                request = version.request(frame, layout, buffer, size_bytes, self._arena, self._requests.regions)
                if group.targets and not version.handle.has_cache:  # which stores arrays
                    devices = version.handle.spec.resident_devices
                    resident = [name for name, target in group.targets.items() if target.region.gpu in devices]
                    request.resident_outputs = frozenset(resident)
            version.handle.admit()
        except HeadraceError as error:
            if len(ranges) > 1:
                self._start_regions(group, frame, layout, ranges)
            else:
                self._settle(group, 0, members, error)
            return
        if members == 1:
            self._start(group, 0, request)
        elif request.rows <= version.handle.max_group_rows:
            request.members = GroupMembers(frame.received_ns, frame.member_rows)
            group.completions += version.handle.infer_group(request, partial(self._on_part_settled, group))
        else:  # the model has stopped merging requests since the table was sent
            self._start_each(group, frame, request)
        if group.unanswered:  # last: it defers work, and so has the wake-up of an instance
            self._requests.on_traffic(version.handle)

    def _find_memory(self, group: _Group, layout: BlockLayout) -> None:
        """Find the memory for the outputs of a request; raises as `ServedVersion.request`."""
        room = layout.room
        if room is not None and self._arena is not None:
            group.room = self._arena.view(room.slot, room.generation, room.offset, room.size_bytes), room
        if layout.ranges:
            group.targets = self._find_targets(group.version, layout)

    def _find_targets(self, version: ServedVersion, layout: BlockLayout) -> dict[str, OutputTarget]:
        """Look up the ranges for outputs in shared memory of clients; raises as `RequestTemplate.attach`."""
        names, targets = list(version.handle.spec.outputs), {}
        for number, tensor in layout.ranges:
            if number >= len(names):
                raise FrameError(f"an output has number {number}, the version has {len(names)}")
            region = self._requests.regions.find(tensor.region)
            with named_tensor(f"output '{names[number]}'"):
                region.check(tensor.offset, tensor.size_bytes)
            shared_range = SharedRange(tensor.region, tensor.offset, tensor.size_bytes)
            targets[names[number]] = OutputTarget(region, shared_range)
        return targets

    def _start_each(self, group: _Group, frame: RequestsFrame, request: InferRequest) -> None:
        """Queue the members of a group one by one."""
        row, size_bytes = 0, request.size_bytes // len(frame.member_rows)
        for index, rows in enumerate(frame.member_rows):
            part = {name: array[row : row + rows] for name, array in request.inputs.items()}
            row += rows
            received_ns = frame.received_ns[index]
            self._start(
                group, index, request.replace(inputs=part, rows=rows, received_ns=received_ns, size_bytes=size_bytes)
            )

    def _start_regions(
        self, group: _Group, frame: RequestsFrame, layout: BlockLayout, ranges: Sequence[Sequence[tuple[str, int]]]
    ) -> None:
        """Queue the members of a group in shared memory of clients one by one: some cannot be read."""
        for index, member in enumerate(ranges):
            try:
                part = group.version.region_request(frame, layout, (member,), self._requests.regions, index)
            except HeadraceError as error:
                self._settle(group, index, 1, error)
            else:
                self._start(group, index, part)
        if group.unanswered:
            self._requests.on_traffic(group.version.handle)

    def _start(self, group: _Group, index: int, request: InferRequest) -> None:
        """Queue one member."""
        try:
            completion = group.version.handle.infer(request)
        except Exception as error:  # any: the front end waits for an answer
            self._settle(group, index, 1, error)
            return
        group.completions.append(completion)
        if completion.woken:  # the request ran on the event loop
            self._settle(group, index, 1, completion.outcome)
        else:
            completion.then(partial(self._on_settled, group, index, completion))

    def _on_settled(self, group: _Group, index: int, completion: LoopCompletion) -> None:
        self._settle(group, index, 1, completion.outcome)

    def _on_part_settled(self, group: _Group, completion: GroupCompletion) -> None:
        self._settle(group, completion.first, len(completion.members.rows), completion.outcome)

    def _settle(self, group: _Group, first: int, members: int, outcome: Outcome | None) -> None:
        """Answer members of a group, and release their leases; never raises."""
        group.unanswered -= members
        if not group.unanswered:
            self._groups.pop(group.number, None)
            group.completions.clear()
        handle = group.version.handle
        self._requests.on_answered(handle, members)  # these requests are in flight still
        try:
            if self.stream.is_lost:
                self._count_lost(group, first, members, outcome)
            elif isinstance(outcome, InferResponse):
                self._write_answer(group, first, members, outcome)
            else:
                self._write_error(group.number, first, members, outcome or Unavailable(_GONE))
        except Exception as error:
            self._write_error(group.number, first, members, error)
        finally:
            handle.release(members)

    def _write_answer(self, group: _Group, first: int, members: int, response: InferResponse) -> None:
        writer, outputs = group.version.writer, response.outputs
        if group.targets:
            try:
                inline, slots = _write_targets(group, response)
            except HeadraceError:  # counted as answered by its batch
                self._count_undelivered(group, response)
                raise
            block, data, data_bytes = writer.write((inline,), 0, response.closed, slots)
        elif group.room is None:
            block, data, data_bytes = writer.write((outputs,), 0, response.closed)
        else:
            inline, slots = _fill_room(group.room, outputs, writer)
            block, data, data_bytes = writer.write((inline,), 0, response.closed, slots)
        self.stream.write(frames.answers_frame(group.number, first, members, response, block, data, data_bytes))

    def _write_error(self, group: int, first: int, members: int, error: BaseException) -> None:
        self.stream.write((frames.message_frame(frames.ERROR, describe_error(error), first, group, members),))

    def pin_arena(self) -> None:
        """Pin the arena if a model on a GPU reads it."""
        if self._arena is not None and self._requests.pin is not None:
            self._arena.start_pinning(self._requests.pin, self._requests.devices())

    def _release(self, slots: Sequence[tuple[int, int]]) -> None:
        """Release slots in the front end; any thread may call."""
        self._released.extend(slots)
        if not self._is_releasing:
            self._is_releasing = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._send_released)

    def _send_released(self) -> None:
        self._is_releasing = False
        released = self._released
        slots = [released.popleft() for _ in range(len(released))]
        if slots and not self.stream.is_lost:
            self.stream.write((frames.message_frame(frames.RELEASE, slots),))

    def _count_undelivered(self, group: _Group, response: InferResponse) -> None:
        for received_ns in group.received_ns:
            group.version.handle.recorder.record_undelivered(1, response.duration_ns(received_ns))

    def _count_lost(self, group: _Group, first: int, members: int, outcome: Outcome | None) -> None:
        """Count requests whose front end has ended, as cancelled: it cannot count them any more."""
        response = outcome if isinstance(outcome, InferResponse) else None
        for received_ns in group.received_ns[first : first + members]:
            group.version.handle.record_failure(Cancelled(_GONE), received_ns, response)

    def _on_lost(self, error: Exception | None) -> None:
        if error is not None:
            logger.warning("the stream of front end %d has ended: %s", self.number, error)
        for group in list(self._groups.values()):
            for completion in tuple(group.completions):
                completion.abandon()
        for number in tuple(self.held):
            self._release_version(number)
        if self._arena is not None:
            self._arena.close()
        self._requests.end_link(self)
        self._on_closed()
