"""Comparison of an imported model with its framework, and of the rows of a batch with single runs.

Errors are relative to the largest value of an output in a case. The bounds are those of rounding: operators of two frameworks sum
in another order, about 1e-6 in FP32. The two forms of GELU, one of the smallest mistakes of an export, differ by more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_engines.errors import BuildError
from headrace_engines.importers.cases import Case
from headrace_engines.importers.programs.exchange import storable

Array = npt.NDArray[Any]
Run = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class Bound:
    """Largest accepted errors of an output, relative to its largest value.

    Attributes:
        largest: of a single element.
        mean: mean over all elements of a case.
    """

    largest: float
    mean: float


# By the type of the output's elements.
BOUNDS: dict[str, Bound] = {
    "float64": Bound(1e-8, 1e-9),
    "float32": Bound(1e-4, 1e-5),
    "float16": Bound(2e-2, 2e-3),
}
# Integers, booleans and text: the error is the share of elements that differ. One in a thousand may: two frameworks order nearly
# equal scores in another way.
EXACT = Bound(1e-3, 1e-3)
# A comparison covers the layers of a model if its output varies by this multiple of the bound.
_MIN_VARIATION = 100.0


@dataclass(slots=True)
class OutputErrors:
    """Errors of one output over all cases.

    Attributes:
        name: name of the output.
        dtype: NumPy type of its elements.
        bound: largest accepted errors.
        largest, mean: largest error of an element, and largest mean error of a case, relative to the largest value.
        absolute: largest error of an element.
        worst: case with the largest error.
        rows_largest, rows_mean: errors of the rows of a batch against their single runs, in the same way.
        variation: largest difference between the framework's outputs for two inputs, relative to the largest value. An output
            that hardly depends on the input says little about the layers before it.
        elements: compared elements.
        finite: compared elements that are finite in the framework.
    """

    name: str
    dtype: str
    bound: Bound
    largest: float = 0.0
    mean: float = 0.0
    absolute: float = 0.0
    worst: str = ""
    rows_largest: float = 0.0
    rows_mean: float = 0.0
    variation: float = 0.0
    elements: int = 0
    finite: int = 0

    @property
    def is_close(self) -> bool:
        """Whether the outputs of the frameworks are within the bound."""
        return self.largest <= self.bound.largest and self.mean <= self.bound.mean

    @property
    def is_sensitive(self) -> bool:
        """Whether the output depends on the input by much more than the bound."""
        return self.variation > _MIN_VARIATION * self.bound.largest

    @property
    def has_own_rows(self) -> bool:
        """Whether each row of a batch equals its single run."""
        return self.rows_largest <= self.bound.largest and self.rows_mean <= self.bound.mean


@dataclass(slots=True)
class ImportCheck:
    """Result of the comparison.

    Attributes:
        outputs: errors by output.
        cases: names of the compared cases.
        skipped: cases with other sizes that the framework itself refuses, with its reason.
        faults: reasons why the model may not be published.
        refused_outputs: names of outputs with another shape or type.
    """

    outputs: dict[str, OutputErrors] = field(default_factory=dict)
    cases: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    refused_outputs: list[str] = field(default_factory=list)

    @property
    def has_passed(self) -> bool:
        """Whether the model may be published."""
        return not self.faults

    @property
    def warnings(self) -> list[str]:
        """Outputs of which the comparison says little."""
        return [
            f"output {output.name} varies by only {output.variation:.1g} of its largest value over these inputs: the comparison "
            "says little about the layers before it; name inputs of the real kind with --samples"
            for output in self.outputs.values()
            if not output.is_sensitive and output.finite
        ]

    def refuse_output(self, name: str, fault: str) -> None:
        """Add a fault of an output's shape or type; the first one of an output counts.

        Args:
            name: name of the output.
            fault: the fault.
        """
        if name not in self.refused_outputs:
            self.refused_outputs.append(name)
            self.faults.append(fault)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object; errors are relative to the largest value of the output in a case."""
        return {
            "passed": self.has_passed,
            "faults": self.faults,
            "cases": self.cases,
            "skipped": self.skipped,
            "warnings": self.warnings,
            "outputs": [
                {**asdict(output), "close": output.is_close, "rows_independent": output.has_own_rows}
                for output in self.outputs.values()
            ],
        }


def compare(cases: Iterable[Case], reference: Run, imported: Run, note: Callable[[str], None]) -> ImportCheck:
    """Run all cases in both, and every batch row by row.

    Args:
        cases: inputs.
        reference: runs the model in its framework.
        imported: runs the ONNX model.
        note: called with the name of each case.

    Returns:
        The result. An error of ONNX Runtime is a fault.

    Raises:
        BuildError: the framework fails on inputs of the example's sizes, or on samples.
    """
    check = ImportCheck()
    first_rows: dict[str, Array] = {}
    for case in cases:
        note(case.name)
        try:
            expected = reference(case.inputs)
        except BuildError as error:
            if not case.has_other_sizes:
                raise BuildError(f"the model fails in its framework on {case.name}: {error}") from error
            check.skipped.append(f"{case.name}: the framework refuses them: {error}")
            break  # the process with the framework has ended; this case is the last one
        check.cases.append(case.name)
        try:
            actual = imported(case.inputs)
        except BuildError as error:
            check.faults.append(f"the imported model fails on {case.name}, the framework does not: {error}")
            break
        _compare_case(check, case, expected, actual)
        _note_variation(check, case, expected, first_rows)
        if case.rows > 1:
            _compare_rows(check, case, actual, imported)
    _judge(check)
    return check


def _note_variation(
    check: ImportCheck, case: Case, expected: Mapping[str, Array], first_rows: dict[str, Array]
) -> None:
    """Note the differences of all rows from the first one; without a batch, of the cases from the first one."""
    for name, array in expected.items():
        rows = array if case.rows and array.ndim else array[None]
        first = first_rows.setdefault(name, rows[:1])
        if not rows.size or first.shape[1:] != rows.shape[1:]:
            continue
        output = check.outputs[name]
        output.variation = max(output.variation, _errors(rows, np.broadcast_to(first, rows.shape))[1])


def _compare_case(check: ImportCheck, case: Case, expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
    for name, wanted in expected.items():
        found = storable(actual[name])
        bound = BOUNDS.get(str(wanted.dtype), EXACT)
        output = check.outputs.setdefault(name, OutputErrors(name, _kind(wanted), bound))
        if wanted.shape != found.shape or _kind(wanted) != _kind(found):
            check.refuse_output(
                name,
                f"output {name} is {found.dtype} {list(found.shape)} on {case.name}, in the framework {wanted.dtype} "
                f"{list(wanted.shape)}",
            )
            continue
        absolute, largest, mean = _errors(wanted, found)
        output.elements += wanted.size
        output.finite += int(np.isfinite(wanted).sum()) if wanted.dtype.kind == "f" else wanted.size
        output.absolute = max(output.absolute, absolute)
        output.mean = max(output.mean, mean)
        if largest > output.largest or not output.worst:
            output.largest, output.worst = largest, case.name


def _compare_rows(check: ImportCheck, case: Case, batch: Mapping[str, Array], imported: Run) -> None:
    singles = [imported({n: a[row : row + 1] for n, a in case.inputs.items()}) for row in range(case.rows)]
    for name, array in batch.items():
        rows = [single[name] for single in singles]
        if array.shape[:1] != (case.rows,) or any(row.shape != (1, *array.shape[1:]) for row in rows):
            check.refuse_output(
                name,
                f"output {name} has the shape {list(array.shape)} for {case.rows} rows, and {list(rows[0].shape)} for one: its "
                "first dimension is no batch, or other sizes depend on the values",
            )
            continue
        output = check.outputs[name]
        _, largest, mean = _errors(storable(np.concatenate(rows)), storable(array))
        output.rows_largest, output.rows_mean = max(output.rows_largest, largest), max(output.rows_mean, mean)


def _judge(check: ImportCheck) -> None:
    for output in check.outputs.values():
        if not output.is_close:
            check.faults.append(
                f"output {output.name} differs from the framework: largest error {output.largest:.2g} (bound "
                f"{output.bound.largest:g}), mean {output.mean:.2g} (bound {output.bound.mean:g}) of its largest value, on "
                f"{output.worst}"
            )
        if not output.has_own_rows:
            check.faults.append(
                f"a row of output {output.name} depends on the other rows of its batch (error {output.rows_largest:.2g}, bound "
                f"{output.bound.largest:g}): such a model cannot be batched"
            )
        if output.elements and not output.finite:
            check.faults.append(
                f"output {output.name} is NaN or infinite in the framework for all inputs: nothing was compared"
            )
    if check.outputs and not check.faults and not any(output.variation for output in check.outputs.values()):
        check.faults.append(
            "no output depends on these inputs, so nothing was compared: name inputs of the real kind with --samples"
        )
    if not check.cases:
        check.faults.append("no case was compared")


def _kind(array: Array) -> str:
    return "text" if array.dtype.kind in "SUO" else str(array.dtype)


def _errors(wanted: Array, found: Array) -> tuple[float, float, float]:
    """Return the largest absolute error, and the largest and mean error relative to the largest value of `wanted`.

    NaN equals NaN, and an infinity equals the same; any other difference of these is an infinite error.
    """
    if not wanted.size:
        return 0.0, 0.0, 0.0
    if wanted.dtype.kind != "f":
        share = float(np.mean(wanted != found))
        return share, share, share
    left, right = wanted.astype(np.float64), found.astype(np.float64)
    with np.errstate(invalid="ignore"):
        differences = np.abs(left - right)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    differences = np.where(same, 0.0, np.where(np.isfinite(differences), differences, np.inf))
    finite = np.abs(left[np.isfinite(left)])
    scale = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    return float(differences.max()), float(differences.max()) / scale, float(differences.mean()) / scale
