"""Rows of a tensor as requests of their own (`each` of a pipeline step): spread over a model, and gathered again.

A step with `each: boxes` calls its model once with one row for each row of `boxes`. Its other inputs are either per row too (they
have as many rows), or shared (repeated for every row). The outputs have one row for each row of `boxes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.core.errors import BadRequest
from headrace.core.tensor import Array, TensorSpec

# A request of the pipeline may start this much work in its model; a detector's output is in the hundreds.
MAX_EACH_ROWS = 4096


def count_rows(name: str, array: Array | None, earlier_rows: int = 0) -> int:
    """Return the number of rows over which a step is spread.

    Args:
        name: tensor in `each`, for messages.
        array: the tensor; its first dimension counts the rows. None if the request omits it.
        earlier_rows: rows of the same step in other runs of the same request, which count against the limit.

    Raises:
        BadRequest: the tensor is missing, has no dimension, or more rows than the limit.
    """
    if array is None:
        raise BadRequest(f"each: {name} needs rows, the request has no tensor '{name}': send it")
    if array.ndim == 0:
        raise BadRequest(f"each: {name} needs rows, the tensor is a single value")
    rows = int(array.shape[0])
    if rows > MAX_EACH_ROWS:
        raise BadRequest(f"each: {name} has {rows} rows, at most {MAX_EACH_ROWS} are allowed: send fewer")
    if rows + earlier_rows > MAX_EACH_ROWS:
        raise BadRequest(
            f"each: {name} has more than {MAX_EACH_ROWS} rows in all rows of the request together, at most {MAX_EACH_ROWS} are "
            "allowed: send fewer rows in one request"
        )
    return rows


def spread(arrays: Mapping[str, Array], each: str, rows: int, dims: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return inputs of the model with `rows` rows each.

    Args:
        arrays: tensors by input name of the model.
        each: input that has the rows.
        rows: number of its rows, at least 1.
        dims: shape of one row by input name, as the model declares it; -1 for any size.

    Returns:
        Views; a shared tensor is repeated without a copy.

    Raises:
        BadRequest: a tensor is neither per row nor of the shape of one row.
    """
    spread_arrays: dict[str, Array] = {}
    for name, array in arrays.items():
        row_dims = dims[name]
        if array.ndim == len(row_dims) + 1 and array.shape[0] == rows:
            spread_arrays[name] = array
        elif array.ndim == 1 and row_dims == (1,) and array.shape[0] == rows:
            spread_arrays[name] = array.reshape(rows, 1)
        elif name != each and array.ndim == len(row_dims):
            spread_arrays[name] = np.broadcast_to(array, (rows, *array.shape))
        elif name != each and array.ndim == len(row_dims) + 1 and array.shape[0] == 1:
            spread_arrays[name] = np.broadcast_to(array, (rows, *array.shape[1:]))
        else:
            raise BadRequest(
                f"input '{name}' has shape {list(array.shape)}; with each over {rows} rows it needs {[rows, *row_dims]}, or "
                f"{list(row_dims)} to be shared by all rows"
            )
    return spread_arrays


def no_rows(outputs: Mapping[str, TensorSpec]) -> dict[str, Array]:
    """Return the outputs of a step over zero rows: empty arrays, in which a free dimension is 0.

    Args:
        outputs: specs of the model's outputs, whose first dimension is the batch.
    """
    return {
        name: np.empty((0, *(max(size, 0) for size in spec.shape[1:])), spec.datatype.dtype)
        for name, spec in outputs.items()
    }
