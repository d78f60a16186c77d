"""Tensor maps: descriptions of tensors for the copy engine of GPUs of compute capability 9.0 and later.

PyCUDA has no encoder, so this module calls the driver's library (CUDA driver API, "Tensor Map Object Management"). A kernel
takes a map as an argument by value. Boxes have at most 64 float16 channels and are swizzled by 128 bytes in shared memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from headrace.runtimes.cuda.driver import library, succeeded

MAP_BYTES = 128
BOX_CHANNELS = 64

# Enumerations of cuda.h.
_FLOAT16 = 6
_NO_INTERLEAVE = 0
_SWIZZLE_128_BYTES = 3
_PROMOTE_TO_256_BYTES = 3
_ZEROS_OUTSIDE = 0
_MAP_ALIGNMENT = 64


class TensorMap(ctypes.Structure):
    """A map, as a kernel takes it by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * MAP_BYTES),)


class _AlignedMap:
    """Memory for a map at an address that the driver accepts."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = -(-start // _MAP_ALIGNMENT) * _MAP_ALIGNMENT

    def content(self) -> TensorMap:
        return TensorMap.from_buffer_copy(ctypes.string_at(self.address, MAP_BYTES))


def encode_tiles(address: int, sizes: Sequence[int], box: Sequence[int]) -> TensorMap:
    """Describe a contiguous float16 tensor that is copied in boxes; elements outside of it are zeros.

    Args:
        address: of the tensor on the GPU, aligned to 16 bytes.
        sizes: innermost dimension first; the innermost is a multiple of 8.
        box: elements of a box in each dimension, at most 64 in the innermost and 256 in the others.

    Returns:
        The map.

    Raises:
        DeviceError: the driver refuses.
    """
    rank, target = len(sizes), _AlignedMap()
    result = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(target.address),
        _FLOAT16,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*_strides(sizes)),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NO_INTERLEAVE,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    succeeded(result, f"encoding a tensor map of sizes {tuple(sizes)}")
    return target.content()


def encode_windows(
    address: int,
    sizes: tuple[int, int, int, int],
    window: tuple[int, int],
    stride: int,
    pad: int,
    pixels: int,
) -> TensorMap:
    """Describe the input of a convolution, which is copied by output pixels (im2col mode); the padding is zeros.

    A copy starts at the first tap of an output pixel, adds the tap's offset and goes on over `pixels` output pixels, from row to
    row and from image to image.

    Args:
        address: of a contiguous float16 tensor (n, h, w, c) on the GPU, aligned to 16 bytes.
        sizes: (c, w, h, n); c is a multiple of 8.
        window: width and height of the convolution's kernel.
        stride: step of the convolution.
        pad: zeros on each side.
        pixels: output pixels of a copy, at most 1024.

    Returns:
        The map.

    Raises:
        DeviceError: the driver refuses.
    """
    target = _AlignedMap()
    result = library().cuTensorMapEncodeIm2col(
        ctypes.c_void_p(target.address),
        _FLOAT16,
        4,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 4)(*sizes),
        (ctypes.c_uint64 * 3)(*_strides(sizes)),
        (ctypes.c_int * 2)(-pad, -pad),
        (ctypes.c_int * 2)(*(pad - (taps - 1) for taps in window)),
        BOX_CHANNELS,
        pixels,
        (ctypes.c_uint32 * 4)(1, stride, stride, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        _ZEROS_OUTSIDE,
    )
    succeeded(result, f"encoding a tensor map of sizes {tuple(sizes)}, window {window}")
    return target.content()


def _strides(sizes: Sequence[int]) -> list[int]:
    """Bytes between neighbours in every dimension but the innermost."""
    strides = [2 * sizes[0]]
    for size in sizes[1:-1]:
        strides.append(strides[-1] * size)
    return strides
