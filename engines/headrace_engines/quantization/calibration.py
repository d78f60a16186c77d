"""Ranges of tensors, measured by running the FP32 model on samples; a table of ranges is stored and used again.

Each tensor has a histogram that grows batch by batch. Its bins are those of a float with 8 bits of mantissa: 256 to an octave,
from the smallest number to the largest. So the range need not be known beforehand, a single huge value costs no resolution, and
the counts do not depend on how the values are divided into batches. A method returns a threshold on absolute values that clips
the smallest and the largest value: INT8 with a zero point of 0 takes the larger side, UINT8 takes both.

    minmax       nothing is clipped
    percentile   that share of the values is inside
    entropy      the least Kullback-Leibler divergence, as TensorRT defines it
    mse          the least mean squared error of INT8
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from headrace.core.optimization_config import Calibration
from onnx import numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.progress import Report
from headrace_engines.quantization.samples import Samples

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Range = tuple[float, float]
# Bumped when the same samples give other ranges than before: tables and artefacts of an earlier one are made anew.
RANGES_RECIPE = 1
# An FP32 number without its sign, less the lower 15 of its 23 bits of mantissa.
_DROPPED_BITS = 15
_BINS = 0x7F800000 >> _DROPPED_BITS
# Values are counted in pieces that stay in the processor's cache.
_PIECE = 1 << 16
# Migacz, "8-bit Inference with TensorRT" (NVIDIA, GTC 2017): 2048 bins; 128 levels of INT8 from 0 up; from 128 bins on.
_ENTROPY_BINS = 2048
_ENTROPY_LEVELS = 128
_ENTROPY_STEP = 16
# The bins reach at most so many times as far as this percentage of the values.
_ENTROPY_REACH = 4.0
_ENTROPY_PERCENTILE = 99.99
# With a few discrete values a cut between them costs no divergence: no more than this share is cut off.
_ENTROPY_CLIPPED = 0.01
# Less is rounding.
_ENTROPY_TOLERANCE = 1e-9
# Zero divergence from a bin that the quantised distribution lacks would be infinite.
_MIN_PROBABILITY = 1e-12
_INT8_LARGEST = 127
_MSE_STEPS_AN_OCTAVE = 16
_MSE_OCTAVES = 12
_MSE_OCTAVES_COUNTED = 20


class TensorHistogram:
    """The values of one tensor over all batches.

    Args:
        name: of the tensor, for messages.
        method: "minmax", "percentile", "entropy" or "mse".
        percentile: of the values that are inside of the range, 50..100, for "percentile".
    """

    def __init__(self, name: str, method: str, percentile: float = 99.99) -> None:
        self._name = name
        self._method = method
        self._percentile = percentile
        self._low = self._high = 0.0
        # The extremes alone cost a tenth of the time.
        self._counts = np.zeros(_BINS if method != "minmax" else 0, np.int64)

    def add(self, values: Array) -> None:
        """Count a batch of numbers of any shape.

        Raises:
            BuildError: one of them is NaN or infinite, also as FP32.
        """
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(values, np.float32).ravel()
        if not flat.size:
            return
        low, high = float(np.min(flat)), float(np.max(flat))
        if not (np.isfinite(low) and np.isfinite(high)):
            cure = "look at the samples, or keep the node that reads it in floating point (calibration.keep)"
            raise BuildError(f"tensor '{self._name}' holds NaN or infinity when the model runs on the samples: {cure}")
        self._low, self._high = min(self._low, low), max(self._high, high)
        if not self._counts.size:
            return
        bits = flat.view(np.uint32)
        for start in range(0, len(bits), _PIECE):
            bins = (bits[start : start + _PIECE] & 0x7FFFFFFF) >> _DROPPED_BITS
            counts = np.bincount(bins)
            self._counts[: len(counts)] += counts

    def range(self) -> Range:
        """(low, high), with 0 in it; (0, 0) where there was nothing but zeros."""
        if not self._counts.size:
            return self._low, self._high
        threshold = self._threshold()
        return max(self._low, -threshold), min(self._high, threshold)

    def _threshold(self) -> float:
        used = np.flatnonzero(self._counts)
        if not used.size or not used[-1]:
            return max(self._high, -self._low)
        counts = self._counts[: used[-1] + 1].astype(np.float64)
        # The lower edge of every bin, and the upper one of the last.
        edges = (np.arange(len(counts) + 1, dtype=np.uint32) << _DROPPED_BITS).view(np.float32).astype(np.float64)
        edges[-1] = min(edges[-1], float(np.finfo(np.float32).max))
        if self._method == "percentile":
            return _by_percentile(counts, edges, self._percentile)
        # Zeros are exact at any scale and do not count for it; there are many behind a ReLU.
        counts[0] = 0.0
        if self._method == "mse":
            return _by_mse(counts, edges)
        return _by_entropy(counts, edges)


def _by_percentile(counts: Floats, edges: Floats, percentile: float) -> float:
    """The upper edge of the bin that fills the percentage."""
    below = np.cumsum(counts)
    index = int(np.searchsorted(below, below[-1] * percentile / 100.0))
    return float(edges[min(index, len(counts) - 1) + 1])


def _by_mse(counts: Floats, edges: Floats) -> float:
    """Return the threshold with the least squared error in INT8; every value counts as the middle of its bin."""
    used = np.flatnonzero(counts)
    # What is far smaller than the largest value adds nothing to a squared error.
    used = used[edges[used + 1] >= edges[-1] * 2.0**-_MSE_OCTAVES_COUNTED]
    weights, values = counts[used], (edges[used] + edges[used + 1]) / 2
    below = np.cumsum(weights)
    median = values[int(np.searchsorted(below, below[-1] / 2))]
    # Where half of the values are clipped, less is never better.
    octaves = min(np.log2(edges[-1] / median), _MSE_OCTAVES)
    steps = np.arange(int(octaves * _MSE_STEPS_AN_OCTAVE) + 1)
    candidates = edges[-1] * np.exp2(-steps / _MSE_STEPS_AN_OCTAVE)
    errors = []
    for threshold in candidates:
        step = threshold / _INT8_LARGEST
        rounded = np.minimum(np.rint(values / step), _INT8_LARGEST) * step
        errors.append(float(weights @ np.square(values - rounded)))
    return float(candidates[int(np.argmin(errors))])


def _by_entropy(counts: Floats, edges: Floats) -> float:
    """TensorRT's published scheme, on a range that a few extreme values cannot stretch.

    Its bins are a 2048th of the largest value wide, and 128 of them are the least it keeps: with one value a thousand times
    larger than all others it would see them in a single bin. So what lies far beyond nearly all values is clipped first.
    """
    limit = min(float(edges[-1]), _ENTROPY_REACH * _by_percentile(counts, edges, _ENTROPY_PERCENTILE))
    below = np.concatenate([[0.0], np.cumsum(counts)])
    at = np.interp(np.linspace(0.0, limit, _ENTROPY_BINS + 1), edges, below)
    inside = np.diff(at)
    # What is smaller than one step becomes 0 or that step: its distribution carries no information, and would outweigh all else.
    inside[: _ENTROPY_BINS // _ENTROPY_LEVELS] = 0.0
    bins = _bins_of_min_divergence(inside, float(below[-1] - at[-1]))
    return limit * bins / _ENTROPY_BINS


def _bins_of_min_divergence(counts: Floats, beyond: float) -> int:
    """Return the number of bins to keep, so that INT8 diverges least from the original; the largest of equally good ones.

    Args:
        counts: [2048] values in bins of equal width, from 0.
        beyond: how many values are larger.
    """
    best, min_divergence = len(counts), np.inf
    tails = np.cumsum(counts[::-1])[::-1]
    for bins in range(len(counts), _ENTROPY_LEVELS - 1, -_ENTROPY_STEP):
        inside = counts[:bins]
        total = float(inside.sum())
        clipped = beyond + (float(tails[bins]) if bins < len(counts) else 0.0)
        if total <= 0 or clipped > _ENTROPY_CLIPPED * (total + clipped):
            break
        original = inside.copy()
        original[-1] += clipped
        # A level of INT8 covers several bins: its count is divided among those that are not empty.
        starts = np.arange(_ENTROPY_LEVELS) * bins // _ENTROPY_LEVELS
        filled = inside > 0
        shares = np.add.reduceat(inside, starts) / np.maximum(np.add.reduceat(filled.astype(np.float64), starts), 1)
        sizes = np.diff(np.append(starts, bins))
        quantized = np.where(filled, np.repeat(shares, sizes), 0.0)
        p = original / original.sum()
        q = np.maximum(quantized / total, _MIN_PROBABILITY)
        some = p > 0
        divergence = float(np.sum(p[some] * np.log(p[some] / q[some])))
        if divergence < min_divergence - _ENTROPY_TOLERANCE:
            best, min_divergence = bins, divergence
    return best


# Inner tensors of a batch are all in memory at once: a batch has as many rows as keep them below this, and at most so many.
_BATCH_BYTES = 128 << 20
_MAX_ROWS = 32


def calibrate(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    samples: Samples,
    calibration: Calibration,
    cache: Path | None,
    report: Report,
) -> dict[str, tuple[float, float]]:
    """The range of each tensor, by name.

    Args:
        model: in FP32, is not changed.
        tensors: names of inner tensors, inputs, outputs or constants of the model.
        samples: all of them are run.
        calibration: its method and percentile.
        cache: the folder where tables are kept, made if missing; None keeps none. A table serves again for the same model,
            samples, method and tensors; one that cannot be read is made anew.
        report: called with the progress.

    Returns:
        (low, high) with low <= 0 <= high; (0, 0) for a tensor that held nothing but zeros.

    Raises:
        BuildError: a tensor does not exist or held NaN or infinity, a sample cannot be read or run, or a table not written.
    """
    method = calibration.method
    names = list(dict.fromkeys(tensors))
    key = _key(model, names, samples, method, calibration.percentile)
    table = None if cache is None else cache / f"{key}.json"
    if table is not None and (stored := _read(table, key, names)) is not None:
        report(1.0, "calibrated earlier")
        return stored
    histograms = {name: TensorHistogram(name, method, calibration.percentile) for name in names}
    _fill(model, histograms, samples, report)
    ranges = {name: histogram.range() for name, histogram in histograms.items()}
    report(1.0, f"calibrated {len(ranges)} tensors")
    if table is not None:
        _write(
            table, {"recipe": RANGES_RECIPE, "key": key, "method": method, "samples": samples.origin, "ranges": ranges}
        )
    return ranges


def _fill(model: onnx.ModelProto, histograms: dict[str, TensorHistogram], samples: Samples, report: Report) -> None:
    """Run the model and count what is in its tensors."""
    constants = {constant.name: constant for constant in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    produced = {name for node in model.graph.node for name in node.output}
    unknown = [name for name in histograms if name not in produced | inputs | set(constants)]
    if unknown:
        raise BuildError(f"the model has no tensor '{unknown[0]}': calibrate the model that is quantised")
    inner = [name for name in histograms if name in produced]
    for name, histogram in histograms.items():
        if name in constants:
            histogram.add(numpy_helper.to_array(constants[name]))
    # Fusions leave the requested tensors as they are, and save the others.
    runner = OnnxRunner(model, inner)
    rows, done = 1, 0
    if samples.batched:
        first = runner.run(next(samples.head(1).batches(1)))
        rows = max(1, min(_MAX_ROWS, _BATCH_BYTES // max(sum(array.nbytes for array in first.values()), 1)))
    for batch in samples.batches(rows):
        report(done / len(samples), f"calibrating, {done} of {len(samples)} samples")
        values = {**runner.run(batch), **batch}
        for name, histogram in histograms.items():
            if name in values:
                histogram.add(values[name])
        done += len(next(iter(batch.values()))) if samples.batched else 1


def _key(model: onnx.ModelProto, names: Sequence[str], samples: Samples, method: str, percentile: float) -> str:
    parts = [RANGES_RECIPE, method, percentile if method == "percentile" else None, samples.digest, list(names)]
    digest = hashlib.sha256(json.dumps(parts).encode())
    digest.update(model.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _read(table: Path, key: str, names: Sequence[str]) -> dict[str, Range] | None:
    """The ranges of a table, None where it is missing, damaged, or another's."""
    try:
        document = json.loads(table.read_text(encoding="utf-8"))
        if document["recipe"] != RANGES_RECIPE or document["key"] != key or set(document["ranges"]) != set(names):
            return None
        ranges = {name: (float(document["ranges"][name][0]), float(document["ranges"][name][1])) for name in names}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    whole = all(low <= 0 <= high and np.isfinite(high - low) for low, high in ranges.values())
    return ranges if whole else None


def _write(table: Path, document: dict[str, Any]) -> None:
    """Written beside and moved into place: builders that race leave one whole table."""
    temporary = ""
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".table.", dir=table.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1)
        Path(temporary).replace(table)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        cure = "make room or choose another folder with --cache DIR"
        raise BuildError(f"the calibration table cannot be kept in {table.parent}: {error.strerror}: {cure}") from error
