"""Checks the shapes of a request's inputs against the model: rank, sizes, rows, and which requests may share a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.core.errors import BadRequest
from headrace.core.tensor import BYTES, Array, ModelSpec, TensorSpec, fits_shape

# 2**62 elements are more than any memory has, and far below the overflow of NumPy's sizes.
_MAX_ELEMENTS = 1 << 62
# Limit on the other dimensions of a tensor with a dimension of 0: a model may create outputs of that size.
_MAX_EMPTY_ELEMENTS = 1 << 24
# A text of 2 bytes becomes an object of 56 bytes.
_MAX_TEXTS = 1 << 20

# Shapes of requests repeat; maximum number of cached shapes of a model version.
MAX_CHECKED_SHAPES = 256


def check_shape(spec: TensorSpec, shape: Sequence[int], model: ModelSpec) -> int:
    """Check the shape of an input; returns its number of elements.

    Args:
        spec: tensor spec of the input; -1 allows any size.
        shape: of the request, batch dimension included.
        model: of the input.

    Raises:
        BadRequest: the rank or a size differs, a dimension is negative, or the batch dimension is 0.
    """
    expected = spec.shape
    if not fits_shape(shape, expected):
        raise BadRequest(
            f"input '{spec.name}' of model '{model.name}' has shape {list(shape)[:16]}, expected {list(expected)}"
            + (" (-1: any size; the first dimension is the batch)" if model.max_batch_size else "")
        )
    elements = math.prod(shape)
    if elements < 1 or min(shape, default=1) < 1:
        return _check_empty(spec, shape, model)
    if elements > _MAX_ELEMENTS:
        raise BadRequest(f"input '{spec.name}' has shape {list(shape)}: more elements than any memory holds")
    if elements > _MAX_TEXTS and spec.datatype is BYTES:
        raise BadRequest(
            f"input '{spec.name}' has shape {list(shape)[:16]}: {elements} elements of BYTES, at most {_MAX_TEXTS} are allowed "
            "in one tensor: send several requests"
        )
    return elements


def _check_empty(spec: TensorSpec, shape: Sequence[int], model: ModelSpec) -> int:
    """Check a shape with a dimension below 1; returns 0, its number of elements.

    Raises:
        BadRequest: a dimension is negative, the batch dimension is 0, or the other dimensions are so large that a model could
            create large outputs from a request without data.
    """
    subject = f"input '{spec.name}' has shape {list(shape)}"
    if model.max_batch_size and shape[0] < 1:
        raise BadRequest(f"{subject}: the first dimension is the batch, it must be at least 1")
    if min(shape) < 0:
        raise BadRequest(f"{subject}: every dimension must be at least 0")
    if math.prod(size for size in shape if size) > _MAX_EMPTY_ELEMENTS:
        raise BadRequest(
            f"{subject}: beside a dimension of 0, the product of the others must be at most {_MAX_EMPTY_ELEMENTS}"
        )
    return 0


def check_rows(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the rows of a request, which are the same for all inputs; 1 for a model without a batch dimension.

    Args:
        model: of the request.
        shapes: checked shapes by input name, batch dimension included.

    Raises:
        BadRequest: inputs are missing or differ in rows.
    """
    missing = [name for name, spec in model.inputs.items() if name not in shapes and not spec.optional]
    if missing:
        raise BadRequest(f"model '{model.name}' needs the inputs {missing}, which are missing")
    if not model.max_batch_size or not model.inputs:
        return 1
    rows = {shape[0] for shape in shapes.values()}
    if len(rows) != 1:
        sizes = {name: shape[0] for name, shape in shapes.items()}
        raise BadRequest(f"the inputs must have the same number of rows (first dimension), they have {sizes}")
    return rows.pop()


def has_one_shape(model: ModelSpec) -> bool:
    """Return True if all requests of a model may share a batch: no optional input and no free size but the rows."""
    start = 1 if model.max_batch_size else 0
    return all(
        not tensor.optional and (tensor.name in model.ragged or -1 not in tensor.shape[start:])
        for tensor in model.inputs.values()
    )


class ExactShapeKey(NamedTuple):
    """Key of requests with equal shapes of a padded model; differs from every key of padded lengths.

    Attributes:
        key: name and row shape of each input.
    """

    key: object


class PaddedShapeKey(NamedTuple):
    """Keys of a request of a padded model; the model's layout chooses one.

    Attributes:
        padded: equal for requests that may share a padded batch.
        exact: equal for requests of equal shapes.
    """

    padded: object
    exact: ExactShapeKey


def shape_key(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> object:
    """Return `InferRequest.shape_key` of a model with several shapes: without those of ragged inputs."""
    if model.padded is None:
        return _key(model, shapes)
    padded = model.padded.padded_shapes(shapes)
    # Requests whose own lengths differ are never padded.
    return (
        _key(model, shapes)
        if padded is shapes
        else PaddedShapeKey(_key(model, padded), ExactShapeKey(_key(model, shapes)))
    )


def _key(model: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> object:
    start, ragged = 1 if model.max_batch_size else 0, model.ragged
    return tuple((name, () if name in ragged else shapes[name][start:]) for name in model.inputs if name in shapes)


class CheckedShapes:
    """Rows and shape key of requests of one model version, by names and shapes of their inputs.

    For callers in this process, whose arrays have the datatypes of the model. Holds at most `MAX_CHECKED_SHAPES` entries.

    Args:
        spec: tensor specs of the version.
    """

    __slots__ = ("_one_shape", "_results", "_spec")

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._one_shape = has_one_shape(spec)
        self._results: dict[tuple[tuple[str, tuple[int, ...]], ...], tuple[int, object]] = {}

    def rows(self, arrays: Mapping[str, Array]) -> tuple[int, object]:
        """Check names and shapes against the model.

        Args:
            arrays: by input name, with the dtype of the input.

        Returns:
            Rows of the batch dimension (1 without one), and `InferRequest.shape_key`.

        Raises:
            BadRequest: an unknown or missing input, or a shape that does not match the model.
        """
        key = tuple([(name, array.shape) for name, array in arrays.items()])
        result = self._results.get(key)
        if result is None:
            if len(self._results) >= MAX_CHECKED_SHAPES:
                self._results.clear()
            result = self._results[key] = self._check(dict(key))
        return result

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> tuple[int, object]:
        spec = self._spec
        for name, shape in shapes.items():
            tensor = spec.inputs.get(name)
            if tensor is None:
                raise BadRequest(f"model '{spec.name}' has no input {name[:128]!r}; its inputs are {list(spec.inputs)}")
            check_shape(tensor, shape, spec)
        return check_rows(spec, shapes), None if self._one_shape else shape_key(spec, shapes)
