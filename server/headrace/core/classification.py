"""Triton's classification extension: the best classes of each row as text, `score:index[:label]`.

A score is written as C++'s `std::to_string` does: integers plainly, floats with six digits.
"""

from __future__ import annotations

import numpy as np

from headrace.core.errors import BadRequest
from headrace.core.tensor import BF16, Array, TensorSpec


def classify(array: Array, spec: TensorSpec, count: int, batched: bool) -> Array:
    """The `count` highest scores of every row, best first.

    Args:
        array: numeric scores, (rows, classes...) if batched, else (classes...); BF16 as bit patterns.
        spec: of the output, with its labels.
        count: how many classes; fewer come back where the row has fewer.
        batched: True if the first dimension is the batch.

    Returns:
        Object array of `bytes`, (rows, count) or (count,).

    Raises:
        BadRequest: the output holds no numbers.
    """
    if array.dtype.hasobject or array.dtype.kind == "b":
        raise BadRequest(f"output '{spec.name}' is {spec.datatype}, classification needs numbers")
    if spec.datatype is BF16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    scores = array.reshape(array.shape[0], -1) if batched else array.reshape(1, -1)
    count = min(count, scores.shape[1])
    # Stable, so that of equal scores the lower index comes first.
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :count]
    best = np.take_along_axis(scores, order, axis=1)
    text = np.empty(order.shape, dtype=object)
    for row, (indices, values) in enumerate(zip(order.tolist(), best.tolist(), strict=True)):
        text[row] = [_line(value, index, spec.labels) for value, index in zip(values, indices, strict=True)]
    return text if batched else text[0]


def _line(value: float, index: int, labels: tuple[str, ...]) -> bytes:
    label = f":{labels[index]}" if index < len(labels) else ""
    score = f"{value:f}" if isinstance(value, float) else str(value)
    return f"{score}:{index}{label}".encode()
