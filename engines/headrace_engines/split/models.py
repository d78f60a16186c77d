"""The parts of a model as ONNX models of their own, and the proof that together they compute what the whole does."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import onnx
import onnxruntime as ort
from headrace.config.manifest import LayerReport
from onnx import helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxGraph, captured, weight_bytes
from headrace_engines.split.cuts import Boundary, CutGraph, Part
from headrace_engines.split.tensors import CrossingTensor, crossing_tensors, name_batch
from headrace_engines.targets.onnxruntime import name_nodes
from headrace_engines.targets.onnxruntime_session import open_session, session_options


@dataclass(frozen=True, slots=True)
class SplitModel:
    """A model cut into parts.

    Attributes:
        parts: the parts in the order in which they run.
        boundaries: the boundaries between them.
        models: ONNX model of each part.
        weight_bytes: bytes of the weights of each part.
        times: measured times of the whole.
    """

    parts: tuple[Part, ...]
    boundaries: tuple[Boundary, ...]
    models: tuple[onnx.ModelProto, ...]
    weight_bytes: tuple[int, ...]
    times: NodeTimes


def split_model(
    model: onnx.ModelProto, report: LayerReport, inputs: Mapping[str, Array], *, parts: int, slack: float, batched: bool
) -> SplitModel:
    """Cut a model into parts of about equal time between which few bytes cross.

    Args:
        model: the whole; not changed.
        report: measured layers of it.
        inputs: a batch of inputs of the measured shapes.
        parts: number of parts, at least 2.
        slack: how much longer than necessary the longest part may be, for fewer bytes.
        batched: True if the first dimension of every input is the batch.

    Raises:
        BuildError: the graph cannot be cut so.
    """
    named = name_nodes(model)
    _check(named)
    symbol = name_batch(named) if batched else ""
    _drop_dead_nodes(named)
    graph = OnnxGraph(named)
    kinds = [_kind(graph, node) for node in graph.nodes]
    times = node_times(report, [node.name for node in graph.nodes], kinds)
    crossing = crossing_tensors(graph, inputs, symbol)
    cut = CutGraph(graph, crossing, times.times_us, times.layers)
    boundaries = cut.choose(parts, slack)
    chosen = cut.parts(boundaries)
    models = tuple(_part_model(graph, part, crossing, symbol, number) for number, part in enumerate(chosen, 1))
    return SplitModel(tuple(chosen), tuple(boundaries), models, tuple(map(weight_bytes, models)), times)


def _kind(graph: OnnxGraph, node: onnx.NodeProto) -> tuple[object, ...]:
    """Return a value that is equal for nodes that compute the same on tensors of the same shapes."""
    attributes = sorted(attribute.SerializeToString() for attribute in node.attribute)
    shapes = [graph.shape(name) for name in (*node.input, *node.output)]
    # Of a node whose shapes are open nothing is said to be equal.
    own = node.name if any(shape is None for shape in shapes) else ""
    return (node.op_type, tuple(attributes), tuple(shapes), own)


def _check(model: onnx.ModelProto) -> None:
    """Refuse graphs that cannot be written as steps of a pipeline."""
    if not model.graph.node:
        raise BuildError("the graph has no nodes: there is nothing to cut")
    if model.graph.sparse_initializer:
        raise BuildError("the graph has sparse initializers, which are not cut: export the model with dense weights")
    written = {name for node in model.graph.node for name in node.output}
    for value in model.graph.output:
        if value.name not in written:
            cure = "take it out of the model's outputs, or write it through an Identity"
            raise BuildError(f"output '{value.name}' is an input or a constant, which no part computes: {cure}")


def _drop_dead_nodes(model: onnx.ModelProto) -> None:
    """Remove nodes that no output needs; the order of the file, which ONNX requires to be topological, stays."""
    needed = {value.name for value in model.graph.output}
    alive = []
    for node in reversed(model.graph.node):
        if needed.intersection(node.output):
            alive.append(node)
            needed.update(name for name in (*node.input, *captured(node)) if name)
    if len(alive) < len(model.graph.node):
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(alive)]
        del model.graph.node[:]
        model.graph.node.extend(kept)


def _part_model(
    graph: OnnxGraph, part: Part, crossing: Mapping[str, CrossingTensor], symbol: str, number: int
) -> onnx.ModelProto:
    whole = graph.model
    model = onnx.ModelProto(ir_version=whole.ir_version, producer_name=whole.producer_name)
    model.opset_import.extend(whole.opset_import)
    model.functions.extend(whole.functions)
    model.metadata_props.extend(whole.metadata_props)
    target = model.graph
    target.name = f"{whole.graph.name or 'graph'}_part{number}"
    nodes = [graph.nodes[index] for index in part.nodes]
    target.node.extend(nodes)
    read = {name for node in nodes for name in graph.reads(node)}
    constants = [tensor for tensor in whole.graph.initializer if tensor.name in read]
    target.initializer.extend(constants)
    own = {value.name: value for value in (*whole.graph.input, *whole.graph.output)}
    # Old files list their constants among the inputs.
    listed = {tensor.name for tensor in constants}.intersection(value.name for value in whole.graph.input)
    for names, values in (((*part.inputs, *sorted(listed)), target.input), (part.outputs, target.output)):
        for name in names:
            tensor = crossing.get(name)
            is_own = name in own and (tensor is None or name not in part.inputs)
            values.append(own[name] if is_own else _value(crossing[name], symbol))
    inner = {name for node in nodes for name in node.output} - {*part.inputs, *part.outputs}
    target.value_info.extend(value for value in whole.graph.value_info if value.name in inner)
    return model


def _value(tensor: CrossingTensor, symbol: str) -> onnx.ValueInfoProto:
    dims = [dim if isinstance(dim, int) or dim else None for dim in tensor.dims]
    return helper.make_tensor_value_info(tensor.name, tensor.element_type, [symbol, *dims[1:]] if symbol else dims)


def prove(whole: Path, parts: Sequence[Path], inputs: Mapping[str, Array]) -> None:
    """Run the whole and the joined parts on ONNX Runtime, without its optimiser, and compare every output bit for bit.

    Args:
        whole: ONNX file of the model.
        parts: ONNX files of the parts, in the order in which they run.
        inputs: a batch of inputs.

    Raises:
        BuildError: an output differs, or a model fails.
    """
    expected = _run(whole, inputs)
    values = dict(inputs)
    for path in parts:
        values |= _run(path, values)
    for name, array in expected.items():
        if not _is_same(values[name], array):
            raise BuildError(
                f"output '{name}' of the joined parts differs from the whole: the model computes something else in each run"
            )


def _is_same(first: Array, second: Array) -> bool:
    """Return True if two arrays have the same bytes; NaN is equal to itself."""
    if first.dtype == object:
        return np.array_equal(first, second)
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()


def _run(path: Path, values: Mapping[str, Array]) -> dict[str, Array]:
    options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = open_session(path, options)
    names = [node.name for node in session.get_outputs()]
    try:
        results = session.run(names, {node.name: values[node.name] for node in session.get_inputs()})
    except Exception as error:  # the binding's exceptions share no other base
        first = " ".join(str(error).split())[:300]
        raise BuildError(f"{path.parent.parent.name} fails on random inputs: {first}") from error
    return dict(zip(names, results, strict=True))


# Time of each node of a model, from the measured layers of its engine or of ONNX Runtime.

# A layer of several nodes that takes more of the time than this, divided by the number of parts, hides where it is spent.
_LARGEST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Times of the nodes of a graph, in its order.

    Attributes:
        times_us: microseconds of each node; they add up to the time of the model under the profiler.
        layers: number of the fused layer of each node; -1 for a node that no layer names.
        source: the file that was measured, and the machine.
    """

    times_us: tuple[float, ...]
    layers: tuple[int, ...]
    source: str


def node_times(report: LayerReport, nodes: Sequence[str], kinds: Sequence[Hashable] = ()) -> NodeTimes:
    """Spread the time of each layer over its nodes.

    A fused layer runs as one, so its first node gets its time. Layers of the same kind get their median time: they compute the
    same, and a single one may have been interrupted. Layers without nodes, such as changes of layout, are spread in
    proportion to the others. Without any time every node gets the same.

    Args:
        report: measured layers with the names of their nodes.
        nodes: names of the nodes, in the order of the graph.
        kinds: for each node, a value that is equal for nodes that compute the same; empty if all are different.
    """
    order = {name: index for index, name in enumerate(nodes)}
    members = [sorted(order[name] for name in layer.nodes if name in order) for layer in report.layers]
    kind_of = [tuple(kinds[i] for i in indices) if kinds else number for number, indices in enumerate(members)]
    groups: dict[Hashable, list[float]] = {}
    for layer, kind in zip(report.layers, kind_of, strict=True):
        groups.setdefault(kind, []).append(layer.time_us)
    times_us = [0.0] * len(nodes)
    layers = [-1] * len(nodes)
    for number, indices in enumerate(members):
        if indices:
            times_us[indices[0]] += median(groups[kind_of[number]])
        for index in indices:
            layers[index] = number
    known_us = sum(times_us)
    if known_us <= 0:
        times_us = [report.total_us / len(nodes) or 1.0] * len(nodes)
    else:
        times_us = [time * (report.total_us or known_us) / known_us for time in times_us]
    return NodeTimes(tuple(times_us), tuple(layers), f"{report.artefact} on {report.machine}")


def is_coarse(report: LayerReport, parts: int) -> bool:
    """Return True if one fused layer has so much of the time that a cut cannot be balanced by this report."""
    return any(len(layer.nodes) > 1 and layer.share > _LARGEST_SHARE / parts for layer in report.layers)
