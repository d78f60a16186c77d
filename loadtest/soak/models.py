"""The models of the soak and what they answer: each request's answer is known, and differs from that of every other request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from loadtest.onnx_models import busy, onnx_model
from loadtest.protocol import Array

STEADY, SWAPPED, APART, GUEST, PICTURES, SLOW = "steady", "swapped", "apart", "guest", "pictures", "slow"
MODELS = (STEADY, SWAPPED, APART, GUEST, PICTURES, SLOW)
# Nothing that is done to the others may be felt here.
UNDISTURBED = (STEADY, SWAPPED, PICTURES)
SEEDS = (1, 2)
# Of `apart`.
LARGEST_BATCH = 8
_CONFIG = {
    STEADY: "max_batch_size: 16\ndynamic_batching: {}\ninstance_group: [{kind: KIND_CPU, count: 2}]\n",
    SWAPPED: "max_batch_size: 8\ndynamic_batching: {}\n",
    APART: f"max_batch_size: {LARGEST_BATCH}\ndynamic_batching: {{}}\nisolation: process\n",
    GUEST: "max_batch_size: 8\n",
    PICTURES: "max_batch_size: 4\ndynamic_batching: {}\n",
    SLOW: "max_batch_size: 0\n",
}
_FEATURES = {STEADY: (16, 16), SWAPPED: (2048, 64), APART: (16, 8), GUEST: (16, 4)}
_SIDE, _CLASSES = 224, 10
# A step of `slow` takes some 30 us.
_STEPS = (50, 150, 300)
_REQUESTS = 40
_FP32 = TensorProto.FLOAT


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A request and its answers.

    Attributes:
        model: name of the model.
        inputs: tensors by name.
        accepted: what the output `Y` may be; more than one while weights are exchanged.
    """

    model: str
    inputs: Mapping[str, Array]
    accepted: tuple[Array, ...]

    def wrong_with(self, outputs: Mapping[str, Array]) -> str:
        """Return the error in an answer, "" if it is right."""
        if set(outputs) != {"Y"}:
            return f"outputs {sorted(outputs)}"
        answer = outputs["Y"]
        if answer.shape != self.accepted[0].shape:
            return f"shape {answer.shape}, expected {self.accepted[0].shape}"
        if not any(matches(answer, expected) for expected in self.accepted):
            return f"another answer: {answer.ravel()[:4]}, expected {self.accepted[0].ravel()[:4]}"
        return ""


def matches(answer: Array, expected: Array) -> bool:
    """Equal but for the order in which a batch of another size adds up."""
    return bool(np.allclose(answer, expected, rtol=1e-3, atol=1e-3))


class Repository:
    """The folder of models, and the cases that go with them.

    Args:
        folder: does not exist yet.

    Attributes:
        folder: as given.
        cases: by model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._swaps = {seed: _affine(*_FEATURES[SWAPPED], seed).SerializeToString() for seed in SEEDS}
        models = {name: [_affine(*_FEATURES[name], 1).SerializeToString()] for name in (STEADY, APART, GUEST)}
        models[SWAPPED] = [self._swaps[seed] for seed in SEEDS]
        models[PICTURES] = [_pictures().SerializeToString()]
        models[SLOW] = [busy().SerializeToString()]
        for name, config in _CONFIG.items():
            (folder / name / "1").mkdir(parents=True)
            (folder / name / "config.yaml").write_text(config)
            (folder / name / "1" / "model.onnx").write_bytes(models[name][0])
        self.cases = {name: _cases(name, models[name]) for name in MODELS}

    def put(self, content: bytes) -> None:
        """Put a file in the place of `swapped`'s, by renaming it, as a careful deployment does."""
        staged = self.folder.parent / "staged.onnx"
        staged.write_bytes(content)
        os.replace(staged, self.folder / SWAPPED / "1" / "model.onnx")

    def swap(self, seed: int) -> Case:
        """Put these weights into `swapped`: a case that is right once they serve, and no sooner."""
        self.put(self._swaps[seed])
        case = self.cases[SWAPPED][0]
        return Case(SWAPPED, case.inputs, (case.accepted[SEEDS.index(seed)],))

    def broken(self, seed: int) -> bytes:
        """Half of a model."""
        return self._swaps[seed][: len(self._swaps[seed]) // 2]


def _cases(name: str, contents: Sequence[bytes]) -> list[Case]:
    random = np.random.default_rng(MODELS.index(name))
    sessions = [onnxruntime.InferenceSession(content) for content in contents]
    cases = []
    for number in range(len(_STEPS) if name == SLOW else 4 if name == PICTURES else _REQUESTS):
        inputs: dict[str, Array]
        if name == SLOW:
            inputs = {"STEPS": np.array([_STEPS[number]], np.int64)}
        elif name == PICTURES:
            # A scale of its own for each: all noise looks alike to a convolution and a mean.
            noise = random.uniform(0, 1 + number, (1, 3, _SIDE, _SIDE))
            inputs = {"X": noise.astype(np.float32)}
        else:
            inputs = {"X": random.standard_normal((1 + number % 4, _FEATURES[name][0]), dtype=np.float32)}
        accepted = tuple(session.run(["Y"], inputs)[0] for session in sessions)
        cases.append(Case(name, inputs, accepted))
    return cases


def _affine(features: int, classes: int, seed: int) -> onnx.ModelProto:
    """Y = X W + B."""
    random = np.random.default_rng(seed)
    constants = {
        "W": random.standard_normal((features, classes), dtype=np.float32),
        "B": random.standard_normal(classes, dtype=np.float32),
    }
    nodes = [helper.make_node("MatMul", ["X", "W"], ["XW"]), helper.make_node("Add", ["XW", "B"], ["Y"])]
    return onnx_model(nodes, {"X": (_FP32, ("batch", features))}, {"Y": (_FP32, ("batch", classes))}, constants)


def _pictures() -> onnx.ModelProto:
    """Y: a convolution of X, its mean, and a matrix."""
    random = np.random.default_rng(3)
    constants = {
        "K": random.standard_normal((8, 3, 8, 8), dtype=np.float32),
        "W": random.standard_normal((8, _CLASSES), dtype=np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["X", "K"], ["edges"], strides=[8, 8]),
        helper.make_node("Relu", ["edges"], ["strong"]),
        helper.make_node("GlobalAveragePool", ["strong"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("MatMul", ["flat", "W"], ["Y"]),
    ]
    shape = ("batch", 3, _SIDE, _SIDE)
    return onnx_model(nodes, {"X": (_FP32, shape)}, {"Y": (_FP32, ("batch", _CLASSES))}, constants)
