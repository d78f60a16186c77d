"""Random ONNX graphs over every operator that has a rule for rows: `graph` builds one, `difference` runs it.

Most graphs keep rows apart: they compute shapes from the batch, fill tensors of these shapes, and move the rows to other axes.
Some work along the rows, and some compute with the number of rows: as data, as a size, as a parameter, in a branch, a loop or a
function. `row_operators` has a method for each kind of operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, defs, helper, numpy_helper

Array = np.ndarray[Any, Any]
FLOAT, INT32, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL
UINT8, UINT32 = TensorProto.UINT8, TensorProto.UINT32
NO_END = (1 << 63) - 1
# The number of rows in shapes here: no constant has it.
N = 10_007
_OPSETS = (11, 13, 17, 18, 21, 23, 24)
_SHAPES = ((N, 4), (N, 4), (N, 3, 4), (N, 3), (N, 2, 3), (N, 2, 4, 4), (N, 1, 2))
_REQUESTS = ((1, 2), (2, 1, 3), (1, 1, 1), (3, 4), (5, 1), (3, 3), (2, 2, 2))
_DOMAIN = "headrace.test"


@cache
def _has(operator: str, opset: int) -> bool:
    if operator == "GlobalLpPool" and opset > 21:
        return False  # ONNX Runtime has no kernel
    try:
        return bool(defs.get_schema(operator, opset))
    except defs.SchemaError:
        return False


class Unsuitable(Exception):
    """The operator does not fit the tensors of the graph."""


@dataclass(frozen=True)
class Value:
    """One tensor.

    Attributes:
        name: of the tensor.
        shape: with `N` for the number of rows.
        kind: ONNX's number of the datatype.
        exact: whole numbers, on which rounding has no effect: steps such as Floor need them.
    """

    name: str
    shape: tuple[int, ...]
    kind: int = FLOAT
    exact: bool = True

    @property
    def axis(self) -> int:
        """The axis of the rows; -1 if there is none."""
        return next((index for index, size in enumerate(self.shape) if size % N == 0), -1)


@dataclass
class RowGraph:
    """A random model of X FP32 (batch, ...).

    Attributes:
        seed: of `graph`.
        model: to run.
        shape: of X, without the rows.
        free: axis in `shape` of a free size; -1 if there is none.
        operators: of all nodes.
    """

    seed: int
    model: onnx.ModelProto
    shape: tuple[int, ...]
    free: int
    operators: frozenset[str]


class Steps:
    """Nodes, constants, and the tensors that later nodes may take.

    Attributes:
        with_counts: the graph may compute with the number of rows.
        with_mixing: the graph may work along the rows.
    """

    def __init__(self, seed: int, operator: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.choice([opset for opset in _OPSETS if _has(operator, opset)]))
        self.with_counts, self.with_mixing = self.chance(0.4), self.chance(0.25)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.values = [Value("X", self.choice(_SHAPES))]

    # Choices

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def choice(self, options: Sequence[Any]) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def axis(self, value: Value, smallest: int = 1) -> int:
        """An axis beside the rows; in some graphs the rows themselves."""
        axes = [i for i, size in enumerate(value.shape) if i != value.axis and size >= smallest]
        if self.with_mixing and self.chance(0.4) and value.axis >= 0:
            return value.axis
        if not axes:
            raise Unsuitable
        return int(self.choice(axes))

    # Nodes and constants

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        return self.node_of(op, *inputs, outputs=outputs, **attributes)[0]

    def node_of(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), names, **attributes))
        return names

    def const(self, values: Any, dtype: Any = np.float32) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), f"c{len(self.constants)}"))
        return self.constants[-1].name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weights(self, *shape: int) -> str:
        """A parameter of an operator, FP32: constants, or values computed from the number of rows."""
        if self.with_counts and self.chance(0.1):
            return self.counted(shape)
        return self.const(self.rng.integers(-2, 3, shape))

    def with_axes(self, op: str, value: str, axes: Sequence[int], **attributes: Any) -> str:
        """A node whose axes are an attribute or an input."""
        since = 13 if op in ("Squeeze", "Unsqueeze", "ReduceSum") else 18
        if self.opset < since:
            return self.node(op, value, axes=list(axes), **attributes)
        return self.node(op, value, self.ints(*axes), **attributes)

    def add(self, name: str, shape: Sequence[int], kind: int = FLOAT, exact: bool = True) -> Value:
        """A result that later nodes may take; FP32 stays within 8."""
        if kind == FLOAT:
            name = self.node("Clip", name, self.const(-8), self.const(8))
        self.values.append(Value(name, tuple(int(size) for size in shape), kind, exact))
        return self.values[-1]

    # Tensors

    def pick(self, kind: int = FLOAT, exact: bool = False, rank: int = 2) -> Value:
        """A tensor with rows, mostly a late one; cast and given more axes where it does not fit."""
        fitting = [v for v in self.values if v.kind == kind and v.axis >= 0 and (v.exact or not exact)]
        if not fitting and kind == FLOAT:
            fitting = self.values[:1]
        if not fitting:
            source = self.pick(exact=True)
            zero = self.const(0)
            name = source.name if kind != UINT32 else self.node("Relu", source.name)
            name = self.node("Greater", name, zero) if kind == BOOL else self.node("Cast", name, to=kind)
            fitting = [Value(name, source.shape, kind)]
        value: Value = fitting[-1] if self.chance(0.5) else self.choice(fitting)
        while len(value.shape) < rank:
            name = self.with_axes("Unsqueeze", value.name, [len(value.shape)])
            value = Value(name, (*value.shape, 1), value.kind, value.exact)
        return value

    def first(self, exact: bool = False) -> Value:
        """An FP32 tensor with the rows in front."""
        value = self.pick(exact=exact)
        if value.axis == 0:
            return value
        order = [value.axis, *(i for i in range(len(value.shape)) if i != value.axis)]
        name = self.node("Transpose", value.name, perm=order)
        return Value(name, tuple(value.shape[i] for i in order), FLOAT, value.exact)

    def of_shape(self, *dims: int, exact: bool = False) -> Value:
        """An FP32 tensor of the shape (rows, *dims)."""
        value = self.first(exact)
        width = math.prod(value.shape[1:])
        if value.shape[1:] == dims:
            return value
        flat = self.node("Flatten", value.name, axis=1)
        if width != math.prod(dims):
            flat = self.node("MatMul", flat, self.const(self.rng.integers(-2, 3, (width, math.prod(dims)))))
            flat = self.node("Clip", flat, self.const(-8), self.const(8))
        shape = (value.shape[0], *dims)
        return Value(self.node("Reshape", flat, self.target(shape)), shape, FLOAT, value.exact)

    def other(self, value: Value, exact: bool = False) -> Value:
        """A second operand that is broadcast to a tensor."""
        same = [v for v in self.values if v.shape == value.shape and v.kind == value.kind and (v.exact or not exact)]
        draw = self.rng.random()
        if self.with_counts and value.kind == FLOAT and draw < 0.2:
            name = self.counted_rows(value.shape) if self.chance(0.6) else self.counted(())
            return Value(name, value.shape, FLOAT)
        if draw < 0.45 and same:
            chosen: Value = self.choice(same)
            return chosen
        if draw < 0.65:
            return Value(self.filled(value.shape, value.kind), value.shape, value.kind)
        dims = [size if i != value.axis and self.chance(0.6) else 1 for i, size in enumerate(value.shape)]
        if self.with_mixing and value.axis >= 0 and self.chance(0.2):
            dims[value.axis] = 3  # the model is for three rows
        dims = dims[int(self.rng.integers(max(value.axis, 0) + 2)) :]
        dtype = helper.tensor_dtype_to_np_dtype(value.kind)
        return Value(self.const(self.rng.integers(0, 3, dims), dtype), value.shape, value.kind)

    def filled(self, shape: Sequence[int], kind: int = FLOAT) -> str:
        """Constants, repeated for each row."""
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        way = self.choice(["fill", "expand", "tile"])
        if way == "fill":
            return self.node("ConstantOfShape", self.target(shape), value=numpy_helper.from_array(np.ones(1, dtype)))
        dims = [1 if size % N == 0 else size for size in shape]
        values = self.const(self.rng.integers(0, 3, dims), dtype)
        if way == "expand":
            return self.node("Expand", values, self.target(shape))
        return self.node("Tile", values, self.target([size if size % N == 0 else 1 for size in shape]))

    # Shapes from the batch

    def rows(self, factor: int = 1) -> str:
        """The number of rows times a factor, INT64 (1,), read from the shape of some tensor."""
        source = self.pick(self.choice([v.kind for v in self.values if v.axis >= 0]), rank=1)
        axis, size = source.axis, source.shape[source.axis] // N
        way = self.choice(["gather", "scalar", "slice", "attributes"] if self.opset >= 15 else ["gather", "slice"])
        if way == "attributes":
            count = self.node("Shape", source.name, start=axis, end=axis + 1)
        else:
            shape = self.node("Shape", source.name)
            if way == "slice":
                count = self.node("Slice", shape, self.ints(axis), self.ints(axis + 1), self.ints(0))
            elif way == "gather":
                count = self.node("Gather", shape, self.ints(axis), axis=0)
            else:
                scalar = self.node("Gather", shape, self.const(axis, np.int64), axis=0)
                count = self.with_axes("Unsqueeze", scalar, [0])
        if self.chance(0.5):
            count, size = self._changed(count), size
        if factor % size:
            return self.node("Div", self.node("Mul", count, self.ints(factor)), self.ints(size))
        return count if factor == size else self.node("Mul", count, self.ints(factor // size))

    def _changed(self, count: str) -> str:
        """The same number in another way."""
        way = self.choice(["cast", "identity", "there and back", "concat", "missing", "squeeze", "scale"])
        if way == "cast":
            return self.node("Cast", self.node("Cast", count, to=INT32), to=INT64)
        if way == "there and back":
            other = self.ints(int(self.rng.integers(-3, 9)))
            return self.node("Sub", self.node("Add", count, other), other)
        if way == "concat":
            both = self.node("Concat", self.ints(7), count, axis=0)
            return self.node("Slice", both, self.ints(1), self.ints(2))
        if way == "missing":
            return self.node("Where", self.node("Equal", count, self.ints(-1)), self.ints(5), count)
        if way == "squeeze":
            return self.with_axes("Unsqueeze", self.with_axes("Squeeze", count, [0]), [0])
        if way == "scale":
            return self.node("Div", self.node("Mul", count, self.ints(6)), self.ints(6))
        return self.node("Identity", count)

    def target(self, shape: Sequence[int]) -> str:
        """A shape as INT64."""
        same = [v for v in self.values if v.shape == tuple(shape)]
        if same and self.chance(0.4):
            return self.node("Shape", self.choice(same).name)
        parts = [self.rows(size // N) if size % N == 0 else self.ints(size) for size in shape]
        return self.node("Concat", *parts, axis=0)

    # Values from the number of rows

    def count(self) -> str:
        """A number that depends on that of the rows, INT64 (1,)."""
        rows = self.rows(int(self.rng.integers(1, 3)))
        way = self.choice(
            ["as is", "as is", "square", "next", "pairs", "less", "half", "bounded", "odd", "size", "product"]
        )
        if way == "square":
            return self.node("Mul", rows, rows)
        if way in ("next", "pairs"):
            product = self.node("Mul", rows, self.node("Add", rows, self.ints(1)))
            return product if way == "next" else self.node("Div", product, self.ints(2))
        if way == "less":
            return self.node("Sub", rows, self.ints(int(self.rng.integers(1, 4))))
        if way == "half":
            return self.node("Div", rows, self.ints(2))
        if way == "bounded":
            return self.node("Min", rows, self.ints(3)) if self.opset >= 12 else rows
        if way == "odd":
            return self.node("Mod", rows, self.ints(2))
        if way == "size":
            return self.node("Reshape", self.node("Size", self.pick().name), self.ints(1))
        if way == "product":
            return self.node("ReduceProd", self.node("Shape", self.pick().name), keepdims=1)
        return rows

    def counted(self, shape: Sequence[int]) -> str:
        """FP32 values of a shape without rows."""
        count, way = self.count(), self.choice(["cast", "cast", "look-up", "sum", "columns", "if", "loop"])
        if way == "look-up":
            number = self.node("Gather", self.const(np.arange(9)), self.node("Mod", count, self.ints(9)), axis=0)
        elif way == "sum":
            number = self.with_axes("ReduceSum", self.node("ConstantOfShape", count, value=_ONE), [0], keepdims=1)
        elif way == "columns":
            row = self.node("Reshape", self.node("ConstantOfShape", count, value=_ONE), self.ints(1, -1))
            number = self.node("Reshape", self.with_axes("ReduceSum", row, [1], keepdims=0), self.ints(1))
        elif way == "if":
            number = self.branches(count)
        elif way == "loop":
            number = self.loop(count)
        else:
            number = self.node("Cast", count, to=FLOAT)
        return number if shape == () else self.node("Expand", number, self.ints(*shape))

    def counted_rows(self, shape: tuple[int, ...]) -> str:
        """FP32 values of a shape with rows."""
        way = self.choice(["expand", "expand", "tile", "range", "places", "running", "split", "function"])
        axis = Value("", shape).axis
        if way == "expand" or axis < 0:
            return self.node("Cast", self.node("Expand", self.count(), self.target(shape)), to=FLOAT)
        if way == "tile":
            tiled = self.node(
                "Tile", self.node("Reshape", self.count(), self.ints(*[1] * len(shape))), self.target(shape)
            )
            return self.node("Cast", tiled, to=FLOAT)
        if way == "running":
            axis_name = self.const(axis, np.int64)
            return self.node("CumSum", self.node("ConstantOfShape", self.target(shape), value=_ONE), axis_name)
        if way == "function":
            source = self.filled(shape)
            return self.function(source)
        if way == "split":
            squared = self.node("Mul", self.rows(), self.node("Add", self.rows(), self.ints(1)))
            row = self.node("ConstantOfShape", squared, value=_ONE)
            table = self.node("Reshape", row, self.node("Concat", self.rows(), self.ints(-1), axis=0))
            numbers = self.with_axes("ReduceSum", table, [1], keepdims=0)
        elif way == "places":
            ones = self.node("ConstantOfShape", self.rows(), value=_ONE)
            numbers = self.node("Cast", self.node("Reshape", self.node("NonZero", ones), self.ints(-1)), to=FLOAT)
        else:
            limit = self.with_axes("Squeeze", self.rows(), [0])
            zero, one = self.const(0, np.int64), self.const(1, np.int64)
            numbers = self.node("Cast", self.node("Range", zero, limit, one), to=FLOAT)
        dims = [1] * len(shape)
        dims[axis] = -1
        return self.node("Expand", self.node("Reshape", numbers, self.ints(*dims)), self.target(shape))

    # Control flow and functions

    def branches(self, count: str) -> str:
        condition = self.with_axes("Squeeze", self.node("Greater", count, self.ints(3)), [0])
        result = helper.make_tensor_value_info("out", FLOAT, None)
        parts = [
            helper.make_graph([helper.make_node("Identity", [self.const([value])], ["out"])], "branch", [], [result])
            for value in (1, 3)
        ]
        return self.node("If", condition, then_branch=parts[0], else_branch=parts[1])

    def loop(self, count: str) -> str:
        """The start, with one added for each turn."""
        info = helper.make_tensor_value_info
        body = helper.make_graph(
            [helper.make_node("Add", ["sum", self.const([1])], ["more"]), helper.make_node("Identity", ["go"], ["on"])],
            "body",
            [info("turn", INT64, []), info("go", BOOL, []), info("sum", FLOAT, None)],
            [info("on", BOOL, []), info("more", FLOAT, None)],
        )
        turns = self.with_axes("Squeeze", self.node("Mod", count, self.ints(7)), [0])
        return self.node("Loop", turns, self.const(True, np.bool_), self.const([0]), body=body)

    def scan(self, value: Value, axis: int) -> str:
        """Running sums along an axis."""
        info, rest = helper.make_tensor_value_info, [size for i, size in enumerate(value.shape) if i != axis]
        nodes = [helper.make_node("Add", ["sum", "part"], ["more"]), helper.make_node("Identity", ["more"], ["result"])]
        ends = (
            [info("sum", FLOAT, None), info("part", FLOAT, None)],
            [info("more", FLOAT, None), info("result", FLOAT, None)],
        )
        start = self.filled(rest)
        attributes = {"body": helper.make_graph(nodes, "body", *ends), "num_scan_inputs": 1}
        names = self.node_of(
            "Scan", start, value.name, outputs=2, scan_input_axes=[axis], scan_output_axes=[axis], **attributes
        )
        return names[1]

    def function(self, source: str) -> str:
        """A call of a function that adds the first of the sizes to a tensor, or does not."""
        name = f"step{len(self.functions)}"
        nodes = [
            helper.make_node("Shape", ["x"], ["shape"]),
            helper.make_node("ConstantOfShape", ["shape"], ["zero"]),
            helper.make_node("Add", ["x", "zero"], ["same"]),
        ]
        if self.with_counts:
            ends = [numpy_helper.from_array(np.array([value])) for value in (0, 1)]
            nodes += [
                helper.make_node("Constant", [], ["from"], value=ends[0]),
                helper.make_node("Constant", [], ["to"], value=ends[1]),
                helper.make_node("Slice", ["shape", "from", "to"], ["rows"]),
                helper.make_node("Expand", ["rows", "shape"], ["all"]),
                helper.make_node("Cast", ["all"], ["added"], to=FLOAT),
                helper.make_node("Add", ["same", "added"], ["y"]),
            ]
        else:
            nodes += [helper.make_node("Relu", ["same"], ["y"])]
        opsets = [helper.make_opsetid("", self.opset)]
        self.functions.append(helper.make_function(_DOMAIN, name, ["x"], ["y"], nodes, opsets))
        return self.node(name, source, domain=_DOMAIN)


_ONE = numpy_helper.from_array(np.ones(1, np.float32))

Operator = Callable[[Steps, str], None]


def graph(seed: int, operator: str, operators: dict[str, Operator], extras: Sequence[Operator]) -> RowGraph:
    """Return the graph of a seed, which has an operator at least once where it fits.

    Args:
        seed: the same graph each time.
        operator: one of `operators`.
        operators: method for each operator, by its name.
        extras: steps that are no single operator.
    """
    steps = Steps(seed, operator)
    count = int(steps.rng.integers(1, 6))
    names = [str(steps.choice(list(operators))) for _ in range(count)]
    names[int(steps.rng.integers(count))] = operator
    for name in names:
        if not _has(name, steps.opset):
            continue
        try:
            (steps.choice(extras) if name != operator and steps.chance(0.12) else operators[name])(steps, name)
        except Unsuitable:
            if name == operator:
                raise
    results = steps.values[-int(steps.rng.integers(1, 4)) :]
    outputs = []
    for index, value in enumerate(results):
        name = value.name
        if value.axis > 0:
            order = [value.axis, *(i for i in range(len(value.shape)) if i != value.axis)]
            name = steps.node("Transpose", name, perm=order)
        if value.axis >= 0 and value.shape[value.axis] != N:
            name = steps.node("Reshape", name, steps.node("Concat", steps.rows(), steps.ints(-1), axis=0))
        steps.nodes.append(helper.make_node("Identity", [name], [f"Y{index}"]))
        outputs.append(helper.make_tensor_value_info(f"Y{index}", value.kind, None))
    needed, nodes = {output.name for output in outputs}, []
    for node in reversed(steps.nodes):  # without those that no output needs
        if needed.intersection(node.output):
            nodes.insert(0, node)
            needed.update(node.input)
    shape = steps.values[0].shape[1:]
    free = int(steps.rng.integers(len(shape))) if steps.chance(0.15) else -1
    dims = ["batch", *(f"d{i}" if i == free else size for i, size in enumerate(shape))]
    x = helper.make_tensor_value_info("X", FLOAT, dims)
    opsets = [helper.make_opsetid("", steps.opset), helper.make_opsetid(_DOMAIN, 1)]
    created = helper.make_graph(nodes, "rows", [x], outputs, steps.constants)
    model = helper.make_model(created, opset_imports=opsets, ir_version=10, functions=steps.functions)
    return RowGraph(seed, model, shape, free, frozenset(node.op_type for node in nodes))


def session_of(model: onnx.ModelProto, optimized: bool) -> ort.InferenceSession:
    """Return a session of one thread; raises where ONNX Runtime refuses the model."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimized else level.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def difference(created: RowGraph, session: ort.InferenceSession, seed: int) -> str | None:
    """Compare requests alone with a batch of all, and with one that has further rows of zeros, as a padded batch has.

    Returns:
        "" if all answers are equal; else the difference. None if a request alone fails.
    """
    rng = np.random.default_rng(seed)
    sizes = _REQUESTS[int(rng.integers(len(_REQUESTS)))]
    shape = list(created.shape)
    if created.free >= 0:
        shape[created.free] = int(rng.choice([1, 2, 3, 4, 8]))
    parts = [rng.integers(-4, 5, (rows, *shape)).astype(np.float32) for rows in sizes]
    try:
        alone = [session.run(None, {"X": part}) for part in parts]
    except Exception:
        return None
    padding = np.zeros((int(rng.integers(1, 4)), *shape), np.float32)
    for batch in (np.concatenate(parts), np.concatenate([*parts, padding])):
        try:
            together = session.run(None, {"X": batch})
        except Exception as error:
            return f"requests of {sizes} rows run alone, {len(batch)} rows do not: {error}"
        for index, whole in enumerate(together):
            start = 0
            for rows, answers in zip(sizes, alone, strict=True):
                expected, actual = answers[index], whole[start : start + rows] if whole.ndim else whole
                start += rows
                if actual.shape != expected.shape or not _close(actual, expected):
                    return f"Y{index} of a request of {rows} rows among {len(batch)}: {actual} instead of {expected}"
    return ""


def _close(actual: Array, expected: Array) -> bool:
    if actual.dtype.kind != "f":
        return bool(np.array_equal(actual, expected))
    return bool(np.allclose(actual, expected, 1e-3, 1e-3, equal_nan=True))
