"""Convolution layers to measure: the distinct ones of a model, of ResNet-50, of a command line, or a sweep of kernel sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from headrace_engines.errors import BuildError, CallError
from onnx import shape_inference

from headrace_lab.kernels.base import ConvShape, Epilogue

PLAIN = Epilogue()
"""A convolution alone."""
EPILOGUE = Epilogue(bias=True, relu=True)
"""Operations after a convolution of a command line."""


@dataclass(frozen=True, slots=True)
class ConvLayer:
    """One distinct convolution of a model.

    Attributes:
        name: name in tables, e.g. "3x3 64->64 56x56".
        shape: the convolution at n = 1.
        epilogue: operations that follow it in the model and that a kernel may fuse.
        nodes: names of the model's nodes of this shape.
    """

    name: str
    shape: ConvShape
    epilogue: Epilogue
    nodes: tuple[str, ...] = ()

    def at(self, n: int) -> ConvShape:
        """Return the shape at a batch size."""
        return replace(self.shape, n=n)


def layer_name(shape: ConvShape) -> str:
    """Return the name of a layer, without its batch: "3x3 64->128 56x56 /2"."""
    stride = f" /{shape.stride}" if shape.stride > 1 else ""
    groups = f" groups {shape.groups}" if shape.groups > 1 else ""
    return f"{shape.r}x{shape.s} {shape.c}->{shape.k} {shape.h}x{shape.w}{stride}{groups}"


def resnet50_layers() -> list[ConvLayer]:
    """Return the 22 distinct 3x3 and 1x1 convolutions of ResNet-50 (v1.5: the stride is in the 3x3 convolution).

    He et al., "Deep Residual Learning for Image Recognition", 2015, table 1; v1.5 is the variant of torchvision.
    """
    found: dict[ConvShape, Epilogue] = {}

    def add(c: int, size: int, k: int, kernel: int, stride: int, epilogue: Epilogue) -> None:
        shape = ConvShape(1, c, size, size, k, kernel, kernel, stride, kernel // 2)
        found[shape] = _joined(found.get(shape, Epilogue()), epilogue)

    relu = Epilogue(bias=True, relu=True)
    channels, size = 64, 56
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            add(channels, size, width, 1, 1, relu)
            add(width, size, width, 3, stride, relu)
            add(width, size // stride, 4 * width, 1, 1, Epilogue(bias=True, residual=True, relu=True))
            if not block:
                add(channels, size, 4 * width, 1, stride, Epilogue(bias=True))
            channels, size = 4 * width, size // stride
    return [ConvLayer(layer_name(shape), shape, epilogue) for shape, epilogue in found.items()]


def _joined(one: Epilogue, other: Epilogue) -> Epilogue:
    return Epilogue(one.bias or other.bias, one.residual or other.residual, one.relu or other.relu)


def shape_layer(text: str, epilogue: Epilogue = EPILOGUE) -> ConvLayer:
    """Parse `n,c,h,w,k,r,s,stride,pad`, with groups as an optional tenth number; the batch size is dropped.

    Raises:
        CallError: it is no shape of a convolution.
    """
    try:
        numbers = [int(word) for word in text.split(",")]
        if len(numbers) not in (9, 10):
            raise ValueError(f"it has {len(numbers)} numbers")
        shape = ConvShape(*numbers)
    except ValueError as error:
        raise CallError(
            f"--shape {text}: {error}: write n,c,h,w,k,r,s,stride,pad, e.g. 8,64,56,56,64,3,3,1,1, "
            "with the groups as an optional tenth number"
        ) from error
    return ConvLayer(layer_name(shape), replace(shape, n=1), epilogue)


def kernel_size_layers(base: ConvShape, sizes: Sequence[int], epilogue: Epilogue = EPILOGUE) -> list[ConvLayer]:
    """Return the base shape with square kernels of other sizes and the padding that keeps the picture's size.

    Raises:
        CallError: a size is even or below 1.
    """
    for size in sizes:
        if size < 1 or size % 2 == 0:
            raise CallError(f"--kernel-sizes has {size}: write odd numbers from 1 on")
    shapes = [replace(base, n=1, r=size, s=size, pad=size // 2) for size in sizes]
    return [ConvLayer(layer_name(shape), shape, epilogue) for shape in shapes]


def model_layers(model: onnx.ModelProto) -> tuple[list[ConvLayer], list[str]]:
    """Return the distinct convolutions of an ONNX model at n = 1 with the operations that follow them.

    A bias is the third input of a Conv; a residual an Add with a tensor of the same shape; ReLU the node after either. A
    BatchNormalization after a Conv counts as a bias: engines fold it into weights and bias. An Add of two convolutions is fused
    into the first of them.

    Returns:
        The layers in the order of the model, and a line for each Conv node that cannot be measured, with the reason.

    Raises:
        BuildError: the model has no Conv node that can be measured.
    """
    try:
        graph = shape_inference.infer_shapes(model, data_prop=True).graph
    except shape_inference.InferenceError as error:
        raise BuildError(f"the shapes of the model cannot be inferred ({error}): export it anew") from error
    shapes = _tensor_shapes(graph)
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found: dict[ConvShape, tuple[Epilogue, list[str]]] = {}
    skipped = []
    claimed: set[str] = set()
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        label = node.name or node.output[0]
        try:
            shape = _shape(node, shapes)
        except ValueError as error:
            skipped.append(f"{label}: {error}")
            continue
        epilogue, names = found.setdefault(shape, (Epilogue(), []))
        found[shape] = _joined(epilogue, _epilogue(node, readers, shapes, claimed)), [*names, label]
    if not found:
        reasons = "; ".join(skipped) or "it has no Conv node"
        raise BuildError(f"the model has no convolution to measure ({reasons}): name another model, or use --shape")
    layers = [ConvLayer(layer_name(shape), shape, mine, tuple(names)) for shape, (mine, names) in found.items()]
    return layers, skipped


def _tensor_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors; free dimensions are -1."""
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            sizes = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in value.type.tensor_type.shape.dim]
            shapes.setdefault(value.name, tuple(sizes))
    for node in graph.node:
        if node.op_type == "Constant":
            constant = next((a.t for a in node.attribute if a.name == "value"), None)
            if constant is not None:
                shapes[node.output[0]] = tuple(constant.dims)
    return shapes


def _shape(node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> ConvShape:
    """Raises ValueError with the reason why a Conv node is not supported."""
    x, weights = shapes.get(node.input[0]), shapes.get(node.input[1])
    if x is None or weights is None or min(x[1:], default=-1) < 1 or min(weights, default=-1) < 1:
        raise ValueError(f"the shape of its input {node.input[0]} is not known")
    if len(weights) != 4:
        raise ValueError(f"it has {len(weights) - 2} dimensions of space, the lab measures convolutions of pictures")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    groups = int(attributes.get("group", 1))
    strides = [int(stride) for stride in attributes.get("strides", (1, 1))]
    if set(map(int, attributes.get("dilations", (1, 1)))) != {1}:
        raise ValueError("its dilation is not 1")
    pads = [int(pad) for pad in attributes.get("pads", (0, 0, 0, 0))]
    kind = attributes.get("auto_pad", b"NOTSET").decode()
    if kind not in ("NOTSET", "VALID"):
        sums = [
            max((int(np.ceil(size / stride)) - 1) * stride + kernel - size, 0)
            for size, stride, kernel in zip(x[2:], strides, weights[2:], strict=True)
        ]
        pads = [*(half // 2 for half in sums), *(half - half // 2 for half in sums)]
    if len(set(pads)) != 1 or len(set(strides)) != 1:
        raise ValueError(f"its padding {pads} or its strides {strides} differ between the sides")
    return ConvShape(1, x[1], x[2], x[3], weights[0], weights[2], weights[3], strides[0], pads[0], groups)


def _epilogue(
    conv: onnx.NodeProto,
    readers: Mapping[str, list[onnx.NodeProto]],
    shapes: Mapping[str, tuple[int, ...]],
    claimed: set[str],
) -> Epilogue:
    """Operations after a Conv that a kernel may fuse; outputs of the fused Add nodes are added to `claimed`."""
    bias, residual, relu = len(conv.input) > 2, False, False
    output = conv.output[0]
    for node in _followers(output, readers):
        operand = [name for name in node.input if name != output]
        if node.op_type == "BatchNormalization":
            bias = True
        elif node.op_type == "Add" and not residual and node.output[0] not in claimed and operand:
            if shapes.get(operand[0]) != shapes.get(output):
                break
            residual = True
            claimed.add(node.output[0])
        elif node.op_type == "Relu":
            relu = True
            break
        else:
            break
        output = node.output[0]
    return Epilogue(bias, residual, relu)


def _followers(output: str, readers: Mapping[str, list[onnx.NodeProto]]) -> Iterator[onnx.NodeProto]:
    """Nodes after a tensor as long as each is the only reader of the one before."""
    while len(nodes := readers.get(output, [])) == 1:
        yield nodes[0]
        output = nodes[0].output[0]
