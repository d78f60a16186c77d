"""Our convolutions against the float64 reference: the same cases for a GPU and, compiled for the host, for the fake driver."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from headrace.core.tensor import Array
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, download, upload
from headrace_lab.kernels.base import ConvShape, Epilogue, convolve
from headrace_lab.kernels.resources import Algorithm

PLAIN = Epilogue()
FUSED = Epilogue(bias=True, residual=True, relu=True)
EPILOGUES = (PLAIN, Epilogue(bias=True), Epilogue(relu=True), Epilogue(residual=True), FUSED)


@dataclass
class Operands:
    """Random operands of a convolution, rounded to its dtype.

    Attributes:
        x: `x_shape`.
        weights: float32 `weights_shape`, of which the sums have a variance of about 1.
        bias: float32 (k,).
        residual: `y_shape`.
    """

    x: Array
    weights: Array
    bias: Array
    residual: Array


def random_operands(shape: ConvShape, dtype: str, seed: int = 0) -> Operands:
    """Draw operands."""
    generator = np.random.default_rng(seed)

    def normal(*sizes: int) -> Array:
        return generator.standard_normal(sizes, np.float32)

    scale = np.float32((shape.r * shape.s * shape.c / shape.groups) ** -0.5)
    return Operands(
        normal(*shape.x_shape).astype(dtype),
        normal(*shape.weights_shape) * scale,
        normal(shape.k),
        normal(*shape.y_shape).astype(dtype),
    )


def expected(shape: ConvShape, dtype: str, epilogue: Epilogue, operands: Operands) -> Array:
    """Float64 result of weights that are rounded to the dtype."""
    weights = operands.weights.astype(dtype)
    return convolve(shape, epilogue, operands.x, weights, operands.bias, operands.residual)


def run(
    algorithm: Algorithm,
    shape: ConvShape,
    dtype: str,
    epilogue: Epilogue,
    operands: Operands,
    rows: int | None = None,
    launches: int = 1,
) -> Array:
    """Run an algorithm on GPU 0, the output being NaN before; return the output of the last launch."""
    bias = operands.bias if epilogue.bias else None
    convolution = algorithm.open(0, shape, dtype, epilogue, operands.weights, bias)
    with driver.current(0):
        stream, pinned, blocks = driver.CudaStream(), PinnedBuffer(), []

        def on_gpu(array: Array) -> DeviceBuffer:
            block = DeviceBuffer(array.nbytes)
            blocks.append(block)
            pinned.reserve(array.nbytes)
            staged = pinned.view(array.shape, array.dtype)
            staged[:] = array
            upload(block, staged, stream)
            stream.synchronize()
            return block

        try:
            x = on_gpu(operands.x)
            residual = on_gpu(operands.residual).address if epilogue.residual else 0
            y = on_gpu(np.full(shape.y_shape, np.nan, dtype))
            for _ in range(launches):
                convolution.launch(stream, x.address, y.address, residual, rows)
            result = pinned.view(shape.y_shape, np.dtype(dtype))
            download(result, y, stream)
            stream.synchronize()
            return result.copy()
        finally:
            for block in blocks:
                block.free()
            pinned.free()
            convolution.close()


def error(result: Array, exact: Array) -> float:
    """Relative error, ||result - exact|| / ||exact||; NaN if a value is."""
    return float(np.linalg.norm(result.astype(np.float64) - exact) / np.linalg.norm(exact))


def check(
    algorithm: Algorithm,
    shape: ConvShape,
    dtype: str,
    epilogue: Epilogue,
    bound: float,
    rows: int | None = None,
    launches: int = 1,
) -> float:
    """Hold a result on the GPU, and the algorithm's NumPy arithmetic, to a bound of the relative error; return the error."""
    operands = random_operands(shape, dtype)
    exact = expected(shape, dtype, epilogue, operands)
    result = run(algorithm, shape, dtype, epilogue, operands, rows, launches)
    count = shape.n if rows is None else rows
    assert np.isnan(result[count:]).all(), "rows beyond the batch were written"
    measured = error(result[:count], exact[:count])
    assert measured <= bound, f"{algorithm.name} {algorithm.variant} {shape} {dtype} {epilogue}: error {measured:.2e}"
    reference = algorithm.reference(
        shape, dtype, epilogue, operands.x, operands.weights, operands.bias, operands.residual
    )
    assert reference.dtype == np.dtype(dtype)
    difference = error(reference, exact)
    assert difference <= bound, f"the reference of {algorithm.name} {shape} {dtype}: error {difference:.2e}"
    return measured
