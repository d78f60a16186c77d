"""ONNX Runtime's CUDA provider on NVIDIA GPUs: the second GPU runtime, for ONNX models that TensorRT cannot take.

Importing this needs no GPU; creating an `OnnxRuntimeCudaBackend` does. It needs the package onnxruntime-gpu, which installs the
module `onnxruntime` in place of the package of that name.

    instance's thread   fill k+2 | launch: queue the copy to the GPU, return at once
    copy stream                  | rows of k+1 |
    finisher's thread            | run k, wait | copy outputs of k to the host

An instance has a session, a compute stream that the session runs on (`user_compute_stream`), and a copy stream. A batch has a
slot: pinned memory, device memory and an event. `launch` queues the copy to the GPU. `finish` waits for it, binds the slot's
device memory as inputs, and runs the session; ONNX Runtime returns when the GPU is done. Outputs are bound to the GPU without
a shape: ONNX Runtime allocates them in the session's arena. They are copied to pinned memory and from there to the caller's.

Inputs are bound again for every batch, after their copy is complete: of an input that only nodes on the CPU read, ONNX Runtime
makes a host copy when it is bound.

API: ONNX Runtime, "I/O Binding" of the Python reference and "CUDA Execution Provider".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from headrace.core.errors import ConfigError, Finding, HeadraceError, ModelFailed, Unsupported
from headrace.core.ledger import Kind, MemoryAccount, NoRoom
from headrace.core.tensor import BY_ORT_NAME, BYTES, Array, Datatype, is_resident
from headrace.runtimes.base import Backend, Execution, ExecutionLost, LoadedModel
from headrace.runtimes.cuda.devices import describe
from headrace.runtimes.cuda.driver import (
    CompletionEvent,
    CudaStream,
    DeviceError,
    OutOfDeviceMemory,
    loaded,
)
from headrace.runtimes.cuda.kernels.launching import RowGather
from headrace.runtimes.cuda.memory import Allocator, PinnedBuffer
from headrace.runtimes.current_device import CurrentDevice
from headrace.runtimes.onnxruntime import bad_parameter, load_finding, session_options
from headrace.runtimes.overlapped import InFlightBatch, ResidentInput, run_one_batch
from headrace.runtimes.tensorrt.backend import GPUS, MAX_BATCH_SIZE
from headrace.runtimes.tensorrt.buffers import (
    SHARED_BLOCKS,
    RowGathers,
    RowTable,
    TensorBuffer,
    fetch_from_peers,
    gather,
)

logger = logging.getLogger("headrace.onnxruntime")

PROVIDER = "CUDAExecutionProvider"
EXTRA = "install Headrace's extra 'gpu-onnx' (docs/gpu.md, \"ONNX Runtime's CUDA provider\")"

# Name of the GPU's memory for ONNX Runtime.
_DEVICE_TYPE = "cuda"
_DEPTH = 3
_MAX_DEPTH = 8
# Device memory of a client is bound as it lies at this alignment, which cudaMalloc has; kernels read several elements at once.
_ALIGNMENT = 256
# A thread spins while it waits for a copy of at most this size: it takes less time than waking a thread that sleeps.
_SPIN_BYTES = 1 << 20
# Libraries that the provider is linked with, those that others need first; the last two are loaded by it on demand.
_LIBRARIES = ("libcudart", "libcublasLt", "libcublas", "libcurand", "libnvrtc", "libcufft", "libcudnn")
_OPTIONAL = ("libnvrtc", "libcufft", "libcudnn")

_ALGORITHMS = {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"}
_STRATEGIES = {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"}
_SWITCH = {"0": "0", "1": "1"}
# Parameters of Triton's ONNX Runtime backend that are options of the provider: allowed values -> values of the provider.
_CHOICES: dict[str, Mapping[str, str]] = {
    "arena_extend_strategy": {**_STRATEGIES, **{name: name for name in _STRATEGIES.values()}},
    "cudnn_conv_algo_search": {**_ALGORITHMS, **{name: name for name in _ALGORITHMS.values()}},
    "cudnn_conv_use_max_workspace": _SWITCH,
    "use_tf32": _SWITCH,
}
# The exhaustive search, which is ONNX Runtime's default, runs for every number of rows that occurs: seconds in the middle of
# serving. The arena grows by what is needed, since its memory is booked.
_DEFAULTS = {"arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}

_NO_MEMORY = ("failed to allocate memory", "out of memory", "alloc_failed")

# Serialises the creation of sessions, whose memory is measured as the decrease of the GPU's free memory.
_opening = threading.Lock()


@functools.cache
def provider_problem() -> str:
    """Return the reason why the CUDA provider cannot run here; "" if it can. Loads the CUDA libraries."""
    if PROVIDER not in ort.get_available_providers():
        return f"the installed onnxruntime has no CUDA provider: {EXTRA}"
    try:
        describe()
    except Unsupported as error:
        return str(error)
    # Every session with the provider makes its default logger warn that no plug-in provider of the name is registered.
    ort.set_default_logger_severity(3)
    missing = [name for name in _LIBRARIES if not _preload(name) and name not in _OPTIONAL]
    if missing:
        version = getattr(ort, "cuda_version", "") or "the version of the package"
        return f"the libraries {', '.join(missing)} of CUDA {version} cannot be loaded: {EXTRA}"
    return ""


def _preload(name: str) -> bool:
    """Load a CUDA library from the loader's path or from NVIDIA's packages; the provider then finds it by its name.

    `onnxruntime.preload_dlls` searches the folder of onnxruntime only, which may be another than that of NVIDIA's packages.
    """
    for folder in sys.path:
        for file in sorted(Path(folder or ".").glob(f"nvidia/*/lib/{name}.so.*")):
            if _fits_build(name, file.name):
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(file))
                    return True
    for suffix in _suffixes(name):
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"{name}.so.{suffix}")
            return True
    return False


def _suffixes(name: str) -> tuple[str, ...]:
    """Versions of a library that fit the CUDA version for which onnxruntime was built."""
    major = str(getattr(ort, "cuda_version", "") or "").partition(".")[0]
    if not major.isdecimal():
        return ()
    return {
        "libcurand": ("10",),
        "libcudnn": ("9",),
        "libcufft": (str(int(major) - 1),),  # 11 of CUDA 12, 12 of CUDA 13
    }.get(name, (major,))


def _fits_build(name: str, file: str) -> bool:
    return file.rpartition(".so.")[2] in _suffixes(name)


class OnnxRuntimeCudaBackend(Backend):
    """Loads ONNX files onto GPUs; see `headrace.runtimes.base.Backend`.

    Raises:
        ConfigError: there is no GPU, or no CUDA provider; the message says what to install.
    """

    books_memory = True

    def __init__(self) -> None:
        problem = provider_problem()
        if problem:
            cure = "write backend: onnxruntime with KIND_CPU, or fallback: onnxruntime"
            raise ConfigError([Finding("config", None, problem, cure)])

    def load(
        self, file: Path, instances: int, parameters: dict[str, str], account: MemoryAccount | None = None
    ) -> CudaModel:
        """Read the options of the sessions; each instance opens its own session.

        Args:
            file: an ONNX model.
            instances: number of executions.
            parameters: of the model's configuration (docs/configuration.md), with `MAX_BATCH_SIZE` and `GPUS`.
            account: account for the memory; None: not booked.

        Raises:
            ConfigError: a parameter has a value that is not allowed.
        """
        gpu_list = parameters.get(GPUS, "")
        devices = [int(number) for number in gpu_list.split(",")] if gpu_list else [0] * instances
        depth = parameters.get("pipeline_depth", str(_DEPTH))
        if not depth.isdecimal() or not 2 <= int(depth) <= _MAX_DEPTH:
            raise bad_parameter(file, "pipeline_depth", depth, f"2 to {_MAX_DEPTH}")
        session = SessionPlan(
            file=file,
            options=session_options(instances, parameters, file),
            provider=provider_options(parameters, file),
            max_rows=int(parameters.get(MAX_BATCH_SIZE, "0")),
            depth=int(depth),
        )
        return CudaModel(session, devices, account)


def provider_options(parameters: Mapping[str, str], file: Path) -> dict[str, str]:
    """Return the options of the CUDA provider, without device and stream.

    Args:
        parameters: of the model's configuration.
        file: of the model, for messages.

    Raises:
        ConfigError: a parameter has a value that is not allowed.
    """
    options = dict(_DEFAULTS)
    for name, allowed in _CHOICES.items():
        value = parameters.get(name)
        if value is None:
            continue
        if value not in allowed:
            raise bad_parameter(file, name, value, ", ".join(allowed))
        options[name] = allowed[value]
    limit = parameters.get("gpu_mem_limit")
    if limit is not None:
        if not limit.isdecimal() or not int(limit):
            raise bad_parameter(file, "gpu_mem_limit", limit, "a number of bytes")
        options["gpu_mem_limit"] = limit
    return options


class SessionPlan(NamedTuple):
    """Settings of the sessions of one model.

    Attributes:
        file: an ONNX model.
        options: options of each session.
        provider: options of the CUDA provider, without device and stream.
        max_rows: rows of the largest batch; 0 without a batch dimension.
        depth: batches in flight.
    """

    file: Path
    options: ort.SessionOptions
    provider: dict[str, str]
    max_rows: int
    depth: int


class CudaModel(LoadedModel):
    """One version on its GPUs; see `headrace.runtimes.base.LoadedModel`.

    Args:
        session: settings of the sessions.
        devices: GPU number of each instance.
        account: account for the memory; None: not booked.
    """

    def __init__(self, session: SessionPlan, devices: Sequence[int], account: MemoryAccount | None) -> None:
        self._session = session
        self._devices = devices
        self._account = account
        self._gathers = RowGathers(sorted(set(devices)), session.file.name)
        self.resident_devices = frozenset(self._gathers)  # all, or none if the kernel is not available

    def execution(self, index: int) -> CudaExecution:
        """Open the session of instance `index` on its GPU.

        Raises:
            NoRoom: the GPU has no room for it.
            ConfigError: ONNX Runtime cannot load the file, or not on this GPU.
        """
        device, name = self._devices[index], self._session.file.name
        try:
            return CudaExecution(self._session, Allocator(device, self._account), self._gathers.get(device))
        except ConfigError:
            raise
        except OutOfDeviceMemory as error:
            cure = "serve fewer models or instances, or lower max_batch_size"
            raise NoRoom(name, f"cannot be run: {error}", cure, device) from error
        except (HeadraceError, ExecutionLost) as error:
            message = f"cannot be loaded on GPU {device} by ONNX Runtime's CUDA provider: {error}"
            cure = "name GPUs that are there in instance_group, or close what else uses them"
            raise ConfigError([Finding(name, None, message, cure)]) from error

    def close(self) -> None:
        """Unload the kernels; the instances have closed their sessions."""
        self._gathers.close()


class _CurrentGpu(CurrentDevice):
    """Converts ONNX Runtime's errors that say that memory is missing."""

    def convert(self, error: Exception) -> None:
        """Raise OutOfDeviceMemory if ONNX Runtime's text says so: such errors have no type of their own."""
        if _is_out_of_memory(error):
            # ONNX Runtime's text has names of nodes only, but clients read this.
            message = "its arena cannot grow: lower max_batch_size, or raise gpu_mem_limit if it is set"
            logger.warning("%s: GPU %d: %s: %s", self._name, self._device, message, error)
            raise OutOfDeviceMemory(f"GPU {self._device} has no memory left for {self._name}, {message}") from error


def _is_out_of_memory(error: Exception) -> bool:
    return any(words in str(error).lower() for words in _NO_MEMORY)


class _Slot:
    """Memory and events for one batch at a time."""

    def __init__(self, allocator: Allocator, names: Iterable[str], table_rows: int) -> None:
        self._allocator = allocator
        self.inputs: dict[str, TensorBuffer] = {}  # pinned and device memory by input; grows with the batches
        self.outputs: dict[str, PinnedBuffer] = {}  # pinned memory by output; grows with the batches
        self.resident_inputs: list[ResidentInput] = []  # keeps those alive from launch to finish
        # Addresses of the batch's rows; None if it takes no resident rows.
        self.rows = RowTable(names, table_rows, allocator) if table_rows else None
        # Events: the inputs are on the GPU; by whether the host spins or sleeps until then.
        self.copied_in = {spins: CompletionEvent(spins) for spins in (False, True)}
        # Events: the outputs are in pinned memory; likewise.
        self.copied_out = {spins: CompletionEvent(spins) for spins in (False, True)}
        self.arrived = self.copied_in[False]  # the one of these two that is waited for

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Return True if the inputs fit; sizes in bytes by input."""
        inputs = self.inputs
        return all(name in inputs and inputs[name].size_bytes >= size for name, size in sizes.items())

    def reserve(self, sizes: Mapping[str, int], types: Mapping[str, Datatype]) -> None:
        """Grow the inputs; nothing runs in the slot, and its device is current.

        Args:
            sizes: bytes by input.
            types: datatypes by input.

        Raises:
            OutOfDeviceMemory, NoRoom: there is no room.
        """
        for name, size in sizes.items():
            old = self.inputs.pop(name, None)
            if old is not None and old.size_bytes >= size:
                self.inputs[name] = old
                continue
            if old is not None:
                old.close()
            self.inputs[name] = TensorBuffer(types[name].dtype, size, self._allocator)

    def output(self, name: str) -> PinnedBuffer:
        """Return the pinned memory of an output."""
        buffer = self.outputs.get(name)
        if buffer is None:
            buffer = self.outputs[name] = self._allocator.pinned()
        return buffer

    def close(self) -> None:
        """Release everything; nothing runs any more, and the device is current."""
        for memory in self.inputs.values():
            memory.close()
        for pinned in self.outputs.values():
            pinned.free()
        self.resident_inputs = []
        if self.rows is not None:
            self.rows.close()
        # Events free themselves with their last reference; the device must be current then.
        del self.copied_in, self.copied_out, self.arrived


class _BatchState(NamedTuple):
    """Slot of a batch in flight, and addresses of inputs that are bound where they lie."""

    slot: _Slot
    in_place: dict[str, int]


class CudaExecution(Execution):
    """One instance; see `headrace.runtimes.overlapped.OverlappedExecution`. Opened and closed on the instance's thread.

    Ownership: slots move from `_free` to a batch and back (a deque: both threads use its ends). The session is run by
    `finish` only, one batch at a time.

    Args:
        plan: settings of the session.
        allocator: of the GPU.
        kernel: gathers resident rows; None: batches have none.

    Raises:
        ConfigError: ONNX Runtime cannot load the file, or has tensors that cannot be served.
        NoRoom, OutOfDeviceMemory: the GPU has no room.
    """

    def __init__(self, plan: SessionPlan, allocator: Allocator, kernel: RowGather | None) -> None:
        self.depth = plan.depth
        self._plan = plan
        self._name = plan.file.name
        self._allocator = allocator
        self._gpu = allocator.gpu
        self._kernel = kernel
        self._device = None if kernel is None else allocator.gpu
        self._on_device = _CurrentGpu(allocator.gpu, self._name)
        self._free: deque[_Slot] = deque()
        self._slots: list[_Slot] = []
        self._session: Any = None
        self._arena = allocator.reservation(Kind.WEIGHTS)
        with _opening, self._on_device:
            try:
                self._computing, self._copying = CudaStream(), CudaStream()
                self._open()
                self._free.extend(self._slots)
                self._measure()
            except BaseException:
                self._free.clear()
                self._release()
                raise

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return all outputs; see `headrace.runtimes.base.Execution.run`."""
        return run_one_batch(self, inputs, bool(self._plan.max_rows))

    def begin(self, like: Mapping[str, Array], rows: int) -> InFlightBatch:
        """Begin a batch in a free slot; see `headrace.runtimes.overlapped.OverlappedExecution.begin`."""
        rows = rows if self._plan.max_rows else 0
        shapes: dict[str, tuple[int, ...]] = {}
        sizes: dict[str, int] = {}
        for name, array in like.items():
            datatype = self._inputs.get(name)
            if datatype is None or array.dtype != datatype.dtype:
                raise self._mismatch(name, array)
            shape = shapes[name] = (rows, *array.shape[1:]) if rows else array.shape
            sizes[name] = math.prod(shape) * datatype.size_bytes
        slot = self._free.popleft()
        try:
            if not slot.fits(sizes):
                with self._on_device:
                    slot.reserve(sizes, self._inputs)
            views = {name: slot.inputs[name].view(shape) for name, shape in shapes.items()}
        except BaseException:
            self._free.append(slot)
            raise
        return InFlightBatch(views, rows or 1, _BatchState(slot, {}), self._device)

    def launch(self, batch: InFlightBatch) -> None:
        """Queue the copy to the GPU."""
        slot, in_place = _batch_state(batch)
        # From now on the GPU may read them, whether the launch succeeds or not.
        slot.resident_inputs = batch.resident_inputs
        try:
            with self._on_device:
                addresses = {name: slot.inputs[name].address for name in batch.inputs}
                residents = fetch_from_peers(batch.resident_inputs, batch.inputs, addresses, self._gpu, self._copying)
                resident = {name for name, _, _ in residents}
                for name, values in batch.inputs.items():
                    if name not in resident:
                        slot.inputs[name].send(values, self._copying)
                    elif (address := self._address_in_place(values, name, residents)) is not None:
                        in_place[name] = address
                    else:
                        self._gather(slot, name, values, batch.rows, residents)
                size_bytes = sum([values.nbytes for values in batch.inputs.values()])
                slot.arrived = slot.copied_in[size_bytes <= _SPIN_BYTES]
                slot.arrived.record(self._copying)
        except BaseException:
            # Some copies may be queued: no other batch may use the memory before they are done.
            with self._on_device:
                self._copying.synchronize()
            self._release_slot(slot)
            raise

    def finish(self, batch: InFlightBatch) -> dict[str, Array]:
        """Run the session on a batch and return copies of its outputs."""
        slot, in_place = _batch_state(batch)
        try:
            with self._on_device:
                try:
                    slot.arrived.wait()
                    return self._run(slot, batch.inputs, in_place)
                except Exception:
                    # Kernels that are queued may still read the slot.
                    with contextlib.suppress(DeviceError, loaded().Error):
                        self._computing.synchronize()
                    raise
        finally:
            self._release_slot(slot)

    def discard(self, batch: InFlightBatch) -> None:
        """Free the slot of a batch that was not launched."""
        slot, _ = _batch_state(batch)
        self._release_slot(slot)

    def close(self) -> None:
        """Release everything, after running work is done."""
        self._free.clear()
        with self._on_device:
            self._release()

    def _open(self) -> None:
        """Open the session, and the memory of its slots where their sizes are known."""
        if self._arena is not None:
            # What it takes at least, before it is allocated; `_measure` corrects it.
            self._arena.resize(_file_bytes(self._plan.file))
        options = {
            **self._plan.provider,
            "device_id": str(self._gpu),
            "user_compute_stream": str(self._computing.handle),
        }
        before = _free_bytes()
        self._session = open_session(self._plan.file, self._plan.options, options)
        self._opened_bytes = before - _free_bytes()
        self._read_tensors()
        row_shapes = {node.name: node.shape for node in self._session.get_inputs()}
        dims = {name: shape[1:] if self._plan.max_rows else shape for name, shape in row_shapes.items()}
        fixed = all(isinstance(size, int) and size >= 0 for shape in dims.values() for size in shape)
        head = (self._plan.max_rows,) if self._plan.max_rows else ()
        self._largest = {name: (*head, *shape) for name, shape in dims.items()} if fixed else {}
        # If more shapes can occur, or optional inputs, `begin` may have to allocate memory.
        self.prompt = fixed and len(self._inputs) == len(dims)
        sizes = {name: math.prod(shape) * self._inputs[name].size_bytes for name, shape in self._largest.items()}
        table_rows = 0 if self._kernel is None else max(self._plan.max_rows, 1)
        for _ in range(self.depth):
            slot = _Slot(self._allocator, self._inputs, table_rows)
            self._slots.append(slot)
            slot.reserve(sizes, self._inputs)

    def _read_tensors(self) -> None:
        """Read the tensors of the session.

        Raises:
            ConfigError: an input, or every output, is no dense tensor of numbers.
        """
        session = self._session
        inputs = [*session.get_inputs(), *session.get_overridable_initializers()]
        served = {name: datatype for name, datatype in BY_ORT_NAME.items() if datatype is not BYTES}
        wrong = [f"input '{node.name}' is a {node.type}" for node in session.get_inputs() if node.type not in served]
        # Outputs that are not tensors are left out; the others are served.
        outputs = [node for node in session.get_outputs() if node.type in BY_ORT_NAME]
        wrong += [f"output '{node.name}' is a {node.type}" for node in outputs if node.type not in served]
        if not outputs:
            wrong.append("no output is a dense tensor")
        if wrong:
            message = f"{'; '.join(wrong)}: ONNX Runtime's CUDA provider takes and returns dense tensors of numbers"
            raise ConfigError([Finding(self._name, None, message, "serve it on the CPU: KIND_CPU")])
        self._inputs = {node.name: served[node.type] for node in inputs if node.type in served}
        self._outputs = {node.name: served[node.type] for node in outputs}

    def _measure(self) -> None:
        """Run the largest batch, whose memory the arena keeps, and book the memory of the session.

        The decrease of the GPU's free memory is an estimate: it contains what others allocate meanwhile. Memory of larger
        shapes that come later is not booked; `gpu_mem_limit` limits the arena, and is booked as a whole.

        Raises:
            NoRoom: the account has no room for it.
        """
        before = _free_bytes()
        zeros = {name: np.zeros(shape, self._inputs[name].dtype) for name, shape in self._largest.items()}
        try:
            # The second run of a shape allocates its activations as one block.
            for _ in range(2 if zeros else 0):
                self.run(zeros)
        except (ExecutionLost, OutOfDeviceMemory):
            raise
        except Exception as error:  # a model that needs other values: the first request allocates
            logger.debug("%s: the first run failed: %s", self._name, error)
        if self._arena is not None:
            taken = self._opened_bytes + before - _free_bytes()
            limit = int(self._plan.provider.get("gpu_mem_limit", "0"))
            self._arena.resize(max(taken, limit, _file_bytes(self._plan.file)))

    def _run(self, slot: _Slot, inputs: Mapping[str, Array], in_place: Mapping[str, int]) -> dict[str, Array]:
        binding = self._session.io_binding()
        for name, values in inputs.items():
            address = in_place.get(name) or slot.inputs[name].address
            number = self._inputs[name].onnx_number
            binding.bind_input(name, _DEVICE_TYPE, self._gpu, number, values.shape, address)
        for name in self._outputs:
            binding.bind_output(name, _DEVICE_TYPE, self._gpu)
        self._session.run_with_iobinding(binding)
        return self._fetch(slot, binding.get_outputs())

    def _fetch(self, slot: _Slot, values: Sequence[Any]) -> dict[str, Array]:
        """Copy outputs to the host. They stay allocated while `values` exists."""
        outputs: dict[str, Array] = {}
        views: list[tuple[str, Array]] = []
        for (name, datatype), value in zip(self._outputs.items(), values, strict=True):
            shape = tuple(value.shape())
            size_bytes = math.prod(shape) * datatype.size_bytes
            if not size_bytes:
                outputs[name] = np.empty(shape, datatype.dtype)
                continue
            pinned = slot.output(name)
            pinned.reserve(size_bytes)
            view = pinned.view(shape, datatype.dtype)
            # On the stream of the session: after all that it has queued.
            loaded().memcpy_dtoh_async(view, value.data_ptr(), self._computing.stream)
            outputs[name] = view
            views.append((name, view))
        copied_out = slot.copied_out[sum([view.nbytes for _, view in views]) <= _SPIN_BYTES]
        copied_out.record(self._computing)
        copied_out.wait()
        for name, view in views:
            outputs[name] = view.copy()
        return outputs

    def _address_in_place(self, values: Array, name: str, residents: Sequence[ResidentInput]) -> int | None:
        """Return the address of an input that lies on this GPU as a whole; None if its rows must be gathered."""
        parts = [rows for input_name, _, rows in residents if input_name == name]
        part = parts[0]
        if len(parts) == 1 and is_resident(part) and part.device == self._gpu and part.shape == values.shape:
            return part.address if part.address % _ALIGNMENT == 0 else None
        return None

    def _gather(self, slot: _Slot, name: str, values: Array, rows: int, residents: Sequence[ResidentInput]) -> None:
        assert slot.rows is not None, "the batch has resident rows, which this execution does not support"
        assert self._kernel is not None
        memory, row_bytes = slot.inputs[name], values.nbytes // rows
        slot.rows.write(name, memory.pinned_address, row_bytes, rows, rows, residents)
        gather(self._kernel, self._copying, slot.rows, rows, {name: (row_bytes, memory.address)}, SHARED_BLOCKS)

    def _mismatch(self, name: str, array: Array) -> ModelFailed:
        datatype = self._inputs.get(name)
        if datatype is None:
            return ModelFailed(f"{self._name} takes the inputs {', '.join(self._inputs)}, the batch has {name}")
        return ModelFailed(f"{self._name} takes '{name}' as {datatype.dtype}, the batch has {array.dtype}")

    def _release_slot(self, slot: _Slot) -> None:
        slot.resident_inputs = []
        self._free.append(slot)

    def _release(self) -> None:
        """Free session, slots and streams; the device is current."""
        for name in ("_computing", "_copying"):
            stream = getattr(self, name, None)
            if stream is not None:
                with contextlib.suppress(DeviceError, loaded().Error):
                    stream.synchronize()
        # The session uses its stream until it ends.
        self._session = None
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        for name in ("_computing", "_copying"):
            if hasattr(self, name):
                delattr(self, name)
        if self._arena is not None:
            self._arena.release()


def open_session(file: Path, options: ort.SessionOptions, provider: Mapping[str, str]) -> Any:
    """Open a session on a GPU; nodes that the CUDA provider lacks run on the CPU.

    Args:
        file: an ONNX model.
        options: of the session.
        provider: options of the CUDA provider.

    Raises:
        OutOfDeviceMemory: the GPU has no memory left.
        ConfigError: ONNX Runtime cannot load the file, or cannot use the provider.
    """
    providers = [(PROVIDER, dict(provider)), "CPUExecutionProvider"]
    try:
        # Without the fallback, which would open a session on the CPU after an error.
        session = ort.InferenceSession(str(file), options, providers=providers, enable_fallback=0)
    except Exception as error:  # ONNX Runtime raises a dozen exception types of its own
        if _is_out_of_memory(error):
            cure = "close what else uses the GPU, or raise gpu_mem_limit if it is set"
            raise OutOfDeviceMemory(f"loading {file.name} failed, the GPU's memory is full: {cure}") from error
        raise ConfigError([load_finding(file, error)]) from error
    if session.get_providers()[0] != PROVIDER:  # it only warns of this on standard error
        message = "ONNX Runtime cannot use its CUDA provider: its line on standard error has the reason"
        raise ConfigError([Finding(file.name, None, message, EXTRA)])
    return session


def _free_bytes() -> int:
    """Free memory of the current GPU."""
    free, _ = loaded().mem_get_info()
    return int(free)


def _file_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # the session reports it
        return 0


def _batch_state(batch: InFlightBatch) -> _BatchState:
    assert isinstance(batch.state, _BatchState), "the batch was begun by another execution"
    return batch.state
