"""Rows per second of ONNX files with a freed batch dimension: batches of one row against larger ones, on ONNX Runtime on the CPU.

    python -m loadtest.batch_gain [FILE ...]

Without files it measures the nine light models that come with the ONNX package, with seeded random weights. Rounds of both batch
sizes alternate and the median is printed, with the smallest and the largest round.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import onnx
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.random_weights import random_weights, with_weights
from headrace_engines.onnx_graph import OnnxRunner
from onnx import helper

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def rates(model: onnx.ModelProto, rows: int, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """Return rows per second of each round, with batches of 1 and of `rows`.

    Args:
        model: with a fixed batch dimension.
        rows: rows of the larger batch.
        rounds: number of rounds of each size.
        seconds: smallest length of a round.
    """
    freed = free_batch(model).model
    random = np.random.default_rng(0)
    batch = {}
    for value in freed.graph.input:
        tensor = value.type.tensor_type
        shape = [rows, *(dim.dim_value or 1 for dim in tensor.shape.dim[1:])]
        batch[value.name] = random.standard_normal(shape).astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    runner = OnnxRunner(with_weights(freed, random_weights(freed, batch, 0)))
    single = {name: array[:1] for name, array in batch.items()}
    measured: tuple[list[float], list[float]] = ([], [])
    for inputs in (single, batch):
        runner.run(inputs)
    for _ in range(rounds):
        for inputs, count, results in ((single, 1, measured[0]), (batch, rows, measured[1])):
            done, began = 0, time.perf_counter()
            while not done or time.perf_counter() - began < seconds:
                runner.run(inputs)
                done += count
            results.append(done / (time.perf_counter() - began))
    return measured


def main(words: Sequence[str] | None = None) -> int:
    """Print a table; return 0."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.batch_gain", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="smallest length of a round")
    options = parser.parse_args(words)
    files = options.files or sorted(LIGHT.glob("light_*.onnx"))
    out = sys.stdout
    out.write(f"| model | rows/s, batches of 1 | batches of {options.rows} | gain |\n|---|---|---|---|\n")
    for file in files:
        ones, many = rates(onnx.load(file), options.rows, options.rounds, options.seconds)
        cells = [f"{median(found):.1f} ({min(found):.1f} to {max(found):.1f})" for found in (ones, many)]
        gain = median(many) / median(ones)
        out.write(f"| {file.stem.removeprefix('light_')} | {cells[0]} | {cells[1]} | {gain:.2f} |\n")
        out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
