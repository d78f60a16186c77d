"""Hand-written digits: trained during the build on pictures of scikit-learn, measured on held-out ones.

The data are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, 1998, UCI repository,
CC BY 4.0): 1797 pictures of 8x8 pixels, ink from 0 to 16.

    [N, 8, 8, 1] - conv 3x3, 16 - ReLU - conv 3x3, 32 - ReLU - max pool 2x2 - dense 64 - ReLU - dense 10

Trained in NumPy on cross entropy with Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015). Inside, pictures
are channels-last, and a convolution is a matrix product over its 3x3 patches. Calibration samples are the pictures of the
training, accuracy samples are held out from it.
"""

from __future__ import annotations

import io
import json

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from numpy.lib.stride_tricks import sliding_window_view
from onnx import helper

from headrace_engines.demo.build import Artefact
from headrace_engines.demo.networks import GraphBuilder, fp32
from headrace_engines.errors import BuildError
from headrace_engines.progress import Report

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
KERNEL = 3
FIRST, SECOND, HIDDEN, CLASSES = 16, 32, 64, 10
_POOLED = 4 * 4 * SECOND


class DigitsNetwork:
    """Parameters, forward pass, backward pass and state of the optimiser.

    Args:
        random: generator of the initial weights.
        learning_rate: Adam's step size.
    """

    def __init__(self, random: np.random.Generator, learning_rate: float = 2e-3) -> None:
        fan_ins = {"conv1": (KERNEL * KERNEL, FIRST), "conv2": (KERNEL * KERNEL * FIRST, SECOND)}
        fan_ins |= {"dense1": (_POOLED, HIDDEN), "dense2": (HIDDEN, CLASSES)}
        self.parameters: dict[str, Floats] = {}
        for name, (rows, columns) in fan_ins.items():
            self.parameters[f"{name}.weight"] = random.normal(0, np.sqrt(2 / rows), (rows, columns)).astype(np.float32)
            self.parameters[f"{name}.bias"] = np.zeros(columns, np.float32)
        self.learning_rate = learning_rate
        self._first_moment = {name: np.zeros_like(values) for name, values in self.parameters.items()}
        self._second_moment = {name: np.zeros_like(values) for name, values in self.parameters.items()}
        self._steps = 0

    def train_step(self, pictures: Floats, labels: Integers) -> float:
        """Run one step of the optimiser.

        Args:
            pictures: FP32 [N, 8, 8, 1].
            labels: INT64 [N], 0..9.

        Returns:
            Mean cross entropy before the step.
        """
        p = self.parameters
        count = len(pictures)
        patches1 = _patches(pictures)
        ink1 = np.maximum(patches1 @ p["conv1.weight"] + p["conv1.bias"], 0)
        patches2 = _patches(ink1.reshape(count, 8, 8, FIRST))
        ink2 = np.maximum(patches2 @ p["conv2.weight"] + p["conv2.bias"], 0)
        pooled, winners = _max_pool(ink2.reshape(count, 8, 8, SECOND))
        hidden = np.maximum(pooled @ p["dense1.weight"] + p["dense1.bias"], 0)
        probabilities = _softmax(hidden @ p["dense2.weight"] + p["dense2.bias"])
        loss = -np.log(np.maximum(probabilities[np.arange(count), labels], 1e-12)).mean()

        slope = probabilities
        slope[np.arange(count), labels] -= 1
        slope /= count
        gradients: dict[str, Floats] = {}
        slope = self._back("dense2", hidden, slope, gradients) * (hidden > 0)
        slope = self._back("dense1", pooled, slope, gradients)
        slope = _max_pool_back(slope, winners).reshape(-1, SECOND) * (ink2 > 0)
        slope = _patches_back(self._back("conv2", patches2, slope, gradients), count) * (ink1 > 0)
        self._back("conv1", patches1, slope, gradients)
        self._adam(gradients)
        return float(loss)

    def _back(self, layer: str, entered: Floats, slope: Floats, gradients: dict[str, Floats]) -> Floats:
        """Store the gradients of one matrix product and return the gradient of its input."""
        gradients[f"{layer}.weight"] = entered.T @ slope
        gradients[f"{layer}.bias"] = slope.sum(axis=0)
        return slope @ self.parameters[f"{layer}.weight"].T

    def _adam(self, gradients: dict[str, Floats], beta1: float = 0.9, beta2: float = 0.999) -> None:
        self._steps += 1
        correction = np.sqrt(1 - beta2**self._steps) / (1 - beta1**self._steps)
        for name, gradient in gradients.items():
            first, second = self._first_moment[name], self._second_moment[name]
            first += (1 - beta1) * (gradient - first)
            second += (1 - beta2) * (gradient * gradient - second)
            self.parameters[name] -= self.learning_rate * correction * first / (np.sqrt(second) + 1e-8)

    def onnx_conv(self, layer: str) -> tuple[Floats, Floats]:
        """Return weight [out, in, 3, 3] and bias [out] of "conv1" or "conv2" in ONNX layout."""
        weight = self.parameters[f"{layer}.weight"]
        return weight.T.reshape(weight.shape[1], -1, KERNEL, KERNEL), self.parameters[f"{layer}.bias"]

    def onnx_dense(self, layer: str) -> tuple[Floats, Floats]:
        """Return weight [out, in] and bias [out] of "dense1" or "dense2"."""
        return self.parameters[f"{layer}.weight"].T, self.parameters[f"{layer}.bias"]


def _patches(x: Floats) -> Floats:
    """Return [N * 64, C * 9] for [N, 8, 8, C]: each row is the 3x3 patch of a pixel, zero-padded."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sliding_window_view(padded, (KERNEL, KERNEL), axis=(1, 2)).reshape(-1, x.shape[3] * KERNEL * KERNEL)


def _patches_back(slope: Floats, count: int) -> Floats:
    """Return the gradient of the pictures, [N * 64, C], for that of their patches, [N * 64, C * 9]."""
    windows = slope.reshape(count, 8, 8, -1, KERNEL, KERNEL)
    padded = np.zeros((count, 10, 10, windows.shape[3]), np.float32)
    for row in range(KERNEL):
        for column in range(KERNEL):
            padded[:, row : row + 8, column : column + 8] += windows[..., row, column]
    return padded[:, 1:9, 1:9].reshape(count * 64, -1)


def _max_pool(x: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return the maximum of each 2x2, flattened channel-first as in ONNX, and its position mask [N, 4, 2, 4, 2, C]."""
    windows = x.reshape(len(x), 4, 2, 4, 2, SECOND)
    largest = windows.max(axis=(2, 4), keepdims=True)
    return largest.reshape(len(x), 4, 4, SECOND).transpose(0, 3, 1, 2).reshape(len(x), -1), windows == largest


def _max_pool_back(slope: Floats, winners: npt.NDArray[np.bool_]) -> Floats:
    channels_last = slope.reshape(-1, SECOND, 4, 4).transpose(0, 2, 3, 1)
    return channels_last[:, :, None, :, None, :] * winners


def _softmax(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True), np.float32)


SEED = 64
EPOCHS = 25
BATCH_SIZE = 32
HELD_OUT_SHARE = 0.25
INK = 16.0


def build(report: Report) -> Artefact:
    """Train and return the model: "image" FP32 [N, 1, 8, 8] with ink from 0 to 16, "probabilities" FP32 [N, 10].

    Raises:
        BuildError: scikit-learn, which has the pictures, is not installed.
    """
    report(0.0, "loading the pictures")
    images, labels = load()
    # threadpoolctl is a dependency of scikit-learn. Products this small gain nothing from threads and are slow on busy cores.
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
    """Return indices for training and held-out indices, with `share` (0..1) of every class held out."""
    train: list[Integers] = []
    held_out: list[Integers] = []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        cut = round(share * len(members))
        held_out.append(members[:cut])
        train.append(members[cut:])
    return np.concatenate(train), np.concatenate(held_out)


def load() -> tuple[Floats, Integers]:
    """Return the pictures FP32 [1797, 1, 8, 8] and their labels INT64 [1797].

    Raises:
        BuildError: scikit-learn, which has the pictures, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise BuildError(
            "the package scikit-learn, which has the digits, is not installed: pip install '.[demo]' in a checkout of Headrace"
        ) from None
    data = load_digits()
    return data.images.astype(np.float32)[:, None], data.target.astype(np.int64)


def _train(images: Floats, labels: Integers, random: np.random.Generator, report: Report) -> DigitsNetwork:
    pictures = images.transpose(0, 2, 3, 1) / np.float32(INK)
    network = DigitsNetwork(random)
    loss = float("nan")
    for epoch in range(EPOCHS):
        report(0.05 + 0.9 * epoch / EPOCHS, f"epoch {epoch + 1} of {EPOCHS}" + (f", loss {loss:.4f}" if epoch else ""))
        # A tenth of the learning rate in the last epochs lets the weights converge.
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
