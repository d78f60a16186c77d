"""Seeded random weights for a graph, scaled layer by layer so that activations neither vanish nor saturate.

Two graphs that treat a batch differently can give equal values by chance: weights may be constant (the zoo models of the
ONNX package have 0.02 everywhere) or saturate a softmax. With random weights every row gives other values. Each layer's
outputs are brought to mean 0 and deviation 1 per channel by one pass over a batch, after "All you need is a good init"
(Mishkin, Matas 2015).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from headrace_engines.errors import BuildError
from headrace_engines.onnx_graph import Array, OnnxRunner, captured, copy_model, replace_items

# Operators that hand a weight on in another shape or type.
_CARRIERS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_LINEAR = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_CHANNEL_AXES = {"Conv": 1, "ConvTranspose": 1, "BatchNormalization": 1}
# Larger values in these stand for "never": masks of attention, limits. A variance of a BatchNormalization may be as large.
_LARGEST = 1e4
_MASKING = frozenset({"Add", "Concat", "Div", "Gather", "Mul", "Sub", "Sum"})

# Operator, index of its input -> distribution of a weight.
_ROLES: dict[tuple[str, int], str] = {
    **{(op, 1): "scale" for op in ("GroupNormalization", "InstanceNormalization", "LayerNormalization")},
    **{(op, 2): "shift" for op in ("GroupNormalization", "InstanceNormalization", "LayerNormalization")},
    **{(op, index): "recurrent" for op in ("GRU", "LSTM", "RNN") for index in (1, 2, 3)},
    **{(op, 2): "shift" for op in ("Conv", "ConvTranspose", "Gemm")},
    **{("Gemm", index): "matrix" for index in (0, 1)},
    **{("MatMul", index): "matrix" for index in (0, 1)},
    **{(op, index): "shift" for op in ("Add", "Sub", "Sum") for index in range(4)},
    **{("Mul", index): "scale" for index in (0, 1)},
    **{("Concat", index): "table" for index in range(8)},
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 2): "shift",
    ("BatchNormalization", 3): "shift",
    ("BatchNormalization", 4): "scale",
    ("Conv", 1): "kernel",
    ("ConvTranspose", 1): "kernel",
    ("Div", 1): "scale",
    ("Gather", 0): "table",
    ("PRelu", 1): "slope",
    ("RMSNormalization", 1): "scale",
}


def weights_of(model: onnx.ModelProto) -> dict[str, Array]:
    """Return the float constants of a graph by name: initializers, Constant nodes, and what ConstantOfShape makes."""
    weights = {
        tensor.name: np.array(numpy_helper.to_array(tensor))
        for tensor in model.graph.initializer
        if not tensor.external_data or tensor.raw_data
    }
    for node in model.graph.node:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if node.op_type == "Constant" and "value" in attributes:
            weights[node.output[0]] = np.array(numpy_helper.to_array(attributes["value"]))
        elif node.op_type == "ConstantOfShape" and node.input[0] in weights:
            filling = numpy_helper.to_array(attributes["value"]) if "value" in attributes else np.zeros(1, np.float32)
            shape = tuple(int(size) for size in weights[node.input[0]].reshape(-1))
            if math.prod(shape) <= 1 << 31:
                weights[node.output[0]] = np.full(shape, filling.reshape(-1)[0], filling.dtype)
    return {name: values for name, values in weights.items() if values.dtype in (np.float16, np.float32, np.float64)}


def random_weights(model: onnx.ModelProto, inputs: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Draw random values for the weights of a graph.

    Scalars, values above 10,000 outside layers (masks), exponents, bounds, scales of resizing and of quantisation are
    settings, not weights: they stay.

    Args:
        model: the graph with a free batch dimension.
        inputs: a batch of rows, by which the layers are scaled.
        seed: the same seed gives the same weights.

    Returns:
        New values by the name of the tensor, in the same shapes and types.
    """
    random = np.random.default_rng(seed)
    drawn = {}
    for name, values in weights_of(model).items():
        use = _use(model, name)
        if use is None or values.size < 2:
            continue
        large = not np.abs(np.where(np.isfinite(values), values, np.inf)).max() < _LARGEST
        if not (large and use[1].op_type in _MASKING):
            drawn[name] = _draw(random, values.shape, *use).astype(values.dtype)
    _scale_layers(model, inputs, drawn)
    return drawn


def with_weights(model: onnx.ModelProto, weights: Mapping[str, Array]) -> onnx.ModelProto:
    """Return a model with other values for constants; names that it does not have are left out."""
    changed = copy_model(model)
    graph = changed.graph
    present = {tensor.name for tensor in graph.initializer}
    makers = [node for node in graph.node if node.op_type in ("Constant", "ConstantOfShape")]
    made = {node.output[0] for node in makers} & weights.keys()
    present |= made
    replace_items(graph.node, [node for node in graph.node if not made.intersection(node.output)])
    read = {name for node in graph.node for name in (*node.input, *captured(node))} | {v.name for v in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name not in weights and tensor.name in read]
    replace_items(graph.initializer, kept)
    graph.initializer.extend(numpy_helper.from_array(weights[name], name) for name in weights if name in present)
    # Formats before 4 list every initializer as an input; those made by nodes are not listed.
    constants = {tensor.name for tensor in model.graph.initializer} | present
    replace_items(graph.input, [value for value in graph.input if value.name not in constants])
    changed.ir_version = max(changed.ir_version, 4)
    return changed


def _use(model: onnx.ModelProto, name: str) -> tuple[str, onnx.NodeProto] | None:
    """Return the distribution of a weight, and the node that uses it; None if its values are settings."""
    names = {name}
    for node in model.graph.node:
        for index, tensor in enumerate(node.input):
            if tensor not in names:
                continue
            if node.op_type in _CARRIERS and index == 0:
                names.update(node.output)
            elif (role := _ROLES.get((node.op_type, index))) is not None:
                return role, node
    return None


def _draw(random: np.random.Generator, shape: tuple[int, ...], role: str, node: onnx.NodeProto) -> Array:
    if role == "scale":
        return random.uniform(0.5, 1.5, shape)
    if role == "slope":
        return random.uniform(0.1, 0.4, shape)
    if role == "shift":
        return random.normal(0.0, 0.1, shape)
    if role == "table":
        return random.normal(0.0, 1.0, shape)
    if role == "recurrent":
        width = shape[-1] if len(shape) > 2 else 16
        return random.uniform(-1.0, 1.0, shape) / math.sqrt(width)
    if role == "kernel":
        fan_in = math.prod(shape[1:]) if node.op_type == "Conv" else shape[0] * math.prod(shape[2:])
    else:
        fan_in = shape[-2] if len(shape) > 1 else shape[0]
    return random.normal(0.0, math.sqrt(2.0 / max(fan_in, 1)), shape)


def _scale_layers(model: onnx.ModelProto, inputs: Mapping[str, Array], weights: dict[str, Array]) -> None:
    """Bring the outputs of each layer to mean 0 (with a bias) and deviation 1, in the order of the graph."""
    values: dict[str, Array] = {
        tensor.name: np.array(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer
    }
    values.update(inputs)
    values.update(weights)
    last = {name: index for index, node in enumerate(model.graph.node) for name in node.input}
    for index, node in enumerate(model.graph.node):
        if any(name in weights for name in node.output):
            continue
        try:
            outputs = _run(model, node, values)
        except (BuildError, KeyError):  # e.g. a subgraph: the layers after it keep their first weights
            return
        if node.op_type in _LINEAR or node.op_type == "BatchNormalization":
            outputs[node.output[0]] = _rescaled(node, outputs[node.output[0]], values, weights)
        values.update(outputs)
        for name in node.input:
            if last.get(name) == index and name not in weights:
                values.pop(name, None)


def _run(model: onnx.ModelProto, node: onnx.NodeProto, values: Mapping[str, Array]) -> dict[str, Array]:
    single = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    single.graph.name = "node"
    single.graph.node.append(node)
    inputs = {name: values[name] for name in node.input if name}
    for name, array in inputs.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        single.graph.input.append(helper.make_tensor_value_info(name, kind, list(array.shape)))
    single.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    return OnnxRunner(single, optimize=False).run(inputs)


def _rescaled(node: onnx.NodeProto, output: Array, values: dict[str, Array], weights: dict[str, Array]) -> Array:
    """Scale the weight of a layer, shift its bias, and return its output with them; unchanged if its weight is no constant."""
    bias_index = 2
    weight = next((name for name in node.input[:bias_index] if name in weights), "")
    if not weight or output.dtype.kind != "f" or not np.isfinite(output).all() or output.size < 2:
        return output
    bias = node.input[bias_index] if len(node.input) > bias_index and node.input[bias_index] in weights else ""
    channel = _CHANNEL_AXES.get(node.op_type, output.ndim - 1) % output.ndim
    others = tuple(axis for axis in range(output.ndim) if axis != channel)
    mean = output.mean(axis=others, keepdims=True) if bias and others else np.zeros((), output.dtype)
    scale = float((output - mean).std())
    if not 1e-20 < scale < 1e20:
        return output
    for name in filter(None, (weight, bias)):
        weights[name] = values[name] = (weights[name] / scale).astype(weights[name].dtype)
    if bias and mean.size == weights[bias].size:
        beta = next((attribute.f for attribute in node.attribute if attribute.name == "beta"), 1.0)
        shift = (mean / scale).reshape(weights[bias].shape) / beta
        weights[bias] = values[bias] = (weights[bias] - shift).astype(weights[bias].dtype)
        return np.asarray((output - mean) / scale, output.dtype)
    return np.asarray(output / scale, output.dtype)
