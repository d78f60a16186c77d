"""Time of each node of a model, from the measured layers of its engine or of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

from headrace.config.manifest import LayerReport

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
