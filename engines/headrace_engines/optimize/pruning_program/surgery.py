"""Selects units to remove and cuts them out of the layers of a network.

Importance of a unit, by `importance`:
    taylor      squared first-order change of the loss without the channel, mean over batches (Molchanov et al., "Importance
                Estimation for Neural Network Pruning", CVPR 2019); the sum over the channels of a unit is taken before the square
    magnitude   L2 norm of all weights that produce the channel (Li et al., "Pruning Filters for Efficient ConvNets", ICLR 2017)

Scores are divided by the mean of their group: layers of different scale then lose similar shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from headrace_engines.optimize.pruning_program.channels import ChannelMap, Layer, Numbers

# Share of a group's units that always remains.
MIN_SHARE = 0.1
Scores = dict[int, float]


def magnitude_scores(channels: ChannelMap) -> Scores:
    """Return the norm of the weights that produce each unit's channels."""
    squares: dict[int, float] = {}
    for layer in channels.layers:
        weight = layer.module.weight
        if weight is None:
            continue
        by_channel = (
            weight.detach().double().flatten(1).square().sum(1) if weight.dim() > 1 else weight.detach().square()
        )
        for unit, square in zip(layer.outputs.tolist(), by_channel.tolist(), strict=True):
            squares[unit] = squares.get(unit, 0.0) + square
    return {unit: square**0.5 for unit, square in squares.items()}


def taylor_scores(channels: ChannelMap, losses: Iterable[Callable[[], torch.Tensor]]) -> Scores:
    """Return the squared first-order change of the loss by removing each unit, mean over batches.

    Args:
        channels: the network; in evaluation mode, so that batch norms do not cancel the scale of filters.
        losses: a function for each batch that runs the network and returns its loss.
    """
    totals: dict[int, float] = {}
    producers = [layer for layer in channels.layers if not layer.is_norm]
    for loss in losses:
        channels.graph.zero_grad(set_to_none=True)
        loss().backward()
        changes: dict[int, float] = {}
        for layer in producers:
            weight = layer.module.weight
            if weight.grad is None:
                continue
            change = (weight.detach() * weight.grad).double().flatten(1).sum(1)
            for unit, value in zip(layer.outputs.tolist(), change.tolist(), strict=True):
                changes[unit] = changes.get(unit, 0.0) + value
        for unit, value in changes.items():
            totals[unit] = totals.get(unit, 0.0) + value * value
    channels.graph.zero_grad(set_to_none=True)
    return totals


def select_units(channels: ChannelMap, scores: Scores, flops_share: float, multiple: int) -> set[int]:
    """Return the units that remain: the most important ones within a share of the multiplications.

    Args:
        channels: the network.
        scores: importance of each unit.
        flops_share: largest share (0..1) of the network's multiplications.
        multiple: the number of units of a group of at least twice as many is rounded up to a multiple of it.

    Returns:
        Removable and fixed units that remain. The share is exceeded if each group has its minimum.
    """
    relative: list[tuple[Numbers, Numbers]] = []
    for group in channels.groups:
        values = np.array([scores.get(int(unit), 0.0) for unit in group], np.float64)
        order = np.argsort(-values, kind="stable")
        relative.append((group[order], (values / max(float(values.mean()), 1e-300))[order]))
    thresholds = np.unique(np.concatenate([values for _, values in relative])) if relative else np.zeros(1)
    limit = flops_share * channels.macs()
    low, high = 0, len(thresholds)  # the number of thresholds that are removed
    while low < high:
        middle = (low + high) // 2
        kept = _kept(channels, relative, float(thresholds[middle]), multiple)
        if channels.macs(kept) <= limit:
            high = middle
        else:
            low = middle + 1
    threshold = float(thresholds[low]) if low < len(thresholds) else np.inf
    return _kept(channels, relative, threshold, multiple)


def _kept(channels: ChannelMap, relative: list[tuple[Numbers, Numbers]], threshold: float, multiple: int) -> set[int]:
    kept = set(channels.fixed)
    for group, values in relative:
        count = max(int((values >= threshold).sum()), int(np.ceil(MIN_SHARE * len(group))), 1)
        step = multiple if len(group) >= 2 * multiple else 1
        count = min(-(-count // step) * step, len(group))
        kept.update(int(unit) for unit in group[:count])
    return kept


def remove_units(channels: ChannelMap, kept: set[int]) -> None:
    """Cut the other units out of the layers; `channels` is no longer valid afterwards.

    Args:
        channels: the network, changed in place.
        kept: units that remain.
    """
    for layer in channels.layers:
        outputs = torch.tensor([int(unit) in kept for unit in layer.outputs])
        inputs = torch.tensor([int(unit) in kept for unit in layer.inputs])
        if layer.is_norm:
            _cut_norm(layer.module, outputs)
        else:
            _cut_layer(layer, inputs, outputs)


def _cut_norm(module: Any, outputs: torch.Tensor) -> None:
    for name in ("weight", "bias"):
        value = getattr(module, name)
        if value is not None:
            setattr(module, name, nn.Parameter(value.detach()[outputs].clone()))
    for name in ("running_mean", "running_var"):
        value = getattr(module, name)
        if value is not None:
            setattr(module, name, value[outputs].clone())
    module.num_features = int(outputs.sum())


def _cut_layer(layer: Layer, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
    module: Any = layer.module
    weight = module.weight.detach()[outputs]
    groups = layer.grouped
    if layer.is_depthwise:
        module.groups = int(inputs.sum())
    elif groups > 1:
        # All groups keep the same positions: those of the first one.
        weight = weight[:, inputs[: len(inputs) // groups]]
    else:
        weight = weight[:, inputs]
    module.weight = nn.Parameter(weight.clone())
    if module.bias is not None:
        module.bias = nn.Parameter(module.bias.detach()[outputs].clone())
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = int(inputs.sum()), int(outputs.sum())
    else:
        module.in_channels, module.out_channels = int(inputs.sum()), int(outputs.sum())
