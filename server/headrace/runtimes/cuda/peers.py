"""Copies from the memory of one GPU to that of another.

PyCUDA's `memcpy_peer_async` ignores the contexts that it gets, since its comparison with None is reversed (2025.1): the driver's
library is called instead (CUDA driver API, "Memory Management", cuMemcpyPeerAsync, and "Peer Context Memory Access").
Without peer access the driver stages the bytes in memory of the host.

A machine may report peer access and still copy wrong bytes: virtual machines and IOMMUs that redirect traffic between PCIe
devices do so. Therefore each pair of GPUs is tested by a copy of random bytes before its first use.
"""

from __future__ import annotations

import ctypes
import logging
import threading

import numpy as np

from headrace.core.errors import Unsupported
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaStream, DeviceError, OutOfDeviceMemory, current, succeeded
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, read_gpu, upload

logger = logging.getLogger("headrace.cuda")

_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED: another library uses the primary contexts, too
_TEST_BYTES = 1 << 20

# Guards `_copies`. Held while a pair is tested, which takes some milliseconds, once.
_lock = threading.Lock()
_copies: dict[tuple[int, int], PeerCopy | None] = {}


def peer_copy(source: int, target: int) -> PeerCopy | None:
    """Return the copy from one GPU to another; None if it does not work. The first call for a pair tests it.

    Args:
        source: number of the GPU with the memory.
        target: number of the GPU that receives it.

    Raises:
        Unsupported: there is no such GPU, or it cannot be used.
    """
    pair = source, target
    # A pair whose test has failed is stored as None: the lookup of a tested pair takes no lock.
    if pair not in _copies:
        with _lock:
            if pair not in _copies:
                try:
                    _copies[pair] = _tested(source, target)
                except OutOfDeviceMemory:  # the next call tests it
                    return None
    return _copies[pair]


def _tested(source: int, target: int) -> PeerCopy | None:
    try:
        copy = PeerCopy(source, target)
        if _is_exact(copy):
            return copy
        reason = (
            "the bytes differ: check with NVIDIA's p2pBandwidthLatencyTest, and whether an IOMMU redirects PCIe traffic"
        )
    except OutOfDeviceMemory:
        raise
    except DeviceError as error:
        reason = str(error)
    logger.warning("no copies from GPU %d to GPU %d, tensors pass through the host: %s", source, target, reason)
    return None


class PeerCopy:
    """Copies memory of one GPU to another; enables peer access if the driver offers it.

    Args:
        source: number of the GPU with the memory.
        target: number of the GPU that receives it.

    Raises:
        Unsupported: there is no such GPU, or it cannot be used.
        DeviceError: the driver refuses.
    """

    def __init__(self, source: int, target: int) -> None:
        if source == target:
            raise Unsupported(f"GPU {source} is no peer of itself: copy by memcpy_dtod_async")
        self.source, self.target = source, target
        self._source_context, self._target_context = _context(source), _context(target)
        if _has_access(target, source):
            with current(target):
                result = driver.library().cuCtxEnablePeerAccess(self._source_context, 0)
            if result not in (0, _ALREADY_ENABLED):
                logger.debug("GPU %d has no access to the memory of GPU %d: CUDA error %d", target, source, result)
        self._copy = driver.library().cuMemcpyPeerAsync

    def queue(self, target: int, source: int, size_bytes: int, stream: CudaStream) -> None:
        """Queue a copy.

        Args:
            target: address on the receiving GPU, which is current.
            source: address on the other GPU; it does not change until the stream has passed the copy.
            size_bytes: number of bytes.
            stream: stream of the receiving GPU.

        Raises:
            DeviceError: the driver refuses.
        """
        if size_bytes:
            result = self._copy(
                *(ctypes.c_ulonglong(target), self._target_context),
                *(ctypes.c_ulonglong(source), self._source_context),
                *(ctypes.c_size_t(size_bytes), ctypes.c_void_p(stream.handle)),
            )
            if result:
                succeeded(result, f"copying from GPU {self.source} to GPU {self.target}")


def _context(gpu: int) -> ctypes.c_void_p:
    """Return the handle of a GPU's primary context, which is never released."""
    context = ctypes.c_void_p()
    with current(gpu):
        succeeded(driver.library().cuCtxGetCurrent(ctypes.byref(context)), "reading the current context")
    return context


def _has_access(gpu: int, peer: int) -> bool:
    """Return True if a GPU can have access to the memory of another."""
    library, devices, result = driver.library(), [], ctypes.c_int()
    for ordinal in (gpu, peer):
        device = ctypes.c_int()
        succeeded(library.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)), f"finding GPU {ordinal}")
        devices.append(device)
    succeeded(library.cuDeviceCanAccessPeer(ctypes.byref(result), *devices), "reading the access between GPUs")
    return bool(result.value)


def _is_exact(copy: PeerCopy) -> bool:
    """Copy random bytes and compare them."""
    sent, block, received = PinnedBuffer(), DeviceBuffer(), DeviceBuffer()
    try:
        with current(copy.source):
            sent.reserve(_TEST_BYTES)
            values = sent.view((_TEST_BYTES,), np.dtype(np.uint8))
            values[:] = np.random.default_rng().integers(256, size=_TEST_BYTES, dtype=np.uint8)
            block.reserve(_TEST_BYTES)
            stream = CudaStream()
            upload(block, values, stream)
            stream.synchronize()
            del stream  # streams free themselves; their device must be current then
        with current(copy.target):
            received.reserve(_TEST_BYTES)
            stream = CudaStream()
            copy.queue(received.address, block.address, _TEST_BYTES, stream)
            stream.synchronize()
            del stream
        return np.array_equal(read_gpu(copy.target, received.address, _TEST_BYTES), values)
    finally:
        with current(copy.source):
            block.free()
            sent.free()
        with current(copy.target):
            received.free()
