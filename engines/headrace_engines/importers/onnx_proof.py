"""Compares a graph with a freed batch dimension with the original: batches of random rows against single runs.

Every row of the new graph's batches must be what the original computes for that row. The rows differ, their order and the
size of the batches change, and one batch has a row of NaN, which spreads into every value that is computed from it. This
happens twice: with the model's own weights, and with seeded random ones (`random_weights`), for which the rows must give
different values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from headrace_engines.errors import BuildError
from headrace_engines.importers.random_weights import random_weights, with_weights
from headrace_engines.onnx_graph import Array, OnnxRunner
from headrace_engines.progress import Report, silent

SEED = 20_240_607
# Rows that are compared; batches of them by their numbers: alone, in pairs, in another order, next to each other.
_ROWS = 6
_BATCHES = ((0,), (4, 1), (5, 3, 2, 0), (2, 2, 4))
_POISONED = (1, 5, 3)
# Largest deviation as a share of the largest difference between two rows.
_TOLERANCE = 1e-3
_COARSE_TOLERANCE = 3e-2
# Deviation of FP32 sums of the same numbers in another order, as a share of the largest value.
_ROUNDING = 1e-5
# Smallest difference between two rows, as a share of the largest value, that shows that an output depends on its row.
_DISTINCT = 1e-3
_ATTEMPTS = 3
# Sizes of free dimensions other than the batch.
_FREE_SIZE = 8

Row = dict[str, Array]


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of the comparison.

    Attributes:
        rows: number of random rows.
        batches: sizes of the batches.
        weights: number of tensors that got random values.
        max_error: largest deviation with random weights, as a share of the largest difference between two rows.
    """

    rows: int
    batches: tuple[int, ...]
    weights: int
    max_error: float


class _Indistinct(Exception):
    """Rows give the same values, so a comparison shows nothing."""


def prove(
    original: onnx.ModelProto,
    freed: onnx.ModelProto,
    batch_size: int = 1,
    fixed: frozenset[str] = frozenset(),
    report: Report = silent,
) -> Proof:
    """Compare batches of the new graph with runs of the original.

    Args:
        original: with `batch_size` as the first dimension of all inputs; not changed.
        freed: the same model with a free batch dimension; not changed.
        batch_size: rows of a run of the original.
        fixed: names of constants that keep their values.
        report: progress callback.

    Raises:
        BuildError: a row depends on its batch, or has other values than in the original (the message names the first node whose
            output differs), or the outputs of the rows do not differ.
    """
    report(0.0, "compares batches with single runs")
    _compare(original, freed, batch_size, _rows(freed, SEED), strict=False)
    problem = ""
    for attempt in range(_ATTEMPTS):
        report(0.4 + 0.2 * attempt, "compares them with random weights")
        rows = _rows(freed, SEED + attempt)
        weights = random_weights(freed, _stacked(rows, range(len(rows))), SEED + attempt)
        weights = {name: values for name, values in weights.items() if name not in fixed}
        try:
            error = _compare(
                with_weights(original, weights), with_weights(freed, weights), batch_size, rows, strict=True
            )
        except _Indistinct as reason:
            problem = str(reason)
            continue
        sizes = tuple(map(len, (*_BATCHES, _POISONED)))
        return Proof(_ROWS, sizes, len(weights), error)
    raise BuildError(
        f"the batch dimension is not proven to be free: {problem}, with {_ATTEMPTS} sets of random weights: export the "
        "model with a dynamic batch dimension"
    )


def _compare(
    original: onnx.ModelProto, freed: onnx.ModelProto, batch_size: int, rows: Sequence[Row], strict: bool
) -> float:
    """Return the largest deviation in units of the largest difference between rows.

    Raises:
        BuildError: an output differs.
        _Indistinct: two rows have the same values in a float output (only if `strict`).
    """
    coarse = _is_coarse(original)
    tensors = _float_ancestors(freed)
    expected = list(_reference(OnnxRunner(original, tensors), batch_size, rows))
    runner = OnnxRunner(freed, tensors)
    ranges = {name: _spread([row[name] for row in expected]) for name in expected[0]}
    if strict:
        for name, (values, _, nearest) in ranges.items():
            if expected[0][name].dtype.kind == "f" and nearest <= _DISTINCT * values:
                raise _Indistinct(f"the rows of '{name}' do not differ")
    worst = 0.0
    for numbers, poisoned in (*((batch, False) for batch in _BATCHES), (_POISONED, True)):
        batch = _stacked(rows, numbers)
        if poisoned:
            floats = [array for array in batch.values() if array.dtype.kind == "f"]
            for array in floats:
                array[1] = np.nan
            if not floats:
                continue
        outputs = runner.run(batch)
        for name, (values, spread, _) in ranges.items():
            limit = (_COARSE_TOLERANCE if coarse else _TOLERANCE) * spread + _ROUNDING * values * (100 if coarse else 1)
            for place, number in enumerate(numbers):
                if poisoned and place == 1:
                    continue
                error = _error(outputs[name], place, len(numbers), expected[number][name])
                if not error <= limit:
                    raise BuildError(_explain(original, freed, batch_size, rows, name, error, limit, poisoned))
                worst = max(worst, error / spread if spread else 0.0)
    return worst


def _error(output: Array, place: int, count: int, expected: Array) -> float:
    """Return the largest deviation of one row of a batch; infinity for another shape."""
    if output.shape != (count, *expected.shape[1:]):
        return float("inf")
    return _distance(output[place : place + 1], expected)


def _distance(first: Array, second: Array) -> float:
    if first.shape != second.shape:
        return float("inf")
    if first.dtype.kind not in "fiub" or not first.size:
        return 0.0 if np.array_equal(first, second) else float("inf")
    a, b = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def _spread(rows: Sequence[Array]) -> tuple[float, float, float]:
    """Return the largest value, and the largest and smallest difference between two rows."""
    distances = [_distance(rows[i], rows[j]) for i in range(len(rows)) for j in range(i)]
    finite = [np.abs(row[np.isfinite(row)]).max(initial=0.0) for row in rows if row.dtype.kind == "f"]
    numbers = [distance for distance in distances if np.isfinite(distance)]
    return float(max(finite, default=0.0)), max(numbers, default=0.0), min(numbers, default=0.0)


def _reference(runner: OnnxRunner, batch_size: int, rows: Sequence[Row]) -> Iterator[Row]:
    """Run every row in the original; the other rows of its batch are the next ones."""
    for number in range(len(rows)):
        outputs = runner.run(_stacked(rows, [(number + step) % len(rows) for step in range(batch_size)]))
        yield {name: array[:1] if array.ndim else array for name, array in outputs.items()}


def _rows(model: onnx.ModelProto, seed: int) -> list[Row]:
    """Return random rows: smooth pictures with noise for floats, small numbers for integers that may be indices."""
    random = np.random.default_rng(seed)
    limits = _index_limits(model)
    return [
        {value.name: _random_row(random, value, limits.get(value.name, 2)) for value in model.graph.input}
        for _ in range(_ROWS)
    ]


def _random_row(random: np.random.Generator, value: onnx.ValueInfoProto, limit: int) -> Array:
    tensor = value.type.tensor_type
    shape = tuple(dim.dim_value if dim.dim_value > 0 else _FREE_SIZE for dim in tensor.shape.dim[1:])
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    if dtype.kind == "f":
        # Whole rows and their parts differ in level, too: averages over them stay apart.
        level = random.normal(0.0, 0.5, (*shape[:-2], 1, 1)[-len(shape) :] if shape else ())
        return np.asarray(random.standard_normal(shape) * random.uniform(0.7, 1.4) + level, dtype)
    if dtype.kind == "b":
        return np.asarray(random.integers(0, 2, shape), np.bool_)
    if dtype.kind in "iu":
        return np.asarray(random.integers(0, limit, shape), dtype)
    if dtype.kind == "O":
        return np.asarray(random.integers(0, limit, shape)).astype(str).astype(object)
    raise BuildError(
        f"input '{value.name}' has the type {dtype}, for which there are no random rows: import the model without --dynamic-batch"
    )


def _index_limits(model: onnx.ModelProto) -> dict[str, int]:
    """Return the number of rows of the smallest table in which the values of an integer input are looked up."""
    sizes = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if tensor.dims}
    limits: dict[str, int] = {}
    for value in model.graph.input:
        names = {value.name}
        for node in model.graph.node:
            if node.op_type in ("Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze") and node.input[0] in names:
                names.update(node.output)
            elif node.op_type == "Gather" and node.input[1] in names and node.input[0] in sizes:
                limits[value.name] = min(limits.get(value.name, sizes[node.input[0]]), sizes[node.input[0]])
    return limits


def _float_ancestors(model: onnx.ModelProto) -> list[str]:
    """Return the inputs of the nodes that make whole numbers of floats for an output, e.g. of ArgMax: they show more."""
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    whole = {name for name, kind in kinds.items() if kind not in (0, 1, 10, 11, 16)}
    producers = {name: node for node in model.graph.node for name in node.output}
    inputs = {value.name for value in model.graph.input} | {tensor.name for tensor in model.graph.initializer}
    nearest = (producers[name].input[0] for name in whole if name in producers and producers[name].input)
    return sorted({name for name in nearest if name not in inputs and name not in kinds})


def _is_coarse(model: onnx.ModelProto) -> bool:
    """Return whether values are rounded to few bits inside of the graph."""
    halves = any(tensor.data_type in (10, 16) for tensor in model.graph.initializer)
    return halves or any("Quantize" in node.op_type or node.op_type.startswith("QLinear") for node in model.graph.node)


def _stacked(rows: Sequence[Row], numbers: Sequence[int]) -> Row:
    return {name: np.stack([rows[number][name] for number in numbers]) for name in rows[0]}


def _explain(
    original: onnx.ModelProto,
    freed: onnx.ModelProto,
    batch_size: int,
    rows: Sequence[Row],
    output: str,
    error: float,
    limit: float,
    poisoned: bool,
) -> str:
    poison = {
        name: np.full_like(array, np.nan) if array.dtype.kind == "f" else array for name, array in rows[1].items()
    }
    node = first_difference(original, freed, batch_size, [rows[0], poison if poisoned else rows[1], rows[2]])
    place = (
        f"{node.op_type} node '{node.name or node.output[0]}' is the first that differs"
        if node is not None
        else "no single node differs"
    )
    kind = "beside a row of NaN " if poisoned else ""
    return (
        f"the batch dimension is not free: rows of '{output}' {kind}deviate by {error:.3g} from runs of the original, "
        f"{limit:.3g} is allowed: {place}: export the model with a dynamic batch dimension, or import it without --dynamic-batch"
    )


def first_difference(
    original: onnx.ModelProto, freed: onnx.ModelProto, batch_size: int, rows: Sequence[Row]
) -> onnx.NodeProto | None:
    """Return the first node of the new graph whose output for a batch has not the values of the original for each row.

    Args:
        original: with `batch_size` as the first dimension of all inputs.
        freed: with the same names of tensors.
        batch_size: rows of a run of the original.
        rows: three of them are used.
    """
    # Rows are looked for on every axis: the graph may have moved them anywhere.
    shared = {name for node in original.graph.node for name in node.output if name}
    names = [name for node in freed.graph.node for name in node.output if name in shared]
    numbers = [0, 1, 2]
    try:
        singles = [OnnxRunner(original, names, optimize=False).run(_stacked(rows, [n] * batch_size)) for n in numbers]
        batch = OnnxRunner(freed, names, optimize=False).run(_stacked(rows, numbers))
    except BuildError:
        return None
    for node in freed.graph.node:
        for name in node.output:
            if (
                name in batch
                and name in shared
                and not _same_rows([single[name] for single in singles], batch[name], batch_size)
            ):
                return node
    return None


def _same_rows(singles: Sequence[Array], batch: Array, batch_size: int) -> bool:
    """Return whether a tensor of a batch has the values of single runs, whichever axis has the rows."""
    alone, count = singles[0], len(singles)
    if alone.shape == batch.shape:
        return all(_close(single, batch) for single in singles)
    if alone.ndim != batch.ndim:
        return False
    for axis, (size, whole) in enumerate(zip(alone.shape, batch.shape, strict=True)):
        if (
            whole * batch_size != size * count
            or alone.shape[:axis] + alone.shape[axis + 1 :] != batch.shape[:axis] + batch.shape[axis + 1 :]
        ):
            continue
        per_row = size // batch_size
        for outer in (1, per_row):
            split = (*batch.shape[:axis], outer, count, per_row // outer, *batch.shape[axis + 1 :])
            split_alone = (*alone.shape[:axis], outer, batch_size, per_row // outer, *alone.shape[axis + 1 :])
            parts = batch.reshape(split)
            if all(
                _close(single.reshape(split_alone).take(0, axis + 1), parts.take(row, axis + 1))
                for row, single in enumerate(singles)
            ):
                return True
    return False


def _close(first: Array, second: Array) -> bool:
    largest = float(np.abs(first[np.isfinite(first)]).max(initial=0.0)) if first.dtype.kind == "f" else 0.0
    return _distance(first, second) <= 1e-3 * largest + 1e-6
