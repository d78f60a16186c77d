"""Times our convolution algorithms on a model's layers, to choose those worth building into an engine.

Random inputs, warm caches as after the layer before, a CUDA graph of repeated launches, CUDA events around it, the median of
several rounds. A kernel whose result is wrong is left out. The layers of one shape are measured once. Algorithms are compiled at
the same time on several threads.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
from headrace.core.errors import HeadraceError
from headrace.core.tensor import Array
from headrace.runtimes.cuda.driver import CudaGraph, CudaStream, TimingEvent, check, current, loaded
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, copy_on_gpu, download, upload
from headrace_lab.kernels import algorithms
from headrace_lab.kernels.base import Convolution, ConvShape, Epilogue, convolve
from headrace_lab.kernels.resources import Algorithm

from headrace_engines.targets.tensorrt.convolutions import FusedConvolution

logger = logging.getLogger("headrace.tensorrt")
_LAUNCHES = 8
# Variants of an algorithm, e.g. tile sizes, that are measured.
_VARIANTS = 3
_ROUNDS = 7
_THREADS = 8
# Random values of one operand; larger operands repeat them.
_VALUES = 1 << 20
# Difference from the reference, relative to the largest value, from which a kernel is wrong: float16 rounds by 0.0005.
_MAX_ERROR = 0.02
# Left out in FP16 where one of the second group supports the shape: they lost there in every measurement (docs/lab.md), and
# compiling and timing them takes long.
_SLOWER = (
    (("direct", "simt-gemm"), ("implicit-gemm", "implicit-gemm-hopper")),
    (("winograd-f2", "winograd-f4"), ("implicit-gemm-hopper",)),
)
_FFT_FROM = 10  # height and width of the kernel; smaller ones lost


class KernelTimes:
    """Measured times of our algorithms on one GPU.

    Args:
        device: number of the GPU.
        rows: batch that is measured.
    """

    def __init__(self, device: int, rows: int) -> None:
        self._device = device
        self._rows = rows
        self._best: dict[tuple[ConvShape, Epilogue], tuple[Algorithm, float] | None] = {}
        with current(device), check("reading the properties of the GPU"):
            major, minor = loaded().Device(device).compute_capability()
        self._capability = major, minor

    def fastest(self, convolution: FusedConvolution) -> tuple[Algorithm, float] | None:
        """Return the fastest algorithm and its time in microseconds; None if none supports the shape.

        Algorithms whose result differs from the reference in float64 are left out.
        """
        key = replace(convolution.shape, n=self._rows), convolution.epilogue
        if key not in self._best:
            with current(self._device), closing(_Operands(convolution, key[0])) as operands:
                opened = self._open(convolution, key[0])
                times = [(self._time(one, each, operands), one) for one, each in opened]
            fitting = [pair for pair in times if math.isfinite(pair[0])]
            best = min(fitting, key=lambda pair: pair[0], default=None)
            self._best[key] = None if best is None else (best[1], best[0])
        return self._best[key]

    def _candidates(self, shape: ConvShape) -> list[Algorithm]:
        fitting = [one for one in algorithms.ALGORITHMS if not one.refusal(shape, np.float16, self._capability)]
        fitting = [one for one in fitting if one.name != "fft" or min(shape.r, shape.s) >= _FFT_FROM]
        names = {one.name for one in fitting}
        left_out = {name for slower, faster in _SLOWER if not names.isdisjoint(faster) for name in slower}
        fitting = [one for one in fitting if one.name not in left_out]
        return [variant for one in fitting for variant in one.variants(shape)[:_VARIANTS]]

    def _open(self, convolution: FusedConvolution, shape: ConvShape) -> Sequence[tuple[Algorithm, Convolution]]:
        weights = convolution.weights.astype(np.float32)

        def open_one(algorithm: Algorithm) -> tuple[Algorithm, Convolution] | None:
            try:
                epilogue, bias = convolution.epilogue, convolution.bias
                # PyCUDA destroys a stream only where its context is current.
                with current(self._device):
                    return algorithm, algorithm.open(self._device, shape, np.float16, epilogue, weights, bias)
            except HeadraceError as error:
                logger.info("%s %s does not run %s: %s", algorithm.name, algorithm.variant, shape, error)
                return None

        with ThreadPoolExecutor(_THREADS) as pool:
            return [result for result in pool.map(open_one, self._candidates(shape)) if result is not None]

    def _time(self, algorithm: Algorithm, opened: Convolution, operands: _Operands) -> float:
        """Return the microseconds of one launch; infinite if it fails or computes another result."""
        with closing(opened):
            try:
                operands.launch(opened)
                error = operands.relative_error()
                if not error < _MAX_ERROR:
                    text = "%s %s is left out: its result for %s differs by %.3g of the largest value"
                    logger.warning(text, algorithm.name, algorithm.variant, operands.shape, error)
                    return math.inf
                return operands.time_us(opened)
            except HeadraceError as error:
                logger.info("%s %s fails on %s: %s", algorithm.name, algorithm.variant, operands.shape, error)
                return math.inf


class _Operands:
    """Random operands of one shape on the GPU, which must be current, and the last image of the result."""

    def __init__(self, convolution: FusedConvolution, shape: ConvShape) -> None:
        self.shape = shape
        self._stream = CudaStream()
        self._values = np.random.default_rng(0).standard_normal(_VALUES, np.float32).astype(np.float16)
        self._staged = PinnedBuffer()
        self._buffers: list[DeviceBuffer] = []
        try:
            self._x, self._residual, self._y = (self._filled(each) for each in (shape.x_shape, *[shape.y_shape] * 2))
        except BaseException:
            self.close()
            raise
        one = replace(shape, n=1)
        x, residual = self._last_image(shape.x_shape), self._last_image(shape.y_shape)
        weights, bias = convolution.weights, convolution.bias
        self._expected = convolve(one, convolution.epilogue, x, weights, bias, residual)

    def launch(self, opened: Convolution) -> None:
        """Queue one convolution."""
        opened.launch(self._stream, self._x, self._y, self._residual, self.shape.n)

    def relative_error(self) -> float:
        """Wait, and return the largest difference from the reference in the last image, relative to the largest value."""
        size_bytes = self._expected.size * 2
        self._staged.reserve(size_bytes)
        block = DeviceBuffer(size_bytes)
        try:
            start = self._y + (self.shape.n - 1) * size_bytes
            with check("copying on the GPU"):
                loaded().memcpy_dtod_async(block.address, start, size_bytes, self._stream.stream)
            y = self._staged.view(self._expected.shape, np.dtype(np.float16))
            download(y, block, self._stream)
            self._stream.synchronize()
        finally:
            block.free()
        largest = float(np.abs(self._expected).max()) or 1.0
        return float(np.abs(y.astype(np.float64) - self._expected).max()) / largest

    def time_us(self, opened: Convolution) -> float:
        """Return the median microseconds of one launch."""

        def repeat() -> None:
            for _ in range(_LAUNCHES):
                self.launch(opened)

        graph = CudaGraph(self._stream, repeat)
        try:
            return _median_us(self._stream, graph) / _LAUNCHES
        finally:
            graph.close()

    def close(self) -> None:
        """Free the memory; all work must be done."""
        for buffer in self._buffers:
            buffer.free()
        self._staged.free()

    def _filled(self, shape: tuple[int, ...]) -> int:
        """Return the address of an operand with the random values, repeated."""
        size_bytes = math.prod(shape) * 2
        buffer = DeviceBuffer(max(size_bytes, self._values.nbytes))
        self._buffers.append(buffer)
        self._staged.reserve(self._values.nbytes)
        staged = self._staged.view(self._values.shape, self._values.dtype)
        np.copyto(staged, self._values)
        upload(buffer, staged, self._stream)
        filled = staged.nbytes
        while filled < size_bytes:
            part = min(filled, size_bytes - filled)
            copy_on_gpu(buffer.address + filled, buffer, part, self._stream)
            filled += part
        self._stream.synchronize()
        return buffer.address

    def _last_image(self, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape[1:])
        image: Array = self._values[(np.arange(size) + (shape[0] - 1) * size) % _VALUES].reshape(1, *shape[1:])
        return image


def _median_us(stream: CudaStream, graph: CudaGraph) -> float:
    start, end = TimingEvent(), TimingEvent()
    times_us = []
    for _ in range(_ROUNDS + 1):
        start.record(stream)
        graph.launch()
        end.record(stream)
        stream.synchronize()
        times_us.append(end.us_since(start))
    return float(np.median(times_us[1:]))
