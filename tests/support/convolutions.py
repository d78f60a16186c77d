"""Convolution algorithms without kernels: NumPy on the fake GPU's memory, as work of its streams."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from headrace.core.errors import Unsupported
from headrace.runtimes.cuda.driver import CudaStream
from headrace_lab.kernels.base import ConvShape, convolve
from headrace_lab.kernels.resources import Algorithm, ConvOperation, GpuResources

from tests.support.fake_cuda import FakeCuda


def at_address(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A view on the fake GPU's memory."""
    kind = np.dtype(dtype)
    count = int(np.prod(shape))
    memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind).reshape(shape)


class NumpyAlgorithm(Algorithm):
    """An `Algorithm` that computes by definition.

    Args:
        cuda: the fake GPU.
        name: of the algorithm.
        variant: of the tile.
        pieces: pieces of work of one launch, each of which takes `cuda.work_us`.
        spoil: changes a result before it is stored.
        refused: reason of `refusal`.
        failure: message of an error in `open`.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        name: str,
        variant: str = "",
        pieces: int = 1,
        spoil: Callable[[np.ndarray], None] | None = None,
        refused: str = "",
        failure: str = "",
    ) -> None:
        self.name, self.variant = name, variant
        self.cuda, self.pieces, self.spoil, self.refused, self.failure = cuda, pieces, spoil, refused, failure
        self.opened = 0

    def refusal(self, shape: ConvShape, dtype: Any, capability: tuple[int, int]) -> str:
        assert capability == (9, 0)
        return self.refused

    def prepared(self, resources: GpuResources, operation: ConvOperation) -> _Opened:
        if self.failure:
            raise Unsupported(self.failure)
        assert (operation.bias is not None) == operation.epilogue.bias
        assert operation.weights.dtype == np.float32
        self.opened += 1
        return _Opened(self, operation)

    def reference(self, shape: ConvShape, dtype: Any, *operands: Any) -> np.ndarray:
        y = convolve(shape, *operands).astype(dtype)
        if self.spoil is not None:
            self.spoil(y)
        return y


class _Opened:
    workspace_bytes = 0

    def __init__(self, algorithm: NumpyAlgorithm, operation: ConvOperation) -> None:
        self._algorithm, self._operation = algorithm, operation

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        operation, algorithm = self._operation, self._algorithm
        shape, dtype, epilogue = operation.shape, operation.dtype, operation.epilogue
        assert bool(residual) == epilogue.residual

        def work() -> None:
            inputs = at_address(x, shape.x_shape, dtype)
            added = at_address(residual, shape.y_shape, dtype) if residual else None
            output = at_address(y, shape.y_shape, dtype)
            output[...] = algorithm.reference(shape, dtype, epilogue, inputs, operation.weights, operation.bias, added)

        algorithm.cuda.submit(work, stream.handle)
        for _ in range(algorithm.pieces - 1):
            algorithm.cuda.submit(lambda: None, stream.handle)

    def close(self) -> None:
        self._algorithm.opened -= 1
