"""Memory of a GPU that another process owns, opened by its CUDA IPC handle.

The driver's rules (CUDA driver API, "Memory Management", cuIpcOpenMemHandle): the handle must come from another process, and
that process must keep the memory until it is closed here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref

import numpy as np
import pycuda.driver as driver

from server.core.errors import BadRequest, Unsupported
from server.core.shared_range import check_range
from server.core.tensor import Array
from server.cuda.driver import load, primary_context, pushed

HANDLE_BYTES = 64  # sizeof(cudaIpcMemHandle_t)


class CudaRegion:
    """Memory of a GPU. The mapping is closed with the last reference to the region.

    Every copy is synchronous and runs in the device's primary context, which is current only as long as the copy takes. Not
    thread-safe: used on the thread that opened it (the event loop), which is also where PyCUDA can close it.

    Args:
        context: of the device.
        memory: the open handle, now the region's own.
        size_bytes: of the region.
    """

    __slots__ = ("__weakref__", "_address", "_context", "_size_bytes")

    def __init__(self, context: driver.Context, memory: driver.IPCMemoryHandle, size_bytes: int) -> None:
        self._context = context
        self._address = int(memory)
        self._size_bytes = size_bytes
        weakref.finalize(self, _close, context, memory, threading.get_ident()).atexit = False

    def check(self, offset: int, size_bytes: int) -> None:
        """Hold a range against the region.

        Raises:
            BadRequest: it does not lie in the region.
        """
        check_range(offset, size_bytes, self._size_bytes)

    def read(self, offset: int, size_bytes: int) -> Array:
        """A copy in host memory, uint8[size_bytes].

        Raises:
            BadRequest: out of the region, or the driver cannot read the memory any more.
        """
        self.check(offset, size_bytes)
        array = np.empty(size_bytes, dtype=np.uint8)
        if size_bytes:
            try:
                with pushed(self._context):
                    driver.memcpy_dtoh(array, self._address + offset)
            except driver.Error:
                raise BadRequest("the CUDA shared memory cannot be read: its owner must keep it allocated") from None
        return array

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put data there.

        Raises:
            BadRequest: out of the region, or the driver cannot write the memory any more.
        """
        source = memoryview(data).cast("B")
        self.check(offset, source.nbytes)
        if source.nbytes:
            try:
                with pushed(self._context):
                    driver.memcpy_htod(self._address + offset, source)
            except driver.Error:
                raise BadRequest("the CUDA shared memory cannot be written: its owner must keep it allocated") from None


def available() -> bool:
    """True if the driver works and finds a device."""
    try:
        driver.init()
        return bool(driver.Device.count() > 0)
    except driver.Error:
        return False


def open_ipc(handle: bytes, device: int, size_bytes: int) -> CudaRegion:
    """Open memory of another process.

    Args:
        handle: cudaIpcMemHandle_t, 64 raw bytes.
        device: number of the GPU the memory is on.
        size_bytes: of the region, from the start of the allocation.

    Raises:
        BadRequest: the handle, the device or the size is wrong.
        Unsupported: the driver does not work.
    """
    if len(handle) != HANDLE_BYTES:
        raise BadRequest(f"raw_handle must be a cudaIpcMemHandle_t of {HANDLE_BYTES} bytes, not {len(handle)} bytes")
    if size_bytes < 1:
        raise BadRequest(f"a region needs a byte_size of at least 1, not {size_bytes}")
    context = _context(device)
    try:
        with pushed(context):
            memory = driver.IPCMemoryHandle(bytearray(handle))
            base, allocated_bytes = driver.mem_get_address_range(int(memory))
    except driver.Error:
        raise BadRequest(
            "raw_handle cannot be opened: it must come from a living process other than the server, for memory on this device"
        ) from None
    region = CudaRegion(context, memory, size_bytes)
    if size_bytes > allocated_bytes - (int(memory) - base):
        raise BadRequest(f"byte_size {size_bytes} reaches past the end of the CUDA allocation")
    return region


def _context(device: int) -> driver.Context:
    try:
        count = load().Device.count()
        if not 0 <= device < count:
            raise BadRequest(f"device_id {device} is not there: this machine has devices 0 to {count - 1}")
        return primary_context(device)
    except Unsupported as error:
        raise Unsupported(f"{error}; or send the tensor in the request") from None


def _close(context: driver.Context, memory: driver.IPCMemoryHandle, thread: int) -> None:
    # PyCUDA cannot enter a context of another thread; the mapping then lives until the process ends.
    if thread == threading.get_ident():
        with contextlib.suppress(driver.Error), pushed(context):
            memory.close()
