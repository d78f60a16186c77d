"""Frees the batch dimension of ONNX graphs that were exported with a fixed one.

The graph is walked on shapes with the rows of a batch followed through it (`headrace.config.onnx_rows.RowWalk`). A node
whose constants hold the batch size of the export is rewritten: targets of Reshape, Flatten, Squeeze and Unsqueeze, sizes of
Resize, shapes of Expand, slices and look-ups of the whole batch, constants with one row for each row of the batch. A node
after which the rows are no longer apart is refused by its name. `onnx_proof` compares the result with the original.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from headrace.config.onnx_rows import RowWalk, analyse_rows
from headrace.config.row_rules import ROWS, RULES, Rows, RowsMixed, RowTensor, Shape, broadcast
from onnx import helper, inliner, numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, captured, copy_model, evaluate_constant, replace_items, reserve_name
from headrace_engines.simplify import name_nodes, raise_opset

# ConstantOfShape is an operator since opset 9, Expand since 8.
_OPSET = 9
# The format from which on initializers need not be inputs.
_IR_VERSION = 4
# Walks with other meanings of a reshape, which a graph with many kinds of them may need.
_MAX_WALKS = 64
_INT64_MAX = (1 << 63) - 1
_CURE = "export the model with a dynamic batch dimension, or import it without --dynamic-batch"

# A reshape whose target can be read in several ways: shape, location of the rows, target at the batch size of the export.
_Pattern = tuple[Shape, Rows, Shape]


@dataclass(frozen=True, slots=True)
class FreedBatch:
    """A graph with a free batch dimension.

    Attributes:
        model: the graph; the first dimension of every input and output has one name.
        batch_size: rows of a batch in the original.
        changes: one line for each rewritten node.
        merged: names of constants with equal rows in the original, and of their first rows in the new graph.
    """

    model: onnx.ModelProto
    batch_size: int
    changes: tuple[str, ...]
    merged: frozenset[str]


def free_batch(model: onnx.ModelProto) -> FreedBatch:
    """Free the first dimension of all inputs and outputs.

    Args:
        model: not changed. Initializers that are also inputs become constants.

    Raises:
        BuildError: the inputs have no common first dimension, or a node mixes rows or cannot be followed; names it.
    """
    prepared = _prepared(model)
    batch_size = _batch_size(prepared)
    choices: dict[_Pattern, int] = {}
    deepest: _StuckError | None = None
    for _ in range(_MAX_WALKS):
        attempt = _Attempt(prepared, batch_size, choices)
        try:
            attempt.run()
            return _finished(attempt, batch_size)
        except _StuckError as error:
            if deepest is None or error.index > deepest.index:
                deepest = error
            if not _next_choice(choices, attempt.ambiguous):
                break
    assert deepest is not None, "the first walk ended without an error"
    raise BuildError(f"the batch dimension cannot be freed: {deepest}: {_CURE}") from None


def _next_choice(choices: dict[_Pattern, int], ambiguous: dict[_Pattern, int]) -> bool:
    """Take the next meaning of the last ambiguous reshape that has one left; those after it start again."""
    for pattern, count in reversed(ambiguous.items()):
        if choices.get(pattern, 0) + 1 < count:
            choices[pattern] = choices.get(pattern, 0) + 1
            return True
        choices.pop(pattern, None)
    return False


class _StuckError(Exception):
    """The rows cannot be followed beyond a node."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


def _prepared(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy in opset 9 or later: functions inlined, no constants among the inputs, no dead nodes, all nodes named."""
    copied = inliner.inline_local_functions(model) if model.functions else copy_model(model)
    constants = {tensor.name for tensor in copied.graph.initializer}
    constants |= {tensor.values.name for tensor in copied.graph.sparse_initializer}
    replace_items(copied.graph.input, [value for value in copied.graph.input if value.name not in constants])
    copied.ir_version = max(copied.ir_version, _IR_VERSION)
    # The converter reads the shapes of broadcast inputs, which operators have had since opset 7; that of a reshape since 5.
    prepared = copy_model(raise_opset(onnx.shape_inference.infer_shapes(raise_opset(copied, 6)), _OPSET))
    needed = {value.name for value in prepared.graph.output}
    alive = []
    for node in reversed(prepared.graph.node):
        if needed.intersection(node.output):
            alive.append(node)
            needed.update(node.input, captured(node))
    replace_items(prepared.graph.node, alive[::-1])
    del prepared.graph.value_info[:]
    name_nodes(prepared)
    return prepared


def _batch_size(model: onnx.ModelProto) -> int:
    """Return the common first dimension of all inputs; 1 if it is free already.

    Raises:
        BuildError: there is none.
    """
    sizes = {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.type.WhichOneof("value") != "tensor_type" or not dims:
            raise BuildError(f"the batch dimension cannot be freed: input '{value.name}' has no dimensions: {_CURE}")
        sizes[value.name] = int(dims[0].dim_value) if dims[0].dim_value > 0 else None
    if not sizes:
        raise BuildError(f"the batch dimension cannot be freed: the model has no inputs: {_CURE}")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name}: {size or 'free'}" for name, size in sizes.items())
        raise BuildError(
            f"the batch dimension cannot be freed: the first dimensions of the inputs differ ({listed}), one batch dimension "
            f"needs the same in all: {_CURE}"
        )
    return next(iter(sizes.values())) or 1


@dataclass(slots=True)
class _Attempt:
    """One walk through the graph with a choice for every ambiguous reshape."""

    source: onnx.ModelProto
    batch_size: int
    choices: dict[_Pattern, int]
    ambiguous: dict[_Pattern, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)
    merged: set[str] = field(default_factory=set)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)
    _count: str = ""
    walk: RowWalk = field(init=False)

    def __post_init__(self) -> None:
        graph = self.source.graph
        self.walk = RowWalk(self.source, [value.name for value in graph.input])
        self._names = {name for node in graph.node for name in (node.name, *node.output, *node.input)}
        self._names |= {item.name for items in (graph.input, graph.initializer) for item in items}

    def run(self) -> None:
        """Walk all nodes.

        Raises:
            _StuckError: rows are mixed, or it is not proven that they are not.
        """
        self.walk.start()
        read = {name for node in self.source.graph.node for name in (*node.input, *captured(node))}
        read |= {output.name for output in self.source.graph.output}
        for index, node in enumerate(self.source.graph.node):
            try:
                for repaired in self._repaired(node):
                    self._visit(repaired)
            except RowsMixed as error:
                raise _StuckError(index, f"{node.op_type} node '{node.name}' {error}") from None
            followed = [self._tensor(name) for name in node.output if name in read]
            problem = next((tensor.problem for tensor in followed if tensor is not None and tensor.problem), None)
            if problem is not None:
                raise _StuckError(index, str(problem))
        for output in self.source.graph.output:
            verdict = self.walk.output(output.name)
            if not verdict.independent:
                raise _StuckError(len(self.source.graph.node), self._output_reason(output.name, verdict.reason))

    def _output_reason(self, name: str, reason: str) -> str:
        producer = next((node for node in self.source.graph.node if name in node.output), None)
        return reason if producer is None else f"{reason}, it comes from {producer.op_type} node '{producer.name}'"

    def _visit(self, node: onnx.NodeProto) -> None:
        self.walk.visit(node)
        self.nodes.append(node)

    def _tensor(self, name: str) -> RowTensor | None:
        return self.walk.tensors.get(name)

    def _rows(self, name: str) -> Rows | None:
        tensor = self._tensor(name)
        return None if tensor is None else tensor.rows

    def _repaired(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the nodes that take the place of a node; the node itself if it needs no change."""
        if node.domain not in ("", "ai.onnx") or not any(self._rows(name) is not None for name in node.input):
            return [node]
        repair = _REPAIRS.get(node.op_type)
        if repair is None and RULES.get(node.op_type) is broadcast:
            repair = _Attempt._repair_broadcast
        return [node] if repair is None else repair(self, node)

    # Reshapes

    def _repair_reshape(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        tensor = self._tensor(node.input[0])
        target = None if tensor is None or tensor.rows is None else self._raw_target(node, tensor)
        if tensor is None or tensor.shape is None or tensor.rows is None or target is None:
            return [node]
        return self._reshaped(node, tensor.shape, tensor.rows, target)

    def _raw_target(self, node: onnx.NodeProto, tensor: RowTensor) -> Shape | None:
        """Return the target of a reshape with 0 and -1 as they stand; None if the model computes it or it is unknown."""
        shape = self._exported(tensor)
        attributes = _attributes(node)
        if node.op_type == "Flatten":
            axis = attributes.get("axis", 1) % (len(shape) + 1)
            return (math.prod(shape[:axis]), math.prod(shape[axis:]))
        if node.op_type == "Reshape":
            target = self._values(node.input[1])
            return None if target is None or (attributes.get("allowzero", 0) and 0 in target) else tuple(target)
        axes = attributes.get("axes")
        if axes is None and len(node.input) > 1 and node.input[1]:
            axes = self._values(node.input[1])
            if axes is None:
                return None
        if node.op_type == "Squeeze":
            axes = [i for i, size in enumerate(shape) if size == 1] if axes is None else [a % len(shape) for a in axes]
            return tuple(size for i, size in enumerate(shape) if i not in axes)
        rank = len(shape) + len(axes or ())
        added = {axis % rank for axis in axes or ()}
        sizes = iter(shape)
        return tuple(1 if axis in added else next(sizes) for axis in range(rank))

    def _reshaped(self, node: onnx.NodeProto, shape: Shape, rows: Rows, raw: Shape) -> list[onnx.NodeProto]:
        """Return a reshape to a target with the rows on one axis, the most plausible or that of `choices`."""
        exported = self._exported(RowTensor(shape, rows))
        target = _resolved(exported, raw)
        as_is = self._as_is(node, shape, rows)
        options = _meanings(shape, rows, target, self.batch_size) if target is not None else []
        if target is None or not options:
            return [node]
        options.sort(key=lambda option: (option.outer * option.inner != 1, option != as_is, option.axis))
        pattern = (shape, rows, target)
        if len(options) > 1:
            self.ambiguous.setdefault(pattern, len(options))
        chosen = options[self.choices.get(pattern, 0)]
        if chosen == as_is:
            return [node]
        written = list(target)
        written[chosen.axis] = -1
        if self.walk.free_sizes:
            # Other free dimensions keep the exporter's 0 or -1; the rows need a 0 then.
            written = [
                value if value < 1 and axis != rows.axis else size
                for axis, (value, size) in enumerate(zip(raw, target, strict=True))
            ]
            same = chosen._replace(axis=0) == rows._replace(axis=0) and chosen.axis == rows.axis
            if -1 in written[: chosen.axis] + written[chosen.axis + 1 :] and not same:
                raise RowsMixed("has a target with another free dimension, beside which the rows have no place")
            written[chosen.axis] = 0 if same else -1
        constant = self._add_constant(f"{node.name}_shape", np.array(written, np.int64))
        self.changes.append(f"{node.op_type} node '{node.name}': {list(target)} is {written} now")
        return [helper.make_node("Reshape", [node.input[0], constant], [node.output[0]], name=node.name)]

    def _as_is(self, node: onnx.NodeProto, shape: Shape, rows: Rows) -> Rows | None:
        """Return the location of the rows after a reshape without any change; None if it fails for other batch sizes."""
        target = self._raw_target_of_rows(node, shape)
        if target is None or math.prod(target) != math.prod(shape):
            return None
        axes = [axis for axis, size in enumerate(target) if size % ROWS == 0]
        if len(axes) != 1:
            return None
        options = _meanings(shape, rows, target, ROWS)
        return next((option for option in options if option.axis == axes[0]), None)

    def _raw_target_of_rows(self, node: onnx.NodeProto, shape: Shape) -> Shape | None:
        if node.op_type == "Gather":
            return None
        if node.op_type == "Squeeze" and not _attributes(node).get("axes") and len(node.input) < 2:
            return None
        attempt_batch, self.batch_size = self.batch_size, ROWS
        try:
            tensor = self._tensor(node.input[0])
            raw = None if tensor is None else self._raw_target(node, tensor)
            removed = node.op_type == "Squeeze" and raw is not None and math.prod(raw) != math.prod(shape)
            return None if raw is None or removed else _resolved(shape, raw)
        finally:
            self.batch_size = attempt_batch

    def _exported(self, tensor: RowTensor) -> Shape:
        """Return the shape of a tensor at the batch size of the export."""
        assert tensor.shape is not None, "the shape of a tensor with rows is known"
        assert tensor.rows is not None, "the tensor has rows"
        sizes = list(tensor.shape)
        sizes[tensor.rows.axis] = sizes[tensor.rows.axis] // ROWS * self.batch_size
        return tuple(sizes)

    # Other operators

    def _repair_gather(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        tensor, indices = self._tensor(node.input[0]), self._tensor(node.input[1])
        if tensor is None or tensor.shape is None or tensor.rows is None or indices is None or indices.value is None:
            return [node]
        axis = int(_attributes(node).get("axis", 0)) % len(tensor.shape)
        if axis != tensor.rows.axis or tensor.shape[axis] != ROWS or indices.counted is not None:
            return [node]
        picked = np.asarray(indices.value) % self.batch_size
        if picked.ndim == 1 and picked.tolist() == list(range(self.batch_size)):
            return self._identity(node)
        if picked.ndim == 0 and self.batch_size == 1:
            exported = self._exported(tensor)
            return self._reshaped(node, tensor.shape, tensor.rows, exported[:axis] + exported[axis + 1 :])
        return [node]

    def _repair_slice(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        tensor = self._tensor(node.input[0])
        if tensor is None or tensor.shape is None or tensor.rows is None or tensor.shape[tensor.rows.axis] != ROWS:
            return [node]
        attributes = _attributes(node)
        parts: list[list[int] | None] = [
            self._values(node.input[i]) if len(node.input) > i and node.input[i] else attributes.get(name)
            for i, name in ((1, "starts"), (2, "ends"), (3, "axes"), (4, "steps"))
        ]
        starts, ends = parts[0], parts[1]
        if starts is None or ends is None:
            return [node]
        axes = [axis % len(tensor.shape) for axis in (parts[2] if parts[2] is not None else range(len(starts)))]
        if tensor.rows.axis not in axes:
            return [node]
        index = axes.index(tensor.rows.axis)
        step = parts[3][index] if parts[3] is not None else 1
        if (
            len(range(*slice(starts[index], ends[index], step).indices(self.batch_size))) != self.batch_size
            or step != 1
        ):
            return [node]
        if starts[index] == 0 and ends[index] >= _INT64_MAX >> 32:
            return [node]
        starts, ends = list(starts), list(ends)
        starts[index], ends[index] = 0, _INT64_MAX
        self.changes.append(f"Slice node '{node.name}': its end along the batch is open now")
        if len(node.input) == 1:
            return [
                helper.make_node(
                    "Slice", [node.input[0]], list(node.output), name=node.name, axes=axes, starts=starts, ends=ends
                )
            ]
        changed = _copy(node)
        changed.input[1] = self._add_constant(f"{node.name}_starts", np.array(starts, np.int64))
        changed.input[2] = self._add_constant(f"{node.name}_ends", np.array(ends, np.int64))
        for i, values in ((3, parts[2]), (4, parts[3])):  # one type for all of them
            if values is not None and len(node.input) > i and node.input[i]:
                changed.input[i] = self._add_constant(f"{node.name}_{i}", np.array(values, np.int64))
        return [changed]

    def _repair_expand(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        tensor, target = self._tensor(node.input[0]), self._values(node.input[1])
        if tensor is None or tensor.shape is None or tensor.rows is None or target is None or self.batch_size == 1:
            return [node]
        axis = tensor.rows.axis - len(tensor.shape) + len(target)
        if axis < 0 or target[axis] != tensor.shape[tensor.rows.axis] // ROWS * self.batch_size:
            return [node]
        target[axis] = 1
        changed = _copy(node)
        changed.input[1] = self._add_constant(f"{node.name}_shape", np.array(target, np.int64))
        self.changes.append(f"Expand node '{node.name}': the batch is {target[axis]} of {target} now")
        return [changed]

    def _repair_resize(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        tensor = self._tensor(node.input[0])
        sizes = self._values(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if (
            tensor is None
            or tensor.shape is None
            or tensor.rows is None
            or sizes is None
            or "axes" in _attributes(node)
        ):
            return [node]
        axis = tensor.rows.axis
        if tensor.shape[axis] != ROWS or len(sizes) != len(tensor.shape) or sizes[axis] != self.batch_size:
            return [node]
        changed = _copy(node)
        changed.input[3] = self._with_count(f"{node.name}_sizes", sizes, axis)
        self.changes.append(f"Resize node '{node.name}': the batch among its sizes {sizes} is free now")
        return [changed]

    def _repair_broadcast(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Merge constants with one equal row for each row of the batch."""
        shapes = [tensor.shape for name in node.input if (tensor := self._tensor(name)) and tensor.shape is not None]
        rank = max(map(len, shapes), default=0)
        with_rows = next(t for name in node.input if (t := self._tensor(name)) and t.rows is not None)
        if with_rows.rows is None or with_rows.shape is None or with_rows.shape[with_rows.rows.axis] != ROWS:
            return [node]
        from_end = len(with_rows.shape) - with_rows.rows.axis
        if node.op_type == "MatMul" and from_end < 3:
            return [node]  # the last two axes of the other matrix are no batch
        changed = _copy(node)
        for index, name in enumerate(node.input):
            tensor = self._tensor(name)
            if (
                tensor is not None
                and tensor.shape is not None
                and tensor.constant
                and from_end <= min(rank, len(tensor.shape))
            ):
                changed.input[index] = self._merge_rows(name, tensor.shape, len(tensor.shape) - from_end, node)
        return [changed]

    def _repair_gemm(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        bias = self._tensor(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if bias is None or bias.shape is None or not bias.constant or len(bias.shape) != 2:
            return [node]
        changed = _copy(node)
        changed.input[2] = self._merge_rows(node.input[2], bias.shape, 0, node)
        return [changed]

    def _repair_concat(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Repeat constants for each row, e.g. the class token of a vision transformer."""
        with_rows = next(t for name in node.input if (t := self._tensor(name)) and t.rows is not None)
        if with_rows.rows is None or with_rows.shape is None or with_rows.shape[with_rows.rows.axis] != ROWS:
            return [node]
        return self._with_repeated(node, dict.fromkeys(range(len(node.input)), with_rows.rows.axis))

    def _repair_recurrent(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Repeat constant lengths and initial states of LSTM, GRU and RNN for each row."""
        states = 0 if _attributes(node).get("layout", 0) else 1
        return self._with_repeated(node, {4: 0, 5: states, 6: states})

    def _with_repeated(self, node: onnx.NodeProto, axes: dict[int, int]) -> list[onnx.NodeProto]:
        changed = _copy(node)
        for index, axis in axes.items():
            name = node.input[index] if index < len(node.input) else ""
            tensor = self._tensor(name)
            if tensor is None or tensor.shape is None or not tensor.constant or len(tensor.shape) <= axis:
                continue
            single = self._merge_rows(name, tensor.shape, axis, node)
            shape = [*tensor.shape[:axis], 1, *tensor.shape[axis + 1 :]]
            if tensor.shape[axis] not in (1, self.batch_size):
                continue
            target = self._with_count(f"{node.name}_{index}_shape", shape, axis)
            changed.input[index] = self._add_node("Expand", [single, target], f"{node.name}_{index}_rows")
            self.changes.append(f"{node.op_type} node '{node.name}': '{name}' is repeated for each row now")
        return [changed]

    def _identity(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        self.changes.append(f"{node.op_type} node '{node.name}': returns the whole batch now")
        return [helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)]

    # Constants

    def _values(self, name: str) -> list[int] | None:
        """Return the whole numbers of a constant; None if it is none or unknown."""
        tensor = self._tensor(name)
        if tensor is None or tensor.value is None or not tensor.constant or tensor.rows is not None:
            return None
        return [int(value) for value in np.asarray(tensor.value).reshape(-1)]

    def _merge_rows(self, name: str, shape: Shape, axis: int, node: onnx.NodeProto) -> str:
        """Return a constant with one row along `axis` instead of equal ones for each row of the batch.

        Raises:
            RowsMixed: the rows differ, so each row of the batch has another meaning.
        """
        if self.batch_size == 1 or shape[axis] != self.batch_size:
            return name
        values, sources = evaluate_constant(self.source, name)
        first = np.take(values, [0], axis=axis)
        if not np.array_equal(np.broadcast_to(first, values.shape), values, equal_nan=values.dtype.kind == "f"):
            raise RowsMixed(f"takes '{name}', which has other values for each row of the batch")
        row = self._add_constant(f"{name}_row", first)
        self.merged |= {*sources, row}
        self.changes.append(f"{node.op_type} node '{node.name}': '{name}' has one row for all now")
        return row

    def _with_count(self, base: str, sizes: Sequence[int], axis: int) -> str:
        """Return a shape with the number of rows on `axis`."""
        if not self._count:
            zero = self._add_constant("rows_axis", np.array([0], np.int64))
            shape = self._add_node("Shape", [self.source.graph.input[0].name], "rows_shape")
            self._count = self._add_node("Gather", [shape, zero], "rows_count", axis=0)
        parts = [self._count]
        if sizes[:axis]:
            parts.insert(0, self._add_constant(f"{base}_before", np.array(sizes[:axis], np.int64)))
        if sizes[axis + 1 :]:
            parts.append(self._add_constant(f"{base}_after", np.array(sizes[axis + 1 :], np.int64)))
        return self._add_node("Concat", parts, base, axis=0)

    def _add_node(self, operator: str, inputs: Sequence[str], base: str, **attributes: Any) -> str:
        name = reserve_name(base, self._names)
        self._visit(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def _add_constant(self, base: str, values: Array) -> str:
        tensor = numpy_helper.from_array(np.ascontiguousarray(values), reserve_name(base, self._names))
        self.constants.append(tensor)
        self.walk.add_constant(tensor.name, tensor)
        return tensor.name


_REPAIRS: dict[str, Callable[[_Attempt, onnx.NodeProto], list[onnx.NodeProto]]] = {
    **dict.fromkeys(("Flatten", "Reshape", "Squeeze", "Unsqueeze"), _Attempt._repair_reshape),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _Attempt._repair_recurrent),
    "Concat": _Attempt._repair_concat,
    "Expand": _Attempt._repair_expand,
    "Gather": _Attempt._repair_gather,
    "Gemm": _Attempt._repair_gemm,
    "MatMul": _Attempt._repair_broadcast,
    "Resize": _Attempt._repair_resize,
    "Slice": _Attempt._repair_slice,
}


def _meanings(shape: Shape, rows: Rows, target: Shape, batch_size: int) -> list[Rows]:
    """Return all locations that the rows can have after a reshape, which keeps the order of the elements.

    Args:
        shape: before the reshape, with `ROWS` for the number of rows.
        rows: their location in `shape`.
        target: after the reshape, with `batch_size` for the number of rows.
        batch_size: number of rows in `target`.
    """
    before = math.prod(shape[: rows.axis]) * rows.outer
    options = []
    for axis, size in enumerate(target):
        leading = math.prod(target[:axis])
        if not leading or before % leading:
            continue
        outer = before // leading
        if size and size % (outer * batch_size) == 0:
            options.append(Rows(axis, outer, size // (outer * batch_size)))
    return options


def _resolved(shape: Shape, raw: Shape) -> Shape | None:
    """Return a target of Reshape with numbers for 0 and -1; None if the sizes do not match."""
    target = [shape[i] if size == 0 and i < len(shape) else size for i, size in enumerate(raw)]
    if target.count(-1) > 1 or any(size < -1 for size in target):
        return None
    if -1 in target:
        rest = math.prod(size for size in target if size != -1)
        if not rest or math.prod(shape) % rest:
            return None
        target[target.index(-1)] = math.prod(shape) // rest
    return tuple(target)


def _finished(attempt: _Attempt, batch_size: int) -> FreedBatch:
    """Return the model of a successful walk, checked once more as a whole."""
    model = copy_model(attempt.source)
    graph = model.graph
    replace_items(graph.node, attempt.nodes)
    graph.initializer.extend(attempt.constants)
    used = {name for node in graph.node for name in (*node.input, *captured(node))}
    used |= {output.name for output in graph.output}
    replace_items(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in used])
    values = [*graph.input, *graph.output]
    taken = {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim[1:]}
    symbol = next(name for name in ("batch", "rows", "batch_rows", "headrace_rows") if name not in taken)
    for value in values:
        dims = value.type.tensor_type.shape.dim
        if not dims:  # an output of unknown shape: its rank is known from the walk
            tensor = attempt.walk.tensors[value.name]
            assert tensor is not None, "the walk has visited the output"
            assert tensor.shape is not None, "the walk has followed its rows"
            for _ in tensor.shape:
                dims.add()
        dims[0].dim_param = symbol
    verdict = analyse_rows(model, [value.name for value in graph.input])
    if not verdict.independent:
        raise BuildError(f"the batch dimension cannot be freed: {verdict.reason}: {_CURE}")
    return FreedBatch(model, batch_size, tuple(attempt.changes), frozenset(attempt.merged))


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    copied = onnx.NodeProto()
    copied.CopyFrom(node)
    return copied
