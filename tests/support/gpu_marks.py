"""Marks of the tests that need an NVIDIA GPU."""

from __future__ import annotations

import importlib.util

import pytest
from headrace.runtimes.cuda import devices


def gpu_marks(timeout_s: int, *packages: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a module that needs a GPU: it is skipped where PyCUDA or TensorRT is not installed.

    Args:
        timeout_s: time limit of each test, in seconds.
        packages: what a server needs besides, for tests that start one.
    """
    missing = [name for name in ("pycuda", "tensorrt", *packages) if importlib.util.find_spec(name) is None]
    needed = "PyCUDA, TensorRT and a server" if packages else "PyCUDA and TensorRT"
    return [
        pytest.mark.gpu,
        pytest.mark.timeout(timeout_s),
        pytest.mark.skipif(bool(missing), reason=f"needs an NVIDIA GPU, {needed}"),
    ]


def every_gpu() -> str:
    """Return the device of a model without `gpus`, which has instances on each: such as "GPU 0,1"."""
    return "GPU " + ",".join(str(gpu) for gpu in range(devices.count()))
