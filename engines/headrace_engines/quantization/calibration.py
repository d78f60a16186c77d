"""Measures the ranges of tensors by running the FP32 model on samples; tables of ranges are cached in files.

Each tensor has a histogram. Its bins are the floats with 8 bits of mantissa: 256 per octave, from the smallest number to the
largest. So the range need not be known before, a single huge value costs no resolution, and the counts do not depend on the
batches. A method returns a threshold that clips absolute values: INT8 with a zero point of 0 uses the larger side, UINT8 both.

    minmax       no clipping
    percentile   the given share of the values is inside the range
    entropy      minimal Kullback-Leibler divergence, as TensorRT defines it
    mse          minimal mean squared error of INT8
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from headrace.config.files import write_durably
from headrace.config.optimization_config import Calibration
from onnx import numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import OnnxRunner
from headrace_engines.progress import Report
from headrace_engines.quantization.samples import Samples

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Range = tuple[float, float]
# Increased when equal samples lead to other ranges than before; tables and artefacts are then built again.
RANGES_RECIPE = 1
# The bin of an FP32 number is its bits without the sign and the lower 15 of its 23 bits of mantissa.
_DROPPED_BITS = 15
_BINS = 0x7F800000 >> _DROPPED_BITS
# Values are counted in pieces of this size, which fit into the processor's cache.
_PIECE = 1 << 16
# Migacz, "8-bit Inference with TensorRT" (NVIDIA, GTC 2017): 2048 bins, 128 levels of INT8, thresholds from 128 bins on.
_ENTROPY_BINS = 2048
_ENTROPY_LEVELS = 128
_ENTROPY_STEP = 16
# The bins cover at most this multiple of the percentile below.
_ENTROPY_REACH = 4.0
_ENTROPY_PERCENTILE = 99.99
# Largest clipped share: with a few discrete values a threshold between them costs no divergence.
_ENTROPY_CLIPPED = 0.01
# Smaller differences are rounding errors.
_ENTROPY_TOLERANCE = 1e-9
# Lower bound of a probability: the divergence from an empty bin of the quantised distribution would be infinite.
_MIN_PROBABILITY = 1e-12
_INT8_LARGEST = 127
_MSE_STEPS_AN_OCTAVE = 16
_MSE_OCTAVES = 12
_MSE_OCTAVES_COUNTED = 20


class TensorHistogram:
    """Histogram of one tensor over all batches.

    Args:
        name: name of the tensor, for messages.
        method: "minmax", "percentile", "entropy" or "mse".
        percentile: percentage of the values inside the range, 50..100, for "percentile".
    """

    def __init__(self, name: str, method: str, percentile: float = 99.99) -> None:
        self._name = name
        self._method = method
        self._percentile = percentile
        self._low = self._high = 0.0
        # Minimum and maximum alone take a tenth of the time.
        self._counts = np.zeros(_BINS if method != "minmax" else 0, np.int64)

    def add(self, values: Array) -> None:
        """Add numbers of any shape.

        Raises:
            BuildError: a number is NaN or infinite, also after conversion to FP32.
        """
        with np.errstate(over="ignore"):
            flat = np.ascontiguousarray(values, np.float32).ravel()
        if not flat.size:
            return
        low, high = float(np.min(flat)), float(np.max(flat))
        if not (np.isfinite(low) and np.isfinite(high)):
            cure = "check the samples, or keep the node that reads it in floating point (calibration.keep)"
            raise BuildError(
                f"tensor '{self._name}' has NaN or infinite values when the model runs on the samples: {cure}"
            )
        self._low, self._high = min(self._low, low), max(self._high, high)
        if not self._counts.size:
            return
        bits = flat.view(np.uint32)
        for start in range(0, len(bits), _PIECE):
            bins = (bits[start : start + _PIECE] & 0x7FFFFFFF) >> _DROPPED_BITS
            counts = np.bincount(bins)
            self._counts[: len(counts)] += counts

    def range(self) -> Range:
        """Return (low, high) with low <= 0 <= high; (0, 0) if all values were zero."""
        if not self._counts.size:
            return self._low, self._high
        threshold = self._threshold()
        return max(self._low, -threshold), min(self._high, threshold)

    def _threshold(self) -> float:
        used = np.flatnonzero(self._counts)
        if not used.size or not used[-1]:
            return max(self._high, -self._low)
        counts = self._counts[: used[-1] + 1].astype(np.float64)
        # Lower edge of every bin, and upper edge of the last one.
        edges = (np.arange(len(counts) + 1, dtype=np.uint32) << _DROPPED_BITS).view(np.float32).astype(np.float64)
        edges[-1] = min(edges[-1], float(np.finfo(np.float32).max))
        if self._method == "percentile":
            return _by_percentile(counts, edges, self._percentile)
        # Zeros are exact at any scale and do not count; a ReLU produces many.
        counts[0] = 0.0
        if self._method == "mse":
            return _by_mse(counts, edges)
        return _by_entropy(counts, edges)


def _by_percentile(counts: Floats, edges: Floats, percentile: float) -> float:
    """Return the upper edge of the bin at the percentile."""
    below = np.cumsum(counts)
    index = int(np.searchsorted(below, below[-1] * percentile / 100.0))
    return float(edges[min(index, len(counts) - 1) + 1])


def _by_mse(counts: Floats, edges: Floats) -> float:
    """Return the threshold with minimal squared error in INT8; every value counts as the middle of its bin."""
    used = np.flatnonzero(counts)
    # Values far below the largest one contribute nothing to the squared error.
    used = used[edges[used + 1] >= edges[-1] * 2.0**-_MSE_OCTAVES_COUNTED]
    weights, values = counts[used], (edges[used] + edges[used + 1]) / 2
    below = np.cumsum(weights)
    median = values[int(np.searchsorted(below, below[-1] / 2))]
    # No smaller threshold is better once half of the values are clipped.
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
    """Return the threshold of TensorRT's published scheme, on a range without extreme values.

    Its bins have a 2048th of the width of the largest value, and it keeps at least 128 of them: with one value a thousand times
    larger than all others, the others would share a single bin. So values far beyond a high percentile are clipped first.
    """
    limit = min(float(edges[-1]), _ENTROPY_REACH * _by_percentile(counts, edges, _ENTROPY_PERCENTILE))
    below = np.concatenate([[0.0], np.cumsum(counts)])
    at = np.interp(np.linspace(0.0, limit, _ENTROPY_BINS + 1), edges, below)
    inside = np.diff(at)
    # Values below one step become 0 or that step: their distribution has no information, and would dominate.
    inside[: _ENTROPY_BINS // _ENTROPY_LEVELS] = 0.0
    bins = _bins_of_min_divergence(inside, float(below[-1] - at[-1]))
    return limit * bins / _ENTROPY_BINS


def _bins_of_min_divergence(counts: Floats, beyond: float) -> int:
    """Return the number of bins for which INT8 has the smallest divergence from the original; the largest of equal ones.

    Args:
        counts: number of values in bins of equal width from 0, FP64 [2048].
        beyond: number of larger values.
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
        # A level of INT8 covers several bins: its count is divided among the non-empty ones.
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


# All inner tensors of a batch are in memory at once: limits on their size and on the rows of a batch.
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
    """Measure the range of each tensor.

    Args:
        model: FP32; not changed.
        tensors: names of inner tensors, inputs, outputs or constants of the model.
        samples: samples to run, all of them.
        calibration: method and percentile.
        cache: folder of cached tables, created if missing; None for no cache. A table is reused for the same model, samples,
            method and tensors; an unreadable one is measured again.
        report: called with the progress.

    Returns:
        (low, high) by name with low <= 0 <= high; (0, 0) for a tensor of zeros.

    Raises:
        BuildError: a tensor does not exist or has NaN or infinite values, a sample fails, or a table cannot be written.
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
    """Run the model and add the values of its tensors to the histograms."""
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
    # Fusions do not change the requested tensors, and skip others.
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
    """Return the ranges of a table; None if it is missing, damaged, or of another key."""
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
    """Replace the table at once, so that concurrent builders leave a complete one."""
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        write_durably(table, json.dumps(document, indent=1).encode())
    except OSError as error:
        cure = "make room or choose another folder with --cache DIR"
        raise BuildError(
            f"the calibration table cannot be written to {table.parent}: {error.strerror}: {cure}"
        ) from error
