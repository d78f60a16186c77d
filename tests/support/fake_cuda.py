"""A GPU without a GPU: stands for PyCUDA and for the part of libcuda that we call ourselves.

Device memory is host memory under its real address, so what runs on the fake can read and write it. Time is virtual: work that is
launched takes `work_us` on the stream.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda import devices, driver, peers
from headrace.runtimes.cuda.kernels import loading

from tests.support.fake_modules import DriverModules


class FakeCuda:
    """State of the fake GPU.

    Attributes:
        pushed: GPUs of the pushed contexts, the current one last.
        live: addresses of allocated device and pinned memory.
        device_blocks: sizes of allocated device memory, by address.
        block_gpus: GPUs of that memory.
        peer_access: True if GPUs can have access to each other's memory.
        accesses: pairs of a GPU and another whose memory it has access to.
        peer_copies: source GPU, receiving GPU and bytes of the copies between GPUs.
        wrong_peer_copies: makes copies between GPUs bring other bytes.
        room_bytes: free device memory.
        captured: work recorded while a graph is captured, None outside of that.
        busy: True if work is queued on the stream and not synchronised.
        refuse_capture: makes captures fail.
        now_us: the stream's clock.
        work_us: duration of one launch.
        l2_bytes: size of the L2 cache.
        registered: sizes of pinned host memory, by address.
        refuse_pinning: makes pinning fail.
        exported: arrays in place of memory of another process, by IPC handle.
        opened: number of times that each of them is open in this process, by address.
        broken_ipc: makes copies of such memory fail.
        stream_fails: makes queries of a stream fail for good.
    """

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.live: set[int] = set()
        self.device_blocks: dict[int, int] = {}
        self.block_gpus: dict[int, int] = {}
        self.peer_access = True
        self.accesses: set[tuple[int, int]] = set()
        self.peer_copies: list[tuple[int, int, int]] = []
        self.wrong_peer_copies = False
        self.room_bytes = 1 << 30
        self.captured: list[Callable[[], None]] | None = None
        self.busy = False
        self.refuse_capture = False
        self.now_us = 0.0
        self.work_us = 50.0
        self.launches = 0
        self.capability = (9, 0)
        self.l2_bytes = 4096
        self.devices = 1
        self.graphs: set[int] = set()
        self.registered: dict[int, int] = {}
        self.refuse_pinning = False
        self.exported: dict[bytes, Any] = {}
        self.opened: Counter[int] = Counter()
        self.broken_ipc = False
        self.stream_fails = False
        self._blocks: dict[int, Any] = {}

    def allocate(self, size: int) -> int:
        """Allocate device memory on the current GPU."""
        assert self.depth > 0
        block = ctypes.create_string_buffer(size)
        address = ctypes.addressof(block)
        self._blocks[address] = block
        self.live.add(address)
        self.device_blocks[address] = size
        self.block_gpus[address] = self.pushed[-1]
        return address

    def release(self, address: int) -> None:
        """Free memory of `allocate`."""
        self.live.remove(address)
        del self._blocks[address], self.device_blocks[address], self.block_gpus[address]

    @property
    def depth(self) -> int:
        """Number of pushed contexts."""
        return len(self.pushed)

    def check_on_gpu(self, address: int, gpu: int) -> None:
        """Memory that was allocated on a GPU can only be used there."""
        for start, size in list(self.device_blocks.items()):
            if start <= address < start + size:
                assert self.block_gpus[start] == gpu, f"GPU {gpu} uses memory of GPU {self.block_gpus[start]}"

    def used_bytes(self) -> int:
        """Device memory that is allocated."""
        return sum(self.device_blocks.values())

    def submit(self, work: Callable[[], None], stream: int = 77) -> None:
        """Queue work on a stream: done at once, or recorded for a graph."""
        assert self.depth > 0, "no context is current"
        if self.captured is not None:
            self.captured.append(work)
            return
        work()
        self.launches += 1
        self.now_us += self.work_us


class _Pinned:
    """Owner of pinned memory, as PyCUDA hangs it below an array."""

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        self._cuda = cuda
        self._block = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self._block)
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (self.address, False), "version": 3}
        cuda.live.add(self.address)

    def free(self) -> None:
        self._cuda.live.remove(self.address)


class DriverError(Exception):
    """`pycuda.driver.Error`."""


class OutOfMemory(DriverError):
    """`pycuda.driver.MemoryError`."""


def _driver_module(cuda: FakeCuda) -> ModuleType:
    module: Any = ModuleType("pycuda.driver")
    module.Error, module.MemoryError = DriverError, OutOfMemory
    module.init = lambda: None
    module.get_driver_version = lambda: 13000
    module.function_attribute = SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES="shared bytes")
    _add_devices(module, cuda)
    _add_streams(module, cuda)
    _add_memory(module, cuda)
    _add_shared_memory(module, cuda)
    return module


def _add_devices(module: Any, cuda: FakeCuda) -> None:
    class Context:
        def __init__(self, gpu: int) -> None:
            self._gpu = gpu

        def push(self) -> None:
            cuda.pushed.append(self._gpu)

        @staticmethod
        def pop() -> None:
            cuda.pushed.pop()

        @staticmethod
        def synchronize() -> None:
            assert cuda.depth > 0
            assert cuda.captured is None, "waiting spoils a capture"

    class Device:
        def __init__(self, ordinal: int) -> None:
            assert 0 <= ordinal < cuda.devices
            self._ordinal = ordinal

        @staticmethod
        def count() -> int:
            return cuda.devices

        multiprocessor_count = 132

        def name(self) -> str:
            return "Fake H1"

        def compute_capability(self) -> tuple[int, int]:
            return cuda.capability

        def total_memory(self) -> int:
            return 1 << 30

        def get_attribute(self, attribute: str) -> int:
            return {"l2 cache size": cuda.l2_bytes}[attribute]

        def retain_primary_context(self) -> Context:
            return Context(self._ordinal)

    module.Context, module.Device = Context, Device
    module.device_attribute = SimpleNamespace(L2_CACHE_SIZE="l2 cache size")


def _add_streams(module: Any, cuda: FakeCuda) -> None:
    class Stream:
        handle = 77

        def __init__(self, flags: int) -> None:
            assert flags == 1
            assert cuda.depth > 0

        def synchronize(self) -> None:
            assert cuda.captured is None, "waiting spoils a capture"
            cuda.busy = False

    class Event:
        def __init__(self) -> None:
            self.at_us = 0.0

        def record(self, stream: Stream) -> None:
            self.at_us = cuda.now_us

        def time_since(self, earlier: Event) -> float:
            return (self.at_us - earlier.at_us) / 1000

    def htod(target: int, source: Any, stream: Stream) -> None:
        assert cuda.captured is None
        assert source.flags.c_contiguous
        if cuda.broken_ipc:
            raise DriverError("cuMemcpyHtoDAsync failed: invalid argument")
        cuda.busy = True
        ctypes.memmove(target, source.ctypes.data, source.nbytes)

    def dtoh(target: Any, source: int, stream: Stream) -> None:
        assert cuda.captured is None
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def dtod(target: int, source: int, size: int, stream: Stream) -> None:
        assert cuda.captured is None
        for address in (target, source):
            cuda.check_on_gpu(address, cuda.pushed[-1])
        ctypes.memmove(target, source, size)

    def memset(target: int, value: int, size: int, stream: Stream) -> None:
        cuda.check_on_gpu(target, cuda.pushed[-1])
        cuda.submit(lambda: ctypes.memset(target, value, size), stream.handle)

    module.Stream, module.Event, module.memcpy_dtod_async = Stream, Event, dtod
    module.memset_d8_async = memset
    module.memcpy_htod_async, module.memcpy_dtoh_async = htod, dtoh


def _add_memory(module: Any, cuda: FakeCuda) -> None:
    class Allocation:
        def __init__(self, size: int) -> None:
            assert cuda.depth > 0
            if size > cuda.room_bytes:
                raise OutOfMemory("cuMemAlloc failed: out of memory")
            self._block = ctypes.create_string_buffer(size)
            self._address = ctypes.addressof(self._block)
            cuda.live.add(self._address)
            cuda.device_blocks[self._address] = size
            cuda.block_gpus[self._address] = cuda.pushed[-1]

        def __int__(self) -> int:
            return self._address

        def free(self) -> None:
            assert cuda.depth > 0
            cuda.live.remove(self._address)
            assert cuda.pushed[-1] == cuda.block_gpus[self._address], "memory is freed where it was allocated"
            del cuda.device_blocks[self._address], cuda.block_gpus[self._address]

    def pagelocked_empty(size: int, dtype: Any) -> Any:
        assert np.dtype(dtype) == np.uint8
        return np.asarray(_Pinned(cuda, size))

    module.mem_alloc, module.pagelocked_empty = Allocation, pagelocked_empty


def _add_shared_memory(module: Any, cuda: FakeCuda) -> None:
    class IPCMemoryHandle:
        """Opens what `FakeCuda.exported` has under the handle."""

        def __init__(self, handle: bytearray) -> None:
            assert cuda.depth > 0
            if bytes(handle) not in cuda.exported:
                raise DriverError("cuIpcOpenMemHandle failed: invalid resource handle")
            self._array = cuda.exported[bytes(handle)]
            cuda.opened[int(self)] += 1
            cuda.live.add(int(self))

        def __int__(self) -> int:
            return int(self._array.ctypes.data)

        def close(self) -> None:
            assert cuda.depth > 0
            cuda.opened[int(self)] -= 1
            if not cuda.opened[int(self)]:
                cuda.live.remove(int(self))

    def address_range(address: int) -> tuple[int, int]:
        sizes = {array.ctypes.data: array.nbytes for array in cuda.exported.values()}
        return address, sizes[address]

    def dtoh_now(target: Any, source: int) -> None:
        assert cuda.depth > 0
        if cuda.broken_ipc:
            raise DriverError("cuMemcpyDtoH failed: invalid argument")
        ctypes.memmove(target.ctypes.data, source, target.nbytes)

    def htod_now(target: int, source: Any) -> None:
        raise AssertionError("it may return before the GPU has the bytes: copy on a stream and wait for it")

    module.IPCMemoryHandle, module.mem_get_address_range = IPCMemoryHandle, address_range
    module.memcpy_dtoh, module.memcpy_htod = dtoh_now, htod_now


_CONTEXTS = 4000  # handle of the context of GPU 0


class _Library(DriverModules):
    """libcuda, as far as modules, graphs, pinned memory and copies between GPUs need it."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda)
        self._numbers = itertools.count(1)
        self._work: dict[int, list[Callable[[], None]]] = {}

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:  # noqa: N802
        self._cuda.captured = []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:  # noqa: N802
        work, self._cuda.captured = self._cuda.captured, None
        assert work is not None
        if self._cuda.refuse_capture:
            return 901
        number = next(self._numbers)
        self._work[number] = work
        graph._obj.value = number
        self._cuda.graphs.add(number)
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: Any) -> int:  # noqa: N802
        executable._obj.value = graph.value + 1000
        self._cuda.graphs.add(graph.value + 1000)
        return 0

    def cuGraphUpload(self, executable: Any, stream: Any) -> int:  # noqa: N802
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:  # noqa: N802
        self._cuda.graphs.remove(graph.value)
        return 0

    def cuGraphExecDestroy(self, executable: Any) -> int:  # noqa: N802
        self._cuda.graphs.remove(executable.value)
        del self._work[executable.value - 1000]
        return 0

    def cuGraphLaunch(self, executable: Any, stream: Any) -> int:  # noqa: N802
        for work in self._work[executable.value - 1000]:
            self._cuda.submit(work, stream.value)
        return 0

    def cuMemHostRegister_v2(self, address: Any, size: Any, flags: int) -> int:  # noqa: N802
        assert self._cuda.depth > 0
        assert flags == 3
        if self._cuda.refuse_pinning:
            return 801
        assert address.value not in self._cuda.registered
        self._cuda.registered[address.value] = size.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        assert self._cuda.depth > 0
        del self._cuda.registered[address.value]
        return 0

    def cuMemHostGetDevicePointer_v2(self, actual: Any, address: Any, flags: int) -> int:  # noqa: N802
        assert flags == 0
        pinned = any(start <= address.value < start + size for start, size in self._cuda.registered.items())
        actual._obj.value = address.value
        return 0 if pinned else 1

    def cuStreamQuery(self, stream: Any) -> int:  # noqa: N802
        return 700 if self._cuda.stream_fails else 0

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = self._cuda.pushed[-1]
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = _CONTEXTS + self._cuda.pushed[-1]
        return 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:  # noqa: N802
        device._obj.value = ordinal.value
        return 0

    def cuDeviceCanAccessPeer(self, result: Any, device: Any, peer: Any) -> int:  # noqa: N802
        result._obj.value = self._cuda.peer_access
        return 0

    def cuCtxEnablePeerAccess(self, context: Any, flags: int) -> int:  # noqa: N802
        assert (flags, self._cuda.peer_access) == (0, True)
        pair = self._cuda.pushed[-1], context.value - _CONTEXTS
        assert pair[0] != pair[1]
        if pair in self._cuda.accesses:
            return 704
        self._cuda.accesses.add(pair)
        return 0

    def cuMemcpyPeerAsync(  # noqa: N802
        self, target: Any, target_context: Any, source: Any, source_context: Any, size: Any, stream: Any
    ) -> int:
        cuda, to, at = self._cuda, target_context.value - _CONTEXTS, source_context.value - _CONTEXTS
        assert cuda.captured is None
        assert cuda.pushed[-1] == to, "the stream is one of the receiving GPU"
        cuda.check_on_gpu(target.value, to)
        cuda.check_on_gpu(source.value, at)
        cuda.peer_copies.append((at, to, size.value))

        def copy() -> None:
            ctypes.memmove(target.value, source.value, size.value)
            if cuda.wrong_peer_copies:
                ctypes.memset(target.value, 0, size.value // 2)

        cuda.submit(copy, stream.value)
        return 0

    def cuGetErrorName(self, result: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
        return 0


def _no_compiler(*_: object) -> bytes:
    raise Unsupported("NVRTC is not there: the GPU is a fake")


def install(monkeypatch: pytest.MonkeyPatch, cuda: FakeCuda) -> None:
    """Let `headrace.runtimes.cuda` find the fake until the test is over."""
    package: Any = ModuleType("pycuda")
    package.driver = _driver_module(cuda)
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", package.driver)
    monkeypatch.setattr(driver, "_contexts", {})
    monkeypatch.setattr(driver, "_lost", set())
    monkeypatch.setattr(peers, "_copies", {})
    monkeypatch.setattr(devices, "driver_major", lambda: 580)
    monkeypatch.setattr(devices, "is_visible", lambda: cuda.devices > 0)
    # There is a compiler on some machines, but never a GPU behind this that would load what it makes.
    monkeypatch.setattr(loading, "compile_cuda", _no_compiler)
    library = _Library(cuda)
    monkeypatch.setattr(driver, "library", lambda: library)
