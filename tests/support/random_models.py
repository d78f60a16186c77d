"""Small ONNX models at random, many of which cannot be batched: some give it away by their shapes, others do not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = np.ndarray[Any, Any]
FP32, INT64 = TensorProto.FLOAT, TensorProto.INT64

# Each row from itself alone.
ROW_STEPS = (
    "relu",
    "negate",
    "add",
    "scale",
    "matrix",
    "row_sum",
    "row_sort",
    "row_softmax",
    "row_total",
    "view",
    "running_row",
    "best",
)
# One row for each row, computed from others, too: no shape gives it away.
MIXED_STEPS = ("centre", "running", "sort", "softmax", "reverse", "first", "largest", "share", "quantise")
# More or fewer rows than came, depending on the values.
FOUND_ENDS = ("non_zero", "boxes", "unique")
# More or fewer rows than came, whenever there are two.
OTHER_ENDS = ("sum", "doubled")


@dataclass
class Sample:
    """One model with its configuration.

    Attributes:
        name: of the model.
        model: to be served.
        width: X is FP32 (rows, width).
        config: text of `config.pbtxt`, may be empty.
        outputs: names.
        steps: what it computes, for messages.
        may_fail: its configuration declares batches that the model may not take: errors are right answers.
    """

    name: str
    model: onnx.ModelProto
    width: int
    config: str
    outputs: list[str]
    steps: list[str]
    may_fail: bool


@dataclass
class _Graph:
    """Nodes, and the tensor that the next one takes: FP32 (rows, width)."""

    rng: np.random.Generator
    width: int
    tensor: str = "X"
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    names: int = 0

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        self.names += 1
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), f"c{self.names}"))
        return f"c{self.names}"

    def node(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        self.names += 1
        results = [f"t{self.names}_{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, list(inputs), results, **attributes))
        return results[0]

    def rows(self) -> str:
        """The number of rows, INT64 (1,)."""
        return self.node("Gather", self.node("Shape", self.tensor), self.constant([0]), axis=0)

    def row_step(self, kind: str) -> None:
        x, width = self.tensor, self.width
        if kind in ("relu", "negate"):
            self.tensor = self.node({"relu": "Relu", "negate": "Neg"}[kind], x)
        elif kind in ("add", "scale"):
            other = self.constant(self.rng.integers(1, 4, width if kind == "add" else ()), np.float32)
            self.tensor = self.node({"add": "Add", "scale": "Mul"}[kind], x, other)
        elif kind == "matrix":
            self.width = int(self.rng.integers(2, 6))
            self.tensor = self.node(
                "MatMul", x, self.constant(self.rng.integers(-2, 3, (width, self.width)), np.float32)
            )
        elif kind == "row_sum":
            self.tensor = self.node("Add", x, self.node("ReduceSum", x, self.constant([1]), keepdims=1))
        elif kind == "row_sort":
            self.tensor = self.node("TopK", x, self.constant([width]), axis=1, outputs=2)
        elif kind == "row_softmax":
            self.tensor = self.node("Softmax", x, axis=1)
        elif kind == "row_total":
            self.tensor, self.width = self.node("ReduceSum", x, self.constant([1]), keepdims=1), 1
        elif kind == "view":
            cube = self.node("Reshape", x, self.node("Concat", self.rows(), self.constant([1, -1]), axis=0))
            self.tensor = self.node("Reshape", cube, self.constant([-1, width]))
        elif kind == "running_row":
            self.tensor = self.node("CumSum", x, self.constant(1))
        else:
            self.tensor, self.width = self.node("Cast", self.node("ArgMax", x, axis=1, keepdims=1), to=FP32), 1

    def mixed_step(self, kind: str) -> None:
        x = self.tensor
        if kind == "centre":
            self.tensor = self.node("Sub", x, self.node("ReduceMean", x, self.constant([0]), keepdims=1))
        elif kind == "running":
            self.tensor = self.node("CumSum", x, self.constant(0))
        elif kind == "sort":
            self.tensor = self.node("TopK", x, self.rows(), axis=0, outputs=2)
        elif kind == "softmax":
            self.tensor = self.node("Softmax", x, axis=0)
        elif kind == "reverse":
            back = self.constant([-1])
            self.tensor = self.node("Slice", x, back, self.constant([-(1 << 40)]), self.constant([0]), back)
        elif kind == "first":
            self.tensor = self.node("Add", x, self.node("Gather", x, self.constant([0]), axis=0))
        elif kind == "largest":
            self.tensor = self.node("Add", x, self.node("ReduceMax", x, keepdims=1))
        elif kind == "share":
            self.tensor = self.node("Div", x, self.node("Cast", self.rows(), to=FP32))
        else:
            names = [f"q{self.names}", f"s{self.names}", f"z{self.names}"]
            self.nodes.append(helper.make_node("DynamicQuantizeLinear", [x], names))
            self.tensor = self.node("DequantizeLinear", *names)

    def end(self, kind: str) -> tuple[int, list[Any]]:
        """Compute an output that has no row for each row: its datatype and shape."""
        x = self.tensor
        if kind == "non_zero":
            self.tensor = self.node("Transpose", self.node("NonZero", x), perm=[1, 0])
            return INT64, [None, 2]
        if kind == "boxes":
            corner = self.node("Abs", self.node("MatMul", x, self.constant(np.ones((self.width, 2)), np.float32)))
            far = self.node("Add", corner, self.constant([2, 2], np.float32))
            boxes = self.node("Unsqueeze", self.node("Concat", corner, far, axis=1), self.constant([0]))
            score = self.node("ReduceSum", x, self.constant([1]), keepdims=0)
            scores = self.node("Unsqueeze", score, self.constant([0, 1]))
            limits = self.constant([9]), self.constant([0.5], np.float32), self.constant([-1e9], np.float32)
            self.tensor = self.node("NonMaxSuppression", boxes, scores, *limits)
            return INT64, [None, 3]
        if kind == "unique":
            self.tensor = self.node("Unique", x, axis=0)
            return FP32, [None, self.width]
        if kind == "sum":
            self.tensor = self.node("ReduceSum", x, self.constant([0]), keepdims=1)
            return FP32, [None, self.width]
        if kind == "doubled":
            self.tensor = self.node("Concat", x, x, axis=0)
            return FP32, [None, self.width]
        self.tensor = self.node("ReduceSum", x, keepdims=0)
        return FP32, []


_BATCHES = "max_batch_size: 4\n"
_MERGED = _BATCHES + "dynamic_batching { max_queue_delay_microseconds: 2000 }\n"
_INSTANCES = "instance_group [ { count: 2 kind: KIND_CPU } ]\n"
_PROCESS = 'parameters { key: "headrace.isolation" value { string_value: "process" } }\n'


def sample(seed: int) -> Sample:
    """The model of a seed: the same each time."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(2, 6))
    graph = _Graph(rng, width)
    steps = [str(step) for step in rng.choice(ROW_STEPS, rng.integers(1, 4))]
    for step in steps:
        graph.row_step(step)
    mixed = bool(rng.random() < 0.4)
    if mixed:
        steps.append(str(rng.choice(MIXED_STEPS)))
        graph.mixed_step(steps[-1])
    outputs: list[tuple[str, int, list[Any]]] = []
    result = False
    for name in ("Y", "Z")[: 1 + int(rng.random() < 0.4)]:
        ends = ("rows", "rows", "rows", *FOUND_ENDS, *OTHER_ENDS, "scalar")
        end = str(rng.choice(ends)) if name == "Z" or rng.random() < 0.6 else "rows"
        branch = _Graph(rng, graph.width, graph.tensor, graph.nodes, graph.constants, graph.names + 100 * (name == "Z"))
        kind, shape = (FP32, [None, branch.width]) if end == "rows" else branch.end(end)
        branch.nodes.append(helper.make_node("Identity", [branch.tensor], [name]))
        outputs.append((name, kind, shape))
        steps.append(f"{name}={end}")
        result = result or end in FOUND_ENDS
    return _finished(seed, rng, graph, width, outputs, steps, trusted=not mixed and not result)


def _finished(
    seed: int,
    rng: np.random.Generator,
    graph: _Graph,
    width: int,
    outputs: list[tuple[str, int, list[Any]]],
    steps: list[str],
    trusted: bool,
) -> Sample:
    """Name the first dimensions, rightly or wrongly, and choose a configuration.

    Args:
        trusted: what the model does with its rows can be seen from the shapes of its outputs, if rows are merged.
    """
    naming = str(rng.choice(["same", "same", "different", "missing"]))
    first: dict[str, Any] = {
        name: {"same": "batch", "different": f"n_{name}", "missing": None}[naming] for name, _, _ in outputs
    }
    infos = []
    for name, kind, shape in outputs:
        dims = [first[name], *(None if rng.random() < 0.3 else size for size in shape[1:])] if shape else []
        infos.append(helper.make_tensor_value_info(name, kind, dims))
    created = helper.make_graph(
        graph.nodes,
        "random",
        [helper.make_tensor_value_info("X", FP32, ["batch" if naming != "missing" else None, width])],
        infos,
        graph.constants,
    )
    model = helper.make_model(created, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    config, may_fail = "", False
    if all(shape for _, _, shape in outputs) and rng.random() < 0.5:
        may_fail = True
        config = _MERGED if trusted and rng.random() < 0.7 else _BATCHES
    if rng.random() < 0.3:
        config += _INSTANCES
    elif rng.random() < 0.07:
        config += _PROCESS
    steps = [*steps, naming, " ".join(config.split())]
    return Sample(f"random_{seed}", model, width, config, [name for name, _, _ in outputs], steps, may_fail)
