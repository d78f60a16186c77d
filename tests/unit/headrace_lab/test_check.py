"""Bounds of errors: right results are within them, small mistakes are not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from headrace_lab.check import HALF_VERDICT, SEPARATE, Errors, SampledReference, sample, transform_gain
from headrace_lab.inputs import HostOperands, host_operands
from headrace_lab.kernels import winograd
from headrace_lab.kernels.base import ConvShape, Epilogue, convolve

ALL = Epilogue(bias=True, residual=True, relu=True)
SHAPES = [
    ConvShape(3, 16, 10, 9, 24, 3, 3, 1, 1),
    ConvShape(2, 32, 8, 8, 8, 1, 1, 2),
    ConvShape(1, 8, 9, 9, 8, 3, 3, 2, 1, 8),
    ConvShape(1, 8, 12, 12, 12, 5, 5, 1, 2, 4),
]


def tensors(host: HostOperands) -> tuple[np.ndarray, np.ndarray]:
    """Input and residual as the GPU has them."""
    x = host.x_at(np.arange(math.prod(host.shape.x_shape))).reshape(host.shape.x_shape)
    residual = host.residual_at(np.arange(math.prod(host.shape.y_shape))).reshape(host.shape.y_shape)
    return x, residual


def exact(host: HostOperands) -> np.ndarray:
    x, residual = tensors(host)
    return convolve(host.shape, host.epilogue, x, host.weights, host.bias, residual)


def errors_of(host: HostOperands, result: np.ndarray, algorithm: str = "", half_sums: bool = False) -> Errors:
    reference = SampledReference(host, sample(host, 3))

    def read(pixels: np.ndarray) -> np.ndarray:
        return result[pixels[:, 0], pixels[:, 1], pixels[:, 2]]

    return reference.errors(algorithm, read, half_sums=half_sums)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_samples_are_the_exact_values_and_a_rounded_result_is_right(shape: ConvShape, dtype: str) -> None:
    host = host_operands(shape, dtype, ALL, 5)
    result = exact(host)
    reference = SampledReference(host, sample(host, 3))
    pixels = reference.pixels
    np.testing.assert_allclose(reference.values, result[pixels[:, 0], pixels[:, 1], pixels[:, 2]], atol=1e-12)
    assert {0, shape.n - 1} <= set(pixels[:, 0])
    found = errors_of(host, result.astype(dtype))
    assert found.is_right
    assert found.worst_share > 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_lost_product_is_wrong(dtype: str) -> None:
    host = host_operands(SHAPES[0], dtype, Epilogue(), 5)
    x, _ = tensors(host)
    weights = host.weights.copy()
    weights[:, 2, 1, 7] = 0
    result = convolve(host.shape, Epilogue(), x, weights)
    found = errors_of(host, result.astype(dtype))
    assert found.worst_share > 10
    assert not found.is_right


def test_tf32_is_not_fp32() -> None:
    host = host_operands(ConvShape(1, 64, 14, 14, 32, 3, 3, 1, 1), "float32", Epilogue(), 5)
    x, _ = tensors(host)
    rounded = (x.astype(np.float32).view(np.uint32) + 0x1000 & 0xFFFFE000).astype(np.uint32).view(np.float32)
    result = convolve(host.shape, Epilogue(), rounded, host.weights)
    assert not errors_of(host, result.astype(np.float32)).is_right


def test_nan_is_wrong() -> None:
    host = host_operands(SHAPES[0], "float32", Epilogue(), 5)
    result = exact(host).astype(np.float32)
    result[-1, -1, -1, -1] = np.nan
    assert math.isinf(errors_of(host, result).worst_share)


def test_the_gain_of_winograd_is_measured_in_float16() -> None:
    """Rounds the transformed operands to float16 in float64 arithmetic; g is the growth of that rounding."""
    generator = np.random.default_rng(4)
    for outputs in winograd.KERNEL:
        matrices = winograd.INPUT, winograd.KERNEL, winograd.OUTPUT
        b_matrix, g_matrix, a_matrix = (np.array(matrix[outputs]) for matrix in matrices)
        channels, tiles, size = 64, 400, len(b_matrix)
        x = generator.standard_normal((tiles, channels, size, size))
        w = generator.standard_normal((channels, 3, 3))
        v, u = b_matrix @ x @ b_matrix.T, g_matrix @ w @ g_matrix.T
        result = a_matrix @ (v * u).sum(1) @ a_matrix.T
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
        np.testing.assert_allclose(result, np.einsum("tcijrs,crs->tij", windows, w), atol=1e-9)
        halves = a_matrix @ (v.astype(np.float16) * u.astype(np.float16).astype(np.float64)).sum(1) @ a_matrix.T
        error = np.abs(halves - result).std(0).max() * 2**11 / math.sqrt(9 * channels)
        # Uniform rounding is 1/sqrt(3) of the unit; the matrices' bound counts a third rounding too.
        gain = transform_gain(f"winograd-f{outputs}")
        assert 0.1 * gain < error < gain
    assert transform_gain("direct") == 0


def test_separate_operations_may_round_each_partial_sum() -> None:
    host = host_operands(ConvShape(4, 32, 12, 12, 32, 1, 1), "float16", Epilogue(bias=True, residual=True), 5)
    x, residual = tensors(host)
    result = convolve(host.shape, Epilogue(), x, host.weights).astype(np.float16)
    result = (result + host.bias.astype(np.float16)).astype(np.float16) + residual.astype(np.float16)
    assert not errors_of(host, result).is_right
    assert errors_of(host, result, SEPARATE).is_right


def accumulated_in_half(host: HostOperands, products: int, lost_step: int = -1) -> np.ndarray:
    """TensorRT's arithmetic: sums rounded to float16 after some products, then with the residual, then with the bias.

    Args:
        host: operands of a layer with all epilogues, one group and no padding.
        products: of a step.
        lost_step: number of a step that is left out.
    """
    shape = host.shape
    x, residual = tensors(host)
    windows = np.lib.stride_tricks.sliding_window_view(x, (shape.r, shape.s), (1, 2))
    patches = windows.transpose(0, 1, 2, 4, 5, 3).reshape(*shape.y_shape[:3], -1)
    weights = host.weights.astype(np.float64).reshape(shape.k, -1)
    result = np.zeros(shape.y_shape, np.float16)
    for number, start in enumerate(range(0, weights.shape[1], products)):
        step = patches[..., start : start + products] @ weights[:, start : start + products].T
        if number != lost_step:
            result = (result + step).astype(np.float16)
    result = (result + residual).astype(np.float16)
    return np.maximum((result + host.bias).astype(np.float16), 0)


@pytest.mark.parametrize("products", [8, 16])
@pytest.mark.parametrize("shape", [ConvShape(1, 64, 12, 12, 64, 1, 1), ConvShape(1, 256, 10, 10, 64, 3, 3)], ids=str)
def test_accumulation_in_float16_has_a_bound_of_its_own(shape: ConvShape, products: int) -> None:
    host = host_operands(shape, "float16", ALL, 5)
    result = accumulated_in_half(host, products)
    assert not errors_of(host, result).is_right
    found = errors_of(host, result, half_sums=True)
    assert found.is_right
    assert found.verdict == HALF_VERDICT
    assert found.worst_share > 5
    assert found.half_share is not None
    assert 0.1 < found.half_share < 1


@pytest.mark.parametrize("shape", [ConvShape(1, 64, 12, 12, 64, 1, 1), ConvShape(1, 256, 10, 10, 64, 3, 3)], ids=str)
def test_a_lost_step_is_wrong_with_accumulation_in_float16_too(shape: ConvShape) -> None:
    host = host_operands(shape, "float16", ALL, 5)
    found = errors_of(host, accumulated_in_half(host, 16, lost_step=2), half_sums=True)
    assert not found.is_right
    assert found.verdict.startswith("wrong")
    assert "times that of FP16 accumulation" in found.verdict


def test_a_result_within_the_first_bound_has_no_other_verdict() -> None:
    host = host_operands(SHAPES[0], "float16", ALL, 5)
    found = errors_of(host, exact(host).astype(np.float16), half_sums=True)
    assert found.verdict == "within its bound"
    assert not found.needs_half_bound
