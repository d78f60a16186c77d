"""Reads the inputs and outputs of an ONNX file, without running or even checking the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from headrace.config.document import refuse
from headrace.config.row_analysis import RowVerdict, analyse_rows
from headrace.core.tensor import BY_ONNX_NUMBER

if TYPE_CHECKING:
    import onnx

_EXPORT = "export the model again, or copy it again if the copy was cut short"
# TensorProto.EXTERNAL; a file may list locations without using them.
_EXTERNAL = 1


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """One input or output of the graph.

    Attributes:
        name: the tensor's name.
        data_type: e.g. "TYPE_FP32"; empty if no request can carry it.
        onnx_type: ONNX's own name of the type, for messages.
        shape: all dimensions, -1 where free; None if the file does not tell.
        batch_symbol: the name of the first dimension where it is free and has one.
        has_default: True for an input that the file gives a value, so that a request may leave it out.
    """

    name: str
    data_type: str
    onnx_type: str
    shape: tuple[int, ...] | None
    batch_symbol: str = ""
    has_default: bool = False


@dataclass(frozen=True, slots=True)
class OnnxSignature:
    """What a model takes and gives.

    Attributes:
        inputs: in the graph's order, constants excluded unless an input has a default.
        outputs: in the graph's order.
        rows: whether the rows of a batch are independent, the first dimension of every required input being the batch.
    """

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]
    rows: RowVerdict

    @property
    def required_inputs(self) -> tuple[TensorSignature, ...]:
        """The inputs that every request must bring."""
        return tuple(tensor for tensor in self.inputs if not tensor.has_default)


def external_files(path: Path, shown: str) -> tuple[str, ...]:
    """The files beside an ONNX file that hold tensors of it: their places in its folder, sorted, each once.

    Args:
        path: the ONNX file; tensors are not loaded.
        shown: its name for findings.

    Raises:
        ConfigError: unreadable, no ONNX model, or tensors stored outside of the file's folder.
    """
    model = _load(path, shown)
    places = set()
    for tensor in _tensors(model):
        _check_external(tensor, path.parent, shown)
        if tensor.data_location == _EXTERNAL:
            places.add(_location(tensor))
    return tuple(sorted(places))


def read_signature(path: Path, shown: str) -> OnnxSignature:
    """Reads what the model in `path` takes and gives; remembers it while the file stays the same.

    Args:
        path: the ONNX file.
        shown: its name for findings.

    Raises:
        ConfigError: unreadable, no ONNX model, or tensors stored outside of the file's folder.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise refuse(shown, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from None
    return _read_signature(path, shown, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=256)
def _read_signature(path: Path, shown: str, mtime_ns: int, size_bytes: int, inode: int) -> OnnxSignature:
    model = _load(path, shown)
    if not model.graph.output:
        raise refuse(shown, None, "holds no graph with outputs", _EXPORT)
    for tensor in _tensors(model):
        _check_external(tensor, path.parent, shown)
    graph = model.graph
    constants = {tensor.name for tensor in graph.initializer} | {
        tensor.values.name for tensor in graph.sparse_initializer
    }
    # Old exporters list every weight among the inputs. Weights have no free dimension and a real optional input is rare, so
    # only the configuration can bring one of these to light, by naming it.
    inputs = tuple(_signature(info, info.name in constants) for info in graph.input)
    outputs = tuple(_signature(info, False) for info in graph.output)
    return OnnxSignature(inputs, outputs, _rows(model, inputs, outputs))


def _rows(
    model: onnx.ModelProto, inputs: tuple[TensorSignature, ...], outputs: tuple[TensorSignature, ...]
) -> RowVerdict:
    """Whether rows are independent, where there can be rows at all."""
    required = [tensor for tensor in inputs if not tensor.has_default]
    if not all(tensor.shape and tensor.shape[0] == -1 for tensor in (*required, *outputs) if tensor.data_type):
        return RowVerdict(False)
    return analyse_rows(model, [tensor.name for tensor in required])


def _load(path: Path, shown: str) -> onnx.ModelProto:
    # onnx costs a tenth of a second to import, which `headrace infer` and other commands need not spend.
    import onnx
    from google.protobuf.message import DecodeError

    try:
        return onnx.load(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        # The decoder's own words ("Error parsing message") tell nobody anything.
        raise refuse(shown, None, "is no ONNX model, or a truncated one", _EXPORT) from error
    except OSError as error:
        raise refuse(shown, None, f"cannot be read: {error.strerror}", "check the file and its permissions") from None


def _signature(info: onnx.ValueInfoProto, has_default: bool) -> TensorSignature:
    from onnx import TensorProto

    kind = info.type.WhichOneof("value") or "untyped"
    if kind != "tensor_type":
        return TensorSignature(info.name, "", kind.removesuffix("_type"), None, has_default=has_default)
    tensor = info.type.tensor_type
    known = BY_ONNX_NUMBER.get(tensor.elem_type)
    name = (
        TensorProto.DataType.Name(tensor.elem_type) if tensor.elem_type in TensorProto.DataType.values() else "unknown"
    )
    if not tensor.HasField("shape"):
        return TensorSignature(info.name, known.config_name if known else "", name, None, has_default=has_default)
    dims = tensor.shape.dim
    # Exporters also write 0 or a negative number for "any size".
    shape = tuple(int(dim.dim_value) if dim.HasField("dim_value") and dim.dim_value > 0 else -1 for dim in dims)
    symbol = dims[0].dim_param if dims and shape[0] == -1 else ""
    return TensorSignature(info.name, known.config_name if known else "", name, shape, symbol, has_default)


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in the model: weights, attributes, subgraphs, functions."""
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


def _check_external(tensor: onnx.TensorProto, folder: Path, shown: str) -> None:
    """Refuses weights stored where the model's file has no business, or nowhere.

    Raises:
        ConfigError: the location is missing, leads out of `folder`, or no file is there.
    """
    if tensor.data_location != _EXTERNAL:
        return
    location = _location(tensor)
    what = f'the weights of "{tensor.name}" are stored in "{location}"'
    inside = PurePosixPath(location)
    cure = "save the model with its external data in the same folder"
    if not location or "\0" in location or inside.is_absolute() or ".." in inside.parts or "\\" in location:
        raise refuse(shown, None, f"{what}, which is not in the model's folder", cure)
    if not (folder / inside).resolve().is_relative_to(folder.resolve()):
        raise refuse(shown, None, f"{what}, which leads out of the model's folder", cure)
    if not (folder / inside).is_file():
        raise refuse(shown, None, f"{what}, which is not there", cure)
