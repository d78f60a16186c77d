"""Tensors in the memory of a GPU, by DLPack and the CUDA driver (ctypes).

`DeviceArray` is an output that a framework gave as a capsule. `IpcArray` is an input in memory of another process, which is
opened by its CUDA IPC handle; it gives capsules to frameworks. Both are copied to host memory on request.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Iterator

import numpy as np

from headrace_model.protocol import BF16, DTYPES

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""Kinds of devices in DLPack. The last two are readable by the CPU."""

_NAME = b"dltensor"
# Kind and bits of a datatype in DLPack -> dtype; bfloat16 (kind 4) as bit patterns.
_DTYPES = {
    **{(0, bits): f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"<u{bits // 8}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"<f{bits // 8}" for bits in (16, 32, 64)},
    (4, 16): "<u2",
    (6, 8): "?",
}


class DLTensor(ctypes.Structure):
    """The struct `DLTensor` of DLPack; it is the first member of `DLManagedTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_BFLOAT_KIND, _BOOL_KIND = 4, 6
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag that the driver accepts


class DlpackError(Exception):
    """The memory of a GPU cannot be read."""


class IpcHandleError(DlpackError):
    """The driver refuses the CUDA IPC handle of a region."""


class DeviceArray:
    """An array in the memory of a GPU. The capsule stays unused, and its memory lives as long as this object.

    Args:
        capsule: a DLPack capsule that nothing has used.

    Attributes:
        capsule: see above.
        shape: of the array.
        dtype: of the array; that of unsigned 16-bit numbers for bfloat16.
        device_type: kind of the device in DLPack.
        device_id: number of the device.

    Raises:
        DlpackError: the capsule is used, or its tensor has a datatype or a layout that is not served.
    """

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule
        self._tensor = tensor = read_capsule(capsule)
        self.device_type, self.device_id = tensor.device_type, tensor.device_id
        self.shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
        name = _DTYPES.get((tensor.kind, tensor.bits))
        if name is None or tensor.lanes != 1:
            raise DlpackError(f"a tensor of the kind {tensor.kind} with {tensor.bits} bits is not served")
        self.dtype = np.dtype(name)
        size = 1
        for axis in reversed(range(tensor.ndim)):
            if tensor.strides and self.shape[axis] != 1 and tensor.strides[axis] != size:
                raise DlpackError("a tensor in the memory of a GPU must be contiguous")
            size *= self.shape[axis]

    def to_host(self) -> Any:
        """Wait for the GPU, and return a copy in host memory; raises DlpackError if the driver refuses."""
        array = np.empty(self.shape, self.dtype)
        if array.nbytes:
            address = (self._tensor.data or 0) + self._tensor.byte_offset
            copy_to_host(array.ctypes.data, address, array.nbytes, self.device_id)
        return array


def read_capsule(capsule: Any) -> DLTensor:
    """Return the tensor of a DLPack capsule, without using it up.

    Raises:
        DlpackError: it is no capsule of DLPack, or is used.
    """
    api = ctypes.pythonapi
    api.PyCapsule_IsValid.argtypes = api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    if not api.PyCapsule_IsValid(capsule, _NAME):
        raise DlpackError("from_dlpack needs a DLPack capsule that nothing has used, or an object with __dlpack__")
    return DLTensor.from_address(api.PyCapsule_GetPointer(capsule, _NAME))


class _IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class IpcRegion:
    """Memory of another process on a GPU, open until the last reference is gone.

    Args:
        handle: CUDA IPC handle, 64 bytes.
        device_id: number of the GPU.

    Attributes:
        address: address of the memory in the GPU.
        device_id: see above.

    Raises:
        IpcHandleError: the driver refuses the handle.
        DlpackError: there is no driver or no such GPU.
    """

    def __init__(self, handle: bytes, device_id: int) -> None:
        self.address = 0
        self.device_id = device_id
        address = ctypes.c_uint64()
        with _current(device_id) as driver:
            reserved, flags = _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
            status = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), reserved, flags)
        if status:
            raise IpcHandleError(f"cuIpcOpenMemHandle failed with the status {status} of CUDA")
        self.address = address.value

    def __del__(self) -> None:
        """Close the memory after all work of its GPU, which may read it."""
        if self.address:
            with suppress(DlpackError), _current(self.device_id) as driver:
                driver.cuCtxSynchronize()
                driver.cuIpcCloseMemHandle(ctypes.c_uint64(self.address))


class IpcRegions:
    """The regions of GPU memory that this process has open, each once.

    A region is closed when the server has dropped it and no tensor of the model, nor one of a framework, uses it any more.
    """

    def __init__(self) -> None:
        self._open: dict[int, IpcRegion] = {}

    def region(self, number: int, handle: bytes, device_id: int) -> IpcRegion:
        """Return a region, which is opened if it is not open.

        Args:
            number: number of the region, which the server gave it.
            handle, device_id: see `IpcRegion`.

        Raises:
            DlpackError: see `IpcRegion`.
        """
        region = self._open.get(number)
        if region is None:
            region = self._open[number] = IpcRegion(handle, device_id)
        return region

    def close(self, number: int) -> None:
        """Drop a region; does nothing if it is not open."""
        self._open.pop(number, None)


class IpcArray:
    """An input in a region of GPU memory; contiguous.

    Args:
        region: the region, which stays open as long as this object, or a capsule or tensor of it.
        offset: start in the region in bytes.
        shape: of the array.
        code: its datatype code.

    Attributes:
        shape, dtype, device_type, device_id: as in `DeviceArray`.
    """

    device_type = CUDA

    def __init__(self, region: IpcRegion, offset: int, shape: tuple[int, ...], code: int) -> None:
        self._region = region
        self._address = region.address + offset
        self._code = code
        self.shape = shape
        self.dtype = DTYPES[code]
        self.device_id = region.device_id

    @property
    def capsule(self) -> Any:
        """A new DLPack capsule, which holds the region.

        NumPy creates it for an array at the address of the GPU, which is never read, and the device is written into it. So the
        functions that free it are NumPy's, in C: a framework may call them on any thread and while an exception is raised.
        """
        if not hasattr(np.ndarray, "__dlpack__"):
            raise DlpackError(f"to_dlpack needs NumPy 1.22 or later, this is {np.__version__}")
        is_bool = self.dtype.kind == "b"  # which NumPy refuses before 1.25
        typestr = "|u1" if is_bool else self.dtype.str
        capsule = np.asarray(_DeviceMemory(self._region, self._address, self.shape, typestr)).__dlpack__()
        tensor = read_capsule(capsule)
        tensor.device_type, tensor.device_id = self.device_type, self.device_id
        if is_bool or self._code == BF16:
            tensor.kind = _BOOL_KIND if is_bool else _BFLOAT_KIND
        return capsule

    def to_host(self) -> Any:
        """Wait for the GPU, and return a copy in host memory; raises DlpackError if the driver refuses."""
        array = np.empty(self.shape, self.dtype)
        copy_to_host(array.ctypes.data, self._address, array.nbytes, self.device_id)
        return array


class _DeviceMemory:
    """NumPy's array interface of memory in a GPU; an array of it holds the region."""

    def __init__(self, region: IpcRegion, address: int, shape: tuple[int, ...], typestr: str) -> None:
        self._region = region
        self.__array_interface__ = {"shape": shape, "typestr": typestr, "data": (address, False), "version": 3}


def copy_to_host(target: int, source: int, size_bytes: int, device_id: int) -> None:
    """Copy from the memory of a GPU after all work of its primary context, which frameworks share.

    Args:
        target: address in host memory.
        source: address in the memory of the GPU.
        size_bytes: bytes to copy.
        device_id: number of the GPU.

    Raises:
        DlpackError: there is no driver, or it refuses.
    """
    with _current(device_id) as driver:
        # The producer may have written on any stream.
        _check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
        arguments = ctypes.c_void_p(target), ctypes.c_uint64(source), ctypes.c_size_t(size_bytes)
        _check(driver.cuMemcpyDtoH_v2(*arguments), "cuMemcpyDtoH")


@contextmanager
def _current(device_id: int) -> Iterator[Any]:
    """Make the primary context of a GPU current on this thread; the value is the driver."""
    driver, context = _driver(), _primary_context(device_id)
    _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@lru_cache(maxsize=None)
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DlpackError(f"the CUDA driver cannot be loaded: {error}") from None
    _check(driver.cuInit(0), "cuInit")
    return driver


@lru_cache(maxsize=None)
def _primary_context(device_id: int) -> ctypes.c_void_p:
    """Return the primary context of a GPU, which is kept until the process ends."""
    driver, device, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(device), device_id), "cuDeviceGet")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    return context


def _check(status: int, call: str) -> None:
    if status:
        raise DlpackError(f"{call} failed with the status {status} of CUDA")
