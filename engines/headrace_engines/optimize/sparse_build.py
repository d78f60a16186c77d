"""Builds a model with 2:4 sparse weights a second time with TensorRT's sparse kernels, and keeps the faster engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import onnx

from headrace_engines.progress import Report, part
from headrace_engines.targets.base import Array, Engine, Target, TargetSpec

# Speed-up that sparse kernels need: timings of the same engine differ by up to a percent.
WORTH = 1.01
_ROUNDS = 4
_ROUND_S = 0.15


@dataclass(frozen=True, slots=True)
class SparseChoice:
    """Measured engines without and with sparse kernels.

    Attributes:
        rows: rows of the batch.
        dense_us: median time of the engine without sparse kernels, in microseconds.
        sparse_us: median time of the engine with them.
        is_faster: the engine with sparse kernels is kept.
    """

    rows: int
    dense_us: float
    sparse_us: float
    is_faster: bool

    def __str__(self) -> str:
        result = "kept" if self.is_faster else "not kept"
        times = f"{self.dense_us:.1f} us without, {self.sparse_us:.1f} us with"
        return f"sparse kernels {result}: {times} ({self.dense_us / self.sparse_us:.2f}x at {self.rows} rows)"

    def to_json(self, nodes: Sequence[str]) -> dict[str, Any]:
        """Return a JSON object.

        Args:
            nodes: names of the nodes with sparse weights.
        """
        return {"rows": self.rows, "dense_us": self.dense_us, "sparse_us": self.sparse_us, "nodes": list(nodes)}


def choose_sparse(
    target: Target,
    model: onnx.ModelProto,
    order: TargetSpec,
    artefact: Path,
    batch: Mapping[str, Array],
    report: Report,
) -> SparseChoice:
    """Replace an artefact by one with sparse kernels if that is at least 1 % faster.

    Args:
        target: target of the artefact.
        model: the lowered model, whose weights are 2:4 sparse.
        order: parameters of the build, with `sparse_weights`.
        artefact: file of the engine without sparse kernels; replaced if the other one is faster.
        batch: one batch by input name.
        report: progress callback.

    Raises:
        BuildError: the engine cannot be built or run.
    """
    candidate = artefact.with_name(f"sparse{artefact.suffix}")
    target.build(model, order, candidate, part(report, 0.0, 0.8))
    report(0.8, "timing sparse kernels")
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, path in (("dense", artefact), ("sparse", candidate)):
            engines[name] = target.open(path, host_code=order.version_compatible)
            stack.callback(engines[name].close)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(_ROUNDS):
            # Each engine is first in half of the rounds.
            for name in sorted(engines, reverse=bool(number % 2)):
                times[name].append(engines[name].time(batch, _ROUND_S).median_us)
    dense_us, sparse_us = median(times["dense"]), median(times["sparse"])
    is_faster = dense_us >= WORTH * sparse_us
    if is_faster:
        candidate.replace(artefact)
    else:
        candidate.unlink()
    rows = next(iter(batch.values())).shape[0]
    return SparseChoice(int(rows), dense_us, sparse_us, is_faster)
