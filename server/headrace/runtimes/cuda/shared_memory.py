"""Shared memory of clients that GPUs read directly: CUDA memory opened by IPC handle, and mapped files.

The driver's rules for IPC handles (CUDA driver API, "Memory Management", cuIpcOpenMemHandle): the handle must come
from another process, and that process must keep the memory allocated until it is closed here.

A file is mapped and registered as pinned memory, and the CPU never reads it through the mapping: a process that reads
a page which its client has truncated is killed by SIGBUS. A GPU is not affected: the driver holds the pages that it
reads.

Therefore **only kernels read that memory** (`kernels.launching.RowGather`). The driver's copies (cuMemcpy*) do not
qualify: the CPU makes small ones, through the mapping (measured on an H200: a process that copied 4 KiB or less of a
truncated file was killed by SIGBUS, 64 KiB came from the pages). Host copies are read from the file; nothing is
written through the mapping.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from headrace.core.errors import BadRequest, HeadraceError, Unsupported
from headrace.core.tensor import Array, IpcMemory, ResidentRows, check_range
from headrace.core.threads import start_thread
from headrace.runtimes.cuda.driver import CudaStream, DeviceError, load, loaded, primary_context, pushed
from headrace.runtimes.cuda.memory import PinnedMapping, Release, read_gpu

logger = logging.getLogger("headrace.cuda")


class DriverThread:
    """Runs jobs in order on a daemon thread, which the first `start` creates.

    Ownership: `start` is called from one thread, which thereby replaces a dead thread; `submit` may be called from
    any thread, also by a finalizer that interrupts other code: it takes no lock that is not reentrant.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread unless it is alive."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            start_thread(thread)
            self._thread = thread

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after those queued before; an error of the driver is logged."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            except (HeadraceError, loaded().Error) as error:
                logger.warning("on the thread '%s': %s", self._name, error)
            del job  # it may hold memory until the next job arrives


_BLOCK_BYTES = 512  # unit of `st_blocks`
HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)
_BYTES: np.dtype[Any] = np.dtype(np.uint8)


class CudaRegion:
    """Region of a client's GPU memory, closed with the last reference to the region or to rows in it.

    Copies are synchronous, run in the device's primary context and are allowed on any thread.

    Args:
        device: number of the GPU.
        memory: open IPC handle, owned by the region.
        handle: cudaIpcMemHandle_t, for other processes.
        size_bytes: of the region.
        release: runs the callback that closes the handle; called on the thread that drops the last reference.

    Attributes:
        gpu: number of the GPU.
        ipc: the memory for other processes.
    """

    __slots__ = ("__weakref__", "_address", "_context", "_size_bytes", "_stream", "gpu", "ipc")

    def __init__(self, device: int, memory: Any, handle: bytes, size_bytes: int, release: Release) -> None:
        self._context = primary_context(device)
        self.gpu: int | None = device
        self._address = int(memory)
        self.ipc = IpcMemory(handle, device, self._address)
        self._size_bytes = size_bytes
        self._stream: CudaStream | None = None  # made by the first write
        weakref.finalize(self, release, functools.partial(_close, self._context, memory)).atexit = False

    def check(self, offset: int, size_bytes: int) -> None:
        """Check that a range lies in the region.

        Raises:
            BadRequest: it does not.
        """
        check_range(offset, size_bytes, self._size_bytes)

    def locate(self, offset: int, size_bytes: int, devices: frozenset[int]) -> ResidentRows:
        """Return a range as uint8[size_bytes] on the GPU without a copy; code elsewhere copies it to the host on use.

        Raises:
            BadRequest: it does not lie in the region.
        """
        self.check(offset, size_bytes)
        assert self.gpu is not None
        return ResidentRows(self._address + offset, self.gpu, _BYTES, (size_bytes,), self, self._copy)

    def read(self, offset: int, size_bytes: int) -> Array:
        """Return a copy in host memory, uint8[size_bytes].

        Raises:
            BadRequest: the range is outside of the region, or the driver cannot read the memory any more.
        """
        self.check(offset, size_bytes)
        return self._copy(self._address + offset, size_bytes)

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy data into the region, and wait until the GPU has it.

        The driver's synchronous copy may return before that: of up to 64 KB of pageable memory it waits for the copy into its own
        buffer only (CUDA driver API, "API synchronization behavior"). The client then reads old bytes.

        Raises:
            BadRequest: the range is outside of the region, or the driver cannot write the memory any more.
        """
        source = np.frombuffer(data, np.uint8)
        self._write(offset, source.nbytes, lambda to, stream: loaded().memcpy_htod_async(to, source, stream))

    def write_rows(self, offset: int, rows: ResidentRows) -> None:
        """Copy rows on the region's GPU into the region, and wait until they are there; raises as `write`."""
        size_bytes, source = rows.nbytes, rows.address
        self._write(offset, size_bytes, lambda to, stream: loaded().memcpy_dtod_async(to, source, size_bytes, stream))

    def _write(self, offset: int, size_bytes: int, copy: Callable[[int, Any], None]) -> None:
        """Queue a copy to an address on a stream of PyCUDA's, and wait for it."""
        self.check(offset, size_bytes)
        if size_bytes:
            try:
                with pushed(self._context):
                    stream = self._stream = self._stream or CudaStream()
                    copy(self._address + offset, stream.stream)
                    stream.synchronize()
            except (loaded().Error, DeviceError):
                raise BadRequest("the CUDA shared memory cannot be written: its owner must keep it allocated") from None

    def _copy(self, address: int, size_bytes: int) -> Array:
        assert self.gpu is not None
        try:
            return read_gpu(self.gpu, address, size_bytes)
        except DeviceError:
            raise BadRequest("the CUDA shared memory cannot be read: its owner must keep it allocated") from None


class ClientMemory:
    """Opens clients' shared memory; one for each process. `open_ipc` and `pin` are called on the event loop.

    Ownership: `_pinned_bytes` belongs to the driver thread.

    Args:
        max_pinned_bytes: limit in bytes of all files together.
    """

    def __init__(self, max_pinned_bytes: int) -> None:
        self._max_pinned_bytes = max_pinned_bytes
        self._pinned_bytes = 0
        self._thread = DriverThread("shared memory")

    def open_ipc(self, handle: bytes, device: int, size_bytes: int) -> CudaRegion:
        """Open memory of another process on a GPU.

        Args:
            handle: cudaIpcMemHandle_t, 64 raw bytes.
            device: number of the GPU with the memory.
            size_bytes: of the region, from the start of the allocation.

        Raises:
            BadRequest: the handle, the device or the size is wrong.
            Unsupported: the driver does not work.
        """
        if len(handle) != HANDLE_BYTES:
            raise BadRequest(
                f"raw_handle must be a cudaIpcMemHandle_t of {HANDLE_BYTES} bytes, not {len(handle)} bytes"
            )
        if size_bytes < 1:
            raise BadRequest(f"a region needs a byte_size of at least 1, not {size_bytes}")
        context = _context(device)
        driver = loaded()
        try:
            with pushed(context):
                memory = driver.IPCMemoryHandle(bytearray(handle))
                base, allocated_bytes = driver.mem_get_address_range(int(memory))
        except driver.Error:
            raise BadRequest(
                "raw_handle cannot be opened: it must come from a living process other than the server, for memory on this "
                "device"
            ) from None
        self._thread.start()
        region = CudaRegion(device, memory, handle, size_bytes, self._thread.submit)
        if size_bytes > allocated_bytes - (int(memory) - base):
            raise BadRequest(f"byte_size {size_bytes} reaches past the end of the CUDA allocation")
        return region

    def pin(
        self, descriptor: int, start: int, size_bytes: int, device: int, done: Callable[[PinnedFile | None], None]
    ) -> None:
        """Map and pin a range of a file for all GPUs, on the driver thread.

        Args:
            descriptor: of the file, open for reading and writing until `done` is called.
            start: offset of the range in the file, bytes.
            size_bytes: of the range.
            device: number of the GPU whose context registers it.
            done: called on that thread with the mapping, or with None if it cannot be pinned. That includes files
                with holes: pinning would allocate their missing pages, as many as the client claims.
        """
        self._thread.start()
        self._thread.submit(functools.partial(self._pin, descriptor, start, size_bytes, device, done))

    def _pin(
        self, descriptor: int, start: int, size_bytes: int, device: int, done: Callable[[PinnedFile | None], None]
    ) -> None:
        pinned: PinnedFile | None = None
        try:
            if self._pinned_bytes + size_bytes <= self._max_pinned_bytes and _has_memory(descriptor, start, size_bytes):
                pinned = PinnedFile(descriptor, start, size_bytes, device, self._unpin)
                self._pinned_bytes += size_bytes
        except (OSError, ValueError) as error:  # ValueError: the file has been truncated
            raise DeviceError(f"a client's shared memory cannot be mapped ({error}): it is copied instead") from error
        finally:
            done(pinned)

    def _unpin(self, size_bytes: int, job: Callable[[], None]) -> None:
        def run() -> None:
            self._pinned_bytes -= size_bytes
            job()

        self._thread.submit(run)


class PinnedFile:
    """Range of a file that kernels on every GPU read, and nothing else; see the module's docstring.

    The pages are those at the time of the mapping. Later writes to the file are visible. Truncated pages remain,
    except for the rest of the page in which the file then ends, which the kernel fills with zeros.

    Args:
        descriptor: of the file, open for reading and writing; not needed afterwards.
        start: offset of the range, bytes.
        size_bytes: of the range.
        device: number of the GPU whose context registers it.
        release: runs the callback that unpins `size_bytes`; called on the thread that drops the last reference.

    Attributes:
        address: CUdeviceptr of the range's first byte.

    Raises:
        OSError, ValueError: the file cannot be mapped.
        DeviceError: it cannot be registered.
    """

    __slots__ = ("_mapping", "address")

    def __init__(
        self,
        descriptor: int,
        start: int,
        size_bytes: int,
        device: int,
        release: Callable[[int, Callable[[], None]], None],
    ) -> None:
        before = start % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(descriptor, before + size_bytes, mmap.MAP_SHARED, offset=start - before)
        self._mapping = PinnedMapping(mapping, device, functools.partial(release, size_bytes))
        self.address = self._mapping.address + before


def find_client_memory() -> ClientMemory | None:
    """Return a `ClientMemory`; None without a GPU or PyCUDA.

    At most a quarter of the machine's memory is pinned: pinned pages cannot be swapped or reclaimed from a client.
    """
    try:
        load()
    except Unsupported:
        return None
    return ClientMemory(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def _context(device: int) -> Any:
    try:
        count = load().Device.count()
        if not 0 <= device < count:
            raise BadRequest(f"device_id {device} is not there: this machine has devices 0 to {count - 1}")
        return primary_context(device)
    except Unsupported as error:
        raise Unsupported(f"{error}; or send the tensor in the request") from None


def _close(context: Any, memory: Any) -> None:
    with pushed(context):
        memory.close()


def _has_memory(descriptor: int, start: int, size_bytes: int) -> bool:
    """Return True if every page of the range is allocated.

    Pages that are allocated and were never written, such as those of a new arena, count as a hole for `lseek`.
    """
    status = os.fstat(descriptor)
    if status.st_blocks * _BLOCK_BYTES >= status.st_size >= start + size_bytes:
        return True
    return os.lseek(descriptor, start, os.SEEK_HOLE) >= start + size_bytes
