"""Texts of different length on a real GPU: padded answers are those of the texts alone, with batches in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import headrace
import numpy as np
import pytest
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from loadtest.onnx_models import transformer
from loadtest.protocol import Array
from tests.support.gpu_marks import gpu_marks
from tests.support.tensorrt_networks import answers

pytestmark = gpu_marks(180, "pydantic", "onnx", "onnxruntime")

ROWS, LONGEST = 16, 100  # not a multiple of 16: the longest texts are padded to 100
CONFIG = f"""backend: tensorrt
input: [{{name: ids, data_type: int64, dims: [-1]}}, {{name: mask, data_type: int64, dims: [-1]}}]
output: [{{name: hidden, data_type: fp32, dims: [-1, 64]}}, {{name: pooled, data_type: fp32, dims: [64]}}]
max_batch_size: {ROWS}
dynamic_batching: {{}}
pad: {{ids: 0, mask: 0, multiple_of: 16}}
optimization: {{profiles: [{{shapes: {{ids: [[8], [48], [{LONGEST}]], mask: [[8], [48], [{LONGEST}]]}}}}]}}
"""


def text_lengths(count: int) -> list[int]:
    """Return log-normal lengths of texts in tokens, median 32, from a fixed seed."""
    lengths = np.random.default_rng(0).lognormal(np.log(32), 0.6, count)
    return [int(length) for length in lengths.clip(8, LONGEST - 1)]


def texts(lengths: list[int]) -> list[dict[str, Array]]:
    """Return the inputs of one text of each length."""
    random = np.random.default_rng(1)
    ids = [random.integers(1, 1000, (1, length)) for length in lengths]
    return [{"ids": each, "mask": np.ones_like(each)} for each in ids]


def test_padded_answers_are_those_of_texts_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = transformer(layers=2, width=64, heads=2)
    folder = tmp_path / "texts"
    (folder / "1").mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    shapes = (1, 8), (8, 48), (ROWS, LONGEST)
    spec = TargetSpec("fp32", (ShapeRange({"ids": shapes, "mask": shapes}),))
    TensorRtTarget(optimization_level=1).build(model, spec, folder / "1" / "model.plan", silent)
    inputs = texts(text_lengths(160)) + texts([LONGEST, 97, 8, LONGEST])
    expected = [answers(model, each) for each in inputs]

    async def run() -> None:
        async with headrace.Server(tmp_path, state_dir="") as server:
            served = server.model("texts")
            alone = [await served.infer_async(each) for each in inputs]
            together = await asyncio.gather(*[served.infer_async(each) for each in inputs])
        for right, one, other in zip(expected, alone, together, strict=True):
            for name, values in right.items():
                assert one[name].shape == other[name].shape == values.shape
                atol = 2e-2 * float(np.abs(values).max())  # TensorRT computes FP32 with TF32
                np.testing.assert_allclose(one[name], values, atol=atol)
                np.testing.assert_allclose(other[name], values, atol=atol)

    asyncio.run(run())
    assert "its requests are not padded" not in caplog.text
