"""What `headrace inspect` found, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engines.targets.base import Layer, Timing
from server.config.layer_report import FORMAT
from server.config.machine import Machine


@dataclass(frozen=True, slots=True)
class Inspection:
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
    timing: Timing
    layers: Sequence[Layer]

    @property
    def machine_text(self) -> str:
        """The machine, for people."""
        return str(self.machine)

    @property
    def title(self) -> str:
        """What was opened, for people, e.g. "model.0123456789ab.onnx, int8, 8 rows"."""
        return f"{self.artefact}, {self.precision or 'as it is'}, {self.rows} row{'s' * (self.rows != 1)}"

    @property
    def total_us(self) -> float:
        """Of all layers, as the profiler saw them: it takes time itself, most of all in graphs of tiny layers."""
        return sum(layer.time_us for layer in self.layers)

    def shares(self) -> dict[str, float]:
        """By precision its share of the time, the largest first."""
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
