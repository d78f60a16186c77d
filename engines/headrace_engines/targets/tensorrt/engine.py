"""A loaded plan: runs batches, times them as a CUDA graph with CUDA events, and lists its layers.

One thread opens, uses and closes an engine. Buffers grow to the largest batch so far and stay allocated.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from headrace.runtimes.cuda.convolution_plugin import CURE, collect_refusals
from headrace.runtimes.cuda.devices import describe
from headrace.runtimes.cuda.driver import CudaGraph, CudaStream, DeviceError, OutOfDeviceMemory, TimingEvent, current
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, download, read_now, upload

from headrace_engines.errors import BuildError
from headrace_engines.targets.base import BatchTiming, MeasuredLayer
from headrace_engines.targets.tensorrt.api import Interrupt, TensorRtApi, as_build_error, explain_open, signals_deferred
from headrace_engines.targets.tensorrt.engine_layers import LayerTimer, layer_profiler, read_layers

Array = npt.NDArray[Any]
# NumPy types by TensorRT's names; BF16 and FP8 have no NumPy type and are passed as bit patterns.
_DTYPES = {
    "FLOAT": "<f4",
    "HALF": "<f2",
    "BF16": "<u2",
    "FP8": "u1",
    "INT8": "i1",
    "UINT8": "u1",
    "INT32": "<i4",
    "INT64": "<i8",
    "BOOL": "?",
}


def numpy_type(datatype: Any) -> np.dtype[Any]:
    """Return the NumPy type of a `tensorrt.DataType`.

    Raises:
        BuildError: NumPy has no such type.
    """
    dtype = _DTYPES.get(datatype.name)
    if dtype is None:
        raise BuildError(f"the engine has a tensor of type {datatype.name}: inputs and outputs must have a NumPy type")
    return np.dtype(dtype)


class EngineTensor:
    """Input or output of a plan with its memory, which grows on demand and stays allocated.

    Args:
        name: name of the tensor.
        dtype: NumPy type.
        shape: shape, -1 for free dimensions.
        on_host: True if TensorRT reads or writes it in host memory (values that define shapes).
    """

    def __init__(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], *, on_host: bool = False) -> None:
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.on_host = on_host
        self._device = DeviceBuffer()
        self._pinned = PinnedBuffer()
        self._staged: Array | None = None

    @property
    def address(self) -> int:
        """Address of the memory that TensorRT reads or writes."""
        return self._pinned.address if self.on_host else self._device.address

    def fit(self, values: Array) -> Array:
        """Return an input's values in the type of the engine.

        Raises:
            BuildError: they have another type.
        """
        if values.dtype == self.dtype:
            return values
        if values.dtype.name == "bfloat16" and self.dtype == np.uint16:
            return values.view(np.uint16)
        raise BuildError(f"input {self.name} is {values.dtype}: the engine takes {self.dtype}")

    def stage(self, values: Array) -> None:
        """Copy an input's values to pinned memory and allocate GPU memory for them."""
        values = self.fit(values)
        self._reserve(values.nbytes)
        self._staged = self._pinned.view(values.shape, self.dtype)
        np.copyto(self._staged, values)

    def send(self, stream: CudaStream) -> None:
        """Queue the copy of the staged values to the GPU."""
        if self._staged is not None and not self.on_host:
            upload(self._device, self._staged, stream)

    def expect(self, shape: tuple[int, ...]) -> None:
        """Allocate memory for an output of this shape."""
        self._reserve(math.prod(shape) * self.dtype.itemsize)
        self._staged = self._pinned.view(shape, self.dtype)

    def allocate(self, size_bytes: int) -> int:
        """Allocate GPU memory for an output of unknown shape and return its address."""
        self._device.reserve(size_bytes)
        return self._device.address

    def expect_allocated(self, shape: tuple[int, ...]) -> None:
        """Set the shape of an output with memory of `allocate`."""
        self._pinned.reserve(math.prod(shape) * self.dtype.itemsize)
        self._staged = self._pinned.view(shape, self.dtype)

    def fetch(self, stream: CudaStream) -> None:
        """Queue the copy of an output from the GPU."""
        if self._staged is not None and not self.on_host:
            download(self._staged, self._device, stream)

    def values(self) -> Array:
        """Return a copy of the output; synchronise the stream first."""
        assert self._staged is not None
        return self._staged.copy()

    def close(self) -> None:
        """Free the memory."""
        self._staged = None
        self._device.free()
        self._pinned.free()

    def _reserve(self, size_bytes: int) -> None:
        # Drop the view: its memory may be freed by the next line.
        self._staged = None
        self._pinned.reserve(size_bytes)
        if not self.on_host:
            self._device.reserve(size_bytes)


class OutputMemory:
    """Memory of an output with a data-dependent shape; TensorRT requests it during the execution.

    Attributes:
        shape: shape reported by the last execution; None before.
        raised: stored exception, since exceptions cannot pass through TensorRT; None without one.
    """

    def __init__(self, tensor: EngineTensor) -> None:
        self._tensor = tensor
        self.shape: tuple[int, ...] | None = None
        self.raised: BaseException | None = None

    def begin(self) -> None:
        """Reset shape and exception before an execution."""
        self.shape = None
        self.raised = None

    def reallocate(self, size_bytes: int) -> int:
        """Allocate memory and return its address; 0 on failure."""
        try:
            return self._tensor.allocate(size_bytes)
        except BaseException as error:
            self.raised = error
            return 0

    def apply_shape(self) -> None:
        """Apply the shape that TensorRT has reported, after the stream is synchronised.

        Raises:
            BuildError: TensorRT has reported no shape.
        """
        if self.raised is not None:
            raise self.raised
        if self.shape is None:
            raise BuildError(f"the engine has not reported the shape of its output {self._tensor.name}: build it again")
        self._tensor.expect_allocated(self.shape)


def output_allocator(trt: Any, memory: OutputMemory) -> Any:
    """Return an IOutputAllocator that uses `memory`."""

    class Allocator(trt.IOutputAllocator):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IOutputAllocator.__init__(self)

        def reallocate_output(self, tensor_name: str, memory_: int, size: int, alignment: int) -> int:
            return memory.reallocate(size)

        def reallocate_output_async(
            self, tensor_name: str, memory_: int, size: int, alignment: int, stream: int
        ) -> int:
            return memory.reallocate(size)

        def notify_shape(self, tensor_name: str, shape: Any) -> None:
            memory.shape = tuple(int(size) for size in shape)

    return Allocator()


class DebugValues:
    """Values of debug tensors, copied during an execution; an exception is stored, since none can pass through TensorRT."""

    def __init__(self) -> None:
        self._values: dict[str, Array] = {}
        self._raised: BaseException | None = None

    def take(self, name: str, address: Any, dtype: Any, shape: Any, on_host: bool) -> bool:
        """Copy a tensor; return False to stop the execution.

        Args:
            name: name of the tensor.
            address: its address, as a number, or as a capsule, which the signature in TensorRT 10.6 names.
            dtype: its `tensorrt.DataType`.
            shape: its sizes.
            on_host: True if it is in host memory.
        """
        try:
            values = np.empty(tuple(int(size) for size in shape), numpy_type(dtype))
            if on_host:
                ctypes.memmove(values.ctypes.data, pointer_of(address), values.nbytes)
            else:
                read_now(values, pointer_of(address))
            self._values[name] = values
        except BaseException as error:
            self._raised = error
        return self._raised is None

    def result(self) -> dict[str, Array]:
        """Return the values by name, or raise the stored exception."""
        if self._raised is not None:
            raise self._raised
        return self._values


def pointer_of(address: Any) -> int:
    """Return the address in a Python capsule, or a number as it is."""
    if isinstance(address, int):
        return address
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(address, name(address)) or 0)


def debug_listener(trt: Any, values: DebugValues) -> Any:
    """Return an IDebugListener that adds to `values`."""

    class Listener(trt.IDebugListener):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IDebugListener.__init__(self)

        def process_debug_tensor(
            self, addr: Any, location: Any, datatype: Any, shape: Any, name: str, stream: int
        ) -> bool:
            on_host = location == trt.TensorLocation.HOST
            return values.take(name, addr, datatype, shape, on_host)

    return Listener()


_WARM_UP, _SINGLE, _SUSTAINED = 0.2, 0.4, 0.4
_MIN_WARM_UPS = 3
_BURST = 16
_BURST_SHARE = 0.05


def time_executions(stream: CudaStream, launch: Callable[[], None], rows: int, seconds: float) -> BatchTiming:
    """Time executions of one batch.

    Single executions are timed between events that are queued ahead in bursts, so that the GPU does not wait for Python. The
    first execution of a burst, for which it waits, is left out. Throughput is measured over a long sequence of executions.

    Args:
        stream: stream of the executions.
        launch: queues one execution on the stream.
        rows: rows of the batch.
        seconds: approximate duration of the measurement.
    """
    started_s = time.monotonic()
    warm_up_runs = 0
    while warm_up_runs < _MIN_WARM_UPS or time.monotonic() - started_s < _WARM_UP * seconds:
        launch()
        warm_up_runs += 1
        # Synchronise after each: queued executions would delay the measurement.
        stream.synchronize()
    each_s = (time.monotonic() - started_s) / warm_up_runs

    burst = int(min(max(_BURST_SHARE * seconds / each_s, 2), _BURST))
    events = [TimingEvent() for _ in range(burst + 1)]
    singles: list[float] = []
    started_s = time.monotonic()
    while not singles or time.monotonic() - started_s < _SINGLE * seconds:
        for event in events:
            launch()
            event.record(stream)
        stream.synchronize()
        singles += [later.us_since(earlier) for earlier, later in pairwise(events)]
    median_us = float(np.median(singles))

    count = max(int(_SUSTAINED * seconds * 1e6 / max(median_us, 1.0)), 1)
    first, last = events[0], events[1]
    first.record(stream)
    for _ in range(count):
        launch()
    last.record(stream)
    stream.synchronize()
    rows_per_s = rows * count / (max(last.us_since(first), 1e-3) / 1e6)
    return BatchTiming(rows, median_us, float(np.percentile(singles, 99)), rows_per_s)


def choose_profile(
    ranges: Sequence[Mapping[str, tuple[tuple[int, ...], ...]]], shapes: Mapping[str, tuple[int, ...]]
) -> int | None:
    """Return the number of the best profile for these shapes, or None: tuned for them, else the smallest one.

    Args:
        ranges: smallest, tuned and largest shape by profile and input.
        shapes: shapes of the inputs.
    """
    fitting = []
    for number, profile in enumerate(ranges):
        if all(_within(shapes[name], smallest, largest) for name, (smallest, _, largest) in profile.items()):
            tuned = all(shapes[name] == tuple(opt) for name, (_, opt, _) in profile.items())
            room = sum(math.prod(largest) for _, _, largest in profile.values())
            fitting.append((not tuned, room, number))
    return min(fitting)[2] if fitting else None


def _within(shape: Sequence[int], smallest: Sequence[int], largest: Sequence[int]) -> bool:
    return len(shape) == len(smallest) and all(a <= s <= c for a, s, c in zip(smallest, shape, largest, strict=True))


logger = logging.getLogger("headrace.tensorrt")
_PROFILED_RUNS = 20
_WARM_UP_RUNS = 3


class TensorRtEngine:
    """One plan on one GPU.

    Args:
        api: TensorRT.
        path: file of the plan.
        source: ONNX model that it was built from; limits `layers` to the names of its nodes.
        device: number of the GPU.
        host_code: TensorRT may run code in the plan, which a version-compatible one has.

    Raises:
        BuildError: the file is missing or for another TensorRT or GPU, or memory ran out.
    """

    def __init__(
        self, api: TensorRtApi, path: Path, source: onnx.ModelProto | None, device: int, *, host_code: bool = False
    ) -> None:
        self._api = api
        self._host_code = host_code
        self._name = path.name
        self._device = device
        self._nodes = _node_names(source)
        self._closed = False
        self._tensors: dict[str, EngineTensor] = {}
        self._allocators: dict[str, tuple[OutputMemory, Any]] = {}
        try:
            plan = path.read_bytes()
        except OSError as error:
            raise BuildError(f"{path} cannot be read ({error.strerror}): build the engine") from error
        # Owned here, not by contexts: TensorRT frees its own memory with the last reference to a context, on any thread.
        self._scratch = DeviceBuffer()
        self._runtime: Any = None
        self._engine: Any = None
        self._context: Any = None
        with self._working("loading") as errors:
            try:
                with signals_deferred(Interrupt()):
                    self._load(path, plan, errors)
            except BaseException:
                self._scratch.free()
                raise

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return all outputs by name; inputs have their batch dimension.

        Raises:
            BuildError: an input is missing, of the wrong type or in no profile, or the GPU reports an error.
        """
        with self._running("running") as errors:
            allocated = self._prepare(self._context, inputs)
            self._send()
            self._enqueue(self._context, errors)
            if allocated:
                self._stream.synchronize()
            for memory in allocated:
                memory.apply_shape()
            for tensor in self._outputs:
                tensor.fetch(self._stream)
            self._stream.synchronize()
            return {tensor.name: tensor.values() for tensor in self._outputs}

    def time(self, inputs: Mapping[str, Array], seconds: float) -> BatchTiming:
        """Time executions of this batch for about `seconds`, as a CUDA graph if possible; inputs are on the device.

        Raises:
            BuildError: as for `run`.
        """
        with self._running("timing") as errors:
            # The first execution of a shape initialises resources, which cannot be captured in a graph.
            self._execute(self._context, inputs, errors)
            first = next(iter(inputs.values()))
            rows = int(first.shape[0]) if first.ndim else 1
            graph = self._capture(errors)
            try:
                launch = graph.launch if graph is not None else lambda: self._enqueue(self._context, errors)
                return time_executions(self._stream, launch, rows, seconds)
            finally:
                if graph is not None:
                    graph.close()

    def layers(self, inputs: Mapping[str, Array], *, graph: bool = False) -> list[MeasuredLayer]:
        """Return the engine's layers in order, timed on this batch.

        Times are those of TensorRT's profiler, which serialises layers: their sum exceeds the time of one execution.

        Args:
            inputs: the batch.
            graph: profile a CUDA graph, so that layers of a plug-in do not wait for Python.

        Raises:
            BuildError: as for `run`.
        """
        with self._running("profiling") as errors:
            # A separate context: a profiler slows down all executions of its context.
            context = self._new_context(errors)
            times = LayerTimer()
            self._execute(context, inputs, errors, _WARM_UP_RUNS)
            profiler = layer_profiler(self._api.trt, times)
            context.profiler = profiler
            if graph:
                self._profile_graph(context, errors)
            else:
                for _ in range(_PROFILED_RUNS):
                    self._enqueue(context, errors)
                    self._stream.synchronize()
            inspector = self._engine.create_engine_inspector()
            inspector.execution_context = context
            information = inspector.get_engine_information(self._api.trt.LayerInformationFormat.JSON)
            del inspector, context
            return read_layers(information, times.mean_us(_PROFILED_RUNS), self._nodes)

    def layer_information(self) -> str:
        """Return the JSON of the engine inspector."""
        with self._working("inspecting"):
            inspector = self._engine.create_engine_inspector()
            return str(inspector.get_engine_information(self._api.trt.LayerInformationFormat.JSON))

    def run_debug(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return the values of all debug tensors by name; BF16 and FP8 as bit patterns.

        Raises:
            BuildError: as for `run`.
        """
        with self._running("reading the tensors of") as errors:
            # A separate context: reports of debug tensors slow down the executions of their context.
            context = self._new_context(errors)
            values = DebugValues()
            listener = debug_listener(self._api.trt, values)
            if not context.set_debug_listener(listener) or not context.set_all_tensors_debug_state(True):
                raise BuildError(f"{self._name} reports no inner tensors: TensorRT {self._api.version} refuses it")
            self._execute(context, inputs, errors)
            del context
            return values.result()

    def _execute(self, context: Any, inputs: Mapping[str, Array], errors: Any, runs: int = 1) -> None:
        """Send a batch, run it so many times, and wait."""
        allocated = self._prepare(context, inputs)
        self._send()
        for _ in range(runs):
            self._enqueue(context, errors)
        self._stream.synchronize()
        for memory in allocated:
            memory.apply_shape()

    def _profile_graph(self, context: Any, errors: Any) -> None:
        """Profile runs of a graph (IExecutionContext.report_to_profiler)."""
        context.enqueue_emits_profile = False
        captured = CudaGraph(self._stream, lambda: self._enqueue(context, errors))
        try:
            for _ in range(_PROFILED_RUNS):
                captured.launch()
                self._stream.synchronize()
                context.report_to_profiler()
        finally:
            captured.close()

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and scratch memory on the GPU; the size of the plan if TensorRT does not report the weights."""
        weights = self._api.weights_bytes(self._engine)
        return self._api.scratch_bytes(self._engine) + (self._plan_bytes if weights is None else weights)

    def close(self) -> None:
        """Free all resources; may be called again."""
        if self._closed:
            return
        with self._working("closing"):
            self._closed = True
            self._settle()
            for tensor in self._tensors.values():
                tensor.close()
            # In this order, with the device current: each object uses the next ones.
            self._context = None
            self._scratch.free()
            self._engine = None
            self._runtime = None
            del self._stream

    @contextmanager
    def _working(self, activity: str) -> Iterator[Any]:
        """Make the device current and collect errors; errors of the GPU become a BuildError."""
        if self._closed:
            raise BuildError(f"{self._name} is closed")
        with as_build_error(f"{activity} {self._name}"), current(self._device), self._api.log.collect() as errors:
            yield errors

    @contextmanager
    def _running(self, activity: str) -> Iterator[Any]:
        """Like `_working`, and wait for queued work after an error: the buffers are free for the next batch."""
        with self._working(activity) as errors:
            try:
                yield errors
            except BaseException:
                self._settle()
                raise

    def _load(self, path: Path, plan: bytes, errors: Any) -> None:
        self._api.load_plugins()
        self._runtime = self._api.runtime(errors)
        if self._host_code:
            self._runtime.engine_host_code_allowed = True
        with collect_refusals() as refusals:
            self._engine = self._runtime.deserialize_cuda_engine(plan)
        if refusals:
            self._engine = None
            raise BuildError(f"{path} {refusals[0]}: {CURE}")
        if self._engine is None:
            raise BuildError(f"{path} {explain_open(errors, self._api.version, describe(self._device).name)}")
        self._plan_bytes = len(plan)
        self._context = self._new_context(errors)
        self._stream = CudaStream()
        self._read_tensors()

    def _settle(self) -> None:
        # The call that needed the result has raised the error already.
        with suppress(DeviceError):
            self._stream.synchronize()

    def _new_context(self, errors: Any) -> Any:
        """Return an execution context; all contexts share the scratch memory, since one of them runs at a time."""
        size_bytes = self._api.scratch_bytes(self._engine)
        reason = ""
        try:
            self._scratch.reserve(size_bytes)
            with collect_refusals() as refusals:
                context = self._api.context(self._engine, self._scratch.address, size_bytes)
            if refusals:
                raise BuildError(f"{self._name} cannot open its plug-in: {refusals[0]}: {CURE}")
        except OutOfDeviceMemory as error:
            context, reason = None, f" ({error})"
        if context is None:
            reason = reason or (f" ({errors[-1]})" if errors else "")
            cure = "close what else uses the GPU, or lower the largest shapes in optimization.profiles"
            raise BuildError(f"{self._name} needs {size_bytes >> 20} MiB of scratch memory on the GPU{reason}: {cure}")
        return context

    def _read_tensors(self) -> None:
        trt, engine = self._api.trt, self._engine
        self._inputs: list[EngineTensor] = []
        self._outputs: list[EngineTensor] = []
        for index in range(engine.num_io_tensors):
            name = engine.get_tensor_name(index)
            on_host = engine.get_tensor_location(name) == trt.TensorLocation.HOST
            dtype = numpy_type(engine.get_tensor_dtype(name))
            tensor = EngineTensor(name, dtype, tuple(engine.get_tensor_shape(name)), on_host=on_host)
            self._tensors[name] = tensor
            is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self._inputs if is_input else self._outputs).append(tensor)
        self._ranges = [
            {tensor.name: self._range(tensor, profile) for tensor in self._inputs}
            for profile in range(engine.num_optimization_profiles)
        ]

    def _range(self, tensor: EngineTensor, profile: int) -> tuple[tuple[int, ...], ...]:
        if -1 not in tensor.shape:
            return (tensor.shape,) * 3
        return tuple(tuple(shape) for shape in self._engine.get_tensor_profile_shape(tensor.name, profile))

    def _prepare(self, context: Any, inputs: Mapping[str, Array]) -> list[OutputMemory]:
        """Shapes, memory and addresses for this batch; returns the outputs whose shape only the execution determines."""
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
            raise BuildError(f"{self._name} cannot infer its outputs' shapes for this batch: {error}") from error
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

    def _allocate_late(self, context: Any, tensor: EngineTensor) -> OutputMemory:
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
            shapes_text = "; ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            served = " or ".join(
                ", ".join(
                    f"{name} {list(smallest)} to {list(largest)}" for name, (smallest, _, largest) in profile.items()
                )
                for profile in self._ranges
            )
            raise BuildError(
                f"{self._name} was not built for {shapes_text}, it takes {served}: see optimization.profiles"
            )
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

    def _capture(self, errors: Any) -> CudaGraph | None:
        try:
            return CudaGraph(self._stream, lambda: self._enqueue(self._context, errors))
        except (BuildError, DeviceError) as error:
            logger.warning("%s is timed without a CUDA graph, it cannot be captured: %s", self._name, error)
            return None


def _node_names(source: onnx.ModelProto | None) -> list[str] | None:
    """Nodes as the parser names them: those without a name get that of their first output."""
    if source is None:
        return None
    return [node.name or f"node_of_{node.output[0]}" for node in source.graph.node if node.name or node.output]
