"""Chooses the places at which a sorted graph is cut: parts of equal time, then few bytes that cross.

A boundary lies between two nodes of the order. Tensors that are written before it and read behind it cross. A tensor that may
not cross, such as a shape or a mask without a batch dimension, is computed again behind the boundary from tensors that may.

The choice is made by two dynamic programs over the boundaries. The first finds the smallest time of the longest part. The second
finds, among all cuts whose longest part is at most a few percent longer, those with the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxGraph
from headrace_engines.split.tensors import CrossingTensor

# Operators whose result differs in each run: never computed twice.
_RANDOM = (
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike",
)  # fmt: skip
_FOLDED_BYTES = 1.0  # price of a cut inside a fused layer, so that it loses against an equal one beside it


@dataclass(frozen=True, slots=True)
class Boundary:
    """Place between two nodes at which the graph can be cut.

    Attributes:
        position: number of nodes before it.
        tensors: the tensors that cross, in the order of their nodes.
        recomputed_us: time of the nodes before it that run again behind it.
        last_output: index of the last node before it whose output crosses or is an output of the model; -1 without one.
        in_layer: True if a fused layer has nodes on both sides.
    """

    position: int
    tensors: tuple[CrossingTensor, ...]
    recomputed_us: float = 0.0
    last_output: int = -1
    in_layer: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one row that cross."""
        return sum(tensor.row_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a cut graph.

    Attributes:
        nodes: indices of its nodes in the order, those that run again included.
        inputs: names of the model's inputs and crossing tensors that it reads.
        outputs: names of crossing tensors and of the model's outputs that it writes.
        time_us: measured time of its nodes.
        received: the crossing tensors among its inputs.
    """

    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    time_us: float
    received: tuple[CrossingTensor, ...]


class CutGraph:
    """Graph in its order, with the time of each node and the boundaries between them.

    Args:
        graph: graph of the model, sorted.
        crossing: tensors that may cross, by name.
        times_us: time of each node.
        layers: number of the fused layer of each node; -1 for none.
    """

    def __init__(
        self,
        graph: OnnxGraph,
        crossing: Mapping[str, CrossingTensor],
        times_us: Sequence[float],
        layers: Sequence[int],
    ) -> None:
        self._graph = graph
        self._nodes = list(graph.nodes)
        self._crossing = crossing
        self._times_us = np.asarray(times_us, np.float64)
        self._layers = layers
        self._index = {name: i for i, node in enumerate(self._nodes) for name in node.output if name}
        self._reads = [sorted(name for name in graph.reads(node) if name in self._index) for node in self._nodes]
        self._outputs = set(graph.outputs)
        self._last_read = self._last_reads()
        self.boundaries = self._find_boundaries()

    def choose(self, parts: int, slack: float) -> list[Boundary]:
        """Return the boundaries between the parts, in order.

        Args:
            parts: number of parts, at least 2.
            slack: how much longer than necessary the longest part may be, for fewer bytes: 0.05 is 5 %.

        Raises:
            BuildError: there are too few boundaries.
        """
        points = [Boundary(0, ()), *self.boundaries, Boundary(len(self._nodes), (), last_output=len(self._nodes) - 1)]
        positions = np.array([point.position for point in points])
        done_us = np.concatenate([[0.0], np.cumsum(self._times_us)])[positions]
        again_us = np.array([point.recomputed_us for point in points])

        def part_us(end: int) -> Array:
            """Return the time of the part between each earlier point and this one; infinite for parts without outputs."""
            time_us = done_us[end] - done_us[:end] + again_us[:end]
            return np.where(positions[:end] <= points[end].last_output, time_us, np.inf)

        longest_us, _ = _program(len(points), parts, lambda before, end: np.maximum(before, part_us(end)))
        if not np.isfinite(longest_us):
            raise BuildError(self._refusal(parts))
        limit_us = longest_us * (1 + slack)
        price = np.array([point.row_bytes + _FOLDED_BYTES * point.in_layer for point in points])

        def bytes_of(before: Array, end: int) -> Array:
            return np.where(part_us(end) <= limit_us * (1 + 1e-9), before + price[:end], np.inf)

        _, chosen = _program(len(points), parts, bytes_of)
        return [points[index] for index in chosen]

    def parts(self, chosen: Sequence[Boundary]) -> list[Part]:
        """Return the parts between boundaries.

        Raises:
            BuildError: a part reads no input.
        """
        edges = [0, *(boundary.position for boundary in chosen), len(self._nodes)]
        owners = {i: part for part, (a, b) in enumerate(pairwise(edges)) for i in range(a, b)}
        nodes = [self._closure(range(a, b), a) for a, b in pairwise(edges)]
        inputs = [self._inputs(each) for each in nodes]
        read_later = {name for names in inputs for name in names}
        parts = []
        for number, (each, names) in enumerate(zip(nodes, inputs, strict=True)):
            written = [name for i in each if owners[i] == number for name in self._nodes[i].output]
            outputs = tuple(name for name in written if name in read_later or name in self._outputs)
            if not names:
                raise BuildError(f"part {number + 1} of {len(nodes)} would have no input: cut into fewer parts")
            received = tuple(self._crossing[name] for name in names if name in self._index)
            parts.append(Part(each, names, outputs, float(self._times_us[list(each)].sum()), received))
        return parts

    def _inputs(self, nodes: Sequence[int]) -> tuple[str, ...]:
        """Return what a part reads from outside: inputs of the model, then crossing tensors in their order."""
        inside = {name for i in nodes for name in self._nodes[i].output}
        read = {name for i in nodes for name in self._graph.reads(self._nodes[i])} - inside
        crossing = sorted((name for name in read if name in self._index), key=self._index.__getitem__)
        return (*(name for name in self._graph.inputs if name in read), *crossing)

    def _closure(self, nodes: range, start: int) -> tuple[int, ...]:
        """Return the nodes of a part, with those before it that it has to run again."""
        needed, waiting = set(nodes), list(nodes)
        while waiting:
            for name in self._reads[waiting.pop()]:
                index = self._index[name]
                if index < start and index not in needed and name not in self._crossing:
                    needed.add(index)
                    waiting.append(index)
        return tuple(sorted(needed))

    def _last_reads(self) -> dict[str, int]:
        """Return the index of the last node that needs each tensor, directly or to run a node again."""
        last: dict[str, int] = {}
        for i in reversed(range(len(self._nodes))):
            again = [last.get(name, -1) for name in self._nodes[i].output if name and name not in self._crossing]
            needed = max([i, *again])
            for name in self._reads[i]:
                last[name] = max(last.get(name, -1), needed)
        return last

    def _find_boundaries(self) -> list[Boundary]:
        boundaries = []
        live: dict[str, int] = {}
        last_result = -1
        for position in range(1, len(self._nodes)):
            node = self._nodes[position - 1]
            live.update((name, self._last_read[name]) for name in node.output if name in self._last_read)
            live = {name: last for name, last in live.items() if last >= position}
            if any(name in self._outputs for name in node.output):
                last_result = position - 1
            again = {self._index[name] for name in live if name not in self._crossing}
            if any(self._is_random(self._nodes[i]) for i in again):
                continue
            tensors = tuple(self._crossing[name] for name in live if name in self._crossing)
            if tensors:
                boundaries.append(
                    Boundary(
                        position=position,
                        tensors=tensors,
                        recomputed_us=float(sum(self._times_us[i] for i in again)),
                        last_output=max([last_result, *(self._index[tensor.name] for tensor in tensors)]),
                        in_layer=-1 < self._layers[position - 1] == self._layers[position],
                    )
                )
        return boundaries

    @staticmethod
    def _is_random(node: onnx.NodeProto) -> bool:
        inner = [graph for a in node.attribute for graph in (a.g, *a.graphs)]
        return node.op_type in _RANDOM or any(CutGraph._is_random(n) for graph in inner for n in graph.node)

    def _refusal(self, parts: int) -> str:
        count = len(self.boundaries)
        reason = f"{len(self._nodes)} nodes with {count} places to cut" if count else f"{len(self._nodes)} nodes"
        blocks = [node for node in self._nodes if any(a.g.node or a.graphs for a in node.attribute)]
        text = f"the graph cannot be cut into {parts} parts: it has {reason}"
        if blocks:
            node = blocks[0]
            text += f", and node '{node.name}' ({node.op_type}) is never cut"
        cure = "cut into fewer parts, or export the model so that the tensors between its layers begin with the batch"
        return f"{text}; a tensor crosses if it has numbers, a known shape and the batch in front: {cure}"


def _program(points: int, parts: int, step: Callable[[Array, int], Array]) -> tuple[float, list[int]]:
    """Return the smallest cost of `parts` parts from the first point to the last, and the points between the parts.

    Args:
        points: number of points.
        parts: number of parts.
        step: returns the costs of ending a part at a point, from the costs before each earlier one.
    """
    cost = np.full(points, np.inf)
    cost[0] = 0.0
    sources = []
    for _ in range(parts):
        following, source = np.full(points, np.inf), np.zeros(points, int)
        for end in range(1, points):
            costs = step(cost[:end], end)
            source[end] = int(np.argmin(costs))
            following[end] = costs[source[end]]
        sources.append(source)
        cost = following
    chosen, end = [], points - 1
    for source in reversed(sources):
        end = int(source[end])
        chosen.append(end)
    return float(cost[-1]), chosen[-2::-1]
