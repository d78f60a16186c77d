"""Reads inputs and outputs of an ONNX file, and where its tensors are."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from headrace.config.documents import refuse, within
from headrace.config.onnx_rows import RowVerdict, analyse_rows, inlined
from headrace.config.trap_rules import trapping_node
from headrace.core.tensor import BY_ONNX_NUMBER

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("headrace.config")


_EXPORT = "export the model again, or copy it again if the copy was cut short"
# TensorProto.EXTERNAL; a file may list locations without using them
_EXTERNAL = 1


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """One input or output of the graph.

    Attributes:
        name: name of the tensor.
        data_type: e.g. "TYPE_FP32"; "" if no request can carry it.
        onnx_type: ONNX's name of the type, for messages.
        shape: all dimensions, -1 for free ones; None if the file has no shape.
        batch_symbol: name of the first dimension if it is free and has one.
        has_default: True for an input with a value in the file, so that a request may leave it out.
    """

    name: str
    data_type: str
    onnx_type: str
    shape: tuple[int, ...] | None
    batch_symbol: str = ""
    has_default: bool = False


@dataclass(frozen=True, slots=True)
class OnnxSignature:
    """Input and output tensor specs of a model.

    Attributes:
        inputs: in the graph's order, without constants, except inputs with a default.
        outputs: in the graph's order.
        rows: whether the rows of a batch are independent, with the first dimension of every required input as the batch.
        trap: node that ends its process for some values of a request; "" if there is none.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    rows: RowVerdict
    trap: str = ""

    @property
    def required_inputs(self) -> tuple[TensorSignature, ...]:
        """Inputs that every request must have."""
        return tuple(tensor for tensor in self.inputs if not tensor.has_default)


def external_files(path: Path, name: str) -> tuple[str, ...]:
    """Return the files beside an ONNX file that hold its external tensors: locations in its folder, sorted, each once.

    Args:
        path: the ONNX file; tensors are not loaded.
        name: name of the file for findings.

    Raises:
        ConfigError: unreadable, not an ONNX model, or external tensors outside of the file's folder.
    """
    model = _load(path, name)
    locations = set()
    for tensor in _tensors(model):
        _check_external(tensor, path, name)
        if tensor.data_location == _EXTERNAL:
            locations.add(_location(tensor))
    return tuple(sorted(locations))


def read_signature(path: Path, name: str) -> OnnxSignature:
    """Read the input and output tensor specs of a model; cached while the file is unchanged.

    Args:
        path: the ONNX file.
        name: name of the file for findings.

    Raises:
        ConfigError: unreadable, not an ONNX model, or external tensors outside of the file's folder.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from None
    return _read_signature(path, name, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=256)
def _read_signature(path: Path, name: str, mtime_ns: int, size_bytes: int, inode: int) -> OnnxSignature:
    model = _load(path, name)
    if not model.graph.output:
        raise refuse(name, None, "has no graph with outputs", _EXPORT)
    for tensor in _tensors(model):
        _check_external(tensor, path, name)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {tensor.values.name for tensor in graph.sparse_initializer}
    # Old exporters list every weight among the inputs. Weights have no free dimension and a real optional input is rare, so
    # only a configuration that names one of these makes it an input.
    inputs = tuple(_signature(info, info.name in constants) for info in graph.input)
    outputs = tuple(_signature(info, False) for info in graph.output)
    flat = inlined(model)
    return OnnxSignature(inputs, outputs, _rows(flat, inputs, outputs), trapping_node(flat))


def _rows(
    model: onnx.ModelProto, inputs: tuple[TensorSignature, ...], outputs: tuple[TensorSignature, ...]
) -> RowVerdict:
    """Return whether rows are independent, if all tensors can have rows."""
    required = [tensor for tensor in inputs if not tensor.has_default]
    if not all(tensor.shape and tensor.shape[0] == -1 for tensor in (*required, *outputs) if tensor.data_type):
        return RowVerdict(False)
    return analyse_rows(model, [tensor.name for tensor in required])


def _load(path: Path, name: str) -> onnx.ModelProto:
    # Importing onnx takes 0.1 s, which `headrace infer` and other commands do not need.
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        # The decoder's text ("Error parsing message") does not help the user.
        raise refuse(name, None, "is no ONNX model, or a truncated one", _EXPORT) from error
    except OSError as error:
        raise refuse(name, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from None


def _signature(info: onnx.ValueInfoProto, has_default: bool) -> TensorSignature:
    from onnx import TensorProto

    kind = info.type.WhichOneof("value") or "untyped"
    if kind != "tensor_type":
        return TensorSignature(info.name, "", kind.removesuffix("_type"), None, has_default=has_default)
    tensor = info.type.tensor_type
    datatype = BY_ONNX_NUMBER.get(tensor.elem_type)
    kinds = TensorProto.DataType
    type_name = kinds.Name(tensor.elem_type) if tensor.elem_type in kinds.values() else "unknown"
    dims = tensor.shape.dim
    # Exporters also write 0 or a negative number for a free dimension.
    sizes = tuple(int(dim.dim_value) if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in dims)
    symbol = dims[0].dim_param if dims and sizes[0] == -1 else ""
    shape = sizes if tensor.HasField("shape") else None
    return TensorSignature(info.name, datatype.config_name if datatype else "", type_name, shape, symbol, has_default)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in the model: weights, attributes, subgraphs, functions."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _graph_tensors(graph)


def _location(tensor: onnx.TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _check_external(tensor: onnx.TensorProto, path: Path, name: str) -> None:
    """Check the location of an external tensor of the file `path`.

    Raises:
        ConfigError: the location is missing, leads out of the file's folder, or does not exist.
    """
    folder = path.parent
    if tensor.data_location != _EXTERNAL:
        return
    location = _location(tensor)
    subject = f'the weights of "{tensor.name}" are stored in "{location}"'
    relative = PurePosixPath(location)
    cure = "save the model with its external data in the same folder"
    if not location or "\0" in location or relative.is_absolute() or ".." in relative.parts or "\\" in location:
        raise refuse(name, None, f"{subject}, which is not in the model's folder", cure)
    if not os.path.isfile(folder / relative):  # False for a name that is too long
        raise refuse(name, None, f"{subject}, which does not exist", cure)
    # REPOSITORY/MODEL/VERSION/model.onnx: the operator has named the repository.
    # ONNX Runtime also takes weights beside the file that a link in place of the model leads to.
    if not within(folder / relative, folder) and not within(folder / relative, path.resolve().parent):
        raise refuse(name, None, f"{subject}, which leads out of the model's folder", cure)


# Operators that pass indices on.
_PASSES_INDICES = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def table_sizes(path: Path, name: str) -> dict[str, int]:
    """Return the rows of the smallest constant table that a graph indexes with an input, by input; others are left out.

    Args:
        path: the ONNX file.
        name: name of the file for findings.

    Raises:
        ConfigError: the file is unreadable, or not an ONNX model.
    """
    graph = _load(path, name).graph
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    sources = {info.name: info.name for info in graph.input if info.name not in shapes}
    sizes: dict[str, int] = {}
    for node in graph.node:
        first, indices = (*node.input, "", "")[:2]
        if node.op_type in _PASSES_INDICES and first in sources:
            sources.update(dict.fromkeys(node.output, sources[first]))
        elif node.op_type == "Gather" and indices in sources and shapes.get(first):
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            source, rows = sources[indices], shapes[first][axis % len(shapes[first])]
            sizes[source] = min(sizes.get(source, rows), rows)
    return sizes
