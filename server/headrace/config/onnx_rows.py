"""Decides whether an ONNX graph computes each row of a batch from that row only.

Nothing is run or checked. Requests may share a batch, and a large one may be split, only if rows are independent. A
softmax over axis 0 or a dynamic quantisation gives each caller values that depend on other callers, and no shape shows
it. The analysis runs the graph on shapes: the number of rows is a large prime, `row_rules` follows the axis that holds
it, and whole numbers computed from shapes are folded. An operator that the analysis does not cover is not treated as
independent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.config.row_rules import (
    ROWS,
    RULES,
    Call,
    Rows,
    RowsMixed,
    RowsUnproven,
    RowTensor,
    Shape,
    Values,
    rows_of_filled,
)

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger("headrace.config")


# Values of tensors up to this size are followed: shapes, axes, pads.
_MAX_VALUES = 64
# Earlier operator sets align inputs by other rules.
_MIN_OPSET = 7
# A larger graph is not analysed.
_MAX_NODES = 30_000
# Free dimensions other than the rows get these sizes, in turn; multiples of 32 pass through strides.
_FREE_SIZES = tuple(32 * odd for odd in range(3, 203, 2))

_RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
# Input that is a shape, and so may depend on the number of rows. Any other input would compute with it.
_SHAPE_INPUTS = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1, "Resize": 3, "Tile": 1}


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """Result of the analysis of a graph's rows.

    Attributes:
        independent: it is proven that each row of every output is computed from the same row of the inputs only.
        mixed: it is proven that rows depend on one another.
        reason: the node that mixes rows, or that cannot be analysed; "" if rows are independent.
    """

    independent: bool
    mixed: bool = False
    reason: str = ""


def _expanded_nodes(model: onnx.ModelProto) -> int:
    """Return the number of nodes with every call of a local function replaced by its nodes; at most `_MAX_NODES` + 1."""
    functions = {(function.domain, function.name): function.node for function in model.functions}
    counts: dict[tuple[str, str], int] = {}

    def count(nodes: Iterable[onnx.NodeProto], depth: int) -> int:
        total = 0
        for node in nodes:
            name = node.domain, node.op_type
            if name in functions and name not in counts:
                # Functions that call each other without end are deeper than all functions together.
                counts[name] = _MAX_NODES if depth > len(functions) else count(functions[name], depth + 1)
            graphs = [graph for each in node.attribute for graph in (each.g, *each.graphs)]
            total += 1 + counts.get(name, 0) + sum(count(graph.node, depth) for graph in graphs)
            if total > _MAX_NODES:
                return _MAX_NODES + 1
        return total

    return count(model.graph.node, 0)


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the nodes of local functions in place of their calls; the same if they are too many or invalid."""
    from onnx import inliner

    try:
        if model.functions and _expanded_nodes(model) <= _MAX_NODES:
            return inliner.inline_local_functions(model)
    except Exception as error:  # as in `analyse_rows`
        logger.debug("the functions of a graph could not be inlined", exc_info=error)
    return model


def analyse_rows(model: onnx.ModelProto, rows_inputs: Sequence[str]) -> RowVerdict:
    """Follow the rows of a batch through a graph.

    Args:
        model: weights may be stored elsewhere and need not be loaded.
        rows_inputs: names of the inputs whose first dimension is the batch: all inputs of a request.
    """
    try:
        return RowWalk(model, rows_inputs).verdict()
    except RowsUnproven as error:
        return RowVerdict(False, reason=str(error))
    except Exception as error:  # an unexpected graph must not prevent serving
        logger.debug("the rows of a graph could not be followed", exc_info=error)
        return RowVerdict(False, reason=f"the graph could not be analysed ({type(error).__name__})")


class RowWalk:
    """Follows the rows of a batch through one graph, node by node in the graph's order.

    Args:
        model: local functions are inlined.
        rows_inputs: names of the inputs whose first dimension is the batch.

    Attributes:
        tensors: state of each tensor visited so far; None under the name "", which stands for an absent input.
        free_sizes: size that stands for each free dimension other than the rows, by its symbol.
    """

    def __init__(self, model: onnx.ModelProto, rows_inputs: Sequence[str]) -> None:
        model = self._model = inlined(model)
        if model.functions:
            raise RowsUnproven(f"the graph has more than {_MAX_NODES} nodes in its functions")
        self._opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
        self.tensors: dict[str, RowTensor | None] = {"": None}
        self._types: dict[str, onnx.TypeProto] = {}
        self._constants: dict[str, onnx.TensorProto] = {}
        self.free_sizes: dict[str, int] = {}
        self._rows_inputs = frozenset(rows_inputs)

    def verdict(self) -> RowVerdict:
        """Visit all nodes and return whether the rows of all outputs are independent."""
        graph = self._model.graph
        if len(graph.node) > _MAX_NODES:
            return RowVerdict(False, reason=f"the graph has more than {_MAX_NODES} nodes")
        if self._opset < _MIN_OPSET:
            return RowVerdict(False, reason=f"the graph is written for opset {self._opset}, before {_MIN_OPSET}")
        self.start()
        for node in graph.node:
            self.visit(node)
        for output in graph.output:
            verdict = self.output(output.name)
            if not verdict.independent:
                return verdict
        return RowVerdict(True)

    def start(self) -> None:
        """Add the constants and inputs of the graph, before the first `visit`."""
        for tensor in self._model.graph.initializer:
            self.add_constant(tensor.name, tensor)
        for info in self._model.graph.input:
            self._add_input(info)

    def output(self, name: str) -> RowVerdict:
        """Return whether a visited tensor has the rows of the batch as its first dimension, each computed from itself."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return RowVerdict(False, reason=f'output "{name}" is not computed by a node')
        if tensor.problem is not None:
            return RowVerdict(False, isinstance(tensor.problem, RowsMixed), str(tensor.problem))
        if tensor.rows is None:
            return RowVerdict(False, True, f'output "{name}" does not depend on the rows')
        if tensor.rows != Rows(0):
            return RowVerdict(False, True, f'the first dimension of output "{name}" is not the batch dimension')
        return RowVerdict(True)

    def add_constant(self, name: str, tensor: onnx.TensorProto) -> RowTensor:
        """Add a tensor that has the same values for all rows; nodes visited later may read it."""
        from onnx import helper, numpy_helper

        shape = tuple(tensor.dims)
        self._types[name] = helper.make_tensor_type_proto(tensor.data_type, shape)
        value = None
        if math.prod(shape) <= _MAX_VALUES and not tensor.external_data:
            value = numpy_helper.to_array(tensor)
            self._constants[name] = tensor
        self.tensors[name] = constant = RowTensor(shape, value=value)
        return constant

    def _add_input(self, info: onnx.ValueInfoProto) -> None:
        from onnx import helper

        if info.name in self.tensors and info.name not in self._rows_inputs:
            return  # an input with a default, which requests leave out
        tensor = info.type.tensor_type
        if info.type.WhichOneof("value") != "tensor_type" or not tensor.HasField("shape") or not tensor.shape.dim:
            problem = RowsUnproven(f'input "{info.name}" has no batch dimension')
            self.tensors[info.name] = RowTensor(None, problem=problem)
            return
        shape = (ROWS, *(self._size(dim) for dim in tensor.shape.dim[1:]))
        self._constants.pop(info.name, None)
        self._types[info.name] = helper.make_tensor_type_proto(tensor.elem_type, shape)
        self.tensors[info.name] = RowTensor(shape, Rows(0))

    def _size(self, dim: onnx.TensorShapeProto.Dimension) -> int:
        if dim.dim_value > 0:
            return int(dim.dim_value)
        symbol = dim.dim_param or f"#{len(self.free_sizes)}"
        return self.free_sizes.setdefault(symbol, _FREE_SIZES[len(self.free_sizes) % len(_FREE_SIZES)])

    def visit(self, node: onnx.NodeProto) -> None:
        """Add the outputs of a node, whose inputs have been added; one that mixes rows gets a `problem`."""
        inputs = [self.tensors.get(name) for name in node.input]
        problem = next((tensor.problem for tensor in inputs if tensor is not None and tensor.problem), None)
        outputs = [RowTensor(None, problem=problem)] * len(node.output)
        if problem is None:
            try:
                if any(name and name not in self.tensors for name in node.input):
                    raise RowsUnproven("takes an unknown tensor")
                outputs = self._outputs(node, inputs)
            except (RowsMixed, RowsUnproven) as error:
                outputs = [RowTensor(None, problem=_at(node, error))] * len(node.output)
        for name, output in zip(node.output, outputs, strict=True):
            if name:
                self.tensors[name] = output

    def _outputs(self, node: onnx.NodeProto, inputs: list[RowTensor | None]) -> list[RowTensor]:
        from onnx import helper

        if node.domain not in ("", "ai.onnx"):
            raise RowsUnproven(f"is of the domain {node.domain}")
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        attributes = {name: value.decode() if isinstance(value, bytes) else value for name, value in attributes.items()}
        if node.op_type == "Constant":
            return [self._constant(node, attributes)]
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise RowsUnproven("has a subgraph")
        if node.op_type in _RANDOM:
            raise RowsUnproven("gives random values")
        if node.op_type == "Einsum" and "." in str(attributes.get("equation", "")):
            raise RowsUnproven("has an equation without explicit letters")  # inference of some does not end
        shapes = self._infer(node)
        call = Call(node.op_type, self._opset, inputs, attributes, shapes)
        counted = [index for index, tensor in enumerate(inputs) if tensor is not None and tensor.counted is not None]
        with_rows = any(tensor is not None and tensor.rows is not None for tensor in inputs)
        folded = fold(call)
        if folded is not None:
            self._record(node, folded)
            return [folded]
        if node.op_type in ("Shape", "Size"):
            raise RowsUnproven("takes a tensor of unknown shape")
        if not with_rows and not counted:
            return [RowTensor(shape) for shape in shapes]
        if counted and not (counted == [_SHAPE_INPUTS.get(node.op_type)] and _is_multiple(inputs[counted[0]])):
            raise (RowsMixed if with_rows else RowsUnproven)("computes with the number of rows")
        rows_of_outputs = self._rows(call, with_rows)
        outputs = []
        for name, shape, rows in zip(node.output, shapes, rows_of_outputs, strict=True):
            problem = None
            try:
                if name:
                    _check_rows(shape, rows)
            except RowsUnproven as error:
                if len(shapes) == 1:
                    raise
                # Only this output: old models list the mask of Dropout, whose shape is unknown and which no node reads.
                problem = _at(node, error)
            outputs.append(RowTensor(shape, rows, problem=problem))
        return outputs

    def _constant(self, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> RowTensor:
        from onnx import numpy_helper

        (name,) = node.output
        ((kind, value),) = attributes.items()
        dtypes = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
        if kind in dtypes:
            value = numpy_helper.from_array(np.array(value, dtypes[kind]), name)
        elif kind != "value":
            raise RowsUnproven(f"has a {kind}")
        return self.add_constant(name, value)

    def _rows(self, call: Call, with_rows: bool) -> list[Rows | None]:
        if call.op == "ConstantOfShape" or (call.op in ("Expand", "Tile") and not with_rows):
            target = call.shapes[0]
            if target is None:
                raise RowsUnproven("makes a tensor of unknown shape")
            return [rows_of_filled(target)] if call.op == "ConstantOfShape" else RULES[call.op](call)
        rule = RULES.get(call.op)
        if rule is None or not with_rows:
            raise RowsUnproven("has no rule that keeps rows apart")
        return rule(call)

    def _infer(self, node: onnx.NodeProto) -> list[Shape | None]:
        """Infer the shapes of the outputs; their types are stored for later nodes."""
        from onnx import defs, shape_inference

        types = {name: self._types[name] for name in node.input if name in self._types}
        data = {name: self._constants[name] for name in node.input if name in self._constants}
        inferred: Mapping[str, Any] = {}
        if len(types) == len({name for name in node.input if name}):
            try:
                schema, opsets = defs.get_schema(node.op_type, self._opset, ""), list(self._model.opset_import)
                inferred = shape_inference.infer_node_outputs(
                    schema, node, types, data, opset_imports=opsets, ir_version=self._model.ir_version
                )
            except Exception as error:  # its exceptions have no common base; the shape stays unknown
                logger.debug("no shape of %s: %s", node.op_type, error)
        for name, kind in inferred.items():
            self._types[name] = kind
        return [_static_shape(inferred.get(name)) for name in node.output]

    def _record(self, node: onnx.NodeProto, tensor: RowTensor) -> None:
        from onnx import helper, numpy_helper

        (name,) = node.output
        if tensor.value is not None:
            self._constants[name] = proto = numpy_helper.from_array(np.ascontiguousarray(tensor.value), name)
            self._types[name] = helper.make_tensor_type_proto(proto.data_type, tensor.value.shape)


def _at(node: onnx.NodeProto, error: RowsMixed | RowsUnproven) -> RowsMixed | RowsUnproven:
    name = node.name or next(iter(node.output), "")
    return type(error)(f'{node.op_type} node "{name}" {error}')


def _static_shape(kind: onnx.TypeProto | None) -> Shape | None:
    if kind is None or kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(int(dim.dim_value) for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None


def _is_multiple(tensor: RowTensor | None) -> bool:
    """True if every element that depends on the number of rows is a positive multiple of it."""
    if tensor is None or tensor.counted is None or tensor.value is None:
        return False
    return bool(((tensor.counted == 0) | ((tensor.value == tensor.counted * ROWS) & (tensor.counted > 0))).all())


def _check_rows(shape: Shape | None, rows: Rows | None) -> None:
    """Compare the result of a rule with the shape.

    Raises:
        RowsUnproven: the number of rows is not on this axis, or also on others.
    """
    if shape is None:
        raise RowsUnproven("gives a tensor of unknown shape")
    axes = [axis for axis, size in enumerate(shape) if size % ROWS == 0]
    if rows is None or axes != [rows.axis] or shape[rows.axis] != rows.outer * ROWS * rows.inner:
        raise RowsUnproven("gives the batch dimension another meaning")
    if rows.outer * rows.inner % ROWS == 0:
        raise RowsUnproven("gives a tensor whose size is not in proportion to the number of rows")


# Folding: the few operators that compute shapes, on values and on marks of elements that depend on the rows.


def fold(call: Call) -> RowTensor | None:
    """Return the value of a node that computes with shapes; None for other nodes, or if its inputs are unknown."""
    if call.op in ("Shape", "Size"):
        return _shape_value(call)
    if call.op not in _FOLDS and call.op not in _ARITHMETIC:
        return None
    tensors = [tensor for tensor in call.inputs if tensor is not None]
    if not tensors or any(tensor.value is None or tensor.rows is not None for tensor in tensors):
        return None
    values: list[Values] = [tensor.value for tensor in tensors if tensor.value is not None]
    counts = [
        np.zeros(value.shape, np.int64) if tensor.counted is None else tensor.counted
        for tensor, value in zip(tensors, values, strict=True)
    ]
    counted = _factors(call, values, counts) if any(bool(count.any()) for count in counts) else np.zeros(())
    if counted is None:
        return None
    with np.errstate(all="ignore"):
        value = (_FOLDS.get(call.op) or _ARITHMETIC[call.op])(call, values)
    if value.size > _MAX_VALUES:
        return None
    return RowTensor(value.shape, value=value, counted=counted if counted.any() else None)


def _factors(call: Call, values: list[Values], counts: list[Values]) -> Values | None:
    """Return the factors of the number of rows in the elements of a result.

    Args:
        call: node of which `fold` has a rule.
        values: of the inputs, with `ROWS` for the number of rows.
        counts: factors in `values`; not all are 0.

    Returns:
        None if the result is not factor * rows + constant with whole numbers, for any number of rows.
    """
    first, *rest = counts
    op, others = call.op, any(bool(count.any()) for count in rest)
    if op in ("Add", "Concat", "Sub"):
        return (_FOLDS.get(op) or _ARITHMETIC[op])(call, counts)
    if op == "Mul" and not (first * rest[0]).any():
        return np.asarray(first * values[1] + values[0] * rest[0])
    if op == "Div" and not others and values[1].all():
        exact = (first == 0) | ((first % values[1] == 0) & (values[0] % values[1] == 0))
        return np.asarray(first // values[1]) if exact.all() else None
    if op == "Where" and not first.any():
        return np.where(values[0], *rest)
    if op == "Equal":  # tests whether a size is set: no number of rows is 0 or less
        sizes = [
            np.where(count == 0, value <= 0, (value == count * ROWS) & (count > 0))
            for value, count in zip(values, counts, strict=True)
        ]
        both = np.logical_and(*counts).any()
        return np.zeros(()) if all(size.all() for size in sizes) and not both else None
    if op == "Cast":
        return first if int(call.attributes["to"]) in (6, 7) else None  # INT32, INT64
    if op in ("Gather", "Identity", "Slice", "Squeeze", "Unsqueeze") and not others:
        return _FOLDS[op](call, [first, *values[1:]])
    return None


def _shape_value(call: Call) -> RowTensor | None:
    tensor = call.inputs[0]
    if tensor is None or tensor.shape is None:
        return None
    sizes = np.array(tensor.shape, np.int64)
    axis = np.arange(sizes.size) == (-1 if tensor.rows is None else tensor.rows.axis)
    if call.op == "Size":
        sizes, axis = np.asarray(sizes.prod()), np.asarray(axis.any())
    else:
        start, end = int(call.attributes.get("start", 0)), call.attributes.get("end")
        sizes, axis = sizes[start:end], axis[start:end]
    return RowTensor(sizes.shape, value=sizes, counted=axis * (sizes // ROWS) if axis.any() else None)


def _axes(call: Call, values: list[Values]) -> list[int] | None:
    if len(values) > 1:
        return [int(axis) for axis in values[1].reshape(-1)]
    return [int(axis) for axis in call.attributes["axes"]] if "axes" in call.attributes else None


def _slice(call: Call, values: list[Values]) -> Values:
    data, *rest = values
    if not rest:
        rest = [np.array(call.attributes["starts"]), np.array(call.attributes["ends"])]
        rest += [np.array(call.attributes["axes"])] if "axes" in call.attributes else []
    starts, ends = rest[0], rest[1]
    axes = rest[2] if len(rest) > 2 else range(len(starts))
    steps = rest[3] if len(rest) > 3 else [1] * len(starts)
    index = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise RowsUnproven("reverses a shape")
        index[int(axis)] = slice(int(start), int(end), int(step))
    result: Values = data[tuple(index)]
    return result


def _squeeze(call: Call, values: list[Values]) -> Values:
    axes = _axes(call, values)
    return np.squeeze(values[0], None if axes is None else tuple(axes))


def _cast(call: Call, values: list[Values]) -> Values:
    from onnx import helper

    return values[0].astype(helper.tensor_dtype_to_np_dtype(int(call.attributes["to"])))


def _filled_value(call: Call, values: list[Values]) -> Values:
    from onnx import numpy_helper

    if math.prod(int(size) for size in values[0]) > _MAX_VALUES:
        return np.zeros(_MAX_VALUES + 1)
    filling = numpy_helper.to_array(call.attributes["value"]) if "value" in call.attributes else np.zeros(1, np.float32)
    return np.full(tuple(int(size) for size in values[0]), filling.reshape(-1)[0], filling.dtype)


def _range(_call: Call, values: list[Values]) -> Values:
    start, limit, step = (value.item() for value in values)
    count = min(max(math.ceil((limit - start) / step), 0), _MAX_VALUES + 1)
    steps: Values = (start + np.arange(count) * step).astype(values[0].dtype)
    return steps


def _divide(_call: Call, values: list[Values]) -> Values:
    if values[0].dtype.kind not in "iu":
        return np.asarray(np.divide(*values))
    quotient = np.floor_divide(*values)
    # ONNX rounds towards 0.
    return np.asarray(quotient + ((quotient < 0) & (quotient * values[1] != values[0])))


_FOLDS: dict[str, Callable[[Call, list[Values]], Values]] = {
    "Cast": _cast,
    "Concat": lambda call, values: np.concatenate(values, axis=int(call.attributes.get("axis", 0))),
    "ConstantOfShape": _filled_value,
    "Gather": lambda call, values: np.take(values[0], values[1], axis=int(call.attributes.get("axis", 0))),
    "Identity": lambda _call, values: values[0],
    "Range": _range,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Unsqueeze": lambda call, values: np.expand_dims(values[0], tuple(_axes(call, values) or ())),
}
_ARITHMETIC: dict[str, Callable[[Call, list[Values]], Values]] = {
    "Add": lambda _call, values: np.add(*values),
    "Div": _divide,
    "Equal": lambda _call, values: np.equal(*values),
    "Mul": lambda _call, values: np.multiply(*values),
    "Sub": lambda _call, values: np.subtract(*values),
    "Where": lambda _call, values: np.where(*values),
}
