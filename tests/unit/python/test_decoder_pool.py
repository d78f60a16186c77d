"""The processes that decode images for all pipelines: how many there are, deaths, and tensors in their memory."""

from __future__ import annotations

import gc
import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from headrace.core.errors import BadRequest
from headrace.core.tensor import Array
from headrace.python.decoder_pool import DecoderPool, PooledDecoder
from PIL import Image

from tests.support.processes import isolated_children_of_this_process, stop
from tests.support.waiting import on_threads, until

RESIZE = {"resize": {"resize_short_side": 8, "crop": [8, 8]}}
COLOURS = [(value, 255 - value, 7) for value in range(0, 240, 12)]


@contextmanager
def step(pool: DecoderPool, processes: int = 1, limit_s: float = 30.0) -> Iterator[PooledDecoder]:
    decoder = PooledDecoder(pool, RESIZE, True, processes, limit_s)
    try:
        yield decoder
    finally:
        decoder.close()


def png(colour: tuple[int, int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(file, "PNG")
    return file.getvalue()


def decode(decoder: PooledDecoder, data: bytes) -> Array:
    image: Array = np.array([[data]], object)
    return decoder.execution(0).run({"image": image})["tensor"]


def colour_of(tensor: Array) -> tuple[int, ...]:
    assert tensor.shape == (1, 3, 8, 8)
    return tuple(int(value) for value in tensor[0, :, 3, 5])


def test_steps_share_the_processes_which_end_with_the_last_step() -> None:
    pool = DecoderPool()
    assert not isolated_children_of_this_process()
    with step(pool, 1) as first:
        before = isolated_children_of_this_process()
        assert len(before) == 1
        with step(pool, 2) as second:
            processes = set(isolated_children_of_this_process())
            assert (len(processes), processes > set(before)) == (2, True)
            assert colour_of(decode(second, png((1, 2, 3)))) == (1, 2, 3)
        assert set(isolated_children_of_this_process()) == processes
        assert colour_of(decode(first, png((4, 5, 6)))) == (4, 5, 6)
        assert pool.process_status == (True, "", 0)
    until(lambda: not isolated_children_of_this_process())
    with step(pool) as again:
        assert colour_of(decode(again, png((7, 8, 9)))) == (7, 8, 9)


def test_each_step_decodes_with_its_own_options() -> None:
    pool = DecoderPool()
    with step(pool) as resized:
        pixels = PooledDecoder(pool, {"color": "gray", "max_pixels": 300}, False, 1, 30.0)
        try:
            assert decode(resized, png((9, 9, 9))).shape == (1, 3, 8, 8)
            outputs = pixels.execution(0).run({"image": np.array([png((9, 9, 9))], object)})
            assert {name: array.shape for name, array in outputs.items()} == {"image": (10, 20, 1)}
            with pytest.raises(BadRequest, match="no image that can be read"):
                decode(pixels, b"nothing")
        finally:
            pixels.close()


def test_tensors_stay_as_they_are_while_others_are_decoded() -> None:
    with step(DecoderPool()) as decoder:
        tensors = [decode(decoder, png(colour)) for colour in COLOURS]  # more than are lent
        views = [tensor.reshape(3, 8, 8)[:, 2:4] for tensor in tensors]
        del tensors
        gc.collect()
        for colour in COLOURS:
            decode(decoder, png(colour[::-1]))
        assert [tuple(int(value) for value in view[:, 0, 0]) for view in views] == COLOURS
        kept = views.pop(0)
        del views
        gc.collect()
        assert [colour_of(decode(decoder, png(colour))) for colour in COLOURS] == COLOURS
    assert tuple(int(value) for value in kept[:, 1, 1]) == COLOURS[0]  # after the end of the process


def test_deleted_tensors_free_their_memory_for_the_next_images() -> None:
    with step(DecoderPool()) as decoder:
        addresses = {decode(decoder, png(colour)).ctypes.data for colour in COLOURS}
        assert len(addresses) == 1


def test_a_killed_process_is_replaced_and_the_other_one_decodes_meanwhile() -> None:
    pool = DecoderPool()
    with step(pool, 2) as decoder:
        killed = isolated_children_of_this_process()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in isolated_children_of_this_process())
        for colour in COLOURS[:4]:
            assert colour_of(decode(decoder, png(colour))) == colour
        until(lambda: pool.process_status.restarts == 1)
        until(lambda: len(isolated_children_of_this_process()) == 2)


def test_the_time_limit_is_that_of_the_step() -> None:
    pool = DecoderPool()
    with step(pool, limit_s=60.0), step(pool, limit_s=0.5) as hasty:
        (stopped,) = isolated_children_of_this_process()
        stop(stopped)
        begun_s = time.monotonic()
        assert colour_of(decode(hasty, png((1, 2, 3)))) == (1, 2, 3)  # not begun there: the next process decodes it
        assert time.monotonic() - begun_s < 50
        assert stopped not in isolated_children_of_this_process()


def test_steps_of_many_threads_wait_for_a_free_process() -> None:
    pool = DecoderPool()
    with step(pool) as one, step(pool) as other:
        results: list[bool] = []

        def many(decoder: PooledDecoder) -> None:
            results.extend(colour_of(decode(decoder, png(colour))) == colour for colour in COLOURS)

        on_threads(many, (one, other, one, other))
        assert results == [True] * 4 * len(COLOURS)
        assert len(isolated_children_of_this_process()) == 1


def test_a_tensor_larger_than_the_memory_so_far_is_whole() -> None:
    pool = DecoderPool()
    large = {"resize": {"resize_short_side": 600, "crop": [600, 600]}}
    with step(pool) as small:
        decode(small, png((1, 2, 3)))
        decoder = PooledDecoder(pool, large, True, 1, 30.0)
        try:
            tensor = decode(decoder, png((4, 5, 6)))
        finally:
            decoder.close()
        assert tensor.shape == (1, 3, 600, 600)
        assert [np.unique(plane).tolist() for plane in tensor[0]] == [[4], [5], [6]]
        assert colour_of(decode(small, png((7, 8, 9)))) == (7, 8, 9)
