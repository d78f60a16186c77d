"""The installed TensorRT: start it, read its version, turn its logged errors into messages.

A server loads and runs plans; the builder builds them.
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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from headrace.core.errors import ConfigError, Finding, ModelFailed
from headrace.core.ledger import NoRoom
from headrace.cuda import devices as gpus
from headrace.cuda import tensorrt
from headrace.cuda.driver import CudaStream
from headrace.cuda.memory import Allocator

logger = logging.getLogger("headrace.tensorrt")

_MAX_ERRORS = 20
_OTHER_MACHINE = re.compile(
    r"incompatible device|not compatible with this version|expecting (?:compute|library version)"
)
_NO_MEMORY = re.compile(r"out of memory|OutOfMemory|insufficient memory|Requested size was", re.IGNORECASE)

# TensorRT's names of element types; BF16 has no NumPy type and travels as its bit pattern.
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
    """Times of one number of rows.

    Attributes:
        replay_us: by its CUDA graph.
        plain_us: without, by a context that had other shapes before.
    """

    replay_us: float
    plain_us: float


class TuningResult(NamedTuple):
    """How the batches of a plan are run.

    Attributes:
        buckets: numbers of rows that have contexts and graphs of their own, ascending; none where there is no batch dimension.
        whole: of the buckets those whose batches are one graph each; 0 for that of a model without a batch dimension.
        lone: those whose batches are one graph each while nothing else of the instance is in the air; likewise.
        timings: by rows what was measured; empty if nothing was.
        exact: numbers of rows that run as they are, in no bucket.
    """

    buckets: tuple[int, ...]
    one_graph: frozenset[int] = frozenset()
    timings: Mapping[int, BucketTiming] = {}
    exact: frozenset[int] = frozenset()
    one_graph_when_idle: frozenset[int] = frozenset()

    def padded(self, rows: int) -> int:
        """Rows that are run for a batch of `rows`, at most the last bucket."""
        return rows if rows in self.exact else self.buckets[bisect_left(self.buckets, rows)]


class InstalledTensorRt(NamedTuple):
    """What a plan depends on besides its model.

    Attributes:
        version: of TensorRT, e.g. "10.6.0".
        gpu: what it runs on.
    """

    version: str
    gpu: gpus.Gpu


class TensorRtLibrary:
    """One installed TensorRT.

    Attributes:
        trt: the module `tensorrt`.
        version: e.g. "10.6.0".
        choices: how plans are best run, by all that it depends on, for the life of the process. Single operations on it only:
            instances open in threads of their own.
    """

    def __init__(self, trt: Any) -> None:
        self.trt = trt
        self.tuning_results: dict[Hashable, TuningResult] = {}
        self.version = tensorrt.version(trt)
        self._errors = threading.local()
        # TensorRT keeps the first logger of a process, so there is one for all models.
        self._logger = tensorrt.make_logger(trt, self._take)
        tensorrt.load_plugins(trt, self._logger)

    def runtime(self) -> Any:
        """An IRuntime, None if TensorRT gives none; the device is current (without a GPU this ends the process)."""
        try:
            return self.trt.Runtime(self._logger)
        except TypeError:  # the binding was handed a null pointer
            return None

    @contextlib.contextmanager
    def collect_errors(self) -> Iterator[deque[str]]:
        """The errors that TensorRT logs in this thread from here on, which then only whoever collects them tells."""
        outer = getattr(self._errors, "found", None)
        self._errors.found = found = deque[str](maxlen=_MAX_ERRORS)
        try:
            yield found
        finally:
            self._errors.found = outer

    def _take(self, severity: int, text: str) -> None:
        found = getattr(self._errors, "found", None)
        if severity <= 1 and found is not None:
            found.append(text)
            severity = 2
        # What writes the log may find a full disk or a closed file.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            logger.log(logging.ERROR if severity <= 1 else logging.DEBUG, "%s", text)


def load() -> TensorRtLibrary:
    """The TensorRT of this machine, loaded on first use.

    Raises:
        Unsupported: there is none, or it is too old.
    """
    return _started(tensorrt.import_tensorrt("install Headrace's extra 'gpu', or use NVIDIA's container"))


@functools.cache
def _started(trt: Any) -> TensorRtLibrary:
    return TensorRtLibrary(trt)


def gpu_is_visible() -> bool:
    """True if an NVIDIA driver and a GPU are there; starts neither CUDA nor TensorRT."""
    return gpus.is_visible()


def installed(device: int = 0) -> InstalledTensorRt:
    """What plans for one GPU of this machine depend on.

    Raises:
        Unsupported: there is no GPU, no driver or no TensorRT; says what to install.
    """
    gpu = gpus.describe(device)
    return InstalledTensorRt(load().version, gpu)


def numpy_type(datatype: Any) -> np.dtype[Any] | None:
    """How NumPy holds a `tensorrt.DataType`; None if it holds it in no way."""
    found = _DTYPES.get(datatype.name)
    return None if found is None else np.dtype(found)


def is_out_of_memory(errors: Collection[str]) -> bool:
    """True if TensorRT complains that there is no memory.

    Args:
        errors: that it has logged.
    """
    return any(_NO_MEMORY.search(error) for error in errors)


def load_failure(errors: Collection[str], here: InstalledTensorRt) -> tuple[str, str]:
    """Why a plan is not loaded, and the cure.

    Args:
        errors: that TensorRT has logged.
        here: what it was to be loaded with.
    """
    last = list(errors)[-1].strip() if errors else "TensorRT logged no error"
    rebuild = "build it again on this machine with `headrace build`"
    if any(_OTHER_MACHINE.search(error) for error in errors):
        return f"was not built by TensorRT {here.version} on {here.gpu.name} ({last})", rebuild
    if is_out_of_memory(errors):
        cure = "close what else uses the GPU, or serve fewer models or instances"
        return f"does not fit into the memory of {here.gpu.name} ({last})", cure
    return f"is no plan that TensorRT {here.version} can load ({last})", rebuild


# Stages: kernels between a model's callers and its plan, e.g. pixels to a tensor, scores to classes.
#
# A stage runs before one input of the plan or after one output. Callers see other tensors in its place (`client_tensors`), with
# as many rows. The plan's own tensor never leaves the GPU.


# Below, a batch takes about as long with one row more.
_FINE_FROM = 8
# Of more plans a process forgets what it has found out first.
_MAX_TUNING_RESULTS = 256

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """One input or output.

    Attributes:
        name: of the tensor.
        dtype: how NumPy holds it.
        shape: -1 where free.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape


class ProfileRange(NamedTuple):
    """The shapes that a profile takes of one input.

    Attributes:
        least: smallest sizes.
        tuned: those that it is fastest for.
        most: largest sizes.
    """

    min_shape: Shape
    opt_shape: Shape
    max_shape: Shape


class TensorRtPlan:
    """A plan on one GPU.

    Args:
        api: TensorRT.
        content: of the plan's file.
        digest: of the content.
        name: of the file, for messages.
        here: the machine.
        allocator: for what its instances need on this GPU.

    Attributes:
        name: of the file.
        allocator: as given.
        inputs: in the plan's order.
        outputs: likewise.
        profiles: by profile and input what is taken.
        scratch_bytes: GPU memory that a context needs while it runs.
        tuning: held by whoever measures how batches are best run, or asks.
        choice: what has been found; None before.

    Raises:
        ConfigError: it was built for another machine, is broken, or has tensors that cannot be served.
    """

    def __init__(
        self,
        api: TensorRtLibrary,
        content: bytes,
        digest: bytes,
        name: str,
        here: InstalledTensorRt,
        allocator: Allocator,
    ) -> None:
        self._trt = api.trt
        self._api = api
        self._digest = digest
        self.name = name
        self.allocator = allocator
        # TensorRT makes no promise for contexts that are made by several threads at once.
        self._lock = threading.Lock()
        # Guards `choice`, and keeps instances from disturbing the one that measures.
        self.tuning_lock = threading.Lock()
        self.tuning_result: TuningResult | None = None
        with api.collect_errors() as errors:
            self._runtime = api.runtime()
            self._engine: Any = None if self._runtime is None else self._runtime.deserialize_cuda_engine(content)
            if self._engine is None:
                raise (
                    self._no_room(*load_failure(errors, here))
                    if is_out_of_memory(errors)
                    else plan_error(name, *load_failure(errors, here))
                )
        tensors = [self._read(index) for index in range(self._engine.num_io_tensors)]
        self.inputs = [tensor for tensor, given in tensors if given]
        self.outputs = [tensor for tensor, given in tensors if not given]
        self.profiles = [
            {tensor.name: self._range(tensor, number) for tensor in self.inputs}
            for number in range(self._engine.num_optimization_profiles)
        ]
        self.scratch_bytes = int(self._engine.device_memory_size_v2)

    def context(self, scratch: int) -> Any:
        """An IExecutionContext that works in memory of the caller's.

        Args:
            scratch: its address; `scratch_bytes` long, and no two contexts that share it may run at the same time.

        Raises:
            ConfigError: there is no memory for it.
        """
        strategy = self._trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with self._lock, self._api.collect_errors() as errors:
            context = self._engine.create_execution_context(strategy)
        if context is None:
            detail = f" ({errors[-1].strip()})" if errors else ""
            raise self._no_room(
                f"finds no memory on the GPU for an instance{detail}", "serve fewer models or instances"
            )
        if self.scratch_bytes:
            context.set_device_memory(scratch, self.scratch_bytes)
        return context

    def find_tuning_result(self, how: Hashable) -> TuningResult | None:
        """What was found earlier in this process for the same content on this GPU, run the same way.

        Args:
            how: it is run.
        """
        return self._api.tuning_results.get((self._digest, self.allocator.gpu, how))

    def save_tuning_result(self, how: Hashable, tuning_result: TuningResult) -> None:
        """Let those who load the same content later `recall` what has been found."""
        tuning_results = self._api.tuning_results
        tuning_results[self._digest, self.allocator.gpu, how] = tuning_result
        for oldest in list(tuning_results)[:-_MAX_TUNING_RESULTS]:
            tuning_results.pop(oldest, None)  # another instance's thread may have

    def _no_room(self, message: str, cure: str) -> NoRoom:
        return NoRoom(self.name, message, cure, self.allocator.gpu)

    def collect_errors(self) -> AbstractContextManager[Collection[str]]:
        """The errors that TensorRT logs in this thread from here on."""
        return self._api.collect_errors()

    def close(self) -> None:
        """Give the GPU's memory back; all contexts are gone."""
        # In this order: each holds what comes after it.
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
    """The error for a plan that is not served."""
    return ConfigError([Finding(name, None, message, cure)])


def choose_profile(profiles: Sequence[Mapping[str, ProfileRange]], shapes: Shapes) -> int | None:
    """Number of the profile that serves these shapes best: tuned for them, else the one with the least room; None without one."""
    fitting = []
    for number, profile in enumerate(profiles):
        if all(_fits(shapes[name], limits) for name, limits in profile.items()):
            opt_shape = all(shapes[name] == limits.opt_shape for name, limits in profile.items())
            fitting.append((not opt_shape, sum(math.prod(limits.max_shape) for limits in profile.values()), number))
    return min(fitting)[2] if fitting else None


def buckets(profiles: Sequence[Mapping[str, ProfileRange]], max_rows: int, fine: bool = False) -> tuple[int, ...]:
    """Numbers of rows that batches are padded to: powers of two and the largest, as far as a profile takes them; ascending.

    Args:
        profiles: of the plan.
        max_rows: rows in the largest batch that is asked for.
        fine: from 8 on, also what is half way to the next power.
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
    # The largest below what is asked for, and the smallest above nothing, where profiles have other bounds.
    expected |= {bound for span in spans for bound in span if bound <= max_rows}
    expected |= {min_shape for min_shape, _ in spans if min_shape > max_rows}
    supported = sorted(rows for rows in expected if any(low <= rows <= high for low, high in spans))
    enough = next((number for number, rows in enumerate(supported, 1) if rows >= max_rows), len(supported))
    return tuple(supported[:enough])


def largest(profiles: Sequence[Mapping[str, ProfileRange]], rows: int) -> list[tuple[int, dict[str, Shape]]]:
    """By profile its number and the largest shapes that are served.

    Args:
        profiles: of the plan.
        rows: of the largest bucket; 0 where there is no batch dimension.
    """
    found = []
    for number, profile in enumerate(profiles):
        if rows and any(limits.min_shape[0] > rows for limits in profile.values()):
            continue
        shapes = {
            name: (min(k.max_shape[0], rows), *k.max_shape[1:]) if rows else k.max_shape for name, k in profile.items()
        }
        found.append((number, shapes))
    return found


def _fits(shape: Sequence[int], limits: ProfileRange) -> bool:
    return len(shape) == len(limits.max_shape) and all(
        low <= size <= high for low, size, high in zip(limits.min_shape, shape, limits.max_shape, strict=True)
    )


Dtype = np.dtype[Any]
Launch = Callable[[CudaStream, int, int, Sequence[int]], None]  # as `StageKernel.launch`


class StageKernel(Protocol):
    """A stage on one GPU, for all instances there. A launch allocates nothing and waits for nothing: it may be captured."""

    def launch(self, stream: CudaStream, source: int, rows: int, targets: Sequence[int]) -> None:
        """Queue the work of a batch; the device is current.

        Args:
            stream: on which.
            source: address of what goes in.
            rows: of the batch, padding and all.
            targets: address of each tensor that comes out, in the order of `GpuStage.client_tensors`.

        Raises:
            DeviceError: the driver refuses.
        """

    @property
    def fetch(self) -> Launch | None:
        """The same for rows anywhere: `source` is the address of uint64 (rows,), where each of them is. None: it cannot."""

    def close(self) -> None:
        """Give back what it holds; all work is done."""


class GpuStage(Protocol):
    """A step before an input of a plan, or behind an output."""

    @property
    def tensor(self) -> str:
        """The input or output of the plan."""

    @property
    def row(self) -> Shape:
        """Shape of one row of it, as the plan has it."""

    @property
    def client_tensors(self) -> Mapping[str, tuple[Dtype, Shape]]:
        """What callers see in its place, by name: element type and shape of a row. Just one before an input."""

    def open(self, device: int) -> StageKernel:
        """Get ready on a GPU.

        Raises:
            Unsupported, DeviceError: that cannot be had.
        """


@dataclass(frozen=True, slots=True)
class OpenStage:
    """A stage that is ready on a GPU.

    Attributes:
        stage: what is done.
        work: does it.
    """

    stage: GpuStage
    work: StageKernel

    def rows(self, shape: Shape) -> int:
        """Rows in a tensor of the plan of this shape."""
        return math.prod(shape[: len(shape) - len(self.stage.row)])

    def client_shapes(self, shape: Shape) -> dict[str, Shape] | None:
        """Shapes of what callers see for one of the plan's tensor; None if it has other rows than the stage knows."""
        lead = len(shape) - len(self.stage.row)
        if lead < 0 or shape[lead:] != self.stage.row:
            return None
        return {name: (*shape[:lead], *row) for name, (_, row) in self.stage.client_tensors.items()}

    def plan_shape(self, shape: Shape) -> Shape | None:
        """Shape of the plan's tensor for one that callers send; None if they cannot."""
        ((_, row),) = self.stage.client_tensors.values()
        lead = len(shape) - len(row)
        return (*shape[:lead], *self.stage.row) if lead >= 0 and shape[lead:] == row else None


class TensorBinding(NamedTuple):
    """A tensor of the plan and what callers see of it.

    Attributes:
        tensor: the plan's.
        dtype: its element type.
        client_tensors: by callers' names their element types.
        stage: the stage in between, None where callers see the plan's tensor itself.
    """

    tensor: str
    dtype: Dtype
    client_tensors: dict[str, Dtype]
    stage: OpenStage | None


class PlanBindings:
    """A plan's tensors as callers see them.

    Args:
        plan: the plan.
        stages: by the plan's tensor, on the plan's GPU.

    Attributes:
        inputs: in the plan's order.
        outputs: likewise.
        given: element types of what callers send, by name.

    Raises:
        ConfigError: two tensors would have the same name, or a stage does not go with its tensor.
    """

    def __init__(self, plan: TensorRtPlan, stages: Mapping[str, OpenStage]) -> None:
        self._plan = plan
        self.inputs = [_port(tensor.name, tensor.dtype, stages) for tensor in plan.inputs]
        self.outputs = [_port(tensor.name, tensor.dtype, stages) for tensor in plan.outputs]
        self.input_types = {name: dtype for port in self.inputs for name, dtype in port.client_tensors.items()}
        seen = [name for port in self.outputs for name in port.client_tensors]
        for name in seen:
            if seen.count(name) > 1:
                raise plan_error(
                    plan.name, f"has an output '{name}' beside postprocess's", "give postprocess other names"
                )

    def plan_shapes(self, shapes: Shapes) -> dict[str, Shape]:
        """Shapes of the plan's inputs for those that callers send.

        Raises:
            ModelFailed: callers cannot send that.
        """
        found: dict[str, Shape] = {}
        for port in self.inputs:
            shape = shapes[port.tensor]
            expected = shape if port.stage is None else port.stage.plan_shape(shape)
            if expected is None:
                raise ModelFailed(f"{self._plan.name} takes no '{port.tensor}' of {list(shape)}")
            found[port.tensor] = expected
        return found

    def client_shapes(self, ports: Iterable[TensorBinding], shapes: Shapes) -> dict[str, Shape]:
        """Shapes of what callers see, for those of the plan's tensors.

        Raises:
            ModelFailed: the plan's are not what the stages were made for.
        """
        found: dict[str, Shape] = {}
        for port in ports:
            shape = shapes[port.tensor]
            seen = {port.tensor: shape} if port.stage is None else port.stage.client_shapes(shape)
            if seen is None:
                raise ModelFailed(f"{self._plan.name} gives '{port.tensor}' of {list(shape)}, which nothing is made of")
            found |= seen
        return found


def _port(tensor: str, dtype: Dtype, stages: Mapping[str, OpenStage]) -> TensorBinding:
    stage = stages.get(tensor)
    if stage is None:
        return TensorBinding(tensor, dtype, {tensor: dtype}, None)
    return TensorBinding(tensor, dtype, {name: kind for name, (kind, _) in stage.stage.client_tensors.items()}, stage)
