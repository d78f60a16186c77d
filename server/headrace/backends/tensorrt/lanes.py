"""A lane is a shape that is ready to run in a berth.

It owns its execution context: its shapes and addresses are set once, so that nothing is set while it serves, and a CUDA graph
stays true ("Graphs captured with TensorRT are specific to the input size and the state of the execution context": TensorRT
documentation, "CUDA Graphs"). The contexts of an instance share their scratch memory: its compute stream runs one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.backends.tensorrt.berths import Berth
from headrace.backends.tensorrt.plan import Plan, Shape, Shapes, choose_profile, refused
from headrace.backends.tensorrt.rows import ALONE, gather
from headrace.backends.tensorrt.stages import Launch, Ports
from headrace.core.errors import ModelFailed
from headrace.cuda.driver import Stream
from headrace.cuda.graphs import Graph
from headrace.cuda.kernels.rows import RowGather

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
