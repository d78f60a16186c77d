"""Types and shapes of the tensors at which a graph can be cut.

ONNX's shape inference keeps dimensions symbolic. Tensors that it leaves open are read from two runs of the model on ONNX
Runtime, with 2 and 3 rows: a first dimension that follows the rows is the batch.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from headrace.core.tensor import BY_ONNX_NUMBER

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxGraph, copy_model, write_onnx
from headrace_engines.targets.onnxruntime_session import open_session, session_options

_ROWS = (2, 3)
Dim = int | str
"""Size of a dimension, or its symbol; "" for a free dimension without one."""


@dataclass(frozen=True, slots=True)
class CrossingTensor:
    """Tensor that one part writes and a later one reads.

    Attributes:
        name: name in the graph.
        element_type: `TensorProto.DataType`.
        dims: sizes and symbols, the batch dimension included.
        row_bytes: bytes of one row in the measured shapes; of the whole tensor without a batch dimension.
    """

    name: str
    element_type: int
    dims: tuple[Dim, ...]
    row_bytes: int


@dataclass(frozen=True, slots=True)
class _Known:
    """Inferred type and dimensions of a tensor: sizes, symbols, or None where inference has neither."""

    element_type: int
    dims: tuple[Dim | None, ...] | None

    def is_complete(self, symbols: Mapping[str, int]) -> bool:
        """Return True if every size is a number, or a symbol of the inputs."""
        if not self.element_type or self.dims is None:
            return False
        return all(isinstance(dim, int) or dim in symbols for dim in self.dims)


def name_batch(model: onnx.ModelProto) -> str:
    """Give the first dimension of every input the same symbol, and return it; before shapes are inferred."""
    constants = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in constants]
    firsts = [value.type.tensor_type.shape.dim[0] for value in values if value.type.tensor_type.shape.dim]
    symbol = next((dim.dim_param for dim in firsts if dim.dim_param), "batch")
    for dim in firsts:
        dim.dim_param = symbol
    return symbol


def crossing_tensors(graph: OnnxGraph, inputs: Mapping[str, Array], symbol: str) -> dict[str, CrossingTensor]:
    """Return the tensors that may pass from one part to the next, by name.

    These have numeric elements, a known rank and, in a model with batches, the rows in their first dimension and at least
    one dimension behind it. Tensors that depend on constants only are left out: each part has them itself.

    Args:
        graph: graph of the whole model.
        inputs: a batch of the measured shapes.
        symbol: symbol of the batch in the shapes of the inputs, see `name_batch`; "" for a model without batches.

    Raises:
        BuildError: shapes are open, and the model cannot be run to read them.
    """
    sizes = _symbols(graph, inputs)
    known = {name: _known(graph, name, symbol) for name in _computed(graph)}
    open_names = [name for name, each in known.items() if not each.is_complete(sizes)]
    observed = _observe(graph.model, open_names, inputs, bool(symbol)) if open_names else {}
    is_static = all(isinstance(dim, int) for name in inputs for dim in _dims(graph, name)[1 if symbol else 0 :])
    crossing = {}
    for name, each in known.items():
        tensor = _crossing(name, each, observed.get(name), sizes, symbol, is_static)
        if tensor is not None:
            crossing[name] = tensor
    return crossing


def _computed(graph: OnnxGraph) -> list[str]:
    """Return the outputs of nodes that depend on an input, in the order of the graph."""
    varying, names = set(graph.inputs), []
    for node in graph.nodes:
        if any(name in varying for name in graph.reads(node)):
            outputs = [name for name in node.output if name]
            varying.update(outputs)
            names += outputs
    return names


def _dims(graph: OnnxGraph, name: str) -> tuple[Dim | None, ...]:
    value = graph.value(name)
    if value is None or not value.type.tensor_type.HasField("shape"):
        return ()
    return tuple(
        int(dim.dim_value) if dim.HasField("dim_value") else (dim.dim_param or None)
        for dim in value.type.tensor_type.shape.dim
    )


def _symbols(graph: OnnxGraph, inputs: Mapping[str, Array]) -> dict[str, int]:
    """Return the size of each symbol in the shapes of the inputs."""
    return {
        dim: size
        for name, array in inputs.items()
        for dim, size in zip(_dims(graph, name), array.shape, strict=False)
        if isinstance(dim, str)
    }


def _known(graph: OnnxGraph, name: str, symbol: str) -> _Known:
    value = graph.value(name)
    if value is None or not value.type.HasField("tensor_type"):
        return _Known(0, None)
    kind = value.type.tensor_type
    dims = _dims(graph, name) if kind.HasField("shape") else None
    if symbol and dims and name in graph.outputs and not isinstance(dims[0], int):
        dims = (symbol, *dims[1:])  # exporters name the batch of an output as they like
    return _Known(kind.elem_type, dims)


_Observed = tuple[int, tuple[tuple[int, ...], ...]]


def _observe(
    model: onnx.ModelProto, names: Iterable[str], inputs: Mapping[str, Array], batched: bool
) -> dict[str, _Observed]:
    """Run the model and return element type and shape in each run by tensor; tensors of other kinds are left out."""
    names = list(names)
    output_names = {value.name for value in model.graph.output}
    added = [onnx.ValueInfoProto(name=name) for name in names if name not in output_names]
    count = len(model.graph.output)
    model.graph.output.extend(added)
    try:
        with tempfile.TemporaryDirectory(prefix="headrace-split-") as folder:
            path = Path(folder, "model.onnx")
            write_onnx(copy_model(model), path)  # writing external data takes the values out of the model
            session = open_session(path, session_options())
    except OSError as error:
        raise BuildError(f"the model cannot be written to a temporary folder: {error}: make room there") from error
    finally:
        del model.graph.output[count:]
    runs = []
    for rows in _ROWS if batched else _ROWS[:1]:
        fed = {name: np.resize(array, (rows, *array.shape[1:])) if batched else array for name, array in inputs.items()}
        try:
            runs.append(session.run(names, fed))
        except Exception as error:  # the binding's exceptions share no other base
            first = " ".join(str(error).split())[:300]
            raise BuildError(f"shapes of the graph are open, and the model fails on random inputs: {first}") from error
    return {
        name: (onnx.helper.np_dtype_to_tensor_dtype(values[0].dtype), tuple(tuple(v.shape) for v in values))
        for name, *values in zip(names, *runs, strict=True)
        if isinstance(values[0], np.ndarray) and values[0].dtype != object
    }


def _crossing(
    name: str, known: _Known, observed: _Observed | None, sizes: Mapping[str, int], symbol: str, is_static: bool
) -> CrossingTensor | None:
    """Return a tensor if it may cross, else None.

    Args:
        name: name of the tensor.
        known: its inferred type.
        observed: its type and shapes in runs of the model; None if it is inferred completely.
        sizes: sizes of the inputs' symbols.
        symbol: symbol of the batch; "" for a model without batches.
        is_static: no dimension of the inputs but the batch is free, so that observed sizes are constant.
    """
    if known.is_complete(sizes):
        assert known.dims is not None
        element_type, dims = known.element_type, tuple(dim for dim in known.dims if dim is not None)
        shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in dims)
    elif observed is not None:
        element_type, shapes = observed
        element_type = known.element_type or element_type
        shape = shapes[0]
        if symbol and (not shape or tuple(each[0] for each in shapes) != _ROWS):
            return None
        inferred = known.dims or (None,) * len(shape)
        dims = tuple(
            dim if isinstance(dim, int) or (dim and dim in sizes) else (size if is_static else "")
            for dim, size in zip(inferred, shape, strict=True)
        )
        dims = (symbol, *dims[1:]) if symbol else dims
    else:
        return None
    datatype = BY_ONNX_NUMBER.get(element_type)
    if datatype is None or not datatype.size_bytes or not all(shape):
        return None
    if symbol and (len(dims) < 2 or dims[0] != symbol):
        return None
    if not dims:
        return None
    return CrossingTensor(name, element_type, dims, math.prod(shape[1:] if symbol else shape) * datatype.size_bytes)
