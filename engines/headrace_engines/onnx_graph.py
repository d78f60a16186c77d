"""Indexed ONNX graph for passes that read and change it, and a session that runs a model.

A pass looks up producers and consumers of tensors in an `OnnxGraph` and changes the graph by its methods, which update the index.
Subgraphs (If, Loop, Scan) are preserved but not analysed: their reads of the outer graph count as reads of the node.

`OnnxRunner` runs models on ONNX Runtime for calibration, comparison and search; it does not serve.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from headrace.config.digests import onnx_digest
from headrace.core.errors import ConfigError
from onnx import TensorProto, helper, numpy_helper

from headrace_engines.errors import BuildError

Array = npt.NDArray[Any]
# Largest size of a serialised protobuf.
_PROTOBUF_LIMIT_BYTES = 2**31 - 1
_HALF_BYTES = ("INT4", "UINT4", "FLOAT4E2M1")  # types with two values in a byte
# Constants of shapes and axes are smaller; shape inference needs their values.
_SMALL_BYTES = 1024


def reserve_name(base: str, names: set[str]) -> str:
    """Return a name that is not in `names`, and add it: `base`, or `base` with a number."""
    name, number = base, 0
    while name in names:
        number += 1
        name = f"{base}_{number}"
    names.add(name)
    return name


class OnnxGraph:
    """Main graph of a model, with an index of its tensors.

    Args:
        model: changed in place; missing types and shapes of inner tensors are inferred.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self._infer()
        self._index()

    # Reading

    @property
    def nodes(self) -> Sequence[onnx.NodeProto]:
        """All nodes; in topological order after `sort`, until a node is added."""
        return self.model.graph.node

    @property
    def inputs(self) -> list[str]:
        """Names of the model's inputs without initializers."""
        return [value.name for value in self.model.graph.input if value.name not in self._constants]

    @property
    def outputs(self) -> list[str]:
        """Names of the model's outputs."""
        return [value.name for value in self.model.graph.output]

    @property
    def opset(self) -> int:
        """Version of ONNX's default operator set; 0 if it is not imported."""
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 0)

    def producer(self, tensor: str) -> onnx.NodeProto | None:
        """Return the node that produces a tensor; None for inputs and constants."""
        return self._producers.get(tensor)

    def consumers(self, tensor: str) -> list[onnx.NodeProto]:
        """Return the nodes that read a tensor, each once, in any order."""
        return list(self._consumers.get(tensor, {}).values())

    def only_reader(self, tensor: str) -> onnx.NodeProto | None:
        """Return the only node that reads a tensor; None if there are several, or if it is an output of the model."""
        readers = self.consumers(tensor)
        return readers[0] if len(readers) == 1 and tensor not in self.outputs else None

    def reads(self, node: onnx.NodeProto) -> set[str]:
        """Return the names of all tensors that a node and its subgraphs read; those inside of subgraphs too."""
        return {name for name in node.input if name} | captured(node)

    def value(self, tensor: str) -> onnx.ValueInfoProto | None:
        """Return the type of a tensor; None if it is unknown, or if the tensor is a constant."""
        return self._values.get(tensor)

    def is_constant(self, tensor: str) -> bool:
        """Return whether a tensor is an initializer."""
        return tensor in self._constants

    def constant(self, tensor: str) -> Array | None:
        """Return a copy of the values of an initializer; None for any other tensor."""
        initializer = self._constants.get(tensor)
        return None if initializer is None else np.array(numpy_helper.to_array(initializer))

    def element_type(self, tensor: str) -> int:
        """Return the `TensorProto.DataType` of a tensor; 0 if unknown."""
        if tensor in self._constants:
            return self._constants[tensor].data_type
        value = self._values.get(tensor)
        return 0 if value is None else value.type.tensor_type.elem_type

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, -1 for free dimensions; None if the rank is unknown."""
        if tensor in self._constants:
            return tuple(self._constants[tensor].dims)
        value = self._values.get(tensor)
        if value is None or not value.type.tensor_type.HasField("shape"):
            return None
        return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)

    def attribute(self, node: onnx.NodeProto, name: str, default: Any = None) -> Any:
        """Return the value of a node's attribute, or `default`."""
        match = next((a for a in node.attribute if a.name == name), None)
        return default if match is None else helper.get_attribute_value(match)

    # Changing

    def fresh(self, base: str) -> str:
        """Return an unused name and reserve it: `base`, or `base` with a number."""
        return reserve_name(base, self._names)

    def add_constant(self, name: str, values: Array | TensorProto) -> str:
        """Add an initializer under an unused name and return its name."""
        name = self.fresh(name)
        tensor = values if isinstance(values, TensorProto) else numpy_helper.from_array(np.asarray(values, order="C"))
        tensor.name = name
        self.model.graph.initializer.append(tensor)
        self._constants[name] = self.model.graph.initializer[-1]
        return name

    def add_node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node with one output at the end (see `sort`) and return the output's name.

        Args:
            operator: e.g. "QuantizeLinear".
            inputs: names of the tensors.
            output: base of the unused name of the output.
            attributes: attributes of the node; those of value None are left out.
        """
        name = self.fresh(output)
        present = {key: value for key, value in attributes.items() if value is not None}
        # The empty domain is written: artefacts and digests of cached tables keep their bytes.
        node = helper.make_node(operator, list(inputs), [name], name=name, domain="", **present)
        self.model.graph.node.append(node)
        self._enter(self.model.graph.node[-1])
        return name

    def set_type(self, tensor: str, element_type: int, shape: Iterable[int] | None = None) -> None:
        """Set the type of a tensor, and its shape (-1 for free dimensions) unless None."""
        value = self._values.get(tensor)
        if value is None:
            value = self.model.graph.value_info.add()
            value.name = tensor
            self._values[tensor] = value
        value.type.tensor_type.elem_type = element_type
        if shape is not None:
            info = helper.make_tensor_value_info(tensor, element_type, [None if s < 0 else s for s in shape])
            value.type.CopyFrom(info.type)

    def rewire(self, node: onnx.NodeProto, index: int, tensor: str) -> None:
        """Connect input `index` of a node to another tensor."""
        old = node.input[index]
        node.input[index] = tensor
        if old not in node.input:
            self._consumers.get(old, {}).pop(id(node), None)
        self._consumers.setdefault(tensor, {})[id(node)] = node

    def rename_output(self, node: onnx.NodeProto, name: str) -> None:
        """Rename the first output of a node to a tensor that no other node produces; readers of that name then read it."""
        node.output[0] = name
        self._index()

    def remove(self, node: onnx.NodeProto) -> None:
        """Remove a node; rewire the readers of its outputs first."""
        self.model.graph.node.remove(node)
        self._index()

    def sort(self) -> None:
        """Sort the nodes topologically.

        Raises:
            BuildError: the graph has a cycle.
        """
        nodes = list(self.model.graph.node)
        index_of = {name: i for i, node in enumerate(nodes) for name in node.output if name}
        # All nodes first: nodes that are ready at the same time have a fixed order.
        sorter: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(range(len(nodes)), ()))
        for i, node in enumerate(nodes):
            sorter.add(i, *(index_of[name] for name in self.reads(node) if name in index_of))
        try:
            sorter.prepare()
        except CycleError:
            raise BuildError("the ONNX graph has a cycle: check it with onnx.checker") from None
        ready: list[int] = []
        order: list[int] = []
        while sorter.is_active():
            ready += sorter.get_ready()
            order.append(ready.pop())
            sorter.done(order[-1])
        replace_items(self.model.graph.node, [nodes[i] for i in order])
        self._index()

    def finish(self) -> onnx.ModelProto:
        """Sort the model, remove unused constants and type entries, and return it."""
        self.sort()
        used = {name for node in self.nodes for name in self.reads(node)} | set(self.outputs)
        graph = self.model.graph
        for field in (graph.initializer, graph.value_info):
            remaining = [item for item in field if item.name in used]
            if len(remaining) < len(field):
                replace_items(field, remaining)
        self._index()
        return self.model

    # The index

    def _infer(self) -> None:
        try:
            inferred = onnx.shape_inference.infer_shapes(_without_weights(self.model), data_prop=True)
        except Exception:  # inference is optional: models with unknown operators have no inferred shapes
            return
        named = {value.name for value in self.model.graph.value_info}
        self.model.graph.value_info.extend(v for v in inferred.graph.value_info if v.name not in named)

    def _index(self) -> None:
        graph = self.model.graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._values = {v.name: v for v in (*graph.value_info, *graph.input, *graph.output)}
        self._producers: dict[str, onnx.NodeProto] = {}
        self._consumers: dict[str, dict[int, onnx.NodeProto]] = {}
        self._names = set(self._constants) | set(self._values)
        for node in graph.node:
            self._enter(node)

    def _enter(self, node: onnx.NodeProto) -> None:
        self._names.update((node.name, *node.output))
        for name in node.output:
            if name:
                self._producers[name] = node
        for name in self.reads(node):
            self._consumers.setdefault(name, {})[id(node)] = node


def captured(node: onnx.NodeProto) -> set[str]:
    """Return the names of all tensors in a node's subgraphs."""
    graphs = [inner for a in node.attribute for inner in (a.g, *a.graphs) if inner.node or inner.output]
    names = {value.name for inner in graphs for value in inner.output}
    return names | {n for inner in graphs for child in inner.node for n in (*child.input, *captured(child)) if n}


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with large constants as inputs: inference needs their types and would copy their values."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    bare.graph.name = model.graph.name
    for field in ("node", "input", "output", "value_info"):
        getattr(bare.graph, field).extend(getattr(model.graph, field))
    input_names = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if len(tensor.raw_data) <= _SMALL_BYTES and not tensor.external_data:
            bare.graph.initializer.append(tensor)
        elif tensor.name not in input_names:
            bare.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return bare


def replace_items(field: Any, items: Iterable[Any]) -> None:
    """Replace the messages of a repeated field, by copies: protobuf's repeated fields own their messages."""
    copies = [type(item).FromString(item.SerializeToString()) for item in items]
    del field[:]
    field.extend(copies)


def drop_unused_domains(model: onnx.ModelProto) -> None:
    """Remove unused operator sets and inlined functions: ONNX Runtime lists all of its own, which other runtimes may not have."""
    used = {"", "ai.onnx", *_domains(model.graph.node)}
    for _ in model.functions:  # a function may call functions of other domains
        used.update(*(_domains(function.node) for function in model.functions if function.domain in used))
    replace_items(model.functions, [function for function in model.functions if function.domain in used])
    replace_items(model.opset_import, [opset for opset in model.opset_import if opset.domain in used])


def _domains(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """Return the domains of nodes and of the nodes in their subgraphs."""
    inner = (graph.node for node in nodes for a in node.attribute for graph in (a.g, *a.graphs))
    return {node.domain for node in nodes}.union(*map(_domains, inner))


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a deep copy of a model."""
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied


def read_onnx(path: Path) -> onnx.ModelProto:
    """Read an ONNX file with its external data, which must lie in the same folder.

    Raises:
        BuildError: the file is missing or not an ONNX model, or its external data lies outside of the folder.
    """
    try:
        model = onnx.load_model(path, load_external_data=False)
        for tensor in model.graph.initializer:
            location = next((e.value for e in tensor.external_data if e.key == "location"), "")
            if location and not (path.parent / location).resolve().is_relative_to(path.parent.resolve()):
                raise BuildError(
                    f"{path.name}: the external data of '{tensor.name}' is '{location}', outside of the folder: move it"
                )
        onnx.load_external_data_for_model(model, str(path.parent))
        # The checker takes no more than one protobuf from memory.
        onnx.checker.check_model(path if weight_bytes(model) > _PROTOBUF_LIMIT_BYTES else model)
    except FileNotFoundError as error:
        raise BuildError(f"{error.filename or path} is missing: put the model there") from None
    except (DecodeError, onnx.checker.ValidationError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise BuildError(f"{path} is not a readable ONNX model: {first}: check it with onnx.checker") from error
    return model


def weight_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of the values of all initializers."""
    return sum(tensor_bytes(tensor) for tensor in model.graph.initializer)


def tensor_bytes(tensor: TensorProto) -> int:
    """Return the bytes of the values of an initializer; 0 for texts."""
    size = int(np.prod(tensor.dims, dtype=np.int64))
    name = TensorProto.DataType.Name(tensor.data_type)
    if name == "STRING":
        return 0
    bits = 4 if name in _HALF_BYTES else 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-size * bits // 8)


def write_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; with external data in `<name>.data` beside it if it exceeds one protobuf."""
    large = model.ByteSize() > _PROTOBUF_LIMIT_BYTES
    onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None)


def file_digest(path: Path) -> str:
    """Return the SHA-256, in hex, of a file and of the external data of an ONNX file.

    Raises:
        BuildError: a file cannot be read, or its external data lies outside of the folder.
    """
    try:
        return onnx_digest(path)
    except ConfigError as error:
        raise BuildError(str(error)) from error


_FP8 = (onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E5M2)


class OnnxRunner:
    """Session of a model that can return inner tensors too.

    Args:
        model: not changed.
        tensors: names of inner tensors to return besides the model's outputs.
        optimize: let ONNX Runtime fuse operators; False if inner tensors must have the exact values of the graph.

    Raises:
        BuildError: ONNX Runtime cannot load the model.
    """

    def __init__(self, model: onnx.ModelProto, tensors: Sequence[str] = (), *, optimize: bool = True) -> None:
        if tensors:
            model = copy_model(model)
            output_names = {value.name for value in model.graph.output}
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in output_names)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        levels = ort.GraphOptimizationLevel
        # ONNX Runtime's optimiser rejects models with FP8 types; its kernels run them.
        plain = not optimize or any(tensor.data_type in _FP8 for tensor in model.graph.initializer)
        options.graph_optimization_level = levels.ORT_DISABLE_ALL if plain else levels.ORT_ENABLE_ALL
        try:
            self._session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the binding's exceptions share no other base
            raise BuildError(f"ONNX Runtime cannot load the model: {error}") from error
        self.outputs = [node.name for node in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a batch and return all outputs and the requested inner tensors by name.

        Raises:
            BuildError: the model rejects the inputs, or fails on them.
        """
        try:
            results = self._session.run(self.outputs, dict(inputs))
        except Exception as error:  # the binding's exceptions share no other base
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())
            first = " ".join(str(error).split())[:300]
            raise BuildError(f"the model fails on samples of {shapes}: {first}: check the samples") from error
        return dict(zip(self.outputs, results, strict=True))


def evaluate_constant(model: onnx.ModelProto, name: str) -> tuple[Array, set[str]]:
    """Compute a tensor that depends on constants only.

    Args:
        model: not changed.
        name: name of the tensor.

    Returns:
        The tensor, and the names of all tensors that it is computed from, its own included.

    Raises:
        BuildError: ONNX Runtime cannot compute it.
    """
    needed, nodes = {name}, []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            nodes.append(node)
            needed.update(node.input)
    constants = [tensor for tensor in model.graph.initializer if tensor.name in needed]
    match = next((tensor for tensor in constants if tensor.name == name), None)
    if match is not None:
        return np.array(numpy_helper.to_array(match)), needed
    part = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    part.graph.name = "constants"
    part.graph.node.extend(nodes[::-1])
    part.graph.initializer.extend(constants)
    part.graph.output.append(onnx.ValueInfoProto(name=name))
    return OnnxRunner(part).run({})[name], needed
