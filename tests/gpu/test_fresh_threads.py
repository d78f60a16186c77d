"""Entry points of `headrace.runtimes.cuda` on threads without a current context: each sets its own and restores the thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from headrace.runtimes.cuda import devices, driver
from headrace.runtimes.cuda.driver import loaded
from headrace.runtimes.cuda.kernels.launching import Classifier, PictureScaler, Preprocessor, RowGather
from headrace_lab.kernels.algorithms import ALGORITHMS
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.kernels.resources import Algorithm

from tests.support.convolution_cases import FUSED, check, random_operands
from tests.support.gpu_marks import gpu_marks
from tests.support.kernel_cases import CAMERA

pytestmark = gpu_marks(300)

SHAPES = (ConvShape(2, 64, 14, 14, 64, 3, 3, 1, 1), ConvShape(2, 48, 17, 15, 48, 3, 3, 1, 1, groups=48))
KERNELS: dict[str, Callable[[], Classifier | PictureScaler | Preprocessor | RowGather]] = {
    "classifier": lambda: Classifier(0, 10, "float32", True, 3),
    "pictures": lambda: PictureScaler(0, CAMERA, "float32"),
    "preprocessor": lambda: Preprocessor(0, CAMERA, "float32"),
    "rows": lambda: RowGather(0),
}


def on_fresh_thread(run: Callable[[], None]) -> None:
    """Run a function on a thread that has no context before and must have none after."""

    def checked() -> None:
        assert current_context() is None
        run()
        assert current_context() is None, "a context was left current"

    with ThreadPoolExecutor(1) as pool:
        pool.submit(checked).result()


def current_context() -> int | None:
    """Address of this thread's current context; None without one."""
    driver.load()
    context = ctypes.c_void_p()
    assert driver.library().cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: f"{algorithm.name} {algorithm.variant}")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_convolution_is_opened_run_and_closed(algorithm: Algorithm, dtype: str) -> None:
    with driver.current():
        capability = loaded().Device(0).compute_capability()
    supported = [shape for shape in SHAPES if not algorithm.refusal(shape, dtype, capability)]
    if not supported:
        pytest.skip(f"{algorithm.name} refuses both shapes in {dtype}")
    shape = supported[0]

    def open_and_close() -> None:
        operands = random_operands(shape, dtype)
        algorithm.open(0, shape, dtype, Epilogue(bias=True), operands.weights, operands.bias).close()

    on_fresh_thread(open_and_close)
    on_fresh_thread(lambda: _check(algorithm, shape, dtype))


def _check(algorithm: Algorithm, shape: ConvShape, dtype: str) -> None:
    # Weights of Winograd's F(4x4) are rounded in its transform.
    check(algorithm, shape, dtype, FUSED, 5e-3 if np.dtype(dtype).itemsize == 2 else 5e-6)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_opened_and_closed(name: str) -> None:
    on_fresh_thread(lambda: KERNELS[name]().close())


def test_a_gpu_is_described() -> None:
    on_fresh_thread(lambda: print(devices.describe(0)))
