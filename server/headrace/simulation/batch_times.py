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

# Factors drawn at a time: one call for each would cost more than simulating the batch.
_BLOCK = 4096
_LINE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:\+\s*(\d+(?:\.\d+)?)\s*\*?\s*n\s*)?")


@dataclass(frozen=True, slots=True)
class StepLatency:
    """Duration of one step of a batch, by its rows.

    Between two known sizes the time is interpolated; with padding it is that of the next larger size. Above the largest size it
    grows linearly with the mean slope of the points. Below the smallest size it is constant.

    Attributes:
        points: (rows, nanoseconds) pairs, rows ascending and at least 1.
        row_ns: nanoseconds of each row above the largest size; None for the mean slope of the points.
        padded: True if batches are padded to the next size.
    """

    points: tuple[tuple[int, float], ...] = ((1, 0.0),)
    row_ns: float | None = None
    padded: bool = False

    @classmethod
    def line(cls, batch_us: float, row_us: float = 0.0) -> StepLatency:
        """Return the latency `batch_us + row_us * rows`, in microseconds."""
        return cls(((1, (batch_us + row_us) * NS_PER_US),), row_us * NS_PER_US)

    def table(self, max_rows: int) -> tuple[int, ...]:
        """Return whole nanoseconds by rows, from 0 to `max_rows`."""
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
    """Durations of the steps of a batch, and their variation.

    Attributes:
        compute: compute on the device, which runs one batch after the other.
        fill: copying inputs into the batch, on the instance's thread before the launch.
        copy_in: host-to-device copy, concurrent with the compute of other batches.
        copy_out: device-to-host copy, concurrent with the compute of other batches.
        variation: coefficient of variation of the compute time (gamma distributed): 0 for constant, 1 for exponential.
    """

    compute: StepLatency
    fill: StepLatency = field(default_factory=StepLatency)
    copy_in: StepLatency = field(default_factory=StepLatency)
    copy_out: StepLatency = field(default_factory=StepLatency)
    variation: float = 0.0


def parse_profile(text: str) -> LatencyProfile:
    """Parse a latency profile of the command line.

    Args:
        text: `450+20n` (microseconds: 450 for a batch and 20 for each row), or the name of a JSON file, see `profile_of`.

    Raises:
        ValueError: the text or the file is no profile.
        OSError: the file cannot be read.
    """
    if _LINE.fullmatch(text):
        return LatencyProfile(_latency(text, text))
    path = Path(text)
    if path.suffix != ".json":
        raise ValueError(
            f"'{text}' is not a latency profile: use microseconds such as 450+20n, or the name of a .json file"
        )
    try:
        return profile_of(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from None


def profile_of(document: object) -> LatencyProfile:
    """Read a latency profile from a JSON document.

    Args:
        document: one of three forms. `{"1": 500, "8": 900}` has microseconds by rows. `{"compute": ..., "fill": ...,
            "copy_in": ..., "copy_out": ..., "padded": true, "variation": 0.1}` has such a table or a text such as "450+20n" for
            each step; only `compute` is required. The third form is the response of a server at `/v2/models/{m}/profile`.

    Raises:
        ValueError: the document has none of these forms.
    """
    if not isinstance(document, Mapping):
        raise ValueError(
            f'a profile is a JSON object such as {{"1": 500, "8": 900}} (microseconds by rows), not {document!r:.40}'
        )
    if isinstance(measured := document.get("profile"), list):
        return LatencyProfile(_latency(_medians(measured), "the profile"))
    if "compute" not in document:
        return LatencyProfile(_latency(document, "the profile"))
    known = {"compute", "fill", "copy_in", "copy_out", "padded", "variation"}
    if unknown := sorted(set(document) - known):
        raise ValueError(f"unknown key '{unknown[0]}' in the profile: use {', '.join(sorted(known))}")
    padded, variation = document.get("padded", False), document.get("variation", 0.0)
    if not isinstance(padded, bool):
        raise ValueError(f"padded is {padded!r:.40}: use true or false")
    if not _is_time(variation):
        raise ValueError(f"variation is {variation!r:.40}: use a number of at least 0")
    steps = {
        name: _latency(document[name], name, padded and name == "compute")
        for name in ("compute", "fill", "copy_in", "copy_out")
        if name in document
    }
    return LatencyProfile(**steps, variation=float(variation))


def _medians(measured: Sequence[object]) -> dict[str, object]:
    """Return microseconds by rows from a server's latency table."""
    for line in measured:
        if not isinstance(line, Mapping) or not {"rows", "median_us"} <= set(line):
            raise ValueError(f"an entry of the profile is {line!r:.40}: use objects with rows and median_us")
    return {str(line["rows"]): line["median_us"] for line in measured if isinstance(line, Mapping)}


def _latency(value: object, where: str, padded: bool = False) -> StepLatency:
    if isinstance(value, str):
        match = _LINE.fullmatch(value)
        if match is None:
            raise ValueError(f"{where}: '{value}' is not a time: use microseconds such as 450+20n")
        return StepLatency.line(float(match[1]), float(match[2] or 0))
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f'{where} is {value!r:.40}: use microseconds by rows, {{"1": 500, "8": 900}}, or "450+20n"')
    points: list[tuple[int, float]] = []
    for rows, time_us in value.items():
        if not (isinstance(rows, str) and rows.isdecimal() and int(rows) >= 1):
            raise ValueError(f"{where}: '{rows}' is not a number of rows: use whole numbers from 1")
        if not _is_time(time_us):
            raise ValueError(f"{where}: {time_us!r} for {rows} rows is not a time: use microseconds, at least 0")
        points.append((int(rows), float(time_us) * NS_PER_US))
    return StepLatency(tuple(sorted(points)), padded=padded)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


class Variation:
    """Random factors of mean 1 for compute times.

    Args:
        coefficient: standard deviation of the factors; 0 for constant times.
        generator: source of randomness.
    """

    def __init__(self, coefficient: float, generator: np.random.Generator) -> None:
        self._shape = 1 / coefficient**2 if coefficient else 0.0
        self._generator = generator
        self._factors: list[float] = []

    def apply(self, time_ns: int) -> int:
        """Return the time of one batch, drawn from a distribution of mean `time_ns`."""
        if not self._shape:
            return time_ns
        if not self._factors:
            self._factors = self._generator.gamma(self._shape, 1 / self._shape, _BLOCK).tolist()
        return int(time_ns * self._factors.pop())
