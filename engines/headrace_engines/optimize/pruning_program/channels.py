"""Channels that can only be removed together, found in the graph of `torch.fx`.

Each channel (dimension 1 of a tensor) has a number. An operator copies, repeats or concatenates the numbers of its input, gives
new ones (convolution, linear layer), or equates those of several tensors (addition). Equal numbers, a *unit*, are removed
together from all layers. Units whose channels the network's input or output has are fixed. The grouping is that of Fang et al.,
"DepGraph: Towards Any Structural Pruning" (CVPR 2023), at the level of single channels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional

Numbers = np.ndarray[Any, Any]
MIN_CHANNELS = 2


class NotUnderstood(Exception):
    """A node of the graph whose effect on channels is unknown; the message names it."""


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Modules that compute each channel from the same channel of their input.
_BY_CHANNEL = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid,
    nn.Hardtanh, nn.Dropout, nn.Dropout2d, nn.Identity, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d, nn.ZeroPad2d,
    nn.ConstantPad2d,
)  # fmt: skip
_FUNCTIONS_BY_CHANNEL: tuple[Callable[..., Any], ...] = (
    torch.relu, torch.sigmoid, torch.tanh, functional.relu, functional.relu6, functional.leaky_relu, functional.elu,
    functional.silu, functional.gelu, functional.mish, functional.sigmoid, functional.tanh, functional.hardswish,
    functional.hardsigmoid, functional.hardtanh, functional.dropout, functional.max_pool2d, functional.avg_pool2d,
    functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d, torch.clamp,
)  # fmt: skip
_METHODS_BY_CHANNEL = ("relu", "relu_", "sigmoid", "tanh", "clamp", "clamp_", "contiguous")
_ELEMENTWISE: tuple[Callable[..., Any], ...] = (
    operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, torch.add, torch.sub, torch.mul,
)  # fmt: skip
_ELEMENTWISE_METHODS = ("add", "add_", "sub", "mul", "mul_")
_FLATTENED_RANK = 2


@dataclass(slots=True)
class Layer:
    """Module with weights, and the units of its channels.

    Attributes:
        name: path of the module.
        module: convolution, linear layer or batch norm.
        inputs: unit of each input channel; of each channel for a batch norm.
        outputs: unit of each output channel.
        positions: number of output values of one channel for one sample, over all calls of the module.
    """

    name: str
    module: nn.Module
    inputs: Numbers
    outputs: Numbers
    positions: int

    @property
    def grouped(self) -> int:
        """Number of groups; 1 for a linear layer and a batch norm."""
        return int(getattr(self.module, "groups", 1))

    @property
    def is_norm(self) -> bool:
        """True for a batch norm, whose channels are those of its input."""
        return isinstance(self.module, _NORMS)

    @property
    def is_depthwise(self) -> bool:
        """True for a convolution with one input channel per group."""
        return self.grouped > 1 and self.grouped == int(self.module.in_channels)


@dataclass(slots=True)
class ChannelMap:
    """Units of a network.

    Attributes:
        graph: traced network; its modules are those of `layers`.
        layers: layers in the order of the graph.
        fixed: units that cannot be removed.
        groups: removable units by group; a group is removed from the same layers.
    """

    graph: fx.GraphModule
    layers: list[Layer]
    fixed: set[int]
    groups: list[Numbers] = field(default_factory=list)

    def macs(self, kept: set[int] | None = None) -> int:
        """Return the multiplications of one sample in convolutions and linear layers.

        Args:
            kept: units that remain; None for all.
        """
        total = 0
        for layer in self.layers:
            if layer.is_norm:
                continue
            entering, leaving = _remaining(layer.inputs, kept), _remaining(layer.outputs, kept)
            weight = layer.module.weight
            kernel = int(np.prod(weight.shape[2:])) if weight.dim() > _FLATTENED_RANK else 1
            groups = entering if layer.is_depthwise else layer.grouped
            total += layer.positions * leaving * (entering // max(groups, 1)) * kernel
        return total


def _remaining(units: Numbers, kept: set[int] | None) -> int:
    return len(units) if kept is None else sum(int(unit) in kept for unit in units)


def map_channels(module: nn.Module, sample: torch.Tensor) -> ChannelMap:
    """Trace a network and find its units.

    Args:
        module: network with one input.
        sample: input of two samples, [2, ...].

    Raises:
        NotUnderstood: an operator's effect on channels is unknown; the message has the node.
    """
    graph = module if isinstance(module, fx.GraphModule) else _traced(module)
    graph.eval()
    with torch.no_grad():
        ShapeProp(graph).propagate(sample)
    tracer = _Tracer(graph)
    for node in graph.graph.nodes:
        tracer.visit(node)
    return tracer.result()


def _traced(module: nn.Module) -> fx.GraphModule:
    try:
        return fx.symbolic_trace(module)
    except Exception as error:  # code of the user runs in the trace
        first = str(error).strip().partition("\n")[0]
        raise NotUnderstood(
            f"torch.fx cannot trace {type(module).__name__} ({first}): its forward must not depend on values of tensors"
        ) from error


class _Tracer:
    """Assigns numbers to the channels of each tensor; equal channels are joined (union-find)."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._modules = dict(graph.named_modules())
        self._parents: list[int] = []
        self._fixed: set[int] = set()
        self._channels: dict[fx.Node, Numbers] = {}
        self._layers: dict[str, Layer] = {}

    def visit(self, node: fx.Node) -> None:
        if node.op == "output":
            for source in node.all_input_nodes:
                self._fix(self._channels.get(source, np.empty(0, np.int64)))
            return
        if _shape(node) is None or node.op == "get_attr":
            return
        if node.op == "placeholder":
            self._channels[node] = self._new(_width(node))
            self._fix(self._channels[node])
            return
        channels = self._module(node) if node.op == "call_module" else self._function(node)
        shape = _shape(node) or ()
        if len(channels) != (shape[1] if len(shape) > 1 else 0):
            raise self._refusal(node, "its channels do not follow from those of its input")
        self._channels[node] = channels

    def result(self) -> ChannelMap:
        roots = np.array([self._find(number) for number in range(len(self._parents))], np.int64)
        layers = list(self._layers.values())
        for layer in layers:
            layer.inputs, layer.outputs = roots[layer.inputs], roots[layer.outputs]
        fixed = {int(roots[number]) for number in self._fixed}
        return ChannelMap(self._graph, layers, fixed, _groups(layers, fixed))

    # Operators

    def _module(self, node: fx.Node) -> Numbers:
        module = self._modules[str(node.target)]
        source = self._only_input(node)
        channels = self._channels[source]
        if isinstance(module, _CONVOLUTIONS):
            return self._layer(node, module, channels, int(module.out_channels), int(module.groups))
        if isinstance(module, nn.Linear):
            if len(_shape(source) or ()) != _FLATTENED_RANK:
                raise self._refusal(node, "its input is not [samples, features]")
            return self._layer(node, module, channels, int(module.out_features), 1)
        if isinstance(module, _NORMS):
            self._enter(node, module, channels, channels)
            return channels
        if isinstance(module, _BY_CHANNEL):
            return channels
        if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
            return _repeated(channels, _shape(source) or ())
        if isinstance(module, nn.Softmax):
            self._fix(channels)
            return channels
        raise self._refusal(node, "this module is unknown")

    def _layer(self, node: fx.Node, module: nn.Module, channels: Numbers, count: int, groups: int) -> Numbers:
        known = self._layers.get(str(node.target))
        outputs = self._new(count) if known is None else known.outputs
        if groups > 1 and groups == len(channels):  # depthwise: each channel has its own filters
            self._join(outputs, np.repeat(channels, count // groups))
        elif groups > 1:  # the same positions of all groups, so that the groups remain equal
            for numbers in (channels, outputs):
                by_group = numbers.reshape(groups, -1)
                for other in by_group[1:]:
                    self._join(by_group[0], other)
        self._enter(node, module, channels, outputs)
        return outputs

    def _enter(self, node: fx.Node, module: nn.Module, inputs: Numbers, outputs: Numbers) -> None:
        name, shape = str(node.target), _shape(node) or ()
        positions = int(np.prod(shape[2:]))
        known = self._layers.get(name)
        if known is None:
            self._layers[name] = Layer(name, module, inputs, outputs, positions)
            return
        if len(known.inputs) != len(inputs):
            raise self._refusal(node, "it is called with different numbers of channels")
        self._join(known.inputs, inputs)
        self._join(known.outputs, outputs)
        known.positions += positions

    def _function(self, node: fx.Node) -> Numbers:
        target: Any = node.target
        is_method = node.op == "call_method"
        if target in (_METHODS_BY_CHANNEL if is_method else _FUNCTIONS_BY_CHANNEL):
            return self._channels[self._only_input(node)]
        if target in (_ELEMENTWISE_METHODS if is_method else _ELEMENTWISE):
            return self._elementwise(node)
        if target in (("flatten", "view", "reshape") if is_method else (torch.flatten, torch.reshape)):
            return self._flattened(node)
        if target in (("mean",) if is_method else (torch.mean,)):
            return self._mean(node)
        if target in (torch.cat, torch.concat):
            return self._concatenated(node)
        if target in (("softmax",) if is_method else (torch.softmax, functional.softmax)):
            channels = self._channels[self._only_input(node)]
            self._fix(channels)
            return channels
        raise self._refusal(node, "this operator is unknown")

    def _elementwise(self, node: fx.Node) -> Numbers:
        operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
        if any(_shape(operand) is None for operand in operands) or not operands:
            raise self._refusal(node, "an operand is a computed number")
        rank, width = len(_shape(node) or ()), _width(node)
        result: Numbers | None = None
        for operand in operands:
            shape = _shape(operand) or ()
            if operand not in self._channels:  # a constant
                if int(np.prod(shape)) > 1:
                    raise self._refusal(node, "an operand is a constant with several values")
                continue
            channels = self._channels[operand]
            if len(shape) != rank or (len(channels) != width and len(channels) != 1):
                raise self._refusal(node, "its operands have different ranks")
            if len(channels) != width:
                self._fix(channels)
            elif result is None:
                result = channels
            else:
                self._join(result, channels)
        if result is None:
            raise self._refusal(node, "no operand has all channels of its output")
        return result

    def _flattened(self, node: fx.Node) -> Numbers:
        source = node.args[0]
        before, after = _shape(source), _shape(node)
        if not isinstance(source, fx.Node) or before is None or after is None:
            raise self._refusal(node, "it has no tensor as its input")
        if after != (before[0], int(np.prod(before[1:]))):
            raise self._refusal(node, "only [samples, all features] is supported")
        arguments = node.args[1:]
        sizes = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)) else arguments
        is_flatten = node.target in ("flatten", torch.flatten)
        if not is_flatten and (len(sizes) != _FLATTENED_RANK or sizes[1] != -1 or sizes[0] == -1):
            raise self._refusal(
                node, "its size is written as a number, which is another one after pruning: use flatten(1)"
            )
        return _repeated(self._channels[source], before)

    def _mean(self, node: fx.Node) -> Numbers:
        source = self._only_input(node)
        rank = len(_shape(source) or ())
        dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        listed = list(dims) if isinstance(dims, (tuple, list)) else [dims]
        if not all(isinstance(dim, int) and dim % rank > 1 for dim in listed):
            raise self._refusal(node, "it does not reduce positions only")
        return self._channels[source]

    def _concatenated(self, node: fx.Node) -> Numbers:
        tensors = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
        if not isinstance(tensors, (tuple, list)) or not all(part in self._channels for part in tensors) or dim != 1:
            raise self._refusal(node, "only tensors along dimension 1 are supported")
        return np.concatenate([self._channels[part] for part in tensors])

    # Numbers

    def _only_input(self, node: fx.Node) -> fx.Node:
        sources = [source for source in node.all_input_nodes if _shape(source) is not None]
        if len(sources) != 1 or sources[0] not in self._channels:
            raise self._refusal(node, "it needs one tensor as its input")
        return sources[0]

    def _new(self, count: int) -> Numbers:
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def _find(self, number: int) -> int:
        while self._parents[number] != number:
            self._parents[number] = self._parents[self._parents[number]]
            number = self._parents[number]
        return number

    def _join(self, left: Numbers, right: Numbers) -> None:
        for a, b in zip(left.tolist(), right.tolist(), strict=True):
            roots = sorted((self._find(a), self._find(b)))
            self._parents[roots[1]] = roots[0]

    def _fix(self, channels: Numbers) -> None:
        self._fixed.update(channels.tolist())

    def _refusal(self, node: fx.Node, reason: str) -> NotUnderstood:
        kind = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        if node.op == "call_module":
            kind = f"{kind}: {type(self._modules[str(node.target)]).__name__}"
        return NotUnderstood(f"node {node.name} ({kind}) cannot be pruned: {reason}")


def _shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of a node's tensor; None if its value is no tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    shape = getattr(meta, "shape", None)
    return None if shape is None else tuple(int(size) for size in shape)


def _width(node: fx.Node) -> int:
    shape = _shape(node) or ()
    return shape[1] if len(shape) > 1 else 0


def _repeated(channels: Numbers, shape: tuple[int, ...]) -> Numbers:
    """Return the numbers of flattened features: each channel for all of its positions."""
    return np.repeat(channels, int(np.prod(shape[2:])))


def _groups(layers: list[Layer], fixed: set[int]) -> list[Numbers]:
    """Return the removable units, together if a layer produces them together."""
    groups: list[set[int]] = []
    for layer in layers:
        if layer.is_norm:
            continue
        units = {int(unit) for unit in layer.outputs}
        if units & fixed:
            # A layer whose output is partly fixed, e.g. by a broadcast, keeps the other units in a group of their own.
            units -= fixed
        touching = [group for group in groups if group & units]
        groups = [group for group in groups if not group & units]
        merged = units.union(*touching)
        if merged:
            groups.append(merged)
    produced = {int(unit) for layer in layers if not layer.is_norm for unit in layer.outputs}
    result = [np.array(sorted(group & produced), np.int64) for group in groups]
    return [group for group in result if len(group) >= MIN_CHANNELS]
