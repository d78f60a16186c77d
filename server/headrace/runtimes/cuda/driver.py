"""CUDA driver: contexts, streams, events and graphs. The base of all code that uses a GPU.

Nothing happens at import; PyCUDA is loaded on first use. GPU work runs inside `current(device)`, which makes the
device's primary context current on this thread and restores the previous one. Primary contexts are shared with
everything that uses the CUDA runtime (TensorRT does) and are retained for the life of the process. Objects created
inside `current` are freed inside `current` of the same device, preferably on the thread that created them.

`library()` is the driver's C library, for calls that PyCUDA lacks (CUDA graphs) or makes while it holds the
interpreter's lock; `ctypes` releases it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.errors import HeadraceError, Unsupported

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream

# Guards `_contexts`: instances open their engines on threads of their own.
_lock = threading.Lock()
_contexts: dict[int, Any] = {}
# GPUs whose primary context has failed, for the rest of the process.
_lost: set[int] = set()


class DeviceError(HeadraceError):
    """A call of the CUDA driver failed."""

    reason = "cuda"


class OutOfDeviceMemory(DeviceError):
    """The GPU's memory, or the host's pinned memory, is full."""


def load() -> Any:
    """Initialise PyCUDA and return its driver module.

    Raises:
        Unsupported: PyCUDA, the driver or a GPU is missing.
    """
    try:
        import pycuda.driver as driver
    except ImportError as error:
        raise Unsupported(
            f"PyCUDA cannot be imported ({error}): install an NVIDIA driver and Headrace's extra 'gpu'"
        ) from error
    try:
        driver.init()
        count = driver.Device.count()
    except driver.Error as error:
        raise Unsupported(f"the CUDA driver does not work ({error}): check that nvidia-smi lists a GPU") from error
    if not count:
        raise Unsupported("this machine has no NVIDIA GPU: check that nvidia-smi lists one")
    return driver


@contextlib.contextmanager
def check(doing: str) -> Iterator[None]:
    """Convert PyCUDA's errors to `DeviceError`.

    Args:
        doing: description of the operation for the message, e.g. "allocating 64 bytes".

    Raises:
        OutOfDeviceMemory: no memory is left.
        DeviceError: the driver refuses for another reason.
    """
    driver = loaded()
    try:
        yield
    except driver.MemoryError as error:
        cure = "close what else uses the GPU, or take smaller batches"
        raise OutOfDeviceMemory(f"{doing} failed, the GPU's memory is full ({error}): {cure}") from error
    except driver.Error as error:
        raise DeviceError(f"{doing} failed on the GPU ({error}): see the driver's messages in dmesg") from error


def loaded() -> Any:
    """Return PyCUDA's driver module; `load` must have initialised it."""
    return sys.modules["pycuda.driver"]  # an import statement takes ten times as long, and each batch comes here


def primary_context(ordinal: int) -> Any:
    """Return a device's primary context, retained once for the life of the process.

    Raises:
        Unsupported: there is no such device, or it cannot be used.
    """
    with _lock:
        context = _contexts.get(ordinal)
        if context is None:
            driver = load()
            count = driver.Device.count()
            if not 0 <= ordinal < count:
                raise Unsupported(f"CUDA device {ordinal} is not there: this machine has devices 0 to {count - 1}")
            try:
                context = _contexts[ordinal] = driver.Device(ordinal).retain_primary_context()
            except driver.Error as error:
                cure = "check with nvidia-smi that nothing else holds it exclusively"
                raise Unsupported(f"CUDA device {ordinal} cannot be used ({error}): {cure}") from error
        return context


@contextlib.contextmanager
def current(ordinal: int = 0) -> Iterator[None]:
    """Make a device's primary context current on this thread; may be nested.

    Raises:
        Unsupported: there is no such device, or it cannot be used.
    """
    with pushed(primary_context(ordinal)):
        yield


@contextlib.contextmanager
def pushed(context: Any) -> Iterator[None]:
    """Make a context current on this thread; may be nested."""
    context.push()
    try:
        yield
    finally:
        loaded().Context.pop()


def current_device() -> int:
    """Return the number of the GPU whose context is current on this thread.

    Raises:
        DeviceError: no context is current.
    """
    device = ctypes.c_int()
    succeeded(library().cuCtxGetDevice(ctypes.byref(device)), "reading the current GPU")
    return device.value


class CudaStream:
    """Queue of work on the current device; does not synchronize with the default stream.

    Attributes:
        stream: PyCUDA's stream.
        handle: CUstream as an integer, as TensorRT and the driver take it.
    """

    def __init__(self) -> None:
        with check("making a stream"):
            self.stream = loaded().Stream(_NON_BLOCKING)
        self.handle = int(self.stream.handle)

    def synchronize(self) -> None:
        """Wait until all work queued so far is done.

        Raises:
            DeviceError: some of it failed.
        """
        with check("waiting for a stream"):
            self.stream.synchronize()


class BorrowedStream(CudaStream):
    """Stream of another library, e.g. the one that TensorRT passes to a plug-in; never destroyed here.

    PyCUDA cannot wrap it: only kernels that were loaded for borrowed streams run on it
    (`headrace.runtimes.cuda.kernels.loading.for_borrowed_streams`).

    Args:
        handle: CUstream as an integer.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def synchronize(self) -> None:
        """Wait until all work queued so far is done.

        Raises:
            DeviceError: some of it failed.
        """
        succeeded(library().cuStreamSynchronize(ctypes.c_void_p(self.handle)), "waiting for a stream")


class TimingEvent:
    """Event with a timestamp in a stream's work."""

    def __init__(self) -> None:
        with check("making an event"):
            self._event = loaded().Event()

    def record(self, stream: CudaStream) -> None:
        """Record the event after all work queued on the stream so far."""
        with check("recording an event"):
            self._event.record(stream.stream)

    def us_since(self, earlier: TimingEvent) -> float:
        """Return the microseconds since an earlier event; both must have completed."""
        with check("reading an event"):
            return float(self._event.time_since(earlier._event)) * 1000


@functools.cache
def library() -> Any:
    """Return libcuda, which PyCUDA has loaded."""
    return ctypes.CDLL("libcuda.so.1")


def succeeded(result: int, doing: str) -> None:
    """Raise an error unless a CUresult is CUDA_SUCCESS.

    Args:
        result: return value of the driver.
        doing: description of the operation for the message.

    Raises:
        DeviceError: the result is not CUDA_SUCCESS.
    """
    if result:
        text = ctypes.c_char_p()
        library().cuGetErrorName(result, ctypes.byref(text))
        name = (text.value or b"unknown error").decode(errors="replace")
        raise DeviceError(f"{doing} failed on the GPU ({name}, {result}): see the driver's messages in dmesg")


_SLEEPING = 1  # CU_EVENT_BLOCKING_SYNC
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING: recording costs less


class CompletionEvent:
    """Event that other streams and one thread may wait for; recorded again for every batch.

    After construction it raises PyCUDA's own errors: the caller converts all errors of a batch in one place. PyCUDA
    releases the interpreter's lock while it waits (`event::synchronize` of its C++ sources).

    Args:
        spins: the waiting thread keeps a core busy; it continues 15 us earlier than one that sleeps (measured on an
            H200).
    """

    def __init__(self, spins: bool = False) -> None:
        with check("making an event"):
            self._event = loaded().Event(_UNTIMED if spins else _UNTIMED | _SLEEPING)

    def record(self, stream: CudaStream) -> None:
        """Record the event after all work queued on the stream so far."""
        self._event.record(stream.stream)

    def block(self, stream: CudaStream) -> None:
        """Make later work of a stream wait for the last recording."""
        stream.stream.wait_for_event(self._event)

    def wait(self) -> None:
        """Wait until the last recording has completed; some of the work before it may have failed."""
        self._event.synchronize()


# CUDA_ERROR_ECC_UNCORRECTABLE, _NVLINK_UNCORRECTABLE, _ILLEGAL_ADDRESS, _LAUNCH_TIMEOUT, _ASSERT, _HARDWARE_STACK_ERROR,
# _ILLEGAL_INSTRUCTION, _MISALIGNED_ADDRESS, _INVALID_ADDRESS_SPACE, _INVALID_PC, _LAUNCH_FAILED
_STICKY = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719})


def is_context_usable() -> bool:
    """Return False once the current context has failed permanently: after e.g. an illegal access every call returns the
    same error.

    (CUDA driver API, CUDA_ERROR_ILLEGAL_ADDRESS: "the process must be terminated and relaunched".)
    """
    cuda = loaded()
    try:
        cuda.mem_get_info()
    except cuda.Error:
        return False
    return library().cuStreamQuery(None) not in _STICKY  # it waits for nothing


def mark_lost(ordinal: int) -> None:
    """Record that the primary context of a GPU has failed: the process uses the GPU no more."""
    _lost.add(ordinal)


def lost_gpus() -> frozenset[int]:
    """Return the numbers of the GPUs of `mark_lost`."""
    return frozenset(_lost)


def has_lost_all() -> bool:
    """Return True if a GPU has failed, and each other one that the process has used with it: only a new process can use them.

    An illegal address and a failed launch do so: every call for the other GPUs returns the same error then, and no new context
    can be made (two H200, driver 580.159). Waits for nothing.
    """
    if not _lost:
        return False
    for ordinal in _contexts.keys() - _lost:
        with pushed(_contexts[ordinal]):
            if is_context_usable():
                return False
            mark_lost(ordinal)
    return True


# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: calls of other threads do not invalidate the capture.
_THREAD_LOCAL = 1


class CudaGraph:
    """CUDA graph: work recorded once from a stream and replayed by a single call.

    PyCUDA has no graphs, so this class calls the driver's library (CUDA driver API, "Stream Management", "Graph
    Management"; cuGraphInstantiateWithFlags needs CUDA 11.4). Create and use it with the stream's device current.

    Args:
        stream: stream on which the work is recorded and replayed.
        enqueue: queues the work on that stream and does nothing else: no allocation, no waiting.

    Raises:
        DeviceError: the work cannot be captured.
    """

    def __init__(self, stream: CudaStream, enqueue: Callable[[], None]) -> None:
        self._stream = ctypes.c_void_p(stream.handle)
        self._executable = ctypes.c_void_p()
        cuda = library()
        succeeded(cuda.cuStreamBeginCapture_v2(self._stream, _THREAD_LOCAL), "starting to capture a CUDA graph")
        graph = ctypes.c_void_p()
        try:
            enqueue()
        except BaseException:
            # End the capture in any case: the stream is unusable until then.
            cuda.cuStreamEndCapture(self._stream, ctypes.byref(graph))
            if graph:
                cuda.cuGraphDestroy(graph)
            raise
        succeeded(cuda.cuStreamEndCapture(self._stream, ctypes.byref(graph)), "capturing a CUDA graph")
        try:
            executable = ctypes.byref(self._executable)
            flags = ctypes.c_ulonglong(0)
            succeeded(cuda.cuGraphInstantiateWithFlags(executable, graph, flags), "instantiating a CUDA graph")
        finally:
            cuda.cuGraphDestroy(graph)
        try:
            # Otherwise the first launch would include the upload.
            succeeded(cuda.cuGraphUpload(self._executable, self._stream), "uploading a CUDA graph")
        except BaseException:
            self.close()
            raise
        self._launch = cuda.cuGraphLaunch

    def launch(self) -> None:
        """Queue the work once more.

        Raises:
            DeviceError: the driver refuses.
        """
        result = self._launch(self._executable, self._stream)
        if result:
            succeeded(result, "launching a CUDA graph")

    def close(self) -> None:
        """Destroy the graph; its work must be done."""
        executable, self._executable = self._executable, ctypes.c_void_p()
        if executable:
            library().cuGraphExecDestroy(executable)
