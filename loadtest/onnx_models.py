"""ONNX models built node by node; one computes for a requested time.

    python -m loadtest.onnx_models encoder.onnx [--layers 4 --width 384 --heads 6]

writes a text encoder with random weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from loadtest.protocol import Array

Dim = int | str | None
_OPSET = 21
_IR_VERSION = 10


def onnx_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[Dim]]],
    outputs: Mapping[str, tuple[int, Sequence[Dim]]],
    constants: Mapping[str, Array] | None = None,
) -> onnx.ModelProto:
    """A model of one graph, checked.

    Args:
        nodes: in the order of computing.
        inputs: datatype (of `TensorProto`) and shape by name.
        outputs: likewise.
        constants: weights by name.
    """
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    return model


def mlp(output: str = "output") -> onnx.ModelProto:
    """input (rows, 784) -> output (rows, 10) FP32: 784-1024-1024-10 with ReLU and seeded weights.

    About 100 us alone on one core, 40 us a row in a batch of 64.
    """
    random, sizes = np.random.default_rng(0), (784, 1024, 1024, 10)
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Array] = {}
    state = "input"
    for layer, (rows, columns) in enumerate(pairwise(sizes)):
        weights[f"w{layer}"] = random.standard_normal((rows, columns), np.float32) * np.float32((2 / rows) ** 0.5)
        is_last = layer == len(sizes) - 2
        nodes.append(helper.make_node("MatMul", [state, f"w{layer}"], [output if is_last else f"sums{layer}"]))
        if not is_last:
            nodes.append(helper.make_node("Relu", [f"sums{layer}"], [state := f"state{layer}"]))
    kind = TensorProto.FLOAT
    return onnx_model(nodes, {"input": (kind, ("rows", sizes[0]))}, {output: (kind, ("rows", sizes[-1]))}, weights)


def busy(width: int = 128) -> onnx.ModelProto:
    """STEPS (1,) INT64 -> Y (1,) FP32, the same number: computes for as many steps as requested, some 30 us each on one core.

    No batch dimension. Each step multiplies a matrix, the identity matrix, by the identity matrix.
    """
    fp32 = TensorProto.FLOAT
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["keep_on"], ["keep_on_out"]),
            helper.make_node("MatMul", ["carried", "eye"], ["carried_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("step", TensorProto.INT64, ()),
            helper.make_tensor_value_info("keep_on", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("carried", fp32, (width, width)),
        ],
        [
            helper.make_tensor_value_info("keep_on_out", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("carried_out", fp32, (width, width)),
        ],
    )
    constants: dict[str, Array] = {
        "eye": np.eye(width, dtype=np.float32),
        "true": np.array(True),
        "scalar": np.array([], np.int64),
        "axes": np.array([0, 1], np.int64),
        "flat": np.array([1], np.int64),
    }
    nodes = [
        helper.make_node("Reshape", ["STEPS", "scalar"], ["trips"]),
        helper.make_node("Loop", ["trips", "true", "eye"], ["last"], body=body),
        helper.make_node("ReduceMax", ["last", "axes"], ["highest"], keepdims=0),
        helper.make_node("Reshape", ["highest", "flat"], ["one"]),
        helper.make_node("Cast", ["STEPS"], ["steps"], to=fp32),
        helper.make_node("Mul", ["one", "steps"], ["Y"]),
    ]
    return onnx_model(nodes, {"STEPS": (TensorProto.INT64, (1,))}, {"Y": (fp32, (1,))}, constants)


def transformer(
    layers: int = 4, width: int = 128, heads: int = 4, words: int = 1000, has_hidden: bool = True
) -> onnx.ModelProto:
    """ids and mask (rows, length) INT64 -> hidden (rows, length, width) and pooled (rows, width) FP32: a text encoder.

    Attention, layer normalisation and two layers with ReLU, as in BERT; random weights from a fixed seed.

    Args:
        layers: of attention.
        width: of the hidden state; the inner layers are four times as wide.
        heads: of attention.
        words: ids are below this.
        has_hidden: False leaves `hidden` out, as encoders of embeddings do.
    """
    random = np.random.default_rng(0)
    node = helper.make_node
    constants: dict[str, Array] = {
        "words": random.standard_normal((words, width), np.float32),
        "split": np.array([0, 0, heads, width // heads], np.int64),
        "join": np.array([0, 0, width], np.int64),
        "mask_axes": np.array([1, 2], np.int64),
        "last": np.array([2], np.int64),
        "length_axis": np.array([1], np.int64),
        "one": np.array(1, np.float32),
        "hidden_score": np.array(-1e9, np.float32),
        "scale": np.array((width // heads) ** -0.5, np.float32),
        "ones": np.ones(width, np.float32),
        "zeros": np.zeros(width, np.float32),  # a bias: TensorRT's parser expects one
    }
    nodes = [
        node("Gather", ["words", "ids"], ["state0"]),
        node("Cast", ["mask"], ["seen"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["seen", "mask_axes"], ["seen_keys"]),
        node("Sub", ["one", "seen_keys"], ["unseen"]),
        node("Mul", ["unseen", "hidden_score"], ["bias"]),
    ]

    for layer in range(layers):
        nodes += encoder_layer(layer, width, constants, random)
    nodes += [
        node("Identity", [f"state{layers}"], ["hidden"]),
        node("Unsqueeze", ["seen", "last"], ["seen_states"]),
        node("Mul", ["hidden", "seen_states"], ["counted"]),
        node("ReduceSum", ["counted", "length_axis"], ["sums"], keepdims=0),
        node("ReduceSum", ["seen", "length_axis"], ["count"], keepdims=1),
        node("Div", ["sums", "count"], ["pooled"]),
    ]
    text = (TensorProto.INT64, ("rows", "length"))
    outputs: dict[str, tuple[int, Sequence[Dim]]] = {
        "hidden": (TensorProto.FLOAT, ("rows", "length", width)),
        "pooled": (TensorProto.FLOAT, ("rows", width)),
    }
    if not has_hidden:
        del outputs["hidden"]
    return onnx_model(nodes, {"ids": text, "mask": text}, outputs, constants)


def convolution(channels: Sequence[int] = (64, 64), side: int = 48, classes: int = 10) -> onnx.ModelProto:
    """pixels (rows, 3, side, side) FP32 -> scores (rows, classes) FP32: 3 x 3 convolutions at full resolution, random weights.

    On a CPU small batches of it are the most efficient ones: the activations of more rows do not fit into the caches.

    Args:
        channels: of each convolution.
        side: of the picture in pixels; 48 makes a row of 27 KiB.
        classes: of the scores.
    """
    random = np.random.default_rng(0)
    node, before, state = helper.make_node, 3, "pixels"
    constants: dict[str, Array] = {"classes": random.standard_normal((channels[-1], classes), np.float32)}
    nodes: list[onnx.NodeProto] = []
    for layer, count in enumerate(channels):
        scale = np.float32((2 / (before * 9)) ** 0.5)
        constants[f"filters{layer}"] = random.standard_normal((count, before, 3, 3), np.float32) * scale
        nodes += [
            node("Conv", [state, f"filters{layer}"], [f"sums{layer}"], pads=[1, 1, 1, 1]),
            node("Relu", [f"sums{layer}"], [f"state{layer}"]),
        ]
        before, state = count, f"state{layer}"
    nodes += [
        node("GlobalAveragePool", [state], ["means"]),
        node("Flatten", ["means"], ["flat"]),
        node("MatMul", ["flat", "classes"], ["scores"]),
    ]
    pixels = {"pixels": (TensorProto.FLOAT, ("rows", 3, side, side))}
    return onnx_model(nodes, pixels, {"scores": (TensorProto.FLOAT, ("rows", classes))}, constants)


def encoder_layer(
    layer: int, width: int, constants: dict[str, Array], random: np.random.Generator
) -> list[onnx.NodeProto]:
    """Return the nodes of one layer, state N -> state N + 1; adds its weights to `constants`."""
    node = helper.make_node
    nodes: list[onnx.NodeProto] = []

    def weight(name: str, rows: int, columns: int) -> str:
        constants[name] = random.standard_normal((rows, columns), np.float32) / np.float32(rows**0.5)
        return name

    state, p = f"state{layer}", f"l{layer}_"
    for part in "qkv":
        nodes += [
            node("MatMul", [state, weight(p + part, width, width)], [p + part + "_flat"]),
            node("Reshape", [p + part + "_flat", "split"], [p + part + "_heads"]),
            node(
                "Transpose",
                [p + part + "_heads"],
                [p + part + "_t"],
                perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3],
            ),
        ]
    nodes += [
        node("MatMul", [p + "q_t", p + "k_t"], [p + "raw"]),
        node("Mul", [p + "raw", "scale"], [p + "scaled"]),
        node("Add", [p + "scaled", "bias"], [p + "masked"]),
        node("Softmax", [p + "masked"], [p + "attention"], axis=-1),
        node("MatMul", [p + "attention", p + "v_t"], [p + "mixed"]),
        node("Transpose", [p + "mixed"], [p + "mixed_t"], perm=[0, 2, 1, 3]),
        node("Reshape", [p + "mixed_t", "join"], [p + "joined"]),
        node("MatMul", [p + "joined", weight(p + "o", width, width)], [p + "projected"]),
        node("Add", [state, p + "projected"], [p + "sum"]),
        node("LayerNormalization", [p + "sum", "ones", "zeros"], [p + "normed"], axis=-1),
        node("MatMul", [p + "normed", weight(p + "up", width, 4 * width)], [p + "wide"]),
        node("Relu", [p + "wide"], [p + "active"]),
        node("MatMul", [p + "active", weight(p + "down", 4 * width, width)], [p + "narrow"]),
        node("Add", [p + "normed", p + "narrow"], [p + "sum2"]),
        node("LayerNormalization", [p + "sum2", "ones", "zeros"], [f"state{layer + 1}"], axis=-1),
    ]
    return nodes


def main(words: Sequence[str] | None = None) -> int:
    """Write an encoder; return 0."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.onnx_models", description="Write a text encoder.")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    options = parser.parse_args(words)
    onnx.save(transformer(options.layers, options.width, options.heads), options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
