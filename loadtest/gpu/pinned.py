"""Pictures in pinned memory of this process, as a caller has them who owns such memory."""

from __future__ import annotations

from headrace.core.tensor import PINNED, ResidentRows, as_input

from loadtest.protocol import Array


def pinned(pixels: Array, on_gpu: bool) -> Array:
    """A copy of the pictures that every GPU reads by itself, kept as long as any of its rows are.

    Args:
        pixels: uint8, with the rows in front.
        on_gpu: False: `ResidentRows` all the same, over ordinary memory, which a model on the CPU copies.
    """
    if on_gpu:
        from headrace.cuda.memory import pinned_empty, pinned_rows

        kept = pinned_empty(pixels.shape, pixels.dtype)
        kept[:] = pixels
        return as_input(pinned_rows(kept))
    flat = pixels.copy().reshape(-1)
    start = int(flat.ctypes.data)

    def copy(address: int, size_bytes: int) -> Array:
        copied: Array = flat[address - start : address - start + size_bytes].copy()
        return copied

    return as_input(ResidentRows(start, PINNED, pixels.dtype, pixels.shape, flat, copy))
