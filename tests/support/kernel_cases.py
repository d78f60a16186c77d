"""The kernels against their references: the same cases for a GPU and, compiled for the host, for the fake driver."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from headrace.inference.pipelines.recipe import ImageRecipe
from headrace.runtimes.cuda import driver
from headrace.runtimes.cuda.driver import CudaGraph
from headrace.runtimes.cuda.kernels.launching import Classifier, PictureScaler, Preprocessor, RowGather, picture_kernel
from headrace.runtimes.cuda.memory import DeviceBuffer, PinnedBuffer, download, upload

from tests.support import kernel_reference as reference

IMAGENET: dict[str, Any] = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
GRAY: dict[str, Any] = {"color": "gray", "mean": (33.3,), "std": (78.5,)}
RECIPES = {
    "crop only": ImageRecipe(by="server", **IMAGENET),
    "not divisible": ImageRecipe(by="server", crop=(37, 61), **IMAGENET),
    "odd channels last": ImageRecipe(by="server", crop=(39, 21), layout="nhwc", **IMAGENET),
    "odd gray": ImageRecipe(by="server", crop=(29, 27), **GRAY),
    "odd": ImageRecipe(by="server", crop=(37, 23), **IMAGENET),
    "one pixel": ImageRecipe(by="server", crop=(1, 1), layout="nhwc"),
    "channels last": ImageRecipe(by="server", crop=(31, 50), layout="nhwc", **IMAGENET),
    "gray": ImageRecipe(by="server", crop=(28, 28), **GRAY),
    "cut out": ImageRecipe(by="server", source=(64, 91), resize_short_side=64, crop=(61, 33), **IMAGENET),
    "shrunk": ImageRecipe(by="server", source=(120, 161), resize_short_side=40, crop=(32, 37), **IMAGENET),
    "enlarged": ImageRecipe(by="server", source=(19, 13), resize_short_side=50, crop=(41, 50), **IMAGENET),
    "tall": ImageRecipe(by="server", source=(190, 30), resize_short_side=21, crop=(21, 20), layout="nhwc", **GRAY),
    "bicubic": ImageRecipe(
        by="server", source=(77, 60), resize_short_side=33, crop=(33, 30), interpolation="bicubic", **IMAGENET
    ),
}
CAMERA = ImageRecipe(by="server", source=(480, 640), **IMAGENET)

Launch = Callable[[driver.CudaStream, list[int], list[int]], None]


def computed(
    inputs: list[np.ndarray], outputs: list[np.ndarray], launch: Launch, graph: bool = False
) -> list[np.ndarray]:
    """Return the device memory after a launch, in the shapes of `outputs`; it is filled with 0xA5 before.

    Args:
        inputs: copied to the device.
        outputs: arrays of the shapes and types that come back.
        launch: called with the stream, and the addresses of inputs and outputs.
        graph: capture the launch and replay it.
    """
    with driver.current():
        stream = driver.CudaStream()
        blocks = [DeviceBuffer(array.nbytes) for array in (*inputs, *outputs)]
        pinned = [PinnedBuffer() for _ in blocks]
        for buffer, array in zip(pinned, (*inputs, *outputs), strict=True):
            buffer.reserve(array.nbytes)
        views = [b.view(a.shape, a.dtype) for b, a in zip(pinned, (*inputs, *outputs), strict=True)]
        for view, array in zip(views, inputs, strict=False):
            view[...] = array
        for view in views[len(inputs) :]:
            view.view(np.uint8)[...] = 0xA5
        for block, view in zip(blocks, views, strict=True):
            upload(block, view, stream)
        addresses = [block.address for block in blocks]
        split = len(inputs)

        def work() -> None:
            launch(stream, addresses[:split], addresses[split:])

        if graph:
            stream.synchronize()
            captured = CudaGraph(stream, work)
            captured.launch()
            captured.launch()
            stream.synchronize()
            captured.close()
        else:
            work()
        for block, view in zip(blocks[split:], views[split:], strict=True):
            download(view, block, stream)
        stream.synchronize()
        results = [view.copy() for view in views[split:]]
        for freed in (*blocks, *pinned):
            freed.free()
    return results


def check_pictures(recipe: ImageRecipe, dtype: str, rows: int = 3, graph: bool = False, general: bool = False) -> None:
    """`general`: by the kernel that also resizes."""
    rng = np.random.default_rng(rows)
    pixels = rng.integers(0, 256, (rows, *recipe.pixels), dtype=np.uint8)
    pixels[0] = 255  # the largest sums
    expected = reference.prepare(pixels, recipe, dtype)
    kernel = Preprocessor(0, recipe, dtype) if general else picture_kernel(0, recipe, dtype)
    (got,) = computed(
        [pixels], [expected], lambda stream, source, to: kernel.launch(stream, source[0], rows, to[0]), graph
    )
    kernel.close()
    assert np.array_equal(got, expected), f"{recipe}: {np.abs(got - expected).max()}"


def check_pictures_anywhere(recipe: ImageRecipe, dtype: str, rows: int = 3, offset: int = 0) -> None:
    """Each picture in a place of its own, `offset` bytes behind one that is aligned; every other one is in pinned memory."""
    rng = np.random.default_rng(rows)
    size = math.prod(recipe.pixels)
    step = -(-(size + offset) // 16) * 16
    pool = rng.integers(0, 256, (rows, step), dtype=np.uint8)
    order = rng.permutation(rows)
    pixels = pool[order, offset : offset + size].reshape(rows, *recipe.pixels)
    expected = reference.prepare(pixels, recipe, dtype)
    kernel = PictureScaler(0, recipe, dtype)
    with driver.current():
        places, pinned = PinnedBuffer(), PinnedBuffer()
        places.reserve(8 * rows)
        pinned.reserve(pool.nbytes)
        pinned.view(pool.shape, pool.dtype)[:] = pool
        addresses = places.view((rows,), np.dtype(np.uint64))

        def launch(stream: driver.CudaStream, source: list[int], to: list[int]) -> None:
            bases = (source[0], pinned.address)
            addresses[:] = [bases[at % 2] + int(number) * step + offset for at, number in enumerate(order)]
            kernel.launch_each(stream, places.address, rows, to[0])

        (got,) = computed([pool], [expected], launch)
        places.free()
        pinned.free()
    kernel.close()
    assert np.array_equal(got, expected), f"{recipe}: {np.abs(got - expected).max()}"


def check_gather(row_bytes: int, rows: int, total: int, offset: int = 0, blocks: int = 8) -> None:
    """`offset` bytes in front of every row, so that it is not aligned; every other row is in pinned memory."""
    rng = np.random.default_rng(row_bytes)
    pool = rng.integers(0, 256, (rows + 2, row_bytes + offset), dtype=np.uint8)
    order = rng.permutation(rows + 2)[:rows]
    expected = reference.gather([pool[number, offset:] for number in order], total)
    kernel = RowGather(0)
    with driver.current():
        places, pinned = PinnedBuffer(), PinnedBuffer()
        places.reserve(8 * rows)
        pinned.reserve(pool.nbytes)
        pinned.view(pool.shape, pool.dtype)[:] = pool
        addresses = places.view((rows,), np.dtype(np.uint64))

        def launch(stream: driver.CudaStream, source: list[int], to: list[int]) -> None:
            bases = (source[0], pinned.address)
            addresses[:] = [
                bases[at % 2] + int(number) * (row_bytes + offset) + offset for at, number in enumerate(order)
            ]
            kernel.launch(stream, places.address, row_bytes, rows, total, to[0], blocks)

        (got,) = computed([pool], [expected], launch)
        places.free()
        pinned.free()
    kernel.close()
    assert np.array_equal(got, expected)


def scores(rows: int, classes: int, dtype: str) -> np.ndarray:
    """Seeded scores with equal ones among them, and rows of one value, of zeros of both signs and with infinities."""
    rng = np.random.default_rng(classes)
    table = np.round(rng.standard_normal((rows, classes)) * 8, 1).astype(dtype)
    if rows > 3 and classes > 1:
        table[1] = 2.5
        table[2] = np.where(np.arange(classes) % 2, 0.0, -0.0)
        table[3, -1] = -np.inf
    return table


def check_rank(rows: int, classes: int, count: int, dtype: str, softmax: bool) -> None:
    table = scores(rows, classes, dtype)
    best, numbers = reference.rank(table, count, softmax)
    kernel = Classifier(0, classes, dtype, softmax, count)
    got_best, got_numbers = computed(
        [table], [best, numbers], lambda stream, source, to: kernel.launch(stream, source[0], rows, to[0], to[1])
    )
    kernel.close()
    assert np.array_equal(got_numbers, numbers)
    if softmax:
        assert np.allclose(got_best, best, rtol=1e-5, atol=1e-9)
    else:
        assert np.array_equal(got_best, best)


def check_soften(rows: int, classes: int, dtype: str) -> None:
    table = scores(rows, classes, dtype)
    expected = reference.soften(table)
    kernel = Classifier(0, classes, dtype, True, 0)
    (got,) = computed([table], [expected], lambda stream, source, to: kernel.launch(stream, source[0], rows, to[0]))
    kernel.close()
    assert np.allclose(got, expected, rtol=1e-5, atol=1e-9)
    assert np.allclose(got.sum(axis=1), 1, atol=1e-5)
