"""The driver's own library, for what PyCUDA lacks or does while it holds the interpreter's lock; `ctypes` gives that away."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from headrace.cuda.driver import DeviceError


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
