"""Random graphs with a fixed batch: every freed one has the values of the original, safe ones are freed, mixed ones are not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import onnx
from headrace_engines.errors import BuildError
from headrace_engines.importers.onnx_batch import free_batch
from headrace_engines.importers.onnx_proof import prove
from headrace_engines.onnx_graph import OnnxRunner
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.onnx_blocks import Network

SAFE = (
    "relu", "scale", "bias", "softmax", "mean", "matrix", "split heads", "join", "flatten", "moved and back", "token", "slice",
    "pick", "expand", "topk", "norm", "conv", "fold", "cumsum", "squeeze and back", "positions first", "merge rows",
)  # fmt: skip
SHAPE_STEPS = (
    "split heads", "join", "flatten", "moved and back", "fold", "squeeze and back", "positions first", "merge rows",
)  # fmt: skip
MIXED = ("softmax", "mean", "cumsum", "largest", "reverse", "product", "sort", "transposed", "shifted", "scaled mean")


@dataclass
class Graph:
    """A graph that grows by steps; the tensor has the shape [batch, ...] after each."""

    batch: int
    shape: tuple[int, ...]
    net: Network = field(default_factory=Network)
    tensor: str = ""
    mixed: bool = False

    def __post_init__(self) -> None:
        self.tensor = self.net.input("x", [self.batch, *self.shape])

    def ints(self, *values: int) -> str:
        return self.net.constant(list(values), np.int64)

    def reshape(self, *target: int) -> None:
        self.tensor = self.net.node("Reshape", self.tensor, self.ints(*target))
        self.shape = target[1:]

    def node(self, operator: str, *inputs: str, **attributes: object) -> None:
        self.tensor = self.net.node(operator, self.tensor, *inputs, **attributes)

    def safe(self, kind: str, draw: st.DrawFn) -> None:
        """Add a step that computes each row from itself."""
        if kind in SHAPE_STEPS:
            self._change_shape(kind, draw)
        else:
            self._change_values(kind, draw)

    def _change_values(self, kind: str, draw: st.DrawFn) -> None:
        shape, last = self.shape, len(self.shape)
        if kind == "relu":
            self.node("LeakyRelu", alpha=0.5)
        elif kind in ("scale", "bias"):
            rows = draw(st.sampled_from([(), (1,), (self.batch,)]))
            values = self.net.random.uniform(0.5, 1.5, (*(1 for _ in rows), *shape))
            # One equal row for each row of the batch, as exporters write constants.
            whole = np.broadcast_to(values, (*rows, *shape))
            self.node("Mul" if kind == "scale" else "Add", self.net.constant(whole))
        elif kind == "softmax":
            self.node("Softmax", axis=draw(st.sampled_from([last, -1])))
        elif kind == "mean":
            axis = draw(st.integers(1, last))
            self.node("ReduceMean", axes=[axis], keepdims=1)
            self.node("Add", self.net.weight(*shape))
        elif kind == "matrix":
            width = draw(st.integers(2, 4))
            self.node("MatMul", self.net.weight(shape[-1], width))
            self.shape = (*shape[:-1], width)
        elif kind == "token":
            token = np.broadcast_to(self.net.random.standard_normal((1, 1, *shape[1:])), (self.batch, 1, *shape[1:]))
            self.tensor = self.net.node("Concat", self.net.constant(token), self.tensor, axis=1)
            self.shape = (shape[0] + 1, *shape[1:])
        elif kind == "slice":
            self.node("Slice", self.ints(0, 0), self.ints(self.batch, shape[-1]), self.ints(0, last))
        elif kind == "pick":
            self.node("Gather", self.ints(*range(self.batch)), axis=0)
        elif kind == "expand":
            self.node("Expand", self.ints(self.batch, *shape))
        elif kind == "topk":
            names = self.net.node("TopK", self.tensor, self.ints(shape[-1]), axis=last, outputs=2)
            self.tensor = names
        elif kind == "norm":
            self.node("LayerNormalization", self.net.weight(shape[-1]), axis=-1)
        elif kind == "conv" and last == 3:
            self.tensor = self.net.conv(self.tensor, (shape[0], 3), f"conv{len(shape)}_{self.tensor}")
            self.shape = (3, *shape[1:])
        elif kind == "cumsum":
            self.node("CumSum", self.net.constant(last, np.int64))

    def _change_shape(self, kind: str, draw: st.DrawFn) -> None:
        shape, last = self.shape, len(self.shape)
        if kind == "split heads" and shape[-1] % 2 == 0:
            self.reshape(self.batch, *shape[:-1], 2, shape[-1] // 2)
        elif kind == "join" and last > 1:
            self.reshape(self.batch, draw(st.sampled_from([-1, shape[0] * shape[1]])), *shape[2:])
            self.shape = (shape[0] * shape[1], *shape[2:])
        elif kind == "flatten":
            self.node("Flatten", axis=1)
            self.shape = (math.prod(shape),)
        elif kind == "moved and back" and last > 1:
            order = draw(st.permutations(range(1, last + 1)))
            self.node("Transpose", perm=[0, *order])
            self.shape = tuple(shape[axis - 1] for axis in order)
        elif kind == "fold" and last > 1:
            # The batch as a factor of another axis, and back.
            self.tensor = self.net.node("Reshape", self.tensor, self.ints(self.batch * shape[0], *shape[1:]))
            self.node("Softmax", axis=-1)
            self.reshape(self.batch, *shape)
        elif kind == "squeeze and back" and self.batch == 1 and last > 1:
            self.node("Squeeze", self.ints(0))
            self.node("MatMul", self.net.weight(shape[-1], 3))
            self.node("Unsqueeze", self.ints(0))
            self.shape = (*shape[:-1], 3)
        elif kind == "positions first" and last > 1:
            self.node("Transpose", perm=[1, 0, *range(2, last + 1)])
            self.node("Softmax", axis=-1)
            self.node("Transpose", perm=[1, 0, *range(2, last + 1)])
        elif kind == "merge rows":
            self.tensor = self.net.node("Reshape", self.tensor, self.ints(-1, shape[-1]))
            self.node("MatMul", self.net.weight(shape[-1], 2))
            self.reshape(self.batch, *shape[:-1], 2)

    def mix(self, kind: str) -> None:
        """Add a step that computes across the rows."""
        self.mixed = True
        x, last = self.tensor, len(self.shape)
        if kind == "softmax":
            self.node("Softmax", axis=0)
        elif kind in ("mean", "scaled mean"):
            mean = self.net.node("ReduceMean", x, axes=[0], keepdims=1)
            share = self.net.node("Mul", mean, self.net.constant(1.0 if kind == "mean" else 0.01))
            self.node("Sub", share)
        elif kind == "cumsum":
            self.node("CumSum", self.net.constant(0, np.int64))
        elif kind == "largest":
            self.node("Add", self.net.node("ReduceMax", x, axes=[0], keepdims=1))
        elif kind == "reverse":
            self.node("Slice", self.ints(-1), self.ints(-(1 << 40)), self.ints(0), self.ints(-1))
        elif kind == "product":
            flat = self.net.node("Flatten", x, axis=1)
            turned = self.net.node("Transpose", flat, perm=[1, 0])
            scores = self.net.node("Softmax", self.net.node("MatMul", flat, turned), axis=1)
            self.tensor = self.net.node("MatMul", scores, flat)
            self.shape = (math.prod(self.shape),)
        elif kind == "sort":
            self.tensor = self.net.node("TopK", x, self.ints(self.batch), axis=0, outputs=2)
        elif kind == "transposed":
            # The batch becomes the last axis and is read as the first one.
            self.node("Transpose", perm=[*range(1, last + 1), 0])
            self.reshape(self.batch, *self.shape)
        else:
            first = self.net.node("Gather", x, self.ints(self.batch - 1), axis=0)
            self.node("Add", first)

    def model(self) -> onnx.ModelProto:
        self.node("Identity")
        return self.net.model(self.tensor)


@st.composite
def graphs(draw: st.DrawFn, mixes: bool | None) -> Graph:
    shape = draw(st.sampled_from([(4,), (2, 4), (3, 4), (2, 4, 4), (3, 2, 2), (1, 4), (4, 1, 2)]))
    graph = Graph(draw(st.sampled_from([1, 1, 2, 3])), shape)
    graph.net.random = np.random.default_rng(draw(st.integers(0, 99)))
    steps = draw(st.lists(st.sampled_from(SAFE), min_size=1, max_size=6))
    has_mix = draw(st.booleans()) if mixes is None else mixes
    place = draw(st.integers(0, len(steps) - 1))
    for number, step in enumerate(steps):
        if has_mix and number == place:
            graph.mix(draw(st.sampled_from(MIXED)))
        graph.safe(step, draw)
    return graph


def depends_on_companions(graph: Graph, model: onnx.ModelProto) -> bool:
    """Whether a row of the original changes with the other rows of its batch."""
    random = np.random.default_rng(5)
    runner = OnnxRunner(model)
    for _ in range(3):
        rows = random.standard_normal((graph.batch, *graph_input(model))).astype(np.float32)
        others = random.standard_normal(rows.shape).astype(np.float32)
        for row in range(graph.batch):
            mixed = others.copy()
            mixed[row] = rows[row]
            (before,), (after,) = (list(runner.run({"x": x}).values()) for x in (rows, mixed))
            if not np.allclose(before[row], after[row], rtol=1e-3, atol=1e-4):
                return True
    return False


def graph_input(model: onnx.ModelProto) -> tuple[int, ...]:
    return tuple(dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[1:])


def check_rows(graph: Graph, model: onnx.ModelProto, freed: onnx.ModelProto) -> None:
    """Compare batches of the freed graph with runs of the original, by other rows than the proof's."""
    random = np.random.default_rng(77)
    original, runner = OnnxRunner(model), OnnxRunner(freed)
    for rows in (1, 2, 5, 7):
        x = random.standard_normal((rows, *graph_input(model))).astype(np.float32) * 2
        (batch,) = runner.run({"x": x}).values()
        for row in range(rows):
            companions = random.standard_normal((graph.batch, *x.shape[1:])).astype(np.float32)
            companions[row % graph.batch] = x[row]
            (expected,) = original.run({"x": companions}).values()
            np.testing.assert_allclose(batch[row], expected[row % graph.batch], rtol=1e-3, atol=1e-4)


@settings(max_examples=examples(60), deadline=None)
@given(graphs(mixes=None))
def test_a_freed_graph_has_the_values_of_the_original(graph: Graph) -> None:
    model = graph.model()
    try:
        freed = free_batch(model)
        prove(model, freed.model, freed.batch_size, freed.merged)
    except BuildError as error:
        event("refused")
        assert "freed" in str(error) or "free" in str(error)
        return
    event("freed")
    check_rows(graph, model, freed.model)


@settings(max_examples=examples(60), deadline=None)
@given(graphs(mixes=False))
def test_safe_graphs_are_freed(graph: Graph) -> None:
    model = graph.model()
    freed = free_batch(model)
    check_rows(graph, model, freed.model)
    try:
        prove(model, freed.model, freed.batch_size, freed.merged)
    except BuildError as error:
        # E.g. a softmax over an axis of one element: every row gives the same.
        assert "do not differ" in str(error)
        assume(False)


@settings(max_examples=examples(60), deadline=None)
@given(graphs(mixes=True))
def test_graphs_whose_rows_depend_on_one_another_are_refused(graph: Graph) -> None:
    model = graph.model()
    assume(graph.batch > 1 and depends_on_companions(graph, model))
    try:
        freed = free_batch(model)
    except BuildError:
        return
    # The analysis must refuse it; if it does not, the comparison does.
    try:
        prove(model, freed.model, freed.batch_size, freed.merged)
    except BuildError:
        return
    raise AssertionError("a graph that mixes rows was freed")
