"""All that an instance holds on its GPU: streams, scratch memory, berths for its batches and their lanes.

Used with the device current, by the instance's thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from server.backends.tensorrt_berths import Berth, Sizes
from server.backends.tensorrt_lanes import Lane, output_shapes
from server.backends.tensorrt_plan import Plan, Shape, largest
from server.backends.tensorrt_stages import Ports
from server.core.errors import ModelFailed
from server.core.ledger import Kind
from server.cuda.driver import DeviceError, Stream
from server.cuda.memory import DeviceBuffer
from server.cuda.signals import works

logger = logging.getLogger("headrace.tensorrt")

# Shapes that come up only while the model serves get lanes of their own up to this number; the others share one a berth.
_LATE_SHAPES = 16

Shapes = tuple[Shape, ...]  # of the plan's inputs, in its order


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


class Dock:
    """Opened with `open`, closed with `close` whatever has become of that.

    Args:
        plan: what runs, shared with the other instances on the GPU.
        ports: tensors as callers see them.
        placement: where and how.
        buckets: numbers of rows that batches are padded to; none where there is no batch dimension.
        tell: is told once why a CUDA graph cannot be had.

    Attributes:
        berths: one for each batch under way.
        copying_in, computing, copying_out: the streams.
    """

    copying_in: Stream
    computing: Stream
    copying_out: Stream

    def __init__(
        self, plan: Plan, ports: Ports, placement: Placement, buckets: tuple[int, ...], tell: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._ports = ports
        self._placement = placement
        self._buckets = buckets
        self._tell = tell
        self._graphs = placement.graphs
        self._names = [tensor.name for tensor in plan.inputs]
        self._scratch = plan.allocator.device(Kind.SCRATCH)
        self._within: dict[str, DeviceBuffer] = {}
        self._streams: list[Stream] = []
        self._lanes: dict[tuple[int, Shapes], Lane] = {}
        self._shared: dict[int, Lane] = {}
        self._late: set[Shapes] = set()
        self.berths: list[Berth] = []

    def open(self) -> None:
        """Take memory for the largest batches, and make the lanes for all shapes that can be told.

        Raises:
            ConfigError: outputs cannot be served.
            DeviceError: the GPU has no memory left, or has failed.
        """
        for _ in range(3):
            self._streams.append(Stream())
        self.copying_in, self.computing, self.copying_out = self._streams
        self._scratch.reserve(self._plan.scratch_bytes)
        sizes = self._sizes()
        for name, size_bytes in sizes.within.items():
            self._within[name] = self._plan.allocator.device()
            self._within[name].reserve(size_bytes)
        within = {name: buffer.address for name, buffer in self._within.items()}
        for index in range(self._placement.depth):
            berth = Berth(index, self._ports, sizes, within, self._plan.allocator)
            self.berths.append(berth)
            for memory in berth.inputs.values():
                memory.clear(self.copying_in)
        self.copying_in.synchronize()
        for shapes in self._known_shapes():
            for berth in self.berths:
                self._new_lane(berth, shapes)
        self.synchronize()

    def ready(self, berth: Berth, shapes: Shapes) -> Lane | None:
        """The lane that there is for shapes of the plan's inputs in a berth; needs no GPU to be current."""
        return self._lanes.get((berth.index, shapes))

    def lane(self, berth: Berth, shapes: Shapes) -> Lane:
        """A lane for shapes of the plan's inputs in a berth where nothing is running and none is ready for them.

        Raises:
            ModelFailed: the plan does not take them.
            DeviceError: the GPU has no memory left, or has failed.
        """
        if shapes in self._late or len(self._late) < _LATE_SHAPES:
            self._late.add(shapes)
            return self._new_lane(berth, shapes)
        if berth.index not in self._shared:
            self._shared[berth.index] = Lane(self._plan, self._ports, berth, self._scratch.address)
        lane = self._shared[berth.index]
        lane.set_shapes(self._named(shapes), self.computing)
        return lane

    def synchronize(self) -> None:
        """Wait for everything that was queued.

        Raises:
            DeviceError: some of it failed.
        """
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Give everything back, after what still runs."""
        with contextlib.suppress(DeviceError):
            self.synchronize()
        # Streams and events free themselves; they must do so while the device is current.
        for lane in (*self._lanes.values(), *self._shared.values()):
            lane.close()
        self._lanes.clear()
        self._shared.clear()
        for berth in self.berths:
            berth.close()
        self.berths.clear()
        for buffer in (*self._within.values(), self._scratch):
            buffer.free()
        self._streams.clear()
        for name in ("copying_in", "computing", "copying_out"):
            if hasattr(self, name):
                delattr(self, name)

    def _known_shapes(self) -> Iterator[Shapes]:
        """What can be told at load: with free dimensions beside the batch, nothing."""
        shapes = [tensor.shape for tensor in self._plan.inputs]
        if self._buckets:
            if all(-1 not in shape[1:] for shape in shapes):
                yield from (tuple([(rows, *shape[1:]) for shape in shapes]) for rows in self._buckets)
        elif all(-1 not in shape for shape in shapes):
            yield tuple(shapes)

    def _sizes(self) -> Sizes:
        """Bytes of each tensor at the largest shapes that are served."""
        plan, sizes = self._plan, Sizes()
        context = plan.context(self._scratch.address)
        for number, shapes in largest(plan.profiles, self._buckets[-1] if self._buckets else 0):
            sizes.add(self._ports, shapes, output_shapes(plan, context, number, shapes, self.computing))
        return sizes

    def _new_lane(self, berth: Berth, shapes: Shapes) -> Lane:
        """A new lane that has run once, with its graph if one can be had."""
        lane = Lane(self._plan, self._ports, berth, self._scratch.address)
        lane.set_shapes(self._named(shapes), self.computing)
        lane.enqueue(self.computing)
        if self._graphs:
            with self._plan.collecting() as errors:
                try:
                    lane.capture(self.computing)
                except (ModelFailed, DeviceError) as error:
                    if not works():
                        raise
                    self._graphs = False
                    self._tell("; ".join([str(error), *list(errors)[-1:]]))
        self._lanes[berth.index, shapes] = lane
        return lane

    def _named(self, shapes: Shapes) -> dict[str, Shape]:
        return dict(zip(self._names, shapes, strict=True))
