"""What a batch needs on its way: a berth has its memory and events, a lane is a shape that is ready to run in a berth.

A lane owns its execution context: its shapes and addresses are set once, so that nothing is set while it serves, and a CUDA graph
stays true ("Graphs captured with TensorRT are specific to the input size and the state of the execution context": TensorRT
documentation, "CUDA Graphs"). The contexts of an instance share their scratch memory: its compute stream runs one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from server.backends.tensorrt_plan import Plan, Shape, Shapes, Tensor, choose_profile, refused
from server.core.errors import ModelFailed
from server.core.tensor import Array
from server.cuda.driver import Stream
from server.cuda.graphs import Graph
from server.cuda.memory import Allocator, download, upload
from server.cuda.signals import Signal


class Memory:
    """One tensor's memory on both sides, of one size for ever.

    Args:
        tensor: what is kept there.
        size_bytes: of the largest that is served.
        allocator: of the GPU.
    """

    def __init__(self, tensor: Tensor, size_bytes: int, allocator: Allocator) -> None:
        self._dtype = tensor.dtype
        self._device = allocator.device()
        self._pinned = allocator.pinned()
        try:
            self._device.reserve(size_bytes)
            self._pinned.reserve(size_bytes)
        except Exception:
            self.close()
            raise
        self.size_bytes = size_bytes
        # What a batch is padded with is what was there: never anything but zeros, or rows that were valid once.
        self._pinned.view((self._pinned.size_bytes,), np.dtype(np.uint8)).fill(0)

    @property
    def address(self) -> int:
        """On the GPU."""
        return self._device.address

    def view(self, shape: Shape) -> Array:
        """The pinned side; it must fit."""
        return self._pinned.view(shape, self._dtype)

    def fits(self, shape: Shape) -> bool:
        """True if a tensor of this shape has room."""
        return math.prod(shape) * self._dtype.itemsize <= self.size_bytes

    def clear(self, stream: Stream) -> None:
        """Queue that the GPU's side becomes what the pinned side is."""
        upload(self._device, self._pinned.view((self._pinned.size_bytes,), np.dtype(np.uint8)), stream)

    def send(self, values: Array, stream: Stream) -> None:
        """Queue the copy of a `view` to the GPU."""
        upload(self._device, values, stream)

    def fetch(self, shape: Shape, stream: Stream) -> Array:
        """Queue the copy from the GPU; the view that it ends in."""
        target = self.view(shape)
        download(target, self._device, stream)
        return target

    def close(self) -> None:
        """Give it back."""
        self._device.free()
        self._pinned.free()


class Berth:
    """Room for one batch at a time: pinned and device memory for all tensors, and the events of its stages.

    Args:
        index: among the berths of an instance.
        plan: the plan.
        sizes: bytes of each tensor at its largest, by name.

    Attributes:
        copied_in: the inputs are on the GPU.
        computed: the outputs are.
        copied_out: they are in pinned memory.
    """

    def __init__(self, index: int, plan: Plan, sizes: Mapping[str, int]) -> None:
        self.index = index
        self.inputs: dict[str, Memory] = {}
        self.outputs: dict[str, Memory] = {}
        try:
            for tensor in plan.inputs:
                self.inputs[tensor.name] = Memory(tensor, sizes[tensor.name], plan.allocator)
            for tensor in plan.outputs:
                self.outputs[tensor.name] = Memory(tensor, sizes[tensor.name], plan.allocator)
            self.copied_in, self.computed, self.copied_out = Signal(), Signal(), Signal()
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Give everything back; nothing runs any more."""
        for memory in (*self.inputs.values(), *self.outputs.values()):
            memory.close()
        for name in ("copied_in", "computed", "copied_out"):
            if hasattr(self, name):
                delattr(self, name)


class Lane:
    """A context with shapes and addresses set.

    Args:
        plan: what runs.
        berth: whose memory it works in.
        scratch: address of the instance's scratch memory.

    Attributes:
        shapes: of the inputs, as last set.
        outputs: shapes of the outputs by name.
    """

    def __init__(self, plan: Plan, berth: Berth, scratch: int) -> None:
        self._plan = plan
        self._berth = berth
        self._context = plan.context(scratch)
        self._graph: Graph | None = None
        self.shapes: dict[str, Shape] = {}
        self.outputs: dict[str, Shape] = {}
        for name, memory in (*berth.inputs.items(), *berth.outputs.items()):
            self._context.set_tensor_address(name, memory.address)

    def set_shapes(self, shapes: dict[str, Shape], stream: Stream) -> None:
        """Take these shapes from here on; nothing of the lane is running.

        Raises:
            ModelFailed: the plan does not take them.
        """
        if shapes == self.shapes:
            return
        self.shapes = {}
        number = choose_profile(self._plan.profiles, shapes)
        if number is None:
            raise ModelFailed(f"{self._plan.name} takes no inputs of {told(shapes)}: see optimization.profiles")
        self.outputs = output_shapes(self._plan, self._context, number, shapes, stream)
        for name, shape in self.outputs.items():
            if not self._berth.outputs[name].fits(shape):
                raise ModelFailed(f"output '{name}' of {self._plan.name} is larger than at the largest inputs: {shape}")
        self.shapes = shapes

    def enqueue(self, stream: Stream) -> None:
        """Queue one execution.

        Raises:
            ModelFailed: TensorRT refuses; its log has the reason.
            DeviceError: the driver does.
        """
        if self._graph is not None:
            self._graph.launch()
        elif not self._context.execute_async_v3(stream.handle):
            raise ModelFailed(f"{self._plan.name} was not launched: the server's log has TensorRT's reason")

    def capture(self, stream: Stream) -> None:
        """Make a graph of the execution, once it has run for these shapes: the first run sets up what a graph cannot.

        Raises:
            ModelFailed: it cannot be captured, says TensorRT; the lane runs without.
            DeviceError: says the driver.
        """
        self._graph = Graph(stream, lambda: self.enqueue(stream))

    def close(self) -> None:
        """Give everything back; nothing of it runs any more."""
        if self._graph is not None:
            self._graph.close()
        self._graph = self._context = None


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
