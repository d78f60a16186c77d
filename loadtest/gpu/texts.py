"""`python -m loadtest.gpu.texts`: texts of 8 to 128 tokens on a GPU, padded into shared batches and without padding.

A small transformer runs as a TensorRT engine with free rows and length, in this process. Callers keep a fixed number of texts
in flight. Every answer of a mixed load is compared with that of the text alone. Exit status: 0 if padding reaches its target,
1 if it does not, 2 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import headrace
import numpy as np
from headrace.embedding import Model
from headrace_engines.progress import silent
from headrace_engines.targets.base import ShapeRange, TargetSpec
from headrace_engines.targets.tensorrt.target import TensorRtTarget

from loadtest.bench.cases.ragged import text_lengths, texts
from loadtest.bench.results import at_least
from loadtest.gpu.closed_loop import Load, alternate, report
from loadtest.onnx_models import transformer
from loadtest.protocol import Array

_TARGET = at_least(3.0)
_LONGEST = 128
_TEXTS = 512
_PADDED, _UNPADDED = "padded", "unpadded"
_CONFIG = "max_batch_size: {rows}\ndynamic_batching: {{}}\n"
# An engine does not complete a configuration.
_ENGINE = """backend: tensorrt
input: [{{name: ids, data_type: int64, dims: [-1]}}, {{name: mask, data_type: int64, dims: [-1]}}]
output: [{{name: pooled, data_type: fp32, dims: [{width}]}}]
"""
_PAD = "pad: {ids: 0, mask: 0, multiple_of: 16}\n"
# TensorRT computes FP32 with TF32, whose sums differ with the kernel.
_TOLERANCE = 2e-2


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, check, measure, print; return the exit status."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-texts-") as name:
        repository = Path(name)
        begun_s = time.monotonic()
        _add_models(repository, options)
        print(f"engines: {time.monotonic() - begun_s:.0f} s", flush=True)
        load = Load(options.in_flight, options.seconds, options.rounds)
        return asyncio.run(_measure(repository, load, options.json))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu.texts", description="Padding of texts on a GPU.")
    add = parser.add_argument
    add("--backend", choices=("tensorrt", "onnxruntime"), default="tensorrt", help="onnxruntime: try it on a CPU")
    add("--rows", type=int, default=64, help="rows of the largest batch (%(default)s)")
    add("--layers", type=int, default=6, help="of the transformer (%(default)s)")
    add("--width", type=int, default=384, help="of the transformer, 32 for each head (%(default)s)")
    add("--in-flight", type=int, default=192, help="texts in flight (%(default)s)")
    add("--seconds", type=float, default=2.0, help="of a sample (%(default)s)")
    add("--rounds", type=int, default=5, help="samples of each model (%(default)s)")
    add("--level", type=int, default=3, help="TensorRT's optimisation level (%(default)s)")
    add("--json", type=Path, help="write the figures to this file")
    return parser


def _add_models(repository: Path, options: argparse.Namespace) -> None:
    model = transformer(options.layers, options.width, options.width // 32, has_hidden=False)
    folders = [repository / name for name in (_PADDED, _UNPADDED)]
    on_gpu = options.backend == "tensorrt"
    for folder, pad in zip(folders, (_PAD, ""), strict=True):
        (folder / "1").mkdir(parents=True)
        backend = _ENGINE.format(width=options.width) if on_gpu else ""
        (folder / "config.yaml").write_text(backend + _CONFIG.format(rows=options.rows) + pad)
    first, second = [folder / "1" / ("model.plan" if on_gpu else "model.onnx") for folder in folders]
    if on_gpu:
        shapes = (1, 8), (options.rows // 2, 48), (options.rows, _LONGEST)
        profile = ShapeRange({"ids": shapes, "mask": shapes})
        TensorRtTarget(optimization_level=options.level).build(model, TargetSpec("fp32", (profile,)), first, silent)
        second.write_bytes(first.read_bytes())
    else:
        for file in (first, second):
            file.write_bytes(model.SerializeToString())


async def _measure(repository: Path, load: Load, json_file: Path | None) -> int:
    inputs = texts(text_lengths(_TEXTS))
    async with headrace.Server(repository, models=[_PADDED, _UNPADDED], state_dir="") as server:
        models = {name: server.model(name) for name in (_PADDED, _UNPADDED)}
        difference = await _largest_difference(models[_PADDED], models[_UNPADDED], inputs[:128])
        print(f"largest difference of 128 padded answers from those of the texts alone: {difference:.2g}", flush=True)
        if not difference < _TOLERANCE:
            print(f"FAILED: more than {_TOLERANCE} of the largest output")
            return 2
        samples = await alternate(models, inputs, load)
    return int(report(samples, "texts/s", _TARGET, json_file) == "MISS")


async def _largest_difference(padded: Model, unpadded: Model, inputs: Sequence[Mapping[str, Array]]) -> float:
    """Return the largest difference of a mixed load from one by one, as a share of the largest output."""
    alone = [await unpadded.infer_async(each) for each in inputs]
    largest = 0.0
    for _ in range(3):
        together = await asyncio.gather(*[padded.infer_async(each) for each in inputs])
        for expected, answer in zip(alone, together, strict=True):
            for name, values in expected.items():
                if answer[name].shape != values.shape:
                    raise SystemExit(f"output '{name}' has the shape {answer[name].shape}, expected {values.shape}")
                largest = max(largest, float(np.abs(answer[name] - values).max() / np.abs(values).max()))
    return largest


if __name__ == "__main__":
    sys.exit(main())
