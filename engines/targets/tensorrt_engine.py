"""A plan that is loaded: it runs, is timed as a CUDA graph, and tells what it consists of.

One thread makes, uses and closes an engine. Buffers grow to the largest batch seen and are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from engines.errors import BuildError
from engines.targets.base import Layer, Timing
from engines.targets.tensorrt_api import TensorRt, as_build_error
from engines.targets.tensorrt_errors import explain_open
from engines.targets.tensorrt_layers import LayerTimes, layer_profiler, read_layers
from engines.targets.tensorrt_profiles import choose_profile
from engines.targets.tensorrt_progress import Stop, signals_stop
from engines.targets.tensorrt_tensors import OutputMemory, Tensor, numpy_type, output_allocator
from engines.targets.tensorrt_timing import measure
from server.cuda.device import describe
from server.cuda.driver import DeviceError, OutOfDeviceMemory, Stream, current
from server.cuda.graphs import Graph
from server.cuda.memory import DeviceBuffer

logger = logging.getLogger("headrace.tensorrt")

Array = npt.NDArray[Any]

_PROFILED_RUNS = 20
_WARM_UP_RUNS = 3


class TensorRtEngine:
    """One plan on one GPU.

    Args:
        api: TensorRT.
        path: the plan.
        source: the model it was built from; `layers` then names its nodes alone.
        device: number of the GPU.

    Raises:
        BuildError: there is no such file, it is for another TensorRT or GPU, or memory ran out.
    """

    def __init__(self, api: TensorRt, path: Path, source: onnx.ModelProto | None, device: int) -> None:
        self._api = api
        self._name = path.name
        self._device = device
        self._nodes = _node_names(source)
        self._closed = False
        self._tensors: dict[str, Tensor] = {}
        self._allocators: dict[str, tuple[OutputMemory, Any]] = {}
        try:
            plan = path.read_bytes()
        except OSError as error:
            raise BuildError(f"{path} cannot be read ({error.strerror}): build the engine") from error
        # Ours, not the contexts': TensorRT gives its own back when the last reference to a context goes, whoever has it.
        self._scratch = DeviceBuffer()
        self._runtime: Any = None
        self._engine: Any = None
        self._context: Any = None
        with self._working("loading") as errors:
            try:
                with signals_stop(Stop()):
                    self._load(path, plan, errors)
            except BaseException:
                self._scratch.free()
                raise

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs by name; inputs have their batch dimension.

        Raises:
            BuildError: an input is missing, of the wrong type or in no profile, or the GPU failed.
        """
        with self._running("running") as errors:
            allocated = self._prepare(self._context, inputs)
            self._send()
            self._enqueue(self._context, errors)
            if allocated:
                self._stream.synchronize()
            for memory in allocated:
                memory.take()
            for tensor in self._outputs:
                tensor.fetch(self._stream)
            self._stream.synchronize()
            return {tensor.name: tensor.values() for tensor in self._outputs}

    def time(self, inputs: Mapping[str, Array], seconds: float) -> Timing:
        """Time executions of this batch for about so long, as a CUDA graph where it can be captured; inputs on the device.

        Raises:
            BuildError: as for `run`.
        """
        with self._running("timing") as errors:
            allocated = self._prepare(self._context, inputs)
            self._send()
            # The first execution of a shape sets things up that a graph cannot.
            self._enqueue(self._context, errors)
            self._stream.synchronize()
            for memory in allocated:
                memory.take()
            first = next(iter(inputs.values()))
            rows = int(first.shape[0]) if first.ndim else 1
            graph = self._capture(errors)
            try:
                launch = graph.launch if graph is not None else lambda: self._enqueue(self._context, errors)
                return measure(self._stream, launch, rows, seconds)
            finally:
                if graph is not None:
                    graph.close()

    def layers(self, inputs: Mapping[str, Array]) -> list[Layer]:
        """What the engine consists of, in order, timed on this batch.

        Times are those of TensorRT's profiler, which runs layer after layer: their sum is a little more than one execution.

        Raises:
            BuildError: as for `run`.
        """
        with self._running("profiling") as errors:
            # A context of its own: a profiler slows down all that its context does.
            context = self._new_context(errors)
            times = LayerTimes()
            allocated = self._prepare(context, inputs)
            self._send()
            for _ in range(_WARM_UP_RUNS):
                self._enqueue(context, errors)
            self._stream.synchronize()
            for memory in allocated:
                memory.take()
            profiler = layer_profiler(self._api.trt, times)
            context.profiler = profiler
            for _ in range(_PROFILED_RUNS):
                self._enqueue(context, errors)
                self._stream.synchronize()
            inspector = self._engine.create_engine_inspector()
            inspector.execution_context = context
            told = inspector.get_engine_information(self._api.trt.LayerInformationFormat.JSON)
            del inspector, context
            return read_layers(told, times.mean_us(_PROFILED_RUNS), self._nodes)

    @property
    def memory_bytes(self) -> int:
        """Weights and scratch memory on the GPU; weights are taken for the plan's size where TensorRT does not tell theirs."""
        weights = self._api.weights_bytes(self._engine)
        return self._api.scratch_bytes(self._engine) + (self._plan_bytes if weights is None else weights)

    def close(self) -> None:
        """Give everything back; may be called again."""
        if self._closed:
            return
        with self._working("closing"):
            self._closed = True
            self._settle()
            for tensor in self._tensors.values():
                tensor.close()
            # In this order, with the device current: each holds what comes after it.
            self._context = None
            self._scratch.free()
            self._engine = None
            self._runtime = None
            del self._stream

    @contextmanager
    def _working(self, doing: str) -> Iterator[Any]:
        """The device current, errors collected; what the GPU refuses becomes a BuildError."""
        if self._closed:
            raise BuildError(f"{self._name} is closed")
        with as_build_error(f"{doing} {self._name}"), current(self._device), self._api.log.collect() as errors:
            yield errors

    @contextmanager
    def _running(self, doing: str) -> Iterator[Any]:
        """`_working`, after which nothing is under way any more, whatever happens: the buffers are free for the next batch."""
        with self._working(doing) as errors:
            try:
                yield errors
            except BaseException:
                self._settle()
                raise

    def _load(self, path: Path, plan: bytes, errors: Any) -> None:
        self._api.load_plugins()
        self._runtime = self._api.runtime(errors)
        self._engine = self._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise BuildError(f"{path} {explain_open(errors, self._api.version, describe(self._device).name)}")
        self._plan_bytes = len(plan)
        self._context = self._new_context(errors)
        self._stream = Stream()
        self._read_tensors()

    def _settle(self) -> None:
        # What has failed was told by whoever needed it.
        with suppress(DeviceError):
            self._stream.synchronize()

    def _new_context(self, errors: Any) -> Any:
        """An execution context; all of the engine share their scratch memory, for one of them runs at a time."""
        size_bytes = self._api.scratch_bytes(self._engine)
        told = ""
        try:
            self._scratch.reserve(size_bytes)
            context = self._api.context(self._engine, self._scratch.address, size_bytes)
        except OutOfDeviceMemory as error:
            context, told = None, f" ({error})"
        if context is None:
            told = told or (f" ({errors[-1]})" if errors else "")
            cure = "close what else uses the GPU, or lower the largest shapes in optimization.profiles"
            raise BuildError(f"{self._name} needs {size_bytes >> 20} MiB of scratch memory on the GPU{told}: {cure}")
        return context

    def _read_tensors(self) -> None:
        trt, engine = self._api.trt, self._engine
        self._inputs: list[Tensor] = []
        self._outputs: list[Tensor] = []
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
            dtype = numpy_type(engine.get_tensor_dtype(name))
            tensor = Tensor(name, dtype, tuple(engine.get_tensor_shape(name)), on_host=on_host)
            self._tensors[name] = tensor
            given = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self._inputs if given else self._outputs).append(tensor)
        self._ranges = [
            {tensor.name: self._range(tensor, profile) for tensor in self._inputs}
            for profile in range(engine.num_optimization_profiles)
        ]

    def _range(self, tensor: Tensor, profile: int) -> tuple[tuple[int, ...], ...]:
        if -1 not in tensor.shape:
            return (tensor.shape,) * 3
        return tuple(tuple(shape) for shape in self._engine.get_tensor_profile_shape(tensor.name, profile))

    def _prepare(self, context: Any, inputs: Mapping[str, Array]) -> list[OutputMemory]:
        """Shapes, memory and addresses for this batch; returns the outputs whose shape only execution tells."""
        arrays = self._checked(inputs)
        self._choose_profile(context, {name: tuple(values.shape) for name, values in arrays.items()})
        for tensor in self._inputs:
            tensor.stage(arrays[tensor.name])
            if not context.set_input_shape(tensor.name, tuple(arrays[tensor.name].shape)):
                raise BuildError(f"{self._name} does not take input {tensor.name} of {arrays[tensor.name].shape}")
            context.set_tensor_address(tensor.name, tensor.address)
        try:
            unknown = context.infer_shapes()
        except RuntimeError as error:
            raise BuildError(f"{self._name} cannot tell its outputs' shapes for this batch: {error}") from error
        if unknown:
            raise BuildError(f"{self._name} has not been given {', '.join(unknown)}")
        allocated = []
        for tensor in self._outputs:
            shape = tuple(context.get_tensor_shape(tensor.name))
            if -1 in shape:
                allocated.append(self._allocate_late(context, tensor))
            else:
                tensor.expect(shape)
                context.set_tensor_address(tensor.name, tensor.address)
        return allocated

    def _allocate_late(self, context: Any, tensor: Tensor) -> OutputMemory:
        if tensor.name not in self._allocators:
            memory = OutputMemory(tensor)
            # Kept with the engine: TensorRT does not hold it.
            self._allocators[tensor.name] = memory, output_allocator(self._api.trt, memory)
        memory, allocator = self._allocators[tensor.name]
        memory.begin()
        context.set_output_allocator(tensor.name, allocator)
        return memory

    def _checked(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        names = [tensor.name for tensor in self._inputs]
        missing = [name for name in names if name not in inputs]
        unknown = sorted(set(inputs) - set(names))
        if missing or unknown:
            what = f"lacks {', '.join(missing)}" if missing else f"takes no {', '.join(unknown)}"
            raise BuildError(f"{self._name} {what}: its inputs are {', '.join(names)}")
        return {name: np.asarray(inputs[name]) for name in names}

    def _choose_profile(self, context: Any, shapes: dict[str, tuple[int, ...]]) -> None:
        number = choose_profile(self._ranges, shapes)
        if number is None:
            told = "; ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            served = " or ".join(
                ", ".join(f"{name} {list(least)} to {list(most)}" for name, (least, _, most) in profile.items())
                for profile in self._ranges
            )
            raise BuildError(f"{self._name} was not built for {told}, it takes {served}: see optimization.profiles")
        if context.active_optimization_profile != number:
            if not context.set_optimization_profile_async(number, self._stream.handle):
                raise BuildError(f"{self._name} cannot switch to profile {number + 1}")
            self._stream.synchronize()

    def _send(self) -> None:
        for tensor in self._inputs:
            tensor.send(self._stream)

    def _enqueue(self, context: Any, errors: Any) -> None:
        if not context.execute_async_v3(self._stream.handle):
            for memory, _ in self._allocators.values():
                if memory.raised is not None:
                    raise memory.raised
            raise BuildError(f"{self._name} failed on the GPU: {errors[-1] if errors else 'TensorRT gives no reason'}")

    def _capture(self, errors: Any) -> Graph | None:
        try:
            return Graph(self._stream, lambda: self._enqueue(self._context, errors))
        except (BuildError, DeviceError) as error:
            logger.warning("%s is timed without a CUDA graph, it cannot be captured: %s", self._name, error)
            return None


def _node_names(source: onnx.ModelProto | None) -> list[str] | None:
    """Nodes as the parser names them: those without a name get that of their first output."""
    if source is None:
        return None
    return [node.name or f"node_of_{node.output[0]}" for node in source.graph.node if node.name or node.output]
