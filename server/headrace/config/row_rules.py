"""Rules for single ONNX operators: location of the rows of a batch in an output, given their location in the inputs.

A tensor that depends on the rows has one axis that counts them. The axis may hold more than rows: a reshape of (rows,
heads, d) to (rows * heads, d) keeps every row's elements together. `Rows` has the location of a row on the axis. An
operator that computes across that axis raises `RowsMixed`; one that is not proven to keep rows apart raises
`RowsUnproven`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy.typing as npt

Values = npt.NDArray[Any]
Shape = tuple[int, ...]

# Number of rows in every shape: a prime that no model has as a dimension.
ROWS = 1_000_003
# A slice end of at least this value means the end of the axis.
_NO_END = (1 << 31) - 1


class Rows(NamedTuple):
    """Location of the rows: `axis` has the size outer * rows * inner, in this order.

    Attributes:
        axis: index of the axis, from 0.
        outer: repetitions of the whole batch along the axis.
        inner: elements of each row along the axis.
    """

    axis: int
    outer: int = 1
    inner: int = 1


class RowsMixed(Exception):
    """The operator computes across the rows of a batch, or with their number."""


class RowsUnproven(Exception):
    """It is not proven that the operator keeps the rows apart."""


@dataclass(slots=True)
class RowTensor:
    """State of one tensor in the analysis.

    Attributes:
        shape: with `ROWS` for the number of rows; None if unknown.
        rows: location of the rows; None for a tensor with the same values for all rows.
        value: its elements, if they are few and known.
        counted: factor of the number of rows in each element of `value`, which is factor * rows + a constant; None if all
            are 0.
        problem: reason why nothing can be proven for the tensor; None if there is none.
    """

    shape: Shape | None
    rows: Rows | None = None
    value: Values | None = None
    counted: Values | None = None
    problem: RowsMixed | RowsUnproven | None = None

    @property
    def constant(self) -> bool:
        """True if neither the rows nor their number affect it."""
        return self.rows is None and self.counted is None


@dataclass(slots=True)
class Call:
    """One node with the inputs of a rule.

    Attributes:
        op: the operator.
        opset: version of the operator set.
        inputs: None for an absent optional input.
        attributes: by name, as Python values.
        shapes: shapes of the outputs, None if unknown.
    """

    op: str
    opset: int
    inputs: Sequence[RowTensor | None]
    attributes: Mapping[str, Any]
    shapes: Sequence[Shape | None]

    def input(self, index: int) -> RowTensor | None:
        """Return the input at `index`, None if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    @property
    def first(self) -> tuple[RowTensor, Shape, Rows]:
        """The first input, which must hold the rows; raises RowsUnproven if it does not."""
        tensor = self.inputs[0]
        if tensor is None or tensor.rows is None:
            raise RowsUnproven("takes the rows as another input than its first")
        return tensor, shape_of(tensor), tensor.rows

    def require_constant(self) -> None:
        """Require that no input after the first depends on the rows.

        Raises:
            RowsUnproven: one does.
        """
        if any(tensor is not None and not tensor.constant for tensor in self.inputs[1:]):
            raise RowsUnproven("takes the rows in more inputs than its first")

    def constants(self, index: int, attribute: str = "") -> list[int] | None:
        """Return whole numbers from an attribute or a constant input; None if both are absent.

        Raises:
            RowsUnproven: the values of the input are unknown before the model runs.
        """
        if attribute and attribute in self.attributes:
            value = self.attributes[attribute]
            return list(value) if isinstance(value, list | tuple) else [value]
        tensor = self.input(index)
        if tensor is None:
            return None
        if tensor.value is None or not tensor.constant:
            raise RowsUnproven("has axes that are not constants")
        return [int(value) for value in tensor.value.reshape(-1)]

    def constants_of(self, tensor: RowTensor) -> list[float]:
        """Return the values of a constant input.

        Raises:
            RowsUnproven: they are unknown before the model runs.
        """
        if tensor.value is None or not tensor.constant:
            raise RowsUnproven("has scales that are not constants")
        return [float(value) for value in tensor.value.reshape(-1)]


Rule = Callable[[Call], list[Rows | None]]


def shape_of(tensor: RowTensor) -> Shape:
    """Return the shape of a tensor.

    Raises:
        RowsUnproven: it is unknown.
    """
    if tensor.shape is None:
        raise RowsUnproven("takes a tensor of unknown shape")
    return tensor.shape


def across_rows() -> RowsMixed:
    """Create the error of an operator that works along the batch dimension."""
    return RowsMixed("computes across the rows of the batch")


def rows_after_reshape(shape: Shape, rows: Rows, target: Shape) -> Rows:
    """Return the location of the rows after a reshape, which keeps the order of the elements.

    Raises:
        RowsUnproven: rows are no longer on one axis.
    """
    before = math.prod(shape[: rows.axis]) * rows.outer
    axis = next((index for index, size in enumerate(target) if size % ROWS == 0), None)
    if axis is not None and math.prod(target) == math.prod(shape):
        leading = math.prod(target[:axis])
        if leading and before % leading == 0:
            outer = before // leading
            if outer and (target[axis] // ROWS) % outer == 0:
                return Rows(axis, outer, target[axis] // ROWS // outer)
    raise RowsUnproven("gives the batch dimension another meaning")


def _same(call: Call) -> list[Rows | None]:
    """Element by element."""
    _, _, rows = call.first
    call.require_constant()
    return [rows] * len(call.shapes)


def broadcast(call: Call) -> list[Rows | None]:
    """Element by element of all inputs, aligned at their last axes."""
    rank = max(len(shape_of(tensor)) for tensor in call.inputs if tensor is not None)
    rows: Rows | None = None
    for tensor in call.inputs:
        if tensor is None or tensor.rows is None:
            continue
        aligned = tensor.rows._replace(axis=tensor.rows.axis + rank - len(shape_of(tensor)))
        if rows is not None and rows != aligned:
            raise RowsMixed("combines the batch dimension with another dimension")
        rows = aligned
    assert rows is not None, "a rule is for inputs with rows"
    for tensor in call.inputs:
        if tensor is None or tensor.rows is not None:
            continue
        shape = shape_of(tensor)
        index = rows.axis - rank + len(shape)
        if index >= 0 and shape[index] != 1:
            raise RowsUnproven("combines the batch dimension with a fixed one")
    return [rows] * len(call.shapes)


def _matmul(call: Call, left: int = 0, right: int = 1) -> list[Rows | None]:
    """A matrix product of the inputs `left` and `right`; the others are constants."""
    scales = [t for i, t in enumerate(call.inputs) if t is not None and i not in (left, right)]
    if any(not scale.constant for scale in scales):
        raise RowsUnproven("takes the rows in its scales or zero points")
    a, b = call.inputs[left], call.inputs[right]
    if a is None or b is None:
        raise RowsUnproven("lacks an input")
    if b.rows is not None and any(math.prod(shape_of(scale)) != 1 for scale in scales):
        raise RowsUnproven("has a scale for each row")
    (shape_a, shape_b), rank = (shape_of(a), shape_of(b)), max(len(shape_of(a)), len(shape_of(b)))
    if len(shape_a) < 2 or len(shape_b) < 2:
        raise RowsUnproven("multiplies by a vector")
    rows: Rows | None = None
    for tensor, shape, contracted, free in ((a, shape_a, 1, 2), (b, shape_b, 2, 1)):
        if tensor.rows is None:
            continue
        from_end = len(shape) - tensor.rows.axis
        if from_end == contracted:
            raise across_rows()
        other, other_shape = (b, shape_b) if tensor is a else (a, shape_a)
        aligned = tensor.rows._replace(axis=rank - from_end)
        if rows is not None and rows != aligned:
            raise RowsMixed("multiplies the rows by one another")
        if from_end == free:
            if other.rows is not None:
                raise RowsMixed("multiplies the rows by one another")
        elif other.rows is None and len(other_shape) >= from_end and other_shape[-from_end] != 1:
            raise RowsUnproven("combines the batch dimension with a fixed one")
        rows = aligned
    return [rows]


def _gemm(call: Call) -> list[Rows | None]:
    _, _, rows = call.first
    if call.input(1) is not None and not call.inputs[1].constant:  # type: ignore[union-attr]
        raise RowsMixed("multiplies the rows by one another")
    if rows.axis != (1 if call.attributes.get("transA", 0) else 0):
        raise across_rows()
    bias = call.input(2)
    out = rows._replace(axis=0)
    if bias is not None:
        shape = shape_of(bias)
        if bias.rows is not None and (len(shape) != 2 or bias.rows != out):
            raise RowsMixed("combines the batch dimension with another dimension")
        if bias.rows is None and len(shape) == 2 and shape[0] != 1:
            raise RowsUnproven("combines the batch dimension with a fixed one")
    return [out]


def _leading(call: Call) -> list[Rows | None]:
    """Operators that treat every entry of axis 0 separately: convolution, pooling, normalisation by channel."""
    _, _, rows = call.first
    call.require_constant()
    if rows.axis != 0:
        raise across_rows()
    return [rows] * len(call.shapes)


def _max_pool(call: Call) -> list[Rows | None]:
    if len(call.shapes) > 1:
        raise RowsUnproven("gives indices into the whole batch")
    return _leading(call)


def _dropout(call: Call) -> list[Rows | None]:
    training = call.input(2)
    if training is not None and (training.value is None or bool(training.value.any())):
        raise RowsUnproven("gives random values (training mode)")
    return _same(call)


def _batch_norm(call: Call) -> list[Rows | None]:
    if call.attributes.get("training_mode", 0) or len(call.shapes) > 1:
        raise RowsMixed("normalises over the rows of the batch (training mode)")
    return _leading(call)


def _along(call: Call, axes: Sequence[int]) -> list[Rows | None]:
    _, shape, rows = call.first
    if any(axis % len(shape) == rows.axis for axis in axes):
        raise across_rows()
    return [rows] * len(call.shapes)


def _axis_of(default: int) -> Rule:
    def rule(call: Call) -> list[Rows | None]:
        call.require_constant()
        return _along(call, [int(call.attributes.get("axis", default))])

    return rule


def _softmax(call: Call) -> list[Rows | None]:
    if call.opset >= 13:
        return _along(call, [int(call.attributes.get("axis", -1))])
    _, shape, _ = call.first
    axis = int(call.attributes.get("axis", 1)) % max(len(shape), 1)
    return _along(call, range(axis, len(shape)))


def _layer_norm(call: Call) -> list[Rows | None]:
    """Normalisation over all axes from one on."""
    call.require_constant()
    _, shape, _ = call.first
    axis = int(call.attributes.get("axis", -1)) % len(shape)
    if any(math.prod(shape_of(t)[: axis - len(shape)]) != 1 for t in call.inputs[1:] if t is not None):
        raise RowsUnproven("has a scale for each row")
    return _along(call, range(axis, len(shape)))


def _cumsum(call: Call) -> list[Rows | None]:
    return _along(call, call.constants(1) or [])


def _reduce(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    axes = call.constants(1, "axes")
    if not axes:
        if call.attributes.get("noop_with_empty_axes", 0):
            return [rows]
        raise across_rows()
    return [_without(call, [axis % len(shape) for axis in axes], rows)]


def _arg(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    return [_without(call, [int(call.attributes.get("axis", 0)) % len(shape)], rows)]


def _without(call: Call, axes: Sequence[int], rows: Rows) -> Rows:
    if rows.axis in axes:
        raise across_rows()
    if call.attributes.get("keepdims", 1):
        return rows
    return rows._replace(axis=rows.axis - sum(axis < rows.axis for axis in set(axes)))


def _reshape(call: Call) -> list[Rows | None]:
    """Reshape, Flatten, Squeeze, Unsqueeze: the order of the elements stays."""
    _, shape, rows = call.first
    target = call.shapes[0]
    if target is None:
        raise RowsUnproven("gives a tensor of unknown shape")
    return [rows_after_reshape(shape, rows, target)]


def _squeeze(call: Call) -> list[Rows | None]:
    if call.constants(1, "axes") is None:
        raise RowsUnproven("removes the batch dimension of a single row")
    return _reshape(call)


def _transpose(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    order = list(call.attributes.get("perm", range(len(shape) - 1, -1, -1)))
    return [rows._replace(axis=order.index(rows.axis))]


def _concat(call: Call) -> list[Rows | None]:
    all_rows = {tensor.rows for tensor in call.inputs if tensor is not None}
    rows = next(rows for rows in all_rows if rows is not None)
    rank = next(len(shape_of(tensor)) for tensor in call.inputs if tensor is not None)
    if int(call.attributes.get("axis", 0)) % rank == rows.axis:
        raise RowsMixed("concatenates tensors along the batch dimension")
    if len(all_rows) > 1:
        raise RowsUnproven("combines the batch dimension with another dimension")
    return [rows]


def _slice(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    call.require_constant()
    axes = call.constants(3, "axes")
    if axes is None:
        axes = list(range(len(call.constants(1, "starts") or shape)))
    fixed_axes = [axis % len(shape) for axis in axes]
    if rows.axis in fixed_axes:
        index = fixed_axes.index(rows.axis)
        starts, ends = call.constants(1, "starts") or [], call.constants(2, "ends") or []
        steps = call.constants(4) or [1] * len(fixed_axes)
        # PyTorch writes x[:] as a slice from 0 to the largest number.
        if (starts[index], steps[index]) != (0, 1) or ends[index] < _NO_END:
            raise RowsMixed("picks single rows of the batch")
    return [rows]


def _pad(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    call.require_constant()
    pads, axes = call.constants(1, "pads") or [], call.constants(3)
    fixed_axes = [axis % len(shape) for axis in axes] if axes is not None else list(range(len(shape)))
    if rows.axis in fixed_axes:
        index = fixed_axes.index(rows.axis)
        if pads[index] or pads[index + len(fixed_axes)]:
            raise RowsMixed("pads the batch dimension")
    return [rows]


def _resize(call: Call) -> list[Rows | None]:
    tensor, shape, rows = call.first
    if any(other is not None and other.rows is not None for other in call.inputs if other is not tensor):
        raise RowsUnproven("takes the rows in more inputs than its first")
    target = call.shapes[0]
    if target is None or len(target) != len(shape) or target[rows.axis] != shape[rows.axis]:
        raise RowsMixed("resizes the batch dimension")
    scales = call.input(2 if call.opset >= 11 else 1)
    if scales is not None and scales.shape != (0,):
        factors = call.constants_of(scales)
        if "axes" in call.attributes or len(factors) != len(shape) or factors[rows.axis] != 1:
            raise RowsUnproven("may resize the batch dimension")
    if call.attributes.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        raise RowsUnproven("crops by a region of interest")
    return [rows]


def _gather(call: Call) -> list[Rows | None]:
    data, indices = call.inputs[0], call.inputs[1]
    if data is None or indices is None:
        raise RowsUnproven("lacks an input")
    axis = int(call.attributes.get("axis", 0)) % len(shape_of(data))
    if data.rows is not None and indices.rows is not None:
        raise RowsMixed("looks up rows by other rows")
    if indices.rows is not None:
        return [indices.rows._replace(axis=indices.rows.axis + axis)]
    assert data.rows is not None, "a rule is for inputs with rows"
    if data.rows.axis == axis:
        raise RowsMixed("picks single rows of the batch")
    shift = len(shape_of(indices)) - 1 if data.rows.axis > axis else 0
    return [data.rows._replace(axis=data.rows.axis + shift)]


def _together_along(call: Call) -> list[Rows | None]:
    """All inputs with the same rows, the operator along one other axis: GatherElements, ScatterElements."""
    _, _, rows = call.first
    if any(tensor is not None and tensor.rows != rows for tensor in call.inputs):
        raise RowsUnproven("takes the rows in some of its inputs only")
    return _along(call, [int(call.attributes.get("axis", 0))])


def _gather_nd(call: Call) -> list[Rows | None]:
    data, indices = call.inputs[0], call.inputs[1]
    shared = int(call.attributes.get("batch_dims", 0))
    if data is not None and indices is not None:
        if data.rows is None and indices.rows is not None and not shared:
            if indices.rows.axis < len(shape_of(indices)) - 1:
                return [indices.rows]
        elif data.rows is not None and data.rows == indices.rows and data.rows.axis < shared:
            return [data.rows]
    raise RowsUnproven("looks up rows by other rows")


def _one_hot(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    call.require_constant()
    axis = int(call.attributes.get("axis", -1)) % (len(shape) + 1)
    return [rows._replace(axis=rows.axis + (axis <= rows.axis))]


def _quantize(call: Call) -> list[Rows | None]:
    _, shape, rows = call.first
    call.require_constant()
    scale = call.input(1)
    scales = () if scale is None else shape_of(scale)
    along_rows = len(scales) > 1 or int(call.attributes.get("axis", 1)) % len(shape) == rows.axis
    if math.prod(scales) != 1 and along_rows:
        raise RowsUnproven("has a scale for each row")
    return [rows]


def _expand(call: Call) -> list[Rows | None]:
    tensor, target = call.inputs[0], call.shapes[0]
    if tensor is None or target is None:
        raise RowsUnproven("gives a tensor of unknown shape")
    if tensor.rows is not None:
        shape = shape_of(tensor)
        axis = tensor.rows.axis + len(target) - len(shape)
        if target[axis] != shape[tensor.rows.axis]:
            raise RowsMixed("repeats the rows of the batch")
        return [tensor.rows._replace(axis=axis)]
    return [rows_of_filled(target)]


def _tile(call: Call) -> list[Rows | None]:
    tensor, target = call.inputs[0], call.shapes[0]
    if tensor is None or target is None:
        raise RowsUnproven("gives a tensor of unknown shape")
    shape = shape_of(tensor)
    if tensor.rows is not None:
        if target[tensor.rows.axis] != shape[tensor.rows.axis]:
            raise RowsMixed("repeats the rows of the batch")
        return [tensor.rows]
    rows = rows_of_filled(target)
    if rows is not None and shape[rows.axis] != 1:
        raise RowsUnproven("repeats a constant as often as there are rows")
    return [rows]


def rows_of_filled(target: Shape) -> Rows | None:
    """Return the location of the rows in a constant tensor whose shape has their number.

    Raises:
        RowsUnproven: the shape depends on their number in another way.
    """
    axes = [axis for axis, size in enumerate(target) if size % ROWS == 0 and size]
    if len(axes) != 1:
        raise RowsUnproven("makes a tensor whose shape depends on the number of rows")
    return Rows(axes[0], 1, target[axes[0]] // ROWS)


def _recurrent(call: Call) -> list[Rows | None]:
    """LSTM, GRU, RNN: X, W, R, B, sequence_lens, initial_h, initial_c, P."""
    _, _, rows = call.first
    layout = int(call.attributes.get("layout", 0))
    if rows != Rows(0 if layout else 1):
        raise across_rows()
    expected = {4: Rows(0), 5: Rows(0 if layout else 1), 6: Rows(0 if layout else 1)}
    for index, tensor in enumerate(call.inputs[1:], start=1):
        if tensor is not None and tensor.rows != expected.get(index):
            raise RowsUnproven("takes states that do not belong to the rows")
    return [Rows(0) if layout else Rows(2), *[Rows(0) if layout else Rows(1)] * (len(call.shapes) - 1)]


def _einsum(call: Call) -> list[Rows | None]:
    left, arrow, right = str(call.attributes.get("equation", "")).replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or len(terms) != len(call.inputs):
        raise RowsUnproven("has an equation without explicit letters")
    letters, all_rows = set(), set()
    for term, tensor in zip(terms, call.inputs, strict=True):
        if tensor is not None and tensor.rows is not None:
            letters.add(term[tensor.rows.axis])
            all_rows.add(tensor.rows._replace(axis=0))
    if len(letters) != 1 or len(all_rows) != 1:
        raise RowsMixed("multiplies the rows by one another")
    letter = letters.pop()
    for term, tensor in zip(terms, call.inputs, strict=True):
        if letter in term and (term.count(letter) > 1 or tensor is None or tensor.rows is None):
            raise RowsUnproven("combines the batch dimension with a fixed one")
    if right.count(letter) != 1:
        raise across_rows()
    return [all_rows.pop()._replace(axis=right.index(letter))]


def _trilu(call: Call) -> list[Rows | None]:
    _, shape, _ = call.first
    call.require_constant()
    return _along(call, [len(shape) - 1, len(shape) - 2])


def _mixes(text: str) -> Rule:
    def rule(_call: Call) -> list[Rows | None]:
        raise RowsMixed(text)

    return rule


_SAME = """
    Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Clip Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish
    Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign
    Sqrt Swish Tan Tanh ThresholdedRelu
"""
_BROADCAST = """
    Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or
    PRelu Pow Sub Sum Where Xor
"""
_LEADING = """
    AveragePool Conv ConvInteger ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool InstanceNormalization LRN
    LpPool QLinearConv SpaceToDepth
"""
_REDUCE = """
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
"""

_NUMBER = "has an output size that depends on the values of the whole batch"

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME.split(), _same),
    **dict.fromkeys(_BROADCAST.split(), broadcast),
    **dict.fromkeys(_LEADING.split(), _leading),
    **dict.fromkeys(_REDUCE.split(), _reduce),
    **dict.fromkeys(("Reshape", "Flatten", "Unsqueeze"), _reshape),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _layer_norm),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg),
    **dict.fromkeys(("GatherElements", "ScatterElements"), _together_along),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _quantize),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("NonZero", "Unique", "Compress", "NonMaxSuppression"), _mixes(_NUMBER)),
    "BatchNormalization": _batch_norm,
    "Concat": _concat,
    "CumSum": _cumsum,
    "DynamicQuantizeLinear": _mixes("scales by the smallest and largest value of the whole batch"),
    "Dropout": _dropout,
    "Einsum": _einsum,
    "Expand": _expand,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "LpNormalization": _axis_of(-1),
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MaxPool": _max_pool,
    "OneHot": _one_hot,
    "Pad": _pad,
    "QLinearMatMul": partial(_matmul, right=3),
    "Resize": _resize,
    "Slice": _slice,
    "Split": _axis_of(0),
    "Tile": _tile,
    "Squeeze": _squeeze,
    "TopK": _axis_of(-1),
    "Transpose": _transpose,
    "Trilu": _trilu,
}
