"""A lane is a shape that is ready to run in a berth.

It owns its execution context: its shapes and addresses are set once, so that nothing is set while it serves, and a CUDA graph
stays true ("Graphs captured with TensorRT are specific to the input size and the state of the execution context": TensorRT
documentation, "CUDA Graphs"). The contexts of an instance share their scratch memory: its compute stream runs one at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from headrace.backends.base import Resident
from headrace.backends.tensorrt.api import Choice
from headrace.backends.tensorrt.buffers import ALONE, BESIDE, Berth, RowTable, Sizes, gather
from headrace.backends.tensorrt.plan import (
    Launch,
    Plan,
    Ports,
    Shape,
    Shapes,
    buckets,
    choose_profile,
    largest,
    refused,
)
from headrace.core.errors import ModelFailed
from headrace.core.ledger import Kind
from headrace.core.tensor import Array
from headrace.cuda.driver import DeviceError, Stream, works
from headrace.cuda.graphs import Graph
from headrace.cuda.kernels.launching import RowGather
from headrace.cuda.memory import DeviceBuffer

# All that an instance holds on its GPU: streams, scratch memory, berths for its batches and their lanes.
#
# Used with the device current, by the instance's thread.


_NOTHING: Mapping[str, Launch] = {}
# A flight of up to so many rows, if it is one graph, has as few steps as can be: resident rows are prepared where they lie, and
# what the GPU makes of the outputs is written over the bus at once. With more rows copies are faster, and kernels that read over
# the bus would keep multiprocessors waiting.
_FEW_ROWS = 4


class Lane:
    """A context with shapes and addresses set.

    Args:
        plan: what runs.
        ports: tensors as callers see them.
        berth: whose memory it works in.
        scratch: address of the instance's scratch memory.
        batched: True if the first dimension of all that callers send is rows.

    Attributes:
        lone: its flights are one graph only while nothing else of the instance is in the air: then nothing could overlap.
        rows: in its batches; 1 if there is no batch dimension.
        shapes: of the plan's inputs, as last set.
        direct: a flight of few rows that is one graph has no copies that can be spared; tells the next capture.
        inputs: shapes of what callers send, by name.
        outputs: of what they get.
    """

    def __init__(self, plan: Plan, ports: Ports, berth: Berth, scratch: int, batched: bool) -> None:
        self._plan = plan
        self._ports = ports
        self._berth = berth
        self._batched = batched
        self._context = plan.context(scratch)
        self._graph: Graph | None = None
        self._flight: Graph | None = None
        self._gathered: Graph | None = None
        self._made: dict[str, Shape] = {}
        self.lone = False
        self.direct = True
        self.rows = 1
        self.shapes: dict[str, Shape] = {}
        self.inputs: dict[str, Shape] = {}
        self.outputs: dict[str, Shape] = {}
        for name, address in berth.addresses.items():
            self._context.set_tensor_address(name, address)

    def set_shapes(self, shapes: dict[str, Shape], stream: Stream) -> None:
        """Take these shapes of the plan's inputs from here on; nothing of the lane is running.

        Raises:
            ModelFailed: the plan does not take them.
        """
        if shapes == self.shapes:
            return
        self.shapes = {}
        number = choose_profile(self._plan.profiles, shapes)
        if number is None:
            raise ModelFailed(f"{self._plan.name} takes no inputs of {told(shapes)}: see optimization.profiles")
        self._made = output_shapes(self._plan, self._context, number, shapes, stream)
        self.inputs = self._ports.outward(self._ports.inputs, shapes)
        self.outputs = self._ports.outward(self._ports.outputs, self._made)
        for name, shape in self.outputs.items():
            if not self._berth.outputs[name].fits(shape):
                raise ModelFailed(f"output '{name}' of {self._plan.name} is larger than at the largest inputs: {shape}")
        self.rows = next(iter(shapes.values()))[0] if self._batched else 1
        self.shapes = shapes

    def enqueue(self, stream: Stream) -> None:
        """Queue one execution, from what callers send to what they get, all of it on the GPU.

        Raises:
            ModelFailed: TensorRT refuses; its log has the reason.
            DeviceError: the driver does.
        """
        if self._graph is not None:
            self._graph.launch()
        else:
            self._compute(stream)

    def capture(self, stream: Stream) -> None:
        """Make a graph of the execution, once it has run for these shapes: the first run sets up what a graph cannot.

        Nothing is done where there is one.

        Raises:
            ModelFailed: it cannot be captured, says TensorRT; the lane runs without.
            DeviceError: says the driver.
        """
        if self._graph is None:
            self._graph = Graph(stream, lambda: self._execute(stream))

    def capture_flight(self, stream: Stream, kernel: RowGather | None) -> None:
        """Make a graph of a whole flight, copies and all, and another for rows that are resident, unless they are there.

        Raises as `capture` does.

        Args:
            stream: where everything is replayed.
            kernel: fetches resident rows; None: there are none.
        """
        if self._flight is None:
            self._flight = Graph(stream, lambda: self._fly(stream, None))
        if self._gathered is None and kernel is not None and self._berth.rows is not None:
            self._gathered = Graph(stream, lambda: self._fly(stream, kernel))

    def drop_execution(self) -> None:
        """Be without the graph of the execution where that of the whole flight is in its place."""
        if self._graph is not None and self._flight is not None:
            self._graph.close()
            self._graph = None

    def drop_flight(self) -> None:
        """Be without the graphs of a whole flight; nothing of it runs."""
        for graph in (self._flight, self._gathered):
            if graph is not None:
                graph.close()
        self._flight = self._gathered = None

    def flies_whole(self, gathered: bool, alone: bool) -> bool:
        """True if a flight is one graph.

        Args:
            gathered: with resident rows.
            alone: nothing else of the instance is in the air.
        """
        return (alone or not self.lone) and (self._gathered if gathered else self._flight) is not None

    def fly(self, gathered: bool) -> None:
        """Queue a whole flight on the stream that it was captured on.

        Args:
            gathered: all rows are where the berth's table says, for all of the lane's rows.

        Raises:
            DeviceError: the driver refuses.
        """
        graph = self._gathered if gathered else self._flight
        assert graph is not None, "captured before"
        graph.launch()

    def close(self) -> None:
        """Give everything back; nothing of it runs any more."""
        self.drop_flight()
        if self._graph is not None:
            self._graph.close()
        self._graph = self._context = None

    def _fly(self, stream: Stream, kernel: RowGather | None) -> None:
        """What `capture_flight` records: all rows of the lane, padding and all."""
        berth = self._berth
        direct = self.direct and self.rows <= _FEW_ROWS
        fetched = dict[str, Launch]()
        if kernel is None:
            for name, memory in berth.inputs.items():
                memory.send(memory.view(self.inputs[name]), stream)
        elif berth.rows is not None:
            if direct:
                fetched = self._fetches()
            sizes = {
                name: (memory.size_of(self.inputs[name]) // self.rows, memory.address)
                for name, memory in berth.inputs.items()
                if name not in fetched
            }
            gather(kernel, stream, berth.rows, self.rows, sizes, ALONE)
        written = self._compute(stream, fetched, direct)
        for name, memory in berth.outputs.items():
            if name not in written:
                memory.fetch(memory.view(self.outputs[name]), stream)

    def _execute(self, stream: Stream) -> None:
        """What `capture` records."""
        self._compute(stream)

    def _fetches(self) -> dict[str, Launch]:
        """By name of the input what prepares its rows where they lie."""
        found = {}
        for port in self._ports.inputs:
            if port.joined is not None and port.joined.rows(self.shapes[port.tensor]) == self.rows:
                fetch = port.joined.work.fetch
                if fetch is not None:
                    found[port.tensor] = fetch
        return found

    def _compute(self, stream: Stream, fetched: Mapping[str, Launch] = _NOTHING, direct: bool = False) -> set[str]:
        """Queue what is between the copies.

        Args:
            stream: on which.
            fetched: what prepares rows that are where the berth's table says, by input.
            direct: write to pinned memory what is made of the plan's outputs.

        Returns:
            The outputs that are in pinned memory then.
        """
        berth = self._berth
        for port in self._ports.inputs:
            if port.joined is not None:
                rows = port.joined.rows(self.shapes[port.tensor])
                if port.tensor in fetched and berth.rows is not None:
                    launch, source = fetched[port.tensor], berth.rows.address(port.tensor)
                else:
                    launch, source = port.joined.work.launch, berth.inputs[port.tensor].address
                launch(stream, source, rows, [berth.addresses[port.tensor]])
        if not self._context.execute_async_v3(stream.handle):
            raise ModelFailed(f"{self._plan.name} was not launched: the server's log has TensorRT's reason")
        written = set[str]()
        for port in self._ports.outputs:
            if port.joined is not None:
                rows = port.joined.rows(self._made[port.tensor])
                memories = [berth.outputs[name] for name in port.outside]
                targets = [memory.pinned_address if direct else memory.address for memory in memories]
                port.joined.work.launch(stream, berth.addresses[port.tensor], rows, targets)
                if direct:
                    written |= port.outside.keys()
        return written


def output_shapes(plan: Plan, context: Any, profile: int, shapes: Shapes, stream: Stream) -> dict[str, Shape]:
    """Set a context's inputs and read its outputs' shapes.

    Raises:
        ModelFailed: TensorRT does not take the inputs.
        ConfigError: the shape of an output is known only when it is computed.
    """
    if context.active_optimization_profile != profile:
        if not context.set_optimization_profile_async(profile, stream.handle):
            raise ModelFailed(f"{plan.name} cannot switch to profile {profile + 1}")
        stream.synchronize()
    for name, shape in shapes.items():
        if not context.set_input_shape(name, shape):
            raise ModelFailed(f"{plan.name} takes no input '{name}' of {list(shape)}")
    unknown = context.infer_shapes()
    if unknown:
        raise ModelFailed(f"{plan.name} has not been given {', '.join(unknown)}")
    found = {tensor.name: tuple(int(s) for s in context.get_tensor_shape(tensor.name)) for tensor in plan.outputs}
    for name, shape in found.items():
        if -1 in shape:
            cure = "serve the model with backend: onnxruntime, or give the output a fixed size and a count"
            raise refused(plan.name, f"gives '{name}', whose shape depends on the values", cure)
    return found


def told(shapes: Shapes) -> str:
    """Shapes for people."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


logger = logging.getLogger("headrace.tensorrt")

# InputShapes that come up only while the model serves get lanes of their own up to this number; the others share one a berth.
_LATE_SHAPES = 16

InputShapes = tuple[Shape, ...]  # of the plan's inputs, in its order


class Placement(NamedTuple):
    """Where and how an instance runs.

    Attributes:
        device: number of the GPU.
        max_rows: rows in the largest batch; 0 if the model has no batch dimension.
        depth: batches under way at the same time.
        graphs: replay CUDA graphs.
        one_graph_rows: batches of up to so many rows fly as one graph; None: measured.
        spins: the host keeps a core busy while it waits; None: for flights that are one graph, to which microseconds matter.
    """

    device: int
    max_rows: int
    depth: int
    graphs: bool
    one_graph_rows: int | None = None
    spins: bool | None = None


class Views(NamedTuple):
    """Arrays on the pinned memory of a berth, for one shape of batch.

    Attributes:
        inputs: by name, what the caller fills.
        outputs: what comes back, less the padding.
        rows: of the batch; 1 if there is no batch dimension.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    rows: int


class Dock:
    """Opened with `open`, closed with `close` whatever has become of that.

    Args:
        plan: what runs, shared with the other instances on the GPU.
        ports: tensors as callers see them.
        placement: where and how.
        kernel: fetches resident rows; None: there are none.
        tell: is told once why a CUDA graph cannot be had.

    Attributes:
        berths: one for each batch under way.
        choice: how batches are run.
        fixed: True if the batch's is the only free dimension, if any: then all batches run by the choice.
        graphs: True as long as CUDA graphs can be had.
        computing: the stream of the model, and of flights that are one graph.
        copying_in, copying_out: those of the others.

    Raises:
        ConfigError: the plan does not take batches of `max_rows` rows.
    """

    copying_in: Stream
    computing: Stream
    copying_out: Stream

    def __init__(
        self,
        plan: Plan,
        ports: Ports,
        placement: Placement,
        kernel: RowGather | None,
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._ports = ports
        self._placement = placement
        self._kernel = kernel
        self._tell = tell
        self.graphs = placement.graphs
        self._names = [tensor.name for tensor in plan.inputs]
        self._scratch = plan.allocator.device(Kind.SCRATCH)
        self._within: dict[str, DeviceBuffer] = {}
        self._streams: list[Stream] = []
        self._lanes: dict[tuple[int, InputShapes], Lane] = {}
        self._shared: dict[int, Lane] = {}
        self._late: set[InputShapes] = set()
        self._max_rows = placement.max_rows
        # A batch dimension may be all that is free.
        shapes = [tensor.shape[1:] if self._max_rows else tensor.shape for tensor in plan.inputs]
        self.fixed = all(-1 not in shape for shape in shapes)
        self._buckets = buckets(plan.profiles, self._max_rows) if self._max_rows else ()
        self._check_buckets()
        self.berths: list[Berth] = []
        self.choice = Choice(self._buckets)

    def open(self) -> None:
        """Take memory for the largest batches.

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
            if self._kernel is not None:
                most = self._buckets[-1] if self._buckets else 1
                berth.rows = RowTable(berth.inputs, most, self._plan.allocator)
            for memory in berth.inputs.values():
                memory.clear(self.copying_in)
        self.copying_in.synchronize()
        self.synchronize()

    def prepare(self, choice: Choice) -> None:
        """Make the lanes for all shapes that can be told, and run batches by this choice from here on.

        Raises:
            DeviceError: the GPU has no memory left, or has failed.
        """
        self.choice = choice
        for rows in choice.buckets or (0,):
            whole, lone = rows in choice.whole, rows in choice.lone
            for berth in self.berths:
                lane = self.ready(berth, self.shapes_of(rows)) or self.new_lane(berth, rows, whole)
                if whole and not self.captured_flight(lane):
                    self._capture(lane)
                elif whole:
                    lane.drop_execution()
                elif lone:
                    lane.lone = True
                    self.captured_flight(lane)
        for berth in self.berths if choice.exact else ():
            self.shared_lane(berth)
        self.synchronize()

    @property
    def way(self) -> Hashable:
        """All that the choice depends on beside the plan and the GPU."""
        ports = (*self._ports.inputs, *self._ports.outputs)
        stages = tuple([port.joined.stage for port in ports if port.joined is not None])
        return self._placement, stages, self._kernel is not None

    def ready(self, berth: Berth, shapes: InputShapes) -> Lane | None:
        """The lane that there is for shapes of the plan's inputs in a berth; needs no GPU to be current."""
        return self._lanes.get((berth.index, shapes))

    def lane(self, berth: Berth, shapes: InputShapes) -> Lane:
        """A lane for shapes of the plan's inputs in a berth where nothing is running and none is ready for them.

        With other free dimensions than the batch's the first shapes that come up get lanes of their own.

        Raises:
            ModelFailed: the plan does not take them.
            DeviceError: the GPU has no memory left, or has failed.
        """
        if not self.fixed and (shapes in self._late or len(self._late) < _LATE_SHAPES):
            self._late.add(shapes)
            return self._make_lane(berth, shapes)
        lane = self.shared_lane(berth)
        lane.set_shapes(self.named(shapes), self.computing)
        return lane

    def new_lane(self, berth: Berth, rows: int, whole: bool = False) -> Lane:
        """A lane for so many rows that has run once, with a graph of its execution if one can be had, unless it flies whole."""
        return self._make_lane(berth, self.shapes_of(rows), whole)

    def drop_lane(self, berth: Berth, rows: int) -> None:
        """Give a lane back; nothing of it is running."""
        self._lanes.pop((berth.index, self.shapes_of(rows))).close()

    def shared_lane(self, berth: Berth) -> Lane:
        """The one for whatever has no lane of its own."""
        if berth.index not in self._shared:
            self._shared[berth.index] = self._loose_lane(berth)
        return self._shared[berth.index]

    def drop_shared_lane(self, berth: Berth) -> None:
        """Give it back; nothing of it is running."""
        if berth.index in self._shared:
            self._shared.pop(berth.index).close()

    def captured_flight(self, lane: Lane) -> bool:
        """Make a lane fly whole; False if that cannot be captured."""
        capture = partial(lane.capture_flight, self.computing, self._kernel)
        if not self._captured(capture):
            return True
        lane.direct = False
        return not self._captured(capture)

    def launch(self, berth: Berth, lane: Lane, views: Views, residents: Sequence[Resident], alone: bool = True) -> None:
        """Queue a flight: copy in, compute, copy out.

        Args:
            berth: whose memory it has; its inputs are there, but for those that are resident.
            lane: of the berth, which it takes.
            views: on the memory.
            residents: those that the GPU fetches itself.
            alone: nothing else of the instance is in the air.

        Raises:
            ModelFailed: TensorRT refuses; some of it may be queued.
            DeviceError: the driver does; likewise.
        """
        gathered = bool(residents)
        whole = lane.flies_whole(gathered, alone)
        if gathered:
            self._write_table(berth, views, lane.rows if whole else views.rows, residents)
        spins = whole if self._placement.spins is None else self._placement.spins
        berth.landing = berth.copied_out[spins]
        if whole:
            lane.fly(gathered)
            berth.landing.record(self.computing)
        else:
            self._launch_in_stages(berth, lane, views, {name for name, _, _ in residents})

    def shapes_of(self, rows: int) -> InputShapes:
        """Of the plan's inputs, for so many rows; the batch's is the only free dimension, if any."""
        return tuple([(rows, *t.shape[1:]) if self._max_rows else t.shape for t in self._plan.inputs])

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

    def _check_buckets(self) -> None:
        most, found = self._max_rows, self._buckets
        if most and (not found or found[-1] < most):
            taken = f"batches of up to {found[-1]} rows" if found else "no batches"
            cure = "build it with a profile for max_batch_size, or lower max_batch_size"
            raise refused(self._plan.name, f"takes {taken}, max_batch_size is {most}", cure)

    def _sizes(self) -> Sizes:
        """Bytes of each tensor at the largest shapes that are served."""
        plan, sizes = self._plan, Sizes()
        context = plan.context(self._scratch.address)
        for number, shapes in largest(plan.profiles, self._buckets[-1] if self._buckets else 0):
            sizes.add(self._ports, shapes, output_shapes(plan, context, number, shapes, self.computing))
        return sizes

    def _make_lane(self, berth: Berth, shapes: InputShapes, whole: bool = False) -> Lane:
        lane = self._lanes[berth.index, shapes] = self._loose_lane(berth)
        lane.set_shapes(self.named(shapes), self.computing)
        lane.enqueue(self.computing)
        if not whole:
            self._capture(lane)
        return lane

    def _loose_lane(self, berth: Berth) -> Lane:
        return Lane(self._plan, self._ports, berth, self._scratch.address, self._max_rows > 0)

    def _capture(self, lane: Lane) -> None:
        """Capture a lane's execution; if that cannot be, no other is tried."""
        if self.graphs:
            reason = self._captured(partial(lane.capture, self.computing))
            if reason:
                self.graphs = False
                self._tell(reason)

    def _captured(self, capture: Callable[[], None]) -> str:
        """Capture a graph: "", or why that cannot be. It is tried twice, since what this thread frees meanwhile spoils it."""
        with self._plan.collecting() as errors:
            try:
                with contextlib.suppress(ModelFailed, DeviceError):
                    capture()
                    return ""
                capture()
            except (ModelFailed, DeviceError) as error:
                if not works():
                    raise
                reason = "; ".join([str(error), *list(errors)[-1:]])
                logger.debug("%s: a CUDA graph cannot be captured: %s", self._plan.name, reason)
                return reason
        return ""

    # On the way

    def _write_table(self, berth: Berth, views: Views, total: int, residents: Sequence[Resident]) -> None:
        assert berth.rows is not None, "a flight that takes no resident rows was given some"
        for name, values in views.inputs.items():
            memory = berth.inputs[name]
            berth.rows.write(name, memory.pinned_address, values.nbytes // views.rows, views.rows, total, residents)

    def _launch_in_stages(self, berth: Berth, lane: Lane, views: Views, resident: set[str]) -> None:
        """Each stage in its stream: copies overlap with the computing of other flights."""
        sizes = {}
        for name, values in views.inputs.items():
            if name in resident:
                sizes[name] = (values.nbytes // views.rows, berth.inputs[name].address)
            else:
                berth.inputs[name].send(values, self.copying_in)
        if sizes and self._kernel is not None and berth.rows is not None:
            gather(self._kernel, self.copying_in, berth.rows, views.rows, sizes, BESIDE)
        berth.copied_in.record(self.copying_in)
        berth.copied_in.hold_back(self.computing)
        lane.enqueue(self.computing)
        berth.computed.record(self.computing)
        berth.computed.hold_back(self.copying_out)
        for name, values in views.outputs.items():
            berth.outputs[name].fetch(values, self.copying_out)
        berth.landing.record(self.copying_out)

    def named(self, shapes: InputShapes) -> dict[str, Shape]:
        """InputShapes of the plan's inputs, by their names."""
        return dict(zip(self._names, shapes, strict=True))
