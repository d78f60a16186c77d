"""Ranges of tensors, found by running the FP32 model on samples; a table that was found once is kept."""

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
from onnx import numpy_helper

from engines.errors import BuildError
from engines.onnx_runner import OnnxRunner
from engines.progress import Report
from engines.quantization.ranges import RECIPE, Range, TensorHistogram
from engines.quantization.samples import Samples
from server.core.optimization_config import Calibration

Array = npt.NDArray[Any]

# Inner tensors of a batch are all in memory at once: a batch has as many rows as keep them below this, and at most so many.
_BATCH_BYTES = 128 << 20
_MOST_ROWS = 32


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
        calibration: its method ("tensorrt" counts as "entropy", which is what TensorRT's calibrator does) and percentile.
        cache: the folder where tables are kept, made if missing; None keeps none. A table serves again for the same model,
            samples, method and tensors; one that cannot be read is made anew.
        report: told how far it is.

    Returns:
        (low, high) with low <= 0 <= high; (0, 0) for a tensor that held nothing but zeros.

    Raises:
        BuildError: a tensor does not exist or held NaN or infinity, a sample cannot be read or run, or a table not written.
    """
    method = "entropy" if calibration.method == "tensorrt" else calibration.method
    names = list(dict.fromkeys(tensors))
    key = _key(model, names, samples, method, calibration.percentile)
    table = None if cache is None else cache / f"{key}.json"
    if table is not None and (known := _read(table, key, names)) is not None:
        report(1.0, "calibrated earlier")
        return known
    histograms = {name: TensorHistogram(name, method, calibration.percentile) for name in names}
    _fill(model, histograms, samples, report)
    ranges = {name: histogram.range() for name, histogram in histograms.items()}
    report(1.0, f"calibrated {len(ranges)} tensors")
    if table is not None:
        _write(table, {"recipe": RECIPE, "key": key, "method": method, "samples": samples.origin, "ranges": ranges})
    return ranges


def _fill(model: onnx.ModelProto, histograms: dict[str, TensorHistogram], samples: Samples, report: Report) -> None:
    """Run the model and count what is in its tensors."""
    constants = {constant.name: constant for constant in model.graph.initializer}
    inputs = {value.name for value in model.graph.input}
    made = {name for node in model.graph.node for name in node.output}
    unknown = [name for name in histograms if name not in made | inputs | set(constants)]
    if unknown:
        raise BuildError(f"the model has no tensor '{unknown[0]}': calibrate the model that is quantised")
    inner = [name for name in histograms if name in made]
    for name, histogram in histograms.items():
        if name in constants:
            histogram.add(numpy_helper.to_array(constants[name]))
    # Fusions leave the tensors asked for as they are, and save the others.
    runner = OnnxRunner(model, inner)
    rows, done = 1, 0
    if samples.batched:
        first = runner.run(next(samples.head(1).batches(1)))
        rows = max(1, min(_MOST_ROWS, _BATCH_BYTES // max(sum(array.nbytes for array in first.values()), 1)))
    for batch in samples.batches(rows):
        report(done / len(samples), f"calibrating, {done} of {len(samples)} samples")
        found = {**runner.run(batch), **batch}
        for name, histogram in histograms.items():
            if name in found:
                histogram.add(found[name])
        done += len(next(iter(batch.values()))) if samples.batched else 1


def _key(model: onnx.ModelProto, names: Sequence[str], samples: Samples, method: str, percentile: float) -> str:
    told = [RECIPE, method, percentile if method == "percentile" else None, samples.digest, list(names)]
    digest = hashlib.sha256(json.dumps(told).encode())
    digest.update(model.SerializeToString(deterministic=True))
    return digest.hexdigest()


def _read(table: Path, key: str, names: Sequence[str]) -> dict[str, Range] | None:
    """The ranges of a table, None where it is missing, damaged, or another's."""
    try:
        told = json.loads(table.read_text(encoding="utf-8"))
        if told["recipe"] != RECIPE or told["key"] != key or set(told["ranges"]) != set(names):
            return None
        ranges = {name: (float(told["ranges"][name][0]), float(told["ranges"][name][1])) for name in names}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    whole = all(low <= 0 <= high and np.isfinite(high - low) for low, high in ranges.values())
    return ranges if whole else None


def _write(table: Path, told: dict[str, Any]) -> None:
    """Written beside and moved into place: builders that race leave one whole table."""
    temporary = ""
    try:
        table.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".table.", dir=table.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(told, stream, indent=1)
        Path(temporary).replace(table)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        cure = "make room or choose another place with --cache DIR"
        raise BuildError(f"the calibration table cannot be kept in {table.parent}: {error.strerror}: {cure}") from error
