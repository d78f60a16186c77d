"""Accuracy of an artefact against the FP32 model on the same samples, and the limits that it must hold.

    top-1 agreement     share of samples with the same top class. The output is the one with a label file, else the first
        floating-point output with classes along its last axis: [N, classes], or [N, positions, classes] of sequences, where
        every position counts. Without such an output: the share of equal values in the first output of integers, booleans
        or text. Without either: None.
    cosine              cosine similarity of the outputs of a sample, mean over samples; the worst floating-point output counts
    max abs             largest absolute difference of a value in any floating-point output
    accuracy            share of samples whose top class is the label; needs labels and one result per sample

Values that are infinite or NaN in the FP32 model's output are left out. Values that are so only in the artefact's output are a
failure: cosine 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from headrace_engines.errors import BuildError
from headrace_engines.progress import Report
from headrace_engines.project import AccuracyLimits
from headrace_engines.quantization.samples import Samples
from headrace_engines.targets.base import ModelRunner

Array = npt.NDArray[Any]
_CURE = "use a higher precision, or lower the limit in optimization.accuracy"
_QUANTIZED_CURE = (
    "keep the layers that lose most in floating point (optimization.calibration.keep), calibrate with more samples like "
    "those of production, or use a higher precision"
)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Measured difference between an artefact and the FP32 model.

    Attributes:
        samples: number of compared samples.
        data: name and number of the samples, for messages.
        top1_agreement: 0..1; None if no output has classes.
        cosine: -1..1, mean over samples, of the worst output.
        max_abs: largest absolute difference.
        accuracy: accuracy of the artefact against labels, 0..1; None without labels.
        reference_accuracy: accuracy of the FP32 model, 0..1; None without labels.
        output: name of the output that agreement and accuracy are measured on; "" for none.
        problem: reason why the outputs cannot be compared; "" if they can.
    """

    samples: int
    data: str
    top1_agreement: float | None
    cosine: float
    max_abs: float
    accuracy: float | None = None
    reference_accuracy: float | None = None
    output: str = ""
    problem: str = ""

    @property
    def drop(self) -> float | None:
        """Lost accuracy, negative for a gain; None without labels."""
        if self.accuracy is None or self.reference_accuracy is None:
            return None
        return self.reference_accuracy - self.accuracy

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read the result of `to_json`; unknown keys are ignored.

        Raises:
            BuildError: a key is missing.
        """
        try:
            return cls(**{f.name: document[f.name] for f in fields(cls) if f.name in document})
        except TypeError as error:
            raise BuildError(
                f"the stored accuracy of an artefact cannot be read ({error}): build it again with --rebuild"
            ) from error


def measure(
    reference: ModelRunner, engine: ModelRunner, samples: Samples, rows: int, report: Report, *, output: str = ""
) -> Accuracy:
    """Run two models on all samples and compare their outputs.

    Args:
        reference: the FP32 model.
        engine: the artefact.
        samples: held out from calibration.
        rows: largest batch size.
        report: called after every batch.
        output: name of the output with classes; "" to search for it.

    Raises:
        BuildError: there are no samples, or a sample does not run.
    """
    if not len(samples):
        raise BuildError("there are no samples to compare with: name some in optimization.accuracy.data")
    comparison = _Comparison(samples.labels, output or None)
    for inputs in samples.batches(rows):
        count = len(next(iter(inputs.values()))) if samples.batched else 1
        comparison.add(reference.run(inputs), engine.run(inputs), count)
        report(comparison.samples / len(samples), f"comparing with FP32, {comparison.samples} of {len(samples)}")
    return comparison.accuracy(samples.origin)


def judge(accuracy: Accuracy, bar: AccuracyLimits, *, quantized: bool = True, cure: str = "") -> list[str]:
    """Return a sentence with measured and required value for each missed limit; the last one has the remedy.

    Args:
        accuracy: measured accuracy.
        bar: required accuracy.
        quantized: the artefact is INT8 or FP8: the remedy names further options.
        cure: replaces the remedy; "" for that of builds.
    """
    missed = [accuracy.problem] if accuracy.problem else []
    agreement = accuracy.top1_agreement
    if agreement is not None and agreement < bar.min_top1_agreement:
        missed.append(f"its top-1 agreement with FP32 is {agreement:.2%}, {bar.min_top1_agreement:.2%} is required")
    if not accuracy.cosine >= bar.min_cosine:  # true for NaN, too
        missed.append(f"the cosine with FP32's outputs is {accuracy.cosine:.5f}, {bar.min_cosine:.5f} is required")
    drop = accuracy.drop
    if drop is not None and bar.max_drop is not None and drop > bar.max_drop + 1e-12:
        now, before = accuracy.accuracy or 0.0, accuracy.reference_accuracy or 0.0
        missed.append(
            f"its accuracy is {now:.2%}, that of FP32 is {before:.2%}: {drop:.2%} lost, {bar.max_drop:.2%} allowed"
        )
    if missed:
        missed[-1] += f": {cure or (_QUANTIZED_CURE if quantized else _CURE)}"
    if drop is None and bar.max_drop is not None:
        cure = "give samples with labels in optimization.accuracy.data, or leave max_drop out"
        missed.append(f"max_drop is set, but the lost accuracy cannot be measured without labels: {cure}")
    return missed


@dataclass(slots=True)
class _Comparison:
    """Running sums over the compared samples."""

    labels: Array | None
    chosen: str | None = None
    samples: int = 0
    # By floating-point output the sum of its cosines, and their number.
    outputs: dict[str, tuple[float, int]] = field(default_factory=dict)
    same: int = 0
    compared: int = 0
    right: int = 0
    reference_right: int = 0
    labelled: int = 0
    max_abs: float = 0.0
    problem: str = ""

    def add(self, expected: Mapping[str, Array], actual: Mapping[str, Array], count: int) -> None:
        """Add a batch of `count` samples."""
        first, self.samples = self.samples, self.samples + count
        expected_rows = {name: rows_of_output(array, count) for name, array in expected.items()}
        for name, rows in expected_rows.items():
            output = actual.get(name)
            if output is None or output.shape != expected[name].shape:
                shape = "is missing" if output is None else f"has shape {list(output.shape)}"
                self.problem = self.problem or f"output {name} {shape}, FP32's has {list(expected[name].shape)}"
            elif rows.dtype.kind == "f":
                self._add_floats(name, rows, output.reshape(rows.shape))
        if self.chosen is None or self.chosen not in expected_rows:
            self.chosen = _with_classes(expected_rows)
        if self.chosen in expected_rows and not self.problem:
            rows = expected_rows[self.chosen]
            self._add_classes(rows, actual[self.chosen].reshape(rows.shape), first)

    def _add_floats(self, name: str, expected: Array, actual: Array) -> None:
        finite = np.isfinite(expected)
        broken = int(np.count_nonzero(~np.isfinite(actual) & finite))
        if broken:
            self.problem = (
                self.problem or f"output {name} has {broken} values that are NaN or infinite, FP32's has none there"
            )
            return
        if not finite.any():
            problem = (
                f"output {name} of the FP32 model itself is NaN or infinite throughout: check the samples and the model"
            )
            self.problem = self.problem or problem
            return
        a = np.where(finite, expected, 0).reshape(len(expected), -1).astype(np.float64)
        b = np.where(finite, actual, 0).reshape(len(actual), -1).astype(np.float64)
        self.max_abs = max(self.max_abs, float(np.abs(a - b).max(initial=0.0)))
        sum_of_cosines, count = self.outputs.get(name, (0.0, 0))
        self.outputs[name] = sum_of_cosines + float(cosines(a, b).sum()), count + len(a)

    def _add_classes(self, expected: Array, actual: Array, first: int) -> None:
        if expected.dtype.kind != "f":
            self.same += int(np.count_nonzero(expected == actual))
            self.compared += expected.size
            return
        expected_classes, classes = expected.argmax(-1), actual.argmax(-1)
        self.same += int(np.count_nonzero(expected_classes == classes))
        self.compared += expected_classes.size
        if self.labels is not None and expected_classes.ndim == 1:
            labels = self.labels[first : first + len(expected_classes)]
            self.labelled += len(labels)
            self.right += int(np.count_nonzero(classes == labels))
            self.reference_right += int(np.count_nonzero(expected_classes == labels))

    def accuracy(self, data: str) -> Accuracy:
        """Return the accuracy over all added samples."""
        cosine = min((total / count for total, count in self.outputs.values()), default=1.0)
        agreement = self.same / self.compared if self.compared else None
        labelled = bool(self.labelled) and not self.problem
        return Accuracy(
            samples=self.samples,
            data=data,
            top1_agreement=0.0 if self.problem and self.chosen else agreement,
            cosine=0.0 if self.problem else cosine,
            max_abs=self.max_abs,
            accuracy=self.right / self.labelled if labelled else None,
            reference_accuracy=self.reference_right / self.labelled if labelled else None,
            output=self.chosen or "",
            problem=self.problem,
        )


def rows_of_output(array: Array, count: int) -> Array:
    """Return [samples, ...]; an output without a batch dimension is one row."""
    return array if array.ndim and len(array) == count else array[np.newaxis]


def _with_classes(rows: Mapping[str, Array]) -> str:
    for name, array in rows.items():
        if array.dtype.kind == "f" and array.ndim in (2, 3) and array.shape[-1] > 1:
            return name
    return next((name for name, array in rows.items() if array.dtype.kind in "iubOSU" and array.ndim > 0), "")


def cosines(a: Array, b: Array) -> Array:
    """Return the cosine of every row of [rows, values]; 1 where both are zero, 0 where one is."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    products = np.einsum("ij,ij->i", a, b)
    same: Array = np.array(~a.any(axis=1) & ~b.any(axis=1), np.float64)
    quotients: Array = np.clip(np.divide(products, lengths, out=same, where=lengths > 0), -1.0, 1.0)
    return quotients
