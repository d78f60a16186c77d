"""Maps the nodes of an optimised graph to the nodes of its original.

Optimisers fuse, rename, move and change layouts without a record. Names survive: of tensors, mostly, and of nodes. A
node whose output has a name of the original executes all nodes between that tensor and the tensors that it reads. Where
layouts changed, ONNX Runtime gives tensors new names, but writes the old name of the tensor ("X_nchwc") or of the node
("X_token_7", "fused X") into the new node's: then what follows in the original and has no other node was done there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx

from headrace_engines.onnx_graph import OnnxGraph, copy_model

_LAYOUT = "_nchwc"


_NUMBERED = re.compile(r"_token_\d+$|/duplicated(_token_\d+)?$")


_FUSED = "fused "


# What optimisers add to bring a tensor into another layout or type: they do no node of the original.
_MOVERS = {"ReorderInput", "ReorderOutput", "Transpose", "Cast"}


Lineage = dict[str, tuple[str, ...]]


def node_label(node: onnx.NodeProto) -> str:
    """Return the name of a node, or that of the first tensor that it produces."""
    return str(node.name or next((name for name in node.output if name), node.op_type))


def name_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every node has a name of its own, that of its `node_label` where it is free."""
    named = copy_model(model)
    used: set[str] = set()
    for node in named.graph.node:
        base = node_label(node)
        node.name, number = base, 1
        while node.name in used:
            node.name = f"{base}#{number}"
            number += 1
        used.add(node.name)
    return named


def trace_nodes(optimised: onnx.ModelProto, original: onnx.ModelProto) -> Lineage:
    """Return the nodes of the original that each node of the optimised graph executes, in the original's order.

    A node that is done several times over, such as a DequantizeLinear with two readers, is listed with each. A node that only
    computes constants (weights' DequantizeLinear too) is listed with none, unless it is still there; one that was dropped on
    the way is listed with the node before it.

    Args:
        optimised: its nodes have names of their own.
        original: likewise; see `name_nodes`.
    """
    return _Trace(optimised, original).run()


def compose_lineages(outer: Lineage, inner: Lineage) -> Lineage:
    """Map the nodes of the outer lineage to those of the inner one's original."""
    return {
        name: tuple(dict.fromkeys(end for middle in through for end in inner.get(middle, ())))
        for name, through in outer.items()
    }


class _Trace:
    def __init__(self, optimised: onnx.ModelProto, original: onnx.ModelProto) -> None:
        self._optimised = optimised.graph
        self._graph = OnnxGraph(_skeleton(original))
        self._by_name = {node.name: node for node in self._graph.nodes}
        self._order = {node.name: index for index, node in enumerate(self._graph.nodes)}
        self._anchors: dict[str, str] = {}  # node of the original -> node of the optimised graph that surely does it
        self._ends: dict[
            str, tuple[str, bool]
        ] = {}  # optimised node -> tensor of the original, whether that is all of it
        self._owner: dict[str, str] = {}  # node of the original -> node that did it alone
        self._alias: dict[str, str] = {name: name for name in self._graph.inputs}
        self._known = set(self._graph.inputs)  # the alias' values
        self._folded: set[str] = set()  # tensors computed from constants alone
        for node in self._graph.nodes:
            if all(self._is_folded(name) for name in node.input if name):
                self._folded.update(node.output)
        self._found: dict[str, set[str]] = {node.name: set() for node in self._optimised.node}

    def run(self) -> Lineage:
        for node in self._optimised.node:
            self._anchor(node)
        for node in self._optimised.node:
            self._claim(node)
        self._give_away_what_is_left()
        return {name: tuple(sorted(names, key=self._order.__getitem__)) for name, names in self._found.items()}

    def _anchor(self, node: onnx.NodeProto) -> None:
        if node.op_type in _MOVERS and node.name not in self._by_name:
            return
        tensor = next((name for name in node.output if self._graph.producer(name) is not None), None)
        if tensor is not None:
            self._set_anchor(node, tensor, True)
            for hint, is_tensor in _hints(node.name):
                if not is_tensor and hint in self._by_name:
                    self._anchors.setdefault(hint, node.name)
            return
        for hint, is_tensor in _hints(node.name):
            maker = self._graph.producer(hint) if is_tensor else self._by_name.get(hint)
            if maker is not None and maker.name not in self._anchors:
                self._set_anchor(node, hint if is_tensor else maker.output[0], False)
                return

    def _set_anchor(self, node: onnx.NodeProto, tensor: str, whole: bool) -> None:
        maker = self._graph.producer(tensor)
        assert maker is not None
        self._anchors[maker.name] = node.name
        self._ends[node.name] = (tensor, whole)

    def _claim(self, node: onnx.NodeProto) -> None:
        if node.name not in self._ends:
            source = next((self._alias[name] for name in node.input if name in self._alias), None)
            for name in node.output if source is not None else ():
                self._alias.setdefault(name, source or "")
            return
        tensor, whole = self._ends[node.name]
        reads = {self._alias[name] for name in node.input if name in self._alias}
        end = tensor if whole else self._follow(node.name, tensor, reads)
        self._walk_back(node.name, end)
        for name in node.output:
            self._alias[name] = name if self._graph.producer(name) is not None else end
            self._known.add(self._alias[name])

    def _follow(self, name: str, tensor: str, reads: set[str]) -> str:
        """Return the last tensor of a node that begins at `tensor`: over single readers that no other node executes."""
        while tensor not in self._graph.outputs:
            readers = self._graph.consumers(tensor)
            if len(readers) != 1 or readers[0].name in self._anchors or readers[0].op_type == "DequantizeLinear":
                return tensor
            others = [t for t in readers[0].input if t and t != tensor and not self._is_folded(t)]
            if any(other not in reads for other in others) or not readers[0].output:
                return tensor
            self._own(name, readers[0])
            tensor = readers[0].output[0]
        return tensor

    def _walk_back(self, name: str, end: str) -> None:
        waiting = [end]
        seen: set[str] = set()
        while waiting:
            tensor = waiting.pop()
            maker = self._graph.producer(tensor)
            if maker is None or tensor in seen or (tensor in self._known and tensor != end):
                continue
            seen.add(tensor)
            if self._anchors.get(maker.name, name) != name or self._owner.get(maker.name, name) != name:
                continue
            if tensor in self._folded and maker.name not in self._anchors:
                continue
            if self._is_shared(maker):
                self._found[name].add(maker.name)
            else:
                self._own(name, maker)
            waiting.extend(t for t in maker.input if t)

    def _is_shared(self, node: onnx.NodeProto) -> bool:
        return sum(len(self._graph.consumers(name)) for name in node.output) > 1 and node.name not in self._anchors

    def _is_folded(self, tensor: str) -> bool:
        return self._graph.is_constant(tensor) or tensor in self._folded

    def _own(self, name: str, node: onnx.NodeProto) -> None:
        self._owner[node.name] = name
        self._found[name].add(node.name)

    def _give_away_what_is_left(self) -> None:
        done = {name for names in self._found.values() for name in names}
        for node in self._graph.nodes:
            if node.name in done or all(self._is_folded(name) for name in node.input if name):
                continue
            makers = (self._graph.producer(name) for name in node.input)
            owner = next((self._owner[maker.name] for maker in makers if maker and maker.name in self._owner), None)
            if owner is not None:
                self._own(owner, node)


def _skeleton(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph without its weights, which may be large and are not needed here."""
    bare = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    for field in ("node", "input", "output"):
        getattr(bare.graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        bare.graph.initializer.add(name=tensor.name, data_type=tensor.data_type)
    return bare


def _hints(name: str) -> Iterator[tuple[str, bool]]:
    """Names of the original that a new node's name was made from, and whether it is a tensor's."""
    yield name, False
    plain = name.removeprefix(_FUSED)
    while shorter := _NUMBERED.sub("", plain):
        if shorter.endswith(_LAYOUT):
            tensor = shorter.removesuffix(_LAYOUT)
            yield tensor, True
            # Normalisations and multiplications by constants become convolutions there.
            yield tensor.removesuffix("_bn").removesuffix("_mul"), True
        yield shorter, False
        if shorter == plain:
            return
        plain = shorter
