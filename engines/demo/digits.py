"""Hand-written digits: trained when the model is built, on scikit-learn's bundled pictures, and measured on held-out ones.

The data are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998, UCI repository,
CC BY 4.0): 1797 pictures of 8x8 pixels, ink from 0 to 16.
"""

from __future__ import annotations

import io
import json

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from engines.demo.artefact import Artefact
from engines.demo.digits_network import CLASSES, DigitsNetwork, Floats, Integers
from engines.demo.graph import GraphBuilder, fp32
from engines.errors import BuildError
from engines.progress import Report

SEED = 64
EPOCHS = 25
BATCH_SIZE = 32
HELD_OUT_SHARE = 0.25
INK = 16.0


def build(report: Report) -> Artefact:
    """Input "image" FP32 [N, 1, 8, 8] with ink from 0 to 16, output "probabilities" FP32 [N, 10].

    Raises:
        BuildError: if scikit-learn, which has the pictures, is not installed.
    """
    report(0.0, "loading the pictures")
    images, labels = _load()
    # scikit-learn brings it. Products this small gain nothing from threads, and lose a lot where cores are busy.
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    random = np.random.default_rng(SEED)
    train, held_out = split_stratified(labels, HELD_OUT_SHARE, random)
    with threadpool_limits(1):
        network = _train(images[train], labels[train], random, report)
    model = _export(network)
    correct = int((_answers(model, images[held_out]) == labels[held_out]).sum())
    accuracy = correct / len(held_out)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    helper.set_model_props(model, {**properties, "accuracy": f"{accuracy:.4f}", "held_out_samples": str(len(held_out))})
    measured = {
        "metric": "top-1",
        "accuracy": accuracy,
        "correct": correct,
        "samples": len(held_out),
        "split": f"held out before training, stratified, seed {SEED}",
        "measured_with": f"ONNX Runtime {ort.__version__} on the exported model",
    }
    stored = io.BytesIO()
    np.savez_compressed(stored, images=images[held_out], labels=labels[held_out])
    extra_files = {"accuracy.json": (json.dumps(measured, indent=2) + "\n").encode(), "held_out.npz": stored.getvalue()}
    return Artefact(model, "trained", accuracy, extra_files)


def split_stratified(labels: Integers, share: float, random: np.random.Generator) -> tuple[Integers, Integers]:
    """Indices to train on and indices to hold out, with `share` of every class held out."""
    train: list[Integers] = []
    held_out: list[Integers] = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        cut = round(share * len(members))
        held_out.append(members[:cut])
        train.append(members[cut:])
    return np.concatenate(train), np.concatenate(held_out)


def _load() -> tuple[Floats, Integers]:
    """The pictures FP32 [1797, 1, 8, 8] and their labels INT64 [1797]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BuildError(
            "the package scikit-learn, which has the digits, is not installed: install Headrace with its extra, headrace[demo]"
        ) from None
    data = load_digits()
    return data.images.astype(np.float32)[:, None], data.target.astype(np.int64)


def _train(images: Floats, labels: Integers, random: np.random.Generator, report: Report) -> DigitsNetwork:
    pictures = images.transpose(0, 2, 3, 1) / np.float32(INK)
    network = DigitsNetwork(random)
    loss = float("nan")
    for epoch in range(EPOCHS):
        report(0.05 + 0.9 * epoch / EPOCHS, f"epoch {epoch + 1} of {EPOCHS}" + (f", loss {loss:.4f}" if epoch else ""))
        # A tenth of the rate for the last epochs lets the weights settle.
        network.learning_rate = 2e-3 if epoch < 0.7 * EPOCHS else 2e-4
        order = random.permutation(len(pictures))
        batches = [order[start : start + BATCH_SIZE] for start in range(0, len(order), BATCH_SIZE)]
        loss = float(np.mean([network.train_step(pictures[batch], labels[batch]) for batch in batches]))
    return network


def _export(network: DigitsNetwork) -> onnx.ModelProto:
    graph = GraphBuilder("digits")
    weight, bias = network.onnx_conv("conv1")
    # Training saw ink from 0 to 1, callers send 0 to 16: the first convolution takes the factor.
    x = graph.node("Relu", graph.conv("image", "conv1", weight / np.float32(INK), bias))
    x = graph.node("Relu", graph.conv(x, "conv2", *network.onnx_conv("conv2")))
    x = graph.node("Flatten", graph.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]))
    x = graph.node("Relu", graph.dense(x, "dense1", *network.onnx_dense("dense1")))
    graph.node("Softmax", graph.dense(x, "dense2", *network.onnx_dense("dense2")), output="probabilities", axis=-1)
    return graph.model(
        {"image": fp32(1, 8, 8)},
        {"probabilities": fp32(CLASSES)},
        "Hand-written digits: 8x8 pictures with ink from 0 to 16 in, the probabilities of 0 to 9 out.",
        {
            "origin": f"trained at build time on scikit-learn's digits, seed {SEED}",
            "licence": "Apache-2.0; the pictures are CC BY 4.0 (Alpaydin and Kaynak, UCI repository)",
        },
    )


def _answers(model: onnx.ModelProto, images: Floats) -> Integers:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["probabilities"], {"image": images})[0].argmax(axis=1), np.int64)
