"""Results of the map: one cell for each layer, batch size, precision and epilogue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from headrace.core.telemetry import GpuReading
from headrace_engines.report import finite

from headrace_lab.check import Errors
from headrace_lab.kernels.base import ConvShape, Epilogue
from headrace_lab.layers import PLAIN
from headrace_lab.measure import Timing
from headrace_lab.roofline import Roofline

FORMAT = 1
DTYPES: dict[str, np.dtype[Any]] = {"fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
BASELINES = ("cudnn", "cudnn-unfused", "cudnn-fused", "tensorrt")


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Result of one candidate on one cell.

    Attributes:
        name: name of the algorithm or baseline.
        variant: tile sizes or kernel.
        reason: reason why there is no time, or the verdict of a check that is wrong or has the bound of FP16 accumulation.
        timing: times; None without a measurement.
        errors: errors against float64; None without a check.
        workspace_bytes: scratch memory; None if unknown.
        tried: number of variants of which this one was the fastest.
    """

    name: str
    variant: str = ""
    reason: str = ""
    timing: Timing | None = None
    errors: Errors | None = None
    workspace_bytes: int | None = None
    tried: int = 1

    @property
    def is_own(self) -> bool:
        """True for an algorithm of ours."""
        return self.name not in BASELINES


def fastest(results: Iterable[CandidateResult]) -> CandidateResult | None:
    """Return the fastest timed result that is not wrong."""
    timed = [r for r in results if r.timing is not None and (r.errors is None or r.errors.is_right)]
    return min(timed, key=lambda r: r.timing.median_us if r.timing else 0.0, default=None)


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one layer at one batch size, precision and epilogue.

    Attributes:
        layer: name of the layer.
        shape: the convolution.
        precision: "fp16" or "fp32".
        epilogue: operations that are part of the measured work.
        floor_us: least time by the roofline.
        results: one for each candidate.
        seconds: duration of the measurement.
        sm_clock_hz: clock of the multiprocessors after it; None if unknown.
        slowed: reasons for which the clocks were lowered after it.
        phases_s: duration of the parts of the measurement.
    """

    layer: str
    shape: ConvShape
    precision: str
    epilogue: Epilogue
    floor_us: float
    results: tuple[CandidateResult, ...]
    seconds: float = 0.0
    sm_clock_hz: float | None = None
    slowed: tuple[str, ...] = ()
    phases_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """True if the convolution alone was measured."""
        return self.epilogue == PLAIN

    def time_us(self, *names: str) -> float | None:
        """Return the shortest median time of right results of the named candidates; None without any."""
        best = fastest(result for result in self.results if result.name in names)
        return None if best is None or best.timing is None else best.timing.median_us

    def winner(self) -> CandidateResult | None:
        """Return the fastest candidate with a right result; None without any."""
        return fastest(result for result in self.results if result.errors is not None)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with times in microseconds, rates in TFLOP/s and shares of the roofline."""
        winner = self.winner()
        results = []
        for result in self.results:
            document = asdict(result)
            if result.timing is not None:
                document["tflops"] = self.shape.flops / result.timing.median_us / 1e6
                document["roofline_share"] = self.floor_us / result.timing.median_us
            if result.errors is not None:
                document["right"] = result.errors.is_right
                document["check"] = result.errors.verdict
            results.append(document)
        return asdict(replace(self, results=())) | {
            "flops": self.shape.flops,
            "min_bytes": self.shape.min_bytes("f2" if self.precision == "fp16" else "f4", self.epilogue.residual),
            "winner": winner.name if winner else None,
            "results": results,
        }


@dataclass(frozen=True, slots=True)
class ConvMap:
    """The map: all cells and the conditions of the measurement.

    Attributes:
        title: name of the model or of the layers.
        gpu: name of the GPU.
        capability: its compute capability.
        driver: version of NVIDIA's driver.
        versions: versions of the compared libraries, by name.
        notes: conditions and reasons for what is missing, as sentences.
        roofline: ceilings of the GPU.
        cells: the cells, in the order of their measurement.
        before: state of the GPU before the measurement; None without NVML.
        after: state of the GPU after it.
        rounds: rounds of each candidate.
        seconds: duration of everything.
        summary: sentences of `summarize_map`.
        compile_seconds: duration of the compilation of kernels, which runs beside the measurements.
    """

    title: str
    gpu: str
    capability: str
    driver: str
    versions: Mapping[str, str]
    notes: Sequence[str]
    roofline: Roofline
    cells: Sequence[Cell]
    before: GpuReading | None = None
    after: GpuReading | None = None
    rounds: int = 0
    seconds: float = 0.0
    summary: Sequence[str] = field(default_factory=tuple)
    compile_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; values that are not finite are None."""
        cells = [cell.to_json() for cell in self.cells]
        cleaned: dict[str, Any] = finite({"format": FORMAT, **asdict(replace(self, cells=())), "cells": cells})
        return cleaned
