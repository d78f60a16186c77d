"""Contract of the convolution algorithms: shapes, layouts, operands and launches.

Activations are channels last, (n, h, w, c); weights are (k, r, s, c / groups), as in cuDNN's NHWC. An algorithm that needs
another layout of the activations converts within `launch`, and the conversion counts. Weights are converted once, in `open`.

A convolution computes `y = relu(conv(x, weights) + bias + residual)`; each of the three additions of an `Epilogue` is optional.
float16 operands are accumulated in float32 and rounded once, after the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from headrace.core.tensor import Array
from headrace.runtimes.cuda.driver import CudaStream


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Shape of a convolution with square stride, padding and dilation 1.

    Attributes:
        n: images of a batch.
        c: input channels.
        h: height of the input.
        w: width of the input.
        k: output channels.
        r: height of the kernel.
        s: width of the kernel.
        stride: step in both directions.
        pad: zeros on each of the four sides.
        groups: groups of channels; `c` for a depthwise convolution.

    Raises:
        ValueError: a size is not positive, the padding is negative, the kernel exceeds the padded input, or `groups`
            does not divide the channels.
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: int = 1
    pad: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        if min(self.n, self.c, self.h, self.w, self.k, self.r, self.s, self.stride, self.groups) < 1 or self.pad < 0:
            raise ValueError(f"{self}: sizes are at least 1 and the padding is at least 0")
        if self.out_h < 1 or self.out_w < 1:
            raise ValueError(f"{self}: the kernel is larger than the padded input")
        if self.c % self.groups or self.k % self.groups:
            raise ValueError(f"{self}: {self.groups} groups do not divide {self.c} and {self.k} channels")

    def __str__(self) -> str:
        groups = f" groups {self.groups}" if self.groups > 1 else ""
        return (
            f"n {self.n} c {self.c} {self.h}x{self.w} k {self.k} {self.r}x{self.s} stride {self.stride} "
            f"pad {self.pad}{groups}"
        )

    @property
    def out_h(self) -> int:
        """Height of the output."""
        return (self.h + 2 * self.pad - self.r) // self.stride + 1

    @property
    def out_w(self) -> int:
        """Width of the output."""
        return (self.w + 2 * self.pad - self.s) // self.stride + 1

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """Shape of the input, (n, h, w, c)."""
        return self.n, self.h, self.w, self.c

    @property
    def y_shape(self) -> tuple[int, int, int, int]:
        """Shape of the output, (n, out_h, out_w, k)."""
        return self.n, self.out_h, self.out_w, self.k

    @property
    def weights_shape(self) -> tuple[int, int, int, int]:
        """Shape of the weights, (k, r, s, c / groups)."""
        return self.k, self.r, self.s, self.c // self.groups

    @property
    def flops(self) -> int:
        """Operations of the direct algorithm: two for each multiplication with its addition, padding included."""
        return 2 * self.n * self.out_h * self.out_w * self.k * self.r * self.s * (self.c // self.groups)

    def min_bytes(self, dtype: npt.DTypeLike, residual: bool = False) -> int:
        """Bytes that any algorithm moves at least: input, weights, residual and output once each."""
        elements = self.n * self.h * self.w * self.c + self.k * self.r * self.s * (self.c // self.groups)
        outputs = self.n * self.out_h * self.out_w * self.k
        return (elements + outputs * (2 if residual else 1)) * np.dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Operations on the sums before they are stored.

    Attributes:
        bias: add one value per output channel.
        residual: add a tensor of the output's shape and dtype.
        relu: replace negative values by 0; NaN stays NaN.
    """

    bias: bool = False
    residual: bool = False
    relu: bool = False


class Convolution(Protocol):
    """An algorithm prepared for one shape on one GPU: kernels compiled, weights on the GPU, scratch memory allocated."""

    @property
    def workspace_bytes(self) -> int:
        """Scratch memory on the GPU, in bytes, without weights."""

    def launch(self, stream: CudaStream, x: int, y: int, residual: int = 0, rows: int | None = None) -> None:
        """Queue the convolution; allocates nothing and waits for nothing, so a CUDA graph can capture it.

        The device's context must be current. Two launches on different streams must not overlap: they share the scratch
        memory.

        Args:
            stream: stream to queue on.
            x: address of the input, aligned to 16 bytes.
            y: address of the output, aligned to 16 bytes.
            residual: address of the residual; 0 if the epilogue has none.
            rows: images, at most `n` of the shape; None for `n`.

        Raises:
            DeviceError: the driver refuses.
        """

    def close(self) -> None:
        """Free weights and scratch memory and unload the kernels; all work must be done."""


def convolve(
    shape: ConvShape,
    epilogue: Epilogue,
    x: Array,
    weights: Array,
    bias: Array | None = None,
    residual: Array | None = None,
) -> npt.NDArray[np.float64]:
    """Compute a convolution in float64 by its definition; the reference of all algorithms.

    Args:
        shape: the convolution.
        epilogue: operations on the sums.
        x: any float type, `x_shape`.
        weights: `weights_shape`.
        bias: (k,).
        residual: `y_shape`.

    Returns:
        float64 `y_shape`.
    """
    pad, stride, groups = shape.pad, shape.stride, shape.groups
    padded = np.pad(x.astype(np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    filters = weights.astype(np.float64)
    y = np.zeros(shape.y_shape, np.float64)
    per_input, per_output = shape.c // groups, shape.k // groups
    for row in range(shape.r):
        for column in range(shape.s):
            window = padded[:, row : row + (shape.out_h - 1) * stride + 1 : stride]
            window = window[:, :, column : column + (shape.out_w - 1) * stride + 1 : stride]
            for group in range(groups):
                inputs = window[..., group * per_input : (group + 1) * per_input]
                outputs = slice(group * per_output, (group + 1) * per_output)
                y[..., outputs] += inputs @ filters[outputs, row, column].T
    return finish(y, epilogue, bias, residual)


def finish(
    y: npt.NDArray[np.float64], epilogue: Epilogue, bias: Array | None, residual: Array | None
) -> npt.NDArray[np.float64]:
    """Apply an epilogue to the sums of a convolution, in their type."""
    if epilogue.bias and bias is not None:
        y = y + bias.astype(y.dtype)
    if epilogue.residual and residual is not None:
        y = y + residual.astype(y.dtype)
    if epilogue.relu:
        y = np.maximum(y, 0)
    return y
