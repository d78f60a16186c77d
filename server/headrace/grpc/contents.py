"""Typed contents of gRPC (InferTensorContents) to tensors: for clients that write numbers into the message, not bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.core.errors import BadRequest
from headrace.core.tensor import BYTES, Array, TensorSpec

# Which field of InferTensorContents holds a datatype's elements, and how protobuf holds those; FP16 and BF16 have none.
_FIELDS: dict[str, tuple[str, str]] = {
    "BOOL": ("bool_contents", "?"),
    "INT8": ("int_contents", "<i4"),
    "INT16": ("int_contents", "<i4"),
    "INT32": ("int_contents", "<i4"),
    "INT64": ("int64_contents", "<i8"),
    "UINT8": ("uint_contents", "<u4"),
    "UINT16": ("uint_contents", "<u4"),
    "UINT32": ("uint_contents", "<u4"),
    "UINT64": ("uint64_contents", "<u8"),
    "FP32": ("fp32_contents", "<f4"),
    "FP64": ("fp64_contents", "<f8"),
    "BYTES": ("bytes_contents", "O"),
}


def from_contents(spec: TensorSpec, shape: tuple[int, ...], elements: int, contents: Any) -> Array:
    """A tensor out of an InferTensorContents.

    Args:
        spec: of the input.
        shape: as declared and checked.
        elements: product of the shape.
        contents: the message.

    Raises:
        BadRequest: contents in another field than the datatype's, another number of elements, or values out of its range.
    """
    if spec.datatype.name not in _FIELDS:
        raise BadRequest(
            f"input '{spec.name}' is {spec.datatype}, which has no contents: send it as raw_input_contents"
        )
    field, wire = _FIELDS[spec.datatype.name]
    for other, _ in contents.ListFields():
        if other.name != field:
            raise BadRequest(f"input '{spec.name}' is {spec.datatype}: its contents go into {field}, not {other.name}")
    values = getattr(contents, field)
    if len(values) != elements:
        raise BadRequest(
            f"input '{spec.name}': {len(values)} elements came in {field} for shape {list(shape)}, expected {elements}"
        )
    if spec.datatype is BYTES:
        texts = np.empty(elements, dtype=object)
        texts[:] = values[:]
        return texts.reshape(shape)
    array: npt.NDArray[Any] = np.fromiter(values, np.dtype(wire), elements)
    dtype = spec.datatype.dtype
    if array.dtype != dtype:  # 8 and 16 bits travel as 32
        info = np.iinfo(dtype)  # type: ignore[type-var]
        outside = (array < info.min) | (array > info.max)
        if outside.any():
            raise BadRequest(
                f"input '{spec.name}' is {spec.datatype}: contents must be from {info.min} to {info.max}, "
                f"{array[outside][0]} is not"
            )
        array = array.astype(dtype)
    return array.reshape(shape)
