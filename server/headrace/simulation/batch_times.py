"""Latency profiles for simulation: the time of each step of a batch, by rows."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.clock import NS_PER_US

# Factors are drawn this many at a time: one call for each would cost more than the batch.
_BLOCK = 4096
_LINE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:\+\s*(\d+(?:\.\d+)?)\s*\*?\s*n\s*)?")


@dataclass(frozen=True, slots=True)
class StepLatency:
    """What a step takes for a batch, by its rows.

    Between two sizes that are known the time is interpolated, or that of the next larger one where batches are padded; beyond the
    largest it grows by the same amount a row as from the first to the last, and below the smallest it is the smallest's.

    Attributes:
        points: (rows, nanoseconds), rows ascending and at least 1.
        row_ns: what a row beyond the largest adds; None: as said.
        padded: a batch between two sizes takes what the larger one does.
    """

    points: tuple[tuple[int, float], ...] = ((1, 0.0),)
    row_ns: float | None = None
    padded: bool = False

    @classmethod
    def line(cls, batch_us: float, row_us: float = 0.0) -> StepLatency:
        """So many microseconds a batch, and so many for each of its rows."""
        return cls(((1, (batch_us + row_us) * NS_PER_US),), row_us * NS_PER_US)

    def table(self, max_rows: int) -> tuple[int, ...]:
        """Whole nanoseconds by rows, from 0 to `max_rows`."""
        return _table(self, max_rows)


@lru_cache(256)  # thousands of models share a few profiles
def _table(latency: StepLatency, max_rows: int) -> tuple[int, ...]:
    rows, times = np.array([n for n, _ in latency.points]), np.array([ns for _, ns in latency.points])
    sizes = np.arange(max_rows + 1)
    match = np.interp(sizes, rows, times)
    if latency.padded:
        match = times[np.minimum(np.searchsorted(rows, sizes), len(rows) - 1)]
    spread = rows[-1] - rows[0]
    row_ns = latency.row_ns
    if row_ns is None:
        row_ns = (times[-1] - times[0]) / spread if spread else 0.0
    match = match + np.maximum(sizes - rows[-1], 0) * row_ns
    return tuple(round(ns) for ns in match.tolist())


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """What a batch takes on its way, and how much that varies.

    Attributes:
        compute: on the device, which computes one batch after the other.
        fill: on the instance's thread, before the launch.
        copy_in, copy_out: on the device, beside the computing of other batches.
        variation: standard deviation of the compute time over its mean (gamma distributed): 0 is always the same, 1 exponential.
    """

    compute: StepLatency
    fill: StepLatency = field(default_factory=StepLatency)
    copy_in: StepLatency = field(default_factory=StepLatency)
    copy_out: StepLatency = field(default_factory=StepLatency)
    variation: float = 0.0


def parse_profile(text: str) -> LatencyProfile:
    """`450+20n` (microseconds: 450 a batch and 20 a row), or the name of a JSON file, see `profile_of`.

    Raises:
        ValueError: it is neither.
        OSError: the file cannot be read.
    """
    if _LINE.fullmatch(text):
        return LatencyProfile(_latency(text, text))
    path = Path(text)
    if path.suffix != ".json":
        raise ValueError(f"'{text}' is no profile: write microseconds such as 450+20n, or the name of a .json file")
    try:
        return profile_of(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None


def profile_of(document: object) -> LatencyProfile:
    """A profile as JSON has it.

    Args:
        document: `{"1": 500, "8": 900}`, microseconds by rows; or `{"compute": ..., "fill": ..., "copy_in": ...,
            "copy_out": ..., "padded": true, "variation": 0.1}` with such a table or a text such as "450+20n" for each step;
            only `compute` is needed; or what a server answers at `/v2/models/{m}/profile`.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(document, Mapping):
        raise ValueError('a profile is an object: {"1": 500, "8": 900}, microseconds by rows')
    if isinstance(measured := document.get("profile"), list):
        return LatencyProfile(_latency(_medians(measured), "the profile"))
    if "compute" not in document:
        return LatencyProfile(_latency(document, "the profile"))
    known = {"compute", "fill", "copy_in", "copy_out", "padded", "variation"}
    if unknown := sorted(set(document) - known):
        raise ValueError(f"a profile has no '{unknown[0]}', only {', '.join(sorted(known))}")
    padded, variation = document.get("padded", False), document.get("variation", 0.0)
    if not isinstance(padded, bool):
        raise ValueError("padded is true or false")
    if not _is_time(variation):
        raise ValueError("variation is a number from 0")
    steps = {
        name: _latency(document[name], name, padded and name == "compute")
        for name in ("compute", "fill", "copy_in", "copy_out")
        if name in document
    }
    return LatencyProfile(**steps, variation=float(variation))


def _medians(measured: Sequence[object]) -> dict[str, object]:
    """Microseconds by rows, of the server's own table."""
    for line in measured:
        if not isinstance(line, Mapping) or not {"rows", "median_us"} <= set(line):
            raise ValueError("each line of the profile has rows and median_us")
    return {str(line["rows"]): line["median_us"] for line in measured if isinstance(line, Mapping)}


def _latency(value: object, where: str, padded: bool = False) -> StepLatency:
    if isinstance(value, str):
        match = _LINE.fullmatch(value)
        if match is None:
            raise ValueError(f"{where}: '{value}' is no time: write microseconds such as 450+20n")
        return StepLatency.line(float(match[1]), float(match[2] or 0))
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{where}: write microseconds by rows, {{"1": 500, "8": 900}}, or "450+20n"')
    points: list[tuple[int, float]] = []
    for rows, time_us in value.items():
        if not (isinstance(rows, str) and rows.isdecimal() and int(rows) >= 1):
            raise ValueError(f"{where}: '{rows}' is no number of rows")
        if not _is_time(time_us):
            raise ValueError(f"{where}: {time_us!r} for {rows} rows is no time in microseconds")
        points.append((int(rows), float(time_us) * NS_PER_US))
    return StepLatency(tuple(sorted(points)), padded=padded)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


class Variation:
    """Factors of mean 1 by which compute times vary.

    Args:
        coefficient: their standard deviation; 0: always 1.
        generator: where they are drawn.
    """

    def __init__(self, coefficient: float, generator: np.random.Generator) -> None:
        self._shape = 1 / coefficient**2 if coefficient else 0.0
        self._generator = generator
        self._factors: list[float] = []

    def apply(self, time_ns: int) -> int:
        """The time that one batch takes, whose mean is `time_ns`."""
        if not self._shape:
            return time_ns
        if not self._factors:
            self._factors = self._generator.gamma(self._shape, 1 / self._shape, _BLOCK).tolist()
        return int(time_ns * self._factors.pop())
