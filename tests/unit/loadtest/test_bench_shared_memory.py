"""Parts of the shared memory case: its models, its requests, its copies."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pytest

from loadtest.bench.cases import shared_memory
from loadtest.bench.inprocess import Oracle
from loadtest.protocol import shared_memory_request


@pytest.mark.parametrize("width", [shared_memory.SMALL, shared_memory.LARGE])
def test_models_read_the_same_bytes_for_any_input(width: int, tmp_path: Path) -> None:
    shared_memory.write_model(tmp_path, width)
    (path,) = tmp_path.glob("*/1/model.onnx")
    oracle = Oracle(path)
    inputs = oracle.example(rows=1)
    assert inputs["x"].nbytes == {16: 64}.get(width, 602_112)
    (picked,) = oracle.run(inputs).values()
    assert picked.shape == (1, 16)
    assert (picked[0, 0], picked[0, -1]) == (inputs["x"][0, 0], inputs["x"][0, -1])


def test_requests_for_both_sizes_are_as_long_but_for_digits() -> None:
    sizes = {}
    for width in (shared_memory.SMALL, shared_memory.LARGE):
        request = shared_memory_request("m", {"x": np.zeros((1, width), dtype=np.float32)}, region="r")
        (described,) = json.loads(request.body)["inputs"]
        assert described["parameters"] == {"shared_memory_region": "r", "shared_memory_byte_size": 4 * width}
        assert "data" not in described
        sizes[width] = len(request.body)
    assert sizes[shared_memory.LARGE] - sizes[shared_memory.SMALL] < 10


def test_both_copies_are_true(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 602_112).astype(np.uint8)
    path = tmp_path / "content"
    path.write_bytes(content.tobytes())
    np.testing.assert_array_equal(shared_memory.mapped(str(path)).copy(), content)
    with io.FileIO(path) as file:
        np.testing.assert_array_equal(shared_memory.kernel_copy(file, content.size), content)


def test_an_action_is_timed_on_the_requested_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    seen: list[set[int]] = []
    assert shared_memory.median_us(lambda: seen.append(os.sched_getaffinity(0)), (core,)) > 0
    assert seen[0] == {core}
    assert os.sched_getaffinity(0) == before
