"""Execution contexts of an instance, and all its resources on a GPU: streams, scratch memory, buffer slots.

A `PreparedContext` is an execution context for one set of shapes in one buffer slot. Shapes and addresses are set once,
so nothing is set while it serves and its CUDA graph stays valid ("Graphs captured with TensorRT are specific to the
input size and the state of the execution context": TensorRT documentation, "CUDA Graphs"). The contexts of an instance
share their scratch memory: its compute stream runs one at a time. `DeviceResources` is used by the instance's thread
with the device current.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from headrace.core.errors import ModelFailed
from headrace.core.ledger import Kind
from headrace.core.tensor import Array
from headrace.runtimes.cuda.driver import CudaGraph, CudaStream, DeviceError, is_context_usable
from headrace.runtimes.cuda.kernels.launching import Launch, RowGather
from headrace.runtimes.cuda.memory import DeviceBuffer
from headrace.runtimes.overlapped import ResidentInput
from headrace.runtimes.tensorrt.buffers import (
    IDLE_BLOCKS,
    SHARED_BLOCKS,
    BufferSizes,
    BufferSlot,
    OutputPool,
    RowTable,
    copy_local_rows,
    fetch_from_peers,
    gather,
    stays_large,
)
from headrace.runtimes.tensorrt.plan import (
    PlanBindings,
    Shape,
    Shapes,
    TensorRtPlan,
    TuningResult,
    buckets,
    choose_profile,
    largest,
    plan_error,
)
from headrace.runtimes.tensorrt.states import DeviceStates

_NOTHING: Mapping[str, Launch] = {}
# One-graph batches of up to this many rows have as few steps as possible: resident rows are preprocessed in place,
# and stages write outputs over the bus to pinned memory. With more rows copies are faster, and kernels that access
# the bus would keep multiprocessors waiting.
_FEW_ROWS = 4


class PreparedContext:
    """An execution context with its shapes and addresses set, and its CUDA graphs.

    Args:
        plan: the plan.
        ports: tensors as clients see them.
        slot: buffer slot that it works in.
        scratch: address of the instance's scratch memory.
        batched: True if the first dimension of clients' tensors is rows.

    Attributes:
        one_graph_when_idle: its batches are one graph only while no other batch of the instance is in flight: then
            nothing could overlap.
        rows: in its batches; 1 without a batch dimension.
        shapes: of the plan's inputs, as last set.
        direct: avoid copies in one-graph batches of few rows; set before the next capture.
        inputs: shapes of clients' inputs, by name.
        outputs: shapes of clients' outputs, by name.
    """

    def __init__(self, plan: TensorRtPlan, ports: PlanBindings, slot: BufferSlot, scratch: int, batched: bool) -> None:
        self._plan = plan
        self._ports = ports
        self._slot = slot
        self._batched = batched
        self._trt_context = plan.context(scratch)
        self._compute_graph: CudaGraph | None = None
        self._batch_graph: CudaGraph | None = None
        self._gather_graph: CudaGraph | None = None
        self._output_shapes: dict[str, Shape] = {}
        self.one_graph_when_idle = False
        self.direct = True
        self.rows = 1
        self.shapes: dict[str, Shape] = {}
        self.inputs: dict[str, Shape] = {}
        self.outputs: dict[str, Shape] = {}
        for name, address in slot.addresses.items():
            self._trt_context.set_tensor_address(name, address)

    def set_shapes(self, shapes: dict[str, Shape], stream: CudaStream) -> None:
        """Set the shapes of the plan's inputs; the context must not run.

        Raises:
            ModelFailed: the plan does not support them.
        """
        if shapes == self.shapes:
            return
        self.shapes = {}
        number = choose_profile(self._plan.profiles, shapes)
        if number is None:
            raise ModelFailed(
                f"{self._plan.name} takes no inputs of {describe_shapes(shapes)}: see optimization.profiles"
            )
        self._output_shapes = output_shapes(self._plan, self._trt_context, number, shapes, stream)
        self.inputs = self._ports.client_shapes(self._ports.inputs, shapes)
        self.outputs = self._ports.client_shapes(self._ports.outputs, self._output_shapes)
        for name, shape in self.outputs.items():
            if not self._slot.outputs[name].fits(shape):
                raise ModelFailed(f"output '{name}' of {self._plan.name} is larger than at the largest inputs: {shape}")
        self.rows = next(iter(shapes.values()))[0] if self._batched else 1
        self.shapes = shapes

    def enqueue(self, stream: CudaStream) -> None:
        """Queue one execution, from clients' inputs to clients' outputs, on the GPU.

        Raises:
            ModelFailed: TensorRT refuses; its log has the reason.
            DeviceError: the driver refuses.
        """
        if self._compute_graph is not None:
            self._compute_graph.launch()
        else:
            self._compute(stream)

    def capture(self, stream: CudaStream) -> None:
        """Capture a graph of the execution, unless there is one. It must have run for these shapes: the first run does
        set-up that a graph cannot contain.

        Raises:
            ModelFailed: TensorRT cannot be captured; the context runs without a graph.
            DeviceError: the driver refuses.
        """
        if self._compute_graph is None:
            self._compute_graph = CudaGraph(stream, lambda: self._record_compute(stream))

    def capture_batch_graph(self, stream: CudaStream, kernel: RowGather | None) -> None:
        """Capture a graph of a whole batch including copies, and another for resident rows, unless they exist.

        Raises as `capture` does.

        Args:
            stream: stream of the replays.
            kernel: gathers resident rows; None without them.
        """
        if self._batch_graph is None:
            self._batch_graph = CudaGraph(stream, lambda: self._record_batch(stream, None))
        if self._gather_graph is None and kernel is not None and self._slot.rows is not None:
            self._gather_graph = CudaGraph(stream, lambda: self._record_batch(stream, kernel))

    def drop_compute_graph(self) -> None:
        """Drop the graph of the execution if the graph of the whole batch replaces it."""
        if self._compute_graph is not None and self._batch_graph is not None:
            self._compute_graph.close()
            self._compute_graph = None

    def drop_batch_graphs(self) -> None:
        """Drop the graphs of a whole batch; none of them runs."""
        for graph in (self._batch_graph, self._gather_graph):
            if graph is not None:
                graph.close()
        self._batch_graph = self._gather_graph = None

    def is_one_graph(self, gathered: bool, alone: bool) -> bool:
        """Return True if a batch runs as one graph.

        Args:
            gathered: it has resident rows.
            alone: no other batch of the instance is in flight.
        """
        return (alone or not self.one_graph_when_idle) and (
            self._gather_graph if gathered else self._batch_graph
        ) is not None

    def launch_batch_graph(self, gathered: bool) -> None:
        """Queue a whole batch on the stream that it was captured on.

        Args:
            gathered: the slot's table has the addresses of all of the context's rows.

        Raises:
            DeviceError: the driver refuses.
        """
        graph = self._gather_graph if gathered else self._batch_graph
        assert graph is not None, "captured before"
        graph.launch()

    def close(self) -> None:
        """Release everything; nothing of it runs any more."""
        self.drop_batch_graphs()
        if self._compute_graph is not None:
            self._compute_graph.close()
        self._compute_graph = self._trt_context = None

    def _record_batch(self, stream: CudaStream, kernel: RowGather | None) -> None:
        """Queue the work that `capture_batch_graph` records: all rows of the context, including padding."""
        slot = self._slot
        direct = self.direct and self.rows <= _FEW_ROWS
        fetched = dict[str, Launch]()
        if kernel is None:
            for name, memory in slot.inputs.items():
                memory.send(memory.view(self.inputs[name]), stream)
        elif slot.rows is not None:
            if direct:
                fetched = self._fetches()
            sizes = {
                name: (memory.size_of(self.inputs[name]) // self.rows, memory.address)
                for name, memory in slot.inputs.items()
                if name not in fetched
            }
            gather(kernel, stream, slot.rows, self.rows, sizes, IDLE_BLOCKS)
        written = self._compute(stream, fetched, direct)
        for name, memory in slot.outputs.items():
            if name not in written:
                memory.fetch(memory.view(self.outputs[name]), stream)

    def _record_compute(self, stream: CudaStream) -> None:
        """Queue the work that `capture` records."""
        self._compute(stream)

    def _fetches(self) -> dict[str, Launch]:
        """Launchers that preprocess rows in place, by input."""
        shapes_by_name = {}
        for port in self._ports.inputs:
            if port.stage is not None and port.stage.rows(self.shapes[port.tensor]) == self.rows:
                fetch = port.stage.work.fetch
                if fetch is not None:
                    shapes_by_name[port.tensor] = fetch
        return shapes_by_name

    def _compute(self, stream: CudaStream, fetched: Mapping[str, Launch] = _NOTHING, direct: bool = False) -> set[str]:
        """Queue the work between the copies.

        Args:
            stream: stream to queue on.
            fetched: launchers that read rows at the addresses in the slot's table, by input.
            direct: write outputs of stages to pinned memory.

        Returns:
            The outputs that are in pinned memory afterwards.
        """
        slot = self._slot
        for port in self._ports.inputs:
            if port.stage is not None:
                rows = port.stage.rows(self.shapes[port.tensor])
                if port.tensor in fetched and slot.rows is not None:
                    launch, source = fetched[port.tensor], slot.rows.address(port.tensor)
                else:
                    launch, source = port.stage.work.launch, slot.inputs[port.tensor].address
                launch(stream, source, rows, [slot.addresses[port.tensor]])
        if not self._trt_context.execute_async_v3(stream.handle):
            raise ModelFailed(f"{self._plan.name} was not launched: the server's log has TensorRT's reason")
        written = set[str]()
        for port in self._ports.outputs:
            if port.stage is not None:
                rows = port.stage.rows(self._output_shapes[port.tensor])
                memories = [slot.outputs[name] for name in port.client_tensors]
                targets = [memory.pinned_address if direct else memory.address for memory in memories]
                port.stage.work.launch(stream, slot.addresses[port.tensor], rows, targets)
                if direct:
                    written |= port.client_tensors.keys()
        return written


def output_shapes(
    plan: TensorRtPlan, context: Any, profile: int, shapes: Shapes, stream: CudaStream
) -> dict[str, Shape]:
    """Set a context's input shapes and return its output shapes.

    Raises:
        ModelFailed: TensorRT does not support the inputs.
        ConfigError: the shape of an output depends on values.
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
        raise ModelFailed(f"{plan.name} lacks the shapes of {', '.join(unknown)}: send every input")
    shapes_by_name = {
        tensor.name: tuple(int(s) for s in context.get_tensor_shape(tensor.name)) for tensor in plan.outputs
    }
    for name, shape in shapes_by_name.items():
        if -1 in shape:
            cure = "serve the model with backend: onnxruntime, or give the output a fixed size and a count"
            raise plan_error(plan.name, f"gives '{name}', whose shape depends on the values", cure)
    return shapes_by_name


def describe_shapes(shapes: Shapes) -> str:
    """Shapes as text."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


logger = logging.getLogger("headrace.tensorrt")

# Shapes that first occur while serving get contexts of their own up to this number; the others share one in each
# slot.
_MAX_SERVING_SHAPES = 16

InputShapes = tuple[Shape, ...]  # of the plan's inputs, in its order


class InstancePlacement(NamedTuple):
    """GPU and launch settings of an instance.

    Attributes:
        device: number of the GPU.
        max_rows: rows in the largest batch; 0 without a batch dimension.
        depth: maximum number of batches in flight.
        graphs: replay CUDA graphs.
        one_graph_rows: batches of up to this many rows are one graph; None: by measurement.
        spins: the host keeps a core busy while it waits; None: for one-graph batches, whose latency is microseconds.
        joined: the requests of a batch are joined, so that nearly every batch has shapes of its own: each slot has one context
            for all of them, without a CUDA graph. Only with `max_rows` 0.
        padded: batches are padded to buckets; False: each runs with its own number of rows, without a CUDA graph.
    """

    device: int
    max_rows: int
    depth: int
    graphs: bool
    one_graph_rows: int | None = None
    spins: bool | None = None
    joined: bool = False
    padded: bool = True


class BatchViews(NamedTuple):
    """Arrays on the pinned memory of a slot, for one shape of batch.

    Attributes:
        inputs: by name, filled by the caller.
        outputs: by name, without padding.
        rows: of the batch; 1 without a batch dimension.
    """

    inputs: dict[str, Array]
    outputs: dict[str, Array]
    rows: int


@dataclass(eq=False, repr=False)
class DeviceResources:
    """All resources of an instance on its GPU: streams, scratch memory, slots and contexts.

    Open it with `open`; `close` it even if that failed.

    Attributes:
        plan: shared with the other instances on the GPU.
        ports: tensors as clients see them.
        placement: GPU and launch settings.
        kernel: gathers resident rows; None without them.
        warn: called once with the reason if CUDA graphs are not available.
        states: states that stay on the GPU; None without any.
        slots: one for each batch in flight.
        tuning_result: buckets, and how batches are launched.
        has_fixed_shapes: True if only the batch dimension is free: then all batches run by the tuning result.
        graphs: True while CUDA graphs are available.
        output_pool: memory of outputs that stay on the GPU.
        computing: stream of the model, and of one-graph batches.
        copying_in, copying_out: streams of the other batches' copies.

    Raises:
        ConfigError: the plan does not support batches of `max_rows` rows.
    """

    copying_in: CudaStream = field(init=False)
    computing: CudaStream = field(init=False)
    copying_out: CudaStream = field(init=False)

    plan: TensorRtPlan
    ports: PlanBindings
    placement: InstancePlacement
    kernel: RowGather | None
    warn: Callable[[str], None]
    states: DeviceStates | None = None

    def __post_init__(self) -> None:
        self.graphs = self.placement.graphs
        self._names = [tensor.name for tensor in self.plan.inputs]
        self._scratch = self.plan.allocator.device(Kind.SCRATCH)
        self.output_pool = OutputPool(self.plan.allocator)
        self._inner_buffers: dict[str, DeviceBuffer] = {}
        self._streams: list[CudaStream] = []
        self._contexts: dict[tuple[int, InputShapes], PreparedContext] = {}
        self._shared_contexts: dict[int, PreparedContext] = {}
        self._serving_shapes: set[InputShapes] = set()
        self._max_rows = self.placement.max_rows
        # The batch dimension may be the only free one.
        shapes = [tensor.shape[1:] if self._max_rows else tensor.shape for tensor in self.plan.inputs]
        self.has_fixed_shapes = all(-1 not in shape for shape in shapes)
        self._buckets = buckets(self.plan.profiles, self._max_rows) if self._max_rows else ()
        self._check_buckets()
        self.slots: list[BufferSlot] = []
        self.tuning_result = TuningResult(self._buckets)

    def open(self) -> None:
        """Allocate memory for the largest batches.

        Raises:
            ConfigError: outputs cannot be served.
            DeviceError: the GPU has no memory left, or has failed.
        """
        for _ in range(3):
            self._streams.append(CudaStream())
        self.copying_in, self.computing, self.copying_out = self._streams
        self._scratch.reserve(self.plan.scratch_bytes)
        sizes = self._sizes()
        for name, size_bytes in sizes.inner.items():
            self._inner_buffers[name] = self.plan.allocator.device()
            self._inner_buffers[name].reserve(size_bytes)
        inner = {name: buffer.address for name, buffer in self._inner_buffers.items()}
        if self.states is not None:
            self.states.open(self._buckets[-1] if self._buckets else 1, self.computing)
        for index in range(self.placement.depth):
            kept = {} if self.states is None else self.states.addresses(index)
            slot = BufferSlot(index, self.ports, sizes, inner | kept, self.plan.allocator)
            self.slots.append(slot)
            if self.kernel is not None:
                max_rows = self._buckets[-1] if self._buckets else 1
                slot.rows = RowTable(slot.inputs, max_rows, self.plan.allocator)
            for memory in slot.inputs.values():
                memory.clear(self.copying_in)
        if self.states is not None:
            outputs = [{name: memory.address for name, memory in slot.outputs.items()} for slot in self.slots]
            self.states.client_outputs = outputs
        self.copying_in.synchronize()
        self.synchronize()

    def prepare(self, tuning_result: TuningResult) -> None:
        """Create the contexts for all shapes known in advance, and launch batches by this result from now on.

        Raises:
            DeviceError: the GPU has no memory left, or has failed.
        """
        self.tuning_result = tuning_result
        for rows in tuning_result.buckets or (0,):
            one_graph, one_graph_when_idle = rows in tuning_result.one_graph, rows in tuning_result.one_graph_when_idle
            for slot in self.slots:
                context = self.find_context(slot, self.shapes_of(rows)) or self.new_context(slot, rows, one_graph)
                if one_graph and not self.try_capture_batch_graph(context):
                    self._capture(context)
                elif one_graph:
                    context.drop_compute_graph()
                elif one_graph_when_idle:
                    context.one_graph_when_idle = True
                    self.try_capture_batch_graph(context)
        for slot in self.slots if tuning_result.exact else ():
            self.shared_context(slot)
        self.synchronize()

    @property
    def tuning_key(self) -> Hashable:
        """Settings that the tuning result depends on, besides the plan and the GPU."""
        ports = (*self.ports.inputs, *self.ports.outputs)
        stages = tuple([port.stage.stage for port in ports if port.stage is not None])
        return self.placement, stages, self.kernel is not None

    def prepare_joined(self) -> None:
        """Create the context of each slot, and run it once at the tuned shapes: the first run loads the kernels.

        Raises:
            DeviceError: the GPU has no memory left, or has failed.
        """
        profile = self.plan.profiles[0]
        for slot in self.slots:
            context = self.shared_context(slot)
            context.set_shapes({name: limits.opt_shape for name, limits in profile.items()}, self.computing)
            context.enqueue(self.computing)
        self.synchronize()

    def find_context(self, slot: BufferSlot, shapes: InputShapes) -> PreparedContext | None:
        """Return the existing context for shapes of the plan's inputs in a slot; needs no current device."""
        return self._contexts.get((slot.index, shapes))

    def context(self, slot: BufferSlot, shapes: InputShapes) -> PreparedContext:
        """Create a context for shapes of the plan's inputs in a slot in which nothing runs.

        If more than the batch dimension is free, the first shapes that occur get contexts of their own.

        Raises:
            ModelFailed: the plan does not support them.
            DeviceError: the GPU has no memory left, or has failed.
        """
        if not (self.has_fixed_shapes or self.placement.joined) and (
            shapes in self._serving_shapes or len(self._serving_shapes) < _MAX_SERVING_SHAPES
        ):
            self._serving_shapes.add(shapes)
            return self._make_context(slot, shapes)
        context = self.shared_context(slot)
        context.set_shapes(self.by_name(shapes), self.computing)
        return context

    def new_context(self, slot: BufferSlot, rows: int, one_graph: bool = False) -> PreparedContext:
        """Create a context for `rows` rows and run it once; capture a graph of its execution unless `one_graph`."""
        return self._make_context(slot, self.shapes_of(rows), one_graph)

    def drop_context(self, slot: BufferSlot, rows: int) -> None:
        """Close a context; nothing of it runs."""
        self._contexts.pop((slot.index, self.shapes_of(rows))).close()

    def shared_context(self, slot: BufferSlot) -> PreparedContext:
        """Return the context for shapes without a context of their own."""
        if slot.index not in self._shared_contexts:
            self._shared_contexts[slot.index] = self._new_unshaped_context(slot)
        return self._shared_contexts[slot.index]

    def drop_shared_context(self, slot: BufferSlot) -> None:
        """Close the shared context; nothing of it runs."""
        if slot.index in self._shared_contexts:
            self._shared_contexts.pop(slot.index).close()

    def try_capture_batch_graph(self, context: PreparedContext) -> bool:
        """Capture a context's whole batch as one graph; return False if that is not possible."""
        capture = partial(context.capture_batch_graph, self.computing, self.kernel)
        if not self._captured(capture):
            return True
        context.direct = False
        return not self._captured(capture)

    def launch(
        self,
        slot: BufferSlot,
        context: PreparedContext,
        views: BatchViews,
        resident_inputs: Sequence[ResidentInput],
        alone: bool = True,
    ) -> None:
        """Queue a batch: copy in, compute, copy out.

        Args:
            slot: slot of the batch; its inputs are there, except for resident ones. Its resident outputs are copied on the
                GPU; in one graph they are copied out, too.
            context: prepared context of the slot.
            views: arrays on the slot's memory.
            resident_inputs: inputs that the GPU gathers itself, after copies of those on other GPUs.
            alone: no other batch of the instance is in flight.

        Raises:
            ModelFailed: TensorRT refuses; some of the work may be queued.
            DeviceError: the driver refuses; some of the work may be queued.
        """
        gathered = bool(resident_inputs)
        # A graph of a whole batch copies its outputs to the host, even those that stay.
        one_graph = context.is_one_graph(gathered, alone) and not stays_large(slot.resident_outputs.values())
        if gathered:
            stream = self.computing if one_graph else self.copying_in
            addresses = {name: memory.address for name, memory in slot.inputs.items()}
            resident_inputs = fetch_from_peers(
                resident_inputs, views.inputs, addresses, self.plan.allocator.gpu, stream
            )
            self._write_table(slot, views, context.rows if one_graph else views.rows, resident_inputs)
        spins = one_graph if self.placement.spins is None else self.placement.spins
        slot.finished = slot.copied_out[spins]
        if one_graph:
            context.launch_batch_graph(gathered)
            for name, rows in slot.resident_outputs.items():
                slot.outputs[name].copy_to(rows.address, rows.nbytes, self.computing)
            slot.finished.record(self.computing)
        else:
            self._launch_in_stages(slot, context, views, resident_inputs)

    def shapes_of(self, rows: int) -> InputShapes:
        """Shapes of the plan's inputs for `rows` rows; only the batch dimension may be free."""
        return tuple([(rows, *t.shape[1:]) if self._max_rows else t.shape for t in self.plan.inputs])

    def synchronize(self) -> None:
        """Wait for all queued work.

        Raises:
            DeviceError: some of it failed.
        """
        for stream in self._streams:
            stream.synchronize()

    def close(self) -> None:
        """Release everything, after running work is done."""
        with contextlib.suppress(DeviceError):
            self.synchronize()
        # Streams and events free themselves with their last reference; the device must be current then.
        for context in (*self._contexts.values(), *self._shared_contexts.values()):
            context.close()
        self._contexts.clear()
        self._shared_contexts.clear()
        for slot in self.slots:
            slot.close()
        self.slots.clear()
        self.output_pool.close()
        if self.states is not None:
            self.states.close()
        for buffer in (*self._inner_buffers.values(), self._scratch):
            buffer.free()
        self._streams.clear()
        for name in ("copying_in", "computing", "copying_out"):
            if hasattr(self, name):
                delattr(self, name)

    def _check_buckets(self) -> None:
        max_rows, shapes_by_name = self._max_rows, self._buckets
        if max_rows and (not shapes_by_name or shapes_by_name[-1] < max_rows):
            supported = f"batches of up to {shapes_by_name[-1]} rows" if shapes_by_name else "no batches"
            cure = "build it with a profile for max_batch_size, or lower max_batch_size"
            raise plan_error(self.plan.name, f"takes {supported}, max_batch_size is {max_rows}", cure)

    def _sizes(self) -> BufferSizes:
        """Bytes of each tensor at the largest shapes that are served."""
        plan, sizes = self.plan, BufferSizes()
        context = plan.context(self._scratch.address)
        for number, shapes in largest(plan.profiles, self._buckets[-1] if self._buckets else 0):
            sizes.add(self.ports, shapes, output_shapes(plan, context, number, shapes, self.computing))
        return sizes

    def _make_context(self, slot: BufferSlot, shapes: InputShapes, one_graph: bool = False) -> PreparedContext:
        context = self._contexts[slot.index, shapes] = self._new_unshaped_context(slot)
        context.set_shapes(self.by_name(shapes), self.computing)
        context.enqueue(self.computing)
        if not one_graph:
            self._capture(context)
        return context

    def _new_unshaped_context(self, slot: BufferSlot) -> PreparedContext:
        return PreparedContext(self.plan, self.ports, slot, self._scratch.address, self._max_rows > 0)

    def _capture(self, context: PreparedContext) -> None:
        """Capture a context's execution; if that fails, no other context tries."""
        if self.graphs:
            reason = self._captured(partial(context.capture, self.computing))
            if reason:
                self.graphs = False
                self.warn(reason)

    def _captured(self, capture: Callable[[], None]) -> str:
        """Capture a graph; return "" or the reason for a failure. It tries twice: memory that this thread frees
        meanwhile spoils a capture.
        """
        with self.plan.collect_errors() as errors:
            try:
                with contextlib.suppress(ModelFailed, DeviceError):
                    capture()
                    return ""
                capture()
            except (ModelFailed, DeviceError) as error:
                if not is_context_usable():
                    raise
                reason = "; ".join([str(error), *list(errors)[-1:]])
                logger.debug("%s: a CUDA graph cannot be captured: %s", self.plan.name, reason)
                return reason
        return ""

    def _write_table(
        self, slot: BufferSlot, views: BatchViews, total: int, resident_inputs: Sequence[ResidentInput]
    ) -> None:
        assert slot.rows is not None, "the batch has resident rows, which this execution does not support"
        for name, values in views.inputs.items():
            memory = slot.inputs[name]
            slot.rows.write(
                name, memory.pinned_address, values.nbytes // views.rows, views.rows, total, resident_inputs
            )

    def _launch_in_stages(
        self,
        slot: BufferSlot,
        context: PreparedContext,
        views: BatchViews,
        resident_inputs: Sequence[ResidentInput],
    ) -> None:
        """Queue each stage in its own stream: copies overlap with the compute of other batches."""
        sizes = {}
        resident, gpu = {name for name, _, _ in resident_inputs}, self.plan.allocator.gpu
        for name, values in views.inputs.items():
            address = slot.inputs[name].address
            if name in resident:
                if copy_local_rows(name, values, address, gpu, resident_inputs, self.copying_in):
                    continue
                sizes[name] = (values.nbytes // views.rows, address)
            else:
                slot.inputs[name].send(values, self.copying_in)
        if sizes and self.kernel is not None and slot.rows is not None:
            gather(self.kernel, self.copying_in, slot.rows, views.rows, sizes, SHARED_BLOCKS)
        slot.copied_in.record(self.copying_in)
        slot.copied_in.block(self.computing)
        context.enqueue(self.computing)
        slot.computed.record(self.computing)
        slot.computed.block(self.copying_out)
        for name, values in views.outputs.items():
            rows = slot.resident_outputs.get(name)
            if rows is None:
                slot.outputs[name].fetch(values, self.copying_out)
            else:
                slot.outputs[name].copy_to(rows.address, rows.nbytes, self.copying_out)
        slot.finished.record(self.copying_out)

    def by_name(self, shapes: InputShapes) -> dict[str, Shape]:
        """Shapes of the plan's inputs by name."""
        return dict(zip(self._names, shapes, strict=True))
