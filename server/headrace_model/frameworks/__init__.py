"""Ready-made models of Python frameworks, one module a backend; each imports its framework when it loads a model.

A module has one class in Headrace's own form: `load(context)` and `predict(batch)`. The configuration has the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Dict

import numpy as np

Array = Any
Batch = Dict[str, Array]

_DTYPES = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}
TEXT = "TYPE_STRING"
_TYPE_OF_KIND = {"b": "TYPE_BOOL", "i": "TYPE_INT64", "u": "TYPE_UINT64", "f": "TYPE_FP64"}


_MAX_ROWS = 64


def completed(config: dict[str, Any], columns: int, predict: Callable[[Array], dict[str, Array]]) -> dict[str, Any]:
    """Return a configuration with the tensors that it lacks: the table `x`, and the results for a row of zeros.

    Args:
        config: configuration in Triton's JSON form.
        columns: features of the model.
        predict: returns the results by the names of the outputs.
    """
    config = dict(config)
    if not config.get("input") and not config.get("output") and "max_batch_size" not in config:
        config["max_batch_size"], config["dynamic_batching"] = _MAX_ROWS, {}
    config["input"] = config.get("input") or [{"name": "x", "data_type": "TYPE_FP64", "dims": [columns]}]
    if not config.get("output"):
        results = {name: np.asarray(value) for name, value in predict(np.zeros((1, columns))).items()}
        config["output"] = [
            {"name": name, "data_type": _TYPE_OF_KIND.get(value.dtype.kind, TEXT), "dims": list(value.shape[1:]) or [1]}
            for name, value in results.items()
        ]
    return config


class Tensors:
    """The tensors of a configuration.

    Args:
        config: the model's configuration in Triton's JSON.

    Attributes:
        inputs: names of the inputs, in the order of the configuration.
        outputs: names of the outputs.
        threads: value of the parameter `intra_op_thread_count`; 0 for the default of the framework.

    Raises:
        ValueError: a tensor has a data type that frameworks do not have.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.inputs: list[str] = [tensor["name"] for tensor in config["input"]]
        self.outputs: list[str] = [tensor["name"] for tensor in config["output"]]
        self._types: dict[str, str] = {tensor["name"]: tensor["data_type"] for tensor in config["output"]}
        self._dims: dict[str, list[int]] = {
            tensor["name"]: [int(n) for n in tensor["dims"]] for tensor in config["output"]
        }
        self._has_rows = int(config.get("max_batch_size", 0)) > 0
        self._parameters: dict[str, dict[str, str]] = config.get("parameters", {})
        self.threads = int(self.parameter("intra_op_thread_count") or 0)
        for name, kind in self._types.items():
            if kind not in _DTYPES and kind != TEXT:
                raise ValueError(f"the output {name} is {kind}, which no framework returns")

    def parameter(self, name: str) -> str:
        """Return a parameter of the configuration, "" without it."""
        return self._parameters.get(name, {}).get("string_value", "")

    def table(self, batch: Batch) -> Array:
        """Return the inputs as one table of rows and features: the columns of several inputs side by side."""
        columns = [batch[name] for name in self.inputs]
        parts = [column.reshape(len(column), -1) if column.ndim != 2 else column for column in columns]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def result(self, name: str, value: Array) -> Array:
        """Return a result of the framework with the data type and the shape of an output."""
        array, kind = np.asarray(value), self._types[name]
        if kind == TEXT:
            array = np.array([str(item).encode() for item in array.ravel()], dtype=object).reshape(array.shape)
        else:
            array = np.ascontiguousarray(array, dtype=_DTYPES[kind])
        shape = [len(array), *self._dims[name]] if self._has_rows else self._dims[name]
        return array if array.ndim == len(shape) else array.reshape(shape)
