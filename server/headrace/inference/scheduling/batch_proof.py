"""Tests whether batching changes an answer: rows of a batch against the same rows in other batches, and alone.

`BatchTests` runs three tests of a batch size over any function that runs a batch:

    influence    the other rows are replaced by other values, NaN and the largest number: a row stays equal to the bit
    position     a row has the same outputs at every place of a batch, and beside other rows
    alone        a row has the outputs of the same row run alone, and its class, unless two classes are as near as the bound

A replaced row never changes the place of a row, so a deterministic kernel returns equal bits. Where repeated runs of one batch
differ, their spread is allowed. Position and alone have a wider bound: kernels add in another order for another size or place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headrace.core.clock import Clock, monotonic_ns
from headrace.core.tensor import BF16, Array, Datatype, bf16_values
from headrace.runtimes.base import ExecutionLost

Row = Mapping[str, Array]
"""Inputs or outputs of one row by name, each of shape (1, ...)."""
RunBatch = Callable[[Sequence[Row]], Sequence[Row]]
"""Runs rows as one batch and returns the outputs of each, in order."""

# Rows beside a reference that differ by up to this multiple of the model's own difference to it.
_REFERENCE_FACTOR = 3.0
# Steps of an output's datatype by which kernels may differ.
_STEPS = 4
# Runs of the same batch that measure its spread, and the allowed multiple of that.
_REPEATS = 3
_SPREAD_FACTOR = 2.0
# Runs of a batch in `check`.
_RUNS = 3
# Of live rows, whole numbers are compared only where rounding is as small as in FP32 on a CPU.
_EXACT_FLOOR = 1e-5
_MIN_ROWS = 2


@dataclass(frozen=True, slots=True)
class BatchVerdict:
    """Batch sizes of a version that are proven.

    Attributes:
        verified: proven batch sizes in rows, ascending.
        faults: reason by batch size that is not proven.
        alone: True if each request runs alone and whole.
        allowed: numbers of rows that may run, ascending; () for all.
        reason: why requests run alone, sizes are not used, or nothing was tested; "" if there is no such reason.
    """

    verified: tuple[int, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    alone: bool = False
    allowed: tuple[int, ...] = ()
    reason: str = ""

    @property
    def state(self) -> str:
        """Return "proven", "partial", "alone", "limited", "warned" or "untested"."""
        if self.alone:
            return "alone"
        if self.allowed:
            return "limited"
        if self.faults:
            return "warned"
        if self.verified:
            return "partial" if self.reason else "proven"
        return "untested"

    def parameters(self) -> dict[str, str | float | bool]:
        """Return the metadata of a version; empty if nothing was tested."""
        parameters: dict[str, str | float | bool] = {}
        if self.verified:
            parameters["headrace.verified_batches"] = ", ".join(map(str, self.verified))
            parameters["headrace.unproven_batch_sizes"] = len(self.faults)
        if self.reason:
            parameters["headrace.unproven_batches"] = self.reason
        return parameters

    def report(self) -> dict[str, object]:
        """Return the fields for `headrace explain`."""
        faults = {str(size): text for size, text in sorted(self.faults.items())}
        return {"state": self.state, "reason": self.reason, "verified_batches": list(self.verified), "faults": faults}


class ProofError(Exception):
    """The rows prove nothing: the model fails on them alone, or returns no usable outputs."""


class ProofInterrupted(BaseException):
    """A request came, or the model is being closed, while batches of an idle model were tested."""


class Fault(NamedTuple):
    """Reason why a batch size is not proven.

    Attributes:
        test: "influence", "position", "alone", "memory" or "run".
        text: description with output, row and difference.
    """

    test: str
    text: str

    def __str__(self) -> str:
        return f"{self.test}: {self.text}"


def run_rows(run: Callable[[dict[str, Array]], dict[str, Array]], outputs: Sequence[str]) -> RunBatch:
    """Return a function that runs rows by a function of joined inputs, e.g. `Execution.run`.

    Args:
        run: takes and returns arrays of shape (rows, ...).
        outputs: names of the outputs to return.
    """

    joined: dict[str, Array] = {}  # memory of earlier batches: fresh pages cost more than the copies

    def memory(name: str, rows: Sequence[Row]) -> Array:
        like, count = rows[0][name], len(rows)
        kept = joined.get(name)
        if kept is None or len(kept) < count or kept.shape[1:] != like.shape[1:]:
            kept = joined[name] = np.empty((count, *like.shape[1:]), like.dtype)
        return kept[:count]

    def run_batch(rows: Sequence[Row]) -> list[Row]:
        inputs = {name: np.concatenate([row[name] for row in rows], out=memory(name, rows)) for name in rows[0]}
        results = run(inputs)
        for name in outputs:
            if results[name].shape[:1] != (len(rows),):
                raise ProofError(f"output '{name}' has the shape {list(results[name].shape)} for {len(rows)} rows")
        return [{name: results[name][index : index + 1] for name in outputs} for index in range(len(rows))]

    return run_batch


@dataclass(eq=False, repr=False)
class BatchTests:
    """Tests batch sizes of one model with one set of rows.

    Attributes:
        run: runs a batch.
        rows: at least two different rows.
        datatypes: datatype of each input and output.
        floor: smallest bound of position and alone, as a share of an output's range, e.g. 1e-5 in FP32.
        classes: name of the output with the scores by that of an output with ranked classes; of a classifier whose scores are
            not ranked, the output itself.
        depth: batches that may be in flight, each in memory of its own, before the memory of the first is used again.
        clock: monotonic nanoseconds.
        end_ns: monotonic time after which two rows suffice; None for all rows.
        is_telling: False if all rows have equal outputs alone, so that a row at another place may go unnoticed.

    Raises:
        ProofError: the rows prove nothing.
    """

    run: RunBatch
    rows: InitVar[Sequence[Row]]
    datatypes: Mapping[str, Datatype]
    floor: float
    classes: Mapping[str, str] = field(default_factory=dict)
    depth: int = 1
    clock: Clock = monotonic_ns
    end_ns: InitVar[int | None] = None

    def __post_init__(self, rows: Sequence[Row], end_ns: int | None) -> None:
        self._random = np.random.default_rng(len(rows))
        self._alone: list[dict[str, Array]] = []
        times_ns = []
        for row in rows:
            begun_ns = self.clock()
            if len(self._alone) < _MIN_ROWS or end_ns is None or begun_ns < end_ns:
                self._alone.append(self._copies(self.run([row]))[0])
                times_ns.append(self.clock() - begun_ns)
        self._rows = rows = rows[: len(self._alone)]
        self._row_ns: float = min(times_ns)
        for output in self._alone:
            for name, values in output.items():
                if values.dtype.kind == "f" and not np.isfinite(values).all():
                    raise ProofError(f"output '{name}' of a row alone is not finite")
        first = self._alone[0]
        self._has_lengths = any(row[name].shape != values.shape for name, values in rows[0].items() for row in rows)
        self.is_telling = any(_differing(first, other) for other in self._alone[1:])
        self._bounds = {name: _bound([output[name] for output in self._alone], self.floor) for name in first}

    def refer(self, run: RunBatch) -> None:
        """Widen the bounds by the difference between the rows alone and a reference.

        Args:
            run: runs a batch of the reference, e.g. of ONNX Runtime.
        """
        for row, alone in zip(self._rows, self._alone, strict=True):
            reference = self._copies(run([row]))[0]
            for name, values in alone.items():
                own = difference(values, reference[name])
                if np.isfinite(own):
                    self._bounds[name] = max(self._bounds[name], _REFERENCE_FACTOR * own)

    def compare(self, row: Row, output: Row, size: int, place: int, reference: RunBatch | None) -> Fault | None:
        """Run a row alone; return the fault if its outputs in a batch of other requests differ, None if they are equal.

        Args:
            row: inputs of the row.
            output: its outputs in the batch.
            size: rows of the batch.
            place: index of the row in the batch.
            reference: widens the bounds as `refer` does; None for none.
        """
        alone, values_of = self._copies(self.run([row]))[0], self._copies([output])[0]
        others = None if reference is None else self._copies(reference([row]))[0]
        bounds = {}
        for name, bound in self._bounds.items():
            bounds[name] = max(bound, _bound([alone[name], *(each[name] for each in self._alone)], self.floor))
            if others is not None and np.isfinite(own := difference(alone[name], others[name])):
                bounds[name] = max(bounds[name], _REFERENCE_FACTOR * own)
        for name, values in values_of.items():
            if values.dtype.kind != "f" and name not in self.classes and self.floor > _EXACT_FLOOR:
                continue  # rounding decides which of two near values a whole number is
            text = self._differs(name, values, alone, bounds)
            # Where the row alone has other outputs each time, as of a graph with random numbers, a difference means nothing.
            if text and not self._differs(name, self._copies(self.run([row]))[0][name], alone, bounds):
                return Fault("alone", f"output '{name}' of row {place} of {size} {text}")
        return None

    def largest(self, size: int) -> list[Row]:
        """Return a batch of `size` rows, the largest first."""
        ordered = sorted(self._rows, key=lambda row: -sum(values.size for values in row.values()))
        return [ordered[index % len(ordered)] for index in range(size)]

    def estimate_ns(self, size: int) -> float:
        """Return the expected time of `check` in nanoseconds."""
        return _RUNS * size * self._row_ns

    def check(self, size: int, before: Callable[[Sequence[Row]], None] = lambda _rows: None) -> Fault | None:
        """Test a batch size; return the first fault, None if it is proven.

        Args:
            size: rows of the batch, at least 2.
            before: called before each of the batches, e.g. to fill the memory of padding rows; the argument is a row of NaN.
        """
        begun_ns = self.clock()
        try:
            fault = self._check(size, before)
        except Exception as error:
            if isinstance(error, ExecutionLost):
                raise
            return Fault("run", f"a batch of {size} rows fails: {type(error).__name__}: {error}")
        # A row of a larger batch takes less: what it took in a small one is no bound.
        self._row_ns = min(self._row_ns, (self.clock() - begun_ns) / size / _RUNS)
        return fault

    def _check(self, size: int, before: Callable[[Sequence[Row]], None]) -> Fault | None:
        drawn = self._draw(size)
        before([self._extreme(self._rows[-1], 0)])
        batch = [self._rows[index] for index in drawn]
        first = self.run(batch)
        kept = self._copies(first)
        results = [(place, index, kept[place]) for place, index in enumerate(drawn)]
        for parity in (0, 1):
            others = self._draw(size)
            mixed, indices = self._replaced(batch, drawn, others, parity)
            try:
                outputs = self._copies(self.run(mixed))
            except Exception as error:  # a model may refuse NaN: then other values replace the rows
                if isinstance(error, ExecutionLost):
                    raise
                indices = [
                    (drawn if place % 2 == parity or self._has_lengths else others)[place] for place in range(size)
                ]
                outputs = self._copies(self.run([self._rows[index] for index in indices]))
            for place in range(parity, size, 2):
                fault = self._influence(size, place, kept[place], outputs[place], batch)
                if fault is not None:
                    return fault
            results += [(place, index, outputs[place]) for place, index in enumerate(indices) if index >= 0]
        for _ in range(self.depth - 2):  # two batches have run since the first
            self.run([self._rows[drawn[0] - 1]])
        for place, (before_output, output) in enumerate(zip(kept, self._copies(first), strict=True)):
            name = _differing(before_output, output)
            if name:
                return Fault("memory", f"output '{name}' of row {place} of {size} changes when the next batch runs")
        return self._compare(size, results)

    def _draw(self, size: int) -> list[int]:
        """Return indices of rows: all rows in one order after the other, so that equal rows have no fixed distance."""
        count = len(self._rows)
        orders = [self._random.permutation(count) for _ in range(-(-size // count))]
        indices: list[int] = np.concatenate(orders)[:size].tolist()
        return indices

    def _replaced(
        self, batch: list[Row], drawn: list[int], others: list[int], parity: int
    ) -> tuple[list[Row], list[int]]:
        """Return the batch with every second row replaced, and the index of each row; -1 for NaN and the largest number."""
        rows, indices = list(batch), list(drawn)
        for number, place in enumerate(range(1 - parity, len(batch), 2)):
            kind, other = (number + parity) % 3, self._rows[others[place]]
            # A row of another length would move the rows behind it, which kernels may then add in another order.
            if kind == 2 and all(values.shape == other[name].shape for name, values in batch[place].items()):
                rows[place], indices[place] = other, others[place]
            else:
                rows[place], indices[place] = self._extreme(batch[place], kind % 2), -1
        return rows, indices

    def _extreme(self, row: Row, kind: int) -> Row:
        """Return a row with NaN (0) or the largest number (1) in place of its floats."""
        return {name: _extreme(values, self.datatypes[name], kind) for name, values in row.items()}

    def _copies(self, outputs: Sequence[Row]) -> list[dict[str, Array]]:
        return [
            {name: _decoded(values, self.datatypes.get(name)).copy() for name, values in output.items()}
            for output in outputs
        ]

    def _influence(self, size: int, place: int, own: Row, other: Row, batch: list[Row]) -> Fault | None:
        name = _differing(own, other)
        if not name:
            return None
        repeats = [self._copies(self.run(batch))[place] for _ in range(_REPEATS)]
        for name in own:  # every output now
            spread = max(difference(own[name], repeat[name]) for repeat in repeats)
            differs = difference(own[name], other[name])
            if differs > _SPREAD_FACTOR * spread:
                text = f"output '{name}' of row {place} of {size} changes by {differs:.3g} with the other rows"
                return Fault("influence", text)
        return None

    def _compare(self, size: int, results: list[tuple[int, int, dict[str, Array]]]) -> Fault | None:
        for place, index, output in results:
            for name, values in output.items():
                text = self._differs(name, values, self._alone[index], self._bounds)
                if not text:
                    continue
                rows = f"output '{name}' of row {place} of {size}"
                for twin in (twin for _, other, twin in results if other == index):
                    of_twin = self._differs(name, values, twin, self._bounds, "that of an equal row at another place")
                    if of_twin:
                        return Fault("position", f"{rows} {of_twin}")
                return Fault("alone", f"{rows} {text}")
        return None

    def _differs(
        self, name: str, values: Array, alone: Row, bounds: Mapping[str, float], other: str = "the row alone"
    ) -> str:
        """Return how an output differs from that of the other row; "" if it is within its bound."""
        scores = self.classes.get(name)
        gap = 0.0 if scores is None else _class_gap(values, alone[name], alone[scores])
        if scores is not None and gap > bounds[scores]:
            return f"has another class than {other}: scores {gap:.3g} apart, {bounds[scores]:.3g} is allowed"
        differs = difference(values, alone[name]) if scores in (None, name) else 0.0
        return (
            "" if differs <= bounds[name] else f"differs by {differs:.3g} from {other}, {bounds[name]:.3g} is allowed"
        )


def _class_gap(values: Array, alone: Array, scores: Array) -> float:
    """Return how far the score of another class is from that of the class of a row alone; 0 for equal classes.

    Args:
        values: classes (..., k), the best first, or scores (..., classes) of a row.
        alone: the same of the row alone.
        scores: scores of the row alone, of the same shape; a class that is not ranked has the lowest one.
    """
    if not values.size or values.shape != alone.shape:
        return 0.0
    own: Any = scores.astype(np.float64)
    if values.dtype.kind == "f":
        other = np.take_along_axis(own, values.argmax(axis=-1, keepdims=True), axis=-1)
        return float((own.max(axis=-1, keepdims=True) - other).max())
    same = values[..., :, None] == alone[..., None, :]
    places = np.where(same.any(axis=-1), same.argmax(axis=-1), values.shape[-1] - 1)
    gaps = np.abs(own - np.take_along_axis(own, places, axis=-1))
    return float(np.where(values == alone, 0.0, gaps).max())


def difference(one: Array, other: Array) -> float:
    """Return the largest absolute difference; infinity for other shapes, other text, and a NaN in only one of both."""
    if one.shape != other.shape:
        return float("inf")
    if one.dtype.kind not in "fiub" or np.array_equal(one, other):
        return 0.0 if np.array_equal(one, other) else float("inf")
    if one.dtype.kind != "f":
        return float("inf")
    unequal = ~((one == other) | (np.isnan(one) & np.isnan(other)))
    if not unequal.any():
        return 0.0
    with np.errstate(all="ignore"):
        gaps = np.abs(one[unequal].astype(np.float64) - other[unequal].astype(np.float64))
    return float(gaps.max()) if np.isfinite(gaps).all() else float("inf")


def _differing(one: Row, other: Row) -> str:
    return next((name for name, values in one.items() if difference(values, other[name])), "")


def _bound(values: Sequence[Array], floor: float) -> float:
    """Return the largest allowed difference of an output; 0 for numbers that are no floats."""
    stacked = np.concatenate([each.reshape(-1) for each in values])
    if stacked.dtype.kind != "f" or not stacked.size:
        return 0.0
    stacked = stacked.astype(np.float64)
    kind: Any = values[0].dtype
    step = float(np.finfo(kind).eps) * _STEPS * float(np.abs(stacked).max())
    return max(floor * float(stacked.max() - stacked.min()), step)


def _decoded(values: Array, datatype: Datatype | None) -> Array:
    """Return BF16, which NumPy lacks, as FP32."""
    return bf16_values(values) if datatype is BF16 else values


def _extreme(values: Array, datatype: Datatype, kind: int) -> Array:
    number: Any
    if datatype is BF16:
        number = (0x7FC0, 0x7F7F)[kind]
    elif values.dtype.kind == "f":
        dtype: Any = values.dtype
        number = (np.nan, np.finfo(dtype).max)[kind]
    else:
        return values
    return np.full_like(values, number)
