"""Errors of a result against float64: exact values at sampled pixels, and a comparison of all elements on the GPU.

Bound of the error of an output y = sum over K products x*w (+ bias + residual), rounded to its type:

    u_y |y|  +  6 sqrt(K) u_32 S  +  6 g u_t R,      S = sum |x*w| + |bias| + |residual|,   R = sqrt(sum (x*w)^2)

Separate operations round the sum after each of them: for "cudnn-unfused" u_y |partial sum| is added for each but the last.

u_y is the unit roundoff of the output's type (2^-11 for float16, 2^-24 for float32), u_32 that of the accumulator, u_t that of
the transformed operands of Winograd. The second term is the probabilistic bound of a sum (Higham, Mary, "A New Approach to
Probabilistic Rounding Error Analysis", 2019, with lambda = 6). The third holds for transforms alone: `transform_gain` computes g,
the standard deviation of the rounding errors of both transformed operands and of the products at the output, in units of R.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.cuda.kernels.convolution.base import ConvShape

from headrace_engines.lab.inputs import HostOperands

SEPARATE = "cudnn-unfused"
"""Name of the candidate whose epilogue is separate operations."""
_LAMBDA = 6.0
_U32 = 2.0**-24
_SAMPLES = 192
# Below the normal numbers the spacing is constant.
_SMALLEST = {2: 2.0**-25, 4: 2.0**-150}

# Matrices of Winograd's minimal filtering (Lavin, Gray, "Fast Algorithms for Convolutional Neural Networks", 2016): B^T, G, A^T.
_WINOGRAD: dict[str, tuple[list[list[float]], list[list[float]], list[list[float]]]] = {
    "winograd-f2": (
        [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]],
        [[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]],
        [[1, 1, 1, 0], [0, 1, -1, -1]],
    ),
    "winograd-f4": (
        [
            [4, 0, -5, 0, 1, 0],
            [0, -4, -4, 1, 1, 0],
            [0, 4, -4, -1, 1, 0],
            [0, -2, -1, 2, 1, 0],
            [0, 2, -1, -2, 1, 0],
            [0, 4, 0, -5, 0, 1],
        ],
        [
            [1 / 4, 0, 0],
            [-1 / 6, -1 / 6, -1 / 6],
            [-1 / 6, 1 / 6, -1 / 6],
            [1 / 24, 1 / 12, 1 / 6],
            [1 / 24, -1 / 12, 1 / 6],
            [0, 0, 1],
        ],
        [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
    ),
}


def transform_gain(algorithm: str) -> float:
    """Return g of the module's bound for an algorithm; 0 for one without transforms in the type of the operands.

    With independent x and w, the transformed operands have the variances |B_i|^2 and |G_i|^2, the square norms of their rows, in
    each of the two directions. Rounding errors in proportion to them pass through A^T: in one direction the variance at output a
    is sum_i A_ai^2 |B_i|^2 |G_i|^2, in both its square. Three roundings count: of x, of w, of the product's sum.
    """
    matrices = next((found for name, found in _WINOGRAD.items() if algorithm.startswith(name)), None)
    if matrices is None:
        return 0.0
    b, g, a = (np.array(matrix) for matrix in matrices)
    direction = (a**2) @ ((b**2).sum(1) * (g**2).sum(1))
    return float(math.sqrt(3) * direction.max() / 3)


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of one result.

    Attributes:
        max_error: largest absolute error at the sampled pixels.
        mean_error: mean absolute error there.
        relative_error: norm of the errors over the norm of the reference.
        worst_share: largest quotient of an error and its bound; at most 1 for a right result.
        samples: number of compared elements.
        wrong: elements that are not finite, or, on the GPU, far from another candidate's result; counted over all elements.
    """

    max_error: float
    mean_error: float
    relative_error: float
    worst_share: float
    samples: int
    wrong: int = 0

    @property
    def is_right(self) -> bool:
        """True if every error is within its bound and every element is written."""
        return self.worst_share <= 1 and not self.wrong


@dataclass(frozen=True, slots=True)
class ExactSums:
    """Exact sums of all channels at some pixels, without an epilogue.

    Attributes:
        pixels: int64 (p, 3), number of the picture, row and column of the output.
        values: float64 (p, k), sums of x*w.
        magnitude: sums of |x*w|.
        squares: sums of (x*w)^2.
    """

    pixels: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    magnitude: npt.NDArray[np.float64]
    squares: npt.NDArray[np.float64]


def sample(operands: HostOperands, seed: int) -> ExactSums:
    """Compute the sums at all pixels of a small output, else at random ones and corners of the first and the last picture."""
    shape = operands.shape
    pixels = _pixels(shape, seed)
    rows = pixels[:, 1, None] * shape.stride - shape.pad + np.arange(shape.r)
    columns = pixels[:, 2, None] * shape.stride - shape.pad + np.arange(shape.s)
    inside = ((rows >= 0) & (rows < shape.h))[:, :, None] & ((columns >= 0) & (columns < shape.w))[:, None, :]
    start = ((pixels[:, 0, None, None] * shape.h + rows[:, :, None]) * shape.w + columns[:, None, :]) * shape.c
    index = np.where(inside, start, 0)[..., None] + np.arange(shape.c)
    patches = operands.x_at(index) * inside[..., None]
    weights = operands.weights.astype(np.float64)
    count, per_input, per_output = len(pixels), shape.c // shape.groups, shape.k // shape.groups
    sums = [np.empty((count, shape.k)) for _ in range(3)]
    for group in range(shape.groups):
        x = patches[..., group * per_input : (group + 1) * per_input].reshape(count, -1)
        outputs = slice(group * per_output, (group + 1) * per_output)
        w = weights[outputs].reshape(per_output, -1).T
        for total, one, other in zip(sums, (x, np.abs(x), x**2), (w, np.abs(w), w**2), strict=True):
            total[:, outputs] = one @ other
    return ExactSums(pixels, *sums)


def _pixels(shape: ConvShape, seed: int) -> npt.NDArray[np.int64]:
    generator = np.random.default_rng(seed)
    sizes = (shape.n, shape.out_h, shape.out_w)
    if math.prod(sizes) <= _SAMPLES:
        everything: npt.NDArray[np.int64] = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes), 1)
        return everything
    corners = [
        (n, row, column)
        for n in {0, shape.n - 1}
        for row in {0, shape.out_h // 2, shape.out_h - 1}
        for column in {0, shape.out_w - 1}
    ]
    drawn = np.stack([generator.integers(0, size, _SAMPLES) for size in sizes], 1)
    pixels: npt.NDArray[np.int64] = np.unique(np.concatenate([np.array(corners), drawn]), axis=0)
    return pixels


class SampledReference:
    """Exact outputs of a layer with its epilogue at sampled pixels.

    Args:
        operands: the layer's operands.
        samples: sums of the same operands.

    Attributes:
        pixels: int64 (p, 3).
        values: float64 (p, k).
    """

    def __init__(self, operands: HostOperands, samples: ExactSums) -> None:
        shape, pixels = operands.shape, samples.pixels
        self.pixels = pixels
        self._dtype = operands.dtype
        products = shape.r * shape.s * (shape.c // shape.groups)
        values, magnitude = samples.values.copy(), samples.magnitude.copy()
        epilogue = operands.epilogue
        unit = float(np.finfo(self._dtype).eps) / 2
        self._partial = np.zeros_like(values)
        if epilogue.bias:
            self._partial += unit * np.abs(values)
            values += operands.bias
            magnitude += np.abs(operands.bias)
        if epilogue.residual:
            self._partial += unit * np.abs(values)
            pixel = (pixels[:, 0] * shape.out_h + pixels[:, 1]) * shape.out_w + pixels[:, 2]
            residual = operands.residual_at(pixel[:, None] * shape.k + np.arange(shape.k))
            values += residual
            magnitude += np.abs(residual)
        self._bound = _LAMBDA * math.sqrt(products) * _U32 * magnitude + _SMALLEST[self._dtype.itemsize]
        self._bound += unit * np.abs(values)
        self._deviation = np.sqrt(samples.squares)
        self.values = np.maximum(values, 0) if epilogue.relu else values

    def bound(self, algorithm: str) -> npt.NDArray[np.float64]:
        """Return the largest allowed error of each value, see the module."""
        unit = float(np.finfo(self._dtype).eps) / 2
        allowed: npt.NDArray[np.float64] = self._bound + _LAMBDA * transform_gain(algorithm) * unit * self._deviation
        return allowed + self._partial if algorithm == SEPARATE else allowed

    def limit(self, algorithm: str) -> float:
        """Return the largest difference of two right results at any element, with the largest sampled bound doubled.

        The samples do not have the largest sums of all; the bound of the other result is at most that of the algorithm.
        """
        return float(2 * (self.bound(algorithm).max() + self.bound("").max()))

    def errors(self, algorithm: str, read: Callable[[npt.NDArray[np.int64]], Array], wrong: int = 0) -> Errors:
        """Compare a result.

        Args:
            algorithm: name of the algorithm, for its bound.
            read: returns all channels of the result at (p, 3) pixels, (p, k).
            wrong: number of wrong elements by `ResultComparison`.
        """
        result = read(self.pixels).astype(np.float64)
        finite = np.isfinite(result)
        error = np.abs(np.where(finite, result, 0) - self.values)
        share = np.where(finite, error / self.bound(algorithm), np.inf)
        norm = float(np.linalg.norm(self.values)) or 1.0
        worst = float(share.max())
        if not finite.all():
            error = np.where(finite, error, np.inf)
        return Errors(
            float(error.max()), float(error.mean()), float(np.linalg.norm(error)) / norm, worst, result.size, wrong
        )
