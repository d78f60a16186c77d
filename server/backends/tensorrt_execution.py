"""One instance on a GPU: batches overlap in three streams, and nothing is allocated for those whose shapes were seen at load.

    copy in:   | rows of k+2 |                 each stage waits for the one before by an event; the host waits once a batch,
    compute:           | k+1 |                 asleep and without the interpreter's lock, for the end of its copy out
    copy out:                 | k |

A batch is padded up to a bucket of rows: then its shapes have a CUDA graph. Only the rows that are there are copied.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from server.backends.base import ExecutionLost, Flight
from server.backends.tensorrt_lanes import Berth, Lane, output_shapes, told
from server.backends.tensorrt_plan import Plan, Shape, buckets, choose_profile, largest, refused
from server.core.errors import HeadraceError, ModelFailed
from server.core.ledger import Kind
from server.core.tensor import Array
from server.cuda.driver import DeviceError, OutOfDeviceMemory, Stream, loaded, primary_context
from server.cuda.signals import works

logger = logging.getLogger("headrace.tensorrt")

# Shapes that come up only while the model serves get lanes of their own up to this number; the others share one a berth.
_LATE_SHAPES = 16
# What is remembered of padding; beyond that it is found out anew.
_ROUTES = 4096

_Shapes = tuple[Shape, ...]


class Placement(NamedTuple):
    """Where and how an instance runs.

    Attributes:
        device: number of the GPU.
        max_rows: rows in the largest batch; 0 if the model has no batch dimension.
        depth: batches under way at the same time.
        graphs: replay CUDA graphs.
    """

    device: int
    max_rows: int
    depth: int
    graphs: bool


class _Trip(NamedTuple):
    """A flight's way: the berth it is in, the lane it takes, the rows that are its own (0: all)."""

    berth: Berth
    lane: Lane
    rows: int


class _Working:
    """The GPU current in a thread; an error after which it does nothing any more becomes `ExecutionLost`. Has no state."""

    def __init__(self, context: Any, device: int, name: str) -> None:
        self._context = context
        self._device = device
        self._name = name

    def __enter__(self) -> None:
        self._context.push()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The error itself is not raised anew: frames in a cycle would keep streams alive that must go while the GPU is current.
        try:
            if error is None or isinstance(error, OutOfDeviceMemory):
                return
            if not isinstance(error, (HeadraceError, loaded().Error)):
                return
            if not works():
                message = f"GPU {self._device} has failed, {self._name} runs there no more: {error}"
                raise ExecutionLost(message) from error
            if not isinstance(error, HeadraceError):
                raise DeviceError(f"running {self._name} failed on the GPU: {error}") from error
        finally:
            loaded().Context.pop()


class TensorRtExecution:
    """See `server.backends.base.PipelinedExecution`. Opened and closed by the instance's thread.

    Ownership: berths go from `_free` through a flight back to `_free` (a deque: both threads touch its ends); lanes belong to
    their berth; everything else is the instance's thread's.

    Args:
        plan: what runs, shared with the other instances on the GPU.
        placement: where and how.
        tell: is told once why a CUDA graph cannot be had.

    Raises:
        ConfigError: the plan does not take batches of `max_rows` rows, or gives outputs that cannot be served.
        DeviceError: the GPU has no memory left, or has failed.
    """

    def __init__(self, plan: Plan, placement: Placement, tell: Callable[[str], None]) -> None:
        self.depth = placement.depth
        self._plan = plan
        self._placement = placement
        self._tell = tell
        self._graphs = placement.graphs
        self._buckets = buckets(plan.profiles, placement.max_rows) if placement.max_rows else ()
        self._check_buckets()
        self._working = _Working(primary_context(placement.device), placement.device, plan.name)
        self._scratch = plan.allocator.device(Kind.SCRATCH)
        self._streams: list[Stream] = []
        self._berths: list[Berth] = []
        self._free: deque[Berth] = deque()
        self._lanes: dict[tuple[int, _Shapes], Lane] = {}
        self._shared: dict[int, Lane] = {}
        self._late: set[_Shapes] = set()
        self._routes: dict[_Shapes, _Shapes] = {}
        self._inputs = {tensor.name: tensor.dtype for tensor in plan.inputs}
        with self._working:
            try:
                self._open()
            except BaseException:
                self._give_back()
                raise

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All outputs; see `server.backends.base.Execution.run`."""
        rows = next(iter(inputs.values())).shape[0] if self._buckets else 0
        flight = self._begin(inputs, rows)
        try:
            for name, array in inputs.items():
                np.copyto(flight.inputs[name], array)
        except BaseException:
            self.discard(flight)
            raise
        self.launch(flight)
        return self.finish(flight)

    def begin(self, like: Mapping[str, Array], rows: int) -> Flight:
        """A free flight; see `server.backends.base.PipelinedExecution.begin`."""
        return self._begin(like, rows)

    def launch(self, flight: Flight) -> None:
        """Queue copy in, compute and copy out."""
        trip = _trip(flight)
        berth = trip.berth
        try:
            with self._working:
                for name, values in flight.inputs.items():
                    berth.inputs[name].send(values, self._copying_in)
                berth.copied_in.record(self._copying_in)
                berth.copied_in.hold_back(self._computing)
                trip.lane.enqueue(self._computing)
                berth.computed.record(self._computing)
                berth.computed.hold_back(self._copying_out)
                for name, memory in berth.outputs.items():
                    memory.fetch(self._fetched(trip, name), self._copying_out)
                berth.copied_out.record(self._copying_out)
        except BaseException:
            # Some of it may be queued: nobody else may use the memory before it is over.
            with self._working:
                self._synchronize()
            self._free.append(berth)
            raise

    def finish(self, flight: Flight) -> dict[str, Array]:
        """Wait for a flight, and copies of its outputs."""
        trip = _trip(flight)
        berth = trip.berth
        try:
            with self._working:
                berth.copied_out.wait()
            return {name: memory.view(self._fetched(trip, name)).copy() for name, memory in berth.outputs.items()}
        finally:
            self._free.append(berth)

    def discard(self, flight: Flight) -> None:
        """Give a flight back that was not launched."""
        self._free.append(_trip(flight).berth)

    def close(self) -> None:
        """Give everything back, after what still runs."""
        with self._working:
            self._give_back()

    # Opening and closing, with the device current

    def _check_buckets(self) -> None:
        most = self._placement.max_rows
        if most and (not self._buckets or self._buckets[-1] < most):
            taken = f"batches of up to {self._buckets[-1]} rows" if self._buckets else "no batches"
            cure = "build it with a profile for max_batch_size, or lower max_batch_size"
            raise refused(self._plan.name, f"takes {taken}, max_batch_size is {most}", cure)

    def _open(self) -> None:
        for _ in range(3):
            self._streams.append(Stream())
        self._copying_in, self._computing, self._copying_out = self._streams
        self._scratch.reserve(self._plan.scratch_bytes)
        sizes = self._sizes()
        for index in range(self.depth):
            berth = Berth(index, self._plan, sizes)
            self._berths.append(berth)
            for memory in berth.inputs.values():
                memory.clear(self._copying_in)
        self._copying_in.synchronize()
        for shapes in self._known_shapes():
            for berth in self._berths:
                self._lane(berth, shapes)
        self._synchronize()
        self._free.extend(self._berths)

    def _known_shapes(self) -> Iterator[_Shapes]:
        """What can be told at load: with free dimensions beside the batch, nothing."""
        shapes = [tensor.shape for tensor in self._plan.inputs]
        if self._buckets:
            if all(-1 not in shape[1:] for shape in shapes):
                yield from (tuple([(rows, *shape[1:]) for shape in shapes]) for rows in self._buckets)
        elif all(-1 not in shape for shape in shapes):
            yield tuple(shapes)

    def _sizes(self) -> dict[str, int]:
        """Bytes of each tensor at the largest shapes that are served."""
        plan, sizes = self._plan, dict[str, int]()
        context = plan.context(self._scratch.address)
        items = {tensor.name: tensor.dtype.itemsize for tensor in (*plan.inputs, *plan.outputs)}
        for number, shapes in largest(plan.profiles, self._buckets[-1] if self._buckets else 0):
            outputs = output_shapes(plan, context, number, shapes, self._computing)
            for name, shape in (*shapes.items(), *outputs.items()):
                sizes[name] = max(sizes.get(name, 0), math.prod(shape) * items[name])
        return sizes

    def _give_back(self) -> None:
        with contextlib.suppress(DeviceError):
            self._synchronize()
        # Streams and events free themselves; they must do so while the device is current.
        for lane in (*self._lanes.values(), *self._shared.values()):
            lane.close()
        self._lanes.clear()
        self._shared.clear()
        self._free.clear()
        for berth in self._berths:
            berth.close()
        self._berths.clear()
        self._scratch.free()
        self._streams.clear()
        for name in ("_copying_in", "_computing", "_copying_out"):
            if hasattr(self, name):
                delattr(self, name)

    def _synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    # On the way

    def _begin(self, like: Mapping[str, Array], rows: int) -> Flight:
        self._check(like)
        shapes = [(rows, *like[name].shape[1:]) if rows else like[name].shape for name in self._inputs]
        exact = dict(zip(self._inputs, shapes, strict=True))
        padded = self._padded(exact, rows)
        berth = self._free.popleft()
        try:
            lane = self._lanes.get((berth.index, padded))
            if lane is None:
                with self._working:
                    lane = self._new_lane(berth, padded)
            views = {name: berth.inputs[name].view(shape) for name, shape in exact.items()}
        except BaseException:
            self._free.append(berth)
            raise
        return Flight(views, rows or 1, _Trip(berth, lane, rows))

    def _check(self, like: Mapping[str, Array]) -> None:
        if like.keys() != self._inputs.keys():
            raise ModelFailed(f"{self._plan.name} takes {', '.join(self._inputs)}, it was given {', '.join(like)}")
        for name, dtype in self._inputs.items():
            if like[name].dtype != dtype:
                raise ModelFailed(f"{self._plan.name} takes '{name}' as {dtype}, it was given as {like[name].dtype}")

    def _padded(self, exact: dict[str, Shape], rows: int) -> _Shapes:
        """The shapes that are run for these, in the order of the inputs."""
        asked = tuple(exact.values())
        found = self._routes.get(asked)
        if found is None:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            found = self._routes[asked] = self._route(exact, rows)
        return found

    def _route(self, exact: dict[str, Shape], rows: int) -> _Shapes:
        for bucket in self._buckets if rows else (0,):
            shapes = {name: (bucket, *shape[1:]) for name, shape in exact.items()} if rows else exact
            if bucket >= rows and choose_profile(self._plan.profiles, shapes) is not None:
                return tuple(shapes.values())
        raise ModelFailed(f"{self._plan.name} was not built for {told(exact)}: see optimization.profiles")

    def _new_lane(self, berth: Berth, shapes: _Shapes) -> Lane:
        """A lane for shapes that were not known at load: one of its own for the first few of them."""
        if shapes in self._late or len(self._late) < _LATE_SHAPES:
            self._late.add(shapes)
            return self._lane(berth, shapes)
        if berth.index not in self._shared:
            self._shared[berth.index] = Lane(self._plan, berth, self._scratch.address)
        lane = self._shared[berth.index]
        lane.set_shapes(self._named(shapes), self._computing)
        return lane

    def _lane(self, berth: Berth, shapes: _Shapes) -> Lane:
        """A new lane that has run once, with its graph if one can be had."""
        lane = Lane(self._plan, berth, self._scratch.address)
        lane.set_shapes(self._named(shapes), self._computing)
        lane.enqueue(self._computing)
        if self._graphs:
            with self._plan.collecting() as errors:
                try:
                    lane.capture(self._computing)
                except (ModelFailed, DeviceError) as error:
                    if not works():
                        raise
                    self._graphs = False
                    self._tell("; ".join([str(error), *list(errors)[-1:]]))
        self._lanes[berth.index, shapes] = lane
        return lane

    def _named(self, shapes: _Shapes) -> dict[str, Shape]:
        return dict(zip(self._inputs, shapes, strict=True))

    def _fetched(self, trip: _Trip, name: str) -> Shape:
        """Of an output's rows those that are not padding."""
        shape = trip.lane.outputs[name]
        bucket = next(iter(trip.lane.shapes.values()))[0] if trip.rows else 0
        return (trip.rows, *shape[1:]) if bucket and shape and shape[0] == bucket else shape


def _trip(flight: Flight) -> _Trip:
    assert isinstance(flight.handle, _Trip), "a flight goes back to the execution that began it"
    return flight.handle
