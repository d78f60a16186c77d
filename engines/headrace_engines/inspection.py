"""Opens an engine and measures its layers: nodes, precision, kernel and time of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from headrace.config.manifest import FORMAT, Machine, choose_in, onnx_digest
from headrace.core.errors import ConfigError

from headrace_engines.errors import BuildError, CallError
from headrace_engines.onnx_graph import read_onnx
from headrace_engines.project import Project, read_spec
from headrace_engines.quantization.samples import random_samples
from headrace_engines.targets import choose_target
from headrace_engines.targets.base import Array, BatchTiming, Layer, ShapeRange, Target


@dataclass(frozen=True, slots=True)
class EngineInspection:
    """An engine and what it consists of.

    Attributes:
        model: its name.
        version: its number.
        artefact: name of the file that was opened.
        precision: that was built, "" for the model itself.
        machine: that it was measured on.
        reason: why `artefact` is the model itself, "" if it is a built one.
        shapes: of the inputs it was measured with.
        rows: of the batch.
        timing: without the profiler.
        layers: in order.
    """

    model: str
    version: int
    artefact: str
    precision: str
    machine: Machine
    reason: str
    shapes: Mapping[str, tuple[int, ...]]
    rows: int
    timing: BatchTiming
    layers: Sequence[Layer]

    @property
    def machine_text(self) -> str:
        """The machine as text."""
        return str(self.machine)

    @property
    def title(self) -> str:
        """File, precision and rows, e.g. "model.0123456789ab.onnx, int8, 8 rows"."""
        return f"{self.artefact}, {self.precision or 'as it is'}, {self.rows} row{'s' * (self.rows != 1)}"

    @property
    def total_us(self) -> float:
        """Time of all layers under the profiler, which takes time itself, most of all in graphs of tiny layers."""
        return sum(layer.time_us for layer in self.layers)

    def shares(self) -> dict[str, float]:
        """Return the share of the time of each precision, the largest first."""
        shares: dict[str, float] = {}
        for layer in self.layers:
            shares[layer.precision] = shares.get(layer.precision, 0.0) + layer.share
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def to_json(self) -> dict[str, Any]:
        """Plain data; times in microseconds, shares from 0 to 1."""
        return {
            "format": FORMAT,
            "model": self.model,
            "version": self.version,
            "artefact": self.artefact,
            "precision": self.precision,
            "machine": asdict(self.machine),
            "reason": self.reason,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "rows": self.rows,
            "median_us": self.timing.median_us,
            "p99_us": self.timing.p99_us,
            "rows_per_s": self.timing.rows_per_s,
            "total_us": self.total_us,
            "layers": [asdict(layer) | {"nodes": list(layer.nodes)} for layer in self.layers],
        }


# A CPU needs seconds for the largest batches of a large model; the picture is the same from a few rows on.
_CPU_ROWS = 8


_NOISE_ROWS = 8


_TIMING_S = 0.5


def inspection_targets(name: str) -> list[Target]:
    """Return the targets whose engines are searched, in order; "auto" on a GPU machine includes its CPU.

    Raises:
        BuildError: the target is not to be had.
    """
    first = choose_target(name)
    if name != "auto" or first.name == "onnxruntime":
        return [first]
    return [first, choose_target("onnxruntime")]


def inspect(project: Project, targets: list[Target], rows: int | None = None) -> EngineInspection:
    """Open the engine for this machine, else the model itself on ONNX Runtime, and measure its layers.

    Args:
        project: the version.
        targets: whose engines are searched, in order.
        rows: of the batch, None: what it is tuned for.

    Raises:
        BuildError: nothing can be opened or run.
    """
    folder = project.source.parent
    try:
        digest = onnx_digest(project.source)
    except ConfigError as error:
        raise BuildError(str(error)) from error
    reasons = []
    for target in targets:
        choice = choose_in(folder, digest, project.config, target.describe())
        if choice.stamp is not None and choice.path is not None:
            return _inspect(project, target, choice.path, choice.stamp.precision, "", rows)
        reasons.append(choice.reason)
    return _inspect(project, choose_target("onnxruntime"), project.source, "", reasons[0], rows)


def _inspect(
    project: Project, target: Target, path: Path, precision: str, reason: str, rows: int | None
) -> EngineInspection:
    inputs = _inputs(project, target, rows)
    engine = target.open(path, read_onnx(project.source))
    try:
        timing = engine.time(inputs, _TIMING_S)
        layers = engine.layers(inputs)
    finally:
        engine.close()
    batched = bool(project.config.max_batch_size)
    if not batched:
        # Without a batch dimension, one execution is one row.
        timing = replace(timing, rows=1, rows_per_s=timing.rows_per_s / max(timing.rows, 1))
    return EngineInspection(
        model=project.name,
        version=project.version,
        artefact=path.name,
        precision=precision,
        machine=target.describe(),
        reason=reason,
        shapes={name: tuple(array.shape) for name, array in inputs.items()},
        rows=timing.rows,
        timing=timing,
        layers=layers,
    )


def _inputs(project: Project, target: Target, rows: int | None) -> dict[str, Array]:
    """Noise in the shapes that the engine is tuned for: kernels take as long on any values."""
    config = project.config
    try:
        profile: ShapeRange | None = read_spec(config).profiles[0]
    except BuildError:  # free dimensions without a profile: they become 1
        profile = None
    tuned = {name: shape for name, (_, shape, _) in profile.shapes.items()} if profile else {}
    if not config.max_batch_size:
        if rows not in (None, 1):
            raise CallError(f"{project.name} has no batch dimension: leave --batch out")
        return next(iter(random_samples(config, 1, tuned).batches(1)))
    smallest, tuned_rows, largest = (
        next(iter(profile.shapes.values())) if profile else ((1,), (1,), (config.max_batch_size,))
    )
    if rows is None:
        rows = max(smallest[0], min(tuned_rows[0], _CPU_ROWS)) if target.name == "onnxruntime" else tuned_rows[0]
    if not smallest[0] <= rows <= largest[0]:
        raise CallError(f"--batch is {rows}, {project.name} takes {smallest[0]} to {largest[0]} rows")
    samples = random_samples(config, min(rows, _NOISE_ROWS), {name: shape[1:] for name, shape in tuned.items()})
    batch = next(iter(samples.batches(_NOISE_ROWS)))
    return {name: np.resize(array, (rows, *array.shape[1:])) for name, array in batch.items()}
