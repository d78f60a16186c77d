"""TensorRT of this machine, and a plan deserialised on one GPU: tensors, profiles, contexts, and stages around it.

One engine, and with it one copy of the weights, serves all instances on a GPU. The device must be current. A server
loads and runs plans; the builder builds them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass
from typing import Any, NamedTuple

import numpy as np

from headrace.core.errors import ConfigError, Finding, ModelFailed
from headrace.core.ledger import NoRoom
from headrace.runtimes.cuda import convolution_plugin, tensorrt
from headrace.runtimes.cuda import devices as gpus
from headrace.runtimes.cuda.driver import OutOfDeviceMemory
from headrace.runtimes.cuda.kernels.launching import GpuStage, StageKernel
from headrace.runtimes.cuda.memory import Allocator

logger = logging.getLogger("headrace.tensorrt")

_MAX_ERRORS = 20
_OTHER_MACHINE = re.compile(
    r"incompatible device|not compatible with this version|expecting (?:compute|library version)"
)
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|insufficient memory|Requested size was", re.IGNORECASE)

# TensorRT's element types in NumPy's notation; BF16 has no NumPy type and is passed as its bit pattern.
_DTYPES = {
    "FLOAT": "<f4",
    "HALF": "<f2",
    "BF16": "<u2",
    "INT8": "i1",
    "UINT8": "u1",
    "INT32": "<i4",
    "INT64": "<i8",
    "BOOL": "?",
}


class BucketTiming(NamedTuple):
    """Measured times of one number of rows.

    Attributes:
        replay_us: as a CUDA graph.
        plain_us: without a graph, in a context that had other shapes before.
    """

    replay_us: float
    plain_us: float


class TuningResult(NamedTuple):
    """Buckets of a plan, and the way in which their batches are launched.

    Attributes:
        buckets: numbers of rows that have contexts and graphs of their own, ascending; empty without a batch dimension.
        one_graph: buckets whose batches are one graph each; 0 stands for a model without a batch dimension.
        timings: measurements by rows; empty if nothing was measured.
        exact: numbers of rows that run unpadded, in no bucket.
        one_graph_when_idle: buckets whose batches are one graph each while no other batch of the instance is in flight.
    """

    buckets: tuple[int, ...]
    one_graph: frozenset[int] = frozenset()
    timings: Mapping[int, BucketTiming] = {}
    exact: frozenset[int] = frozenset()
    one_graph_when_idle: frozenset[int] = frozenset()

    def padded(self, rows: int) -> int:
        """Return the number of rows that run for a batch of `rows`, at most the last bucket."""
        return rows if rows in self.exact else self.buckets[bisect_left(self.buckets, rows)]


class InstalledTensorRt(NamedTuple):
    """Machine properties that a plan depends on.

    Attributes:
        version: of TensorRT, e.g. "10.6.0".
        gpu: the GPU that runs it.
    """

    version: str
    gpu: gpus.Gpu


class TensorRtLibrary:
    """The installed TensorRT.

    Attributes:
        trt: the module `tensorrt`.
        version: e.g. "10.6.0".
        tuning_results: by plan, GPU and settings, for the life of the process. Only single operations: instances open
            on threads of their own.
    """

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.tuning_results: dict[Hashable, TuningResult] = {}
        self.version = tensorrt.version(trt)
        self._errors = threading.local()
        # TensorRT uses the first logger of a process for everything, so all models share one.
        self._logger = tensorrt.make_logger(trt, self._log)
        tensorrt.load_plugins(trt, self._logger)

    def runtime(self) -> Any:
        """Return an IRuntime, None if TensorRT fails; the device must be current (without a GPU this ends the process)."""
        try:
            return self.trt.Runtime(self._logger)
        except TypeError:  # raised by the binding for a null pointer
            return None

    @contextlib.contextmanager
    def collect_errors(self) -> Iterator[deque[str]]:
        """Collect the errors that TensorRT logs on this thread, instead of logging them."""
        outer = getattr(self._errors, "collected", None)
        self._errors.collected = collected = deque[str](maxlen=_MAX_ERRORS)
        try:
            yield collected
        finally:
            self._errors.collected = outer

    def _log(self, severity: int, text: str) -> None:
        collected = getattr(self._errors, "collected", None)
        if severity <= 1 and collected is not None:
            collected.append(text)
            severity = 2
        # The log's file may be closed, or the disk full.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            logger.log(logging.ERROR if severity <= 1 else logging.DEBUG, "%s", text)


def load() -> TensorRtLibrary:
    """Load the TensorRT of this machine on first use.

    Raises:
        Unsupported: it is missing or too old.
    """
    return _started(tensorrt.import_tensorrt("install Headrace's extra 'gpu', or use NVIDIA's container"))


_started = functools.cache(TensorRtLibrary)


def installed(device: int = 0) -> InstalledTensorRt:
    """Return the machine properties that plans for one GPU depend on.

    Raises:
        Unsupported: the GPU, the driver or TensorRT is missing; the message says what to install.
    """
    gpu = gpus.describe(device)
    return InstalledTensorRt(load().version, gpu)


def plugin_problem(name: str, version: str, digest: str, layers: Mapping[str, str]) -> str:
    """Return the reason why an engine with a plug-in does not run with this Headrace; "" if it does.

    Args:
        name, version, digest, layers: of the plug-in, from the engine's manifest.
    """
    return tensorrt.plugin_problem(name, version, digest, layers)


def numpy_type(datatype: Any) -> np.dtype[Any] | None:
    """Return the NumPy type of a `tensorrt.DataType`; None without one."""
    notation = _DTYPES.get(datatype.name)
    return None if notation is None else np.dtype(notation)


def is_out_of_memory(errors: Collection[str]) -> bool:
    """Return True if TensorRT's errors say that memory is missing.

    Args:
        errors: logged by TensorRT.
    """
    return any(_NO_MEMORY.search(error) for error in errors)


def load_failure(errors: Collection[str], machine: InstalledTensorRt) -> tuple[str, str]:
    """Return the reason why a plan is not loaded, and the cure.

    Args:
        errors: logged by TensorRT.
        machine: the machine.
    """
    last = list(errors)[-1].strip() if errors else "TensorRT logged no error"
    rebuild = "build it again on this machine with `headrace build`"
    missing = convolution_plugin.missing_plugin(errors)
    if missing:
        return f"needs a plug-in, or a version of one, that this Headrace does not have ({missing})", rebuild
    if any(_OTHER_MACHINE.search(error) for error in errors):
        return f"was not built by TensorRT {machine.version} on {machine.gpu.name} ({last})", rebuild
    if is_out_of_memory(errors):
        cure = "close what else uses the GPU, or serve fewer models or instances"
        return f"does not fit into the memory of {machine.gpu.name} ({last})", cure
    return f"is no plan that TensorRT {machine.version} can load ({last})", rebuild


# Stages: kernels between a model's clients and its plan, e.g. pixels to a tensor, scores to classes.
#
# A stage runs before one input of the plan or after one output. Clients use other tensors in its place (`client_tensors`),
# with as many rows. The plan's own tensor never leaves the GPU.


# With fewer rows, one more row hardly changes the time of a batch.
_FINE_FROM = 8
# Limit of remembered results in a process; the oldest are dropped.
_MAX_TUNING_RESULTS = 256

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """One input or output of a plan.

    Attributes:
        name: of the tensor.
        dtype: its NumPy type.
        shape: -1 for free dimensions.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape


class ProfileRange(NamedTuple):
    """Shapes of one input that an optimization profile supports.

    Attributes:
        min_shape: smallest sizes.
        opt_shape: sizes that it is tuned for.
        max_shape: largest sizes.
    """

    min_shape: Shape
    opt_shape: Shape
    max_shape: Shape


@dataclass(eq=False, repr=False)
class TensorRtPlan:
    """A plan deserialised on one GPU.

    Attributes:
        api: TensorRT.
        content: of the plan's file.
        digest: of the content.
        name: of the file, for messages.
        machine: the machine.
        allocator: for the memory that its instances need on this GPU.
        host_code: TensorRT may run code in the plan, which a version-compatible one has.
        inputs: in the plan's order.
        outputs: in the plan's order.
        profiles: for each profile, the supported shapes by input.
        scratch_bytes: GPU memory that a context needs while it runs.
        tuning_lock: held by the instance that measures, and by others while they read the result.
        tuning_result: None before the measurement.

    Raises:
        ConfigError: the plan was built for another machine, is broken, or has tensors that cannot be served.
    """

    api: TensorRtLibrary
    content: InitVar[bytes]
    digest: bytes
    name: str
    machine: InitVar[InstalledTensorRt]
    allocator: Allocator
    host_code: InitVar[bool] = False

    def __post_init__(self, content: bytes, machine: InstalledTensorRt, host_code: bool) -> None:
        self._trt = self.api.trt
        # TensorRT does not promise that several threads may create contexts at once.
        self._lock = threading.Lock()
        # Guards `tuning_result`, and keeps other instances from disturbing a measurement.
        self.tuning_lock = threading.Lock()
        self.tuning_result: TuningResult | None = None
        with self.api.collect_errors() as errors, convolution_plugin.collect_refusals() as refusals:
            self._runtime = self.api.runtime()
            if self._runtime is not None and host_code:
                self._runtime.engine_host_code_allowed = True
            self._engine: Any = None if self._runtime is None else self._runtime.deserialize_cuda_engine(content)
            if self._engine is None and tensorrt.register_convolutions(self.api.trt, errors):
                errors.clear()
                self._engine = self._runtime.deserialize_cuda_engine(content)
            if refusals:
                self._engine = None
                raise plan_error(self.name, str(refusals[0]), convolution_plugin.CURE)
            if self._engine is None:
                raise (
                    self._no_room(*load_failure(errors, machine))
                    if is_out_of_memory(errors)
                    else plan_error(self.name, *load_failure(errors, machine))
                )
        tensors = [self._read(index) for index in range(self._engine.num_io_tensors)]
        self.inputs = [tensor for tensor, is_input in tensors if is_input]
        self.outputs = [tensor for tensor, is_input in tensors if not is_input]
        self.profiles = [
            {tensor.name: self._range(tensor, number) for tensor in self.inputs}
            for number in range(self._engine.num_optimization_profiles)
        ]
        self.scratch_bytes = int(self._engine.device_memory_size_v2)

    def context(self, scratch: int) -> Any:
        """Create an IExecutionContext that works in the caller's memory.

        Args:
            scratch: address of `scratch_bytes` of GPU memory; contexts that share it must not run at the same time.

        Raises:
            ConfigError: there is no memory for it.
        """
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with self._lock, self.api.collect_errors() as errors, convolution_plugin.collect_refusals() as refusals:
            context = self._engine.create_execution_context(strategy)
        if refusals and not isinstance(refusals[0], OutOfDeviceMemory):
            reason = f"cannot open its plug-in {convolution_plugin.PLUGIN}: {refusals[0]}"
            raise plan_error(self.name, reason, convolution_plugin.CURE)
        if context is None or refusals:
            detail = f" ({errors[-1].strip()})" if errors else ""
            raise self._no_room(
                f"finds no memory on the GPU for an instance{detail}", "serve fewer models or instances"
            )
        if self.scratch_bytes:
            context.set_device_memory(scratch, self.scratch_bytes)
        return context

    def find_tuning_result(self, how: Hashable) -> TuningResult | None:
        """Return the result measured earlier in this process for the same content, GPU and settings; None without one.

        Args:
            how: settings of the instance.
        """
        return self.api.tuning_results.get((self.digest, self.allocator.gpu, how))

    def save_tuning_result(self, how: Hashable, tuning_result: TuningResult) -> None:
        """Remember a result for later instances of the same content."""
        tuning_results = self.api.tuning_results
        tuning_results[self.digest, self.allocator.gpu, how] = tuning_result
        for oldest in list(tuning_results)[:-_MAX_TUNING_RESULTS]:
            tuning_results.pop(oldest, None)  # another instance's thread may have removed it

    def _no_room(self, message: str, cure: str) -> NoRoom:
        return NoRoom(self.name, message, cure, self.allocator.gpu)

    def collect_errors(self) -> AbstractContextManager[Collection[str]]:
        """Collect the errors that TensorRT logs on this thread."""
        return self.api.collect_errors()

    def close(self) -> None:
        """Free the GPU memory; all contexts are gone."""
        # In this order: the engine refers to the runtime.
        self._engine = None
        self._runtime = None

    def _read(self, index: int) -> tuple[PlanTensor, bool]:
        engine = self._engine
        name = engine.get_tensor_name(index)
        shape = tuple(int(size) for size in engine.get_tensor_shape(name))
        dtype = numpy_type(engine.get_tensor_dtype(name))
        if dtype is None:
            kind = engine.get_tensor_dtype(name).name
            raise plan_error(self.name, f"has the tensor '{name}' of type {kind}", "let it take and give another type")
        if engine.get_tensor_location(name) == self._trt.TensorLocation.HOST:
            cure = "make them constants of the ONNX model"
            raise plan_error(self.name, f"has shapes that the values of '{name}' decide on", cure)
        return PlanTensor(name, dtype, shape), engine.get_tensor_mode(name) == self._trt.TensorIOMode.INPUT

    def _range(self, tensor: PlanTensor, profile: int) -> ProfileRange:
        if -1 not in tensor.shape:
            return ProfileRange(tensor.shape, tensor.shape, tensor.shape)
        detail = self._engine.get_tensor_profile_shape(tensor.name, profile)
        return ProfileRange(*(tuple(int(size) for size in shape) for shape in detail))


def plan_error(name: str, message: str, cure: str) -> ConfigError:
    """Create the error for a plan that is not served."""
    return ConfigError([Finding(name, None, message, cure)])


def choose_profile(profiles: Sequence[Mapping[str, ProfileRange]], shapes: Shapes) -> int | None:
    """Return the number of the best profile for shapes: one tuned for them, else the one with the smallest range; None
    without one.
    """
    fitting = []
    for number, profile in enumerate(profiles):
        if all(_fits(shapes[name], limits) for name, limits in profile.items()):
            opt_shape = all(shapes[name] == limits.opt_shape for name, limits in profile.items())
            fitting.append((not opt_shape, sum(math.prod(limits.max_shape) for limits in profile.values()), number))
    return min(fitting)[2] if fitting else None


def buckets(profiles: Sequence[Mapping[str, ProfileRange]], max_rows: int, fine: bool = False) -> tuple[int, ...]:
    """Return the numbers of rows that batches are padded to: powers of two and the maximum, as far as profiles support
    them; ascending.

    Args:
        profiles: of the plan.
        max_rows: rows in the largest batch.
        fine: from 8 on, add the values halfway to the next power.
    """
    spans = [
        (
            max(limits.min_shape[0] for limits in profile.values()),
            min(limits.max_shape[0] for limits in profile.values()),
        )
        for profile in profiles
        if profile and all(limits.min_shape for limits in profile.values())
    ]
    expected = {1 << power for power in range(max_rows.bit_length())} | {max_rows}
    if fine:
        expected |= {rows + rows // 2 for rows in expected if rows >= _FINE_FROM and rows + rows // 2 <= max_rows}
    # Add bounds of profiles up to max_rows, and the smallest minimum above it.
    expected |= {bound for span in spans for bound in span if bound <= max_rows}
    expected |= {min_shape for min_shape, _ in spans if min_shape > max_rows}
    supported = sorted(rows for rows in expected if any(low <= rows <= high for low, high in spans))
    end = next((number for number, rows in enumerate(supported, 1) if rows >= max_rows), len(supported))
    return tuple(supported[:end])


def largest(profiles: Sequence[Mapping[str, ProfileRange]], rows: int) -> list[tuple[int, dict[str, Shape]]]:
    """Return for each profile its number and the largest shapes that are served.

    Args:
        profiles: of the plan.
        rows: of the largest bucket; 0 without a batch dimension.
    """
    shapes_by_profile = []
    for number, profile in enumerate(profiles):
        if rows and any(limits.min_shape[0] > rows for limits in profile.values()):
            continue
        shapes = {
            name: (min(k.max_shape[0], rows), *k.max_shape[1:]) if rows else k.max_shape for name, k in profile.items()
        }
        shapes_by_profile.append((number, shapes))
    return shapes_by_profile


def _fits(shape: Sequence[int], limits: ProfileRange) -> bool:
    return len(shape) == len(limits.max_shape) and all(
        low <= size <= high for low, size, high in zip(limits.min_shape, shape, limits.max_shape, strict=True)
    )


Dtype = np.dtype[Any]


@dataclass(frozen=True, slots=True)
class OpenStage:
    """A stage that is ready on a GPU.

    Attributes:
        stage: its description.
        work: its kernel.
    """

    stage: GpuStage
    work: StageKernel

    def rows(self, shape: Shape) -> int:
        """Number of rows in a plan's tensor of this shape."""
        return math.prod(shape[: len(shape) - len(self.stage.row)])

    def client_shapes(self, shape: Shape) -> dict[str, Shape] | None:
        """Shapes of the client tensors for a plan's tensor of this shape; None if its rows have another shape."""
        lead = len(shape) - len(self.stage.row)
        if lead < 0 or shape[lead:] != self.stage.row:
            return None
        return {name: (*shape[:lead], *row) for name, (_, row) in self.stage.client_tensors.items()}

    def plan_shape(self, shape: Shape) -> Shape | None:
        """Shape of the plan's tensor for a client's tensor of this shape; None if its rows have another shape."""
        ((_, row),) = self.stage.client_tensors.values()
        lead = len(shape) - len(row)
        return (*shape[:lead], *self.stage.row) if lead >= 0 and shape[lead:] == row else None


class TensorBinding(NamedTuple):
    """A tensor of the plan and the tensors that clients use for it.

    Attributes:
        tensor: name in the plan.
        dtype: its element type.
        client_tensors: element types by clients' names.
        stage: the stage in between, None if clients use the plan's tensor itself.
    """

    tensor: str
    dtype: Dtype
    client_tensors: dict[str, Dtype]
    stage: OpenStage | None


class PlanBindings:
    """A plan's tensors as clients see them.

    Args:
        plan: the plan.
        stages: by the plan's tensor, on the plan's GPU.
        hidden: names of inputs and outputs that clients do not use: states that stay on the GPU.

    Attributes:
        inputs: in the plan's order.
        outputs: in the plan's order.
        input_types: element types of clients' inputs, by name.

    Raises:
        ConfigError: two tensors would have the same name, or a stage does not fit its tensor.
    """

    def __init__(
        self, plan: TensorRtPlan, stages: Mapping[str, OpenStage], hidden: frozenset[str] = frozenset()
    ) -> None:
        self._plan = plan
        self._hidden = {tensor.name: tensor for tensor in plan.inputs if tensor.name in hidden}
        self.inputs = [_bind(t.name, t.dtype, stages) for t in plan.inputs if t.name not in hidden]
        self.outputs = [_bind(t.name, t.dtype, stages) for t in plan.outputs if t.name not in hidden]
        self.input_types = {name: dtype for port in self.inputs for name, dtype in port.client_tensors.items()}
        client_names = [name for port in self.outputs for name in port.client_tensors]
        for name in client_names:
            if client_names.count(name) > 1:
                raise plan_error(
                    plan.name, f"has an output '{name}' beside postprocess's", "give postprocess other names"
                )

    def plan_shapes(self, shapes: Shapes) -> dict[str, Shape]:
        """Return shapes of the plan's inputs for shapes of clients' inputs.

        Raises:
            ModelFailed: a stage does not support a shape.
        """
        shapes_by_name: dict[str, Shape] = {}
        for port in self.inputs:
            shape = shapes[port.tensor]
            expected = shape if port.stage is None else port.stage.plan_shape(shape)
            if expected is None:
                raise ModelFailed(f"{self._plan.name} takes no '{port.tensor}' of {list(shape)}")
            shapes_by_name[port.tensor] = expected
        if not self._hidden:
            return shapes_by_name
        rows = next((shape[0] for shape in shapes_by_name.values() if shape), 1)
        for tensor in self._hidden.values():
            shapes_by_name[tensor.name] = tuple(rows if size == -1 else size for size in tensor.shape)
        return {tensor.name: shapes_by_name[tensor.name] for tensor in self._plan.inputs}

    def client_shapes(self, ports: Iterable[TensorBinding], shapes: Shapes) -> dict[str, Shape]:
        """Return shapes of clients' tensors for shapes of the plan's.

        Raises:
            ModelFailed: the plan's shapes do not fit the stages.
        """
        shapes_by_name: dict[str, Shape] = {}
        for port in ports:
            shape = shapes[port.tensor]
            client_shapes = {port.tensor: shape} if port.stage is None else port.stage.client_shapes(shape)
            if client_shapes is None:
                raise ModelFailed(
                    f"{self._plan.name} returns {port.tensor!r} of {list(shape)}, which postprocess does not support"
                )
            shapes_by_name |= client_shapes
        return shapes_by_name


def _bind(tensor: str, dtype: Dtype, stages: Mapping[str, OpenStage]) -> TensorBinding:
    stage = stages.get(tensor)
    if stage is None:
        return TensorBinding(tensor, dtype, {tensor: dtype}, None)
    return TensorBinding(tensor, dtype, {name: kind for name, (kind, _) in stage.stage.client_tensors.items()}, stage)
