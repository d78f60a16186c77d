"""2:4 sparsity of ONNX weights, and the choice of sparse kernels.

Of each four consecutive weights along the reduction the two smallest are zero.
Sparse Tensor Cores (NVIDIA Ampere and later) skip the zeros. The reduction of a convolution is its input channels, for each
output channel and each position of the filter; that of a product is its inner dimension (TensorRT documentation, "Structured
Sparsity"; Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from headrace_engines.onnx_graph import captured, copy_model
from headrace_engines.progress import Report, part
from headrace_engines.targets.base import Array, Engine, Target, TargetSpec

BLOCK, KEPT = 4, 2
# Sparse kernels read this many reduced values at a time; shorter or uneven reductions stay dense.
MIN_REDUCTION = 16
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True)
class SparseLayer:
    """Layer whose weights can be 2:4 sparse.

    Attributes:
        node: name of the ONNX node, or of its output.
        operator: "Conv", "Gemm" or "MatMul".
        weight: name of the initializer.
        axis: dimension of the weight that is reduced.
        size: number of weights.
    """

    node: str
    operator: str
    weight: str
    axis: int
    size: int


def sparse_layers(model: onnx.ModelProto) -> list[SparseLayer]:
    """Return the layers of a model that can be 2:4 sparse, in the order of the graph.

    These are convolutions without groups and products with a constant matrix. The reduction is a multiple of 16, and the weight
    has no other reader.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    readers = Counter(name for node in model.graph.node for name in {*node.input, *captured(node)})
    layers = []
    for node in model.graph.node:
        tensor = constants.get(node.input[1]) if len(node.input) > 1 else None
        if tensor is None or readers[tensor.name] > 1 or tensor.data_type not in _FLOATS:
            continue
        axis = _reduced_axis(node, len(tensor.dims))
        if axis is None or not tensor.dims[axis] or tensor.dims[axis] % MIN_REDUCTION:
            continue
        layers.append(
            SparseLayer(node.name or node.output[0], node.op_type, tensor.name, axis, int(np.prod(tensor.dims)))
        )
    return layers


def _reduced_axis(node: onnx.NodeProto, rank: int) -> int | None:
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Conv" and rank > 2 and attributes.get("group", 1) == 1:
        return 1
    if node.op_type == "Gemm" and rank == 2:
        return 1 if attributes.get("transB", 0) else 0
    return 0 if node.op_type == "MatMul" and rank == 2 else None


def sparse_weights(weights: Array, axis: int) -> Array:
    """Return weights with the two smallest magnitudes of each four along an axis set to zero.

    Args:
        weights: floating-point weights; the size of the axis is a multiple of 4.
        axis: reduced dimension. Of equal magnitudes the first ones are kept.
    """
    moved = np.moveaxis(weights, axis, -1)
    blocks = np.abs(moved.astype(np.float64)).reshape(*moved.shape[:-1], -1, BLOCK)
    order = np.argsort(-blocks, axis=-1, kind="stable")
    mask = np.zeros(blocks.shape, bool)
    np.put_along_axis(mask, order[..., :KEPT], True, axis=-1)
    pruned = np.where(mask.reshape(moved.shape), moved, np.zeros((), weights.dtype))
    return np.ascontiguousarray(np.moveaxis(pruned, -1, axis))


def is_sparse(weights: Array, axis: int) -> bool:
    """Return whether each four consecutive weights along an axis have at most two that are not zero."""
    moved = np.moveaxis(weights, axis, -1)
    if moved.shape[-1] % BLOCK:
        return False
    return bool(((moved.reshape(*moved.shape[:-1], -1, BLOCK) != 0).sum(-1) <= KEPT).all())


def make_sparse(model: onnx.ModelProto, weights: Collection[str]) -> onnx.ModelProto:
    """Return a copy of a model with 2:4 sparse weights.

    Args:
        model: not changed.
        weights: names of initializers, of `sparse_layers`.
    """
    axes = {layer.weight: layer.axis for layer in sparse_layers(model) if layer.weight in weights}
    result = copy_model(model)
    for tensor in result.graph.initializer:
        if tensor.name in axes:
            pruned = sparse_weights(numpy_helper.to_array(tensor), axes[tensor.name])
            tensor.CopyFrom(numpy_helper.from_array(pruned, tensor.name))
    return result


def sparse_nodes(model: onnx.ModelProto) -> list[str]:
    """Return the names of the nodes whose weights are 2:4 sparse; weights that are all zero do not count."""
    values = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = []
    for layer in sparse_layers(model):
        weights = numpy_helper.to_array(values[layer.weight])
        if weights.any() and is_sparse(weights, layer.axis):
            nodes.append(layer.node)
    return nodes


# Builds a model with 2:4 sparse weights a second time with TensorRT's sparse kernels, and keeps the faster engine.

# Speed-up that sparse kernels need: timings of the same engine differ by up to a percent.
WORTH = 1.01
_ROUNDS = 4
_ROUND_S = 0.15


@dataclass(frozen=True, slots=True)
class SparseChoice:
    """Measured engines without and with sparse kernels.

    Attributes:
        rows: rows of the batch.
        dense_us: median time of the engine without sparse kernels, in microseconds.
        sparse_us: median time of the engine with them.
        is_faster: the engine with sparse kernels is kept.
    """

    rows: int
    dense_us: float
    sparse_us: float
    is_faster: bool

    def __str__(self) -> str:
        result = "kept" if self.is_faster else "not kept"
        times = f"{self.dense_us:.1f} us without, {self.sparse_us:.1f} us with"
        return f"sparse kernels {result}: {times} ({self.dense_us / self.sparse_us:.2f}x at {self.rows} rows)"

    def to_json(self, nodes: Sequence[str]) -> dict[str, Any]:
        """Return a JSON object.

        Args:
            nodes: names of the nodes with sparse weights.
        """
        return {"rows": self.rows, "dense_us": self.dense_us, "sparse_us": self.sparse_us, "nodes": list(nodes)}


def choose_sparse(
    target: Target,
    model: onnx.ModelProto,
    order: TargetSpec,
    artefact: Path,
    batch: Mapping[str, Array],
    report: Report,
) -> SparseChoice:
    """Replace an artefact by one with sparse kernels if that is at least 1 % faster.

    Args:
        target: target of the artefact.
        model: the lowered model, whose weights are 2:4 sparse.
        order: parameters of the build, with `sparse_weights`.
        artefact: file of the engine without sparse kernels; replaced if the other one is faster.
        batch: one batch by input name.
        report: progress callback.

    Raises:
        BuildError: the engine cannot be built or run.
    """
    candidate = artefact.with_name(f"sparse{artefact.suffix}")
    target.build(model, order, candidate, part(report, 0.0, 0.8))
    report(0.8, "timing sparse kernels")
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, path in (("dense", artefact), ("sparse", candidate)):
            engines[name] = target.open(path, host_code=order.version_compatible)
            stack.callback(engines[name].close)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(_ROUNDS):
            # Each engine is first in half of the rounds.
            for name in sorted(engines, reverse=bool(number % 2)):
                times[name].append(engines[name].time(batch, _ROUND_S).median_us)
    dense_us, sparse_us = median(times["dense"]), median(times["sparse"])
    is_faster = dense_us >= WORTH * sparse_us
    if is_faster:
        candidate.replace(artefact)
    else:
        candidate.unlink()
    rows = next(iter(batch.values())).shape[0]
    return SparseChoice(int(rows), dense_us, sparse_us, is_faster)
