"""A small convolutional network for 8x8 pictures, with its training, in NumPy.

    [N, 8, 8, 1] - conv 3x3, 16 - ReLU - conv 3x3, 32 - ReLU - max pool 2x2 - dense 64 - ReLU - dense 10

Trained on cross entropy with Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015). Inside, pictures are
channels-last, and a convolution is a matrix product over its 3x3 patches.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

KERNEL = 3
FIRST, SECOND, HIDDEN, CLASSES = 16, 32, 64, 10
_POOLED = 4 * 4 * SECOND


class DigitsNetwork:
    """The parameters, the pass forward, the pass back and the optimiser's state.

    Args:
        random: where the initial weights come from.
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
        """One step of the optimiser.

        Args:
            pictures: [N, 8, 8, 1].
            labels: [N], 0..9.

        Returns:
            The mean cross entropy before the step.
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
        """Note the gradients of one matrix product and return the slope of what entered it."""
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
        """Weight [out, in, 3, 3] and bias [out] of "conv1" or "conv2", as ONNX has them."""
        weight = self.parameters[f"{layer}.weight"]
        return weight.T.reshape(weight.shape[1], -1, KERNEL, KERNEL), self.parameters[f"{layer}.bias"]

    def onnx_dense(self, layer: str) -> tuple[Floats, Floats]:
        """Weight [out, in] and bias [out] of "dense1" or "dense2"."""
        return self.parameters[f"{layer}.weight"].T, self.parameters[f"{layer}.bias"]


def _patches(x: Floats) -> Floats:
    """[N, 8, 8, C] -> [N * 64, C * 9], each row the 3x3 surroundings of a pixel with zeros beyond the edge."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return sliding_window_view(padded, (KERNEL, KERNEL), axis=(1, 2)).reshape(-1, x.shape[3] * KERNEL * KERNEL)


def _patches_back(slope: Floats, count: int) -> Floats:
    """The slope of the pictures, [N * 64, C], from that of their patches, [N * 64, C * 9]."""
    windows = slope.reshape(count, 8, 8, -1, KERNEL, KERNEL)
    padded = np.zeros((count, 10, 10, windows.shape[3]), np.float32)
    for row in range(KERNEL):
        for column in range(KERNEL):
            padded[:, row : row + 8, column : column + 8] += windows[..., row, column]
    return padded[:, 1:9, 1:9].reshape(count * 64, -1)


def _max_pool(x: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """The largest of each 2x2, flattened with the channel first as ONNX does, and where it was, [N, 4, 2, 4, 2, C]."""
    windows = x.reshape(len(x), 4, 2, 4, 2, SECOND)
    largest = windows.max(axis=(2, 4), keepdims=True)
    return largest.reshape(len(x), 4, 4, SECOND).transpose(0, 3, 1, 2).reshape(len(x), -1), windows == largest


def _max_pool_back(slope: Floats, winners: npt.NDArray[np.bool_]) -> Floats:
    channels_last = slope.reshape(-1, SECOND, 4, 4).transpose(0, 2, 3, 1)
    return channels_last[:, :, None, :, None, :] * winners


def _softmax(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True), np.float32)
