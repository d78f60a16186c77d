"""FFT convolution for large kernels: one complex product for each frequency replaces the sum over the kernel.

Images are cut into parts of `SIZE` x `SIZE` inputs that overlap by the kernel less one ("overlap-save"), padded with zeros.
Five steps: NHWC to float32 planes, transposed through 4 to 17 KiB of shared memory; cuFFT, real to complex; (tiles, c) * (c,
k) for each frequency; cuFFT back; planes to NHWC with the epilogue. In the products a warp has 32 neighbouring frequencies
and a thread 4x4 complex sums in registers (74 in all), so that all reads are of 256 consecutive bytes; there is no shared
memory. The kernel's spectrum is computed on the host in float64. The size of a plane is the one with the least estimated
time.

Sources: Mathieu, Henaff and LeCun (2014), "Fast Training of Convolutional Networks through FFTs"; Vasilache et al. (2015),
"Fast Convolutional Nets With fbfft", for the parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from headrace.core.errors import Unsupported
from headrace.core.tensor import Array
from headrace.runtimes.cuda.driver import CudaStream

from headrace_lab.kernels.base import Convolution, ConvShape
from headrace_lab.kernels.cufft import find_cufft
from headrace_lab.kernels.resources import (
    Algorithm,
    ChunkedConvolution,
    ConvOperation,
    Floats,
    GpuResources,
    as_floats,
)

_SIZES = (8, 16, 24, 32, 48, 64, 96, 128)
_THREADS = 256
_WARPS = _THREADS // 32
# Sums of a thread in the products, rows and columns, and channels that it reads ahead.
_SUMS = (4, 4, 2)
_VARIANTS = 4
# Planes and spectra of a chunk of images, and the spectrum of a kernel, in bytes at most.
_CHUNK_BYTES = 1 << 30
_KERNEL_BYTES = 4 << 30
# Rates that the size of a plane is chosen by: operations of the products and bytes of the transforms per second.
_OPERATIONS_PER_S = 15e12
_BYTES_PER_S = 3e12
# The transforms, with gathering and scattering, read and write each plane about this often.
_PASSES = 6

Spectrum = npt.NDArray[np.complex64]


@dataclass(frozen=True, slots=True)
class Planes:
    """Planes that a shape's images are cut into.

    Attributes:
        size: rows and columns.
        valid_h: rows of outputs of a plane.
        valid_w: columns.
        high: planes above each other in an image.
        wide: planes beside each other.
    """

    size: int
    valid_h: int
    valid_w: int
    high: int
    wide: int

    @classmethod
    def of(cls, shape: ConvShape, size: int) -> Planes:
        """Return the planes of one size."""
        valid_h, valid_w = min(size - shape.r + 1, shape.out_h), min(size - shape.s + 1, shape.out_w)
        return cls(size, valid_h, valid_w, -(-shape.out_h // valid_h), -(-shape.out_w // valid_w))

    @property
    def per_image(self) -> int:
        """Planes of one channel of an image."""
        return self.high * self.wide

    @property
    def frequencies(self) -> int:
        """Complex values of a spectrum."""
        return self.size * (self.size // 2 + 1)

    def image_bytes(self, shape: ConvShape) -> int:
        """Planes and spectra of an image."""
        real = max(shape.c, shape.k) * self.size**2 * 4
        return self.per_image * (real + (shape.c + shape.k) * self.frequencies * 8)

    def kernel_bytes(self, shape: ConvShape) -> int:
        """Spectrum of the kernel."""
        return shape.c * shape.k * self.frequencies * 8

    def seconds(self, shape: ConvShape) -> float:
        """Estimate the time of a batch."""
        tiles = shape.n * self.per_image
        operations = 8 * tiles * self.frequencies * shape.c * shape.k
        moved = tiles * (shape.c + shape.k) * self.size**2 * 4 * _PASSES + self.kernel_bytes(shape)
        return operations / _OPERATIONS_PER_S + moved / _BYTES_PER_S


def fitting_planes(shape: ConvShape) -> list[Planes]:
    """Return the planes that a shape fits into, the one with the least estimated time first; none for very large kernels."""
    sizes = [size for size in _SIZES if size >= max(shape.r, shape.s)]
    planes = [Planes.of(shape, size) for size in sizes]
    planes = [one for one in planes if max(one.kernel_bytes(shape), one.image_bytes(shape)) <= _KERNEL_BYTES]
    return sorted(planes, key=lambda one: one.seconds(shape))


def kernel_spectrum(shape: ConvShape, planes: Planes, weights: Array) -> Spectrum:
    """Return the conjugated spectrum (c, k, frequencies) of a kernel, divided by the elements of a plane."""
    result = np.empty((shape.c, shape.k, planes.frequencies), np.complex64)
    scale = 1 / planes.size**2
    for channel in range(shape.c):
        spectrum = np.fft.rfft2(weights[..., channel].astype(np.float64), (planes.size, planes.size))
        result[channel] = (np.conj(spectrum) * scale).reshape(shape.k, -1)
    return result


class _FftConvolution(ChunkedConvolution):
    """`Convolution` by FFT. The transforms of the last chunk are those of a whole one."""

    def __init__(self, resources: GpuResources, operation: ConvOperation, planes: Planes, chunk_bytes: int) -> None:
        shape = operation.shape
        super().__init__(resources, operation, planes.per_image, chunk_bytes // planes.image_bytes(shape))
        self._planes = planes
        tiles = self._chunk_tiles
        self._rows, self._columns, unrolled = _SUMS
        self._rows = min(self._rows, tiles)
        self._warp_rows = 2 if tiles > self._rows else 1
        options = {
            **operation.options(),
            "SIZE": planes.size,
            "VALID_HEIGHT": planes.valid_h,
            "VALID_WIDTH": planes.valid_w,
            "PLANES_HIGH": planes.high,
            "PLANES_WIDE": planes.wide,
            "THREADS": _THREADS,
            "ROWS": self._rows,
            "COLUMNS": self._columns,
            "WARP_ROWS": self._warp_rows,
            "UNROLLED": unrolled,
        }
        types = {"gather_planes": "PPi", "multiply_spectra": "PPPi", "scatter_planes": "PPPPi"}
        self._kernels = resources.load("fft.cu", options, types)
        resources.kernels_complete()
        self._kernel, self._bias = resources.constants(
            kernel_spectrum(shape, planes, operation.weights.astype(operation.dtype)), operation.float_bias()
        )
        self._real = resources.workspace(tiles * max(shape.c, shape.k) * planes.size**2 * 4)
        self._inputs = resources.workspace(tiles * shape.c * planes.frequencies * 8)
        self._outputs = resources.workspace(tiles * shape.k * planes.frequencies * 8)
        self._forward = resources.transform(planes.size, tiles * shape.c, inverse=False)
        self._inverse = resources.transform(planes.size, tiles * shape.k, inverse=True)
        work = resources.workspace(max(self._forward.work_bytes, self._inverse.work_bytes, 1))
        for transform in (self._forward, self._inverse):
            transform.set_work_area(work)

    def launch_chunk(self, stream: CudaStream, x: int, y: int, residual: int, tiles: int) -> None:
        """Queue a chunk of so many tiles; the addresses are those of its first image."""
        shape, planes, launch = self._shape, self._planes, self._kernels.launch
        grid = tiles * planes.size, -(-shape.c // 32)
        launch("gather_planes", grid, _THREADS, stream, x, self._real, tiles)
        self._forward.launch(stream, self._real, self._inputs)
        row_blocks = -(-tiles // (self._rows * self._warp_rows))
        column_blocks = -(-shape.k // (self._columns * (_WARPS // self._warp_rows)))
        grid = row_blocks * column_blocks * -(-planes.frequencies // 32), 1
        spectra = (self._inputs, self._kernel, self._outputs)
        launch("multiply_spectra", grid, _THREADS, stream, *spectra, tiles)
        self._inverse.launch(stream, self._outputs, self._real)
        grid = tiles * planes.valid_h, -(-shape.k // 32)
        launch("scatter_planes", grid, _THREADS, stream, self._real, self._bias, residual, y, tiles)


class FftAlgorithm(Algorithm):
    """`Algorithm`: FFT convolution in float32; float16 elements are converted on the way.

    Args:
        size: rows and columns of a plane; None: the one with the least estimated time.
        chunk_bytes: scratch memory of a chunk of images.
    """

    name = "fft"

    def __init__(self, size: int | None = None, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._size = size
        self._chunk_bytes = chunk_bytes
        self.variant = f"{size}x{size}" if size else "auto"

    def variants(self, shape: ConvShape) -> list[Algorithm]:
        """Return the sizes of planes that are worth measuring for a shape."""
        return [FftAlgorithm(planes.size, self._chunk_bytes) for planes in fitting_planes(shape)[:_VARIANTS]]

    def estimate_us(self, shape: ConvShape) -> float:
        """Return the time by the cost model, in microseconds, of an H100 or H200; the shape must be supported."""
        return 1e6 * self._selected(shape).seconds(shape)

    def _selected(self, shape: ConvShape) -> Planes:
        """Return the planes of a supported shape."""
        planes = self._planes(shape)
        assert planes is not None, "refusal has a reason then"
        return planes

    def _planes(self, shape: ConvShape) -> Planes | None:
        if self._size is None:
            return next(iter(fitting_planes(shape)), None)
        return Planes.of(shape, self._size) if self._size >= max(shape.r, shape.s) else None

    def refusal(self, shape: ConvShape, dtype: npt.DTypeLike, capability: tuple[int, int]) -> str:
        """Supports stride 1 and one group where cuFFT is installed."""
        if shape.stride != 1:
            return "it supports stride 1 only: use implicit-gemm, simt-gemm or direct"
        if shape.groups > 1:
            return "it supports one group only: use depthwise, simt-gemm or direct"
        if self._planes(shape) is None:
            return (
                f"its planes have {self._size or _SIZES[-1]} rows at most and its spectra {_KERNEL_BYTES >> 30} GiB: "
                "use implicit-gemm, simt-gemm or direct"
            )
        try:
            find_cufft()
        except Unsupported as error:
            return str(error)
        return ""

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> Convolution:
        """Prepare a supported shape with resources that are closed if this raises."""
        return _FftConvolution(resources, operation, self._selected(operation.shape), self._chunk_bytes)

    def sums(self, shape: ConvShape, dtype: npt.DTypeLike, x: Array, weights: Array) -> Floats:
        """Compute the algorithm's sums in float32 with NumPy, with its roundings, for `reference`. The same transforms and
        products.
        """
        planes = self._selected(shape)
        kernel = kernel_spectrum(shape, planes, weights.astype(dtype))
        size, pad = planes.size, shape.pad
        below = (planes.high - 1) * planes.valid_h + size - pad - shape.h
        right = (planes.wide - 1) * planes.valid_w + size - pad - shape.w
        padded = np.pad(as_floats(x, dtype), ((0, 0), (pad, max(below, 0)), (pad, max(right, 0)), (0, 0)))
        sums = np.empty((shape.n, planes.high * planes.valid_h, planes.wide * planes.valid_w, shape.k), np.float32)
        for part in range(planes.per_image):
            row, column = part // planes.wide * planes.valid_h, part % planes.wide * planes.valid_w
            window: Floats = padded[:, row : row + size, column : column + size]
            spectrum = np.fft.rfft2(window, axes=(1, 2)).reshape(shape.n, -1, shape.c)
            products = np.einsum("nfc,ckf->nfk", spectrum, kernel, optimize=True)
            planes_back = np.fft.irfft2(
                products.reshape(shape.n, size, -1, shape.k), (size, size), (1, 2), norm="forward"
            )
            valid = planes_back[:, : planes.valid_h, : planes.valid_w]
            sums[:, row : row + planes.valid_h, column : column + planes.valid_w] = valid
        return sums[:, : shape.out_h, : shape.out_w]
