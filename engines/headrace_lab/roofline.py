"""Ceilings of a GPU, measured: bandwidth of a copy and rate of matrix products; and the floor that they set for a layer.

Williams, Waterman, Patterson, "Roofline: An Insightful Visual Performance Model for Multicore Architectures", 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.runtimes.cuda.driver import CudaStream, check, loaded
from headrace.runtimes.cuda.memory import DeviceBuffer

from headrace_lab.cudnn import Torch
from headrace_lab.kernels.base import ConvShape
from headrace_lab.measure import timed_us

_COPY_BYTES = 1 << 30
_COPIES = 8
_SAMPLES = 5
# Side of the matrices and products of one sample.
_PRODUCTS = {"fp16": (8192, 10), "fp32": (6144, 3)}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Ceilings of a GPU.

    Attributes:
        bytes_per_s: bandwidth of a copy on the GPU; bytes read and bytes written count.
        flops_per_s: operations of a large matrix product in a second, by precision.
        source: origin of the matrix products, e.g. "torch.matmul 8192x8192x8192"; "" without any.
    """

    bytes_per_s: float
    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def floor_us(self, shape: ConvShape, precision: str, itemsize: int, residual: bool) -> float:
        """Return the least time of a direct convolution: its arithmetic or its bytes, the longer of the two."""
        memory_s = shape.min_bytes(f"f{itemsize}", residual) / self.bytes_per_s
        peak = self.flops_per_s.get(precision)
        return 1e6 * max(memory_s, shape.flops / peak if peak else 0.0)


def measure_roofline(torch: Torch | None, precisions: tuple[str, ...], stream: CudaStream, copy_bytes: int) -> Roofline:
    """Measure the ceilings; the device must be current.

    Args:
        torch: PyTorch, for the matrix products; None leaves the arithmetic out of the floors.
        precisions: "fp16", "fp32".
        stream: stream of the work.
        copy_bytes: size of the copied block, at most 1 GiB is used.
    """
    bytes_per_s = _copy_bandwidth(stream, min(copy_bytes, _COPY_BYTES))
    if torch is None:
        return Roofline(bytes_per_s)
    rates = {precision: _matrix_rate(torch, precision, stream) for precision in precisions}
    sizes = ", ".join(f"{precision} {_PRODUCTS[precision][0]}^3" for precision in precisions)
    return Roofline(bytes_per_s, rates, f"torch.matmul, {sizes}")


def _copy_bandwidth(stream: CudaStream, size_bytes: int) -> float:
    source, target = DeviceBuffer(), DeviceBuffer()
    try:
        source.reserve(size_bytes)
        target.reserve(size_bytes)
        with check("filling memory of the GPU"):
            loaded().memset_d8_async(source.address, 0x5A, size_bytes, stream.stream)

        def copy() -> None:
            with check("copying on the GPU"):
                loaded().memcpy_dtod_async(target.address, source.address, size_bytes, stream.stream)

        best_us = _best_us(stream, copy, _COPIES)
    finally:
        source.free()
        target.free()
    return 2 * size_bytes / best_us * 1e6 if best_us else float("inf")


def _matrix_rate(torch: Torch, precision: str, stream: CudaStream) -> float:
    size, products = _PRODUCTS[precision]
    module = torch.module
    dtype = module.float16 if precision == "fp16" else module.float32
    with torch.running():
        left, right = (module.randn(size, size, device=torch.device).to(dtype) for _ in range(2))
        result = module.empty_like(left)

        def multiply() -> None:
            module.mm(left, right, out=result)

        best_us = _best_us(stream, multiply, products)
    return 2 * size**3 / best_us * 1e6


def _best_us(stream: CudaStream, work: Callable[[], None], repeats: int) -> float:
    """Shortest mean time of `repeats` pieces of work, of some samples."""
    work()

    def repeat() -> None:
        for _ in range(repeats):
            work()

    return min(timed_us(stream, repeat) for _ in range(_SAMPLES)) / repeats
