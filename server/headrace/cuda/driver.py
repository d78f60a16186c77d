"""Contexts, streams and events of the CUDA driver, and its C library: the base of all code that uses a GPU.

Nothing happens at import; PyCUDA is loaded on first use. Work is done inside `current(device)`, which makes the
device's primary context current in this thread and restores the previous one. Primary contexts are shared with
everything that uses the CUDA runtime (TensorRT does) and are kept for the life of the process. What was created inside
`current` is freed inside `current` of the same device, best in the thread that created it.

`library()` is the driver's C library, for calls that PyCUDA lacks or makes while it holds the interpreter's lock;
`ctypes` releases it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from headrace.core.errors import HeadraceError, Unsupported

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream

# The lock guards the contexts: instances open their engines in threads of their own.
_lock = threading.Lock()
_contexts: dict[int, Any] = {}


class DeviceError(HeadraceError):
    """A call of the CUDA driver failed."""

    reason = "cuda"


class OutOfDeviceMemory(DeviceError):
    """The GPU, or the host's pinned memory, has no room left."""


def load() -> Any:
    """PyCUDA's driver module, initialised.

    Raises:
        Unsupported: there is no PyCUDA, no driver, or no GPU.
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
    """Turn PyCUDA's errors into ours.

    Args:
        doing: what is done, for the message, e.g. "allocating 64 bytes".

    Raises:
        OutOfDeviceMemory: no room is left.
        DeviceError: anything else the driver refuses.
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
    """PyCUDA's driver module, which `load` has initialised before."""
    import pycuda.driver as driver

    return driver


def primary_context(ordinal: int) -> Any:
    """A device's primary context, retained once and kept.

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
    """Make a device's primary context current in this thread; may be nested.

    Raises:
        Unsupported: there is no such device, or it cannot be used.
    """
    with pushed(primary_context(ordinal)):
        yield


@contextlib.contextmanager
def pushed(context: Any) -> Iterator[None]:
    """Make a context current in this thread; may be nested."""
    context.push()
    try:
        yield
    finally:
        loaded().Context.pop()


class CudaStream:
    """A queue of work on the current device, which waits for no other stream.

    Attributes:
        handle: the CUstream, as TensorRT and the driver take it.
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


class TimingEvent:
    """A moment in a stream's work."""

    def __init__(self) -> None:
        with check("making an event"):
            self._event = loaded().Event()

    def record(self, stream: CudaStream) -> None:
        """Mark the moment when all work queued on the stream so far is done."""
        with check("recording an event"):
            self._event.record(stream.stream)

    def us_since(self, earlier: TimingEvent) -> float:
        """Microseconds from an earlier event to this one; both have happened."""
        with check("reading an event"):
            return float(self._event.time_since(earlier._event)) * 1000


@functools.cache
def library() -> Any:
    """libcuda, loaded already by PyCUDA."""
    return ctypes.CDLL("libcuda.so.1")


def succeeded(result: int, doing: str) -> None:
    """Turn a CUresult into nothing or an error of ours.

    Args:
        result: what the driver returned.
        doing: what was done, for the message.

    Raises:
        DeviceError: it is not CUDA_SUCCESS.
    """
    if result:
        text = ctypes.c_char_p()
        library().cuGetErrorName(result, ctypes.byref(text))
        name = (text.value or b"unknown error").decode(errors="replace")
        raise DeviceError(f"{doing} failed on the GPU ({name}, {result}): see the driver's messages in dmesg")


_SLEEPING = 1  # CU_EVENT_BLOCKING_SYNC
_UNTIMED = 2  # CU_EVENT_DISABLE_TIMING: recording costs less


class CompletionEvent:
    """A moment in a stream's work that other streams and one thread may wait for; recorded anew for every batch.

    Once made, it raises PyCUDA's own errors: whoever uses it turns those of all that a batch needs into ours together.

    PyCUDA gives the interpreter's lock away while it waits (`event::synchronize` of its C++ sources).

    Args:
        spins: who waits keeps a core busy, and is 15 us earlier on the spot than one who sleeps (measured on an H200).
    """

    def __init__(self, spins: bool = False) -> None:
        with check("making an event"):
            self._event = loaded().Event(_UNTIMED if spins else _UNTIMED | _SLEEPING)

    def record(self, stream: CudaStream) -> None:
        """Mark the moment when all work queued on the stream so far is done."""
        self._event.record(stream.stream)

    def block(self, stream: CudaStream) -> None:
        """Let a stream begin what is queued on it from here on only after the moment last recorded."""
        stream.stream.wait_for_event(self._event)

    def wait(self) -> None:
        """Wait until the moment last recorded has come; some of the work before it may have failed."""
        self._event.synchronize()


def is_context_usable() -> bool:
    """False once the current context has failed for good: after an illegal access, say, every call gives the same error.

    (CUDA driver API, CUDA_ERROR_ILLEGAL_ADDRESS: "the process must be terminated and relaunched".)
    """
    cuda = loaded()
    try:
        cuda.mem_get_info()
    except cuda.Error:
        return False
    return True


# CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do in the meantime does not spoil the capture.
_THREAD_LOCAL = 1


class CudaGraph:
    """Work of a stream, ready to be replayed. Made and used with the stream's device current.

    Args:
        stream: where the work is recorded and replayed.
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
            # The stream must come out of capturing, whatever has become of the graph.
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
            # Else the first launch would pay for it.
            succeeded(cuda.cuGraphUpload(self._executable, self._stream), "uploading a CUDA graph")
        except BaseException:
            self.close()
            raise
        self._launch = cuda.cuGraphLaunch

    def launch(self) -> None:
        """Queue the work once more.

        Raises:
            DeviceError: the driver refuses it.
        """
        result = self._launch(self._executable, self._stream)
        if result:
            succeeded(result, "launching a CUDA graph")

    def close(self) -> None:
        """Give the graph back; its work must be done."""
        executable, self._executable = self._executable, ctypes.c_void_p()
        if executable:
            library().cuGraphExecDestroy(executable)
