"""ResNet-50 v1.5, with seeded weights or with published ones.

The architecture is that of He et al., "Deep Residual Learning for Image Recognition" (2015), table 1; v1.5 means that the
stride of 2 sits in a block's 3x3 convolution and not in its first. Tensor names are torchvision's, whose state dict of
this architecture can be read as it is. A published ONNX file is accepted only if it has the model's shapes and computes rows
in a batch as it computes them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from onnx import helper

from headrace_engines.demo.catalogue import Artefact
from headrace_engines.demo.graph import BATCH, Floats, GraphBuilder, fold_batch_norm, fp32
from headrace_engines.demo.weights_file import WeightsFile
from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

# An ONNX element type and a shape without the batch dimension.
Tensor = tuple[int, tuple[int, ...]]


def read_published_onnx(
    content: bytes,
    expected_input: Tensor,
    expected_output: Tensor,
    input_name: str,
    output_name: str,
    properties: Mapping[str, str],
) -> onnx.ModelProto:
    """Read an ONNX file, give its one input and output our names, and free its batch dimension.

    Args:
        content: the file's bytes, weights included.
        expected_input: element type and shape of its input.
        expected_output: the same of its output.
        input_name: what the input is called from now on.
        output_name: the same for the output.
        properties: metadata to add.

    Raises:
        BuildError: if the file is no such model, or its batch dimension cannot be freed.
    """
    try:
        model = onnx.load_model_from_string(content)
        onnx.checker.check_model(model)
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise BuildError(f"the weights file is neither a PyTorch checkpoint nor a whole ONNX model: {error}") from error
    constants = {initializer.name for initializer in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    _expect("input", inputs, expected_input)
    _expect("output", list(model.graph.output), expected_output)
    _rename(model.graph, {inputs[0].name: input_name, model.graph.output[0].name: output_name})
    for value in (inputs[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    # Shapes that were inferred for one batch size would contradict the freed dimension.
    del model.graph.value_info[:]
    helper.set_model_props(model, {**{entry.key: entry.value for entry in model.metadata_props}, **properties})
    _check_batches(model, expected_input, input_name)
    return model


def _expect(role: str, values: list[onnx.ValueInfoProto], expected: Tensor) -> None:
    actual = [
        (value.type.tensor_type.elem_type, tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)[1:])
        for value in values
    ]
    if actual != [expected]:
        raise BuildError(
            f"the ONNX file's {role}s are (element type, shape of a row) {actual}, expected only {expected}"
        )


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


def _check_batches(model: onnx.ModelProto, expected_input: Tensor, input_name: str) -> None:
    rows = np.random.default_rng(0).standard_normal((2, *expected_input[1]), np.float32)
    try:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        together = session.run(None, {input_name: rows})[0]
        alone = session.run(None, {input_name: rows[1:]})[0]
    # ONNX Runtime's exceptions have no common base but this one.
    except Exception as error:
        raise BuildError(f"the ONNX file does not run with a free batch dimension: {error}") from error
    if not np.allclose(together[1:], alone, rtol=1e-3, atol=1e-4):
        raise BuildError("the ONNX file answers a row in a batch otherwise than the row alone: it cannot be batched")


SIDE = 224


CLASSES = 1000


SEED = 50


_EPSILON = 1e-5


# Blocks in each of the four stages; the width doubles from 64 on, and a block's output is four times as wide.
_BLOCKS = (3, 4, 6, 3)


_EXPANSION = 4


# An even share of the shortcut's variance and the branch's would double it 16 times. A small one also keeps errors of rounding
# from growing block by block, which they do not in a trained network either: without it INT8 would look hopeless here.
# (Zhang et al., "Fixup Initialization", 2019, begins with branches that add nothing.)
_BRANCH_GAIN = 0.125


# Gives weight and bias of one convolution: its name, its batch norm's name, the weight's shape, the gain it should have.
ConvWeights = Callable[[str, str, tuple[int, ...], float], tuple[Floats, Floats]]


def build_seeded(report: Report) -> Artefact:
    """Input "input" FP32 [N, 3, 224, 224], output "logits" FP32 [N, 1000]; random weights, the same each time."""
    random = np.random.default_rng(SEED)

    def draw(shape: tuple[int, ...], gain: float) -> Floats:
        # He et al., "Delving Deep into Rectifiers" (2015): variance 2 / fan-in keeps activations' scale through ReLUs.
        # Without batch norm the positive mean of what comes in would drown the picture, so each filter sums to zero;
        # that takes away the mean's share of the power, 1 / pi of a rectified normal, which the filter makes up for.
        weight = random.standard_normal(shape, np.float32)
        weight -= weight.mean(axis=tuple(range(1, len(shape))), keepdims=True)
        return weight * np.float32(gain * np.sqrt(2.0 / (1.0 - 1.0 / np.pi) / np.prod(shape[1:])))

    def seeded(_conv: str, _norm: str, shape: tuple[int, ...], gain: float) -> tuple[Floats, Floats]:
        return draw(shape, gain), np.zeros(shape[0], np.float32)

    width = 512 * _EXPANSION
    dense = draw((CLASSES, width), 1.0), np.zeros(CLASSES, np.float32)
    return _build(report, seeded, dense, f"seeded random weights, seed {SEED}", "Apache-2.0", "seeded")


def build_fetched(report: Report, weights: WeightsFile) -> Artefact:
    """Build the model with published weights: a state dict with torchvision's names, or an ONNX file in its place.

    Raises:
        BuildError: if the file cannot be had, has another checksum, or does not hold this architecture.
    """
    content = weights.read(lambda done, note: report(0.6 * done, note))
    origin, source = f"{weights.url}, SHA-256 {weights.sha256}", f"sha256:{weights.sha256}"
    if content[:4] != b"PK\x03\x04" and content[:2] != b"\x80\x02":
        report(0.7, "checking the ONNX file")
        model = read_published_onnx(content, fp32(3, SIDE, SIDE), fp32(CLASSES), "input", "logits", {"origin": origin})
        return Artefact(model, source)

    from headrace_engines.demo.torch_weights import read_state_dict

    tensors = read_state_dict(content)

    def tensor(name: str, shape: tuple[int, ...]) -> Floats:
        if name not in tensors or tensors[name].shape != shape or tensors[name].dtype != np.float32:
            actual = f"{tensors[name].dtype} {tensors[name].shape}" if name in tensors else "nothing"
            raise BuildError(
                f"{weights.url}: {name} is {actual}, expected float32 {shape}: this is no state dict of torchvision's resnet50"
            )
        return tensors[name]

    def folded(conv: str, norm: str, shape: tuple[int, ...], _gain: float) -> tuple[Floats, Floats]:
        parts = ("weight", "bias", "running_mean", "running_var")
        gamma, beta, mean, variance = (tensor(f"{norm}.{part}", shape[:1]) for part in parts)
        return fold_batch_norm(tensor(f"{conv}.weight", shape), gamma, beta, mean, variance, _EPSILON)

    dense = tensor("fc.weight", (CLASSES, 512 * _EXPANSION)), tensor("fc.bias", (CLASSES,))
    licence = "the publisher's"
    return _build(lambda done, note: report(0.6 + 0.4 * done, note), folded, dense, origin, licence, source)


def _build(
    report: Report, weights: ConvWeights, dense: tuple[Floats, Floats], origin: str, licence: str, source: str
) -> Artefact:
    graph = GraphBuilder("resnet50")
    x = graph.conv("input", "conv1", *weights("conv1", "bn1", (64, 3, 7, 7), 1.0), stride=2)
    x = graph.node("Relu", x)
    x = graph.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels, number = 64, 0
    for stage, blocks in enumerate(_BLOCKS):
        for block in range(blocks):
            report(number / sum(_BLOCKS), f"block {number + 1} of {sum(_BLOCKS)}")
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(graph, x, f"layer{stage + 1}.{block}", weights, channels, 64 << stage, stride)
            channels, number = (64 << stage) * _EXPANSION, number + 1
    x = graph.node("Flatten", graph.node("GlobalAveragePool", x))
    graph.dense(x, "fc", *dense, output="logits")
    model = graph.model(
        {"input": fp32(3, SIDE, SIDE)},
        {"logits": fp32(CLASSES)},
        "ResNet-50 v1.5: RGB pixels less ImageNet's mean, divided by its deviation in; the logits of 1000 classes out.",
        {"origin": origin, "licence": licence},
    )
    return Artefact(model, source)


def _block(
    graph: GraphBuilder, x: str, prefix: str, weights: ConvWeights, channels: int, width: int, stride: int
) -> str:
    """A bottleneck: 1x1 to `width`, 3x3 with the stride, 1x1 to four times `width`, added to the shortcut."""

    def conv(y: str, name: str, norm: str, shape: tuple[int, ...], stride: int = 1, gain: float = 1.0) -> str:
        weight, bias = weights(f"{prefix}.{name}", f"{prefix}.{norm}", shape, gain)
        return graph.conv(y, f"{prefix}.{name}", weight, bias, stride=stride)

    wide = width * _EXPANSION
    y = graph.node("Relu", conv(x, "conv1", "bn1", (width, channels, 1, 1)))
    y = graph.node("Relu", conv(y, "conv2", "bn2", (width, width, 3, 3), stride))
    y = conv(y, "conv3", "bn3", (wide, width, 1, 1), gain=_BRANCH_GAIN)
    if channels != wide or stride != 1:
        x = conv(x, "downsample.0", "downsample.1", (wide, channels, 1, 1), stride)
    return graph.node("Relu", graph.node("Add", x, y))
