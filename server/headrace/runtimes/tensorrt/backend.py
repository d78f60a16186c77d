"""TensorRT on NVIDIA GPUs: one engine a GPU shared by all instances, batches that overlap.

Importing this needs neither TensorRT nor a GPU; creating a `TensorRtBackend` does.

    copy in:   | rows of k+2 |                 an event makes each stage wait for the one before; the host waits once a batch,
    compute:           | k+1 |                 without the interpreter's lock, for the end of its copy out
    copy out:                 | k |

A batch is padded up to a bucket of rows, whose shapes have a CUDA graph. Only the rows of the batch are copied. A small
batch is one graph from the first copy to the last, on the compute stream alone: one call queues it. That holds for all
batches of a bucket with little to overlap, and for others while no other batch of the instance is in flight.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from headrace.core.errors import ConfigError, Finding, HeadraceError, ModelFailed, Unsupported
from headrace.core.ledger import Kind, MemoryAccount, NoRoom, Reservation
from headrace.core.tensor import Array, ResidentRows, as_input
from headrace.runtimes.base import Backend, InputRefused, LoadedModel
from headrace.runtimes.cuda.driver import DeviceError, OutOfDeviceMemory, current
from headrace.runtimes.cuda.kernels.launching import GpuStage, RowGather
from headrace.runtimes.cuda.memory import Allocator, booked
from headrace.runtimes.current_device import CurrentDevice
from headrace.runtimes.overlapped import InFlightBatch, OverlappedExecution, run_one_batch
from headrace.runtimes.tensorrt.buffers import BufferSlot, RowGathers
from headrace.runtimes.tensorrt.contexts import (
    BatchViews,
    DeviceResources,
    InputShapes,
    InstancePlacement,
    PreparedContext,
    describe_shapes,
)
from headrace.runtimes.tensorrt.plan import (
    OpenStage,
    PlanBindings,
    ProfileRange,
    Shape,
    TensorRtPlan,
    TuningResult,
    buckets,
    choose_profile,
    installed,
    load,
    plan_error,
)
from headrace.runtimes.tensorrt.states import BUFFER_SLOTS, NO_STATES, DeviceStates, PlanStates, host_reason
from headrace.runtimes.tensorrt.tuning import tune

# Parameters that the loader adds to those of the configuration: rows in a batch, the comma-separated GPU of each
# instance, and "1" if the requests of a batch are joined.
MAX_BATCH_SIZE = "headrace.max_batch_size"
GPUS = "headrace.gpus"
JOINED = "headrace.joined"
HOST_CODE = "headrace.engine_host_code"

# One batch is copied in while one computes and one is copied out.
_DEPTH = 3
_MAX_DEPTH = 8
# Parameter `wait` -> the host spins while it waits for a batch (None: automatic).
_WAITS: dict[str, bool | None] = {"auto": None, "spin": True, "sleep": False}

logger = logging.getLogger("headrace.tensorrt")


class TensorRtBackend(Backend):
    """Loads plans; see `headrace.runtimes.base.Backend`.

    Raises:
        ConfigError: there is no GPU or no TensorRT; the message says what to install.
    """

    books_memory = True

    def __init__(self) -> None:
        try:
            # Check for a GPU first: TensorRT ends the process if it is started without one.
            installed()
        except Unsupported as error:
            message = f"backend 'tensorrt' is not available on this machine: {error}"
            cure = "write backend: onnxruntime, or fallback: onnxruntime with the ONNX file beside"
            raise ConfigError([Finding("config", None, message, cure)]) from error

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount | None = None
    ) -> TensorRtModel:
        """Deserialise a plan once on each GPU.

        Args:
            file: the plan.
            instances: number of executions.
            parameters: of the model's configuration (docs/configuration.md), with `MAX_BATCH_SIZE` and `GPUS`, and with
                `HOST_CODE` for a version-compatible plan, whose code TensorRT may run.
            account: account for the memory; None: not booked.
        """
        gpu_list = parameters.get(GPUS, "")
        devices = [int(number) for number in gpu_list.split(",")] if gpu_list else [0] * instances
        placements = [_placement(file.name, device, parameters) for device in devices]
        try:
            content = file.read_bytes()
        except OSError as error:
            raise plan_error(
                file.name, f"cannot be read: {error.strerror}", "build it with `headrace build`"
            ) from error
        return TensorRtModel(file.name, content, placements, account, parameters.get(HOST_CODE) == "1")


def _placement(file: str, device: int, parameters: dict[str, str]) -> InstancePlacement:
    """Read an instance's GPU and launch settings from the parameters.

    Raises:
        ConfigError: a parameter has a value that is not allowed.
    """
    graphs, depth = parameters.get("cuda_graphs", "1"), parameters.get("pipeline_depth", str(_DEPTH))
    one_graph, wait = parameters.get("one_graph_rows", "auto"), parameters.get("wait", "auto")
    if graphs not in ("0", "1"):
        raise plan_error(file, f"parameter 'cuda_graphs' is '{graphs}'", "write 1 or 0")
    if not depth.isdecimal() or not 2 <= int(depth) <= _MAX_DEPTH:
        raise plan_error(file, f"parameter 'pipeline_depth' is '{depth}'", f"write 2 to {_MAX_DEPTH}")
    if one_graph != "auto" and not one_graph.isdecimal():
        raise plan_error(file, f"parameter 'one_graph_rows' is '{one_graph}'", "write auto, or a number of rows")
    if wait not in _WAITS:
        raise plan_error(file, f"parameter 'wait' is '{wait}'", f"write one of {', '.join(_WAITS)}")
    is_joined = parameters.get(JOINED) == "1"
    return InstancePlacement(
        device=device,
        max_rows=int(parameters.get(MAX_BATCH_SIZE, "0")),
        depth=int(depth),
        graphs=graphs == "1" and not is_joined,
        one_graph_rows=None if one_graph == "auto" else int(one_graph),
        spins=_WAITS[wait],
        joined=is_joined,
    )


class TensorRtModel(LoadedModel):
    """The engines of one version; see `headrace.runtimes.base.LoadedModel`.

    Args:
        name: of the plan's file.
        content: of the plan's file.
        placements: of the instances.
        account: account for the memory; None: not booked. The weights are booked at the size of the file.
        host_code: TensorRT may run code in the plan, which a version-compatible one has.

    Raises:
        NoRoom: the account has no room.
        ConfigError: the plan was built for another machine, is broken, or does not fit into memory.
    """

    def __init__(
        self,
        name: str,
        content: bytes,
        placements: list[InstancePlacement],
        account: MemoryAccount | None = None,
        host_code: bool = False,
    ) -> None:
        self._name = name
        self._placements = placements
        self._plans: dict[int, TensorRtPlan] = {}
        self._stages: dict[int, dict[str, OpenStage]] = {}
        self._gathers = RowGathers((), name)
        self._states = NO_STATES
        self._weights: list[Reservation | None] = []
        self._lock = threading.Lock()  # guards _warned: instances open on threads of their own
        self._warned = False
        digest = hashlib.sha256(content).digest()
        try:
            for device in sorted({placement.device for placement in placements}):
                allocator = Allocator(device, account)
                weights = allocator.reservation(Kind.WEIGHTS)
                with booked(weights, len(content)):
                    self._plans[device] = _deserialised(name, content, digest, allocator, host_code)
                self._weights.append(weights)
            self._gathers = RowGathers(self._plans, name)
        except BaseException:
            self.close()
            raise
        self.resident_devices = frozenset(self._gathers)  # all, or none if the kernel is not available
        plan = next(iter(self._plans.values()))
        self.inputs, self.outputs = plan.inputs, plan.outputs
        self.shape_ranges = [{name: (k.min_shape, k.max_shape) for name, k in each.items()} for each in plan.profiles]

    def attach_stages(self, stages: Sequence[GpuStage]) -> str:
        """Run stages on the GPUs before and after the plan; called once, before the first execution is created.

        Returns:
            "" on success, else the reason; the model then runs as if this had not been called.
        """
        try:
            for device in self._plans:
                open_stages = self._stages[device] = {}
                for stage in stages:
                    open_stages[stage.tensor] = OpenStage(stage, stage.open(device))
        except (Unsupported, DeviceError) as error:
            self._detach_stages()
            return str(error)
        return ""

    def attach_states(self, states: PlanStates) -> str:
        """Keep states of sequences on the GPUs, in the executions that are created from now on.

        Returns:
            "" on success, else the reason; the model then runs as if this had not been called.
        """
        placement = self._placements[0]
        reason = host_reason(states.tensors, self.inputs, self.outputs, placement.max_rows > 0)
        if not reason:
            self._states = states
        return reason

    def execution(self, index: int) -> TensorRtExecution:
        """Create instance `index` on its GPU.

        Raises:
            ConfigError: the GPU has no room for it, or the plan does not support the model's batches.
        """
        placement = self._placements[index]
        try:
            stages = self._stages.get(placement.device)
            gather = self._gathers.get(placement.device)
            plan = self._plans[placement.device]
            return TensorRtExecution(plan, placement, self._warn, stages, gather, self._states)
        except ConfigError:
            raise
        except OutOfDeviceMemory as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise NoRoom(self._name, f"cannot be run: {error}", cure, placement.device) from error
        except HeadraceError as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise plan_error(self._name, f"cannot be run: {error}", cure) from error

    def buckets_us(self) -> dict[int, float]:
        """Return the microseconds of each bucket; empty before an instance is open."""
        tuning_result = next(iter(self._plans.values())).tuning_result
        if tuning_result is None:
            return {}
        return {n: t.replay_us for n, t in tuning_result.timings.items() if n in tuning_result.buckets}

    def run_rows(self, rows: int) -> int:
        """Return the rows of the bucket; see `LoadedModel`."""
        plan, placement = next(iter(self._plans.values())), self._placements[0]
        tuning_result = plan.tuning_result or TuningResult(buckets(plan.profiles, placement.max_rows))
        return tuning_result.padded(rows)

    def run_unpadded(self) -> bool:
        """Do not pad batches; called once, before the executions that serve are created."""
        self._placements = [placement._replace(padded=False) for placement in self._placements]
        return True

    def detach_states(self) -> None:
        """Keep the states of sequences in host memory; see `LoadedModel`."""
        self._states = NO_STATES

    def close(self) -> None:
        """Free the GPUs' memory."""
        self._detach_stages()
        self._gathers.close()
        for device, plan in self._plans.items():
            with current(device):
                plan.close()
        self._plans.clear()
        for reservation in self._weights:
            if reservation is not None:
                reservation.release()
        self._weights.clear()

    def _detach_stages(self) -> None:
        for device, open_stages in self._stages.items():
            with current(device):
                while open_stages:
                    open_stages.popitem()[1].work.close()
        self._stages.clear()

    def _warn(self, reason: str) -> None:
        with self._lock:
            was_warned, self._warned = self._warned, True
        if not was_warned:
            logger.warning("%s runs without CUDA graphs, it cannot be captured: %s", self._name, reason)


def _deserialised(name: str, content: bytes, digest: bytes, allocator: Allocator, host_code: bool) -> TensorRtPlan:
    device = allocator.gpu
    try:
        machine = installed(device)
        with current(device):
            return TensorRtPlan(load(), content, digest, name, machine, allocator, host_code)
    except ConfigError:
        raise
    except HeadraceError as error:
        cure = "name GPUs that are there in instance_group, or close what else uses them"
        raise plan_error(name, f"cannot be loaded on GPU {device}: {error}", cure) from error


# Two hand-overs between threads take about as long.
_BRIEF_US = 100.0
# Limit of the caches of batch shapes; a full cache is cleared.
_MAX_CACHED_SHAPES = 4096


class _BatchState(NamedTuple):
    """Memory, prepared context and views of a batch in flight."""

    slot: BufferSlot
    context: PreparedContext
    views: BatchViews


class TensorRtExecution(OverlappedExecution):
    """One instance; see `headrace.runtimes.overlapped.OverlappedExecution`. Opened and closed on the instance's thread.

    Ownership: slots move from `_free` to a batch and back (a deque: both threads use its ends); everything else
    belongs to the instance's thread.

    Args:
        plan: shared with the other instances on the GPU.
        placement: GPU and launch settings.
        warn: called once with the reason if CUDA graphs are not available.
        stages: run on the GPU before and after the plan, by the plan's tensor.
        kernel: gathers resident rows; None: batches have none.
        states: states of sequences that stay on the GPU.

    Attributes:
        slot_states: the same, by slot; None without any.
        brief_rows: see `headrace.runtimes.base.Execution`; by the times of the buckets.

    Raises:
        ConfigError: the plan does not support batches of `max_rows` rows, or its outputs cannot be served.
        DeviceError: the GPU has no memory left, or has failed.
    """

    def __init__(
        self,
        plan: TensorRtPlan,
        placement: InstancePlacement,
        warn: Callable[[str], None],
        stages: Mapping[str, OpenStage] | None = None,
        kernel: RowGather | None = None,
        states: PlanStates = NO_STATES,
    ) -> None:
        if states.tensors:
            placement = placement._replace(depth=BUFFER_SLOTS)
        self.depth = placement.depth
        self._plan = plan
        self._ports = PlanBindings(plan, stages or {}, states.hidden)
        self._input_types = self._ports.input_types
        self._batched = placement.max_rows > 0
        self._joined, self._padded = placement.joined, placement.padded
        self._device = None if kernel is None else placement.device
        self._on_device = CurrentDevice(placement.device, plan.name)
        device_states = DeviceStates(states, plan.allocator, self._on_device) if states.tensors else None
        self.slot_states = device_states
        self._resources = DeviceResources(plan, self._ports, placement, kernel, warn, device_states)
        self._free: deque[BufferSlot] = deque()
        self._run_shapes: dict[InputShapes, InputShapes] = {}
        self._views: dict[tuple[int, InputShapes], BatchViews] = {}
        with self._on_device:
            try:
                self._resources.open()
                if self._resources.has_fixed_shapes:
                    self._resources.prepare(tune(self._resources, plan, placement))
                elif placement.joined:
                    self._resources.prepare_joined()
                # If more shapes can occur, `begin` may have to create a context and capture its graph.
                self.prompt = self.any_thread = self._resources.has_fixed_shapes
                self.brief_rows = self._find_brief_rows()
            except BaseException:
                self._resources.close()
                raise
        self._free.extend(self._resources.slots)

    def _find_brief_rows(self) -> int:
        tuning_result = self._resources.tuning_result
        measured = [rows for rows in tuning_result.buckets if rows in tuning_result.timings]
        return max(takewhile(lambda rows: tuning_result.timings[rows].replay_us <= _BRIEF_US, measured), default=0)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return all outputs; see `headrace.runtimes.base.Execution.run`."""
        return run_one_batch(self, inputs, self._batched)

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Begin a batch in a free slot; see `headrace.runtimes.overlapped.OverlappedExecution.begin`."""
        rows = rows if self._batched else 0
        self._check(like)
        requested = tuple([(rows, *like[name].shape[1:]) if rows else like[name].shape for name in self._input_types])
        padded = self._run_shapes.get(requested)
        if padded is None:
            padded = self._cached_run_shapes(requested, rows)
        states = self._resources.states
        while states is not None and self._free[0].index != states.buffer_slot:
            self._free.rotate()
        slot = self._free.popleft()
        try:
            context = self._resources.find_context(slot, padded)
            if context is None:
                with self._on_device:
                    context = self._resources.context(slot, padded)
            views = self._views.get((slot.index, requested))
            if views is None:
                views = self._cached_views(slot, context, requested, rows)
        except BaseException:
            self._free.append(slot)
            raise
        return InFlightBatch(dict(views.inputs), views.rows, _BatchState(slot, context, views), self._device)

    def launch(self, batch: InFlightBatch) -> None:
        """Queue copy in, compute and copy out."""
        slot, context, views = _batch_state(batch)
        # From now on the GPU may read them, whether the launch succeeds or not.
        slot.resident_inputs = batch.resident_inputs
        alone = len(self._free) == self.depth - 1
        try:
            with self._on_device:
                if batch.resident_outputs:
                    slot.resident_outputs = self._resident_outputs(slot, views, batch.resident_outputs)
                self._resources.launch(slot, context, views, batch.resident_inputs, alone)
        except BaseException:
            # Some work may be queued: no other batch may use the memory before it is done.
            with self._on_device:
                self._resources.synchronize()
            self._release_slot(slot)
            raise

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Wait for a batch and return copies of its outputs, or their rows on the GPU."""
        slot, _, views = _batch_state(batch)
        try:
            with self._on_device:
                slot.finished.wait()
            resident = slot.resident_outputs
            return {
                name: as_input(resident[name]) if name in resident else values.copy()
                for name, values in views.outputs.items()
            }
        finally:
            self._release_slot(slot)

    def discard(self, batch: InFlightBatch) -> None:
        """Free the slot of a batch that was not launched."""
        self._release_slot(_batch_state(batch).slot)

    def close(self) -> None:
        """Release everything, after running work is done."""
        # Views would keep the pinned memory alive.
        self._views.clear()
        self._free.clear()
        with self._on_device:
            self._resources.close()

    def _release_slot(self, slot: BufferSlot) -> None:
        slot.resident_inputs, slot.resident_outputs = [], {}
        self._free.append(slot)

    def _resident_outputs(self, slot: BufferSlot, views: BatchViews, names: Collection[str]) -> dict[str, ResidentRows]:
        """Return memory for the outputs that stay on the GPU; those without are copied out.

        Outputs of a stage are copied out, too: its kernel may write them to pinned memory only.
        """
        resident: dict[str, ResidentRows] = {}
        for port in self._ports.outputs:
            if port.stage is None and port.tensor in names and views.outputs[port.tensor].ndim:
                size_bytes = slot.outputs[port.tensor].size_bytes
                rows = self._resources.output_pool.take(port.tensor, size_bytes, views.outputs[port.tensor])
                if rows is not None:
                    resident[port.tensor] = rows
        return resident

    def _check(self, like: Mapping[str, Array]) -> None:
        if like.keys() != self._input_types.keys():
            raise ModelFailed(
                f"{self._plan.name} takes the inputs {', '.join(self._input_types)}, the batch has {', '.join(like)}"
            )
        for name, dtype in self._input_types.items():
            if like[name].dtype != dtype:
                raise ModelFailed(f"{self._plan.name} takes '{name}' as {dtype}, the batch has {like[name].dtype}")

    def _cached_run_shapes(self, requested: InputShapes, rows: int) -> InputShapes:
        """Shapes of the plan's inputs that run for a batch."""
        if len(self._run_shapes) >= _MAX_CACHED_SHAPES:
            self._run_shapes.clear()
        run_shapes = self._run_shapes[requested] = self._choose_run_shapes(
            dict(zip(self._input_types, requested, strict=True)), rows
        )
        return run_shapes

    def _choose_run_shapes(self, requested: dict[str, Shape], rows: int) -> InputShapes:
        exact, tuning_result = self._ports.plan_shapes(requested), self._resources.tuning_result
        if not (rows and self._padded):
            candidates: tuple[int, ...] = (rows,)
        elif self._resources.has_fixed_shapes and rows <= tuning_result.buckets[-1]:
            candidates = (tuning_result.padded(rows),)
        else:
            candidates = tuple(bucket for bucket in tuning_result.buckets if bucket >= rows)
        for run in candidates:
            shapes = {name: (run, *shape[1:]) for name, shape in exact.items()} if rows else exact
            if choose_profile(self._plan.profiles, shapes) is not None:
                return tuple(shapes.values())
        if self._joined:
            raise InputRefused(
                f"the engine was not built for {describe_shapes(exact)}, the joined inputs of the request. It takes "
                f"{_describe_ranges(self._plan.profiles)}: send a request within them, or widen optimization.profiles"
            )
        raise ModelFailed(f"{self._plan.name} was not built for {describe_shapes(exact)}: see optimization.profiles")

    def _cached_views(
        self, slot: BufferSlot, context: PreparedContext, requested: InputShapes, rows: int
    ) -> BatchViews:
        if len(self._views) >= _MAX_CACHED_SHAPES:
            self._views.clear()
        fetched = {
            # Rows of the output without padding.
            name: (rows, *shape[1:]) if rows and shape and shape[0] == context.rows else shape
            for name, shape in context.outputs.items()
        }
        views = self._views[slot.index, requested] = BatchViews(
            {name: slot.inputs[name].view(shape) for name, shape in zip(self._input_types, requested, strict=True)},
            {name: slot.outputs[name].view(shape) for name, shape in fetched.items()},
            rows or 1,
        )
        return views


def _describe_ranges(profiles: Sequence[Mapping[str, ProfileRange]]) -> str:
    return " or ".join(
        ", ".join(f"{name} {list(k.min_shape)} to {list(k.max_shape)}" for name, k in profile.items())
        for profile in profiles
    )


def _batch_state(batch: InFlightBatch) -> _BatchState:
    assert isinstance(batch.state, _BatchState), "the batch was begun by another execution"
    return batch.state
