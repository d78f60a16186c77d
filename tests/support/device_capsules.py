"""DLPack capsules over any memory, as a framework gives them for a tensor on a GPU. Runs in model processes, too."""

from __future__ import annotations

import ctypes
from typing import Any

from headrace_model.device import DLTensor

KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}


class Tensor(DLTensor):
    """`DLManagedTensor` of DLPack."""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# Structs of capsules, which must live as long as the capsules.
_alive: list[Any] = []


def capsule(
    address: int, shape: tuple[int, ...], dtype: Any, device: tuple[int, int] = (2, 0), strides: tuple[int, ...] = ()
) -> Any:
    """Return a capsule; it does not own the memory.

    Args:
        address: of the first element.
        shape, dtype: of the tensor.
        device: kind and number of the device in DLPack; 2 is CUDA.
        strides: in elements; empty for a contiguous tensor without them.
    """
    dims = (ctypes.c_int64 * len(shape))(*shape)
    steps = (ctypes.c_int64 * len(strides))(*strides) if strides else None
    kind, bits = KINDS[dtype.kind], dtype.itemsize * 8
    tensor = Tensor(address, *device, len(shape), kind, bits, 1, dims, steps, 0, None, None)
    _alive.append((tensor, dims, steps))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(tensor), b"dltensor", None)
