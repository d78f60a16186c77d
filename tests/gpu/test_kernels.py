"""Our kernels on a real GPU, each against its NumPy reference.

Also a script, for a GPU machine without pytest: `python tests/gpu/test_kernels.py` from the repository's root.
"""

from __future__ import annotations

import importlib.util
import sys
import time

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, ".")

from headrace.cuda import driver
from headrace.cuda.driver import CudaGraph
from headrace.cuda.kernels.launching import Classifier, PictureScaler, Preprocessor, RowGather
from headrace.cuda.memory import DeviceBuffer, PinnedBuffer
from headrace.pipelines.recipe import ImageRecipe

from tests.support.kernel_cases import (
    CAMERA,
    RECIPES,
    check_gather,
    check_pictures,
    check_pictures_anywhere,
    check_rank,
    check_soften,
)


def test_pictures_that_lie_anywhere() -> None:
    for dtype in ("float32", "float16"):
        for name in ("crop only", "not divisible", "odd channels last", "odd gray", "one pixel"):
            for offset in (0, 1, 4, 8):
                check_pictures_anywhere(RECIPES[name], dtype, 5, offset)
        check_pictures_anywhere(RECIPES["crop only"], dtype, 64)
        check_pictures_anywhere(RECIPES["one pixel"], dtype, 140_000)  # more than a grid has rows


def test_copies_by_either_kernel_have_the_same_bits() -> None:
    for dtype in ("float32", "float16"):
        for name in ("crop only", "odd", "channels last", "gray"):
            check_pictures(RECIPES[name], dtype, general=True)
            check_pictures(RECIPES[name], dtype)


def test_pixels_are_scaled_as_if_divided_whatever_the_scale() -> None:
    rng = np.random.default_rng(7)
    for _ in range(40):
        mean, std = rng.uniform(0, 255, 3), rng.uniform(0.01, 300, 3)
        recipe = ImageRecipe(by="server", crop=(16, 48), mean=tuple(map(float, mean)), std=tuple(map(float, std)))
        check_pictures(recipe, "float32", rows=4)


def test_a_large_batch_of_camera_pictures() -> None:
    check_pictures(CAMERA, "float16", rows=8)
    check_pictures(RECIPES["crop only"], "float32", rows=33)


def test_rows_are_gathered_and_padded() -> None:
    for row_bytes in (1, 16, 37, 4096, 150_528):
        check_gather(row_bytes, 3, 3)
        check_gather(row_bytes, 5, 8)
        check_gather(row_bytes, 3, 5, offset=4, blocks=1)
    check_gather(150_528, 4, 8, offset=3)
    check_gather(64, 1, 256)
    check_gather(150_528, 200, 256, blocks=132)


def test_classes_are_ranked() -> None:
    for dtype in ("float32", "float16"):
        for softmax in (False, True):
            check_rank(5, 1000, 5, dtype, softmax)
            check_rank(4, 1, 1, dtype, softmax)
            check_rank(7, 257, 257, dtype, softmax)
    check_rank(300, 21_841, 3, "float32", True)


def test_scores_become_probabilities() -> None:
    for dtype in ("float32", "float16"):
        for classes in (1, 10, 255, 256, 1000, 5001):
            check_soften(6, classes, dtype)


def test_times() -> None:
    """No bar: prints what the kernels take on this GPU."""
    with driver.current():
        stream, rows = driver.CudaStream(), 128
        large = DeviceBuffer(rows * 480 * 640 * 3)
        tensor = DeviceBuffer(256 * 3 * 224 * 224 * 4)
        kernel: Preprocessor | PictureScaler
        for name, recipe in (("224x224", RECIPES["crop only"]), ("480x640", CAMERA)):
            kernel = Preprocessor(0, recipe, "float16")
            us = _us(stream, lambda k=kernel: k.launch(stream, large.address, rows, tensor.address))  # type: ignore[misc]
            print(f"{name} uint8 to FP16, {rows} pictures: {us:.1f} us, {rows / us:.2f} million pictures/s")
            kernel.close()
        for dtype in ("float16", "float32"):
            for count in (1, 128, 256):
                kernel = PictureScaler(0, RECIPES["crop only"], dtype)
                us = _us(
                    stream,
                    lambda k=kernel, n=count: k.launch(stream, large.address, n, tensor.address),  # type: ignore[misc]
                )
                print(f"copy of {count} pictures of 224x224 to {dtype}: {us:.1f} us")
                kernel.close()
        classifier = Classifier(0, 1000, "float32", True, 5)
        for count in (1, rows):
            us = _us(
                stream,
                lambda n=count: classifier.launch(  # type: ignore[misc]
                    stream, tensor.address, n, large.address, large.address + 8192
                ),
            )
            print(f"softmax and top 5 of 1000, {count} rows: {us:.1f} us")
        _gather_times(stream, large)
        large.free()
        tensor.free()


def _gather_times(stream: driver.CudaStream, target: DeviceBuffer) -> None:
    gather, row_bytes = RowGather(0), 224 * 224 * 3
    pinned, table = PinnedBuffer(), PinnedBuffer()
    pinned.reserve(256 * row_bytes)
    table.reserve(256 * 8)
    source = DeviceBuffer(256 * row_bytes)
    for index, start in (("pinned", pinned.address), ("GPU", source.address)):
        table.view((256,), np.dtype(np.uint64))[:] = start + np.arange(256) * row_bytes
        for rows in (1, 8, 64, 256):
            for blocks in (2, 4, 8, 16, 32, 64, 132):
                arguments = (stream, table.address, row_bytes, rows, rows, target.address, blocks)
                us = _us(stream, lambda given=arguments: gather.launch(*given))  # type: ignore[misc]
                speed = rows * row_bytes / us / 1e3
                print(f"gather of {rows} rows from {index} memory by {blocks} blocks: {us:.1f} us, {speed:.1f} GB/s")
    for freed in (pinned, table, source):
        freed.free()
    gather.close()


def _us(stream: driver.CudaStream, launch) -> float:  # type: ignore[no-untyped-def]
    """Of one launch, of many in a graph: launched one by one, they would take as long as the host takes."""
    launch()
    stream.synchronize()

    def many() -> None:
        for _ in range(50):
            launch()

    graph = CudaGraph(stream, many)
    begin, end = driver.TimingEvent(), driver.TimingEvent()
    graph.launch()
    begin.record(stream)
    graph.launch()
    graph.launch()
    end.record(stream)
    stream.synchronize()
    graph.close()
    return end.us_since(begin) / 100


if importlib.util.find_spec("pytest") is not None:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.timeout(60),
        pytest.mark.skipif(importlib.util.find_spec("pycuda") is None, reason="needs an NVIDIA GPU and PyCUDA"),
    ]

if __name__ == "__main__":
    failed = 0
    for name, test in sorted(globals().items()):
        if name.startswith("test_"):
            start_s = time.monotonic()
            try:
                test()
            except Exception as error:
                failed += 1
                print(f"{name} FAILED: {type(error).__name__}: {error}")
            else:
                print(f"{name} passed in {time.monotonic() - start_s:.1f} s")
    sys.exit(1 if failed else 0)
