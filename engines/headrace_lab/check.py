"""Errors of a result against float64: exact values at sampled pixels, and a comparison of all elements on the GPU.

Bound of the error of an output y = sum over K products x*w (+ bias + residual), rounded to its type:

    u_y |y|  +  6 sqrt(K) u_32 S  +  6 g u_t R,      S = sum |x*w| + |bias| + |residual|,   R = sqrt(sum (x*w)^2)

Separate operations round the sum after each of them: for "cudnn-unfused" u_y |partial sum| is added for each but the last.

A kernel that accumulates in float16 has a second bound. It does not replace the first one: `Errors` has the shares of both. The
kernel rounds the sum to float16 after each step of a Tensor Core, which adds 8 products or more (8 on Ampere: Fasi, Higham,
Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer Science 7, 2021; 16 on an H200, see below). Its
m = r s ceil(c / 8) roundings have errors of at most u_y |s_i|, s_i the sum after step i, and random signs; by Hoeffding's
inequality their sum exceeds 6 u_y sqrt(sum s_i^2) with a probability below 3e-8. The operands of the lab have random signs, so
that the s_i are a random walk of the variance R^2 to the end v, the sum of all products: the mean of s_i^2 is R^2 / 6 + v^2 / 3.
The bound has six times the first part, for elements with a larger walk, and v^2 in whole:

    6 u_y sqrt(m (R^2 + v^2))  +  u_y |partial sum|      in addition to the first bound

The last term is for one rounding within the epilogue: of v + bias or v + residual, the larger. On an H200 the largest errors of
four of TensorRT's kernels equal those of this arithmetic with steps of 16 in NumPy to the last digit: no fault hides in them.

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

from headrace_lab.inputs import HostOperands
from headrace_lab.kernels import winograd
from headrace_lab.kernels.base import ConvShape

SEPARATE = "cudnn-unfused"
"""Name of the candidate whose epilogue is separate operations."""
HALF_VERDICT = "FP16 accumulation: within its bound"
"""Verdict on a result of a kernel that accumulates in float16 and exceeds the bound of FP32 accumulation."""
_LAMBDA = 6.0
# Products that a Tensor Core adds before it rounds to float16: the fewest since Ampere.
_STEP_PRODUCTS = 8
_U32 = 2.0**-24
_SAMPLES = 192
# Below the normal numbers the spacing is constant.
_SMALLEST = {2: 2.0**-25, 4: 2.0**-150}


def transform_gain(algorithm: str) -> float:
    """Return g of the module's bound for an algorithm; 0 for one without transforms in the type of the operands.

    With independent x and w, the transformed operands have the variances |B_i|^2 and |G_i|^2, the square norms of their rows, in
    each of the two directions. Rounding errors in proportion to them pass through A^T: in one direction the variance at output a
    is sum_i A_ai^2 |B_i|^2 |G_i|^2, in both its square. Three roundings count: of x, of w, of the product's sum.
    """
    size = next((size for size in winograd.KERNEL if algorithm.startswith(f"winograd-f{size}")), None)
    if size is None:
        return 0.0
    b, g, a = (np.array(matrices[size]) for matrices in (winograd.INPUT, winograd.KERNEL, winograd.OUTPUT))
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
        half_share: the same quotient with the bound of FP16 accumulation; None for a candidate that accumulates in float32.
    """

    max_error: float
    mean_error: float
    relative_error: float
    worst_share: float
    samples: int
    wrong: int = 0
    half_share: float | None = None

    @property
    def needs_half_bound(self) -> bool:
        """True if the result is within the bound of FP16 accumulation and not within that of FP32 accumulation."""
        return self.worst_share > 1 and self.half_share is not None and self.half_share <= 1

    @property
    def is_right(self) -> bool:
        """True if every error is within a bound that applies to the candidate and every element is written."""
        return (self.worst_share <= 1 or self.needs_half_bound) and not self.wrong

    @property
    def verdict(self) -> str:
        """Result of the check, for tables: the bound that holds, or "wrong" with the excess."""
        if self.is_right:
            return HALF_VERDICT if self.needs_half_bound else "within its bound"
        half = f", {self.half_share:.3g} times that of FP16 accumulation" if self.half_share is not None else ""
        return f"wrong: {self.worst_share:.3g} times the bound{half}, {self.wrong} elements"


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
        steps = shape.r * shape.s * -(-(shape.c // shape.groups) // _STEP_PRODUCTS)
        self._half = _LAMBDA * unit * np.sqrt(steps * (samples.squares + samples.values**2))
        if epilogue.bias:
            self._partial += unit * np.abs(values)
            values += operands.bias
            magnitude += np.abs(operands.bias)
        if epilogue.residual:
            self._partial += unit * np.abs(values)
            pixel = (pixels[:, 0] * shape.out_h + pixels[:, 1]) * shape.out_w + pixels[:, 2]
            residual = operands.residual_at(pixel[:, None] * shape.k + np.arange(shape.k))
            self._half += unit * np.maximum(np.abs(values), np.abs(samples.values + residual))
            values += residual
            magnitude += np.abs(residual)
        self._bound = _LAMBDA * math.sqrt(products) * _U32 * magnitude + _SMALLEST[self._dtype.itemsize]
        self._bound += unit * np.abs(values)
        self._deviation = np.sqrt(samples.squares)
        self.values = np.maximum(values, 0) if epilogue.relu else values

    def bound(self, algorithm: str, half_sums: bool = False) -> npt.NDArray[np.float64]:
        """Return the largest allowed error of each value, see the module.

        Args:
            algorithm: name of the algorithm.
            half_sums: return the second bound, of kernels that accumulate in float16.
        """
        unit = float(np.finfo(self._dtype).eps) / 2
        allowed: npt.NDArray[np.float64] = self._bound + _LAMBDA * transform_gain(algorithm) * unit * self._deviation
        if half_sums:
            allowed = allowed + self._half
        return allowed + self._partial if algorithm == SEPARATE else allowed

    def limit(self, algorithm: str, half_sums: bool = False) -> float:
        """Return the largest difference of two right results at any element, with the largest sampled bound doubled.

        The samples do not have the largest sums of all; the bound of the other result is at most that of the algorithm.
        """
        return float(2 * (self.bound(algorithm, half_sums).max() + self.bound("").max()))

    def errors(self, algorithm: str, read: Callable[[npt.NDArray[np.int64]], Array], half_sums: bool = False) -> Errors:
        """Compare a result.

        Args:
            algorithm: name of the algorithm, for its bound.
            read: returns all channels of the result at (p, 3) pixels, (p, k).
            half_sums: the candidate accumulates in float16.
        """
        result = read(self.pixels).astype(np.float64)
        finite = np.isfinite(result)
        error = np.abs(np.where(finite, result, 0) - self.values)

        def worst(bound: npt.NDArray[np.float64]) -> float:
            return float(np.where(finite, error / bound, np.inf).max())

        share = worst(self.bound(algorithm))
        half_share = worst(self.bound(algorithm, half_sums=True)) if half_sums else None
        norm = float(np.linalg.norm(self.values)) or 1.0
        if not finite.all():
            error = np.where(finite, error, np.inf)
        relative = float(np.linalg.norm(error)) / norm
        return Errors(float(error.max()), float(error.mean()), relative, share, result.size, 0, half_share)
