"""A step of a random graph for each operator that has a rule for rows: `OPERATORS`; and steps of several nodes: `EXTRAS`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.support.row_graphs import BOOL, FLOAT, INT64, NO_END, UINT32, N, Operator, Steps, Unsuitable, Value


def _named(names: str, step: Any, **options: Any) -> dict[str, Operator]:
    return dict.fromkeys(names.split(), partial(step, **options) if options else step)


# Element by element


def unary(
    steps: Steps, op: str, domain: str = "", exact: bool = False, discrete: bool = False, **attributes: Any
) -> None:
    x = steps.pick(exact=discrete)
    name = x.name
    if domain == "positive":
        name = steps.node("Add", steps.node("Abs", name), steps.const(1))
    elif domain == "within 1":
        name = steps.node("Mul", steps.node("Tanh", name), steps.const(0.9))
    steps.add(steps.node(op, name, **attributes), x.shape, FLOAT, exact and x.exact)


def clip(steps: Steps, op: str) -> None:
    x = steps.pick()
    bound = steps.const(2)
    if steps.with_counts and steps.chance(0.2):
        bound = steps.node("Cast", steps.with_axes("Squeeze", steps.count(), [0]), to=FLOAT)
    steps.add(steps.node(op, x.name, steps.const(-2), bound), x.shape, FLOAT, x.exact)


def test_of_floats(steps: Steps, op: str) -> None:
    x = steps.pick(exact=True)
    steps.add(steps.node(op, x.name), x.shape, BOOL)


def cast(steps: Steps, op: str) -> None:
    kinds = [kind for kind in (BOOL, INT64) if any(v.kind == kind and v.axis >= 0 for v in steps.values)]
    if kinds:
        x = steps.pick(steps.choice(kinds))
        steps.add(steps.node(op, x.name, to=FLOAT), x.shape)
    else:
        x = steps.pick(exact=True)
        steps.add(steps.node(op, x.name, to=INT64), x.shape, INT64)


def of_kind(steps: Steps, op: str, kind: int) -> None:
    x = steps.pick(kind)
    steps.add(steps.node(op, x.name), x.shape, kind)


def binary(steps: Steps, op: str, exact: bool = True, discrete: bool = False, result: int = FLOAT) -> None:
    x = steps.pick(exact=discrete)
    y = steps.other(x, discrete)
    names = [x.name, y.name]
    if op == "Div":
        names[1] = steps.node("Add", steps.node("Abs", y.name), steps.const(1))
    elif op == "Pow":
        names[0] = steps.node("Add", steps.node("Abs", x.name), steps.const(1))
        names[1] = steps.node("Clip", y.name, steps.const(-2), steps.const(2))
    elif op in ("Max", "Mean", "Min", "Sum") and steps.chance(0.4):
        third = steps.other(x)
        names, y = [*names, third.name], Value("", x.shape, FLOAT, y.exact and third.exact)
    if op in ("Add", "Sub", "Mul") and steps.chance(0.3):
        names.reverse()
    steps.add(steps.node(op, *names), x.shape, result, discrete or (exact and x.exact and y.exact))


def binary_of_kind(steps: Steps, op: str, kind: int) -> None:
    x = steps.pick(kind)
    y = steps.other(x)
    if op == "Mod":
        names = [x.name, steps.node("Add", steps.node("Abs", y.name), steps.ints(1))]
        steps.add(steps.node(op, *names), x.shape, kind)
    else:
        steps.add(steps.node(op, x.name, y.name), x.shape, kind)


def bit_shift(steps: Steps, op: str) -> None:
    x = steps.pick(UINT32)
    y = steps.const(steps.rng.integers(0, 3, x.shape[-1]) if x.axis != len(x.shape) - 1 else 1, np.uint32)
    shifted = steps.node(op, x.name, y, direction=steps.choice(["LEFT", "RIGHT"]))
    steps.add(steps.node("Cast", shifted, to=INT64), x.shape, INT64)


def where(steps: Steps, op: str) -> None:
    condition = steps.pick(BOOL)
    x = Value(steps.node("Cast", condition.name, to=FLOAT), condition.shape)
    y, z = steps.other(x), steps.other(x)
    if steps.with_counts and steps.chance(0.2):
        # A choice by the number of rows.
        condition = Value(steps.node("Greater", steps.count(), steps.ints(3)), x.shape, BOOL)
    both = steps.node("Add", x.name, y.name)
    steps.add(steps.node(op, condition.name, both, z.name), x.shape, FLOAT, y.exact and z.exact)


def dropout(steps: Steps, op: str) -> None:
    x = steps.pick()
    if steps.opset < 12:
        steps.add(steps.node(op, x.name, ratio=0.3), x.shape, FLOAT, x.exact)
        return
    names = steps.node_of(op, x.name, steps.const(0.3), steps.const(False, np.bool_), outputs=2)
    steps.add(names[0], x.shape, FLOAT, x.exact)
    steps.add(names[1], x.shape, BOOL)


# Along axes


def along(steps: Steps, op: str, exact: bool = False, discrete: bool = False) -> None:
    x = steps.pick(exact=discrete)
    axis = steps.axis(x)
    if steps.opset < 13 and op in ("Softmax", "LogSoftmax", "Hardmax"):
        axis = max(axis, min(x.axis + 1, len(x.shape) - 1) if not steps.with_mixing else 0)
    if steps.chance(0.3):
        axis -= len(x.shape)
    steps.add(steps.node(op, x.name, axis=axis), x.shape, FLOAT, exact and x.exact)


def cumsum(steps: Steps, op: str) -> None:
    x = steps.pick()
    axis = steps.const(steps.axis(x), np.int64)
    attributes = {"exclusive": int(steps.chance(0.5)), "reverse": int(steps.chance(0.5))}
    steps.add(steps.node(op, x.name, axis, **attributes), x.shape, FLOAT, x.exact)


def reduce(steps: Steps, op: str) -> None:
    x = steps.pick(rank=3 if steps.chance(0.3) else 2)
    name = x.name
    if op in ("ReduceLogSum", "ReduceL2", "ReduceL1"):
        name = steps.node("Add", steps.node("Abs", name), steps.const(1))
    axes = sorted({steps.axis(x) for _ in range(int(steps.rng.integers(1, 3)))})
    keep = int(steps.chance(0.5))
    shape = [1 if i in axes else size for i, size in enumerate(x.shape) if keep or i not in axes]
    exact = x.exact and op in ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceSumSquare", "ReduceL1")
    steps.add(steps.with_axes(op, name, axes, keepdims=keep), shape, FLOAT, exact)


def arg(steps: Steps, op: str) -> None:
    x = steps.pick(exact=True)
    axis, keep = steps.axis(x), int(steps.chance(0.5))
    shape = [1 if i == axis else size for i, size in enumerate(x.shape) if keep or i != axis]
    steps.add(steps.node(op, x.name, axis=axis, keepdims=keep), shape, INT64)


def top_k(steps: Steps, op: str) -> None:
    x = steps.pick(exact=True)
    axis = steps.axis(x)
    if axis == x.axis:
        count, size = steps.rows(x.shape[axis] // N), x.shape[axis]
    else:
        size = int(steps.rng.integers(1, x.shape[axis] + 1))
        count = steps.ints(size)
    names = steps.node_of(op, x.name, count, axis=axis, outputs=2)
    shape = [size if i == axis else each for i, each in enumerate(x.shape)]
    steps.add(names[1], shape, INT64)
    steps.add(names[0], shape)


def trilu(steps: Steps, op: str) -> None:
    x = steps.pick()
    if x.axis >= len(x.shape) - 2 and not steps.with_mixing:
        x = steps.of_shape(3, 3)
    k = steps.const(int(steps.rng.integers(-1, 2)), np.int64)
    steps.add(steps.node(op, x.name, k, upper=int(steps.chance(0.5))), x.shape, FLOAT, x.exact)


def layer_norm(steps: Steps, op: str) -> None:
    x = steps.pick()
    axis = len(x.shape) - 1
    if x.axis == axis and not steps.with_mixing:
        x = steps.of_shape(4)
        axis = 1
    if x.axis == axis:
        return
    lead = [3] if steps.with_mixing and x.axis == axis - 1 and steps.chance(0.3) else []
    scale = [steps.weights(*lead, x.shape[axis]) for _ in range(1 if op == "RMSNormalization" else 2)]
    steps.add(steps.node(op, x.name, *scale, axis=steps.choice([axis, -1])), x.shape, FLOAT, False)


# Axes and shapes


def reshape(steps: Steps, op: str) -> None:
    x = steps.pick(steps.choice([FLOAT, FLOAT, FLOAT, INT64, BOOL]))
    shape = list(x.shape)
    way = steps.choice(["merge", "merge", "split", "view", "odd"])
    if way == "merge":
        index = int(steps.rng.integers(len(shape) - 1))
        shape[index : index + 2] = [shape[index] * shape[index + 1]]
    elif way == "split":
        index = int(steps.rng.integers(len(shape)))
        factor = steps.choice([f for f in (1, 2, 3, 4) if shape[index] % f == 0])
        shape[index : index + 1] = steps.choice([[factor, shape[index] // factor], [shape[index] // factor, factor]])
    elif way == "odd" and steps.with_mixing:
        factor = steps.choice([f for f in (1, 2, 3, 4) if math.prod(shape) % f == 0])
        shape = steps.choice([[factor, math.prod(shape) // factor], [math.prod(shape) // factor, factor]])
    if sum(size % N == 0 for size in shape) != 1:
        raise Unsuitable
    if steps.chance(0.5):
        target = steps.target(shape)
    else:
        # One -1; in place of the rows, or beside their number.
        free = (
            next(i for i, size in enumerate(shape) if size % N == 0)
            if steps.chance(0.6)
            else int(steps.rng.integers(len(shape)))
        )
        parts = [
            steps.ints(-1) if i == free else steps.rows(s // N) if s % N == 0 else steps.ints(s)
            for i, s in enumerate(shape)
        ]
        target = steps.node("Concat", *parts, axis=0)
    steps.add(steps.node(op, x.name, target), shape, x.kind, x.exact)


def flatten(steps: Steps, op: str) -> None:
    x = steps.pick(rank=3)
    axis = int(steps.rng.integers(len(x.shape) + 1))
    shape = [math.prod(x.shape[:axis]), math.prod(x.shape[axis:])]
    steps.add(steps.node(op, x.name, axis=axis), shape, FLOAT, x.exact)


def unsqueeze(steps: Steps, op: str) -> None:
    x = steps.pick(rank=1)
    axis = int(steps.rng.integers(len(x.shape) + 1))
    shape = [*x.shape[:axis], 1, *x.shape[axis:]]
    steps.add(steps.with_axes(op, x.name, [axis]), shape, FLOAT, x.exact)


def squeeze(steps: Steps, op: str) -> None:
    x = steps.pick()
    axes = [i for i, size in enumerate(x.shape) if size == 1]
    if not axes:
        axis = int(steps.rng.integers(len(x.shape) + 1))
        x = Value(steps.with_axes("Unsqueeze", x.name, [axis]), (*x.shape[:axis], 1, *x.shape[axis:]), FLOAT, x.exact)
        axes = [axis]
    axis = steps.choice(axes)
    if steps.with_mixing and steps.chance(0.3):
        name, shape = steps.node(op, x.name), [size for size in x.shape if size != 1]
    else:
        name, shape = steps.with_axes(op, x.name, [axis]), [size for i, size in enumerate(x.shape) if i != axis]
    steps.add(name, shape, FLOAT, x.exact)


def transpose(steps: Steps, op: str) -> None:
    x = steps.pick(steps.choice([FLOAT, FLOAT, INT64]), rank=steps.choice([2, 3]))
    order = [int(axis) for axis in steps.rng.permutation(len(x.shape))]
    steps.add(steps.node(op, x.name, perm=order), [x.shape[i] for i in order], x.kind, x.exact)


def concat(steps: Steps, op: str) -> None:
    x = steps.pick()
    same = [v for v in steps.values if v.shape == x.shape and v.kind == x.kind]
    parts = [
        x,
        *[steps.choice([*same, Value(steps.filled(x.shape), x.shape)]) for _ in range(int(steps.rng.integers(1, 3)))],
    ]
    if steps.with_counts and steps.chance(0.3):
        parts.append(Value(steps.counted_rows(x.shape), x.shape))
    axis = steps.axis(x)
    if axis == x.axis:
        raise Unsuitable
    shape = [size * len(parts) if i == axis else size for i, size in enumerate(x.shape)]
    steps.add(
        steps.node(op, *[part.name for part in parts], axis=axis), shape, FLOAT, all(part.exact for part in parts)
    )


def split(steps: Steps, op: str) -> None:
    x = steps.pick()
    axis = steps.axis(x, 2)
    if axis == x.axis:
        raise Unsuitable
    first = int(steps.rng.integers(1, x.shape[axis]))
    sizes = [first, x.shape[axis] - first]
    if steps.opset < 13:
        names = steps.node_of(op, x.name, outputs=2, axis=axis, split=sizes)
    else:
        names = steps.node_of(op, x.name, steps.ints(*sizes), outputs=2, axis=axis)
    for name, size in zip(names, sizes, strict=True):
        steps.add(name, [size if i == axis else each for i, each in enumerate(x.shape)], FLOAT, x.exact)


def slice_(steps: Steps, op: str) -> None:
    x = steps.pick()
    axis = steps.axis(x)
    if axis == x.axis:
        way = steps.choice(["all", "reversed", "by count"])
        if way == "reversed":
            name = steps.node(op, x.name, steps.ints(-1), steps.ints(-NO_END), steps.ints(axis), steps.ints(-1))
        else:
            end = steps.ints(NO_END) if way == "all" else steps.rows(x.shape[axis] // N)
            name = steps.node(op, x.name, steps.ints(0), end, steps.ints(axis))
        steps.add(name, x.shape, FLOAT, x.exact)
        return
    size = x.shape[axis]
    start = int(steps.rng.integers(size))
    end = int(steps.rng.integers(start + 1, size + 1))
    if steps.chance(0.3):
        starts, ends, axes = steps.ints(start, 0), steps.ints(end, NO_END), steps.ints(axis, x.axis)
    else:
        starts, ends, axes = steps.ints(start), steps.ints(end), steps.ints(axis)
    shape = [end - start if i == axis else each for i, each in enumerate(x.shape)]
    steps.add(steps.node(op, x.name, starts, ends, axes), shape, FLOAT, x.exact)


def pad(steps: Steps, op: str) -> None:
    x = steps.pick()
    axis = steps.axis(x)
    pads = [0] * (2 * len(x.shape))
    if axis == x.axis:
        raise Unsuitable
    pads[axis], pads[axis + len(x.shape)] = int(steps.rng.integers(2)), int(steps.rng.integers(1, 3))
    shape = [size + pads[i] + pads[i + len(x.shape)] for i, size in enumerate(x.shape)]
    mode = steps.choice(["constant", "edge"])
    steps.add(steps.node(op, x.name, steps.ints(*pads), mode=mode), shape, FLOAT, x.exact)


def expand(steps: Steps, op: str) -> None:
    x = steps.pick()
    axis = steps.axis(x)
    if axis == x.axis:
        raise Unsuitable
    shape = [steps.choice([1, 2, 3]) if i == axis else size for i, size in enumerate(x.shape)]
    reduced = Value(steps.with_axes("ReduceMax", x.name, [axis], keepdims=1), tuple(shape), FLOAT, x.exact)
    target = steps.target(shape) if steps.chance(0.5) else steps.ints(*[1 if size % N == 0 else size for size in shape])
    steps.add(steps.node(op, reduced.name, target), shape, FLOAT, x.exact)


def tile(steps: Steps, op: str) -> None:
    x = steps.pick()
    repeats = [1 if i == x.axis else int(steps.rng.integers(1, 3)) for i in range(len(x.shape))]
    shape = [size * repeat for size, repeat in zip(x.shape, repeats, strict=True)]
    steps.add(steps.node(op, x.name, steps.ints(*repeats)), shape, FLOAT, x.exact)


# Look-ups


def gather(steps: Steps, op: str) -> None:
    if steps.chance(0.5):
        indices = steps.pick(INT64)
        bounded = steps.node("Mod", indices.name, steps.ints(4))
        dims = steps.choice([(), (2,), (3, 1)])
        steps.add(steps.node(op, steps.weights(4, *dims), bounded, axis=0), (*indices.shape, *dims))
        return
    x = steps.pick()
    axis = steps.axis(x)
    if axis == x.axis:
        steps.add(
            steps.node(op, x.name, steps.const(0, np.int64), axis=axis),
            [size for i, size in enumerate(x.shape) if i != axis], FLOAT, x.exact,
        )  # fmt: skip
        return
    dims = steps.choice([(), (2,), (1, 3)])
    indices_name = steps.const(steps.rng.integers(-x.shape[axis], x.shape[axis], dims), np.int64)
    steps.add(
        steps.node(op, x.name, indices_name, axis=axis), [*x.shape[:axis], *dims, *x.shape[axis + 1 :]], FLOAT, x.exact
    )


def _indices(steps: Steps, shape: Sequence[int], size: int) -> str:
    """INT64 of the shape (rows, *shape), at least 0 and below `size`."""
    x = steps.of_shape(*shape, exact=True)
    if x.shape[0] != N:
        raise Unsuitable
    return steps.node("Mod", steps.node("Cast", steps.node("Abs", x.name), to=INT64), steps.ints(size))


def gather_elements(steps: Steps, op: str) -> None:
    x = steps.of_shape(4)
    if steps.with_mixing and steps.chance(0.3):
        zeros = steps.const(np.zeros((1, 4)), np.int64)
        steps.add(steps.node(op, x.name, zeros, axis=0), (1, 4), FLOAT, x.exact)
        return
    steps.add(steps.node(op, x.name, _indices(steps, (3,), 4), axis=1), (N, 3), FLOAT, x.exact)


def scatter_elements(steps: Steps, op: str) -> None:
    x, updates = steps.of_shape(4), steps.of_shape(3)
    indices = _indices(steps, (3,), 4)
    if x.shape[0] != N or updates.shape[0] != N:
        raise Unsuitable
    attributes = {"reduction": "add"} if steps.opset >= 16 and steps.chance(0.7) else {}
    steps.add(
        steps.node(op, x.name, indices, updates.name, axis=1, **attributes), x.shape, FLOAT, x.exact and updates.exact
    )


def gather_nd(steps: Steps, op: str) -> None:
    if steps.opset >= 12 and steps.chance(0.5):
        x = steps.of_shape(4, 2)
        if x.shape[0] != N:
            raise Unsuitable
        steps.add(steps.node(op, x.name, _indices(steps, (1,), 4), batch_dims=1), (N, 2), FLOAT, x.exact)
    else:
        table = steps.const(steps.rng.integers(-2, 3, (4, 4, 3)))
        steps.add(steps.node(op, table, _indices(steps, (2, 2), 4)), (N, 2, 3))


def one_hot(steps: Steps, op: str) -> None:
    x = steps.pick(INT64)
    axis = int(steps.rng.integers(len(x.shape) + 1))
    bounded = steps.node("Mod", x.name, steps.ints(3))
    name = steps.node(
        op, bounded, steps.ints(3), steps.const([0, 2]), axis=steps.choice([axis, axis - len(x.shape) - 1])
    )
    steps.add(name, [*x.shape[:axis], 3, *x.shape[axis:]])


# Products


def matmul(steps: Steps, op: str) -> None:
    way = steps.choice(["weights", "weights", "rows", "left", "across"])
    if way == "weights":
        x, width = steps.pick(), int(steps.rng.integers(1, 5))
        if x.axis == len(x.shape) - 1:
            raise Unsuitable
        steps.add(steps.node(op, x.name, steps.weights(x.shape[-1], width)), (*x.shape[:-1], width), FLOAT, x.exact)
    elif way == "rows":
        x, y = steps.of_shape(2, 3), steps.of_shape(3, 4)
        if x.shape[0] != y.shape[0]:
            raise Unsuitable
        steps.add(steps.node(op, x.name, y.name), (x.shape[0], 2, 4), FLOAT, x.exact and y.exact)
    elif way == "left" or not steps.with_mixing:
        x = steps.of_shape(3, 4)
        steps.add(steps.node(op, steps.weights(2, 3), x.name), (x.shape[0], 2, 4), FLOAT, x.exact)
    else:
        x = steps.of_shape(4)
        square = steps.node(op, x.name, steps.node("Transpose", x.name, perm=[1, 0]))
        steps.add(steps.node(op, square, x.name), x.shape, FLOAT, False)


def gemm(steps: Steps, op: str) -> None:
    x, width = steps.of_shape(4), int(steps.rng.integers(1, 5))
    across = int(steps.chance(0.3))
    name = steps.node("Transpose", x.name, perm=[1, 0]) if across else x.name
    turned = int(steps.chance(0.5))
    weights = steps.weights(*((width, 4) if turned else (4, width)))
    way = steps.choice(["none", "vector", "row", "rows"])
    if way == "rows":
        bias = [steps.other(Value("", (x.shape[0], width))).name]
    else:
        bias = [] if way == "none" else [steps.weights(*((width,) if way == "vector" else (1, width)))]
    attributes = {"transA": across, "transB": turned, "alpha": 2.0}
    steps.add(steps.node(op, name, weights, *bias, **attributes), (x.shape[0], width), FLOAT, False)


def einsum(steps: Steps, op: str) -> None:
    x = steps.of_shape(3, 4)
    lead = x.shape[0]
    ways: dict[str, Sequence[int]] = {
        "bij->bji": (lead, 4, 3), "bij->bi": (lead, 3), "bij->jbi": (4, lead, 3), "bij,jk->bik": (lead, 3, 2),
        "kj,bij->bik": (lead, 3, 2), "bij,bkj->bik": (lead, 3, 3),
    }  # fmt: skip
    if steps.with_mixing:
        ways |= {"bij->ij": (1, 3, 4), "bij,cij->bci": (lead, 3)}
    equation = steps.choice(list(ways))
    names = [x.name] if "," not in equation else [x.name, x.name]
    if "jk" in equation:
        names[1] = steps.weights(4, 2)
    elif "kj," in equation:
        names[0] = steps.weights(2, 4)
    letters = steps.choice(["bijck", "nijmk", "abcde", "zyxwv"])
    written = equation.translate(str.maketrans("bijck", letters))
    name = steps.node(op, *names, equation=written)
    if equation == "bij->ij":
        name = steps.node("Add", x.name, name)
    elif equation == "bij,cij->bci":
        name = steps.with_axes("ReduceSum", name, [1], keepdims=0)
    steps.add(name, x.shape if equation == "bij->ij" else ways[equation], FLOAT, x.exact)


# Pictures


def picture(steps: Steps, op: str) -> None:
    x = steps.of_shape(4, 4, 4)
    lead = x.shape[0]
    if op == "Conv":
        group = steps.choice([1, 2])
        weights = [steps.weights(2, 4 // group, 3, 3), steps.weights(2)]
        name = steps.node(op, x.name, *weights, group=group, pads=[1, 1, 1, 1], strides=[2, 2])
        steps.add(name, (lead, 2, 2, 2), FLOAT, x.exact)
    elif op == "ConvTranspose":
        steps.add(steps.node(op, x.name, steps.weights(4, 2, 2, 2), strides=[2, 2]), (lead, 2, 8, 8), FLOAT, x.exact)
    elif op in ("AveragePool", "LpPool", "MaxPool"):
        name = steps.node(op, x.name, kernel_shape=[2, 2], strides=[2, 2])
        steps.add(name, (lead, 4, 2, 2), FLOAT, x.exact and op == "MaxPool")
    elif op in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"):
        steps.add(steps.node(op, x.name), (lead, 4, 1, 1), FLOAT, x.exact and op == "GlobalMaxPool")
    elif op == "LRN":
        steps.add(steps.node(op, x.name, size=3), x.shape, FLOAT, False)
    elif op == "DepthToSpace":
        steps.add(
            steps.node(op, x.name, blocksize=2, mode=steps.choice(["DCR", "CRD"])), (lead, 1, 8, 8), FLOAT, x.exact
        )
    elif op == "SpaceToDepth":
        steps.add(steps.node(op, x.name, blocksize=2), (lead, 16, 2, 2), FLOAT, x.exact)
    elif op == "BatchNormalization":
        positive = steps.node("Abs", steps.weights(4))
        parameters = [steps.weights(4), steps.weights(4), steps.weights(4), positive]
        steps.add(steps.node(op, x.name, *parameters, epsilon=1.0), x.shape, FLOAT, False)
    else:
        steps.add(steps.node(op, x.name, steps.weights(4), steps.weights(4)), x.shape, FLOAT, False)


def resize(steps: Steps, op: str) -> None:
    x = steps.of_shape(2, 4, 4)
    mode, height = steps.choice(["nearest", "linear"]), steps.choice([2, 4, 8])
    attributes = {
        "mode": mode,
        "coordinate_transformation_mode": steps.choice(["asymmetric", "half_pixel", "align_corners"]),
    }
    if mode == "nearest":
        attributes["nearest_mode"] = steps.choice(["floor", "ceil", "round_prefer_floor"])
    empty = steps.const(np.zeros(0))
    if steps.with_mixing and steps.chance(0.3):
        # The second half of the batch.
        attributes["coordinate_transformation_mode"] = "tf_crop_and_resize"
        region = steps.const([0.5, 0, 0, 0, 1, 1, 1, 1])
        name = steps.node(op, x.name, region, steps.const([1, 1, height / 4, 2]), **attributes)
    elif steps.chance(0.5):
        name = steps.node(op, x.name, empty, steps.const([1, 1, height / 4, 2]), **attributes)
    else:
        sizes = steps.target((x.shape[0], 2, height, 8))
        name = steps.node(op, x.name, empty, empty, sizes, **attributes)
    steps.add(name, (x.shape[0], 2, height, 8), FLOAT, x.exact and mode == "nearest")


def recurrent(steps: Steps, op: str) -> None:
    x = steps.of_shape(2, 3)
    if x.shape[0] != N:
        raise Unsuitable
    gates, size = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], 2
    first = steps.node("Transpose", x.name, perm=[1, 0, 2])
    parameters = [steps.weights(1, gates * size, 3), steps.weights(1, gates * size, size)]
    if steps.chance(0.5):
        state = steps.with_axes("Unsqueeze", steps.of_shape(size).name, [0])
        if steps.chance(0.4):
            state = steps.counted_rows((1, N, size)) if steps.with_counts else steps.filled((1, N, size))
        parameters += ["", "", state]
    names = steps.node_of(op, first, *parameters, outputs=2, hidden_size=size)
    steps.add(names[0], (2, 1, N, size), FLOAT, False)
    steps.add(names[1], (1, N, size), FLOAT, False)


# Whole numbers of 8 bits


def _quantized(steps: Steps, x: Value) -> str:
    return steps.node("QuantizeLinear", x.name, steps.const(0.5), steps.const(100, np.uint8))


def quantized(steps: Steps, op: str) -> None:
    scale, zero = steps.const(0.5), steps.const(100, np.uint8)
    weights = steps.const(steps.rng.integers(0, 9, (4, 2)), np.uint8)
    if op in ("QuantizeLinear", "DequantizeLinear"):
        x = steps.pick(exact=True)
        attributes = {}
        if steps.opset >= 13 and steps.chance(0.5) and len(x.shape) - 1 != x.axis:
            scale = steps.const(steps.rng.choice([0.5, 1, 2], x.shape[-1]))
            zero, attributes = steps.const(np.full(x.shape[-1], 100), np.uint8), {"axis": len(x.shape) - 1}
        values = steps.node("QuantizeLinear", x.name, scale, zero, **attributes)
        steps.add(steps.node("DequantizeLinear", values, scale, zero, **attributes), x.shape)
    elif op == "DynamicQuantizeLinear":
        x = steps.pick(exact=True)
        steps.add(steps.node("DequantizeLinear", *steps.node_of(op, x.name, outputs=3)), x.shape, FLOAT, False)
    elif op in ("MatMulInteger", "QLinearMatMul"):
        x = steps.of_shape(4, exact=True)
        if op == "MatMulInteger":
            product = steps.node("Cast", steps.node(op, _quantized(steps, x), weights, zero), to=FLOAT)
        else:
            inputs = [_quantized(steps, x), scale, zero, weights, scale, zero, steps.const(1), zero]
            product = steps.node("DequantizeLinear", steps.node(op, *inputs), scale, zero)
        steps.add(product, (x.shape[0], 2))
    else:
        x = steps.of_shape(2, 4, 4, exact=True)
        weights = steps.const(steps.rng.integers(0, 9, (2, 2, 3, 3)), np.uint8)
        if op == "ConvInteger":
            product = steps.node("Cast", steps.node(op, _quantized(steps, x), weights, zero), to=FLOAT)
        else:
            inputs = [_quantized(steps, x), scale, zero, weights, scale, zero, steps.const(1), zero]
            product = steps.node("DequantizeLinear", steps.node(op, *inputs), scale, zero)
        steps.add(product, (x.shape[0], 2, 2, 2))


# Results of an unknown size


def of_all(steps: Steps, op: str) -> None:
    """A number from a result whose size depends on the values, added to all rows."""
    x = steps.pick(exact=True)
    if op == "NonMaxSuppression":
        boxes, scores = steps.of_shape(2, 4), steps.of_shape(1, 2)
        result = steps.node(op, boxes.name, scores.name, steps.ints(1), steps.const([0.5]), steps.const([0.5]))
    elif op == "Compress":
        axis = steps.axis(x)
        size = 1 if axis == x.axis else x.shape[axis]
        result = steps.node(op, x.name, steps.const(np.ones(size), np.bool_), axis=axis)
        if axis != x.axis:
            steps.add(result, x.shape)
            return
    else:
        result = steps.node(op, x.name)
    count = steps.node("Cast", steps.node("Size", result), to=FLOAT)
    steps.add(steps.node("Add", x.name, count), x.shape)


# Steps of several nodes


def scan(steps: Steps, _op: str) -> None:
    x = steps.pick()
    axis = steps.axis(x)
    if axis == x.axis and len(x.shape) < 2:
        raise Unsuitable
    steps.add(steps.scan(x, axis), x.shape, FLOAT, x.exact)


def call(steps: Steps, _op: str) -> None:
    x = steps.pick()
    steps.add(steps.function(x.name), x.shape, FLOAT, x.exact)


def filling(steps: Steps, _op: str) -> None:
    x = steps.pick()
    steps.add(steps.filled(x.shape), x.shape)


def counting(steps: Steps, _op: str) -> None:
    """Values, a size or a parameter from the number of rows."""
    if not steps.with_counts:
        raise Unsuitable
    x = steps.pick(exact=True)
    axis = next((i for i in range(len(x.shape)) if i != x.axis), -1)
    way = steps.choice(["rows", "rows", "number", "pad", "top", "slice", "depth", "triangle", "output"])
    if way == "rows":
        steps.add(steps.node("Add", x.name, steps.counted_rows(x.shape)), x.shape)
    elif way == "output":
        steps.add(steps.counted_rows(x.shape), x.shape)
    elif way == "number" or axis < 0:
        steps.add(steps.node("Mul", x.name, steps.counted(())), x.shape)
    elif way == "depth":
        indices = steps.node("Mod", steps.node("Cast", x.name, to=INT64), steps.ints(2))
        wide = steps.node("OneHot", indices, steps.count(), steps.const([1, 0]), axis=-1)
        steps.add(steps.with_axes("ReduceSum", wide, [len(x.shape)], keepdims=0), x.shape)
    elif way == "triangle":
        square = steps.of_shape(4, 4)
        k = steps.with_axes("Squeeze", steps.node("Mod", steps.count(), steps.ints(3)), [0])
        if steps.opset < 14:
            raise Unsuitable
        steps.add(steps.node("Trilu", square.name, k), square.shape, FLOAT, square.exact)
    else:
        size = steps.node("Mod", steps.count(), steps.ints(x.shape[axis]))
        size = steps.node("Add", size, steps.ints(1))
        if way == "top":
            name = steps.node_of("TopK", x.name, size, axis=axis, outputs=2)[0]
        elif way == "slice":
            name = steps.node("Slice", x.name, steps.ints(0), size, steps.ints(axis))
        else:
            zeros = [steps.ints(0)] * (2 * len(x.shape))
            zeros[axis] = size
            name = steps.node("Pad", x.name, steps.node("Concat", *zeros, axis=0), steps.const(1))
        shape = [1 if i == axis else each for i, each in enumerate(x.shape)]
        steps.add(steps.with_axes("ReduceSum", name, [axis], keepdims=1), shape)


EXTRAS: tuple[Operator, ...] = (scan, call, filling, counting, counting, counting, counting)

_SMOOTH = """
    Asinh Atan Celu Cos Cosh Elu Erf Exp Gelu HardSigmoid HardSwish Mish Selu Sigmoid Sin Sinh Softplus Softsign Swish Tanh
"""
OPERATORS: dict[str, Operator] = {
    **_named(_SMOOTH, unary),
    **_named("Abs Identity Neg Relu", unary, exact=True),
    **_named("LeakyRelu", unary, alpha=0.5),
    **_named("Ceil Floor Round Shrink Sign ThresholdedRelu", unary, exact=True, discrete=True),
    **_named("Acosh Log Reciprocal Sqrt", unary, domain="positive"),
    **_named("Acos Asin Atanh Tan", unary, domain="within 1"),
    **_named("IsInf IsNaN", test_of_floats),
    **_named("BitwiseNot", of_kind, kind=INT64),
    **_named("Not", of_kind, kind=BOOL),
    **_named("Add Max Min Mul Sub Sum", binary),
    **_named("Div Mean PRelu Pow", binary, exact=False),
    **_named("Equal Greater GreaterOrEqual Less LessOrEqual", binary, discrete=True, result=BOOL),
    **_named("And Or Xor", binary_of_kind, kind=BOOL),
    **_named("BitwiseAnd BitwiseOr BitwiseXor Mod", binary_of_kind, kind=INT64),
    **_named("LogSoftmax LpNormalization Softmax", along),
    **_named("Hardmax", along, exact=True, discrete=True),
    **_named("LayerNormalization RMSNormalization", layer_norm),
    **_named("ArgMax ArgMin", arg),
    **_named(
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum", reduce
    ),
    **_named("ReduceSumSquare", reduce),
    **_named("AveragePool BatchNormalization Conv ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool", picture),
    **_named("GlobalMaxPool InstanceNormalization LRN LpPool MaxPool SpaceToDepth", picture),
    **_named("GRU LSTM RNN", recurrent),
    **_named("ConvInteger DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul", quantized),
    **_named("QuantizeLinear", quantized),
    **_named("Compress NonMaxSuppression NonZero Unique", of_all),
    "BitShift": bit_shift,
    "Cast": cast,
    "Clip": clip,
    "Concat": concat,
    "CumSum": cumsum,
    "Dropout": dropout,
    "Einsum": einsum,
    "Expand": expand,
    "Flatten": flatten,
    "Gather": gather,
    "GatherElements": gather_elements,
    "GatherND": gather_nd,
    "Gemm": gemm,
    "MatMul": matmul,
    "OneHot": one_hot,
    "Pad": pad,
    "Reshape": reshape,
    "Resize": resize,
    "ScatterElements": scatter_elements,
    "Slice": slice_,
    "Split": split,
    "Squeeze": squeeze,
    "Tile": tile,
    "TopK": top_k,
    "Transpose": transpose,
    "Trilu": trilu,
    "Unsqueeze": unsqueeze,
    "Where": where,
}
